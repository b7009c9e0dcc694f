"""Control networks, which add to the image tokens of a denoiser: ControlNets and model patches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .component import Component, Json

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class ControlSpec:
    """A kind of control network of a family, each in a file of its own."""

    title: str  # for messages
    component: Component
    # from the config: channels of a hint
    hint_channels: Callable[[Json], int]
    # from a file's tensors by name, and a function that reads one: config values that no shape determines
    read_values: Callable[[Mapping[str, Any], Callable[[Any], Any]], Json] = lambda tensors, read: {}
    # from the configs of the denoiser and of this network: why they do not run together, or None
    problem: Callable[[Json, Json], "str | None"] = lambda denoiser, control: None


@dataclass(frozen=True, kw_only=True)
class ControlInput:
    """The input of one control network, for one call."""

    hint: "np.ndarray"  # [1 or rows, channels, (1,) height, width] float32: latents of images, and masks
    strength: float  # a factor of the addition
