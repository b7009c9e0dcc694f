"""Draws the examples' thumbnails, `examples/*.jpg`, which ComfyUI's template browser shows: a square picture each.

It has the workflow's own graph, as ComfyUI's page draws it, below its prompt or the picture that it starts from, and
above a caption. Once there are results of real weights, `--frame` puts one in the place of the graph.

Run: python tools/thumbnails.py [--only NAME ...] [--frame NAME=FILE ...]. It needs a running ComfyUI with this pack
(`--url`), playwright, and Chromium. Where ComfyUI lacks the LoRAs, even as empty files, their loaders are drawn red.
"""

import argparse
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np

# Run as a file, this folder is where Python looks first.
import workflows
from comfyui_tpu.nodes.graphs.miniature import EXAMPLES_PICTURE
from graphs import Example
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps

TITLES = {example.name: example.title for example in workflows.ALL}
SIDE, EDGE, BAND = 512, 16, 128
# Cards write what they are across the left of this strip.
BADGE = 70
BAND_COLOUR, BRIGHT, DIM = "#111113", "#fafafa", "#c9c9d1"
# A node of the dark page is hardly seen at this size.
BRIGHTER = 1.5
MOST_BYTES = 40_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = "--headless --no-sandbox --disable-gpu --disable-background-networking".split()
READY = "window.app && app.graph && Object.keys(LiteGraph.registered_node_types).length > 50"
# Loads a workflow, takes its note away, and shows the rest without the page around it; the picture's box on the screen.
DRAW = """async (workflow) => {
    await app.loadGraphData(workflow);
    for (const note of app.graph.nodes.filter((node) => node.type === "MarkdownNote")) app.graph.remove(note);
    // Until the picture of a node is there, and a frame has been drawn.
    const pictures = () => app.graph.nodes.filter((node) => node.type === "LoadImage");
    while (pictures().some((node) => !node.imgs?.[0]?.complete)) await new Promise((done) => setTimeout(done, 50));
    const boxes = app.graph.nodes.map((node) => Array.from(node.boundingRect ?? node.getBounding()));
    const [left, top] = [0, 1].map((axis) => Math.min(...boxes.map((box) => box[axis])));
    const [right, bottom] = [0, 1].map((axis) => Math.max(...boxes.map((box) => box[axis] + box[axis + 2])));
    const scale = Math.min(1, (innerWidth - 40) / (right - left), (innerHeight - 40) / (bottom - top));
    Object.assign(app.canvas.ds, {scale, offset: [20 / scale - left, 20 / scale - top]});
    app.canvas.draw(true, true);
    await new Promise((done) => setTimeout(done, 500));
    return {x: 10, y: 10, width: scale * (right - left) + 20, height: scale * (bottom - top) + 20};
}"""
BARE = "body * { visibility: hidden } #graph-canvas, .dom-widget, .dom-widget * { visibility: visible !important }"


def graphs(url: str, names: Sequence[str]) -> Iterator[tuple[str, Image.Image]]:
    """Pictures of these examples' graphs, from ComfyUI's page at `url`."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        raise SystemExit(f"There is no browser on the PATH: {', '.join(BROWSERS)}. Install one.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 2600, "height": 1500})
        page.goto(url, wait_until="domcontentloaded")
        page.wait_for_function(READY)
        page.add_style_tag(content=BARE)
        for name in names:
            box = page.evaluate(DRAW, json.loads((workflows.EXAMPLES / f"{TITLES[name]}.json").read_text("utf-8")))
            drawn = Image.open(io.BytesIO(page.screenshot(clip=box))).convert("RGB")
            yield name, ImageEnhance.Brightness(drawn).enhance(BRIGHTER)
        browser.close()


def frame(path: Path) -> Image.Image:
    """A picture; of a video its first frame, one of its middle and its last, side by side."""
    if path.suffix != ".mp4":
        return Image.open(path)
    with av.open(str(path)) as video:
        frames = [one.to_ndarray(format="rgb24") for one in video.decode(video=0)]
    return Image.fromarray(np.concatenate([frames[0], frames[len(frames) // 2], frames[-1]], axis=1))


def thumbnail(example: Example, drawn: Image.Image) -> Image.Image:
    """What it starts from, the graph or a frame, and the caption, from top to bottom."""
    width, height = SIDE - 2 * EDGE, SIDE - BAND - BADGE - EDGE
    graph = ImageOps.contain(drawn.convert("RGB"), (SIDE, height * 2 // 3), Image.Resampling.LANCZOS)
    whole = Image.new("RGB", (SIDE, SIDE), graph.getpixel((0, 0)))  # type: ignore[arg-type]
    draw = ImageDraw.Draw(whole)
    top = SIDE - BAND - graph.height - EDGE // 2
    whole.paste(graph, ((SIDE - graph.width) // 2, top))
    if example.has_picture:
        picture = ImageOps.fit(
            Image.open(workflows.EXAMPLES / EXAMPLES_PICTURE).convert("RGB"), (SIDE, top - EDGE // 2)
        )
        whole.paste(picture, (0, 0))
    else:
        _words(draw, example.values["prompt"], (EDGE, BADGE, width, top - BADGE - EDGE))
    draw.rectangle((0, SIDE - BAND, SIDE, SIDE), fill=BAND_COLOUR)
    place = SIDE - BAND + 7
    for line, size, colour in zip(workflows.caption(example), (38, 25, 25), (BRIGHT, DIM, DIM), strict=True):
        draw.text((EDGE, place), line, fill=colour, font=_font(line, size, width))
        place += size + 9
    return whole


def _font(line: str, size: int, width: int) -> Any:
    """As large as asked, or as fits."""
    font = ImageFont.load_default(size)
    return font if font.getlength(line) <= width else _font(line, size - 1, width)


def _words(draw: ImageDraw.ImageDraw, text: str, box: tuple[int, int, int, int]) -> None:
    """As large as they fit; of a long text its beginning."""
    left, top, width, height = box
    text = textwrap.shorten(text, 150, placeholder=" ...")
    for size in range(34, 15, -1):
        font = ImageFont.load_default(size)
        lines = textwrap.wrap(text, int(width / (size * 0.5)))
        if len(lines) * size * 1.3 <= height and all(font.getlength(line) <= width for line in lines):
            break
    else:
        raise ValueError(f"{text!r} has no room in {width}x{height}.")
    for line in lines:
        draw.text((left, top), line, fill=BRIGHT, font=font)
        top += size * 1.3


def comment(example: Example) -> str:
    """What is in the caption, for a file's comment: by it a test sees what is out of date."""
    return "; ".join(workflows.caption(example))


def save(path: Path, picture: Image.Image, words: str) -> None:
    """As well as `MOST_BYTES` allow."""
    for quality in range(92, 30, -4):
        picture.save(path, quality=quality, optimize=True, comment=words.encode())
        if path.stat().st_size <= MOST_BYTES:
            return
    raise ValueError(f"{path} does not become smaller than {MOST_BYTES} bytes.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8188", help="a running ComfyUI (http://127.0.0.1:8188)")
    parser.add_argument("--only", action="append", metavar="NAME", help="this example; repeatable")
    parser.add_argument(
        "--frame", action="append", default=[], metavar="NAME=FILE", help="a picture or video made by it; repeatable"
    )
    options = parser.parse_args(arguments)
    by_name: Mapping[str, Example] = {example.name: example for example in workflows.ALL}
    frames = dict(one.split("=", 1) for one in options.frame)
    names = options.only or [*by_name]
    given = [(name, frame(Path(path))) for name, path in frames.items()]
    wanted = [name for name in names if name not in frames]
    drawn = graphs(options.url, wanted) if wanted else ()
    for name, picture in (*given, *drawn):
        path = workflows.EXAMPLES / f"{TITLES[name]}.jpg"
        save(path, thumbnail(by_name[name], picture), comment(by_name[name]))
        sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")


if __name__ == "__main__":
    main()
