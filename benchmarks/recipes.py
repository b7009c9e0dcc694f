"""Predict complete generations in few steps: `benchmarks/predicted.json` and the recipes in `docs/performance.md`.

Run: python benchmarks/recipes.py [--only TITLE ...] [--stages decode]. It takes minutes per recipe and needs no TPU.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Run as a file, this folder is where Python looks first.
import predict
from comfyui_tpu.tpu_runtime.model_spec import STAGES
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.plan import report as plan_report
from comfyui_tpu.tpu_runtime.units import GIB

BEGIN, END = "<!-- recipes:begin -->", "<!-- recipes:end -->"
ONE_BRANCH = {"guidance_scale": 1.0}
ONE_CHIP = ("v5e:1x1", "v6e:1x1")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A generation as an example workflow has it: a model, what is not its default, and a TPU."""

    title: str
    model: str
    topology: str
    widgets: Mapping[str, float | str]

    @property
    def key(self) -> str:
        return f"{self.title}, {self.topology}"


WAN22 = {"num_inference_steps": 4, **ONE_BRANCH, "guidance_scale_2": 1.0}
WAN_SMALL = {"height": 480, "width": 832, "num_frames": 81, "num_inference_steps": 4, **ONE_BRANCH}
SQUARE = {"height": 1024, "width": 1024}
KLEIN = {**SQUARE, "num_inference_steps": 4, **ONE_BRANCH}
RECIPES = (
    Recipe(title="Wan 2.2 T2V, 4 steps", model="wan2.2-t2v-a14b", topology="v6e:2x4", widgets=WAN22),
    Recipe(
        title="Wan 2.2 T2V, 4 steps, int8",
        model="wan2.2-t2v-a14b",
        topology="v6e:2x4",
        widgets={**WAN22, "quality": "int8"},
    ),
    Recipe(title="Wan 2.2 I2V, 4 steps", model="wan2.2-i2v-a14b", topology="v6e:2x4", widgets=WAN22),
    *(
        Recipe(title="Wan 2.1 T2V 1.3B, 4 steps", model="wan2.1-t2v-1.3b", topology=topology, widgets=WAN_SMALL)
        for topology in ONE_CHIP
    ),
    Recipe(
        title="Wan 2.1 T2V 1.3B, 4 steps, int8",
        model="wan2.1-t2v-1.3b",
        topology="v5e:1x1",
        widgets={**WAN_SMALL, "quality": "int8"},
    ),
    *(
        Recipe(title="Wan 2.1 T2V 1.3B, 50 steps", model="wan2.1-t2v-1.3b", topology=topology, widgets={})
        for topology in ONE_CHIP
    ),
    *(
        Recipe(title="FLUX.2 klein 4B, 4 steps", model="flux2-klein-4b", topology=topology, widgets=KLEIN)
        for topology in (*ONE_CHIP, "v6e:2x4")
    ),
    Recipe(
        title="FLUX.2 klein 4B, 4 steps, int8",
        model="flux2-klein-4b",
        topology="v5e:1x1",
        widgets={**KLEIN, "quality": "int8"},
    ),
    *(
        Recipe(title="Z-Image Turbo, 8 steps", model="z-image-turbo", topology=topology, widgets={})
        for topology in ONE_CHIP
    ),
    Recipe(title="Qwen-Image Edit, 40 steps", model="qwen-image-edit-2511", topology="v6e:2x4", widgets={}),
    Recipe(
        title="FLUX.2 dev Turbo, 8 steps",
        model="flux2-dev",
        topology="v6e:2x4",
        widgets={**SQUARE, "num_inference_steps": 8},
    ),
)


def table(records: Sequence[predict.Record]) -> str:
    """Markdown, one row a recipe."""
    head = ("recipe", "TPU", "size", "frames", "GiB, largest stage", "s per step", "text", "image", "steps", "decoder",
            "s in total")  # fmt: skip
    lines = [head, ("---",) * len(head), *map(_row, records)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(record: predict.Record) -> tuple[str, ...]:
    settings = record["settings"]
    step = predict.step_of(record)

    def seconds(*starts: str) -> str:
        parts = [p["predicted_s"] * p["runs"] for p in record["programs"] if p["name"].startswith(starts)]
        return predict.number(sum(parts)) if parts else "-"

    return (
        record["recipe"].rpartition(", ")[0],
        record["topology"],
        f"{settings['width']}x{settings['height']}",
        str(settings["num_frames"]),
        f"{max(program['memory']['peak'] for program in record['programs']) / GIB:.1f}",
        predict.floored(step),
        seconds("text_encoder"),
        seconds("vae_encoder", "image_encoder"),
        seconds(step["name"]),
        seconds("vae_decoder"),
        predict.number(record["predicted_total_s"]),
    )


def section(records: Sequence[predict.Record]) -> str:
    """Return the text between the page's markers."""
    first = records[0]
    return (
        f"{first['label'].capitalize()} ({first['compiler']}), by `benchmarks/recipes.py`; nothing in this table was "
        "measured. Seconds are those of the programs, with weights loaded and everything compiled. If not all stages "
        "fit at once, one stage at a time is in memory. Floor: a prediction of at least "
        f"{100 * plan_report.FLOOR_SHARE:.0f} % of the peak, which no chip reaches; sums in its row are also "
        f"floors.{predict.without_starts(records)}\n\n" + table(records)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="TITLE", help="recipes whose title starts so; repeatable")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated; others stay as recorded")
    options = parser.parse_args(arguments)
    wanted = [one for one in RECIPES if not options.only or one.key.startswith(tuple(options.only))]
    for recipe in wanted:
        sys.stdout.write(f"== {recipe.key}\n")
        # Pictures to look at are not part of a recipe, one to start from is.
        needs_picture = lookup_spec(recipe.model).needs_condition
        stages = [stage for stage in options.stages.split(",") if stage != "image" or needs_picture]
        found = predict.predict(recipe.model, recipe.topology, stages, recipe.widgets)
        records = predict.read(predict.recorded(predict.DEFAULT))
        if recipe.key in records:
            found = predict.merged(found, records[recipe.key])
        records[recipe.key] = {**found, "recipe": recipe.key}
        predict.write(predict.recorded(predict.DEFAULT), records, [one.key for one in RECIPES])
        rows = [records[one.key] for one in RECIPES if one.key in records]
        predict.write_page(section(rows), BEGIN, END)


if __name__ == "__main__":
    main()
