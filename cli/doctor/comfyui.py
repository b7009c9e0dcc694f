"""Checks of a ComfyUI installation: its version, this pack in it, other packs with the same nodes, what runs."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ...nodes import DECLARATIONS
from . import packages
from .machine import Finding, Machine, distributions

PORT = 8188
OLDEST_PYTHON = 11
MANAGER = "https://github.com/Comfy-Org/ComfyUI-Manager"
# The installer's, then what people make.
_ENVIRONMENTS = (".comfyui-tpu/venv", ".venv", "venv")
_SITE = "lib/python3.*/site-packages"
# A node's id, where it is registered in either of ComfyUI's two ways.
_REGISTERED = re.compile(
    rf"""["']({"|".join(DECLARATIONS)})["']\s*:|node_id\s*=\s*["']({"|".join(DECLARATIONS)})["']"""
)
MAX_SOURCE_BYTES = 2**20


def _is_there(machine: Machine) -> bool:
    return (machine.comfyui / "main.py").is_file()


def _setup(machine: Machine, verb: str, comfyui: Path | None = None) -> str:
    folder = shlex.quote(str(comfyui or machine.comfyui))
    return f"python3 {shlex.quote(str(machine.pack / 'setup.py'))} {verb} --comfyui {folder}"


def version(machine: Machine) -> Iterator[Finding]:
    """Whether there is a ComfyUI, and a new enough one."""
    folder = machine.comfyui
    if not _is_there(machine):
        remedy = f"{_setup(machine, 'install')}; or set COMFYUI_PATH"
        found = f"not in {folder}; the command line needs none"
        yield Finding(topic="ComfyUI", found=found, remedy=remedy, advice=True)
        return
    settings = tomllib.loads((machine.pack / "pyproject.toml").read_text("utf-8"))
    oldest = settings["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    file = folder / "comfyui_version.py"
    said = re.search(r'__version__ = "([^"]+)"', file.read_text("utf-8")) if file.is_file() else None
    current = said[1] if said else "0"
    if _numbers(current) < _numbers(oldest):
        is_ours = (folder / ".comfyui-tpu/installed.json").is_file()
        where = shlex.quote(str(folder))
        remedy = _setup(machine, "update") if is_ours else f"git -C {where} checkout master && git -C {where} pull"
        found = f"{current if said else 'too old to say its version'}; the pack needs {oldest} or newer"
        yield Finding(topic="ComfyUI", found=found, remedy=remedy)
    else:
        yield Finding(topic="ComfyUI", found=f"{current} in {folder}")
    local = sorted(path.parent.name for path in (folder / "models/diffusers").glob("*/model_index.json"))
    yield Finding(topic="models/diffusers", found=", ".join(local) or "none")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])


def requirements(machine: Machine) -> Iterator[Finding]:
    """Where what ComfyUI asks for was never run with this pack."""
    file = machine.comfyui / "requirements.txt"
    if find_spec("packaging") is None or not file.is_file():
        return
    from ...tpu_runtime import versions

    for asked, package in versions.unserved(file):
        remedy = "Take a ComfyUI that allows one of these versions; no other is known to work."
        yield Finding(topic="ComfyUI needs", found=f"{asked}; tested with {package.range}", remedy=remedy)


# --- packs ------------------------------------------------------------------------------------------------------------


def _packs(machine: Machine) -> list[Path]:
    """What ComfyUI will import: folders, links and files in custom_nodes that nobody has disabled."""
    found = sorted((machine.comfyui / "custom_nodes").glob("*"))
    skipped = (".disabled", ".example", "__pycache__")
    return [path for path in found if not path.name.startswith(".") and not path.name.lower().endswith(skipped)]


def _is_ours(folder: Path) -> bool:
    file = folder / "pyproject.toml"
    try:
        return tomllib.loads(file.read_text("utf-8")).get("project", {}).get("name") == "comfyui-tpu"
    except (OSError, ValueError):
        return False


def this_pack(machine: Machine) -> Iterator[Finding]:
    """This pack is to be in custom_nodes, once."""
    if not _is_there(machine):
        return
    for path in _packs(machine):
        if path.is_symlink() and not path.exists():
            remedy = f"rm {shlex.quote(str(path))}"
            yield Finding(topic="custom_nodes", found=f"{path.name} leads to {os.readlink(path)}, which is not there",
                          remedy=remedy)  # fmt: skip
    ours = [path for path in _packs(machine) if _is_ours(path)]
    if not ours:
        link = shlex.quote(str(machine.comfyui / "custom_nodes/ComfyUI-TPU"))
        remedy = f"ln -s {shlex.quote(str(machine.pack))} {link}"
        yield Finding(topic="this pack", found=f"not in {machine.comfyui}/custom_nodes", remedy=remedy)
        return
    # The one that this command belongs to stays.
    ours.sort(key=lambda path: path.resolve() != machine.pack.resolve())
    kept = ours[0]
    yield Finding(topic="this pack", found=f"{kept.name}{f' -> {os.readlink(kept)}' if kept.is_symlink() else ''}")
    for other in ours[1:]:
        found = f"in custom_nodes again, as {other.name}: ComfyUI loads both"
        yield Finding(topic="this pack", found=found, remedy=_disable(other))
    if kept.resolve() != machine.pack.resolve():
        found = f"ComfyUI's is {kept.resolve()}, this command's is {machine.pack}"
        remedy = f"pip install --no-deps -e {shlex.quote(str(kept.resolve()))}"
        yield Finding(topic="this pack", found=found, remedy=remedy, advice=True)


def _disable(path: Path) -> str:
    if path.is_symlink():
        return f"rm {shlex.quote(str(path))}"
    return f"mv {shlex.quote(str(path))} {shlex.quote(f'{path}.disabled')}"


def other_packs(machine: Machine) -> Iterator[Finding]:
    """The separate packs that this one replaces have its nodes' ids; their monitor starts the TPU with ComfyUI."""
    for path in _packs(machine):
        if _is_ours(path):
            continue
        ids, starts = set(), False
        for text in _sources(path):
            ids |= {first or second for first, second in _REGISTERED.findall(text)}
            starts |= "tpu_info" in text and "jax.devices(" in text
        if ids:
            some = ", ".join(sorted(ids)[:3]) + (", ..." if len(ids) > 3 else "")
            found = f"{path.name} has nodes of the same names ({some}): which one runs is chance"
            yield Finding(topic="other packs", found=found, remedy=_disable(path))
        elif starts:
            found = f"{path.name} starts the TPU when ComfyUI starts, and holds it"
            yield Finding(topic="other packs", found=found, remedy=_disable(path))


def _sources(pack: Path) -> Iterator[str]:
    """A pack's own Python, not what it carries of others."""
    files = [pack] if pack.suffix == ".py" else [*pack.glob("*.py"), *pack.glob("*/*.py"), *pack.glob("*/*/*.py")]
    for file in files:
        try:
            if file.stat().st_size <= MAX_SOURCE_BYTES:
                yield file.read_text("utf-8", "replace")
        except OSError:
            continue


def manager(machine: Machine) -> Iterator[Finding]:
    """ComfyUI-Manager is convenient; nothing needs it."""
    if not _is_there(machine):
        return
    names = [path.name for path in _packs(machine) if path.name.lower() in ("comfyui-manager", "comfyui_manager")]
    if names or "comfyui-manager" in machine.packages:
        yield Finding(topic="Manager", found=names[0] if names else machine.packages["comfyui-manager"])
        return
    target = shlex.quote(str(machine.comfyui / "custom_nodes/ComfyUI-Manager"))
    remedy = f"git clone {MANAGER} {target}"
    yield Finding(topic="Manager", found="not installed; other packs install with it", remedy=remedy, advice=True)


# --- environments -----------------------------------------------------------------------------------------------------


def environment(machine: Machine) -> Iterator[Finding]:
    """The environment beside ComfyUI, where this command runs in another one."""
    folder = next((each for name in _ENVIRONMENTS if (each := machine.comfyui / name).exists()), None)
    is_used = any(_is_ours(path) for path in _packs(machine))
    if folder is None or not is_used or not _is_there(machine):
        return
    topic, python = f"ComfyUI's {folder.relative_to(machine.comfyui)}", folder / "bin/python"
    again = _setup(machine, "install")
    if not python.exists() or not (sites := sorted(folder.glob(_SITE))):
        is_ours = folder.parent.name == ".comfyui-tpu"
        remedy = again if is_ours else f"python3 -m venv --upgrade {shlex.quote(str(folder))}"
        yield Finding(topic=topic, found=f"broken: {python} leads nowhere", remedy=remedy)
        return
    minor = int(sites[-1].parent.name.removeprefix("python3.").rstrip("t"))
    if minor < OLDEST_PYTHON:
        yield Finding(topic=topic, found=f"Python 3.{minor}; the pack needs 3.{OLDEST_PYTHON}", remedy=again)
        return
    if folder.resolve() == machine.prefix.resolve() or find_spec("packaging") is None:
        return
    installed = distributions(sites[-1])
    for name, found, remedy in packages.compared(installed, has_tpu=bool(machine.device_files)):
        if remedy:
            command = f"{shlex.quote(str(python))} -m {remedy}"
            yield Finding(topic=topic, found=f"{name} {found}", remedy=command)


# --- what runs --------------------------------------------------------------------------------------------------------


def running(machine: Machine) -> Iterator[Finding]:
    """A ComfyUI whose later installations may replace PyTorch, and whoever has its port."""
    for server in machine.servers:
        if server.environ is not None and not server.environ.get("PIP_CONSTRAINT"):
            found = f"process {server.pid} runs without PIP_CONSTRAINT: a pack's installation may replace PyTorch"
            remedy = f"kill {server.pid}; {_setup(machine, 'start', server.folder)}"
            yield Finding(topic="ComfyUI", found=found, remedy=remedy, advice=True)
    servers = {server.pid for server in machine.servers}
    listeners = machine.listeners(PORT)
    if servers & set(listeners):
        (pid, *_) = servers & set(listeners)
        yield Finding(topic=f"port {PORT}", found=f"ComfyUI, process {pid}")
    elif listeners:
        from ...tpu_runtime.monitor import bus

        who = [f"{bus.program(pid, machine.root)}, process {pid}" for pid in listeners if pid is not None]
        found = f"in use by {', '.join(who) or 'a program of another user'}"
        yield Finding(topic=f"port {PORT}", found=found, remedy=f"{_setup(machine, 'start')} --port {PORT + 1}")
