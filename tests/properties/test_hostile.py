"""What judges hostile files: it sees what takes too much, and blames no file for what the interpreter takes once."""

import pytest
from comfyui_tpu.tests.properties.hostile import BESIDE_BYTES, ends_well


def test_what_takes_too_much_every_time_fails():
    with pytest.raises(AssertionError, match=r"bytes of Python's"):
        ends_well(lambda: bytearray(2 * BESIDE_BYTES), 0)


def test_what_is_taken_once_does_not():
    """As a table of the interpreter's that grows."""
    taken: list[bytearray] = []
    ends_well(lambda: taken or taken.append(bytearray(2 * BESIDE_BYTES)), 0)
    assert taken


def test_an_error_that_is_no_sentence_fails():
    with pytest.raises(AssertionError, match="KeyError"):
        ends_well(lambda: {}["a"], 0)
