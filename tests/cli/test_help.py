"""What `comfyui-tpu COMMAND --help` says to who reads it for the first time, in a terminal of 80 columns."""

import logging
import os
import shlex
import subprocess
import sys
from itertools import takewhile

import pytest
from comfyui_tpu.cli.common_arguments import DOWNLOADS
from comfyui_tpu.cli.main import _parser, main
from comfyui_tpu.tpu_runtime.models import SPECS
from comfyui_tpu.tpu_runtime.progress import SHOWN_TO_USER

(VERBS,) = (action.choices for action in _parser()._actions if action.choices)


@pytest.mark.parametrize("name", VERBS)
def test_command_help_describes_options_and_valid_example(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    verb = VERBS[name]
    said = [action.help for action in verb._actions]
    assert all(said) and not [text for text in said if text.startswith(("default", "("))]
    lines = verb.format_help().splitlines()
    assert [line for line in lines[lines.index("") :] if len(line) > 80] == []
    example = " ".join(takewhile(str.strip, lines[lines.index("example:") + 1 :])).replace("\\ ", " ")
    assert _parser().parse_args(shlex.split(example)[1:]).command is verb.get_default("command")


def test_help_marks_commands_that_need_network():
    assert {name for name, verb in VERBS.items() if DOWNLOADS in (verb.epilog or "")} == {
        "run", "compare", "batch", "serve", "encode", "denoise", "decode", "calibrate", "warmup", "follow",
    }  # fmt: skip
    assert "(needs the network)" in DOWNLOADS and "(needs the network)" in VERBS["download"].description


def test_main_help_lists_models_by_name(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [words for words in map(str.split, lines) if words[1:2] and words[1].startswith("tiny/")] == sorted(
        [spec.name, spec.miniature.id] for spec in SPECS
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["encode", "--folder", ".", "--name", "wan2.1-1.3b"], "there is no model 'wan2.1-1.3b'; there are:\n  wan2."),
        (["encode", "--folder", ".", "--family", "flux"], "there is no family 'flux'; there are:\n  Flux2\n"),
        (["doctor", "--model", "z image"], "there is no model 'z image'; there are:\n  z-image"),
        (["calibrate", "flux"], "there is no model 'flux'; there are:\n  flux2-"),
        (["calibrate", "flux2-dev"], "this model has no cache_threshold"),
    ],
)
def test_command_unknown_name_error_lists_known_names(words: list[str], sentence: str, capsys: pytest.CaptureFixture):
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--help", "run --help", "doctor", "plan z-image --topology nowhere:1x1"])
def test_command_with_closed_output_exits_without_traceback(words: str):
    """As behind `| head`, of both its streams or of one."""
    read, write = os.pipe()
    os.close(read)
    run = "import sys; from comfyui_tpu.cli.main import command; sys.exit(command())"
    call = [sys.executable, "-c", run, *words.split()]
    try:
        done = subprocess.run(call, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
        assert "Traceback" not in done.stderr and "Broken pipe" not in done.stderr, done.stderr
        assert subprocess.run(call, stdout=write, stderr=write, check=False).returncode == done.returncode
    finally:
        os.close(write)


def test_terminal_log_handler_skips_records_shown_to_user():
    assert main(["plan", "nothing"]) == 2
    assert logging.lastResort
    records = [logging.makeLogRecord(given) for given in ({}, {SHOWN_TO_USER: True})]
    assert [bool(logging.lastResort.filter(record)) for record in records] == [True, False]
