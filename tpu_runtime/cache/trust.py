"""Whom the files of a cache may come from. A serialized program is code: it is loaded only where nobody else can have
written it, and only if it bears the seal of the key that lies beside it.

The key travels with the folder, so that another machine that is given the folder compiles nothing.
"""

import grp
import hmac
import os
import pwd
import secrets
import stat
import tempfile
from pathlib import Path

KEY_SIZE = 32
PRIVATE = 0o700


class Untrusted(Exception):
    """Others than this user could have written it; the message says why and what to do."""


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


def key(path: Path) -> bytes:
    """The key at `path`, made if there is none or another user may have chosen it. The folder must be trusted.

    Raises `OSError` where it can be neither read nor made.
    """
    try:
        return _read_key(path)
    except FileNotFoundError:
        _make_key(path, replace=False)
    except Untrusted:
        _make_key(path, replace=True)
    return _read_key(path)


def _read_key(path: Path) -> bytes:
    if path.is_symlink():
        raise Untrusted(f"{path} is a link")
    check(path)
    found = path.read_bytes()
    if len(found) != KEY_SIZE:
        raise Untrusted(f"{path} is no key")
    return found


def _make_key(path: Path, *, replace: bool) -> None:
    """Puts a new key at `path`, whole or not at all; of processes that do so at once, one wins."""
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # readable by this user only
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_SIZE))
        if replace:
            os.replace(scratch, path)
        else:
            _link(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)


def _link(scratch: str, path: Path) -> None:
    try:
        os.link(scratch, path)
    except FileExistsError:
        return  # another process was first
    except OSError:
        os.replace(scratch, path)  # no hard links here, as in a mounted bucket


def seal(secret: bytes, name: str, payload: bytes) -> bytes:
    """What only the holder of `secret` can compute for the entry `name`."""
    code = hmac.new(secret, name.encode() + b"\0", "sha256")
    code.update(payload)
    return code.digest()


def temporary_folder() -> Path:
    """A folder for this user alone: the same at every call of every process, unless something else lies in its place.

    Raises `OSError` where there is no place for temporary files.
    """
    folder = Path(tempfile.gettempdir()) / f"comfyui-tpu-{os.getuid()}"
    try:
        folder.mkdir(mode=PRIVATE)
    except FileExistsError:
        status = folder.lstat()  # a link is not followed: it leads where its owner wants
        is_private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == PRIVATE
        if not is_private or status.st_uid != os.getuid():
            return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
    return folder
