"""What the docs say of the code where that can be compared: the lines that a reader is sent to, and the vocabulary."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_tpu.tpu_runtime.engine.stage_functions import CALL_FUNCTIONS, STAGE_FUNCTIONS
from comfyui_tpu.tpu_runtime.model_spec import STAGES

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
# Without the self-test, whose checks are also of parts that are no stage.
ROOMS = (
    "cli",
    "nodes",
    "distributed/fleet",
    *(f"tpu_runtime/{room}" for room in ("engine", "programs", "plan", "monitor")),
)
PRODUCT = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
PLACES = re.findall(r"^\| ([^|]+) \| `([\w/]+\.py)` \| `(.+)` \|$", CONTRIBUTING, re.MULTILINE)


def section(title: str) -> str:
    return ARCHITECTURE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize(("what", "path", "line"), PLACES, ids=[what for what, *_ in PLACES])
def test_contributing_line_occurs_once_in_file(what: str, path: str, line: str):
    """From the README to each of them it is three files."""
    assert "(CONTRIBUTING.md)" in (ROOT / "README.md").read_text("utf-8")
    assert (ROOT / path).read_text("utf-8").count(line) == 1


def test_contributing_table_includes_guidance_memory_and_refusal():
    assert {"guidance is added", "weights leave the chips", "a wrong size is refused"} <= {what for what, *_ in PLACES}


def test_glossary_lists_stages_in_order():
    listed = re.findall(r"^\| `(\w+)` \|", section("Glossary"), re.MULTILINE)
    assert tuple(listed) == STAGES
    assert set(STAGE_FUNCTIONS) == {*STAGES, "warmup", "calibrate", *CALL_FUNCTIONS}


def stage_words(tree: ast.AST) -> Iterator[str]:
    """Literals that are compared with, or passed as, a stage."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "stage":
            yield from words(node.value)
        elif isinstance(node, ast.Compare) and re.search(r"\bstages?(\.name)?$", ast.unparse(node.comparators[-1])):
            yield from words(node.left)
        elif isinstance(node, ast.Compare) and re.search(r"\bstage(\.name)?$", ast.unparse(node.left)):
            yield from (word for each in node.comparators for word in words(each))


def words(node: ast.AST) -> list[str]:
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def test_code_uses_only_stage_names_of_glossary():
    used = {word for path in PRODUCT for word in stage_words(ast.parse(path.read_text("utf-8")))}
    assert {"denoise", "decode"} <= used <= {*STAGES, "warmup", ""}


def test_glossary_contains_states_of_weights():
    text = (ROOT / "tpu_runtime/engine/device_cache.py").read_text("utf-8")
    body = next(
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == "state"
    )
    states = {word for node in ast.walk(body.body[-1]) for word in words(node)}
    assert states and states <= set(re.findall(r"`(\w+)`", section("Glossary")))


# Tables of what runs and of what is refused, by the heads of their columns.
TABLES = {
    "docs/core_nodes.md": ["| | | test |", "| known | from | test |", "| node | why | instead | test |"],
    "docs/files.md": [
        "| in the file | decoded | marks | test |",
        "| file | ComfyUI's folder | becomes | on the chips | test |",
        "| family | not determined by tensors | determined by | if undetermined | test |",
        "| known by | networks | test |",
        "| what | test |",
    ],
}


def rows(path: str, head: str) -> list[str]:
    text = (ROOT / path).read_text("utf-8")
    assert text.count(f"\n{head}\n") == 1, (path, head)
    lines = text.partition(f"\n{head}\n")[2].splitlines()[1:]
    return lines[: next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))]


@pytest.mark.parametrize(("path", "head"), [(path, head) for path, heads in TABLES.items() for head in heads])
def test_docs_table_row_names_unique_test(path: str, head: str):
    """By its function's name, which one file of the tests has."""
    sources = [file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    for row in rows(path, head):
        named = re.findall(r"`(test_\w+)`", row.rsplit(" | ", 1)[-1])
        assert named, f"{path} names no test: {row}"
        for name in named:
            files = [source for source in sources if re.search(rf"^def {name}\(", source, re.MULTILINE)]
            assert len(files) == 1, f"{path}: {name} is in {len(files)} files"
