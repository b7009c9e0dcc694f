"""Versions of packages, flags and the pack's own source, which results depend on; and checks of untested versions.

`requirements.txt` has the allowed versions, `supported.txt` the tested ones, including PyTorch's. The metadata of jax
has its matching jaxlib and libtpu. Nothing here imports torch or JAX.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from .messages import compose, compose_list

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
# The build for the CPU: only the TPU computes.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
JAX_COMPANIONS = ("jaxlib", "libtpu")
# Imported by ComfyUI together with torch; each is built for one minor version of it.
TORCH_COMPANIONS = ("torchvision", "torchaudio")
# Packages that must be in their ranges, and packages that must be installed.
BINDING = ("torch", "jax", "torchax")
ESSENTIAL = (*BINDING, "jaxlib", "diffusers", "transformers", "safetensors", "numpy")
# Packages that results and their speed depend on.
_RESULT_PACKAGES = ("comfyui-tpu", "jax", *JAX_COMPANIONS, "torch", "torchax", "diffusers", "transformers", "numpy")
# Environment variables that change compiled programs.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")
# The folders whose code computes results.
_SOURCES = ("attention", "diagnostics", "distributed", "kernels", "sharding", "tpu_runtime")


class UnsupportedPackages(RuntimeError):
    """Packages with which no model runs; the message names them and the commands that help."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package with its tested versions."""

    name: str
    range: SpecifierSet  # of tested versions
    command: str  # that installs one of them

    @property
    def installed(self) -> str | None:
        """Installed version, or None."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def is_newer(self, version: str) -> bool:
        """Return whether `version` is above the tested ones and nevertheless allowed."""
        above = [SpecifierSet(f">={bound.version}") for bound in self.range if bound.operator == "<"]
        is_above = any(bound.contains(version, prereleases=True) for bound in above)
        return is_above and self.name not in (*BINDING, *JAX_COMPANIONS)

    def describe_doubt(self, version: str) -> str:
        """Return the remark on an untested `version`, "" for a tested one."""
        if self.range.contains(version, prereleases=True):
            return ""
        if self.is_newer(version):
            return f"; newer than the tested versions, {self.range}: change it if a model fails"
        return f"; tested with {self.range}"

    @property
    def refusal(self) -> str:
        """Reason why no model runs with the installed version, and the command that helps; "" if one can run."""
        help_ = compose("packages.run_command", executable=shlex.quote(sys.executable), command=self.command)
        version = self.installed
        if version is None:
            is_missed = self.name in ESSENTIAL
            return compose("packages.not_installed", name=self.name, help=help_) if is_missed else ""
        if self.name not in BINDING or not self.describe_doubt(version):
            return ""
        return compose("packages.version_unsupported", name=self.name, version=version, range=self.range, help=help_)


def list_packages() -> tuple[Package, ...]:
    """Return every package that the pack needs."""
    supported = {requirement_.name: requirement_ for requirement_ in read_requirements(ROOT / "supported.txt")}
    required = list(read_requirements(ROOT / "requirements.txt"))
    for requirement in required:
        if requirement.name in supported:
            requirement.specifier &= supported[requirement.name].specifier
    (jax,) = (requirement_ for requirement_ in required if requirement_.name == "jax")
    command = " ".join((f"pip install --index-url {TORCH_INDEX} '{supported['torch']}'", *TORCH_COMPANIONS))
    result = [Package(name="torch", range=supported["torch"].specifier, command=command)]
    for requirement in required:
        result.append(Package(name=requirement.name, range=requirement.specifier, command=_install(requirement)))
        if requirement is jax:
            ranges = _ranges_of_jax()
            result.extend(Package(name=name, range=ranges[name], command=_install(jax)) for name in JAX_COMPANIONS)
    return tuple(result)


@functools.cache
def find_refusals() -> tuple[str, ...]:
    """Return the reasons why no model runs, one per package, as of the first call."""
    return tuple(refusal for package in list_packages() if (refusal := package.refusal))


def check() -> None:
    """Raise `UnsupportedPackages` if no model runs with the installed packages."""
    if reasons := find_refusals():
        raise UnsupportedPackages(compose_list(reasons, "line"))


def list_result_versions() -> dict[str, str]:
    """Return the installed versions that a record of results names."""
    installed = {}
    for name in _RESULT_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def list_program_environment() -> tuple[object, ...]:
    """Return the versions and flags that a compiled program depends on apart from its own text."""
    return (*list_result_versions().items(), *(os.environ.get(name, "") for name in FLAGS))


@functools.cache
def source_digest(root: Path = ROOT) -> str:
    """Return a digest of the code that computes results, in the pack's folder `root`."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def read_requirements(path: Path) -> Iterator[Requirement]:
    """Yield the lines of a requirements file that apply to this machine."""
    for line in path.read_text("utf-8").splitlines():
        text = line.partition("#")[0].strip()
        # Skip options such as `-r other.txt`.
        if text and not text.startswith("-"):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                requirement.name = canonicalize_name(requirement.name)
                yield requirement


def _install(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"pip install '{requirement.name}{extras}{requirement.specifier}'"


def _ranges_of_jax() -> dict[str, SpecifierSet]:
    """Return the version ranges that the installed jax requires on a TPU; unbounded ones without jax."""
    ranges: dict[str, SpecifierSet] = dict.fromkeys(JAX_COMPANIONS, SpecifierSet())
    try:
        lines = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        return ranges
    for requirement in map(Requirement, lines):
        if requirement.name in ranges and (not requirement.marker or requirement.marker.evaluate({"extra": "tpu"})):
            ranges[requirement.name] &= requirement.specifier
    return ranges


def find_conflicts(path: Path) -> Iterator[tuple[Requirement, Package]]:
    """Yield the lines of another requirements file that contradict the tested versions, with the package."""
    pins = {pin.name: pin.specifier for pin in read_requirements(ROOT / "constraints.txt")}
    known = {package.name: package for package in list_packages()}
    for asked in read_requirements(path):
        if package := known.get(asked.name):
            bounds = (*asked.specifier, *package.range, *pins.get(asked.name, ()))
            both = asked.specifier & package.range
            if both and not any(both.contains(bound.version.removesuffix(".*")) for bound in bounds):
                yield asked, package


@functools.cache
def warn_once() -> None:
    """Log once per process which packages are missing or untested, except for refused ones."""
    for package in list_packages():
        version = package.installed
        if package.refusal:
            continue  # raised by `check` when a model is to run
        if version is None and package.name != "libtpu":  # needed only on a TPU machine
            log.warning("%s is not installed. To install it: %s", package.name, package.command)
        elif version and (doubt := package.describe_doubt(version)):
            log.warning("%s %s%s. To change it: %s", package.name, version, doubt, package.command)
