"""`comfyui-tpu bench`, on the miniature's sizes, and the record that it writes."""

import json
from dataclasses import fields, replace
from pathlib import Path

import jax
import pytest
from comfyui_tpu.cli.main import main
from comfyui_tpu.diagnostics import bench, random_inputs
from comfyui_tpu.tests.support.host import use_two_chips
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs import denoising_plan
from comfyui_tpu.tpu_runtime.units import GIB

MODEL = "flux2-klein-4b"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "klein.json"
    words = ["--height", "64", "--width", "80", "--runs", "3", "--stages", "encode,denoise,decode"]
    words += ["--quality", "int8", "--json", str(path), "--trace", str(path.parent / "trace")]
    with pytest.MonkeyPatch.context() as patched:
        use_two_chips(patched)
        assert main(["bench", MODEL, *words]) == 0
    return path


def read(record: Path) -> bench.BenchResult:
    values = json.loads(record.read_text())
    programs = tuple(bench.MeasuredProgram(**program) for program in values["programs"])
    own = {field.name for field in fields(bench.BenchResult)}
    assert set(values) - own == {"schema", "label", "total_s"}
    return bench.BenchResult(**{**{name: values[name] for name in own}, "programs": programs})


@pytest.mark.slow
def test_bench_times_and_records_every_program_of_tiny_model(record: Path):
    found = read(record)
    assert (found.model, found.is_tiny, found.precision) == (MODEL, True, "float32")
    assert found.settings["quality"] == "int8"
    wanted = ["text_encoder.encode_text", "denoise_step", "vae_decoder.decode_image"]
    assert [program.name for program in found.programs] == wanted
    for program in found.programs:
        assert 0 < program.least_s < program.median_s < program.most_s and program.compile_s > 0, program.name
        assert program.predicted_s is None and program.peak_bytes > 0, program.name
    assert [program.runs for program in found.programs] == [1, 4, 1]
    assert found.total_s == pytest.approx(sum(program.median_s * program.runs for program in found.programs))
    assert {"jax", "torch"} <= set(found.versions)
    assert str(Path.home()) not in record.read_text() and str(record.parent) not in record.read_text()


@pytest.mark.slow
def test_every_program_has_a_profiler_trace(record: Path):
    folders = {path.name: path for path in (record.parent / "trace").iterdir()}
    assert sorted(folders) == sorted(program.name for program in read(record).programs)
    for folder in folders.values():
        (trace,) = folder.rglob("*.xplane.pb")
        assert trace.stat().st_size > 0


@pytest.mark.slow
def test_bench_report_states_measurements_and_hardware(record: Path):
    found = read(record)
    text = bench.format_report(found)
    assert text.startswith(f"the tiny model of FLUX.2 klein 4B on {found.num_devices} x ")
    assert ", float32, int8. " in text
    assert "not on a TPU: they do not indicate speed" in text
    assert "One generation of the tiny model, not on a TPU, measured: " in text
    assert text.endswith("This was not FLUX.2 klein 4B but its tiny model: the times do not apply to a TPU.")
    real = replace(found, is_tiny=False, programs=(replace(found.programs[1], median_s=0.5, predicted_s=0.25),))
    assert "Fullest device: does not report its memory." in text
    full = replace(real, hbm_peak_bytes=3 * GIB, hbm_reserved_peak_bytes=27 * GIB, hbm_limit_bytes=31 * GIB)
    assert "Fullest device: at most 3.0 GiB in use and 27.0 GiB reserved, of 31.0 GiB." in bench.format_report(full)
    assert "tiny model" not in bench.format_report(real)
    assert "predicted is by the compiler" in bench.format_report(real) and " 200 %" in bench.format_report(real)
    sparse = replace(real, settings={**real.settings, "quality": "int8+sparse"})
    assert "The timed step skips nothing" in bench.format_report(sparse)
    assert "skips nothing" not in bench.format_report(real)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nothing"], "there is no model 'nothing'; there are:\n  wan2.1-t2v-14b\n  wan2.2-i2v-a14b\n"),
        (["wan2.1"], "there is no model 'wan2.1'; there are:\n  wan2.1-t2v-14b\n  wan2.1-t2v-1.3b\n"),
        (["hunyuan-1.5"], "there is no model 'hunyuan-1.5'; there are:\n  hunyuanvideo1.5-"),
        (["flux2-klein-b9"], "there is no model 'flux2-klein-b9'; there are:\n  flux2-klein-9b\n"),
        ([MODEL, "--runs", "0"], "--runs is 0; it must be at least 1."),
        ([MODEL, "--verify", "--trace", "folder"], "--trace is not for --verify, which compares forms. Leave one of"),
        ([MODEL, "--stages", "paint"], "--stages is 'paint'; it must name one or more of encode"),
        ([MODEL, "--height", "81"], "height is 81; it must be a multiple of"),
        ([MODEL, "--quality", "int8+sparse"], "but not TI2V, and HunyuanVideo have; it must be one of exact, int8."),
    ],
)
def test_bench_invalid_argument_error_lists_allowed_values(
    words: list[str], problem: str, capsys: pytest.CaptureFixture
):
    assert main(["bench", *words]) == 2
    assert problem in capsys.readouterr().err


def test_bench_inputs_use_full_text_length():
    """A text's length decides how much attention there is."""
    spec = random_inputs.tiny_spec(lookup_spec("wan2.1-t2v-14b"))
    settings = spec.settings(**{**spec.miniature.inputs, "num_frames": 5})
    (step,) = denoising_plan.list_programs(spec, settings, jax.devices()[:1], precision="float32", stages=("denoise",))
    inputs = random_inputs.random_arguments(step)[step.args._fields.index("inputs")]
    assert inputs["text_length"].tolist() == [512, 512]
