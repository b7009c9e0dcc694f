"""Checks of a ComfyUI installation: its version, this pack, other packs with the same nodes, and running servers."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ...nodes import DECLARATIONS
from ...nodes.headless import model_folders
from ...tpu_runtime.checkpoints.file_resolution import list_weight_paths
from ...tpu_runtime.machine import pci
from .machine import Finding, Findings, HostMachine

PORT = 8188
REPOSITORY = "https://github.com/comfyui-tpu/ComfyUI-TPU"
# A node's id, where it is registered in either of ComfyUI's two ways.
_ID = f"[\"']({'|'.join(DECLARATIONS)})[\"']"
_REGISTERED = re.compile(rf"{_ID}\s*:|node_id\s*=\s*{_ID}")
MAX_SOURCE_BYTES = 2**20
# Files of a folder that are listed.
MAX_NAMES = 8


def setup_command(machine: HostMachine, verb: str, comfyui: Path | None = None) -> str:
    """Return the command of setup.py for this ComfyUI.

    machine: to look for a clone on. verb: of setup.py. comfyui: its folder; None: the machine's.
    Without a clone the command makes one first, because the registry's archive and the wheel lack setup.py.
    """
    folder = comfyui or machine.comfyui
    words = f"{verb} --comfyui {_quote(folder)}"
    if (clone := _clone(machine, folder)) is None:
        return f"git clone {REPOSITORY} && python3 ComfyUI-TPU/setup.py {words}"
    return f"python3 {_quote(clone / 'setup.py')} {words}"


def _clone(machine: HostMachine, comfyui: Path) -> Path | None:
    """Return the pack's folder with an installer: this command's, or the one in `comfyui`; None without one."""
    linked = [path.resolve() for path in sorted((comfyui / "custom_nodes").glob("*")) if _is_ours(path)]
    return next((pack for pack in (machine.pack, *linked) if (pack / "installer").is_dir()), None)


def _start(machine: HostMachine, folder: Path) -> str:
    """Return the command that starts a ComfyUI whose later installations keep PyTorch."""
    if _clone(machine, folder) is not None:
        return setup_command(machine, "start", folder)
    freeze = "python -m pip freeze | grep ^torch > torch.txt"
    return f"cd {_quote(folder)} && {freeze} && PIP_CONSTRAINT=$PWD/torch.txt python main.py --cpu"


def _quote(path: Path | str) -> str:
    return shlex.quote(str(path))


def _is_there(machine: HostMachine) -> bool:
    return (machine.comfyui / "main.py").is_file()


def check_version(machine: HostMachine) -> Findings:
    """Check that ComfyUI is installed and new enough."""
    folder = machine.comfyui
    if not _is_there(machine):
        remedy = f"{setup_command(machine, 'install')}; or set COMFYUI_PATH"
        yield Finding("ComfyUI", f"not in {folder}; the command line does not need it", remedy, advice=True)
        return
    settings = tomllib.loads((machine.pack / "pyproject.toml").read_text("utf-8"))
    oldest = settings["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    file = folder / "comfyui_version.py"
    match = re.search(r'__version__ = "([^"]+)"', file.read_text("utf-8")) if file.is_file() else None
    if match and _numbers(match[1]) >= _numbers(oldest):
        yield Finding("ComfyUI", f"{match[1]} in {folder}")
    else:
        is_ours = (folder / ".comfyui-tpu/installed.json").is_file()
        pull = f"git -C {_quote(folder)} checkout master && git -C {_quote(folder)} pull"
        message = f"{match[1] if match else 'too old to have a version'}; the pack needs {oldest} or newer"
        yield Finding("ComfyUI", message, setup_command(machine, "update") if is_ours else pull)
    local = sorted(path.parent.name for path in (folder / "models/diffusers").glob("*/model_index.json"))
    yield Finding("models/diffusers", ", ".join(local) or "none")
    for name in model_folders.find_model_folders(folder):
        files = list(list_weight_paths(name)) if not name.endswith("diffusers") else []
        if files:
            yield Finding(f"files in {name}", f"{len(files)}: {', '.join(files[:MAX_NAMES])}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])


# --- packs ------------------------------------------------------------------------------------------------------------


def _packs(machine: HostMachine) -> list[Path]:
    """Return what ComfyUI will import: enabled folders, links and files in custom_nodes."""
    paths = sorted((machine.comfyui / "custom_nodes").glob("*"))
    skipped = (".disabled", ".example", "__pycache__")
    return [path for path in paths if not path.name.startswith(".") and not path.name.lower().endswith(skipped)]


def _is_ours(folder: Path) -> bool:
    file = folder / "pyproject.toml"
    try:
        return tomllib.loads(file.read_text("utf-8")).get("project", {}).get("name") == "comfyui-tpu"
    except (OSError, ValueError):
        return False


def is_used(machine: HostMachine) -> bool:
    """Return whether there is a ComfyUI with this pack in it."""
    return _is_there(machine) and any(_is_ours(path) for path in _packs(machine))


def check_this_pack(machine: HostMachine) -> Findings:
    """Check that this pack is in custom_nodes exactly once."""
    if not _is_there(machine):
        return
    for path in _packs(machine):
        if path.is_symlink() and not path.exists():
            message = f"{path.name} links to {os.readlink(path)}, which does not exist"
            yield Finding("custom_nodes", message, f"rm {_quote(path)}")
    # Keep the copy that this command belongs to.
    ours = [path for path in _packs(machine) if _is_ours(path)]
    ours.sort(key=lambda path: path.resolve() != machine.pack.resolve())
    if not ours:
        remedy = f"ln -s {_quote(machine.pack)} {_quote(machine.comfyui / 'custom_nodes/ComfyUI-TPU')}"
        yield Finding("this pack", f"not in {machine.comfyui}/custom_nodes", remedy)
        return
    kept, *others = ours
    yield Finding("this pack", f"{kept.name}{f' -> {os.readlink(kept)}' if kept.is_symlink() else ''}")
    for other in others:
        message = f"in custom_nodes twice, also as {other.name}: ComfyUI loads both"
        yield Finding("this pack", message, _disable(other))
    if kept.resolve() != machine.pack.resolve():
        message = f"ComfyUI's is {kept.resolve()}, this command's is {machine.pack}"
        yield Finding("this pack", message, f"pip install --no-deps -e {_quote(kept.resolve())}", advice=True)


def _disable(path: Path) -> str:
    return f"rm {_quote(path)}" if path.is_symlink() else f"mv {_quote(path)} {_quote(f'{path}.disabled')}"


def check_other_packs(machine: HostMachine) -> Findings:
    """Report separate packs that this one replaces.

    They have the same node ids, and their monitor starts the TPU with ComfyUI.
    """
    for path in _packs(machine):
        if _is_ours(path):
            continue
        ids, starts = set(), False
        for text in _sources(path):
            ids |= {first or second for first, second in _REGISTERED.findall(text)}
            starts |= "tpu_info" in text and "jax.devices(" in text
        if ids:
            some = ", ".join(sorted(ids)[:3]) + (", ..." if len(ids) > 3 else "")
            message = f"{path.name} has nodes of the same names ({some}): it is undefined which one runs"
            yield Finding("other packs", message, _disable(path))
        elif starts:
            message = f"{path.name} starts the TPU when ComfyUI starts, and holds it"
            yield Finding("other packs", message, _disable(path))


def _sources(pack: Path) -> Iterator[str]:
    """Yield the sources of a pack's own Python files, without vendored code."""
    files = [pack] if pack.suffix == ".py" else [*pack.glob("*.py"), *pack.glob("*/*.py"), *pack.glob("*/*/*.py")]
    for file in files:
        try:
            if file.stat().st_size <= MAX_SOURCE_BYTES:
                yield file.read_text("utf-8", "replace")
        except OSError:
            continue


def check_manager(machine: HostMachine) -> Findings:
    """Report ComfyUI-Manager, which is optional."""
    if not _is_there(machine):
        return
    names = [path.name for path in _packs(machine) if path.name.lower() in ("comfyui-manager", "comfyui_manager")]
    if names or "comfyui-manager" in machine.packages:
        yield Finding("Manager", names[0] if names else machine.packages["comfyui-manager"])
    else:
        requirements = _quote(machine.comfyui / "manager_requirements.txt")
        remedy = f"python -m pip install -r {requirements}, then start ComfyUI with --enable-manager"
        yield Finding("Manager", "not installed; other packs install with it", remedy, advice=True)


# --- processes --------------------------------------------------------------------------------------------------------


def check_running(machine: HostMachine) -> Findings:
    """Report a ComfyUI whose later installations may replace PyTorch, and the process that has its port."""
    for server in machine.servers:
        if server.environ is not None and not server.environ.get("PIP_CONSTRAINT"):
            message = f"process {server.pid} runs without PIP_CONSTRAINT: a pack's installation may replace PyTorch"
            again = _start(machine, server.folder)
            remedy = f"kill {server.pid}; {again}" if machine.is_own(server.pid) else f"Ask its owner to run: {again}"
            yield Finding("ComfyUI", message, remedy, advice=True)
    listeners = machine.listeners(PORT)
    if ours := {server.pid for server in machine.servers} & {*listeners}:
        yield Finding(f"port {PORT}", f"ComfyUI, process {ours.pop()}")
    elif listeners:
        who = [f"{pci.program_name(pid, machine.root)}, process {pid}" for pid in listeners if pid is not None]
        message = f"in use by {', '.join(who) or 'a program of another user'}"
        yield Finding(f"port {PORT}", message, f"{_start(machine, machine.comfyui)} --port {PORT + 1}")
