"""Makes the examples' thumbnails, `examples/*.jpg`, which ComfyUI's template browser shows: a square picture each.

Each has what the example makes with `--tiny`, of a video four frames, and where it starts from a picture that one
first. Above stands the prompt, which is the built-in miniature's, and below what the example itself takes.

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
# Cards write what they are over this corner.
BADGE = 250, 74
BAND_COLOUR, BRIGHT, DIM = "#111113", "#fafafa", "#c9c9d1"
MOST_BYTES = 40_000


def made(example: Example) -> list[tuple[str, Image.Image]]:
    """Up to four pictures, with a word on each: what it starts from, and what comes of it."""
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
    # The first frame of a video is that picture.
    return [("starts from", given), *(found[1:] or found)]


def pictures(path: Path) -> list[Image.Image]:
    """The frames of a video; of a picture it alone."""
    with av.open(str(path)) as video:
        return [frame.to_image() for frame in video.decode(video=0)]


def thumbnail(example: Example, shown: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Whose the pictures are, right of what cards write; the pictures, in rows; and the caption."""
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
    """Lines of these sizes and colours, one below the other."""
    left, top = place
    for line, size, colour in lines:
        draw.text((left, top + size), line, colour, _font(line, size, SIDE - EDGE - left), "ls")
        top += size + between


def _font(line: str, size: int, width: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """As large as asked, or as fits."""
    font = ImageFont.load_default(size)
    return font if font.getlength(line) <= width else _font(line, size - 1, width)


def prompt(example: Example) -> str:
    """The miniature's, in quotes."""
    text = tiny.find_trained_texts(example.spec, example.spec.miniature.id).get("prompt")
    return f'"{text}"' if text else "random weights"


def comment(example: Example) -> str:
    """What a thumbnail says, for its file's comment: by it a test sees what is out of date."""
    return "; ".join((prompt(example), *workflows.caption(example)))


def save(path: Path, picture: Image.Image, words: str) -> None:
    """As well as `MOST_BYTES` allow."""
    for quality in range(92, 30, -4):
        picture.save(path, quality=quality, optimize=True, comment=words.encode())
        if path.stat().st_size <= MOST_BYTES:
            return
    raise ValueError(f"{path} does not become smaller than {MOST_BYTES} bytes.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this example; repeatable")
    names = parser.parse_args(arguments).only
    for example in workflows.ALL:
        if names is None or example.name in names:
            path = workflows.EXAMPLES / f"{example.title}.jpg"
            save(path, thumbnail(example, made(example)), comment(example))
            sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
