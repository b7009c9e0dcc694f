"""git commands that the installer needs."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from .terminal import SetupError, run_logged, tail

# Without a prompt: nobody could answer one, and git asks for a password if a repository does not exist.
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}


def git(folder: Path, *arguments: str) -> str:
    """Return the output of `git ARGUMENTS` in `folder`. Raises SetupError with git's error."""
    done = subprocess.run(
        # Change nothing: otherwise `status` writes its index.
        ["git", "--no-optional-locks", "-C", str(folder), *arguments],
        env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise SetupError(f"git {arguments[0]} failed in {folder}: {words[-1]}")
    return done.stdout.strip("\n")


def find_commit(folder: Path, name: str = "HEAD") -> str | None:
    """Return the commit of `name` in a repository; None if the name or the repository does not exist."""
    if not (folder / ".git").exists():
        return None
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except SetupError:
        return None


def is_unchanged(folder: Path) -> bool:
    """Return whether no file that git tracks in `folder` was changed."""
    return not git(folder, "status", "--porcelain", "--untracked-files=no")


def clone(
    origin: str, tag: str, target: Path, beginning: Path, *, default_branch: bool, ready: Callable[[str], None]
) -> None:
    """Clone `origin` at `tag` into `target`, completely or not at all.

    beginning: temporary folder of the clone, on the same disk.
    default_branch: whether the default branch may be used if the tag does not exist.
    ready: called with the commit before the clone is moved to `target`.
    If `target` already has files they stay, and only the repository is moved there: see `write_missing_files`.
    """
    shutil.rmtree(beginning, ignore_errors=True)
    beginning.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.NamedTemporaryFile() as output:
            log = Path(output.name)
            command = ["git", "clone", "--progress", origin, str(beginning)]
            if run_logged(command, log, {**os.environ, **_ENVIRONMENT}, beginning.parent):
                raise SetupError(
                    f"{origin} could not be cloned: {tail(log)}. "
                    "Fix that (the network, the address or the disk), and run the same command again."
                )
        if find_commit(beginning, f"refs/tags/{tag}"):
            git(beginning, "-c", "advice.detachedHead=false", "checkout", "--detach", f"refs/tags/{tag}")
        elif not default_branch:
            raise SetupError(f"{origin} has no tag {tag}. Was this folder changed? `git pull` gets the right one.")
        commit = find_commit(beginning)
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
    """Write tracked files that the folder lacks; existing files stay unchanged."""
    git(folder, "checkout-index", "--all", "--quiet")


def checkout_tag(folder: Path, tag: str) -> str:
    """Check out `tag` in a clone; return the commit."""
    if find_commit(folder, f"refs/tags/{tag}") is None:
        git(folder, "fetch", "--tags", "origin")
    git(folder, "-c", "advice.detachedHead=false", "checkout", "--detach", f"refs/tags/{tag}")
    return git(folder, "rev-parse", "HEAD")
