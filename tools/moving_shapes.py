"""Clips of coloured shapes that move as a sentence says, and a judge that reads the sentence back from the frames.

A clip is the training data of the miniature (`train_miniature.py`) and what its score is about (`score_miniature.py`):
one or two shapes before a plain background, "a red circle moves right on blue" or "a white square turns and a green
circle grows on black". Speeds are those of a frame, so that a shorter clip is the beginning of a longer one.
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

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
MOVES = {"moves right": (1.75, 0.0), "moves left": (-1.75, 0.0), "moves up": (0.0, -1.0), "moves down": (0.0, 1.0)}
MOTIONS = (*MOVES, "grows", "shrinks", "turns")

GROWTH = 0.42  # pixels of radius a frame
TURN = 4.5  # degrees a frame
HELD_OUT = 0.2  # of all sentences are never trained on
PAIRS = 0.2  # of them have two actors


@dataclass(frozen=True, kw_only=True)
class Actor:
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

    @property
    def is_held_out(self) -> bool:
        """By a digest, so that what is held out never depends on the order in which scenes are drawn."""
        digest = hashlib.sha256(str(self).encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT * 2**32


def random_scene(random: np.random.Generator) -> Scene:
    """A scene, with two actors at a rate of PAIRS; no two things in it have one colour."""
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
    """Scenes without end, only those that are held out, or only those that are not."""
    random = np.random.default_rng(seed)
    drawn = (random_scene(random) for _ in itertools.count())
    return (scene for scene in drawn if scene.is_held_out == held_out)


# --- drawing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pose:
    """Where a shape is: its centre and the radius of a circle of its area in pixels, its angle in degrees."""

    x: float
    y: float
    radius: float
    angle: float = 0.0


def coverage(shape: str, pose: Pose) -> np.ndarray:
    """How much of each pixel the shape covers, `[HEIGHT, WIDTH]` from 0 to 1."""
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


def first_pose(actor: Actor, random: np.random.Generator, left: float, right: float) -> Pose:
    """Where an actor begins between two columns, so that after 33 frames it is still in the picture."""
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
    """The pose `frame` frames on."""
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
    """A clip of a scene from its frame `start` on, `[frames, HEIGHT, WIDTH, 3]` uint8."""
    picture = np.broadcast_to(np.array(COLOURS[scene.background], np.float32), (frames, HEIGHT, WIDTH, 3)).copy()
    width = WIDTH / len(scene.actors)
    for number, actor in enumerate(scene.actors):
        pose = first_pose(actor, random, number * width, (number + 1) * width)
        scale = min(1.0, width / 80)
        for frame in range(frames):
            alpha = coverage(actor.shape, later(pose, actor, start + frame, scale))[..., None].astype(np.float32)
            picture[frame] += alpha * (np.array(COLOURS[actor.colour], np.float32) - picture[frame])
    return np.round(picture).astype(np.uint8)


# --- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What of a sentence the frames show; of two actors, what both show."""

    colour: bool
    shape: bool
    motion: bool

    @property
    def all(self) -> bool:
        return self.colour and self.shape and self.motion


def judge(frames: np.ndarray, scene: Scene) -> Verdict:
    """Whether frames `[number, HEIGHT, WIDTH, 3]` uint8 show a scene, by plain arithmetic on the pixels.

    Every pixel has the nearest of the six colours. The background is what most have; an actor is the colour that most
    of the others have, in its part of the picture. Its shape is the one that fits over its pixels best.
    """
    nearest = palette(frames)
    background = np.bincount(nearest.ravel(), minlength=len(COLOURS)).argmax()
    colours, shapes, motions = [list(COLOURS)[background] == scene.background], [], []
    parts = np.array_split(np.arange(WIDTH), len(scene.actors))
    for actor, columns in zip(scene.actors, parts, strict=True):
        part = nearest[:, :, columns]
        counts = np.bincount(part.ravel(), minlength=len(COLOURS))
        counts[background] = 0
        masks = np.zeros(nearest.shape, bool)
        masks[:, :, columns] = part == counts.argmax()
        sizes = masks.sum((1, 2))
        seen = sizes.min() >= 40  # pixels; the smallest actor has over twice as many
        colours.append(bool(seen) and list(COLOURS)[counts.argmax()] == actor.colour)
        shapes.append(bool(seen) and shape_of(masks) == actor.shape)
        motions.append(bool(seen) and motion_of(masks) == actor.motion)
    return Verdict(colour=all(colours), shape=all(shapes), motion=all(motions))


def palette(frames: np.ndarray) -> np.ndarray:
    """The nearest of COLOURS for each pixel, `[number, height, width]`."""
    colours = np.array(list(COLOURS.values()), np.float32)
    return np.square(frames[..., None, :].astype(np.float32) - colours).sum(-1).argmin(-1)


def shape_of(masks: np.ndarray) -> str:
    """The shape that overlaps best with the masks of the first, the middle and the last frame, at any angle."""
    votes = {shape: 0.0 for shape in SHAPES}
    for mask in masks[[0, len(masks) // 2, -1]]:
        y, x = (axis.mean() + 0.5 for axis in np.nonzero(mask))
        radius = np.sqrt(mask.sum() / np.pi)
        for shape, period in zip(SHAPES, (1, 90, 120), strict=True):
            poses = (Pose(x=x, y=y, radius=radius, angle=angle) for angle in range(0, period, 10))
            votes[shape] += max(overlap(mask, coverage(shape, pose) > 0.5) for pose in poses)
    return max(votes, key=lambda shape: votes[shape])


def motion_of(masks: np.ndarray) -> str:
    """What the masks of one shape do from the first frame to the last; "rests" if none of MOTIONS."""
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
    """The mask with its centre in the middle of the picture, to a pixel."""
    y, x = (round(size / 2 - axis.mean()) for size, axis in zip(mask.shape, np.nonzero(mask), strict=True))
    return np.roll(mask, (y, x), (0, 1))


def overlap(first: np.ndarray, second: np.ndarray) -> float:
    """Pixels that are in both masks, over those in either."""
    return (first & second).sum() / max((first | second).sum(), 1)
