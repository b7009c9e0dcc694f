"""Resolution of a list of single files to a model: `denoiser.safetensors + encoder.safetensors + vae.safetensors`.

An entry is a file, a folder in diffusers layout or Hub id with the remaining components, or the name of a model, which
decides cases that tensors do not. Only the order of two denoisers counts. Missing networks are searched for in the
application's folders.
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
from ..formats import single_file
from ..formats.single_file import NetworkFile
from ..model_spec import Component, Json, ModelSpec
from ..models.layouts import LAYOUTS, identification, published
from . import compatibility, hub, virtual_folder

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

SEPARATOR = " + "
# The only folders that are searched for a missing network: those of denoisers are large.
_LOOKED_THROUGH = ("text_encoders", "clip", "vae", "clip_vision")
_MOST_FILES = 500
# Words in the file names of a model's experts, in the order of the experts.
_NOISE = ("high", "low")


_DENOISERS = frozenset(spec.component(name).class_name for spec in models.SPECS for name in spec.denoiser.experts)


@dataclass(frozen=True, kw_only=True)
class ResolvedFiles:
    """A model of single files."""

    spec: ModelSpec
    parts: Mapping[str, NetworkFile]  # networks by folder of the model
    configs: Mapping[str, Json]  # by folder of the model
    rest: str = ""  # entry with the remaining components; "" if there is no such entry
    # Note for the user if it could be another model as well, and question if a value is undetermined; "" otherwise.
    assumed: str = ""
    question: str = ""


@dataclass(frozen=True, kw_only=True)
class _FileSelection:
    """The contents of a model id."""

    networks: tuple[NetworkFile, ...]  # in files
    specs: tuple[ModelSpec, ...] = ()  # models that are named
    rest: str = ""  # entry with the remaining components, or ""

    @property
    def titles(self) -> tuple[str, ...]:
        """Names of the files, and titles in their metadata, in lower case."""
        titles = (title.lower() for network in self.networks for title in network.contents.titles)
        return tuple(dict.fromkeys(titles))


@dataclass(frozen=True)
class _Problem:
    """The reason why files are not a given model."""

    nearness: int  # larger if more checks passed
    sentence: str


def list_local_models(folders: Sequence[str]) -> list[str]:
    """Return the model ids that need no download.

    These are folders in diffusers layout, the Hub's cache, and the built-in ones.
    """
    class_names = {name for spec in models.SPECS for name in spec.published.pipeline_classes}
    local = [path.parent.name for folder in folders for path in sorted(Path(folder).glob(f"*/{hub.INDEX}"))]
    cached = [name for name, index in hub.list_cached_models() if index.get("_class_name") in class_names]
    return list(dict.fromkeys([*local, *cached, *(spec.miniature.id for spec in models.SPECS)]))


def split_entries(model_id: str) -> list[str]:
    """Return the entries of a list of files."""
    return [entry.strip() for entry in model_id.split(SEPARATOR) if entry.strip()]


def names_single_files(model_id: str) -> bool:
    """Return whether a model id names single files."""
    names = split_entries(model_id)
    return len(names) > 1 or any(single_file.is_weights(entry) for entry in names)


def find_file(entry: str, folders: Sequence[str]) -> Path:
    """Return the path of an entry's file. Raises `CheckpointError` if it does not exist."""
    path = os.path.expanduser(entry)
    for place in (path, *(os.path.join(folder, entry) for folder in folders)):
        if "\0" not in place and os.path.isfile(place):
            return Path(place)
    known = {name for folder in folders for name in list_weight_paths(folder)}
    near = difflib.get_close_matches(entry, known, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    where = ", ".join(folders) or "the working folder"
    raise CheckpointError(f"There is no file {entry} (looked in {where}).{hint}")


def list_weight_paths(folder: str) -> Iterator[str]:
    """Yield the weight files below a folder in order, relative to it."""
    count = 0
    for root, inner, files in os.walk(folder):
        inner.sort()
        for name in sorted(files):
            if single_file.is_weights(name):
                yield os.path.relpath(os.path.join(root, name), folder)
                count += 1
        if count > _MOST_FILES:
            return


def _select_files(model_id: str, folders: Sequence[str]) -> _FileSelection:
    """Return the contents of a model id.

    Raises `CheckpointError` for entries that are missing or contradict each other.
    """
    networks: list[NetworkFile] = []
    specs, rest = [], []
    paths: set[Path] = set()
    by_name = {spec.name: spec for spec in models.SPECS}
    for entry in split_entries(model_id):
        if entry in by_name:
            specs.append(by_name[entry])
        elif single_file.is_weights(entry):
            path = find_file(entry, folders)
            # A file with two merged experts is named twice, and may hold the other networks too.
            networks += [
                network
                for network in single_file.find_networks(path, LAYOUTS)
                if path.resolve() not in paths or network.layout.class_name in _DENOISERS
            ]
            paths.add(path.resolve())
        else:
            rest.append(entry)
    if len(rest) > 1:
        raise CheckpointError(
            f"model_id is {model_id}: {' and '.join(rest)} are two models in diffusers layout; networks that are "
            "in no file come from one. Name one of them."
        )
    if not networks:
        raise CheckpointError(f"model_id is {model_id}: none of its parts is a file of weights.")
    return _FileSelection(networks=tuple(networks), specs=tuple(specs), rest="".join(rest))


def read_tensor(tensor: TensorFile) -> "torch.Tensor":
    """Return a whole tensor of a file on the host, in the file's shape `[...]`."""
    from . import weight_loader  # imports torch, which choosing a model must not

    with contextlib.ExitStack() as stack:
        return weight_loader.TensorReader(stack, lambda: None).slice(tensor, ())


def resolve_spec(model: str, folders: Sequence[str] = ()) -> ModelSpec:
    """Return the model of a name, or that of single files with their configs instead of the published ones.

    folders: searched for the files.
    """
    if not names_single_files(model):
        return models.lookup_spec(model)
    resolved = resolve(model, models.SPECS, folders, needs_all=False)

    def with_own(part: Component) -> Component:
        return replace(part, config=compatibility.select_config(part, resolved.configs.get(part.folder, part.config)))

    return replace(resolved.spec, components=tuple(map(with_own, resolved.spec.components)))


def resolve(
    model_id: str, specs: Iterable[ModelSpec], folders: Sequence[str] = (), *, needs_all: bool = True, only: str = ""
) -> ResolvedFiles:
    """Return the model among `specs` that the files of a model id are. Reads headers alone.

    folders: searched for the files and for missing networks.
    needs_all: False if networks may be missing.
    only: class of the networks that count, of files that hold others too; "" for all.
    Raises `CheckpointError` with a sentence if no model fits.
    """
    selection = _select_files(model_id, folders)
    if only:
        networks = tuple(network for network in selection.networks if network.layout.class_name == only)
        selection = replace(selection, networks=networks)
    candidates = list(specs)
    if selection.specs:
        candidates = [spec for spec in candidates if spec in selection.specs]
        if not candidates:
            raise CheckpointError(
                f"model_id is {model_id}: {selection.specs[0].title} is not of the family of this node. Use the nodes "
                f"of {selection.specs[0].family}."
            )
    results = [_fit(spec, selection, folders, needs_all=needs_all) for spec in candidates]
    fitting = [result for result in results if isinstance(result, ResolvedFiles)]
    problems = [result for result in results if isinstance(result, _Problem)]
    if not fitting:
        raise CheckpointError(_best_problem(model_id, candidates, problems, selection))
    best = max(fitting, key=lambda one: _rank_key(one, selection))
    if best.question and needs_all:
        raise CheckpointError(best.question)
    if best.question:
        log.warning("%s Until then it runs as ComfyUI runs it.", best.question)
    if not needs_all or not (titles := _denoiser_titles(best)):
        return best
    notes = [identification.warn_distilled(best.spec, titles)]
    key = (_num_differences(best), _num_experts(best))
    alike = (other for other in fitting if (_num_differences(other), _num_experts(other)) == key)
    rivals = [other.spec for other in alike if other is not best and not selection.specs]
    if rivals and not _is_rest(best.spec, selection) and not identification.is_decided(best.spec, rivals, titles):
        if any(
            identification.distinguishing_settings(rival) != identification.distinguishing_settings(best.spec)
            for rival in rivals
        ):
            raise CheckpointError(identification.explain_ambiguity(model_id, [best.spec, *rivals]))
        notes.insert(0, identification.warn_assumed(rivals))
    if assumed := "; ".join(filter(None, notes)):
        log.warning("%s is taken for %s; %s.", model_id, best.spec.title, assumed)
    return replace(best, assumed=assumed)


def _rank_key(one: ResolvedFiles, given: _FileSelection) -> tuple[bool, bool, float, float]:
    """Return the rank of a model that fits.

    In this order count: published file names, the model that the user names for the rest, words in the names, and the
        number of published sizes.
    """
    words = set().union(*map(identification.split_words, given.titles))
    hint = sum(1.0 if word in words else -0.4 for word in identification.split_words(one.spec.name))
    is_published = identification.is_published(one.spec, _denoiser_titles(one))
    return is_published, _is_rest(one.spec, given), hint, compatibility.count_published_values(one.spec, one.configs)


def _is_rest(spec: ModelSpec, given: _FileSelection) -> bool:
    """Return whether the remaining components are those of this model."""
    return given.rest in (spec.published.hub_id, *spec.miniature.ids)


def _denoisers(spec: ModelSpec, placed: Json) -> list[Any]:
    """Return the entries of `placed` for the folders of a model's denoisers."""
    folders = (spec.component(name).folder for name in spec.denoiser.experts)
    return [placed[folder] for folder in folders if folder in placed]


def _denoiser_titles(one: ResolvedFiles) -> list[str]:
    """Return names and titles of the denoisers' files, in lower case."""
    return [title.lower() for network in _denoisers(one.spec, one.parts) for title in network.contents.titles]


def _num_experts(one: ResolvedFiles) -> int:
    return len(one.spec.denoiser.experts)


def _num_differences(one: ResolvedFiles) -> int:
    """Return how many values of the denoisers' configs differ from the published ones.

    Values that no tensor determines do not count.
    """
    published = one.spec.component(one.spec.denoiser.experts[0]).config
    both = zip(_denoisers(one.spec, one.configs), _denoisers(one.spec, one.parts), strict=True)
    return sum(
        config.get(key) != value
        for config, held in both
        for key, value in published.items()
        if key not in held.layout.flags
    )


def _fit(
    spec: ModelSpec, given: _FileSelection, folders: Sequence[str], *, needs_all: bool
) -> "ResolvedFiles | _Problem":
    """Return the model of these networks, or the reason why `spec` does not fit."""
    if spec.vae.light and any(
        network.layout.class_name == spec.vae.light.component.class_name for network in given.networks
    ):
        spec = spec.with_light_vae()
    placed = _place(spec, given.networks)
    if isinstance(placed, _Problem):
        return placed
    components = {
        name: spec.list_components(name)[0] for name in dict.fromkeys(part.folder for part in spec.components)
    }
    known = identification.DeclaredFlags(
        names=(*(named.name for named in given.specs), *filter(None, [given.rest])), asks=True
    )
    try:
        configs, question = _configs(spec, placed, known)
    except CheckpointError as error:
        return _Problem(2, str(error))
    if problem := _problem(spec, placed, configs):
        return _Problem(3, problem)
    if problem := _experts_problem(spec, placed, has_rest=bool(given.rest) or not needs_all):
        return _Problem(4, problem)
    if needs_all and not given.specs and (problem := _relative_problem(spec, placed)):
        return _Problem(6, problem)
    missing = [name for name in components if name not in placed]
    for name in missing if needs_all and not given.rest else ():
        match = _find_missing(spec, components[name], placed, configs, folders)
        if match is None:
            return _Problem(5, _missing_sentence(spec, components[name]))
        placed[name], configs[name] = match
    return ResolvedFiles(spec=spec, parts=placed, configs=configs, rest=given.rest, question=question)


def _configs(
    spec: ModelSpec, placed: Mapping[str, NetworkFile], said: identification.DeclaredFlags
) -> tuple[dict[str, Json], str]:
    """Return the config of each folder that is in a file, and the question to the user about them, or ""."""
    try:
        return {
            name: virtual_folder.build_folder_config(network, spec, name, said) for name, network in placed.items()
        }, ""
    except identification.AmbiguousModelError as error:
        return _configs(spec, placed, replace(said, asks=False))[0], str(error)


def _place(spec: ModelSpec, networks: Sequence[NetworkFile]) -> "dict[str, NetworkFile] | _Problem":
    """Return the networks by folder of the model; denoisers keep their order."""
    free: dict[str, list[str]] = {}
    for component in spec.components:
        places = free.setdefault(component.class_name, [])
        if component.folder not in places:
            places.append(component.folder)
    placed: dict[str, NetworkFile] = {}
    for network in networks:
        places = free.get(network.layout.class_name)
        if places is None:
            return _Problem(
                0,
                f"{network.path} is a {network.layout.class_name}, and {spec.title} has none: it is made of "
                f"{', '.join(free)}. Leave the file out, or choose one of these.",
            )
        if not places:
            return _Problem(
                1,
                f"{network.path} is one {network.layout.class_name} more than {spec.title} has. Name each network "
                "once.",
            )
        placed[places.pop(0)] = network
    return placed


def _experts_problem(spec: ModelSpec, placed: Mapping[str, NetworkFile], *, has_rest: bool) -> str | None:
    """Return why the denoisers of a model with two experts are incomplete, or swapped according to the file names."""
    experts = [spec.component(name).folder for name in spec.denoiser.experts]
    present = [name for name in experts if name in placed]
    if 0 < len(present) < len(experts) and not has_rest:
        return (
            f"{spec.title} has two denoisers, for high noise and for low noise, and there is one file. Name both, the "
            "one for high noise first; a file in which the two are merged is named twice."
        )
    if len(present) > 1:
        first, second = (identification.noise(placed[name], is_of_two=True) for name in present[:2])
        if first == second != "":
            both = " and ".join(placed[name].path.name for name in present[:2])
            return (
                f"{spec.title}: {both} are both the denoiser for {first} noise by their names, and it has one for high "
                "noise and one for low noise. Name one of each, the one for high noise first."
            )
        if (first, second) == _NOISE[::-1]:
            return (
                f"{spec.title}: {placed[present[0]].path.name} is the denoiser for low noise by its name, and comes "
                "first. Name the one for high noise first."
            )
    return None


def _relative_problem(spec: ModelSpec, placed: Mapping[str, NetworkFile]) -> str | None:
    """Return what the denoisers' files are according to their names, if that is not this model."""
    problems = (
        identification.find_relative(network, spec) or identification.read_expert(network, spec)
        for network in _denoisers(spec, placed)
    )
    return next(filter(None, problems), None)


def _problem(spec: ModelSpec, placed: Mapping[str, NetworkFile], configs: Mapping[str, Json]) -> str | None:
    """Return why the model cannot run these configs."""
    if problem := _blind_problem(spec, placed):
        return problem
    known = [component for component in spec.components if component.folder in placed]
    for component in known:
        path = str(placed[component.folder].path)
        config = compatibility.select_config(component, configs[component.folder])
        if found := compatibility.config_problem(spec, component, path, config, _advice(spec, component)):
            return found
    named = {part.name: compatibility.select_config(part, configs[part.folder]) for part in known}
    files = {part.name: str(placed[part.folder].path) for part in known}
    return compatibility.sizes_problem(spec, " and ".join(dict.fromkeys(files.values())), named, files)


def _find_missing(
    spec: ModelSpec,
    component: Component,
    placed: Mapping[str, NetworkFile],
    configs: Mapping[str, Json],
    folders: Sequence[str],
) -> tuple[NetworkFile, dict[str, Any]] | None:
    """Return the file in the application's folders that is this component, with its config; None without one.

    A file with a published name has precedence, then the largest, which is the most exact of several formats.
    """
    candidates: list[tuple[bool, int, str, NetworkFile, dict[str, Any]]] = []
    place = _FOLDERS.get(component.folder, "text_encoders")
    for folder in (folder for folder in folders if Path(folder).name.lower() in _LOOKED_THROUGH):
        for name in list_weight_paths(folder):
            path = Path(folder, name)
            try:
                for match in single_file.find_networks(path, LAYOUTS):
                    if match.layout.class_name != component.class_name:
                        continue
                    config = virtual_folder.build_folder_config(match, spec, component.folder)
                    both = {**placed, component.folder: match}
                    if _problem(spec, both, {**configs, component.folder: config}) is None:
                        is_own = identification.is_published(spec, [path.name.lower()], place)
                        candidates.append((is_own, path.stat().st_size, name, match, config))
            except (CheckpointError, OSError):
                continue  # another kind of file, or a damaged one
    if not candidates:
        return None
    *_, network, config = max(candidates, key=lambda candidate: candidate[:3])
    return network, config


# ComfyUI's folder of each network, except for text encoders.
_FOLDERS = {"vae": "vae", "image_encoder": "clip_vision"}


def _advice(spec: ModelSpec, component: Component) -> str:
    """Return the sentence that names a file to use instead."""
    is_denoiser = component.name in spec.denoiser.experts
    folder = "diffusion_models" if is_denoiser else _FOLDERS.get(component.folder, "text_encoders")
    file = published.find_part(spec.name, folder)
    return f"Choose one of {spec.title}, such as {file.name}." if file else f"Choose one of {spec.title}."


def _blind_problem(spec: ModelSpec, placed: Mapping[str, NetworkFile]) -> str | None:
    """Return why a text encoder's file lacks the vision tower that the model needs."""
    for component in spec.components:
        prefixes = tuple(start for start in component.aliases if start.endswith("."))
        network = placed.get(component.folder)
        if network is None or not component.config_part or component.name == component.folder or not prefixes:
            continue
        if not any(name.startswith(prefixes) for name in network.tensors):
            return (
                f"{network.path} is a text encoder without vision (it has no {prefixes[0]}), and {spec.title} "
                f"encodes images with it. {_advice(spec, component)}"
            )
    return None


def _missing_sentence(spec: ModelSpec, component: Component) -> str:
    folder = _FOLDERS.get(component.folder, "text_encoders")
    file = published.find_part(spec.name, folder)
    what = f"{file.name} of {file.repository}" if file else f"the file of a {component.class_name}"
    return (
        f"{spec.title}: its {component.folder} ({component.class_name}) is in none of the files, and in none of "
        f"ComfyUI's folders {', '.join(_LOOKED_THROUGH)}. Get {what} into models/{folder}, or add{SEPARATOR}"
        f"{spec.published.hub_id} to model_id, which has it."
    )


def _best_problem(
    model_id: str, candidates: Sequence[ModelSpec], problems: "Sequence[_Problem]", given: _FileSelection
) -> str:
    """Return the sentence of the most likely model: the nearest to fitting, then by the files' names."""
    words = set().union(*map(identification.split_words, given.titles))
    pairs = list(zip(candidates, problems, strict=True))
    if not pairs:
        return f"model_id is {model_id}: there is no such model."
    return max(pairs, key=lambda pair: (pair[1].nearness, len(identification.split_words(pair[0].name) & words)))[
        1
    ].sentence
