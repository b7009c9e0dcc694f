"""Temporary files of the suite: deleted as soon as their tests have passed, and bounded for each test."""

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

# Bytes that the files of one test may occupy. The whole suite occupies two gigabytes at a time.
LIMIT = 3 * 2**29


def count_bytes(folder: Path) -> int:
    """Return the bytes that the files of a folder occupy on the disk. A hard link counts once."""
    sizes = {}
    for path in folder.rglob("*"):
        if not path.is_symlink() and path.is_file():
            found = path.stat()
            sizes[found.st_dev, found.st_ino] = 512 * found.st_blocks
    return sum(sizes.values())


def check_size(size: int, limit: int = LIMIT) -> None:
    """Fail the test whose temporary files take more than `limit` bytes."""
    if size > limit:
        pytest.fail(
            f"the test's temporary files take {size / 2**20:.0f} MiB of the disk, and {limit / 2**20:.0f} MiB are"
            " allowed. Make its models smaller."
        )


def delete_module_folders(base: Path, kept: Collection[Path]) -> None:
    """Delete the folders in `base` that are not `kept`, except those of `tmp_path`, which pytest deletes itself."""
    for folder in base.iterdir():
        if folder not in kept and folder.is_dir() and not folder.name.startswith("test_"):
            shutil.rmtree(folder, ignore_errors=True)
