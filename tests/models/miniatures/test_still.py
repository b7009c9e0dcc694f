"""The pictures that picture models' miniatures are trained on, and what reads a sentence back from one."""

import itertools
from types import ModuleType

import numpy as np


def test_still_judge_accepts_only_the_drawn_scene(score: ModuleType):
    still, random = score.still, np.random.default_rng(3)
    changes = list(itertools.islice(still.changes(3, held_out=True), 24))
    for change, other in zip(changes, [*changes[1:], changes[0]], strict=True):
        jitter = still.random_jitter(random)
        before, after = still.draw(change.before, jitter), still.draw(change.after, jitter)
        assert still.judge(before, change.before).all and still.judge(after, change.after).all, str(change)
        assert not still.judge(before, change.after).all, str(change)
        assert other.after == change.after or not still.judge(after, other.after).all, (str(change), str(other))


def test_still_change_alters_only_the_named_thing(score: ModuleType):
    """Beside the changed thing, or behind all of them, no pixel differs."""
    still, random = score.still, np.random.default_rng(4)
    for change in itertools.islice(still.changes(4, held_out=False), 24):
        jitter = still.random_jitter(random)
        before, after = (still.draw(one, jitter) for one in (change.before, change.after))
        kept = [old == new for old, new in zip(change.before.things, change.after.things, strict=True)]
        assert (change.before.background != change.after.background) or not all(kept)
        if change.before.background == change.after.background and len(kept) == 2:
            half = slice(None, before.shape[1] // 2 - 8) if kept[0] else slice(before.shape[1] // 2 + 8, None)
            assert np.array_equal(before[:, half], after[:, half]), str(change)
