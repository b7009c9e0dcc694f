"""The supported families; a family is one folder. May import the families and `models/common`.

ComfyUI imports these files when it starts, so slow imports (JAX, PyTorch) are inside the functions that use them.
"""

import difflib
import importlib
import re

from ..formats.file_signature import FileLayout
from ..model_spec import ModelSpec
from .common import encoder_single_files, kl_single_file, light_single_file
from .common.family import Family

# The folders, in the order in which users see the models; `nodes` has a file of the same name for each.
FAMILY_NAMES = ("wan", "hunyuan15", "flux2", "z_image", "qwen_image", "cogvideox")
FAMILIES: tuple[Family, ...] = tuple(importlib.import_module(f".{name}", __name__).FAMILY for name in FAMILY_NAMES)
FLAGSHIPS: tuple[ModelSpec, ...] = tuple(spec for family in FAMILIES for spec in family.flagships)
SIBLINGS: tuple[ModelSpec, ...] = tuple(spec for family in FAMILIES for spec in family.siblings)
# How a network's file is recognized. A family's come first: some of the shared ones match its files too.
LAYOUTS: tuple[FileLayout, ...] = (
    *(layout for family in FAMILIES for layout in family.layouts),
    *kl_single_file.LAYOUTS,
    *light_single_file.LAYOUTS,
    *encoder_single_files.LAYOUTS,
)
SPECS = FLAGSHIPS + SIBLINGS
# Help text of every command with a model argument.
NAME_HELP = f"a model's name, such as {FLAGSHIPS[0].name}; `comfyui-tpu --help` lists all"


def lookup_spec(name: str) -> ModelSpec:
    """Return the spec called `name`. Raises ValueError that lists the names, the most similar first."""
    return _find("model", name, {spec.name: spec for spec in SPECS})


def spec_for_family(family: str) -> ModelSpec:
    """Return the first spec whose nodes start with `family`. Raises ValueError that lists the families."""
    return _find("family", family, {spec.family: spec for spec in reversed(SPECS)})


def _find(kind: str, key: str, specs: dict[str, ModelSpec]) -> ModelSpec:
    if key not in specs:
        raise ValueError("\n  ".join([f"there is no {kind} {key!r}; there are:", *_nearest_first(key, list(specs))]))
    return specs[key]


def _nearest_first(key: str, names: list[str]) -> list[str]:
    """Return `names` by similarity to `key`: first those that start with it, then close matches, then the rest.

    Case and punctuation are ignored.
    """
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in names}
    wanted_key = re.sub(r"[^a-z0-9]", "", key[:100].lower())
    starts = [name for letters, name in plain.items() if wanted_key and letters.startswith(wanted_key)]
    close = [plain[letters] for letters in difflib.get_close_matches(wanted_key, plain, len(plain))]
    return list(dict.fromkeys([*starts, *close, *names]))
