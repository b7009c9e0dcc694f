"""Checks that cache files can only have been written by this user or root. A compiled program is code."""

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

PRIVATE = 0o700


class UntrustedFile(Exception):
    """A file that another user could have written; the message has the reason and the remedy."""


def check_ownership(path: Path) -> None:
    """Raise `UntrustedFile` unless `path` belongs to this user or root, and nobody else may write it."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise UntrustedFile(f"{path} belongs to user {status.st_uid}, not to you")
    open_to_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    if open_to_group or status.st_mode & stat.S_IWOTH:
        raise UntrustedFile(f"other users may write {path}; forbid it: chmod -R go-w {path}")


def _is_own_group(number: int) -> bool:
    """Return whether a group is the user's private one. Many systems make a user's files writable by that group."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def temporary_folder() -> Path:
    """Return a private folder, the same for every call and process unless another user has taken its path.

    Raises `OSError` without a usable temporary folder.
    """
    folder = Path(tempfile.gettempdir()) / f"comfyui-tpu-{os.getuid()}"
    try:
        folder.mkdir(mode=PRIVATE)
    except FileExistsError:
        status = folder.lstat()  # a link is not followed: its owner chooses the target
        is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == PRIVATE
        if not is_private or status.st_uid != os.getuid():
            return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    return folder
