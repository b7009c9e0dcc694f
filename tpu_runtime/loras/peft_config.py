"""PEFT's config of an adapter: what it says that a file's tensors do not, and what is refused of it.

The formulas are those of the `peft` package: `lora_alpha / r` for LoRA and DoRA, `alpha / r` for LoHa and LoKr.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .change import LoraError, Scaling, check_alpha, short

_METHODS = ("LORA", "LOHA", "LOKR")
# What PEFT takes where a config says nothing.
_DEFAULT = 8
_LARGEST_RANK = 1_000_000
# Ways to begin that leave the model's weights as they are, in lower case.
_BEGINNINGS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
# What else changes the arithmetic; absent, null, false or empty it does nothing.
_REFUSED = (
    *("target_parameters", "layer_replication", "trainable_token_indices", "alora_invocation_tokens", "use_qalora"),
    *("monteclora_config", "use_bdlora", "arrow_config", "kasa_config"),
)
# What a name of an option that this list does not know says; these do not change what an adapter computes.
_SWITCH = re.compile(r"use_\w+|\w+_config")
_HARMLESS = frozenset({
    *("use_rslora", "use_dora", "use_effective_conv2d", "megatron_config", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "velora_config", "runtime_config"),
})  # fmt: skip
_WAY_ON = "Merge the adapter into its model with PEFT, or choose another."


class PeftConfig:
    """A config, checked; `config` is the file's own object without the component's name before its keys.

    Its patterns name modules, fully or from a dot on, as diffusers and PEFT write them. PEFT takes the names for
    regular expressions; a stranger's are not run here, because one can take forever.
    """

    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
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
            raise LoraError(
                f"The LoRA {self._path}: PEFT's init_lora_weights is {short(self._config['init_lora_weights'])}; such "
                f"an adapter is for weights that PEFT changed at first. Taken are {', '.join(_BEGINNINGS)}. Save it "
                "with path_initial_model_for_weight_conversion, which makes a plain LoRA of it, or choose another."
            )
        unknown = [name for name in self._config if _SWITCH.fullmatch(name) and name not in _HARMLESS]
        for name in (*_REFUSED, *unknown):
            if self._config.get(name):
                self._refuse(name, "false, null or nothing")

    def _refuse(self, name: str, allowed: str) -> None:
        raise LoraError(
            f"The LoRA {self._path}: PEFT's {name} is {short(self._config.get(name))}; taken is {allowed}. {_WAY_ON}"
        )

    def _pattern(self, name: str) -> dict[str, tuple[int, Any]]:
        """Each module's value with its place among them."""
        patterns = self._config.get(name) or {}
        if not isinstance(patterns, dict):
            raise LoraError(
                f"The LoRA {self._path}: {name} is {short(patterns)}, and no object, which has a number for each "
                "module. Save it again with PEFT, or choose another."
            )
        found: dict[str, tuple[int, Any]] = {}
        for order, (key, value) in enumerate(patterns.items()):
            module = key.removesuffix("$").replace("\\.", ".")
            if not re.fullmatch(r"\^?[\w.-]+", module):
                raise LoraError(
                    f"The LoRA {self._path}: {name} has {short(key)}, which is a regular expression; only names of "
                    "modules are taken, whole or from a dot on. Save it with the modules' names, or choose another."
                )
            found.setdefault(module, (order, value))
        return found

    def scaling(self, module: str, bare: str) -> Scaling:
        """Of a module by its name in the file, and by that without the prefixes of trainers."""
        name = "lora_alpha" if self._method == "LORA" else "alpha"
        default = _DEFAULT if "peft_type" in self._config else None
        alpha = _found(self._alphas, module, bare, self._config.get(name, default))
        rank = _found(self._ranks, module, bare, self._config.get("r", _DEFAULT)) if self._method == "LOKR" else None
        if rank is not None and (type(rank) is not int or not 0 < rank <= _LARGEST_RANK):
            raise LoraError(
                f"The LoRA {self._path}: PEFT's r is {short(rank)}; a rank is a whole number from 1 to "
                f"{_LARGEST_RANK:_}. Choose another."
            )
        return Scaling(
            alpha=None if alpha is None else check_alpha(self._path, name, alpha),
            power=0.5 if self._config.get("use_rslora") and self._method == "LORA" else 1.0,
            rank=rank,
        )

    def check_module(self, module: str, has_magnitude: bool) -> None:
        """Raises `LoraError` where PEFT would compute something else with the tensors of a module of a LoRA."""
        said = self._config.get("use_dora")
        if said is not None and bool(said) != has_magnitude:
            raise LoraError(
                f"The LoRA {self._path}: PEFT's use_dora is {short(said)}, but {short(module)} has "
                f"{int(has_magnitude)} magnitude vectors; taken is one of each module, or none. "
                "Save it again with PEFT, or choose another."
            )
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
            raise LoraError(
                f"The LoRA {self._path}: PEFT's layers_to_transform is {short(chosen)}, but the file changes "
                f"{short(module)}; taken are changes of these layers alone. Save it again with PEFT, or choose another."
            )

    def check_whole(self, weights: Iterable[str]) -> None:
        """Raises `LoraError` where the file holds whole weights, by their names here, that take others' place."""
        option = "modules_to_save" if self._config.get("modules_to_save") else ""
        option = option if self._config.get("bias", "none") in ("none", None) else "bias"
        first = min(weights, default=None) if option else None
        if first is not None:
            raise LoraError(
                f"The LoRA {self._path}: PEFT's {option} is {short(self._config[option])}, and the file holds "
                f"{short(first)} whole; taken are changes of weights. {_WAY_ON}"
            )


def _found(patterns: Mapping[str, tuple[int, Any]], module: str, bare: str, default: Any) -> Any:
    """Of several names that fit, the first counts, as in PEFT."""
    parts = module.split(".")
    names = [f"^{bare}", *(".".join(parts[start:]) for start in range(len(parts)))]
    fitting = [found for name in names if (found := patterns.get(name))]
    return min(fitting, key=lambda one: one[0])[1] if fitting else default


def of_component(config: Mapping[str, Any], component: str) -> Mapping[str, Any]:
    """What a file says of one network: diffusers writes each key with the component's name before it."""
    for name in (component, "transformer"):
        if any(key.startswith(f"{name}.") for key in config):
            return {key.removeprefix(f"{name}."): value for key, value in config.items() if key.startswith(f"{name}.")}
    return config
