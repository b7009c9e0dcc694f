"""`comfyui-tpu selftest --first-run` on machines that refuse, halt, hang and lie: a red row each, and what it teaches.

The machine is a layer in the place of PJRT, in the self-test's own processes.
"""

import argparse
import errno
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from comfyui_tpu.cli import selftest
from comfyui_tpu.diagnostics.selftest import compiled, first_run, groups, overlap, report
from comfyui_tpu.diagnostics.selftest.checks import CheckResult, parse_result
from comfyui_tpu.diagnostics.selftest.first_run import FirstRun
from comfyui_tpu.diagnostics.selftest.groups import CheckGroup
from comfyui_tpu.kernels.dispatch import KernelFallbacks
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.machine import fake_pjrt
from comfyui_tpu.tests.machine.fake_pjrt import Fault, Layer
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import files
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.machine import fallbacks, record
from comfyui_tpu.tpu_runtime.machine.record import MachineRecord
from comfyui_tpu.tpu_runtime.programs.program import step_compiler_options
from jax.sharding import NamedSharding
from rich.console import Console

pytestmark = pytest.mark.slow

OPTION = "xla_tpu_enable_async_all_to_all"
HALT = "INTERNAL: Accelerator device halted prematurely. Core halted unexpectedly: TPU program continuator has halted"
MIB = 2**20

Runs = Callable[..., FirstRun]

MODEL = "wan2.1-t2v-14b"  # whose miniature is through soonest


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs groups by name on the machine of a layer; each check may take `deadline_s`."""
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path / "cache"))

    def run(layer: Layer, *names: str, deadline_s: float | None = None, **how: Any) -> FirstRun:
        for name, value in fake_pjrt.environment(layer, tmp_path / "start").items():
            monkeypatch.setenv(name, value)
        chosen = [one for one in groups.all_groups([MODEL]) if one.name in names]
        if deadline_s is not None:
            chosen = [
                CheckGroup(name=one.name, deadline_s=deadline_s, continue_on_failure=one.continue_on_failure)
                for one in chosen
            ]
        found = FirstRun([MODEL], **how)
        found.run(chosen)
        return found

    return run


def verdicts(run: FirstRun) -> dict[str, str]:
    return {row.stage: row.problem for row in run.rows}


def read_machine_record() -> MachineRecord:
    (found,) = record.read_all().values()
    return found


def test_first_run_refused_option_is_one_failed_row_and_left_out(runs: Runs):
    layer = Layer(
        options={OPTION: "true", "xla_tpu_scoped_vmem_limit_kib": "65536"},
        faults=[Fault(at="compile", option=OPTION, says=f"INVALID_ARGUMENT: No such compile option: '{OPTION}'")],
    )
    found = verdicts(runs(layer, "start", "options", "beside"))
    assert list(found) == ["devices", OPTION, "xla_tpu_scoped_vmem_limit_kib", "transfers beside a kernel"], found
    assert [name for name, problem in found.items() if problem] == [OPTION], found
    assert "rejects xla_tpu_enable_async_all_to_all" in found[OPTION]
    assert read_machine_record().fallbacks.options == (OPTION,)
    (sentence,) = read_machine_record().sentences
    assert sentence.startswith(f"Self-test, options: {OPTION}: The compiler rejects")


def test_first_run_hanging_check_is_killed_and_next_checks_run(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """As it begins, nearly all of its time is over."""
    begin = FirstRun._begin

    def begins(run: FirstRun, family: str, stage: str, *row: Any) -> None:
        begin(run, family, stage, *row)
        if stage == "exchange":
            run._begun -= 19.5

    monkeypatch.setattr(FirstRun, "_begin", begins)
    layer = Layer(faults=[Fault(at="run", holds="all_to_all", does="hang")])
    found = verdicts(runs(layer, "start", "together", deadline_s=20.0))
    assert found == {"devices": "", "exchange": "It did not end within 20 s, and was killed.", "products": ""}


@pytest.mark.parametrize(("does", "how"), [("die", "by SIGABRT"), ("leave", "with exit code 0")])
def test_first_run_dead_process_is_one_failed_row(runs: Runs, does: str, how: str):
    layer = Layer(faults=[Fault(at="run", holds="all_to_all", does=does)])
    found = verdicts(runs(layer, "start", "together"))
    assert found["exchange"].startswith(f"Its process ended {how}") and found["products"] == ""


def test_first_run_process_that_does_not_exit_is_killed(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """As within a driver that does not let the chips go."""
    begin, patience_s = FirstRun._begin, first_run.END_S

    def begins(run: FirstRun, family: str, stage: str, *row: Any) -> None:
        monkeypatch.setattr(first_run, "END_S", 1.0 if stage == "exchange" else patience_s)
        begin(run, family, stage, *row)

    monkeypatch.setattr(FirstRun, "_begin", begins)
    found = verdicts(runs(Layer(faults=[Fault(at="run", holds="all_to_all", does="linger")]), "start", "together"))
    assert found == {"devices": "", "exchange": "Its process did not end within 1 s, and was killed.", "products": ""}


def test_first_run_lost_chips_are_not_awaited_by_every_group(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    lost = Fault(at="run", holds="all_to_all", does="die")
    begin = FirstRun._begin

    def begins(run: FirstRun, *row: Any) -> None:
        if any("SIGABRT" in one.problem for one in run.rows):
            monkeypatch.setenv("JAX_PLATFORMS", "none_of_these")
        begin(run, *row)

    monkeypatch.setattr(FirstRun, "_begin", begins)
    run = runs(Layer(faults=[lost]), "start", "together", "store", "stored", "compiling")
    assert [row.stage for row in run.rows if row.is_good] == ["devices"]
    assert [row.stage for row in run.rows if not row.is_good] == [
        "exchange",
        first_run.START_TITLE,
        first_run.START_TITLE,
    ]


# --- chips that another process holds ---------------------------------------------------------------------------------

QUICK = {
    "machine.device_access:WAIT_S": 2.0, "machine.device_access:FIRST_PAUSE_S": 0.1,
    "machine.device_access:LAST_PAUSE_S": 0.1,
}  # fmt: skip


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen]]:
    """Starts a process that holds the fake chip until it is killed."""
    started: list[subprocess.Popen] = []
    program = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'a+'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print('holds', flush=True); time.sleep(10_000)"
    )

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", program, str(tmp_path / "chip")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert started[-1].stdout and started[-1].stdout.readline() == b"holds\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_first_run_groups_open_device_in_turn_with_timing(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each process holds the device until it has ended; none meets the one before."""
    monkeypatch.setattr(first_run, "NUM_REOPENINGS", 2)
    run = runs(Layer(device=str(tmp_path / "chip")), "start", "reopen", "together")
    assert not any(verdicts(run).values())
    (row,) = (row for row in run.rows if row.stage == first_run.REOPEN_TITLE)
    assert list(row.values) == ["open_1_s", "open_2_s"]
    assert (tmp_path / "chip").read_text() == "x" * 4


def test_first_run_waits_for_busy_chips(runs: Runs, tmp_path: Path, other_process: Callable[[], subprocess.Popen]):
    """The other process is killed while it holds the device, as soon as the self-test says that it waits."""
    process = other_process()
    lines: list[str] = []

    def shown(text: str) -> None:
        lines.append(text)
        if "are held by" in text:
            process.kill()

    layer = Layer(device=str(tmp_path / "chip"), sets={**QUICK, "machine.device_access:WAIT_S": 600.0})
    run = runs(layer, "start", "together", shown=shown)
    assert not any(verdicts(run).values()) and run.report().is_good
    assert any("are held by" in line for line in lines)


def test_first_run_chips_that_stay_busy_skip_all_checks(
    runs: Runs, tmp_path: Path, other_process: Callable[[], subprocess.Popen]
):
    other_process()
    run = runs(Layer(device=str(tmp_path / "chip"), sets=QUICK), "start", "together", "store", "stored")
    assert [(row.problem, row.is_skipped) for row in run.rows] == [("", True)] * 4
    assert "stayed busy for 2 s. End that process" in run.rows[0].note
    verdict = run.report().verdict
    assert verdict.startswith("Incomplete: 4 of 4 checks on no chips did not run: start: start of the process; ")
    assert "Red" not in verdict and not run.report().is_good


def test_first_run_in_sandbox_suggests_one_process_option(runs: Runs, tmp_path: Path):
    run = runs(Layer(device=str(tmp_path / "chip"), max_opens=1, sets=QUICK), "start", "reopen", "together", "store")
    assert [(row.problem, row.is_skipped) for row in run.rows] == [("", False), ("", True), ("", True), ("", True)]
    assert run.rows[-1].note.endswith("restart it and add --one-process.")


def test_first_run_in_one_process_runs_all_groups(runs: Runs, tmp_path: Path):
    layer = Layer(device=str(tmp_path / "chip"), max_opens=1, sets=QUICK)
    run = runs(layer, "start", "reopen", "together", "store", in_one_process=True)
    assert [row.family for row in run.rows] == ["chips", "chips", "chips", "programs"]
    assert not any(verdicts(run).values()) and run.report().is_good


def test_first_run_in_one_process_skips_checks_after_lost_chip(runs: Runs, tmp_path: Path):
    layer = Layer(device=str(tmp_path / "chip"), faults=[Fault(at="run", holds="all_to_all", does="die")])
    run = runs(layer, "start", "together", "store", "compiling", in_one_process=True)
    assert [(row.stage, bool(row.problem), row.is_skipped) for row in run.rows[1:]] == [
        ("exchange", True, False), (first_run.START_TITLE, False, True), (first_run.START_TITLE, False, True)
    ]  # fmt: skip


def test_first_run_without_chips_stops_after_start(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "none_of_these")
    run = runs(Layer(), "start", "together")
    ((stage, problem),) = verdicts(run).items()
    assert stage == first_run.START_TITLE and "with exit code 1" in problem and "none_of_these" in problem
    assert run.report().verdict == "Red: 1 of 1 checks on no chips failed: start: start of the process."
    assert record.read_all() == {}


@pytest.mark.parametrize(
    ("layer", "stage", "problem", "reserve"),
    [
        (Layer(limit_bytes=128 * MIB), "", "", 0.04),
        (Layer(limit_bytes=128 * MIB, room_bytes=112 * MIB), "room", "only 84 % can be filled", 0.16),
        (Layer(limit_bytes=128 * MIB, room_bytes=25 * MIB), "room", "not even 60 % can be filled", 0.4),
        (Layer(limit_bytes=128 * MIB, drift_bytes=8 * MIB), "numbers", "24.0 MiB more in use", 0.04),
        (Layer(), "", "", None),
    ],
    ids=["true", "less room", "hardly any", "wrong numbers", "says nothing"],
)
def test_first_run_memory_check_finds_wrong_numbers_and_sets_reserve(
    runs: Runs, layer: Layer, stage: str, problem: str, reserve: float | None
):
    found = verdicts(runs(layer, "start", "memory"))
    assert [name for name, said in found.items() if said] == ([stage] if stage else [])
    assert problem in found.get(stage, "")
    assert read_machine_record().reserve_share == reserve


def test_first_run_stored_program_runs_in_another_process(runs: Runs):
    run = runs(Layer(), "start", "store", "stored")
    assert not any(verdicts(run).values())
    assert "load_s" in run.rows[-1].values and run.rows[-1].note == ""  # it came from the cache


def test_first_run_unloadable_stored_program_disables_program_cache(runs: Runs):
    found = runs(Layer(faults=[Fault(at="load", does="die")]), "start", "store", "stored")
    assert verdicts(found)["run by another"].startswith("Its process ended by SIGABRT")
    assert not read_machine_record().keeps_programs


ONE_FORM = {"selftest.kernels:HEAD_SIZES": [64], "selftest.kernels:FORMS": ["bounded scores"]}


def test_first_run_halting_kernel_is_one_failed_row_and_disabled(runs: Runs, monkeypatch: pytest.MonkeyPatch):
    """Its kernel is off in the rest of the self-test, and in the engine whose stages are compared at its end."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace("count=8", "count=2"))  # quicker
    layer = Layer(sets=ONE_FORM, faults=[Fault(at="run", holds="/residual_norm/", does="halt", says=HALT)])
    run = runs(layer, "start", "kernels", "beside", "store", "stored", f"{groups.FAMILY}{MODEL}")
    found = verdicts(run)
    assert [stage for stage, problem in found.items() if problem] == ["residual norm"]
    assert HALT in found["residual norm"]
    assert {"convolution", "modulation", "run by another", "first step", "frames", "weights"} <= set(found)
    assert next(row for row in run.rows if "beside" in row.stage).note.endswith(
        "norms by XLA, because the kernel is off"
    )
    assert read_machine_record().fallbacks.kernels == KernelFallbacks(off=("residual_norm",))
    assert run.report().to_json()["machine"]["kernels_off"] == ["residual_norm"]


def test_first_run_kernel_compile_error_selects_small_tiles(runs: Runs):
    """The layer refuses the first program with the kernel, and takes the second."""
    said = "INTERNAL: Mosaic failed to compile TPU kernel: no layout"
    # Of the attention kernel nothing: it is refused elsewhere (tests/machine), and runs before this one above.
    without = {"selftest.kernels:HEAD_SIZES": []}
    layer = Layer(sets=without, faults=[Fault(at="compile", holds="/residual_norm/", says=said, times=1)])
    found = verdicts(runs(layer, "start", "kernels"))
    assert [stage for stage, problem in found.items() if problem] == ["residual norm"]
    assert "smaller tiles are used" in found["residual norm"]
    assert read_machine_record().fallbacks.kernels == KernelFallbacks(small=("residual_norm",))


def test_count_background_compilers_depends_on_time_ratio():
    assert [compiled.count_background_compilers(ratio) for ratio in (0.9, 1.1, 1.3, 2.0)] == [2, 2, 1, 0]


@pytest.mark.parametrize("name", ["v6e:2x4", "v5e:2x4"])
def test_overlap_step_compiles_for_tpu_with_all_options(name: str):
    """Of this loop nothing else says before a TPU runs it that libtpu takes it."""
    mesh = make_mesh(chips.compile_devices(chips.topology(name)), MeshShape(sp=8))
    *sent, x = overlap._arrays(8, *overlap.ON_TPU)
    arrays = x, *sent
    shapes = jax.tree.map(
        lambda one, spec: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(mesh, spec)),
        arrays, overlap._specs(arrays),
    )  # fmt: skip
    lowered = overlap.lower_step(mesh, KernelFallbacks(), shapes)
    text = lowered.compile(compiler_options=dict(step_compiler_options(mesh))).as_text() or ""
    assert fallbacks.find_kernels(text) == ("residual_norm",)
    assert "all-to-all-start" in text or "async" in text


# --- the record -------------------------------------------------------------------------------------------------------

NUMBER, TEXT, TEXTS = (int, float), (str,), [str]
MACHINE = {
    "kernels_off": TEXTS, "kernels_small": TEXTS, "options_off": TEXTS, "sentences": TEXTS,
    "reserve_share": (*NUMBER, type(None)), "compilers_behind": (int, type(None)), "keeps_programs": (bool,),
    "rates": {str: NUMBER}, "transfer_start_s": (*NUMBER, type(None)),
    "overlap": {str: (bool,)}, "messages": (dict,),
}  # fmt: skip
ROW = {
    "family": TEXT, "stage": TEXT, "precision": TEXT, "error": (*NUMBER, type(None)), "slope": (*NUMBER, type(None)),
    "bound": (dict, type(None)), "seconds": NUMBER, "problem": TEXT, "values": {str: NUMBER}, "note": TEXT,
    "learnt": MACHINE, "is_lost": (bool,), "is_skipped": (bool,), "verdict": TEXT,
}  # fmt: skip
SCHEMA = {
    "schema": (int,), "label": TEXT, "platform": TEXT,
    "chips": [{"id": (int,), "kind": TEXT, "coords": (list, type(None)), "memory_bytes": (int, type(None))}],
    "versions": {str: TEXT}, "system": TEXT, "settings": {str: TEXT}, "models": TEXTS, "rows": [ROW],
    "elapsed_s": NUMBER, "machine": MACHINE, "is_good": (bool,), "verdict": TEXT,
}  # fmt: skip


def faults(value: Any, schema: Any, where: str = "record") -> list[str]:
    """Where a value is not of the schema: types, a list of one kind, an object by names or of any names."""
    if isinstance(schema, tuple):
        return [] if isinstance(value, schema) else [f"{where} is {value!r}"]
    if isinstance(schema, type):
        return faults(value, (schema,), where)
    if isinstance(schema, list):
        return [one for index, each in enumerate(value) for one in faults(each, schema[0], f"{where}[{index}]")]
    if set(schema) == {str}:
        return [one for name, each in value.items() for one in faults(each, schema[str], f"{where}.{name}")]
    wrong = [f"{where} has {sorted(value)}"] if set(value) != set(schema) else []
    return wrong or [one for name, each in schema.items() for one in faults(value[name], each, f"{where}.{name}")]


def test_first_run_report_matches_schema_and_precedes_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "secret-token")
    layer = Layer(
        faults=[Fault(at="run", holds="all_to_all", says=f"cannot read {tmp_path}/weights with secret-token")]
    )
    for name, value in fake_pjrt.environment(layer, tmp_path / "start").items():
        monkeypatch.setenv(name, value)
    chosen = [one for one in groups.FIRST if one.name in ("start", "together")]
    monkeypatch.setattr(groups, "all_groups", lambda models: chosen)
    file, kept = tmp_path / "first.json", list[Mapping[str, Any]]()
    write = selftest._write

    def written(path: Path, found: Any) -> str:
        problem = write(path, found)
        kept.append(json.loads(path.read_text()))
        return problem

    monkeypatch.setattr(selftest, "_write", written)
    stream = io.StringIO()
    options = argparse.Namespace(model=[MODEL], report=file, first_run=True, one_process=False, quick=False)
    assert selftest.run(options, Console(file=stream, width=160)) == 1
    text = file.read_text()
    found = json.loads(text)
    assert faults(found, SCHEMA) == [] and found["schema"] == report.SCHEMA == 3
    assert [row["verdict"] for row in found["rows"]] == ["ok", "wrong", "ok"]
    assert "cannot read *** with ***" in found["rows"][1]["problem"]
    assert str(tmp_path) not in text and "secret-token" not in text + stream.getvalue()
    # Who loses the machine has the row of what lost it.
    stages = [[(row["stage"], row["verdict"]) for row in one["rows"]] for one in kept]
    assert stages[0] == [(first_run.START_TITLE, "running")]
    assert [("devices", "ok"), ("exchange", "running")] in stages
    assert stream.getvalue().splitlines()[-1] == "Red: 1 of 3 checks on 8 x cpu failed: chips: exchange."


def first_run_of(folder: Path, monkeypatch: pytest.MonkeyPatch, report: Path | None) -> tuple[int, str]:
    """The command's exit code and what it printed, for the first group alone."""
    monkeypatch.setenv("COMFYUI_TPU_CACHE", str(folder / "cache"))
    monkeypatch.setattr(groups, "all_groups", lambda models: groups.FIRST[:1])
    stream = io.StringIO()
    options = argparse.Namespace(model=[MODEL], report=report, first_run=True, one_process=False, quick=False)
    return selftest.run(options, Console(file=stream, width=160)), stream.getvalue()


def test_first_run_full_disk_loses_only_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_file", full)
    code, said = first_run_of(tmp_path, monkeypatch, tmp_path / "first.json")
    assert code == 1 and "chips: devices" in said
    assert said.splitlines()[-2] == f"--report {tmp_path}/first.json was not written: No space left on device."
    assert said.splitlines()[-1].startswith("Green: all 1 checks on 8 x cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_first_run_unknown_kernel_switch_raises_value_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMFYUI_TPU_KERNELS", "-splash")
    with raises_message(
        ValueError,
        "machine.switch_unknown",
        variable="COMFYUI_TPU_KERNELS",
        word="'-splash'",
        allowed=re.compile(r"^-attention"),
    ):
        first_run_of(tmp_path, monkeypatch, None)
    assert record.read_all() == {}


def test_schema_faults_detect_missing_fields_and_wrong_types():
    assert faults({"schema": 2}, SCHEMA) and faults([1], TEXTS) and faults({"a": "b"}, {str: NUMBER})
    assert not faults(MachineRecord().to_json(), MACHINE)


def test_check_result_round_trips_through_json():
    row = CheckResult(
        family="a", stage="b", precision="", error=None, slope=None, bound=None, seconds=1.0, problem="c",
        values={"x": 2.0}, note="n", learnt=MachineRecord(keeps_programs=False, reserve_share=0.2), is_lost=True,
    )  # fmt: skip
    assert parse_result(json.loads(json.dumps(row.to_json()))) == row


def test_first_run_parent_does_not_import_jax():
    program = "import sys; import comfyui_tpu.diagnostics.selftest.first_run, comfyui_tpu.cli.selftest; " + (
        "assert not {'jax', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_quick_groups_are_those_needed_for_first_image():
    chosen = [group.name for group in groups.quick_groups(groups.QUICK_MODELS)]
    assert chosen == ["start", "transfers", "together", "kernels", "family z-image-turbo"]


def test_first_run_groups_are_unique_and_have_checks():
    from comfyui_tpu.diagnostics.selftest import run

    assert [group.name for group in groups.FIRST] == list(dict.fromkeys(group.name for group in groups.FIRST))
    assert {group.name for group in groups.FIRST} == set(run._CHECKS)
    assert len(jax.devices()) == 8
