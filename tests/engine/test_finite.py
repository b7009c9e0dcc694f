"""What is not finite stops the run in a sentence that says where it was noticed and what is likely wrong."""

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import Expected, assert_message, raises_message
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef
from comfyui_tpu.tpu_runtime.model_spec import Settings
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.models.common import frames
from comfyui_tpu.tpu_runtime.programs import finite_check, solver_table
from comfyui_tpu.tpu_runtime.progress import Preview, SilentProgress
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.slow

SPEC = spec_for_family("Flux2")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id, precision="float32")
SETTINGS = Settings(height=64, width=96, num_inference_steps=4, guidance_scale=4.0)
LATENT = {"samples": torch.zeros(1, 128, 4, 6)}


@functools.cache
def engine() -> Runner:
    return Runner(jax.devices()[:2])


def encode(model: ModelRef = MODEL) -> Any:
    return engine().encode(model, "cat", "", SilentProgress())


def encode_image(model: ModelRef) -> Any:
    return engine().encode_image(model, torch.zeros(1, 64, 96, 3), SETTINGS, SilentProgress())


def denoise(model: ModelRef = MODEL, progress: SilentProgress | None = None) -> Any:
    return engine().denoise(model, SETTINGS, *encode(), progress or SilentProgress())


def decode(model: ModelRef) -> Any:
    return engine().decode(model, LATENT, SilentProgress())


def damage_checkpoint(folder: Path, part: str, weight: str) -> ModelRef:
    """The built-in checkpoint with one weight so large that what follows overflows; it is finite itself."""
    shutil.copytree(tiny.ensure_random(SPEC), folder)
    (path,) = (path for path in (folder / part).glob("*.safetensors") if _find_weights(load_file(path), weight))
    weights = load_file(path)
    _find_weights(weights, weight)[0].fill_(3e38)
    save_file(weights, path, metadata={"format": "pt"})
    return replace(MODEL, model_id=str(folder))


def _find_weights(weights: dict[str, torch.Tensor], ending: str) -> list[torch.Tensor]:
    return [weight for name, weight in weights.items() if name.endswith(ending)]


@pytest.mark.parametrize(
    ("stage", "part", "weight", "what"),
    [
        (
            encode,
            "text_encoder",
            "layers.0.input_layernorm.weight",
            Expected("stage.values_of_component", component="component.text_encoder"),
        ),
        (
            encode_image,
            "vae",
            "encoder.conv_in.weight",
            Expected("stage.values_of_component", component="component.vae_encoder"),
        ),
        (denoise, "transformer", "proj_out.weight", Expected("sampling.latents_from_step", step=1, total=4)),
        (
            decode,
            "vae",
            "decoder.conv_in.weight",
            Expected("stage.values_of_component", component="component.vae_decoder"),
        ),
        (
            decode,
            "vae",
            "decoder.conv_out.weight",
            Expected("stage.values_of_component", component="component.vae_decoder"),
        ),
    ],
    ids=["encode", "encode image", "denoise", "decode, first layer", "decode, last layer"],
)
def test_stage_with_overflowing_weight_raises_value_error(
    tmp_path: Path, stage: Callable, part: str, weight: str, what: Expected
):
    model = damage_checkpoint(tmp_path / "damaged", part, weight)
    for _ in range(2):  # nothing of it is kept
        with raises_message(
            ValueError,
            "program.result_not_finite",
            title="FLUX.2 dev",
            what=what,
            precision="float32",
            cause="program.cause_checkpoint",
        ):
            stage(model)


class Steps(SilentProgress):
    def __init__(self) -> None:
        self.done: list[int] = []

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        if unit == "step":
            self.done.append(done)


def test_denoise_stops_at_first_non_finite_step(monkeypatch: pytest.MonkeyPatch):
    tabulate, progress = solver_table.tabulate, Steps()

    def spoilt(*args: Any, **keywords: Any) -> solver_table.SolverTable:
        solver = tabulate(*args, **keywords)
        solver.table[2] = np.nan
        return solver

    monkeypatch.setattr(solver_table, "tabulate", spoilt)
    with raises_message(
        ValueError,
        "program.result_not_finite",
        title="FLUX.2 dev",
        what=Expected("sampling.latents_from_step", step=3, total=4),
    ):
        denoise(progress=progress)
    assert progress.done == [0, 1, 2]


def test_denoise_overflowing_lora_names_lora_in_error(tmp_path: Path):
    """Every number in the file is finite, and so is its alpha; what they make of a weight is not."""
    files = (tiny.ensure_random(SPEC) / "transformer").glob("*.safetensors")
    ((out, inner),) = (weight.shape for file in files for weight in _find_weights(load_file(file), "proj_out.weight"))
    tensors = {
        "proj_out.lora_A.weight": torch.full((1, inner), 1e30),
        "proj_out.lora_B.weight": torch.full((out, 1), 1e30),
    }
    loras = tuple(
        Lora(path=str(tmp_path / f"{name}.safetensors"), strength=strength)
        for name, strength in (("wild", 0.5), ("off", 0.0))
    )
    for lora in loras:
        save_file(tensors, lora.path)
    with raises_message(
        ValueError,
        "program.result_not_finite",
        title="FLUX.2 dev",
        what=Expected("sampling.latents_from_step", step=1, total=4),
        precision="float32",
        cause=Expected("program.cause_loras", changed_by="wild.safetensors"),
    ):
        denoise(replace(MODEL, loras=loras))
    assert np.isfinite(np.asarray(denoise()["samples"])).all()  # the same engine, without it


def test_not_finite_error_in_bfloat16_suggests_float32():
    key, parameters = (
        "program.result_not_finite",
        {"title": "Some model", "what": "its values", "precision": "bfloat16"},
    )
    error = finite_check.not_finite_error("Some model", "its values", "bfloat16")
    assert_message(error, key, cause="program.cause_precision", **parameters)
    loras = ["a.safetensors", "b.safetensors"]
    cause = Expected("program.cause_loras", changed_by=" and ".join(loras))
    assert_message(
        finite_check.not_finite_error("Some model", "its values", "bfloat16", loras), key, cause=cause, **parameters
    )


def test_stage_non_finite_input_raises_before_loading():
    """Before a weight is read: it is not the model's fault."""
    runner = Runner(jax.devices()[:2])
    bad = torch.full((1, 512, 120), torch.inf)
    with raises_message(ValueError, "program.input_not_finite", title="FLUX.2 dev", name="prompt_embeds"):
        runner.denoise(MODEL, SETTINGS, [[bad, {}]], None, SilentProgress())
    condition = {"tpu_family": SPEC.family, "tensors": {"reference_0": torch.full((1, 128, 4, 4), torch.nan)}}
    with raises_message(ValueError, "program.input_not_finite", title="FLUX.2 dev", name="condition"):
        runner.denoise(MODEL, SETTINGS, [[torch.zeros_like(bad), {}]], None, SilentProgress(), condition)
    with raises_message(ValueError, "program.input_not_finite", title="FLUX.2 dev", name="the LATENT"):
        runner.decode(MODEL, {"samples": LATENT["samples"] - torch.inf}, SilentProgress())
    assert runner.counts["load"] == runner.counts["compile"] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_all_finite_detects_single_non_finite_value(value: float):
    good, whole = jnp.ones((3, 5)), jnp.arange(4)
    assert bool(jax.jit(finite_check.all_finite)({"a": good, "b": [whole]})) and bool(finite_check.all_finite([whole]))
    assert not bool(jax.jit(finite_check.all_finite)({"a": good, "b": [good.at[2, 4].set(value).astype(jnp.bfloat16)]}))


def test_to_pixels_keeps_non_finite_values_as_nan():
    found = frames.to_pixels(torch.tensor([-1.5, -1.0, 0.0, 1.0, 1.5, torch.inf, -torch.inf, torch.nan]))
    assert found.isnan().tolist() == [False] * 5 + [True] * 3
    assert found[:5].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
