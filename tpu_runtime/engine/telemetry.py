"""What the process does and did: the running stage, the last one, bytes held on the devices."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax

from ...sharding.mesh import Device
from .. import device_memory
from ..device_memory import DeviceMemory
from ..programs.program import shard_bytes
from ..progress import TOOK, Preview, Progress
from ..units import GIB, loaded

# The shortest part of a stage that is said at its end.
LEAST_SAID_S = 0.1
LEAST_PACE_S = 0.005  # less is 0.00 s a step


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
    remark: str = ""  # what the host's last line says besides: of earlier ones it shows nothing any more
    needed_bytes: int = 0  # the most that one chip had to hold at a time: weights, and the running program
    loaded_bytes: int = 0  # of weights
    # How long it did what; the rest is the host's other work.
    compiling_s: float = 0.0  # it waited for that, and for programs that a cache had
    preparing_s: float = 0.0
    importing_s: float = 0.0  # once in a process: of the libraries with upstream's networks
    downloading_s: float = 0.0
    loading_s: float = 0.0
    running_s: float = 0.0
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

    @contextlib.contextmanager
    def spends(self, part: str) -> Iterator[None]:
        """Counts how long the body takes to the field `part`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent(part, time.monotonic() - began)

    def spent(self, part: str, span_s: float) -> None:
        setattr(self, part, getattr(self, part) + span_s)

    def pace(self) -> str:
        """How long a step takes; nothing where that is not known, or too little to say."""
        each = self.seconds_per_unit if self.unit == "step" else None
        return f"{each:.2f} s a step" if each and each >= LEAST_PACE_S else ""

    def summary(self) -> str:
        """How long the stage took, and what of it in which part; for its host, at the end. The parts add up."""
        whole = round(time.monotonic() - self.started, 1)
        parts = {
            "importing diffusers": self.importing_s, "compiling": self.compiling_s,
            "preparing programs": self.preparing_s, "downloading": self.downloading_s,
            "loading": self.loading_s, "running": self.running_s,
        }  # fmt: skip
        said = {name: round(seconds, 1) for name, seconds in parts.items() if seconds >= LEAST_SAID_S}
        # Each part is rounded by itself, so that together they may be a little more than the whole.
        said["other work on the host"] = round(max(0.0, whole - sum(said.values())), 1)
        whole = sum(said.values())
        pace = f" ({self.pace()})" if self.pace() else ""
        texts = [
            f"{name} {seconds:.1f} s{pace if name == 'running' else ''}"
            for name, seconds in said.items()
            if seconds >= LEAST_SAID_S
        ]
        took = f"{TOOK} {whole:.1f} s: {', '.join(texts)}" if texts else f"{TOOK} {whole:.1f} s"
        return f"{took}. {self.remark}" if self.remark else took

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
    """The stages of one generation that ended, in order, with their seconds. `peak_hbm`: the bytes that one chip had to
    hold by the compiler's numbers; `memory`: what the fullest chip says itself.
    """

    model: str
    stages: list[tuple[str, float]] = field(default_factory=list)
    steps_per_second: float | None = None
    peak_hbm: int | None = None
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    loaded_bytes: int = 0
    loading_s: float = 0.0
    compiling_s: float = 0.0

    def add(self, activity: Activity, memory: DeviceMemory) -> None:
        """One stage more, with what the fullest chip says after it."""
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
            parts.append(f"the fullest chip says {self.memory}")
        if self.loaded_bytes:
            parts.append(loaded(self.loaded_bytes, self.loading_s))
        return f"{self.model}: {', '.join(parts)}"


def held_bytes(devices: Sequence[Device]) -> list[int]:
    """Bytes in use on each of `devices`: what it says, or where one does not, this process's live arrays."""
    said = [device_memory.of(device).in_use_bytes for device in devices]
    known = [one for one in said if one is not None]
    if len(known) == len(said):
        return known
    held = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        size = shard_bytes(array)
        for device in array.sharding.device_set:
            if device in held:
                held[device] += size
    return list(held.values())
