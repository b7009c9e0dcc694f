"""A plan in its own process: libtpu, its environment and its memory stay out of this one, and a cancel ends it."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import children

if TYPE_CHECKING:
    from ..progress import Progress

POLL_S = 0.2  # poll interval for cancellation


def make_report(asked: Mapping[str, Any], progress: "Progress") -> str:
    """Return the report of a plan. `progress` gets a line as each program is compiled.

    asked: as for `plan.make_report`. Raises `ValueError` for wrong options, and `RuntimeError` if the compiler fails or
      its process ends early.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # leave this machine's TPU alone
    with children.run_module_child("plan.plan", asked, environment) as child:
        while True:
            progress.check_cancelled()
            try:
                answer = child.line(POLL_S)
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
            f"the plan's process ended with exit code {child.process.wait()}{child.last_error_line()}. Plans take up "
            "to 12 GiB of host memory: end other programs, or plan a smaller size."
        )
