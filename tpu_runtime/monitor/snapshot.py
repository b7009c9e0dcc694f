"""The monitor's numbers. Reading them never starts a device, and never waits for a running stage."""

from typing import TYPE_CHECKING, Any

from .. import device_memory
from ..cache import store
from ..engine.current import current

if TYPE_CHECKING:
    from ..engine.engine import Engine

NOT_STARTED = "No run yet: the TPU is started by the first run."


def stats() -> dict[str, Any]:
    """What is on the chips, running, resident, cached; `readings.Sampler` adds the host's load and libtpu's own."""
    engine = current()
    if engine is None:
        counts = dict.fromkeys(("load", "merge", "encode", "compile"), 0)
        return {**nothing(NOT_STARTED), "caches": store.usage(), "counts": counts}
    activity, last_run = engine.activity, engine.last_run
    return {
        "platform": engine.devices[0].platform,
        "message": chips_of(engine),
        "chips": own_chips(engine),
        "elsewhere": engine.hosts.rows(),
        "resident": _resident(engine),
        "running": activity.describe() if activity else None,
        "behind": engine.program_cache.behind(),
        "notes": engine.ladder.sentences,
        "last_run": last_run.describe() if last_run else None,
        "caches": store.usage(),
        "counts": dict(engine.counts),
    }


def nothing(message: str) -> dict[str, Any]:
    """The statistics of a runtime that has none to tell."""
    lists: dict[str, Any] = {name: [] for name in ("chips", "resident", "behind", "caches", "notes")}
    return {"platform": None, "message": message, **lists, "running": None, "last_run": None, "counts": {}}


def chips_of(engine: "Engine") -> str:
    """How many chips it runs on, and of which kind."""
    count, first = len(engine.devices), engine.devices[0]
    if first.platform == "tpu":
        return f"{count} x {first.device_kind}"
    return f"no TPU, running on CPU with {count} simulated chip{'s' if count > 1 else ''}"


def own_chips(engine: "Engine") -> list[dict[str, Any]]:
    """The chips of this host."""
    held = engine.note_peak()
    return [_chip(engine, index, held[index]) for index in range(len(engine.own))]


def _chip(engine: "Engine", index: int, held: int) -> dict[str, Any]:
    from ..engine.device_cache import budget_bytes

    device = engine.own[index]
    said = device_memory.of(device)
    return {
        "index": engine.devices.index(device),
        "host": device.process_index,
        "kind": device.device_kind,
        "coords": list(device.coords) if device.platform == "tpu" else None,
        "hbm_used": held,
        "hbm_peak": engine.peak_bytes[index] if said.peak_in_use_bytes is None else said.peak_in_use_bytes,
        "hbm_reserved": said.reserved_bytes,
        "hbm_reserved_peak": said.peak_reserved_bytes,
        "hbm_limit": said.limit_bytes or budget_bytes(device),
        "tensorcore_utilization": None,
        "duty_cycle": None,
    }


def _resident(engine: "Engine") -> list[dict[str, Any]]:
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
