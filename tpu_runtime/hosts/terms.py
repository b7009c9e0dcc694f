"""What hosts of one engine must have in common, and what the leader's environment decides for all. Imports no JAX."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from .. import versions

_ROOT = Path(__file__).parents[2]
_SOURCES = ("attention", "sharding", "tpu_runtime")
# The leader's values of these hold on all hosts: programs depend on them.
VARIABLES = (
    "COMFYUI_TPU_PRECISION",
    "COMFYUI_TPU_HBM_GIB",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_DEFAULT_MATMUL_PRECISION",
)


def terms() -> dict[str, str]:
    """Versions, and a digest of the pack's source, by name."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(_ROOT)).encode())
            digest.update(path.read_bytes())
    return {**versions.of_results(), "the pack's source": digest.hexdigest()[:12]}


def difference(leaders: Mapping[str, str], followers: Mapping[str, str]) -> str | None:
    """What is not the same, in words; None where all is."""
    names = [name for name in {**leaders, **followers} if leaders.get(name) != followers.get(name)]
    return (
        "; ".join(f"{name}: {followers.get(name, 'none')} there, {leaders.get(name, 'none')} here" for name in names)
        or None
    )


def environment() -> dict[str, str | None]:
    """The values of `VARIABLES` here."""
    return {name: os.environ.get(name) for name in VARIABLES}


def take_over(environment: Mapping[str, str | None]) -> None:
    """Sets `VARIABLES`, and nothing else, as the leader has them; before JAX is imported."""
    for name in VARIABLES:
        if (value := environment.get(name)) is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
