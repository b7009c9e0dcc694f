"""Counterparts of core's loaders with the same widgets and outputs, so that a swap only changes a node's type.

Their models run on the TPU, with core's own nodes (docs/core_nodes.md).
"""

import importlib
from collections.abc import Callable

from ...tpu_runtime.checkpoints.model_ref import ModelRef
from ...tpu_runtime.model_spec import APPROXIMATE, describe_qualities
from ..declare import Input, Node, Output, Value, by_id
from ..model import CLIP_TYPES, parse_quality
from . import core_control_nets, core_control_patches, core_model, core_text_and_vae
from .host import ComfyContext, resolve_path

# ComfyUI's own nodes. Imported by name, because a folder of this pack has the same name.
core = importlib.import_module("nodes")
_AUTO = "auto"  # precision: COMFYUI_TPU_PRECISION, or bfloat16
_MODEL = Output(name="MODEL", type="MODEL", tooltip="For KSampler and other ComfyUI samplers.")
_CLIP = Output(name="CLIP", type="CLIP", tooltip="For CLIPTextEncode and similar nodes.")
_VAE = Output(name="VAE", type="VAE", tooltip="For VAEDecode, VAEEncode and similar nodes.")
_MODEL_PATCH = Output(
    name="MODEL_PATCH", type="MODEL_PATCH", tooltip="For ZImageFunControlnet and QwenImageDiffsynthControlnet."
)
_CONTROL_NET = Output(name="CONTROL_NET", type="CONTROL_NET", tooltip="For ControlNetApplyAdvanced and similar nodes.")
_CLIP_VISION = Output(name="CLIP_VISION", type="CLIP_VISION", tooltip="For CLIPVisionEncode.")


def _unet(host: ComfyContext, *, unet_name: str, weight_dtype: str) -> tuple:
    path = resolve_path("diffusion_models", unet_name)
    return (core_model.load_model(path, _AUTO, ComfyContext, parse_quality(weight_dtype)),)


def _clip(host: ComfyContext, *, type: str, device: str, **names: str) -> tuple:
    paths = [resolve_path("text_encoders", name) for name in names.values()]
    return (core_text_and_vae.load_clip(paths, type, _AUTO, ComfyContext),)


def _vae(host: ComfyContext, *, vae_name: str) -> tuple:
    return (core_text_and_vae.load_vae(resolve_path("vae", vae_name), _AUTO, ComfyContext),)


def _checkpoint(host: ComfyContext, *, ckpt_name: str) -> tuple:
    path = resolve_path("checkpoints", ckpt_name)
    return (
        core_model.load_model(path, _AUTO, ComfyContext),
        core_text_and_vae.load_clip([path], core_text_and_vae.detect_clip_type(path), _AUTO, ComfyContext),
        core_text_and_vae.load_vae(path, _AUTO, ComfyContext),
    )


def _clip_vision(host: ComfyContext, *, clip_name: str) -> tuple:
    return (core_text_and_vae.load_clip_vision(resolve_path("clip_vision", clip_name), _AUTO, ComfyContext),)


def _model_patch(host: ComfyContext, *, name: str) -> tuple:
    return (core_control_patches.load_patch(resolve_path("model_patches", name)),)


def _control_net(host: ComfyContext, *, control_net_name: str) -> tuple:
    return (core_control_nets.load_control_net(resolve_path("controlnet", control_net_name)),)


def make_core_objects(model: ModelRef) -> tuple[Value, ...]:
    """Return MODEL, CLIP, VAE and the second denoiser's MODEL of a model, each created on first use."""
    return (
        core_model.defer_model(model, 0, ComfyContext),
        core_text_and_vae.defer_clip(model, ComfyContext),
        core_text_and_vae.defer_vae(model, ComfyContext),
        core_model.defer_model(model, 1, ComfyContext),
    )


def _loader(name: str, title: str, run: Callable[..., tuple], *more: Input | Output, description: str) -> Node:
    return Node(
        id=name,
        title=title,
        category="TPU/ComfyUI's own nodes",
        description=description,
        inputs=tuple(entry for entry in more if isinstance(entry, Input)),
        outputs=tuple(entry for entry in more if isinstance(entry, Output)),
        run=run,
    )


def _file(name: str, folder: str, tooltip: str) -> Input:
    return Input(name=name, type="COMBO", files=folder, tooltip=tooltip)


def _like(loader: type, name: str, tooltip: str, *more: str, **options: Value) -> Input:
    """Return the widget of core's loader, with `more` choices."""
    known = loader.INPUT_TYPES()  # type: ignore[attr-defined]
    choices = {**known["required"], **known.get("optional", {})}[name][0]
    return Input(name=name, type="COMBO", options=(*choices, *more), tooltip=tooltip, **options)


_TYPE = f"Type of the text encoder. The TPU supports {', '.join(CLIP_TYPES)}."
_DEVICE = "Ignored: the text encoder always runs on the TPU. Kept for compatibility with ComfyUI's own loader."

LOADERS = by_id(
    (
        _loader(
            "TPUUNETLoader",
            "Load Diffusion Model (TPU)",
            _unet,
            _file("unet_name", "diffusion_models", "File of the diffusion model."),
            _like(
                core.UNETLoader,
                "weight_dtype",
                "A quality of the denoiser; other choices keep weights in bfloat16: "
                f"{describe_qualities(APPROXIMATE)}.",
                *(quality.value for quality in APPROXIMATE),
                advanced=True,
            ),
            _MODEL,
            description="Load Diffusion Model for the TPU. Works with the samplers, guiders, schedulers and LoRA "
            "loaders of ComfyUI, and with sampler packs.",
        ),
        _loader(
            "TPUCLIPLoader",
            "Load CLIP (TPU)",
            _clip,
            _file("clip_name", "text_encoders", "File of the text encoder."),
            _like(core.CLIPLoader, "type", _TYPE),
            _like(core.CLIPLoader, "device", _DEVICE, optional=True, advanced=True),
            _CLIP,
            description="Load CLIP for the TPU. Prompt weights and templates are ComfyUI's own.",
        ),
        _loader(
            "TPUDualCLIPLoader",
            "Load Two CLIPs (TPU)",
            _clip,
            _file("clip_name1", "text_encoders", "File of the first text encoder."),
            _file("clip_name2", "text_encoders", "File of the second text encoder."),
            _like(core.DualCLIPLoader, "type", _TYPE),
            _like(core.DualCLIPLoader, "device", _DEVICE, optional=True, advanced=True),
            _CLIP,
            description="DualCLIPLoader for the TPU.",
        ),
        _loader(
            "TPUVAELoader",
            "Load VAE (TPU)",
            _vae,
            _file("vae_name", "vae", "File of the VAE."),
            _VAE,
            description="Load VAE for the TPU, also for light decoders such as taew2_1. Tiles are not needed: the "
            "tiled nodes decode without them.",
        ),
        _loader(
            "TPUCheckpointLoader",
            "Load Checkpoint (TPU)",
            _checkpoint,
            _file("ckpt_name", "checkpoints", "File of the checkpoint."),
            _MODEL,
            _CLIP,
            _VAE,
            description="Load Checkpoint for the TPU, for a file that holds a diffusion model, its text encoder and "
            "its VAE.",
        ),
        _loader(
            "TPUCLIPVisionLoader",
            "Load CLIP Vision (TPU)",
            _clip_vision,
            _file("clip_name", "clip_vision", "File of the image encoder."),
            _CLIP_VISION,
            description="Load CLIP Vision for the TPU, for the image encoder of Wan 2.1 or HunyuanVideo 1.5.",
        ),
        _loader(
            "TPUModelPatchLoader",
            "Load Model Patch (TPU)",
            _model_patch,
            _file("name", "model_patches", "File of the model patch."),
            _MODEL_PATCH,
            description="Load Model Patch for the TPU, for Z-Image's Fun and Qwen-Image's DiffSynth ControlNets. They "
            "run compiled with the diffusion model.",
        ),
        _loader(
            "TPUControlNetLoader",
            "Load ControlNet Model (TPU)",
            _control_net,
            _file("control_net_name", "controlnet", "File of the ControlNet."),
            _CONTROL_NET,
            description="Load ControlNet Model for the TPU, for Qwen-Image's InstantX and Fun ControlNets. They run "
            "compiled with the diffusion model.",
        ),
    )
)
