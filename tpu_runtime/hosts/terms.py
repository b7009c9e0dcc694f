"""What hosts of one engine must have in common, and what the leader's environment decides for all. Imports no JAX."""

import os
from collections.abc import Mapping

from .. import versions

# The leader's values of these hold on all hosts: programs depend on them.
VARIABLES = (
    "COMFYUI_TPU_PRECISION", "COMFYUI_TPU_HBM_GIB", "COMFYUI_TPU_KERNELS", "COMFYUI_TPU_OPTIONS", *versions.FLAGS,
)  # fmt: skip


def terms() -> dict[str, str]:
    """Versions, and a digest of the pack's source, by name."""
    return {**versions.of_results(), "the pack's source": versions.source_digest()[:12]}


def difference(leaders: Mapping[str, str], followers: Mapping[str, str]) -> str | None:
    """What is not the same, in words; None where all is."""
    names = [name for name in {**leaders, **followers} if leaders.get(name) != followers.get(name)]
    said = [f"{name}: {followers.get(name, 'none')} there, {leaders.get(name, 'none')} here" for name in names]
    return "; ".join(said) or None


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
