"""What machines with a TPU said: the records in `benchmarks/measured/`, as a table for the READMEs.

Records are what `comfyui-tpu bench --json`, `bench --verify --json` and `selftest --first-run --report` write.
`predict.py` puts the table under its own.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from comfyui_tpu.cli import verify
from comfyui_tpu.tpu_runtime.device_memory import DeviceMemory
from comfyui_tpu.tpu_runtime.plan import measured
from comfyui_tpu.tpu_runtime.selftest import report

MEASURED = Path(__file__).parent / "measured"
VERSIONS = ("libtpu", "jax")
HEAD = ("record", "what ran", "chips", "versions", "what came of it")

Record = Mapping[str, Any]
Row = tuple[str, ...]


def rows(folder: Path = MEASURED) -> list[Row]:
    """A row for each record, by file name. Raises `ValueError` with a sentence for a file that is none."""
    return [_row(path, *read(path)) for path in sorted(folder.glob("*.json"))]


def read(path: Path) -> tuple[str, Record]:
    """The kind of a record and the record: `bench`, `verify` or `first run`."""
    try:
        record = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    found = record if isinstance(record, dict) else {}
    if found.get("label") == "first run" and found.get("schema") == report.SCHEMA:
        return "first run", found
    if "forms" in found and found.get("schema") == verify.SCHEMA:
        return "verify", found
    measured.read(path)
    return "bench", found


def is_of_a_tpu(kind: str, record: Record) -> bool:
    """Whether it says anything of a TPU: elsewhere miniatures run, and plans are the compiler's."""
    if kind == "first run":
        return record["platform"] == "tpu"
    return record["label"] == "measured" and not record["is_tiny"]


def table(found: list[Row]) -> str:
    """Markdown; nothing without a record."""
    if not found:
        return ""
    lines = ["| " + " | ".join(line) + " |" for line in (HEAD, ("---",) * len(HEAD), *found)]
    return "\n".join(["Measured, by the files in `benchmarks/measured/`:", "", *lines])


def _row(path: Path, kind: str, record: Record) -> Row:
    said: Mapping[str, Callable[[Record], Iterator[str]]] = {
        "first run": _first_run, "verify": _verify, "bench": _bench,
    }  # fmt: skip
    where = "" if is_of_a_tpu(kind, record) else " (no TPU)"
    what = "self-test" if kind == "first run" else record["model"] + ", one block" * (kind == "verify")
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in VERSIONS if record["versions"].get(name))
    return path.stem, what, f"{_chips(kind, record)}{where}", versions, "; ".join(said[kind](record))


def _chips(kind: str, record: Record) -> str:
    if kind == "first run":
        return f"{len(record['chips'])} x {record['chips'][0]['kind']}" if record["chips"] else "none"
    return f"{record['num_devices']} x {record['device_kind']}"


def _first_run(record: Record) -> Iterator[str]:
    good = sum(row["verdict"] == "ok" for row in record["rows"])
    yield f"{good} of {len(record['rows'])} checks held"
    machine = record["machine"]
    if off := [*machine["kernels_off"], *machine["options_off"]]:
        yield f"without {', '.join(off)}"
    if machine["reserve_share"] is not None:
        yield f"{100 * machine['reserve_share']:.0f} % of memory left free"
    yield from (f"{rate:.1f} GB/s {name.replace('_', ' ')}" for name, rate in machine["rates"].items())


def _verify(record: Record) -> Iterator[str]:
    wrong = [form["name"] for form in record["forms"] if form["problem"]]
    yield f"wrong: {', '.join(wrong)}" if wrong else f"{len(record['forms'])} forms agree"
    times = {form["name"]: form["median_s"] for form in record["forms"]}
    for name, seconds in times.items():
        chosen = times.get(verify.CHOSEN + verify.PART * name.endswith(verify.PART))
        if seconds and chosen and not name.startswith(verify.CHOSEN):
            yield f"{name} {100 * seconds / chosen:.0f} %"


def _bench(record: Record) -> Iterator[str]:
    settings = record["settings"]
    yield f"{settings['width']}x{settings['height']}, {settings['num_frames']} frames, {record['precision']}"
    yield f"{record['total_s']:.1f} s of programs a generation"
    memory = DeviceMemory(
        limit_bytes=record.get("hbm_limit_bytes"), peak_in_use_bytes=record["hbm_peak_bytes"],
        peak_reserved_bytes=record.get("hbm_reserved_peak_bytes"),
    )  # fmt: skip
    yield f"the fullest chip {memory}"
