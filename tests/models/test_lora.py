"""LoRAs through the engine: parity with diffusers' `load_lora_weights` and `set_adapters`, and what a change costs."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.models.wan import test_wan21, test_wan22_i2v
from comfyui_tpu.tests.support.closeness import difference
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.models.common import wan_vae
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

MODEL, WAN21 = test_wan22_i2v.MODEL, test_wan21.MODEL
SHORT = replace(test_wan21.ODD, num_inference_steps=1)


def write_lora(path: Path, family: str, seed: int) -> Path:
    """Of every projection in the blocks, as diffusers saves it; ranks differ from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    folder = tiny.ensure_random(spec_for_family(family)) / "transformer"
    weights = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    tensors = {}
    for name, weight in weights.items():
        if weight.ndim == 2 and name.startswith("blocks.") and name.endswith(".weight"):
            rank, module = 3 + (seed + len(tensors)) % 4, f"transformer.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator) / 12
            tensors[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator) / rank
    save_file(tensors, path)
    return path


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_two_loras_on_both_experts_match_diffusers(tmp_path: Path, compare: Callable):
    """The first LoRA on both experts, the second on that of low noise alone."""
    settings, runner = replace(test_wan22_i2v.ODD, num_inference_steps=2), engine(8)  # a step for each expert
    first, second = (write_lora(tmp_path / f"{seed}.safetensors", "Wan22I2V", seed) for seed in (1, 2))
    pipe = test_wan22_i2v.load_pipeline(tiny.ensure_random(test_wan22_i2v.SPEC))
    pipe.load_lora_weights(str(first), adapter_name="first")
    pipe.load_lora_weights(str(first), adapter_name="first", load_into_transformer_2=True)
    pipe.load_lora_weights(str(second), adapter_name="second", load_into_transformer_2=True)
    pipe.transformer.set_adapters(["first"], [0.7])
    pipe.transformer_2.set_adapters(["first", "second"], [0.7, -0.3])
    expected = test_wan22_i2v.generate(pipe, settings).latents
    condition = runner.encode_image(MODEL, test_wan22_i2v.picture(settings), settings, SilentProgress())
    embeds = runner.encode(MODEL, test_wan22_i2v.SHORT, test_wan22_i2v.NEGATIVE, SilentProgress())
    mean, std = wan_vae.latent_stats(test_wan22_i2v.SPEC.component("vae_decoder").config)

    def latents(*loras: Lora) -> np.ndarray:
        model = replace(MODEL, loras=loras)
        samples = runner.denoise(model, settings, *embeds, SilentProgress(), condition)["samples"]
        return ((samples - mean) / std).numpy()

    loras = Lora(path=str(first), strength=0.7), Lora(path=str(second), strength=-0.3, expert="low")
    compare("latents, two LoRAs", latents(*loras), expected)
    for others in ((), loras[:1]):  # so that both are seen
        assert difference(latents(*others), expected) > 1e-3


class Wan:
    """Wan 2.1 with its text encoded: latents with some LoRAs, and what they cost."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.embeds = runner.encode(WAN21, test_wan21.SHORT, test_wan21.NEGATIVE, SilentProgress())

    def latents(self, *loras: Lora, progress: Any = None) -> torch.Tensor:
        model = replace(WAN21, loras=loras)
        return self.runner.denoise(model, SHORT, *self.embeds, progress or SilentProgress())["samples"]

    def weights(self) -> dict[str, bytes]:
        (resident,) = (one for one in self.runner.device_cache.list() if one.component == "transformer")
        return {name: np.asarray(array).tobytes() for name, array in resident.weights.items()}


@pytest.fixture
def wan() -> Iterator[Wan]:
    runner = engine(8)
    runner.free()
    yield Wan(runner)
    runner.free()


def test_lora_changes_recompile_and_reload_nothing(wan: Wan, tmp_path: Path):
    """And end bit for bit where they began; what was merged on top of others is what is merged at once."""
    one, two = (write_lora(tmp_path / f"{seed}.safetensors", "Wan21", seed) for seed in (1, 2))
    plain, begin = wan.latents(), wan.weights()
    counts = dict(wan.runner.counts)
    others = {r.component: r.weights for r in wan.runner.device_cache.list() if r.component != "transformer"}
    seen = [plain]
    for loras in (
        [Lora(path=str(one), strength=1.0)],
        [Lora(path=str(one), strength=0.5)],
        [Lora(path=str(one), strength=0.5), Lora(path=str(two), strength=-0.3)],
        [Lora(path=str(two), strength=-0.3)],
    ):
        seen.append(wan.latents(*loras))
    assert len({latents.numpy().tobytes() for latents in seen}) == len(seen)
    merged = wan.weights()
    changed = {name for name, value in merged.items() if value != begin[name]}
    assert changed == {name for name in begin if name.startswith("blocks.") and name.endswith((
        "to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight", "proj.weight", "net.2.weight"))}  # fmt: skip
    wan.latents(Lora(path=str(two), strength=-0.3))  # the same again: nothing to do
    for change in range(8):
        wan.latents(Lora(path=str(one), strength=0.1 * (change + 1)))
    assert torch.equal(wan.latents(Lora(path=str(one), strength=0.0)), plain)
    assert wan.weights() == begin
    assert wan.runner.counts == {**counts, "merge": counts["merge"] + 4 + 8}
    assert {r.component: r.weights for r in wan.runner.device_cache.list() if r.component != "transformer"} == others
    wan.runner.free()
    assert torch.equal(wan.latents(Lora(path=str(two), strength=-0.3)), seen[-1])
    assert wan.weights() == merged


def test_changed_lora_file_is_read_again(wan: Wan, tmp_path: Path):
    path = write_lora(tmp_path / "one.safetensors", "Wan21", 1)
    lora = Lora(path=str(path), strength=1.0)
    before = wan.latents(lora)
    write_lora(path, "Wan21", 2)
    os.utime(path, (1, 1))
    assert not torch.equal(wan.latents(lora), before)
    path.unlink()
    with raises_message(
        ValueError, "lora.unreadable", source=re.compile(r"one\.safetensors$"), strerror="No such file or directory"
    ):
        wan.latents(lora)


def test_cancelled_lora_merge_leaves_no_partly_merged_weights(wan: Wan, tmp_path: Path):
    class Cancelled(Exception):
        pass

    class CancelHalfway(SilentProgress):
        def step(self, done: int, total: int, unit: str, preview: object = None) -> None:
            if unit == "MiB" and done > 0:
                raise Cancelled

    path = write_lora(tmp_path / "one.safetensors", "Wan21", 1)
    plain = wan.latents()
    with pytest.raises(Cancelled):
        wan.latents(Lora(path=str(path), strength=1.0), progress=CancelHalfway())
    assert "transformer" not in [resident.component for resident in wan.runner.device_cache.list()]
    assert torch.equal(wan.latents(), plain)


def test_select_loras_filters_by_expert_and_strength():
    loras = tuple(Lora(path="a", strength=1.0, expert=expert) for expert in ("both", "high", "low"))
    two = replace(MODEL, loras=(*loras, Lora(path="b", strength=0.0)))
    assert two.select_loras("transformer") == loras[:2]
    assert two.select_loras("transformer_2") == (loras[0], loras[2])
    assert two.select_loras("text_encoder") == ()
    assert ModelRef(spec_name=WAN21.spec_name, model_id="x", loras=loras).select_loras("transformer") == loras[:2]
