"""Predict how Wan's step scales with the number of chips: the table in `docs/performance.md`.

It covers two sizes of the denoiser on 1, 4, 8, 16 and 32 chips of v6e and on 4 of v5p. Efficiency is relative to the
chip seconds on the fewest chips of the generation that hold the model.

Run: python benchmarks/scaling.py. It takes about two minutes per entry and needs no TPU.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.plan import plan
from comfyui_tpu.tpu_runtime.plan.compile import PlanRequest
from comfyui_tpu.tpu_runtime.plan.report import LABEL, ProgramPlan
from comfyui_tpu.tpu_runtime.units import GIB

MODEL = "wan2.1-t2v-14b"
SIZES = ((480, 832), (720, 1280))
TOPOLOGIES = ("v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v5p:2x2x1")
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- scaling:begin -->", "<!-- scaling:end -->"
HEAD = (
    "chips",
    "mesh",
    "GiB per chip",
    "s per step",
    "efficiency",
    "kernels",
    "XLA's operations",
    "waiting for links",
    "bound by",
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One size on one slice; without `seconds` it does not fit, and `program` says what it would need."""

    size: tuple[int, int]
    topology: chips.Topology
    program: ProgramPlan

    @property
    def seconds(self) -> float | None:
        return self.program.predicted_s if self.program.fits else None

    @property
    def chip_seconds(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.topology.num_chips

    def parts(self) -> dict[str, float]:
        """Seconds of the step, by what they go to."""
        timing = self.program.timing
        assert timing is not None
        clock = self.topology.chip.clock_hz
        seconds = timing.kernels / clock, timing.xla / clock, timing.waiting / clock
        return dict(zip(HEAD[5:8], seconds, strict=True))


def predict(size: tuple[int, int], name: str) -> Entry:
    spec, (height, width) = lookup_spec(MODEL), size
    topology = chips.topology(name)
    request = PlanRequest(
        spec=spec, settings=spec.settings(height=height, width=width), topology=topology, stages=("denoise",)
    )
    (program,) = plan.make_plan(request, _say).programs
    return Entry(size=size, topology=topology, program=program)


def row(entry: Entry, entries: Sequence[Entry]) -> tuple[str, ...]:
    """A line of the table; `entries` are those to compare with."""
    gib = f"{entry.program.memory.peak / GIB:.1f}"
    first = (f"{entry.topology.num_chips} x {entry.topology.chip.generation}", str(entry.program.mesh))
    if entry.seconds is None or entry.chip_seconds is None:
        return (*first, f"{gib}, does not fit", *["-"] * 6)
    same = (e for e in entries if e.size == entry.size and e.topology.chip == entry.topology.chip)
    fewest = min((e for e in same if e.chip_seconds), key=lambda e: e.topology.num_chips)
    assert fewest.chip_seconds is not None
    parts = entry.parts()
    return (
        *first,
        gib,
        f"{entry.seconds:.2f}",
        f"{100 * fewest.chip_seconds / entry.chip_seconds:.0f} %",
        *(f"{100 * part / entry.seconds:.0f} %" for part in parts.values()),
        max(parts, key=lambda name: parts[name]),
    )


def section(entries: Sequence[Entry]) -> str:
    """What stands between the page's markers: a table for each size."""
    said = [f"{LABEL.capitalize()}, bfloat16, 81 frames; nothing was measured."]
    for size in SIZES:
        lines = [HEAD, ("---",) * len(HEAD), *(row(entry, entries) for entry in entries if entry.size == size)]
        said.append(f"**{size[1]}x{size[0]}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(said)


def insert(page: str, text: str) -> str:
    """`page` with `text` between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    entries = []
    for size in SIZES:
        for name in TOPOLOGIES:
            _say(f"== {size[1]}x{size[0]} on {name}")
            entries.append(predict(size, name))
    PAGE.write_text(insert(PAGE.read_text(), section(entries)))


if __name__ == "__main__":
    main()
