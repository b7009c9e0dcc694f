"""Images and videos as files."""

import contextlib
import json
import re
import resource
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.closeness import OPERATION, difference
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tpu_runtime import media
from comfyui_tpu.tpu_runtime.files import WriteError
from PIL import Image


def gradient_video(num_frames: int, height: int, width: int) -> torch.Tensor:
    """A red ramp to the right, a green one down, blue rising with time."""
    ramps = torch.meshgrid(*(torch.linspace(0, 1, size) for size in (num_frames, height, width)), indexing="ij")
    return torch.stack((ramps[2], ramps[1], ramps[0]), dim=-1)


@pytest.mark.parametrize(
    ("fps", "rate"),
    [
        (16, Fraction(16)),
        (16.0, Fraction(16)),
        (12.5, Fraction(25, 2)),
        (23.976, Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
    ],
)
def test_exact_frame_rate_returns_fraction(fps: float, rate: Fraction):
    assert media.exact_frame_rate(fps) == rate


def test_save_video_keeps_frames_size_rate_and_colours(tmp_path: Path):
    frames = gradient_video(7, 48, 80)
    path = tmp_path / "new" / "clip.mp4"
    media.save_video(path, media.Video(frames=frames, frame_rate=Fraction(24000, 1001)))
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.width, stream.height, stream.average_rate) == (80, 48, Fraction(24000, 1001))
        assert stream.codec_context.colorspace == 1
    assert len(decoded) == 7
    error = np.abs(np.stack(decoded) / 255 - frames.numpy()).mean(axis=(0, 1, 2))
    # Measured 0.009, from halved chroma; with the wrong colour matrix it is 0.043.
    assert error.max() < 0.015, f"mean error of red, green, blue: {error}"
    data = path.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat"), "not a fast start"


def test_save_video_is_deterministic(tmp_path: Path):
    """Measured without our option to x264: a third of the files of this noise differ from the others."""
    generator = torch.Generator().manual_seed(0)
    blocks, grain = (torch.rand(5, *size, 3, generator=generator) for size in ((10, 14), (80, 112)))
    frames = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2) + 0.05 * grain
    video = media.Video(frames=frames, frame_rate=Fraction(16))
    files = set()
    for _ in range(40):
        media.save_video(tmp_path / "clip.mp4", video)
        files.add((tmp_path / "clip.mp4").read_bytes())
    assert len(files) == 1


@pytest.mark.parametrize(
    ("shape", "key", "parameters"),
    [((3, 15, 16, 3), "media.video_size_odd", {"width": 16, "height": 15}), ((0, 16, 16, 3), "media.no_frames", {})],
)
def test_save_video_invalid_frames_raise_value_error(
    tmp_path: Path, shape: tuple[int, ...], key: str, parameters: dict
):
    with raises_message(ValueError, key, path=tmp_path / "clip.mp4", **parameters):
        media.save_video(tmp_path / "clip.mp4", media.Video(frames=torch.zeros(shape), frame_rate=Fraction(16)))
    assert list(tmp_path.iterdir()) == []


def test_free_path_adds_number_to_existing_name(tmp_path: Path):
    for expected in ("a.png", "a_00002.png", "a_00003.png"):
        path = media.free_path(tmp_path, "a", ".png")
        assert path.name == expected
        path.touch()


def test_image_round_trips_through_file(tmp_path: Path):
    image = gradient_video(2, 5, 7)[1]
    media.save_image(tmp_path / "image.png", image)
    loaded, mask = media.load_image(tmp_path / "image.png")
    assert loaded.shape == (1, 5, 7, 3) and mask.shape == (1, 5, 7)
    assert ((loaded[0] - image).abs() <= 0.5001 / 255).all() and not mask.any()  # half of a file's step


def test_load_image_mask_is_one_where_transparent(tmp_path: Path):
    Image.fromarray(np.array([[[255, 0, 0, 0], [255, 0, 0, 255]]], dtype=np.uint8)).save(tmp_path / "image.png")
    assert media.load_image(tmp_path / "image.png")[1].tolist() == [[[1, 0]]]


def test_load_image_invalid_file_raises_value_error(tmp_path: Path):
    (tmp_path / "text.png").write_text("text")
    for name, key in (("text.png", "media.not_image"), ("none.png", "media.no_image")):
        with raises_message(ValueError, key):
            media.load_image(tmp_path / name)


@pytest.mark.parametrize("channels", [1, 3, 4], ids=["grey", "rgb", "rgba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_to_rgb_converts_channels_and_clamps_values(channels: int, dtype: torch.dtype):
    image = torch.tensor([-0.5, 0.25, 1.5, 0.0])[:channels].to(dtype).expand(2, 6, 8, channels)
    expected = torch.tensor([0.0, 0.25, 1.0] if channels > 1 else [0.0] * 3).expand(2, 6, 8, 3)
    found = media.to_rgb(image)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert torch.equal(media.resize(image, 6, 8, "crop"), expected)
    assert difference(media.resize(image, 4, 4, "crop"), expected[:, :4, :4]) <= OPERATION


def test_save_image_accepts_grey_image(tmp_path: Path):
    media.save_image(tmp_path / "grey.png", torch.full((5, 7, 1), 0.5))
    assert media.load_image(tmp_path / "grey.png")[0].unique().tolist() == [pytest.approx(128 / 255)]


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (torch.zeros(5, 7, 3), Expected("media.image_shape_wrong", dtype=torch.float32, shape="(5, 7, 3)")),
        (torch.zeros(1, 5, 7, 2), Expected("media.image_shape_wrong", shape="(1, 5, 7, 2)")),
        (torch.zeros(0, 5, 7, 3), Expected("media.image_shape_wrong", shape="(0, 5, 7, 3)")),
        (torch.zeros(1, 5, 7, 3, dtype=torch.uint8), Expected("media.image_shape_wrong", dtype=torch.uint8)),
        (torch.full((1, 5, 7, 3), torch.nan), Expected("media.image_not_finite")),
    ],
    ids=["no batch", "two channels", "empty", "whole numbers", "NaN"],
)
def test_resize_invalid_image_raises_value_error(image: torch.Tensor, expected: Expected):
    with raises_message(ValueError, expected):
        media.resize(image, 16, 16, "crop")


def test_save_video_nonfinite_frames_raise_value_error(tmp_path: Path):
    frames = torch.full((2, 16, 16, 3), torch.nan)
    with raises_message(ValueError, "media.image_not_finite"):
        media.save_video(tmp_path / "clip.mp4", media.Video(frames=frames, frame_rate=Fraction(16)))
    assert list(tmp_path.iterdir()) == []


def test_save_animation_keeps_pixels_and_prompt_metadata(tmp_path: Path):
    frames, prompt = gradient_video(3, 24, 40), {"1": {"inputs": {"text": "ein Fuß 红"}}}
    path = tmp_path / "new" / "clip.webp"
    media.save_animation(path, frames, fps=16, lossless=True, quality=80, effort=0, prompt=json.dumps(prompt))
    with Image.open(path) as opened:
        name, _, value = opened.getexif()[0x0110].partition(":")
        assert (name, json.loads(value)) == ("prompt", prompt)
        assert (opened.n_frames, opened.info["loop"]) == (3, 0)
        for index, frame in enumerate(frames):
            opened.seek(index)
            assert opened.convert("RGB").tobytes() == media.to_pillow(frame).tobytes()
            opened.load()
            assert opened.info["duration"] == 62


def test_save_animation_invalid_image_raises_value_error(tmp_path: Path):
    with raises_message(ValueError, "media.image_shape_wrong"):
        media.save_animation(tmp_path / "x.webp", torch.zeros(2, 3), fps=8, lossless=True, quality=80, effort=0)


@contextlib.contextmanager
def disk_that_takes(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("taken", [0, 1, 2000])
@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.webp", "x.mp4"])
def test_save_on_full_disk_raises_write_error_and_keeps_old_file(tmp_path: Path, name: str, taken: int):
    frames = torch.rand(4, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "out" / name

    def save() -> None:
        if path.suffix == ".mp4":
            media.save_video(path, media.Video(frames=frames, frame_rate=Fraction(8)))
        elif path.suffix == ".webp":
            media.save_animation(path, frames, fps=8, lossless=True, quality=80, effort=0)
        else:
            media.save_image(path, frames[0])

    with (
        disk_that_takes(taken),
        raises_message(WriteError, "file.disk_full", folder=path.parent, instead=re.compile("--out$")),
    ):
        save()
    assert list(path.parent.iterdir()) == []
    save()
    before = path.read_bytes()
    with disk_that_takes(taken), pytest.raises(WriteError):
        save()
    assert [path] == list(path.parent.iterdir()) and path.read_bytes() == before
