"""Draw the pack's icon and banner for the ComfyUI registry: `docs/images/icon.png` and `docs/images/banner.png`.

The drawing has two rows of four chips, as on a TPU v6e host. Their colours go from noise to an image.

Run: python tools/artwork.py
"""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

IMAGES = Path(__file__).parents[1] / "docs" / "images"
# The registry shows icons as squares of at most 400 pixels, banners at 21 to 9.
ICON, BANNER = (400, 400), (1260, 540)
# The drawing is made larger by this factor and then shrunk, so that edges are smooth.
SCALE = 4
GROUND, LINE, INK, FAINT = (23, 26, 33), (86, 96, 116), (236, 240, 247), (150, 160, 178)
# Colours of the chips, from noise to image.
COLOURS = (
    (92, 99, 112), (84, 110, 142), (66, 133, 190), (52, 168, 160), (74, 182, 110), (170, 190, 70), (244, 180, 60),
    (240, 130, 70),
)  # fmt: skip


def draw_chips(draw: ImageDraw.ImageDraw, left: float, top: float, size: float, gap: float) -> None:
    """Draw eight chips of `size` pixels with the links between them: the upper row, and the lower row backwards."""
    places = [(column, 0) for column in range(4)] + [(column, 1) for column in reversed(range(4))]
    centres = [(left + x * (size + gap) + size / 2, top + y * (size + gap) + size / 2) for x, y in places]
    for column in range(4):
        across = left + column * (size + gap) + size / 2
        draw.line([(across, top + size / 2), (across, top + size * 1.5 + gap)], fill=LINE, width=int(size / 14))
    draw.line(centres, fill=LINE, width=int(size / 14), joint="curve")
    for (x, y), colour in zip(centres, COLOURS, strict=True):
        box = [x - size / 2, y - size / 2, x + size / 2, y + size / 2]
        draw.rounded_rectangle(box, radius=size / 6, fill=colour)
        hole = size / 5
        draw.rounded_rectangle([x - hole, y - hole, x + hole, y + hole], radius=size / 14, fill=GROUND)


def picture(size: tuple[int, int]) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (size[0] * SCALE, size[1] * SCALE), GROUND)
    return image, ImageDraw.Draw(image)


def write(image: Image.Image, size: tuple[int, int], name: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    image.resize(size, Image.Resampling.LANCZOS).save(IMAGES / name, optimize=True)


def text(
    draw: ImageDraw.ImageDraw, left: float, top: float, lines: Sequence[tuple[str, int, tuple[int, int, int]]]
) -> None:
    for words, size, colour in lines:
        draw.text((left * SCALE, top * SCALE), words, fill=colour, font=ImageFont.load_default(size * SCALE))
        top += size * 1.5


def main() -> None:
    image, draw = picture(ICON)
    draw_chips(draw, 30 * SCALE, 117 * SCALE, 73 * SCALE, 16 * SCALE)
    write(image, ICON, "icon.png")
    image, draw = picture(BANNER)
    draw_chips(draw, 90 * SCALE, 178 * SCALE, 82 * SCALE, 20 * SCALE)
    lines = (
        ("ComfyUI-TPU", 84, INK),
        ("FLUX.2, Wan, CogVideoX, HunyuanVideo", 34, FAINT),
        ("on Google TPUs, with JAX", 34, FAINT),
    )
    text(draw, 560, 165, lines)
    write(image, BANNER, "banner.png")


if __name__ == "__main__":
    main()
