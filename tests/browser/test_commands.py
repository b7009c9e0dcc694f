"""The pack's commands in ComfyUI's page, by their shortcuts: the tab, programs ahead of time, free memory, a plan."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfyui_tpu.tests.browser.page import IS_DRAWN, SCREENSHOTS, needs_browser, opened
from comfyui_tpu.tests.browser.test_examples import OPEN
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui
from comfyui_tpu.tests.support.patience import until

pytestmark = [needs_comfyui, needs_browser]

NOTICE, PANEL = "#comfyui-tpu-notice", ".comfyui-tpu-panel"


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    return start_comfyui()


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with opened(server) as page:
        page.evaluate(OPEN, examples.page("try_it_now").stem)
        page.wait_for_function(IS_DRAWN)
        yield page


def says(page: Any, text: str) -> None:
    page.locator(NOTICE).get_by_text(text).first.wait_for()


def test_the_tab_opens_and_closes(page: Any):
    page.keyboard.press("Alt+Shift+T")
    page.locator(PANEL).wait_for()
    page.keyboard.press("Alt+Shift+T")
    page.locator(PANEL).wait_for(state="hidden")


def test_programs_are_compiled_ahead_and_the_run_then_compiles_nothing(page: Any, server: Server):
    before = len(server.get("/history"))
    page.keyboard.press("Alt+Shift+W")
    says(page, "112x80, 17 frames:")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "command-warmup.png")
    until(lambda: len(server.get("/history")) == before + 1)
    compiled = server.get("/tpu/stats")["counts"]["compile"]
    page.evaluate("app.queuePrompt(0)")
    until(lambda: len(server.get("/history")) == before + 2)
    assert server.get("/tpu/stats")["counts"]["compile"] == compiled


def test_memory_is_freed(page: Any, server: Server):
    before = len(server.get("/history"))
    page.evaluate("app.queuePrompt(0)")
    until(lambda: len(server.get("/history")) == before + 1)
    until(lambda: server.get("/tpu/stats")["resident"])
    page.keyboard.press("Alt+Shift+F")
    says(page, "Frees as soon as no prompt runs.")
    until(lambda: not server.get("/tpu/stats")["resident"])


def test_a_plan_asks_for_the_tpu_and_a_wrong_one_is_a_sentence(page: Any):
    """The plan itself, of a real size, takes minutes: what it says is in `tests/plan`."""
    page.keyboard.press("Alt+Shift+P")
    dialog = page.get_by_role("dialog").filter(has_text="For which TPU?")
    field = dialog.locator("input")
    assert field.input_value() == "v6e:2x4"
    page.screenshot(path=SCREENSHOTS / "command-plan.png")
    field.fill("v9:1x1")
    with page.expect_response("**/prompt") as answer:
        field.press("Enter")
    prompt = answer.value.request.post_data_json["prompt"]
    inputs = prompt["plan-0"]["inputs"]
    assert (inputs["model_name"], inputs["topology"]) == ("wan2.1-t2v-14b", "v9:1x1")
    assert (inputs["height"], inputs["width"], inputs["num_frames"]) == (80, 112, 17)
    says(page, "there is no topology 'v9:1x1'; there are v6e:1x1")
