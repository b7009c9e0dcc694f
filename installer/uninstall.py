"""`setup.py uninstall`: removes unchanged files that `install` created, and lists what stays."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from . import git
from .install import verb
from .layout import Installation, find_installation
from .lock import lock_exclusively
from .machine import ROOT
from .terminal import confirm, say

_DESCRIPTION = """\
Removes what `install` created: the environment with Manager, the link in custom_nodes, and ComfyUI if `install` cloned
it and it is unchanged. Models, outputs, inputs, workflows, settings and other custom nodes stay, and are listed.\
"""


def main(arguments: Sequence[str]) -> int:
    """Removes what install created; models, outputs, inputs and settings stay"""
    options = verb("uninstall", _DESCRIPTION).parse_args(arguments)
    chosen = find_installation(options.comfyui)
    _print_plan(chosen)
    if options.dry_run:
        return 0
    if not options.yes:
        confirm("Remove this?")
    with lock_exclusively(chosen):
        _remove(chosen)
    for line in _list_remaining(chosen.comfyui):
        say(f"left: {line}")
    say(f"left: {ROOT}, this folder, and the pack's caches (~/.cache/comfyui-tpu, ~/.cache/huggingface)")
    return 0


def _print_plan(chosen: Installation) -> None:
    record = chosen.record()
    lines = [f"{chosen.home}: the environment and all packages in it"]
    if _is_our_link(chosen):
        lines.append(f"{chosen.link}: the link to {ROOT}")
    for name, folder, commit in (
        ("Manager", chosen.manager, record.manager),
        ("ComfyUI", chosen.comfyui, record.comfyui),
    ):
        if commit and _is_as_cloned(folder, commit):
            lines.append(f"{folder}: {name}'s own files, as they were cloned")
        elif commit and folder.is_dir():
            say(f"{folder} stays: {name} was changed or updated since `install` cloned it")
    print("To be removed:\n\n" + "\n".join(f"  {line}" for line in lines) + "\n", flush=True)


def _remove(chosen: Installation) -> None:
    """Remove everything. The record goes last, so that the same command resumes after an interruption."""
    record = chosen.record()
    if _is_our_link(chosen):
        chosen.link.unlink()
    for folder, commit in ((chosen.manager, record.manager), (chosen.comfyui, record.comfyui)):
        if commit and _is_as_cloned(folder, commit):
            _remove_tracked(folder, chosen)
    _remove_home(chosen.home)
    if not any(chosen.comfyui.iterdir()):
        chosen.comfyui.rmdir()


def _remove_home(home: Path) -> None:
    """Remove our folder, also if it is a link because the user moved the environment to another disk."""
    if home.is_symlink():
        shutil.rmtree(home.resolve(), ignore_errors=True)
        home.unlink()
    else:
        shutil.rmtree(home)


def _is_our_link(chosen: Installation) -> bool:
    return chosen.record().link and chosen.link.is_symlink() and chosen.link.resolve() == ROOT


def _is_as_cloned(folder: Path, commit: str) -> bool:
    """Return whether a clone is unchanged.

    Missing files count as unchanged: an earlier removal may have been interrupted. A link belongs to the user.
    """
    if folder.is_symlink() or git.find_commit(folder) != commit:
        return False
    changes = git.git(folder, "status", "--porcelain", "--untracked-files=no").splitlines()
    return all(line.startswith(" D") for line in changes)


def _remove_tracked(folder: Path, chosen: Installation) -> None:
    """Remove the files that git tracks, Python's caches of them and the repository; the user's own files stay.

    Files in a folder that the user replaced by a link stay too: git takes them for deleted.
    """
    names = [name for name in git.git(folder, "ls-files", "-z").split("\0") if name]
    tracked = [folder / name for name in names if not _is_behind_link(folder, Path(name))]
    for file in tracked:
        file.unlink(missing_ok=True)
    for parent in sorted({file.parent for file in tracked}, reverse=True):  # the deepest first
        if not (parent / "__pycache__").is_symlink():
            shutil.rmtree(parent / "__pycache__", ignore_errors=True)
        while parent != folder and parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()
            parent = parent.parent
    # Atomic: with half a repository the user's own files could not be told apart.
    (folder / ".git").rename(chosen.home / f"removed-{folder.name}.git")
    if folder != chosen.comfyui and not any(folder.iterdir()):
        folder.rmdir()


def _is_behind_link(folder: Path, name: Path) -> bool:
    return any((folder / parent).is_symlink() for parent in name.parents)


def _list_remaining(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    lines = []
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            lines.append(f"{path} (a link to {path.resolve()})")
            continue
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        lines.append(f"{path} ({len(files)} files, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB)")
    return lines
