"""The total of a run beside its budget."""

import pytest
from comfyui_tpu.tests.support import durations


def reports(count: int, seconds: float = 0.1) -> list[pytest.TestReport]:
    """Reports of `count` tests in files of a thousand, each slower than the one before."""
    return [
        pytest.TestReport(
            nodeid=f"tests/test_{index // 1000}.py::test_{index}", location=("", None, ""), keywords={},
            outcome="passed", longrepr=None, when="call", duration=seconds * (1 + index // 1000),
        )
        for index in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tests", "minutes", "fails"), [(6000, 59, False), (6000, 61, True), (4000, 100, False)], ids=str
)
def test_full_run_above_one_and_a_half_budgets_fails(tests: int, minutes: float, fails: bool):
    found = reports(tests)
    assert durations.exceeds_budget(found, 60 * minutes) is fails
    *_, total = durations.describe(found, 60 * minutes)
    assert total.startswith(f"{minutes:.1f}" + (" of 40" if tests == 6000 else "")) and ("failed" in total) is fails


def test_durations_list_slowest_files_first():
    lines = durations.describe(reports(12_000), 60)
    assert lines[0] == " 1200.0 s  tests/test_11.py" and lines[9] == "  300.0 s  tests/test_2.py" and len(lines) == 11


def test_durations_plugin_prints_slowest_files(pytester: pytest.Pytester):
    pytester.makeconftest(
        "from comfyui_tpu.tests.support.durations import Durations\n"
        "def pytest_configure(config):\n    config.pluginmanager.register(Durations(config))\n"
    )
    pytester.makepyfile(test_one="import time\ndef test_it(): time.sleep(0.05)\n", test_two="def test_it(): pass\n")
    result = pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:cacheprovider")
    result.stdout.re_match_lines([".*slowest files.*", r" +0\.\d s  test_one.py", r".*test_two.py", r"0\.\d minutes"])
    assert result.ret == 0
