"""What is left out of the search for garbage: what there is when nobody's model is in memory, and once."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from comfyui_tpu.tpu_runtime import garbage


class Model:
    """Of a kind that is looked for."""


@pytest.fixture(autouse=True)
def isolated_gc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few objects are many, and what other tests set aside is not; afterwards nothing is that was not before."""
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(garbage, "_seen", 0)
    monkeypatch.setattr(garbage, "MANY", 1000)
    yield
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()


def make_tracked_objects() -> list[list[int]]:
    """Objects that a search has found to live."""
    found: list[list[int]] = [[number] for number in range(2000)]
    gc.collect()
    return found


def is_frozen(value: object) -> bool:
    """Numbers of frozen objects say less: other threads free some of them meanwhile."""
    return gc.is_tracked(value) and not any(one is value for one in gc.get_objects())


class Circle:
    def __init__(self) -> None:
        self.me = self


def test_set_aside_freezes_many_objects_after_collecting():
    kept, circle = make_tracked_objects(), Circle()
    gone = weakref.ref(circle)
    del circle
    assert garbage.set_aside()
    assert all(map(is_frozen, kept[:2])) and gone() is None
    assert not garbage.set_aside(), "few are new"
    later = Circle()
    gone = weakref.ref(later)
    del later
    gc.collect()
    assert gone() is None, "what comes later is searched as ever"


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations of all collections from here on."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def test_pause_while_importing_collects_nothing_and_freezes_after_the_last_block(collections: list[int]):
    gc.collect()
    collections.clear()
    with garbage.pause_while_importing():
        with garbage.pause_while_importing():
            kept = [[number] for number in range(20_000)]
        assert not gc.isenabled() and not is_frozen(kept[0])
    assert not collections and gc.isenabled()
    assert is_frozen(kept[0]) and is_frozen(kept[-1])


def test_pause_while_importing_leaves_collections_as_they_were(collections: list[int]):
    gc.disable()
    try:
        with garbage.pause_while_importing():
            kept = [[number] for number in range(20_000)]
        assert not gc.isenabled() and kept and not collections
    finally:
        gc.enable()


def test_pause_while_importing_beside_a_network_with_weights_freezes_nothing():
    network = torch.nn.Linear(1024, 1024)
    with garbage.pause_while_importing():
        kept = [[number] for number in range(20_000)]
    assert not is_frozen(kept[0]) and not is_frozen(network)


def test_set_aside_few_objects_returns_false(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "MANY", 10**9)
    many_objects = make_tracked_objects()
    assert not garbage.set_aside() and many_objects


def test_set_aside_with_live_model_of_given_class_returns_false():
    model, kept = Model(), make_tracked_objects()
    assert not garbage.set_aside([Model])
    assert not garbage.set_aside([Model]), "the same objects are looked through once"
    del model
    more = make_tracked_objects()
    assert garbage.set_aside([Model]) and kept and more


@pytest.mark.parametrize(("device", "is_set_aside"), [("cpu", False), ("meta", True)])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_set_aside_with_network_weights_in_memory_returns_false(device: str, is_set_aside: bool, kind: str):
    inner = torch.nn.Module()
    weights = torch.zeros(2**19, device=device)
    if kind == "parameter":
        inner.weight = torch.nn.Parameter(weights)
    else:
        inner.register_buffer("weight", weights)
    outer, kept = torch.nn.Sequential(torch.nn.Sequential(inner)), make_tracked_objects()
    assert garbage.set_aside() is is_set_aside and outer and kept
