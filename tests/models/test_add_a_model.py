"""docs/add_a_model.md, followed to the letter in a copy of the repository: its model passes its tests there."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from comfyui_tpu.tpu_runtime.checkpoints import compatibility
from comfyui_tpu.tpu_runtime.models import SPECS

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "add_a_model.md"
# A file of the repository, which is one of the guide's; and one with how it changes.
NEW = re.compile(r"^\*\*`([^`\n]+)`\*\* is \[[^]]+\]\(([^)\n]+)\)", re.MULTILINE)
CHANGE = re.compile(r"^\*\*`([^`\n]+)`\*\*\n\n```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def new_files() -> dict[str, str]:
    """The files that the guide adds, by their place in the repository."""
    return {found[1]: (GUIDE.parent / found[2]).read_text("utf-8") for found in NEW.finditer(GUIDE.read_text("utf-8"))}


def follow(root: Path) -> None:
    """Does in the repository at `root` what the guide says."""
    for path, content in new_files().items():
        assert not (root / path).exists(), path
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(content, "utf-8")
    for found in CHANGE.finditer(GUIDE.read_text("utf-8")):
        file, lines = root / found[1], found[2].splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
        text = file.read_text("utf-8")
        assert text.count(before) == 1, f"{found[1]} no longer has what the guide changes:\n{before}"
        file.write_text(text.replace(before, after), "utf-8")


def test_guide_code_blocks_are_in_its_files():
    quoted = QUOTED.findall(GUIDE.read_text("utf-8"))
    assert quoted and all(any(each in content for content in new_files().values()) for each in quoted)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository with the guide's model; its parent is where Python finds it."""
    root = tmp_path_factory.mktemp("guide") / "comfyui_tpu"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "output", "*.egg-info"))
    follow(root)
    done = run(root, "tools/workflows.py")
    assert done.returncode == 0, done.stderr
    return root


def run(root: Path, *command: str) -> subprocess.CompletedProcess:
    outer = ("PYTEST_", "COMFYUI_TPU_CACHE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment["PYTHONPATH"] = str(root.parent)
    return subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_guide_model_passes_its_tests_and_the_shared_ones(copy: Path):
    """Text states, one denoiser call with poisoned padding, the whole loop at an odd size, on 8 simulated chips."""
    results = copy.parent / "results.xml"
    options = ("-q", "-k", "pixart", "-p", "no:cacheprovider", "--junit-xml", str(results))
    rooms = ("tests/models/test_pixart.py", "tests/nodes", "tests/sharding", "tests/test_layering.py")
    done = run(copy, "-m", "pytest", *options, f"--basetemp={copy.parent / 'temp'}", *rooms)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = list(ElementTree.parse(results).iter("testcase"))
    passed = [f"{case.get('classname')}.{case.get('name')}" for case in cases if len(case) == 0]
    assert len(passed) == len(cases)
    own = re.findall(r"^def (test_\w+)", (copy / "tests/models/test_pixart.py").read_text("utf-8"), re.MULTILINE)
    nodes = ("PixArtTextEncoder", "PixArtTPUSampler", "PixArtTPUVAEDecoder", "PixArtTPUPipeline")
    wanted = (
        *own,
        *(f"test_node_required_widgets_come_first[{node}]" for node in nodes),
        "test_lay_out_published_architectures_split_every_large_weight[pixart-sigma-xl transformer-float32]",
        "test_example_is_valid_workflow[api/pixart_t2i.json]",
        "test_file_imports_only_allowed_packages[tpu_runtime/models/pixart/spec.py]",
    )
    assert len(own) == 3
    assert [name for name in wanted if not any(name in case for case in passed)] == []


def test_guide_code_passes_ruff(copy: Path):
    new = list(new_files())
    assert len(new) == 5
    for command in (("ruff", "check"), ("ruff", "format", "--check")):
        done = run(copy, "-m", *command, "--no-cache", *new)
        assert done.returncode == 0, done.stdout + done.stderr


def test_config_problem_accepts_class_aliases():
    """PixArt's say Transformer2DModel: diffusers translates that name, and so a component may."""
    spec = SPECS[0]
    component = replace(spec.component("transformer"), class_aliases=("OldName",))
    problems = [
        compatibility.config_problem(spec, component, "model", {**component.tiny, "_class_name": name})
        for name in (component.class_name, "OldName", "Other")
    ]
    assert problems == [None, None, f"model: transformer is a Other; {spec.title} needs a {component.class_name}."]
