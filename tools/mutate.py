"""Test by mutation: `python tools/mutate.py run`, then `results` and `show NAME`. Arguments are passed to mutmut.

mutmut changes one operation at a time in the modules that `[tool.mutmut]` in pyproject.toml lists, and runs the tests
listed there. It needs the package inside its working folder, so it runs in `output/mutation` on a link to the package.
Without an argument this prints how many mutants of each module the tests detect.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "output" / "mutation"
PACKAGE = "comfyui_tpu"
# mutmut's exit codes for a mutant that survives: no test failed, or no test runs it.
SURVIVED = (0, 5, 33)


def table() -> str:
    """Return a line `module | mutants | detected` for each module."""
    lines = []
    for path in sorted((PLACE / "mutants" / PACKAGE).rglob("*.py.meta")):
        codes = [code for code in json.loads(path.read_text())["exit_code_by_key"].values() if code is not None]
        if codes:
            noticed = sum(code not in SURVIVED for code in codes)
            name = path.relative_to(PLACE / "mutants" / PACKAGE).with_suffix("")
            lines.append(f"{name} | {len(codes)} | {noticed} ({noticed / len(codes):.1%})")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if not arguments:
        print(table())
        return
    PLACE.mkdir(parents=True, exist_ok=True)
    for name, target in {PACKAGE: ROOT, "pyproject.toml": ROOT / "pyproject.toml"}.items():
        if not (PLACE / name).is_symlink():
            (PLACE / name).symlink_to(target)
    os.chdir(PLACE)
    os.execv(Path(sys.executable).with_name("mutmut"), ["mutmut", *arguments])


main(sys.argv[1:])
