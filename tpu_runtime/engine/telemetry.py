"""Records of the running stage, the last generation and the bytes held on the devices."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from ...sharding.mesh import Device
from .. import device_memory
from ..device_memory import DeviceMemory
from ..messages import compose, compose_list
from ..programs.program import shard_bytes
from ..progress import Preview, Progress
from ..units import GIB, format_load_rate

# Shorter parts of a stage are left out of its summary.
MIN_REPORTED_S = 0.1
MIN_PACE_S = 0.005  # a faster step would show as 0.00 s


@dataclass(kw_only=True)
class Activity:
    """The running stage as reported to the application. Written by the stage's thread, read by others."""

    stage: str
    model: str
    text: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    compiling: bool = False
    remark: str = ""  # appended to the final status line, because earlier lines are not visible any more
    needed_bytes: int = 0  # largest need of one chip so far: weights and the running program
    loaded_bytes: int = 0  # of weights
    # Seconds by kind of work; the rest is other work of the host.
    compiling_s: float = 0.0  # waiting for compilations
    preparing_s: float = 0.0  # waiting for programs from a cache
    importing_s: float = 0.0  # libraries of the upstream networks, once per process
    downloading_s: float = 0.0
    loading_s: float = 0.0
    running_s: float = 0.0
    started: float = field(default_factory=time.monotonic)  # monotonic seconds
    unit_started: float | None = None  # monotonic seconds of the first report in `unit`
    unit_first: int = 0  # `done` in that report

    def update_progress(self, done: int, total: int, unit: str) -> None:
        """Update the progress: `done` of `total` in `unit`."""
        if unit != self.unit or self.unit_started is None or done < self.done:
            # Counted from the first report on: earlier time belongs to other work.
            self.unit_started, self.unit_first = time.monotonic(), done
        self.done, self.total, self.unit = done, total, unit

    @property
    def seconds_per_unit(self) -> float | None:
        """Mean seconds per unit since the first report; None before the second one."""
        if self.unit_started is None or self.done <= self.unit_first:
            return None
        return (time.monotonic() - self.unit_started) / (self.done - self.unit_first)

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the duration of the block to the field `part`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add_time(part, time.monotonic() - began)

    def add_time(self, part: str, span_s: float) -> None:
        setattr(self, part, getattr(self, part) + span_s)

    def pace(self) -> str:
        """Return the seconds per step as text; "" if unknown or below `MIN_PACE_S`."""
        seconds = self.seconds_per_unit if self.unit == "step" else None
        return compose("took.seconds_a_step", seconds=f"{seconds:.2f}") if seconds and seconds >= MIN_PACE_S else ""

    def summary(self) -> str:
        """Return the time that the stage and each kind of work took, as its last status line. The parts add up."""
        total_s = round(time.monotonic() - self.started, 1)
        parts = {
            compose("took.importing"): self.importing_s, compose("took.compiling"): self.compiling_s,
            compose("took.preparing_programs"): self.preparing_s, compose("took.downloading"): self.downloading_s,
            compose("took.loading"): self.loading_s, (running := compose("took.running")): self.running_s,
        }  # fmt: skip
        shown = {name: round(seconds, 1) for name, seconds in parts.items() if seconds >= MIN_REPORTED_S}
        # Each part is rounded separately, so their sum may slightly exceed the total.
        shown[compose("took.other_work")] = round(max(0.0, total_s - sum(shown.values())), 1)
        total_s = sum(shown.values())
        pace = compose("took.pace", pace=self.pace()) if self.pace() else ""
        texts = [
            compose("took.part", name=name, seconds=f"{seconds:.1f}", pace=pace if name == running else "")
            for name, seconds in shown.items()
            if seconds >= MIN_REPORTED_S
        ]
        took = (
            compose("took.total_and_parts", total_s=f"{total_s:.1f}", texts=compose_list(texts))
            if texts
            else compose("took.total", total_s=f"{total_s:.1f}")
        )
        return compose("took.remark", took=took, remark=self.remark) if self.remark else took

    def describe(self) -> dict[str, object]:
        return {
            **{name: getattr(self, name) for name in ("stage", "model", "text", "done", "total", "unit")},
            "seconds_per_unit": self.seconds_per_unit,
            "elapsed_s": time.monotonic() - self.started,
            "compiling": self.compiling,
        }


@dataclass(frozen=True, kw_only=True)
class TrackedProgress:
    """The application's progress, with every report also recorded in an `Activity`."""

    host: Progress
    activity: Activity

    def text(self, message: str) -> None:
        self.activity.text = message
        self.host.text(message)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        self.activity.update_progress(done, total, unit)
        self.host.step(done, total, unit, preview)

    def check_cancelled(self) -> None:
        self.host.check_cancelled()


@dataclass(kw_only=True)
class LastRun:
    """The completed stages of one generation."""

    model: str
    stages: list[tuple[str, float]] = field(default_factory=list)  # names in order, with seconds
    steps_per_second: float | None = None
    peak_hbm: int | None = None  # largest need of one chip by the compiler's numbers, in bytes
    memory: DeviceMemory = field(default_factory=DeviceMemory)  # reported by the fullest chip
    loaded_bytes: int = 0  # of weights
    loading_s: float = 0.0
    compiling_s: float = 0.0

    def add(self, activity: Activity, memory: DeviceMemory) -> None:
        """Add a completed stage, with the memory that the fullest chip reports after it."""
        self.stages.append((activity.stage, time.monotonic() - activity.started))
        if activity.stage == "denoise" and activity.seconds_per_unit:
            self.steps_per_second = 1 / activity.seconds_per_unit
        self.peak_hbm = max(self.peak_hbm or 0, activity.needed_bytes)
        self.memory = memory
        self.loaded_bytes += activity.loaded_bytes
        self.loading_s += activity.loading_s
        self.compiling_s += activity.compiling_s

    def describe(self) -> dict[str, object]:
        stages = [{"stage": stage, "seconds": seconds} for stage, seconds in self.stages]
        return {
            "model": self.model, "stages": stages, "steps_per_second": self.steps_per_second,
            "peak_hbm": self.peak_hbm, "peak_in_use": self.memory.peak_in_use_bytes,
            "peak_reserved": self.memory.peak_reserved_bytes,
            "loaded_bytes": self.loaded_bytes, "loading_s": self.loading_s, "compiling_s": self.compiling_s,
        }  # fmt: skip

    def __str__(self) -> str:
        parts = [f"{stage} {seconds:.1f} s" for stage, seconds in self.stages]
        if self.steps_per_second is not None:
            parts.append(f"{self.steps_per_second:.2f} steps a second")
        if self.peak_hbm is not None:
            parts.append(f"at most {self.peak_hbm / GIB:.2f} GiB on a chip")
        if self.memory.known:
            parts.append(f"the fullest chip reports {self.memory}")
        if self.loaded_bytes:
            parts.append(format_load_rate(self.loaded_bytes, self.loading_s))
        return f"{self.model}: {', '.join(parts)}"


def bytes_in_use(devices: Sequence[Device]) -> list[int]:
    """Return the bytes in use on each of `devices`: as reported, or else the size of this process's live arrays."""
    reported = [device_memory.memory_stats(device).in_use_bytes for device in devices]
    known = [used for used in reported if used is not None]
    if len(known) == len(reported):
        return known
    sizes = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        size = shard_bytes(array)
        for device in array.sharding.device_set:
            if device in sizes:
                sizes[device] += size
    return list(sizes.values())
