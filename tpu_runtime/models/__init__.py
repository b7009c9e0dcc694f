"""The supported models. May import the families and `models/common`.

ComfyUI imports these files when it starts, so slow imports (JAX, PyTorch) are inside the functions that use them.
"""

import difflib
import re

from ..model_spec import ModelSpec
from .cogvideox import i2v as cogvideox_i2v
from .cogvideox import spec as cogvideox
from .flux2 import klein
from .flux2 import spec as flux2
from .hunyuan15 import distilled
from .hunyuan15 import i2v as hunyuan15_i2v
from .hunyuan15 import spec as hunyuan15
from .qwen_image import edit
from .qwen_image import spec as qwen_image
from .wan import i2v as wan_i2v
from .wan import spec as wan
from .wan import ti2v as wan_ti2v
from .z_image import spec as z_image

# One model of each kind: the README's table. Examples and predictions exist for these.
FLAGSHIPS: tuple[ModelSpec, ...] = (
    wan.SPEC,
    wan_i2v.SPEC,
    hunyuan15.SPEC,
    hunyuan15_i2v.SPEC,
    flux2.SPEC,
    z_image.SPEC,
    qwen_image.SPEC,
    cogvideox.SPEC,
)
# Models of another size or recipe, or with more inputs. The nodes of their family's flagship run them.
SIBLINGS: tuple[ModelSpec, ...] = (
    *wan.SIBLINGS,
    *wan_i2v.SIBLINGS,
    wan_ti2v.SPEC,
    *distilled.SIBLINGS,
    cogvideox_i2v.SPEC,
    *klein.SIBLINGS,
    z_image.BASE,
    edit.SPEC,
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
