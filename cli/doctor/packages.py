"""Checks of versions, here and in ComfyUI's environment, against those that were run; needs the package packaging."""

import importlib.metadata
import shlex
from collections.abc import Mapping

from packaging.requirements import Requirement

from ...tpu_runtime.pipeline import versions
from .comfyui import is_used, setup
from .machine import Finding, Findings, HostMachine, Inspection, distributions

# Small, and used by other packs' monitors on any machine.
_HARMLESS = frozenset({"nvidia-ml-py"})
OLDEST_PYTHON = 11
# The installer's, then what people make.
_ENVIRONMENTS = (".comfyui-tpu/venv", ".venv", "venv")


def versions_here(machine: HostMachine) -> Findings:
    """What the pack needs, in this environment."""
    yield from _compared({each.name: each.installed for each in versions.packages()}, machine)


def _compared(installed: Mapping[str, str | None], machine: HostMachine) -> Findings:
    """By package: what there is of it, and the command that brings a version that was run."""
    for package in versions.packages():
        found = installed.get(package.name)
        if found is None and package.name == "libtpu" and not machine.device_files:
            yield Finding(package.name, "not installed; needed only on a TPU machine")
        elif found is None:
            yield Finding(package.name, "not installed", package.command)
        else:
            remedy = package.command if package.doubt(found) else ""
            yield Finding(package.name, f"{found}{package.doubt(found)}", remedy, advice=package.is_newer(found))


def builds(machine: HostMachine) -> Findings:
    """PyTorch for a GPU works, but brings gigabytes that a TPU machine cannot use, and slows every start."""
    torch = machine.packages.get("torch", "")
    extra = sorted(name for name in machine.packages if name.startswith("nvidia-") and name not in _HARMLESS)
    if torch and (torch.partition("+")[2].startswith(("cu", "rocm", "xpu")) or extra):
        public = torch.partition("+")[0]
        (package,) = (each for each in versions.packages() if each.name == "torch")
        wanted = f"torch=={public}" if not package.doubt(public) else f"'torch{package.range}'"
        remove = f"pip uninstall -y {' '.join(extra)}; " if extra else ""
        yield Finding(
            "PyTorch's build",
            f"{torch}, a GPU build" + (f" with {len(extra)} nvidia packages" if extra else ""),
            f"{remove}pip install --force-reinstall --no-deps --index-url {versions.TORCH_INDEX} {wanted}",
        )


def companions(machine: HostMachine) -> Findings:
    """ComfyUI imports torchvision and torchaudio, which load with the very torch they were built for."""
    torch = machine.packages.get("torch")
    for name in ("torchvision", "torchaudio"):
        if torch is None or name not in machine.packages:
            continue
        wanted = [Requirement(line) for line in _requires(name)]
        asked = next((each.specifier for each in wanted if each.name == "torch" and each.specifier), None)
        if asked and not asked.contains(torch, prereleases=True):
            found = f"{machine.packages[name]}, built for torch{asked}; torch is {torch}"
            remedy = f"pip install --upgrade --index-url {versions.TORCH_INDEX} torch=={torch.partition('+')[0]} {name}"
            yield Finding(name, found, remedy)


def _requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def requirements(machine: HostMachine) -> Findings:
    """Where what ComfyUI asks for was never run with this pack."""
    file = machine.comfyui / "requirements.txt"
    for asked, package in versions.unserved(file) if file.is_file() else ():
        remedy = "Take a ComfyUI that allows one of these versions; no other is known to work."
        yield Finding("ComfyUI needs", f"{asked}; tested with {package.range}", remedy)


def environment(machine: HostMachine) -> Findings:
    """The environment next to ComfyUI, where this command runs in another one."""
    folder = next((each for name in _ENVIRONMENTS if (each := machine.comfyui / name).exists()), None)
    if folder is None or not is_used(machine):
        return
    topic, python = f"ComfyUI's {folder.relative_to(machine.comfyui)}", folder / "bin/python"
    sites = sorted(folder.glob("lib/python3.*/site-packages"))
    again = setup(machine, "install")
    if not python.exists() or not sites:
        is_ours = folder.parent.name == ".comfyui-tpu"
        remedy = again if is_ours else f"python3 -m venv --upgrade {shlex.quote(str(folder))}"
        yield Finding(topic, f"broken: {python} leads nowhere", remedy)
        return
    minor = int(sites[-1].parent.name.removeprefix("python3.").rstrip("t"))
    if minor < OLDEST_PYTHON:
        yield Finding(topic, f"Python 3.{minor}; the pack needs 3.{OLDEST_PYTHON}", again)
    elif folder.resolve() != machine.prefix.resolve():
        for each in _compared(distributions(sites[-1]), machine):
            if each.remedy:
                command = f"{shlex.quote(str(python))} -m {each.remedy}"
                yield Finding(topic, f"{each.topic} {each.found}", command, each.advice)


CHECKS: tuple[Inspection, ...] = (versions_here, builds, companions, requirements, environment)
