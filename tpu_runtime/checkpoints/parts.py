"""Which model a list of single files is: `denoiser.safetensors + encoder.safetensors + vae.safetensors`.

Each entry is a file, a folder in diffusers layout or a Hub id that has the rest, or the name of a model, which decides
what tensors cannot. The order of two denoisers counts, that of all else does not. Parts that are missing are looked for
next to the others, in the host's folders.
"""

import contextlib
import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import models
from ..files import CheckpointError, TensorFile
from ..formats import contents
from ..formats.contents import Held
from ..model_spec import Component, ModelSpec
from ..models.layouts import LAYOUTS, published, told
from . import assembled, compatibility, hub

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SEPARATOR = " + "
# Folders that are looked through for a missing part, and no others: those with denoisers are large.
_LOOKED_THROUGH = ("text_encoders", "clip", "vae", "clip_vision")
_MOST_FILES = 500
# What names of the experts of one model have in them, the first one's first.
_NOISE = ("high", "low")


_DENOISERS = frozenset(spec.component(name).class_name for spec in models.SPECS for name in spec.denoiser.experts)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A model of single files: which of its folders each network is, and the config of each. `rest` is the entry that
    has the others; without it there are none.
    """

    spec: ModelSpec
    parts: Mapping[str, Held]
    configs: Mapping[str, Mapping[str, Any]]
    rest: str = ""
    # What the user is told where it could be another model as well, and asked where a value is open.
    assumed: str = ""
    question: str = ""


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What a model id names: networks in files, models by name, and where the rest is."""

    networks: tuple[Held, ...]
    specs: tuple[ModelSpec, ...] = ()
    rest: str = ""

    @property
    def titles(self) -> tuple[str, ...]:
        """What the files are called, by themselves and by whoever stored them."""
        found = (title.lower() for held in self.networks for title in held.contents.titles)
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class _Problem:
    """Why a model is not the one of some files, and how near they are to being it."""

    nearness: int
    sentence: str


def choices(folders: Sequence[str]) -> list[str]:
    """Model ids that need no download: folders in diffusers layout, what the Hub's cache has, the built-in ones."""
    own = {name for spec in models.SPECS for name in spec.published.pipeline_classes}
    local = [path.parent.name for folder in folders for path in sorted(Path(folder).glob(f"*/{hub.INDEX}"))]
    cached = [name for name, index in hub.downloaded() if index.get("_class_name") in own]
    return list(dict.fromkeys([*local, *cached, *(spec.miniature.id for spec in models.SPECS)]))


def entries(model_id: str) -> list[str]:
    return [entry.strip() for entry in model_id.split(SEPARATOR) if entry.strip()]


def is_of_files(model_id: str) -> bool:
    """Whether a model id names single files."""
    found = entries(model_id)
    return len(found) > 1 or any(contents.is_weights(entry) for entry in found)


def find(entry: str, folders: Sequence[str]) -> Path:
    """The file of an entry; `CheckpointError` where there is none."""
    own = os.path.expanduser(entry)
    for place in (own, *(os.path.join(folder, entry) for folder in folders)):
        if "\0" not in place and os.path.isfile(place):
            return Path(place)
    known = {name for folder in folders for name in files_in(folder)}
    near = difflib.get_close_matches(entry, known, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    where = ", ".join(folders) or "the working folder"
    raise CheckpointError(f"There is no file {entry} (looked in {where}).{hint}")


def files_in(folder: str) -> Iterator[str]:
    """The files of weights below a folder, by their paths from there, in order."""
    count = 0
    for root, inner, files in os.walk(folder):
        inner.sort()
        for name in sorted(files):
            if contents.is_weights(name):
                yield os.path.relpath(os.path.join(root, name), folder)
                count += 1
        if count > _MOST_FILES:
            return


def _given(model_id: str, folders: Sequence[str]) -> _Given:
    networks: list[Held] = []
    specs, rest = [], []
    seen: set[Path] = set()
    by_name = {spec.name: spec for spec in models.SPECS}
    for entry in entries(model_id):
        if entry in by_name:
            specs.append(by_name[entry])
        elif contents.is_weights(entry):
            path = find(entry, folders)
            # One in which two experts are merged is named twice, and may hold the other networks too.
            networks += [
                held
                for held in contents.networks(path, LAYOUTS)
                if path.resolve() not in seen or held.layout.class_name in _DENOISERS
            ]
            seen.add(path.resolve())
        else:
            rest.append(entry)
    if len(rest) > 1:
        raise CheckpointError(
            f"model_id is {model_id}: {' and '.join(rest)} are two models in diffusers layout; what is in no file "
            "comes from one. Name one of them."
        )
    if not networks:
        raise CheckpointError(f"model_id is {model_id}: none of its parts is a file of weights.")
    return _Given(networks=tuple(networks), specs=tuple(specs), rest="".join(rest))


def read_tensor(tensor: TensorFile) -> "torch.Tensor":
    """A whole tensor of a file, on the host."""
    from . import load  # imports torch, which asking for a model does not

    with contextlib.ExitStack() as stack:
        return load.Reader(stack, lambda: None).slice(tensor, ())


def spec_of(model: str, folders: Sequence[str] = ()) -> ModelSpec:
    """The model of a name, or the one that single files are, with their configs in place of the published ones."""
    if not is_of_files(model):
        return models.spec_by_name(model)
    found = resolve(model, models.SPECS, folders, needs_all=False)

    def with_own(part: Component) -> Component:
        return replace(part, config=compatibility.own_config(part, found.configs.get(part.folder, part.config)))

    return replace(found.spec, components=tuple(map(with_own, found.spec.components)))


def resolve(model_id: str, specs: Iterable[ModelSpec], folders: Sequence[str] = (), *, needs_all: bool = True) -> Parts:
    """The model among `specs` that the files of a model id are; `CheckpointError` with a sentence where there is none.

    Reads headers alone. Without `needs_all` parts may be missing.
    """
    given = _given(model_id, folders)
    candidates = list(specs)
    if given.specs:
        candidates = [spec for spec in candidates if spec in given.specs]
        if not candidates:
            raise CheckpointError(
                f"model_id is {model_id}: {given.specs[0].title} is not of the family of this node. Use the nodes of "
                f"{given.specs[0].family}."
            )
    found = [_fit(spec, given, folders, needs_all=needs_all) for spec in candidates]
    fitting = [one for one in found if isinstance(one, Parts)]
    problems = [one for one in found if isinstance(one, _Problem)]
    if not fitting:
        raise CheckpointError(_best_problem(model_id, candidates, problems, given))
    best = max(fitting, key=lambda one: _rank(one, given))
    if best.question and needs_all:
        raise CheckpointError(best.question)
    if best.question:
        log.warning("%s Until then it runs as ComfyUI runs it.", best.question)
    if not needs_all or not (titles := _titles(best)):
        return best
    notes = [told.distilled_sentence(best.spec, titles)]
    alike = (one for one in fitting if (_misfit(one), _experts(one)) == (_misfit(best), _experts(best)))
    rivals = [one.spec for one in alike if one is not best and not given.specs]
    if rivals and not _is_rest(best.spec, given) and not told.is_decided(best.spec, rivals, titles):
        if any(told.differences(rival) != told.differences(best.spec) for rival in rivals):
            raise CheckpointError(told.open_sentence(model_id, [best.spec, *rivals]))
        notes.insert(0, told.assumed_sentence(rivals))
    if assumed := "; ".join(filter(None, notes)):
        log.warning("%s is taken for %s; %s.", model_id, best.spec.title, assumed)
    return replace(best, assumed=assumed)


def _rank(one: Parts, given: _Given) -> tuple[bool, bool, float, float]:
    """Among models that fit, the one whose files are published under these names, the one that the user names beside
    them, the one that the names suggest, then the one with the most published sizes.
    """
    words = set().union(*map(told.words_of, given.titles))
    hint = sum(1.0 if word in words else -0.4 for word in told.words_of(one.spec.name))
    is_published = told.is_published(one.spec, _titles(one))
    return is_published, _is_rest(one.spec, given), hint, compatibility.likeness(one.spec, one.configs)


def _is_rest(spec: ModelSpec, given: _Given) -> bool:
    """Whether what is in no file is that of this model."""
    return given.rest in (spec.published.hub_id, *spec.miniature.ids)


def _denoisers(spec: ModelSpec, placed: Mapping[str, Any]) -> list[Any]:
    """What is known of the folders of a model's denoisers."""
    folders = (spec.component(name).folder for name in spec.denoiser.experts)
    return [placed[folder] for folder in folders if folder in placed]


def _titles(one: Parts) -> list[str]:
    """What the files of the denoisers are called."""
    return [title.lower() for held in _denoisers(one.spec, one.parts) for title in held.contents.titles]


def _experts(one: Parts) -> int:
    return len(one.spec.denoiser.experts)


def _misfit(one: Parts) -> int:
    """In how many values the configs of the denoisers differ from the published ones, but for what no tensor tells."""
    published = one.spec.component(one.spec.denoiser.experts[0]).config
    both = zip(_denoisers(one.spec, one.configs), _denoisers(one.spec, one.parts), strict=True)
    return sum(
        config.get(key) != value
        for config, held in both
        for key, value in published.items()
        if key not in held.layout.flags
    )


def _fit(spec: ModelSpec, given: _Given, folders: Sequence[str], *, needs_all: bool) -> "Parts | _Problem":
    """The model of these networks, or why `spec` is not it."""
    if spec.vae.light and any(held.layout.class_name == spec.vae.light.component.class_name for held in given.networks):
        spec = spec.with_light_vae()
    placed = _place(spec, given.networks)
    if isinstance(placed, _Problem):
        return placed
    components = {name: spec.parts_of(name)[0] for name in dict.fromkeys(one.folder for one in spec.components)}
    said = told.Said(names=(*(one.name for one in given.specs), *filter(None, [given.rest])), asks=True)
    try:
        configs, question = _configs(spec, placed, said)
    except CheckpointError as error:
        return _Problem(2, str(error))
    if problem := _problem(spec, placed, configs):
        return _Problem(3, problem)
    if problem := _experts_problem(spec, placed, has_rest=bool(given.rest) or not needs_all):
        return _Problem(4, problem)
    if needs_all and not given.specs and (problem := _relative(spec, placed)):
        return _Problem(6, problem)
    missing = [name for name in components if name not in placed]
    for name in missing if needs_all and not given.rest else ():
        found = _look_for(spec, components[name], placed, configs, folders)
        if found is None:
            return _Problem(5, _missing(spec, components[name]))
        placed[name], configs[name] = found
    return Parts(spec=spec, parts=placed, configs=configs, rest=given.rest, question=question)


def _configs(spec: ModelSpec, placed: Mapping[str, Held], said: told.Said) -> tuple[dict[str, Mapping[str, Any]], str]:
    """The config of each folder that a file is, and what the user is asked of them."""
    try:
        return {name: assembled.folder_config(held, spec, name, said) for name, held in placed.items()}, ""
    except told.OpenError as error:
        return _configs(spec, placed, replace(said, asks=False))[0], str(error)


def _place(spec: ModelSpec, networks: Sequence[Held]) -> "dict[str, Held] | _Problem":
    """Which folder of the model each network is; denoisers in their order."""
    free: dict[str, list[str]] = {}
    for component in spec.components:
        places = free.setdefault(component.class_name, [])
        if component.folder not in places:
            places.append(component.folder)
    placed: dict[str, Held] = {}
    for held in networks:
        places = free.get(held.layout.class_name)
        if places is None:
            return _Problem(
                0,
                f"{held.path} is a {held.layout.class_name}, and {spec.title} has none: it is made of "
                f"{', '.join(free)}. Leave the file out, or choose one of these.",
            )
        if not places:
            return _Problem(
                1, f"{held.path} is one {held.layout.class_name} more than {spec.title} has. Name each network once."
            )
        placed[places.pop(0)] = held
    return placed


def _experts_problem(spec: ModelSpec, placed: Mapping[str, Held], *, has_rest: bool) -> str | None:
    """A model of two denoisers has both, in their order as far as the files' names say it."""
    experts = [spec.component(name).folder for name in spec.denoiser.experts]
    given = [name for name in experts if name in placed]
    if 0 < len(given) < len(experts) and not has_rest:
        return (
            f"{spec.title} has two denoisers, for high noise and for low noise, and there is one file. Name both, the "
            "one for high noise first; a file in which the two are merged is named twice."
        )
    if len(given) > 1:
        first, second = (told.noise(placed[name], is_of_two=True) for name in given[:2])
        if first == second != "":
            both = " and ".join(placed[name].path.name for name in given[:2])
            return (
                f"{spec.title}: {both} are both the denoiser for {first} noise by their names, and it has one for high "
                "noise and one for low noise. Name one of each, the one for high noise first."
            )
        if (first, second) == _NOISE[::-1]:
            return (
                f"{spec.title}: {placed[given[0]].path.name} is the denoiser for low noise by its name, and comes "
                "first. Name the one for high noise first."
            )
    return None


def _relative(spec: ModelSpec, placed: Mapping[str, Held]) -> str | None:
    """What the files of the denoisers are by their names, where that is not this model."""
    found = (told.relative(held, spec) or told.expert(held, spec) for held in _denoisers(spec, placed))
    return next(filter(None, found), None)


def _problem(spec: ModelSpec, placed: Mapping[str, Held], configs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What of these configs the model cannot run."""
    if problem := _blind_problem(spec, placed):
        return problem
    known = [component for component in spec.components if component.folder in placed]
    for component in known:
        path = str(placed[component.folder].path)
        own = compatibility.own_config(component, configs[component.folder])
        if found := compatibility.config_problem(spec, component, path, own, _advice(spec, component)):
            return found
    named = {part.name: compatibility.own_config(part, configs[part.folder]) for part in known}
    files = {part.name: str(placed[part.folder].path) for part in known}
    return compatibility.sizes_problem(spec, " and ".join(dict.fromkeys(files.values())), named, files)


def _look_for(
    spec: ModelSpec,
    component: Component,
    placed: Mapping[str, Held],
    configs: Mapping[str, Mapping[str, Any]],
    folders: Sequence[str],
) -> tuple[Held, dict[str, Any]] | None:
    """The file in the host's folders that is this part of the model: one that is published under its name, or else the
    largest; of several formats that is the most exact.
    """
    found: list[tuple[bool, int, str, Held, dict[str, Any]]] = []
    place = _FOLDERS.get(component.folder, "text_encoders")
    for folder in (folder for folder in folders if Path(folder).name.lower() in _LOOKED_THROUGH):
        for name in files_in(folder):
            path = Path(folder, name)
            try:
                for held in contents.networks(path, LAYOUTS):
                    if held.layout.class_name != component.class_name:
                        continue
                    config = assembled.folder_config(held, spec, component.folder)
                    both = {**placed, component.folder: held}
                    if _problem(spec, both, {**configs, component.folder: config}) is None:
                        is_own = told.is_published(spec, [path.name.lower()], place)
                        found.append((is_own, path.stat().st_size, name, held, config))
            except (CheckpointError, OSError):
                continue  # a file of something else, or one that is damaged
    if not found:
        return None
    *_, held, config = max(found, key=lambda each: each[:3])
    return held, config


# ComfyUI's folder of each part; text encoders have theirs.
_FOLDERS = {"vae": "vae", "image_encoder": "clip_vision"}


def _advice(spec: ModelSpec, component: Component) -> str:
    """Which file to take in place of one that does not fit."""
    is_denoiser = component.name in spec.denoiser.experts
    folder = "diffusion_models" if is_denoiser else _FOLDERS.get(component.folder, "text_encoders")
    file = published.part(spec.name, folder)
    return f"Choose one of {spec.title}, such as {file.name}." if file else f"Choose one of {spec.title}."


def _blind_problem(spec: ModelSpec, placed: Mapping[str, Held]) -> str | None:
    """A file of a text encoder that also sees holds what it sees with."""
    for component in spec.components:
        own = tuple(start for start in component.aliases if start.endswith("."))
        held = placed.get(component.folder)
        if held is None or not component.config_part or component.name == component.folder or not own:
            continue
        if not any(name.startswith(own) for name in held.tensors):
            return (
                f"{held.path} is a text encoder that cannot see (it has no {own[0]}), and {spec.title} looks at "
                f"pictures with it. {_advice(spec, component)}"
            )
    return None


def _missing(spec: ModelSpec, component: Component) -> str:
    folder = _FOLDERS.get(component.folder, "text_encoders")
    file = published.part(spec.name, folder)
    what = f"{file.name} of {file.repository}" if file else f"the file of a {component.class_name}"
    return (
        f"{spec.title}: its {component.folder} ({component.class_name}) is in none of the files, and in none of "
        f"ComfyUI's folders {', '.join(_LOOKED_THROUGH)}. Get {what} into models/{folder}, or add{SEPARATOR}"
        f"{spec.published.hub_id} to model_id, which has it."
    )


def _best_problem(model_id: str, candidates: Sequence[ModelSpec], problems: "Sequence[_Problem]", given: _Given) -> str:
    """The sentence of the model that is meant: the nearest to fitting, by the files' names of several."""
    words = set().union(*map(told.words_of, given.titles))
    pairs = list(zip(candidates, problems, strict=True))
    if not pairs:
        return f"model_id is {model_id}: there is no such model."
    return max(pairs, key=lambda pair: (pair[1].nearness, len(told.words_of(pair[0].name) & words)))[1].sentence
