"""`machine.json` in the cache: known failures and measurements of this machine, keyed by chips, libtpu and sources.

Deleting it is safe: failures are detected again. It holds names, numbers and sentences, no code, and can only make
programs slower.
"""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...kernels import registry
from ...kernels.dispatch import KernelFallbacks
from .. import files
from ..cache import store
from ..cache.store import cache_folder
from ..messages import find_messages, restore, transform
from .fallbacks import OPTIONS, Fallbacks

log = logging.getLogger(__name__)

NAME = "machine.json"
MAX_BYTES = 2**20
# The newest machines that are kept, and the newest sentences of each.
MAX_MACHINES, MAX_SENTENCES = 32, 32
# Characters of a sentence; it is shown in terminals and in the browser.
MAX_SENTENCE = 1000
# More than any self-test reserves; with less memory nothing would run.
MAX_RESERVE = 0.5

# The newest verdicts on overlapped transfers that are kept.
MAX_VERDICTS = 64
# A hundred times the expected start of a collective.
MAX_TRANSFER_START_S = 1e-3

# The transfer rates of a record, in GB/s.
RATES = ("to_chips", "from_chips")


@dataclass(frozen=True, kw_only=True)
class MachineRecord:
    """Known failures and measurements of a machine, in the order in which they were found out.

    `selftest --first-run` measures `reserve_share`, `compilers_behind`, `rates` and `transfer_start_s`.
    """

    fallbacks: Fallbacks = Fallbacks()
    sentences: tuple[str, ...] = ()  # explain the fallbacks
    reserve_share: float | None = None  # share of a chip's memory to leave free; None: not measured
    compilers_behind: int | None = None  # background compilations that do not slow a stage down; None: not measured
    transfer_start_s: float | None = None  # seconds before a collective's first byte; None: not measured
    keeps_programs: bool = True  # whether compiled programs may be loaded from the disk
    rates: Mapping[str, float] = field(default_factory=dict)  # GB/s, by the names in `RATES`
    # Whether a program's first step had the same bits with and without overlapped transfers, by the program's digest.
    overlap: Mapping[str, bool] = field(default_factory=dict)

    def __or__(self, other: "MachineRecord") -> "MachineRecord":
        """Merge two records. Numbers of `other` win where it has them."""
        reserve, compilers, start = other.reserve_share, other.compilers_behind, other.transfer_start_s
        return MachineRecord(
            fallbacks=self.fallbacks | other.fallbacks,
            sentences=(*(text for text in self.sentences if text not in other.sentences), *other.sentences),
            reserve_share=self.reserve_share if reserve is None else reserve,
            compilers_behind=self.compilers_behind if compilers is None else compilers,
            transfer_start_s=self.transfer_start_s if start is None else start,
            keeps_programs=self.keeps_programs and other.keeps_programs,
            rates={**self.rates, **other.rates},
            overlap={**self.overlap, **other.overlap},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as `parsed` reads it."""
        kernels = self.fallbacks.kernels
        return {
            "kernels_off": list(kernels.off),
            "kernels_small": list(kernels.small),
            "options_off": list(self.fallbacks.options),
            "sentences": list(self.sentences[-MAX_SENTENCES:]),
            "messages": find_messages(self.sentences[-MAX_SENTENCES:]),
            "reserve_share": self.reserve_share,
            "compilers_behind": self.compilers_behind,
            "transfer_start_s": self.transfer_start_s,
            "keeps_programs": self.keeps_programs,
            "rates": dict(self.rates),
            "overlap": dict(list(self.overlap.items())[-MAX_VERDICTS:]),
        }


def record_path() -> Path:
    """Return the path of the record of machines."""
    return cache_folder() / NAME


def machine_key(device_kind: str, num_devices: int) -> str:
    """Return the key of a record: chips, libtpu's version, and a digest of the code that computes results."""
    from .. import versions  # needs `packaging`, which may be missing when `doctor` runs

    libtpu = versions.list_result_versions().get("libtpu", "none")
    return f"{num_devices} x {device_kind}, libtpu {libtpu}, sources {versions.source_digest()[:12]}"


def read_record(key: str) -> MachineRecord:
    """Return the record of a machine, empty for an unknown one. Invalid parts are ignored and logged."""
    return parse_record(_entries(record_path()).get(key))


def read_all(file: Path | None = None) -> dict[str, MachineRecord]:
    """Return all records of a file, by default this process's, by key, the oldest first."""
    return {_printable(key): parse_record(value) for key, value in _entries(file or record_path()).items()}


def update_record(key: str, found: MachineRecord) -> MachineRecord:
    """Merge `found` into a machine's record, and return the result, other processes' additions included."""
    with store.hold_lock():  # another process may be adding too
        known = read_record(key) | found
        write_record(key, known)
    return known


def write_record(key: str, record: MachineRecord) -> None:
    """Replace a machine's record. If the folder is read-only, a warning is logged and the run goes on."""
    try:
        with store.hold_lock():
            entries = _entries(record_path())
            entries.pop(key, None)
            entries[key] = record.to_json()
            content = json.dumps(dict(list(entries.items())[-MAX_MACHINES:]), indent=2, ensure_ascii=False)
            record_path().parent.mkdir(parents=True, exist_ok=True)
            files.write_file(record_path(), f"{content}\n".encode(), mode=0o600)
    except OSError as error:
        log.warning("%s was not written (%s): this machine's failures will be detected again.", record_path(), error)


def _entries(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        entries = files.parse_json(content) if len(content) <= MAX_BYTES else None
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read (%s) and is ignored.", file, error)
        return {}
    if not isinstance(entries, dict):
        log.warning("%s is not a record of machines and is ignored.", file)
        return {}
    return entries


def parse_record(value: object) -> MachineRecord:
    """Parse an untrusted record from JSON; unknown or invalid fields are ignored."""
    if not isinstance(value, Mapping):
        return MachineRecord()
    begins = tuple(begin for switch in OPTIONS.values() for begin in switch)

    def texts(name: str) -> list[str]:
        items = value.get(name)
        return [item for item in items if isinstance(item, str)] if isinstance(items, list) else []

    def kernels(name: str) -> tuple[str, ...]:
        return tuple(sorted(set(texts(name)) & set(registry.KERNELS)))

    verdicts = [
        (digest, verdict)
        for digest, verdict in _given(value, "overlap").items()
        if isinstance(verdict, bool) and re.fullmatch(r"[0-9a-f]{8,64}", digest)
    ]
    options = {option for option in texts("options_off") if option.startswith(begins)}
    return MachineRecord(
        fallbacks=Fallbacks(
            kernels=KernelFallbacks(off=kernels("kernels_off"), small=kernels("kernels_small")),
            options=tuple(sorted(options)),
        ),
        sentences=tuple(
            transform(restore(text, value.get("messages")), _printable) for text in texts("sentences")[-MAX_SENTENCES:]
        ),
        reserve_share=_number(value.get("reserve_share"), 0.0, MAX_RESERVE),
        compilers_behind=None if (count := _number(value.get("compilers_behind"), 0, 8)) is None else int(count),
        transfer_start_s=_number(value.get("transfer_start_s"), 0.0, MAX_TRANSFER_START_S),
        keeps_programs=value.get("keeps_programs") is not False,
        rates={name: rate for name in RATES if (rate := _number(_given(value, "rates").get(name), 0.0, 1e6))},
        overlap=dict(verdicts[-MAX_VERDICTS:]),
    )


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:MAX_SENTENCE])


def _given(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    mapping = value.get(name)
    return mapping if isinstance(mapping, Mapping) else {}


def _number(value: object, least: float, most: float) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if least <= value <= most else None
