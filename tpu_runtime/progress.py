"""What a running stage tells its host (ComfyUI, a terminal) and asks of it."""

from typing import Protocol


class Progress(Protocol):
    """A host's view of a running stage; each host implements it."""

    def text(self, message: str) -> None:
        """Shows one line of status."""

    def step(self, done: int, total: int, unit: str) -> None:
        """Moves the bar. `unit` says what is counted: "step", "chunk", "tensor", "MiB"."""

    def check_cancelled(self) -> None:
        """Raises the host's own exception if the user cancelled."""


class Silent:
    """Reports to nobody and is never cancelled."""

    def text(self, message: str) -> None:
        pass

    def step(self, done: int, total: int, unit: str) -> None:
        pass

    def check_cancelled(self) -> None:
        pass
