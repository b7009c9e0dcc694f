"""The `comfyui-tpu` command. Errors of users end in one sentence and exit code 2; --debug shows the traceback."""

import argparse
import importlib.metadata
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..nodes.declare import Folders
from ..nodes.graphs import upgrade
from ..nodes.headless import compare
from ..nodes.headless.changes import read_json
from ..nodes.headless.runner import TerminalHost, run_workflow
from ..tpu_runtime import pipeline
from ..tpu_runtime.pipeline import plan_options, plan_process, supervisor
from . import batch, bench, doctor, download, follow, monitor, selftest, serve, stages, warmup
from .verbs import add_verb, add_workflow, given_folders, given_workflow, model_folders, print_timings


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 2 for an error of the user, 130 after Ctrl-C, 143 after SIGTERM."""
    pipeline.bus.expect_no_tpu()
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (ValueError, RuntimeError, OSError) as error:
        if options.debug:
            raise
        print(f"comfyui-tpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as cancel:
        print("comfyui-tpu: cancelled", file=sys.stderr)
        return 128 + (cancel.args or (signal.SIGINT,))[0]


def command() -> int:
    """The console script: `main`, without waiting for XLA where it still compiles what is no longer wanted."""
    status = main()
    pipeline.leave(status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="comfyui-tpu", description="Diffusion models on Google TPUs, without ComfyUI."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    run = add_verb(verbs, "run", _run, "run a ComfyUI workflow file")
    add_workflow(run)
    run.add_argument("--out", type=Path, default=Path("output"), metavar="DIR", help="where results go (output)")

    compared = add_verb(verbs, "compare", _compare, "run a workflow in several qualities, results side by side")
    add_workflow(compared)
    compared.add_argument("--quality", default=compare.DEFAULT, metavar="A,B", help=f"({compare.DEFAULT})")
    compared.add_argument("--out", type=Path, default=Path("output"), metavar="DIR", help="where results go (output)")

    def add(name: str, file: Any, text: str) -> None:
        file.add_arguments(add_verb(verbs, name, file.run, text))

    convert = add_verb(verbs, "convert", _convert, "swap ComfyUI's own loaders in a workflow for those of the TPU")
    convert.add_argument("workflow", type=Path, help="a workflow as ComfyUI's page saves or exports it (JSON)")
    convert.add_argument("--back", action="store_true", help="swap the TPU's loaders for ComfyUI's own")
    convert.add_argument("--to", type=Path, metavar="FILE", help="where it goes; by default into the same file")

    add("batch", batch, "run a workflow once for each line of a file")
    add("serve", serve, "run stages for a ComfyUI elsewhere, by its node TPU Remote")
    stages.add_verbs(verbs)
    add("warmup", warmup, "compile a size's programs, so that its first run starts at once")
    plan_options.add_arguments(
        add_verb(verbs, "plan", _plan, "compile for a described TPU: does it fit, how long would it take")
    )
    add("bench", bench, "time a model's programs on this machine, with random weights")
    add("selftest", selftest, "compare what this machine computes with float32 on the host's CPU")
    add("download", download, "download the files of a model that are loaded")
    add("monitor", monitor, "show what a ComfyUI server does on the TPU, or without one the chips")
    add("follow", follow, "take part, as a further host, in what the first host of a TPU runs")
    add("doctor", doctor, "report what is wrong with this machine, and how to fix it")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked for: a source tree that is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(importlib.metadata.version("comfyui-tpu"))
        parser.exit()


def _run(options: argparse.Namespace) -> int:
    workflow = given_workflow(options)
    host = TerminalHost(given_folders(options, options.out), tells=True)
    try:
        run_workflow(workflow, host)
    finally:
        print_timings(host.timings)
    return 0


def _compare(options: argparse.Namespace) -> int:
    qualities, workflow = compare.check_qualities(options.quality), given_workflow(options)
    rendered = list(compare.render(workflow, qualities, given_folders(options, options.out)))
    for one in rendered:
        print(f"{one.quality}: {one.seconds:.1f} s in the samplers, of compiling too")
    for one in compare.differences(rendered):
        print(
            f"{one.quality} against {qualities[0]}, node {one.node_id}: PSNR {one.psnr:.1f} dB, "
            f"{one.least_psnr:.1f} in the frame that is least alike"
        )
    print("\n".join(f"written: {path}" for path in compare.save_side_by_side(rendered, options.out)))
    return 0


def _convert(options: argparse.Namespace) -> int:
    document = read_json(options.workflow)
    found, changes = upgrade.with_tpu_loaders(document, model_folders(), back=options.back)
    print("\n".join(changes) or "No loader to swap.")
    target = options.to or options.workflow
    if found != document or target != options.workflow:
        target.write_text(json.dumps(found, indent=2, ensure_ascii=False), "utf-8")
    return 0


def _plan(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name not in ("command", "debug")}
    given["models"] = options.models or list(model_folders())
    with supervisor.signals(_cancel):
        print(plan_process.make_text(given, TerminalHost(Folders())))
    return 0


def _cancel(number: int, _: Any) -> None:
    raise KeyboardInterrupt(number)
