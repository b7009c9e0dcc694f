"""git, as far as the installer needs it."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from .terminal import SetupError, logged, tail

# A password that git would ask for has nobody to answer, and a repository that does not exist makes it ask.
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def git(folder: Path, *arguments: str) -> str:
    """What `git ARGUMENTS` prints in `folder`; SetupError with what it complained about."""
    done = subprocess.run(
        # Looking changes nothing: `status` would write its index.
        ["git", "--no-optional-locks", "-C", str(folder), *arguments],
        env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise SetupError(f"git {arguments[0]} failed in {folder}: {words[-1]}")
    return done.stdout.strip("\n")


def commit_of(folder: Path, name: str = "HEAD") -> str | None:
    """The commit that `name` stands for in a repository; None if there is no such name, or no repository."""
    if not (folder / ".git").exists():
        return None
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except SetupError:
        return None


def is_unchanged(folder: Path) -> bool:
    """Whether nothing that git tracks in `folder` was changed."""
    return not git(folder, "status", "--porcelain", "--untracked-files=no")


def clone(
    origin: str, tag: str, target: Path, beginning: Path, *, default_branch: bool, ready: Callable[[str], None]
) -> None:
    """Clones `origin` at `tag` into `target`, completely or not at all; without the tag the default branch, if that is
    allowed.

    It begins as the folder `beginning` on the same disk. `ready`, given the commit, is called before that is renamed.
    Where files are in `target` already they stay, and only the repository comes to them: see `write_missing_files`.
    """
    shutil.rmtree(beginning, ignore_errors=True)
    beginning.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile() as output:
            log = Path(output.name)
            command = ["git", "clone", "--progress", origin, str(beginning)]
            if logged(command, log, {**os.environ, **_ENVIRONMENT}, beginning.parent):
                raise SetupError(
                    f"{origin} could not be cloned: {tail(log)}. "
                    "Fix that (the network, the address or the disk), and run the same command again."
                )
        if commit_of(beginning, f"refs/tags/{tag}"):
            git(beginning, "-c", "advice.detachedHead=false", "checkout", "--detach", f"refs/tags/{tag}")
        elif not default_branch:
            raise SetupError(f"{origin} has no tag {tag}. Was this folder changed? `git pull` brings the right one.")
        commit = commit_of(beginning)
        if commit is None:
            raise SetupError(f"{origin} has no commit: it cannot be the right repository.")
        ready(commit)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and any(target.iterdir()):
            os.rename(beginning / ".git", target / ".git")
        else:
            os.rename(beginning, target)
    finally:
        shutil.rmtree(beginning, ignore_errors=True)


def write_missing_files(folder: Path) -> None:
    """Writes what a clone tracks and its folder lacks; what is there stays as it is."""
    git(folder, "checkout-index", "--all", "--quiet")


def move_to(folder: Path, tag: str) -> str:
    """Brings a clone to `tag`; returns the commit."""
    if commit_of(folder, f"refs/tags/{tag}") is None:
        git(folder, "fetch", "--tags", "origin")
    git(folder, "-c", "advice.detachedHead=false", "checkout", "--detach", f"refs/tags/{tag}")
    return git(folder, "rev-parse", "HEAD")
