"""`machine.json` in the cache: what was found out about this machine, by its chips, libtpu and the pack's sources.

Deleting it is safe: what fails is found out again. It holds names, numbers and sentences, no code, and can only make
programs slower.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...kernels import names
from ...kernels.choice import Rungs
from .. import files
from ..cache import store
from ..cache.store import cache_folder
from .fallbacks import OPTIONS, Fallbacks

log = logging.getLogger(__name__)

NAME = "machine.json"
MAX_BYTES = 2**20
# Of the newest machines, and of each the newest sentences.
MAX_MACHINES, MAX_SENTENCES = 32, 32
# Characters of a sentence, which is shown in terminals and in the page.
MAX_SENTENCE = 1000
# More than any self-test leaves free: with less room than that nothing would run.
MAX_RESERVE = 0.5

# A hundred times what a start is thought to take.
MAX_TRANSFER_START_S = 1e-3

# What a record may say of rates, in GB/s.
RATES = ("to_chips", "from_chips")


@dataclass(frozen=True, kw_only=True)
class MachineRecord:
    """What a machine does without, and the sentences that say why, in the order in which it was found out.

    Measured by `selftest --first-run`, None before: `reserve_share` of a chip's memory that is left free, how many
    `compilers_behind` a running stage do not slow it down, `transfer_start_s` seconds before a collective's first byte.
    `keeps_programs`: compiled ones may be taken from the disk.
    """

    fallbacks: Fallbacks = Fallbacks()
    sentences: tuple[str, ...] = ()
    reserve_share: float | None = None
    compilers_behind: int | None = None
    transfer_start_s: float | None = None
    keeps_programs: bool = True
    rates: Mapping[str, float] = field(default_factory=dict)

    def __or__(self, other: "MachineRecord") -> "MachineRecord":
        """Both; of numbers the other's, where it has them."""
        reserve, behind, start = other.reserve_share, other.compilers_behind, other.transfer_start_s
        return MachineRecord(
            fallbacks=self.fallbacks | other.fallbacks,
            sentences=(*(one for one in self.sentences if one not in other.sentences), *other.sentences),
            reserve_share=self.reserve_share if reserve is None else reserve,
            compilers_behind=self.compilers_behind if behind is None else behind,
            transfer_start_s=self.transfer_start_s if start is None else start,
            keeps_programs=self.keeps_programs and other.keeps_programs,
            rates={**self.rates, **other.rates},
        )

    def to_json(self) -> dict[str, Any]:
        """What `parsed` reads."""
        kernels = self.fallbacks.kernels
        return {
            "kernels_off": list(kernels.off),
            "kernels_small": list(kernels.small),
            "options_off": list(self.fallbacks.options),
            "sentences": list(self.sentences[-MAX_SENTENCES:]),
            "reserve_share": self.reserve_share,
            "compilers_behind": self.compilers_behind,
            "transfer_start_s": self.transfer_start_s,
            "keeps_programs": self.keeps_programs,
            "rates": dict(self.rates),
        }


def path() -> Path:
    return cache_folder() / NAME


def key_of(device_kind: str, num_devices: int) -> str:
    """What a record depends on: chips, libtpu, and the code that computes results."""
    from .. import versions  # needs `packaging`, which `doctor` may have to miss

    libtpu = versions.of_results().get("libtpu", "none")
    return f"{num_devices} x {device_kind}, libtpu {libtpu}, sources {versions.source_digest()[:12]}"


def read(key: str) -> MachineRecord:
    """The record of a machine; an empty one where there is none. What is damaged is left aside, and the log says so."""
    return parsed(_entries(path()).get(key))


def everything(file: Path | None = None) -> dict[str, MachineRecord]:
    """All records of a file, by default this process's, by key, the oldest first."""
    return {_printable(key): parsed(value) for key, value in _entries(file or path()).items()}


def add(key: str, found: MachineRecord) -> MachineRecord:
    """Adds to a machine's record; all that is known then, what other processes found out meanwhile too."""
    with store.locked():  # another process may be adding too
        known = read(key) | found
        write(key, known)
    return known


def write(key: str, record: MachineRecord) -> None:
    """Puts a record in place of the one before. A folder that cannot be written costs the record, not the run."""
    try:
        with store.locked():
            entries = _entries(path())
            entries.pop(key, None)
            entries[key] = record.to_json()
            content = json.dumps(dict(list(entries.items())[-MAX_MACHINES:]), indent=2, ensure_ascii=False)
            path().parent.mkdir(parents=True, exist_ok=True)
            files.write_file(path(), f"{content}\n".encode(), mode=0o600)
    except OSError as error:
        log.warning("%s was not written (%s): what was found out about this machine is found out again.", path(), error)


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


def parsed(value: Any) -> MachineRecord:
    """A record from JSON, of anyone's: what is none of a record's is left aside."""
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
        sentences=tuple(_printable(one) for one in texts("sentences")[-MAX_SENTENCES:]),
        reserve_share=_number(value.get("reserve_share"), 0.0, MAX_RESERVE),
        compilers_behind=None if (behind := _number(value.get("compilers_behind"), 0, 8)) is None else int(behind),
        transfer_start_s=_number(value.get("transfer_start_s"), 0.0, MAX_TRANSFER_START_S),
        keeps_programs=value.get("keeps_programs") is not False,
        rates={name: rate for name in RATES if (rate := _number(_given(value, "rates").get(name), 0.0, 1e6))},
    )


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text[:MAX_SENTENCE])


def _given(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: Any, least: float, most: float) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and least <= value <= most else None
