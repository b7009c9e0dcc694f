"""`tools/matrix.py`: what it decides and says, with wheels and steps that weigh nothing."""

import csv
import importlib.util
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load():
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "tools" / "matrix.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


matrix = load()
PATCHELF = """#!/bin/sh
if [ "$1" = --print-rpath ]; then echo '$ORIGIN'; else echo "$3 $4" >> "$(dirname "$0")/../asked"; fi
"""


def test_unpinned_removes_only_exact_pins():
    text = "comfyui-frontend-package==1.49.6\ntorch\nnumpy>=1.25.0\ncomfy-kitchen==0.2.31\npydantic~=2.0\n# x==1\n"
    assert matrix.unpinned(text) == (
        "comfyui-frontend-package\ntorch\nnumpy>=1.25.0\ncomfy-kitchen\npydantic~=2.0\n# x==1\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"numpy": "2.5.5"}, {"numpy": "2.6.0"}, ["numpy 2.5.5 -> 2.6.0"]),
        ({"Comfy_Kitchen": "0.2.40"}, {"comfy-kitchen": "0.2.40"}, []),
        ({"a": "1"}, {"b": "2"}, ["a 1 -> absent", "b absent -> 2"]),
        ({"comfyui-tpu": "0.1.0", "x": "1"}, {"comfyui_tpu": "0.2.0", "x": "1"}, []),
    ],
)
def test_version_changes_list_package_old_and_new_version(old, new, said):
    assert matrix.changed(old, new) == said


def outcome(*results, video="f00", **versions):
    return matrix.Outcome(
        steps=[(f"step {at}", one, 90) for at, one in enumerate(results)], video=video, versions=versions
    )


def test_matrix_report_of_failure_names_changed_packages():
    recorded = {"3.12": {"jax": "0.12.0", "av": "19"}}
    assert matrix.told("3.12", outcome("passed", jax="0.13.0", av="19"), recorded, "f00") == [
        "| 3.12 | step 0 | passed | 1.5 |"
    ]
    *_, last = matrix.told("3.12", outcome("passed", "exit code 1", jax="0.13.0", av="19"), recorded, "f00")
    assert last == "3.12 failed; since it last passed: jax 0.12.0 -> 0.13.0"
    *_, last = matrix.told("3.12", outcome("exit code 1", jax="0.12.0", av="19"), recorded, "")
    assert last == "3.12 failed; no package has another version"
    *_, last = matrix.told("3.13", outcome("exit code 1", jax="0.12.0"), recorded, "")
    assert last == "3.13 failed; no run of it is recorded"


def test_matrix_report_of_different_video_is_failure():
    _, differs, last = matrix.told("3.12", outcome("passed", video="bad"), {}, "f00")
    assert "differs from" in differs and last.startswith("3.12 failed")


def test_run_row_stops_at_first_failure_and_keeps_output(tmp_path):
    steps = {name: (sys.executable, "-c", f"print({name!r}); raise SystemExit({name == 'b'})") for name in "abc"}
    row = matrix.Row(python="3.11", newest=False, steps=steps)
    (tmp_path / "row").mkdir()
    found = matrix.run_row(row, tmp_path / "row", {}, [])
    assert [(name, result) for name, result, _ in found.steps] == [("a", "passed"), ("b", "exit code 1")]
    assert not found.is_green and (tmp_path / "row-a.log").read_text() == "a\n"
    chosen = matrix.run_row(row, tmp_path / "row", {}, ["c"])
    assert [(name, result) for name, result, _ in chosen.steps] == [("c", "passed")] and chosen.is_green


def test_repacked_torch_wheel_has_no_cuda_dependencies(tmp_path):
    """pip itself reads what is written; the code stays as it is."""
    wheel, libraries = tmp_path / "torch-9.1.0-py3-none-any.whl", tmp_path / "cuda"
    metadata = (
        "Metadata-Version: 2.1\nName: torch\nVersion: 9.1.0\nRequires-Dist: sympy\n"
        "Requires-Dist: nvidia-cudnn-cu13==9; platform_system == 'Linux'\nRequires-Dist: cuda-toolkit[cublas]==13\n"
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/__init__.py", "code = 1\n")
        archive.writestr("torch/version.py", "__version__ = '9.1.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n")
        archive.writestr("torch/lib/libtorch.so", b"ELF")
        archive.writestr("torch-9.1.0.dist-info/METADATA", metadata)
        archive.writestr(
            "torch-9.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("torch-9.1.0.dist-info/RECORD", "")
    for path, text in (("bin/patchelf", PATCHELF), ("nvidia/cudnn/lib/libcudnn.so.9", "")):
        (libraries / path).parent.mkdir(parents=True)
        (libraries / path).write_text(text)
    (libraries / "bin/patchelf").chmod(0o755)
    made = matrix.repacked(wheel, libraries, tmp_path)
    assert made.name == "torch-9.1.0+cpu-py3-none-any.whl"
    asked = (libraries / "asked").read_text().split()
    assert asked[0] == f"$ORIGIN:{libraries / 'nvidia/cudnn/lib'}" and asked[1].endswith("torch/lib/libtorch.so")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "site"),
    ]
    own = {**os.environ, "PIP_CONSTRAINT": os.devnull}  # this machine may cap torch
    subprocess.run([*install, str(made)], check=True, capture_output=True, env=own)
    (info,) = (tmp_path / "site").glob("torch-*.dist-info")
    assert [line for line in (info / "METADATA").read_text().splitlines() if "-Dist" in line] == [
        "Requires-Dist: sympy"
    ]
    said = (tmp_path / "site/torch/version.py").read_text()
    assert said == "__version__ = '9.1.0+cpu'\ncuda = None\nhip = None\n"
    assert (tmp_path / "site/torch/__init__.py").read_text() == "code = 1\n"
    names = [row[0] for row in csv.reader(io.StringIO((info / "RECORD").read_text()))]
    assert "torch/lib/libtorch.so" in names
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    here = tmp_path / f"torch-9.1.0+cpu-{tag}-{tag}-linux_x86_64.whl"
    here.write_text("")
    assert matrix.torch_wheel(sys.executable, "9.1.0", [], tmp_path) == here  # nothing is downloaded


def test_row_clone_has_matching_python_first_on_path(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    git = ["git", "-C", str(source), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    (source / matrix.NEWEST).write_text("numpy==1\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(matrix, "ROOT", source)
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "none"))
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    row = matrix.Row(python=python, newest=True, steps={})
    for _ in range(2):  # the second run finds the first's
        environment = matrix.clone(row, tmp_path / "row", {"torch": "9.1.0"})
        assert (tmp_path / "row" / matrix.NEWEST).read_text() == "torch==9.1.0\n"
    asks = ["python3", "-c", "import sys, json; print(json.dumps(sys.version_info[:2]))"]
    assert json.loads(subprocess.run(asks, env=environment, capture_output=True).stdout) == [*sys.version_info[:2]]
    oldest = matrix.clone(matrix.Row(python=python, newest=False, steps={}), tmp_path / "row", {})
    assert (tmp_path / "row" / matrix.NEWEST).read_text() == "numpy==1\n" and "/source" not in oldest["PATH"]


def test_matrix_rows_start_with_demo_and_unknown_row_is_refused(capsys):
    assert all(next(iter(row.steps)) == "demo" for row in matrix.ROWS.values())
    with pytest.raises(SystemExit):
        matrix.main(["3.99"])
    assert "there is no row '3.99': choose from 3.11, 3.12, 3.13" in capsys.readouterr().err
