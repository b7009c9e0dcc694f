"""Shared parts of the commands: verbs, an option for every model input, and printed times."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..nodes import inputs
from ..nodes.declare import Folders, Value
from ..nodes.graphs.graph import Workflow
from ..nodes.graphs.tiny_models import make_tiny
from ..nodes.headless import model_folders as comfyui_folders
from ..nodes.headless.overrides import apply_assignment, read_json
from ..nodes.headless.runner import HEADLESS_NODES, NodeTime
from ..nodes.headless.workflow import to_api
from ..tpu_runtime import api
from ..tpu_runtime.checkpoints import tiny
from ..tpu_runtime.model_spec import BoolInput, EnumInput, IntInput, ModelSpec, SigmaList
from ..tpu_runtime.models import SPECS
from ..tpu_runtime.precision import CHOICES
from . import doctor

TINY = "use the built-in tiny models, at their sizes: needs no network and no TPU"
DOWNLOADS = """
The first run of a model downloads its files (needs the network). Built-in tiny
models, such as tiny/wan21, need no download."""


def add_verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Callable,
    text: str,
    example: str,
    *,
    downloads: bool = False,
) -> argparse.ArgumentParser:
    """Add a command; return its parser.

    verbs: the parsers of commands. name: of the command. command: runs it. text: its help.
    example: arguments of an example. downloads: whether it may download a model's files.
    """
    verb = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  comfyui-tpu {name} {example}\n{DOWNLOADS * downloads}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verb.set_defaults(command=command)
    return verb


def add_workflow(verb: argparse.ArgumentParser) -> None:
    """Add the options for a workflow file and its changes."""
    verb.add_argument("workflow", type=Path, help="a workflow as ComfyUI's page saves or exports it (JSON)")
    verb.add_argument(
        "--set", action="append", default=[], metavar="NODE.INPUT=VALUE",
        help='change an input of a node, such as 1.prompt="a cat"; repeatable',
    )  # fmt: skip
    verb.add_argument("--tiny", action="store_true", help=TINY)
    verb.add_argument(
        "--input", type=Path, default=Path("input"), metavar="DIR", help="folder of LoadImage; default: input"
    )


def read_workflow(options: argparse.Namespace) -> Workflow:
    """Return the workflow of these options in API format, with tiny models if they ask for that."""
    workflow = to_api(read_json(options.workflow), HEADLESS_NODES)
    if options.tiny:
        make_tiny(workflow)
    return workflow


def load_workflow(options: argparse.Namespace) -> Workflow:
    """Return the workflow of these options, changed as `--set` asks."""
    workflow = read_workflow(options)
    for assignment in options.set:
        apply_assignment(workflow, assignment)
    return workflow


def list_tiny_prompts(workflow: Workflow) -> Iterator[str]:
    """Yield the prompt of each tiny model, which a trained one uses instead of the workflow's own."""
    trained = {spec.miniature.id: tiny.is_trained(spec.miniature.id) for spec in SPECS}
    for node_id, node in workflow.items():
        model_id, prompt = (node["inputs"].get(name) for name in ("model_id", "prompt"))
        if not isinstance(prompt, str) or not isinstance(model_id, str) or model_id not in trained:
            continue
        if trained[model_id]:
            yield f'{model_id} shows "{prompt}"; to change it: --set {node_id}.prompt="..."'
        else:
            yield f"{model_id} has random weights: it shows noise, whatever the prompt."


def workflow_folders(options: argparse.Namespace, output: Path) -> Folders:
    """Return the folders for a workflow's run."""
    return Folders(
        models=model_folders(), loras=lora_folders(), input=options.input, output=output,
        workflow=options.workflow.parent,
    )  # fmt: skip


def model_folders() -> tuple[str, ...]:
    """Return the folders of this machine's ComfyUI, if there is one, in which model ids are looked up."""
    return comfyui_folders.find_model_folders(doctor.comfyui_folder())


def lora_folders() -> tuple[str, ...]:
    """Return the LoRA folders of this machine's ComfyUI."""
    return comfyui_folders.find_lora_folders(doctor.comfyui_folder())


def input_names(field: str) -> list[str]:
    """Return the names of the texts or inputs of all models, each once, in order."""
    return list(dict.fromkeys(name for spec in SPECS for name in getattr(spec, field)))


def add_inputs(verb: argparse.ArgumentParser, names: Sequence[str], aliases: Mapping[str, str] = {}) -> None:
    """Add an option for each of these model inputs; an option that is not used is None.

    verb: the command. names: of the inputs. aliases: further option names, by input.
    """
    for name in names:
        limits = [spec.inputs[name] for spec in SPECS if name in spec.inputs]
        kind: dict[str, Value] = {"type": {IntInput: int, SigmaList: str}.get(type(limits[0]), float)}
        kind["metavar"] = "A,B" if kind["type"] is str else "N"
        listed = ""
        if isinstance(limits[0], BoolInput):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(limits[0], EnumInput):
            options = (option for limit in limits if isinstance(limit, EnumInput) for option in limit.options)
            kind = {"choices": list(dict.fromkeys(options)), "metavar": "NAME"}
            listed = f" ({', '.join(kind['choices'])})"
        flags = filter(None, (aliases.get(name), format_flag(name)))
        verb.add_argument(*flags, dest=name, help=f"{describe_input(name)}{listed}; default: {_default(name)}", **kind)


def add_precision(verb: argparse.ArgumentParser) -> None:
    """Add the option --precision."""
    verb.add_argument(
        "--precision", choices=CHOICES, default="auto", help=f"{describe_input('precision')}; default: auto"
    )


def describe_input(name: str) -> str:
    """Return the first sentence of an input's tooltip."""
    return inputs.find_doc(name).tooltip.partition(". ")[0].rstrip(".").replace("%", "%%")


def _default(name: str) -> str:
    """Return the inputs' default as text; if models have different ones, also the first model's."""
    owners = [spec for spec in SPECS if name in spec.inputs]
    value = owners[0].inputs[name].default
    shown = {True: "on", False: "off", "": "empty"}.get(value, value) if isinstance(value, bool | str) else f"{value:g}"
    has_own = any(spec.inputs[name].default != value for spec in owners)
    return f"the model's own, {shown} for {owners[0].name}" if has_own else str(shown)


def parse_inputs(options: argparse.Namespace, spec: ModelSpec) -> dict[str, Value]:
    """Return the texts and inputs that were given as options; ValueError for one that the model does not have."""
    names = [*input_names("texts"), *input_names("inputs")]
    values = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    for name in values:
        if name not in spec.texts and name not in spec.inputs:
            raise ValueError(f"{spec.title}: this model has no {name}. Leave {format_flag(name)} out.")
    return values


def format_flag(name: str) -> str:
    """Return the option of an input."""
    return "--" + name.replace("_", "-")


def print_now(line: str) -> None:
    """Print a line without buffering."""
    print(line, flush=True)


def print_timings(timings: Sequence[NodeTime]) -> None:
    """Print the nodes' times and their sum."""
    if not timings:
        return
    width = max(len(timing.title) for timing in timings)
    for timing in timings:
        print(f"{timing.title:<{width}}  {timing.elapsed_s:8.1f} s")
    print(f"{'total':<{width}}  {sum(timing.elapsed_s for timing in timings):8.1f} s")
    print(f"XLA programs: {api.compilation_summary()}")
