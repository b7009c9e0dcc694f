"""One at a time: an installation, update or removal, and none of them under a running ComfyUI.

The kernel holds the locks, so that none is left behind by a process that was killed.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from .layout import Installation
from .terminal import SetupError


@contextlib.contextmanager
def alone(chosen: Installation) -> Iterator[None]:
    """For what changes an installation; SetupError where something else changes it, or its ComfyUI runs.

    The folder that ComfyUI is in, or will be made in, is locked too: there two first installations meet.
    """
    outer = next(folder for folder in chosen.comfyui.parents if folder.is_dir())
    with contextlib.ExitStack() as stack:
        for folder in (outer, chosen.comfyui):
            if folder.is_dir():
                stack.enter_context(_locked(folder, chosen, fcntl.LOCK_EX))
        yield


@contextlib.contextmanager
def running(chosen: Installation) -> Iterator[None]:
    """For ComfyUI, of which several may run. The lock goes over to the program that this process becomes."""
    with _locked(chosen.comfyui, chosen, fcntl.LOCK_SH) as descriptor:
        os.set_inheritable(descriptor, True)
        yield


@contextlib.contextmanager
def _locked(folder: Path, chosen: Installation, kind: int) -> Iterator[int]:
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
