"""What the process does and did: the running stage, the last one, bytes held on the devices."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from ...sharding.mesh import Device
from ..programs.program import shard_bytes
from ..progress import Preview, Progress
from ..units import GIB


@dataclass(kw_only=True)
class Activity:
    """The stage that is running, as its host is told; written by the run's thread, read by others."""

    stage: str
    model: str
    text: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    compiling: bool = False
    needed_bytes: int = 0  # the most that one chip had to hold at a time: weights, and the running program
    started: float = field(default_factory=time.monotonic)
    unit_started: float | None = None
    unit_first: int = 0

    def reached(self, done: int, total: int, unit: str) -> None:
        if unit != self.unit or self.unit_started is None or done < self.done:
            # Counted from the first report on: what came before belongs to something else.
            self.unit_started, self.unit_first = time.monotonic(), done
        self.done, self.total, self.unit = done, total, unit

    @property
    def seconds_per_unit(self) -> float | None:
        if self.unit_started is None or self.done <= self.unit_first:
            return None
        return (time.monotonic() - self.unit_started) / (self.done - self.unit_first)

    def describe(self) -> dict[str, object]:
        return {
            **{name: getattr(self, name) for name in ("stage", "model", "text", "done", "total", "unit")},
            "seconds_per_unit": self.seconds_per_unit,
            "elapsed_s": time.monotonic() - self.started,
            "compiling": self.compiling,
        }


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A host's progress, with what it is told also noted in an `Activity`."""

    host: Progress
    activity: Activity

    def text(self, message: str) -> None:
        self.activity.text = message
        self.host.text(message)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        self.activity.reached(done, total, unit)
        self.host.step(done, total, unit, preview)

    def check_cancelled(self) -> None:
        self.host.check_cancelled()


@dataclass(kw_only=True)
class LastRun:
    """The stages of one generation that ended, in order, with their seconds."""

    model: str
    stages: list[tuple[str, float]] = field(default_factory=list)
    steps_per_second: float | None = None
    peak_hbm: int | None = None

    def describe(self) -> dict[str, object]:
        stages = [{"stage": stage, "seconds": seconds} for stage, seconds in self.stages]
        return {
            "model": self.model, "stages": stages,
            "steps_per_second": self.steps_per_second, "peak_hbm": self.peak_hbm,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{stage} {seconds:.1f} s" for stage, seconds in self.stages]
        if self.steps_per_second is not None:
            parts.append(f"{self.steps_per_second:.2f} steps a second")
        if self.peak_hbm is not None:
            parts.append(f"at most {self.peak_hbm / GIB:.2f} GiB on a chip")
        return f"{self.model}: {', '.join(parts)}"


def held_bytes(devices: Sequence[Device]) -> list[int]:
    """Bytes held on each of `devices`: what the device says, or where it does not, this process's live arrays."""
    stats = [device.memory_stats() if device.platform == "tpu" else None for device in devices]
    said = [int(one["bytes_in_use"]) for one in stats if one]
    if len(said) == len(stats):
        return said
    held = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        size = shard_bytes(array)
        for device in array.sharding.device_set:
            if device in held:
                held[device] += size
    return list(held.values())
