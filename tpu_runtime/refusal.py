"""What the TPU's compiler says when a program does not fit, whatever else is in memory. Imports no JAX."""

import re
from dataclasses import dataclass
from typing import Literal

from .units import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """`memory`: the chip's (HBM), of which the program needs `needed_bytes`, or the on-chip one of a kernel (VMEM)."""

    memory: Literal["HBM", "VMEM"]
    needed_bytes: int
    sentence: str


class HostFull(RuntimeError):
    """The host has too little memory, or cannot map more of it for the chips; a sentence for the user."""


class DoesNotFit(RuntimeError):
    """The compiler refused a program for lack of memory: it would again, whatever is unloaded."""

    def __init__(self, refused: Refusal) -> None:
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
# Older ones name no kernel: "... memory space vmem. Used 16.75M of 16.00M vmem."
_NAMELESS = re.compile(r"memory space vmem\. Used ([\d.]+\w) of ([\d.]+\w) vmem")


# What VFIO says of memory that it cannot map for a chip, as in public reports.
_HOST = re.compile(r"ioctl|vfio|memlock|DMA map|Cannot allocate memory", re.IGNORECASE)


def of_host(message: str) -> HostFull | None:
    """The error where memory ran out on the host, not on a chip; None for any other."""
    if "RESOURCE_EXHAUSTED" not in message or not _HOST.search(message):
        return None
    line = message.strip().partition("\n")[0][:200]
    return HostFull(
        f"The host could not map memory for the chips ({line}). Allow more and start again: `ulimit -l unlimited`, in "
        "a container `--ulimit memlock=-1`, or options vfio_iommu_type1 dma_entry_limit=1000000 in /etc/modprobe.d."
    )


def parse(message: str) -> Refusal | None:
    """The refusal in the compiler's error `message`; None for any other complaint, and for memory that is only full."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    if found := _STACK.search(message):
        name, needed, limit = found.groups()
        return _kernel(f"kernel {name}", needed, limit)
    if found := _NAMELESS.search(message):
        return _kernel("a kernel", *found.groups())
    if found := _SCRATCH.search(message):
        needed, limit, name = found.groups()
        return _kernel(f"kernel {name}", *(f"{int(size) / MIB:.2f}M" for size in (needed, limit)))
    if found := _HBM.search(message):
        number, unit, limit = found.groups()
        needed = int(float(number) * 1024 ** (1 + "KMGT".index(unit)))
        sentence = f"the compiler says it needs {needed / GIB:.2f} of {limit} GiB"
        return Refusal(memory="HBM", needed_bytes=needed, sentence=sentence)
    return None


def _kernel(which: str, needed: str, limit: str) -> Refusal:
    sentence = f"{which} needs {needed} of the {limit} on-chip memory (VMEM) a kernel may use; it wants smaller tiles"
    return Refusal(memory="VMEM", needed_bytes=0, sentence=sentence)
