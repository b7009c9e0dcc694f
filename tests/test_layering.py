"""Imports point one way: nodes -> tpu_runtime -> attention -> sharding; each outside package has its place."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each layer may import itself and those after it.
LAYERS = ("nodes", "tpu_runtime", "attention", "sharding")
TORCH = frozenset({"torch", "torchax", "diffusers", "transformers"})
COMFYUI = frozenset({"comfy", "comfy_api", "comfy_execution", "folder_paths", "server", "execution", "latent_preview"})
# The only files that know ComfyUI.
ADAPTERS = frozenset(f"nodes/comfyui/{part}.py" for part in ("adapter", "memory", "previews", "routes"))
ENTRIES = [ROOT / "__init__.py", *sorted((ROOT / "cli").glob("*.py"))]
MODULES = ENTRIES + sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str, int]]:
    """`(level, dotted name, line)` of every import; level 0 is absolute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((node.level, name, node.lineno) for name in names)


def target_layer(path: Path, level: int, name: str) -> str:
    """The top folder or file of the pack that a relative import names."""
    parent = path.parent
    for _ in range(level - 1):
        parent = parent.parent
    assert parent == ROOT or ROOT in parent.parents, f"{path}: {'.' * level}{name} leaves the pack"
    return (parent / name.replace(".", "/")).relative_to(ROOT).parts[0]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_point_down(path: Path):
    layer = path.relative_to(ROOT).parts[0]
    if layer not in LAYERS:
        return
    allowed = LAYERS[LAYERS.index(layer) :]
    for level, name, line in imports(path):
        if level:
            assert target_layer(path, level, name) in allowed, f"{relative(path)}:{line} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_outside_packages_are_imported_where_they_belong(path: Path):
    """Absolute imports of our own names fail in ComfyUI, which renames the pack and has a module `nodes` itself."""
    own = {"comfyui_tpu", *LAYERS, "cli"}
    for level, name, line in imports(path):
        package = name.partition(".")[0]
        where = f"{relative(path)}:{line} imports {name}"
        if level == 0:
            assert package not in own, where
            assert package not in COMFYUI or relative(path) in ADAPTERS, where
            assert package not in TORCH or relative(path).startswith("tpu_runtime/"), where


def test_the_rules_see_a_wrong_import(tmp_path: Path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    import torch.nn\n    from ..nodes import host\n    from . import axes\n")
    assert list(imports(wrong)) == [(0, "torch.nn", 2), (2, "nodes", 3), (1, "axes", 4)]
    assert target_layer(ROOT / "sharding" / "rules.py", 2, "nodes") == "nodes"
