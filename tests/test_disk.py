"""The suite's temporary files: deleted after passed tests, kept after failures, and bounded."""

from pathlib import Path

import pytest
from comfyui_tpu.tests.support import disk

PASSING = """
import pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "weights").write_bytes(b"0" * 5000)
    return folder

def test_passes(made, tmp_path):
    (tmp_path / "file").write_bytes(b"0" * 5000)
"""
FAILING = """
def test_fails(tmp_path):
    (tmp_path / "evidence").write_bytes(b"0" * 5000)
    assert False
"""


def test_own_settings_keep_failed_tests_files_only(pytester: pytest.Pytester, request: pytest.FixtureRequest):
    settings = {name: request.config.getini(name) for name in ("tmp_path_retention_policy", "tmp_path_retention_count")}
    pytester.makeini("\n".join(["[pytest]", *(f"{name} = {value}" for name, value in settings.items())]))
    pytester.makeconftest("from comfyui_tpu.tests.conftest import delete_module_folders\n")
    pytester.makepyfile(test_passing=PASSING, test_failing=FAILING)
    base = pytester.path / "base"
    result = pytester.runpytest_subprocess(f"--basetemp={base}", "-p", "no:randomly", "-p", "no:xdist")
    result.assert_outcomes(passed=1, failed=1)
    assert {path.name for path in base.rglob("*") if path.is_file()} - {".lock"} == {"evidence"}


def test_delete_module_folders_keeps_earlier_ones_and_tests(tmp_path: Path):
    for name in ("shared-cache", "model0", "test_fails0"):
        (tmp_path / name / "inside").mkdir(parents=True)
    disk.delete_module_folders(tmp_path, kept={tmp_path / "shared-cache"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shared-cache", "test_fails0"]


def test_check_size_fails_above_limit(tmp_path: Path):
    (tmp_path / "large").write_bytes(b"0" * 2**20)
    (tmp_path / "link").symlink_to(tmp_path / "large")
    (tmp_path / "hard").hardlink_to(tmp_path / "large")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(2**40)
    size = disk.count_bytes(tmp_path)
    assert 2**20 <= size < 2**20 + 2**16
    disk.check_size(size, size)
    with pytest.raises(pytest.fail.Exception, match="take 1 MiB of the disk, and 0 MiB are allowed"):
        disk.check_size(size, 2**19)


def test_own_hook_fails_the_large_test_alone(pytester: pytest.Pytester):
    pytester.makeconftest(
        """
        from comfyui_tpu.tests.conftest import disk, pytest_runtest_teardown

        disk.check_size = lambda size, check=disk.check_size: check(size, 6000)
        """
    )
    small, large = (PASSING.replace("5000", str(size)) for size in (500, 9000))
    pytester.makepyfile(test_a=small, test_b=large, test_c=small)
    result = pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:xdist")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["ERROR test_b.py::test_passes *"])
