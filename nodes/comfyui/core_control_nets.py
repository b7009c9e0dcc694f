"""Core's CONTROL_NET whose network runs on the TPU, compiled with the denoiser.

Core's own nodes apply it, and core's own code scales and encodes its image. Only the call of its network is replaced:
the sampler passes on hint and strength, and the denoiser's call computes both networks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import comfy.controlnet
import comfy.latent_formats
import torch

from ...tpu_runtime.checkpoints.controls import ControlFile, check_fits, read_control
from ...tpu_runtime.messages import compose
from ...tpu_runtime.model_spec import ControlInput
from ...tpu_runtime.models.common import core_inputs
from ...tpu_runtime.models.common.core_inputs import CoreNetwork

_FUN = "QwenImageFunControlNetModel"
# Classes of networks that core's ControlNets have.
_CLASSES = frozenset(("QwenImageControlNetModel", _FUN))


@dataclass(frozen=True, kw_only=True)
class ControlCall:
    """What a sampler passes to the denoiser instead of a ControlNet's result: files and inputs, in order."""

    files: tuple[ControlFile, ...]
    inputs: tuple[ControlInput, ...]


def load_control_net(path: str) -> "TPUControlNet":
    """Return core's CONTROL_NET of a file. Raises `CheckpointError` for a file of another kind."""
    file = read_control(path)
    if file.spec.component.class_name not in _CLASSES:
        raise ValueError(compose("control.is_a_model_patch", path=path, kind=file.spec.title))
    return TPUControlNet(file)


class TPUControlNet(comfy.controlnet.ControlNet):
    """Core's ControlNet without a torch network."""

    def __init__(self, file: ControlFile) -> None:
        self.file, self.channels = file, file.spec.hint_channels(file.config)
        self.is_fun = file.spec.component.class_name == _FUN
        super().__init__(
            compression_ratio=1, latent_format=comfy.latent_formats.Wan21(), extra_conds=[],
            concat_mask=self.channels > 16 and not self.is_fun,
        )  # fmt: skip
        # In place of the network: returns the hint that core has made.
        self.control_model = _Recorder()

    def copy(self) -> "TPUControlNet":
        """Return a copy, as core's nodes make it before they change one."""
        copied = TPUControlNet(self.file)
        self.copy_to(copied)
        return copied

    def get_models(self) -> list[Any]:
        """Return the models of the ControlNets before this one; this one has none that moves."""
        return comfy.controlnet.ControlBase.get_models(self)

    def pre_run(self, model: Any, percent_to_timestep_function: Any) -> None:
        """Refuse a MODEL of core's own loader, which cannot use what `get_control` returns."""
        if not hasattr(model, "tpu_texts"):
            raise ValueError(compose("control.model_not_on_tpu", path=self.file.path, kind=self.file.spec.title))
        super().pre_run(model, percent_to_timestep_function)

    def get_control(self, x_noisy: torch.Tensor, t: torch.Tensor, *args: Any) -> ControlCall | None:
        """Return the inputs of this and of the previous networks.

        Outside of its range of timesteps a network has strength 0, so that all steps have one program.
        x_noisy: `[rows, channels, (1,) height, width]`. t: sigmas `[rows]`.
        """
        known, strength = self.timestep_range, self.strength
        if known is not None and (t[0] > known[0] or t[0] < known[1]):
            self.timestep_range, self.strength = None, 0.0
        try:
            return super().get_control(x_noisy, t, *args)
        finally:
            self.timestep_range, self.strength = known, strength

    def control_merge(self, control: torch.Tensor, control_prev: ControlCall | None, output_dtype: Any) -> ControlCall:
        """Return the inputs of the previous networks and of this one.

        control: its hint `[rows, channels, 1, height, width]`.
        """
        row = control[:1] if torch.equal(control, control[:1].expand_as(control)) else control
        strength = float(self.strength)
        if self.is_fun:  # core has zeros for a mask and an image to be inpainted, and takes the root of the strength
            height, width = row.shape[-2:]
            missing = self.channels - row.shape[1]
            row = torch.nn.functional.pad(row, (0, width % 2, 0, height % 2, 0, 0, 0, missing))
            strength = max(strength, 0.0) ** 0.5
        padded = core_inputs.pad_to_patches(row, (1, 2, 2))
        entry = ControlInput(hint=core_inputs.to_array(padded), strength=strength)
        before = control_prev or ControlCall(files=(), inputs=())
        return ControlCall(files=(*before.files, self.file), inputs=(*before.inputs, entry))


class _Recorder:
    """Stands for core's network of a ControlNet, and returns its hint."""

    dtype = torch.float32

    def __call__(self, *, hint: torch.Tensor, **given: Any) -> torch.Tensor:
        return hint


def check_controls(conds: Sequence[Sequence[Mapping[str, Any]] | None], network: CoreNetwork, refusal: str) -> None:
    """Raise ValueError for ControlNets that are not of a supported denoiser, before they read an image.

    conds: core's conditionings. network: the denoiser. refusal: of core's own ControlNets.
    """
    for control in {
        id(control): control for row in conds for cond in row or () for control in _chain(cond.get("control"))
    }.values():
        if not isinstance(control, TPUControlNet):
            raise ValueError(refusal)
        check_fits(control.file, network.spec, network.config)


def _chain(control: Any) -> Iterator[Any]:
    while control is not None:
        yield control
        control = control.previous_controlnet


def check_mask(mask: torch.Tensor | None, network: CoreNetwork) -> None:
    """Raise ValueError for a mask of the text `[rows, tokens]` that leaves out tokens: core's ControlNets ignore it."""
    if mask is not None and not bool(mask.all()):
        count = int((mask == 0).sum())
        raise ValueError(compose("control.text_mask_unsupported", title=network.spec.title, count=count))
