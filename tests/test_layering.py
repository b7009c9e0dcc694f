"""Check the imports between packages, and the sizes and docstrings of their files.

A package is a folder here. The files of `tpu_runtime` itself form the package "leaves", except `api.py`, which runs
stages, and `messages.py`.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from comfyui_tpu.tpu_runtime.models import SPECS

ROOT = Path(__file__).parents[1]
# Longer files hide their purpose. Longer runs of equal lines should be one function.
MAX_LINES, MAX_SHARED_RUN = 500, 8
# For each package, the others that it may import.
LEAVES = {"leaves", "messages", "model_spec", "cache", "attention", "kernels", "sharding"}
PROGRAMS = {"programs", "machine", *LEAVES}
CHECKPOINTS = {"checkpoints", "models", "models.common", "formats", *PROGRAMS}
ENGINE = {"engine", "distributed.multihost", "distributed.rpc", "loras", *CHECKPOINTS}
RUNTIME = {"api", "monitor", "plan", "cost_model", *ENGINE}
NODES = {"nodes", "nodes.graphs", *RUNTIME}
MAY_IMPORT = {
    "sharding": set(),
    "kernels": {"sharding"},
    "attention": {"kernels", "sharding"},
    "messages": set(),
    "model_spec": {"messages", "sharding"},
    "leaves": {"messages", "model_spec", "attention", "sharding"},
    "cache": {"leaves", "messages", "model_spec", "attention", "sharding"},
    "machine": LEAVES,
    "programs": {"machine", *LEAVES},
    "formats": LEAVES,
    "models.common": {"formats", *PROGRAMS},
    "models.<family>": {"models.common", "formats", *PROGRAMS},
    "models": {"models.<family>", "models.common", "formats", *PROGRAMS},
    "checkpoints": {"models", "formats", *PROGRAMS},
    "loras": CHECKPOINTS,
    "distributed.rpc": CHECKPOINTS,
    "distributed.multihost": {"distributed.rpc", *CHECKPOINTS},
    "engine": ENGINE - {"engine"},
    "distributed.remote": ENGINE,
    "cost_model": PROGRAMS,
    "plan": {"cost_model", *CHECKPOINTS},
    "monitor": ENGINE,
    "api": {"distributed.remote", *RUNTIME} - {"api"},
    # Outside the runtime.
    "nodes": RUNTIME,
    "nodes.graphs": {"nodes", *RUNTIME},
    "nodes.headless": NODES,
    "nodes.comfyui.networks": RUNTIME,
    "nodes.comfyui.weights": RUNTIME,
    "nodes.comfyui": {"nodes.comfyui.networks", "nodes.comfyui.weights", *NODES},
    "diagnostics.selftest": ENGINE,
    "diagnostics": {"nodes", *RUNTIME},
    "distributed.fleet": {"nodes.headless", *NODES},
    "distributed": set(),
    "cli": {"nodes.headless", "distributed.fleet", "diagnostics", "diagnostics.selftest", "sharding", *NODES},
    "entry": {"nodes.comfyui"},
    "installer": set(),
}
TORCH = frozenset({"torch", "torchax", "diffusers", "transformers"})
# ComfyUI's MODEL, CLIP and VAE are torch objects, as are the self-test's float32 reference and the codec's tensors.
TORCH_TOO = (
    "diagnostics/selftest/families.py",
    "distributed/rpc/codec.py",
    *(
        f"nodes/comfyui/core_{name}.py"
        for name in ("control_nets", "control_patches", "encoder", "model", "text_and_vae")
    ),
    "nodes/comfyui/model_patcher.py",
    "nodes/comfyui/networks/",
    "nodes/comfyui/weights/",
)
COMFYUI = frozenset({"comfy", "comfy_api", "comfy_execution", "folder_paths", "server", "execution", "latent_preview"})
FOLDERS = (
    "attention", "cli", "diagnostics", "distributed", "installer", "kernels", "nodes", "sharding", "tpu_runtime",
)  # fmt: skip
FILES = [ROOT / "__init__.py"] + sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> str:
    """Return the package of a file."""
    parts = path.relative_to(ROOT).parts
    if parts == ("__init__.py",):
        return "entry"
    if parts[:2] == ("tpu_runtime", "models") and len(parts) > 3:
        return "models.common" if parts[2] == "common" else "models.<family>"
    if parts[0] == "tpu_runtime":
        return ".".join(parts[1:-1]) or {"api.py": "api", "messages.py": "messages"}.get(parts[1], "leaves")
    return ".".join(parts[:-1]) if parts[0] in ("diagnostics", "distributed", "nodes") else parts[0]


def imports(path: Path) -> Iterator[tuple[int, str, tuple[str, ...], int]]:
    """Yield `(level, module, names, line)` of each import, for type checking too; level 0 is absolute."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, (), node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", tuple(alias.name for alias in node.names), node.lineno


def targets(path: Path, level: int, module: str, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of the pack that a relative import names."""
    folder = path.parents[level - 1]
    assert folder == ROOT or ROOT in folder.parents, f"{relative(path)}: {'.' * level}{module} leaves the pack"
    base = folder.joinpath(*module.split(".")) if module else folder
    if base.with_suffix(".py").is_file():
        yield base.with_suffix(".py")
        return
    for name in names:
        inner = base / name
        if inner.with_suffix(".py").is_file():
            yield inner.with_suffix(".py")
        elif inner.is_dir():
            yield inner / "__init__.py"
        else:
            yield base / "__init__.py"


def imported_files(path: Path) -> Iterator[Path]:
    """Yield the files of the pack that a file imports, for type checking too."""
    for level, module, names, _ in imports(path):
        if level:
            yield from targets(path, level, module, names)


def find_forbidden_imports(path: Path) -> list[str]:
    """Return the imports of a file that its package is not allowed."""
    package = package_of(path)
    return [
        f"{relative(path)}:{line} ({package}) imports {relative(target)} ({package_of(target)})"
        for level, module, names, line in imports(path)
        if level
        for target in targets(path, level, module, names)
        if package_of(target) not in {package, *MAY_IMPORT[package]}
    ]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_imports_only_allowed_packages(path: Path):
    assert not find_forbidden_imports(path)


def test_package_dependencies_form_no_cycle():
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    assert {package_of(path) for path in FILES} == set(order)


def test_file_imports_form_no_cycle():
    graph = {path: {target for target in imported_files(path) if target != path} for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()


def test_family_imports_no_other_family():
    """Networks that several families share are in `models/common`."""
    files = [path for path in FILES if package_of(path) == "models.<family>"]
    pairs = [
        (path, target) for path in files for target in imported_files(path) if package_of(target) == "models.<family>"
    ]
    assert len(pairs) > 50
    assert [(relative(path), relative(target)) for path, target in pairs if path.parent != target.parent] == []


def test_conditions_outside_family_files_name_no_family():
    """Families differ in fields of their specs. A condition on a name elsewhere would leave out a new family."""
    denoisers = {spec.component(spec.denoiser.experts[0]).class_name for spec in SPECS}
    names = {spec.family for spec in SPECS} | denoisers
    own = [path for path in FILES if "spec_for_family" in path.read_text() and path.parent == ROOT / "nodes"]
    asked = [
        f"{relative(path)}:{node.lineno} {node.value}"
        for path in FILES
        if not package_of(path).startswith("models") and path not in own
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert asked == []


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_external_packages_are_imported_only_where_allowed(path: Path):
    """Absolute imports of our own names fail in ComfyUI, which renames the pack and has a module `nodes` itself."""
    own, importer = {"comfyui_tpu", *FOLDERS}, package_of(path)
    for level, module, _, line in imports(path):
        package = module.partition(".")[0]
        where = f"{relative(path)}:{line} imports {module}"
        if level == 0:
            assert package not in own, where
            assert package not in COMFYUI or importer.startswith("nodes.comfyui"), where
            assert package not in TORCH or relative(path).startswith(("tpu_runtime/", *TORCH_TOO)), where


def test_files_stay_below_line_limit():
    files = FILES + [path for folder in ("tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]
    long = {relative(path): count for path in files if (count := len(path.read_text().splitlines())) >= MAX_LINES}
    assert not long


def test_model_files_share_no_long_run_of_lines():
    seen: dict[tuple[str, ...], str] = {}
    for path in (path for path in FILES if package_of(path).startswith("models")):
        text = path.read_text()
        imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        skipped = {number for node in imported for number in range(node.lineno, (node.end_lineno or 0) + 1)}
        kept = (line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in skipped)
        lines = [line for line in kept if line]
        for run in zip(*(lines[start:] for start in range(MAX_SHARED_RUN)), strict=False):
            assert seen.setdefault(run, relative(path)) == relative(path), f"{relative(path)} and {seen[run]}:\n{run}"


def test_model_files_replace_no_forward_except_causal():
    """Only the attention of unchanged text encoders replaces a forward of upstream."""
    behind = re.compile(r"\.forward\s*=[^=]|set_processor|register_forward")
    files = [path for path in (ROOT / "tpu_runtime" / "models").rglob("*.py") if behind.search(path.read_text())]
    assert [path.name for path in files] == ["causal.py"]


def test_package_docstrings_describe_contents_and_imports():
    package_files = [path for path in FILES if path.name == "__init__.py"]
    docstrings = {relative(path): ast.get_docstring(ast.parse(path.read_text())) or "" for path in package_files}
    assert not [name for name, text in docstrings.items() if len(text) < 40]
    assert not [name for name, text in docstrings.items() if "import" not in text and name != "__init__.py"]


def test_architecture_page_lists_every_package():
    """Each package has a row in docs/architecture.md, which names only packages that it may import."""
    rows = re.findall(r"^\| (`.+?) \| .+ \| (.+) \|$", (ROOT / "docs/architecture.md").read_text("utf-8"), re.MULTILINE)
    plan: dict[str, set[str]] = {}
    for names, may in rows[: rows.index(next(row for row in rows if row[0] == "`sharding/`")) + 1]:
        allowed = {word.replace("/", ".") for word in re.findall(r"`([^`]+)`", may)}
        folder = ""
        for name in re.findall(r"`([^`]+)`", names):
            folder = folder if "/" not in name.rstrip("/") and folder else name.rpartition("/")[0].rpartition("/")[0]
            place = name if "/" in name.rstrip("/") or not folder else f"{folder}/{name}"
            plan[_package_of_place(place)] = allowed
    assert set(plan) == set(MAY_IMPORT) - {"installer"}
    wrong = {package: extra for package, may in plan.items() if (extra := _known_packages(may) - MAY_IMPORT[package])}
    assert not wrong


def _package_of_place(place: str) -> str:
    """Return the package of a path in the table."""
    inside = place.removeprefix("tpu_runtime/")
    special = {"__init__.py": "entry", "api.py": "api", "messages.py": "messages", "*.py": "leaves"}
    return special.get(inside, inside.rstrip("/").replace("/", "."))


def _known_packages(words: set[str]) -> set[str]:
    return {word for word in words if word in MAY_IMPORT}


def test_class_names_are_unique_in_package():
    seen: dict[tuple[str, str], str] = {}
    twice = [
        (node.name, relative(path), other)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and (other := seen.setdefault((relative(path.parent), node.name.lstrip("_")), relative(path))) != relative(path)
    ]
    assert not twice


def test_import_check_detects_reversed_dependency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for name in (
        "sharding/rules.py",
        "nodes/family.py",
        "tpu_runtime/engine/stage_functions.py",
        "tpu_runtime/models/__init__.py",
        "tpu_runtime/models/flux2/spec.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "sharding/rules.py").write_text("def f():\n    from ..nodes import family\n")
    (tmp_path / "tpu_runtime/models/flux2/spec.py").write_text("from ...engine.run import Run\n")
    (tmp_path / "tpu_runtime/engine/stage_functions.py").write_text("from ..models import SPECS\n")
    assert find_forbidden_imports(tmp_path / "sharding/rules.py") == [
        "sharding/rules.py:2 (sharding) imports nodes/family.py (nodes)"
    ]
    assert find_forbidden_imports(tmp_path / "tpu_runtime/models/flux2/spec.py")
    assert not find_forbidden_imports(tmp_path / "tpu_runtime/engine/stage_functions.py")
