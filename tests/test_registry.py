"""What the ComfyUI registry and PyPI are told of the pack. Rules: https://docs.comfy.org/registry/specifications."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from PIL import Image

ROOT = Path(__file__).parents[1]
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, COMFY = METADATA["project"], METADATA["tool"]["comfy"]
RAW = PROJECT["urls"]["Repository"].replace("github.com", "raw.githubusercontent.com") + "/main/"


def test_names_and_versions_are_what_the_registry_takes():
    assert re.fullmatch(r"[a-z](?:[-_.]?[a-z0-9])*", PROJECT["name"]) and len(PROJECT["name"]) < 100
    assert re.fullmatch(r"[a-z][a-z0-9-]+", COMFY["PublisherId"]) and COMFY["DisplayName"] and PROJECT["description"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert Version("0.3.76") in SpecifierSet(COMFY["requires-comfyui"])
    for path in [PROJECT["readme"], *PROJECT["license-files"], *COMFY["includes"]]:
        assert (ROOT / path).exists(), path


def test_the_version_is_the_newest_of_the_changelog():
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    released = [(Version(name), date) for name, date in headings[1:]]
    assert released == sorted(released, reverse=True) and all(date for _, date in released)
    assert released[0][0] == Version(PROJECT["version"])


def test_addresses_are_of_one_repository():
    for name, url in PROJECT["urls"].items():
        assert url.startswith(PROJECT["urls"]["Repository"]), name
    assert {"Repository", "Documentation", "Issues"} <= set(PROJECT["urls"])


@pytest.mark.parametrize(("name", "ratio"), [("Icon", 1), ("Banner", 21 / 9)])
def test_pictures_are_there_and_of_the_shape_that_is_shown(name: str, ratio: float):
    path = ROOT / COMFY[name].removeprefix(RAW)
    with Image.open(path) as picture:
        width, height = picture.size
    assert width / height == pytest.approx(ratio) and path.stat().st_size < 150_000
    assert name == "Banner" or width <= 400


def test_the_archive_holds_what_comfyui_loads():
    left_out = (ROOT / ".comfyignore").read_text().split()
    packages = {package.removeprefix("comfyui_tpu").lstrip(".").partition(".")[0]
                for package in METADATA["tool"]["setuptools"]["packages"]}  # fmt: skip
    for name in {*packages, "web", "examples", "miniatures", "requirements.txt", "pyproject.toml", "__init__.py"} - {
        ""
    }:
        assert (ROOT / name).exists() and not {name, name + "/"} & set(left_out), name


def test_what_is_mutated_and_the_tests_that_notice_it_are_there():
    """mutmut passes over what has moved, in silence."""
    mutated = METADATA["tool"]["mutmut"]
    names = (*mutated["only_mutate"], *mutated["source_paths"], *mutated["pytest_add_cli_args_test_selection"])
    for name in names:
        path, _, function = name.removeprefix("comfyui_tpu/").partition("::")
        assert (ROOT / path).exists(), name
        assert not function or f"def {function}(" in (ROOT / path).read_text(), name
