"""A plan in a process of its own: libtpu, its environment and its memory stay out of this one, and a cancel ends it."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import children

if TYPE_CHECKING:
    from ..progress import Progress

# How soon a cancel is noticed.
LOOK_S = 0.2


def make_text(options: Mapping[str, Any], progress: "Progress") -> str:
    """The report of `comfyui-tpu plan` with these options by name; `progress` gets a line as each program is compiled.

    Raises `ValueError` for wrong options, `RuntimeError` where the compiler fails or its process ends early.
    """
    # -P: the program's folder holds modules of the package, which must not hide others.
    command = [sys.executable, "-P", str(Path(__file__).with_name("child.py")), *_words(options)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # a TPU of this machine is not its business
    with children.running(command, environment) as child:
        while True:
            progress.check_cancelled()
            try:
                answer = child.line(LOOK_S)
            except TimeoutError:
                continue
            if answer is None:
                break
            if "report" in answer:
                return answer["report"]
            if "error" in answer:
                raise (ValueError if answer["is_users"] else RuntimeError)(answer["error"])
            progress.text(answer["line"])
        raise RuntimeError(
            f"the plan's process ended with exit code {child.process.wait()}{child.last_words()}. Plans take up to 12 "
            "GiB of host memory: end other programs, or plan a smaller size."
        )


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            if one is True:
                yield option
            elif one is not None and one is not False:
                yield f"{option}={one}"
