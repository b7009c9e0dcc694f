"""The statistics of a process that runs nothing: the chips on the PCI bus, and their use by another process."""

import functools
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..machine import pci
from ..messages import compose, compose_list
from . import metrics_service

Stats = dict[str, Any]  # the statistics of the runtime, or of a chip, by name
# Seconds between two scans of all processes' open files, which take some hundredths of a second, and between two
# queries of a service that did not answer in time.
RETRY_S = 5.0
NO_TPU = compose("monitor.no_tpu")
TPU_INFO_MISSING = compose("monitor.tpu_info_missing")


class IdleStats:
    """Reads the statistics without starting the chips.

    Call `complete` from one thread at a time; it takes up to a second.
    """

    def __init__(
        self, root: Path = pci.ROOT, ports: list[int] | None = None, *, deadline_s: float = metrics_service.DEADLINE_S
    ) -> None:
        self._root = root
        self._ports = metrics_service.metrics_ports() if ports is None else ports
        self._deadline_s = deadline_s
        self._looked_s = self._failed_s = -RETRY_S
        self._failure = ""
        self._holders: list[pci.Holder] = []

    @functools.cached_property
    def _chips(self) -> pci.Chips | None:
        return pci.detect_chips(self._root)

    def complete(self, stats: Stats, notes: list[str]) -> Stats:
        """Return `stats` with `message` and `chips` of the plugged-in hardware, or the message that it has no TPU."""
        has_files = bool(pci.find_device_files(self._root))
        try:
            chips = self._chips
        except ImportError:
            chips = None
            notes += [TPU_INFO_MISSING] if has_files else []
        if chips is None:
            return stats if has_files else {**stats, "message": NO_TPU}
        usages = self._usages(notes)
        holders = self._look(again=bool(usages))
        if any(holder.pid == os.getpid() for holder in holders):
            state = compose("monitor.held_by_this_process")  # a first run that starts them, or another node pack
        elif holders or usages:
            state = compose("monitor.held_by_another_process")
            processes = [compose("monitor.process", program=holder.program, pid=holder.pid) for holder in holders]
            who = compose_list(processes) if processes else compose("monitor.of_another_user")
            notes.append(compose("monitor.held_by", who=who))
        else:
            state = compose("monitor.not_started")
        if usages and len(usages) != chips.num_devices:
            notes.append(compose("monitor.memory_partly_known", count=len(usages), num_devices=chips.num_devices))
        rows = [_row(chips, index) for index in range(chips.num_devices)]
        for row, usage in zip(rows, usages, strict=False):
            row |= {name: value for name, value in asdict(usage).items() if value is not None}
        return {**stats, "message": compose("monitor.chips_and_state", chips=chips, state=state), "chips": rows}

    def _usages(self, notes: list[str]) -> list[metrics_service.DeviceUsage]:
        if time.monotonic() - self._failed_s >= RETRY_S:
            try:
                return metrics_service.read_usage(self._ports, self._deadline_s)
            except (metrics_service.MetricsUnavailable, ImportError) as error:
                self._failure, self._failed_s = compose("monitor.memory_unknown", error=error), time.monotonic()
        notes.append(self._failure)
        return []

    def _look(self, *, again: bool) -> list[pci.Holder]:
        """Return the holders as of some seconds ago; with `again` scan anew if none were found."""
        if time.monotonic() - self._looked_s >= RETRY_S or (again and not self._holders):
            self._holders = pci.find_holders(self._root)
            self._looked_s = time.monotonic()
        return self._holders


def _row(chips: pci.Chips, index: int) -> Stats:
    memory = ("hbm_used", "hbm_peak", "hbm_reserved", "hbm_reserved_peak")
    unknown = dict.fromkeys(("coords", *memory, "tensorcore_utilization", "duty_cycle"))
    limit = chips.hbm_bytes_per_chip // chips.devices_per_chip
    return {"index": index, "kind": chips.kind, **unknown, "hbm_limit": limit}
