"""Tests of the browser page for tests: a script that never ends raises an error."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from comfyui_tpu.tests.browser.page import launch_browser, needs_browser, patient

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install playwright")
pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch_browser() as launched:
        yield launched


@pytest.mark.parametrize(
    "script", ["new Promise(() => {})", "() => new Promise(() => {})", "async () => { await new Promise(() => {}); }"]
)
def test_evaluate_script_without_end_raises_error_with_script(browser: Any, script: str):
    page = patient(browser.new_page(), 0.2)
    with pytest.raises(playwright.Error, match=f"no end within 0.2 s: {re.escape(script)}"):
        page.evaluate(script)
    page.close()


@pytest.mark.parametrize(
    ("script", "given", "result"),
    [
        ("1 + 1", None, 2),
        ("window.kept = 3; window.kept + 1", None, 4),
        ("([first, second]) => first + second", [1, 2], 3),
        ("async (given) => ({given})", "one", {"given": "one"}),
        ("Promise.resolve([1])", None, [1]),
    ],
)
def test_evaluate_returns_script_result(browser: Any, script: str, given: Any, result: Any):
    page = patient(browser.new_page())
    assert page.evaluate(script, given) == result
    page.close()


def test_evaluate_failing_script_raises_script_error(browser: Any):
    page = patient(browser.new_page())
    with pytest.raises(playwright.Error, match="of this kind"):
        page.evaluate("() => { throw new Error('of this kind'); }")
    page.close()
