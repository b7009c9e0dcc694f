"""The example workflows in ComfyUI's page, in a real browser: every node is there, every widget has its own value.

What the page looked like is in `output/screenshots/`.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.nodes.headless.runner import HEADLESS
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.nodes.test_bypass import OLD_ORDER, saved_page
from comfyui_tpu.tests.support.comfyui_server import PACK, Server, needs_comfyui
from comfyui_tpu.tests.support.patience import PATIENCE_S

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EXAMPLES = PACK / "examples"
PAGES = sorted(EXAMPLES.glob("*.json"))
LORAS = {
    node["inputs"]["lora_name"]
    for path in (EXAMPLES / "api").glob("*.json")
    for node in json.loads(path.read_text()).values()
    if node["class_type"] == "TPULoraLoader"
}
SCREENSHOTS = PACK / "output" / "screenshots"
ARGUMENTS = "--headless --no-sandbox --disable-gpu --disable-background-networking".split()
READY = "window.app && app.graph && Object.keys(LiteGraph.registered_node_types).length > 50"

pytestmark = [needs_comfyui, pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome on the PATH")]
playwright_sync = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install playwright")

# What the page made of a workflow, and what it would queue.
LOAD = """async (workflow) => {
    await app.loadGraphData(workflow);
    app.canvas?.ds && Object.assign(app.canvas.ds, {scale: 0.6, offset: [560, 160]});
    app.graph.setDirtyCanvas(true, true);
    const nodes = (app.graph.nodes ?? app.graph._nodes).map((node) => ({
        id: String(node.id),
        type: node.type,
        known: node.type in LiteGraph.registered_node_types,
        errors: Boolean(node.has_errors),
        widgets: Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget.value])),
    }));
    return {nodes, queued: (await app.graphToPrompt()).output};
}"""


@pytest.fixture(scope="module")
def page(start_comfyui: Callable[..., Server]) -> Iterator[Any]:
    """ComfyUI's page, ready to load a workflow."""
    server = start_comfyui()
    picture = EXAMPLES / "wan_i2v_input.jpg"
    shutil.copy(picture, server.base / "input" / picture.name)
    # Where a LoRA is missing the page marks its loader, as it should.
    for name in LORAS:
        (server.base / "models" / "loras").mkdir(parents=True, exist_ok=True)
        (server.base / "models" / "loras" / name).touch()
    # Its first visit would open a gallery of templates over the canvas.
    server.post("/settings", {"Comfy.TutorialCompleted": True, "Comfy.Workflow.ShowMissingModelsWarning": False})
    with playwright_sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        try:
            opened = browser.new_page(viewport={"width": 1600, "height": 1000})
            opened.set_default_timeout(1000 * PATIENCE_S)
            opened.goto(server.url, wait_until="domcontentloaded")
            opened.wait_for_function(READY)
            yield opened
        finally:
            browser.close()


def api_twin(path: Path) -> Path:
    """The example in API form, which holds values by name; a pipeline node has those of its stages."""
    return EXAMPLES / "api" / f"{path.stem.removesuffix('_pipeline')}.json"


def constants(workflow: dict) -> dict[str, Any]:
    """Every widget's value by its name, which stages share; a sampler's size of 0 is its picture's."""
    given = [(name, x) for node in workflow.values() for name, x in node["inputs"].items() if not isinstance(x, list)]
    return {name: x for name, x in given if x or name not in ("height", "width", "num_frames")}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_an_example_opens_with_every_node_and_every_value_in_its_place(page: Any, path: Path):
    document = json.loads(path.read_text())
    found = page.evaluate(LOAD, document)
    page.wait_for_timeout(500)  # the canvas is drawn after the next frame
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{path.stem}.png")
    assert [node["type"] for node in found["nodes"] if not node["known"] or node["errors"]] == []
    assert sorted(node["id"] for node in found["nodes"]) == sorted(str(node["id"]) for node in document["nodes"])
    expected = to_api(document, HEADLESS)
    assert constants(expected).items() >= constants(json.loads(api_twin(path).read_text())).items()
    widgets = {node["id"]: node["widgets"] for node in found["nodes"]}
    for node_id, node in expected.items():
        declared = [i.name for i in HEADLESS[node["class_type"]].inputs if i.is_widget]
        wanted = {name: node["inputs"][name] for name in declared if not isinstance(node["inputs"][name], list)}
        shown = {name: widgets[node_id].get(name) for name in wanted}
        assert shown == wanted, f"{node['class_type']} (node {node_id})"
    # What the page would queue is the example, link by link.
    queued = {node_id: node["inputs"] for node_id, node in found["queued"].items()}
    assert {node_id: node["inputs"].items() <= queued[node_id].items() for node_id, node in expected.items()} == {
        node_id: True for node_id in expected
    }
    assert sorted(queued) == sorted(expected)


def test_a_bypassed_save_stage_gives_the_page_the_links_that_a_headless_run_has(page: Any):
    document = saved_page(OLD_ORDER)
    queued = page.evaluate(LOAD, document)["queued"]
    links = {name: x for name, x in queued["3"]["inputs"].items() if isinstance(x, list)}
    assert links == {"prompt_embeds": ["1", 0], "negative_prompt_embeds": ["1", 1]}
    assert to_api(document, HEADLESS)["3"]["inputs"].items() >= links.items()
    assert "2" not in queued
