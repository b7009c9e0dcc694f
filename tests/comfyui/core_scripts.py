"""Scripts in which ComfyUI's own torch code runs beside ours, each in a process of its own.

Their imports, seconds of a core, are made once in a server that each process is a fork of. JAX starts in the fork.
"""

import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comfyui_tpu.tests.support.comfyui_server import COMFYUI, TWO_CHIPS
from comfyui_tpu.tests.support.patience import PATIENCE_S

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["comfyui_tpu.tests.comfyui.core_imports"])
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", **TWO_CHIPS}


def run_script(name: str | Path, job: Any, folder: Path) -> Any:
    """What a script beside this file, or at a path, prints last, of a job; it runs in `folder`."""
    said = job if isinstance(job, str) else json.dumps(job)
    script = Path(__file__).parent / name
    out, err = folder / f"{script.name}.out", folder / f"{script.name}.err"
    process = _FORKS.Process(target=_run, args=(str(script), said, folder, out, err, dict(os.environ)))
    process.start()
    process.join(PATIENCE_S)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0, err.read_text()[-5000:]
    return json.loads(out.read_text().splitlines()[-1])


def _run(script: str, job: str, folder: Path, out: Path, err: Path, environment: Mapping[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | _ENVIRONMENT)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [script, str(COMFYUI), job]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
