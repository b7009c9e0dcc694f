"""The plan node and command: their compiler runs in a process of its own, and ends with a cancel."""

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui_tpu.nodes.declare import Folders
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES, TerminalContext
from comfyui_tpu.tests.support.host import Cancelled, Host
from comfyui_tpu.tests.support.messages import Expected, raises_message
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime import children
from comfyui_tpu.tpu_runtime.cost_model.chips import compiler_environment
from comfyui_tpu.tpu_runtime.models import SPECS
from comfyui_tpu.tpu_runtime.plan import process
from comfyui_tpu.tpu_runtime.progress import SilentProgress

MODEL = {"model": SPECS[0].name, "topology": "v6e:2x4"}


@pytest.fixture
def check_environment_unchanged(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Asserts that nothing of what libtpu reads was put into this process's environment."""
    for name in compiler_environment():
        monkeypatch.delenv(name, raising=False)

    def environment() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}

    before = environment()

    def check() -> None:
        assert environment() == before

    return check


@pytest.mark.slow
def test_plan_process_leaves_environment_unchanged(check_environment_unchanged: Callable[[], None]):
    host = Host()
    text = process.make_report({"model": "wan2.1-t2v-1.3b", "topology": "v6e-1", "stages": "encode"}, host)
    check_environment_unchanged()
    assert "predicted by the compiler" in text and "text_encoder" in text
    assert any("compiled" in line for line in host.said), host.said


def test_plan_node_passes_widget_values_to_report(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(process, "make_report", lambda options, host: asked.append(options) or "the report")
    host = TerminalContext(Folders(), stream=io.StringIO())
    sizes = {"height": 480, "width": 832, "num_frames": 0, "num_inference_steps": 20, "guidance_scale": 1.0}
    node = HEADLESS_NODES["TPUPlan"]
    assert node.run(host, model_name=SPECS[0].name, topology="v6e-4", **sizes) == ("the report",)
    given = {"height": 480, "width": 832, "num_inference_steps": 20, "guidance_scale": 1.0}
    assert asked == [{"model": SPECS[0].name, "topology": "v6e-4", "inputs": given}]
    with raises_message(
        ValueError,
        "settings.input",
        name="input.height",
        problem=Expected("settings.breaks_rule", value=481, rule="settings.multiple"),
    ):
        node.run(host, model_name=SPECS[0].name, topology="v6e-4", **{**sizes, "height": 481})
    assert len(asked) == 1, "a wrong size needs no process"


def test_plan_process_unknown_topology_raises_value_error(check_environment_unchanged: Callable[[], None]):
    with raises_message(ValueError, "plan.no_topology", name="'v6e:9x9'", known=re.compile(r"^v6e:1x1")):
        process.make_report({**MODEL, "topology": "v6e:9x9"}, SilentProgress())
    check_environment_unchanged()


def test_plan_cancel_terminates_compiler_and_children(monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen] = []

    class Popen(subprocess.Popen):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)

    class Cancelling(SilentProgress):
        looks = 0

        def check_cancelled(self) -> None:
            self.looks += 1
            if self.looks == 3:
                raise Cancelled

    with pytest.raises(Cancelled):
        process.make_report(MODEL, Cancelling())
    assert started[0].returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.killpg(started[0].pid, 0)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.recorded)]
)
def test_plan_command_signal_exits_with_cancelled_message(number: signal.Signals, status: int, tmp_path: Path):
    command = [sys.executable, "-c", "import sys; from comfyui_tpu.cli.main import main; sys.exit(main())", "plan"]
    with (tmp_path / "said").open("w+") as said:
        started = subprocess.Popen([*command, SPECS[0].name, "--stages", "encode"], stdout=said, stderr=said)
        until(lambda: "compiles" in (tmp_path / "said").read_text(), "the compiler did not start")
        started.send_signal(number)
        assert started.wait(timeout=PATIENCE_S) == status
    assert (tmp_path / "said").read_text().splitlines()[1:] == ["comfyui-tpu: cancelled"]


def test_plan_process_early_exit_raises_runtime_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with raises_message(RuntimeError, "plan.process_ended", wait=1):
        process.make_report(MODEL, SilentProgress())


def test_plan_process_terminates_when_stdin_closes():
    with children.run_module_child("tpu_runtime.plan.plan", MODEL) as child:
        child.process.stdin.close()
        assert child.process.wait(timeout=PATIENCE_S) == -signal.SIGTERM
