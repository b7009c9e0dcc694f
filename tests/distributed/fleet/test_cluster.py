"""Which of a cluster's workers get a job, and which are gone: without Ray, on machines that a script takes away."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.distributed.fleet import cluster, driver
from comfyui_tpu.distributed.fleet.cluster import RayWorker, RayWorkers
from comfyui_tpu.distributed.fleet.messages import JobRequest, WorkerLost
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.tests.support.fake_ray import FakeRay, RayError, RayTaskError, machine
from comfyui_tpu.tests.support.fleet import WORKFLOW, prompts
from comfyui_tpu.tests.support.hosts import free_port
from comfyui_tpu.tests.support.patience import until

REQUEST = JobRequest(job="1", line=1, workflow={}, folders=Folders(), out="", token="")
ONE, PARTS = machine(4), [machine(4, "y", "2x4", "v6e-8") for _ in range(2)]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay([ONE, ONE])
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(cluster, "start_actor", fake.start)
    for module, name in ((cluster, "_SEARCH_S"), (driver, "_TICK_S")):
        monkeypatch.setattr(module, name, 0.005)
    return fake


def answers(worker: RayWorker) -> bool:
    """Whether a worker may be given a job."""
    try:
        worker.call("status").result()
    except RayError as error:
        assert worker.lost(error, is_running=False) is None
        return False
    return True


def run(worker: RayWorker) -> Any:
    try:
        return worker.call("run", REQUEST).result()
    except RayError as error:
        lost = worker.lost(error, is_running=True)
        assert lost is not None
        raise lost from None


def test_ray_worker_lost_while_idle_gets_no_job(ray: FakeRay):
    """Else it is given a job, which then waits until Ray notices: a minute, if the machine says nothing any more."""
    one, other = RayWorkers("fake").found()
    assert answers(one) and answers(other)
    lost = ray.handles["slice-0"]
    lost.lose()
    assert not answers(one) and not answers(one) and answers(other)
    lost.is_alive = True
    assert answers(one)


def test_ray_worker_with_dead_actor_is_started_again(ray: FakeRay):
    worker, _ = RayWorkers("fake").found()
    first = ray.handles["slice-0"]
    lost = worker.lost(RayError("The actor died: no module named so"), is_running=False)
    assert lost is not None
    assert "does not start: The actor died: no module named so Is the pack installed on every machine" in str(lost)
    assert not first.is_alive and ray.handles["slice-0"] is not first and answers(worker)


def test_ray_worker_lost_during_job_raises_worker_lost_and_recovers(ray: FakeRay):
    worker, _ = RayWorkers("fake").found()
    assert answers(worker)
    handle = ray.handles["slice-0"]
    threading.Thread(target=lambda: until(lambda: handle.open("run")) and handle.lose()).start()
    with pytest.raises(WorkerLost, match="The node died"):
        run(worker)
    handle.is_alive = True
    assert answers(worker)


def test_ray_workers_found_keeps_list_after_rpc_error(ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    workers = RayWorkers("fake")
    with monkeypatch.context() as context:
        context.setattr(ray, "nodes", lambda: fails(RayError("RPC error: CANCELLED")))
        until(lambda: time.monotonic() > workers._looked + 0.01)
        assert [one.name for one in workers.found()] == ["slice-0", "slice-1"]
    ray.machines = [ONE, ONE, ONE]
    until(lambda: [one.name for one in workers.found()] == ["slice-0", "slice-1", "slice-2"])


def fails(error: Exception) -> None:
    raise error


def test_ray_workers_unreachable_cluster_raises_runtime_error(ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    """Ray would try for minutes, and raise what is no error of Python's own kinds."""
    with socket.create_server(("127.0.0.1", free_port())) as server:
        _, port = server.getsockname()
        RayWorkers(f"127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "127.0.0.1:none"):
        with pytest.raises(RuntimeError, match=f"no Ray cluster answers at {address} .*On a machine of the cluster"):
            RayWorkers(address)
    monkeypatch.setattr(ray, "nodes", lambda: fails(RayError("RPC error: CANCELLED")))
    with pytest.raises(RuntimeError, match="no Ray cluster answers at fake .RPC error: CANCELLED.*`ray status`"):
        RayWorkers("fake")


def test_ray_worker_task_error_raises_worker_lost_and_recovers(ray: FakeRay):
    worker, _ = RayWorkers("fake").found()
    handle = ray.handles["slice-0"]

    def fail() -> None:
        until(lambda: handle.open("run"))[0].fails(RayTaskError("no module named so"))

    threading.Thread(target=fail).start()
    with pytest.raises(WorkerLost, match="no module named so"):
        run(worker)
    assert answers(worker)


def test_batch_continues_after_idle_multi_host_slice_loses_host(ray: FakeRay, tmp_path: Path):
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
        given = len(one.requests)
        for _ in range(5):
            yield
            assert len(one.requests) == given  # it does not answer
        one.is_alive = True
        while not one.open("run"):
            yield
        one.finish()

    ray.play(script())
    lines, out = prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "out"
    command = ["batch", str(WORKFLOW), "--tiny", "--set-from", str(lines), "--out", str(out), "--ray", "fake"]
    assert cli.main(command) == 0
    assert len(list((out / "results").iterdir())) == 2
