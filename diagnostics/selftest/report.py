"""The results of a self-test, to attach to a bug report: without paths, tokens, names of people or machines."""

import getpass
import ipaddress
import os
import platform
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ...tpu_runtime import device_memory, versions
from ...tpu_runtime.machine.record import MachineRecord
from ...tpu_runtime.redact import HIDDEN, redact
from .checks import CheckResult

if TYPE_CHECKING:
    from ...sharding.mesh import Device

SCHEMA = 3
# The problem of a check that has not ended; its row is written before it starts.
UNFINISHED = "It has not ended."
# Variables that change how programs are compiled or where they run.
VARIABLES = (
    "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "JAX_DEFAULT_MATMUL_PRECISION", "COMFYUI_TPU_HBM_GIB",
    "COMFYUI_TPU_KERNELS", "COMFYUI_TPU_OPTIONS",
)  # fmt: skip
_MAX_SENTENCE = 400  # characters of a sentence
_WORD = r"[^\s/'\"<>|:;,()\[\]]+"  # of a path
_PATTERNS = (
    re.compile(r"(['\"])(?:file:|~|\.{1,2})?/(?:(?!\1).)+\1"),  # a path in quotes may hold anything else
    re.compile(r"\b(?:[a-z][a-z0-9+.-]*://|file:)\S+", re.IGNORECASE),
    # Spaces belong to a folder's name where another slash follows soon, and to a file's where an ending does.
    re.compile(
        rf"(?<![\w./])(?:~\w*|\.{{1,2}})?"
        rf"(?:/{_WORD}(?: {_WORD}){{0,5}}(?=/)|/{_WORD}(?: {_WORD}){{0,5}}\.[A-Za-z]\w*|/{_WORD})+/?"
    ),
    re.compile(r"\b[A-Za-z]:\\[^\s'\"]+"),
    re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"),  # addresses
    re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*\b"),
    re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:internal|local|lan|corp|home)\b"),
)
# Candidates for IPv6 addresses; times of day look like them.
_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(?:%\w+)?")


@dataclass(frozen=True, kw_only=True)
class ChipRecord:
    """A device of the report."""

    id: int
    kind: str
    coords: tuple[int, ...] | None
    memory_bytes: int | None  # limit that it reports; None without one


def chip_record(device: "Device") -> ChipRecord:
    return ChipRecord(
        id=device.id,
        kind=device.device_kind,
        coords=tuple(device.coords) if getattr(device, "coords", None) is not None else None,
        memory_bytes=device_memory.memory_stats(device).limit_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class SelftestReport:
    """The report of a self-test."""

    platform: str
    chips: tuple[ChipRecord, ...]
    versions: dict[str, str]
    system: str
    settings: dict[str, str]  # values of `VARIABLES`, without secrets and paths
    models: tuple[str, ...]
    rows: tuple[CheckResult, ...]
    elapsed_s: float
    machine: MachineRecord | None  # after a first run; None after a plain self-test, which changes nothing

    @property
    def is_good(self) -> bool:
        return all(row.is_good for row in self.rows)

    @property
    def verdict(self) -> str:
        """Return one sentence for the user."""
        wrong = [row for row in self.rows if row.problem]
        skipped = [row for row in self.rows if row.is_skipped]
        where = f"{len(self.chips)} x {self.chips[0].kind}" if self.chips else "no chips"
        if not wrong and not skipped:
            return f"Green: all {len(self.rows)} checks on {where} are within their bounds ({self.elapsed_s:.0f} s)."
        titles = "; ".join(row.title for row in (wrong or skipped)[:4]) + ("; ..." if len(wrong or skipped) > 4 else "")
        if not wrong:
            return (
                f"Incomplete: {len(skipped)} of {len(self.rows)} checks on {where} did not run: {titles}. "
                f"{skipped[0].note}"
            )
        return f"Red: {len(wrong)} of {len(self.rows)} checks on {where} failed: {titles}."

    def to_json(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            texts = {name: redact_report(getattr(row, name)) for name in ("family", "stage", "problem", "note")}
            verdict = "ok" if row.is_good else "running" if row.problem == UNFINISHED else "wrong"
            verdict = "skipped" if row.is_skipped else verdict
            rows.append({**row.to_json(), **texts, "learnt": _without_paths(row.learnt), "verdict": verdict})
        return {
            "schema": SCHEMA, "label": "selftest" if self.machine is None else "first run",
            **asdict(replace(self, machine=None)), "rows": rows,
            "machine": self.machine and _without_paths(self.machine),
            "is_good": self.is_good, "verdict": redact_report(self.verdict),
        }  # fmt: skip


def _without_paths(record: MachineRecord) -> dict[str, Any]:
    return {**record.to_json(), "sentences": [redact_report(sentence) for sentence in record.sentences]}


def make_report(
    platform_name: str,
    chips: Sequence[ChipRecord],
    models: Sequence[str],
    rows: Sequence[CheckResult],
    elapsed_s: float,
    machine: MachineRecord | None = None,
) -> SelftestReport:
    """Return the report of these checks on this machine.

    platform_name: JAX's. chips, models, rows: of the checks. elapsed_s: in total. machine: after a first run.
    """
    return SelftestReport(
        platform=platform_name,
        chips=tuple(chips),
        versions={"python": platform.python_version(), **versions.list_result_versions()},
        system=f"{platform.system()} {platform.machine()}",
        settings={name: redact_report(value) for name in VARIABLES if (value := os.environ.get(name))},
        models=tuple(models),
        rows=tuple(rows),
        elapsed_s=elapsed_s,
        machine=machine,
    )


def redact_report(text: str) -> str:
    """Return `text` without tokens, paths, addresses, and names of this machine and its user.

    The result has at most 400 characters, and "..." after them if the text is longer.
    """
    text = _IPV6.sub(lambda match: HIDDEN if _is_address(match[0]) else match[0], redact(text))
    for pattern in _PATTERNS:
        text = pattern.sub(HIDDEN, text)
    for name in _names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text, flags=re.IGNORECASE)
    return text if len(text) <= _MAX_SENTENCE else text[:_MAX_SENTENCE] + "..."


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.rstrip("."))
    except ValueError:
        return False
    return True


def _names() -> set[str]:
    """Return the names of this machine and its user."""
    host = socket.gethostname()
    names = {host, host.partition(".")[0]}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):  # a user without a name
        pass
    return {name for name in names if len(name) > 1}
