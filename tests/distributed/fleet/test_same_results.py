"""Jobs of a batch, and stages on another machine (TPURemote), give what a run here gives; progress, previews, cancel
and errors come back.
"""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_tpu.cli import batch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.distributed.fleet.serve import Server, StageService
from comfyui_tpu.distributed.fleet.worker import WorkerActor
from comfyui_tpu.distributed.remote import client
from comfyui_tpu.distributed.rpc import auth
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.graphs.graph import list_generations, plan_generations
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, TerminalContext, run_workflow
from comfyui_tpu.tests.support.comfyui_server import tiny_workflow
from comfyui_tpu.tests.support.fleet import Inline, packets, prompts
from comfyui_tpu.tests.support.hosts import free_port
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, PlannedGeneration
from comfyui_tpu.tpu_runtime.progress import Preview
from safetensors.torch import save_file

pytestmark = pytest.mark.slow


class Watching(TerminalContext):
    """Notes what is shown; cancels once `stop_at` steps are done."""

    def __init__(self, folders: Folders, stop_at: int | None = None) -> None:
        super().__init__(folders, stream=io.StringIO())
        self.texts: list[str] = []
        self.steps: list[tuple[int, int, str]] = []
        self.previews: list[Preview] = []
        self._stop_at = stop_at

    def text(self, message: str) -> None:
        self.texts.append(message)

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        self.steps.append((done, total, unit))
        if preview is not None:
            self.previews.append(preview)

    def check_cancelled(self) -> None:
        if self._stop_at is not None and any(unit == "step" and done >= self._stop_at for done, _, unit in self.steps):
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Stages at an address of this machine."""
    with Server("127.0.0.1", 0, StageService()) as server:
        yield server


@pytest.fixture(autouse=True)
def allow_all_remotes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner has listed every address, and none rests because of another test."""
    monkeypatch.setattr(auth, "check_listed", lambda address: None)
    monkeypatch.setattr(client, "BACKOFFS", client._Backoffs())


def address(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


def workflow(server: Server | None = None, *, lora: str = "", **sampler: Any) -> dict[str, Any]:
    """The example on its miniature, here or there."""
    found = tiny_workflow("wan21", **sampler)
    if server is not None:
        found["6"]["class_type"] = "TPURemote"
        found["6"]["inputs"]["address"] = address(server)
    if lora:
        added = {"model": ["6", 0], "lora_name": lora, "strength": 1.0}
        found["7"] = {"class_type": "TPULoraLoader", "inputs": added}
        for node_id in ("1", "2", "3"):
            found[node_id]["inputs"]["model"] = ["7", 0]
    return found


def with_values(graph: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        node_id, _, key = name.partition(".")
        graph[node_id]["inputs"][key] = value
    return graph


def frames(graph: dict[str, Any], host: TerminalContext) -> torch.Tensor:
    ((video,),) = run_workflow(graph, host).values()
    return video.frames


def run_node(node: dict[str, Any], host: TerminalContext, **links: Any) -> tuple:
    declaration = DECLARATIONS[node["class_type"]]
    return declaration.run(host, **declaration.values(node["inputs"] | links))


def test_batch_results_equal_single_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real worker, in this process: the same video, byte for byte."""
    real, out = WorkerActor("a"), tmp_path / "out"
    workers = Inline(["a"], lambda worker, request: real.run(request))
    monkeypatch.setattr(batch, "_workers", lambda *_: workers)
    lines, graph = prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "workflow.json"
    graph.write_text(json.dumps(workflow()))  # whose programs are those of the tests below
    assert cli.main(["batch", str(graph), "--set-from", str(lines), "--out", str(out)]) == 0
    records = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    assert len(records) == 2
    for record in records:
        alone, sets = (
            tmp_path / f"alone-{record['line']}",
            json.loads(lines.read_text().splitlines()[record["line"] - 1]),
        )
        options = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
        assert cli.main(["run", str(graph), *options, "--out", str(alone)]) == 0
        (file,) = record["files"]
        assert packets(out / file) == packets(alone / "wan21.mp4") != []


def test_remote_stages_give_same_frames_as_local_stages(server: Server, tmp_path: Path):
    folders = Folders(output=tmp_path)
    there = Watching(folders)
    # Of no other test: that it is being encoded is said only while it is not known.
    prompt = {"1.prompt": "said by the machine that encodes it"}
    elsewhere, here = (with_values(graph, prompt) for graph in (workflow(server), workflow()))
    assert torch.equal(frames(elsewhere, there), frames(here, TerminalContext(folders, io.StringIO())))
    assert (1, 2, "step") in there.steps and (2, 2, "step") in there.steps
    assert there.previews[0].latent_format == "Wan21" and there.previews[0].sample().shape == (1, 16, 2, 10, 14)
    assert any("prompt" in text for text in there.texts)


def test_remote_address_list_skips_unreachable_and_busy_machines(server: Server, tmp_path: Path):
    folders = Folders(output=tmp_path)
    gone = f"127.0.0.1:{free_port()}"
    with Server("127.0.0.1", 0, busy := StageService()) as other:
        other.asking = 1
        graph = workflow(server)
        graph["6"]["inputs"]["address"] = f"{gone}, {address(other)}, {address(server)}"
        assert frames(graph, Watching(folders)).shape == (5, 80, 112, 3)
        assert not busy.ran and server.stages.ran == "tiny/random-wan21"
    with raises_message(client.RemoteError, "remote.no_machine_usable", errors="remote.nothing_listens"):
        ask(f"{gone},{address(other)}")


@contextlib.contextmanager
def serve_process() -> Iterator[str]:
    """The address of `comfyui-tpu serve` as a process."""
    # What a shell runs in the background ignores Ctrl-C, and so would what this process starts.
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{listens}; import sys; from comfyui_tpu.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program, "serve", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline()
        yield re.search(r"at (127.0.0.1:\d+),", said)[1]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130


def test_serve_command_answers_requests():
    with serve_process() as there:
        assert ask(there) == "wan2.1-t2v-14b"


@pytest.mark.recorded
def test_serve_process_gives_same_frames_as_local_run(tmp_path: Path):
    folders, graph = Folders(output=tmp_path), workflow()
    with serve_process() as there:
        graph["6"] |= {"class_type": "TPURemote"}
        graph["6"]["inputs"] |= {"address": there}
        assert torch.equal(frames(graph, Watching(folders)), frames(workflow(), Watching(folders)))


@pytest.fixture
def style(tmp_path: Path) -> Folders:
    """Folders with one LoRA, style.safetensors."""
    module = "diffusion_model.blocks.0.self_attn.q"
    tensors = {f"{module}.lora_A.weight": torch.ones(2, 144), f"{module}.lora_B.weight": torch.ones(144, 2)}
    save_file(tensors, tmp_path / "style.safetensors")
    return Folders(output=tmp_path, loras=(str(tmp_path),))


def test_remote_lora_is_sent_once(server: Server, style: Folders):
    there, again, here = Watching(style), Watching(style), Watching(style)
    for host, at in ((there, server), (again, server), (here, None)):
        graph = workflow(at, lora="style.safetensors")
        (chosen,) = run_node(graph["6"], host)
        changed, said = run_node(graph["7"], host, model=chosen)
        assert (
            said == "style.safetensors, strength 1: changes 1 weights of Wan 2.1 T2V 14B." and len(changed.loras) == 1
        )
    assert sum("Sending style.safetensors" in text for text in [*there.texts, *again.texts]) == 1


@pytest.mark.recorded
def test_remote_lora_gives_same_frames_as_local_lora(server: Server, style: Folders):
    changed = frames(workflow(server, lora="style.safetensors"), Watching(style))
    assert torch.equal(changed, frames(workflow(lora="style.safetensors"), Watching(style)))
    assert not torch.equal(changed, frames(workflow(server), Watching(style)))


def test_remote_cancel_ends_stage_and_next_prompt_runs(server: Server, tmp_path: Path):
    folders = Folders(output=tmp_path)
    host = Watching(folders, stop_at=1)
    with pytest.raises(KeyboardInterrupt):
        frames(workflow(server, num_inference_steps=50), host)
    assert max(done for done, _, unit in host.steps if unit == "step") < 50
    until(lambda: not server.asking, "the stage goes on though nobody waits")
    assert frames(workflow(server), Watching(folders)).shape == (5, 80, 112, 3)


def test_remote_unknown_model_raises_same_error_as_local(server: Server, tmp_path: Path):
    wrong = workflow(server)
    wrong["6"]["inputs"]["model_id"] = "nowhere"
    with raises_message(ValueError, "checkpoint.model_id_not_found", title="Wan 2.1 T2V 14B", model_id="nowhere"):
        run_workflow(wrong, Watching(Folders(output=tmp_path)))


def encode(asked: client.Client, model: ModelRef) -> None:
    asked.run("encode", model, Watching(Folders()), prompt="a cat", negative_prompt="")


def test_remote_stages_are_announced_on_serving_machine(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[list[PlannedGeneration]] = []
    here = api.announce_local_generations
    monkeypatch.setattr(
        api,
        "announce_local_generations",
        lambda found, progress: said.append(list(found)) or here(found, progress=progress),
    )
    graph = workflow(server, num_inference_steps=3)
    frames(graph, Watching(Folders(output=tmp_path)))
    (there,) = plan_generations(graph, Folders(), HEADLESS_NODES)
    assert there.model.address == address(server) and there.stages == ("denoise", "decode")
    # Here nothing, and then with each stage.
    assert said == [[], *[[replace(there, model=replace(there.model, address=""))]] * 3]
    with raises_message(ValueError, "settings.input", name="input.num_inference_steps"):
        strange = replace(there, settings=replace(there.settings, num_inference_steps=0))
        encode(client.Client(address(server), strange), there.model)
    # Another model of the family than it is taken for here: nothing is prepared for that.
    other = replace(there, model=replace(there.model, spec_name="wan2.1-t2v-1.3b"))
    encode(client.Client(address(server), other), there.model)
    assert said[-1] == []


def test_warmup_node_with_remote_model_compiles_on_serving_machine(server: Server, monkeypatch: pytest.MonkeyPatch):
    asked, run = [], client.Client.run

    def noted(self: client.Client, stage: str, model: ModelRef, progress: Any, **given: Any) -> Any:
        asked.append((stage, model.address, given["settings"]))
        return run(self, stage, model, progress, **given)

    monkeypatch.setattr(client.Client, "run", noted)
    graph = workflow(server)
    ((_, settings),) = list_generations(graph, Folders(), HEADLESS_NODES)
    graph = {key: node for key, node in graph.items() if not HEADLESS_NODES[node["class_type"]].is_output}
    graph["8"] = {"class_type": "TPUWarmup", "inputs": {}}
    for count in (r"\d+ programs?", "0 programs"):
        ((report,),) = run_workflow(graph, Watching(Folders())).values()
        assert re.fullmatch(rf"Wan 2.1 T2V 14B, .*, 5 frames: {count} compiled, the others were cached.", report)
    assert asked == [("warmup", address(server), settings)] * 2


@pytest.mark.parametrize("text", ["", "host:port", "https://host:1", "host:0", "a b", "host:70000"])
def test_parse_address_invalid_text_raises_value_error(text: str):
    with raises_message(ValueError, "remote.address_malformed"):
        auth.parse_address(text)
    assert str(auth.parse_address("http://gpu-1/")) == f"gpu-1:{auth.DEFAULT_PORT}"
    assert str(auth.parse_address("[::1]:99")) == "[::1]:99"


def ask(to: str) -> str:
    return client.Client(to).choose("Wan21", "tiny/wan21", "auto", Watching(Folders()))


def test_remote_with_wrong_token_raises_remote_error(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(auth.TOKEN_VARIABLE, "guess")
    with pytest.raises(client.RemoteError, match="rejected the connection: the token is wrong or missing"):
        ask(address(server))
    monkeypatch.undo()


def test_remote_connection_failures_raise_remote_error():
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        port = listener.getsockname()[1]

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.recv(100)
                    connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        with raises_message(client.RemoteError, "remote.connection_lost", address=f"127.0.0.1:{port}"):
            ask(f"127.0.0.1:{port}")
    with raises_message(
        client.RemoteError, "remote.nothing_listens", address=f"127.0.0.1:{port}", command="comfyui-tpu serve"
    ):
        ask(f"127.0.0.1:{port}")
