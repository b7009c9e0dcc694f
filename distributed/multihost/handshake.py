"""What hosts of one engine must have in common, and the environment that the leader sets for all. Imports no JAX."""

import os
from collections.abc import Mapping

from ...tpu_runtime import versions

# Programs depend on these variables, so all hosts use the leader's values.
VARIABLES = (
    "COMFYUI_TPU_PRECISION", "COMFYUI_TPU_HBM_GIB", "COMFYUI_TPU_KERNELS", "COMFYUI_TPU_OPTIONS", *versions.FLAGS,
)  # fmt: skip


def host_versions() -> dict[str, str]:
    """Return the versions of packages, and a digest of the pack's source, by name."""
    return {**versions.list_result_versions(), "the pack's source": versions.source_digest()[:12]}


def describe_difference(leaders: Mapping[str, str], followers: Mapping[str, str]) -> str | None:
    """Return the versions that differ, in words, or None."""
    names = [name for name in {**leaders, **followers} if leaders.get(name) != followers.get(name)]
    differences = [f"{name}: {followers.get(name, 'none')} there, {leaders.get(name, 'none')} here" for name in names]
    return "; ".join(differences) or None


def collect_environment() -> dict[str, str | None]:
    """Return the values of `VARIABLES` in this process."""
    return {name: os.environ.get(name) for name in VARIABLES}


def apply_environment(environment: Mapping[str, str | None]) -> None:
    """Set `VARIABLES`, and nothing else, to the leader's values, before JAX is imported."""
    for name in VARIABLES:
        if (value := environment.get(name)) is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
