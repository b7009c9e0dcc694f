"""Descriptions of the programs that calls of ComfyUI's own nodes compile. Opens no devices."""

from collections.abc import Iterable, Iterator
from typing import Any

from ..checkpoints.model_ref import ModelRef
from ..messages import compose, compose_term
from ..programs.denoise_step import PREDICT
from .compile_times import get_model_s
from .stage_functions import describe_size


def list_programs(calls: Iterable[tuple[ModelRef, dict[str, Any]]]) -> list[str]:
    """Return a message for each program of calls, each once, with its last compile time on this machine.

    calls: see `Engine.prepare`. Models share encoders and decoders, so only a denoiser has its model's title.
    """
    return list(dict.fromkeys(text for model, arguments in calls for text in _describe_call(model, arguments)))


def _describe_call(model: ModelRef, arguments: dict[str, Any]) -> Iterator[str]:
    spec = model.spec
    if (prediction := arguments.get("prediction")) is not None:
        size = describe_size(spec, tuple(prediction.sample.shape))
        program = compose("compile.of_model", title=spec.title, program=compose("stage.the_denoiser", size=size))
        yield _describe(program, get_model_s(spec.name, PREDICT))
        return
    if "decoded" in arguments:
        components = [spec.vae.component]
    elif "encoded" in arguments:
        components = ["vae_encoder"]
    else:
        components = [text.component for text in spec.text_encoders]
    for name in components:
        program = compose("stage.the_component", component=compose_term("component", name))
        yield _describe(program, get_model_s(spec.name, f"{name}."))


def _describe(program: str, seconds: float) -> str:
    time = compose("stage.expected_time", expected_s=f"{seconds:.0f}") if seconds else compose("compile.time_unknown")
    return compose("compile.program", program=program, time=time)
