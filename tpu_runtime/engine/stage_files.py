"""Values between stages as files of a folder, so that each stage may run in another process or on another machine.

The files are `stage1_embeddings.safetensors`, `stage2_latents.safetensors` and `generation_config.json` with the
settings and the model. Their content is untrusted. Files of these names that this pack did not write are never
overwritten.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..files import parse_json, write_file
from ..messages import compose
from . import stage_values
from .stage_values import Conditioning, ImageCondition, Latent, unpack_conditioning

if TYPE_CHECKING:
    from ..checkpoints.model_ref import ModelRef

EMBEDDINGS = "stage1_embeddings.safetensors"
LATENTS = "stage2_latents.safetensors"
CONFIG = "generation_config.json"
Value = TypeVar("Value")


class StageFileError(ValueError):
    """An error for stage files that are missing, damaged or another model's, in a sentence for the user."""


def save_embeddings(
    folder: Path,
    prompt_embeds: Conditioning,
    negative_prompt_embeds: Conditioning | None,
    model: "ModelRef",
    condition: ImageCondition | None = None,
) -> None:
    """Write the encoded prompts, and an encoded image if there is one, to `folder`, which is created if need be.

    prompt_embeds, negative_prompt_embeds: CONDITIONING; None to leave the negative one out.
    model: recorded in the folder's config.
    condition: an encoded image or None.
    Raises `StageFileError` if the folder cannot be written or has files of another origin.
    """
    check_ownership(folder)
    for name, value in {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": negative_prompt_embeds}.items():
        if value is not None:
            unpack_conditioning(model.spec, name, value)
    _replace(folder / EMBEDDINGS, stage_values.pack_embeddings(prompt_embeds, negative_prompt_embeds, condition))
    update_config(folder, {"model_name": model.spec_name, "model_id": model.model_id})


def load_embeddings(folder: Path, model: "ModelRef") -> tuple[Conditioning, Conditioning | None]:
    """Return prompt and negative prompt of `folder`. Raises `StageFileError` if another model made them."""
    prompt, negative, _ = _embeddings(folder, model)
    if prompt is None:
        raise StageFileError(compose("stage_file.no_prompt_embeds", folder=folder / EMBEDDINGS))
    return prompt, negative


def load_condition(folder: Path, model: "ModelRef") -> ImageCondition | None:
    """Return the encoded image of `folder`, or None. Raises `StageFileError` if another model made it."""
    return _embeddings(folder, model)[2]


def _embeddings(
    folder: Path, model: "ModelRef"
) -> tuple[Conditioning | None, Conditioning | None, ImageCondition | None]:
    return _load(folder, EMBEDDINGS, "encode", model, lambda x: stage_values.unpack_embeddings(x, model.spec.family))


def save_latents(folder: Path, latents: Mapping[str, Any], model: "ModelRef") -> None:
    """Write a LATENT to `folder`. Raises `StageFileError` if that fails.

    latents: tensors by name. model: what made them, for the generation's config.
    """
    check_ownership(folder)
    _replace(folder / LATENTS, stage_values.pack_latents(latents))
    update_config(folder, {"model_name": model.spec_name, "model_id": model.model_id})


def load_latents(folder: Path, model: "ModelRef") -> Latent:
    """Return the LATENT of `folder`. Raises `StageFileError` if another model made it."""
    latents = _load(folder, LATENTS, "denoise", model, stage_values.unpack_latents)
    if latents is None:
        raise StageFileError(compose("stage_file.no_latents", folder=folder / LATENTS))
    return latents


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings in `folder`, {} without a config. Raises `StageFileError` for invalid content."""
    path = folder / CONFIG
    with _as_sentence(path):
        try:
            config = parse_json(path.read_bytes()) if path.is_file() else {}
        except ValueError as error:
            raise StageFileError(compose("stage_file.not_json", path=path, error=error)) from error
    if not isinstance(config, dict):
        raise StageFileError(compose("stage_file.json_not_object", path=path, type=type(config).__name__))
    for name in ("model_name", "model_id"):
        if not isinstance(config.get(name, ""), str):
            raise StageFileError(compose("stage_file.not_text", path=path, name=name, config=repr(config[name])))
    return config


def update_config(folder: Path, values: Mapping[str, Any]) -> None:
    """Add `values` to the folder's settings."""
    merged = {**read_config(folder), **values}
    _replace(folder / CONFIG, json.dumps(merged, indent=2, ensure_ascii=False).encode())


def list_stage_files(folder: Path) -> dict[str, int]:
    """Return the stage files in `folder` by name, with their modification times in nanoseconds."""
    with _as_sentence(folder):
        paths = [folder / name for name in (EMBEDDINGS, LATENTS)]
        return {path.name: path.stat().st_mtime_ns for path in paths if path.is_file()}


def check_ownership(folder: Path) -> None:
    """Raise `StageFileError` if `folder` has files of these names that this pack did not write."""
    with _as_sentence(folder):
        foreign = [name for name in (EMBEDDINGS, LATENTS) if (folder / name).exists() and not _is_ours(folder / name)]
        config = folder / CONFIG
        if config.exists() and not (config.is_file() and "model_name" in read_config(folder)):
            foreign.append(CONFIG)
    if foreign:
        raise StageFileError(compose("stage_file.foreign_file", folder=folder, foreign=foreign[0]))


def _is_ours(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        return False
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            return stage_values.MADE_BY.items() <= (file.metadata() or {}).items()
    except SafetensorError:
        return False


@contextlib.contextmanager
def _as_sentence(path: Path) -> Iterator[None]:
    """Raise errors of the file system as `StageFileError`."""
    try:
        yield
    except OSError as error:
        raise StageFileError(compose(
            "stage_file.folder_unusable", path=path, strerror=error.strerror or error,
        )) from error  # fmt: skip


def _replace(path: Path, content: bytes) -> None:
    with _as_sentence(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)


def _load(folder: Path, name: str, stage: str, model: "ModelRef", unpack: Callable[[bytes], Value]) -> Value:
    writer = read_config(folder).get("model_name", model.spec_name)
    if writer != model.spec_name:
        raise StageFileError(
            compose("stage_file.of_another_model", folder=folder, writer=writer, spec_name=model.spec_name)
        )
    path = folder / name
    if name not in list_stage_files(folder):
        raise StageFileError(compose("stage_file.missing", path=path, stage=stage, folder=folder))
    with _as_sentence(path):
        try:
            return unpack(path.read_bytes())
        except ValueError as error:
            again = f"delete it and run `comfyui-tpu {stage}` again"
            raise StageFileError(compose("stage_file.damaged", path=path, error=error, again=again)) from error
