"""The devices are given the next step while one runs: when, what that leaves alone, and that the numbers are the same
to the bit.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comfyui_tpu.tests.models import parity
from comfyui_tpu.tests.models.parity import engine
from comfyui_tpu.tests.support.host import Cancelled, Host
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime.engine import denoise as denoising
from comfyui_tpu.tpu_runtime.model_spec import MagCache, MagCacheCurve, Settings, StepCache
from comfyui_tpu.tpu_runtime.models import lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.programs.executables import Executable
from comfyui_tpu.tpu_runtime.programs.finite_check import NotFinite
from comfyui_tpu.tpu_runtime.progress import Preview

pytestmark = pytest.mark.slow

MODEL = parity.tiny_model(spec_for_family("Wan21"))
SETTINGS = Settings(
    height=64, width=48, num_frames=5, num_inference_steps=5, guidance_scale=1.0, seed=7, shift=5.0,
    scheduler="UniPCMultistepScheduler",
)  # fmt: skip
IN_ORDER = ["launch", "done"] * 5
# The first step's time is known when it has ended.
AHEAD = ["launch", "done", "launch", *["launch", "done"] * 3, "done"]


class Watching(Host):
    """Notes in `events` what ended; cancels after so many steps."""

    def __init__(self, events: list[str], cancel_after: float = math.inf) -> None:
        super().__init__()
        self.events, self.cancel_after = events, cancel_after

    def step(self, done: int, total: int, unit: str, preview: Preview | None = None) -> None:
        if unit == "step" and done:
            self.events.append("done")
            assert preview is not None and preview.sample().isfinite().all()
            self.is_cancelled = done >= self.cancel_after


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened: steps that the devices were given, and steps that are known to have ended."""
    found: list[str] = []
    call = Executable.__call__

    def watched(program: Executable, *args: Any) -> Any:
        if program.program.name.startswith("denoise_step"):
            found.append("launch")
        return call(program, *args)

    monkeypatch.setattr(Executable, "__call__", watched)
    return found


@pytest.fixture
def run_denoise(events: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., np.ndarray]:
    """The latents of a run."""
    monkeypatch.setattr(denoising, "DISPATCH_LEAD_S", math.inf)

    def run(model: Any = MODEL, settings: Settings = SETTINGS, **options: Any) -> np.ndarray:
        runner, host = engine(1), Watching(events, **options)
        embeds = runner.encode(model, "a cat", "", host)
        events.clear()
        return runner.denoise(model, settings, *embeds, host)["samples"].numpy()

    return run


def test_denoise_dispatches_next_step_while_one_runs(
    run_denoise: Callable[..., np.ndarray], events: list[str], monkeypatch: pytest.MonkeyPatch
):
    ahead = run_denoise()
    assert events == AHEAD
    monkeypatch.setattr(denoising, "_can_dispatch_ahead", lambda *_: False)
    assert np.array_equal(run_denoise(), ahead)
    assert events == IN_ORDER


@pytest.mark.parametrize(
    ("seconds", "ends_after", "slept"),
    [(0.3, 9.0, 0.0), (2.5, 9.0, 2.0), (2.5, 1.0, 1.0)],
    ids=["short", "long", "over"],
)
def test_sleep_until_near_end_waits_for_long_steps_only(
    seconds: float, ends_after: float, slept: float, monkeypatch: pytest.MonkeyPatch
):
    """What runs after a cancel is no longer than the step and the half second."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda some: now.__setitem__(0, now[0] + some))
    monkeypatch.setattr(denoising, "time", clock)
    stage = SimpleNamespace(progress=SimpleNamespace(activity=SimpleNamespace(seconds_per_unit=seconds)))
    is_finite = SimpleNamespace(is_ready=lambda: now[0] >= 100.0 + ends_after)
    denoising._sleep_until_near_end(stage, denoising.InFlightStep(index=0, denoised=None, is_finite=is_finite))  # type: ignore[arg-type]
    assert slept <= now[0] - 100.0 < slept + 0.05


def test_denoise_cancel_leaves_at_most_one_step_running(run_denoise: Callable[..., np.ndarray], events: list[str]):
    with pytest.raises(Cancelled):
        run_denoise(cancel_after=2)
    assert events == ["launch", "done", "launch", "launch", "done"]
    assert run_denoise().shape == (1, 16, 2, 8, 6)


CURVE = MagCacheCurve(ratios=((1.0,) * 5,), retained=(0.2,))


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        pytest.param("HunyuanVideo15", StepCache(start=1, end=4, interval=2), marks=pytest.mark.recorded),
        ("Wan21", MagCache(threshold=0.1, curve=CURVE)),
    ],
)
def test_denoise_with_step_cache_dispatches_steps_in_order(
    family: str, policy: Any, run_denoise: Callable[..., np.ndarray], events: list[str]
):
    """Kept features would be there twice. A cancel ends it as any other."""
    model = parity.tiny_model(spec_for_family(family))
    settings = replace(SETTINGS, scheduler="checkpoint", step_cache=policy)
    run_denoise(model=model, settings=settings)
    assert events == IN_ORDER
    with pytest.raises(Cancelled):
        run_denoise(model=model, settings=settings, cancel_after=2)
    assert events == IN_ORDER[:4]


def test_denoise_does_not_dispatch_ahead_across_experts(
    run_denoise: Callable[..., np.ndarray], events: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Its weights may need the place of those that a step is running on."""
    found: list[int] = []
    watched = Executable.__call__

    def launch(program: Executable, *args: Any) -> Any:
        result = watched(program, *args)
        if program.program.name.startswith("denoise_step"):
            found.append(id(args[0]["proj_out.weight"]))
        return result

    monkeypatch.setattr(Executable, "__call__", launch)
    run_denoise(model=parity.tiny_model(lookup_spec("wan2.2-t2v-a14b")))
    at = [index for index, event in enumerate(events) if event == "launch"][found.index(found[-1])]
    assert 0 < events[:at].count("launch") == events[:at].count("done") < 5
    assert "launch launch" in " ".join(events)


def test_denoise_non_finite_step_is_named_in_error(
    run_denoise: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    """Not the one that runs behind it."""
    asked, settle = [], denoising._await_step

    def spoiled(stage: Any, plan: Any, launched: denoising.InFlightStep) -> None:
        asked.append(launched.index)
        settle(stage, plan, replace(launched, is_finite=np.array(launched.index != 2)))  # type: ignore[arg-type]

    monkeypatch.setattr(denoising, "_await_step", spoiled)
    with raises_message(
        NotFinite, "program.result_not_finite", what=Expected("sampling.latents_from_step", step=3, total=5)
    ):
        run_denoise()
    assert asked == [0, 1, 2]
