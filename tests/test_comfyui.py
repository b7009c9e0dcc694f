"""The pack in a real ComfyUI server, with the built-in tiny model on simulated chips."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import av
import pytest
from comfyui_tpu.cli import make_tiny
from comfyui_tpu.nodes import DECLARATIONS

PACK = Path(__file__).parents[1]
COMFYUI = Path(os.environ.get("COMFYUI_PATH") or "~/ComfyUI").expanduser()
START_TIMEOUT_S = 180
RUN_TIMEOUT_S = 600

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (COMFYUI / "main.py").is_file(), reason=f"no ComfyUI in {COMFYUI}; set COMFYUI_PATH"),
]

# ComfyUI imports these at its start, our nodes never do; the real ones would bring gigabytes.
STUBS = """
    import importlib.abc, importlib.machinery, sys, types

    def anything(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {})

    class Meta(type):
        __getattr__ = anything

    class Anything(metaclass=Meta):
        __getattr__ = anything
        def __init__(self, *args, **kwargs): pass
        def __call__(self, *args, **kwargs): return self

    class Stub(types.ModuleType):
        __path__ = []
        __getattr__ = anything

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path, target=None):
            if name.partition(".")[0] in ("torchvision", "torchaudio"):
                return importlib.machinery.ModuleSpec(name, self, is_package=True)
        def create_module(self, spec): return Stub(spec.name)
        def exec_module(self, module): module.__version__ = "0"

    sys.meta_path.append(Finder())
"""

# A neighbour pack: says what our import did to the process, and what torch is like after our nodes ran.
PROBE = """
    import json, sys
    import torch
    from aiohttp import web
    from server import PromptServer

    @PromptServer.instance.routes.get("/probe")
    async def probe(request):
        bridge = sys.modules.get("jax._src.xla_bridge")
        return web.json_response({"devices": sorted(getattr(bridge, "_backends", {}))})

    class TorchProbe:
        CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "test", "run", (), True

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"after": ("IMAGE",)}}

        def run(self, after):
            product = torch.nn.Linear(3, 5)(torch.ones(2, 3))
            facts = [type(product), product.dtype, product.device, torch.get_default_dtype(), type(after), after.dtype]
            return {"ui": {"facts": [str(fact) for fact in facts]}}

    NODE_CLASS_MAPPINGS = {"TorchProbe": TorchProbe}
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    base: Path
    log: Path

    def get(self, path: str) -> dict:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def queue(self, workflow: dict) -> dict:
        """The server's answer to a prompt, also when it refuses it."""
        body = json.dumps({"prompt": workflow}).encode()
        request = urllib.request.Request(self.url + "/prompt", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            return json.load(refusal)

    def run(self, workflow: dict) -> dict:
        """The history entry of a prompt that ran to its end."""
        answer = self.queue(workflow)
        assert not answer.get("node_errors") and "prompt_id" in answer, answer
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while time.monotonic() < deadline:
            entry = self.get(f"/history/{answer['prompt_id']}").get(answer["prompt_id"])
            if entry:
                assert entry["status"]["status_str"] == "success", f"{entry['status']}\n{self.log_tail()}"
                return entry
            time.sleep(0.3)
        raise AssertionError(f"the prompt did not end within {RUN_TIMEOUT_S} s\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("comfyui")
    _write(base / "stubs" / "sitecustomize.py", STUBS)
    _write(base / "custom_nodes" / "probe" / "__init__.py", PROBE)
    (base / "custom_nodes" / "ComfyUI-TPU").symlink_to(PACK, target_is_directory=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = Server(url=f"http://127.0.0.1:{port}", base=base, log=base / "server.log")
    options = f"--cpu --disable-api-nodes --port {port} --base-directory".split()
    command = [sys.executable, "main.py", *options, str(base)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(base / "stubs"),
        "COMFYUI_TPU_CACHE": str(base / "cache"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "HF_HUB_OFFLINE": "1",
    }
    with started.log.open("w") as log:
        process = subprocess.Popen(command, cwd=COMFYUI, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait(started, process)
        yield started
    finally:
        process.terminate()
        process.wait(timeout=60)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(dedent(text))


def _wait(server: Server, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            server.get("/system_stats")
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"ComfyUI did not start\n{server.log_tail()}")


def _workflow(prefix: str, **sampler: int) -> dict:
    workflow = json.loads((PACK / "examples" / "api" / "wan21_t2v_720p.json").read_text())
    make_tiny(workflow)
    workflow["2"]["inputs"] |= {"num_frames": 5, "num_inference_steps": 2, **sampler}
    workflow["5"]["inputs"]["filename_prefix"] = prefix
    return workflow


def _video(server: Server, prefix: str) -> tuple[int, int, int, float]:
    """Frames, width, height, fps of the one video with this prefix."""
    (path,) = (server.base / "output").glob(f"{prefix}_*.mp4")
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        return sum(1 for _ in container.decode(stream)), stream.width, stream.height, float(stream.average_rate)


def test_the_pack_imports_in_under_a_second_and_touches_no_device(server: Server):
    times = dict(re.findall(r"([\d.]+) seconds(.*ComfyUI-TPU)$", server.log.read_text(), re.MULTILINE))
    assert len(times) == 1, server.log_tail()
    [(seconds, line)] = times.items()
    assert "FAILED" not in line and float(seconds) < 1, f"imported in {seconds} s: {line}"
    assert server.get("/probe")["devices"] == []


def test_every_node_is_offered_with_a_tooltip_on_every_input(server: Server):
    offered = server.get("/object_info")
    for declaration in DECLARATIONS.values():
        info = offered[declaration.id]
        inputs = {**info["input"]["required"], **info["input"].get("optional", {})}
        assert list(inputs) == sorted(inputs, key=lambda name: _position(declaration, name))
        assert all(options["tooltip"] for _, options in inputs.values()), declaration.id
        assert info["category"] == declaration.category
        assert info["output"] == [output.type for output in declaration.outputs]


def _position(declaration, name: str) -> tuple[bool, int]:
    """ComfyUI lists required inputs first."""
    names = [declared.name for declared in declaration.inputs]
    return declaration.input(name).optional, names.index(name)


def test_the_api_workflow_gives_the_video_and_leaves_torch_as_it_was(server: Server):
    workflow = _workflow("stages")
    workflow["6"] = {"class_type": "TorchProbe", "inputs": {"after": ["3", 0]}}
    entry = server.run(workflow)
    assert _video(server, "stages") == (5, 112, 80, 16.0)
    tensor = "<class 'torch.Tensor'>"
    facts = [tensor, "torch.float32", "cpu", "torch.float32", tensor, "torch.float32"]
    assert entry["outputs"]["6"]["facts"] == facts


def test_the_pipeline_node_gives_the_same_video(server: Server):
    inputs = {
        "height": 80,
        "width": 112,
        "num_frames": 5,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "seed": 2025,
    }
    spec = DECLARATIONS["Wan21TPUPipeline"]
    texts = {name: spec.input(name).default for name in ("prompt", "negative_prompt")}
    workflow = {
        "1": {"class_type": "TPUModelLoader", "inputs": {"model_id": "tiny/wan21", "family": "Wan21"}},
        "2": {"class_type": "Wan21TPUPipeline", "inputs": {**inputs, **texts, "model": ["1", 0]}},
        "3": {
            "class_type": "SaveVideo",
            "inputs": {"video": ["2", 2], "filename_prefix": "pipeline", "format": "auto", "codec": "auto"},
        },
    }
    server.run(workflow)
    assert _video(server, "pipeline") == (5, 112, 80, 16.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"height": 721}, "Wan 2.1 T2V 14B: height is 721; it must be a multiple of 16 between"),
        ({"num_frames": 80}, "Wan 2.1 T2V 14B: num_frames is 80; it must be 4k + 1 between"),
        ({"model_id": ""}, "Wan 2.1 T2V 14B: model_id is empty."),
        ({"num_inference_steps": -1}, "Value -1 smaller than min of 1"),
    ],
)
def test_a_bad_input_is_rejected_when_queued(server: Server, change: dict, sentence: str):
    answer = server.queue(_workflow("never", **change))
    errors = answer["node_errors"]["2"]["errors"]
    assert any(sentence in f"{error['message']} {error['details']}" for error in errors), errors
    assert not list((server.base / "output").glob("never*"))
