"""Calls of core's samplers to its networks, converted by the family; refuses what a model does not support."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ....tpu_runtime.checkpoints.model_ref import ModelRef
from ....tpu_runtime.messages import compose
from ....tpu_runtime.model_spec.core_inputs import Arguments, PredictionRequest
from ....tpu_runtime.models import SPECS
from ....tpu_runtime.models.common import core_inputs
from ....tpu_runtime.models.common.core_inputs import CoreNetwork
from ....tpu_runtime.progress import SilentProgress

if TYPE_CHECKING:
    from comfy.model_base import BaseModel


def describe_network(chosen: ModelRef, expert: int) -> CoreNetwork:
    """Return a model's denoiser, by its number `expert`."""
    config = chosen.resolve(SilentProgress()).configs[chosen.spec.denoiser.experts[expert]]
    return CoreNetwork(spec=chosen.spec, config=config)


def check_known(base: "BaseModel") -> None:
    """Raise ValueError if core detects a model that does not run with its samplers."""
    name = type(base).__name__
    if not any(name in spec.core.model_classes for spec in SPECS):
        raise ValueError(compose("comfyui.model_class_unsupported", name=name))


def split_call(network: CoreNetwork, given: Arguments) -> list[tuple[list[int], PredictionRequest]]:
    """Split a call of core into calls of one timestep each, with the numbers of the rows that each answers."""
    times = given["timesteps" if "timesteps" in given else "timestep"]
    number = len(times)
    by_time: dict[tuple[float, ...], list[int]] = {}
    for row, values in enumerate(times.reshape(number, -1).tolist()):
        by_time.setdefault(tuple(values), []).append(row)
    if len(by_time) == 1:
        return [(list(range(number)), _convert(network, dict(given)))]
    return [
        (rows, _convert(network, {name: _rows(x, rows, number) for name, x in given.items()}))
        for rows in by_time.values()
    ]


def _convert(network: CoreNetwork, given: Arguments) -> PredictionRequest:
    """Convert a call of one timestep; two equal rows become one."""
    x = given["x"]
    if len(x) == 2 and torch.equal(x[0], x[1]):
        given["x"] = x[:1]
    return network.spec.core.convert(network, given)


def _rows(value: Any, rows: Sequence[int], number: int) -> Any:
    """Select `rows` of `number` rows, of everything that has rows."""
    if isinstance(value, torch.Tensor):
        return value[list(rows)] if value.ndim and len(value) == number else value
    if isinstance(value, list):
        return [_rows(entry, rows, number) for entry in value]
    if isinstance(value, dict) and core_inputs.LENGTHS in value:
        selected = {name: [lengths[row] for row in rows] for name, lengths in value[core_inputs.LENGTHS].items()}
        return {**value, core_inputs.LENGTHS: selected}
    return value


def text_lengths(network: CoreNetwork) -> dict[str, int]:
    """Return the number of tokens that texts are padded to, by core's names of them; nothing if they are not padded."""
    encoders = network.spec.text_encoders
    return dict(zip(network.spec.core.padded_texts, (text.max_length for text in encoders), strict=False))


def predict_call(
    chosen: ModelRef,
    expert: int,
    shape: tuple[int, ...],
    rows: tuple[int, int],
    pictures: Collection[str] = (),
    references: Sequence[tuple[int, ...]] = (),
) -> PredictionRequest:
    """Return the call that a step of core's samplers will make to a denoiser, with zeros as values.

    chosen, expert: the model, and the number of its denoiser.
    shape: of one sample, without the batch.
    rows: of the sample, and of the conditionings.
    pictures: images that nodes add, by the names of their inputs.
    references: shapes of the latents of reference images, without the batch; of no effect on models without them.
    """
    network = describe_network(chosen, expert)
    spec, config, core = network.spec, network.config, network.spec.core
    text = spec.text_encoders[0]
    conditions = spec.condition_shapes(config, (1, *shape))
    arguments: Arguments = {
        "context": torch.zeros(rows[1], text.max_length, int(config[text.width_key])),
        "options": {"sample_sigmas": torch.tensor((1.0, 0.0)), "sigmas": torch.ones(1)},
    }
    channels = shape[0] + sum(conditions.get(name, (0, 0))[1] for name in ("condition", "image"))
    if core.always_has_condition:
        channels = 2 * shape[0] + 1
    x = torch.zeros(rows[0], channels, *shape[1:])
    if core.always_has_condition and "start_image" in pictures:
        x[:, shape[0] :] = 1.0
    if "image_embeds" in conditions and "clip_vision_output" in pictures:
        tokens, width = conditions["image_embeds"][1:]
        number = 2 if "second_clip_vision_output" in pictures else 1
        arguments["clip_fea"] = torch.zeros(rows[1], tokens // spec.pictures.numbers[0] * number, width)
    if core.takes_guidance:
        arguments["guidance"] = torch.ones(rows[1])
    if references and core.takes_references:
        arguments["ref_latents"] = [torch.zeros(rows[1], *reference) for reference in references]
    call = core.convert(network, {**arguments, "x": x, core.timestep: torch.ones(1)})
    return replace(call, expert=expert)


# --- checks ----------------------------------------------------------------------------------------------------------

_OTHER_VAE = compose("comfyui.encode_with_own_vae")


def check_sample(network: CoreNetwork, shape: Sequence[int]) -> None:
    """Raise ValueError for latents of a sampler whose shape the network does not support."""
    geometry, title = network.spec.geometry, network.spec.title
    names = ["rows", str(geometry.channels), *(["frames"] if geometry.stride_t else []), "height", "width"]
    if len(shape) != len(names) or shape[1] != geometry.channels:
        raise ValueError(compose(
            "comfyui.latent_channels_wrong", title=title, channel_count=shape[1] if len(shape) > 1 else 0,
            shape=tuple(shape), expected_channels=geometry.channels, expected_shape=", ".join(names),
        ))  # fmt: skip
    if geometry.stride_t and "num_frames" not in network.spec.inputs and shape[2] != 1:
        raise ValueError(compose("comfyui.latent_of_several_frames", title=title, frame_count=shape[2]))


def check_conditioning(network: CoreNetwork, given: Mapping[str, Any]) -> None:
    """Raise ValueError for entries of a conditioning that do not fit, before core cuts them to the sample's size."""
    spec, config, core = network.spec, network.config, network.spec.core
    for encoder, name in enumerate(("cross_attn", *core.more_texts)):
        if given.get(name) is not None:
            core_inputs.check_width(network, encoder, given[name])
    _check_concat(network, given, given.get("noise"))
    if core.takes_references:
        for number, latents in enumerate(given.get("reference_latents") or ()):
            _check_reference(network, f"reference_latents {number + 1}", latents)
    output = given.get("clip_vision_output")
    width = core.vision and config.get(core.vision.width_key)
    if output is not None and core.vision and width:
        states = getattr(output, core.vision.states)
        if states.shape[-1] != int(width):
            raise ValueError(compose(
                "comfyui.clip_vision_width_wrong", title=spec.title, actual_width=states.shape[-1], width=width,
            ))  # fmt: skip
        most = config.get("pos_embed_seq_len")
        if most and states.shape[1] > int(most):
            raise ValueError(compose(
                "comfyui.clip_vision_too_long", title=spec.title, token_count=states.shape[1], max_tokens=most,
            ))  # fmt: skip


def _check_concat(network: CoreNetwork, given: Mapping[str, Any], noise: torch.Tensor | None) -> None:
    """Check the latents of image to video's images, which core concatenates to the sample's channels."""
    spec, latents = network.spec, given.get("concat_latent_image")
    if latents is None or noise is None or noise.ndim != 5:
        return
    conditions = spec.pictures.condition_shapes(tuple(noise.shape))
    channels = spec.geometry.channels
    if not spec.core.always_has_condition and not conditions.keys() & {"condition", "image"}:
        return  # core ignores them, too
    allowed = {channels, int(conditions["condition"][1])} if spec.core.condition_may_have_mask else {channels}
    is_one_frame = "image" in conditions
    if latents.ndim != 5 or latents.shape[1] not in allowed:
        raise ValueError(compose(
            "comfyui.concat_latent_channels_wrong", title=spec.title, channel_count=latents.shape[1],
            shape=tuple(latents.shape), expected_channels=channels, other_vae=_OTHER_VAE,
        ))  # fmt: skip
    if not is_one_frame and latents.shape[2] != noise.shape[2]:
        raise ValueError(compose(
            "comfyui.concat_latent_frames_wrong", title=spec.title, frame_count=latents.shape[2],
            sample_frames=noise.shape[2],
        ))  # fmt: skip
    mask = given.get("concat_mask")
    if mask is not None and not is_one_frame and mask.ndim == 5 and mask.shape[2] > noise.shape[2]:
        raise ValueError(compose(
            "comfyui.concat_mask_frames_wrong", title=spec.title, frame_count=mask.shape[2],
            sample_frames=noise.shape[2],
        ))  # fmt: skip


def _check_reference(network: CoreNetwork, what: str, latents: torch.Tensor) -> None:
    geometry = network.spec.geometry
    names = ["1", str(geometry.channels), *(["1"] if geometry.stride_t else []), "height", "width"]
    shape = tuple(latents.shape)
    is_plain = len(shape) == len(names) and (not geometry.stride_t or shape[2] == 1)
    if not is_plain or shape[1] != geometry.channels:
        raise ValueError(compose(
            "comfyui.channels_wrong", title=network.spec.title, what=what, channel_count=shape[1],
            shape=shape, expected_channels=geometry.channels, expected_shape=", ".join(names), other_vae=_OTHER_VAE,
        ))  # fmt: skip
