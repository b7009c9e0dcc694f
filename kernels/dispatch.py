"""Dispatch between a kernel and its reference.

A kernel that is called directly raises its reasons for not computing a call. Where the choice is automatic, XLA
computes such a call, and the reasons are logged once.
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
class KernelFallbacks:
    """Fallbacks of the kernels on one machine, by the names in `names.KERNELS`. Equal fallbacks have equal hashes."""

    off: tuple[str, ...] = ()  # kernels that XLA replaces, sorted
    small: tuple[str, ...] = ()  # kernels that use tiles for half of VMEM, sorted


_NO_FALLBACKS = KernelFallbacks()
_RUNGS: ContextVar[KernelFallbacks] = ContextVar("rungs", default=_NO_FALLBACKS)


@contextlib.contextmanager
def use_fallbacks(rungs: KernelFallbacks) -> Iterator[None]:
    """Choose kernels and their tiles by `rungs` inside the context."""
    token = _RUNGS.set(rungs)
    try:
        yield
    finally:
        _RUNGS.reset(token)


def uses_small_tiles(kernel: str) -> bool:
    """Return whether the kernel uses tiles for half of VMEM."""
    return kernel in _RUNGS.get().small


@dataclass(frozen=True, kw_only=True)
class KernelUnsupported:
    """Reasons why `kernel` cannot compute a call. False, and without reasons, if it can."""

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
        """Raise `NotImplementedError` with the reasons, if there are any."""
        if self:
            raise NotImplementedError(str(self))


def should_use(refusal: KernelUnsupported) -> bool:
    """Return whether an automatic choice uses the kernel.

    Log the reasons against it, unless the program is not for a TPU.
    """
    if refusal and NO_TPU not in refusal.reasons:
        _warn_once(refusal)
    return not refusal


@functools.cache
def _warn_once(refusal: KernelUnsupported) -> None:
    log.warning("%s XLA computes it.", refusal)
