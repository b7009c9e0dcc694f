"""`machine.json` in the cache: what was found out about this machine, by its chips, libtpu and the pack's sources.

Deleting it is safe: what fails is found out again. It holds names and sentences, no code, and can only make programs
slower.
"""

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...kernels import names
from ...kernels.choice import Rungs
from .. import files
from ..cache.store import cache_folder
from .fallbacks import OPTIONS, Fallbacks

log = logging.getLogger(__name__)

NAME = "machine.json"
MAX_BYTES = 2**20
# Of the newest machines, and of each the newest sentences.
MAX_MACHINES, MAX_SENTENCES = 32, 32


@dataclass(frozen=True, kw_only=True)
class MachineRecord:
    """What a machine does without, and the sentences that say why, in the order in which it was found out."""

    fallbacks: Fallbacks = Fallbacks()
    sentences: tuple[str, ...] = ()


def path() -> Path:
    return cache_folder() / NAME


def key_of(device_kind: str, num_devices: int) -> str:
    """What a record depends on: chips, libtpu, and the code that computes results."""
    from .. import versions  # needs `packaging`, which `doctor` may have to miss

    libtpu = versions.of_results().get("libtpu", "none")
    return f"{num_devices} x {device_kind}, libtpu {libtpu}, sources {versions.source_digest()[:12]}"


def read(key: str) -> MachineRecord:
    """The record of a machine; an empty one where there is none. What is damaged is left aside, and the log says so."""
    return _record(_entries(path()).get(key))


def everything(file: Path | None = None) -> dict[str, MachineRecord]:
    """All records of a file, by default this process's, by key, the oldest first."""
    return {key: _record(value) for key, value in _entries(file or path()).items()}


def write(key: str, record: MachineRecord) -> None:
    """Puts a record in place of the one before. A folder that cannot be written costs the record, not the run."""
    entries = _entries(path())
    entries.pop(key, None)
    kernels = record.fallbacks.kernels
    entries[key] = {
        "kernels_off": list(kernels.off),
        "kernels_small": list(kernels.small),
        "options_off": list(record.fallbacks.options),
        "sentences": list(record.sentences[-MAX_SENTENCES:]),
    }
    content = json.dumps(dict(list(entries.items())[-MAX_MACHINES:]), indent=2, ensure_ascii=False)
    scratch = None
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(prefix=f".{NAME}-", dir=path().parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{content}\n")
        os.replace(scratch, path())
    except OSError as error:
        log.warning("%s was not written (%s): what was found out about this machine is found out again.", path(), error)
        if scratch:
            with contextlib.suppress(OSError):
                Path(scratch).unlink(missing_ok=True)


def _entries(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        found = files.parse_json(content) if len(content) <= MAX_BYTES else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read (%s); doing without.", file, error)
        return {}
    if not isinstance(found, dict):
        log.warning("%s is not a record of machines; doing without.", file)
        return {}
    return found


def _record(value: Any) -> MachineRecord:
    if not isinstance(value, Mapping):
        return MachineRecord()
    begins = tuple(begin for switch in OPTIONS.values() for begin in switch)

    def texts(name: str) -> list[str]:
        given = value.get(name)
        return [one for one in given if isinstance(one, str)] if isinstance(given, list) else []

    def kernels(name: str) -> tuple[str, ...]:
        return tuple(sorted(set(texts(name)) & set(names.KERNELS)))

    options = {one for one in texts("options_off") if one.startswith(begins)}
    return MachineRecord(
        fallbacks=Fallbacks(
            kernels=Rungs(off=kernels("kernels_off"), small=kernels("kernels_small")), options=tuple(sorted(options))
        ),
        sentences=tuple(texts("sentences")[-MAX_SENTENCES:]),
    )
