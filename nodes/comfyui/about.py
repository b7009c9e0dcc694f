"""What the page may want to say of the pack: why it cannot run, what has changed, and what is known of this machine."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

from ...tpu_runtime.pipeline import check_packages, machine_record

PACK = Path(__file__).parents[2]
CHANGELOG = PACK / "CHANGELOG.md"
MOST_CHANGES, LONGEST_CHANGE, MOST_BYTES = 200, 400, 2**20
_ENTRY = re.compile(r"^- (.*(?:\n(?!-|#|\n).*)*)", re.MULTILINE)


def changes(file: Path = CHANGELOG) -> list[str]:
    """The newest entries of the changelog, as plain text; none where there is no such file."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    entries = (" ".join(entry.split()).replace("`", "") for entry in _ENTRY.findall(text))
    return [_shortened(entry) for entry, _ in zip(entries, range(MOST_CHANGES), strict=False)]


def _shortened(entry: str) -> str:
    return entry if len(entry) <= LONGEST_CHANGE else f"{entry[: LONGEST_CHANGE - 1]}…"


def refusals() -> list[str]:
    """Why no node of the pack can run with the installed packages, with the command that helps; none where they can."""
    try:
        check_packages()
    except RuntimeError as error:
        return str(error).splitlines()
    return []


def selftest() -> dict[str, Any]:
    """The command that runs it in a terminal, and what it has found on machines of this cache, the newest last: their
    `title`, whether a first run `is_measured`, and `sentences` of what they do without.
    """
    program = Path(sys.executable).with_name("comfyui-tpu")
    # Manager installs no command: there the pack's folder is one.
    command = [str(program)] if program.is_file() else [sys.executable, str(PACK)]
    machines = [
        {"title": key, "is_measured": found.reserve_share is not None, "sentences": list(found.sentences)}
        for key, found in machine_record.everything().items()
    ]
    words = (*command, "selftest", "--first-run", "--report", "selftest.json")
    return {"command": shlex.join(words), "machines": machines}


def everything() -> dict[str, Any]:
    """The answer of `GET /tpu/about`."""
    return {"refusals": refusals(), "changes": changes(), "selftest": selftest()}
