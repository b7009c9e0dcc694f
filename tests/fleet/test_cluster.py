"""Which of a cluster's workers get a job, and which are gone: without Ray, on machines that a script takes away."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.fleet import cluster, slices
from comfyui_tpu.fleet.cluster import RayWorkers
from comfyui_tpu.fleet.messages import Lost, Ready, Request
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.tests.support.fake_ray import FakeRay, RayError, RayTaskError, machine
from comfyui_tpu.tests.support.fleet import WORKFLOW, prompts

REQUEST = Request(job="1", line=1, workflow={}, folders=Folders(), out="", token="")
ONE, PARTS = machine(4), [machine(4, "y", "2x4", "v6e-8") for _ in range(2)]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay([ONE, ONE])
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(slices, "start", fake.start)
    monkeypatch.setattr(cluster, "_LOOK_S", -1.0)
    monkeypatch.setattr(cluster, "_AGAIN_S", -1.0)
    return fake


def test_a_worker_that_is_gone_while_it_waits_is_not_taken_for_one_that_is_there(ray: FakeRay):
    """Else it is given a job, which then waits until Ray notices: a minute, if the machine says nothing any more."""
    workers = RayWorkers("fake")
    assert workers.events(0) == [Ready(worker="slice-0"), Ready(worker="slice-1")]
    lost = ray.handles["slice-0"]
    lost.lose()
    assert workers.events(0) == [Lost(worker="slice-0", reason="The node died")]
    assert workers.events(0) == workers.events(0) == []  # asked again, and not there
    lost.is_alive = True
    assert workers.events(0) == [Ready(worker="slice-0")]


def test_a_worker_that_is_gone_with_a_job_says_so_once(ray: FakeRay):
    workers = RayWorkers("fake")
    workers.events(0)
    workers.submit("slice-1", REQUEST)
    assert workers.events(0) == []
    ray.handles["slice-1"].lose()
    assert workers.events(0) == [Lost(worker="slice-1", reason="The node died")]
    assert workers.events(0) == []


def test_a_cluster_that_does_not_answer_once_is_asked_again(ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    workers = RayWorkers("fake")
    with monkeypatch.context() as context:
        context.setattr(ray, "nodes", lambda: fails(RayError("RPC error: CANCELLED")))
        assert workers.events(0) == [Ready(worker="slice-0"), Ready(worker="slice-1")]
    ray.machines = [ONE, ONE, ONE]
    assert [*workers.events(0), *workers.events(0)] == [Ready(worker="slice-2")]


def fails(error: Exception) -> None:
    raise error


def test_a_cluster_that_cannot_be_reached_is_said_in_a_sentence_at_once(ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    """Ray would try for minutes, and raise what is no error of Python's own kinds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, port = server.getsockname()
        RayWorkers(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:none"):
        with pytest.raises(RuntimeError, match=f"no Ray cluster answers at {address} .*On a machine of the cluster"):
            RayWorkers(address)
    monkeypatch.setattr(ray, "nodes", lambda: fails(RayError("RPC error: CANCELLED")))
    with pytest.raises(RuntimeError, match="no Ray cluster answers at fake .RPC error: CANCELLED.*`ray status`"):
        RayWorkers("fake")


def test_a_worker_whose_job_cannot_even_be_read_stays_reachable(ray: FakeRay):
    """Each call that has no answer takes one of the actor's threads."""
    workers = RayWorkers("fake")
    workers.events(0)
    handle = ray.handles["slice-0"]
    for _ in range(2 * cluster.Actor.CONCURRENCY):
        workers.submit("slice-0", REQUEST)
        handle.open("run")[0].fails(RayTaskError("no module named so"))
        assert workers.events(0) == [Lost(worker="slice-0", reason="no module named so")]
        assert workers.events(0) == [Ready(worker="slice-0")]
    assert len(handle.open("stay")) == 1


def test_a_batch_goes_on_when_a_slice_of_several_hosts_that_has_nothing_to_do_loses_one(ray: FakeRay, tmp_path: Path):
    ray.machines = [ONE, *PARTS]

    def script() -> Iterator[None]:
        yield
        one, several = ray.handles["slice-0"], ray.handles["slice-1"]
        while not (one.open("run") and several.open("run")):
            yield
        several.finish()
        yield
        ray.machines = [ONE, PARTS[0]]
        yield
        one.lose()  # its job waits again, and nobody else is there
        yield
        one.is_alive = True
        while not one.open("run"):
            yield
        one.finish()

    ray.play(script())
    lines, out = prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "out"
    command = ["batch", str(WORKFLOW), "--tiny", "--set-from", str(lines), "--out", str(out), "--ray", "fake"]
    assert cli.main(command) == 0
    assert len(list((out / "results").iterdir())) == 2
