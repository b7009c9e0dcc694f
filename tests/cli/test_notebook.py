"""The notebook for Colab and Kaggle: its cells from top to bottom, on simulated chips and with the miniatures."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from comfyui_tpu.tests.support.patience import PATIENCE_S
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "tpu_first_run.ipynb"


def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def find_cell(found: Any, tag: str) -> Any:
    (cell,) = (cell for cell in found.cells if tag in cell.metadata.get("tags", ()))
    return cell


def cell_output(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.recorded
@pytest.mark.parametrize("selftest", [[], ["--first-run"]], ids=["short", "in full"])
def test_notebook_cells_run_in_order(selftest: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With this environment in place of an installation, and one miniature in place of all in the self-test."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    found = notebook()
    settings = find_cell(found, "settings")
    settings.source += (
        f"\nPACK = Path({str(ROOT)!r})\nCOMMAND = Path({str(Path(sys.executable).with_name('comfyui-tpu'))!r})\n"
        f"OUTPUT = Path({str(tmp_path / 'output')!r})\nCOMFYUI = Path({str(tmp_path / 'ComfyUI')!r})\n"
        f'TINY, STEPS, SELFTEST = ["--tiny"], [4], {[*selftest, "--model", "flux2-klein-4b"]}\n'
    )
    NotebookClient(found, timeout=4 * PATIENCE_S, kernel_name="python3").execute(cwd=str(tmp_path))
    assert "doctor" in find_cell(found, "install").source and "Cloning into" not in cell_output(
        find_cell(found, "install")
    )
    assert "All forms agree." in cell_output(find_cell(found, "verify"))
    shown = {
        kind
        for tag in ("picture", "video")
        for output in find_cell(found, tag).outputs
        for kind in output.get("data", {})
    }
    assert {"image/png", "text/html"} <= shown
    assert list((tmp_path / "output").rglob("*.mp4")) and list((tmp_path / "output").rglob("*.png"))
    assert "first_run.json" in cell_output(find_cell(found, "record")) and "verify.json" in cell_output(
        find_cell(found, "record")
    )
    record = json.loads((tmp_path / "output" / "first_run.json").read_text())
    assert str(tmp_path) not in json.dumps(record) and os.path.expanduser("~") not in json.dumps(record)


def test_notebook_continues_after_failed_check(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """A red row is for the record; a download that fails stops it."""
    found = notebook()
    (function,) = (
        node for node in ast.parse(find_cell(found, "install").source).body if isinstance(node, ast.FunctionDef)
    )
    (tmp_path / "run.py").write_text(ast.unparse(function))
    names = runpy.run_path(
        str(tmp_path / "run.py"), {"PACK": ROOT, "COMFYUI": ROOT, "os": os, "subprocess": subprocess}
    )
    names["run"]("false", stops=False)
    assert capsys.readouterr().out == "false ended with exit code 1; the last lines of its output show why.\n"
    with pytest.raises(SystemExit, match="exit code 1"):
        names["run"]("false")
    for word in ('"doctor"', '"selftest"', '"--verify"'):
        (line,) = (line for cell in found.cells for line in cell.source.splitlines() if word in line)
        assert line.endswith("stops=False)"), line


def test_notebook_states_sizes_has_no_outputs_and_existing_paths():
    found = notebook()
    nbformat.validate(found)
    named = [
        ROOT.joinpath(*re.findall(r'"([^"]+)"', path))
        for cell in found.cells
        for path in re.findall(r'PACK((?: / "[^"]+")+)', cell.source)
    ]
    assert len(named) > 1 and all(path.exists() for path in named), named
    first, *_ = found.cells
    assert "| download | disk |" in first.source and "16 GB" in first.source
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in found.cells)
    downloads = [index for index, cell in enumerate(found.cells) if '"download"' in cell.source]
    assert downloads and min(downloads) > 0
    assert find_cell(found, "settings").source.count("TINY = []") == 1
