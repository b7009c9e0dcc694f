"""The models there are, one line each; a model is one file. May import `programs` and the leaves.

ComfyUI imports these files at its start: what is slow to import, JAX and PyTorch too, is imported where it is used.
"""

import difflib
import re

from ..model_spec import ModelSpec
from . import (
    cogvideox,
    cogvideox_i2v,
    flux2,
    flux2_klein,
    hunyuan15,
    hunyuan15_distilled,
    hunyuan15_i2v,
    qwen_image,
    qwen_image_edit,
    z_image,
)
from .wan import wan21, wan21_i2v, wan22_i2v, wan22_ti2v

# One of each kind, in the README's table: what its examples and predictions are for.
FLAGSHIPS: tuple[ModelSpec, ...] = (
    wan21.SPEC,
    wan22_i2v.SPEC,
    hunyuan15.SPEC,
    hunyuan15_i2v.SPEC,
    flux2.SPEC,
    z_image.SPEC,
    qwen_image.SPEC,
    cogvideox.SPEC,
)
# Of another size or recipe, or with more inputs: run by the nodes of the flagship of their family.
SIBLINGS: tuple[ModelSpec, ...] = (
    *wan21.SIBLINGS,
    *wan21_i2v.SIBLINGS,
    wan22_ti2v.SPEC,
    *hunyuan15_distilled.SIBLINGS,
    cogvideox_i2v.SPEC,
    *flux2_klein.SIBLINGS,
    z_image.BASE,
    qwen_image_edit.SPEC,
)
SPECS = FLAGSHIPS + SIBLINGS
# For every command that takes a name.
NAME_HELP = f"a model's name, such as {FLAGSHIPS[0].name}; `comfyui-tpu --help` lists all"


def spec_by_name(name: str) -> ModelSpec:
    """The spec called `name`; raises `ValueError` that lists the names."""
    return _find("model", name, {spec.name: spec for spec in SPECS})


def spec_for_family(family: str) -> ModelSpec:
    """The first spec whose nodes start with `family`; raises `ValueError` that lists the families."""
    return _find("family", family, {spec.family: spec for spec in reversed(SPECS)})


def _find(kind: str, key: str, specs: dict[str, ModelSpec]) -> ModelSpec:
    if key not in specs:
        raise ValueError("\n  ".join([f"there is no {kind} {key!r}; there are:", *_nearest_first(key, list(specs))]))
    return specs[key]


def _nearest_first(key: str, names: list[str]) -> list[str]:
    """The names that start as `key`, those that are like it, and the others. Punctuation counts not."""
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in names}
    own = re.sub(r"[^a-z0-9]", "", key[:100].lower())
    starts = [name for each, name in plain.items() if own and each.startswith(own)]
    close = [plain[each] for each in difflib.get_close_matches(own, plain, len(plain))]
    return list(dict.fromkeys([*starts, *close, *names]))
