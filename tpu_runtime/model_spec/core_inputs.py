"""A family in ComfyUI's own nodes ("core") as data: core's classes, and the conversion of calls to its networks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .control import ControlInput

if TYPE_CHECKING:
    import numpy as np
    import torch

# The keywords of a call to core's network; `options` are its `transformer_options`.
Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PredictionRequest:
    """A request for a denoiser's prediction for rows of a sample, all at one timestep."""

    sample: "torch.Tensor"  # [rows, channels, (frames,) height, width] float32
    timestep: float  # in the denoiser's scale
    # of `model_spec.Forward` by name, 1 or `rows` rows each; optional ones may be absent
    inputs: "Mapping[str, np.ndarray]"
    expert: int = 0  # index of the denoiser
    controls: tuple[ControlInput, ...] = ()  # of the networks of `ModelRef.controls`, in the same order


@dataclass(frozen=True, kw_only=True)
class CoreClip:
    """Core's text encoder and tokenizer, by their paths in `comfy.text_encoders`."""

    encoder: str  # a function that returns the class
    tokenizer: str
    options: Mapping[str, str] = field(default_factory=dict)  # of the function
    needs_tokenizer: bool = False  # whether core has no tokenizer of its own, so that the encoder's file must have it


@dataclass(frozen=True, kw_only=True)
class CoreVision:
    """Core's image encoder."""

    config: str  # core's config file
    states: str  # attribute of its output with the states that the denoiser takes
    width_key: str  # key of their width in the denoiser's config


def _refuse(network: Any, given: Arguments) -> PredictionRequest:
    raise NotImplementedError("the family has no nodes in ComfyUI")


@dataclass(frozen=True, kw_only=True)
class CoreInputs:
    """A family in core's nodes; the default has none."""

    model_classes: tuple[str, ...] = ()  # of `comfy.model_base`
    clip_type: str = ""  # the `type` of core's loaders of text encoders
    clip: CoreClip = CoreClip(encoder="", tokenizer="")
    vision: CoreVision | None = None
    # (`models.common.core_inputs.CoreNetwork`, arguments) -> call; removes what it uses from the arguments
    convert: Callable[[Any, Arguments], PredictionRequest] = _refuse
    timestep: str = "timestep"  # name of an argument
    # Core's names of texts that have their own lengths. Core does not join rows of different lengths: they are padded.
    padded_texts: tuple[str, ...] = ()
    more_texts: tuple[str, ...] = ()  # entries of a conditioning, of the text encoders after the first
    takes_guidance: bool = False  # whether the scale is an argument
    takes_references: bool = False  # whether latents of reference images are arguments
    always_has_condition: bool = False  # whether a mask and an image's latents are channels of each call
    condition_may_have_mask: bool = False  # whether an image's latents may come with the channels of the mask
