"""`comfyui-tpu bench --verify`: forms of a step that agree, one that does not, one that does not run."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from comfyui_tpu.cli.main import main
from comfyui_tpu.diagnostics import random_inputs, verify
from comfyui_tpu.kernels import attention
from comfyui_tpu.tests.support.host import use_two_chips
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime.cost_model import chips, flops
from comfyui_tpu.tpu_runtime.machine import fallbacks
from comfyui_tpu.tpu_runtime.machine.fallbacks import Fallbacks
from comfyui_tpu.tpu_runtime.models import FLAGSHIPS, lookup_spec
from comfyui_tpu.tpu_runtime.plan import compile, report
from comfyui_tpu.tpu_runtime.programs.program import Program

MODEL = "cogvideox1.5-5b"
WORDS = ["bench", MODEL, "--verify", "--runs", "1", "--num-frames", "9", "--height", "64", "--width", "80"]


def run_verify(tmp_path: Path) -> dict[str, Any]:
    """The record of a run; its forms by name."""
    path = tmp_path / "verified.json"
    assert main([*WORDS, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text() and str(Path.home()) not in path.read_text()
    return {**record, "forms": {form["name"]: form for form in record["forms"]}}


@pytest.mark.slow
def test_verify_tiny_model_variants_agree_and_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    use_two_chips(monkeypatch)
    record = run_verify(tmp_path)
    assert (record["model"], record["is_tiny"], record["label"]) == (MODEL, True, "measured")
    names = ["as chosen", "as chosen (part)", "without the kernels attention (part)"]
    assert list(record["forms"]) == names
    for form in record["forms"].values():
        assert form["median_s"] > 0 and form["peak_bytes"] > 0 and not form["problem"]
    assert 0 < record["forms"][names[2]]["difference"] <= verify.BOUNDS["float32"]
    assert record["loop"]["steps"] == verify.LOOP_STEPS - 1 and record["loop"]["median_s"] > 0
    said = capsys.readouterr().out
    assert "All forms agree." in said and "not on a TPU: they do not indicate speed" in said


def part_forms(precision: str = "float32") -> dict[str, verify.FormResult]:
    """Those of a part of the tokens, on one device."""
    spec = lookup_spec(MODEL)
    settings = verify.take_first_frames(spec, spec.settings(**spec.miniature.inputs))
    check = verify.StepVariants(random_inputs.tiny_spec(spec), jax.devices()[:1], precision, runs=1)
    wanted = verify.list_variants(
        check.program(settings, verify.StepVariant(name="", without=Fallbacks())), is_tiny=True
    )
    parts = (one for one in wanted if one.is_part)
    return {row.name: row for row in check.measure(parts, {True: settings})}


WITHOUT_ATTENTION = "without the kernels attention (part)"


@pytest.mark.slow
@pytest.mark.parametrize("precision", slower(["float32", "bfloat16"], "bfloat16"))
def test_verify_detects_scaled_attention_kernel(precision: str, monkeypatch: pytest.MonkeyPatch):
    """By a hundredth of attention's result alone, which in bfloat16 is less than rounding."""
    sound = part_forms(precision)[WITHOUT_ATTENTION]
    assert sound.difference is not None and not sound.problem
    assert 0 < sound.difference <= verify.BOUNDS[precision] / 4
    assert set(sound.factors) == set(verify.ERROR_DIRECTIONS)
    bounds = verify.FACTORS[precision]
    assert all(abs(factor) <= bounds[name] / 4 for name, factor in sound.factors.items()), sound.factors
    right = attention.flat_attention

    def wrong(*args: Any, **options: Any) -> Any:
        result, *others = right(*args, **options)
        return (1.01 * result, *others)

    monkeypatch.setattr(attention, "flat_attention", wrong)
    form = part_forms(precision)[WITHOUT_ATTENTION]
    assert form.difference is not None
    factor, bound = form.factors["attention's results"], bounds["attention's results"]
    assert factor == pytest.approx(-0.01, rel=0.25)
    assert f"attention's results are {-factor:.1e} smaller, where {bound:.1e} may be rounding" in form.problem
    is_coarse = form.difference <= verify.BOUNDS[precision]
    assert is_coarse == (precision == "bfloat16")
    assert form.problem.startswith("differs by") != is_coarse


@pytest.mark.slow
def test_verify_continues_after_variant_fails_to_run(monkeypatch: pytest.MonkeyPatch):
    right = Program.compile

    def refused(program: Program, *args: Any) -> Any:
        if program.rungs.off:
            raise RuntimeError("Mosaic failed to compile TPU kernel: no such luck\nand a trace")
        return right(program, *args)

    monkeypatch.setattr(Program, "compile", refused)
    forms = part_forms()
    found = forms.pop(WITHOUT_ATTENTION)
    assert found.problem == "does not run: Mosaic failed to compile TPU kernel: no such luck"
    assert found.median_s is None and forms and not any(form.problem for form in forms.values())


def test_verify_prediction_continues_after_compile_failure(monkeypatch: pytest.MonkeyPatch):
    def refused(program: Program, topology: chips.Topology) -> compile.CompiledProgram:
        if not program.compiler_options:
            raise RuntimeError("the TPU's compiler failed: INTERNAL: no such luck\nand a trace")
        memory = report.Memory(arguments=1, weights=1, temporaries=None, output=None, alias=0, peak=3)
        return compile.CompiledProgram(
            program=program, memory=memory, text=None, refusal="no room", compile_s=1.0, flops=flops.Flops()
        )

    monkeypatch.setattr(compile, "compile_program", refused)
    spec, target = lookup_spec(MODEL), chips.topology("v6e:2x4")
    check = verify.StepVariants(spec, chips.compile_devices(target), "bfloat16", runs=1)
    off = Fallbacks(options=fallbacks.option_prefixes(fallbacks.OPTIONS))
    forms = [verify.StepVariant(name="off", without=off), verify.StepVariant(name="on", without=Fallbacks())]
    found = list(check.predict(iter(forms), {False: spec.settings()}, target))
    assert [(row.name, row.problem, row.peak_bytes) for row in found] == [
        ("off", "does not compile: the TPU's compiler failed: INTERNAL: no such luck", None), ("on", "no room", 3)
    ]  # fmt: skip


@pytest.mark.parametrize("spec", FLAGSHIPS, ids=lambda spec: spec.name)
def test_list_variants_omits_each_option_group_and_kernel_once(spec: Any):
    """Of the real size, whose blocks are as wide as the model's and run in a loop, as in a step."""
    settings = spec.settings()
    devices = chips.compile_devices(chips.topology("v6e:2x4"))
    check = verify.StepVariants(spec, devices, "bfloat16", runs=1)
    chosen = check.program(settings, verify.StepVariant(name="as chosen", without=Fallbacks()))
    found = {one.name: one for one in verify.list_variants(chosen, is_tiny=False)}
    kernels = "attention, prologue, residual_norm"
    assert list(found) == [
        "as chosen", "without sparsecore", "without async", "without vmem", "without sparsecore, async, vmem",
        "as chosen (part)", "without the kernels attention (part)", "without the kernels prologue (part)",
        "without the kernels residual_norm (part)", f"without the kernels {kernels} (part)",
    ]  # fmt: skip
    bare = check.program(settings, found["without sparsecore, async, vmem"])
    assert chosen.compiler_options and not bare.compiler_options
    assert 0 < sum(map(_size, (chosen.weights or {}).values())) < 6e9
    part = verify.take_first_frames(spec, settings)
    of_part = check.program(part, found["as chosen (part)"])
    lengths = {name: (weight.shape[0], (of_part.weights or {})[name].shape[0])
               for name, weight in (chosen.weights or {}).items() if ".*." in name}  # fmt: skip
    assert lengths and set(lengths.values()) <= {(verify.NUM_BLOCKS, verify.NUM_PART_BLOCKS), (2, 1)}
    assert (verify.NUM_BLOCKS, verify.NUM_PART_BLOCKS) in lengths.values() and verify.NUM_BLOCKS >= 3
    assert part == settings if spec.is_image else 1 < part.num_frames <= verify.PART_FRAMES


def _size(weight: Any) -> int:
    size = 1
    for dim in weight.shape:
        size *= dim
    return size


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--stages", "denoise"], "--stages is not for --verify, which runs one block of the denoiser alone."),
        (["--no-prediction"], "--no-prediction is not for --verify: it measures, and predicts only with --topology."),
    ],
)
def test_verify_refuses_unused_options(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]):
    assert main([*WORDS, *words]) == 2
    assert problem in capsys.readouterr().err


def test_bench_topology_without_verify_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", MODEL, "--topology", "v6e:2x4"]) == 2
    assert "--topology is for --verify" in capsys.readouterr().err


def test_relative_rms_returns_share_of_reference():
    import numpy as np

    ones = np.ones((4, 4))
    assert verify.relative_rms(ones * 1.5, ones) == pytest.approx(0.5)
    assert verify.relative_rms(ones, ones) == 0.0
    assert not np.isfinite(verify.relative_rms(ones * np.nan, ones))


def test_attribute_error_finds_direction_below_larger_noise():
    """A hundredth of one, nothing of another that is not at right angles to it, in noise of three times as much."""
    import numpy as np

    random = np.random.default_rng(0)
    first, second, noise = random.normal(size=(3, 100, 100))
    pulls = {"first": 0.2 * first, "second": 0.2 * (first + second)}
    found = verify.attribute_error(0.01 * pulls["first"] + 0.006 * noise, pulls)
    assert found["first"] == pytest.approx(0.01, rel=0.2) and abs(found["second"]) < 0.2 * found["first"]
    assert verify.attribute_error(noise, {}) == {}
    assert np.isnan(verify.attribute_error(noise * np.nan, pulls)["first"])


def test_format_verification_lists_times_memory_and_problems():
    rows = (
        verify.FormResult(
            name="as chosen", compile_s=3.0, median_s=0.5, predicted_s=None, peak_bytes=2**30, difference=None,
            problem="",
        ),
        verify.FormResult(
            name="without async", compile_s=3.0, median_s=1.0, predicted_s=None, peak_bytes=2**30, difference=0.5,
            problem="differs by 5.0e-01, where 3.1e-02 may be rounding",
        ),
    )  # fmt: skip
    record = {
        "label": "measured", "is_tiny": False, "num_devices": 8, "device_kind": "TPU v6 lite", "precision": "bfloat16",
        "loop": {"steps": 5, "median_s": 0.5, "was_compiled": False},
        "memory": {"peak_reserved_bytes": 2**31, "peak_in_use_bytes": 2**30},
    }  # fmt: skip
    lines = verify.format_verification(lookup_spec(MODEL), record, rows).splitlines()
    assert lines[0] == "3 blocks of CogVideoX 1.5 5B on 8 x TPU v6 lite, bfloat16; seconds are measured."
    assert "200 %" in next(line for line in lines if line.startswith("without async"))
    assert "from the cache." in lines[-3]
    assert lines[-2] == "Fullest device: at most 1.0 GiB in use and 2.0 GiB reserved."
    assert lines[-1] == "without async: differs by 5.0e-01, where 3.1e-02 may be rounding."
