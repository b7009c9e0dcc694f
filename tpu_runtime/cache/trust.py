"""Who may have written the files of a cache. A compiled program is code: it is loaded only where nobody else can have
written it.
"""

import grp
import os
import pwd
import stat
import tempfile
from pathlib import Path

PRIVATE = 0o700


class Untrusted(Exception):
    """Another user could have written it; the message says why and what to do."""


def check(path: Path) -> None:
    """Raises `Untrusted` unless `path` belongs to this user or root, and nobody else may write it."""
    status = path.stat()
    if status.st_uid not in (os.getuid(), 0):
        raise Untrusted(f"{path} belongs to user {status.st_uid}, not to you")
    open_to_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    if open_to_group or status.st_mode & stat.S_IWOTH:
        raise Untrusted(f"other users may write {path}; forbid it: chmod -R go-w {path}")


def _is_own_group(number: int) -> bool:
    """Whether a group is the user's private one (a user's files are group-writable then, by many systems' default)."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def temporary_folder() -> Path:
    """A private folder: the same at every call of every process, unless something else is in its place.

    Raises `OSError` where there is no place for temporary files.
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
