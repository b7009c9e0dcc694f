"""Clips of coloured shapes that move as a sentence states, and a judge that derives the sentence from the frames.

Clips are the training data of the tiny video models, and the basis of their score: one or two shapes on a plain
background, "a red circle moves right on blue" or "a white square turns and a green circle grows on black". Speeds are
per frame, so a shorter clip is the beginning of a longer one.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage
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
    overlap,
    paint,
    palette,
    seen,
    shape_of,
)
from .training import save_sheet

MOVES = {"moves right": (1.75, 0.0), "moves left": (-1.75, 0.0), "moves up": (0.0, -1.0), "moves down": (0.0, 1.0)}
MOTIONS = (*MOVES, "grows", "shrinks", "turns")

GROWTH = 0.42  # pixels of radius a frame
TURN = 4.5  # degrees a frame
PAIRS = 0.2  # of them have two actors
EDGE = 2  # pixels about an actor's border that blend its colour with the background's


@dataclass(frozen=True, kw_only=True)
class Actor:
    """A shape of one colour that moves or changes."""

    colour: str
    shape: str
    motion: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape} {self.motion}"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One actor anywhere, or two: the first in the left half, the second in the right half."""

    actors: tuple[Actor, ...]
    background: str

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.actors))} on {self.background}"


def random_scene(random: np.random.Generator) -> Scene:
    """Draw a scene, with two actors at a rate of PAIRS. All colours in it differ."""
    count = 2 if random.random() < PAIRS else 1
    background, *colours = random.permutation(list(COLOURS))[: count + 1]
    motions = [one for one in MOTIONS if count == 1 or MOVES.get(one, (0.0, 0.0))[0] == 0]
    actors = []
    for colour in colours:
        motion = str(random.choice(motions))
        shapes = [one for one in SHAPES if not (one == "circle" and motion == "turns")]  # nobody would see it
        actors.append(Actor(colour=str(colour), shape=str(random.choice(shapes)), motion=motion))
    return Scene(actors=tuple(actors), background=str(background))


def scenes(seed: int, *, held_out: bool) -> Iterator[Scene]:
    """Yield endless scenes, either only held-out ones or only the others."""
    random = np.random.default_rng(seed)
    drawn = (random_scene(random) for _ in itertools.count())
    return (scene for scene in drawn if is_held_out(str(scene)) == held_out)


# --- drawing ----------------------------------------------------------------------------------------------------------


def first_pose(actor: Actor, random: np.random.Generator, left: float, right: float) -> Pose:
    """Return an actor's first pose between two columns, such that it is still in the image after 33 frames."""
    scale = min(1.0, (right - left) / 80)
    jitter = random.uniform(-1, 1, 3)
    middle = (left + right) / 2
    if actor.motion in MOVES:
        dx, dy = MOVES[actor.motion]
        x = middle - 16 * dx + 4 * jitter[0]
        y = HEIGHT / 2 - 16 * dy + (3 if dy else 6) * jitter[1]
        return Pose(x=x, y=y, radius=15 * scale + jitter[2])
    begin = {"grows": 9.0, "shrinks": 22.0, "turns": 18.0}[actor.motion] * scale
    angle = 15 * jitter[2] if actor.motion == "turns" else 0.0
    x, y = middle + 8 * scale * jitter[0], HEIGHT / 2 + 4 * jitter[1]
    return Pose(x=x, y=y, radius=begin + jitter[2], angle=angle)


def later(pose: Pose, actor: Actor, frame: int, scale: float) -> Pose:
    """Return the pose after `frame` frames."""
    dx, dy = MOVES.get(actor.motion, (0.0, 0.0))
    growth = {"grows": GROWTH, "shrinks": -GROWTH}.get(actor.motion, 0.0) * scale
    turn = TURN if actor.motion == "turns" else 0.0
    return replace(
        pose,
        x=pose.x + dx * frame,
        y=pose.y + dy * frame,
        radius=pose.radius + growth * frame,
        angle=pose.angle + turn * frame,
    )


def draw(scene: Scene, frames: int, random: np.random.Generator, *, start: int = 0) -> np.ndarray:
    """Return a clip of a scene from its frame `start` on, uint8 `[frames, HEIGHT, WIDTH, 3]`."""
    clip = background(scene.background, frames)
    width = WIDTH / len(scene.actors)
    for number, actor in enumerate(scene.actors):
        pose = first_pose(actor, random, number * width, (number + 1) * width)
        scale = min(1.0, width / 80)
        for frame in range(frames):
            paint(clip[frame], actor.colour, coverage(actor.shape, later(pose, actor, start + frame, scale)))
    return np.round(clip).astype(np.uint8)


# --- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The properties of a sentence that the frames show; with two actors, those that both show."""

    colour: bool
    shape: bool
    motion: bool

    @property
    def all(self) -> bool:
        return self.colour and self.shape and self.motion


def judge(frames: np.ndarray, scene: Scene) -> Verdict:
    """Return what uint8 frames `[number, HEIGHT, WIDTH, 3]` show of a scene, by arithmetic on the pixels.

    Every pixel gets the nearest of the six colours. The most frequent colour is the background. The most frequent other
    colour in an actor's part of the image is the actor. Its shape is the one that overlaps best.
    """
    nearest = palette(frames)
    behind = colour_behind(nearest)
    colours, shapes, motions = [behind == scene.background], [], []
    parts = np.array_split(np.arange(WIDTH), len(scene.actors))
    for actor, columns in zip(scene.actors, parts, strict=True):
        colour, masks = seen(nearest, columns, behind)
        is_seen = bool(masks.sum((1, 2)).min() >= LEAST)
        colours.append(is_seen and colour == actor.colour)
        shapes.append(is_seen and shape_of(masks) == actor.shape)
        motions.append(is_seen and motion_of(masks) == actor.motion)
    return Verdict(colour=all(colours), shape=all(shapes), motion=all(motions))


def stray(frames: np.ndarray, scene: Scene) -> float:
    """Return the share of stray pixels in uint8 frames `[number, HEIGHT, WIDTH, 3]` of a scene.

    These are pixels with another colour than the background two or more pixels away from an actor, and with another
    colour than the actor within it.
    """
    nearest = palette(frames)
    behind = colour_behind(nearest)
    wrong = nearest != list(COLOURS).index(behind)
    for columns in np.array_split(np.arange(WIDTH), len(scene.actors)):
        _, masks = seen(nearest, columns, behind)
        for number, mask in enumerate(masks):
            body = ndimage.binary_fill_holes(largest(mask))
            within = ndimage.binary_erosion(body, iterations=EDGE)
            around = ndimage.binary_dilation(body, iterations=EDGE)
            wrong[number, around] = False
            wrong[number, within & ~mask] = True
    return float(wrong.mean())


def largest(mask: np.ndarray) -> np.ndarray:
    """Return the largest connected piece of a mask; corners connect."""
    labelled: Any = ndimage.label(mask, np.ones((3, 3)))
    pieces, _ = labelled
    return pieces == 1 + np.bincount(pieces.ravel(), minlength=2)[1:].argmax()


def motion_of(masks: np.ndarray) -> str:
    """Return the motion of one shape's masks from the first to the last frame; "rests" for none of MOTIONS."""
    centres = np.array([[axis.mean() for axis in np.nonzero(mask)] for mask in masks[[0, -1]]])
    down, right = centres[1] - centres[0]
    if max(abs(down), abs(right)) > 4:
        if abs(right) > abs(down):
            return "moves right" if right > 0 else "moves left"
        return "moves down" if down > 0 else "moves up"
    first, *others = (centred(mask) for mask in masks)
    growth = np.log(others[-1].sum() / first.sum())
    if abs(growth) > 0.15:
        return "grows" if growth > 0 else "shrinks"
    return "turns" if min(overlap(first, other) for other in others) < 0.85 else "rests"


def centred(mask: np.ndarray) -> np.ndarray:
    """Return the mask centred in the image, to a pixel."""
    y, x = (round(size / 2 - axis.mean()) for size, axis in zip(mask.shape, np.nonzero(mask), strict=True))
    return np.roll(mask, (y, x), (0, 1))


def show(make: Callable[[Scene, int], np.ndarray], out: Path, seed: int, number: int = 8) -> None:
    """Write a sheet of the results of `make` for some held-out scenes, and print how many are correct."""
    drawn = list(itertools.islice(scenes(seed, held_out=True), number))
    clips = [make(scene, index) for index, scene in enumerate(drawn)]
    save_sheet([clip[::4] for clip in clips[:8]], out / "preview.png")
    right = list(map(judge, clips, drawn))
    parts = (*(field.name for field in fields(Verdict)), "all")
    tqdm.write(f"of {number} held-out: { ({part: sum(getattr(one, part) for one in right) for part in parts}) }")
