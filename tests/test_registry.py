"""What the ComfyUI registry and PyPI are told of the pack. Rules: https://docs.comfy.org/registry/specifications."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from comfyui_tpu.setup import list_packages
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from PIL import Image

ROOT = Path(__file__).parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, COMFY, PACKAGES = METADATA["project"], METADATA["tool"]["comfy"], METADATA["tool"]["setuptools"]
DATA = PACKAGES["package-data"]["comfyui_tpu"]
RAW = PROJECT["urls"]["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main/"


def test_registry_names_and_versions_are_valid():
    assert re.fullmatch(r"[a-z](?:[-_.]?[a-z0-9])*", PROJECT["name"]) and len(PROJECT["name"]) < 100
    assert re.fullmatch(r"[a-z][a-z0-9-]+", COMFY["PublisherId"]) and COMFY["DisplayName"] and PROJECT["description"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert Version("0.3.76") in SpecifierSet(COMFY["requires-comfyui"])
    for path in [PROJECT["readme"], *PROJECT["license-files"], *COMFY["includes"]]:
        assert (ROOT / path).exists(), path


def test_project_version_is_newest_of_changelog():
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    released = [(Version(name), date) for name, date in headings[1:]]
    assert released == sorted(released, reverse=True) and all(date for _, date in released)
    assert released[0][0] == Version(PROJECT["version"])


def test_project_urls_belong_to_one_repository():
    for name, url in PROJECT["urls"].items():
        assert url.startswith(PROJECT["urls"]["Repository"]), name
    assert {"Repository", "Documentation", "Issues"} <= set(PROJECT["urls"])


@pytest.mark.parametrize(("name", "ratio"), [("Icon", 1), ("Banner", 21 / 9)])
def test_registry_images_have_required_shape(name: str, ratio: float):
    path = ROOT / COMFY[name].removeprefix(RAW)
    with Image.open(path) as picture:
        width, height = picture.size
    assert width / height == pytest.approx(ratio) and path.stat().st_size < 150_000
    assert name == "Banner" or width <= 400


def list_tracked_files(*options: str) -> set[str]:
    """The files that git tracks; with `--ignored` and a file of patterns, those of them that the patterns name."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "-z", *options]
    return {*subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")} - {""}


def archive() -> set[str]:
    """The files that comfy-cli packs: all that are tracked, without those that .comfyignore names.

    Its patterns are .gitignore's, so git itself is the judge of them.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone of the repository")
    return list_tracked_files() - list_tracked_files("--ignored", f"--exclude-from={ROOT / '.comfyignore'}")


def test_archive_contains_all_served_and_loaded_files():
    """By folder, so that a pattern for a folder at the top is seen where it also names one further down."""
    packed = archive()
    packages = {name.removeprefix("comfyui_tpu").lstrip(".").replace(".", "/") for name in list_packages()}
    served = {"web", "locales", "examples", "miniatures"}
    needed = {
        name for name in list_tracked_files()
        if name.split("/")[0] in served or name.endswith((".py", ".json")) and str(Path(name).parent) in packages - {""}
    }  # fmt: skip
    single = {"__init__.py", "__main__.py", "LICENSE", "README.md", "pyproject.toml"}
    single |= {path.name for pattern in DATA if "/" not in pattern for path in ROOT.glob(pattern)}
    assert len([name for name in needed if name.startswith("web/docs/")]) >= 96
    assert sorted((needed | single) - packed) == []


def test_archive_contains_no_repository_only_files():
    tops = {name.split("/")[0] for name in archive()}
    packages = {name.split(".")[1] for name in list_packages() if "." in name}
    texts = {"CHANGELOG.md", "LICENSE", "README.md", "README.zh-CN.md", "pyproject.toml", "__init__.py", "__main__.py"}
    data = {pattern.partition("/")[0] for pattern in DATA if "/" in pattern}
    data |= {path.name for pattern in DATA if "/" not in pattern for path in ROOT.glob(pattern)}
    assert tops == packages | texts | data


@pytest.mark.slow
def test_wheel_contents_equal_archive(tmp_path: Path):
    """Made as pip does it, by the back end. No setup.py, whose installer would be missing."""
    source = tmp_path / "source"
    for name in archive() | {"setup.py"}:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).symlink_to(ROOT / name)
    program = f"import setuptools.build_meta; setuptools.build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = {
        name.removeprefix("comfyui_tpu/") for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name
    }
    assert held == {name for name in archive() if "/" in name or not name.endswith(".md")} - {"LICENSE"}


def test_repository_passes_registry_lint_rules():
    """`comfy node validate` runs these rules; what they find, exec, eval, two statements a line, is to be an error."""
    command = ["ruff", "check", ".", "--quiet", "--output-format=concise", "--select", "S102,S307,E702"]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_mutmut_paths_and_tests_exist():
    """mutmut passes over what has moved, in silence."""
    mutated = METADATA["tool"]["mutmut"]
    names = (*mutated["only_mutate"], *mutated["source_paths"], *mutated["pytest_add_cli_args_test_selection"])
    for name in names:
        path, _, function = name.removeprefix("comfyui_tpu/").partition("::")
        assert (ROOT / path).exists(), name
        assert not function or f"def {function}(" in (ROOT / path).read_text(), name
