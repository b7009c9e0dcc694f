"""One change under several names of a file is merged once; of different ones, what ComfyUI takes, else none."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tests.loras.test_formats import STRENGTH, File, merged, network, z_image_qkv
from comfyui_tpu.tests.support.closeness import OPERATION, difference
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.loras import adapter
from comfyui_tpu.tpu_runtime.loras.change import LoraError
from safetensors.torch import save_file

KOHYA = {"down": "lora_down.weight", "up": "lora_up.weight"}
QKV, Q = z_image_qkv("layers.0"), "layers.0.attention.to_q.weight"
FUSED, SPLIT = "lora_unet_layers_0_attention_qkv", "lora_unet_layers_0_attention_to_"
WAN, WAN_Q = "blocks.0.self_attn.q", "blocks.0.attn1.to_q.weight"


def add_aliases(file: File, module: str, *others: str) -> None:
    """A module's tensors under other names too."""
    for name, tensor in list(file.tensors.items()):
        if name.startswith(f"{module}."):
            for other in others:
                file.tensors[other + name.removeprefix(module)] = tensor.clone()


def split_up(file: File, up: str, down: str, module: str, *others: str) -> None:
    """A fused module's rows under names of their own."""
    parts = file.tensors[f"{module}.{up}"].chunk(3)
    for other, part in zip(others, parts, strict=False):
        file.tensors[f"{other}.{up}"] = part.clone()
        file.tensors[f"{other}.{down}"] = file.tensors[f"{module}.{down}"].clone()
        for name in ("alpha", "dora_scale"):
            if (one := file.tensors.get(f"{module}.{name}")) is not None:
                file.tensors[f"{other}.{name}"] = one.clone() if name == "alpha" else part_of(one, others.index(other))


def part_of(rows: torch.Tensor, number: int) -> torch.Tensor:
    return rows.chunk(3)[number].clone()


def kohyas_fused_and_split(file: File) -> None:
    """As Z-Image's LoRAs that are made for ComfyUI and diffusers at once; `out` has two names there too."""
    file.lora(FUSED, *QKV, **KOHYA, alpha=1.5)
    split_up(file, "lora_up.weight", "lora_down.weight", FUSED, *(SPLIT + name for name in "qkv"))
    file.lora("lora_unet_layers_1_attention_out", "layers.1.attention.to_out.0.weight", **KOHYA, alpha=6.0)
    add_aliases(file, "lora_unet_layers_1_attention_out", "lora_unet_layers_1_attention_to_out_0")


def one_part_is_split(file: File) -> None:
    file.lora(FUSED, *QKV, **KOHYA)
    split_up(file, "lora_up.weight", "lora_down.weight", FUSED, f"{SPLIT}q")


def both_are_comfyuis(file: File) -> None:
    fused = "diffusion_model.layers.0.attention.qkv"
    file.lora(fused, *QKV)
    split_up(file, "lora_B.weight", "lora_A.weight", fused, *(f"transformer.layers.0.attention.to_{n}" for n in "qkv"))


def other_factors(file: File) -> None:
    """Split matrices joined to a fused one of three times the rank, as converters do it."""
    for name, target in zip("qkv", QKV, strict=True):
        file.lora(f"transformer.layers.0.attention.to_{name}", target)
    names = [f"transformer.layers.0.attention.to_{name}.lora_" for name in "qkv"]
    fused = "diffusion_model.layers.0.attention.qkv"
    file.tensors[f"{fused}.lora_A.weight"] = torch.cat([file.tensors[f"{name}A.weight"] for name in names])
    file.tensors[f"{fused}.lora_B.weight"] = torch.block_diag(*(file.tensors[f"{name}B.weight"] for name in names))


def other_formats(file: File) -> None:
    """The same in half precision, and with an alpha that is in the matrix already."""
    file.lora(f"diffusion_model.{WAN}", WAN_Q, alpha=1.5)
    matrices = {part: file.tensors[f"diffusion_model.{WAN}.lora_{part}.weight"] for part in "AB"}
    file.tensors[f"transformer.{WAN}.lora_A.weight"] = matrices["A"].bfloat16()
    file.tensors[f"transformer.{WAN}.lora_B.weight"] = (matrices["B"] / 2).half()


def prefixes(file: File) -> None:
    file.lora(f"diffusion_model.{WAN}", WAN_Q, alpha=1.0)
    flat = WAN.replace(".", "_")
    add_aliases(
        file, f"diffusion_model.{WAN}", f"transformer.{WAN}", "base_model.model.blocks.0.attn1.to_q", WAN,
        f"lora_unet_{flat}", f"lycoris_{flat}", "lycoris_blocks_0_attn1_to_q", "transformer.blocks.0.attn1.to_q",
    )  # fmt: skip


def pairs_of_matrices(file: File) -> None:
    """The names of PEFT and of kohya for the matrices of one module, with and without the adapter's."""
    module = "diffusion_model.blocks.0.self_attn.q"
    file.lora(module, WAN_Q, alpha=1.0)
    for part, other in (("A", "down"), ("B", "up")):
        one = file.tensors[f"{module}.lora_{part}.weight"]
        for name in (f"lora_{other}.weight", f"lora.{other}.weight", f"lora_{part}.default.weight", f"lora_{part}"):
            file.tensors[f"{module}.{name}"] = one.clone()


def doras(file: File) -> None:
    file.dora(f"lora_unet_{WAN.replace('.', '_')}", WAN_Q, 1)
    add_aliases(file, f"lora_unet_{WAN.replace('.', '_')}", f"diffusion_model.{WAN}")


def doras_fused_and_split(file: File) -> None:
    base = torch.cat([file.base[name] for name in QKV])
    new = base + file.lora(FUSED, *QKV, **KOHYA, alpha=2.0)
    norm = new.norm(dim=1, keepdim=True)
    scale = file.draw(f"{FUSED}.dora_scale", *norm.shape).abs_().add_(0.5)
    file.add(tuple(QKV), new * scale / norm - base)
    split_up(file, "lora_up.weight", "lora_down.weight", FUSED, *(SPLIT + name for name in "qkv"))


def differences(file: File) -> None:
    """Of a norm, a bias and a matrix."""
    file.diff("diffusion_model.blocks.2.norm3.diff", "blocks.2.norm2.weight")
    file.diff("diffusion_model.blocks.2.norm3.diff_b", "blocks.2.norm2.bias")
    file.diff("diffusion_model.head.head.diff", "proj_out.weight")
    for one, other in (
        ("diffusion_model.blocks.2.norm3.diff", "lora_unet_blocks_2_norm3.w_norm"),
        ("diffusion_model.blocks.2.norm3.diff_b", "transformer.blocks.2.norm2.b_norm"),
        ("diffusion_model.head.head.diff", "head.head.diff"),
    ):
        file.tensors[other] = file.tensors[one].clone()


def lycoris(file: File) -> None:
    file.loha("lora_unet_blocks_0_self_attn_v", "blocks.0.attn1.to_v.weight", alpha=1.0)
    add_aliases(
        file, "lora_unet_blocks_0_self_attn_v", "lycoris_blocks_0_attn1_to_v", "transformer.blocks.0.attn1.to_v"
    )
    file.lokr("diffusion_model.blocks.1.self_attn.k", "blocks.1.attn1.to_k.weight", whole=(True, False))
    add_aliases(file, "diffusion_model.blocks.1.self_attn.k", "lycoris_blocks_1_self_attn_k")


def lokrs_fused_and_split(file: File) -> None:
    """Factors over three times the rows, whose first factor has a third of its rows for each part."""
    file.lokr(FUSED, *QKV, whole=(True, True), factor=12)
    first, second = file.tensors[f"{FUSED}.lokr_w1"], file.tensors[f"{FUSED}.lokr_w2"]
    for number, name in enumerate("qkv"):
        file.tensors[f"{SPLIT}{name}.lokr_w1"] = part_of(first, number)
        file.tensors[f"{SPLIT}{name}.lokr_w2"] = second.clone()


def a_part_of_the_rows(file: File) -> None:
    """ComfyUI's and x-flux' `linear1_qkv` beside all of `linear1`."""
    target = "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight"
    file.lora("diffusion_model.single_blocks.1.linear1", target)
    rows = 3 * file.base[target].shape[1]
    own, part = (f"diffusion_model.single_blocks.1.linear1{end}" for end in ("", "_qkv"))
    file.tensors[f"{part}.lora_A.weight"] = file.tensors[f"{own}.lora_A.weight"].clone()
    file.tensors[f"{part}.lora_B.weight"] = file.tensors[f"{own}.lora_B.weight"][:rows].clone()


REPEATED = {
    "ZImage": (
        kohyas_fused_and_split, one_part_is_split, both_are_comfyuis, other_factors, doras_fused_and_split,
        lokrs_fused_and_split,
    ),
    "Wan21": (prefixes, pairs_of_matrices, other_formats, doras, differences, lycoris),
    "Flux2": (a_part_of_the_rows,),
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(family, case, id=case.__name__) for family, cases in REPEATED.items() for case in cases],
)
def test_merge_equal_changes_under_several_names_apply_once(family: str, case: Callable[[File], None], tmp_path: Path):
    file = File(family)
    case(file)
    check(family, file, tmp_path / "lora.safetensors", 2**-8 if case is other_formats else OPERATION)


def check(family: str, file: File, path: Path, bound: float, unused: tuple[str, ...] = ()) -> None:
    save_file(file.tensors, path)
    found = {name: (cut, value) for name, cut, value in merged(family, path) if name in file.added}
    assert found.keys() == file.added.keys()
    for name, (cut, value) in found.items():
        whole = file.base[name] + STRENGTH * file.added[name]
        wanted = cut.take(whole) if cut else whole.reshape(value.shape)
        assert difference(value, wanted.numpy()) <= bound, name
    assert adapter.read_adapter(str(path), network(family)).unused == unused


def draw_ignored(file: File, module: str, target: str) -> tuple[str, ...]:
    """Draws a change that is not to count."""
    before = dict(file.added)
    file.lora(module, target)
    file.added = before
    return tuple(sorted(name for name in file.tensors if name.startswith(f"{module}.")))


@pytest.mark.parametrize(
    ("family", "target", "counts", "does_not"),
    [
        ("ZImage", "layers.1.attention.to_out.0.weight", "lora_unet_layers_1_attention_out",
         "lora_unet_layers_1_attention_to_out_0"),
        ("ZImage", "layers.1.attention.to_out.0.weight", "layers.1.attention.to_out.0",
         "transformer.layers.1.attention.to_out.0"),
        ("Wan21", WAN_Q, f"diffusion_model.{WAN}", f"lora_unet_{WAN.replace('.', '_')}"),
        ("Wan21", WAN_Q, f"lora_unet_{WAN.replace('.', '_')}", "transformer.blocks.0.attn1.to_q"),
        ("QwenImage", "transformer_blocks.0.attn.to_q.weight", "lycoris_transformer_blocks_0_attn_to_q",
         "transformer_blocks.0.attn.to_q"),
    ],
)  # fmt: skip
def test_merge_different_changes_use_the_one_comfyui_takes(
    family: str, target: str, counts: str, does_not: str, tmp_path: Path
):
    """Its map (`comfy.lora`) knows the names that count, and takes the last of several for one module."""
    file = File(family)
    file.lora(counts, target)
    check(family, file, tmp_path / "lora.safetensors", OPERATION, draw_ignored(file, does_not, target))


def test_merge_fused_and_split_changes_add_up(tmp_path: Path):
    file = File("ZImage")
    file.lora("diffusion_model.layers.0.attention.qkv", *QKV)
    whole = file.added[Q]
    file.lora("diffusion_model.layers.0.attention.to_q", Q)
    file.added[Q] = file.added[Q] + whole
    check("ZImage", file, tmp_path / "lora.safetensors", OPERATION)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("transformer.blocks.0.attn1.to_q", "base_model.model.blocks.0.attn1.to_q"),
        ("lycoris_blocks_0_attn1_to_q", WAN),
        ("transformer.blocks.0.attn1.to_q", "lora_unet__blocks_0_self_attn_q"),
    ],
)
@pytest.mark.parametrize("nearly", [False, True])
def test_read_adapter_conflicting_changes_raise_lora_error(first: str, second: str, nearly: bool, tmp_path: Path):
    file = File("Wan21")
    file.lora(first, WAN_Q)
    file.lora(second, WAN_Q)
    if nearly:
        add_aliases(file, first, second)
        file.tensors[f"{second}.lora_B.weight"][7] *= 1.5
    save_file(file.tensors, tmp_path / "lora.safetensors")
    names = " and ".join(map(repr, sorted((first, second))))
    path = f"{tmp_path}/lora.safetensors"
    with raises_message(LoraError, "lora.changes_contradict", path=path, names=names, weight=WAN_Q):
        adapter.read_adapter(str(tmp_path / "lora.safetensors"), network("Wan21"))


def test_merge_difference_replaces_product_of_same_module(tmp_path: Path):
    """`comfy.lora.load_lora` puts the difference in the place of the product."""
    file = File("Wan21")
    names = draw_ignored(file, f"diffusion_model.{WAN}", WAN_Q)
    file.diff(f"diffusion_model.{WAN}.diff", WAN_Q)
    check("Wan21", file, tmp_path / "lora.safetensors", OPERATION, names)


def test_read_adapter_many_prefixes_raise_lora_error(tmp_path: Path):
    file = File("Wan21")
    file.lora(WAN, WAN_Q)
    add_aliases(file, WAN, *("model." * number + WAN for number in range(1, 30)))
    save_file(file.tensors, tmp_path / "lora.safetensors")
    with raises_message(LoraError, "lora.too_many_spellings", count=30, weight="blocks.0.attn1.to_q.weight", most=16):
        adapter.read_adapter(str(tmp_path / "lora.safetensors"), network("Wan21"))
