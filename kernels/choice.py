"""The choice between a kernel and its reference.

A kernel that is called by name raises what it refuses. Where the choice is automatic, XLA computes what the kernel
refuses, and the reasons are logged once.
"""

import functools
import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

NO_TPU = "the program is not for a TPU"


@dataclass(frozen=True, kw_only=True)
class KernelRefusal:
    """Why `kernel` does not compute a call; false, and without reasons, where it does."""

    kernel: str
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasons)

    def __str__(self) -> str:
        return f"The kernel {self.kernel} does not compute this call: {'; '.join(self.reasons)}."

    def check(self) -> None:
        """Raises `NotImplementedError` with the reasons, if there are any."""
        if self:
            raise NotImplementedError(str(self))


def accepted(refusal: KernelRefusal) -> bool:
    """Whether an automatic choice takes the kernel. Reasons against it are logged, but for a program for no TPU."""
    if refusal and NO_TPU not in refusal.reasons:
        _warn_once(refusal)
    return not refusal


@functools.cache
def _warn_once(refusal: KernelRefusal) -> None:
    log.warning("%s XLA computes it.", refusal)
