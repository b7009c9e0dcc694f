"""What a running stage tells its host (ComfyUI, a terminal) and asks of it, and work next to it."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


# How the line begins with which a stage ends.
TOOK = "Took"
# Marks a record of the log that the host is told too.
TOLD = "is_told"


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What the result looks like so far. `sample()` fetches the estimate from the devices, `[1, channels, ...]`
    float32 in the denoiser's scale; `latent_format` is ComfyUI's name for that layout. `picture()`, where the model has
    a light decoder, fetches its middle frame `[height, width, 3]` in 0..1.
    """

    latent_format: str
    sample: "Callable[[], torch.Tensor]"
    picture: "Callable[[], torch.Tensor] | None" = None


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


def in_daemon(work: Callable[[], Any], name: str) -> Future:
    """Does `work` in a thread of its own, which unlike an executor's cannot keep the process from ending."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # the future hands it on to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
