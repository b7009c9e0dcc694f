"""Batches: each job once, whatever ends before it does; affinity; what is set aside; the same results as one by one."""

import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.cli import batch
from comfyui_tpu.cli import main as cli
from comfyui_tpu.distributed.fleet import cluster, driver
from comfyui_tpu.distributed.fleet.cluster import Slice
from comfyui_tpu.distributed.fleet.driver import MAX_CONSECUTIVE_FAILURES, BatchNumbers, WorkerState
from comfyui_tpu.distributed.fleet.messages import JOB_FAULT, JobFailed, JobRequest, WorkerLost, WorkerStatus
from comfyui_tpu.distributed.fleet.queue import MAX_CANDIDATES, Job, JobKey, Queue
from comfyui_tpu.distributed.fleet.store import BatchStore
from comfyui_tpu.tests.support.fake_ray import machine
from comfyui_tpu.tests.support.fleet import PACK, SMALLEST, WORKFLOW, Inline, keep, prompts
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from rich.console import Console

ROOMS = ("attention", "cli", "distributed", "nodes", "sharding", "tpu_runtime")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`comfyui-tpu batch` of `count` jobs with other workers in place of a child process; its exit code."""

    def call(workers: Inline, count: int = 4, *options: str, **sets: Any) -> int:
        monkeypatch.setattr(driver, "FIRST_BACKOFF_S", 0.001)
        monkeypatch.setattr(batch, "_workers", lambda *_: workers)
        lines = prompts(tmp_path / "prompts.jsonl", count, **sets)
        return cli.main(["batch", str(WORKFLOW), "--tiny", "--set-from", str(lines), *options, "--out", out(tmp_path)])

    return call


def out(folder: Path) -> str:
    return str(folder / "out")


def journal(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "journal.jsonl").read_text().splitlines()]


def results(folder: Path) -> list[str]:
    return sorted(path.read_text() for path in (folder / "out" / "results").rglob("prompt.txt"))


def test_batch_runs_each_job_once_and_second_call_only_new_jobs(run, tmp_path: Path):
    first, second = Inline(["a", "b"]), Inline(["a"])
    assert run(first, 4) == 0 and first.runs == {1: 1, 2: 1, 3: 1, 4: 1}
    assert run(second, 6) == 0 and second.runs == {5: 1, 6: 1}
    assert results(tmp_path) == [f"number {index}" for index in range(6)]
    assert sorted(line["line"] for line in journal(tmp_path)) == [1, 2, 3, 4, 5, 6]
    named = {path.name: path.read_text() for path in (tmp_path / "out" / "named").iterdir()}
    assert named == {f"{line:04} number {line - 1}.txt": f"number {line - 1}" for line in range(1, 7)}


@pytest.mark.parametrize(
    ("text", "files", "names"),
    [
        ({"1.prompt": "../../a/b: \n 红 'x'", "1.negative": "no"}, ["r/j/a.png"], ["0007 a b 红 x.png"]),
        ({"2.seed": 1}, ["r/j/a.png", "r/j/b.png"], ["0007.png", "0007 2.png"]),
        ({"1.prompt": "word " * 100}, ["r/j/a.mp4"], [f"0007 {('word ' * 12).strip()}.mp4"]),
        ({"1.prompt": "x"}, [], []),
    ],
)
def test_batch_store_link_names_results_by_line_and_prompt(
    tmp_path: Path, text: dict, files: list[str], names: list[str]
):
    store = BatchStore(str(tmp_path))
    for _ in range(2):
        store.link(7, json.dumps(text), files)
    assert {link.name: str(link.readlink()) for link in (tmp_path / "named").glob("*")} == {
        name: f"../{file}" for name, file in zip(names, files, strict=True)
    }


def test_batch_sets_job_aside_after_three_failures_and_continues(run, tmp_path: Path, capsys):
    def body(worker: str, request: JobRequest) -> dict[str, Any] | JobFailed:
        return keep(worker, request) if request.line != 2 else JobFailed(error="no such")

    workers = Inline(["a", "b"], body)
    assert run(workers, 5) == 1 and workers.runs == {1: 1, 2: 3, 3: 1, 4: 1, 5: 1}
    (aside,) = (tmp_path / "out" / "failed").iterdir()
    said = json.loads(aside.read_text())
    assert said["error"] == "no such" and said["set"]["1.prompt"] == "number 1" and len(said["failures"]) == 3
    assert not list((tmp_path / "out" / "tries").iterdir())
    # It stays aside until it is asked for; then it is done, and the journal says both.
    again = Inline(["a"])
    assert run(again, 5) == 1 and not again.runs
    assert run(again, 5, "--retry-failed") == 0 and again.runs == {2: 1}
    assert [line["state"] for line in journal(tmp_path) if line["line"] == 2] == ["failed", "done"]


def test_batch_lost_worker_does_not_count_as_job_failure(run, tmp_path: Path):
    times: Counter[int] = Counter()

    def body(worker: str, request: JobRequest) -> dict[str, Any]:
        times[request.line] += 1
        # The second time its results are there already.
        if request.line == 1 and times[1] <= 5:
            raise WorkerLost("preempted")
        if request.line == 2 and times[2] == 1:
            keep(worker, request)
            raise WorkerLost("preempted")
        return keep(worker, request)

    workers = Inline(["a", "b"], body)
    assert run(workers, 3) == 0
    assert workers.runs == {1: 6, 2: 1, 3: 1} and sorted(line["line"] for line in journal(tmp_path)) == [1, 2, 3]


def goes_away(worker: str, request: JobRequest) -> dict[str, Any]:
    raise WorkerLost("killed by SIGKILL")


def test_batch_sets_job_aside_after_twelve_lost_workers(run, tmp_path: Path):
    workers = Inline(["a"], goes_away)
    assert run(workers, 1) == 1 and workers.runs == {1: 12}
    assert "its worker was lost 12 times" in journal(tmp_path)[0]["error"]


def test_batch_counts_failures_across_calls(run, tmp_path: Path):
    def interrupted(worker: str, request: JobRequest) -> JobFailed:
        if workers.runs[1] == 2:
            workers.ctrl_c()
        return JobFailed(error="bad", fault=JOB_FAULT)

    workers = Inline(["a"], interrupted)
    assert run(workers, 1) == 130 and workers.runs == {1: 2}
    last = Inline(["a"], lambda worker, request: JobFailed(error="bad", fault=JOB_FAULT))
    assert run(last, 1) == 1 and last.runs == {1: 1}


def test_batch_counts_lost_workers_across_calls(run, tmp_path: Path):
    def interrupted(worker: str, request: JobRequest) -> dict[str, Any]:
        if workers.runs[1] == 5:
            workers.ctrl_c()
            return JobFailed(error="cancelled", cancelled=True)
        raise WorkerLost("preempted")

    workers = Inline(["a"], interrupted)
    assert run(workers, 1) == 130
    assert run(again := Inline(["a"], goes_away), 1) == 1 and again.runs == {1: 8}


def test_batch_stops_at_max_consecutive_failures_and_next_call_resumes(run, capsys):
    workers = Inline(["a"], lambda worker, request: JobFailed(error="the chips are taken"))
    assert run(workers, 30) == 2
    assert (
        f"{MAX_CONSECUTIVE_FAILURES} jobs in a row" in (said := capsys.readouterr().err)
        and "the chips are taken" in said
    )
    assert workers.restarted and workers.runs.total() == MAX_CONSECUTIVE_FAILURES
    assert run(again := Inline(["a"]), 30) == 0 and len(again.runs) == 30


def test_batch_ctrl_c_exits_130_and_next_call_resumes(run, tmp_path: Path, capsys):
    def body(worker: str, request: JobRequest) -> dict[str, Any]:
        if request.line == 2:
            workers.ctrl_c()
        return keep(worker, request)

    workers = Inline(["a"], body)
    assert run(workers, 5) == 130
    assert run(rest := Inline(["a"]), 5) == 0 and rest.runs == {3: 1, 4: 1, 5: 1}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"2.seed": }', "line 1: it is not JSON"),
        ("[1]", "line 1: it is a JSON list; it must be an object"),
        ('{"9.seed": 1}', "line 1: 9.seed: no node called '9'"),
        ('{"2.seeds": 1}', "line 1: 2.seeds: 2 has no input seeds"),
        ('{"2.height": 81}', "line 1: Wan21TPUSampler (node 2): Wan 2.1 T2V 14B: height is 81; it must be a multiple"),
        ('{"2.latents": 1}', "line 1: 2.latents must be linked"),
        ('{"6.model_id": "nowhere"}', "line 1: Wan 2.1 T2V 14B: model_id is nowhere; there is no such folder"),
        ("", "has no jobs"),
    ],
)
def test_batch_invalid_line_is_named_before_any_run(tmp_path: Path, line: str, problem: str, capsys):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(line + "\n")
    assert cli.main(["batch", str(WORKFLOW), "--tiny", "--set-from", str(lines), "--out", out(tmp_path)]) == 2
    assert problem in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_batch_line_ends_only_at_newline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not at other signs that end lines elsewhere; and a file may begin with a mark of its encoding."""
    workers, said = Inline(["a"]), "one\u2028two\u2029three\x85four"
    monkeypatch.setattr(batch, "_workers", lambda *_: workers)
    lines = tmp_path / "prompts.jsonl"
    prompts = [{"1.prompt": text, **SMALLEST} for text in ("first", said, "last")]
    written = "\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line in prompts)
    lines.write_bytes(written.encode())
    assert cli.main(["batch", str(WORKFLOW), "--tiny", "--set-from", str(lines), "--out", out(tmp_path)]) == 0
    found = [path.read_bytes().decode() for path in (tmp_path / "out" / "results").rglob("prompt.txt")]
    assert sorted(found) == sorted(["first", said, "last"])


def test_batch_set_from_file_in_latin_1_is_refused(tmp_path: Path, capsys):
    lines = tmp_path / "prompts.jsonl"
    lines.write_bytes(json.dumps({"1.prompt": "caf\xe9"}, ensure_ascii=False).encode("latin-1"))
    assert cli.main(["batch", str(WORKFLOW), "--tiny", "--set-from", str(lines), "--out", out(tmp_path)]) == 2
    assert "prompts.jsonl cannot be read as UTF-8 text" in capsys.readouterr().err


def test_queue_keeps_workers_on_one_model_and_size():
    mixed = [Job(id=f"{n}", line=n, text="", group=JobKey("m", f"size {n % 2}")) for n in range(20)]
    queue, held = Queue(mixed), {"a": [], "b": []}
    while queue:
        for worker, sizes in held.items():
            if job := queue.take(worker):
                sizes.append(job.group.size)
    changes = [sum(one != two for one, two in zip(sizes, sizes[1:], strict=False)) for sizes in held.values()]
    assert changes == [0, 0] and set(held["a"]) != set(held["b"])


def test_queue_take_gives_idle_worker_other_model_and_skips_avoided_jobs():
    jobs = [Job(id=f"{n}", line=n, text="", group=JobKey("ab"[n == 0], "s")) for n in range(MAX_CANDIDATES + 5)]
    queue = Queue(jobs)
    assert queue.take("one").group.model == "a" and queue.take("two").group.model == "a"
    jobs[3].avoid = "one"
    assert queue.take("one").id == "4"
    left = []
    while job := queue.take("one"):
        left.append(job.id)
    assert len(left) == MAX_CANDIDATES + 2 and {"0", "3"} <= set(left) and not queue


def test_batch_store_in_fsspec_memory_resumes_batch(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In fsspec's memory, which as a bucket cannot be added to."""
    monkeypatch.setattr(sys.modules[__name__], "out", lambda folder: f"memory://batch-{folder.name}")
    assert run(Inline(["a"]), 3) == 0 and run(second := Inline(["a"]), 5) == 0 and second.runs == {4: 1, 5: 1}
    store = BatchStore(out(tmp_path))
    assert sorted(json.loads(line)["line"] for line in (store.read("journal.jsonl") or b"").splitlines()) == [
        1, 2, 3, 4, 5,
    ]  # fmt: skip


def test_fleet_extra_packages_are_imported_only_inside_functions():
    """Inside functions of the fleet; and the core's requirements know nothing of them."""
    for path in (path for folder in ROOMS for path in (PACK / folder).rglob("*.py")):
        for node in ast.walk(tree := ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if {name.partition(".")[0] for name in names} & {"ray", "fsspec"}:
                assert path.parent.name == "fleet" and node not in tree.body, path
    core = (PACK / "requirements.txt").read_text()
    assert not re.search(r"^(ray|fsspec)\b", core, re.MULTILINE)


def test_batch_without_fleet_extra_names_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for name in ("ray", "fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    lines = prompts(tmp_path / "prompts.jsonl", 1)
    for options in (["--out", out(tmp_path), "--ray", "auto"], ["--out", "gs://bucket/batch"]):
        assert cli.main(["batch", str(WORKFLOW), "--tiny", "--set-from", str(lines), *options]) == 2
        assert "pip install 'comfyui-tpu[fleet]'" in capsys.readouterr().err


# A driver with a child that pretends, as a process of its own.
DRIVER = """
import sys
from comfyui_tpu.cli import batch, main
from comfyui_tpu.distributed.fleet.local import LocalWorker
from comfyui_tpu.tests.support.fake_ray import machine
from comfyui_tpu.tests.support.fleet import Stub
if __name__ == "__main__":
    for name in ("ray", "fsspec"):
        sys.modules[name] = None
    batch._workers = lambda options, store: LocalWorker(store.root / "logs", Stub)
    code = main.main(sys.argv[1:])
    assert not {"torch", "jax", "torchax"} & set(sys.modules), "the driver is to stay small"
    sys.exit(code)
"""


def test_batch_survives_killed_worker_and_driver(tmp_path: Path):
    """kill -9 of a worker, then of the driver; the third start finds what is left. Without Ray, fsspec and PyTorch."""
    program, lines, begun = tmp_path / "driver.py", prompts(tmp_path / "prompts.jsonl", 40), tmp_path / "out/begun.txt"
    program.write_text(DRIVER)
    command = [sys.executable, str(program), "batch", str(WORKFLOW), "--tiny", "--set-from", str(lines)]
    command += ["--out", out(tmp_path)]

    def start() -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def runs() -> list[list[str]]:
        return [line.split() for line in begun.read_text().splitlines()] if begun.exists() else []

    driver = start()
    until(lambda: len(runs()) >= 5)
    os.kill(worker := int(runs()[-1][1]), signal.SIGKILL)
    until(lambda: int(runs()[-1][1]) != worker and len(runs()) > 10)
    driver.kill()
    assert "killed by SIGKILL" in driver.communicate()[0]
    child = int(runs()[-1][1])
    until(lambda: not Path(f"/proc/{child}").exists(), "the worker outlived its driver")
    last = start()
    said, _ = last.communicate(timeout=PATIENCE_S)
    assert last.returncode == 0 and "40 of 40 jobs are done" in said, said
    assert results(tmp_path) == sorted(f"number {index}" for index in range(40))
    assert sorted(line["line"] for line in journal(tmp_path)) == list(range(1, 41))
    # Only what ran when somebody was killed has run twice.
    assert len(runs()) <= 42 and PACK.is_dir()


def test_batch_render_shows_state_of_each_worker():
    job = Job(id="1", line=7, text="", group=JobKey("m", "s"))
    busy = WorkerState(
        job=job, since=time.monotonic(), status=WorkerStatus(node="Sampler", done=3, total=50, unit="step")
    )
    workers = {"a": busy, "b": WorkerState(), "c": WorkerState(is_here=False)}
    numbers = BatchNumbers(total=20, done=9, failed=1, before=0, waiting=9, per_hour=120.0, workers=workers)
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(batch.render(numbers))
    said = console.file.getvalue()
    assert "9 done, 1 running, 9 waiting, 1 set aside, 120 an hour, 5 min to go" in said
    assert re.search(r"a +7 +0 s +Sampler, step 3/50", said) and re.search(r"b +waits", said)
    assert re.search(r"c +is started again", said)


def test_find_slices_counts_complete_multi_host_slice_once():
    one = machine(8, "x", "2x4", "v6e-8")
    four = [machine(4, "y", "4x4", "v6e-16") for _ in range(4)]
    others = [machine(0), machine(4), machine(4, alive=False), *(machine(4, "z", "4x4", "v6e-16") for _ in range(3))]
    whole = Slice(chips=4, hosts=4, name="y", topology="4x4", generation="v6e")
    assert cluster.find_slices([one, *four, *others]) == [Slice(chips=8), Slice(chips=4), whole]
