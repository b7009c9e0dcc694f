"""Predicts every model for one TPU: `benchmarks/predicted.json` and the table in the README.

Inputs are the models' defaults, but for the size of videos: all have the same, so that models compare.

Run: python benchmarks/predict.py [--model NAME ...] [--topology v6e:2x4]. Takes minutes a model; no TPU is needed.
Models that are not named keep what was recorded before.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comfyui_tpu.tpu_runtime import chips, plan
from comfyui_tpu.tpu_runtime.models import SPECS, spec_by_name
from comfyui_tpu.tpu_runtime.plan_compile import Request
from comfyui_tpu.tpu_runtime.spec import ModelSpec, Settings

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "predicted.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- predicted:begin -->", "<!-- predicted:end -->"
# Files of this machine and sentences for a reader are not for comparing.
DROPPED = ("findings", "notes")
VIDEO_SIZE = {"height": 720, "width": 1280}

Record = Mapping[str, Any]


def settings_of(spec: ModelSpec) -> Settings:
    """What a model is predicted at."""
    return spec.settings(**({} if spec.is_image else VIDEO_SIZE))


def predict(name: str, topology: str) -> Record:
    """One model's plan."""
    spec = spec_by_name(name)
    request = Request(spec=spec, settings=settings_of(spec), topology=chips.topology(topology))
    record = plan.make_plan(request, _say).to_json()
    programs = [{key: value for key, value in program.items() if key not in DROPPED} for program in record["programs"]]
    return {**record, "title": spec.title, "programs": programs}


def table(records: Sequence[Record]) -> str:
    """Markdown, one row a model."""
    head = (
        "model", "size", "frames", "steps", "mesh of the denoiser", "GiB a chip", "s a step", "of it kernels",
        "of it waiting for links", "MFU", "of what its shapes allow", "s in all",
    )  # fmt: skip
    lines = [head, ("---",) * len(head), *map(_row, records)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(record: Record) -> tuple[str, ...]:
    settings, clock = record["settings"], record["chip"]["clock_ghz"] * 1e9
    # The denoiser is what runs once a step.
    step = max(record["programs"], key=lambda program: program["runs"] == settings["num_inference_steps"])
    total = record["predicted_total_s"]
    seconds = step["predicted_s"]
    return (
        record["title"],
        f"{settings['width']}x{settings['height']}",
        str(settings["num_frames"]),
        str(settings["num_inference_steps"]),
        step["mesh"],
        f"{record['residency_bytes'] / chips.GIB:.1f}" + ("" if record["fits"] else " (does not fit)"),
        _number(seconds),
        _share(step["kernel_cycles"] / clock, seconds),
        _share(step["collectives_exposed_s"], seconds),
        _share(step["mfu"], 1),
        _share(step["ceiling_share"], 1),
        _number(total),
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{100 * part / whole:.0f} %"


def section(records: Sequence[Record]) -> str:
    """What stands between the README's markers."""
    first = records[0]
    return (
        f"{first['label'].capitalize()} ({first['compiler']}) for {first['topology']}, {first['chips']} chips, "
        f"{first['precision']}, by `benchmarks/predict.py`; nothing in this table was measured. GiB: all components "
        "loaded and the largest program running. Links: collectives that no computation covers. Shapes allow less than "
        "the peak where contractions are shallower than a matrix unit (attention heads).\n\n" + table(records)
    )


def insert(readme: str, text: str) -> str:
    """`readme` with `text` between its markers. Raises `ValueError` if it has none."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the README must contain {BEGIN} and {END}.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--topology", default="v6e:2x4")
    options = parser.parse_args(arguments)
    known = {record["model"]: record for record in json.loads(RECORDED.read_text())} if RECORDED.exists() else {}
    for name in options.model or [spec.name for spec in SPECS]:
        _say(f"== {name}")
        known[name] = predict(name, options.topology)
        # After each: a run of all takes long, and may be broken off.
        records = [known[spec.name] for spec in SPECS if spec.name in known]
        RECORDED.write_text(json.dumps(records, indent=1) + "\n")
        README.write_text(insert(README.read_text(), section(records)))


if __name__ == "__main__":
    main()
