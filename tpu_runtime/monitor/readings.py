"""Readings that the runtime does not have itself: the host's load, and what libtpu measures about its chips.

Nothing here starts a device: libtpu is asked only once the runtime says that it runs on a TPU, the bus until then.
Nothing is sampled unless somebody asks.
"""

import importlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

from .unstarted import Unstarted

log = logging.getLogger(__name__)

Stats = dict[str, Any]

# libtpu's own names (`libtpu.sdk.tpumonitoring.list_supported_metrics()`), by the field of a chip that each fills.
UTILISATION = {"tensorcore_utilization": "tensorcore_util", "duty_cycle": "duty_cycle_pct"}
# Asked only where the runtime could not tell.
MEMORY = {"hbm_used": "hbm_capacity_usage", "hbm_limit": "hbm_capacity_total"}
# libtpu answers in well under a millisecond; after this long something is wrong with a chip.
DEADLINE_S = 1.0
# Each note is logged once; a message that differs every time must not fill the log.
MAX_LOGGED = 50


def in_daemon(function: Callable[[], Any]) -> Future:
    """Runs `function` in a thread of its own that, unlike an executor's, cannot keep the process from ending."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # the future hands it on to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="comfyui-tpu-monitor", daemon=True).start()
    return future


def read_libtpu(metric: str) -> Sequence[str]:
    """One number a chip or core, as libtpu writes them. Raises ImportError without libtpu's monitoring module."""
    return importlib.import_module("libtpu.sdk").tpumonitoring.get_metric(metric).data()


class Sampler:
    """Completes the runtime's statistics. `complete` is for one thread at a time."""

    def __init__(
        self,
        read: Callable[[str], Sequence[str]] = read_libtpu,
        *,
        deadline_s: float = DEADLINE_S,
        unstarted: Unstarted | None = None,
    ) -> None:
        self._read = read
        self._unstarted = unstarted or Unstarted()
        self._deadline_s = deadline_s
        self._late: Future | None = None
        self._logged: set[str] = set()
        self._process: Any = None

    def complete(self, stats: Stats) -> Stats:
        """`stats` with `host`, with what libtpu knows of the chips, and with `notes`: what is not known and why."""
        notes = [str(note) for note in stats.get("notes") or ()]
        host = stats.get("host") or self._host(notes)
        if stats.get("platform") is None and not stats.get("chips"):
            stats = self._unstarted.complete(stats, notes)
        chips = [dict(chip) for chip in stats.get("chips") or ()]
        if stats.get("platform") == "tpu" and chips:
            self._fill(chips, notes)
        elsewhere = stats.get("elsewhere") or ()  # of other hosts, which filled them, as of their last answer
        chips = sorted([*chips, *elsewhere], key=lambda chip: chip["index"]) if elsewhere else chips
        for note in notes:
            if note not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(note)
                log.info("monitor: %s", note)
        known = {name: value for name, value in stats.items() if name != "elsewhere"}
        return {**known, "host": host, "chips": chips, "notes": notes}

    def _host(self, notes: list[str]) -> dict[str, float | int | None]:
        try:
            import psutil
        except ImportError:
            notes.append("The host's CPU and memory are not known: psutil is not installed (pip install psutil).")
            return dict.fromkeys(("cpu_percent", "ram_used", "ram_total", "process_ram"))
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

    def _fill(self, chips: list[Stats], notes: list[str]) -> None:
        """Puts libtpu's numbers where the runtime has none."""
        wanted = {
            field: metric
            for field, metric in {**UTILISATION, **MEMORY}.items()
            if any(chip.get(field) is None for chip in chips)
        }
        answers = self._ask(wanted, notes) if wanted else {}
        for field, answer in answers.items():
            for chip, number in zip(chips, _per_chip(wanted[field], answer, len(chips), notes), strict=True):
                if chip.get(field) is None:
                    chip[field] = number

    def _ask(self, wanted: dict[str, str], notes: list[str]) -> dict[str, Sequence[str] | Exception]:
        """libtpu's answers by field, within the deadline. One question at a time: an open one forbids the next."""
        if self._late is not None and not self._late.done():
            notes.append("libtpu does not answer: a chip may hang. Utilisation is not known.")
            return {}
        late = in_daemon(lambda: {field: self._answer(metric) for field, metric in wanted.items()})
        self._late = late
        try:
            return late.result(self._deadline_s)
        except NotInTime:
            notes.append(f"libtpu did not answer within {self._deadline_s:g} s. Utilisation is not known.")
            return {}

    def _answer(self, metric: str) -> Sequence[str] | Exception:
        try:
            return list(self._read(metric))
        except Exception as error:  # libtpu documents no types; whatever it raises, the other readings stay useful
            return error


def _per_chip(metric: str, answer: Sequence[str] | Exception, num_chips: int, notes: list[str]) -> list[float | None]:
    """A number a chip, the mean where a chip has several cores; None and a note for what is not known."""
    unknown: list[float | None] = [None] * num_chips
    if isinstance(answer, ImportError):
        if metric == UTILISATION["tensorcore_utilization"]:  # once is enough
            notes.append("Utilisation is not known: libtpu's monitoring module is missing (pip install -U libtpu).")
        return unknown
    if isinstance(answer, Exception):
        notes.append(f"{metric} is not known: libtpu says {type(answer).__name__}: {answer}")
        return unknown
    if not answer or len(answer) % num_chips:
        notes.append(f"{metric} is not known: libtpu gave {len(answer)} values for {num_chips} chips.")
        return unknown
    cores = len(answer) // num_chips
    numbers = [_number(text) for text in answer]
    if None in numbers:
        notes.append(f"{metric} is not known for {numbers.count(None)} of {len(numbers)} cores.")
    groups = [numbers[start : start + cores] for start in range(0, len(numbers), cores)]
    known = [[number for number in group if number is not None] for group in groups]
    return [sum(group) / cores if len(group) == cores else None for group in known]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number >= 0 else None
