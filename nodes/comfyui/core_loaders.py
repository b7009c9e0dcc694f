"""Loaders one for one with core's: the same widgets and outputs, so that a swap changes a node's type and nothing else.

What they load runs on the TPU behind core's own nodes (docs/core_nodes.md).
"""

import importlib
from collections.abc import Callable
from typing import Any

from ...tpu_runtime.pipeline import QUALITIES, ModelRef
from ..declare import Input, Node, Output, by_id
from ..model import CLIP_TYPES, quality_of
from . import core_model, core_text_and_vae
from .host import ComfyHost, path_of

# ComfyUI's own nodes: its module is called as a folder of this pack.
core = importlib.import_module("nodes")
_AUTO = "auto"  # what COMFYUI_TPU_PRECISION says, or bfloat16
_MODEL = Output(name="MODEL", type="MODEL", tooltip="For KSampler and alike.")
_CLIP = Output(name="CLIP", type="CLIP", tooltip="For CLIPTextEncode and alike.")
_VAE = Output(name="VAE", type="VAE", tooltip="For VAEDecode, VAEEncode and alike.")
_CLIP_VISION = Output(name="CLIP_VISION", type="CLIP_VISION", tooltip="For CLIPVisionEncode.")


def _unet(host: ComfyHost, *, unet_name: str, weight_dtype: str) -> tuple:
    path = path_of("diffusion_models", unet_name)
    return (core_model.model(path, _AUTO, ComfyHost, quality_of(weight_dtype)),)


def _clip(host: ComfyHost, *, type: str, device: str, **names: str) -> tuple:
    paths = [path_of("text_encoders", name) for name in names.values()]
    return (core_text_and_vae.clip(paths, type, _AUTO, ComfyHost),)


def _vae(host: ComfyHost, *, vae_name: str) -> tuple:
    return (core_text_and_vae.vae(path_of("vae", vae_name), _AUTO, ComfyHost),)


def _checkpoint(host: ComfyHost, *, ckpt_name: str) -> tuple:
    path = path_of("checkpoints", ckpt_name)
    return (
        core_model.model(path, _AUTO, ComfyHost),
        core_text_and_vae.clip([path], core_text_and_vae.type_of(path), _AUTO, ComfyHost),
        core_text_and_vae.vae(path, _AUTO, ComfyHost),
    )


def _clip_vision(host: ComfyHost, *, clip_name: str) -> tuple:
    return (core_text_and_vae.clip_vision(path_of("clip_vision", clip_name), _AUTO, ComfyHost),)


def objects(model: ModelRef) -> tuple[Any, ...]:
    """MODEL, CLIP, VAE and MODEL of the second denoiser of a model, each made when it is first used."""
    return (
        core_model.later(model, 0, ComfyHost),
        core_text_and_vae.later_clip(model, ComfyHost),
        core_text_and_vae.later_vae(model, ComfyHost),
        core_model.later(model, 1, ComfyHost),
    )


def _loader(name: str, title: str, run: Callable[..., tuple], *more: Input | Output, description: str) -> Node:
    return Node(
        id=name,
        title=title,
        category="TPU/ComfyUI's own nodes",
        description=description,
        inputs=tuple(one for one in more if isinstance(one, Input)),
        outputs=tuple(one for one in more if isinstance(one, Output)),
        run=run,
    )


def _file(name: str, folder: str, tooltip: str) -> Input:
    return Input(name=name, type="COMBO", files=folder, tooltip=tooltip)


def _like(loader: Any, name: str, tooltip: str, *more: str, **how: Any) -> Input:
    """The widget of core's loader, with `more` choices."""
    known = loader.INPUT_TYPES()
    options = {**known["required"], **known.get("optional", {})}[name][0]
    return Input(name=name, type="COMBO", options=(*options, *more), tooltip=tooltip, **how)


_TYPE = f"On the TPU run {', '.join(CLIP_TYPES)}."
_DEVICE = "As in ComfyUI's own loader; the text encoder runs on the TPU, whatever is chosen here."

LOADERS = by_id(
    (
        _loader(
            "TPUUNETLoader",
            "Load Diffusion Model (TPU)",
            _unet,
            _file("unet_name", "diffusion_models", "The file of the diffusion model."),
            _like(
                core.UNETLoader,
                "weight_dtype",
                "The TPU keeps weights in bfloat16, whatever is chosen here, but for int8: linear layers and attention "
                "are then faster, with a result that is close. int8+sparse, for Wan and HunyuanVideo, also leaves "
                "out keys of attention at steps in the middle, and the video is another.",
                *QUALITIES[1:],
                advanced=True,
            ),
            _MODEL,
            description="As Load Diffusion Model, for a model that runs on the TPU: samplers, guiders, schedulers and "
            "LoRA loaders of ComfyUI and of packs for samplers work with it.",
        ),
        _loader(
            "TPUCLIPLoader",
            "Load CLIP (TPU)",
            _clip,
            _file("clip_name", "text_encoders", "The file of the text encoder."),
            _like(core.CLIPLoader, "type", _TYPE),
            _like(core.CLIPLoader, "device", _DEVICE, optional=True, advanced=True),
            _CLIP,
            description="As Load CLIP, for a text encoder that runs on the TPU. Prompt weights and templates are "
            "ComfyUI's own.",
        ),
        _loader(
            "TPUDualCLIPLoader",
            "Load Two CLIPs (TPU)",
            _clip,
            _file("clip_name1", "text_encoders", "The file of one text encoder."),
            _file("clip_name2", "text_encoders", "The file of the other."),
            _like(core.DualCLIPLoader, "type", _TYPE),
            _like(core.DualCLIPLoader, "device", _DEVICE, optional=True, advanced=True),
            _CLIP,
            description="As DualCLIPLoader, for two text encoders that run on the TPU.",
        ),
        _loader(
            "TPUVAELoader",
            "Load VAE (TPU)",
            _vae,
            _file("vae_name", "vae", "The file of the VAE."),
            _VAE,
            description="As Load VAE, for a VAE that runs on the TPU, or a light decoder such as taew2_1. It needs no "
            "tiles: the tiled nodes do as the others do.",
        ),
        _loader(
            "TPUCheckpointLoader",
            "Load Checkpoint (TPU)",
            _checkpoint,
            _file("ckpt_name", "checkpoints", "The file of the checkpoint."),
            _MODEL,
            _CLIP,
            _VAE,
            description="As Load Checkpoint, for a file that holds a diffusion model, its text encoder and its VAE, "
            "which run on the TPU.",
        ),
        _loader(
            "TPUCLIPVisionLoader",
            "Load CLIP Vision (TPU)",
            _clip_vision,
            _file("clip_name", "clip_vision", "The file of the image encoder."),
            _CLIP_VISION,
            description="As Load CLIP Vision, for the image encoder of Wan 2.1 or HunyuanVideo 1.5, which runs on the "
            "TPU.",
        ),
    )
)
