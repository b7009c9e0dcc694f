"""`comfyui-tpu bench`: times a model's real programs at the real size on this machine, next to `plan`'s predictions.

Nothing is downloaded: weights and inputs are random, created on the chips. Without a TPU the tiny model's sizes run,
which only shows that the command works.
"""

import argparse
import json
from pathlib import Path

from ..diagnostics import bench, verify
from ..diagnostics.random_inputs import tiny_spec
from ..tpu_runtime.checkpoints.file_resolution import resolve_spec
from ..tpu_runtime.machine import device_access
from ..tpu_runtime.model_spec import STAGES
from ..tpu_runtime.models import NAME_HELP
from .common_arguments import add_inputs, add_precision, model_folders, parse_inputs, print_now


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help=f"{NAME_HELP}; or a file")
    add_precision(parser)
    add_inputs(parser, ["height", "width", "num_frames", "num_inference_steps", "guidance_scale", "quality"])
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="number of timed runs per program; default: 5")
    parser.add_argument("--stages", metavar="A,B", help=f"stages to time; default: {','.join(STAGES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--no-prediction", action="store_true", help="leave out the compiler's predictions, which take minutes"
    )
    parser.add_argument(
        "--verify", action="store_true", help="run three blocks in every variant of a step; compare results and times"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help=f"write a profiler trace of {bench.TRACED_RUNS} runs of each program",
    )
    parser.add_argument("--topology", metavar="NAME", help="with --verify: compile for these chips, such as v6e:2x4")


def run(options: argparse.Namespace) -> int:
    """Run the command; return 1 if variants disagree. Raises ValueError for errors of the user."""
    from ..tpu_runtime.cost_model import chips

    spec = resolve_spec(options.model, model_folders())
    if options.runs < 1:
        raise ValueError(f"--runs is {options.runs}; it must be at least 1.")
    stages = _stages(options)
    widgets = parse_inputs(options, spec)
    described = chips.topology(options.topology) if options.topology else None
    devices = chips.compile_devices(described) if described else device_access.open_devices(print_now)
    is_tiny = devices[0].platform != "tpu"
    settings = spec.settings(**{**(spec.miniature.inputs if is_tiny else {}), **widgets})
    model = tiny_spec(spec) if is_tiny else spec
    if options.verify:
        record, rows = verify.verify(model, settings, devices, options.precision, options.runs, described, print_now)
        report, status = verify.format_verification(spec, record, rows), int(any(row.problem for row in rows))
    else:
        result = bench.measure(
            model, settings, devices, is_tiny=is_tiny, stages=stages, runs=options.runs, choice=options.precision,
            predicts=not options.no_prediction, report=print_now, trace=options.trace,
        )  # fmt: skip
        record, report, status = result.to_json(), bench.format_report(result), 0
    print_now("\n" + report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print_now(f"written: {options.json}")
    return status


def _stages(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the stages to time. Raises ValueError for options that exclude each other."""
    if options.verify and options.stages is not None:
        raise ValueError("--stages is not for --verify, which runs one block of the denoiser alone. Leave it out.")
    if options.verify and options.no_prediction:
        raise ValueError(
            "--no-prediction is not for --verify: it measures, and predicts only with --topology. Leave it out."
        )
    if options.verify and options.trace is not None:
        raise ValueError("--trace is not for --verify, which compares forms. Leave one of them out.")
    if options.topology and not options.verify:
        raise ValueError("--topology is for --verify; for a model on other chips use `comfyui-tpu plan`.")
    if options.stages is None:
        return tuple(STAGES)
    stages = tuple(name.strip() for name in options.stages.split(",") if name.strip())
    if not stages or set(stages) - set(STAGES):
        raise ValueError(f"--stages is {options.stages!r}; it must name one or more of {', '.join(STAGES)}.")
    return stages
