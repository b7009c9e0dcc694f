"""Checks of a checkpoint's `model_index.json` and configs against a model's description.

Pure functions over parsed JSON: each returns a sentence for the user, or None if everything fits.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..formats import quantization_detect
from ..messages import compose
from ..model_spec import Component, ConfigRequirement, EqualsConfig, Json, ModelSpec

# Largest allowed ratio of a config's number to the published one: for counts (below 1000) and for lengths. Each layer
# takes time to build and each row of a table takes memory, long before a chip's memory is the limit.
MAX_COUNT_RATIO, MAX_LENGTH_RATIO = 8, 64
# Preprocessors and filters of images, without which results are the same.
IGNORED_COMPONENTS = ("feature_extractor", "image_processor", "video_processor", "processor", "safety_checker")
QUANTIZATION_KEY = "quantization_config"
_MISSING = object()
_NO_FILES: Mapping[str, str] = {}


def is_pipeline(spec: ModelSpec, index: Json) -> bool:
    """Return whether the index is of a pipeline class of `spec`."""
    return index.get("_class_name") in spec.published.pipeline_classes


def index_problem(spec: ModelSpec, model_id: str, index: Json) -> str | None:
    """Return why the model cannot run a pipeline: its class, unknown networks, or unknown options.

    spec: the model that should run it.
    index: the parsed `model_index.json` of `model_id`.
    """
    if not is_pipeline(spec, index):
        return compose(
            "compatibility.pipeline_of_another_node", title=spec.title, model_id=model_id,
            class_name=index.get("_class_name"), pipeline_classes=" or ".join(spec.published.pipeline_classes),
            hub_id=spec.published.hub_id,
        )  # fmt: skip
    if unknown := list(_find_unknown_entries(spec, index)):
        return compose(
            "compatibility.component_unknown", title=spec.title, model_id=model_id,
            unknown=_join_words(unknown), hub_id=spec.published.hub_id,
        )  # fmt: skip
    if missing := list(_find_missing_entries(spec, index)):
        return compose(
            "compatibility.component_missing", title=spec.title, model_id=model_id,
            missing=_join_words(missing), hub_id=spec.published.hub_id,
        )  # fmt: skip
    return None


def _find_missing_entries(spec: ModelSpec, index: Json) -> Iterator[str]:
    """Yield networks and options of the spec that the index does not have."""
    for folder in dict.fromkeys(component.folder for component in spec.components):
        if folder in index and _is_off(index[folder]):
            yield folder
    for name, value in spec.published.index.items():
        if not _is_part(value) and _is_off(index.get(name)):
            yield name


def _find_unknown_entries(spec: ModelSpec, index: Json) -> Iterator[str]:
    """Yield entries of the index that are set but unknown, with their values."""
    folders = {component.folder for component in spec.components}
    tokenizers = {text.tokenizer_folder for text in spec.text_encoders}
    known = {*folders, *tokenizers, "scheduler", *spec.published.index, *IGNORED_COMPONENTS}
    for name, value in index.items():
        if name not in known and not name.startswith("_") and not _is_off(value):
            yield f"{name} ({value[1]})" if _is_part(value) else f"{name} {json.dumps(value)}"


def _is_part(value: Any) -> bool:
    """Return whether an entry is a pair of library and class, as for networks and tokenizers."""
    return isinstance(value, list | tuple) and len(value) == 2


def _is_off(value: Any) -> bool:
    """Return whether an option is off, or a component unused by the pipeline."""
    return value is None or value is False or (_is_part(value) and value[1] is None)


def select_config(component: Component, config: Json) -> Json:
    """Return a component's part of the config in its folder, which may be that of a whole model."""
    part = config.get(component.config_part)
    if not isinstance(part, Mapping):
        return config
    return {**part, **{name: config[name] for name in ("architectures", QUANTIZATION_KEY) if name in config}}


def config_problem(spec: ModelSpec, component: Component, model_id: str, config: Json, advice: str = "") -> str | None:
    """Return why the model cannot run a component's own `config.json`, by key and value.

    spec, component: the model, and the network of this config.
    model_id: of the checkpoint, or the path of a single file.
    advice: end of the sentence for a single file, whose tensors determine the config; "" for a folder.
    """
    class_name = config.get("_class_name") or config.get("architectures")
    class_name = class_name[0] if isinstance(class_name, list) and class_name else class_name
    if class_name not in (component.class_name, *component.class_aliases):
        return compose(
            "compatibility.class_wrong", model_id=model_id, folder=component.folder, class_name=class_name,
            title=spec.title, expected_class=component.class_name,
        )  # fmt: skip
    if (method := quantization_detect.detect_in_config(config)) and method not in quantization_detect.DECODED_METHODS:
        return compose(
            "compatibility.quantized", title=spec.title, folder=component.folder, model_id=model_id, method=method,
            advice=quantization_detect.ADVICE.removesuffix("."), hub_id=spec.published.hub_id,
        )  # fmt: skip
    if strange := next(_find_oversized_values(config, component.config), None):
        if advice:
            return compose(
                "compatibility.file_of_another_model", model_id=model_id, title=spec.title, strange=strange,
                advice=advice,
            )  # fmt: skip
        where = f"{component.folder}/config.json"
        return compose(
            "compatibility.config_strange", model_id=model_id, strange=strange, where=where,
            hub_id=spec.published.hub_id,
        )  # fmt: skip
    for key, need in component.needs.items():
        value = _value(config, key)
        if isinstance(need, EqualsConfig) or _fits(need, value):
            continue
        state = (
            compose("compatibility.is_missing")
            if value is _MISSING
            else compose("compatibility.has_value", value=json.dumps(value))
        )
        if advice:
            return compose(
                "compatibility.file_config_unsupported", model_id=model_id, class_name=component.class_name,
                title=spec.title, key=key, state=state, need=_join_supported_values(need), advice=advice,
            )  # fmt: skip
        return compose(
            "compatibility.config_unsupported", title=spec.title, key=key, state=state, folder=component.folder,
            model_id=model_id, need=_join_supported_values(need), hub_id=spec.published.hub_id,
        )  # fmt: skip
    return None


def _find_oversized_values(config: Json, published: Json) -> Iterator[str]:
    """Yield values far above the published ones, with which building a network would take forever."""
    for key, real in published.items():
        value = config.get(key)
        if isinstance(real, Mapping) and isinstance(value, Mapping):
            yield from _find_oversized_values(value, real)
        largest = max(_sizes(real), default=math.inf)
        most = largest * (MAX_COUNT_RATIO if largest < 1000 else MAX_LENGTH_RATIO)
        if any(size > most for size in _sizes(value)) or (isinstance(value, list) and len(value) > most):
            yield compose(
                "compatibility.differs_from_published", key=key, value=json.dumps(value)[:80], real=json.dumps(real),
            )  # fmt: skip


def _sizes(value: Any) -> list[float]:
    """Return the absolute value of an integer, or of those in a list."""
    values = value if isinstance(value, list | tuple) else [value]
    return [abs(size) for size in values if isinstance(size, int) and not isinstance(size, bool)]


def can_run_configs(spec: ModelSpec, model_id: str, configs: Mapping[str, Json]) -> bool:
    """Return whether the model can run the known configs, by folder.

    spec, model_id: the model.
    """
    known = (part for part in spec.components if part.folder in configs)
    return not any(config_problem(spec, part, model_id, configs[part.folder]) for part in known)


def count_published_values(spec: ModelSpec, configs: Mapping[str, Json]) -> int:
    """Return how many values of the configs, by folder, equal the published ones."""
    known = (part for part in spec.components if part.folder in configs)
    return sum(_value(configs[part.folder], key) == value for part in known for key, value in part.config.items())


def sizes_problem(
    spec: ModelSpec, model_id: str, configs: Mapping[str, Json], files: Mapping[str, str] = _NO_FILES
) -> str | None:
    """Return how the configs of several components, by name, contradict each other.

    spec: the model that should run them.
    model_id: for messages.
    files: paths of the single files by component; empty for folders.
    """
    for component in spec.components:
        for key, need in component.needs.items():
            if not isinstance(need, EqualsConfig) or not {component.name, need.component} <= configs.keys():
                continue
            value, other = _value(configs[component.name], key), _value(configs[need.component], need.key)
            if _MISSING in (value, other) or (isinstance(other, int) and value == need.times * other):
                continue
            times = f"{need.times} times " if need.times > 1 else ""
            if component.name in files:
                return compose(
                    "compatibility.files_contradict", title=spec.title, key=key, value=json.dumps(value),
                    file=files[component.name], times=times, other_key=need.key, other_file=files[need.component],
                    other_value=json.dumps(other),
                )  # fmt: skip
            return compose(
                "compatibility.components_contradict", title=spec.title, key=key, value=json.dumps(value),
                folder=component.folder, model_id=model_id, times=times, other_key=need.key,
                other_folder=spec.component(need.component).folder, other_value=json.dumps(other),
            )  # fmt: skip
    return _experts_problem(spec, model_id, configs)


def _experts_problem(spec: ModelSpec, model_id: str, configs: Mapping[str, Json]) -> str | None:
    """Return how the configs of two experts differ. One program runs both."""
    known = [name for name in spec.denoiser.experts if name in configs]
    for first, name in zip(known, known[1:], strict=False):
        mine, its = configs[first], configs[name]
        for key in sorted({*mine, *its}):
            if not key.startswith("_") and mine.get(key) != its.get(key):
                return compose(
                    "compatibility.configs_differ", title=spec.title, key=key, value=json.dumps(its.get(key)),
                    name=name, model_id=model_id, first_value=json.dumps(mine.get(key)), first=first,
                )  # fmt: skip
    return None


def _join_words(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])


def _value(config: Json, key: str) -> Any:
    """Return a config's value. A dot in the key leads into a nested object: `text_config.hidden_size`."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    return tuple(value) if isinstance(value, list) else value


def _fits(need: ConfigRequirement, value: Any) -> bool:
    if value is _MISSING:
        return not need.required
    return value in need.values or (need.fits is not None and need.fits(value))


def _join_supported_values(need: ConfigRequirement) -> str:
    return " or ".join([*(json.dumps(value) for value in need.values), *([need.wording] if need.wording else [])])
