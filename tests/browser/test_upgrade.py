"""Workflows of the separate packs in ComfyUI's page.

A file dropped on the page opens with today's nodes and one notice. Its button saves the workflow, which runs.
Screenshots are in `output/screenshots/`.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.graphs.upgrade import upgrade_workflow
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.browser.page import (
    COMPLAINTS,
    COVERED,
    FOUND,
    IS_DRAWN,
    SCREENSHOTS,
    click,
    needs_browser,
    opened,
)
from comfyui_tpu.tests.nodes import examples, separate_packs
from comfyui_tpu.tests.nodes.test_upgrade import in_api_form
from comfyui_tpu.tests.support.comfyui_server import TWO_CHIPS, Server, make_random, needs_comfyui
from comfyui_tpu.tests.support.patience import slower, until
from PIL import Image

pytestmark = [needs_comfyui, needs_browser]

NOTICE = "#comfyui-tpu-notice"
DROP = """async ([name, workflow]) => {
    await app.handleFile(new File([JSON.stringify(workflow)], name, {type: "application/json"}));
}"""
ITEMS = f"() => [...document.querySelectorAll('{NOTICE} strong, {NOTICE} li')].map((item) => item.innerText)"


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    server = start_comfyui(environment=TWO_CHIPS)
    (server.base / "input").mkdir(exist_ok=True)
    Image.new("RGB", (96, 64), "red").save(server.base / "input" / separate_packs.PICTURE, "PNG")
    return server


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with opened(server) as page:
        yield page


@pytest.fixture
def fresh(page: Any) -> Any:
    """Return the page without a notice and without complaints about missing models."""
    page.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4})")
    page.wait_for_function(f"!document.querySelector('{NOTICE}') && !({COMPLAINTS})().length")
    return page


@pytest.mark.parametrize("pack", slower(separate_packs.ALL, "cogvideox", "wan22_i2v"))
def test_separate_pack_workflow_opens_upgraded_with_one_notice_and_runs(fresh: Any, server: Server, pack: str):
    document = separate_packs.ALL[pack]()
    _, changes = upgrade_workflow(document, DECLARATIONS)
    fresh.evaluate(DROP, [f"{pack}.json", document])
    fresh.wait_for_selector(NOTICE)
    fresh.wait_for_function(IS_DRAWN)
    found = fresh.evaluate(FOUND)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    fresh.screenshot(path=SCREENSHOTS / f"separate_{pack}.png")
    assert fresh.evaluate(ITEMS) == changes
    # An image counts as missing until the page has asked the server for it.
    fresh.wait_for_function(f"({COMPLAINTS})().length === 1")
    (notice,) = fresh.evaluate(COMPLAINTS)
    assert notice.startswith(changes[0])
    assert [node["type"] for node in found["nodes"] if not node["known"] or node["errors"]] == []
    expected = to_api(document, HEADLESS_NODES)
    shown = {node_id: node["inputs"] for node_id, node in found["queued"].items()}
    assert sorted(shown) == sorted(expected)
    for node_id, node in expected.items():
        assert shown[node_id].items() >= node["inputs"].items(), node["class_type"]
    queued = found["queued"]
    make_random(queued)
    for node in queued.values():
        if "num_inference_steps" in node["inputs"]:
            node["inputs"]["num_inference_steps"] = 2
    outputs = server.run(queued)["outputs"]
    assert [name for output in outputs.values() for name in output["images"]]


def test_api_workflow_opens_upgraded_with_one_notice(fresh: Any):
    workflow = in_api_form("cogvideox")
    _, changes = upgrade_workflow(workflow, DECLARATIONS)
    fresh.evaluate(DROP, ["exported.json", workflow])
    fresh.wait_for_selector(NOTICE)
    fresh.wait_for_function("app.graph.links.size > 0")  # where the page puts nodes without a place is not all in sight
    assert fresh.evaluate(ITEMS) == changes
    inputs = fresh.evaluate(FOUND)["queued"]["2"]["inputs"]
    assert (inputs["prompt_embeds"], inputs["negative_prompt_embeds"]) == (["1", 0], ["1", 1])


def test_upgrade_notice_button_saves_upgraded_workflow(fresh: Any, server: Server):
    fresh.evaluate(DROP, ["saved.json", separate_packs.cogvideox()])
    click(fresh, f"{NOTICE} button", "Save workflow")
    fresh.wait_for_function(f"!document.querySelector('{NOTICE}')")
    saved = server.base / "user" / "default" / "workflows" / "saved.json"
    click(fresh, "[role=dialog] button", "Confirm")
    until(saved.is_file)
    document = until(lambda: json.loads(saved.read_text() or "null"))
    assert upgrade_workflow(document, DECLARATIONS) == (document, [])
    assert to_api(document, HEADLESS_NODES)["2"]["inputs"]["negative_prompt_embeds"] == ["1", 1]


def test_current_workflow_opens_without_upgrade_notice(fresh: Any):
    document = json.loads(examples.page("cogvideox_t2v_768p").read_text())
    fresh.evaluate(DROP, ["today.json", document])
    fresh.wait_for_function(IS_DRAWN)
    assert fresh.evaluate(ITEMS) == []
    assert fresh.evaluate(COVERED) == []
