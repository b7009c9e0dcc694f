"""An input of one family alone: declared once in its spec, it is a widget, a setting and an input of the denoiser."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from comfyui_tpu.distributed.rpc import codec
from comfyui_tpu.nodes import inputs
from comfyui_tpu.tpu_runtime.engine import conditioning
from comfyui_tpu.tpu_runtime.model_spec import FloatInput, Settings
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs import denoising_plan

PLAIN = lookup_spec("z-image-turbo")
LIMIT = FloatInput(default=0.0, low=0.0, high=1.0, step=0.05, tooltip="Extra detail in each step.")
SPEC = replace(PLAIN, inputs={**PLAIN.inputs, "own_number": LIMIT})


def test_own_input_is_last_advanced_widget():
    names = inputs.list_newest_inputs(SPEC, ())
    assert names == (*inputs.list_newest_inputs(PLAIN, ()), "own_number")
    assert inputs.find_doc("own_number", [PLAIN, SPEC]).tooltip == LIMIT.tooltip
    assert inputs.find_doc("seed", [SPEC]) is inputs.INPUT_DOCS["seed"]
    widget = inputs.make_input(SPEC, "own_number")
    assert (widget.type, widget.tooltip, widget.low, widget.high) == ("FLOAT", LIMIT.tooltip, 0.0, 1.0)
    assert widget.optional and widget.advanced and widget.parse(0.5) == 0.5


def test_own_input_is_checked_as_widget_and_as_setting():
    assert PLAIN.settings(own_number=0.5) == PLAIN.settings() == replace(SPEC.settings(), own=())
    assert SPEC.settings(own_number=0.5).own == (("own_number", 0.5),)
    wrong = "Z-Image Turbo: own_number is 2.0; it must be between 0.0 and 1.0. Use 1.0."
    with pytest.raises(ValueError) as error:
        SPEC.settings(own_number=2.0)
    assert str(error.value) == wrong
    with pytest.raises(ValueError) as error:
        SPEC.check_settings(replace(SPEC.settings(), own=(("own_number", 2.0),)))
    assert str(error.value) == wrong
    hidden = replace(SPEC.settings(), height=81, own=(("height", 80),))
    with pytest.raises(ValueError) as error:
        SPEC.check_settings(hidden)
    assert "height is 81" in str(error.value)


@pytest.mark.parametrize("own", [3, "ab", ("a",), (("a", 1, 2),), ((["a"], 1),)])
def test_malformed_own_settings_are_refused(own: Any):
    packed, body = codec.pack(PLAIN.settings())
    size, message = codec.read_header(packed, 10)
    assert codec.unpack(message, body, [Settings]) == PLAIN.settings() and size == 0
    with pytest.raises(codec.CodecError):
        codec.unpack({**message, "own": {"__tuple__": list(own)} if isinstance(own, tuple) else own}, b"", [Settings])


def test_own_input_reaches_denoiser_with_default_if_missing(monkeypatch: pytest.MonkeyPatch):
    tiny = replace(SPEC, components=tuple(replace(part, config=part.tiny) for part in SPEC.components))
    settings = tiny.settings(**tiny.miniature.inputs)
    listed = denoising_plan.list_programs(tiny, settings, jax.devices()[:1], precision="float32", stages=("denoise",))
    args: Any = next(iter(listed)).args
    assert args.inputs["own_number"].shape == (1,) and args.inputs["own_number"].dtype == np.float32
    monkeypatch.setattr(conditioning, "_text_row", lambda *_: {"text": np.zeros((1, 2, 3))})
    monkeypatch.setattr(conditioning, "_condition_arrays", lambda *_: {})
    for own, wanted in (((("own_number", 0.5),), 0.5), ((), 0.0)):
        group = SimpleNamespace(branches=1)
        plan: Any = SimpleNamespace(spec=tiny, settings=replace(settings, own=own), largest_group=group)
        found = conditioning.build_denoiser_inputs(plan, ..., None, None)  # type: ignore[arg-type]
        assert found["own_number"].tolist() == [wanted]
