"""Paths of an installation, and the record of what `install` created."""

import dataclasses
import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from .machine import ROOT, comfyui_folder
from .terminal import SetupError
from .venv import Venv

# The ComfyUI that the tests run against; it names its release of Manager.
COMFYUI_ORIGIN, COMFYUI_TAG = "https://github.com/Comfy-Org/ComfyUI", "v0.33.0"
PACK = "ComfyUI-TPU"


@dataclass(frozen=True)
class Record:
    """What `install` created, so that `uninstall` and `update` change nothing else."""

    comfyui: str | None = None  # commit of the clone
    manager: str | None = None  # commit of the clone that an earlier version made; Manager is a package now
    link: bool = False


@dataclass(frozen=True)
class Installation:
    """The folder of ComfyUI, and everything in it that belongs to this installation."""

    comfyui: Path
    comfyui_origin: str = COMFYUI_ORIGIN  # another one may lack our tag; then its default branch is cloned

    @property
    def home(self) -> Path:
        """Return the folder of the environment, the record and pip's caches. No other program uses its name."""
        return self.comfyui / ".comfyui-tpu"

    @property
    def constraints(self) -> Path:
        """Return the constraints for every later installation in the environment."""
        return self.home / "constraints.txt"

    @property
    def custom_nodes(self) -> Path:
        return self.comfyui / "custom_nodes"

    @property
    def manager(self) -> Path:
        """Return the clone of ComfyUI-Manager that an earlier version made; with the package, ComfyUI ignores it."""
        return self.custom_nodes / "ComfyUI-Manager"

    @property
    def manager_requirements(self) -> Path:
        """Return ComfyUI's own file that pins the tested Manager."""
        return self.comfyui / "manager_requirements.txt"

    @property
    def link(self) -> Path:
        return self.custom_nodes / PACK

    @property
    def is_in_custom_nodes(self) -> bool:
        """Return whether the repository itself is in ComfyUI's custom_nodes."""
        return ROOT.parent == self.custom_nodes.resolve()

    @property
    def venv(self) -> Venv:
        return Venv(
            folder=self.home / "venv",
            log=self.home / "install.log",
            root=ROOT,
            variables={**self.caches, "TMPDIR": str(self.temporary)},
        )

    @property
    def temporary(self) -> Path:
        return self.home / "tmp"

    @property
    def caches(self) -> dict[str, str]:
        """Return the variables of pip's and uv's caches, so that nothing is written into the user's home."""
        return {"PIP_CACHE_DIR": str(self.home / "cache" / "pip"), "UV_CACHE_DIR": str(self.home / "cache" / "uv")}

    # --- the record ---------------------------------------------------------------------------------------------------

    @property
    def is_ours(self) -> bool:
        """Return whether `install` was run here."""
        return _record_path(self.home).is_file()

    def record(self) -> Record:
        """Return the record, or an empty one. Raises SetupError if it is damaged."""
        if not self.is_ours:
            return Record()
        try:
            return Record(**json.loads(_record_path(self.home).read_text()))
        except (ValueError, TypeError):
            raise SetupError(
                f"{_record_path(self.home)} is damaged, so the installed parts are unknown. Remove {self.home} and run "
                "`python3 setup.py install` again; it keeps everything else."
            ) from None

    def note(self, **changed: object) -> None:
        """Update the record, completely or not at all."""
        write_record(self.home, dataclasses.replace(self.record(), **changed))


def _record_path(home: Path) -> Path:
    return home / "installed.json"


def write_record(home: Path, record: Record) -> None:
    """Write the record."""
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitignore").write_text("*\n")  # ComfyUI's own repository stays clean
    beginning = home / "installed.json.new"
    beginning.write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n")
    os.replace(beginning, _record_path(home))


def layout(chosen: str | None) -> Installation:
    """Return the installation in the chosen folder, else in COMFYUI_PATH, else in ~/ComfyUI."""
    return Installation((Path(chosen).expanduser() if chosen else comfyui_folder(os.environ)).resolve())


def find_installation(chosen: str | None) -> Installation:
    """Return the installation like `layout`. Raises SetupError if `install` created nothing there."""
    place = layout(chosen)
    if not place.is_ours:
        raise SetupError(f"Nothing is installed in {place.comfyui}: python3 setup.py install --comfyui {place.comfyui}")
    return place


# --- contents of the folder ------------------------------------------------------------------------------------------

# Entries of a ComfyUI folder that belong to its user, or remain after an interrupted installation.
_KEPT = frozenset({"models", "output", "input", "user", "custom_nodes", "temp", ".git", ".comfyui-tpu"})


def is_remainder(folder: Path) -> bool:
    """Return whether `folder` holds only remains of an uninstalled or incomplete ComfyUI."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return bool(names) and names <= _KEPT


def require_comfyui(folder: Path) -> None:
    """Raise SetupError if `folder` is not a ComfyUI, or is too old."""
    if not (folder / "main.py").is_file() or not (folder / "requirements.txt").is_file():
        raise SetupError(
            f"{folder} is not empty and not a ComfyUI (it has no main.py): choose another folder with --comfyui DIR."
        )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = settings["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    file = folder / "comfyui_version.py"
    version = re.search(r'__version__ = "([^"]+)"', file.read_text()) if file.is_file() else None
    if version is None or _numbers(version[1]) < _numbers(required):
        name = f"ComfyUI {version[1]}" if version else "a ComfyUI without a version"
        raise SetupError(
            f"{folder} is {name}, and the pack needs {required} or newer: update it (git pull), or choose another "
            "folder with --comfyui DIR."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])
