"""Encoded prompts, cached in host memory and on disk by content: a model encodes the same text once."""

import logging
from collections import OrderedDict
from collections.abc import Callable

from ..cache.store import Store
from . import stage_values
from .stage_values import Conditioning

log = logging.getLogger(__name__)

STORE = Store("prompts")
# Entries kept in host memory; one is at most 512 x 15360 float32 numbers.
MAX_IN_MEMORY = 16

Encoded = tuple[Conditioning, Conditioning | None]
# Placeholder on a follower that lacks the leader's entry: only the leader's result is used.
FOLLOWER_RESULT: Encoded = ([], None)


class PromptCache:
    """Encoded prompts by key: a digest of the text, the model and everything else that they depend on."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Encoded] = OrderedDict()

    def get(self, key: str, family: str, encode: Callable[[], Encoded], decide: Callable[[bool], bool]) -> Encoded:
        """Return the entry `key`: from memory, else from disk, else from `encode`.

        decide: returns the leader's value of a bool on all hosts; the leader's finding counts.
        """
        encoded = self._kept.get(key) or _read(key, family)
        if not decide(encoded is not None):
            encoded = encode()
            STORE.put(key, stage_values.pack_embeddings(*encoded))
        if encoded is None:
            return FOLLOWER_RESULT
        self._kept[key] = encoded
        if len(self._kept) > MAX_IN_MEMORY:
            self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return encoded


def _read(key: str, family: str) -> Encoded | None:
    content = STORE.get(key)
    if content is None:
        return None
    try:
        prompt, negative, _ = stage_values.unpack_embeddings(content, family)
    except ValueError as error:
        STORE.discard(key, f"it cannot be read ({error})")
        return None
    if prompt is None:
        STORE.discard(key, "it holds no prompt")
        return None
    return prompt, negative
