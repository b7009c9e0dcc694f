"""The `comfyui-tpu` command. Errors of users end in one sentence and exit code 2; --debug shows the traceback."""

import argparse
import contextlib
import json
import logging
import os
import select
import signal
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..distributed.multihost import supervisor
from ..nodes.declare import Folders
from ..nodes.graphs import loader_swap
from ..nodes.headless import compare
from ..nodes.headless.overrides import read_json
from ..nodes.headless.runner import TerminalContext, run_workflow
from ..tpu_runtime.checkpoints.file_resolution import resolve_spec
from ..tpu_runtime.engine.lifecycle import exit_process
from ..tpu_runtime.machine import pci
from ..tpu_runtime.model_spec import STAGES
from ..tpu_runtime.models import NAME_HELP, SPECS
from ..tpu_runtime.plan import process as plan_process
from ..tpu_runtime.precision import CHOICES
from ..tpu_runtime.progress import SHOWN_TO_USER
from ..tpu_runtime.redact import printable
from . import batch, bench, doctor, download, follow, monitor, selftest, serve, stages, warmup
from .common_arguments import (
    DOWNLOADS,
    add_inputs,
    add_verb,
    add_workflow,
    list_tiny_prompts,
    load_workflow,
    model_folders,
    parse_inputs,
    print_timings,
    workflow_folders,
)

WORKFLOW = "examples/api/wan21_t2v_720p.json"
# Defaults of `plan`: the described TPU, inputs of the models, and short options for them.
TOPOLOGY = "v6e:2x4"
SIZES = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "guidance_scale_2")
SHORT_FLAGS = {"num_inference_steps": "--steps", "guidance_scale": "--guidance", "guidance_scale_2": "--guidance-2"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 2 for an error of the user, 130 after Ctrl-C, 143 after SIGTERM."""
    pci.configure_without_tpu()
    if logging.lastResort:
        logging.lastResort.addFilter(_is_not_shown)
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (ValueError, RuntimeError, OSError) as error:
        if options.debug:
            raise
        if not _close_broken_pipes():
            print(f"comfyui-tpu: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as cancel:
        print("comfyui-tpu: cancelled", file=sys.stderr)
        return 128 + (cancel.args or (signal.SIGINT,))[0]


def command() -> int:
    """Run `main` as the console script, without waiting for XLA compilations that are no longer needed."""
    try:
        status = main()
    finally:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        _close_broken_pipes()
    exit_process(status)
    return status


def _close_broken_pipes() -> bool:
    """Return whether the output's reader has ended, as with `| head`; further output is discarded silently."""
    if not hasattr(select, "poll"):
        return False  # Windows
    streams = select.poll()
    for stream in (1, 2):
        streams.register(stream, 0)
    broken = [stream for stream, event in streams.poll(0) if event & select.POLLERR]
    for stream in broken:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    return bool(broken)


def _is_not_shown(record: logging.LogRecord) -> bool:
    """Return whether a log record was not shown by a host; without a log file it would appear twice in the terminal."""
    return not hasattr(record, SHOWN_TO_USER)


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {spec.name:<40}{spec.miniature.id}" for spec in sorted(SPECS, key=lambda spec: spec.name))
    parser = argparse.ArgumentParser(
        prog="comfyui-tpu", description="Diffusion models on Google TPUs, without ComfyUI.",
        epilog=f"names of models, and of their built-in tiny models:\n{names}\n\n"
        f"`comfyui-tpu COMMAND --help` shows options and an example.\n{DOWNLOADS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    model = SPECS[0].name
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    run = add_verb(verbs, "run", _run, "run a ComfyUI workflow file", f"{WORKFLOW} --tiny", downloads=True)
    add_workflow(run)
    run.add_argument(
        "--out", type=Path, default=Path("output"), metavar="DIR", help="folder for results; default: output"
    )

    compared = add_verb(
        verbs,
        "compare",
        _compare,
        "run a workflow in several qualities and save the results side by side",
        f"{WORKFLOW} --tiny",
        downloads=True,
    )
    add_workflow(compared)
    compared.add_argument(
        "--quality",
        default=compare.DEFAULT,
        metavar="A,B",
        help=f"qualities; the first is the reference; default: {compare.DEFAULT}",
    )
    compared.add_argument(
        "--out", type=Path, default=Path("output"), metavar="DIR", help="folder for results; default: output"
    )

    def add(name: str, file: ModuleType, text: str, example: str, *, downloads: bool = False) -> None:
        file.add_arguments(add_verb(verbs, name, file.run, text, example, downloads=downloads))

    convert = add_verb(
        verbs,
        "convert",
        _convert,
        "replace ComfyUI's own loaders in a workflow with the TPU's",
        "mine.json --to mine-on-tpu.json",
    )
    convert.add_argument("workflow", type=Path, help="a workflow as ComfyUI's page saves or exports it (JSON)")
    convert.add_argument("--back", action="store_true", help="replace the TPU's loaders with ComfyUI's own")
    convert.add_argument("--to", type=Path, metavar="FILE", help="output file; default: the same file")

    add(
        "batch",
        batch,
        "run a workflow once for each line of a file",
        f"{WORKFLOW} --tiny \\\n    --set-from jobs.jsonl --out output/batch",
        downloads=True,
    )
    add("serve", serve, "run stages for ComfyUI on another machine (node TPU Remote)", "--port 8190", downloads=True)
    stages.add_verbs(verbs)
    add("warmup", warmup, "compile the programs of a size in advance", WORKFLOW, downloads=True)
    _add_plan(
        add_verb(
            verbs,
            "plan",
            _plan,
            "compile for a described TPU; report memory and predicted time",
            f"{model} --topology {TOPOLOGY}",
        )
    )
    add("bench", bench, "time a model's programs on this machine, with random weights", model)
    add("selftest", selftest, "compare this machine's results with float32 on the host's CPU", "--report selftest.json")
    add("download", download, "download a model's files (needs the network)", model)
    add("monitor", monitor, "show a ComfyUI server's work on the TPU; without a server, show the chips", "--once")
    add(
        "follow",
        follow,
        "join a TPU as a further host and follow its first host",
        "-- comfyui-tpu run workflow.json",
        downloads=True,
    )
    add("doctor", doctor, "report problems of this machine, and how to fix them", f"--model {model}")
    return parser


class _Version(argparse.Action):
    """The option --version, which reads the file that repository, registry archive and wheel contain."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..tpu_runtime import versions

        settings = tomllib.loads((versions.ROOT / "pyproject.toml").read_text("utf-8"))
        print(settings["project"]["version"])
        parser.exit()


def _run(options: argparse.Namespace) -> int:
    workflow = load_workflow(options)
    host = TerminalContext(workflow_folders(options, options.out), tells=True)
    if options.tiny:
        print("\n".join(list_tiny_prompts(workflow)), file=sys.stderr)
    try:
        run_workflow(workflow, host)
    finally:
        print_timings(host.timings)
    return 0


def _compare(options: argparse.Namespace) -> int:
    qualities, workflow = compare.parse_qualities(options.quality), load_workflow(options)
    rendered = list(compare.render_qualities(workflow, qualities, workflow_folders(options, options.out)))
    for result in rendered:
        print(f"{result.quality}: {result.seconds:.1f} s in the samplers, compilation included")
    for difference in compare.compare_psnr(rendered):
        print(
            f"{difference.quality} against {qualities[0]}, node {difference.node_id}: PSNR {difference.psnr:.1f} dB, "
            f"{difference.least_psnr:.1f} in the least similar frame"
        )
    print("\n".join(f"written: {path}" for path in compare.save_side_by_side(rendered, options.out)))
    return 0


def _convert(options: argparse.Namespace) -> int:
    document = read_json(options.workflow)
    converted, changes = loader_swap.swap_loaders(document, model_folders(), back=options.back)
    print("\n".join(changes) or "No loader to replace.")
    target = options.to or options.workflow
    if converted != document or target != options.workflow:
        target.write_text(json.dumps(converted, indent=2, ensure_ascii=False), "utf-8")
    return 0


def _add_plan(verb: argparse.ArgumentParser) -> None:
    model = verb.add_mutually_exclusive_group(required=True)
    text = f"{NAME_HELP}; or a file of the denoiser"
    model.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=text)
    model.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help="the same")
    verb.add_argument(
        "--models", action="append", default=[], metavar="DIR", help="folder to look for the file in; repeatable"
    )
    verb.add_argument(
        "--topology", default=TOPOLOGY, metavar="NAME",
        help=f"the TPU: generation and mesh of chips, or their number (v6e-8); default: {TOPOLOGY}",
    )  # fmt: skip
    add_inputs(verb, [*SIZES, "step_cache", "cache_threshold", "quality"], SHORT_FLAGS)
    verb.add_argument(
        "--precision", choices=CHOICES[1:], default="bfloat16",
        help="number format; mixed: image encoders in float32; default: bfloat16",
    )  # fmt: skip
    verb.add_argument(
        "--mesh", metavar="DP,SP,TP",
        help="chips by guidance, sequence and heads in the denoiser; default: the runtime's choice",
    )  # fmt: skip
    every = ",".join(STAGES)
    verb.add_argument("--stages", default=every, metavar="A,B", help=f"stages to compile; default: {every}")
    verb.add_argument("--explain", action="store_true", help="list the slowest operations and their source")
    verb.add_argument("--json", dest="json_file", metavar="FILE", help="also write the report as JSON")


def _plan(options: argparse.Namespace) -> int:
    models = options.models or list(model_folders())
    same = ("model", "topology", "precision", "mesh", "stages", "explain", "json_file")
    asked = {"models": models, "inputs": parse_inputs(options, resolve_spec(options.model, models))}
    asked |= {name: getattr(options, name) for name in same}
    with supervisor.handle_signals(_cancel):
        print(plan_process.make_report(asked, TerminalContext(Folders())))
    return 0


def _cancel(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)
