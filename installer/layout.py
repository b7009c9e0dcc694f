"""Where `install` puts what, and the record of what it made."""

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

# The ComfyUI that the tests run against; it names the release of Manager that belongs to it.
COMFYUI_ORIGIN, COMFYUI_TAG = "https://github.com/Comfy-Org/ComfyUI", "v0.33.0"
PACK = "ComfyUI-TPU"


@dataclass(frozen=True)
class Record:
    """What `install` made, so that `uninstall` and `update` touch nothing else.

    comfyui, manager: commits of the clones it made; an earlier version cloned Manager, which is a package now.
    """

    comfyui: str | None = None
    manager: str | None = None
    link: bool = False


@dataclass(frozen=True)
class Installation:
    """The folder of ComfyUI, and all that belongs to this installation in it.

    comfyui_origin: what is cloned. One that was chosen may lack our tag: then the default branch is.
    """

    comfyui: Path
    comfyui_origin: str = COMFYUI_ORIGIN

    @property
    def home(self) -> Path:
        """Everything of ours: the environment, the record, pip's caches. No other program uses this name."""
        return self.comfyui / ".comfyui-tpu"

    @property
    def constraints(self) -> Path:
        """What every later installation in the environment must keep to."""
        return self.home / "constraints.txt"

    @property
    def custom_nodes(self) -> Path:
        return self.comfyui / "custom_nodes"

    @property
    def manager(self) -> Path:
        """The clone of ComfyUI-Manager that an earlier version made; ComfyUI leaves it alone beside the package."""
        return self.custom_nodes / "ComfyUI-Manager"

    @property
    def manager_requirements(self) -> Path:
        """ComfyUI's own file of the Manager that it was tested with."""
        return self.comfyui / "manager_requirements.txt"

    @property
    def link(self) -> Path:
        return self.custom_nodes / PACK

    @property
    def is_in_custom_nodes(self) -> bool:
        """Whether the repository itself is where ComfyUI looks for it."""
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
        """Where pip and uv keep what they download: nothing goes into the user's home but into the chosen folder."""
        return {"PIP_CACHE_DIR": str(self.home / "cache" / "pip"), "UV_CACHE_DIR": str(self.home / "cache" / "uv")}

    # --- the record ---------------------------------------------------------------------------------------------------

    @property
    def is_ours(self) -> bool:
        """Whether `install` was here."""
        return _record_in(self.home).is_file()

    def record(self) -> Record:
        if not self.is_ours:
            return Record()
        try:
            return Record(**json.loads(_record_in(self.home).read_text()))
        except (ValueError, TypeError):
            raise SetupError(
                f"{_record_in(self.home)} is damaged, so what install made is not known. Remove {self.home} and run "
                "`python3 setup.py install` again; it keeps everything else."
            ) from None

    def note(self, **changed: object) -> None:
        """Writes into the record, completely or not at all."""
        write_record(self.home, dataclasses.replace(self.record(), **changed))


def _record_in(home: Path) -> Path:
    return home / "installed.json"


def write_record(home: Path, record: Record) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitignore").write_text("*\n")  # ComfyUI's own repository stays clean
    beginning = home / "installed.json.new"
    beginning.write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n")
    os.replace(beginning, _record_in(home))


def layout(chosen: str | None) -> Installation:
    """For the folder that was chosen, else COMFYUI_PATH, else ~/ComfyUI."""
    return Installation((Path(chosen).expanduser() if chosen else comfyui_folder(os.environ)).resolve())


def installed(chosen: str | None) -> Installation:
    """`layout`, if `install` made something there; SetupError otherwise."""
    found = layout(chosen)
    if not found.is_ours:
        raise SetupError(f"Nothing is installed in {found.comfyui}: python3 setup.py install --comfyui {found.comfyui}")
    return found


# --- what is in the folder --------------------------------------------------------------------------------------------

# What of a ComfyUI is its user's, and what an installation that was cut off leaves.
_KEPT = frozenset({"models", "output", "input", "user", "custom_nodes", "temp", ".git", ".comfyui-tpu"})


def remains(folder: Path) -> bool:
    """Whether `folder` holds what is left of a ComfyUI that was uninstalled, or not complete yet, and nothing else."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return bool(names) and names <= _KEPT


def require_comfyui(folder: Path) -> None:
    """SetupError if `folder` is something else, or a ComfyUI that is too old."""
    if not (folder / "main.py").is_file() or not (folder / "requirements.txt").is_file():
        raise SetupError(
            f"{folder} is neither empty nor a ComfyUI (it has no main.py): choose another folder with --comfyui DIR."
        )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = settings["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    file = folder / "comfyui_version.py"
    version = re.search(r'__version__ = "([^"]+)"', file.read_text()) if file.is_file() else None
    if version is None or _numbers(version[1]) < _numbers(required):
        said = f"ComfyUI {version[1]}" if version else "a ComfyUI that does not even say its version"
        raise SetupError(
            f"{folder} is {said}, and the pack needs {required} or newer: update it (git pull), or choose another "
            "folder with --comfyui DIR."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])
