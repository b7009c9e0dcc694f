"""Predict the flagship models for one TPU: `benchmarks/predicted.json` and the table in `docs/performance.md`.

Inputs are the models' defaults. Below that table are the records of machines with a TPU, from `benchmarks/measured/`.

Run: python benchmarks/predict.py [--model NAME ...] [--topology v6e:2x4] [--stages denoise] [--page]. It takes minutes
per model and needs no TPU. Other models and stages keep their earlier records. Other topologies have their own files,
`benchmarks/predicted_<generation>.json`, and no table.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

# Run as a file, this folder is where Python looks first.
import ranges
from comfyui_tpu.diagnostics import bench, verify
from comfyui_tpu.diagnostics.selftest import report
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.device_memory import DeviceMemory
from comfyui_tpu.tpu_runtime.model_spec import STAGES
from comfyui_tpu.tpu_runtime.models import FLAGSHIPS, lookup_spec
from comfyui_tpu.tpu_runtime.plan import plan
from comfyui_tpu.tpu_runtime.plan import report as plan_report
from comfyui_tpu.tpu_runtime.plan.compile import PlanRequest
from comfyui_tpu.tpu_runtime.programs.program import DENOISE_STEP
from comfyui_tpu.tpu_runtime.units import GIB

ROOT = Path(__file__).parents[1]
DEFAULT = "v6e:2x4"
PAGE = ROOT / "docs" / "performance.md"
MEASURED = ROOT / "benchmarks" / "measured"
BEGIN, END = "<!-- predicted:begin -->", "<!-- predicted:end -->"
RANGES = "<!-- ranges:begin -->", "<!-- ranges:end -->"
# Files of this machine and sentences for a reader are not for comparing.
DROPPED = ("findings", "notes")

Record = Mapping[str, Any]
Row = tuple[str, ...]
# The table of machines, and the versions that it says.
MACHINES = ("record", "what ran", "chips", "versions", "what came of it")
VERSIONS = ("libtpu", "jax")


def recorded(topology: str) -> Path:
    """The file of a topology."""
    suffix = "" if topology == DEFAULT else "_" + topology.partition(":")[0]
    return ROOT / "benchmarks" / f"predicted{suffix}.json"


def read(file: Path) -> dict[str, Record]:
    """What is recorded, by model, or by recipe where it is one (see `recipes.py`)."""
    records = json.loads(file.read_text()) if file.exists() else []
    return {record.get("recipe", record["model"]): record for record in records}


def write(file: Path, records: Mapping[str, Record], recipes: Sequence[str]) -> None:
    """Records flagships, and the recipes in the order of `recipes`."""
    names = [*(spec.name for spec in FLAGSHIPS), *recipes]
    file.write_text(json.dumps([records[name] for name in names if name in records], indent=1) + "\n")


def predict(name: str, topology: str, stages: Sequence[str] = STAGES, widgets: Mapping[str, Any] = {}) -> Record:
    """One model's plan at its defaults, but for `widgets`."""
    spec = lookup_spec(name)
    settings = spec.settings(**widgets)
    request = PlanRequest(spec=spec, settings=settings, topology=chips.topology(topology), stages=tuple(stages))
    record = plan.make_plan(request, _say).to_json()
    programs = [{key: value for key, value in program.items() if key not in DROPPED} for program in record["programs"]]
    return {**record, "title": spec.title, "programs": programs, "weights_bytes": ranges.weights_bytes(spec)}


def merged(new: Record, old: Record) -> Record:
    """`old` with the programs of `new` in place of those of the same parts, and what follows from all of them."""
    again = {_part(program) for program in new["programs"]}
    candidates = [*(program for program in old["programs"] if _part(program) not in again), *new["programs"]]
    order = list(dict.fromkeys(_part(program) for program in [*old["programs"], *new["programs"]]))
    programs = sorted(candidates, key=lambda program: order.index(_part(program)))
    weights = {name: program["memory"]["weights"] for program in programs for name in program["weights"]}
    largest = max(program["memory"]["peak"] - program["memory"]["weights"] for program in programs)
    residency = sum(weights.values()) + largest
    seconds = [program["predicted_s"] for program in programs]
    total = None if None in seconds else sum(program["predicted_s"] * program["runs"] for program in programs)
    fits = residency <= new["chip"]["hbm_gib"] * GIB and all(program["fits"] for program in programs)
    return {
        **new,
        "mesh": {program["name"]: program["mesh"] for program in programs},
        "programs": programs,
        "residency_bytes": residency,
        "predicted_total_s": total,
        "fits": fits,
    }


def _part(program: Record) -> str:
    """The component that a program runs; one that it had before may be gone."""
    return program["name"].partition(".")[0]


def table(records: Sequence[Record]) -> str:
    """Markdown, one row a model."""
    head = (
        "model", "size", "frames", "steps", "mesh of the denoiser", "GiB per chip", "s per step", "kernels",
        "waiting for links", "MFU", "MFU of its shapes", "s in total",
    )  # fmt: skip
    rows = list(map(_row, records))
    if any(seconds := [measured_step(record) for record in records]):
        head = (*head, "measured s per step")
        rows = [(*row, number(found)) for row, found in zip(rows, seconds, strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ("---",) * len(head), *rows])


def measured_step(record: Record) -> float | None:
    """The median step of the newest file in `measured/`, by name, for this model and size on such a TPU."""
    found = None
    there = record["chip"]["device_kind"], chips.topology(record["topology"]).num_devices
    for path in sorted(MEASURED.glob("*.json")):
        kind, content = read_record(path)
        if kind != "bench":
            continue
        one = measured(content, path)
        same = all(one.settings.get(name) == record["settings"][name] for name in ("height", "width", "num_frames"))
        on = one.device_kind, one.num_devices
        if same and on == there and not one.is_tiny and one.model == record["model"]:
            found = next((p.median_s for p in one.programs if p.name.startswith(DENOISE_STEP)), found)
    return found


def _row(record: Record) -> tuple[str, ...]:
    settings, clock = record["settings"], record["chip"]["clock_ghz"] * 1e9
    step = step_of(record)
    total = record["predicted_total_s"]
    seconds = step["predicted_s"]
    return (
        record["title"],
        f"{settings['width']}x{settings['height']}",
        str(settings["num_frames"]),
        str(settings["num_inference_steps"]),
        step["mesh"],
        f"{record['residency_bytes'] / GIB:.1f}" + ("" if record["fits"] else " (does not fit)"),
        floored(step),
        _share(step["kernel_cycles"] / clock, seconds),
        _share(step["collectives_exposed_s"], seconds),
        _share(step["mfu"], 1),
        _share(step["ceiling_share"], 1),
        number(total),
    )


def step_of(record: Record) -> Record:
    """The denoiser's program: what runs once a step."""
    return next(program for program in record["programs"] if program["name"].startswith(DENOISE_STEP))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def floored(program: Record) -> str:
    """Return a program's seconds, and that they are a floor where the prediction is the chips' peak."""
    # Older records have no word of their kernels.
    is_floor = plan_report.is_floor(program["ceiling_share"], program.get("kernels_share"))
    return number(program["predicted_s"]) + f" ({plan_report.FLOOR})" * is_floor


def without_starts(records: Sequence[Record]) -> str:
    """Return a sentence that names the records from before a collective's start was counted; "" without any."""
    names = [record.get("recipe", record["title"]) for record in records if is_older(record)]
    return f" Recorded before the start of a collective was counted: {', '.join(names)}." if names else ""


def is_older(record: Record) -> bool:
    """Return whether a record has collectives whose start is not in its seconds."""
    return "transfer_start" not in record and any(program["collectives"] for program in record["programs"])


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.0f} %"


def section(records: Sequence[Record]) -> str:
    """What stands between the page's markers: the predictions, and what machines said."""
    first, is_measured = records[0], any(measured_step(record) for record in records)
    only = "the last column alone was measured" if is_measured else "nothing in this table was measured"
    predicted = (
        f"{first['label'].capitalize()} ({first['compiler']}) for {first['topology']}, {first['chips']} chips, "
        f"{first['precision']}, by `benchmarks/predict.py`; {only}. GiB: with all components "
        "loaded and the largest program running. Kernels and links: shares of a step; links: collectives that no "
        "computation covers. MFU of its shapes: relative to the peak for contractions that are shallower than a matrix "
        "unit (attention heads). Floor: a prediction of at least "
        f"{100 * plan_report.FLOOR_SHARE:.0f} % of the peak, which no chip reaches."
        f"{without_starts(records)}\n\n" + table(records)
    )
    return "\n\n".join(filter(None, [predicted, machine_table(machine_rows(MEASURED))]))


# --- what machines with a TPU said ------------------------------------------------------------------------------------


def machine_rows(folder: Path) -> list[Row]:
    """A row for each record, by file name. Raises `ValueError` with a sentence for a file that is none."""
    return [_machine_row(path, *read_record(path)) for path in sorted(folder.glob("*.json"))]


def read_record(path: Path) -> tuple[str, Record]:
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
    measured(found, path)
    return "bench", found


def measured(record: Record, path: Path) -> bench.BenchResult:
    """What `bench --json` wrote to `path`. Raises `ValueError` with a sentence for what is no such record."""
    if record.get("schema") != bench.SCHEMA:
        raise ValueError(
            f"{path} is not what `comfyui-tpu bench --json` of this version writes (schema {bench.SCHEMA})."
        )
    programs = tuple(_fill(bench.MeasuredProgram, program, path) for program in record.get("programs", ()))
    if not programs:
        raise ValueError(f"{path} holds no program; `programs` must have one for each that ran.")
    return _fill(bench.BenchResult, {**record, "programs": programs}, path)


def _fill(kind: type, values: Any, path: Path) -> Any:
    """A record of `kind`; ValueError that names the fields that are missing or of a wrong type. Those with a default
    came later: older records do not have them.
    """
    defaults = {one.name: one.default for one in fields(kind) if one.default is not MISSING}
    values = {**defaults, **values} if isinstance(values, dict) else {}
    wrong = [one.name for one in fields(kind) if one.name not in values or not _fits(one.type, values[one.name])]
    if wrong:
        raise ValueError(f"{path}: {', '.join(wrong)} of a {kind.__name__} {'is' if len(wrong) == 1 else 'are'} wrong.")
    return kind(**{one.name: values[one.name] for one in fields(kind)})


def _fits(kind: Any, value: Any) -> bool:
    if value is None:
        return "None" in str(kind)
    wanted = {int: int, float: (int, float), str: str, bool: bool}.get(kind)
    return wanted is None or (isinstance(value, wanted) and isinstance(value, bool) == (kind is bool))


def is_of_a_tpu(kind: str, record: Record) -> bool:
    """Whether it says anything of a TPU: elsewhere miniatures run, and plans are the compiler's."""
    if kind == "first run":
        return record["platform"] == "tpu"
    return record["label"] == "measured" and not record["is_tiny"]


def machine_table(found: list[Row]) -> str:
    """Markdown; nothing without a record."""
    if not found:
        return ""
    lines = ["| " + " | ".join(line) + " |" for line in (MACHINES, ("---",) * len(MACHINES), *found)]
    return "\n".join(["Measured, by the files in `benchmarks/measured/`:", "", *lines])


def _machine_row(path: Path, kind: str, record: Record) -> Row:
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


# --- the page ---------------------------------------------------------------------------------------------------------


def insert(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """`page` with `text` between its markers. Raises `ValueError` if it has none."""
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page must contain {begin} and {end}.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def write_page(text: str, begin: str, end: str) -> None:
    """Puts `text` between the page's markers."""
    PAGE.write_text(insert(PAGE.read_text("utf-8"), text, begin, end), "utf-8")


def write_tables(known: Mapping[str, Record]) -> None:
    """Put the tables of the flagships among the `known` records into the page."""
    records = [known[spec.name] for spec in FLAGSHIPS if spec.name in known]
    write_page(section(records), BEGIN, END)
    write_page(ranges.table(records), *RANGES)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", action="append", metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--topology", default=DEFAULT)
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated; others stay as recorded")
    parser.add_argument("--page", action="store_true", help="only write the page's tables from what is recorded")
    options = parser.parse_args(arguments)
    file = recorded(options.topology)
    known = read(file)
    if options.page:
        write_tables(read(recorded(DEFAULT)))
        return
    for name in options.model or [spec.name for spec in FLAGSHIPS]:
        _say(f"== {name}")
        found = predict(name, options.topology, options.stages.split(","))
        known[name] = merged(found, known[name]) if name in known else found
        # After each: a run of all takes long, and may be broken off.
        write(file, known, [key for key, record in known.items() if "recipe" in record])
        if options.topology == DEFAULT:
            write_tables(known)


if __name__ == "__main__":
    main()
