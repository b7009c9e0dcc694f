"""The compiled programs of this process, by all that they depend on."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ...sharding.mesh import Device
from ..cache.store import signature
from ..programs import executables
from ..programs.executables import Executable
from ..programs.program import Program
from . import telemetry
from .device_cache import DeviceCache


class ProgramCache:
    """Compiled programs by key, loaded on the devices. `counts["compile"]` tells how many were not in any cache."""

    def __init__(self, devices: tuple[Device, ...], device_cache: DeviceCache, counts: Counter[str]) -> None:
        self._devices = devices
        self._device_cache = device_cache
        self._counts = counts

    def get(
        self, title: str, key: tuple[Any, ...], progress: telemetry.Watched, build: Callable[[], Program]
    ) -> Executable:
        """The program for `key`: of this process, of an earlier one, or compiled."""
        digest = signature(*(json.dumps(part, sort_keys=True) if isinstance(part, dict) else part for part in key))
        if (loaded := self._device_cache.program(digest)) is not None:
            return loaded
        stored = executables.is_stored(digest, self._devices)
        progress.text(f"Loading the program of {title}" if stored else f"Compiling {title} (once for this size)")
        progress.check_cancelled()
        with _flagged(progress.activity):
            found, is_new = executables.obtain(digest, build, self._devices)
        self._device_cache.add_program(digest, found)
        self._counts["compile"] += is_new
        progress.check_cancelled()
        return found


@contextlib.contextmanager
def _flagged(activity: telemetry.Activity) -> Iterator[None]:
    activity.compiling = True
    try:
        yield
    finally:
        activity.compiling = False
