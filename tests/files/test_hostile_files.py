"""Files that are damaged, mixed up or made to harm end in a sentence before they are numbers on a chip."""

import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import safetensors
import torch
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.checkpoints.test_quantized import WRITERS
from comfyui_tpu.tests.files import single_files
from comfyui_tpu.tests.files.single_files import Tensors
from comfyui_tpu.tests.files.test_gguf_and_tokenizers import write_gguf
from comfyui_tpu.tests.properties.hostile import documents, ends_well, spoiled
from comfyui_tpu.tests.properties.test_checkpoints import file_of
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, tiny, virtual_folder, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import choose_model
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.formats import gguf_file, single_file
from comfyui_tpu.tpu_runtime.models import LAYOUTS, lookup_spec
from comfyui_tpu.tpu_runtime.programs import upstream_network, weights
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from hypothesis import given, settings

WAN = lookup_spec("wan2.1-t2v-14b")
KIND = "WanTransformer3DModel"
LAYER = "blocks.0.self_attn.q"
TINY = WAN.component("transformer").tiny


def gguf_of_two() -> bytes:
    """A small file with fields and tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        writer = gguf.GGUFWriter(str(path), "wan")
        writer.add_array("comfy.gguf.orig_shape.patch_embedding.weight", [2, 4, 1, 2, 2])
        writer.add_array("names", ["a", "b"])
        writer.add_tensor("patch_embedding.weight", np.zeros((2, 16), np.float32))
        writer.add_tensor("head.modulation", np.zeros((1, 2, 2), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def write(path: Path, change: Callable[[Tensors], Tensors] = single_files.same) -> str:
    """A denoiser's file after a change, as a model whose other parts are the miniature's."""
    single_files.write(path, tiny.ensure_random(WAN) / "transformer", KIND, change=change)
    return f"{path} + {WAN.miniature.random_id}"


def load_denoiser(model_id: str) -> None:
    """All that happens to a denoiser's file before a program sees its numbers."""
    found, component = choose_model(WAN, model_id).locate(), WAN.component("transformer")
    network = upstream_network.build_network(component, found.config(component, SilentProgress()))
    folder = found.fetch_weights(component, SilentProgress())
    files = checkpoint.match_weights(network, checkpoint.read_headers(folder, component), folder)
    wanted = weights.abstract_weights(network, make_mesh(jax.devices()[:1], MeshShape()), "float32")
    weight_loader.load_weights(network, files, wanted, "test", SilentProgress())


def quantised(tensors: Tensors, scale: float = 0.01) -> Tensors:
    layers = [name.removesuffix(".weight") for name, x in tensors.items() if ".ffn." in name and x.ndim == 2]
    fp8 = {f"{layer}.weight": tensors[f"{layer}.weight"].to(torch.float8_e4m3fn) for layer in layers}
    return {**tensors, **fp8, **{f"{layer}.scale_weight": torch.tensor(scale) for layer in layers}}


def without_tensor(tensors: Tensors, name: str) -> Tensors:
    return {own: value for own, value in tensors.items() if own != name}


DAMAGE: dict[str, tuple[Callable[[Tensors], Tensors], Expected]] = {
    "another shape": (
        lambda t: {**t, f"{LAYER}.weight": torch.zeros(7, 5)},
        Expected("checkpoint.shape_contradicts_other_tensors", shape="(7, 5)"),
    ),
    "no weight": (
        lambda t: without_tensor(t, f"{LAYER}.weight"),
        Expected("checkpoint.weight_missing", missing="blocks.0.attn1.to_q.weight"),
    ),
    "no block at all": (lambda t: without_tensor(t, "blocks.0.ffn.0.weight"), Expected("file.weight_missing")),
    "a first weight of another kind": (
        lambda t: {**t, "patch_embedding.weight": torch.zeros(8)},
        Expected("file.weight_dimensions_wrong", shape="(8,)"),
    ),
    "a weight of no numbers": (
        lambda t: {**t, f"{LAYER}.weight": t[f"{LAYER}.weight"].to(torch.int8)},
        Expected("checkpoint.weight_not_floating_point", dtype="I8"),
    ),
    "values that are not finite": (
        lambda t: {**t, f"{LAYER}.weight": t[f"{LAYER}.weight"] * float("nan")},
        Expected("checkpoint.weight_not_finite"),
    ),
    "a scale of NaN": (lambda t: quantised(t, float("nan")), Expected("checkpoint.weight_not_finite")),
    "a scale without end": (lambda t: quantised(t, float("inf")), Expected("checkpoint.weight_not_finite")),
    "a weight by both of its names": (
        lambda t: {**t, "blocks.0.attn1.to_q.weight": t[f"{LAYER}.weight"]},
        Expected("file.weight_twice"),
    ),
    "ten thousand tensors more": (
        lambda t: {**t, **{f"more.{n}.weight": torch.zeros(1) for n in range(10_000)}},
        Expected("checkpoint.weight_unexpected", more="more.0.weight", class_name=KIND),
    ),
    "another network's": (
        lambda t: {**t, "vace_blocks.0.weight": torch.zeros(1)},
        Expected("file.network_unsupported", what="VACE", start="vace_blocks"),
    ),
    "blocks without number": (
        lambda t: {**t, "blocks.999999.ffn.0.weight": torch.zeros(1)},
        Expected("checkpoint.weight_unexpected", more="blocks.999999.ffn.net.0.proj.weight"),
    ),
    "no tensors": (lambda t: {}, Expected("file.no_known_network", count=0)),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_load_denoiser_damaged_tensors_raise_checkpoint_error(case: str, tmp_path: Path):
    change, expected = DAMAGE[case]
    with raises_message(CheckpointError, expected):
        load_denoiser(write(tmp_path / "wan.safetensors", change))


def test_load_denoiser_closes_file_only_after_all_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Closed before, safetensors said "Already borrowed" in place of what is wrong with the file."""
    opened, inside, at_close = safetensors.safe_open, Counter[str](), []

    class Slow:
        """A file, or a slice of a tensor of it, of which a part takes time."""

        def __init__(self, found: Any) -> None:
            self.found = found

        def __enter__(self) -> "Slow":
            return Slow(self.found.__enter__())

        def __exit__(self, *error: Any) -> None:
            at_close.append(inside["reads"])
            self.found.__exit__(*error)

        def get_slice(self, name: str) -> "Slow":
            return Slow(self.found.get_slice(name))

        def __getitem__(self, index: Any) -> Any:
            inside["reads"] += 1
            time.sleep(0.05)
            try:
                return self.found[index]
            finally:
                inside["reads"] -= 1

        def __getattr__(self, name: str) -> Any:
            return getattr(self.found, name)

    model_id = write(tmp_path / "wan.safetensors", DAMAGE["a scale without end"][0])
    monkeypatch.setattr(safetensors, "safe_open", lambda *given, **options: Slow(opened(*given, **options)))
    with raises_message(CheckpointError, "checkpoint.weight_not_finite"):
        load_denoiser(model_id)
    assert at_close and not any(at_close)


def test_load_denoiser_undamaged_file_loads(tmp_path: Path):
    load_denoiser(write(tmp_path / "wan.safetensors"))
    load_denoiser(write(tmp_path / "scaled.safetensors", quantised))


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("extent", ["one layer", "all layers"])
def test_load_denoiser_undecodable_codes_raise_checkpoint_error(writer: str, extent: str, tmp_path: Path):
    """torchao's among them, whose layout is a prototype's."""
    _, codes_of, named = WRITERS[writer]

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            layer = name.removesuffix(".weight")
            is_one = layer == LAYER if extent == "one layer" else "blocks." in name and tensor.ndim == 2
            if is_one and layer != name:
                found |= {f"{layer}.{own}": value.clone() for own, value in codes_of(tensor).items()}
            else:
                found[name] = tensor
        return found

    with raises_message(CheckpointError, "file.weights_quantized", method=named):
        load_denoiser(write(tmp_path / "wan.safetensors", change))


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.999])
def test_choose_model_truncated_safetensors_raises_checkpoint_error(part: float, tmp_path: Path):
    model_id = write(tmp_path / "wan.safetensors")
    path = tmp_path / "wan.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with raises_message(CheckpointError, "file.safetensors_cut_off"):
        choose_model(WAN, model_id)


def test_load_denoiser_contradictory_config_raises_checkpoint_error(tmp_path: Path):
    model_id = write(tmp_path / "wan.safetensors")
    tensors = single_files.load_file(tmp_path / "wan.safetensors")
    config = {"attention_head_dim": 24, "num_attention_heads": 3, "in_channels": 16}
    single_files.save_file(tensors, tmp_path / "wan.safetensors", {"config": json.dumps(config)})
    with raises_message(CheckpointError, "checkpoint.shape_contradicts_other_tensors"):
        load_denoiser(model_id)
    for config in ("[", "[]", '{"in_channels": {}}', '{"patch_size": 3}', '{"attention_head_dim": 0}'):
        single_files.save_file(tensors, tmp_path / "wan.safetensors", {"config": config})
        ends_well(lambda: choose_model(WAN, model_id), 10**6)


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "model.bin"])
def test_choose_model_pickle_file_raises_checkpoint_error(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"\x80\x04")
    with raises_message(CheckpointError, "checkpoint.model_id_not_found"):
        choose_model(WAN, str(tmp_path / name))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(20), b"GGUF\x03\0\0\0" + b"\xff" * 64, b"x" * 999])
def test_choose_model_malformed_gguf_raises_checkpoint_error(content: bytes, tmp_path: Path):
    (tmp_path / "wan.gguf").write_bytes(content)
    with raises_message(CheckpointError, "file.gguf_unreadable"):
        choose_model(WAN, f"{tmp_path / 'wan.gguf'} + {WAN.miniature.random_id}")


def makers_tensors() -> Tensors:
    return single_files.wan(single_files.load_folder(tiny.ensure_random(WAN) / "transformer"))


@pytest.fixture(scope="module")
def wan_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "wan.gguf"
    write_gguf(path, makers_tensors(), "wan")
    return path.read_bytes()


@pytest.mark.parametrize("part", [0.001, 0.1, 0.5, 0.999])
def test_load_denoiser_truncated_gguf_raises_checkpoint_error(part: float, wan_gguf: bytes, tmp_path: Path):
    (tmp_path / "wan.gguf").write_bytes(wan_gguf[: int(len(wan_gguf) * part)])
    # Its end is missing, or already its header.
    with raises_message(CheckpointError, "file.gguf_cut_off" if part > 0.01 else "file.gguf_unreadable"):
        load_denoiser(f"{tmp_path / 'wan.gguf'} + {WAN.miniature.random_id}")


def test_read_gguf_tensor_after_truncation_raises_checkpoint_error(wan_gguf: bytes, tmp_path: Path):
    """Its header was read when it was whole."""
    path = tmp_path / "wan.gguf"
    path.write_bytes(wan_gguf)
    tensors, _ = gguf_file.read_gguf(path)
    last = max((tensor.made for tensor in tensors.values()), key=lambda made: made.offset)
    path.write_bytes(wan_gguf[: last.offset + 1])
    with raises_message(CheckpointError, "file.ends_early"):
        last.read((), lambda *_: None)


GGUF_DAMAGE: dict[str, tuple[Callable[[Tensors], Tensors], Expected]] = {
    "a weight by both of its names": (
        lambda t: {**t, "blocks.0.attn1.to_q.weight": t[f"{LAYER}.weight"]},
        Expected("file.weight_twice"),
    ),
    "values that are not finite": (
        lambda t: {**t, f"{LAYER}.weight": t[f"{LAYER}.weight"] * float("nan")},
        Expected("checkpoint.weight_not_finite"),
    ),
    "another shape": (
        lambda t: {**t, f"{LAYER}.weight": torch.zeros(7, 5)},
        Expected("checkpoint.shape_contradicts_config", shape="(7, 5)"),
    ),
}


@pytest.mark.parametrize("case", GGUF_DAMAGE)
def test_load_weights_damaged_gguf_raises_checkpoint_error(case: str, tmp_path: Path):
    change, expected = GGUF_DAMAGE[case]
    path = write_gguf(tmp_path / "wan.gguf", change(makers_tensors()), "wan")
    # What heads it has a GGUF does not say: the folder's config stands in for the published one.
    component, network = (
        WAN.component("transformer"),
        upstream_network.build_network(WAN.component("transformer"), TINY),
    )
    (held,) = single_file.find_networks(Path(path), LAYOUTS)
    with raises_message(CheckpointError, expected):
        files = checkpoint.match_weights(network, virtual_folder.translate_tensors(held), Path(path))
        wanted = weights.abstract_weights(network, make_mesh(jax.devices()[:1], MeshShape()), "float32")
        weight_loader.load_weights(network, files, wanted, component.name, SilentProgress())


HEADER = {
    "__metadata__": {"config": "{}", "_quantization_metadata": '{"layers": {"head.head": {"format": "nvfp4"}}}'},
    "head.modulation": {"dtype": "F32", "shape": [1, 2, 1], "data_offsets": [0, 8]},
    "patch_embedding.weight": {"dtype": "BF16", "shape": [1, 4, 1, 1, 1], "data_offsets": [8, 16]},
    "head.head.weight": {"dtype": "U8", "shape": [4, 4], "data_offsets": [16, 32]},
    "head.head.weight_scale": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [32, 33]},
}


@settings(max_examples=60, deadline=None)
@given(content=documents(HEADER).map(file_of))
def test_find_networks_arbitrary_header_fails_cleanly(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(content)
    ends_well(lambda: single_file.find_networks(path, LAYOUTS), len(content))


@settings(max_examples=60, deadline=None)
@given(content=spoiled(gguf_of_two()))
def test_find_networks_arbitrary_gguf_bytes_fail_cleanly(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    path = tmp_path_factory.getbasetemp() / "any.gguf"
    path.write_bytes(content)
    ends_well(lambda: single_file.find_networks(path, LAYOUTS), len(content))


def test_choose_model_other_family_raises_checkpoint_error(tmp_path: Path):
    spec = lookup_spec("flux2-klein-4b")
    path = single_files.write(
        tmp_path / "flux.safetensors", tiny.ensure_random(spec) / "transformer", "Flux2Transformer2DModel"
    )
    with raises_message(CheckpointError, "checkpoint.component_not_of_model", class_name="Flux2Transformer2DModel"):
        choose_model(WAN, str(path))


def test_tensor_reader_file_truncated_while_mapped_raises_error(tmp_path: Path):
    """The kernel ends a process that reads behind the end of a file that it has mapped."""
    path = tmp_path / "x.safetensors"
    single_files.save_file({"a": torch.zeros(2**18), "b": torch.ones(2**18)}, path)
    tensors, _ = single_file.read_safetensors_header(path)
    with contextlib.ExitStack() as stack:
        reader = weight_loader.TensorReader(stack, lambda: None)
        assert reader.slice(tensors["a"], ()).sum() == 0
        with path.open("r+b") as file:
            file.truncate(2**12)
        for index in ((), (slice(2**17, None),)):
            with raises_message(CheckpointError, "checkpoint.cut_off_while_read", now=4096):
                reader.slice(tensors["b"], index)
