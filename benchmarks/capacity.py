"""Compute the slices, chips and chip hours for a number of videos a day, from recorded predictions of every model.

Run: python benchmarks/capacity.py [--videos 1000000] [--used 0.8]. It reads `benchmarks/predicted*.json` and compiles
nothing. `--used` is the share of a day in which a slice generates; the rest is loading, compiling and preemption.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import predict
from comfyui_tpu.tpu_runtime.plan.report import LABEL

DAY_S = 86_400
HOUR_S = 3_600
HEAD = ("model", "slice", "seconds per video", "videos per day and slice", "chip hours per video", "slices", "chips")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One record at work all day: `videos` a day on slices that generate in the share `used` of it."""

    record: predict.Record
    videos: int
    used: float

    @property
    def seconds(self) -> float:
        """Of one video, its text encoder and decoder included."""
        return self.record["predicted_total_s"]

    @property
    def a_slice(self) -> float:
        """Videos a day from one slice."""
        return DAY_S * self.used / self.seconds

    @property
    def slices(self) -> int:
        return math.ceil(self.videos / self.a_slice)

    @property
    def chips(self) -> int:
        return self.slices * self.record["chips"]

    @property
    def chip_hours(self) -> float:
        """Of one video, with the share of the day in which nothing is generated."""
        return self.seconds * self.record["chips"] / HOUR_S / self.used

    def row(self) -> tuple[str, ...]:
        name = self.record.get("recipe", self.record["title"]).removesuffix(f", {self.record['topology']}")
        return (
            name,
            self.record["topology"],
            f"{self.seconds:.1f}",
            f"{self.a_slice:,.0f}",
            f"{self.chip_hours:.3f}",
            f"{self.slices:,}",
            f"{self.chips:,}",
        )


def plans(videos: int, used: float) -> list[Plan]:
    """Of every record that fits, the fewest chips first."""
    files = sorted((predict.ROOT / "benchmarks").glob("predicted*.json"))
    records = [record for file in files for record in predict.read(file).values()]
    videos_only = [record for record in records if record["fits"] and record["settings"]["num_frames"] > 1]
    found = [Plan(record=record, videos=videos, used=used) for record in videos_only]
    return sorted(
        found, key=lambda plan: (plan.record["model"], plan.record["settings"]["num_inference_steps"], plan.chips)
    )


def lines(videos: int, used: float) -> Iterator[str]:
    yield f"{LABEL.capitalize()}: {videos:,} videos a day of default sizes, slices at work {used:.0%} of it."
    yield ""
    for row in (HEAD, ("---",) * len(HEAD), *(plan.row() for plan in plans(videos, used))):
        yield "| " + " | ".join(row) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--videos", type=int, default=1_000_000)
    parser.add_argument("--used", type=float, default=0.8)
    options = parser.parse_args()
    sys.stdout.write("\n".join(lines(options.videos, options.used)) + "\n")


if __name__ == "__main__":
    main()
