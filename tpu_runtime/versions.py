"""What results depend on: versions of other packages, which installed ones were not tested, flags, and the own source.

`requirements.txt` states what is needed, `supported.txt` the versions that were run, PyTorch's among them. Which jaxlib
and libtpu belong to a jax, that jax says itself. Nothing here imports torch or JAX.
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

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
# The build for the CPU: only the TPU computes.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OF_JAX = ("jaxlib", "libtpu")
# ComfyUI imports these beside torch, and each is built for one minor version of it.
OF_TORCH = ("torchvision", "torchaudio")
# Outside their ranges nothing runs, and without these nothing does.
BINDING = ("torch", "jax", "torchax")
ESSENTIAL = (*BINDING, "jaxlib", "diffusers", "transformers", "safetensors", "numpy")
# What results and their speed depend on.
_OF_RESULTS = ("comfyui-tpu", "jax", *OF_JAX, "torch", "torchax", "diffusers", "transformers", "numpy")
# What else changes compiled programs.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")
# The folders whose code computes results.
_SOURCES = ("attention", "kernels", "sharding", "tpu_runtime")


class UnsupportedPackages(RuntimeError):
    """Packages with which no model runs; the message says which they are, and the commands that help."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package, the versions of it that were run, and the command that installs one of them."""

    name: str
    range: SpecifierSet
    command: str

    @property
    def installed(self) -> str | None:
        """The installed version; None if there is none."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def is_newer(self, version: str) -> bool:
        """Whether `version` is above what was run, and allowed all the same."""
        above = [SpecifierSet(f">={each.version}") for each in self.range if each.operator == "<"]
        is_above = any(each.contains(version, prereleases=True) for each in above)
        return is_above and self.name not in (*BINDING, *OF_JAX)

    def doubt(self, version: str) -> str:
        """What is to be said behind `version`; nothing where it was run."""
        if self.range.contains(version, prereleases=True):
            return ""
        if self.is_newer(version):
            return f"; newer than what was tested, {self.range}: change it if a model fails"
        return f"; tested with {self.range}"

    @property
    def refusal(self) -> str:
        """Why nothing runs with what is installed, and the command that helps; empty where something does."""
        help_ = f"Run this command, then start again: {shlex.quote(sys.executable)} -m {self.command}"
        version = self.installed
        if version is None:
            is_missed = self.name in ESSENTIAL
            return f"{self.name} is not installed: no TPU node runs without it. {help_}" if is_missed else ""
        if self.name not in BINDING or not self.doubt(version):
            return ""
        return f"{self.name} {version} is not supported: TPU nodes run with {self.name} {self.range}. {help_}"


def packages() -> tuple[Package, ...]:
    """Every package that the pack needs."""
    supported = {each.name: each for each in requirements(ROOT / "supported.txt")}
    own = list(requirements(ROOT / "requirements.txt"))
    for requirement in own:
        if requirement.name in supported:
            requirement.specifier &= supported[requirement.name].specifier
    (jax,) = (each for each in own if each.name == "jax")
    command = " ".join((f"pip install --index-url {TORCH_INDEX} '{supported['torch']}'", *OF_TORCH))
    found = [Package(name="torch", range=supported["torch"].specifier, command=command)]
    for requirement in own:
        found.append(Package(name=requirement.name, range=requirement.specifier, command=_install(requirement)))
        if requirement is jax:
            ranges = _ranges_of_jax()
            found.extend(Package(name=name, range=ranges[name], command=_install(jax)) for name in OF_JAX)
    return tuple(found)


@functools.cache
def refusals() -> tuple[str, ...]:
    """Why no model runs in this environment, a package each, with the command that helps; of what it began with."""
    return tuple(refusal for package in packages() if (refusal := package.refusal))


def check() -> None:
    """Raises `UnsupportedPackages` where no model runs with what is installed."""
    if found := refusals():
        raise UnsupportedPackages("\n".join(found))


def of_results() -> dict[str, str]:
    """The installed versions that a record of results is to name."""
    found = {}
    for name in _OF_RESULTS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def environment() -> tuple[object, ...]:
    """What a compiled program depends on apart from its own text: versions and flags."""
    return (*of_results().items(), *(os.environ.get(name, "") for name in FLAGS))


@functools.cache
def source_digest(root: Path = ROOT) -> str:
    """Of the names and contents of the code that computes results, in the pack's folder `root`."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def requirements(path: Path) -> Iterator[Requirement]:
    """The lines of a requirements file that hold on this machine."""
    for line in path.read_text("utf-8").splitlines():
        text = line.partition("#")[0].strip()
        # An option such as `-r other.txt` is no requirement.
        if text and not text.startswith("-"):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                requirement.name = canonicalize_name(requirement.name)
                yield requirement


def _install(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"pip install '{requirement.name}{extras}{requirement.specifier}'"


def _ranges_of_jax() -> dict[str, SpecifierSet]:
    """What the installed jax asks for on a TPU; nothing where there is no jax."""
    ranges: dict[str, SpecifierSet] = dict.fromkeys(OF_JAX, SpecifierSet())
    try:
        lines = importlib.metadata.requires("jax") or []
    except importlib.metadata.PackageNotFoundError:
        return ranges
    for requirement in map(Requirement, lines):
        if requirement.name in ranges and (not requirement.marker or requirement.marker.evaluate({"extra": "tpu"})):
            ranges[requirement.name] &= requirement.specifier
    return ranges


def unserved(path: Path) -> Iterator[tuple[Requirement, Package]]:
    """The lines of another requirements file that no version serves which we know of and which was run."""
    pins = {pin.name: pin.specifier for pin in requirements(ROOT / "constraints.txt")}
    known = {package.name: package for package in packages()}
    for asked in requirements(path):
        if package := known.get(asked.name):
            bounds = (*asked.specifier, *package.range, *pins.get(asked.name, ()))
            both = asked.specifier & package.range
            if both and not any(both.contains(bound.version.removesuffix(".*")) for bound in bounds):
                yield asked, package


@functools.cache
def warn_once() -> None:
    """Says in the log which packages are missing or were not run, but for refused ones: a process says it once."""
    for package in packages():
        version = package.installed
        if package.refusal:
            continue  # who asks to run gets it (see `check`)
        if version is None and package.name != "libtpu":  # needed only on a TPU machine
            log.warning("%s is not installed. To install it: %s", package.name, package.command)
        elif version and (doubt := package.doubt(version)):
            log.warning("%s %s%s. To change it: %s", package.name, version, doubt, package.command)
