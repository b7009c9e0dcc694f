"""Who asks a machine for a stage: served in the order of asking, noticed when they leave, and bounded; and of several
machines a sick one is asked last.
"""

import hashlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.distributed.fleet import serve
from comfyui_tpu.distributed.fleet.serve import Server, StageService
from comfyui_tpu.distributed.remote import client
from comfyui_tpu.distributed.remote.client import Client
from comfyui_tpu.distributed.rpc import auth, connection
from comfyui_tpu.distributed.rpc.messages import Invoke, ServerLoad, StageFailed, StageResult, StatusText
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.headless.runner import TerminalContext, run_workflow
from comfyui_tpu.tests.support.comfyui_server import tiny_workflow
from comfyui_tpu.tests.support.host import Cancelled, Host
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime import api, versions
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora, ModelRef


class Pretended(StageService):
    """Stages that end when a test says so; `fails` is what they raise."""

    def __init__(self, fails: Exception | None = None) -> None:
        super().__init__()
        self.begun: list[Any] = []
        self.fails, self.continue_on_failure = fails, threading.Event()

    def run(self, verb: str, given: Any, asker: Any) -> Any:
        self.begun.append(given.get("number", verb))
        while not self.continue_on_failure.wait(0.01):
            asker.check_cancelled()
        if self.fails:
            raise self.fails
        return verb


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(auth, "check_listed", lambda address: None)
    monkeypatch.setattr(client, "BACKOFFS", client._Backoffs())
    started: list[Server] = []

    def begin(stages: StageService) -> Server:
        started.append(Server("127.0.0.1", 0, stages).__enter__())
        return started[-1]

    yield begin
    for server in started:
        server.__exit__()


def connect(server: Server) -> connection.Connection:
    found = connection.connect(auth.Address(host="127.0.0.1", port=server.port), {"source": versions.source_digest()})
    found.receive((ServerLoad,))
    return found


def choose(*servers: Server) -> str:
    addresses = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return Client(addresses).choose("Wan21", "tiny/wan21", "auto", Host())


def test_server_runs_requests_in_order_and_drops_closed_clients(start: Callable[..., Server]):
    """Asked 0 to 9, they ran 0 4 7 5 1 ..."""
    stages = Pretended()
    server = start(stages)
    links = []
    for number in range(10):
        links.append(connect(server))
        links[-1].send(Invoke("x", {"number": number}))
        until(lambda number=number: server.asking == number + 1)
    assert stages.begun == [0]
    links[5].close()
    links[0].close()  # whose stage runs: it ends
    until(lambda: server.asking == 8)
    stages.continue_on_failure.set()
    for number in (1, 2, 3, 4, 6, 7, 8, 9):
        while isinstance(said := links[number].receive((StatusText, StageResult, StageFailed)), StatusText):
            pass
        assert said == StageResult("x")
        links[number].close()
    assert stages.begun == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    until(lambda: not server.clients)


def test_server_removes_request_of_client_lost_while_waiting(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
):
    """It would count as a request for ever, and other machines' clients would be sent elsewhere."""

    def is_gone(text: str) -> StatusText:
        raise ConnectionResetError(text)

    stages = Pretended()
    server = start(stages)
    first = connect(server)
    first.send(Invoke("x", {"number": 0}))
    until(lambda: stages.begun == [0])
    monkeypatch.setattr(serve.messages, "StatusText", is_gone)
    second = connect(server)
    second.send(Invoke("x", {"number": 1}))
    until(lambda: server.clients == 1)
    assert server.asking == 1
    stages.continue_on_failure.set()
    assert first.receive((StageResult,)) == StageResult("x")
    first.close()
    second.close()
    until(lambda: not server.asking)
    assert stages.begun == [0]


def test_server_refuses_too_many_clients_and_other_versions(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serve, "MAX_CLIENTS", 2)
    server = start(Pretended())
    held = [connect(server), connect(server)]
    with pytest.raises(connection.HandshakeRejected, match="it has 2 clients already"):
        connect(server)
    held[0].close()
    until(lambda: server.clients == 1)
    with pytest.raises(connection.HandshakeRejected, match="another version of the pack. Update"):
        connection.connect(auth.Address(host="127.0.0.1", port=server.port), {"source": "older"})


def test_health_endpoint_is_public_and_metrics_need_token(start: Callable[..., Server]):
    server = start(Pretended())
    at = f"http://127.0.0.1:{server.port}"
    assert urlopen(f"{at}/health").read() == b"ok\n"
    numbers = urlopen(Request(f"{at}/metrics", headers={"Authorization": f"Bearer {auth.read_token()}"})).read()
    assert b"comfyui_tpu_serve_requests 0\n" in numbers
    with pytest.raises(OSError, match="401"):
        urlopen(f"{at}/metrics")


@pytest.mark.parametrize("error", [RuntimeError("a chip is lost"), OSError("no such mount")])
def test_client_asks_next_machine_after_error_and_rests_failing_one(start: Callable[..., Server], error: Exception):
    """It got every prompt, as it had least to do: 0 of 10 were done."""
    sick, well = Pretended(error), Pretended()
    sick.continue_on_failure.set()
    well.continue_on_failure.set()
    machines = start(sick), start(well)
    assert [choose(*machines) for _ in range(10)] == ["choose"] * 10
    assert len(sick.begun) == 1
    with raises_message(client.RemoteError, "remote.from", text=re.compile(str(error))):
        choose(machines[0])  # a lone one is asked although it rests


def test_client_invalid_request_is_not_sent_to_next_machine(start: Callable[..., Server]):
    wrong, other = Pretended(ValueError("no such model")), Pretended()
    wrong.continue_on_failure.set()
    machines = start(wrong), start(other)
    with pytest.raises(ValueError, match="no such model"):
        choose(*machines)
    assert not other.begun


def test_remote_address_not_listed_by_owner_is_refused(tmp_path: Path):
    """`TPURemote` sent the token, prompts and LoRAs to whichever address its widget named."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        graph = tiny_workflow("wan21")
        graph["6"] = {"class_type": "TPURemote", "inputs": {**graph["6"]["inputs"], "address": address}}
        with raises_message(ValueError, "remote.address_not_listed", address=address):
            run_workflow(graph, TerminalContext(Folders(output=tmp_path)))
        model = ModelRef(spec_name="wan2.1-t2v-14b", model_id="tiny/wan21", address=address)
        with raises_message(auth.AuthError, "remote.address_not_listed"):
            api.run_stage("encode", model, Host(), prompt="a cat", negative_prompt="")
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody came
            listening.accept()


@pytest.fixture
def loras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where LoRAs are kept."""
    monkeypatch.setattr(serve, "lora_path", lambda digest: tmp_path / "loras" / f"{digest}.safetensors")
    return tmp_path / "loras"


def send(server: Server, path: Path, host: Host) -> Any:
    model = ModelRef(spec_name="x", model_id="x", loras=(Lora(path=str(path), strength=1.0),))
    return Client(f"127.0.0.1:{server.port}").run("denoise", model, host)


def test_lora_is_sent_once_and_least_recently_used_is_evicted(
    start: Callable[..., Server], loras: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The folder only grew."""
    monkeypatch.setattr(serve, "MAX_LORA_CACHE_BYTES", 2500)
    stages = Pretended()
    stages.continue_on_failure.set()
    server = start(stages)
    digests = []
    for number in range(3):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(bytes([number]) * 1000)
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
        for _ in range(2):
            send(server, path, host := Host())
        assert not any("Sending" in text for text in host.said)
    assert sorted(path.stem for path in loras.iterdir()) == sorted(digests[1:])
    monkeypatch.setattr(serve, "MAX_LORA_BYTES", 999)
    path.write_bytes(b"x" * 1000)
    with pytest.raises(Exception, match=r"it may have 999|was lost"):
        send(server, path, Host())


def test_cancel_during_lora_upload_removes_partial_file(start: Callable[..., Server], loras: Path, tmp_path: Path):
    """It was deaf for 39 s."""
    server, path, host = start(Pretended()), tmp_path / "large.safetensors", Host()
    with path.open("wb") as file:
        file.truncate(2**28)

    def cancel() -> None:
        """In the middle, when the other end has begun to keep it."""
        if any(loras.glob("*")):
            raise Cancelled

    host.check_cancelled = cancel
    with pytest.raises(Cancelled):
        send(server, path, host)
    until(lambda: not server.clients and not list(loras.glob("*")))


@pytest.mark.parametrize("verb", ["denoise", "image", "warmup"])
def test_stage_service_invalid_settings_raise_value_error(verb: str):
    model = ModelRef(spec_name="wan2.1-t2v-14b", model_id="tiny/wan21")
    given = {"model": model, "expected": None, "settings": replace(model.spec.settings(), height=88)}
    with raises_message(
        ValueError,
        "settings.input",
        title="Wan 2.1 T2V 14B",
        name="input.height",
        problem=Expected("settings.breaks_rule", value=88, rule=Expected("settings.multiple", multiple_of=16)),
    ):
        StageService().run(verb, given, Host())


def test_server_refuses_lora_path_instead_of_digest(start: Callable[..., Server]):
    """A LoRA is named by its digest, in the place of its path."""
    asked = connect(start(StageService()))
    model = ModelRef(spec_name="x", model_id="x", loras=(Lora(path="/etc/passwd", strength=1.0),))
    asked.send(Invoke("decode", {"model": model, "expected": None}))
    problem = "the LoRA cannot be kept ('/etc/passwd' is not a SHA-256.)."
    assert asked.receive((StageFailed,)) == StageFailed("ValueError", problem)
    asked.close()


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_serve_invalid_port_is_refused(port: str, capsys: pytest.CaptureFixture):
    assert cli.main(["serve", "--port", port]) == 2
    assert f"--port {port}" in capsys.readouterr().err


def test_serve_prints_ipv6_address_in_brackets(capsys: pytest.CaptureFixture, monkeypatch: Any):
    monkeypatch.setattr(threading.Event, "wait", lambda self, timeout=None: True)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(Server, "__enter__", lambda self: self)
        context.setattr(Server, "__exit__", lambda self, *_: None)
        assert cli.main(["serve", "--host", "::1", "--port", "8190"]) == 0
    assert "Stages are served at [::1]:8190," in capsys.readouterr().out
    assert auth.parse_address("[::1]:8190").host == "::1" and PATIENCE_S
