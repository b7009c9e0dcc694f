"""Processes that say lines of JSON: what is heard of one that ends, fails, hangs, is cut off, or loses its parent."""

import signal
import sys
from pathlib import Path

import pytest
from comfyui_tpu.tests.support.patience import PATIENCE_S
from comfyui_tpu.tpu_runtime import children

PROGRAM = """
import os, sys, time
from comfyui_tpu.tpu_runtime.children import open_child_channel
say = open_child_channel()
print("what a library prints")
say(first=1)
sys.stderr.write("a complaint\\n")
say(second=[2])
if sys.argv[1] == "hangs":
    time.sleep(1000)
sys.exit(int(sys.argv[1]))
"""
CUT_OFF = 'import sys; sys.stdout.write(\'{"first": 1}\\n{"seco\')'


def lines(child: children.Child) -> list[dict]:
    return list(iter(lambda: child.line(PATIENCE_S), None))


@pytest.mark.parametrize("code", [0, 3])
def test_child_lines_arrive_in_order_with_last_error_line(code: int):
    with children.run_child([sys.executable, "-c", PROGRAM, str(code)]) as child:
        assert lines(child) == [{"first": 1}, {"second": [2]}]
        assert child.ending(PATIENCE_S) == code
        assert child.last_error_line() in (" (a complaint)", " (what a library prints)")


def test_child_that_hangs_is_terminated_at_block_end():
    with children.run_child([sys.executable, "-c", PROGRAM, "hangs"]) as child:
        assert [child.line(PATIENCE_S) for _ in range(2)] == [{"first": 1}, {"second": [2]}]
        with pytest.raises(TimeoutError):
            child.line(0.1)
    assert child.process.returncode == -signal.SIGTERM


def test_child_truncated_line_is_ignored():
    with children.run_child([sys.executable, "-c", CUT_OFF]) as child:
        assert lines(child) == [{"first": 1}]


STUCK = "import os, time; os.close(1); time.sleep(1000)"
NO_TEXT = r"""
import sys
sys.stdout.buffer.write(b'{"first": 1}\n\xff\xfe\n[1]\n{"second": 2}\n')
sys.stderr.buffer.write(b"core \xff dumped\n")
sys.exit(3)
"""


def test_child_that_does_not_exit_after_output_is_terminated():
    """As one whose driver hangs while it lets the chips go."""
    with children.run_child([sys.executable, "-c", STUCK]) as child:
        assert lines(child) == []
        with pytest.raises(TimeoutError):
            child.ending(0.1)
    assert child.process.returncode == -signal.SIGTERM


def test_child_invalid_utf_8_output_does_not_end_reading():
    with children.run_child([sys.executable, "-c", NO_TEXT]) as child:
        assert lines(child) == [{"first": 1}, {"second": 2}]
        assert child.ending(PATIENCE_S) == 3
        assert child.last_error_line() == " (core \ufffd dumped)"


def test_child_terminates_when_stdin_closes():
    with children.run_child([sys.executable, "-c", PROGRAM, "hangs"]) as child:
        assert child.line(PATIENCE_S) == {"first": 1}
        assert child.process.stdin is not None
        child.process.stdin.close()  # as the kernel does when the parent is gone
        assert child.process.wait(PATIENCE_S) == -signal.SIGTERM


IGNORES = """
import signal, time
from comfyui_tpu.tpu_runtime.children import open_child_channel
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open_child_channel()(first=1)
time.sleep(1000)
"""
ENDS_IN_ORDER = """
import pathlib, signal, sys, time
from comfyui_tpu.tpu_runtime.children import open_child_channel
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
say = open_child_channel()
try:
    say(first=1)
    time.sleep(1000)
finally:
    pathlib.Path(sys.argv[1]).write_text("shut down")
"""


def test_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(children, "TERMINATE_TIMEOUT_S", 0.2)
    with children.run_child([sys.executable, "-c", IGNORES]) as child:
        assert child.line(PATIENCE_S) == {"first": 1}
    assert child.process.returncode == -signal.SIGKILL


def test_child_gets_time_for_orderly_shutdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(children, "TERMINATE_TIMEOUT_S", PATIENCE_S)
    with children.run_child([sys.executable, "-c", ENDS_IN_ORDER, str(tmp_path / "end")]) as child:
        assert child.line(PATIENCE_S) == {"first": 1}
    assert child.process.returncode == 5
    assert (tmp_path / "end").read_text() == "shut down"
