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
from ..messages import compose, compose_list
from ..model_spec import Component, Json, ModelSpec
from ..models import LAYOUTS, published
from . import compatibility, hub, identification, virtual_folder

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
    hint = compose("checkpoint.did_you_mean", names=compose_list(near, "or")) if near else ""
    where = ", ".join(folders) or compose("checkpoint.the_working_folder")
    raise CheckpointError(compose("checkpoint.no_such_file", entry=entry, where=where, hint=hint))


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
            compose("checkpoint.model_id_with_two_folders", model_id=model_id, rest=" and ".join(rest))
        )
    if not networks:
        raise CheckpointError(compose("checkpoint.model_id_without_weights", model_id=model_id))
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
            raise CheckpointError(compose(
                "checkpoint.model_id_of_another_family", model_id=model_id, title=selection.specs[0].title,
                family=selection.specs[0].family,
            ))  # fmt: skip
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
        log.warning("%s is treated as %s; %s.", model_id, best.spec.title, assumed)
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
            return _Problem(0, compose(
                "checkpoint.component_not_of_model", path=network.path, class_name=network.layout.class_name,
                title=spec.title, free=", ".join(free),
            ))  # fmt: skip
        if not places:
            return _Problem(1, compose(
                "checkpoint.component_named_twice", path=network.path, class_name=network.layout.class_name,
                title=spec.title,
            ))  # fmt: skip
        placed[places.pop(0)] = network
    return placed


def _experts_problem(spec: ModelSpec, placed: Mapping[str, NetworkFile], *, has_rest: bool) -> str | None:
    """Return why the denoisers of a model with two experts are incomplete, or swapped according to the file names."""
    experts = [spec.component(name).folder for name in spec.denoiser.experts]
    present = [name for name in experts if name in placed]
    if 0 < len(present) < len(experts) and not has_rest:
        return compose("checkpoint.second_expert_missing", title=spec.title)
    if len(present) > 1:
        first, second = (identification.noise(placed[name], is_of_two=True) for name in present[:2])
        if first == second != "":
            both = " and ".join(placed[name].path.name for name in present[:2])
            return compose("checkpoint.two_experts_for_one_noise", title=spec.title, both=both, first=first)
        if (first, second) == _NOISE[::-1]:
            return compose("checkpoint.low_noise_first", title=spec.title, name=placed[present[0]].path.name)
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
    return (
        compose("checkpoint.choose_model_such_as", title=spec.title, name=file.name)
        if file
        else compose("checkpoint.choose_model", title=spec.title)
    )


def _blind_problem(spec: ModelSpec, placed: Mapping[str, NetworkFile]) -> str | None:
    """Return why a text encoder's file lacks the vision tower that the model needs."""
    for component in spec.components:
        prefixes = tuple(start for start in component.aliases if start.endswith("."))
        network = placed.get(component.folder)
        if network is None or not component.config_part or component.name == component.folder or not prefixes:
            continue
        if not any(name.startswith(prefixes) for name in network.tensors):
            return compose(
                "checkpoint.text_encoder_without_vision", path=network.path, prefixes=prefixes[0], title=spec.title,
                advice=_advice(spec, component),
            )  # fmt: skip
    return None


def _missing_sentence(spec: ModelSpec, component: Component) -> str:
    folder = _FOLDERS.get(component.folder, "text_encoders")
    file = published.find_part(spec.name, folder)
    what = (
        compose("hub.file_of_model", name=file.name, model_id=file.repository)
        if file
        else compose("checkpoint.file_of_class", class_name=component.class_name)
    )
    return compose(
        "checkpoint.component_not_found", title=spec.title, folder=component.folder,
        class_name=component.class_name, looked_through=", ".join(_LOOKED_THROUGH), what=what, models_folder=folder,
        separator=SEPARATOR, hub_id=spec.published.hub_id,
    )  # fmt: skip


def _best_problem(
    model_id: str, candidates: Sequence[ModelSpec], problems: "Sequence[_Problem]", given: _FileSelection
) -> str:
    """Return the sentence of the most likely model: the nearest to fitting, then by the files' names."""
    words = set().union(*map(identification.split_words, given.titles))
    pairs = list(zip(candidates, problems, strict=True))
    if not pairs:
        return compose("checkpoint.model_id_unknown", model_id=model_id)
    return max(pairs, key=lambda pair: (pair[1].nearness, len(identification.split_words(pair[0].name) & words)))[
        1
    ].sentence
