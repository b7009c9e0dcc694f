"""Profiler traces of stages, for XProf and TensorBoard, by `COMFYUI_TPU_TRACE`."""

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import jax

VARIABLE = "COMFYUI_TPU_TRACE"
# A process traces this many stages: one prompt with a spare. Traces of many steps take gigabytes.
MAX_STAGES = 4

log = logging.getLogger(__name__)
_numbers = itertools.count(1)


@contextlib.contextmanager
def trace_stage(stage: str) -> Iterator[None]:
    """Trace the stage into a folder of its own below the one that `COMFYUI_TPU_TRACE` names. Does nothing if unset.

    A trace that cannot be started or written costs a line in the log, never the stage.
    """
    folder = os.environ.get(VARIABLE)
    number = next(_numbers) if folder else MAX_STAGES + 1
    if not folder or number > MAX_STAGES:
        yield
        return
    target = Path(folder) / f"{number}-{stage}"
    try:
        target.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(target)
    except (OSError, RuntimeError, ValueError) as error:
        log.warning("%s: no trace of stage %s in %s (%s)", VARIABLE, stage, folder, error)
        yield
        return
    try:
        yield
    finally:
        try:
            jax.profiler.stop_trace()
            log.info("%s: the trace of stage %s is in %s", VARIABLE, stage, target)
        except (OSError, RuntimeError, ValueError) as error:
            log.warning("%s: the trace of stage %s was not written to %s (%s)", VARIABLE, stage, target, error)
