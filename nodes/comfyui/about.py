"""Facts about the pack and this machine for the page: problems with packages, changes, and self-test results."""

import re
import shlex
import sys
from pathlib import Path

from ...tpu_runtime.api import check_packages
from ...tpu_runtime.machine import record as machine_record
from ..declare import Json

PACK = Path(__file__).parents[2]
CHANGELOG = PACK / "CHANGELOG.md"
MAX_CHANGES, MAX_CHANGE_LENGTH, MAX_BYTES = 200, 400, 2**20
_ENTRY = re.compile(r"^- (.*(?:\n(?!-|#|\n).*)*)", re.MULTILINE)


def read_changes(file: Path = CHANGELOG) -> list[str]:
    """Return the newest entries of the changelog as plain text; none if the file does not exist."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    entries = (" ".join(entry.split()).replace("`", "") for entry in _ENTRY.findall(text))
    return [_shorten(entry) for entry, _ in zip(entries, range(MAX_CHANGES), strict=False)]


def _shorten(entry: str) -> str:
    return entry if len(entry) <= MAX_CHANGE_LENGTH else f"{entry[: MAX_CHANGE_LENGTH - 1]}…"


def find_package_problems() -> list[str]:
    """Return why no node of the pack can run with the installed packages, with the command that helps; else nothing."""
    try:
        check_packages()
    except RuntimeError as error:
        return str(error).splitlines()
    return []


def describe_selftest() -> dict[str, Json]:
    """Return the self-test's command, and its results on machines of this cache, the newest last.

    Of each machine: its `title`, whether a first run `is_measured`, and `sentences` about its limitations.
    """
    program = Path(sys.executable).with_name("comfyui-tpu")
    # Manager does not install the command; the pack's folder can be run instead.
    command = [str(program)] if program.is_file() else [sys.executable, str(PACK)]
    machines = [
        {"title": key, "is_measured": record.reserve_share is not None, "sentences": list(record.sentences)}
        for key, record in machine_record.read_all().items()
    ]
    words = (*command, "selftest", "--first-run", "--report", "selftest.json")
    return {"command": shlex.join(words), "machines": machines}


def describe_pack() -> dict[str, Json]:
    """Return the answer of `GET /tpu/about`."""
    return {"refusals": find_package_problems(), "changes": read_changes(), "selftest": describe_selftest()}
