"""A real ComfyUI in front of two machines that serve, of which one is killed in the middle of a step: by hand,
`pytest -m recorded tests/distributed/fleet/test_comfyui.py -s`.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from comfyui_tpu.tests.support.citizen import Listener
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui, tiny_workflow
from comfyui_tpu.tests.support.patience import until

SERVE = "import sys; from comfyui_tpu.cli.main import main; sys.exit(main(sys.argv[1:]))"


def start_serve_process(folder: Path, name: str) -> tuple[subprocess.Popen, str]:
    """A machine that serves, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=(folder / f"{name}.log").open("w"),
    )  # fmt: skip
    assert process.stdout is not None
    return process, re.search(r"at (127.0.0.1:\d+),", process.stdout.readline())[1]  # pyright: ignore


@needs_comfyui
@pytest.mark.recorded
def test_remote_prompt_finishes_on_other_machine_after_kill(start_comfyui: Callable[..., Server], tmp_path: Path):
    machines = dict(start_serve_process(tmp_path, name)[::-1] for name in ("one", "other"))
    try:
        server = start_comfyui(environment={"COMFYUI_TPU_REMOTES": ",".join(machines)})
        graph = tiny_workflow("remote", num_inference_steps=60)
        graph["6"]["class_type"] = "TPURemote"
        graph["6"]["inputs"]["address"] = ",".join(machines)
        with Listener(server) as client:
            prompt = client.queue(graph)
            until(lambda: any(data["max"] == 60 and data["value"] > 3 for data in client.values("progress")))
            busy = max(machines.values(), key=lambda process: sum(psutil.Process(process.pid).cpu_times()[:2]))
            began = time.monotonic()
            busy.kill()
            entry = client.finish(prompt)
            print(f"killed in a step; the prompt ended {time.monotonic() - began:.1f} s later: {client.texts()[-4:]}")
            assert entry["status"]["status_str"] == "success", server.log_tail()
            assert any("trying another machine" in text for text in client.texts())
    finally:
        for process in machines.values():
            process.kill()
            process.wait()
