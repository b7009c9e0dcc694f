"""Make the examples' thumbnails for ComfyUI's template browser: the square images `examples/*.jpg`.

Each shows the example's result with `--tiny`: an image, or four frames of a video. A start image comes first. Above it
is the prompt of the tiny model, below it the size and predicted time of the example itself.

Run: python tools/thumbnails.py [--only NAME ...]. It runs the examples without ComfyUI, about ten minutes on a CPU.
"""

import argparse
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import av

# Run as a file, this folder is where Python looks first.
import workflows
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes.graphs.tiny_models import EXAMPLE_IMAGE
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from graphs import Example
from PIL import Image, ImageDraw, ImageFont, ImageOps

SIDE, EDGE, BAND, GAP = 512, 12, 110, 4
# The template browser covers this corner with its badge.
BADGE = 250, 74
BAND_COLOUR, BRIGHT, DIM = "#111113", "#fafafa", "#c9c9d1"
MOST_BYTES = 40_000


def made(example: Example) -> list[tuple[str, Image.Image]]:
    """Return up to four images with a label on each: the start image, and frames of the result."""
    workflow = workflows.EXAMPLES / "api" / f"{example.name}.json"
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", str(workflow), "--tiny", "--input", str(workflows.EXAMPLES), "--out", folder]
        if code := cli.main(words):
            raise SystemExit(code)
        frames = [picture for path in Path(folder).iterdir() for picture in pictures(path)]
    last = len(frames) - 1
    found = [(f"frame {index + 1}", frames[index]) for index in (round(last * third / 3) for third in range(4))]
    found = found if last else [("", frames[0])]
    if not example.has_picture:
        return found
    (given,) = pictures(workflows.EXAMPLES / (example.spec.miniature.picture or EXAMPLE_IMAGE))
    # The first frame of a video is the start image.
    return [("starts from", given), *(found[1:] or found)]


def pictures(path: Path) -> list[Image.Image]:
    """Return the frames of a video, or a single image."""
    with av.open(str(path)) as video:
        return [frame.to_image() for frame in video.decode(video=0)]


def thumbnail(example: Example, shown: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Draw the tiny model's prompt next to the badge, the images in rows, and the caption."""
    whole = Image.new("RGB", (SIDE, SIDE), BAND_COLOUR)
    draw = ImageDraw.Draw(whole)
    lines = [("Built-in miniature:", 20, DIM), *((line, 20, BRIGHT) for line in textwrap.wrap(prompt(example), 25))]
    _write(draw, (BADGE[0], 2), lines, 2)
    columns, rows, room = min(2, len(shown)), -(-len(shown) // 2), SIDE - BADGE[1] - BAND
    fitting = ((SIDE - GAP * (columns - 1)) // columns, (room - GAP * (rows - 1)) // rows)
    width, height = ImageOps.contain(shown[0][1], fitting).size
    start = (SIDE - columns * (width + GAP) + GAP) // 2, BADGE[1] + (room - rows * (height + GAP) + GAP) // 2
    for index, (word, picture) in enumerate(shown):
        left, top = start[0] + index % columns * (width + GAP), start[1] + index // columns * (height + GAP)
        whole.paste(ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS), (left, top))
        place = (left + EDGE, top + height - 8)
        draw.text(place, word, BRIGHT, ImageFont.load_default(18), "ls", stroke_width=2, stroke_fill=BAND_COLOUR)
    caption = zip(workflows.caption(example), (36, 24, 24), (BRIGHT, DIM, DIM), strict=True)
    _write(draw, (EDGE, SIDE - BAND), caption, 7)
    return whole


def _write(
    draw: ImageDraw.ImageDraw, place: tuple[int, int], lines: Iterable[tuple[str, int, str]], between: int
) -> None:
    """Write lines of these sizes and colours, one below the other."""
    left, top = place
    for line, size, colour in lines:
        draw.text((left, top + size), line, colour, _font(line, size, SIDE - EDGE - left), "ls")
        top += size + between


def _font(line: str, size: int, width: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Return the font in `size`, or smaller if the line does not fit `width`."""
    font = ImageFont.load_default(size)
    return font if font.getlength(line) <= width else _font(line, size - 1, width)


def prompt(example: Example) -> str:
    """Return the tiny model's prompt in quotes."""
    text = tiny.find_trained_texts(example.spec, example.spec.miniature.id).get("prompt")
    return f'"{text}"' if text else "random weights"


def comment(example: Example) -> str:
    """Return the text of a thumbnail, for its file's comment; a test uses it to find outdated thumbnails."""
    return "; ".join((prompt(example), *workflows.caption(example)))


def save(path: Path, picture: Image.Image, words: str) -> None:
    """Save in the best quality that `MOST_BYTES` allow."""
    for quality in range(92, 30, -4):
        picture.save(path, quality=quality, optimize=True, comment=words.encode())
        if path.stat().st_size <= MOST_BYTES:
            return
    raise ValueError(f"{path} cannot be compressed to {MOST_BYTES} bytes.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="only this example; repeatable")
    names = parser.parse_args(arguments).only
    for example in workflows.ALL:
        if names is None or example.name in names:
            path = workflows.EXAMPLES / f"{example.title}.jpg"
            save(path, thumbnail(example, made(example)), comment(example))
            sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
