"""Loaders one for one with core's: the same widgets and outputs, so that a swap changes a node's type and nothing else.

What they load runs on the TPU behind core's own nodes (docs/core_nodes.md).
"""

import importlib
from collections.abc import Sequence
from typing import Any

from ...tpu_runtime.pipeline import QUALITIES, ModelRef
from ..model import CLIP_TYPES, quality_of
from . import core_model, core_text_and_vae, memory
from .announce import announce
from .host import ComfyHost, path_of, weights

try:
    from comfy_api.latest import io
except ImportError:
    from comfy_api.v0_0_2 import io

# ComfyUI's own nodes: its module is called as a folder of this pack.
core = importlib.import_module("nodes")
_CATEGORY = "TPU/ComfyUI's own nodes"
_AUTO = "auto"  # what COMFYUI_TPU_PRECISION says, or bfloat16


def _options(loader: Any, name: str) -> list[str]:
    """The choices of a widget of core's loader."""
    known = loader.INPUT_TYPES()
    return list({**known["required"], **known.get("optional", {})}[name][0])


def _begin(node: Any) -> None:
    """What every loader does first."""
    memory.register()
    announce(node.hidden and node.hidden.prompt, ComfyHost())


def _schema(node_id: str, title: str, description: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> io.Schema:
    return io.Schema(
        node_id=node_id,
        display_name=title,
        category=_CATEGORY,
        description=description,
        inputs=list(inputs),
        outputs=list(outputs),
        hidden=[io.Hidden.prompt],
    )


def _file(name: str, *folders: str, tooltip: str) -> Any:
    return io.Combo.Input(name, options=weights(*folders), tooltip=tooltip)


class TPUUNETLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "TPUUNETLoader",
            "Load Diffusion Model (TPU)",
            "As Load Diffusion Model, for a model that runs on the TPU: samplers, guiders, schedulers and LoRA loaders "
            "of ComfyUI and of packs for samplers work with it.",
            (
                _file("unet_name", "diffusion_models", tooltip="The file of the diffusion model."),
                io.Combo.Input(
                    "weight_dtype",
                    options=[*_options(core.UNETLoader, "weight_dtype"), *QUALITIES[1:]],
                    advanced=True,
                    tooltip="The TPU keeps weights in bfloat16, whatever is chosen here, but for int8: linear layers "
                    "and attention are then faster, with a result that is close. int8+sparse, for Wan, also leaves out "
                    "keys of attention at steps in the middle, and the video is another.",
                ),
            ),
            (io.Model.Output(tooltip="For KSampler and alike."),),
        )

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str = "default") -> io.NodeOutput:
        _begin(cls)
        path = path_of("diffusion_models", unet_name)
        return io.NodeOutput(core_model.model(path, _AUTO, ComfyHost, quality_of(weight_dtype)))


class TPUCLIPLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "TPUCLIPLoader",
            "Load CLIP (TPU)",
            "As Load CLIP, for a text encoder that runs on the TPU. Prompt weights and templates are ComfyUI's own.",
            (
                _file("clip_name", "text_encoders", tooltip="The file of the text encoder."),
                _type(core.CLIPLoader),
                _device(core.CLIPLoader),
            ),
            (io.Clip.Output(tooltip="For CLIPTextEncode and alike."),),
        )

    @classmethod
    def execute(cls, clip_name: str, type: str = "wan", device: str = "default") -> io.NodeOutput:
        _begin(cls)
        return io.NodeOutput(core_text_and_vae.clip([path_of("text_encoders", clip_name)], type, _AUTO, ComfyHost))


class TPUDualCLIPLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "TPUDualCLIPLoader",
            "Load Two CLIPs (TPU)",
            "As DualCLIPLoader, for two text encoders that run on the TPU.",
            (
                _file("clip_name1", "text_encoders", tooltip="The file of one text encoder."),
                _file("clip_name2", "text_encoders", tooltip="The file of the other."),
                _type(core.DualCLIPLoader),
                _device(core.DualCLIPLoader),
            ),
            (io.Clip.Output(tooltip="For CLIPTextEncode and alike."),),
        )

    @classmethod
    def execute(cls, clip_name1: str, clip_name2: str, type: str, device: str = "default") -> io.NodeOutput:
        _begin(cls)
        paths = [path_of("text_encoders", name) for name in (clip_name1, clip_name2)]
        return io.NodeOutput(core_text_and_vae.clip(paths, type, _AUTO, ComfyHost))


def _type(loader: Any) -> Any:
    return io.Combo.Input("type", options=_options(loader, "type"), tooltip=f"On the TPU run {', '.join(CLIP_TYPES)}.")


def _device(loader: Any) -> Any:
    return io.Combo.Input(
        "device",
        options=_options(loader, "device"),
        optional=True,
        advanced=True,
        tooltip="As in ComfyUI's own loader; the text encoder runs on the TPU, whatever is chosen here.",
    )


class TPUVAELoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "TPUVAELoader",
            "Load VAE (TPU)",
            "As Load VAE, for a VAE that runs on the TPU, or a light decoder such as taew2_1. It needs no tiles: the "
            "tiled nodes do as the others do.",
            (_file("vae_name", "vae", tooltip="The file of the VAE."),),
            (io.Vae.Output(tooltip="For VAEDecode, VAEEncode and alike."),),
        )

    @classmethod
    def execute(cls, vae_name: str) -> io.NodeOutput:
        _begin(cls)
        return io.NodeOutput(core_text_and_vae.vae(path_of("vae", vae_name), _AUTO, ComfyHost))


class TPUCheckpointLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "TPUCheckpointLoader",
            "Load Checkpoint (TPU)",
            "As Load Checkpoint, for a file that holds a diffusion model, its text encoder and its VAE, which run on "
            "the TPU.",
            (_file("ckpt_name", "checkpoints", tooltip="The file of the checkpoint."),),
            (
                io.Model.Output(tooltip="For KSampler and alike."),
                io.Clip.Output(tooltip="For CLIPTextEncode and alike."),
                io.Vae.Output(tooltip="For VAEDecode, VAEEncode and alike."),
            ),
        )

    @classmethod
    def execute(cls, ckpt_name: str) -> io.NodeOutput:
        _begin(cls)
        path = path_of("checkpoints", ckpt_name)
        return io.NodeOutput(
            core_model.model(path, _AUTO, ComfyHost),
            core_text_and_vae.clip([path], core_text_and_vae.type_of(path), _AUTO, ComfyHost),
            core_text_and_vae.vae(path, _AUTO, ComfyHost),
        )


class TPUCLIPVisionLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return _schema(
            "TPUCLIPVisionLoader",
            "Load CLIP Vision (TPU)",
            "As Load CLIP Vision, for the image encoder of Wan 2.1 or HunyuanVideo 1.5, which runs on the TPU.",
            (_file("clip_name", "clip_vision", tooltip="The file of the image encoder."),),
            (io.ClipVision.Output(tooltip="For CLIPVisionEncode."),),
        )

    @classmethod
    def execute(cls, clip_name: str) -> io.NodeOutput:
        _begin(cls)
        return io.NodeOutput(core_text_and_vae.clip_vision(path_of("clip_vision", clip_name), _AUTO, ComfyHost))


def objects(model: ModelRef) -> tuple[Any, ...]:
    """MODEL, CLIP, VAE and MODEL of the second denoiser of a model, each made when it is first used."""
    return (
        core_model.later(model, 0, ComfyHost),
        core_text_and_vae.later_clip(model, ComfyHost),
        core_text_and_vae.later_vae(model, ComfyHost),
        core_model.later(model, 1, ComfyHost),
    )


CLASSES: tuple[type[io.ComfyNode], ...] = (
    TPUUNETLoader,
    TPUCLIPLoader,
    TPUDualCLIPLoader,
    TPUVAELoader,
    TPUCheckpointLoader,
    TPUCLIPVisionLoader,
)
