"""A host whose user may cancel."""

from comfyui_tpu.tpu_runtime.progress import Silent


class Cancelled(Exception):
    pass


class Host(Silent):
    """`said` is what it was told; once `is_cancelled`, whoever asks it ends with `Cancelled`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.is_cancelled = False

    def text(self, message: str) -> None:
        self.said.append(message)

    def check_cancelled(self) -> None:
        if self.is_cancelled:
            raise Cancelled
