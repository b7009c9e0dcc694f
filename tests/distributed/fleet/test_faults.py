"""Whose fault an error of a batch is: a broken machine or file system costs no job, and no machine stops the others."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.cli import batch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.distributed.fleet import driver, worker
from comfyui_tpu.distributed.fleet.messages import JOB_FAULT, MACHINE_FAULT, JobFailed, JobRequest, WorkerLost
from comfyui_tpu.distributed.fleet.worker import WorkerActor
from comfyui_tpu.tests.support.fleet import WORKFLOW, Inline, came, keep, prompts
from comfyui_tpu.tests.support.patience import until
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.memory_errors import HostMemoryError
from comfyui_tpu.tpu_runtime.models import spec_for_family


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "FIRST_BACKOFF_S", 0.001)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`comfyui-tpu batch` with other workers; its exit code."""

    def call(workers: Any, count: int, *options: str) -> int:
        monkeypatch.setattr(batch, "_workers", lambda *_: workers)
        lines = prompts(tmp_path / "prompts.jsonl", count)
        return cli.main(["batch", str(WORKFLOW), *options, "--set-from", str(lines), "--out", str(tmp_path / "out")])

    return call


def count_records(folder: Path, kind: str) -> int:
    return len(list((folder / "out" / kind).glob("*")))


def fails(error: Exception) -> None:
    raise error


def machine_failure(request: JobRequest, fault: str = "") -> JobFailed:
    return JobFailed(error="the chips are taken", fault=fault)


@pytest.mark.parametrize("fault", ["", MACHINE_FAULT])
def test_batch_with_one_bad_machine_finishes_all_jobs(
    run: Any, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
):
    """Failures were counted over all machines: the batch stopped with nothing done."""
    monkeypatch.setattr(driver, "FIRST_BACKOFF_S", 0.0)  # so that it fails as often as the others do a job each

    def body(name: str, request: JobRequest) -> dict[str, Any] | JobFailed:
        return machine_failure(request, fault) if name == "bad" else keep(name, request)

    workers = Inline(["bad", "a", "b", "c"], body)
    assert run(workers, 40, "--tiny") == 0
    assert count_records(tmp_path, "done") == 40 and not count_records(tmp_path, "failed")
    assert len(workers.ran["bad"]) > driver.MAX_CONSECUTIVE_FAILURES


def test_driver_backoff_doubles_until_batch_stops(run: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    rests: list[float] = []
    blame_worker = driver.Driver._blame_worker
    monkeypatch.setattr(
        driver.Driver, "_blame_worker", lambda *given: rests.append(rest := blame_worker(*given)) or rest
    )
    assert run(Inline(["a"], lambda name, request: machine_failure(request)), 30, "--tiny") == 2
    assert rests == [0.001 * 2**count for count in range(driver.MAX_CONSECUTIVE_FAILURES)]
    said = capsys.readouterr()
    assert "the chips are taken" in said.err and "run the same command again" in said.err


def test_driver_rest_after_many_failures_is_max_backoff():
    """After 1 024 failures in a row, some 17 hours, the next rest was no float, and the error stopped the batch."""
    assert driver._rest_s(100_000) == driver.MAX_BACKOFF_S


def test_batch_with_moved_model_folder_sets_no_job_aside(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The worker's own classification, of the sentence that a missing folder is. 38 of 40 were set aside in 2 s."""
    folder, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(tiny.ensure_random(spec_for_family("Wan21")), folder)
    real, runs = WorkerActor("a"), []

    def pretend(workflow: Any, host: Any) -> None:
        if not folder.is_dir():
            raise ValueError(f"Wan 2.1 T2V 14B: model_id is {folder}; there is no such folder")
        (host.folders.output / "prompt.txt").write_text(workflow["1"]["inputs"]["prompt"])

    def body(name: str, request: JobRequest) -> dict[str, Any] | JobFailed:
        runs.append(request.line)
        if len(runs) == 3:
            folder.rename(away)
        if len(runs) == 3 + driver.MAX_CONSECUTIVE_FAILURES - 2:  # before all rest
            away.rename(folder)
        return real.run(request)

    monkeypatch.setattr(worker, "run_workflow", pretend)
    model = ("--set", f"6.model_id={folder}")
    assert run(Inline(["a"], body), 40, *model) == 0
    assert (
        count_records(tmp_path, "done") == 40
        and not count_records(tmp_path, "failed")
        and not count_records(tmp_path, "tries")
    )

    def gone(name: str, request: JobRequest) -> dict[str, Any] | JobFailed:
        if folder.is_dir():
            folder.rename(away)
        return real.run(request)

    workers = Inline(["a"], gone)
    assert run(workers, 50, *model) == 2 and not count_records(tmp_path, "failed")  # all rest: it stops, and says why
    away.rename(folder)
    assert run(Inline(["a"], lambda name, request: real.run(request)), 50, *model) == 0
    assert count_records(tmp_path, "done") == 50


def test_worker_actor_fault_classifies_errors_by_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    request = JobRequest(job="1", line=1, workflow={}, folders=None, out=str(tmp_path), token="")  # pyright: ignore
    runner = WorkerActor("a")
    errors = (ValueError(), RuntimeError(), OSError(), MemoryError(), HostMemoryError())
    found = [runner._fault(request, error) for error in errors]
    assert found == [JOB_FAULT, "", MACHINE_FAULT, MACHINE_FAULT, MACHINE_FAULT]


def test_journal_with_damaged_lines_is_rebuilt_from_records(run: Any, tmp_path: Path):
    assert run(Inline(["a"]), 3, "--tiny") == 0
    journal = tmp_path / "out" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + b'{"job": \x00\xff\n' + b"[1]\n" + lines[2] + lines[1][:20])
    (tmp_path / "out" / "tries").mkdir(exist_ok=True)
    (tmp_path / "out" / "tries" / "x.json").write_text("{")
    assert run(Inline(["a"]), 4, "--tiny") == 0
    said = [json.loads(line) for line in journal.read_text().splitlines()]
    assert sorted(record["line"] for record in said) == [1, 2, 3, 4]


def test_scratch_folder_removes_folder_of_killed_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    body = (
        "import time; from comfyui_tpu.distributed.fleet.worker import scratch_folder\n"
        "with scratch_folder(): time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", body], env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = until(lambda: list(tmp_path.glob(f"{worker._PREFIX}*")))
    with worker.scratch_folder():
        assert left.is_dir()  # it is alive
    process.send_signal(signal.SIGKILL)
    process.wait()
    with worker.scratch_folder() as own:
        assert list(tmp_path.iterdir()) == [own]
    assert not list(tmp_path.iterdir())


def test_scratch_folder_is_locked_before_becoming_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker beside took a folder that was just made for one that was left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    locked, found = worker.lock_path, []
    monkeypatch.setattr(
        worker, "lock_path", lambda file: found.extend(tmp_path.glob(f"{worker._PREFIX}*")) or locked(file)
    )
    with worker.scratch_folder() as own:
        assert own.is_dir() and not found
    assert not list(tmp_path.iterdir())


def test_batch_with_worker_that_never_starts_exits_with_error(run: Any, tmp_path: Path, capsys: Any):
    workers, starts = Inline(["a"]), []

    def vain(method: str) -> Future:
        starts.append(1)
        return came(lambda: fails(WorkerLost("the worker on this machine does not start: exit code 3")))

    workers.all[0].call = vain
    assert run(workers, 3, "--tiny") == 2 and len(starts) == driver._VAIN_STARTS and not workers.runs
    assert "does not start: exit code 3" in capsys.readouterr().err and not count_records(tmp_path, "tries")
