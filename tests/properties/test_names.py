"""Names of tensors and files in logs and texts: no further lines, no escapes of a terminal, no links."""

import io
import json
import logging
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.headless.runner import TerminalContext
from comfyui_tpu.tests.properties.test_checkpoints import file_of
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import redact
from comfyui_tpu.tpu_runtime.files import CheckpointError
from comfyui_tpu.tpu_runtime.formats import single_file
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = [
    "a\nERROR forged", "a\rforged", "\x1b[2J\x1b[Hb", "\x1b]8;;http://x\x07a\x1b]8;;\x07", "\x9b31m", "a\x00b", "a\x7f",
    "\u202egpj.exe", "\u2066a", "\u2028x", "\u200fx", "\x85next",
]  # fmt: skip
UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LOG = logging.getLogger(redact.__name__.replace("redact", "anything"))


@pytest.mark.parametrize("name", NAMES)
def test_read_contents_unprintable_tensor_name_raises_checkpoint_error(tmp_path: Path, name: str):
    header = {f"blocks.0.{name}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(json.dumps(header).encode())[:-33])
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "wan")
    writer.add_tensor(f"blocks.0.{name}", np.zeros(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for one in (path, path.with_suffix(".gguf")):
        with raises_message(CheckpointError, "file.tensor_name_not_printable") as error:
            single_file.read_contents(one)
        assert not UNSAFE.search(str(error.value))


@settings(max_examples=100)
@given(name=st.text(max_size=20) | st.sampled_from(NAMES))
def test_log_record_with_any_name_is_one_line(name: str):
    root, handler = logging.getLogger(), logging.StreamHandler(stream := io.StringIO())
    handler.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(handler)
    try:
        LOG.warning("%s of %d is not there: %s", name, 7, OSError(2, name))
        LOG.warning("read {}".format(name.replace("\n", "")))  # noqa: G001 - as some libraries do it
    finally:
        root.removeHandler(handler)
    said = stream.getvalue()
    assert len(said.splitlines()) == 2 and " of 7 is not there: " in said
    assert not UNSAFE.search(said.replace("\n", "").replace("\t", ""))


@pytest.mark.parametrize("name", NAMES)
def test_logged_exception_has_no_escapes(name: str, caplog: pytest.LogCaptureFixture):
    try:
        raise ValueError(name)
    except ValueError:
        LOG.exception("could not read %s", name)
    assert not UNSAFE.search(caplog.text.replace("\n", ""))


def test_log_record_without_handlers_is_escaped(monkeypatch: pytest.MonkeyPatch):
    """Python's last resort, which is for loggers without handlers."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging, "lastResort", handler := logging.StreamHandler(stream := io.StringIO()))
    handler.setLevel(logging.WARNING)
    LOG.info("not said")
    LOG.warning("said\x1b of %s", "a\nb")
    assert stream.getvalue() == "said\\x1b of a\\nb\n"


@pytest.mark.parametrize("name", NAMES)
def test_terminal_text_and_error_have_no_escapes(name: str):
    TerminalContext(Folders(), stream := io.StringIO()).text(f"reading {name}")
    for said in (stream.getvalue(), str(CheckpointError(f"{name} is damaged."))):
        assert not UNSAFE.search(said.replace("\n", ""))


@settings(max_examples=100)
@given(
    name=st.text(max_size=12)
    | st.sampled_from([*NAMES, "<img src=x onerror=a()>", "http://x", "WWW.x", "javascript://"])
)
def test_escape_for_page_removes_tags_and_links(name: str):
    said = redact.escape_for_page(f"reading {name}, {name}")
    assert not UNSAFE.search(said.replace("\n", "").replace("\t", ""))
    assert not re.search(r"[<>]|://|\bwww\.", said, re.IGNORECASE)
    assert redact.escape_for_page("Took 3 s: 1.5 GB of a/b.safetensors") == "Took 3 s: 1.5 GB of a/b.safetensors"
