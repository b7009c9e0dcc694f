"""`comfyui-tpu compare`: one workflow in several qualities, side by side."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comfyui_tpu.attention import policy
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes.headless import compare
from comfyui_tpu.tpu_runtime import media

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 leaves a miniature's tokens alone: it would save nothing."""
    monkeypatch.setattr(policy, "MANY_KEYS", 0)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("name", ["api/wan21_t2v_720p", "pipeline/wan21_t2v_720p"])
def test_a_workflow_is_rendered_in_each_quality(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    import av

    steps = "Wan21TPUPipeline" if name.startswith("pipeline") else "Wan21TPUSampler"
    arguments = ["compare", str(EXAMPLES / f"{name}.json"), "--tiny", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--set", f"{steps}.num_inference_steps=2"]) == 0
    said = capsys.readouterr().out
    assert "int8 against exact, node " in said and "dB" in said and f"written: {tmp_path / 'compared.mp4'}" in said
    with av.open(str(tmp_path / "compared.mp4")) as video:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])
    assert frames.shape == (17, 80 + media.NAME_HEIGHT, 2 * 112, 3)
    left, right = frames[:, media.NAME_HEIGHT :, :112], frames[:, media.NAME_HEIGHT :, 112:]
    assert 20 < compare.psnr(left / 255, right / 255) < compare.MOST_DB
    assert {path.parent.name for path in tmp_path.rglob("wan21*.mp4")} == {"exact", "int8"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact", "--quality is 'exact'; name two or more to compare, such as exact,int8."),
        ("exact,int4", "--quality is 'int4'; it must be one of exact, int8."),
        ("", "--quality is ''; name two or more to compare, such as exact,int8."),
    ],
)
def test_qualities_are_checked_before_anything_runs(text: str, message: str, capsys: pytest.CaptureFixture):
    assert cli.main(["compare", str(EXAMPLES / "api/wan21_t2v_720p.json"), "--tiny", "--quality", text]) == 2
    assert capsys.readouterr().err == f"comfyui-tpu: {message}\n"


def test_a_workflow_without_a_sampler_is_refused():
    workflow: dict[str, Any] = {"1": {"class_type": "LoadImage", "inputs": {"image": "x.png"}}}
    with pytest.raises(ValueError, match="no TPU sampler or pipeline, whose quality could be compared"):
        compare.with_quality(workflow, "int8")
