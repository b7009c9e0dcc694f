"""`setup.py test --changed`: which tests are chosen, in a small repository of its own."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
from comfyui_tpu.installer import changed_tests, demo_and_tests
from comfyui_tpu.installer.terminal import SetupError

FILES = {
    "tpu_runtime/__init__.py": "",
    "tpu_runtime/units.py": "GIB = 2**30\n",
    "tpu_runtime/engine/__init__.py": "LIMIT = 1\n",
    "tpu_runtime/engine/memory.py": "from ..units import GIB\n",
    "tpu_runtime/engine/engine.py": "def run():\n    from . import memory\n",
    "cli/main.py": "import comfyui_tpu.tpu_runtime.engine.engine\n",
    "web/messages/en.json": "{}",
    "tests/conftest.py": "",
    "tests/support/runner.py": "from comfyui_tpu.tpu_runtime.engine import engine\n",
    "tests/test_units.py": "from comfyui_tpu.tpu_runtime.units import GIB\n",
    "tests/test_runner.py": "from comfyui_tpu.tests.support import runner\n",
    "tests/test_words.py": "FILE = 'en.json'\n",
    "tests/test_layering.py": "",
    "tests/engine/test_limit.py": "from comfyui_tpu.tpu_runtime.engine import LIMIT\n",
    "tests/cli/test_main.py": "from comfyui_tpu.cli import main\n",
    ".venv/lib/test_foreign.py": "from comfyui_tpu.tpu_runtime.units import GIB\n",
}
LAYERING, LIMIT, MAIN, RUNNER, UNITS, WORDS = (
    f"tests/{name}.py"
    for name in ("test_layering", "engine/test_limit", "cli/test_main", "test_runner", "test_units", "test_words")
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        (["tpu_runtime/units.py"], [UNITS]),
        (["tpu_runtime/engine/memory.py"], [LIMIT, RUNNER]),
        (["tpu_runtime/engine/__init__.py"], [LIMIT]),
        (["tpu_runtime/engine/engine.py"], [LIMIT, MAIN, RUNNER]),
        (["tests/support/runner.py"], [RUNNER]),
        (["tests/test_units.py", "cli/main.py"], [MAIN, UNITS]),
        (["web/messages/en.json"], [WORDS]),
        (["tests/conftest.py"], [LIMIT, MAIN, RUNNER, UNITS, WORDS]),
        (["gone.py"], []),
    ],
    ids=lambda value: value[0].rpartition("/")[2] if value else "",
)
def test_the_tests_of_a_change_import_it_or_are_in_its_folder(
    changed: list[str], chosen: Iterable[str], repository: Path
):
    """One module may lie between. A test of the whole tree runs whatever has changed."""
    assert changed_tests.choose_tests(repository, changed) == sorted([LAYERING, *chosen])


def test_what_differs_is_changed_removed_or_new(repository: Path):
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(repository), *identity, *words], check=True, capture_output=True)

    (repository / ".gitignore").write_text(".venv/\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert changed_tests.list_changed(repository, "HEAD") == []
    (repository / "cli" / "main.py").write_text("import os\n")
    (repository / "tests" / "test_words.py").unlink()
    git("add", ".")
    git("commit", "-m", "second")
    (repository / "tests" / "test_é.py").write_text("")
    assert changed_tests.list_changed(repository, "HEAD") == ["tests/test_é.py"]
    assert changed_tests.list_changed(repository, "HEAD~1") == ["cli/main.py", WORDS, "tests/test_é.py"]
    with pytest.raises(SetupError, match="compares with the commit 'nowhere', and git says: .*nowhere"):
        changed_tests.list_changed(repository, "nowhere")


def test_the_command_runs_them_beside_what_goes_to_pytest(monkeypatch: pytest.MonkeyPatch):
    asked, ran = [], []
    changes = ["distributed/fleet/jobs.py"]
    monkeypatch.setattr(changed_tests, "list_changed", lambda root, commit: asked.append(commit) or changes)
    monkeypatch.setattr(changed_tests, "choose_tests", lambda root, changed: [MAIN, UNITS])
    for name in ("once", "install_comfyui_requirements"):
        monkeypatch.setattr(demo_and_tests, name, lambda *_: None)
    monkeypatch.setattr(demo_and_tests, "run", lambda command: ran.append(command[1:]) or 0)
    assert demo_and_tests.test(["--changed=main", "-x"]) == demo_and_tests.test(["--changed", "--fast"]) == 0
    assert asked == ["main", "HEAD"]
    assert ran[0] == ["-m", "pytest", "-x", MAIN, UNITS]
    assert ran[-1] == ["-m", "pytest", *demo_and_tests.FAST, *demo_and_tests.spread([]), MAIN, UNITS]
    changes.clear()
    with pytest.raises(SetupError, match="No file differs from the commit. Name an older one"):
        demo_and_tests.test(["--changed"])
