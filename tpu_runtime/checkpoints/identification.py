"""What tensors cannot tell about single files is decided by marks, metadata, the user and the files' names.

The user's choice counts most, then the file's marks and metadata, then its name. If the result would depend on an open
question, the user is asked. Otherwise a value is assumed, and the log and the loader node report it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..files import CheckpointError
from ..formats import gguf_file
from ..formats.single_file import NetworkFile
from ..messages import compose
from ..model_spec import Component, ModelSpec
from ..model_spec.upstream import UpstreamConfig
from ..models import published

# Words of a file's name that describe its format, not its model.
_OF_FORMAT = re.compile(
    r"[a-z]|bf|(mx|nv)?fp(\d\w*)?|fn|int|[emv]\d\w*|q\d\w*|xxs|xs|iq|nl|ud|scaled|mixed|convrot|comfy\w*|gguf"
    r"|safetensors|sft|kj|repackaged|transformer|diffusion|model|diffusers|pytorch|high|low|noise|cfg"
)
# Names of one of two denoisers, in lower case with `-` between words: `high-noise`, or `high` alone unless it describes
# memory, quality or steps.
_NOISE = r"(high|low)-?noise"
_ALONE = r"(?<![a-z])(high|low)(?![a-z]|-?(?:v?ram|mem|res|quality|cfg|step|poly))"
# Names of models with two denoisers.
_OF_TWO = re.compile(r"wan-?2-?2(?!\d)|a14b")

# Words in the names of networks that were distilled to a few steps without guidance.
_DISTILLED = re.compile(
    r"distill|lightx2v|lightning|turbo|rapid|causvid|fast-?wan|dmd|accvid|fusionx|(?<![a-z0-9])(rcm|\d+-?steps?)(?![a-z])"
)


@dataclass(frozen=True)
class DeclaredFlags:
    """The user's choice, in addition to the files."""

    names: tuple[str, ...] = ()  # of models and repositories
    asks: bool = False  # whether the user may be asked


NO_FLAGS = DeclaredFlags()


class AmbiguousModelError(CheckpointError):
    """A value that the files leave open: the user is asked, unless the files match another model."""


def read_head_counts(held: NetworkFile, config: UpstreamConfig) -> dict[str, Any]:
    """Return a published config with the numbers in a GGUF file's metadata, also within nested configs."""
    if held.path.suffix != gguf_file.SUFFIX:
        return dict(config)
    numbers = {key: text for key in gguf_file.CONFIG_NUMBERS.values() if (text := held.contents.metadata.get(key))}
    values = {
        key: read_head_counts(held, value) if isinstance(value, Mapping) else value for key, value in config.items()
    }
    return values | {key: float(text) for key, text in numbers.items() if key in config}


def read_flag(held: NetworkFile, component: Component, key: str, said: DeclaredFlags) -> bool:
    """Return the value of a config key that no weight decides. Raises OpenError if it is open or contradictory.

    held: the network's file. component: whose config it is. said: the user's choice.
    """
    declared = held.layout.flags[key]
    if declared.mark in held.tensors:
        return True
    allowed = getattr(component.needs.get(key), "values", (False,))
    if len(allowed) == 1:
        return bool(allowed[0])
    by_user, by_name = (_read(declared.true, declared.false, names) for names in (said.names, held.contents.titles))
    value = by_name if by_user is None else by_user
    if said.asks and None not in (by_user, by_name) and by_user != by_name:
        raise AmbiguousModelError(
            compose(
                "file.name_of_another_model", path=held.path, names=" and ".join(said.names), meaning=declared.meaning
            )
        )
    if value is None and said.asks:
        raise AmbiguousModelError(
            compose("file.variant_ambiguous", path=held.path, meaning=declared.meaning, answers=declared.answers)
        )
    return bool(value)


def _read(true: str, false: str, names: Iterable[str]) -> bool | None:
    """Return the value of a flag from the first of `names` that matches exactly one of both patterns, or None."""
    for name in names:
        matches = [bool(re.search(pattern, name.lower())) for pattern in (true, false)]
        if matches in ([True, False], [False, True]):
            return matches[0]
    return None


def find_relative(held: NetworkFile, spec: ModelSpec) -> str | None:
    """Return why the file's name excludes this model, or None.

    Some networks have the same tensors and compute something else.
    """
    for title in _plain(held.contents.titles):
        for pattern, what in held.layout.relatives.items():
            if re.search(pattern, title):
                return compose(
                    "file.name_contradicts_tensors", path=held.path, what=what, title=spec.title, name=spec.name,
                )  # fmt: skip
    return None


def read_expert(held: NetworkFile, spec: ModelSpec) -> str | None:
    """Return why a file is not complete for a model with one denoiser, if its name is that of an expert; else None."""
    level = noise(held)
    if not level or len(spec.denoiser.experts) > 1:
        return None
    return compose("file.expert_of_another_model", path=held.path, level=level, title=spec.title, name=spec.name)


def noise(held: NetworkFile, *, is_of_two: bool = False) -> str:
    """Return the noise level of an expert by its file's name: `high`, `low`, or "" if the name is ambiguous.

    is_of_two: the file is known to be one of two experts, so the word `high` or `low` is enough.
    """
    names = (held.path.name, *held.contents.titles)
    for title in _plain(re.sub("(?=[A-Z][a-z])", "_", name) for name in names):  # `I2VHighNoise` too
        for pattern in (_NOISE, _ALONE) if is_of_two or _OF_TWO.search(title) else (_NOISE,):
            if matches := set(re.findall(pattern, title)):
                return matches.pop() if len(matches) == 1 else ""
    return ""


def _plain(titles: Iterable[str]) -> list[str]:
    """Return titles in lowercase with `-` between words."""
    return [re.sub(r"[\W_]+", "-", title.lower()) for title in titles]


def split_words(name: str) -> set[str]:
    """Return the words of a name that tell models apart: `480p`, `i2v`, `base`, and sizes without a dot."""
    return set(re.findall(r"[a-z]+\d+[a-z]+\d*|\d+p|\d+b|[a-z]+", name.lower().replace("1.3b", "13b")))


def is_published(spec: ModelSpec, names: Iterable[str], folder: str = "diffusion_models") -> bool:
    """Return whether one of `names` is a published file of the model in `folder`."""
    files = (file for formats in published.SETS.get(spec.name, {}).values() for file in formats)
    return not {file.name.lower() for file in files if file.folder == folder}.isdisjoint(names)


def is_decided(spec: ModelSpec, rivals: Sequence[ModelSpec], names: Sequence[str]) -> bool:
    """Return whether the denoisers' names identify this model among its `rivals`.

    They do so with a word that each rival lacks, or with all words of the model and no others.
    """
    if is_published(spec, names):
        return True
    words = set().union(*map(split_words, names))
    known = split_words(spec.name)
    strange = {word for word in words - known if not _OF_FORMAT.fullmatch(word)}
    return (known <= words and not strange) or all((known - split_words(rival.name)) & words for rival in rivals)


def distinguishing_settings(spec: ModelSpec) -> tuple[Any, ...]:
    """Return the settings by which this model differs from others with the same networks, apart from widgets."""
    index = {key: value for key, value in spec.published.index.items() if not isinstance(value, tuple)}
    return dict(spec.recipe.scheduler), spec.recipe.guidance, index, dict(spec.published.files)


def warn_distilled(spec: ModelSpec, names: Iterable[str]) -> str:
    """Return a warning if the names of a denoiser say that it is distilled, unless the model is; else "".

    The model's default steps and guidance do not suit a distilled network.
    """
    word = next((match for name in _plain(names) if (match := _DISTILLED.search(name))), None)
    if word is None or _DISTILLED.search(spec.name) or spec.branches(spec.settings().guidance_scale) == 1:
        return ""
    return f"it is distilled by its name ({word[0]}): set its few steps, and a guidance of 1, in the sampler"


def explain_ambiguity(model_id: str, specs: Sequence[ModelSpec]) -> str:
    """Return the question which of several models some files are."""
    names = " or ".join(f"+ {spec.name}" for spec in specs)
    titles = " and of ".join(spec.title for spec in specs)
    return compose("file.model_ambiguous", model_id=model_id, titles=titles, names=names)


def warn_assumed(rivals: Sequence[ModelSpec]) -> str:
    """Return the notice that a model was assumed, and how to choose another."""
    others = " or ".join(f"+ {rival.name}" for rival in rivals)
    return f"neither tensors nor names tell it from another: add {others} to model_id if it is that"
