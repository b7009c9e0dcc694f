"""Records in `benchmarks/measured/` as `docs/performance.md` shows them: written by the commands, here on no TPU."""

import argparse
import importlib
import io
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.cli import selftest
from comfyui_tpu.cli.main import main
from comfyui_tpu.diagnostics import bench
from comfyui_tpu.diagnostics.selftest import groups
from comfyui_tpu.tests.support.host import use_two_chips
from rich.console import Console

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODEL = "wan2.1-t2v-1.3b"
# Fields that records of older versions do not have.
LATER = ("hbm_reserved_peak_bytes", "hbm_limit_bytes")


@pytest.fixture(scope="module")
def predict() -> Iterator[Any]:
    """The script that writes the tables."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(BENCHMARKS)
        yield importlib.import_module("predict")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one record of each command."""
    folder = tmp_path_factory.mktemp("measured")
    words = ["bench", MODEL, "--runs", "1", "--num-frames", "5", "--height", "64", "--width", "80", "--json"]
    with pytest.MonkeyPatch.context() as patched:
        use_two_chips(patched)
        assert main([*words, str(folder / "bench.json"), "--stages", "denoise"]) == 0
        assert main([*words, str(folder / "verify.json"), "--verify"]) == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COMFYUI_TPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        patched.setattr(groups, "all_groups", lambda models: [one for one in groups.FIRST if one.name == groups.START])
        options = argparse.Namespace(
            model=[MODEL], report=folder / "first_run.json", first_run=True, one_process=False, quick=False
        )
        assert selftest.run(options, Console(file=io.StringIO())) == 0
    return folder


@pytest.mark.slow
def test_machine_rows_name_source_of_each_record(records: Path, predict: Any):
    rows = {row[0]: row for row in predict.machine_rows(records)}
    assert {name: row[1] for name, row in rows.items()} == {
        "bench": MODEL, "first_run": "self-test", "verify": f"{MODEL}, one block",
    }  # fmt: skip
    for name, row in rows.items():
        assert row[2] == f"{8 if name == 'first_run' else 2} x cpu (no TPU)" and "jax " in row[3]
    assert rows["first_run"][4] == "1 of 1 checks held"
    assert rows["verify"][4].startswith("3 forms agree; without the kernels attention (part) ")
    assert "float32; " in rows["bench"][4] and "does not report its memory" in rows["bench"][4]
    # A miniature's step is no measurement of the model's.
    predicted = json.loads((BENCHMARKS / "predicted.json").read_text())[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(predict, "MEASURED", records)
        section = predict.section([predicted])
    assert "nothing in this table was measured" in section and "measured s per step" not in section
    assert section.endswith(f"| {' | '.join(rows['verify'])} |")


def write_changed_record(path: Path, to: Path, **changes: Any) -> dict[str, Any]:
    record = {**json.loads(path.read_text()), **changes}
    to.write_text(json.dumps(record))
    return record


def on_a_tpu(record: Mapping[str, Any], step_s: float) -> dict[str, Any]:
    """What a bench of this record's model and size would say of eight v6e."""
    program = {
        "name": "denoise_step", "runs": 50, "mesh": "2x4x1", "compile_s": 60.0, "median_s": step_s, "least_s": step_s,
        "most_s": step_s, "predicted_s": 2.0, "peak_bytes": 2**34,
    }  # fmt: skip
    return {
        "is_tiny": False, "device_kind": "TPU v6 lite", "num_devices": 8, "model": record["model"],
        "settings": record["settings"],
        "programs": [program], "total_s": 50 * step_s, "hbm_peak_bytes": 3 * 2**30,
        "hbm_reserved_peak_bytes": 27 * 2**30, "hbm_limit_bytes": 31 * 2**30,
    }  # fmt: skip


@pytest.mark.slow
def test_performance_section_shows_tpu_records_next_to_predictions(records: Path, predict: Any, tmp_path: Path):
    predicted = json.loads((BENCHMARKS / "predicted.json").read_text())[0]
    write_changed_record(records / "bench.json", tmp_path / "bench.json", **on_a_tpu(predicted, 2.345))
    machine = {
        "kernels_off": ["convolution"], "options_off": [], "kernels_small": [], "sentences": [], "reserve_share": 0.08,
        "compilers_behind": 1, "keeps_programs": True, "rates": {"to_chips": 12.34},
        "transfer_start_s": 4.2e-6,
    }  # fmt: skip
    chips = 8 * [{"id": 0, "kind": "TPU v6 lite", "coords": None, "memory_bytes": None}]
    write_changed_record(
        records / "first_run.json", tmp_path / "first_run.json", platform="tpu", chips=chips, machine=machine
    )
    timed, first_run = predict.machine_rows(tmp_path)
    assert timed[2] == first_run[2] == "8 x TPU v6 lite"
    assert "at most 3.0 GiB in use and 27.0 GiB reserved, of 31.0 GiB" in timed[4]
    assert first_run[4].endswith("without convolution; 8 % of memory left free; 12.3 GB/s to chips")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(predict, "MEASURED", tmp_path)
        section = predict.section([predicted])
    assert "the last column alone was measured" in section
    head, _, row = [line for line in section.splitlines() if line.startswith("|")][:3]
    assert head.endswith("| measured s per step |") and row.endswith("| 2.35 |")


def test_machine_rows_invalid_file_raises_value_error_with_name(predict: Any, tmp_path: Path):
    for text in ("{", "[]", "{}", '{"label": "first run", "schema": 0}', '{"forms": [], "schema": 0}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ValueError, match="wrong.json is not"):
            predict.machine_rows(tmp_path)
    shutil.rmtree(tmp_path)
    assert predict.machine_table(predict.machine_rows(tmp_path)) == ""


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": 0}, "is not what `comfyui-tpu bench --json` of this version writes"),
        ({"programs": []}, "holds no program"),
        ({"num_devices": "8"}, "num_devices of a BenchResult is wrong"),
        ({"programs": [{"name": "step"}]}, "runs, mesh, compile_s, median_s, least_s, most_s, predicted_s, peak_bytes"),
    ],
)
def test_bench_record_invalid_field_raises_value_error(
    predict: Any, tmp_path: Path, change: dict[str, Any], problem: str
):
    program = bench.MeasuredProgram(
        name="step", runs=4, mesh="1x8x1", compile_s=1.0, median_s=1.0, least_s=1.0, most_s=1.0, predicted_s=None,
        peak_bytes=1,
    )  # fmt: skip
    whole = bench.BenchResult(
        model=MODEL, title="T", settings={}, device_kind="TPU v6 lite", num_devices=8, precision="bfloat16",
        versions={}, is_tiny=False, hbm_peak_bytes=None, programs=(program,),
    )  # fmt: skip
    path = tmp_path / "record.json"

    def read() -> bench.BenchResult:
        return predict.measured(predict.read_record(path)[1], path)

    path.write_text(json.dumps(whole.to_json()))
    assert read() == whole
    older = {name: value for name, value in whole.to_json().items() if name not in LATER}
    path.write_text(json.dumps(older))
    assert read() == whole
    path.write_text(json.dumps({**whole.to_json(), **change}))
    with pytest.raises(ValueError, match=problem):
        read()


def test_repository_records_are_from_tpu(predict: Any):
    for path in sorted((BENCHMARKS / "measured").glob("*.json")):
        assert predict.is_of_a_tpu(*predict.read_record(path)), path.name
