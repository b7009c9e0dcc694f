"""Single files named as in ComfyUI's templates, of all families."""

import functools
from collections.abc import Mapping

from ..messages import compose
from . import FAMILIES
from .common.published_files import Files, SingleFile

# The files of each model, by its name and by format.
SETS: Mapping[str, Mapping[str, Files]] = {
    model: formats for family in FAMILIES for model, formats in family.files.sets.items()
}
_MORE_DENOISERS: Mapping[str, tuple[str, ...]] = {
    model: names for family in FAMILIES for model, names in family.files.more_denoisers.items()
}
_MORE_PARTS: Mapping[str, tuple[str, ...]] = {
    model: names for family in FAMILIES for model, names in family.files.more_parts.items()
}

# Names of files with control networks.
CONTROLS: frozenset[str] = frozenset(name for family in FAMILIES for name in family.files.controls)


def describe_sizes(model: str) -> str:
    """Return the approximate size of a model's files by format, such as "fp8 29 GB"; "" without files."""
    totals = {kind: sum(file.size_gb for file in files) for kind, files in SETS.get(model, {}).items()}
    return ", ".join(f"{kind} {total:.0f} GB" for kind, total in sorted(totals.items(), key=lambda item: item[1]))


def list_files(model: str, kind: str) -> Files:
    """Return the files of a model in a format. Raises ValueError that lists the formats."""
    if model not in SETS:
        raise ValueError(compose("file.published_model_unknown", model=model, sets=", ".join(SETS)))
    if kind not in SETS[model]:
        raise ValueError(compose("file.published_kind_unknown", model=model, kind=kind, sets=" or ".join(SETS[model])))
    return SETS[model][kind]


def find_part(model: str, folder: str) -> SingleFile | None:
    """Return the most exact file of a model for one of ComfyUI's folders, or None."""
    known = SETS.get(model, {})
    exact = known.get("fp16") or next(iter(known.values()), ())
    return next((file for file in exact if file.folder == folder), None)


def list_denoisers(model: str) -> tuple[str, ...]:
    """Return the names of files that hold a denoiser of this model; with two experts in `SETS`, the first one's."""
    return (*(files[0].name for files in SETS.get(model, {}).values()), *_MORE_DENOISERS.get(model, ()))


@functools.cache
def list_models() -> Mapping[str, str]:
    """Return the model of each known file, by file name; for a file that several models share, the first of them."""
    model_of_file: dict[str, str] = {}
    for model, formats in SETS.items():
        known = (file.name for files in formats.values() for file in files)
        for name in (*known, *_MORE_DENOISERS.get(model, ()), *_MORE_PARTS.get(model, ())):
            model_of_file.setdefault(name, model)
    return model_of_file
