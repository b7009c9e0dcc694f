"""What each entry of the pack does under an older Python, or where nothing of the pack is installed."""

import ast
import asyncio
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_entry_files_parse_with_python_3_7():
    for name in ("setup.py", "installer/__init__.py", "installer/newer_python.py", "__init__.py", "__main__.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 7))


OLDER = (
    "import collections, sys, runpy; "
    "version = collections.namedtuple('version', 'major minor micro releaselevel serial'); "
    "sys.version_info = version(3, 9, 18, 'final', 0); sys.argv = sys.argv[1:]; sys.path[0] = '.'; "
)
TOO_OLD = "ComfyUI-TPU needs Python 3.11 or newer; "


def run_older(*words, **options):
    """A program of ours under a Python that takes itself for an older one, and that does not see its folder, as pip's
    isolated build does not.
    """
    program = OLDER + "sys.path.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run([sys.executable, "-P", "-c", program, *words], capture_output=True, text=True, **options)


def test_setup_metadata_requires_supported_python(tmp_path):
    """It is told by the metadata, which setup.py hands over whatever Python asks."""
    done = run_older("setup.py", "egg_info", "--egg-base", str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    [metadata] = tmp_path.glob("*.egg-info/PKG-INFO")
    assert "Requires-Python: >=3.11\n" in metadata.read_text()


def test_entry_point_on_old_python_raises_one_sentence(tmp_path, monkeypatch):
    done = run_older(str(ROOT), "doctor", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(TOO_OLD)
    root = runpy.run_path(str(ROOT / "__init__.py"))
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(RuntimeError, match=f"^{TOO_OLD}ComfyUI runs on .*Make ComfyUI's environment again"):
        asyncio.run(root["comfy_entrypoint"]())


@pytest.mark.parametrize("name", ["comfyui-tpu", "ComfyUI-TPU", "a folder"])
def test_folder_runs_as_command_without_installation(name, tmp_path):
    """As Manager leaves it: in custom_nodes, under whichever name, its package not installed."""
    folder = tmp_path / "custom_nodes" / name
    folder.parent.mkdir()
    folder.symlink_to(ROOT, target_is_directory=True)
    # Without site-packages' editable install of this package; its dependencies stay.
    program = (
        "import sys, runpy\n"
        "sys.meta_path = [each for each in sys.meta_path if 'editable' not in repr(each)]\n"
        f"sys.path[:] = [place for place in sys.path if place != {str(ROOT.parent)!r}]\n"
        "sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[0])\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    assert sys.modules['comfyui_tpu'].__path__ == [sys.argv[0]] and sys.argv[0] not in sys.path, sys.path\n"
    )
    command = [sys.executable, "-c", program, str(folder), "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (done.stdout, done.returncode) == (f"{version}\n", 0), done.stderr


# `python3.11` as it is under pyenv where another version was chosen: it exists and does not run.
COMMANDS = {"python3.11": "exit 127", "python3.12": f'exec {sys.executable} "$@"'}
MISSING = "sudo apt install python3.11 python3.11-venv"


@pytest.mark.parametrize(
    ("commands", "words", "said"),
    [
        (COMMANDS, ["demo", "--fast"], "demo takes no arguments; it got: --fast"),
        ({"uv": f"echo {sys.executable}"}, ["demo", "--fast"], "demo takes no arguments; it got: --fast"),
        ({"uv": "echo /not/there"}, ["demo", "--fast"], MISSING),
        ({"uv": "exit 2"}, ["install"], MISSING),
        ({"uv": f"echo {sys.executable}"}, ["install", "--dry-run"], MISSING),  # downloads nothing
        ({}, ["install", "--help"], MISSING),
    ],
    ids=["beside a newer one", "uv has one", "uv's is gone", "uv gets none", "dry run", "help"],
)
def test_setup_on_old_python_uses_newer_python_or_names_remedy(commands, words, said, tmp_path):
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    program = OLDER + "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", program, "setup.py", *words]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith(f"{said}\n") and "\n" not in done.stderr.strip()
    assert done.stderr.startswith(TOO_OLD) is (said == MISSING)


def test_package_import_loads_no_torch_or_jax(tmp_path):
    program = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('strange name', {str(ROOT / '__init__.py')!r},"
        f" submodule_search_locations=[{str(ROOT)!r}])\n"
        "module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert not {'torch', 'jax', 'comfy_api'} & set(sys.modules)\n"
        "assert sorted(module.__all__) == ['WEB_DIRECTORY', 'comfy_entrypoint']\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
