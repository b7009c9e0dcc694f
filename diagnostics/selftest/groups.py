"""The groups of checks, in order: the cheapest and safest first. Imports no JAX; `run` has their checks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

FAMILY = "family "  # begins the name of a family's group; its model's name follows
START = "start"
REOPEN = "reopen"  # the chips, by several processes in a row
STORE, STORED = "store", "stored"


@dataclass(frozen=True, kw_only=True)
class CheckGroup:
    """Checks that one process runs."""

    name: str
    deadline_s: float = 120.0  # per check
    continue_on_failure: bool = True  # whether another process continues after a check that lost the chips
    is_plain: bool = False  # part of `selftest` without --first-run
    environment: tuple[tuple[str, str], ...] = ()  # variables of its process


# Bytes of host memory that libtpu maps for transfers when it starts; transfers are timed with each size.
PREMAPPED = "TPU_PREMAPPED_BUFFER_SIZE"
PREMAPPED_GIB = (4, 16)

# Kernels come before programs that contain them: a kernel that halts is one row, and disabled afterwards.
FIRST = (
    CheckGroup(name=START, is_plain=True),
    CheckGroup(name=REOPEN, deadline_s=300.0),
    CheckGroup(name="options", deadline_s=180.0),
    CheckGroup(name="memory"),
    CheckGroup(name="transfers", is_plain=True),
    CheckGroup(name="together", is_plain=True),
    CheckGroup(name="kernels", deadline_s=300.0, is_plain=True),
    CheckGroup(name="beside", deadline_s=240.0),
    CheckGroup(name=STORE),
    CheckGroup(name=STORED),
    CheckGroup(name="compiling", deadline_s=240.0),
    CheckGroup(name="probes", deadline_s=300.0),
    *(
        CheckGroup(name=f"{PREMAPPED} {size} GiB", environment=((PREMAPPED, str(size * 2**30)),))
        for size in PREMAPPED_GIB
    ),
)


# The groups that the first image needs; Z-Image is the most run model that fits one small chip.
QUICK = (START, "transfers", "together", "kernels")
QUICK_MODELS = ("z-image-turbo",)


def quick_groups(models: Iterable[str]) -> Iterator[CheckGroup]:
    """Yield the groups that decide whether a first image works, with these models' miniatures last."""
    chosen = list(models)
    skipped = {group.name for group in FIRST} - set(QUICK)
    yield from (group for group in all_groups(chosen) if group.name not in skipped)


def all_groups(models: Iterable[str]) -> Iterator[CheckGroup]:
    """Yield every group, with these models' miniatures last, because they use everything before."""
    yield from FIRST
    for name in models:
        yield CheckGroup(name=f"{FAMILY}{name}", deadline_s=420.0, continue_on_failure=False, is_plain=True)
