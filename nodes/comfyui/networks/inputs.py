"""What core passes to its networks, by its models, in our terms; and what does not fit a network, in sentences."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from comfy.ldm.common_dit import pad_to_patch_size

from ....tpu_runtime import pipeline
from ....tpu_runtime.pipeline import ModelRef, ModelSpec
from . import rows as batch
from .rows import LENGTHS

CPU = torch.device("cpu")
Given = dict[str, Any]
# How Qwen-Image Edit from 2511 on takes its images; FLUX.2 has no such network.
_OF_2511 = "index_timestep_zero"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What core asks a network for, in our terms: a sample, `model_spec.Forward`'s inputs, a timestep."""

    sample: torch.Tensor
    timestep: float
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class CoreNetwork:
    """A denoiser that core asks: its model, and its config."""

    spec: ModelSpec
    config: Mapping[str, Any]

    @classmethod
    def of(cls, chosen: ModelRef, expert: int) -> "CoreNetwork":
        """That of a model, by its number."""
        config = chosen.resolve(pipeline.Silent()).configs[chosen.spec.denoiser.experts[expert]]
        return cls(spec=chosen.spec, config=config)


def check_known(base: Any) -> None:
    name = type(base).__name__
    if name not in ("WAN21", "WAN22", "Flux2", "Lumina2", "QwenImage", "HunyuanVideo15", "CogVideoX"):
        raise ValueError(
            f"This file is a {name} to ComfyUI, which does not run on the TPU behind ComfyUI's samplers. Use this "
            "pack's own nodes for it, or ComfyUI's loader."
        )


def asked(network: CoreNetwork, given: Given) -> list[tuple[list[int], Asked]]:
    """What the network is asked for, with the numbers of the rows that each answers: rows of one timestep at a time."""
    times = given["timesteps" if "timesteps" in given else "timestep"]
    number = len(times)
    alike: dict[tuple[float, ...], list[int]] = {}
    for row, own in enumerate(times.reshape(number, -1).tolist()):
        alike.setdefault(tuple(own), []).append(row)
    if len(alike) == 1:
        return [(list(range(number)), _one_asked(network, dict(given)))]
    return [
        (rows, _one_asked(network, {name: _rows(x, rows, number) for name, x in given.items()}))
        for rows in alike.values()
    ]


def _one_asked(network: CoreNetwork, given: Given) -> Asked:
    x = given["x"]
    if len(x) == 2 and torch.equal(x[0], x[1]):
        given["x"] = x[:1]
    return _FAMILIES[network.spec.family](network, given)


def _rows(value: Any, rows: Sequence[int], number: int) -> Any:
    """These of so many rows, of all that has rows."""
    if isinstance(value, torch.Tensor):
        return value[list(rows)] if value.ndim and len(value) == number else value
    if isinstance(value, list):
        return [_rows(one, rows, number) for one in value]
    if isinstance(value, dict) and LENGTHS in value:
        own = {name: [lengths[row] for row in rows] for name, lengths in value[LENGTHS].items()}
        return {**value, LENGTHS: own}
    return value


def _wan(network: CoreNetwork, given: Given) -> Asked:
    """`WAN21` and `WAN22`. What is beside the sample's channels is the condition of image to video."""
    x, timestep, context, pictures = (given.pop(name, None) for name in ("x", "timestep", "context", "clip_fea"))
    # Core's network looks at a reference latent only where it has weights for it, which ours have not.
    _refuse_rest(network, given, {"denoise_mask", "reference_latent"})
    x = _padded(x, (1, 2, 2))
    channels = network.spec.geometry.channels
    wanted = network.spec.pictures.condition_shapes(tuple(x[:, :channels].shape))
    _check_channels(network, x, wanted.get("condition", (0, 0))[1])
    inputs = {"text": _whole_text(network, context)}
    if "condition" in wanted:
        inputs["condition"] = _array(x[:, channels:])
    if "image_embeds" in wanted and pictures is not None:
        inputs["image_embeds"] = _array(pictures)
    timestep = timestep.reshape(len(timestep), -1)
    if "is_given" in wanted:
        # Core says a timestep for each frame; that of a first frame that is given is 0.
        is_given = timestep.shape[1] > 1 and bool((timestep[:, 0] == 0).all())
        inputs["is_given"] = np.full(1, is_given, np.float32)
        timestep = timestep[:, is_given:]
    return Asked(sample=x[:, :channels], timestep=_one_timestep(network, timestep), inputs=inputs)


def _flux2(network: CoreNetwork, given: Given) -> Asked:
    """`Flux2`, whose timestep is in 0..1; latents of references are as many arrays."""
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
    return Asked(sample=x, timestep=1000.0 * _one_timestep(network, timestep), inputs=inputs)


def _check_method(network: CoreNetwork, method: str | None, own: str) -> None:
    if method in (None, own):
        return
    if method == _OF_2511 and network.spec.family == "QwenImage":
        raise ValueError(
            f"{network.spec.title}: reference_latents_method is {method}, and the file is not known to be 2511; its "
            f"network on the TPU takes {own}. Set that, or where it is 2511, put 2511 into the file's name, or add "
            "+ qwen-image-edit-2511 to the model_id of TPUModelLoader."
        )
    raise ValueError(
        f"{network.spec.title}: reference_latents_method is {method}; its network on the TPU takes {own}. Set that, or "
        "remove the node."
    )


def _z_image(network: CoreNetwork, given: Given) -> Asked:
    """`Lumina2`, whose timestep is in 0..1. Texts are as long as they are; ours are padded, and have lengths."""
    x, timestep, context = (given.pop(name, None) for name in ("x", "timesteps", "context"))
    # Of these core's network takes none, or has no weights for it.
    _refuse_rest(network, given, {"num_tokens", "attention_mask", "clip_text_pooled"})
    _check_channels(network, x)
    inputs = _padded_text(network, 0, context, _lengths(network, given, context, None))
    return Asked(sample=_padded(x, (2, 2)), timestep=1000.0 * _one_timestep(network, timestep), inputs=inputs)


def _qwen_image(network: CoreNetwork, given: Given) -> Asked:
    """`QwenImage`, whose timestep is in 0..1. Texts are as long as they are; ours are padded, and have lengths."""
    x, timestep, context, mask = (given.pop(name, None) for name in ("x", "timesteps", "context", "attention_mask"))
    references, method = (given.pop(name, None) for name in ("ref_latents", "ref_latents_method"))
    _refuse_rest(network, given, set())
    _check_channels(network, x)
    if references:
        _check_method(network, method, _OF_2511 if network.config.get("zero_cond_t") else "index")
    inputs = _padded_text(network, 0, context, _lengths(network, given, context, mask))
    inputs |= {f"reference_{n}": _array(_padded(each, (1, 2, 2))) for n, each in enumerate(references or ())}
    return Asked(sample=_padded(x, (1, 2, 2)), timestep=1000.0 * _one_timestep(network, timestep), inputs=inputs)


def _hunyuan15(network: CoreNetwork, given: Given) -> Asked:
    """`HunyuanVideo15`, whose texts are as long as they are; ours are padded, and have lengths."""
    x, timestep, context, glyphs, pictures, mask = (
        given.pop(name, None) for name in ("x", "timestep", "context", "txt_byt5", "clip_fea", "attention_mask")
    )
    _refuse_rest(network, given, {"y", "guidance", "disable_time_r"})
    channels = network.spec.geometry.channels
    _check_channels(network, x, channels + 1)
    told = given["options"].get(LENGTHS, {}).get("txt_byt5")
    inputs = {
        **_padded_text(network, 0, context, _lengths(network, given, context, mask)),
        **_padded_text(network, 1, glyphs, told or [0 if glyphs is None else glyphs.shape[1]] * len(context)),
    }
    if x[:, channels:].any():
        inputs["condition"] = _array(x[:, channels:])
    if pictures is not None:
        inputs["image_embeds"] = _array(pictures)
    if (following := _next_timestep(network, given["options"])) is not None:
        inputs["next_timestep"] = np.full(1, following, np.float32)
    return Asked(sample=x[:, :channels], timestep=_one_timestep(network, timestep), inputs=inputs)


def _cogvideox(network: CoreNetwork, given: Given) -> Asked:
    """`CogVideoX`. A picture's latent is the first frame of as many channels more."""
    x, timestep, context, ofs = (given.pop(name, None) for name in ("x", "timestep", "context", "ofs"))
    _refuse_rest(network, given, set())
    x = _padded(x, (2, 2, 2))
    channels = network.spec.geometry.channels
    takes_picture = "image" in network.spec.pictures.condition_shapes(tuple(x[:, :channels].shape))
    _check_channels(network, x, channels if takes_picture else 0)
    inputs = {"text": _whole_text(network, context)}
    if takes_picture:
        if x[:, channels:, 1:].any() or (ofs is not None and not torch.all(ofs == 2.0)):
            raise ValueError(
                f"{network.spec.title}: what is given is more than a first frame, or ofs is not 2; its network on the "
                "TPU takes a first frame. Connect one picture."
            )
        inputs["image"] = _array(x[:, channels:, :1])
    return Asked(sample=x[:, :channels], timestep=_one_timestep(network, timestep), inputs=inputs)


_FAMILIES: Mapping[str, Callable[[CoreNetwork, Given], Asked]] = {
    "Wan21": _wan,
    "Wan22I2V": _wan,
    "Flux2": _flux2,
    "ZImage": _z_image,
    "QwenImage": _qwen_image,
    "HunyuanVideo15": _hunyuan15,
    "CogVideoX": _cogvideox,
}

# Texts are as long as they are, and core joins no rows of different lengths.
_PADDED = frozenset({"ZImage", "QwenImage", "HunyuanVideo15"})


def texts(network: CoreNetwork) -> dict[str, int]:
    """To how many tokens texts are padded, by core's names of them; nothing where they are not."""
    encoders = network.spec.text_encoders if network.spec.family in _PADDED else ()
    return dict(zip(("c_crossattn", "txt_byt5"), (text.max_length for text in encoders), strict=False))


def expected(
    chosen: ModelRef, expert: int, shape: tuple[int, ...], rows: tuple[int, int], pictures: Collection[str]
) -> Any:
    """What a step of core's samplers will ask of a denoiser, as zeros: for a sample of this `shape`, without its batch,
    for so many `rows` of it and of conditionings, and for what nodes give of `pictures`.
    """
    network = CoreNetwork.of(chosen, expert)
    spec, config = network.spec, network.config
    text = spec.text_encoders[0]
    wanted = spec.conditions(config, (1, *shape))
    given: Given = {
        "context": torch.zeros(rows[1], text.max_length, int(config[text.width_key])),
        "options": {"sample_sigmas": torch.tensor((1.0, 0.0)), "sigmas": torch.ones(1)},
    }
    channels = shape[0] + sum(wanted.get(name, (0, 0))[1] for name in ("condition", "image"))
    if spec.family == "HunyuanVideo15":
        channels = 2 * shape[0] + 1
    x = torch.zeros(rows[0], channels, *shape[1:])
    if spec.family == "HunyuanVideo15" and "start_image" in pictures:
        x[:, shape[0] :] = 1.0
    if "image_embeds" in wanted and "clip_vision_output" in pictures:
        given["clip_fea"] = torch.zeros(rows[1], *wanted["image_embeds"][1:])
    if spec.family == "Flux2":
        given["guidance"] = torch.ones(rows[1])
    time = "timesteps" if spec.family in ("ZImage", "QwenImage") else "timestep"
    found = _FAMILIES[spec.family](network, {**given, "x": x, time: torch.ones(1)})
    return pipeline.Prediction(sample=found.sample, timestep=found.timestep, inputs=found.inputs, expert=expert)


# --- arrays -----------------------------------------------------------------------------------------------------------


def _padded(x: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """As core pads; what need not be padded it would copy."""
    is_whole = all(size % part == 0 for size, part in zip(x.shape[2:], patch, strict=True))
    return x if is_whole else pad_to_patch_size(x, patch)


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().to(CPU, torch.float32).contiguous().numpy()


def _whole_text(network: CoreNetwork, context: torch.Tensor) -> np.ndarray:
    """A text whose every token counts."""
    check_width(network, 0, "the prompt's states", context)
    return _array(context)


def _padded_text(
    network: CoreNetwork, encoder: int, context: torch.Tensor | None, lengths: Sequence[int]
) -> dict[str, np.ndarray]:
    text = network.spec.text_encoders[encoder]
    counted = {f"{text.name}_length": np.array(lengths, np.int32)}
    if context is not None:
        check_width(network, encoder, "the prompt's states" if encoder == 0 else "the glyphs' states", context)
        if context.shape[1] >= text.max_length:
            return {text.name: _array(context), **counted}
    padded = np.zeros((len(lengths), text.max_length, int(network.config[text.width_key])), np.float32)
    if context is not None:
        padded[:, : context.shape[1]] = _array(context)
    return {text.name: padded, **counted}


def _lengths(network: CoreNetwork, given: Given, context: torch.Tensor, mask: torch.Tensor | None) -> Sequence[int]:
    told = given["options"].get(LENGTHS, {}).get("c_crossattn")
    if told or mask is None:
        return told or [context.shape[1]] * len(context)
    found = batch.ends(mask)
    if found is None:
        raise ValueError(
            f"{network.spec.title}: the prompt's attention_mask leaves out tokens before its end, which its network on "
            "the TPU does not. Encode the prompt with the model's text encoder."
        )
    return found


def _next_timestep(network: CoreNetwork, options: Mapping[str, Any]) -> float | None:
    """The timestep that a step goes to, which a mean flow is told; core finds it among the sampler's own, and tells
    none where the sampler evaluates the network between them.
    """
    sigmas, own = options.get("sample_sigmas"), options.get("sigmas")
    if not network.config.get("use_meanflow") or sigmas is None or own is None:
        return None
    found = torch.where(own[0] == sigmas)[0].tolist()
    return 1000.0 * float(sigmas[found[0] + 1]) if found and found[0] + 1 < len(sigmas) else None


def _one_timestep(network: CoreNetwork, values: torch.Tensor) -> float:
    first = values.flatten()[0]
    if not torch.all(values == first):
        shown = ", ".join(f"{value:.4g}" for value in values.flatten().unique().tolist()[:3])
        raise ValueError(
            f"{network.spec.title}: frames have different timesteps ({shown}), and its compiled program takes one for "
            "all but a first frame that is given. Use a mask that keeps the first frame, or none."
        )
    return float(first)


# --- what does not fit ------------------------------------------------------------------------------------------------

_OTHER_VAE = "It comes from the VAE, or a node, of another model. Encode the picture with this model's VAE."


def check_sample(network: CoreNetwork, shape: Sequence[int]) -> None:
    """Raises ValueError for latents that a sampler is given and that the network does not take."""
    geometry, title = network.spec.geometry, network.spec.title
    names = ["rows", str(geometry.channels), *(["frames"] if geometry.stride_t else []), "height", "width"]
    if len(shape) != len(names) or shape[1] != geometry.channels:
        raise ValueError(
            f"{title}: latent_image has {shape[1] if len(shape) > 1 else 0} channels, shape {tuple(shape)}, and its "
            f"network takes {geometry.channels}, shape ({', '.join(names)}). It comes from another model's VAE or "
            "node for empty latents. Make it with this model's."
        )
    if geometry.stride_t and "num_frames" not in network.spec.inputs and shape[2] != 1:
        raise ValueError(
            f"{title}: latent_image has {shape[2]} frames, and its network takes 1: it makes pictures. Set the length "
            "of the empty latent to 1."
        )


def check_conditioning(network: CoreNetwork, given: Mapping[str, Any]) -> None:
    """Raises ValueError for what nodes put into a conditioning and the network does not take, before core fits it to
    the sample, by cutting channels for one.
    """
    spec, config, noise = network.spec, network.config, given.get("noise")
    if given.get("cross_attn") is not None:
        check_width(network, 0, "the prompt's states", given["cross_attn"])
    if spec.family == "HunyuanVideo15" and given.get("conditioning_byt5small") is not None:
        check_width(network, 1, "the glyphs' states", given["conditioning_byt5small"])
    _check_concat(network, given, noise)
    if spec.family in ("Flux2", "QwenImage"):
        for number, latents in enumerate(given.get("reference_latents") or ()):
            _check_reference(network, f"reference_latents {number + 1}", latents)
    seen = given.get("clip_vision_output")
    width = config.get("image_embed_dim" if spec.family == "HunyuanVideo15" else "image_dim")
    if seen is not None and width:
        states = seen.last_hidden_state if spec.family == "HunyuanVideo15" else seen.penultimate_hidden_states
        if states.shape[-1] != int(width):
            raise ValueError(
                f"{spec.title}: clip_vision_output is {states.shape[-1]} wide, and its network takes {width}. It "
                "comes from another model's image encoder. Load the one of this model."
            )
        most = config.get("pos_embed_seq_len")
        if most and states.shape[1] > int(most):
            raise ValueError(
                f"{spec.title}: clip_vision_output has {states.shape[1]} tokens, and its network takes at most {most}: "
                "a first and a last picture. Connect no more than two."
            )


def check_width(network: CoreNetwork, encoder: int, what: str, states: torch.Tensor) -> None:
    width = int(network.config[network.spec.text_encoders[encoder].width_key])
    if states.ndim != 3 or states.shape[2] != width:
        raise ValueError(
            f"{network.spec.title}: {what} are {states.shape[-1]} wide, and its network takes {width}. Load "
            "the text encoder of this model, with its type."
        )


def _check_concat(network: CoreNetwork, given: Mapping[str, Any], noise: Any) -> None:
    """The latents of pictures that image to video is given, which core joins to the sample's channels."""
    spec, latents = network.spec, given.get("concat_latent_image")
    if latents is None or noise is None or noise.ndim != 5:
        return
    wanted = spec.pictures.condition_shapes(tuple(noise.shape))
    channels = spec.geometry.channels
    if spec.family != "HunyuanVideo15" and not wanted.keys() & {"condition", "image"}:
        return  # core leaves them out, too
    allowed = {channels, int(wanted["condition"][1])} if spec.family.startswith("Wan") else {channels}
    if latents.ndim != 5 or latents.shape[1] not in allowed:
        raise ValueError(
            f"{spec.title}: concat_latent_image has {latents.shape[1]} channels, shape {tuple(latents.shape)}, and "
            f"its network takes {channels}. {_OTHER_VAE}"
        )
    if spec.family != "CogVideoX" and latents.shape[2] != noise.shape[2]:
        raise ValueError(
            f"{spec.title}: concat_latent_image has {latents.shape[2]} latent frames, and the sample has "
            f"{noise.shape[2]}. Give the node that prepares the picture the length of the video."
        )
    mask = given.get("concat_mask")
    if mask is not None and spec.family != "CogVideoX" and mask.ndim == 5 and mask.shape[2] > noise.shape[2]:
        raise ValueError(
            f"{spec.title}: concat_mask has {mask.shape[2]} latent frames, and the sample has {noise.shape[2]}. Give "
            "the node that prepares the picture the length of the video."
        )


def _check_reference(network: CoreNetwork, what: str, latents: torch.Tensor) -> None:
    geometry = network.spec.geometry
    names = ["1", str(geometry.channels), *(["1"] if geometry.stride_t else []), "height", "width"]
    shape = tuple(latents.shape)
    is_plain = len(shape) == len(names) and (not geometry.stride_t or shape[2] == 1)
    if not is_plain or shape[1] != geometry.channels:
        raise ValueError(
            f"{network.spec.title}: {what} has {shape[1]} channels, shape {shape}, and its network takes "
            f"{geometry.channels}, shape ({', '.join(names)}). {_OTHER_VAE}"
        )


def _check_channels(network: CoreNetwork, x: torch.Tensor, beside: int | str = 0) -> None:
    wanted = network.spec.geometry.channels + int(beside)
    if x.shape[1] != wanted:
        raise ValueError(
            f"{network.spec.title}: the sample and what is beside it have {x.shape[1]} channels, and its network takes "
            f"{wanted}. Make both with this model's VAE."
        )


def _refuse_rest(network: CoreNetwork, given: Given, harmless: set[str]) -> None:
    for name, value in given.items():
        if value is not None and name not in harmless | {"options"}:
            raise ValueError(
                f"{network.spec.title}: a node adds {name} to the conditioning, which the compiled network has no "
                "input for. Remove that node, or load the model with ComfyUI's own loader."
            )
