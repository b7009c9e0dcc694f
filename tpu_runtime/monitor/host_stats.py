"""Statistics that the runtime does not have itself: the host's load, and libtpu's measurements of the chips.

Nothing here starts a device: libtpu is queried only after the runtime reports that it runs on a TPU, the PCI bus until
then. Nothing is sampled without a client.
"""

import importlib
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime

import psutil

from ..messages import compose
from ..progress import run_in_daemon_thread
from .idle import IdleStats, Stats

log = logging.getLogger(__name__)

# libtpu's own names (`libtpu.sdk.tpumonitoring.list_supported_metrics()`), by the field of a chip that each fills.
UTILISATION = {"tensorcore_utilization": "tensorcore_util", "duty_cycle": "duty_cycle_pct"}
# Queried only if the runtime does not know them.
MEMORY = {"hbm_used": "hbm_capacity_usage", "hbm_limit": "hbm_capacity_total"}
# libtpu answers in well under a millisecond; after this long something is wrong with a chip.
DEADLINE_S = 1.0
# The name of threads that read.
READER = "comfyui-tpu-monitor"
# Each note is logged once; a message that differs every time must not fill the log.
MAX_LOGGED = 50


def read_libtpu(metric: str) -> Sequence[str]:
    """Return one number per chip or core of a metric, as strings. Raises ImportError without tpumonitoring."""
    return importlib.import_module("libtpu.sdk").tpumonitoring.get_metric(metric).data()


class Sampler:
    """Completes the runtime's statistics. Call `complete` from one thread at a time."""

    def __init__(
        self,
        read: Callable[[str], Sequence[str]] = read_libtpu,
        *,
        deadline_s: float = DEADLINE_S,
        unstarted: IdleStats | None = None,
    ) -> None:
        self._read = read
        self._unstarted = unstarted or IdleStats()
        self._deadline_s = deadline_s
        self._late: Future | None = None
        self._logged: set[str] = set()
        self._process: psutil.Process | None = None

    def complete(self, stats: Stats) -> Stats:
        """Return `stats` with `host` and libtpu's numbers of the chips; `notes` says which are unknown, and why."""
        notes = [str(note) for note in stats.get("notes") or ()]
        host = stats.get("host") or self._host()
        if stats.get("platform") is None and not stats.get("chips"):
            stats = self._unstarted.complete(stats, notes)
        chips = [dict(chip) for chip in stats.get("chips") or ()]
        if stats.get("platform") == "tpu" and chips:
            self._fill(chips, notes, is_idle=not stats.get("running"))
        chips += stats.get("elsewhere") or ()  # of other hosts, complete, as of their last answer
        for note in notes:
            if note not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(note)
                log.info("monitor: %s", note)
        known = {name: value for name, value in stats.items() if name != "elsewhere"}
        return {**known, "host": host, "chips": sorted(chips, key=lambda chip: chip["index"]), "notes": notes}

    def _host(self) -> dict[str, float | int]:
        is_first = self._process is None
        self._process = self._process or psutil.Process()
        memory = psutil.virtual_memory()
        return {
            # The load since the last call; the very first has none to compare with, so it waits a moment.
            "cpu_percent": psutil.cpu_percent(interval=0.1 if is_first else None),
            "ram_used": memory.total - memory.available,
            "ram_total": memory.total,
            "process_ram": self._process.memory_info().rss,
        }

    def _fill(self, chips: list[Stats], notes: list[str], *, is_idle: bool) -> None:
        """Set libtpu's numbers where the runtime has no value.

        libtpu reports no values for idle chips: then an empty answer means no utilisation. While something runs it
        means that the utilisation is unknown.
        """
        missing = {
            field: metric
            for field, metric in {**UTILISATION, **MEMORY}.items()
            if any(chip.get(field) is None for chip in chips)
        }
        for field, answer in self._ask(missing, notes).items() if missing else ():
            nothing = 0.0 if is_idle and field in UTILISATION else None
            numbers = _per_chip(missing[field], answer, len(chips), nothing, notes)
            for chip, number in zip(chips, numbers, strict=False):
                if chip.get(field) is None:
                    chip[field] = number

    def _ask(self, metrics: dict[str, str], notes: list[str]) -> dict[str, Sequence[str] | Exception]:
        """Return libtpu's answers by field, within the deadline. While a query is pending, no other is started."""
        if self._late is not None and not self._late.done():
            notes.append(compose("monitor.libtpu_does_not_answer"))
            return {}
        self._late = run_in_daemon_thread(
            lambda: {field: self._answer(metric) for field, metric in metrics.items()}, READER
        )
        try:
            return self._late.result(self._deadline_s)
        except NotInTime:
            notes.append(compose("monitor.libtpu_not_in_time", deadline_s=f"{self._deadline_s:g}"))
            return {}

    def _answer(self, metric: str) -> Sequence[str] | Exception:
        try:
            return list(self._read(metric))
        except Exception as error:  # libtpu documents no exceptions; the other readings stay useful
            return error


def _per_chip(
    metric: str, answer: Sequence[str] | Exception, num_chips: int, nothing: float | None, notes: list[str]
) -> list[float | None]:
    """Return one number per chip, averaged over its cores; None where it is unknown.

    metric, answer: libtpu's. nothing: the value of each chip if the answer is empty. Returns [] and adds to `notes` if
    the answer is an error or has another number of values.
    """
    if isinstance(answer, ImportError):
        if metric == UTILISATION["tensorcore_utilization"]:  # once is enough
            notes.append(compose("monitor.monitoring_module_missing"))
        return []
    if isinstance(answer, Exception):
        notes.append(compose("monitor.metric_raised", metric=metric, type=type(answer).__name__, answer=answer))
        return []
    if not answer:
        return [nothing] * num_chips
    if len(answer) % num_chips:
        notes.append(compose("monitor.metric_count_wrong", metric=metric, count=len(answer), num_chips=num_chips))
        return []
    numbers = [_number(text) for text in answer]
    if unknown := sum(math.isnan(number) for number in numbers):
        notes.append(compose("monitor.cores_unknown", metric=metric, unknown=unknown, cores=len(numbers)))
    cores = len(answer) // num_chips
    means = [sum(numbers[start : start + cores]) / cores for start in range(0, len(numbers), cores)]
    return [None if math.isnan(mean) else mean for mean in means]


def _number(text: str) -> float:
    """Parse a measurement; NaN if it is not a number, or is negative or infinite."""
    try:
        number = float(text)
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) and number >= 0 else math.nan
