"""Coloured shapes on a plain background: drawing them for images and clips, and detecting them.

`moving` has the clips, `still` the images and their changes.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

HEIGHT, WIDTH = 80, 112
COLOURS = {
    "black": (16, 16, 16),
    "blue": (48, 80, 224),
    "green": (32, 168, 64),
    "red": (224, 40, 40),
    "white": (240, 240, 240),
    "yellow": (240, 208, 48),
}
SHAPES = ("circle", "square", "triangle")
HELD_OUT = 0.2  # of all sentences are never trained on
LEAST = 40  # pixels of what counts as seen; the smallest shape has about twice as many


def is_held_out(sentence: str) -> bool:
    """Return whether a sentence is held out, by its digest, independent of the order in which sentences are drawn."""
    digest = hashlib.sha256(sentence.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


@dataclass(frozen=True, kw_only=True)
class Pose:
    """A shape's centre and the radius of a circle of equal area, in pixels, and its angle in degrees."""

    x: float
    y: float
    radius: float
    angle: float = 0.0


def coverage(shape: str, pose: Pose) -> np.ndarray:
    """Return how much of each pixel the shape covers, `[HEIGHT, WIDTH]` in 0..1."""
    y, x = np.mgrid[0.5:HEIGHT, 0.5:WIDTH]
    turn = np.deg2rad(pose.angle)
    across = (x - pose.x) * np.cos(turn) + (y - pose.y) * np.sin(turn)
    along = (y - pose.y) * np.cos(turn) - (x - pose.x) * np.sin(turn)
    if shape == "circle":
        inside = pose.radius - np.hypot(across, along)
    elif shape == "square":
        inside = pose.radius * np.sqrt(np.pi) / 2 - np.maximum(np.abs(across), np.abs(along))
    else:
        # Equilateral, a corner upwards: its three sides are as far from the centre.
        middle = pose.radius * np.sqrt(np.pi / np.sqrt(27))
        sides = (along, np.sqrt(0.75) * across - 0.5 * along, -np.sqrt(0.75) * across - 0.5 * along)
        inside = middle - np.maximum.reduce(sides)
    return np.clip(inside + 0.5, 0, 1)


def paint(picture: np.ndarray, colour: str, alpha: np.ndarray) -> None:
    """Paint a shape that covers `alpha` of each pixel over a float image `[HEIGHT, WIDTH, 3]`."""
    picture += alpha[..., None].astype(np.float32) * (np.array(COLOURS[colour], np.float32) - picture)


def background(name: str, *shape: int) -> np.ndarray:
    """Return one or several plain float images, `[*shape, HEIGHT, WIDTH, 3]`."""
    return np.broadcast_to(np.array(COLOURS[name], np.float32), (*shape, HEIGHT, WIDTH, 3)).copy()


def palette(frames: np.ndarray) -> np.ndarray:
    """Return the nearest of COLOURS for each pixel, `[number, height, width]`."""
    colours = np.array(list(COLOURS.values()), np.float32)
    return np.square(frames[..., None, :].astype(np.float32) - colours).sum(-1).argmin(-1)


def colour_behind(nearest: np.ndarray) -> str:
    """Return the most frequent colour of a `palette`."""
    return list(COLOURS)[np.bincount(nearest.ravel(), minlength=len(COLOURS)).argmax()]


def seen(nearest: np.ndarray, columns: np.ndarray, behind: str) -> tuple[str, np.ndarray]:
    """Return the most frequent colour of some columns, except `behind`, and its mask over all columns."""
    counts = np.bincount(nearest[..., columns].ravel(), minlength=len(COLOURS))
    counts[list(COLOURS).index(behind)] = 0
    masks = np.zeros(nearest.shape, bool)
    masks[..., columns] = nearest[..., columns] == counts.argmax()
    return list(COLOURS)[counts.argmax()], masks


def shape_of(masks: np.ndarray) -> str:
    """Return the shape that overlaps best with the masks of the first, middle and last frame, at any angle."""
    votes = {shape: 0.0 for shape in SHAPES}
    for mask in masks[[0, len(masks) // 2, -1]]:
        y, x = (axis.mean() + 0.5 for axis in np.nonzero(mask))
        radius = np.sqrt(mask.sum() / np.pi)
        for shape, period in zip(SHAPES, (1, 90, 120), strict=True):
            poses = (Pose(x=x, y=y, radius=radius, angle=angle) for angle in range(0, period, 10))
            votes[shape] += max(overlap(mask, coverage(shape, pose) > 0.5) for pose in poses)
    return max(votes, key=lambda shape: votes[shape])


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Return the intersection of two masks over their union."""
    return (first & second).sum() / max((first | second).sum(), 1)
