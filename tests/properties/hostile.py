"""What may come in anyone's file, and what may come of reading it: a result or a sentence, soon, in little memory."""

import copy
import json
import linecache
import resource
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

PACK = Path(__file__).parents[2]
# Of this process, which other threads share, and with every allocation traced.
MOST_SECONDS = 2.0
TIMES_ITS_SIZE, BESIDE_BYTES = 10, 8 * 2**20
_NESTED = "@nested:{}@"

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
# Where parsers tend to break.
ODD = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, 1e308, float("nan"), float("inf")),
        *("", " ", "0", "\x00", "\ud800", "..", "../../etc/passwd", "/etc/passwd", "%s{0}", "a" * 5000),
        *("model.safetensors", "../model.safetensors", "a" * 300 + ".safetensors", "\x00.safetensors"),
        *([], {}, [[]], [None], [None, None], {"": None}, [1e999, -1], ["a", 0], ["a", 10**30], ["a", True]),
        *(_NESTED.format(levels) for levels in (50, 300, 900, 960, 100_000)),
    ]
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a document, as what holds it and its key there."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)


@st.composite
def changed(draw: st.DrawFn, document: Any) -> str:
    """A document as JSON, with up to three of its values replaced, removed, renamed, moved or given twice."""
    root = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(root))
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        how = draw(st.sampled_from(["odd", "any", "moved", "removed", "renamed", "twice"]))
        if how == "odd":
            holder[key] = copy.deepcopy(draw(ODD))
        elif how == "any":
            holder[key] = draw(VALUES)
        elif how == "moved":
            other, place = places[draw(st.integers(0, len(places) - 1))]
            holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder, dict):
            value = holder[key] if how == "twice" else holder.pop(key)
            if how != "removed":
                holder[draw(st.text(max_size=8))] = value
        elif holder is not root:
            holder.insert(key, copy.deepcopy(holder[key])) if how == "twice" else holder.pop(key)
    return with_nested(json.dumps(root[0] if root else None))


def with_nested(text: str) -> str:
    """The text with lists in lists where they are asked for: more than `json` writes."""
    for levels in (50, 300, 900, 960, 100_000):
        text = text.replace(f'"{_NESTED.format(levels)}"', "[" * levels + "]" * levels)
    return text


@st.composite
def spoiled(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes of which some are cut off, changed, doubled, or have others among them."""
    spoilt = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(0, len(spoilt) - 1)))
        how = draw(st.sampled_from(["cut", "flip", "insert", "drop"]))
        if how == "cut":
            del spoilt[place:]
        elif how == "flip" and spoilt:
            spoilt[place] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            spoilt[place:place] = draw(st.binary(max_size=9))
        elif how == "drop":
            del spoilt[place : place + draw(st.integers(1, 9))]
    return bytes(spoilt)


def documents(document: Any) -> st.SearchStrategy[bytes]:
    """The bytes of a JSON file that was this document once, or never."""
    whole = json.dumps(document).encode()
    twice = changed(document).map(
        lambda text: ("{" + text[1:-1] + "," + text[1:]).encode() if text[:1] == "{" else b"{}"
    )
    return st.one_of(
        changed(document).map(str.encode), changed(document).map(str.encode), twice, spoiled(whole),
        st.binary(max_size=64), ODD.map(json.dumps).map(with_nested).map(str.encode),
    )  # fmt: skip


def ends_well(action: Callable[[], object], size_bytes: int) -> None:
    """Asserts that reading something of this size gives a result or a sentence, soon and in little memory.

    What is too much is measured again: the whole process is, in which a table of the interpreter may have grown, once.
    CPython 3.11 takes 15.4 MB when it holds 344 000 interned strings. What an input takes, it takes every time; but
    the most that the process ever held grows the first time only.
    """
    allowed = TIMES_ITS_SIZE * size_bytes + BESIDE_BYTES
    seconds, peak, grown = _measured(action)
    assert grown <= allowed + 64 * 2**20, f"{grown} bytes more of the process"
    if seconds >= MOST_SECONDS or peak > allowed:
        seconds, peak, _ = _measured(action)
    assert seconds < MOST_SECONDS, f"{seconds:.1f} s"
    assert peak <= allowed, f"{peak} bytes of Python's"


def _measured(action: Callable[[], object]) -> tuple[float, int, int]:
    """Seconds of this process, the most bytes of Python's own at a time, and bytes that the process grew by."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    start = time.process_time()
    try:
        action()
    except Exception as error:
        assert is_sentence(error), "".join(traceback.format_exception(error)[-12:])
    finally:
        seconds = time.process_time() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return seconds, peak, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - largest) * 1024


def is_sentence(error: Exception) -> bool:
    """Whether an error is for the user to read: one that the pack itself raises, of several words."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    path = Path(frame.f_code.co_filename)
    is_ours = PACK in path.parents and "raise" in linecache.getline(str(path), line)
    return isinstance(error, ValueError | RuntimeError) and is_ours and len(str(error).split()) > 4
