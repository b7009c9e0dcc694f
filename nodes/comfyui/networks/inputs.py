"""Converts the arguments that core passes to its networks into our terms, by model; refuses unsupported ones."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from comfy.ldm.common_dit import pad_to_patch_size

from ....tpu_runtime.checkpoints.model_ref import ModelRef
from ....tpu_runtime.messages import compose
from ....tpu_runtime.model_spec import ModelSpec
from ....tpu_runtime.progress import SilentProgress
from . import rows as batch
from .rows import LENGTHS

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

    from ....tpu_runtime.engine.stage_functions import PredictionRequest

CPU = torch.device("cpu")
# The keywords of a call to core's network; `options` are its `transformer_options`.
Arguments = dict[str, Any]
# The reference method of Qwen-Image Edit from 2511 on; FLUX.2 does not have it.
_OF_2511 = "index_timestep_zero"


@dataclass(frozen=True, kw_only=True)
class DenoiserCall:
    """A call to a network in our terms."""

    sample: torch.Tensor  # [rows, channels, (frames,) height, width] of latents
    timestep: float  # in 0..1000
    inputs: Mapping[str, np.ndarray]  # of `model_spec.Forward`, by name


@dataclass(frozen=True, kw_only=True)
class CoreNetwork:
    """A denoiser that core calls."""

    spec: ModelSpec
    config: Mapping[str, Any]  # of the checkpoint

    @classmethod
    def from_model(cls, chosen: ModelRef, expert: int) -> "CoreNetwork":
        """Return a model's denoiser, by its number `expert`."""
        config = chosen.resolve(SilentProgress()).configs[chosen.spec.denoiser.experts[expert]]
        return cls(spec=chosen.spec, config=config)


def check_known(base: "BaseModel") -> None:
    """Raise ValueError if core detects a model that does not run with its samplers."""
    name = type(base).__name__
    if name not in ("WAN21", "WAN22", "Flux2", "Lumina2", "QwenImage", "HunyuanVideo15", "CogVideoX"):
        raise ValueError(compose("comfyui.model_class_unsupported", name=name))


def split_call(network: CoreNetwork, given: Arguments) -> list[tuple[list[int], DenoiserCall]]:
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


def _convert(network: CoreNetwork, given: Arguments) -> DenoiserCall:
    """Convert a call of one timestep; two equal rows become one."""
    x = given["x"]
    if len(x) == 2 and torch.equal(x[0], x[1]):
        given["x"] = x[:1]
    return _FAMILIES[network.spec.family](network, given)


def _rows(value: Any, rows: Sequence[int], number: int) -> Any:
    """Select `rows` of `number` rows, of everything that has rows."""
    if isinstance(value, torch.Tensor):
        return value[list(rows)] if value.ndim and len(value) == number else value
    if isinstance(value, list):
        return [_rows(entry, rows, number) for entry in value]
    if isinstance(value, dict) and LENGTHS in value:
        selected = {name: [lengths[row] for row in rows] for name, lengths in value[LENGTHS].items()}
        return {**value, LENGTHS: selected}
    return value


def _wan(network: CoreNetwork, given: Arguments) -> DenoiserCall:
    """Convert a call of `WAN21` or `WAN22`. Channels after the sample's are the condition of image to video."""
    x, timestep, context, pictures = (given.pop(name, None) for name in ("x", "timestep", "context", "clip_fea"))
    # Core's network uses a reference latent only if it has weights for it, which ours do not have.
    _refuse_rest(network, given, {"denoise_mask", "reference_latent"})
    x = _pad(x, (1, 2, 2))
    channels = network.spec.geometry.channels
    conditions = network.spec.pictures.condition_shapes(tuple(x[:, :channels].shape))
    _check_channels(network, x, conditions.get("condition", (0, 0))[1])
    inputs = {"text": _whole_text(network, context)}
    if "condition" in conditions:
        inputs["condition"] = _array(x[:, channels:])
    if "image_embeds" in conditions and pictures is not None:
        inputs["image_embeds"] = _array(pictures)
    timestep = timestep.reshape(len(timestep), -1)
    if "is_given" in conditions:
        # Core passes one timestep per frame; a given first frame has timestep 0.
        is_given = timestep.shape[1] > 1 and bool((timestep[:, 0] == 0).all())
        inputs["is_given"] = np.full(1, is_given, np.float32)
        timestep = timestep[:, is_given:]
    return DenoiserCall(sample=x[:, :channels], timestep=_one_timestep(network, timestep), inputs=inputs)


def _flux2(network: CoreNetwork, given: Arguments) -> DenoiserCall:
    """Convert a call of `Flux2`, whose timestep is in 0..1. Each reference's latents are one input."""
    x, timestep, context, guidance, references, method = (
        given.pop(name, None) for name in ("x", "timestep", "context", "guidance", "ref_latents", "ref_latents_method")
    )
    _refuse_rest(network, given, {"y"})
    _check_method(network, method, "index")
    _check_channels(network, x)
    inputs = {"text": _whole_text(network, context)}
    if guidance is not None and network.config.get("guidance_embeds", True):
        inputs["guidance"] = _array(guidance)
    inputs |= {f"reference_{number}": _array(latents) for number, latents in enumerate(references or ())}
    return DenoiserCall(sample=x, timestep=1000.0 * _one_timestep(network, timestep), inputs=inputs)


def _check_method(network: CoreNetwork, method: str | None, own: str) -> None:
    if method in (None, own):
        return
    if method == _OF_2511 and network.spec.family == "QwenImage":
        raise ValueError(
            compose("comfyui.reference_method_needs_2511", title=network.spec.title, method=method, own=own)
        )
    raise ValueError(compose("comfyui.reference_method_unsupported", title=network.spec.title, method=method, own=own))


def _z_image(network: CoreNetwork, given: Arguments) -> DenoiserCall:
    """Convert a call of `Lumina2`, whose timestep is in 0..1. Its texts have their own lengths; ours are padded."""
    x, timestep, context = (given.pop(name, None) for name in ("x", "timesteps", "context"))
    # Core's network ignores these, or has no weights for them.
    _refuse_rest(network, given, {"num_tokens", "attention_mask", "clip_text_pooled"})
    _check_channels(network, x)
    inputs = _pad_text(network, 0, context, _lengths(network, given, context, None))
    return DenoiserCall(sample=_pad(x, (2, 2)), timestep=1000.0 * _one_timestep(network, timestep), inputs=inputs)


def _qwen_image(network: CoreNetwork, given: Arguments) -> DenoiserCall:
    """Convert a call of `QwenImage`, whose timestep is in 0..1. Its texts have their own lengths; ours are padded.

    ComfyUI numbers the tokens of odd grids, and the text with larger references, differently from upstream.
    """
    x, timestep, context, mask = (given.pop(name, None) for name in ("x", "timesteps", "context", "attention_mask"))
    references, method = (given.pop(name, None) for name in ("ref_latents", "ref_latents_method"))
    _refuse_rest(network, given, set())
    _check_channels(network, x)
    if references:
        _check_method(network, method, _OF_2511 if network.config.get("zero_cond_t") else "index")
    inputs = _pad_text(network, 0, context, _lengths(network, given, context, mask))
    inputs |= {f"reference_{n}": _array(_pad(latents, (1, 2, 2))) for n, latents in enumerate(references or ())}
    inputs["comfyui_positions"] = np.ones(1, np.float32)
    return DenoiserCall(sample=_pad(x, (1, 2, 2)), timestep=1000.0 * _one_timestep(network, timestep), inputs=inputs)


def _hunyuan15(network: CoreNetwork, given: Arguments) -> DenoiserCall:
    """Convert a call of `HunyuanVideo15`, whose texts have their own lengths; ours are padded."""
    x, timestep, context, glyphs, pictures, mask = (
        given.pop(name, None) for name in ("x", "timestep", "context", "txt_byt5", "clip_fea", "attention_mask")
    )
    _refuse_rest(network, given, {"y", "guidance", "disable_time_r"})
    channels = network.spec.geometry.channels
    _check_channels(network, x, channels + 1)
    glyph_lengths = given["options"].get(LENGTHS, {}).get("txt_byt5")
    inputs = {
        **_pad_text(network, 0, context, _lengths(network, given, context, mask)),
        **_pad_text(network, 1, glyphs, glyph_lengths or [0 if glyphs is None else glyphs.shape[1]] * len(context)),
    }
    if x[:, channels:].any():
        inputs["condition"] = _array(x[:, channels:])
    if pictures is not None:
        inputs["image_embeds"] = _array(pictures)
    if (following := _next_timestep(network, given["options"])) is not None:
        inputs["next_timestep"] = np.full(1, following, np.float32)
    return DenoiserCall(sample=x[:, :channels], timestep=_one_timestep(network, timestep), inputs=inputs)


def _cogvideox(network: CoreNetwork, given: Arguments) -> DenoiserCall:
    """Convert a call of `CogVideoX`. An image's latent is the first frame of further channels."""
    x, timestep, context, ofs = (given.pop(name, None) for name in ("x", "timestep", "context", "ofs"))
    _refuse_rest(network, given, set())
    x = _pad(x, (2, 2, 2))
    channels = network.spec.geometry.channels
    takes_picture = "image" in network.spec.pictures.condition_shapes(tuple(x[:, :channels].shape))
    _check_channels(network, x, channels if takes_picture else 0)
    inputs = {"text": _whole_text(network, context)}
    if takes_picture:
        if x[:, channels:, 1:].any() or (ofs is not None and not torch.all(ofs == 2.0)):
            raise ValueError(compose("comfyui.more_than_first_frame", title=network.spec.title))
        inputs["image"] = _array(x[:, channels:, :1])
    return DenoiserCall(sample=x[:, :channels], timestep=_one_timestep(network, timestep), inputs=inputs)


_FAMILIES: Mapping[str, Callable[[CoreNetwork, Arguments], DenoiserCall]] = {
    "Wan21": _wan,
    "Wan22I2V": _wan,
    "Flux2": _flux2,
    "ZImage": _z_image,
    "QwenImage": _qwen_image,
    "HunyuanVideo15": _hunyuan15,
    "CogVideoX": _cogvideox,
}

# Families whose texts have their own lengths; core does not join rows of different lengths, so they are padded.
_PADDED = frozenset({"ZImage", "QwenImage", "HunyuanVideo15"})


def text_lengths(network: CoreNetwork) -> dict[str, int]:
    """Return the number of tokens that texts are padded to, by core's names of them; nothing if they are not padded."""
    encoders = network.spec.text_encoders if network.spec.family in _PADDED else ()
    return dict(zip(("c_crossattn", "txt_byt5"), (text.max_length for text in encoders), strict=False))


def predict_call(
    chosen: ModelRef,
    expert: int,
    shape: tuple[int, ...],
    rows: tuple[int, int],
    pictures: Collection[str] = (),
    references: Sequence[tuple[int, ...]] = (),
) -> "PredictionRequest":
    """Return the call that a step of core's samplers will make to a denoiser, with zeros as values.

    chosen, expert: the model, and the number of its denoiser.
    shape: of one sample, without the batch.
    rows: of the sample, and of the conditionings.
    pictures: images that nodes add, by the names of their inputs.
    references: shapes of the latents of reference images, without the batch; of no effect on models without them.
    """
    from ....tpu_runtime.engine.stage_functions import PredictionRequest

    network = CoreNetwork.from_model(chosen, expert)
    spec, config = network.spec, network.config
    text = spec.text_encoders[0]
    conditions = spec.condition_shapes(config, (1, *shape))
    arguments: Arguments = {
        "context": torch.zeros(rows[1], text.max_length, int(config[text.width_key])),
        "options": {"sample_sigmas": torch.tensor((1.0, 0.0)), "sigmas": torch.ones(1)},
    }
    channels = shape[0] + sum(conditions.get(name, (0, 0))[1] for name in ("condition", "image"))
    if spec.family == "HunyuanVideo15":
        channels = 2 * shape[0] + 1
    x = torch.zeros(rows[0], channels, *shape[1:])
    if spec.family == "HunyuanVideo15" and "start_image" in pictures:
        x[:, shape[0] :] = 1.0
    if "image_embeds" in conditions and "clip_vision_output" in pictures:
        tokens, width = conditions["image_embeds"][1:]
        number = 2 if "second_clip_vision_output" in pictures else 1
        arguments["clip_fea"] = torch.zeros(rows[1], tokens // spec.pictures.numbers[0] * number, width)
    if spec.family == "Flux2":
        arguments["guidance"] = torch.ones(rows[1])
    if references and spec.family in ("Flux2", "QwenImage"):
        arguments["ref_latents"] = [torch.zeros(rows[1], *reference) for reference in references]
    time = "timesteps" if spec.family in ("ZImage", "QwenImage") else "timestep"
    call = _FAMILIES[spec.family](network, {**arguments, "x": x, time: torch.ones(1)})
    return PredictionRequest(sample=call.sample, timestep=call.timestep, inputs=call.inputs, expert=expert)


# --- arrays -----------------------------------------------------------------------------------------------------------


def _pad(x: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """Pad `[rows, channels, ...]` to whole patches as core does, without a copy if nothing is to be padded."""
    is_whole = all(size % part == 0 for size, part in zip(x.shape[2:], patch, strict=True))
    return x if is_whole else pad_to_patch_size(x, patch)


def _array(x: torch.Tensor) -> np.ndarray:
    """Return a float32 array."""
    return x.detach().to(CPU, torch.float32).contiguous().numpy()


def _whole_text(network: CoreNetwork, context: torch.Tensor) -> np.ndarray:
    """Return a text whose tokens are all valid."""
    check_width(network, 0, compose("comfyui.prompt_states"), context)
    return _array(context)


def _pad_text(
    network: CoreNetwork, encoder: int, context: torch.Tensor | None, lengths: Sequence[int]
) -> dict[str, np.ndarray]:
    """Return an encoder's text `[rows, tokens, width]`, padded, and its lengths, by the network's input names."""
    text = network.spec.text_encoders[encoder]
    counted = {f"{text.name}_length": np.array(lengths, np.int32)}
    if context is not None:
        check_width(
            network,
            encoder,
            compose("comfyui.prompt_states") if encoder == 0 else compose("comfyui.glyphs_states"),
            context,
        )
        if context.shape[1] >= text.max_length:
            return {text.name: _array(context), **counted}
    padded = np.zeros((len(lengths), text.max_length, int(network.config[text.width_key])), np.float32)
    if context is not None:
        padded[:, : context.shape[1]] = _array(context)
    return {text.name: padded, **counted}


def _lengths(network: CoreNetwork, given: Arguments, context: torch.Tensor, mask: torch.Tensor | None) -> Sequence[int]:
    """Return the number of valid tokens of each row; ValueError if the mask leaves out tokens before the end."""
    lengths = given["options"].get(LENGTHS, {}).get("c_crossattn")
    if lengths or mask is None:
        return lengths or [context.shape[1]] * len(context)
    lengths = batch.valid_lengths(mask)
    if lengths is None:
        raise ValueError(compose("comfyui.attention_mask_unsupported", title=network.spec.title))
    return lengths


def _next_timestep(network: CoreNetwork, options: Mapping[str, Any]) -> float | None:
    """Return the timestep at the end of a step, an input of mean flow networks.

    Core looks it up in the sampler's sigmas; None if the network has no such input, or is evaluated between them.
    """
    sigmas, current = options.get("sample_sigmas"), options.get("sigmas")
    if not network.config.get("use_meanflow") or sigmas is None or current is None:
        return None
    steps = torch.where(current[0] == sigmas)[0].tolist()
    return 1000.0 * float(sigmas[steps[0] + 1]) if steps and steps[0] + 1 < len(sigmas) else None


def _one_timestep(network: CoreNetwork, values: torch.Tensor) -> float:
    """Return the only timestep of a call; ValueError if frames have different ones."""
    first = values.flatten()[0]
    if not torch.all(values == first):
        shown = ", ".join(f"{value:.4g}" for value in values.flatten().unique().tolist()[:3])
        raise ValueError(compose("comfyui.timesteps_differ", title=network.spec.title, shown=shown))
    return float(first)


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
    spec, config, noise = network.spec, network.config, given.get("noise")
    if given.get("cross_attn") is not None:
        check_width(network, 0, compose("comfyui.prompt_states"), given["cross_attn"])
    if spec.family == "HunyuanVideo15" and given.get("conditioning_byt5small") is not None:
        check_width(network, 1, compose("comfyui.glyphs_states"), given["conditioning_byt5small"])
    _check_concat(network, given, noise)
    if spec.family in ("Flux2", "QwenImage"):
        for number, latents in enumerate(given.get("reference_latents") or ()):
            _check_reference(network, f"reference_latents {number + 1}", latents)
    vision = given.get("clip_vision_output")
    width = config.get("image_embed_dim" if spec.family == "HunyuanVideo15" else "image_dim")
    if vision is not None and width:
        states = vision.last_hidden_state if spec.family == "HunyuanVideo15" else vision.penultimate_hidden_states
        if states.shape[-1] != int(width):
            raise ValueError(compose(
                "comfyui.clip_vision_width_wrong", title=spec.title, actual_width=states.shape[-1], width=width,
            ))  # fmt: skip
        most = config.get("pos_embed_seq_len")
        if most and states.shape[1] > int(most):
            raise ValueError(compose(
                "comfyui.clip_vision_too_long", title=spec.title, token_count=states.shape[1], max_tokens=most,
            ))  # fmt: skip


def check_width(network: CoreNetwork, encoder: int, what: str, states: torch.Tensor) -> None:
    """Raise ValueError for text states not of shape `[rows, tokens, width]` of a text encoder.

    encoder: its number. what: name of the states in the error.
    """
    width = int(network.config[network.spec.text_encoders[encoder].width_key])
    if states.ndim != 3 or states.shape[2] != width:
        raise ValueError(compose(
            "comfyui.states_width_wrong", title=network.spec.title, what=what, actual_width=states.shape[-1],
            width=width,
        ))  # fmt: skip


def _check_concat(network: CoreNetwork, given: Mapping[str, Any], noise: torch.Tensor | None) -> None:
    """Check the latents of image to video's images, which core concatenates to the sample's channels."""
    spec, latents = network.spec, given.get("concat_latent_image")
    if latents is None or noise is None or noise.ndim != 5:
        return
    conditions = spec.pictures.condition_shapes(tuple(noise.shape))
    channels = spec.geometry.channels
    if spec.family != "HunyuanVideo15" and not conditions.keys() & {"condition", "image"}:
        return  # core ignores them, too
    allowed = {channels, int(conditions["condition"][1])} if spec.family.startswith("Wan") else {channels}
    if latents.ndim != 5 or latents.shape[1] not in allowed:
        raise ValueError(compose(
            "comfyui.concat_latent_channels_wrong", title=spec.title, channel_count=latents.shape[1],
            shape=tuple(latents.shape), expected_channels=channels, other_vae=_OTHER_VAE,
        ))  # fmt: skip
    if spec.family != "CogVideoX" and latents.shape[2] != noise.shape[2]:
        raise ValueError(compose(
            "comfyui.concat_latent_frames_wrong", title=spec.title, frame_count=latents.shape[2],
            sample_frames=noise.shape[2],
        ))  # fmt: skip
    mask = given.get("concat_mask")
    if mask is not None and spec.family != "CogVideoX" and mask.ndim == 5 and mask.shape[2] > noise.shape[2]:
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


def _check_channels(network: CoreNetwork, x: torch.Tensor, further: int | str = 0) -> None:
    """Raise ValueError unless `x` has the sample's channels and `further` ones."""
    channels = network.spec.geometry.channels + int(further)
    if x.shape[1] != channels:
        raise ValueError(compose(
            "comfyui.sample_channels_wrong", title=network.spec.title, channel_count=x.shape[1],
            expected_channels=channels,
        ))  # fmt: skip


def _refuse_rest(network: CoreNetwork, given: Arguments, harmless: set[str]) -> None:
    for name, value in given.items():
        if value is not None and name not in harmless | {"options"}:
            raise ValueError(compose("comfyui.conditioning_entry_unsupported", title=network.spec.title, name=name))
