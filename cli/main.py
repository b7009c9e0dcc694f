"""The `comfyui-tpu` command. Errors of users end in one sentence and exit code 2; --debug shows the traceback."""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..nodes.declare import Declaration, Folders
from ..nodes.graph import Workflow, generations
from ..nodes.headless.runner import HEADLESS, TerminalHost, run_workflow
from ..nodes.headless.workflow import to_api
from ..tpu_runtime import pipeline
from ..tpu_runtime.checkpoints.model_ref import ModelRef, variant
from ..tpu_runtime.limits import without_zero_sizes
from ..tpu_runtime.models import SPECS, spec_by_name, spec_for_family
from ..tpu_runtime.plan import options as plan_options
from ..tpu_runtime.precision import CHOICES
from ..tpu_runtime.spec import Settings
from . import bench, doctor, download, follow, selftest, stages
from .verbs import add_inputs, add_verb, flag, given_inputs, input_names, print_timings


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
    run.add_argument("workflow", type=Path, help="a workflow as ComfyUI's page saves or exports it (JSON)")
    run.add_argument(
        "--set", action="append", default=[], metavar="NODE.INPUT=VALUE", help="change an input; repeatable"
    )
    run.add_argument("--tiny", action="store_true", help="use the built-in miniature models, at their sizes")
    run.add_argument("--out", type=Path, default=Path("output"), metavar="DIR", help="where results go (output)")
    run.add_argument("--input", type=Path, default=Path("input"), metavar="DIR", help="where LoadImage looks (input)")
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
    monitor = add_verb(
        verbs, "monitor", _monitor, "show what a ComfyUI server does on the TPU, or without one the chips"
    )
    monitor.add_argument("--url", default="http://127.0.0.1:8188", help="the server (http://127.0.0.1:8188)")
    monitor.add_argument("--once", action="store_true", help="print the numbers once and end")
    monitor.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks (1)")
    follow.add_arguments(
        add_verb(verbs, "follow", follow.run, "take part, as a further host, in what the first host of a TPU runs")
    )
    doctor.add_arguments(
        add_verb(verbs, "doctor", doctor.run, "report what is wrong with this machine, and how to mend it")
    )
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked for: a source tree that is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(importlib.metadata.version("comfyui-tpu"))
        parser.exit()


# --- run --------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    workflow = to_api(_read_json(options.workflow), HEADLESS)
    if options.tiny:
        make_tiny(workflow)
    for assignment in options.set:
        assign(workflow, assignment)
    loras = (str(doctor.comfyui_folder() / "models" / "loras"),)
    folders = Folders(loras=loras, input=options.input, output=options.out, workflow=options.workflow.parent)
    host = TerminalHost(folders)
    try:
        run_workflow(workflow, host)
    finally:
        print_timings(host.timings)
    return 0


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None


def make_tiny(workflow: Workflow) -> None:
    """Gives every model node its family's built-in miniature and its sizes; frames, steps and fps stay.

    LoRAs, which are made for the real sizes, are left out.
    """
    for node_id in [name for name, node in workflow.items() if node["class_type"] == "TPULoraLoader"]:
        model = workflow.pop(node_id)["inputs"].get("model")
        for node in workflow.values():
            node["inputs"] = {k: model if v == [node_id, 0] else v for k, v in node["inputs"].items()}
    for node in workflow.values():
        declaration = HEADLESS.get(node["class_type"])
        family = declaration and (declaration.family or node["inputs"].get("family"))
        if not declaration or not family:
            continue
        named = node["inputs"].get("model")
        source = workflow.get(named[0], node) if isinstance(named, list) else node  # a loader, in place of the widget
        defaults = {i.name: i.default for i in HEADLESS.get(source["class_type"], declaration).inputs}
        spec = variant(spec_for_family(family), (defaults | source["inputs"]).get("model_id") or "")
        wanted = {"model_id": spec.tiny_id, **spec.tiny_inputs}
        given = {i.name: node["inputs"].get(i.name, i.default) for i in declaration.inputs if i.name in wanted}
        if "condition" in node["inputs"]:
            given = without_zero_sizes(given)  # they stay the picture's
        node["inputs"] |= {name: wanted[name] for name in given}


def assign(workflow: Workflow, assignment: str) -> None:
    """Applies one NODE.INPUT=VALUE; NODE is an id, or a class or title that only one node has."""
    target, equals, text = assignment.partition("=")
    node_name, dot, input_name = target.rpartition(".")
    if not equals or not dot:
        raise ValueError(f"--set {assignment}: it must look like NODE.INPUT=VALUE, such as 2.seed=7.")
    node = workflow[_find_node(workflow, node_name)]
    declaration = _declaration(node)
    names = [declared.name for declared in declaration.inputs]
    if input_name not in names:
        raise ValueError(f"--set {assignment}: {node_name} has no input {input_name}; it has {', '.join(names)}.")
    node["inputs"][input_name] = _value(declaration, input_name, text)


def _declaration(node: dict[str, Any]) -> Declaration:
    if node["class_type"] not in HEADLESS:
        raise ValueError(
            f"{node['class_type']} does not run without ComfyUI. Known here: {', '.join(sorted(HEADLESS))}."
        )
    return HEADLESS[node["class_type"]]


def _value(declaration: Declaration, input_name: str, text: str) -> Any:
    """`text` as JSON, or as it stands where the input takes text or it is not JSON."""
    if declaration.input(input_name).type in ("STRING", "COMBO"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _find_node(workflow: Workflow, name: str) -> str:
    if name in workflow:
        return name
    titles = {node_id: node.get("_meta", {}).get("title") for node_id, node in workflow.items()}
    found = [node_id for node_id, node in workflow.items() if name in (node["class_type"], titles[node_id])]
    if len(found) == 1:
        return found[0]
    listing = ", ".join(f"{node_id} ({node['class_type']})" for node_id, node in workflow.items())
    count = "no node" if not found else f"{len(found)} nodes"
    raise ValueError(f"--set: {count} called {name!r} in this workflow; its nodes are {listing}.")


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
        workflow = to_api(_read_json(options.workflow), HEADLESS)
        if options.tiny:
            make_tiny(workflow)
        return generations(workflow, Folders(), HEADLESS)
    spec = spec_by_name(options.model)
    model_id = options.model_id or (spec.tiny_id if options.tiny else spec.hub_id)
    sizes = spec.tiny_inputs if model_id == spec.tiny_id else {}
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


# --- monitor ----------------------------------------------------------------------------------------------------------


def _monitor(options: argparse.Namespace) -> int:
    from . import monitor

    return monitor.run(options)
