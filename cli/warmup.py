"""`comfyui-tpu warmup`: compiles the programs of the generations that a workflow, or one model, will run."""

import argparse
from pathlib import Path

from ..nodes.declare import Folders
from ..nodes.graphs.graph import list_generations
from ..nodes.headless.runner import HEADLESS_NODES, TerminalContext
from ..tpu_runtime import api
from ..tpu_runtime.checkpoints.file_resolution import names_single_files
from ..tpu_runtime.checkpoints.model_ref import ModelRef, resolve_variant
from ..tpu_runtime.model_spec import Settings
from ..tpu_runtime.models import NAME_HELP, lookup_spec
from .common_arguments import (
    TINY,
    add_inputs,
    add_precision,
    format_flag,
    input_names,
    lora_folders,
    model_folders,
    parse_inputs,
    print_timings,
    read_workflow,
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    verb.add_argument("workflow", type=Path, nargs="?", help="a workflow; its samplers give the sizes")
    verb.add_argument("--model", metavar="NAME", help=f"instead: {NAME_HELP}; or a file")
    verb.add_argument("--model-id", metavar="ID", help="with --model: its id or folder; default: its Hub id")
    add_precision(verb)
    verb.add_argument("--tiny", action="store_true", help=TINY)
    add_inputs(verb, [name for name in input_names("inputs") if name not in ("fps", "seed")])


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    host = TerminalContext(Folders())
    for model, settings in _list_generations(options):
        with host.time_node(f"{model.spec.title}: {settings.width}x{settings.height}, {settings.num_frames} frames"):
            api.warm_up(model, settings, progress=host)
    print_timings(host.timings)
    return 0


def _list_generations(options: argparse.Namespace) -> list[tuple[ModelRef, Settings]]:
    """Return the generations to compile for: a workflow's, or one model's."""
    if bool(options.workflow) == bool(options.model):
        raise ValueError("warmup takes either a workflow file or --model NAME.")
    if options.workflow:
        if used := [format_flag(name) for name in input_names("inputs") if getattr(options, name, None) is not None]:
            raise ValueError(f"{', '.join(used)}: a workflow has its own. Leave it out, or give --model NAME instead.")
        return list_generations(
            read_workflow(options), Folders(models=model_folders(), loras=lora_folders()), HEADLESS_NODES
        )
    is_file = names_single_files(options.model)
    folders = model_folders() if names_single_files(options.model_id or options.model) else ()
    spec = resolve_variant(None, options.model, folders) if is_file else lookup_spec(options.model)
    default_id = options.model if is_file else spec.published.hub_id
    model_id = options.model_id or (spec.miniature.id if options.tiny else default_id)
    sizes = spec.miniature.inputs if model_id in spec.miniature.ids else {}
    model = ModelRef(spec_name=spec.name, model_id=model_id, precision=options.precision, folders=folders)
    model.check()
    return [(model, spec.settings(**{**sizes, **parse_inputs(options, spec)}))]
