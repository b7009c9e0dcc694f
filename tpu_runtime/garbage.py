"""What stays as long as the process is left out of the search for garbage, during which nothing else of Python runs.

JAX, PyTorch and upstream's models leave some 700 000 objects; ComfyUI searches all of them every ten seconds while
prompts run, and its page stands still for half a second meanwhile.
"""

import gc
import sys
import threading
from collections.abc import Collection

from .units import MIB

# So many new objects are worth a search, the last that looks at them.
MANY = 100_000
# A network of another's with more than this could be part of a circle, which would never be freed.
LARGE_BYTES = MIB
_LOCK = threading.Lock()
_seen = 0


def set_aside(kinds: Collection[type] = ()) -> bool:
    """Frees what is garbage, and leaves what else there is out of later searches; gives whether it did.

    Nothing is done while there are few new objects, an object of just one of these `kinds`, or a network with weights
    in the host's memory. What is set aside is still freed as soon as nothing refers to it, but for circles.
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
    networks = {one for one in types if torch is not None and issubclass(one, torch.nn.Module)}
    return any(type(one) in networks and _weight_bytes(one) > LARGE_BYTES for one in objects)


def _weight_bytes(network: object) -> int:
    """Of its own weights, without those of networks in it, which are looked at themselves."""
    own = [held for name in ("_parameters", "_buffers") for held in vars(network).get(name, {}).values()]
    return sum(one.nbytes for one in own if one is not None and one.device.type != "meta")
