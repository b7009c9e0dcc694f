"""Checks of package versions, here and in ComfyUI's environment, against tested ones; needs the package packaging."""

import importlib.metadata
import shlex
from collections.abc import Mapping

from packaging.requirements import Requirement

from ...tpu_runtime import versions
from .comfyui import is_used, setup_command
from .machine import Finding, Findings, HostMachine, Inspection, distributions

# Small packages that other packs' monitors install on any machine.
_HARMLESS = frozenset({"nvidia-ml-py"})
OLDEST_PYTHON = 11
# Folders of environments: the installer's, then common ones.
_ENVIRONMENTS = (".comfyui-tpu/venv", ".venv", "venv")


def check_versions(machine: HostMachine) -> Findings:
    """Check the packages that the pack needs, in this environment."""
    yield from _compare({package.name: package.installed for package in versions.list_packages()}, machine)


def _compare(installed: Mapping[str, str | None], machine: HostMachine) -> Findings:
    """Yield the installed version of each package, with the command that installs a tested one."""
    for package in versions.list_packages():
        version = installed.get(package.name)
        if version is None and package.name == "libtpu" and not machine.device_files:
            yield Finding(package.name, "not installed; needed only on a TPU machine")
        elif version is None:
            yield Finding(package.name, "not installed", package.command)
        else:
            remedy = package.command if package.describe_doubt(version) else ""
            yield Finding(
                package.name, f"{version}{package.describe_doubt(version)}", remedy, advice=package.is_newer(version)
            )


def check_torch_build(machine: HostMachine) -> Findings:
    """Report a GPU build of PyTorch.

    It works, but needs gigabytes that a TPU machine cannot use, and slows every start.
    """
    torch = machine.packages.get("torch", "")
    extra = sorted(name for name in machine.packages if name.startswith("nvidia-") and name not in _HARMLESS)
    if torch and (torch.partition("+")[2].startswith(("cu", "rocm", "xpu")) or extra):
        public = torch.partition("+")[0]
        (package,) = (entry for entry in versions.list_packages() if entry.name == "torch")
        requirement = f"torch=={public}" if not package.describe_doubt(public) else f"'torch{package.range}'"
        remove = f"pip uninstall -y {' '.join(extra)}; " if extra else ""
        yield Finding(
            "PyTorch's build",
            f"{torch}, a GPU build" + (f" with {len(extra)} nvidia packages" if extra else ""),
            f"{remove}pip install --force-reinstall --no-deps --index-url {versions.TORCH_INDEX} {requirement}",
        )


def check_companions(machine: HostMachine) -> Findings:
    """Check torchvision and torchaudio: ComfyUI imports them, and each loads only with the torch it was built for."""
    torch = machine.packages.get("torch")
    for name in ("torchvision", "torchaudio"):
        if torch is None or name not in machine.packages:
            continue
        parsed = [Requirement(line) for line in _requires(name)]
        asked = next((entry.specifier for entry in parsed if entry.name == "torch" and entry.specifier), None)
        if asked and not asked.contains(torch, prereleases=True):
            message = f"{machine.packages[name]}, built for torch{asked}; torch is {torch}"
            remedy = f"pip install --upgrade --index-url {versions.TORCH_INDEX} torch=={torch.partition('+')[0]} {name}"
            yield Finding(name, message, remedy)


def _requires(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def check_requirements(machine: HostMachine) -> Findings:
    """Report requirements of ComfyUI that were not tested with this pack."""
    file = machine.comfyui / "requirements.txt"
    for asked, package in versions.find_conflicts(file) if file.is_file() else ():
        remedy = "Take a ComfyUI that allows one of these versions; no other is known to work."
        yield Finding("ComfyUI needs", f"{asked}; tested with {package.range}", remedy)


def check_environment(machine: HostMachine) -> Findings:
    """Check the environment next to ComfyUI, if this command runs in another one."""
    folder = next((path for name in _ENVIRONMENTS if (path := machine.comfyui / name).exists()), None)
    if folder is None or not is_used(machine):
        return
    topic, python = f"ComfyUI's {folder.relative_to(machine.comfyui)}", folder / "bin/python"
    sites = sorted(folder.glob("lib/python3.*/site-packages"))
    again = setup_command(machine, "install")
    if not python.exists() or not sites:
        is_ours = folder.parent.name == ".comfyui-tpu"
        remedy = again if is_ours else f"python3 -m venv --upgrade {shlex.quote(str(folder))}"
        yield Finding(topic, f"broken: {python} leads nowhere", remedy)
        return
    minor = int(sites[-1].parent.name.removeprefix("python3.").rstrip("t"))
    if minor < OLDEST_PYTHON:
        yield Finding(topic, f"Python 3.{minor}; the pack needs 3.{OLDEST_PYTHON}", again)
    elif folder.resolve() != machine.prefix.resolve():
        for finding in _compare(distributions(sites[-1]), machine):
            if finding.remedy:
                command = f"{shlex.quote(str(python))} -m {finding.remedy}"
                yield Finding(topic, f"{finding.topic} {finding.found}", command, finding.advice)


CHECKS: tuple[Inspection, ...] = (
    check_versions,
    check_torch_build,
    check_companions,
    check_requirements,
    check_environment,
)
