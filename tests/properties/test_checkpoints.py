"""A model's folder may come from anyone: whatever is in its files, it loads or a sentence says why not."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.tests.properties.hostile import documents, ends_well, spoiled
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, guider, tiny, weight_names
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, resolve_variant
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs import solver_table, upstream_network
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from comfyui_tpu.tpu_runtime.tokenization import load_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

SPEC = lookup_spec("wan2.1-t2v-14b")
TEXT = SPEC.text_encoders[0]
PARTS = {component.name: component for component in SPEC.components}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint of our own. What a test changes in it, it puts back."""
    return Path(shutil.copytree(tiny.ensure_random(SPEC), tmp_path_factory.mktemp("hostile") / "model"))


def read_with(path: Path, content: bytes, action: Callable[[], Any]) -> None:
    """Reads with this content in a file of the folder, which ends well, and as before once it is put back."""
    saved = path.read_bytes() if path.is_file() else None
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    try:
        ends_well(action, len(content))
    finally:
        path.unlink() if saved is None else path.write_bytes(saved)


def check(folder: Path) -> None:
    model_id = str(folder)
    ModelRef(spec_name=resolve_variant(SPEC, model_id).name, model_id=model_id).check()


def load(folder: Path, name: str) -> None:
    """All that is done with a component before its weights are read."""
    component = PARTS[name]
    located = checkpoint.locate(SPEC, str(folder))
    located.configs(SilentProgress())
    network = upstream_network.build_network(component, located.config(component, SilentProgress()))
    part = located.folder(component.folder, SilentProgress())
    checkpoint.match_weights(network, checkpoint.read_headers(part, component), part)


def of_file(path: str) -> Any:
    return json.loads((tiny.ensure_random(SPEC) / path).read_text())


def config_of(name: str) -> Any:
    return {"_class_name": PARTS[name].class_name, **PARTS[name].tiny}


INDEX = {
    "_class_name": "WanPipeline", "_diffusers_version": "0.42.1", "transformer": ["diffusers", "WanTransformer3DModel"],
    "text_encoder": ["transformers", "UMT5EncoderModel"], "vae": ["diffusers", "AutoencoderKLWan"],
    "tokenizer": ["transformers", "T5TokenizerFast"], "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "image_encoder": [None, None], "expand_timesteps": False,
}  # fmt: skip


@settings(max_examples=120)
@given(content=documents(INDEX))
def test_model_check_arbitrary_index_fails_cleanly(folder: Path, content: bytes):
    read_with(folder / "model_index.json", content, lambda: check(folder))


@pytest.mark.parametrize("name", PARTS)
def test_load_arbitrary_component_config_fails_cleanly(folder: Path, name: str):
    path = folder / PARTS[name].folder / "config.json"

    @settings(max_examples=50)
    @given(content=documents(json.loads(path.read_text())))
    def read(content: bytes) -> None:
        read_with(path, content, lambda: load(folder, name))

    load(folder, name)
    whole = path.read_bytes()
    path.write_bytes(b"[]")
    with contextlib.suppress(ValueError):  # what says so is imported now, and not while memory is looked at
        load(folder, name)
    path.write_bytes(whole)
    read()


@settings(max_examples=60)
@given(content=documents(dict(SPEC.recipe.scheduler)))
def test_build_table_arbitrary_scheduler_config_fails_cleanly(folder: Path, content: bytes):
    path, asked = folder / checkpoint.SCHEDULER_CONFIG, SPEC.settings(num_inference_steps=4)

    def read() -> None:
        solver_table.build_table(SPEC, checkpoint.read_json(path), asked, SPEC.geometry.latent_shape(asked))

    read_with(path, content, read)


GUIDER = {
    "_class_name": "ClassifierFreeGuidance", "enabled": True, "guidance_scale": 7.5, "guidance_rescale": 0.0,
    "use_original_formulation": False, "start": 0.0, "stop": 1.0,
}  # fmt: skip


@settings(max_examples=100)
@given(content=documents(GUIDER))
def test_resolve_guidance_arbitrary_guider_config_fails_cleanly(folder: Path, content: bytes):
    located = checkpoint.locate(SPEC, str(folder))
    index, saved = folder / "model_index.json", of_file("model_index.json")
    index.write_text(json.dumps({**saved, "guider": ["diffusers", "ClassifierFreeGuidance"]}))
    read_with(
        folder / "guider" / "guider_config.json", content,
        lambda: guider.resolve_guidance_scale(located, SPEC.settings().guidance_scale, SilentProgress()),
    )  # fmt: skip
    index.write_text(json.dumps(saved))


WEIGHT_MAP = {
    "metadata": {"total_size": 100},
    "weight_map": {
        "blocks.0.attn1.to_q.weight": "diffusion_pytorch_model-00001-of-00002.safetensors",
        "blocks.1.attn1.to_q.weight": "diffusion_pytorch_model-00002-of-00002.safetensors",
        "proj_out.weight": "diffusion_pytorch_model-00001-of-00002.safetensors",
    },
}


@settings(max_examples=150)
@given(content=documents(WEIGHT_MAP))
def test_list_weight_files_arbitrary_index_fails_cleanly(folder: Path, content: bytes):
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"

    def read() -> None:
        for file in checkpoint.list_weight_files(path.parent, PARTS["transformer"]):
            assert file.parent == path.parent

    read_with(path, content, read)


@pytest.mark.parametrize("name", ["../../outside.safetensors", "/etc/passwd", "../../../etc/passwd", "..\\x", "..", ""])
def test_list_weight_files_path_outside_folder_raises_value_error(tmp_path: Path, name: str):
    (tmp_path / "outside.safetensors").touch()
    (tmp_path / "model" / "transformer").mkdir(parents=True)
    path = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"proj_out.weight": name}}))
    with raises_message(ValueError, "checkpoint.index_names_foreign_file"):
        checkpoint.list_weight_files(path.parent, PARTS["transformer"])


# --- headers of safetensors -------------------------------------------------------------------------------------------

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [32, 33]},
    "d": {"dtype": "I64", "shape": [0, 5], "data_offsets": [33, 33]},
}
ONE = PARTS["transformer"]


def file_of(header: bytes, size: int | None = None) -> bytes:
    return (len(header) if size is None else size).to_bytes(8, "little") + header + bytes(33)


FILES = st.one_of(
    documents(HEADER).map(file_of),
    documents(HEADER).map(file_of),
    spoiled(file_of(json.dumps(HEADER).encode())),
    st.builds(file_of, st.just(json.dumps(HEADER).encode()), st.sampled_from([0, 1, 7, 10**8, 2**63, 2**64 - 1])),
    st.binary(max_size=64),
)


@settings(max_examples=250)
@given(content=FILES)
def test_read_headers_arbitrary_file_fails_cleanly(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    folder = tmp_path_factory.getbasetemp() / "weights"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    ends_well(lambda: checkpoint.read_headers(folder, ONE), len(content))


@pytest.mark.parametrize("name", ["{}", "layer.{}", "layer.{}.scale", "layer.{}_scale", "{}.a.b.quant_state"])
def test_read_headers_many_tensors_stay_within_limits(tmp_path: Path, name: str):
    header = {name.format(n): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(15_000)}
    content = file_of(json.dumps(header, separators=(",", ":")).encode())[:-33]
    (tmp_path / "model.safetensors").write_bytes(content)
    ends_well(lambda: checkpoint.read_headers(tmp_path, ONE), len(content))


def test_model_check_folder_or_link_instead_of_file_fails_cleanly(folder: Path):
    """A folder, a link to nowhere, a link to itself."""
    weights = f"transformer/{weight_names.list_weight_names(folder / 'transformer', ONE)[0]}"
    for name in ("model_index.json", "transformer/config.json", weights):
        path, saved = folder / name, folder / f"{name}.saved"
        for make in (path.mkdir, lambda path=path: path.symlink_to("nowhere"), lambda path=path: path.symlink_to(path)):
            path.rename(saved)
            try:
                make()
                with pytest.raises(ValueError):
                    check(folder)
                ends_well(lambda: check(folder), 0)
            finally:
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
                saved.rename(path)
    check(folder)


@settings(max_examples=100)
@given(model_id=st.text(max_size=30) | st.sampled_from(["a" * 5000, "a/" * 3000, "\x00", "~\x00", "~" * 300, "\ud800"]))
def test_locate_arbitrary_model_id_fails_cleanly(model_id: str):
    ends_well(lambda: checkpoint.locate(SPEC, model_id, (os.fspath(Path.cwd()), "/nowhere")), len(model_id))


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.json"])
def test_load_tokenizer_arbitrary_file_fails_cleanly(folder: Path, name: str):
    path = folder / TEXT.tokenizer_folder / name
    document = json.loads(path.read_text()) if path.is_file() else {"chat_template": "{{ messages }}"}

    @settings(max_examples=40)
    @given(content=documents(document))
    def read(content: bytes) -> None:
        read_with(path, content, lambda: TEXT.tokenize(load_tokenizer(path.parent), ["a red circle"]))

    TEXT.tokenize(load_tokenizer(path.parent), ["a red circle"])
    read()
