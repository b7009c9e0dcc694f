"""The commands encode, denoise, decode and `calibrate`.

The first three run a generation in stages with files between them; `calibrate` measures MagCache's curve.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..nodes.declare import Folders, Json, Value
from ..nodes.headless.runner import TerminalContext
from ..tpu_runtime import api, media
from ..tpu_runtime.checkpoints import tiny
from ..tpu_runtime.checkpoints.model_ref import ModelRef, choose_model
from ..tpu_runtime.engine import stage_files, stage_values
from ..tpu_runtime.model_spec import SIZE_INPUTS, STEP_RANGE_INPUTS, ModelSpec
from ..tpu_runtime.models import NAME_HELP, SPECS, lookup_spec, spec_for_family
from .common_arguments import (
    add_inputs,
    add_precision,
    add_verb,
    describe_input,
    format_flag,
    input_names,
    model_folders,
    parse_inputs,
    print_timings,
)


def add_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this file."""
    encode = _stage_verb(
        verbs, "encode", _encode, "stage 1: encode prompts and images to embeddings",
        '--folder output/stages --model tiny/wan21 \\\n    --prompt "a red circle moves right on blue"',
    )  # fmt: skip
    _add_prompts(encode)
    add_inputs(encode, SIZE_INPUTS)
    denoise = _stage_verb(
        verbs, "denoise", _denoise, "stage 2: denoise latents, guided by the embeddings",
        "--folder output/stages --model tiny/wan21",
    )  # fmt: skip
    add_inputs(denoise, [name for name in input_names("inputs") if name != "fps"])
    decode = _stage_verb(
        verbs, "decode", _decode, "stage 3: decode latents to a video or an image",
        "--folder output/stages --model tiny/wan21",
    )  # fmt: skip
    add_inputs(decode, ["fps"])
    decode.add_argument(
        "--out", type=Path, metavar="FILE",
        help="output file; default: output_video.mp4 or output_image.png in --folder",
    )  # fmt: skip
    _add_calibrate(verbs)


def _add_prompts(verb: argparse.ArgumentParser) -> None:
    for name in input_names("texts"):
        verb.add_argument(
            format_flag(name), dest=name, metavar="TEXT", help=f"{describe_input(name)}; default: the model's own"
        )
    verb.add_argument(
        "--image", type=Path, action="append", default=[], metavar="FILE",
        help="the start image, then the end image; for models that take references: each of them",
    )  # fmt: skip
    verb.add_argument(
        "--resize", choices=media.RESIZE_MODES, default=media.RESIZE_MODES[0],
        help=f"{describe_input('resize')}; default: {media.RESIZE_MODES[0]}",
    )  # fmt: skip


def _stage_verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, command: Callable, text: str, example: str
) -> argparse.ArgumentParser:
    verb = add_verb(verbs, name, command, text, example, downloads=True)
    verb.add_argument(
        "--folder", type=Path, required=True, metavar="DIR", help="folder of the stage files; created if needed"
    )
    verb.add_argument("--name", help=f"{NAME_HELP}; default: the folder's, or {SPECS[0].name}")
    families = ", ".join(dict.fromkeys(spec.family for spec in SPECS))
    verb.add_argument("--family", help=f"the model's family instead of its name: {families}")
    verb.add_argument(
        "--model", metavar="ID",
        help=f"its weights: a Hub id, a folder, or a tiny model such as {SPECS[0].miniature.id}; default: the "
        "folder's, or the model's own",
    )  # fmt: skip
    add_precision(verb)
    return verb


def _stage_spec(options: argparse.Namespace, config: dict[str, Json]) -> ModelSpec:
    if options.name and options.family and lookup_spec(options.name).family != options.family:
        raise ValueError(f"--name {options.name} is not of the family {options.family}; give one of the two.")
    if options.family and not options.name:
        return spec_for_family(options.family)
    name = options.name or config.get("model_name")
    return lookup_spec(name) if name else SPECS[0]


def _stage(options: argparse.Namespace) -> tuple[ModelSpec, ModelRef, dict[str, Value]]:
    """Return the spec, the checked model, and the value of every option.

    A value is the given one, else the folder's, else the default.
    """
    config = stage_files.read_config(options.folder)
    spec = _stage_spec(options, config)
    folders = model_folders()
    model_id = options.model or config.get("model_id") or spec.published.hub_id
    model = ModelRef(spec_name=spec.name, model_id=model_id, precision=options.precision, folders=folders)
    if options.family and not options.name:
        host = TerminalContext(Folders())
        model = choose_model(spec, model_id, precision=options.precision, folders=folders, progress=host)
        spec = model.spec
    defaults = dict(spec.texts) | {name: limit.default for name, limit in spec.inputs.items()}
    fitting = (
        {**spec.miniature.inputs, **tiny.find_trained_texts(spec, model_id)} if model_id in spec.miniature.ids else {}
    )
    stored = {name: config[name] for name in defaults if name in config}
    values = {**defaults, **fitting, **stored, **parse_inputs(options, spec)}
    for name in spec.inputs:
        spec.check_input(name, values[name])
    for name in spec.texts:
        if not isinstance(values[name], str):
            raise ValueError(f"{spec.title}: {name} is {values[name]!r}; it must be text.")
    model.check()
    return spec, model, values


@contextmanager
def _time_stage(title: str) -> Iterator[TerminalContext]:
    """Return the host of a stage; print the stage's duration at its end."""
    host = TerminalContext(Folders())
    with host.time_node(title):
        yield host
    print_timings(host.timings)


def _encode(options: argparse.Namespace) -> int:
    spec, model, values = _stage(options)
    stage_files.check_ownership(options.folder)
    texts = {name: values[name] for name in spec.texts}
    pictures = _pictures(spec, options.image)
    # An image is encoded for a size, which later stages must use.
    fixed = {name: values[name] for name in SIZE_INPUTS if pictures and not spec.pictures.are_references}
    asked = {name: values[name] for name in SIZE_INPUTS if name in values and getattr(options, name) is not None}
    with _time_stage(f"{spec.title}: encode") as host:
        condition = _encode_pictures(model, pictures, fixed, options.resize, host)
        prompts = texts["prompt"], texts.get("negative_prompt", "")
        embeds = api.encode_prompt(model, *prompts, progress=host, condition=condition)
        stage_files.save_embeddings(options.folder, *embeds, model, condition)
        stage_files.update_config(options.folder, texts | asked | fixed)
    return 0


def _pictures(spec: ModelSpec, paths: Sequence[Path]) -> list[Value]:
    """Load the images as IMAGEs; ValueError if the model takes another number of them."""
    if paths and spec.pictures.encode is None:
        names = ", ".join(other.name for other in SPECS if other.pictures.encode is not None)
        raise ValueError(f"{spec.title} uses no image. Leave --image out, or choose a model by --name: {names}.")
    allowed = spec.pictures.numbers
    if (paths or spec.needs_condition) and not spec.pictures.are_references and len(paths) not in allowed:
        count = {0: "none was given", 1: "one was given"}.get(len(paths), f"{len(paths)} were given")
        expected = {1: "starts from one image", 2: "starts from one image and ends with another"}[allowed[0]]
        raise ValueError(f"{spec.title} {expected}, but {count}. Give each with --image FILE.")
    return [media.load_image(path)[0] for path in paths]


def _encode_pictures(
    model: ModelRef, pictures: Sequence[Value], size: dict[str, int], resize: str, host: TerminalContext
) -> stage_values.ImageCondition | None:
    """Return the condition of images, resized to `size` if it is not empty; None without images."""
    images = [media.resize(image, size["height"], size["width"], resize) if size else image for image in pictures]
    images = [media.join_images(images)] if size else images
    conditions = [api.encode_image(model, image, size, progress=host) for image in images]
    return api.join_references(conditions) if len(conditions) > 1 else next(iter(conditions), None)


def _denoise(options: argparse.Namespace) -> int:
    spec, model, values = _stage(options)
    stage_files.check_ownership(options.folder)
    numbers = {name: values[name] for name in spec.inputs if name != "fps"}
    settings = spec.settings(**numbers)
    embeds = stage_files.load_embeddings(options.folder, model)
    condition = stage_files.load_condition(options.folder, model)
    goes_on = settings.start_step or not settings.add_noise
    latents = stage_files.load_latents(options.folder, model) if goes_on else None
    if spec.needs_condition and condition is None:
        raise ValueError(
            f"{spec.title}: {options.folder} has no encoded image; run `comfyui-tpu encode --folder "
            f"{options.folder} --image FILE` first."
        )
    with _time_stage(f"{spec.title}: denoise") as host:
        latents = api.denoise(model, settings, *embeds, condition=condition, latents=latents, progress=host)
        stage_files.save_latents(options.folder, latents, model)
        stage_files.update_config(
            options.folder, {name: x for name, x in numbers.items() if name not in STEP_RANGE_INPUTS}
        )
    return 0


def _decode(options: argparse.Namespace) -> int:
    spec, model, values = _stage(options)
    out = options.out or options.folder / ("output_image.png" if spec.is_image else "output_video.mp4")
    latents = stage_files.load_latents(options.folder, model)
    with _time_stage(f"{spec.title}: decode") as host:
        frames = api.decode(model, latents, progress=host)
        if spec.is_image:
            media.save_image(out, frames[0])
        else:
            media.save_video(out, media.Video(frames=frames, frame_rate=media.exact_frame_rate(values["fps"])))
        host.text(f"wrote {out}")
    return 0


# --- calibrate --------------------------------------------------------------------------------------------------------

# Inputs that do not affect the curve, or that use it.
_NOT_MEASURED = (
    "fps",
    "step_cache",
    "cache_threshold",
    "cache_start",
    "cache_end",
    "cache_interval",
    *STEP_RANGE_INPUTS,
)


def _add_calibrate(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "measure the curve by which cache_threshold chooses the steps to skip"
    verb = add_verb(
        verbs, "calibrate", _calibrate, text, f"{SPECS[0].name} --model-id {SPECS[0].miniature.id}", downloads=True
    )
    verb.add_argument("name", metavar="MODEL", help=f"{NAME_HELP}; a video model")
    verb.add_argument("--model-id", metavar="ID", help="the model's id or folder; default: its Hub id")
    add_precision(verb)
    _add_prompts(verb)
    add_inputs(verb, [name for name in input_names("inputs") if name not in _NOT_MEASURED])


def _calibrate(options: argparse.Namespace) -> int:
    """Measure a model's MagCache curve in one generation of full steps."""
    spec, host = lookup_spec(options.name), TerminalContext(Folders())
    if "cache_threshold" not in spec.inputs:
        raise ValueError(f"{spec.title}: this model has no cache_threshold, so there is nothing to measure.")
    model_id = options.model_id or spec.published.hub_id
    model = choose_model(spec, model_id, precision=options.precision, folders=model_folders(), progress=host)
    if model.spec != spec:
        raise ValueError(f"{model_id} is a {model.spec.name}, not a {spec.name}. Name that model.")
    fitting = (
        {**spec.miniature.inputs, **tiny.find_trained_texts(spec, model_id)} if model_id in spec.miniature.ids else {}
    )
    values = {**spec.texts, **fitting, **parse_inputs(options, spec)}
    settings = spec.settings(**values)
    with host.time_node(f"{spec.title}: {len(settings.steps)} steps"):
        pictures = _pictures(spec, options.image)
        size = {name: getattr(settings, name) for name in SIZE_INPUTS if pictures}
        condition = _encode_pictures(model, pictures, size, options.resize, host)
        prompts = values["prompt"], values.get("negative_prompt", "")
        embeds = api.encode_prompt(model, *prompts, progress=host, condition=condition)
        curve, path = api.calibrate(model, settings, *embeds, condition=condition, progress=host)
    print_timings(host.timings)
    for branch, ratios in zip(("prompt", "negative prompt"), curve.ratios, strict=False):
        print(f"{branch}: {', '.join(f'{ratio:.4f}' for ratio in ratios)}")
    print(f"written: {path}")
    return 0
