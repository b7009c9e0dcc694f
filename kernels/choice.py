"""The choice between a kernel and its reference.

A kernel that is called by name raises what it refuses. Where the choice is automatic, XLA computes what the kernel
refuses, and the reasons are logged once.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

log = logging.getLogger(__name__)

NO_TPU = "the program is not for a TPU"
SWITCHED_OFF = "it is switched off on this machine"


@dataclass(frozen=True, kw_only=True)
class Rungs:
    """How far this machine follows each kernel, by the names in `names.KERNELS`: `off` are computed by XLA, `small`
    take tiles for half of the on-chip memory. Both are sorted, so that equal rungs have equal keys.
    """

    off: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


_ALL_TAKEN = Rungs()
_RUNGS: ContextVar[Rungs] = ContextVar("rungs", default=_ALL_TAKEN)


@contextlib.contextmanager
def on(rungs: Rungs) -> Iterator[None]:
    """Within it kernels are chosen, and their tiles, as `rungs` says."""
    token = _RUNGS.set(rungs)
    try:
        yield
    finally:
        _RUNGS.reset(token)


def is_small(kernel: str) -> bool:
    """Whether the kernel takes tiles for half of the on-chip memory."""
    return kernel in _RUNGS.get().small


@dataclass(frozen=True, kw_only=True)
class KernelRefusal:
    """Why `kernel` does not compute a call; false, and without reasons, where it does."""

    kernel: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kernel in _RUNGS.get().off:
            object.__setattr__(self, "reasons", (*self.reasons, SWITCHED_OFF))

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
