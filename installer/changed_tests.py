"""`setup.py test --changed`: the tests of the files that differ from a commit."""

import ast
import os
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from .terminal import SetupError

PACKAGE = "comfyui_tpu"
# They read every file, and are quick.
ALWAYS = ("tests/test_docs.py", "tests/test_language.py", "tests/test_layering.py", "tests/test_locales.py")


def list_changed(root: Path, commit: str) -> list[str]:
    """Return the paths, relative to `root`, of files that differ from `commit` or are not under version control."""
    commands = (["diff", "--name-only", "-z", commit, "--"], ["ls-files", "--others", "--exclude-standard", "-z"])
    found: list[str] = []
    for words in commands:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["git failed"]
            raise SetupError(f"--changed compares with the commit {commit!r}, and git says: {said[-1]}. Give a commit.")
        found += filter(None, done.stdout.split("\0"))
    return sorted(found)


def choose_tests(root: Path, changed: Iterable[str]) -> list[str]:
    """Return the test files of the changed files.

    They import a changed module, or a module that imports one, themselves or by helpers in `tests/`; or they are in
    the folder of the same name, such as `tests/engine` for `tpu_runtime/engine`. Other files
    belong to the tests that name them. A changed conftest.py selects all tests of its folder.
    """
    changed = set(changed)
    modules = {_module_name(path): path for path in _python_files(root)}
    imports = {path: set(_list_imports(root / path, path, modules)) for path in modules.values()}
    concerned = changed | {path for path, found in imports.items() if not _is_test(path) and found & changed}
    others = {Path(path).name for path in changed if not path.endswith(".py")}
    folders = [Path(path).parent for path in changed if Path(path).name == "conftest.py"]
    folders += [folder for path in changed & imports.keys() if (folder := _folder_of_tests(path)) != Path("tests")]
    chosen = {path for path in ALWAYS if (root / path).is_file()}
    for path in imports:
        if not Path(path).name.startswith("test_"):
            continue
        reached = _through_helpers(path, imports)
        if (
            reached & concerned
            or any(folder in Path(path).parents for folder in folders)
            or any(name in (root / path).read_text("utf-8") for name in others)
        ):
            chosen.add(path)
    return sorted(chosen)


def _through_helpers(test: str, imports: Mapping[str, Collection[str]]) -> set[str]:
    """Return a test's file, all that it imports, and all that its helpers in `tests/` import."""
    reached, waiting = set[str](), [test]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        if _is_test(path):
            waiting += imports[path]
    return reached


def _is_test(path: str) -> bool:
    return path.startswith("tests/")


def _python_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from ((Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py"))


def _folder_of_tests(path: str) -> Path:
    """Return where the tests of a module's folder are, `tests` for one without a folder of its own."""
    parts = () if _is_test(path) else Path(path).parent.parts
    return Path("tests", *(part for part in parts if part != "tpu_runtime"))


def _module_name(path: str) -> str:
    parts = [PACKAGE, *Path(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _list_imports(file: Path, path: str, modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths of the modules that a file imports. Names other than modules belong to the package."""
    package = [PACKAGE, *Path(path).parent.parts]
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names = [name if (name := f"{origin}.{alias.name}") in modules else origin for alias in node.names]
        else:
            continue
        yield from (modules[name] for name in names if name in modules)
