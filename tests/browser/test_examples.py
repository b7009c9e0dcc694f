"""The example workflows in ComfyUI's page, in a real browser: the template browser shows them all, they open without a
warning, every node is there and in nobody's way, every widget has its own value.

What the page looked like is in `output/screenshots/`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.nodes.headless.runner import HEADLESS_NODES
from comfyui_tpu.nodes.headless.workflow import to_api
from comfyui_tpu.tests.browser.page import (
    COMPLAINTS,
    COVERED,
    FOUND,
    IS_DRAWN,
    SCREENSHOTS,
    click,
    fresh,
    needs_browser,
    opened,
    small,
)
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.nodes.test_bypass import OLD_ORDER, saved_page
from comfyui_tpu.tests.support.comfyui_server import TWO_CHIPS, Server, needs_comfyui
from comfyui_tpu.tests.support.patience import until

EXAMPLES = examples.FOLDER
PAGES = examples.PAGES
LORAS = {
    node["inputs"]["lora_name"]
    for path in (EXAMPLES / "api").glob("*.json")
    for node in json.loads(path.read_text()).values()
    if node["class_type"] == "TPULoraLoader"
}

pytestmark = [needs_comfyui, needs_browser]

# Opens an example as a click on its card does, but for the click.
OPEN = """async (name) => {
    const workflow = await (await fetch(`/api/workflow_templates/ComfyUI-TPU/${name}.json`)).json();
    await app.loadGraphData(workflow, true, true, name, {openSource: "template"});
}"""
# The names of the template browser's cards; the last one is brought into view, which makes the page add others.
ACTIVE = "(title) => app.extensionManager.workflow.activeWorkflow.path.includes(title)"
CARDS = """() => {
    const cards = [...document.querySelectorAll("[data-testid^=template-workflow-]")];
    cards.at(-1)?.scrollIntoView();
    return cards.map((card) => card.dataset.testid.replace("template-workflow-", ""));
}"""
# How wide a card's picture is. The page loads it when somebody could see it, and now and then one stayed empty however
# long it was in sight: so what is served is asked for, and one on the page is enough.
THUMBNAIL = """async (name) => {
    const picture = new Image();
    picture.src = `/api/workflow_templates/ComfyUI-TPU/${name}.jpg`;
    await picture.decode();
    return picture.naturalWidth;
}"""
SHOWS_A_PICTURE = """() => [...document.querySelectorAll("[data-testid^=template-workflow-] img")]
    .some((picture) => picture.complete && picture.naturalWidth === 512 && picture.alt)"""


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    server = start_comfyui(environment=TWO_CHIPS)
    # Where a LoRA is missing the page marks its loader, as it should.
    for name in LORAS:
        (server.base / "models" / "loras").mkdir(parents=True, exist_ok=True)
        (server.base / "models" / "loras" / name).touch()
    return server


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    """ComfyUI's page, ready to load a workflow."""
    with opened(server) as page:
        yield page


def constants(workflow: dict) -> dict[str, Any]:
    """Every widget's value by its name, which stages share; a sampler's size of 0 is its picture's, and a loader's
    family has no place in a pipeline node.
    """
    given = [(name, x) for node in workflow.values() for name, x in node["inputs"].items() if not isinstance(x, list)]
    given = [(name, x) for name, x in given if name != "family"]
    return {name: x for name, x in given if x or name not in ("height", "width", "num_frames")}


def test_template_browser_lists_every_example_with_thumbnail(page: Any):
    """And the page does complain of what it lacks: of its own default workflow's models."""
    with fresh(page) as page:
        page.wait_for_function(f"({COMPLAINTS})().length > 0")
        page.evaluate("app.extensionManager.command.execute('Comfy.BrowseTemplates')")
        click(page, "[role=dialog] *", "ComfyUI-TPU")
        every = [path.stem for path in PAGES]
        until(lambda: len(page.evaluate(CARDS)) >= len(every))
        first = examples.page("try_it_now").stem
        assert page.evaluate(CARDS) == [first, *(name for name in every if name != first)]
        assert {name: page.evaluate(THUMBNAIL, name) for name in every} == dict.fromkeys(every, 512)
        page.wait_for_function(SHOWS_A_PICTURE)
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SCREENSHOTS / "templates.png")
        title = examples.page("wan22_i2v_720p").stem
        click(page, f"[data-testid='template-workflow-{title}']")
        page.wait_for_function(ACTIVE, arg=title)
        page.wait_for_function(IS_DRAWN)
        assert page.evaluate(COMPLAINTS) == []
        assert any(node["type"] == "Wan22I2VTPUSampler" for node in page.evaluate(FOUND)["nodes"])


def is_model(socket: dict[str, Any]) -> bool:
    return socket["type"] == "TPU_MODEL" and socket["link"] is not None


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_example_opens_with_all_nodes_and_widget_values(page: Any, path: Path):
    document = json.loads(path.read_text())
    page.evaluate(OPEN, path.stem)
    page.wait_for_function(IS_DRAWN)
    found = page.evaluate(FOUND)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{path.stem}.png")
    assert page.evaluate(COMPLAINTS) == []
    assert page.evaluate(COVERED) == []
    assert [node["type"] for node in found["nodes"] if not node["known"] or node["errors"]] == []
    assert sorted(node["id"] for node in found["nodes"]) == sorted(str(node["id"]) for node in document["nodes"])
    linked = {str(node["id"]) for node in document["nodes"] for socket in node["inputs"] if is_model(socket)}
    hidden = {node["id"]: set(node["hidden"]) for node in found["nodes"] if node["hidden"]}
    named = {node["id"] for node in found["nodes"] if "model_id" in node["widgets"]}
    assert {node_id for node_id, names in hidden.items() if {"model_id", "precision"} <= names} == linked & named
    expected = to_api(document, HEADLESS_NODES)
    assert constants(expected).items() >= constants(json.loads(examples.twin(path).read_text())).items()
    widgets = {node["id"]: node["widgets"] for node in found["nodes"]}
    for node_id, node in expected.items():
        declared = [i.name for i in HEADLESS_NODES[node["class_type"]].inputs if i.is_widget]
        wanted = {name: node["inputs"][name] for name in declared if not isinstance(node["inputs"][name], list)}
        shown = {name: widgets[node_id].get(name) for name in wanted}
        assert shown == wanted, f"{node['class_type']} (node {node_id})"
    # What the page would queue is the example, link by link.
    queued = {node_id: node["inputs"] for node_id, node in found["queued"].items()}
    assert {node_id: node["inputs"].items() <= queued[node_id].items() for node_id, node in expected.items()} == {
        node_id: True for node_id in expected
    }
    assert sorted(queued) == sorted(expected)


def test_bypassed_save_stage_gives_page_and_headless_run_same_links(page: Any):
    document = saved_page(OLD_ORDER)
    page.evaluate("(workflow) => app.loadGraphData(workflow)", document)
    queued = page.evaluate(FOUND)["queued"]
    links = {name: x for name, x in queued["3"]["inputs"].items() if isinstance(x, list)}
    assert links == {"prompt_embeds": ["1", 0], "negative_prompt_embeds": ["1", 1]}
    assert to_api(document, HEADLESS_NODES)["3"]["inputs"].items() >= links.items()
    assert "2" not in queued


def wait_for_finished_prompts(server: Server, count: int) -> list[dict[str, Any]]:
    """The prompts that have run, oldest first, once there are so many."""
    return until(lambda: len(found := list(server.get("/history").values())) >= count and found)


def test_first_template_runs_twice_with_different_seeds(page: Any, server: Server):
    """Last, because ComfyUI then says in this page that jobs were completed."""
    page.evaluate(OPEN, examples.page("try_it_now").stem)
    page.wait_for_function(IS_DRAWN)
    before = len(server.get("/history"))
    with small(page):
        for number in (1, 2):
            page.evaluate("app.queuePrompt(0)")
            wait_for_finished_prompts(server, before + number)
    entries = wait_for_finished_prompts(server, before + 2)[before:]
    assert [entry["status"]["status_str"] for entry in entries] == ["success", "success"], server.log_tail()
    seeds = [entry["prompt"][2]["2"]["inputs"]["seed"] for entry in entries]
    assert seeds[0] != seeds[1]
    videos = sorted((server.base / "output").rglob("try_it_now*.mp4"))
    assert len(videos) == 2
    page.wait_for_function("document.querySelector('video')?.readyState >= 2")
    page.screenshot(path=SCREENSHOTS / "try-it-now.png")
