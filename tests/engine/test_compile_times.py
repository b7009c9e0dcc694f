"""Recorded compile times, and the descriptions of programs that calls of ComfyUI's own nodes compile."""

import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.messages import Expected, assert_message
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.cache.store import VARIABLE
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine import compile_times
from comfyui_tpu.tpu_runtime.model_spec.core_inputs import PredictionRequest

WAN = "wan2.1-t2v-14b"
DAMAGED_SECONDS = [b'{"predict": %s}' % value for value in (b"true", b'"9"', b"null", b"-1", b"NaN", b"1e9")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def test_record_keeps_last_time_of_each_program():
    for seconds in (40.0, 30.04):
        compile_times.record("kind", WAN, "vae_decoder.decode_next", seconds)
    compile_times.record("other", WAN, "vae_decoder.before_first", 5)
    compile_times.record("another", WAN, "predict", 100)
    assert compile_times.get_last_s("kind") == 30.0
    assert compile_times.get_model_s(WAN, "vae_decoder.") == 35.0
    assert compile_times.get_model_s(WAN, "predict") == 100.0
    assert compile_times.get_model_s("z-image", "") == 0
    compile_times.record("kind", "", "", 7)
    assert compile_times.get_model_s("", "") == 0


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, *DAMAGED_SECONDS])
def test_damaged_record_of_a_model_counts_as_unknown(content: bytes):
    compile_times.COMPILE_TIMES.put(compile_times._model_key(WAN), content)
    assert compile_times.get_model_s(WAN, "predict") == 0
    compile_times.record("kind", WAN, "predict", 3)
    assert compile_times.get_model_s(WAN, "predict") == 3


def test_record_of_a_model_is_bounded():
    for number in range(3 * compile_times.MAX_PROGRAMS):
        compile_times.record("kind", WAN, f"program {number}", 1)
    assert compile_times.get_model_s(WAN, "") == compile_times.MAX_PROGRAMS


def test_list_programs_names_model_size_and_last_compile_time():
    model = ModelRef(spec_name=WAN, model_id="tiny/wan21")
    prediction = PredictionRequest(sample=torch.zeros(1, 16, 2, 10, 14), timestep=0, inputs={"text": np.zeros((1, 1))})
    calls = [(model, {}), (model, {"prediction": prediction}), (model, {"decoded": (1, 16, 2, 10, 14)})]
    compile_times.record("kind", WAN, "predict", 41.6)
    programs = api.list_programs([*calls, calls[1]])
    unknown, size = Expected("compile.time_unknown"), Expected("stage.the_denoiser", size="112x80, 5 frames")
    for text, program, time in zip(
        programs,
        (
            Expected("stage.the_component", component="component.text_encoder"),
            Expected("compile.of_model", title=model.spec.title, program=size),
            Expected("stage.the_component", component="component.vae_decoder"),
        ),
        (unknown, Expected("stage.expected_time", expected_s="42"), unknown),
        strict=True,
    ):
        assert_message(text, "compile.program", program=program, time=time)


def test_list_programs_ends_at_a_call_that_cannot_be_predicted():
    def calls():
        yield ModelRef(spec_name=WAN, model_id="tiny/wan21"), {"encoded": (1, 3, 1, 80, 112)}
        raise ValueError("a file that ComfyUI has deleted")

    (text,) = api.list_programs(calls())
    assert_message(text, "compile.program")
