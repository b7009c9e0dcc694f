"""`comfyui-tpu compare`, one workflow in several qualities side by side, and the node that joins any results."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_tpu.attention import policy
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes.declare import Node
from comfyui_tpu.nodes.headless import compare
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.tests.support.host import Host
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tests.support.patience import slower
from comfyui_tpu.tpu_runtime import media

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 leaves a miniature's tokens alone: it would save nothing."""
    monkeypatch.setattr(policy, "LONG_SEQUENCE_TOKENS", 0)


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("name", slower(["api/wan21_t2v_720p", "pipeline/wan21_t2v_720p"], "pipeline/wan21_t2v_720p"))
def test_compare_renders_workflow_in_each_quality(name: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    import av

    steps = "Wan21TPUPipeline" if name.startswith("pipeline") else "Wan21TPUSampler"
    arguments = ["compare", str(EXAMPLES / f"{name}.json"), "--tiny", "--out", str(tmp_path)]
    assert cli.main([*arguments, "--set", f"{steps}.num_inference_steps=2", "--set", f"{steps}.num_frames=5"]) == 0
    said = capsys.readouterr().out
    assert "int8 against exact, node " in said and "dB" in said and f"written: {tmp_path / 'compared.mp4'}" in said
    with av.open(str(tmp_path / "compared.mp4")) as video:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)])
    assert frames.shape == (5, 80 + media.LABEL_HEIGHT, 2 * 112, 3)
    left, right = frames[:, media.LABEL_HEIGHT :, :112], frames[:, media.LABEL_HEIGHT :, 112:]
    assert 20 < compare.psnr(left / 255, right / 255) < compare.MAX_PSNR_DB
    assert {path.parent.name for path in tmp_path.rglob("wan21*.mp4")} == {"exact", "int8"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact", "--quality is 'exact'; name two or more to compare, such as exact,int8."),
        ("exact,int4", "--quality is 'int4'; it must be one of exact, int8, int8+sparse."),
        ("", "--quality is ''; name two or more to compare, such as exact,int8."),
    ],
)
def test_compare_invalid_quality_is_refused_before_run(text: str, message: str, capsys: pytest.CaptureFixture):
    assert cli.main(["compare", str(EXAMPLES / "api/wan21_t2v_720p.json"), "--tiny", "--quality", text]) == 2
    assert capsys.readouterr().err == f"comfyui-tpu: {message}\n"


def test_set_quality_without_sampler_raises_value_error():
    workflow: dict[str, Any] = {"1": {"class_type": "LoadImage", "inputs": {"image": "x.png"}}}
    with pytest.raises(ValueError, match="no TPU sampler or pipeline, whose quality could be compared"):
        compare.set_quality(workflow, "int8")


@pytest.mark.parametrize(
    ("example", "changes"),
    [("flux2_klein", []), ("wan22_i2v_720p", ["--set", "TPUModelLoader.model_id=tiny/wan22ti2v"])],
)
def test_compare_quality_unsupported_by_model_is_refused_before_run(
    example: str, changes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
):
    """Of a family without it, and of one whose other models have it."""
    workflow = str(EXAMPLES / f"api/{example}.json")
    command = ["compare", workflow, "--tiny", "--quality", "exact,int8+sparse", "--out", str(tmp_path)]
    assert cli.main([*command, *changes]) == 2
    assert "quality is 'int8+sparse', which Wan, but not TI2V, and HunyuanVideo have" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def video(frames: int, height: int = 32, width: int = 48) -> torch.Tensor:
    """Each frame is grey of its own, from 0.2 to 0.9."""
    return torch.linspace(0.2, 0.9, frames)[:, None, None, None].expand(frames, height, width, 3)


def run_compare_node(**given: Any) -> torch.Tensor:
    node = HEADLESS_NODES["TPUCompare"]
    assert isinstance(node, Node)
    (found,) = node.run(Host(), **node.values(given))
    return found


def test_compare_node_side_by_side_places_results_below_labels():
    """A shorter one stays on its last frame; one of another shape is seen whole, between bars."""
    first, second = video(5), torch.full((3, 64, 48, 3), 0.5)
    found = run_compare_node(frames=first, frames_2=second, layout="side by side", labels="exact, int8")
    assert found.shape == (5, 32 + media.LABEL_HEIGHT, 2 * 48, 3)
    labels, below = found[:, : media.LABEL_HEIGHT], found[:, media.LABEL_HEIGHT :]
    assert torch.equal(below[:, :, :48], first)
    assert below[4, 16, 48 + 24].tolist() == pytest.approx([0.5] * 3, rel=1e-5) and not below[4, :, 48:54].any()
    assert (
        labels[:, :, :48].any()
        and labels[:, :, 48:].any()
        and not torch.equal(labels[..., :48, :], labels[..., 48:, :])
    )
    unnamed = run_compare_node(frames=first, frames_2=second, layout="side by side", labels="")
    assert torch.equal(unnamed[:, media.LABEL_HEIGHT :], below) and not torch.equal(unnamed, found)


def test_compare_node_contact_sheet_spans_first_to_last_frame():
    frames = video(81)
    found = run_compare_node(frames=frames, layout="contact sheet", pictures=5, columns=3)
    tall = 32 + media.LABEL_HEIGHT
    assert found.shape == (1, 2 * tall, 3 * 48, 3)
    middles = found[0, media.LABEL_HEIGHT + 16 :: tall, 24::48, 0].flatten().tolist()
    assert middles == pytest.approx([*(frames[at, 0, 0, 0].item() for at in (0, 20, 40, 60, 80)), 0.0])
    # A video and a picture: rows of their own, as wide as each other.
    both = run_compare_node(frames=frames, frames_2=video(1), layout="contact sheet", pictures=5, columns=3)
    assert both.shape == (1, 3 * tall, 3 * 48, 3)
    assert torch.equal(both[:, media.LABEL_HEIGHT : tall], found[:, media.LABEL_HEIGHT : tall])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"labels": "a, b"}, Expected("node.compare_too_many_labels", label_count=2, result_count=1)),
        (
            {"frames": torch.zeros(0, 8, 8, 3)},
            Expected("media.image_shape_wrong", dtype=torch.float32, shape=(0, 8, 8, 3)),
        ),
        ({"frames_2": torch.full((1, 8, 8, 3), torch.nan)}, Expected("media.image_not_finite")),
        (
            {"frames": torch.zeros(1).expand(300, 2000, 2000, 3)},
            Expected("node.compare_too_large", shown=300, width=2000, height=2000, pixels=1200),
        ),
    ],
    ids=["labels", "empty", "NaN", "huge"],
)
def test_compare_node_invalid_inputs_raise_value_error(given: dict[str, Any], expected: Expected):
    with raises_message(ValueError, expected):
        run_compare_node(**{"frames": video(2), "layout": "side by side", **given})
