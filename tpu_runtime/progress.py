"""What a running stage tells its host (ComfyUI, a terminal) and asks of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What the result looks like so far. `latents()` fetches the estimate from the devices, `[1, channels, ...]`
    float32 in the denoiser's scale; `latent_format` is ComfyUI's name for that layout.
    """

    latent_format: str
    latents: "Callable[[], torch.Tensor]"


class Progress(Protocol):
    """A host's view of a running stage; each host implements it."""

    def text(self, message: str) -> None:
        """Shows one line of status."""

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        """Moves the bar. `unit` says what is counted: "step", "chunk", "MiB"."""

    def check_cancelled(self) -> None:
        """Raises the host's own exception if the user cancelled."""


class Silent:
    """Reports to nobody and is never cancelled."""

    def text(self, message: str) -> None:
        pass

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        pass

    def check_cancelled(self) -> None:
        pass
