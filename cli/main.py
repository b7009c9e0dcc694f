"""The `comfyui-tpu` command. Errors of users end in one sentence and exit code 2; --debug shows the traceback."""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..nodes.declare import Declaration, Folders
from ..nodes.graph import Workflow, generations
from ..nodes.headless.runner import HEADLESS, TerminalHost, Timing, run_workflow
from ..nodes.headless.workflow import to_api
from ..tpu_runtime import media, pipeline
from ..tpu_runtime.checkpoints.model_ref import ModelRef, choose_model, variant
from ..tpu_runtime.engine import payloads, stage_files
from ..tpu_runtime.limits import PART, Choice, IntLimit, Numbers, Switch
from ..tpu_runtime.models import SPECS, spec_by_name, spec_for_family
from ..tpu_runtime.plan import options as plan_options
from ..tpu_runtime.precision import CHOICES
from ..tpu_runtime.spec import ModelSpec, Settings
from . import doctor

# What a picture is encoded for.
_SIZE = ("height", "width", "num_frames")


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
    run = _verb(verbs, "run", _run, "run a ComfyUI workflow file")
    run.add_argument("workflow", type=Path, help="a workflow as ComfyUI's page saves or exports it (JSON)")
    run.add_argument(
        "--set", action="append", default=[], metavar="NODE.INPUT=VALUE", help="change an input; repeatable"
    )
    run.add_argument("--tiny", action="store_true", help="use the built-in miniature models, at their sizes")
    run.add_argument("--out", type=Path, default=Path("output"), metavar="DIR", help="where results go (output)")
    run.add_argument("--input", type=Path, default=Path("input"), metavar="DIR", help="where LoadImage looks (input)")
    encode = _stage_verb(verbs, "encode", _encode, "stage 1: prompts, and a picture, to embeddings")
    for name in _names("texts"):
        encode.add_argument(_flag(name), dest=name)
    encode.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE",
        help="the picture to start from, and then the one to end with; for models that look at references: each",
    )  # fmt: skip
    encode.add_argument("--resize", choices=media.RESIZE, default=media.RESIZE[0], help="how another shape is fitted")
    _add_widgets(encode, _SIZE)
    denoise = _stage_verb(verbs, "denoise", _denoise, "stage 2: embeddings to latents")
    _add_widgets(denoise, [name for name in _names("inputs") if name != "fps"])
    decode = _stage_verb(verbs, "decode", _decode, "stage 3: latents to a video or a picture")
    _add_widgets(decode, ["fps"])
    decode.add_argument("--out", type=Path, metavar="FILE", help="FOLDER/output_video.mp4 or output_image.png")
    warmup = _verb(verbs, "warmup", _warmup, "compile a size's programs, so that its first run starts at once")
    warmup.add_argument("workflow", type=Path, nargs="?", help="the sizes of this workflow's samplers")
    warmup.add_argument("--model", metavar="NAME", help="instead: this model; " + "; ".join(s.name for s in SPECS))
    warmup.add_argument("--model-id", metavar="ID", help="with --model: its id or folder; default: its Hub id")
    warmup.add_argument("--precision", choices=CHOICES, default="auto")
    warmup.add_argument("--tiny", action="store_true", help="use the built-in miniature models, at their sizes")
    _add_widgets(warmup, [name for name in _names("inputs") if name not in ("fps", "seed")])
    plan_options.add_arguments(
        _verb(verbs, "plan", _plan, "compile for a described TPU: does it fit, how long would it take")
    )
    monitor = _verb(verbs, "monitor", _monitor, "show what a running ComfyUI server does on the TPU")
    monitor.add_argument("--url", default="http://127.0.0.1:8188", help="the server (http://127.0.0.1:8188)")
    monitor.add_argument("--once", action="store_true", help="print the numbers once and end")
    monitor.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks (1)")
    _verb(verbs, "doctor", _doctor, "report versions, devices, folders and what is missing")
    return parser


class _Version(argparse.Action):
    """Looks the version up only when asked for: a source tree that is not installed has none."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(importlib.metadata.version("comfyui-tpu"))
        parser.exit()


def _verb(verbs: Any, name: str, command: Callable, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verb.set_defaults(command=command)
    return verb


def _stage_verb(verbs: Any, name: str, command: Callable, text: str) -> argparse.ArgumentParser:
    verb = _verb(verbs, name, command, text)
    verb.add_argument("--folder", type=Path, required=True, metavar="DIR", help="the folder of the stage files")
    verb.add_argument(
        "--name", choices=[spec.name for spec in SPECS], help="the model; default: the folder's, or the first"
    )
    verb.add_argument("--family", choices=[spec.family for spec in SPECS], help="the same by family")
    verb.add_argument("--model", metavar="ID", help="model id or folder; default: the folder's, or the model's own")
    verb.add_argument("--precision", choices=CHOICES, default="auto")
    return verb


def _names(field: str) -> list[str]:
    """Names of the texts or inputs of all models, each once, in order."""
    return list(dict.fromkeys(name for spec in SPECS for name in getattr(spec, field)))


def _add_widgets(verb: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """An option for each of these inputs of the models; None where it is not given."""
    for name in names:
        limits = [spec.inputs[name] for spec in SPECS if name in spec.inputs]
        defaults = ", ".join(str(value) for value in dict.fromkeys(limit.default for limit in limits)) or "empty"
        kind: dict[str, Any] = {"type": {IntLimit: int, Numbers: str}.get(type(limits[0]), float)}
        if isinstance(limits[0], Switch):
            kind = {"action": argparse.BooleanOptionalAction}
        elif isinstance(limits[0], Choice):
            kind = {"choices": list(dict.fromkeys(one for limit in limits for one in limit.options))}
        verb.add_argument(_flag(name), dest=name, help=f"default {defaults}", **kind)


def _given(options: argparse.Namespace, spec: ModelSpec) -> dict[str, Any]:
    """The texts and inputs that were given as options, by name; ValueError for one that the model does not have."""
    names = [*_names("texts"), *_names("inputs")]
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    for name in given:
        if name not in spec.texts and name not in spec.inputs:
            raise ValueError(f"{spec.title}: this model has no {name}. Leave {_flag(name)} out.")
    return given


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
        _print_timings(host.timings)
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
        # With an encoded picture a sampler's size may be 0: the picture's.
        is_free = "condition" not in node["inputs"]
        node["inputs"] |= {name: wanted[name] for name, value in given.items() if value or is_free}


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


# --- encode, denoise, decode ------------------------------------------------------------------------------------------


def _stage_spec(options: argparse.Namespace, config: dict[str, Any]) -> ModelSpec:
    if options.name and options.family and spec_by_name(options.name).family != options.family:
        raise ValueError(f"--name {options.name} is not of the family {options.family}; give one of the two.")
    if options.family and not options.name:
        return spec_for_family(options.family)
    name = options.name or config.get("model_name")
    return spec_by_name(name) if name else SPECS[0]


def _stage(options: argparse.Namespace) -> tuple[ModelSpec, ModelRef, dict[str, Any]]:
    """The spec, the checked model, and every option by name: given now, else the folder's, else the default."""
    config = stage_files.read_config(options.folder)
    spec = _stage_spec(options, config)
    model_id = options.model or config.get("model_id") or spec.hub_id
    model = ModelRef(spec_name=spec.name, model_id=model_id, precision=options.precision)
    if options.family and not options.name:
        model = choose_model(spec, model_id, precision=options.precision, progress=TerminalHost(Folders()))
        spec = model.spec
    defaults = dict(spec.texts) | {name: limit.default for name, limit in spec.inputs.items()}
    sizes = spec.tiny_inputs if model_id == spec.tiny_id else {}
    stored = {name: config[name] for name in defaults if name in config}
    values = {**defaults, **sizes, **stored, **_given(options, spec)}
    for name in spec.inputs:
        spec.check_input(name, values[name])
    for name in spec.texts:
        if not isinstance(values[name], str):
            raise ValueError(f"{spec.title}: {name} is {values[name]!r}; it must be text.")
    model.check()
    return spec, model, values


def _timed(title: str, action: Callable[[TerminalHost], None]) -> int:
    host = TerminalHost(Folders())
    with host.timed(title):
        action(host)
    _print_timings(host.timings)
    return 0


def _encode(options: argparse.Namespace) -> int:
    spec, model, values = _stage(options)
    stage_files.check_ours(options.folder)
    texts = {name: values[name] for name in spec.texts}
    pictures = _pictures(spec, options.image)
    # A picture is encoded for a size, which the later stages must have.
    fixed = {name: values[name] for name in _SIZE if pictures and not spec.references}
    asked = {name: values[name] for name in _SIZE if name in values and getattr(options, name) is not None}

    def action(host: TerminalHost) -> None:
        embeds = pipeline.encode_prompt(model, texts["prompt"], texts.get("negative_prompt", ""), progress=host)
        condition = _encode_pictures(model, pictures, fixed, options.resize, host)
        stage_files.save_embeddings(options.folder, *embeds, model, condition)
        stage_files.update_config(options.folder, texts | asked | fixed)

    return _timed(f"{spec.title}: encode", action)


def _pictures(spec: ModelSpec, paths: Sequence[Path]) -> list[Any]:
    """The pictures as IMAGEs; ValueError where the model takes another number of them."""
    if paths and spec.encode_image is None:
        names = ", ".join(other.name for other in SPECS if other.encode_image is not None)
        raise ValueError(f"{spec.title}: it takes no picture. Leave --image out, or choose a model by --name: {names}.")
    if (paths or spec.needs_condition) and not spec.references and len(paths) not in spec.pictures:
        given = {0: "none was given", 1: "one was given"}.get(len(paths), f"{len(paths)} were given")
        wanted = {1: "starts from one picture", 2: "starts from one picture and ends with another"}[spec.pictures[0]]
        raise ValueError(f"{spec.title}: it {wanted}, and {given}. Give each with --image FILE.")
    return [media.load_image(path)[0] for path in paths]


def _encode_pictures(
    model: ModelRef, pictures: Sequence[Any], size: dict[str, int], resize: str, host: TerminalHost
) -> payloads.ImageCondition | None:
    """The condition of pictures brought to `size`, or left at their own where that is empty; None without pictures."""
    images = [media.resize(one, size["height"], size["width"], resize) if size else one for one in pictures]
    images = [media.joined(images)] if size else images
    conditions = [pipeline.encode_image(model, image, size, progress=host) for image in images]
    return pipeline.join_references(conditions) if len(conditions) > 1 else next(iter(conditions), None)


def _denoise(options: argparse.Namespace) -> int:
    spec, model, values = _stage(options)
    stage_files.check_ours(options.folder)
    numbers = {name: values[name] for name in spec.inputs if name != "fps"}
    settings = spec.settings(**numbers)
    embeds = stage_files.load_embeddings(options.folder, model)
    condition = stage_files.load_condition(options.folder, model)
    goes_on = settings.start_step or not settings.add_noise
    given = stage_files.load_latents(options.folder, model) if goes_on else None
    if spec.needs_condition and condition is None:
        raise ValueError(
            f"{spec.title}: {options.folder} holds no encoded picture; run `comfyui-tpu encode --folder "
            f"{options.folder} --image FILE` first."
        )

    def action(host: TerminalHost) -> None:
        latents = pipeline.denoise(model, settings, *embeds, condition=condition, latents=given, progress=host)
        stage_files.save_latents(options.folder, latents, model)
        stage_files.update_config(options.folder, {name: x for name, x in numbers.items() if name not in PART})

    return _timed(f"{spec.title}: denoise", action)


def _decode(options: argparse.Namespace) -> int:
    spec, model, values = _stage(options)
    out = options.out or options.folder / ("output_image.png" if spec.is_image else "output_video.mp4")
    latents = stage_files.load_latents(options.folder, model)

    def action(host: TerminalHost) -> None:
        frames = pipeline.decode(model, latents, progress=host)
        if spec.is_image:
            media.save_image(out, frames[0])
        else:
            media.save_video(out, media.Video(frames=frames, frame_rate=media.frame_rate(values["fps"])))
        host.text(f"wrote {out}")

    return _timed(f"{spec.title}: decode", action)


# --- warmup -----------------------------------------------------------------------------------------------------------


def _warmup(options: argparse.Namespace) -> int:
    host = TerminalHost(Folders())
    for model, settings in _wanted(options):
        with host.timed(f"{model.spec.title}: {settings.width}x{settings.height}, {settings.num_frames} frames"):
            pipeline.warmup(model, settings, progress=host)
    _print_timings(host.timings)
    return 0


def _wanted(options: argparse.Namespace) -> list[tuple[ModelRef, Settings]]:
    """The generations to compile for: a workflow's, or one model's."""
    if bool(options.workflow) == bool(options.model):
        raise ValueError("warmup takes either a workflow file or --model NAME.")
    if options.workflow:
        if given := [_flag(name) for name in _names("inputs") if getattr(options, name, None) is not None]:
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
    return [(model, spec.settings(**{**sizes, **_given(options, spec)}))]


# --- plan -------------------------------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> int:
    from ..tpu_runtime.plan import plan

    return plan.run(options, lambda line: print(line, flush=True))


# --- monitor ----------------------------------------------------------------------------------------------------------


def _monitor(options: argparse.Namespace) -> int:
    from . import monitor

    return monitor.run(options)


# --- reports ----------------------------------------------------------------------------------------------------------


def _print_timings(timings: Sequence[Timing]) -> None:
    if not timings:
        return
    width = max(len(timing.title) for timing in timings)
    for timing in timings:
        print(f"{timing.title:<{width}}  {timing.elapsed_s:8.1f} s")
    print(f"{'total':<{width}}  {sum(timing.elapsed_s for timing in timings):8.1f} s")
    print(f"XLA programs: {pipeline.compilation_summary()}")


def _doctor(options: argparse.Namespace) -> int:
    """Exit code 1 when something needs mending."""
    findings = doctor.report()
    for finding in findings:
        print(f"{finding.topic:<22} {finding.found}")
        if finding.remedy:
            print(f"{'':<22} -> {finding.remedy}")
    return 1 if any(finding.remedy for finding in findings) else 0
