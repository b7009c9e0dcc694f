"""What the commands share: verbs, an option for every input of the models, and the times they print."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..nodes import inputs
from ..nodes.declare import Folders
from ..nodes.graphs.graph import Workflow
from ..nodes.graphs.miniature import make_tiny
from ..nodes.headless import model_folders as comfyui_folders
from ..nodes.headless.changes import assign, read_json
from ..nodes.headless.runner import HEADLESS, NodeTime
from ..nodes.headless.workflow import to_api
from ..tpu_runtime import pipeline
from ..tpu_runtime.pipeline import CHOICES, SPECS, Choice, IntLimit, ModelSpec, Numbers, Switch
from . import doctor

TINY = "use the built-in miniature models, at their sizes: no network, no TPU"
DOWNLOADS = """
The first run of a model downloads its files (needs the network); a built-in
miniature, such as tiny/wan21, is there."""


def add_verb(
    verbs: Any, name: str, command: Callable, text: str, example: str, *, downloads: bool = False
) -> argparse.ArgumentParser:
    """A command with this help `text` and the words of an example; `downloads`: it may fetch a model's files."""
    verb = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  comfyui-tpu {name} {example}\n{DOWNLOADS * downloads}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verb.set_defaults(command=command)
    return verb


def add_workflow(verb: argparse.ArgumentParser) -> None:
    """A workflow file, and what changes it before it runs."""
    verb.add_argument("workflow", type=Path, help="a workflow as ComfyUI's page saves or exports it (JSON)")
    verb.add_argument(
        "--set", action="append", default=[], metavar="NODE.INPUT=VALUE",
        help='change an input of a node, such as 1.prompt="a cat"; repeatable',
    )  # fmt: skip
    verb.add_argument("--tiny", action="store_true", help=TINY)
    verb.add_argument(
        "--input", type=Path, default=Path("input"), metavar="DIR", help="where LoadImage looks; default: input"
    )


def read_workflow(options: argparse.Namespace) -> Workflow:
    """The workflow of these options in API format, as a miniature if they ask for that."""
    workflow = to_api(read_json(options.workflow), HEADLESS)
    if options.tiny:
        make_tiny(workflow)
    return workflow


def given_workflow(options: argparse.Namespace) -> Workflow:
    """The same, changed as `--set` says."""
    workflow = read_workflow(options)
    for assignment in options.set:
        assign(workflow, assignment)
    return workflow


def prompts_of_miniatures(workflow: Workflow) -> Iterator[str]:
    """What each miniature is given to show, which a trained one has in place of the workflow's own prompt."""
    trained = {spec.miniature.id: pipeline.tiny.is_trained(spec.miniature.id) for spec in SPECS}
    for node_id, node in workflow.items():
        model_id, prompt = (node["inputs"].get(name) for name in ("model_id", "prompt"))
        if not isinstance(prompt, str) or not isinstance(model_id, str) or model_id not in trained:
            continue
        if trained[model_id]:
            yield f'{model_id} shows "{prompt}"; to change it: --set {node_id}.prompt="..."'
        else:
            yield f"{model_id} has random weights: it shows noise, whatever the prompt."


def given_folders(options: argparse.Namespace, output: Path) -> Folders:
    return Folders(
        models=model_folders(), loras=lora_folders(), input=options.input, output=output,
        workflow=options.workflow.parent,
    )  # fmt: skip


def model_folders() -> tuple[str, ...]:
    """The folders of the ComfyUI on this machine, if there is one, that model ids are looked for in."""
    return comfyui_folders.find(doctor.comfyui_folder())


def lora_folders() -> tuple[str, ...]:
    return comfyui_folders.loras(doctor.comfyui_folder())


def input_names(field: str) -> list[str]:
    """Names of the texts or inputs of all models, each once, in order."""
    return list(dict.fromkeys(name for spec in SPECS for name in getattr(spec, field)))


def add_inputs(verb: argparse.ArgumentParser, names: Sequence[str], aliases: Mapping[str, str] = {}) -> None:
    """An option for each of these inputs of the models, and its other name; None where it is not given."""
    for name in names:
        limits = [spec.inputs[name] for spec in SPECS if name in spec.inputs]
        kind: dict[str, Any] = {"type": {IntLimit: int, Numbers: str}.get(type(limits[0]), float)}
        kind["metavar"] = "A,B" if kind["type"] is str else "N"
        listed = ""
        if isinstance(limits[0], Switch):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(limits[0], Choice):
            options = (option for limit in limits if isinstance(limit, Choice) for option in limit.options)
            kind = {"choices": list(dict.fromkeys(options)), "metavar": "NAME"}
            listed = f" ({', '.join(kind['choices'])})"
        flags = filter(None, (aliases.get(name), flag(name)))
        verb.add_argument(*flags, dest=name, help=f"{meaning(name)}{listed}; default: {_default(name)}", **kind)


def add_precision(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--precision", choices=CHOICES, default="auto", help=f"{meaning('precision')}; default: auto")


def meaning(name: str) -> str:
    """What an input is, in the first sentence of its widget's tooltip."""
    return inputs.ENTRIES[name].tooltip.partition(". ")[0].rstrip(".").replace("%", "%%")


def _default(name: str) -> str:
    """The one default, or that models have their own, and that of the first."""
    owners = [spec for spec in SPECS if name in spec.inputs]
    value = owners[0].inputs[name].default
    said = {True: "on", False: "off", "": "empty"}.get(value, value) if isinstance(value, bool | str) else f"{value:g}"
    has_own = any(spec.inputs[name].default != value for spec in owners)
    return f"the model's own, {said} for {owners[0].name}" if has_own else str(said)


def given_inputs(options: argparse.Namespace, spec: ModelSpec) -> dict[str, Any]:
    """The texts and inputs that were given as options, by name; ValueError for one that the model does not have."""
    names = [*input_names("texts"), *input_names("inputs")]
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    for name in given:
        if name not in spec.texts and name not in spec.inputs:
            raise ValueError(f"{spec.title}: this model has no {name}. Leave {flag(name)} out.")
    return given


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def print_now(line: str) -> None:
    print(line, flush=True)


def print_timings(timings: Sequence[NodeTime]) -> None:
    if not timings:
        return
    width = max(len(timing.title) for timing in timings)
    for timing in timings:
        print(f"{timing.title:<{width}}  {timing.elapsed_s:8.1f} s")
    print(f"{'total':<{width}}  {sum(timing.elapsed_s for timing in timings):8.1f} s")
    print(f"XLA programs: {pipeline.compilation_summary()}")
