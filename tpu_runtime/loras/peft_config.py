"""PEFT's config of an adapter: values that a file's tensors do not determine, and refusal of unsupported options.

The formulas are those of the `peft` package: `lora_alpha / r` for LoRA and DoRA, `alpha / r` for LoHa and LoKr.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..messages import compose
from ..model_spec import Json
from .change import AlphaScaling, LoraError, check_alpha, shorten_value

_METHODS = ("LORA", "LOHA", "LOKR")
# PEFT's default of r and alpha.
_DEFAULT = 8
_LARGEST_RANK = 1_000_000
# Initialisations that leave the model's weights as they are, in lower case.
_BEGINNINGS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
# Other options that change the arithmetic unless they are absent, null, false or empty.
_REFUSED = (
    *("target_parameters", "layer_replication", "trainable_token_indices", "alora_invocation_tokens", "use_qalora"),
    *("monteclora_config", "use_bdlora", "arrow_config", "kasa_config"),
)
# Names of unknown options that may change the arithmetic, and known options that do not.
_SWITCH = re.compile(r"use_\w+|\w+_config")
_HARMLESS = frozenset({
    *("use_rslora", "use_dora", "use_effective_conv2d", "megatron_config", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "velora_config", "runtime_config"),
})  # fmt: skip
_WAY_ON = compose("lora.merge_with_peft")


class PeftConfig:
    """A checked config; `config` is the file's object without the component's name before its keys.

    Its patterns name modules, fully or from a dot on, as diffusers and PEFT write them. PEFT treats the names as
    regular expressions. Untrusted ones are not run here, because one can take forever.
    """

    def __init__(self, path: str, config: Json) -> None:
        self._path, self._config = path, config
        self._method = config.get("peft_type", _METHODS[0])
        if self._method not in _METHODS:
            self._refuse("peft_type", ", ".join(_METHODS))
        self._check_options()
        self._alphas = self._pattern("alpha_pattern")
        self._ranks = self._pattern("rank_pattern") if self._method == "LOKR" else {}

    def _check_options(self) -> None:
        beginning = str(self._config.get("init_lora_weights")).lower()
        if self._method == "LORA" and beginning not in _BEGINNINGS:
            raise LoraError(compose(
                "lora.peft_init_unsupported", path=self._path,
                init_lora_weights=shorten_value(self._config["init_lora_weights"]), beginnings=", ".join(_BEGINNINGS),
            ))  # fmt: skip
        unknown = [name for name in self._config if _SWITCH.fullmatch(name) and name not in _HARMLESS]
        for name in (*_REFUSED, *unknown):
            if self._config.get(name):
                self._refuse(name, "false, null or nothing")

    def _refuse(self, name: str, allowed: str) -> None:
        raise LoraError(compose(
            "lora.peft_option_unsupported", path=self._path, option=name, value=shorten_value(self._config.get(name)),
            allowed=allowed, way_on=_WAY_ON,
        ))  # fmt: skip

    def _pattern(self, name: str) -> dict[str, tuple[int, Any]]:
        """Return each module's value with its position."""
        patterns = self._config.get(name) or {}
        if not isinstance(patterns, dict):
            raise LoraError(
                compose("lora.pattern_not_object", path=self._path, name=name, patterns=shorten_value(patterns))
            )
        values: dict[str, tuple[int, Any]] = {}
        for order, (key, value) in enumerate(patterns.items()):
            module = key.removesuffix("$").replace("\\.", ".")
            if not re.fullmatch(r"\^?[\w.-]+", module):
                raise LoraError(compose(
                    "lora.pattern_regular_expression", path=self._path, name=name, key=shorten_value(key),
                ))  # fmt: skip
            values.setdefault(module, (order, value))
        return values

    def scaling(self, module: str, bare: str) -> AlphaScaling:
        """Return the scale factor of a module.

        module: its name in the file.
        bare: its name without trainers' prefixes.
        """
        name = "lora_alpha" if self._method == "LORA" else "alpha"
        default = _DEFAULT if "peft_type" in self._config else None
        alpha = _match_pattern(self._alphas, module, bare, self._config.get(name, default))
        rank = (
            _match_pattern(self._ranks, module, bare, self._config.get("r", _DEFAULT))
            if self._method == "LOKR"
            else None
        )
        if rank is not None and (type(rank) is not int or not 0 < rank <= _LARGEST_RANK):
            raise LoraError(compose(
                "lora.peft_rank_outside", path=self._path, rank=shorten_value(rank), largest_rank=f"{_LARGEST_RANK:_}",
            ))  # fmt: skip
        return AlphaScaling(
            alpha=None if alpha is None else check_alpha(self._path, name, alpha),
            power=0.5 if self._config.get("use_rslora") and self._method == "LORA" else 1.0,
            rank=rank,
        )

    def check_module(self, module: str, has_magnitude: bool) -> None:
        """Raise `LoraError` if PEFT would compute something else with the tensors of a LoRA's module."""
        use_dora = self._config.get("use_dora")
        if use_dora is not None and bool(use_dora) != has_magnitude:
            raise LoraError(compose(
                "lora.peft_dora_contradicts", path=self._path, use_dora=shorten_value(use_dora),
                module=shorten_value(module), has_magnitude=int(has_magnitude),
            ))  # fmt: skip
        chosen, patterns = self._config.get("layers_to_transform"), self._config.get("layers_pattern")
        if chosen is None or chosen == []:
            return
        lists = [patterns] if isinstance(patterns, str) else patterns if isinstance(patterns, list) else []
        parts = module.split(".")
        numbers = [
            int(number)
            for before, number in zip(parts, parts[1:], strict=False)
            if number.isdecimal() and len(number) < 9 and (not lists or before in lists)
        ]
        if not numbers or numbers[0] not in (chosen if isinstance(chosen, list) else [chosen]):
            raise LoraError(compose(
                "lora.peft_layers_contradict", path=self._path, chosen=shorten_value(chosen),
                module=shorten_value(module),
            ))  # fmt: skip

    def check_whole(self, weights: Iterable[str]) -> None:
        """Raise `LoraError` if the file holds full weights that replace others, by their names here."""
        option = "modules_to_save" if self._config.get("modules_to_save") else ""
        option = option if self._config.get("bias", "none") in ("none", None) else "bias"
        first = min(weights, default=None) if option else None
        if first is not None:
            raise LoraError(compose(
                "lora.peft_whole_weights", path=self._path, option=option,
                config=shorten_value(self._config[option]), first=shorten_value(first), way_on=_WAY_ON,
            ))  # fmt: skip


def _match_pattern(patterns: Mapping[str, tuple[int, Any]], module: str, bare: str, default: Any) -> Any:
    """Return the value of the first pattern that matches, as PEFT does, or `default`."""
    parts = module.split(".")
    names = [f"^{bare}", *(".".join(parts[start:]) for start in range(len(parts)))]
    fitting = [match for name in names if (match := patterns.get(name))]
    return min(fitting, key=lambda match: match[0])[1] if fitting else default


def select_component(config: Json, component: str) -> Json:
    """Return the config of one network. Diffusers writes each key with the component's name before it."""
    for name in (component, "transformer"):
        if any(key.startswith(f"{name}.") for key in config):
            return {key.removeprefix(f"{name}."): value for key, value in config.items() if key.startswith(f"{name}.")}
    return config
