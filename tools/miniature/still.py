"""Images of coloured shapes from a sentence, changes of an image, and a judge that derives the sentence from pixels.

Sentences are "a large red circle left on blue" or "a red circle and a small green square on blue". With a given image
they are "the circle becomes red" or "on green". The tiny image models are trained and scored on these images.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .shapes import (
    COLOURS,
    HEIGHT,
    LEAST,
    SHAPES,
    WIDTH,
    Pose,
    background,
    colour_behind,
    coverage,
    is_held_out,
    paint,
    palette,
    seen,
    shape_of,
)
from .training import save_sheet

PAIRS = 0.35  # of all sentences have two shapes
# What is not said is in the middle: the radius of a circle of the area, and the centre's column, in pixels.
SIZES = {"small": 10.0, "": 13.6, "large": 18.5}
PLACES = {"left": WIDTH / 4, "": WIDTH / 2, "right": WIDTH * 3 / 4}
PARTS = ("colour", "shape", "size", "place", "all")  # of a verdict
CHANGES = ("colour", "shape", "size", "background", "colour and background")
Jitter = Sequence[Sequence[float]]  # column, row and radius of each shape, from -1 to 1


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A shape of one colour and size."""

    colour: str
    shape: str
    size: str = ""

    def __str__(self) -> str:
        return f"a {self.size} {self.colour} {self.shape}".replace("  ", " ")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One thing at a position, or two: the first in the left half, the second in the right half."""

    things: tuple[Thing, ...]
    background: str
    place: str = ""

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.things))} {self.place} on {self.background}".replace("  ", " ")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A sentence that states a change of an image; everything else stays."""

    before: Picture
    after: Picture
    sentence: str

    def __str__(self) -> str:
        return f"{self.before}: {self.sentence}"


def random_picture(random: np.random.Generator) -> Picture:
    """Draw an image description in which all colours differ."""
    count = 2 if random.random() < PAIRS else 1
    behind, *colours = random.permutation(list(COLOURS))[: count + 1]
    things = [
        Thing(colour=str(colour), shape=str(random.choice(SHAPES)), size=str(random.choice(list(SIZES))))
        for colour in colours
    ]
    place = str(random.choice(list(PLACES))) if count == 1 else ""
    return Picture(things=tuple(things), background=str(behind), place=place)


def random_change(random: np.random.Generator) -> Change:
    """Draw a change of one thing, named by its shape, or of the background."""
    return change_of(random, changeable(random))


def changeable(random: np.random.Generator) -> Picture:
    """Draw an image description whose things have different shapes."""
    before = random_picture(random)
    while len({thing.shape for thing in before.things}) < len(before.things):
        before = random_picture(random)
    return before


def change_of(random: np.random.Generator, before: Picture) -> Change:
    index = int(random.integers(len(before.things)))
    thing, used = before.things[index], [before.background, *(one.colour for one in before.things)]
    colour, behind = (str(one) for one in random.permutation([one for one in COLOURS if one not in used])[:2])
    kind, becomes = str(random.choice(CHANGES)), f"the {thing.shape} becomes"
    after, sentence = replace(before, background=behind), f"on {behind}"
    if kind == "shape":
        shapes = [one for one in SHAPES if one not in {other.shape for other in before.things}]
        thing = replace(thing, shape=str(random.choice(shapes)))
        after, sentence = before, f"{becomes} a {thing.shape}"
    elif kind == "size":
        thing = replace(thing, size=str(random.choice([one for one in SIZES if one and one != thing.size])))
        after, sentence = before, f"{becomes} {thing.size}"
    elif kind != "background":
        thing = replace(thing, colour=colour)
        after, sentence = (
            (before, f"{becomes} {colour}") if kind == "colour" else (after, f"{becomes} {colour} {sentence}")
        )
    things = (*before.things[:index], thing, *before.things[index + 1 :])
    return Change(before=before, after=replace(after, things=things), sentence=sentence)


def pictures(seed: int, *, held_out: bool) -> Iterator[Picture]:
    """Yield endless image descriptions, either only held-out ones or only the others."""
    random = np.random.default_rng(seed)
    drawn = (random_picture(random) for _ in itertools.count())
    return (one for one in drawn if is_held_out(str(one)) == held_out)


def changes(seed: int, *, held_out: bool) -> Iterator[Change]:
    """Yield endless changes, either only held-out ones or only the others."""
    random = np.random.default_rng(seed)
    drawn = (random_change(random) for _ in itertools.count())
    return (one for one in drawn if is_held_out(str(one)) == held_out)


def shares(sentences: Sequence[str]) -> np.ndarray:
    """Return how often images are used: more often with small things, most often with small squares.

    Their corners are learnt last.
    """
    return np.array(
        [3.0 if re.search("small [a-z]+ square", one) else 1.5 if "small" in one else 1.0 for one in sentences]
    )


def random_jitter(random: np.random.Generator) -> Jitter:
    return random.uniform(-1, 1, (2, 3)).tolist()


def draw(picture: Picture, jitter: Jitter) -> np.ndarray:
    """Return a uint8 image `[HEIGHT, WIDTH, 3]`; the same jitter before and after a change keeps positions."""
    drawn = background(picture.background)
    centres = [PLACES[picture.place]] if len(picture.things) == 1 else [PLACES["left"], PLACES["right"]]
    for thing, centre, (column, row, radius) in zip(picture.things, centres, jitter, strict=False):
        pose = Pose(x=centre + 3 * column, y=HEIGHT / 2 + 4 * row, radius=SIZES[thing.size] + 0.7 * radius)
        paint(drawn, thing.colour, coverage(thing.shape, pose))
    return np.round(drawn).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The properties of a sentence that an image shows; with two things, those that both show."""

    colour: bool
    shape: bool
    size: bool
    place: bool

    @property
    def all(self) -> bool:
        return self.colour and self.shape and self.size and self.place


def judge(drawn: np.ndarray, picture: Picture) -> Verdict:
    """Return what a uint8 image `[HEIGHT, WIDTH, 3]` shows of a description, by arithmetic on the pixels.

    Every pixel gets the nearest of the six colours. The most frequent colour is the background. The most frequent other
    colour in a thing's part of the image is the thing.
    """
    nearest = palette(drawn)
    behind = colour_behind(nearest)
    colours, shapes, sizes, places = [behind == picture.background], [], [], []
    for thing, columns in zip(picture.things, np.array_split(np.arange(WIDTH), len(picture.things)), strict=True):
        colour, mask = seen(nearest, columns, behind)
        is_seen = bool(mask.sum() >= LEAST)
        colours.append(is_seen and colour == thing.colour)
        shapes.append(is_seen and shape_of(mask[None]) == thing.shape)
        sizes.append(is_seen and closest(SIZES, np.sqrt(mask.sum() / np.pi)) == thing.size)
        where = closest(PLACES, np.nonzero(mask)[1].mean() + 0.5) if is_seen else None
        places.append(where == (picture.place if len(picture.things) == 1 else ("left", "right")[int(columns[0] > 0)]))
    return Verdict(colour=all(colours), shape=all(shapes), size=all(sizes), place=all(places))


def closest(names: dict[str, float], value: float) -> str:
    return min(names, key=lambda name: abs(names[name] - value))


def show(make: Callable[[str, int], np.ndarray], file: Path, seed: int, number: int = 12) -> None:
    """Write a sheet of the results of `make` for some held-out sentences, and print how many are correct."""
    asked = list(itertools.islice(pictures(seed, held_out=True), number))
    drawn = [make(str(picture), index) for index, picture in enumerate(asked)]
    save_sheet([np.stack(drawn[first : first + 6]) for first in range(0, number, 6)], file)
    right = list(map(judge, drawn, asked))
    tqdm.write(f"of {number} held-out: { ({part: sum(getattr(one, part) for one in right) for part in PARTS}) }")
