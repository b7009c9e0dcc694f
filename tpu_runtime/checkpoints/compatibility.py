"""What a checkpoint says of itself, in `model_index.json` and its configs, against what a spec can run.

Pure functions over parsed JSON: each returns a sentence for the user, or None if all is well.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..formats import quantized
from ..model_spec import Component, ModelSpec, Need, Same

# A number of a config may be at most so many times the published one; below a thousand it is a count, above a length.
# Each layer takes time to build and each row of a table memory, long before a chip's memory is the limit.
MOST_TIMES, MOST_TIMES_LONGER = 8, 64
# They prepare or judge pictures around the networks; results are the same without them.
HARMLESS = ("feature_extractor", "image_processor", "video_processor", "processor", "safety_checker")
QUANTIZED = "quantization_config"
_MISSING = object()
_NO_FILES: Mapping[str, str] = {}


def is_pipeline(spec: ModelSpec, index: Mapping[str, Any]) -> bool:
    """Whether the index is of a pipeline that `spec` stands for."""
    return index.get("_class_name") in spec.published.pipeline_classes


def index_problem(spec: ModelSpec, model_id: str, index: Mapping[str, Any]) -> str | None:
    """What of a pipeline the spec cannot run: its class, networks it does not know, options it does not follow."""
    if not is_pipeline(spec, index):
        return (
            f"{spec.title}: the checkpoint {model_id} is a {index.get('_class_name')}; this node needs a "
            f"{' or '.join(spec.published.pipeline_classes)}, such as {spec.published.hub_id}."
        )
    if unknown := list(_unknown(spec, index)):
        return (
            f"{spec.title}: the model_index.json of {model_id} has {_listed(unknown)}, which this model does not know; "
            f"without that the result would be wrong. Use one such as {spec.published.hub_id}."
        )
    if missing := list(_missing(spec, index)):
        return (
            f"{spec.title}: the model_index.json of {model_id} has no {_listed(missing)}, which this model needs. Use "
            f"one that has, such as {spec.published.hub_id}."
        )
    return None


def _missing(spec: ModelSpec, index: Mapping[str, Any]) -> Iterator[str]:
    """Networks that the index says are not there, and options that the spec reads."""
    for folder in dict.fromkeys(component.folder for component in spec.components):
        if folder in index and _is_off(index[folder]):
            yield folder
    for name, value in spec.published.index.items():
        if not _is_part(value) and _is_off(index.get(name)):
            yield name


def _unknown(spec: ModelSpec, index: Mapping[str, Any]) -> Iterator[str]:
    """What is set and not known, with its value."""
    folders = {component.folder for component in spec.components}
    tokenizers = {text.tokenizer_folder for text in spec.text_encoders}
    known = {*folders, *tokenizers, "scheduler", *spec.published.index, *HARMLESS}
    for name, value in index.items():
        if name not in known and not name.startswith("_") and not _is_off(value):
            yield f"{name} ({value[1]})" if _is_part(value) else f"{name} {json.dumps(value)}"


def _is_part(value: Any) -> bool:
    """Whether an entry names a library and a class, as of networks, tokenizers and the like."""
    return isinstance(value, list | tuple) and len(value) == 2


def _is_off(value: Any) -> bool:
    """An option that is off, or a part that the pipeline does not use."""
    return value is None or value is False or (_is_part(value) and value[1] is None)


def own_config(component: Component, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A component's own of the config in its folder, which may be of a whole model."""
    part = config.get(component.config_part)
    if not isinstance(part, Mapping):
        return config
    return {**part, **{name: config[name] for name in ("architectures", QUANTIZED) if name in config}}


def config_problem(
    spec: ModelSpec, component: Component, model_id: str, config: Mapping[str, Any], advice: str = ""
) -> str | None:
    """What of a component's own `config.json` does not fit, by key and value.

    With `advice` the config is what the tensors of a single file, `model_id`, say; it ends the sentence.
    """
    found = config.get("_class_name") or config.get("architectures")
    found = found[0] if isinstance(found, list) and found else found
    if found not in (component.class_name, *component.class_aliases):
        return f"{model_id}: {component.folder} is a {found}; {spec.title} needs a {component.class_name}."
    if (method := quantized.method_of_config(config)) and method not in quantized.DECODED:
        return (
            f"{spec.title}: {component.folder} of {model_id} is quantized with {method} (quantization_config in its "
            f"config.json). {quantized.ADVICE.removesuffix('.')}, such as {spec.published.hub_id}."
        )
    if strange := next(_strange(config, component.config), None):
        if advice:
            return f"{model_id} is of another model than {spec.title}, or damaged: {strange}. {advice}"
        where = f"{component.folder}/config.json"
        return f"{model_id}: {strange} in {where}. Use a checkpoint such as {spec.published.hub_id}."
    for key, need in component.needs.items():
        value = _value(config, key)
        if isinstance(need, Same) or _fits(need, value):
            continue
        said = "is missing" if value is _MISSING else f"is {json.dumps(value)}"
        if advice:
            return (
                f"{model_id} is the {component.class_name} of another model than {spec.title}: its {key} {said}; "
                f"supported is {_supported(need)}. {advice}"
            )
        return (
            f"{spec.title}: {key} {said} in {component.folder}/config.json of {model_id}; supported is "
            f"{_supported(need)}. Use a checkpoint such as {spec.published.hub_id}."
        )
    return None


def _strange(config: Mapping[str, Any], published: Mapping[str, Any]) -> Iterator[str]:
    """Numbers far above the published ones, with which building a network would take forever."""
    for key, real in published.items():
        value = config.get(key)
        if isinstance(real, Mapping) and isinstance(value, Mapping):
            yield from _strange(value, real)
        largest = max(_sizes(real), default=math.inf)
        most = largest * (MOST_TIMES if largest < 1000 else MOST_TIMES_LONGER)
        if any(size > most for size in _sizes(value)) or (isinstance(value, list) and len(value) > most):
            yield f"{key} is {json.dumps(value)[:80]} (the published model's is {json.dumps(real)})"


def _sizes(value: Any) -> list[float]:
    """The size of an integer, or of those in a list."""
    values = value if isinstance(value, list | tuple) else [value]
    return [abs(one) for one in values if isinstance(one, int) and not isinstance(one, bool)]


def configs_fit(spec: ModelSpec, model_id: str, configs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the spec can run what the configs that are known, by folder, say."""
    known = (part for part in spec.components if part.folder in configs)
    return not any(config_problem(spec, part, model_id, configs[part.folder]) for part in known)


def likeness(spec: ModelSpec, configs: Mapping[str, Mapping[str, Any]]) -> int:
    """In how many values the configs, by folder, are those that the spec was published with."""
    known = (part for part in spec.components if part.folder in configs)
    return sum(_value(configs[part.folder], key) == value for part in known for key, value in part.config.items())


def sizes_problem(
    spec: ModelSpec, model_id: str, configs: Mapping[str, Mapping[str, Any]], files: Mapping[str, str] = _NO_FILES
) -> str | None:
    """Where the configs of several components (by name) contradict each other; `files` are those that they are in,
    where they are single files.
    """
    for component in spec.components:
        for key, need in component.needs.items():
            if not isinstance(need, Same) or not {component.name, need.component} <= configs.keys():
                continue
            value, other = _value(configs[component.name], key), _value(configs[need.component], need.key)
            if _MISSING in (value, other) or (isinstance(other, int) and value == need.times * other):
                continue
            times = f"{need.times} times " if need.times > 1 else ""
            if component.name in files:
                return (
                    f"{spec.title}: {key} is {json.dumps(value)} in {files[component.name]}, but must be {times}"
                    f"{need.key} in {files[need.component]}, which is {json.dumps(other)}. The files are of different "
                    f"models; choose those of {spec.title}."
                )
            return (
                f"{spec.title}: {key} is {json.dumps(value)} in {component.folder}/config.json of {model_id}, but must "
                f"be {times}{need.key} of {spec.component(need.component).folder}, which is {json.dumps(other)}. Its "
                "parts do not belong together."
            )
    return _experts_problem(spec, model_id, configs)


def _experts_problem(spec: ModelSpec, model_id: str, configs: Mapping[str, Mapping[str, Any]]) -> str | None:
    """One program runs all experts, so they are of one architecture."""
    known = [name for name in spec.denoiser.experts if name in configs]
    for first, name in zip(known, known[1:], strict=False):
        mine, its = configs[first], configs[name]
        for key in sorted({*mine, *its}):
            if not key.startswith("_") and mine.get(key) != its.get(key):
                return (
                    f"{spec.title}: {key} is {json.dumps(its.get(key))} in {name} of {model_id} and "
                    f"{json.dumps(mine.get(key))} in {first}; the two must be alike. Choose two of one model."
                )
    return None


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])


def _value(config: Mapping[str, Any], key: str) -> Any:
    """A value of a config, whose key may lead into nested ones: `text_config.hidden_size`."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
    return tuple(value) if isinstance(value, list) else value


def _fits(need: Need, value: Any) -> bool:
    if value is _MISSING:
        return not need.required
    return value in need.values or (need.fits is not None and need.fits(value))


def _supported(need: Need) -> str:
    return " or ".join([*(json.dumps(value) for value in need.values), *([need.wording] if need.wording else [])])
