"""Images and videos as files. Frames are IMAGE tensors: `[frames, height, width, rgb]` float32 on the CPU, 0 to 1."""

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import open_atomic, report_full_disk
from .messages import compose

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

_BT709 = 1
_NTSC = Fraction(1000, 1001)
# Advice for a full disk.
_INSTEAD = "name another folder with --out"
LABEL_HEIGHT = 24  # pixels, of the label above each image


@dataclass(frozen=True, kw_only=True)
class Video:
    """Frames and the number of frames per second."""

    frames: "torch.Tensor"  # IMAGE [frames, height, width, rgb] in 0..1
    frame_rate: Fraction

    def __repr__(self) -> str:
        return f"Video({len(self.frames)} frames, {self.frame_rate} fps)"


def exact_frame_rate(fps: float) -> Fraction:
    """Return the exact rate that `fps` stands for: 16.0 is 16, and 23.976 is NTSC's 24000/1001."""
    ntsc = round(fps / _NTSC) * _NTSC
    if not float(fps).is_integer() and abs(ntsc - Fraction(fps)) < Fraction(5, 1000):
        return ntsc
    return Fraction(fps).limit_denominator(1000)


def free_path(folder: Path, stem: str, suffix: str) -> Path:
    """Return `folder/stem.suffix`, or the first of `stem_00002`, `stem_00003`, … that does not exist.

    Creates the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, number = folder / f"{stem}{suffix}", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}_{number:05}{suffix}"
    return path


def save_video(path: Path, video: Video, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write H.264 (yuv420p, BT.709, fast start) in an MP4.

    path: of the file, which is written completely or not at all.
    video: with even width and height, which yuv420p needs.
    metadata: by name; None for none.
    On one machine the same frames give the same file. x264's number of threads depends on the cores and changes the
    file.
    Raises `ValueError` for no frames and for odd sizes, `WriteError` if the disk is full.
    """
    if len(video.frames) == 0:
        raise ValueError(compose("media.no_frames", path=path))
    check_image(video.frames)
    height, width = video.frames.shape[1:3]
    if height % 2 or width % 2:
        raise ValueError(compose("media.video_size_odd", path=path, width=width, height=height))
    with _written(path) as scratch:
        _write_video(scratch, video, metadata or {})


def _write_video(path: Path, video: Video, metadata: Mapping[str, str]) -> None:
    import av

    height, width = video.frames.shape[1:3]
    flags = "+faststart+use_metadata_tags" if metadata else "+faststart"
    with av.open(str(path), mode="w", options={"movflags": flags}) as container:
        container.metadata.update(metadata)
        # Otherwise x264 uses code for the specific processor, whose results also differ from run to run.
        options = {"crf": "18", "x264-params": "cpu-independent=1"}
        stream = container.add_stream("libx264", rate=video.frame_rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        _mark_bt709(stream.codec_context)
        for image in video.frames:
            frame = av.VideoFrame.from_ndarray(_bytes(image), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=_BT709)
            _mark_bt709(frame)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _mark_bt709(target: Any) -> None:
    """Tag BT.709; players guess the colours of untagged videos from the size. `color_range` 1 is MPEG's 16..235."""
    target.color_primaries = target.color_trc = target.colorspace = _BT709
    target.color_range = 1


def _bytes(image: "torch.Tensor") -> "np.ndarray":
    """Return `[height, width, rgb]` in [0, 1] as uint8, rounded."""
    import torch

    return to_rgb(image[None])[0].mul(255).round().to(torch.uint8).numpy()


def to_pillow(image: "torch.Tensor") -> "Image.Image":
    """Return an IMAGE `[height, width, rgb]` as a Pillow image, the input of upstream's processors."""
    from PIL import Image

    return Image.fromarray(_bytes(image))


def check_image(images: "torch.Tensor") -> None:
    """Raise `ValueError` unless images are floating, finite, not empty and `[N, height, width, 1, 3 or 4]`."""
    import torch

    if images.ndim != 4 or images.shape[3] not in (1, 3, 4) or not images.numel() or not images.is_floating_point():
        raise ValueError(compose("media.image_shape_wrong", dtype=images.dtype, shape=tuple(images.shape)))
    if not torch.isfinite(images).all():
        raise ValueError(compose("media.image_not_finite"))


def to_rgb(images: "torch.Tensor") -> "torch.Tensor":
    """Return an IMAGE `[N, height, width, channels]` of any node as RGB float32 on the CPU in 0..1.

    Drops alpha, expands grey, and clamps values beyond the range. Raises `ValueError` for other tensors.
    """
    import torch

    check_image(images)
    colours = images[..., :3].to(torch.float32).cpu().clamp(0.0, 1.0)
    return colours.expand(*colours.shape[:3], 3)


def save_image(path: Path, image: "torch.Tensor", metadata: Mapping[str, str] | None = None) -> None:
    """Write one image `[height, width, rgb]` in the format of `path`'s ending; a PNG with `metadata` by name."""
    from PIL.PngImagePlugin import PngInfo

    chunks = PngInfo()
    for name, value in (metadata or {}).items():
        chunks.add_text(name, value)
    pillow_image, encoded = to_pillow(image), io.BytesIO()
    pillow_image.save(encoded, _format(path), pnginfo=chunks)  # ignored by other formats
    _write(path, encoded)


def _format(path: Path) -> str:
    """Return Pillow's name of a file's format. Raises `ValueError` for an unknown ending."""
    from PIL import Image

    known = Image.registered_extensions()
    if (suffix := path.suffix.lower()) not in known:
        raise ValueError(compose("media.image_suffix_unknown", path=path, suffix=suffix or "nothing"))
    return known[suffix]


def _write(path: Path, encoded: io.BytesIO) -> None:
    """Write a whole file at once: on a full disk some of Pillow's encoders leave a partial file without an error."""
    with _written(path) as scratch:
        # A buffer of it, kept by an error's traceback, ends Python below 3.12.2 in its search for garbage.
        scratch.write_bytes(encoded.getvalue())


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Yield a scratch file that becomes `path`, whose folder is created; raises `WriteError` on a full disk."""
    with report_full_disk(path.parent, _INSTEAD):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_atomic(path) as scratch:
            yield scratch


_EXIF_MODEL = 0x0110  # tag of the prompt in ComfyUI's WebP files


def save_animation(
    path: Path,
    images: "torch.Tensor",
    *,
    fps: float,
    lossless: bool,
    quality: int,
    effort: int,
    prompt: str | None = None,
) -> None:
    """Write IMAGE frames `[N, height, width, channels]` as one animated WebP that repeats forever.

    path: of the file.
    images: in 0..1.
    fps: frames per second; a frame lasts an integer number of milliseconds.
    lossless: whether to compress without loss.
    quality: 0 to 100.
    effort: 0 to 6.
    prompt: JSON that ComfyUI's page reads from the file; None for none.
    Raises `ValueError` for invalid images.
    """
    check_image(images)
    first, *others = map(to_pillow, images)
    exif = first.getexif()
    if prompt is not None:
        exif[_EXIF_MODEL] = f"prompt:{_ascii(prompt)}"
    encoded = io.BytesIO()
    first.save(
        encoded,
        "WEBP",
        save_all=True,
        append_images=others,
        duration=int(1000 / fps),
        loop=0,
        exif=exif,
        lossless=lossless,
        quality=quality,
        method=effort,
    )
    _write(path, encoded)


def _ascii(text: str) -> str:
    """Return JSON in ASCII, which is all that EXIF holds. Other text is kept except for its non-ASCII characters."""
    return re.sub(r"[^\x00-\x7f]+", lambda found: json.dumps(found[0])[1:-1], text)


def load_image(path: Path) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return an IMAGE `[1, height, width, 3]` and its MASK `[1, height, width]`.

    The mask is 1 where the image is transparent.

    Raises `ValueError` if the file does not exist or is not an image.
    """
    import numpy as np
    import torch
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            rgba = np.asarray(ImageOps.exif_transpose(opened).convert("RGBA"), dtype=np.float32) / 255
    except FileNotFoundError:
        raise ValueError(compose("media.no_image", path=path)) from None
    except UnidentifiedImageError:
        raise ValueError(compose("media.not_image", path=path)) from None
    pixels = torch.from_numpy(rgba)[None]
    return pixels[..., :3].contiguous(), 1 - pixels[..., 3]


RESIZE_MODES = ("crop", "fit")


def resize(images: "torch.Tensor", height: int, width: int, how: str) -> "torch.Tensor":
    """Return IMAGE `[N, height, width, channels]` of any node as RGB of another size.

    The image is not distorted (see `pictures`).

    images: in 0..1.
    height, width: in pixels.
    how: "crop" fills the frame and trims the edges evenly, "fit" adds black bars.
    An image of the right size is returned unchanged. Raises `ValueError` for another `how`.
    """
    import torch.nn.functional as functional

    if how not in RESIZE_MODES:
        raise ValueError(compose("media.resize_unknown", how=repr(how), resize_modes=", ".join(RESIZE_MODES)))
    images = to_rgb(images)
    if tuple(images.shape[1:3]) == (height, width):
        return images
    scales = (height / images.shape[1], width / images.shape[2])
    scale = max(scales) if how == "crop" else min(scales)
    size = [max(1, round(images.shape[1] * scale)), max(1, round(images.shape[2] * scale))]
    pixels = images.movedim(-1, 1)
    scaled = functional.interpolate(pixels, size=size, mode="bicubic", antialias=True, align_corners=False)
    # Negative padding cuts.
    over_y, over_x = height - size[0], width - size[1]
    edges = (over_x // 2, over_x - over_x // 2, over_y // 2, over_y - over_y // 2)
    return functional.pad(scaled.clamp(0.0, 1.0), edges).movedim(1, -1)


def join_images(images: "list[torch.Tensor]") -> "torch.Tensor":
    """Return IMAGEs `[N, height, width, 3]` of one size concatenated in order."""
    import torch

    return torch.cat(images)


def side_by_side(columns: "Sequence[torch.Tensor]", names: Sequence[str]) -> "torch.Tensor":
    """Return images or frames `[number, height, width, 3]` in 0..1 next to each other, with labels above.

    columns: the images. The last frame is repeated in those with fewer frames.
    names: their labels.
    """
    import torch

    most = max(len(frames) for frames in columns)
    whole = (torch.cat([frames, frames[-1:].expand(most - len(frames), -1, -1, -1)]) for frames in columns)
    return torch.cat([_add_label(frames, name) for frames, name in zip(whole, names, strict=True)], dim=2)


def contact_sheet(
    videos: "Sequence[torch.Tensor]", names: Sequence[str], pictures: int, columns: int
) -> "torch.Tensor":
    """Return evenly spaced frames of each video in rows, as one image `[1, height, width, 3]`.

    Each frame has a label above it.

    videos: `[frames, height, width, 3]` each.
    names: in the labels, before the frame's number.
    pictures: frames of each video at most.
    columns: frames in a row at most.
    """
    import torch

    columns, rows = min(columns, pictures, max(map(len, videos))), []
    for frames, name in zip(videos, names, strict=True):
        count, last = min(pictures, len(frames)), len(frames) - 1
        places = [round(index * last / max(1, count - 1)) for index in range(count)]
        labelled = [
            _add_label(frames[frame_index : frame_index + 1], f"{name} {frame_index + 1}/{last + 1}".strip())
            for frame_index in places
        ]
        labelled += [torch.zeros_like(labelled[0])] * (-count % columns)
        rows += [torch.cat(labelled[first : first + columns], dim=2) for first in range(0, len(labelled), columns)]
    return torch.cat(rows, dim=1)


def _add_label(frames: "torch.Tensor", name: str) -> "torch.Tensor":
    """Return frames `[N, height, width, 3]` with the label `name` above."""
    import numpy as np
    import torch
    from PIL import Image, ImageDraw, ImageFont

    line = Image.new("RGB", (frames.shape[2], LABEL_HEIGHT))
    ImageDraw.Draw(line).text((4, 2), name, fill="white", font=ImageFont.load_default(LABEL_HEIGHT - 8))
    above = torch.from_numpy(np.asarray(line, np.float32) / 255).expand(len(frames), -1, -1, -1)
    return torch.cat([above, frames.float().cpu()], dim=1)


def fit_latent_colours(latents: "torch.Tensor") -> tuple[list[list[float]], list[float]]:
    """Return a linear map from latents `[1, channels, ...]` to colours in -1..1.

    The three main axes of the latents become red, green and blue.

    The map is factors, one triple per channel, and an offset.
    """
    import torch

    points = latents[0].flatten(1).T
    centre = points.mean(0)
    _, spread, axes = torch.linalg.svd(points - centre, full_matrices=False)
    deviation = spread[:3] / max(1, len(points) - 1) ** 0.5
    factors = axes[:3].T / (2 * deviation.clamp_min(1e-6))
    return factors.tolist(), (-centre @ factors).tolist()
