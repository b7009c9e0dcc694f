"""What results depend on: versions of other packages, which installed ones were not tested, flags, and the own source.

`requirements.txt` states the ranges, `supported.txt` those of packages that ComfyUI brings, which are only named there.
PyTorch is in neither: its line is in `constraints.txt`. Which jaxlib and libtpu belong to a jax, that jax says itself.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
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
# What results and their speed depend on.
_OF_RESULTS = ("comfyui-tpu", "jax", *OF_JAX, "torch", "torchax", "diffusers", "transformers", "numpy")
# What else changes compiled programs.
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION")
# The folders whose code computes results.
_SOURCES = ("attention", "kernels", "sharding", "tpu_runtime")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package, the versions of it that were run, and the command that installs one of them."""

    name: str
    range: SpecifierSet
    command: str
    is_comfyuis: bool = False

    @property
    def installed(self) -> str | None:
        """The installed version; None if there is none."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    def is_newer(self, version: str) -> bool:
        """Whether `version` is above the range of a package that ComfyUI brings; of the pack's own none may be."""
        above = [SpecifierSet(f">={each.version}") for each in self.range if each.operator == "<"]
        return self.is_comfyuis and any(each.contains(version, prereleases=True) for each in above)

    def doubt(self, version: str) -> str:
        """What is to be said behind `version`; nothing where it was run."""
        if self.range.contains(version, prereleases=True):
            return ""
        if self.is_newer(version):
            return f"; newer than what was tested, {self.range}: change it if a model fails"
        return f"; tested with {self.range}"


def packages() -> tuple[Package, ...]:
    """Every package that the pack needs."""
    (torch,) = (pin for pin in requirements(ROOT / "constraints.txt") if pin.name == "torch")
    supported = {each.name: each.specifier for each in requirements(ROOT / "supported.txt")}
    own = list(requirements(ROOT / "requirements.txt"))
    for requirement in own:
        requirement.specifier &= supported.get(requirement.name, SpecifierSet())
    (jax,) = (each for each in own if each.name == "jax")
    found = [Package(name="torch", range=torch.specifier, command=f"pip install --index-url {TORCH_INDEX} {torch}")]
    for requirement in own:
        found.append(
            Package(
                name=requirement.name, range=requirement.specifier, command=_install(requirement),
                is_comfyuis=requirement.name in supported,
            )
        )  # fmt: skip
        if requirement is jax:
            ranges = _ranges_of_jax()
            found.extend(Package(name=name, range=ranges[name], command=_install(jax)) for name in OF_JAX)
    return tuple(found)


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
    """Says in the log which packages are not among those that were run: a process says it once."""
    for package in packages():
        if package.installed and (doubt := package.doubt(package.installed)):
            log.warning("%s %s%s. To change it: %s", package.name, package.installed, doubt, package.command)
