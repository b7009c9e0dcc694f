"""What neither names nor shapes of tensors tell of single files: marks, metadata, the user and the files' names do.

The user's word counts most, then the file's marks and metadata, then its name. What stays open is asked where the
result would be another one; else it is assumed, and the log and the node that loads the model say so.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...files import CheckpointError
from ...formats import gguf_file
from ...formats.contents import Held
from ...model_spec import Component, ModelSpec
from . import published

# Words of a file's name that are of its format, and none of a model's.
_OF_FORMAT = re.compile(
    r"[a-z]|bf|(mx|nv)?fp(\d\w*)?|fn|int|[emv]\d\w*|q\d\w*|xxs|xs|iq|nl|ud|scaled|mixed|convrot|comfy\w*|gguf"
    r"|safetensors|sft|kj|repackaged|transformer|diffusion|model|diffusers|pytorch|high|low|noise|cfg"
)
# How names say which of two denoisers a file is, in small letters with `-` between words: `high-noise`, or the word
# alone, which elsewhere is said of memory, sizes and steps.
_NOISE = r"(high|low)-?noise"
_ALONE = r"(?<![a-z])(high|low)(?![a-z]|-?(?:v?ram|mem|res|quality|cfg|step|poly))"
# How names say that a file is one of two.
_OF_TWO = re.compile(r"wan-?2-?2(?!\d)|a14b")

# How names say that a network was distilled to a few steps without guidance.
_DISTILLED = re.compile(
    r"distill|lightx2v|lightning|turbo|rapid|causvid|fast-?wan|dmd|accvid|fusionx|(?<![a-z0-9])(rcm|\d+-?steps?)(?![a-z])"
)


@dataclass(frozen=True)
class Said:
    """What a user says beside the files: names of models and repositories. `asks` where what is open may be asked."""

    names: tuple[str, ...] = ()
    asks: bool = False


NOTHING = Said()


class OpenError(CheckpointError):
    """A value that is open: the user is asked, unless it is another model that the files are."""


def numbered(held: Held, config: Mapping[str, Any]) -> dict[str, Any]:
    """A published config with the numbers that the metadata of a GGUF file says, also in a part of it."""
    if held.path.suffix != gguf_file.SUFFIX:
        return dict(config)
    numbers = {key: text for key in gguf_file.NUMBERS.values() if (text := held.contents.metadata.get(key))}
    found = {key: numbered(held, value) if isinstance(value, Mapping) else value for key, value in config.items()}
    return found | {key: float(text) for key, text in numbers.items() if key in config}


def flag(held: Held, component: Component, key: str, said: Said) -> bool:
    """Whether a key of the config is true that no weight tells; `OpenError` where it is open, or contradicted."""
    one = held.layout.flags[key]
    if one.mark in held.tensors:
        return True
    allowed = getattr(component.needs.get(key), "values", (False,))
    if len(allowed) == 1:
        return bool(allowed[0])
    by_user, by_name = (_read(one.true, one.false, names) for names in (said.names, held.contents.titles))
    found = by_name if by_user is None else by_user
    if said.asks and None not in (by_user, by_name) and by_user != by_name:
        raise OpenError(
            f"{held.path} is another model by its name than {' and '.join(said.names)}: one of them is "
            f"{one.meaning}. Name the model that the file is, or rename the file."
        )
    if found is None and said.asks:
        raise OpenError(
            f"{held.path}: neither its tensors nor its name tell whether it is {one.meaning}. Put one of the two "
            f"numbers into the file's name, or add {one.answers} to model_id."
        )
    return bool(found)


def _read(true: str, false: str, names: Iterable[str]) -> bool | None:
    """What the first of some names says that says one of two things."""
    for name in names:
        found = [bool(re.search(pattern, name.lower())) for pattern in (true, false)]
        if found in ([True, False], [False, True]):
            return found[0]
    return None


def relative(held: Held, spec: ModelSpec) -> str | None:
    """Why a network is none of this model by what its file is called: it has the same tensors and computes something
    else, or is one of two denoisers.
    """
    for title in _plain(held.contents.titles):
        for pattern, what in held.layout.relatives.items():
            if re.search(pattern, title):
                return (
                    f"{held.path} is by its name {what}; its tensors are like those of {spec.title}, which computes "
                    f"something else. Use ComfyUI's own loader for it, or where it is {spec.title}, add + {spec.name} "
                    "to model_id."
                )
    return None


def expert(held: Held, spec: ModelSpec) -> str | None:
    """Why a file is not all of a model with one denoiser: it is one of two by its name."""
    found = noise(held)
    if not found or len(spec.denoiser.experts) > 1:
        return None
    return (
        f"{held.path} is by its name the denoiser for {found} noise, one of two, and {spec.title} has one. Name both, "
        f"the one for high noise first, or to run it alone as {spec.title}, add + {spec.name} to model_id."
    )


def noise(held: Held, *, is_of_two: bool = False) -> str:
    """Which of two denoisers a file is by its name: `high`, `low`, or nothing where that is open. Of one that is known
    to be of two the word alone tells, too.
    """
    names = (held.path.name, *held.contents.titles)
    for title in _plain(re.sub("(?=[A-Z][a-z])", "_", name) for name in names):  # `I2VHighNoise` too
        for pattern in (_NOISE, _ALONE) if is_of_two or _OF_TWO.search(title) else (_NOISE,):
            if found := set(re.findall(pattern, title)):
                return found.pop() if len(found) == 1 else ""
    return ""


def _plain(titles: Iterable[str]) -> list[str]:
    """Titles in small letters with `-` between words."""
    return [re.sub(r"[\W_]+", "-", title.lower()) for title in titles]


def words_of(name: str) -> set[str]:
    """The parts of a name that tell models apart: `480p`, `i2v`, `base`, and sizes without a dot."""
    return set(re.findall(r"[a-z]+\d+[a-z]+\d*|\d+p|\d+b|[a-z]+", name.lower().replace("1.3b", "13b")))


def is_published(spec: ModelSpec, names: Iterable[str], folder: str = "diffusion_models") -> bool:
    """Whether a file of the model is published under one of these names."""
    files = (file for formats in published.SETS.get(spec.name, {}).values() for file in formats)
    return not {file.name.lower() for file in files if file.folder == folder}.isdisjoint(names)


def is_decided(spec: ModelSpec, rivals: Sequence[ModelSpec], names: Sequence[str]) -> bool:
    """Whether the names of denoisers say that they are this model and none of its rivals: by a word that a rival lacks,
    or by all words of the model and no others.
    """
    if is_published(spec, names):
        return True
    words = set().union(*map(words_of, names))
    own = words_of(spec.name)
    strange = {word for word in words - own if not _OF_FORMAT.fullmatch(word)}
    return (own <= words and not strange) or all((own - words_of(rival.name)) & words for rival in rivals)


def differences(spec: ModelSpec) -> tuple[Any, ...]:
    """What a model does otherwise than another one of the same networks, whatever the widgets say."""
    index = {key: value for key, value in spec.published.index.items() if not isinstance(value, tuple)}
    return dict(spec.recipe.scheduler), spec.recipe.guidance, index, dict(spec.published.files)


def distilled_sentence(spec: ModelSpec, names: Iterable[str]) -> str:
    """Says of a network that is distilled by its name that this model's usual steps and guidance are not its own; empty
    where they are.
    """
    found = next((match for name in _plain(names) if (match := _DISTILLED.search(name))), None)
    if found is None or _DISTILLED.search(spec.name) or spec.branches(spec.settings().guidance_scale) == 1:
        return ""
    return f"it is distilled by its name ({found[0]}): set its few steps, and a guidance of 1, in the sampler"


def open_sentence(model_id: str, specs: Sequence[ModelSpec]) -> str:
    """Asks which of several models some files are."""
    names = " or ".join(f"+ {spec.name}" for spec in specs)
    titles = " and of ".join(spec.title for spec in specs)
    return (
        f"model_id is {model_id}: its tensors are those of {titles}, which run differently, and the files' names do "
        f"not tell which they are. Add {names} to model_id."
    )


def assumed_sentence(rivals: Sequence[ModelSpec]) -> str:
    """Says that a model is assumed, and how another one is chosen."""
    others = " or ".join(f"+ {rival.name}" for rival in rivals)
    return f"neither tensors nor names tell it from another: add {others} to model_id if it is that"
