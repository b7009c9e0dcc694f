"""The slowest files of a run, and its total beside the budget, so that growth is seen before it hurts."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

# A full run has more tests than this. It takes 20 to 40 minutes on two cores; half as long again fails it.
FULL_RUN = 5000
BUDGET_MIN = 40
SHOWN = 10


class Durations:
    """A pytest plugin of the process that reports: of the only one, or of the one that has workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._started_s = config, time.monotonic()

    @property
    def _stats(self) -> Mapping[str, Sequence[Any]]:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        return reporter.stats if reporter else {}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reports = list_reports(self._stats)
        terminalreporter.section("slowest files")
        for line in describe(reports, time.monotonic() - self._started_s):
            terminalreporter.write_line(line)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if exceeds_budget(list_reports(self._stats), time.monotonic() - self._started_s):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def list_reports(stats: Mapping[str, Sequence[Any]]) -> list[pytest.TestReport]:
    """Return the reports of all phases of all tests."""
    return [report for reports in stats.values() for report in reports if isinstance(report, pytest.TestReport)]


def describe(reports: Iterable[pytest.TestReport], total_s: float) -> list[str]:
    """Return a line for each of the slowest files, in seconds of all workers, and one with the total."""
    seconds, reports = Counter[str](), list(reports)
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += report.duration
    lines = [f"{value:7.1f} s  {name}" for name, value in seconds.most_common(SHOWN)]
    budget = f" of {BUDGET_MIN}" if _count_tests(reports) > FULL_RUN else ""
    if exceeds_budget(reports, total_s):
        budget += ": failed, because half as much again is the limit. Make the files above faster, or raise BUDGET_MIN"
    return [*lines, f"{total_s / 60:.1f}{budget} minutes"]


def exceeds_budget(reports: Iterable[pytest.TestReport], total_s: float) -> bool:
    """Return whether a full run took more than one and a half times the budget."""
    return _count_tests(reports) > FULL_RUN and total_s > 1.5 * 60 * BUDGET_MIN


def _count_tests(reports: Iterable[pytest.TestReport]) -> int:
    return len({report.nodeid for report in reports})
