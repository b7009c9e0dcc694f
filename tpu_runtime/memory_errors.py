"""Errors of the TPU's compiler for programs that do not fit in memory at all. Imports no JAX."""

import re
from dataclasses import dataclass
from typing import Literal

from .messages import compose
from .units import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class MemoryRefusal:
    """Compiler error for lack of memory."""

    memory: Literal["HBM", "VMEM"]  # the chip's memory, or the on-chip memory of a kernel
    needed_bytes: int  # HBM that the program needs; 0 for VMEM
    sentence: str  # for the user


class HostMemoryError(RuntimeError):
    """Failure of the host, whose memory is too small or cannot be mapped for the chips; the message is for the user."""


class CompileOutOfMemory(RuntimeError):
    """Failure to compile a program for lack of memory. Unloading other data does not help."""

    def __init__(self, refused: MemoryRefusal) -> None:
        super().__init__(refused.sentence)
        self.refused = refused


# libtpu 0.0.42: "... HLO temporaries (64.06G) exceeds available HBM (31.25G)", "Used 54.12G of 31.25G hbm".
_HBM = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT])[^.]*?(?:HBM \(|of )([\d.]+)G")
# "... memory space vmem while allocating on stack for %splash.2 = ... with size 21.51M and limit 16.00M ..."
_STACK = re.compile(r"memory space vmem.*?%(\S+) = .*?size ([\d.]+\w) and limit ([\d.]+\w)", re.DOTALL)
# "Allocation (size=268435456) would exceed memory (size=134217728) :: ... space=vmem ... :: splash.2"
_SCRATCH = re.compile(
    r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\) ::.*space=vmem.*:: (\S+)", re.DOTALL
)
# Older versions do not name the kernel: "... memory space vmem. Used 16.75M of 16.00M vmem."
_NAMELESS = re.compile(r"memory space vmem\. Used ([\d.]+\w) of ([\d.]+\w) vmem")


# Messages of VFIO for memory that it cannot map for a chip, as in public reports.
_HOST = re.compile(r"ioctl|vfio|memlock|DMA map|Cannot allocate memory", re.IGNORECASE)


def parse_host_error(message: str) -> HostMemoryError | None:
    """Return the error if the host's memory ran out, not a chip's; None for any other message."""
    if "RESOURCE_EXHAUSTED" not in message or not _HOST.search(message):
        return None
    line = message.strip().partition("\n")[0][:200]
    return HostMemoryError(compose("memory.host_not_mapped", line=line))


def parse_compile_error(message: str) -> MemoryRefusal | None:
    """Return the refusal in the compiler's error `message`; None for others, and if memory is only full now."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    if match := _STACK.search(message):
        name, needed, limit = match.groups()
        return _kernel(f"kernel {name}", needed, limit)
    if match := _NAMELESS.search(message):
        return _kernel("a kernel", *match.groups())
    if match := _SCRATCH.search(message):
        needed, limit, name = match.groups()
        return _kernel(f"kernel {name}", *(f"{int(size) / MIB:.2f}M" for size in (needed, limit)))
    if match := _HBM.search(message):
        number, unit, limit = match.groups()
        needed = int(float(number) * 1024 ** (1 + "KMGT".index(unit)))
        sentence = compose("memory.compiler_needs", needed=f"{needed / GIB:.2f}", limit=limit)
        return MemoryRefusal(memory="HBM", needed_bytes=needed, sentence=sentence)
    return None


def _kernel(name: str, needed: str, limit: str) -> MemoryRefusal:
    """Return the refusal of a kernel that needs too much VMEM."""
    sentence = f"{name} needs {needed} of the {limit} on-chip memory (VMEM) a kernel may use; use smaller tiles"
    return MemoryRefusal(memory="VMEM", needed_bytes=0, sentence=sentence)
