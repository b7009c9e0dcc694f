"""A real ComfyUI server with this pack in it, on eight simulated chips, as a process that tests may end and restart.

Servers come from the fixture `start_comfyui` in conftest.py, which ends them; what they leave lies in its own folders.
"""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from packaging.version import Version

from .hosts import free_port
from .patience import PATIENCE_S, until

PACK = Path(__file__).parents[2]
COMFYUI = Path(os.environ.get("COMFYUI_PATH") or "~/ComfyUI").expanduser()
# The `static` folder of a frontend's package, in place of the installed one.
FRONTEND = os.environ.get("COMFYUI_FRONTEND", "")
# Of all tests, so that what one process has compiled serves every other. Compiling the tiny programs takes more of the
# suite's time than running them, also in a server; a quarter of it went into fusions, another into dividing each among
# threads, where every core has its worker.
FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
# jaxlib ends the process at a flag that it does not know: 0.10 knows this one, 0.12 does not, 0.11 was not tried.
if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"

# Where the number of chips is not the subject. Each chip computes a text's states: eight take four times as long.
TWO_CHIPS = {"XLA_FLAGS": FLAGS.replace("count=8", "count=2")}

needs_comfyui = pytest.mark.skipif(
    not (COMFYUI / "main.py").is_file(), reason=f"no ComfyUI in {COMFYUI}; set COMFYUI_PATH"
)

STUBS = (Path(__file__).parents[1] / "comfyui" / "stubs.py").read_text()


@dataclass(kw_only=True)
class Server:
    """One server and its folders. `environment` and `arguments` come on top of what every test server gets."""

    base: Path
    port: int
    cache: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """What the server printed, all its starts in one file."""
        return self.base / "server.log"

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process and waits until it answers; again after `stop` or `kill`, at the same address."""
        assert not self.is_running, "the server runs already"
        options = f"--cpu --disable-api-nodes --port {self.port} --base-directory".split()
        frontend = ("--front-end-root", FRONTEND) if FRONTEND else ()
        command = [sys.executable, "main.py", *options, str(self.base), *frontend, *self.arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.base / "stubs"),
            "COMFYUI_TPU_CACHE": str(self.cache),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": FLAGS,
            "HF_HUB_OFFLINE": "1",
            **self.environment,
        }
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, cwd=COMFYUI, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._wait()

    def _wait(self) -> None:
        until(lambda: not self.is_running or self._answers(), lambda: f"ComfyUI did not start\n{self.log_tail()}")
        assert self.is_running, f"ComfyUI ended\n{self.log_tail()}"

    def _answers(self) -> bool:
        try:
            self.get("/system_stats")
        except OSError:
            return False
        return True

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Asks it to end, and waits until it has."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it as the kernel's out-of-memory killer would: kill -9."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def _end(self, number: signal.Signals) -> None:
        if self.is_running:
            self.process.send_signal(number)
            self.process.wait(timeout=PATIENCE_S)

    # -- requests ----------------------------------------------------------------------------------------------------

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any) -> dict:
        """The JSON answer, also when it is a refusal; `{}` where the server answers with an empty body."""
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as refusal:
            return json.load(refusal)

    def queue(self, workflow: dict) -> dict:
        """The server's answer to a prompt, also when it refuses it."""
        return self.post("/prompt", {"prompt": workflow})

    def finish(self, prompt_id: str) -> dict:
        """Waits for the history entry of a queued prompt, whatever its end."""

        def entry() -> dict | None:
            assert self.is_running, f"ComfyUI ended\n{self.log_tail()}"
            return self.get(f"/history/{prompt_id}").get(prompt_id)

        return until(entry, lambda: f"the prompt did not end\n{self.log_tail()}")

    def run(self, workflow: dict) -> dict:
        """The history entry of a prompt that ran to its end."""
        answer = self.queue(workflow)
        assert not answer.get("node_errors") and "prompt_id" in answer, answer
        entry = self.finish(answer["prompt_id"])
        assert entry["status"]["status_str"] == "success", f"{entry['status']}\n{self.log_tail()}"
        return entry

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


def prepare(
    base: Path,
    *,
    cache: Path | None = None,
    packs: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> Server:
    """A server that is not started yet, over `base`, which may hold what an earlier one left.

    `packs` are neighbours: folder name and the source of its `__init__.py`. `cache` is the pack's own folder.
    """
    _write(base / "stubs" / "sitecustomize.py", STUBS)
    for name, source in (packs or {}).items():
        _write(base / "custom_nodes" / name / "__init__.py", source)
    link = base / "custom_nodes" / "ComfyUI-TPU"
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(PACK, target_is_directory=True)
    return Server(
        base=base, port=free_port(), cache=cache or base / "cache", environment=environment or {}, arguments=arguments
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(text))


def tiny_workflow(prefix: str, **sampler: int) -> dict:
    """The Wan 2.1 example in API form on the built-in miniature; 5 frames, 2 steps, saved under `prefix`."""
    workflow = json.loads((PACK / "examples" / "api" / "wan21_t2v_720p.json").read_text())
    make_random(workflow)
    workflow["2"]["inputs"] |= {"num_frames": 5, "num_inference_steps": 2, **sampler}
    workflow["5"]["inputs"]["filename_prefix"] = prefix
    return workflow


def make_random(workflow: dict) -> None:
    """Like `--tiny`, but for a trained miniature, which is larger: this takes the one with random weights."""
    from comfyui_tpu.nodes.graphs.tiny_models import make_tiny
    from comfyui_tpu.tpu_runtime.checkpoints import tiny
    from comfyui_tpu.tpu_runtime.models import SPECS

    make_tiny(workflow)
    random_ids = {spec.miniature.id: spec.miniature.random_id for spec in SPECS if tiny.is_trained(spec.miniature.id)}
    for node in workflow.values():
        if "model_id" in node["inputs"]:
            node["inputs"]["model_id"] = random_ids.get(node["inputs"]["model_id"], node["inputs"]["model_id"])


def saved_video(server: Server, prefix: str) -> tuple[int, int, int, float]:
    """Frames, width, height, fps of the one video with this prefix."""
    import av

    (path,) = (server.base / "output").glob(f"{prefix}*.mp4")
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        return sum(1 for _ in container.decode(stream)), stream.width, stream.height, float(stream.average_rate)
