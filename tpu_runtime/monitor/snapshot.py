"""The runtime's own statistics. Reading them never starts a device, and never waits for a running stage."""

from typing import TYPE_CHECKING

from .. import device_memory
from ..cache import store
from ..engine.lifecycle import current_engine
from ..messages import compose
from .idle import Stats

if TYPE_CHECKING:
    from ..engine.engine import Engine

NOT_STARTED = compose("monitor.no_run_yet")


def take_snapshot() -> Stats:
    """Return the state of the chips, the running stage, and the contents of the caches.

    `readings.Sampler` adds the host's load and libtpu's numbers.
    """
    engine = current_engine()
    if engine is None:
        counts = dict.fromkeys(("load", "merge", "encode", "compile"), 0)
        return {**empty_stats(NOT_STARTED), "caches": store.measure_usage(), "counts": counts}
    activity, last_run = engine.activity, engine.last_run
    return {
        "platform": engine.devices[0].platform,
        "message": describe_chips(engine),
        "chips": local_chips(engine),
        "elsewhere": engine.hosts.rows(),
        "resident": _resident(engine),
        "running": activity.describe() if activity else None,
        "behind": engine.program_cache.list_background(),
        "notes": engine.ladder.sentences,
        "last_run": last_run.describe() if last_run else None,
        "caches": store.measure_usage(),
        "counts": dict(engine.counts),
    }


def empty_stats(message: str) -> Stats:
    """Return the statistics of a runtime without any, with `message` for the user."""
    lists: Stats = {name: [] for name in ("chips", "resident", "behind", "caches", "notes")}
    return {"platform": None, "message": message, **lists, "running": None, "last_run": None, "counts": {}}


def describe_chips(engine: "Engine") -> str:
    """Return number and kind of an engine's chips, in words."""
    count, first = len(engine.devices), engine.devices[0]
    if first.platform == "tpu":
        return f"{count} x {first.device_kind}"
    return compose("monitor.simulated_chips" if count > 1 else "monitor.simulated_chip", count=count)


def local_chips(engine: "Engine") -> list[Stats]:
    """Return the statistics of this host's chips."""
    used_bytes = engine.update_peak_bytes()
    return [_chip(engine, index, used_bytes[index]) for index in range(len(engine.local_devices))]


def _chip(engine: "Engine", index: int, used_bytes: int) -> Stats:
    from ..engine.device_cache import budget_bytes

    device = engine.local_devices[index]
    memory = device_memory.memory_stats(device)
    return {
        "index": engine.devices.index(device),
        "host": device.process_index,
        "kind": device.device_kind,
        "coords": list(device.coords) if device.platform == "tpu" else None,
        "hbm_used": used_bytes,
        "hbm_peak": engine.peak_bytes[index] if memory.peak_in_use_bytes is None else memory.peak_in_use_bytes,
        "hbm_reserved": memory.reserved_bytes,
        "hbm_reserved_peak": memory.peak_reserved_bytes,
        "hbm_limit": memory.limit_bytes or budget_bytes(device),
        "tensorcore_utilization": None,
        "duty_cycle": None,
    }


def _resident(engine: "Engine") -> list[Stats]:
    return [
        {
            "id": resident.id,
            "component": resident.component,
            "model": resident.model,
            "bytes_per_chip": resident.size_bytes,
            "last_used": resident.last_used,
        }
        for resident in engine.device_cache.list()
    ]
