"""ComfyUI's own MODEL whose network runs on the TPU: samplers, guiders and wrappers are core's, the network is ours.

Core builds its own network from the shapes in a file, on the meta device, where it takes no memory: so names for LoRAs,
latent formats, schedules and conditionings are core's. Only the innermost `_forward` is another: it asks the engine.
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.ops
import numpy as np
import torch
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.patcher_extension import WrappersMP

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import QUALITIES, ModelRef, Progress
from . import core_patches, errors
from .core_patches import CPU, LENGTHS, CorePatcher, PlainBatch

# The progress of the node that runs: one object is used by many.
MakeHost = Callable[[], Progress]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What core asks a network for, in our terms: a sample, `model_spec.Forward`'s inputs, a timestep."""

    sample: torch.Tensor
    timestep: float
    inputs: Mapping[str, np.ndarray]


def model(path: str, precision: str, host: MakeHost, quality: str = QUALITIES[0]) -> CorePatcher:
    """Core's MODEL of the denoiser in a file."""
    found = later(pipeline.choose_part(pipeline.SPECS, path, precision=precision, quality=quality), 0, host)
    found.make_now()
    return found


def later(chosen: ModelRef, expert: int, host: MakeHost) -> CorePatcher:
    """Core's MODEL of a model's denoiser, by its number, made when it is first used; refused where there is none."""
    return CorePatcher.later(lambda patcher: _make(patcher, chosen, expert, host))


def _make(patcher: CorePatcher, chosen: ModelRef, expert: int, host: MakeHost) -> None:
    experts = chosen.spec.denoiser.experts
    if expert >= len(experts):
        raise ValueError(
            f"{chosen.spec.title} has one denoiser, and this MODEL is that of a second one, for low noise. Link the "
            "output MODEL."
        )
    held = pipeline.checkpoint.network(chosen.locate(), experts[expert], host())
    base = _core_model(held)
    _check_known(base)
    network = base.diffusion_model
    forward = inspect.signature(type(network)._forward)

    def predict(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound = forward.bind(network, *args, **kwargs).arguments
        given = {name: value for name, value in bound.items() if name != "self"}
        given |= given.pop("kwargs", {})
        patcher = base.current_patcher
        options = given.pop("transformer_options", None) or {}
        core_patches.check(options, given.pop("control", None))
        x = given["x"]
        if len(x) == 2 and torch.equal(x[0], x[1]):
            given["x"] = x[:1]
        asked = _FAMILIES[chosen.spec.family](chosen, {**given, "options": options})
        loras = core_patches.loras(patcher, held)
        prediction = pipeline.Prediction(
            sample=asked.sample, timestep=asked.timestep, inputs=asked.inputs, expert=expert
        )
        found = ask("predict", replace(chosen, loras=loras), host, prediction=prediction)
        found = found[(..., *(slice(0, size) for size in x.shape[2:]))]
        return found.expand(max(len(found), len(x)), *found.shape[1:]).to(x.dtype)

    network._forward = predict
    patcher.fill(base)
    texts = _texts(chosen) if chosen.spec.family in _PADDED else {}
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "comfyui_tpu", PlainBatch(texts))


def ask(stage: str, model: ModelRef, host: MakeHost, **arguments: Any) -> Any:
    """`pipeline.run`, whose error for want of memory ComfyUI then knows: it unloads everything and says so."""
    try:
        with errors.named():
            return pipeline.run(stage, model, host(), **arguments)
    except pipeline.OutOfMemory as error:
        failure = str(error)
    raise comfy.model_management.OOM_EXCEPTION(failure)


def _core_model(held: Any) -> Any:
    """Core's model of a network, as its own loader finds it, without memory for weights."""
    shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in held.tensors.items()}
    said = held.contents.config
    metadata = {"config": json.dumps(said)} if said else None
    config = comfy.model_detection.model_config_from_unet(shapes, "", metadata=metadata)
    if config is None:
        found = comfy.model_detection.convert_diffusers_mmdit(shapes, "")
        config = found and comfy.model_detection.model_config_from_unet(found, "")
        shapes = found or shapes
    if config is None:
        raise ValueError(
            f"{held.path}: ComfyUI does not know this file's names, so its samplers cannot run it. Use the file in "
            "ComfyUI's own names (Comfy-Org's repositories), or this pack's own sampler."
        )
    config.set_inference_dtype(torch.float32, None)
    config.custom_operations = comfy.ops.disable_weight_init
    return config.get_model(shapes, "", device=torch.device("meta"))


# --- what core passes, by its models ----------------------------------------------------------------------------------

Given = dict[str, Any]


def _check_known(base: Any) -> None:
    name = type(base).__name__
    if name not in ("WAN21", "WAN22", "Flux2", "Lumina2", "QwenImage", "HunyuanVideo15", "CogVideoX"):
        raise ValueError(
            f"This file is a {name} to ComfyUI, which does not run on the TPU behind ComfyUI's samplers. Use this "
            "pack's own nodes for it, or ComfyUI's loader."
        )


def _wan(model: ModelRef, given: Given) -> Asked:
    """`WAN21` and `WAN22`. What is beside the sample's channels is the condition of image to video."""
    x, timestep, context, pictures = (given.pop(name, None) for name in ("x", "timestep", "context", "clip_fea"))
    _refuse_rest(model, given, {"denoise_mask"})
    x = _padded(x, (1, 2, 2))
    channels = model.spec.geometry.channels
    wanted = model.spec.pictures.condition_shapes(tuple(x[:, :channels].shape))
    inputs = {"text": _whole_text(model, context)}
    if "condition" in wanted:
        inputs["condition"] = _array(x[:, channels:])
    if "image_embeds" in wanted:
        inputs["image_embeds"] = _pictures(model, pictures, int(wanted["image_embeds"][1]))
    timestep = timestep.reshape(len(timestep), -1)
    if "is_given" in wanted:
        # Core says a timestep for each frame; that of a first frame that is given is 0.
        is_given = timestep.shape[1] > 1 and bool((timestep[:, 0] == 0).all())
        inputs["is_given"] = np.full(1, is_given, np.float32)
        timestep = timestep[:, is_given:]
    return Asked(sample=x[:, :channels], timestep=_one(model, timestep, "timesteps"), inputs=inputs)


def _flux2(model: ModelRef, given: Given) -> Asked:
    """`Flux2`, whose timestep is in 0..1; latents of references are as many arrays."""
    x, timestep, context, guidance, references, method = (
        given.pop(name, None) for name in ("x", "timestep", "context", "guidance", "ref_latents", "ref_latents_method")
    )
    _refuse_rest(model, given, {"y"})
    _check_method(model, method, "index")
    told = 0.0 if guidance is None else _one(model, guidance, "guidances")
    inputs = {"text": _whole_text(model, context), "guidance": np.full(1, told, np.float32)}
    inputs |= {f"reference_{number}": _array(latents) for number, latents in enumerate(references or ())}
    return Asked(sample=x, timestep=1000.0 * _one(model, timestep, "timesteps"), inputs=inputs)


def _check_method(model: ModelRef, method: str | None, own: str) -> None:
    if method not in (None, own):
        raise ValueError(
            f"{model.spec.title}: reference_latents_method is {method}; its network on the TPU takes {own}. Set that, "
            "or remove the node."
        )


def _z_image(model: ModelRef, given: Given) -> Asked:
    """`Lumina2`, whose timestep is in 0..1. Texts are as long as they are; ours are padded, and have lengths."""
    x, timestep, context, mask = (given.pop(name, None) for name in ("x", "timesteps", "context", "attention_mask"))
    _refuse_rest(model, given, {"num_tokens"})
    inputs = _padded_text(model, 0, context, _lengths(model, given, context, mask))
    return Asked(sample=_padded(x, (2, 2)), timestep=1000.0 * _one(model, timestep, "timesteps"), inputs=inputs)


def _qwen_image(model: ModelRef, given: Given) -> Asked:
    """`QwenImage`, whose timestep is in 0..1. Texts are as long as they are; ours are padded, and have lengths."""
    x, timestep, context, mask = (given.pop(name, None) for name in ("x", "timesteps", "context", "attention_mask"))
    references, method = (given.pop(name, None) for name in ("ref_latents", "ref_latents_method"))
    _refuse_rest(model, given, set())
    config = model.resolve(pipeline.Silent()).configs[model.spec.denoiser.experts[0]]
    if references:
        _check_method(model, method, "index_timestep_zero" if config.get("zero_cond_t") else "index")
    inputs = _padded_text(model, 0, context, _lengths(model, given, context, mask))
    inputs |= {f"reference_{n}": _array(_padded(each, (1, 2, 2))) for n, each in enumerate(references or ())}
    return Asked(sample=_padded(x, (1, 2, 2)), timestep=1000.0 * _one(model, timestep, "timesteps"), inputs=inputs)


def _hunyuan15(model: ModelRef, given: Given) -> Asked:
    """`HunyuanVideo15`, whose texts are as long as they are; ours are padded, and have lengths."""
    x, timestep, context, glyphs, pictures, mask = (
        given.pop(name, None) for name in ("x", "timestep", "context", "txt_byt5", "clip_fea", "attention_mask")
    )
    _refuse_rest(model, given, {"y", "guidance", "disable_time_r"})
    channels = model.spec.geometry.channels
    told = given["options"].get(LENGTHS, {}).get("txt_byt5")
    inputs = {
        **_padded_text(model, 0, context, _lengths(model, given, context, mask)),
        **_padded_text(model, 1, glyphs, told or [0 if glyphs is None else glyphs.shape[1]] * len(context)),
    }
    if x[:, channels:].any():
        inputs["condition"] = _array(x[:, channels:])
    if pictures is not None:
        inputs["image_embeds"] = _array(pictures)
    inputs["next_timestep"] = np.full(1, _next_timestep(model, given["options"]), np.float32)
    return Asked(sample=x[:, :channels], timestep=_one(model, timestep, "timesteps"), inputs=inputs)


def _cogvideox(model: ModelRef, given: Given) -> Asked:
    """`CogVideoX`. A picture's latent is the first frame of as many channels more."""
    x, timestep, context, ofs = (given.pop(name, None) for name in ("x", "timestep", "context", "ofs"))
    _refuse_rest(model, given, set())
    x = _padded(x, (2, 2, 2))
    channels = model.spec.geometry.channels
    inputs = {"text": _whole_text(model, context)}
    if "image" in model.spec.pictures.condition_shapes(tuple(x[:, :channels].shape)):
        if x[:, channels:, 1:].any() or (ofs is not None and not torch.all(ofs == 2.0)):
            raise ValueError(
                f"{model.spec.title}: what is given is more than a first frame, or ofs is not 2; its network on the "
                "TPU takes a first frame. Connect one picture."
            )
        inputs["image"] = _array(x[:, channels:, :1])
    return Asked(sample=x[:, :channels], timestep=_one(model, timestep, "timesteps"), inputs=inputs)


_FAMILIES: Mapping[str, Callable[[ModelRef, Given], Asked]] = {
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


def _texts(model: ModelRef) -> dict[str, int]:
    """To how many tokens texts are padded, by core's names of them."""
    encoders = model.spec.text_encoders
    return dict(zip(("c_crossattn", "txt_byt5"), (text.max_length for text in encoders), strict=False))


def expected(
    chosen: ModelRef, expert: int, shape: tuple[int, ...], rows: tuple[int, int], pictures: Collection[str]
) -> Any:
    """What a step of core's samplers will ask of a denoiser, as zeros: for a sample of this `shape`, without its batch,
    for so many `rows` of it and of conditionings, and for what nodes give of `pictures`.
    """
    spec = chosen.spec
    config = chosen.resolve(pipeline.Silent()).configs[spec.denoiser.experts[expert]]
    text = spec.text_encoders[0]
    wanted = spec.conditions(config, (1, *shape))
    given: Given = {
        "context": torch.zeros(rows[1], text.max_length, int(config[text.width_key])),
        "options": {"sample_sigmas": torch.tensor((1.0, 0.0)), "sigmas": torch.ones(1)},
    }
    channels = shape[0] + sum(wanted.get(name, (0, 0))[1] for name in ("condition", "image"))
    x = torch.zeros(rows[0], channels, *shape[1:])
    if spec.family == "HunyuanVideo15" and "start_image" in pictures:
        x[:, shape[0] :] = 1.0
    if "image_embeds" in wanted and ("clip_vision_output" in pictures or spec.family != "HunyuanVideo15"):
        given["clip_fea"] = torch.zeros(rows[1], *wanted["image_embeds"][1:])
    time = "timesteps" if spec.family in ("ZImage", "QwenImage") else "timestep"
    asked = _FAMILIES[spec.family](chosen, {**given, "x": x, time: torch.ones(1)})
    return pipeline.Prediction(sample=asked.sample, timestep=asked.timestep, inputs=asked.inputs, expert=expert)


def _padded(x: torch.Tensor, patch: tuple[int, ...]) -> torch.Tensor:
    """As core pads; what need not be padded it would copy."""
    is_whole = all(size % part == 0 for size, part in zip(x.shape[2:], patch, strict=True))
    return x if is_whole else pad_to_patch_size(x, patch)


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().to(CPU, torch.float32).contiguous().numpy()


def _width_of(model: ModelRef, text: Any) -> int:
    return int(model.resolve(pipeline.Silent()).configs[model.spec.denoiser.experts[0]][text.width_key])


def _check_width(model: ModelRef, context: torch.Tensor, width: int) -> None:
    if context.shape[2] != width:
        raise ValueError(
            f"{model.spec.title}: the prompt's states are {context.shape[2]} wide, and its network takes {width}. Load "
            "the text encoder of this model, with its type."
        )


def _whole_text(model: ModelRef, context: torch.Tensor) -> np.ndarray:
    """A text whose every token counts: its program has one length."""
    text = model.spec.text_encoders[0]
    if context.shape[1] != text.max_length:
        raise ValueError(
            f"{model.spec.title}: the prompt is {context.shape[1]} tokens long, and its program takes "
            f"{text.max_length}. Encode it with the model's text encoder, and shorten it if it is longer."
        )
    _check_width(model, context, _width_of(model, text))
    return _array(context)


def _padded_text(
    model: ModelRef, encoder: int, context: torch.Tensor | None, lengths: Sequence[int]
) -> dict[str, np.ndarray]:
    text = model.spec.text_encoders[encoder]
    if max(lengths) > text.max_length:
        raise ValueError(
            f"{model.spec.title}: the prompt is {max(lengths)} tokens long for its "
            f"{text.component.replace('_', ' ')}, and its program takes {text.max_length}. Shorten it."
        )
    width = _width_of(model, text)
    if context is not None and context.shape[1] == text.max_length:
        _check_width(model, context, width)
        return {text.name: _array(context), f"{text.name}_length": np.array(lengths, np.int32)}
    padded = np.zeros((len(lengths), text.max_length, width), np.float32)
    if context is not None:
        _check_width(model, context, width)
        used = min(context.shape[1], text.max_length)
        padded[:, :used] = _array(context[:, :used])
    return {text.name: padded, f"{text.name}_length": np.array(lengths, np.int32)}


def _lengths(model: ModelRef, given: Given, context: torch.Tensor, mask: torch.Tensor | None) -> Sequence[int]:
    told = given["options"].get(LENGTHS, {}).get("c_crossattn")
    if told or mask is None:
        return told or [context.shape[1]] * len(context)
    found = core_patches.ends(mask)
    if found is None:
        raise ValueError(
            f"{model.spec.title}: the prompt's attention_mask leaves out tokens before its end, which its network on "
            "the TPU does not. Encode the prompt with the model's text encoder."
        )
    return found


def _next_timestep(model: ModelRef, options: Mapping[str, Any]) -> float:
    """The timestep that a step goes to, which a mean flow is told; core finds it among the sampler's own."""
    sigmas, own = options.get("sample_sigmas"), options.get("sigmas")
    if not model.resolve(pipeline.Silent()).configs[model.spec.denoiser.experts[0]].get("use_meanflow"):
        return 0.0
    found = [] if sigmas is None or own is None else torch.where(own[0] == sigmas)[0].tolist()
    if sigmas is None or not found or found[0] + 1 >= len(sigmas):
        raise ValueError(
            f"{model.spec.title}: the sampler evaluates the network between its steps, and this distilled network must "
            "know which step follows. Use euler, or another sampler with one evaluation a step."
        )
    return 1000.0 * float(sigmas[found[0] + 1])


def _pictures(model: ModelRef, pictures: torch.Tensor | None, tokens: int) -> np.ndarray:
    if pictures is None:
        raise ValueError(
            f"{model.spec.title}: clip_vision_output is not connected, and this model looks at its pictures through "
            "CLIP. Connect CLIPVisionEncode to the node that prepares the picture."
        )
    if pictures.shape[1] != tokens:
        raise ValueError(
            f"{model.spec.title}: clip_vision_output has {pictures.shape[1]} tokens, and this model takes {tokens}. "
            "Encode as many pictures as it is for."
        )
    return _array(pictures)


def _one(model: ModelRef, values: torch.Tensor, what: str) -> float:
    first = values.flatten()[0]
    if not torch.all(values == first):
        raise ValueError(
            f"{model.spec.title}: frames or rows have different {what}, which its compiled program does not take. Use "
            "a mask that keeps the first frame, or none, and one guidance for all."
        )
    return float(first)


def _refuse_rest(model: ModelRef, given: Given, harmless: set[str]) -> None:
    for name, value in given.items():
        if value is not None and name not in harmless | {"options"}:
            raise ValueError(
                f"{model.spec.title}: a node adds {name} to the conditioning, which the compiled network has no input "
                "for. Remove that node, or load the model with ComfyUI's own loader."
            )
