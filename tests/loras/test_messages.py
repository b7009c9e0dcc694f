"""What a user is told of a LoRA that fits in part, or not at all."""

import re
from pathlib import Path

import pytest
import torch
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import save_file

WAN21 = parity.tiny_model(spec_for_family("Wan21"))
Q = {"blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 144), "blocks.0.attn1.to_q.lora_B.weight": torch.ones(144, 2)}


class Page(SilentProgress):
    said = ""

    def text(self, message: str) -> None:
        self.said = message


def add(folder: Path, tensors: dict[str, torch.Tensor], expert: str = "both") -> tuple[str, str]:
    """The node's text and the page's."""
    save_file(tensors, folder / "my.safetensors")
    page = Page()
    model, text = api.add_lora(
        WAN21, Lora(path=str(folder / "my.safetensors"), strength=0.5, expert=expert), progress=page
    )
    assert [lora.strength for lora in model.loras] == [0.5]
    return text, page.said


def test_add_lora_complete_file_reports_changed_weights(tmp_path: Path):
    expected = "my.safetensors, strength 0.5: changes 1 weights of Wan 2.1 T2V 14B."
    assert add(tmp_path, Q) == (expected, expected)


def test_add_lora_partial_file_lists_unapplied_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Keys of a text encoder, of what only Wan 2.1's image to video has, an unknown ending, and a product of three."""
    others = {f"lora_te_layer_{n}.lora_down.weight": torch.ones(1) for n in range(9)}
    alone = {"diffusion_model.blocks.0.cross_attn.k_img.lora_down.weight": torch.ones(2, 144)}
    sizes = {"down": (2, 144), "mid": (2, 2), "up": (144, 2)}
    three = {f"blocks.2.attn1.to_q.lora_{part}.weight": torch.ones(size) for part, size in sizes.items()}
    text, said = add(tmp_path, {**Q, **others, **alone, **three, "blocks.1.attn1.to_q.oft_blocks": torch.ones(1)})
    first = ["blocks.1.attn1.to_q.oft_blocks", *three, *alone, *sorted(others)]
    assert (
        text
        == said
        == (
            "my.safetensors, strength 0.5: changes 1 weights of Wan 2.1 T2V 14B. Not applied, 14 tensors: "
            f"{', '.join(first[:8])} and 6 more."
        )
    )
    assert all(name in caplog.text for name in first)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (
            {"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": torch.ones(2, 144)},
            Expected(
                "lora.changes_nothing",
                title="Wan 2.1 T2V 14B",
                unused="lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight",
                family="Wan21",
                expected="blocks.0.attn1.to_q or blocks.0.self_attn.q",
            ),
        ),
        (
            {name: value.repeat(*(2 if size == 144 else 1 for size in value.shape)) for name, value in Q.items()},
            Expected(
                "lora.of_another_size",
                model_id="tiny/random-wan21",
                incompatible=re.compile("^blocks.0.attn1.to_q is .*288x288.* blocks.0.attn1.to_q.weight .*144x144$"),
                title="Wan 2.1 T2V 14B",
            ),
        ),
    ],
    ids=["another family", "another size"],
)
def test_add_lora_unsuitable_file_raises_value_error(
    tmp_path: Path, tensors: dict[str, torch.Tensor], expected: Expected
):
    with raises_message(ValueError, expected) as error:
        add(tmp_path, tensors)
    assert str(error.value).parameters["path"] == f"{tmp_path}/my.safetensors"


def test_add_lora_missing_expert_raises_value_error(tmp_path: Path):
    with raises_message(
        ValueError, "lora.expert_of_one_denoiser", title="Wan 2.1 T2V 14B", expert="low", lora_experts="both"
    ):
        add(tmp_path, Q, expert="low")


def test_add_lora_damaged_file_raises_value_error(tmp_path: Path):
    (tmp_path / "my.safetensors").write_bytes(b"half")
    with raises_message(ValueError, "lora.cut_off", path=re.compile(r"my\.safetensors$")):
        api.add_lora(WAN21, Lora(path=str(tmp_path / "my.safetensors"), strength=1.0), progress=SilentProgress())
