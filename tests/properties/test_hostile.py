"""What judges hostile files: it sees what takes too much, and blames no file for what the interpreter takes once."""

import pytest
from comfyui_tpu.tests.properties.hostile import BESIDE_BYTES, ends_well


def test_ends_well_repeated_excess_memory_fails():
    with pytest.raises(AssertionError, match=r"bytes of Python's"):
        ends_well(lambda: bytearray(2 * BESIDE_BYTES), 0)


def test_ends_well_one_time_memory_passes():
    """As a table of the interpreter's that grows."""
    taken: list[bytearray] = []
    ends_well(lambda: taken or taken.append(bytearray(2 * BESIDE_BYTES)), 0)
    assert taken


def test_ends_well_unexpected_error_type_fails():
    with pytest.raises(AssertionError, match="KeyError"):
        ends_well(lambda: {}["a"], 0)
