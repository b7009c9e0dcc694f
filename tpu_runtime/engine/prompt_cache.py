"""Encoded prompts, kept in host memory and on disk by their content: the same text is encoded once per model."""

import logging
from collections import OrderedDict
from collections.abc import Callable

from ..cache.store import Store
from . import payloads
from .payloads import Conditioning

log = logging.getLogger(__name__)

STORE = Store("prompts")
# Kept in host memory: one is at most 512 x 15360 float32 numbers.
MAX_IN_MEMORY = 16

Encoded = tuple[Conditioning, Conditioning | None]
# On a follower that does not have what the leader found: only the leader's result goes on.
NOBODYS: Encoded = ([], None)


class PromptCache:
    """Encoded prompts by key: the text, the model and all else that they depend on."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Encoded] = OrderedDict()

    def get(self, key: str, family: str, encode: Callable[[], Encoded], decide: Callable[[bool], bool]) -> Encoded:
        """The entry `key`: from memory, else from disk, else by `encode`. Whether it is there is what the leader of
        several hosts finds: `decide` returns that.
        """
        found = self._kept.get(key) or _read(key, family)
        if not decide(found is not None):
            found = encode()
            STORE.put(key, payloads.pack_embeddings(*found))
        if found is None:
            return NOBODYS
        self._kept[key] = found
        if len(self._kept) > MAX_IN_MEMORY:
            self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


def _read(key: str, family: str) -> Encoded | None:
    content = STORE.get(key)
    if content is None:
        return None
    try:
        prompt, negative, _ = payloads.unpack_embeddings(content, family)
    except ValueError as error:
        STORE.discard(key, f"it cannot be read ({error})")
        return None
    if prompt is None:
        STORE.discard(key, "it holds no prompt")
        return None
    return prompt, negative
