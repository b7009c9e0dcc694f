"""The `comfyui-tpu` command. Errors of users end in one sentence and exit code 2; --debug shows the traceback."""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..nodes.declare import Folders
from ..nodes.graph import generations
from ..nodes.headless.changes import make_tiny, read_json
from ..nodes.headless.runner import HEADLESS, TerminalHost, run_workflow
from ..nodes.headless.workflow import to_api
from ..tpu_runtime import pipeline
from ..tpu_runtime.checkpoints.model_ref import ModelRef
from ..tpu_runtime.models import SPECS, spec_by_name
from ..tpu_runtime.plan import options as plan_options
from ..tpu_runtime.precision import CHOICES
from ..tpu_runtime.spec import Settings
from . import batch, bench, doctor, download, follow, monitor, selftest, serve, stages
from .verbs import (
    add_inputs,
    add_verb,
    add_workflow,
    flag,
    given_folders,
    given_inputs,
    given_workflow,
    input_names,
    print_timings,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 2 for an error of the user, 130 after Ctrl-C."""
    _expect_no_tpu()  # before JAX is imported, which reads the environment then
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (ValueError, RuntimeError, OSError) as error:
        if options.debug:
            raise
        print(f"comfyui-tpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("comfyui-tpu: cancelled", file=sys.stderr)
        return 130


def command() -> int:
    """The console script: `main`, without waiting for XLA where it still compiles what nobody wants any more."""
    status = main()
    pipeline.leave(status)
    return status


def _expect_no_tpu() -> None:
    """Without a TPU's device files JAX is told so: libtpu would search a cloud for one, and complain at length."""
    if not doctor.has_tpu():
        for name, value in {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}.items():
            os.environ.setdefault(name, value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="comfyui-tpu", description="Diffusion models on Google TPUs, without ComfyUI."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    run = add_verb(verbs, "run", _run, "run a ComfyUI workflow file")
    add_workflow(run)
    run.add_argument("--out", type=Path, default=Path("output"), metavar="DIR", help="where results go (output)")
    batch.add_arguments(add_verb(verbs, "batch", batch.run, "run a workflow once for each line of a file"))
    serve.add_arguments(
        add_verb(verbs, "serve", serve.run, "run stages for a ComfyUI elsewhere, by its node TPU Remote")
    )
    stages.add_verbs(verbs)
    warmup = add_verb(verbs, "warmup", _warmup, "compile a size's programs, so that its first run starts at once")
    warmup.add_argument("workflow", type=Path, nargs="?", help="the sizes of this workflow's samplers")
    warmup.add_argument("--model", metavar="NAME", help="instead: this model; " + "; ".join(s.name for s in SPECS))
    warmup.add_argument("--model-id", metavar="ID", help="with --model: its id or folder; default: its Hub id")
    warmup.add_argument("--precision", choices=CHOICES, default="auto")
    warmup.add_argument("--tiny", action="store_true", help="use the built-in miniature models, at their sizes")
    add_inputs(warmup, [name for name in input_names("inputs") if name not in ("fps", "seed")])
    plan_options.add_arguments(
        add_verb(verbs, "plan", _plan, "compile for a described TPU: does it fit, how long would it take")
    )
    timed = add_verb(verbs, "bench", _bench, "time a model's programs on this machine, with random weights")
    timed.add_argument("model", metavar="MODEL", help="; ".join(s.name for s in SPECS))
    timed.add_argument("--precision", choices=CHOICES, default="auto")
    add_inputs(timed, ["height", "width", "num_frames", "num_inference_steps", "guidance_scale"])
    bench.add_arguments(timed)
    selftest.add_arguments(
        add_verb(verbs, "selftest", selftest.run, "compare what this machine computes with float32 on the host's CPU")
    )
    download.add_arguments(add_verb(verbs, "download", download.run, "download the files of a model that are loaded"))
    monitor.add_arguments(
        add_verb(verbs, "monitor", monitor.run, "show what a ComfyUI server does on the TPU, or without one the chips")
    )
    follow.add_arguments(
        add_verb(verbs, "follow", follow.run, "take part, as a further host, in what the first host of a TPU runs")
    )
    doctor.add_arguments(
        add_verb(verbs, "doctor", doctor.run, "report what is wrong with this machine, and how to fix it")
    )
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked for: a source tree that is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(importlib.metadata.version("comfyui-tpu"))
        parser.exit()


# --- run --------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    workflow = given_workflow(options)
    host = TerminalHost(given_folders(options, options.out))
    try:
        run_workflow(workflow, host)
    finally:
        print_timings(host.timings)
    return 0


# --- warmup -----------------------------------------------------------------------------------------------------------


def _warmup(options: argparse.Namespace) -> int:
    host = TerminalHost(Folders())
    for model, settings in _wanted(options):
        with host.timed(f"{model.spec.title}: {settings.width}x{settings.height}, {settings.num_frames} frames"):
            pipeline.warmup(model, settings, progress=host)
    print_timings(host.timings)
    return 0


def _wanted(options: argparse.Namespace) -> list[tuple[ModelRef, Settings]]:
    """The generations to compile for: a workflow's, or one model's."""
    if bool(options.workflow) == bool(options.model):
        raise ValueError("warmup takes either a workflow file or --model NAME.")
    if options.workflow:
        if given := [flag(name) for name in input_names("inputs") if getattr(options, name, None) is not None]:
            raise ValueError(f"{', '.join(given)}: a workflow has its own. Leave it out, or give --model NAME instead.")
        workflow = to_api(read_json(options.workflow), HEADLESS)
        if options.tiny:
            make_tiny(workflow)
        return generations(workflow, Folders(), HEADLESS)
    spec = spec_by_name(options.model)
    model_id = options.model_id or (spec.tiny_id if options.tiny else spec.hub_id)
    sizes = spec.tiny_inputs if model_id in spec.tiny_ids else {}
    model = ModelRef(spec_name=spec.name, model_id=model_id, precision=options.precision)
    model.check()
    return [(model, spec.settings(**{**sizes, **given_inputs(options, spec)}))]


# --- plan -------------------------------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    from ..tpu_runtime.plan import plan

    return plan.run(options, lambda line: print(line, flush=True))


def _bench(options: argparse.Namespace) -> int:
    spec = spec_by_name(options.model)
    return bench.run(options, spec, given_inputs(options, spec), lambda line: print(line, flush=True))
