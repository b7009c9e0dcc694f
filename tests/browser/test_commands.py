"""The pack's commands in ComfyUI's page, by their shortcuts: the tab, programs ahead of time, free memory, a plan."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfyui_tpu.tests.browser.page import ALERTS, IS_DRAWN, READY, SCREENSHOTS, fresh, needs_browser, opened, small
from comfyui_tpu.tests.browser.test_examples import OPEN
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.comfyui_server import TWO_CHIPS, Server, needs_comfyui
from comfyui_tpu.tests.support.patience import until

pytestmark = [needs_comfyui, needs_browser]

SEEN = "comfyui-tpu.changes"
EMPTY = (700, 900)  # a place of the graph without nodes
NOTICE, PANEL = "#comfyui-tpu-notice", ".comfyui-tpu-panel"

# The nodes that generate become a subgraph, which shows the height outside.
INTO_SUBGRAPH = """() => {
    const kinds = /TextEncoder$|TPUSampler$|^TPUModelLoader$/;
    const chosen = app.graph.nodes.filter(({ type }) => kinds.test(type));
    const { node, subgraph } = app.graph.convertToSubgraph(new Set(chosen));
    const sampler = subgraph.nodes.find(({ type }) => type.endsWith("TPUSampler"));
    subgraph.addInput("height", "INT").connect(sampler.inputs.find(({ name }) => name === "height"), sampler);
    return String(node.id);
}"""

# A solver that remembers nothing, and steps that start from others.
OTHERS = """() => {
    const sampler = app.graph.nodes.find(({ type }) => type === "Wan21TPUSampler");
    const values = { scheduler: "FlowMatchEulerDiscreteScheduler", step_cache: true, cache_threshold: 0.3 };
    for (const [name, value] of Object.entries(values)) sampler.widgets.find((one) => one.name === name).value = value;
}"""


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    return start_comfyui(environment=TWO_CHIPS)


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with opened(server) as page:
        page.evaluate(OPEN, examples.page("try_it_now").stem)
        page.wait_for_function(IS_DRAWN)
        yield page


def says(page: Any, text: str) -> None:
    page.locator(NOTICE).get_by_text(text).first.wait_for()


def test_panel_shortcut_opens_and_closes_tab(page: Any):
    page.keyboard.press("Alt+Shift+T")
    page.locator(PANEL).wait_for()
    page.keyboard.press("Alt+Shift+T")
    page.locator(PANEL).wait_for(state="hidden")


def test_warmup_shortcut_compiles_all_programs_of_next_run(page: Any, server: Server):
    """Also of another solver, and of a step cache's two kinds of steps."""
    page.evaluate(OTHERS)
    before = len(server.get("/history"))
    page.keyboard.press("Alt+Shift+W")
    says(page, "112x80, 17 frames:")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "command-warmup.png")
    until(lambda: len(server.get("/history")) == before + 1)
    compiled = server.get("/tpu/stats")["counts"]["compile"]
    with small(page):
        page.evaluate("app.queuePrompt(0)")
        until(lambda: len(server.get("/history")) == before + 2)
    assert server.get("/tpu/stats")["counts"]["compile"] == compiled


def test_free_memory_shortcut_unloads_resident_components(page: Any, server: Server):
    if not server.get("/tpu/stats")["resident"]:  # what the test before has run is
        page.evaluate("app.queuePrompt(0)")
        until(lambda: server.get("/tpu/stats")["resident"])
        until(lambda: not any(server.get("/queue").values()))
    page.keyboard.press("Alt+Shift+F")
    says(page, "Memory will be freed when the current prompt finishes.")
    until(lambda: not server.get("/tpu/stats")["resident"])


def test_selftest_command_shows_usage_and_recorded_findings(page: Any, server: Server):
    run = "app.extensionManager.command.execute('comfyui-tpu.selftest')"
    page.evaluate(run)
    says(page, "No self-test has run here yet.")
    assert "comfyui-tpu selftest --first-run --report selftest.json" in page.locator(NOTICE).inner_text()
    key, evil = "8 x TPU v6 lite, libtpu 1", "<img src=x onerror='window.pwned=1'>"
    said = {key: {"sentences": ["Without residual_norm: it did not compile.", evil]}, "clean": {"reserve_share": 0.1}}
    (server.cache / "machine.json").write_text(json.dumps(said))
    page.evaluate(run)
    says(page, f"{key}: Without residual_norm: it did not compile.")
    says(page, "clean: all checks passed.")
    assert page.evaluate("window.pwned") is None and page.locator(f"{NOTICE} img").count() == 0
    page.screenshot(path=SCREENSHOTS / "command-selftest.png")
    (server.cache / "machine.json").unlink()
    # While prompts wait it is no time for it.
    page.evaluate("window.asked = comfyAPI.api.api.getQueue; "
                  "comfyAPI.api.api.getQueue = async () => ({Running: [{}], Pending: [{}]})")  # fmt: skip
    page.evaluate(run)
    says(page, "Not now: the queue has 2 prompts.")
    assert "--first-run" not in page.locator(NOTICE).inner_text()
    page.evaluate("comfyAPI.api.api.getQueue = window.asked")


def test_update_notice_is_shown_once_with_new_changes(page: Any):
    with fresh(page) as new:
        new.wait_for_function(f"localStorage.getItem('{SEEN}')")
        assert new.locator(NOTICE).count() == 0  # to a new user all is new
        changes = ["A first change. <b>", *(f"Change {number}." for number in range(20))]
        answer = {"changes": [*changes, "An old one."], "selftest": {}}
        new.evaluate(f"localStorage.setItem('{SEEN}', JSON.stringify(['An old one.']))")
        new.route("**/tpu/about", lambda route: route.fulfill(json=answer))
        new.reload()
        says(new, "ComfyUI-TPU was updated.")
        said = new.locator(f"{NOTICE} li").all_inner_texts()
        assert said == [*changes[:12], "And 9 more, in CHANGELOG.md."]
        new.screenshot(path=SCREENSHOTS / "update.png")
        kept = new.evaluate(f"localStorage.getItem('{SEEN}')")
        new.reload()
        new.wait_for_function(READY)
        assert new.locator(NOTICE).count() == 0 and new.evaluate(f"localStorage.getItem('{SEEN}')") == kept
        for wrong in ("{", '{"a": 1}', "7"):  # whatever has been left there
            new.evaluate(f"(value) => localStorage.setItem('{SEEN}', value)", wrong)
        new.route("**/tpu/about", lambda route: route.fulfill(json={"changes": {"a": [1]}}))
        new.reload()
        new.wait_for_function(READY)
        assert new.locator(NOTICE).count() == 0


def test_unsupported_packages_notice_is_shown_on_every_load(page: Any):
    refusals = ["torch 2.16.0 is not supported: TPU nodes run with torch <2.16,>=2.13. <b>", "jax is not installed"]
    with fresh(page) as new:
        answer = {"refusals": refusals, "changes": ["New."], "selftest": {}}
        new.route("**/tpu/about", lambda route: route.fulfill(json=answer))
        new.evaluate(f"localStorage.setItem('{SEEN}', '[]')")
        for _ in range(2):
            new.reload()
            says(new, "No TPU node can run here:")
            assert new.locator(f"{NOTICE} li").all_inner_texts() == refusals
        answers = [{"refusals": {"a": 1}}, {"refusals": 7}, {}]
        new.route("**/tpu/about", lambda route: route.fulfill(json=answers[0]))
        for _ in range(len(answers)):
            new.reload()
            new.wait_for_function(READY)
            assert new.locator(NOTICE).count() == 0
            answers.append(answers.pop(0))


def test_plan_command_asks_for_topology_and_reports_unknown_one(page: Any):
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


def widgets(page: Any) -> dict[str, Any]:
    """Values by name, of all nodes of the graph."""
    return page.evaluate(
        "Object.fromEntries("
        "app.graph.nodes.flatMap(({widgets}) => (widgets ?? []).map(({name, value}) => [name, value])))"
    )


def test_missing_tpu_notice_cancels_prompt_and_runs_tiny_model(page: Any, server: Server):
    """From the notice that comes with its prompt: nothing has to be changed by hand, and undo brings the model back."""
    page.evaluate(OPEN, examples.page("flux2_klein").stem)
    page.wait_for_function(IS_DRAWN)
    before = len(server.get("/history"))
    page.evaluate("app.queuePrompt(0)")
    says(page, "This machine has no TPU: FLUX.2 klein 4B will be downloaded and then run on the CPU, for hours.")
    page.screenshot(path=SCREENSHOTS / "miniature-offered.png")
    page.get_by_role("button", name="Cancel and try the tiny model").click()
    says(page, "This workflow now uses a built-in tiny model and matching sizes.")
    says(page, 'Its prompt is "a red circle and a green square on blue".')
    page.screenshot(path=SCREENSHOTS / "miniature-taken.png")
    until(lambda: not any(server.get("/queue").values()))
    found = widgets(page)
    assert (found["model_id"], found["height"], found["width"]) == ("tiny/flux2klein", 80, 112)
    page.mouse.click(*EMPTY)
    page.keyboard.press("Control+z")
    until(lambda: widgets(page)["model_id"] == "black-forest-labs/FLUX.2-klein-4B")
    assert widgets(page)["height"] == 1024
    assert page.evaluate(ALERTS) == []  # no shortcut of the page's own is taken
    page.keyboard.press("Alt+Shift+Y")
    until(lambda: widgets(page)["model_id"] == "tiny/flux2klein")
    page.evaluate("app.queuePrompt(0)")
    until(lambda: len(server.get("/history")) >= before + 2 and not any(server.get("/queue").values()))
    last = list(server.get("/history").values())[-1]
    assert last["status"]["status_str"] == "success", last["status"]
    page.evaluate("app.graph.clear()")
    page.keyboard.press("Alt+Shift+Y")
    says(page, "This workflow has no model that a tiny model can replace.")


def test_commands_apply_to_nodes_inside_subgraph(page: Any):
    page.evaluate(OPEN, examples.page("flux2_klein").stem)
    page.wait_for_function(IS_DRAWN)
    subgraph = page.evaluate(INTO_SUBGRAPH)
    page.keyboard.press("Alt+Shift+Y")
    says(page, "This workflow now uses a built-in tiny model and matching sizes.")
    page.screenshot(path=SCREENSHOTS / "miniature-subgraph.png")
    queued = page.evaluate("async () => (await app.graphToPrompt()).output")
    inside = {
        node["class_type"]: node["inputs"] for node_id, node in queued.items() if node_id.startswith(f"{subgraph}:")
    }
    assert inside["TPUModelLoader"]["model_id"] == "tiny/flux2klein"
    assert (inside["Flux2TPUSampler"]["height"], inside["Flux2TPUSampler"]["width"]) == (80, 112)
    assert inside["Flux2TextEncoder"]["prompt"] == "a red circle and a green square on blue"
    assert widgets(page)["height"] == 80  # of the subgraph's node: what stood there would replace it
    page.keyboard.press("Alt+Shift+W")
    says(page, "112x80:")
    page.keyboard.press("Alt+Shift+P")
    field = page.get_by_role("dialog").filter(has_text="For which TPU?").locator("input")
    field.fill("v9:1x1")
    with page.expect_response("**/prompt") as answer:
        field.press("Enter")
    planned = answer.value.request.post_data_json["prompt"]["plan-0"]["inputs"]
    assert (planned["model_name"], planned["height"], planned["width"]) == ("flux2-klein-4b", 80, 112)
