"""A family's tiny model, stage by stage, on the chips and on the host: our own engine on one CPU device in float32.

Each stage on the chips gets the output of the host's previous stage, so that a failed row names the stage at fault.
There are few tokens, so that chips have padding among theirs. The initial noise is subtracted from the steps'
estimates: it is far larger than the output of a network with random weights. The bounds, relative to the reference's
    largest value:

- float32: on 8 simulated chips sums in another order are off by up to 3e-6, and 2e-5 is required. A TPU's own
  exponentials, sines and roots are coarser, and it is not measured by how much: 1e-3 there. One wrong weight is off by
  1e-4 to 4e-3, a wrong order of tokens or rows by 1e-2 and more.
- bfloat16: eight bits, so 4e-3 in each of several layers; 6e-2 at the worst value on simulated chips. 1.5e-1 is
  required, and a slope within 1e-2 of 1. The float32 run and the exact comparison of all weights detect smaller errors.

In float32 libtpu compiles each autoencoder for half a minute: a TPU runs only text encoders and denoisers in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...tpu_runtime.checkpoints.model_ref import ModelRef, PlannedGeneration
from ...tpu_runtime.engine.engine import Engine
from ...tpu_runtime.engine.prompt_cache import Encoded, PromptCache
from ...tpu_runtime.engine.stage_values import Conditioning, ImageCondition, Latent
from ...tpu_runtime.model_spec import STAGES, ModelSpec, Settings
from ...tpu_runtime.precision import Precision
from ...tpu_runtime.progress import Preview, Progress
from .checks import Arrays, Check, CheckFailed, Tolerance

NUM_FRAMES, NUM_STEPS = 9, 4  # three latent frames, and steps for both experts
TIGHT, TIGHT_ON_TPU = Tolerance(error=2e-5, slope=1e-4), Tolerance(error=1e-3, slope=1e-3)
COARSE = Tolerance(error=1.5e-1, slope=1e-2)


class NoPromptCache(PromptCache):
    """A prompt cache that encodes every time: the chips must not get results of the host or of an earlier process."""

    def get(self, key: str, family: str, encode: Any, decide: Any) -> Encoded:
        return encode()


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The results of the stages of one generation."""

    texts: tuple[Conditioning, Conditioning | None]  # prompt, negative prompt
    condition: ImageCondition | None
    estimates: Sequence[torch.Tensor]  # see `Estimates`
    latents: Latent
    frames: torch.Tensor  # [frames, height, width, 3]


class Estimates:
    """A progress that keeps each step's estimate of the final latents, `[1, channels, ...]`."""

    def __init__(self, progress: Progress) -> None:
        self.text, self.check_cancelled = progress.text, progress.check_cancelled
        self._progress = progress
        self.kept: list[torch.Tensor] = []

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        if preview is not None:
            self.kept.append(preview.sample())
        self._progress.step(done, total, unit, preview)


def make_engine(devices: Sequence[Any], **how: Any) -> Engine:
    """Return an engine that caches no encoded prompts. how: arguments of `Engine`."""
    uncached = Engine(devices, **how)
    uncached.prompt_cache = NoPromptCache()
    return uncached


def make_settings(spec: ModelSpec) -> Settings:
    """Return settings with 6 x 8 patches, which autoencoders split over 2, 4 or 8 chips; few frames and steps."""
    sizes = {"height": spec.miniature.inputs["height"] // 5 * 6, "width": spec.miniature.inputs["width"] // 7 * 8}
    if not spec.is_image:
        sizes["num_frames"] = NUM_FRAMES
    return spec.settings(**sizes, num_inference_steps=NUM_STEPS)


def make_image(spec: ModelSpec, settings: Settings) -> torch.Tensor:
    """Return images `[number, height, width, 3]` in 0..1: waves of another length in each colour."""
    size = (spec.pictures.numbers[0], settings.height, settings.width, 3)
    number, row, column, colour = np.indices(size)
    waves = np.sin(row / (5 + 3 * colour) + number) * np.cos(column / (7 + 2 * colour))
    return torch.from_numpy((0.5 + 0.4 * waves).astype(np.float32))


def checks(spec: ModelSpec, host: Engine, chips: Engine, precisions: Sequence[Precision]) -> Iterator[Check]:
    """Yield the reference, then all stages in each precision. Stages without their input are left out.

    host, chips: engines. precisions: those to check.
    """
    settings, references = make_settings(spec), list[Generation]()

    def refer(progress: Progress) -> None:
        references.append(_generate(spec, settings, host, progress))

    yield Check(family=spec.title, stage="reference on the host", precision="float32", run=refer)
    if references:
        for precision in precisions:
            yield from _stages(spec, settings, references[0], host, chips, precision)
    for runner in (host, chips):
        runner.expect(())
        runner.free()


def _model(spec: ModelSpec, precision: Precision) -> ModelRef:
    return ModelRef(spec_name=spec.name, model_id=spec.miniature.random_id, precision=precision)


def _encode(spec: ModelSpec, on: Engine, model: ModelRef, progress: Progress) -> Encoded:
    texts = {name: spec.texts.get(name, "") for name in ("prompt", "negative_prompt")}
    return on.run("encode", model, progress, **texts)


def _denoise(
    on: Engine,
    model: ModelRef,
    settings: Settings,
    texts: Encoded,
    condition: ImageCondition | None,
    progress: Progress,
) -> Latent:
    embeds = dict(zip(("prompt_embeds", "negative_prompt_embeds"), texts, strict=True))
    return on.run("denoise", model, progress, settings=settings, condition=condition, **embeds)


def _generate(spec: ModelSpec, settings: Settings, host: Engine, progress: Progress) -> Generation:
    model, estimates = _model(spec, "float32"), Estimates(progress)
    host.expect([PlannedGeneration(model=model, stages=STAGES[1:], settings=settings)])
    texts = _encode(spec, host, model, progress)
    condition = None
    if spec.pictures.encode is not None:
        condition = host.run("image", model, progress, image=make_image(spec, settings), settings=settings)
    latents = _denoise(host, model, settings, texts, condition, estimates)
    frames = host.run("decode", model, progress, latents=latents)
    return Generation(texts=texts, condition=condition, estimates=estimates.kept, latents=latents, frames=frames)


def _stages(
    spec: ModelSpec, settings: Settings, reference: Generation, host: Engine, chips: Engine, precision: Precision
) -> Iterator[Check]:
    model, denoised = _model(spec, precision), list[torch.Tensor]()
    on_tpu = chips.devices[0].platform == "tpu"
    bound = COARSE if precision == "bfloat16" else TIGHT_ON_TPU if on_tpu else TIGHT
    is_long = precision == "float32" and on_tpu
    later = ("denoise",) if is_long else STAGES[1:]

    def check(stage: str, run: Any) -> Check:
        return Check(family=spec.title, stage=stage, precision=precision, bound=bound, run=run)

    def encode(progress: Progress) -> tuple[Arrays, Arrays]:
        chips.expect([PlannedGeneration(model=model, stages=later, settings=settings)])
        return _texts(_encode(spec, chips, model, progress)), _texts(reference.texts)

    def encode_image(progress: Progress) -> tuple[Arrays, Arrays]:
        assert reference.condition is not None
        ours = chips.run("image", model, progress, image=make_image(spec, settings), settings=settings)
        return ours["tensors"], reference.condition["tensors"]

    def first_step(progress: Progress) -> tuple[Arrays, Arrays]:
        estimates = Estimates(progress)
        _denoise(chips, model, settings, reference.texts, reference.condition, estimates)
        denoised.extend(estimates.kept)
        return _subtract_noise(spec, settings, denoised[0], reference.estimates[0])

    def decode(progress: Progress) -> tuple[Arrays, Arrays]:
        frames = chips.run("decode", model, progress, latents=reference.latents)
        return {"frames": frames}, {"frames": reference.frames}

    yield check("text states", encode)
    if reference.condition is not None and not is_long:
        yield check("image condition", encode_image)
    yield check("first step", first_step)
    if denoised:
        yield check(
            "last step", lambda progress: _subtract_noise(spec, settings, denoised[-1], reference.estimates[-1])
        )
    if not is_long:
        yield check("frames", decode)
    yield Check(
        family=spec.title, stage="weights", precision=precision, run=lambda progress: _same_weights(spec, host, chips)
    )


def _subtract_noise(
    spec: ModelSpec, settings: Settings, ours: torch.Tensor, theirs: torch.Tensor
) -> tuple[Arrays, Arrays]:
    """Return both estimates `[1, channels, ...]` without the reference's share of the initial noise."""
    noise = spec.recipe.noise(spec.geometry.latent_shape(settings), torch.Generator().manual_seed(settings.seed))
    share = (theirs * noise).sum() / noise.square().sum()
    return {"estimate": ours - share * noise}, {"estimate": theirs - share * noise}


def _texts(encoded: tuple[Conditioning, Conditioning | None]) -> Arrays:
    """Return states and lengths of both prompts, by name."""
    arrays = {}
    for name, conditioning in zip(("prompt", "negative prompt"), encoded, strict=True):
        if conditioning is not None:
            ((arrays[name], info),) = conditioning
            arrays |= {f"{name}, {key}": value for key, value in info.items() if not isinstance(value, str)}
    return arrays


def _same_weights(spec: ModelSpec, host: Engine, chips: Engine) -> None:
    """Check that every chip's shard of every weight, after all stages, equals the host's in the chips' dtype."""
    residents = [resident for resident in host.device_cache.list() if resident.model == spec.miniature.random_id]
    expected = {resident.component: resident.weights for resident in residents}
    for resident in chips.device_cache.list():
        for name, weight in resident.weights.items():
            want = np.asarray(expected[resident.component][name]).astype(weight.dtype)
            for shard in weight.addressable_shards:
                wrong = np.count_nonzero(np.asarray(shard.data) != want[shard.index])
                if wrong:
                    raise CheckFailed(
                        f"{wrong} of {shard.data.size} values of {resident.component}'s {name} on chip "
                        f"{shard.device.id} differ from the host's."
                    )
