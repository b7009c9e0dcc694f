"""`setup.py update`: updates this repository, clones that `install` made, and packages. The user's changes stay."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from . import git
from .install import install, verb
from .layout import COMFYUI_TAG, Installation, find_installation
from .lock import lock_exclusively
from .machine import ROOT
from .steps import SetupStep
from .terminal import SetupError, say

_DESCRIPTION = """\
Updates this repository (git pull, if it is unchanged and on a branch). Then updates ComfyUI to the release that this
pack names, if `install` cloned it and it is unchanged. Then updates packages that are out of range, including Manager.
Models, outputs, settings and your own changes stay unchanged.\
"""


def main(arguments: Sequence[str]) -> int:
    """Updates this repository, what install cloned, and packages (needs the network)"""
    parser = verb("update", _DESCRIPTION)
    parser.add_argument("--pulled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen = find_installation(options.comfyui)
    with contextlib.nullcontext() if options.dry_run else lock_exclusively(chosen):
        is_new = not options.pulled and _pull(options)
    if is_new:
        # The steps of the new version apply.
        os.execv(sys.executable, [sys.executable, str(ROOT / "setup.py"), "update", "--pulled", *arguments])
    return install(chosen, options, before=[_move(chosen)])


def _pull(options: argparse.Namespace) -> bool:
    """Update the repository; return whether that changed it."""
    if reason := _why_not_pulled():
        say(f"{ROOT} stays unchanged: {reason}")
        return False
    if options.dry_run:
        say(f"git pull --ff-only in {ROOT}")
        return False
    before = git.find_commit(ROOT)
    git.git(ROOT, "pull", "--ff-only", "--quiet")
    after = git.find_commit(ROOT)
    say(f"{ROOT} is up to date" if after == before else f"{ROOT} was updated from {before} to {after}")
    return after != before


def _why_not_pulled() -> str:
    if git.find_commit(ROOT) is None:
        return "it is not a clone of a repository"
    if not git.is_unchanged(ROOT):
        return "files in it were changed"
    try:
        git.git(ROOT, "rev-parse", "--abbrev-ref", "@{upstream}")
    except SetupError:
        return "its branch does not track a branch of another repository"
    return ""


def _move(chosen: Installation) -> SetupStep:
    """Return a step that updates our clone to the release that this version names."""
    folder, commit = chosen.comfyui, chosen.record().comfyui

    def todo() -> str:
        now, target = git.find_commit(folder), git.find_commit(folder, f"refs/tags/{COMFYUI_TAG}")
        if commit is None or now is None or now == target == commit:
            return ""
        if now not in (commit, target) or not git.is_unchanged(folder):
            say(f"{folder} stays unchanged: it was changed since `install` cloned it")
            return ""
        if target is None and not git.git(folder, "ls-remote", "--tags", "origin", f"refs/tags/{COMFYUI_TAG}"):
            return ""  # the chosen origin is a fork without our tags
        return f"bring {folder} to {COMFYUI_TAG}"

    return SetupStep(name="ComfyUI", todo=todo, do=lambda: chosen.note(comfyui=git.checkout_tag(folder, COMFYUI_TAG)))
