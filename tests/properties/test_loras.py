"""Whatever a LoRA file holds: it changes something, or is refused in a sentence with its name."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.loras.test_formats import network
from comfyui_tpu.tests.properties.hostile import VALUES, documents, ends_well, spoiled
from comfyui_tpu.tpu_runtime.checkpoints import weight_loader
from comfyui_tpu.tpu_runtime.loras import adapter, merge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

bounded = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "U8": 1}
MODULES = {
    "Wan21": ("blocks.0.attn1.to_q", "blocks.1.self_attn.q", "blocks.0.norm3", "patch_embedding", "blocks.0"),
    "Flux2": ("double_blocks.0.img_attn.qkv", "single_blocks.1.linear1", "single_blocks.1.linear1_qkv",
              "double_blocks.0.img_attn.norm.key_norm", "final_layer.adaLN_modulation.1"),
}  # fmt: skip
PREFIXES = ("", "diffusion_model.", "transformer.", "base_model.model.", "transformer_2.", "lora_unet.", "pipe.dit.")
PARTS = (
    ".lora_A.default.weight", ".lokr_w2", ".w_norm", ".bias", ".lora_down", ".lora_A",
    ".lora_A.weight", ".lora_B.weight", ".lora_down.weight", ".lora_up", ".alpha", ".magnitude", ".dora_scale", ".diff",
    ".diff_b", ".hada_w1_a", ".hada_w2_b", ".lokr_w1", ".lokr_w2_a", ".lora_A.any.weight", ".oft_blocks", ".weight",
)  # fmt: skip
DIMS = st.sampled_from((0, 1, 2, 3, 4, 16, 24, 64, 72, 144, 200, 432, 864, 2**40, 2**63))
OPTIONS = (
    "lora_alpha", "transformer.lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "r", "alpha", "peft_type",
    "use_dora", "init_lora_weights", "layers_to_transform", "layers_pattern", "bias", "modules_to_save", "kasa_config",
    "use_it",
)  # fmt: skip
CONFIGS = st.dictionaries(
    st.sampled_from(OPTIONS),
    VALUES
    | st.sampled_from(("LORA", "LOKR", "LOHA", "pissa", [0], True))
    | st.dictionaries(st.sampled_from(("to_q", "^blocks.0.attn1.to_q", r"(([\w.]+)+)+!", "[", "")), VALUES),
)
WHOLE = save(
    {
        "transformer.blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 144),
        "transformer.blocks.0.attn1.to_q.lora_B.weight": torch.ones(144, 2),
        "transformer.blocks.0.attn1.to_q.alpha": torch.tensor(2.0),
        "transformer.blocks.0.attn1.to_q.magnitude": torch.ones(144),
        "transformer.blocks.1.attn1.to_q.lokr_w1": torch.ones(4, 4),
        "transformer.blocks.1.attn1.to_q.lokr_w2": torch.ones(36, 36),
    },
    {"lora_adapter_metadata": json.dumps({"lora_alpha": 2, "alpha_pattern": {"to_q": 3}, "use_rslora": False})},
)
SIZE = int.from_bytes(WHOLE[:8], "little")


def read(path: Path, family: str) -> bool:
    """Whether a file changes something: as where its weights are merged, up to their products."""
    own = network(family)
    weights = {source: weight for weight in own.weights.values() for source in weight.sources}
    with contextlib.ExitStack() as stack:
        found = adapter.read_adapter(str(path), own)
        adapter.hash_content(str(path))
        reader = weight_loader.TensorReader(stack, lambda: None)
        for name, changes in found.changes.items():
            for change in changes:
                _, scale = merge._read(reader, found, change, weights[name])
                assert np.isfinite(scale)
    return bool(found.changes)


def check(path: Path, content: bytes, family: str) -> None:
    path.write_bytes(content)
    read(path, family) if content == WHOLE else ends_well(lambda: read(path, family), len(content))


@pytest.fixture(scope="module", autouse=True)
def networks() -> None:
    """Built before anything is timed."""
    for family in MODULES:
        network(family)


@st.composite
def files(draw: st.DrawFn, family: str) -> bytes:
    """A sound container; what it holds is anything."""
    described: dict[str, Any] = {}
    end = 0
    parts = st.tuples(*map(st.sampled_from, (PREFIXES, MODULES[family], PARTS))).map("".join)
    flat = st.tuples(*map(st.sampled_from, (MODULES[family], PARTS))).map(
        lambda pair: f"lora_unet_{pair[0].replace('.', '_')}{pair[1]}"
    )
    for name in draw(st.lists(parts | flat | st.text(max_size=30), max_size=8, unique=True)):
        dtype, shape = draw(st.sampled_from(sorted(SIZES))), draw(st.lists(DIMS, max_size=5))
        size = SIZES[dtype] * int(np.prod([float(dim) for dim in shape]))
        if size > 100_000:
            shape, size = [0, *shape[:1]], 0
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + size]}
    if draw(st.booleans()):
        said = draw(CONFIGS.map(json.dumps) | VALUES.map(json.dumps) | st.text(max_size=20))
        described["__metadata__"] = {"lora_adapter_metadata": said}
    text = json.dumps(described).encode()
    value = draw(st.sampled_from((b"\x00", b"\x3c", b"\xff", b"\x7f")))
    return struct.pack("<Q", len(text)) + text + value * end


@pytest.mark.parametrize("family", MODULES)
def test_read_adapter_arbitrary_tensors_fail_cleanly(family: str, tmp_path: Path):
    @bounded
    @given(files(family))
    def one(content: bytes) -> None:
        check(tmp_path / "any.safetensors", content, family)

    one()


def test_read_adapter_arbitrary_bytes_fail_cleanly(tmp_path: Path):
    path = tmp_path / "any.safetensors"
    path.write_bytes(WHOLE)
    assert read(path, "Wan21")
    headers = documents(json.loads(WHOLE[8 : 8 + SIZE])).map(
        lambda header: len(header).to_bytes(8, "little") + header + WHOLE[8 + SIZE :]
    )

    @bounded
    @given(st.one_of(spoiled(WHOLE), headers, st.binary(max_size=64)))
    def one(content: bytes) -> None:
        check(path, content, "Wan21")

    one()


@st.composite
def nearly_fitting_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """One module whose matrices fit, or nearly do, with what may stand beside them."""
    module, sizes = "blocks.0.attn1.to_q", st.sampled_from((1, 2, 4, 36, 72, 144, 200))
    one = draw(sizes)
    kind = draw(st.sampled_from(("lora", "loha", "lokr")))
    shapes: dict[str, tuple[int, ...]] = {"lora_A.weight": (one, 144), "lora_B.weight": (144, draw(sizes))}
    if kind == "loha":
        shapes = {f"hada_w{n}_{part}": (144, one) if part == "a" else (one, 144) for n in (1, 2) for part in "ab"}
    elif kind == "lokr":
        shapes = {"lokr_w1_a": (4, one), "lokr_w1_b": (draw(sizes), 4), "lokr_w2": (36, 36)}
    shapes |= draw(st.dictionaries(st.sampled_from(("magnitude", "alpha", "diff_b")), st.tuples() | st.tuples(sizes)))
    values = draw(st.sampled_from((0.0, 1.0, -1e4, 3e38, float("nan"), float("inf"))))
    return {f"{module}.{part}": torch.full(shape, values) for part, shape in shapes.items()}


def test_read_adapter_nearly_fitting_matrices_fail_cleanly(tmp_path: Path):
    @bounded
    @given(nearly_fitting_tensors())
    def one(tensors: dict[str, torch.Tensor]) -> None:
        check(tmp_path / "any.safetensors", save(tensors), "Wan21")

    one()
