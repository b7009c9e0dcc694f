"""Exclusion of permanent objects from garbage collections, which stop all Python threads.

JAX, PyTorch and upstream's models create some 700 000 objects. ComfyUI collects garbage every ten seconds while prompts
run, and its page freezes for half a second each time.
"""

import gc
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from .units import MIB

# Number of new objects from which on they are frozen. The collection before takes a quarter of a second for 100 000.
MANY = 50_000
# A network with more weights than this is not frozen, because a reference cycle with it would never be freed.
LARGE_BYTES = MIB
_LOCK = threading.Lock()
_PAUSE_LOCK = threading.Lock()
_seen = 0
_pauses, _was_enabled = 0, True


@contextmanager
def pause_while_importing() -> Iterator[None]:
    """Pause automatic collections while the block imports modules, then freeze all objects.

    During imports Python would collect repeatedly, and each collection of the growing heap can take seconds. Nothing is
    frozen after fewer than `MANY` new objects, or with a network's weights in the host's memory.
    """
    global _pauses, _was_enabled
    with _PAUSE_LOCK:
        if not _pauses:
            _was_enabled = gc.isenabled()
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _PAUSE_LOCK:
            _pauses -= 1
            if not _pauses and _was_enabled:
                # Nothing was collected, so new objects are in the youngest generation. Imports leave little garbage.
                if gc.get_count()[0] >= MANY and not _holds_models(frozenset()):
                    gc.freeze()
                gc.enable()


def set_aside(kinds: Collection[type] = ()) -> bool:
    """Collect garbage, freeze all other objects (`gc.freeze`), and return whether that was done.

    kinds: types of which no object may exist; subclasses do not count.
    Nothing is done with fewer than `MANY` new objects, or with a network's weights in the host's memory. A frozen
    object is still freed when its last reference goes, except in a reference cycle.
    """
    global _seen
    with _LOCK:
        count = len(gc.get_objects(generation=2))
        if count - min(_seen, count) < MANY:
            return False
        _seen = count
        if _holds_models(frozenset(kinds)):
            return False
        gc.collect()
        gc.freeze()
        _seen = 0
        return True


def _holds_models(kinds: frozenset[type]) -> bool:
    objects = gc.get_objects()
    types = set(map(type, objects))
    if types & kinds:
        return True
    torch = sys.modules.get("torch")
    networks = {kind for kind in types if torch is not None and issubclass(kind, torch.nn.Module)}
    return any(type(item) in networks and _weight_bytes(item) > LARGE_BYTES for item in objects)


def _weight_bytes(network: object) -> int:
    """Return the bytes of a network's own weights on the host, without those of its submodules."""
    tensors = [tensor for name in ("_parameters", "_buffers") for tensor in vars(network).get(name, {}).values()]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.device.type != "meta")
