"""Interface between a running stage and the application (ComfyUI, a terminal), and background threads."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


# Start of a stage's last status line.
DURATION_PREFIX = "Took"
# Attribute of log records that the application also shows to the user.
SHOWN_TO_USER = "is_told"


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A preview of the result."""

    latent_format: str  # ComfyUI's name for the layout of the sample
    # fetches the estimate [1, channels, ...] float32, in the denoiser's scale, from the devices
    sample: "Callable[[], torch.Tensor]"
    # fetches the middle frame [height, width, 3] in 0..1; None without a light decoder
    picture: "Callable[[], torch.Tensor] | None" = None


class Progress(Protocol):
    """The progress of a running stage; implemented by each application."""

    def text(self, message: str) -> None:
        """Show one line of status."""

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        """Move the progress bar.

        `unit` is the unit of `done` and `total`: "step", "chunk", "MiB"; `preview` is of this step, or None.
        """

    def check_cancelled(self) -> None:
        """Raise the application's own exception if the user cancelled."""


class SilentProgress:
    """A progress that reports nothing and is never cancelled."""

    def text(self, message: str) -> None:
        pass

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        pass

    def check_cancelled(self) -> None:
        pass


def run_in_daemon_thread(work: Callable[[], object], name: str) -> Future:
    """Run `work` in a daemon thread, and return its future.

    Unlike an executor's thread, it cannot keep the process from ending.
    """
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again where the future's result is read
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
