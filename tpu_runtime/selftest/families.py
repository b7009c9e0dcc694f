"""A family's miniature, stage by stage, on the chips and on the host: our own engine on one CPU device in float32.

Each stage on the chips gets what the host's stage before it gave, so that a red row names the stage at fault. Tokens are
few, so that chips have padding among theirs. The bounds, in units of the reference's largest value:

- float32: the miniatures equal diffusers within 2e-4 on any number of simulated chips. A TPU's own exponentials,
  sines and roots are a little coarser, so it gets five times that; wrong weights or tokens are off by 1e-2 and more.
- bfloat16: eight bits, so what a network of several layers makes of 4e-3; measured on simulated chips, times two or
  three. Fine faults hide below it: they are what the float32 run is for.

In float32 libtpu compiles each autoencoder for half a minute: of float32, a TPU runs text encoders and denoisers alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..checkpoints.model_ref import Expected, ModelRef
from ..engine.engine import Engine
from ..engine.payloads import Conditioning, ImageCondition, Latent
from ..engine.prompt_cache import Encoded, PromptCache
from ..precision import Precision
from ..progress import Preview, Progress
from ..spec import ModelSpec, Settings
from .checks import Arrays, Bound, Check, Wrong

NUM_FRAMES, NUM_STEPS = 9, 4  # three latent frames, and steps for both experts
TIGHT = {"cpu": Bound(error=2e-4, slope=1e-3), "tpu": Bound(error=1e-3, slope=1e-3)}
COARSE = {
    "text states": Bound(error=1e-1, slope=2e-2),
    "image condition": Bound(error=1e-1, slope=2e-2),
    "first step": Bound(error=1e-1, slope=2e-2),
    "latents": Bound(error=1e-1, slope=2e-2),
    "frames": Bound(error=1.5e-1, slope=2e-2),
}


class Unkept(PromptCache):
    """Encodes every time: the chips must not be given what the host has encoded, nor an earlier process."""

    def get(self, key: str, family: str, encode: Any) -> Encoded:
        return encode()


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What the stages of one generation gave; `first` is the estimate after the first step."""

    texts: tuple[Conditioning, Conditioning | None]
    condition: ImageCondition | None
    first: torch.Tensor
    latents: Latent
    frames: torch.Tensor


class FirstStep:
    """A host's progress that keeps the estimate of the first step."""

    def __init__(self, progress: Progress) -> None:
        self.text, self.check_cancelled = progress.text, progress.check_cancelled
        self._progress = progress
        self.estimate: torch.Tensor | None = None

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        if preview is not None and self.estimate is None:
            self.estimate = preview.latents()
        self._progress.step(done, total, unit, preview)


def engine(devices: Sequence[Any], **how: Any) -> Engine:
    """One that keeps no encoded prompts."""
    made = Engine(devices, **how)
    made.prompt_cache = Unkept()
    return made


def settings_of(spec: ModelSpec) -> Settings:
    """Sizes of the miniature: 6 x 8 patches, which autoencoders split over 2, 4 or 8 chips, and few frames and steps."""
    sizes = {"height": spec.tiny_inputs["height"] // 5 * 6, "width": spec.tiny_inputs["width"] // 7 * 8}
    if not spec.is_image:
        sizes["num_frames"] = NUM_FRAMES
    return spec.settings(**sizes, num_inference_steps=NUM_STEPS)


def picture(spec: ModelSpec, settings: Settings) -> torch.Tensor:
    """`[number, height, width, 3]`: waves of another length in each colour."""
    size = (spec.pictures[0], settings.height, settings.width, 3)
    number, row, column, colour = np.indices(size)
    waves = np.sin(row / (5 + 3 * colour) + number) * np.cos(column / (7 + 2 * colour))
    return torch.from_numpy((0.5 + 0.4 * waves).astype(np.float32))


def checks(spec: ModelSpec, host: Engine, chips: Engine, precisions: Sequence[Precision]) -> Iterator[Check]:
    """The reference, then all stages in each precision. What needs a result that did not come is left out."""
    settings, found = settings_of(spec), []

    def refer(progress: Progress) -> None:
        found.append(_generate(spec, settings, host, progress))

    yield Check(family=spec.title, stage="reference on the host", precision="float32", run=refer)
    if found:
        for precision in precisions:
            yield from _stages(spec, settings, found[0], host, chips, precision)
    for each in (host, chips):
        each.expect(())
        each.free()


def _model(spec: ModelSpec, precision: Precision) -> ModelRef:
    return ModelRef(spec_name=spec.name, model_id=spec.tiny_id, precision=precision)


def _encode(spec: ModelSpec, on: Engine, model: ModelRef, progress: Progress) -> Any:
    return on.encode(model, spec.texts["prompt"], spec.texts.get("negative_prompt", ""), progress)


def _generate(spec: ModelSpec, settings: Settings, host: Engine, progress: Progress) -> Generation:
    model, watched = _model(spec, "float32"), FirstStep(progress)
    host.expect([Expected(model=model, stages=("image", "denoise", "decode"), settings=settings)])
    texts = _encode(spec, host, model, progress)
    condition = None
    if spec.encode_image is not None:
        condition = host.encode_image(model, picture(spec, settings), settings, progress)
    latents = host.denoise(model, settings, *texts, watched, condition)
    assert watched.estimate is not None
    frames = host.decode(model, latents, progress)
    return Generation(texts=texts, condition=condition, first=watched.estimate, latents=latents, frames=frames)


def _stages(
    spec: ModelSpec, settings: Settings, reference: Generation, host: Engine, chips: Engine, precision: Precision
) -> Iterator[Check]:
    model, denoised = _model(spec, precision), []
    is_long = precision == "float32" and chips.devices[0].platform == "tpu"
    later = ("denoise",) if is_long else ("image", "denoise", "decode")

    def check(stage: str, run: Any) -> Check:
        bound = COARSE[stage] if precision == "bfloat16" else TIGHT[chips.devices[0].platform]
        return Check(family=spec.title, stage=stage, precision=precision, bound=bound, run=run)

    def encode(progress: Progress) -> tuple[Arrays, Arrays]:
        chips.expect([Expected(model=model, stages=later, settings=settings)])
        return _texts(_encode(spec, chips, model, progress)), _texts(reference.texts)

    def encode_image(progress: Progress) -> tuple[Arrays, Arrays]:
        assert reference.condition is not None
        ours = chips.encode_image(model, picture(spec, settings), settings, progress)
        return ours["tensors"], reference.condition["tensors"]

    def first_step(progress: Progress) -> tuple[Arrays, Arrays]:
        watched = FirstStep(progress)
        denoised.append(chips.denoise(model, settings, *reference.texts, watched, reference.condition))
        assert watched.estimate is not None
        return {"estimate": watched.estimate}, {"estimate": reference.first}

    def decode(progress: Progress) -> tuple[Arrays, Arrays]:
        return {"frames": chips.decode(model, reference.latents, progress)}, {"frames": reference.frames}

    yield check("text states", encode)
    if reference.condition is not None and not is_long:
        yield check("image condition", encode_image)
    yield check("first step", first_step)
    if denoised:
        ours, theirs = ({"latents": latents["samples"]} for latents in (denoised[0], reference.latents))
        yield check("latents", lambda progress: (ours, theirs))
    if not is_long:
        yield check("frames", decode)
    yield Check(
        family=spec.title, stage="weights", precision=precision, run=lambda progress: _same_weights(spec, host, chips)
    )


def _texts(encoded: tuple[Conditioning, Conditioning | None]) -> Arrays:
    """States and lengths of both prompts, by name."""
    arrays = {}
    for name, conditioning in zip(("prompt", "negative prompt"), encoded, strict=True):
        if conditioning is not None:
            ((arrays[name], info),) = conditioning
            arrays |= {f"{name}, {key}": value for key, value in info.items() if not isinstance(value, str)}
    return arrays


def _same_weights(spec: ModelSpec, host: Engine, chips: Engine) -> None:
    """Every chip's part of every weight, after all stages, is still the host's, in the chips' format."""
    wanted = {one.component: one.weights for one in host.device_cache.list() if one.model == spec.tiny_id}
    for resident in chips.device_cache.list():
        for name, weight in resident.weights.items():
            want = np.asarray(wanted[resident.component][name]).astype(weight.dtype)
            for shard in weight.addressable_shards:
                wrong = np.count_nonzero(np.asarray(shard.data) != want[shard.index])
                if wrong:
                    raise Wrong(
                        f"{wrong} of {shard.data.size} values of {resident.component}'s {name} on chip "
                        f"{shard.device.id} are others than on the host."
                    )
