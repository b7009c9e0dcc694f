"""Whatever a user wrote, what made a file is read back from it as it went in, and never keeps the file from being
written.
"""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from comfyui_tpu.nodes.graphs.provenance import KEY, build_metadata
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.tpu_runtime import media
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

IMAGE = torch.zeros(2, 16, 16, 3)
TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345"
# What looks like a secret, what JSON escapes, what names a path, and what no encoding but JSON's has.
PIECES = st.sampled_from(
    [
        *('bearer "Frodo"', "a ring bearer\\", "Bearer\t\n", 'bearer", "x": "', "http://a:b@c", "://@", "@"),
        *("?token=x&sig='", "hf_abcdefghijklmnopqrst", '"', "\\", "\\u0000", "\x00", "\x7f", "\x1b[2J", "\ud800"),
        *("/", "/tmp", "~", "é", "写", "\U0001f600", "&amp;", "%s", "{}", "\r\n", " " * 300),
    ]
)
TEXTS = st.text(max_size=20) | st.lists(PIECES | st.text(max_size=3), max_size=6).map("".join)


def record_workflow(text: str, prefix: str = "x", title: str = "t") -> tuple[dict[str, Any], dict[str, str]]:
    """A workflow of this prompt, and what a file holds of it."""
    workflow = {
        "1": {"class_type": "Wan21TextEncoder", "inputs": {"prompt": text, "negative_prompt": text}},
        "2": {
            "class_type": "SaveImage",
            "inputs": {"images": ["1", 0], "filename_prefix": prefix},
            "_meta": {"title": title},
        },
    }
    return workflow, build_metadata(workflow, {}, HEADLESS_NODES)


def of_webp(path: Path) -> str:
    with Image.open(path) as opened:
        return opened.getexif()[0x0110].removeprefix("prompt:")


@settings(max_examples=150)
@given(text=TEXTS, prefix=st.text(max_size=8).filter(lambda text: text[:1] not in ("/", "~")), title=TEXTS)
def test_any_prompt_round_trips_through_image_metadata(tmp_path_factory: pytest.TempPathFactory, text, prefix, title):
    workflow, told = record_workflow(text, prefix, title)
    path = tmp_path_factory.getbasetemp() / "any.png"
    media.save_image(path, IMAGE[0], told)
    with Image.open(path) as opened:
        assert json.loads(opened.text["prompt"]) == {**workflow, "1": {**workflow["1"], "_meta": {}}}
    path = path.with_suffix(".webp")
    media.save_animation(path, IMAGE, fps=8, lossless=False, quality=1, effort=0, prompt=told["prompt"])
    assert json.loads(of_webp(path))["1"]["inputs"]["prompt"] == text


@settings(max_examples=15)
@given(text=TEXTS)
def test_any_prompt_round_trips_through_video_metadata(tmp_path_factory: pytest.TempPathFactory, text):
    path = tmp_path_factory.getbasetemp() / "any.mp4"
    media.save_video(path, media.Video(frames=IMAGE, frame_rate=Fraction(8)), metadata=record_workflow(text)[1])
    with av.open(str(path)) as container:
        assert json.loads(container.metadata["prompt"])["1"]["inputs"]["prompt"] == text


@pytest.mark.parametrize("text", ["a" * 2**20, '"' * 2**18, "写" * 2**18], ids=["letters", "quotes", "ideographs"])
def test_long_prompt_round_trips_through_every_file_format(tmp_path: Path, text: str):
    told = record_workflow(text)[1]
    media.save_image(tmp_path / "x.png", IMAGE[0], told)
    media.save_animation(tmp_path / "x.webp", IMAGE, fps=8, lossless=False, quality=1, effort=0, prompt=told["prompt"])
    media.save_video(tmp_path / "x.mp4", media.Video(frames=IMAGE, frame_rate=Fraction(8)), metadata=told)
    with Image.open(tmp_path / "x.png") as image, av.open(str(tmp_path / "x.mp4")) as video:
        found = [image.text["prompt"], of_webp(tmp_path / "x.webp"), video.metadata["prompt"]]
    assert all(json.loads(one)["1"]["inputs"]["prompt"] == text for one in found)


@settings(max_examples=40)
@given(prompt=TEXTS)
def test_save_animation_arbitrary_metadata_text_succeeds(tmp_path_factory: pytest.TempPathFactory, prompt):
    path = tmp_path_factory.getbasetemp() / "any.webp"
    media.save_animation(path, IMAGE, fps=8, lossless=False, quality=1, effort=0, prompt=prompt)
    with Image.open(path) as opened:
        assert opened.n_frames == 2 or opened.size == (16, 16)


@pytest.mark.parametrize("token", [TOKEN, 'my "own" gateway\\key'])
def test_build_metadata_redacts_tokens(monkeypatch: pytest.MonkeyPatch, token: str):
    monkeypatch.setenv("HF_TOKEN", token)
    text = f"draw {token}, and bearer {TOKEN[:-1]}x"
    _, told = record_workflow(text, f"of {token}", token)
    found = json.loads(told["prompt"])
    assert found["1"]["inputs"]["prompt"] == text.replace(token, "***")
    assert found["2"]["inputs"]["filename_prefix"] == "of ***" and found["2"]["_meta"]["title"] == "***"
    assert KEY not in told["prompt"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("/secret/a.safetensors", "a.safetensors"),
        ("/secret/a.safetensors + /secret/b.gguf", "a.safetensors + b.gguf"),
        ("a.safetensors + /secret/deep/b.gguf + owner/model", "a.safetensors + b.gguf + owner/model"),
        ("~/secret/a.safetensors + wan2.1-t2v-14b", "a.safetensors + wan2.1-t2v-14b"),
        (r"C:\secret\a.safetensors + \\host\secret\b.gguf", "a.safetensors + b.gguf"),
        ("owner/model", "owner/model"),
        ("sub/a.safetensors", "sub/a.safetensors"),
        ("/", "/"),
    ],
)
def test_build_metadata_strips_local_paths_of_model_id(value: str, said: str):
    """Also of several files that are joined, and of files that are there no more."""
    model = {"class_type": "TPUModelLoader", "inputs": {"model_id": value}}
    found = json.loads(build_metadata({"1": model}, {}, HEADLESS_NODES)["prompt"])
    assert found["1"]["inputs"]["model_id"] == said
