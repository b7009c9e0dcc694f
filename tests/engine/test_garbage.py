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
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
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


def many() -> list[list[int]]:
    """Objects that a search has found to live."""
    found: list[list[int]] = [[number] for number in range(2000)]
    gc.collect()
    return found


class Circle:
    def __init__(self) -> None:
        self.me = self


def test_many_objects_are_set_aside_and_garbage_is_freed_before():
    kept, circle = many(), Circle()
    gone = weakref.ref(circle)
    del circle
    before = gc.get_freeze_count()
    assert garbage.set_aside()
    assert gc.get_freeze_count() >= before + len(kept) and gone() is None
    assert not garbage.set_aside(), "few are new"
    later = Circle()
    gone = weakref.ref(later)
    del later
    gc.collect()
    assert gone() is None, "what comes later is searched as ever"


def test_few_objects_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "MANY", 10**9)
    many_objects = many()
    assert not garbage.set_aside() and many_objects


def test_nothing_is_set_aside_beside_anothers_model():
    model, kept = Model(), many()
    assert not garbage.set_aside([Model])
    assert not garbage.set_aside([Model]), "the same objects are looked through once"
    del model
    more = many()
    assert garbage.set_aside([Model]) and kept and more


@pytest.mark.parametrize(("device", "is_set_aside"), [("cpu", False), ("meta", True)])
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_network_with_weights_in_memory_is_anothers(device: str, is_set_aside: bool, kind: str):
    inner = torch.nn.Module()
    weights = torch.zeros(2**19, device=device)
    if kind == "parameter":
        inner.weight = torch.nn.Parameter(weights)
    else:
        inner.register_buffer("weight", weights)
    outer, kept = torch.nn.Sequential(torch.nn.Sequential(inner)), many()
    assert garbage.set_aside() is is_set_aside and outer and kept
