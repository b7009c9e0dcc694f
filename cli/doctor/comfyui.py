"""Checks of a ComfyUI installation: its version, this pack in it, other packs with the same nodes, what runs."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ...nodes import DECLARATIONS
from ...nodes.headless import model_folders
from ...tpu_runtime.pipeline import bus, files_in
from .machine import Finding, Findings, HostMachine

PORT = 8188
REPOSITORY = "https://github.com/comfyui-tpu/ComfyUI-TPU"
# A node's id, where it is registered in either of ComfyUI's two ways.
_ID = f"[\"']({'|'.join(DECLARATIONS)})[\"']"
_REGISTERED = re.compile(rf"{_ID}\s*:|node_id\s*=\s*{_ID}")
MAX_SOURCE_BYTES = 2**20
# Of a folder's files.
MOST_NAMES = 8


def setup(machine: HostMachine, verb: str, comfyui: Path | None = None) -> str:
    """The command of setup.py for this ComfyUI, by a clone first where this machine has none: the registry's archive
    and the wheel come without.
    """
    folder = comfyui or machine.comfyui
    words = f"{verb} --comfyui {_quoted(folder)}"
    if (clone := _clone(machine, folder)) is None:
        return f"git clone {REPOSITORY} && python3 ComfyUI-TPU/setup.py {words}"
    return f"python3 {_quoted(clone / 'setup.py')} {words}"


def _clone(machine: HostMachine, comfyui: Path) -> Path | None:
    """The pack's folder that has setup.py and its installer: this command's, or the one in `comfyui`; None without."""
    linked = [path.resolve() for path in sorted((comfyui / "custom_nodes").glob("*")) if _is_ours(path)]
    return next((each for each in (machine.pack, *linked) if (each / "installer").is_dir()), None)


def _start(machine: HostMachine, folder: Path) -> str:
    """The command that starts a ComfyUI whose later installations leave PyTorch alone."""
    if _clone(machine, folder) is not None:
        return setup(machine, "start", folder)
    held = "python -m pip freeze | grep ^torch > torch.txt"
    return f"cd {_quoted(folder)} && {held} && PIP_CONSTRAINT=$PWD/torch.txt python main.py --cpu"


def _quoted(path: Path | str) -> str:
    return shlex.quote(str(path))


def _is_there(machine: HostMachine) -> bool:
    return (machine.comfyui / "main.py").is_file()


def version(machine: HostMachine) -> Findings:
    """Whether there is a ComfyUI, and a new enough one."""
    folder = machine.comfyui
    if not _is_there(machine):
        remedy = f"{setup(machine, 'install')}; or set COMFYUI_PATH"
        yield Finding("ComfyUI", f"not in {folder}; the command line needs none", remedy, advice=True)
        return
    settings = tomllib.loads((machine.pack / "pyproject.toml").read_text("utf-8"))
    oldest = settings["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    file = folder / "comfyui_version.py"
    said = re.search(r'__version__ = "([^"]+)"', file.read_text("utf-8")) if file.is_file() else None
    if said and _numbers(said[1]) >= _numbers(oldest):
        yield Finding("ComfyUI", f"{said[1]} in {folder}")
    else:
        is_ours = (folder / ".comfyui-tpu/installed.json").is_file()
        pull = f"git -C {_quoted(folder)} checkout master && git -C {_quoted(folder)} pull"
        found = f"{said[1] if said else 'too old to say its version'}; the pack needs {oldest} or newer"
        yield Finding("ComfyUI", found, setup(machine, "update") if is_ours else pull)
    local = sorted(path.parent.name for path in (folder / "models/diffusers").glob("*/model_index.json"))
    yield Finding("models/diffusers", ", ".join(local) or "none")
    for name in model_folders.find(folder):
        files = list(files_in(name)) if not name.endswith("diffusers") else []
        if files:
            yield Finding(f"files in {name}", f"{len(files)}: {', '.join(files[:MOST_NAMES])}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])


# --- packs ------------------------------------------------------------------------------------------------------------


def _packs(machine: HostMachine) -> list[Path]:
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


def is_used(machine: HostMachine) -> bool:
    """Whether there is a ComfyUI with this pack in it."""
    return _is_there(machine) and any(_is_ours(path) for path in _packs(machine))


def this_pack(machine: HostMachine) -> Findings:
    """This pack is to be in custom_nodes, once."""
    if not _is_there(machine):
        return
    for path in _packs(machine):
        if path.is_symlink() and not path.exists():
            found = f"{path.name} leads to {os.readlink(path)}, which is not there"
            yield Finding("custom_nodes", found, f"rm {_quoted(path)}")
    # The one that this command belongs to stays.
    ours = [path for path in _packs(machine) if _is_ours(path)]
    ours.sort(key=lambda path: path.resolve() != machine.pack.resolve())
    if not ours:
        remedy = f"ln -s {_quoted(machine.pack)} {_quoted(machine.comfyui / 'custom_nodes/ComfyUI-TPU')}"
        yield Finding("this pack", f"not in {machine.comfyui}/custom_nodes", remedy)
        return
    kept, *others = ours
    yield Finding("this pack", f"{kept.name}{f' -> {os.readlink(kept)}' if kept.is_symlink() else ''}")
    for other in others:
        found = f"in custom_nodes again, as {other.name}: ComfyUI loads both"
        yield Finding("this pack", found, _disable(other))
    if kept.resolve() != machine.pack.resolve():
        found = f"ComfyUI's is {kept.resolve()}, this command's is {machine.pack}"
        yield Finding("this pack", found, f"pip install --no-deps -e {_quoted(kept.resolve())}", advice=True)


def _disable(path: Path) -> str:
    return f"rm {_quoted(path)}" if path.is_symlink() else f"mv {_quoted(path)} {_quoted(f'{path}.disabled')}"


def other_packs(machine: HostMachine) -> Findings:
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
            yield Finding("other packs", found, _disable(path))
        elif starts:
            found = f"{path.name} starts the TPU when ComfyUI starts, and holds it"
            yield Finding("other packs", found, _disable(path))


def _sources(pack: Path) -> Iterator[str]:
    """A pack's own Python, not what it carries of others."""
    files = [pack] if pack.suffix == ".py" else [*pack.glob("*.py"), *pack.glob("*/*.py"), *pack.glob("*/*/*.py")]
    for file in files:
        try:
            if file.stat().st_size <= MAX_SOURCE_BYTES:
                yield file.read_text("utf-8", "replace")
        except OSError:
            continue


def manager(machine: HostMachine) -> Findings:
    """ComfyUI-Manager is convenient; nothing needs it."""
    if not _is_there(machine):
        return
    names = [path.name for path in _packs(machine) if path.name.lower() in ("comfyui-manager", "comfyui_manager")]
    if names or "comfyui-manager" in machine.packages:
        yield Finding("Manager", names[0] if names else machine.packages["comfyui-manager"])
    else:
        wanted = _quoted(machine.comfyui / "manager_requirements.txt")
        remedy = f"python -m pip install -r {wanted}, then start ComfyUI with --enable-manager"
        yield Finding("Manager", "not installed; other packs install with it", remedy, advice=True)


# --- what runs --------------------------------------------------------------------------------------------------------


def running(machine: HostMachine) -> Findings:
    """A ComfyUI whose later installations may replace PyTorch, and whoever has its port."""
    for server in machine.servers:
        if server.environ is not None and not server.environ.get("PIP_CONSTRAINT"):
            found = f"process {server.pid} runs without PIP_CONSTRAINT: a pack's installation may replace PyTorch"
            again = _start(machine, server.folder)
            remedy = f"kill {server.pid}; {again}" if machine.is_own(server.pid) else f"Ask its owner to run: {again}"
            yield Finding("ComfyUI", found, remedy, advice=True)
    listeners = machine.listeners(PORT)
    if ours := {server.pid for server in machine.servers} & {*listeners}:
        yield Finding(f"port {PORT}", f"ComfyUI, process {ours.pop()}")
    elif listeners:
        who = [f"{bus.program(pid, machine.root)}, process {pid}" for pid in listeners if pid is not None]
        found = f"in use by {', '.join(who) or 'a program of another user'}"
        yield Finding(f"port {PORT}", found, f"{_start(machine, machine.comfyui)} --port {PORT + 1}")
