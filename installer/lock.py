"""Locks: one installation, update or removal at a time, and none while ComfyUI runs.

The kernel holds the locks, so they end with a killed process.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .layout import Installation
from .terminal import SetupError


@contextlib.contextmanager
def lock_exclusively(chosen: Installation) -> Iterator[None]:
    """Lock an installation for changes. Raises SetupError if something else changes it, or its ComfyUI runs.

    The parent folder is locked too, where two first installations would collide.
    """
    outer = next(folder for folder in chosen.comfyui.parents if folder.is_dir())
    with contextlib.ExitStack() as stack:
        for folder in (outer, chosen.comfyui):
            if folder.is_dir():
                stack.enter_context(_lock(folder, chosen, fcntl.LOCK_EX))
        yield


@contextlib.contextmanager
def lock_shared(chosen: Installation) -> Iterator[None]:
    """Lock an installation for ComfyUI, of which several may run.

    The program that replaces this process keeps the lock.
    """
    with _lock(chosen.comfyui, chosen, fcntl.LOCK_SH) as descriptor:
        os.set_inheritable(descriptor, True)
        yield


@contextlib.contextmanager
def _lock(folder: Path, chosen: Installation, kind: int) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems that are shared over a network have no locks.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SetupError(
                    f"{chosen.comfyui} is in use: its ComfyUI runs, or another install, update or uninstall does. End "
                    "that, or wait for it, and run this again."
                ) from None
        yield descriptor
    finally:
        os.close(descriptor)
