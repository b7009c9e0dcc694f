"""A plan in its own process: libtpu, its environment and its memory stay out of this one, and a cancel ends it."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import children
from ..messages import compose, restore

if TYPE_CHECKING:
    from ..progress import Progress

POLL_S = 0.2  # poll interval for cancellation


def make_report(asked: Mapping[str, Any], progress: "Progress") -> str:
    """Return the report of a plan. `progress` gets a line as each program is compiled.

    asked: as for `plan.make_report`. Raises `ValueError` for wrong options, and `RuntimeError` if the compiler fails or
      its process ends early.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}  # leave this machine's TPU alone
    with children.run_module_child("tpu_runtime.plan.plan", asked, environment) as child:
        while True:
            progress.check_cancelled()
            try:
                answer = child.line(POLL_S)
            except TimeoutError:
                continue
            if answer is None:
                break
            if "report" in answer:
                return restore(answer["report"], answer["messages"])
            if "error" in answer:
                raise (ValueError if answer["is_users"] else RuntimeError)(restore(answer["error"], answer["messages"]))
            progress.text(answer["line"])
        raise RuntimeError(
            compose("plan.process_ended", wait=child.process.wait(), last_error_line=child.last_error_line())
        )
