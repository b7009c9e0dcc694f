"""Nodes of the templates as they stand in the page once they are opened: in both renderers as large as their files say,
without empty rows, and apart from each other.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfyui_tpu.tests.browser.page import IS_DRAWN, SCREENSHOTS, needs_browser, opened
from comfyui_tpu.tests.browser.test_examples import OPEN
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui
from comfyui_tpu.tests.support.patience import until

pytestmark = [needs_comfyui, needs_browser]

RENDERER = "Comfy.VueNodes.Enabled"
TITLE = 30
# ComfyUI's own nodes may be some pixels lower than the file says, by the page's version.
SLACK = 2
SIZES = "() => Object.fromEntries(app.graph.nodes.map((node) => [node.id, [...node.size]]))"
# Of each Vue node its place in the page, title included, and the height that its content takes by itself.
BOXES = """() => Object.fromEntries([...document.querySelectorAll("[data-node-id]")].map((one) => {
    const scale = app.canvas.ds.scale;
    const { left, top, right, bottom } = one.getBoundingClientRect();
    const style = one.style.cssText;
    one.style.setProperty("--node-height", "0px");
    one.style.minHeight = one.style.height = "auto";
    const content = one.offsetHeight;
    one.style.cssText = style;
    return [one.dataset.nodeId, { box: [left, top, right, bottom].map((edge) => edge / scale), content }];
}))"""
# As ComfyUI's settings do, while the page is open.
RENDER = f"(isVue) => app.extensionManager.setting.set('{RENDERER}', isVue)"


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    return start_comfyui()


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with opened(server) as page:
        yield page
    server.post("/settings", {RENDERER: False})


def read_saved_sizes(name: str) -> dict[str, list[float]]:
    """Width and height of each node by its id, as the file has them."""
    (path,) = (path for path in examples.PAGES if path.stem == name)
    return {str(node["id"]): node["size"] for node in json.loads(path.read_text("utf-8"))["nodes"]}


def different(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> dict[str, Any]:
    """Nodes that have another size than the file says."""
    pairs = {key: (found.get(key), size) for key, size in wanted.items()}
    return {
        key: pair
        for key, pair in pairs.items()
        if pair[0] is None or any(abs(one - other) > SLACK for one, other in zip(*pair, strict=True))
    }


def list_overlaps(boxes: dict[str, list[float]]) -> list[tuple[str, str]]:
    return [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(boxes.items(), 2)
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
    ]


def as_boxes(sizes: dict[str, list[float]], page: Any) -> dict[str, list[float]]:
    places = page.evaluate("Object.fromEntries(app.graph.nodes.map((node) => [node.id, [...node.pos]]))")
    return {key: [x, y - TITLE, x + sizes[key][0], y + sizes[key][1]] for key, (x, y) in places.items()}


def render(page: Any, is_vue: bool) -> None:
    page.evaluate(RENDER, is_vue)
    page.wait_for_function(f"LiteGraph.vueNodesMode === {str(is_vue).lower()}")


def load(page: Any, name: str) -> dict[str, list[float]]:
    page.evaluate(OPEN, name)
    page.wait_for_function(IS_DRAWN)
    return page.evaluate(SIZES)


NAMES = [path.stem for path in examples.PAGES]


def test_classic_nodes_match_saved_sizes_without_overlap(page: Any):
    render(page, False)
    found = {}
    for name in NAMES:
        sizes = load(page, name)
        found[name] = [different(sizes, read_saved_sizes(name)), list_overlaps(as_boxes(sizes, page))]
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "sizes-classic.png")
    assert found == {name: [{}, []] for name in NAMES}


def wrong_boxes(page: Any, name: str) -> list[Any]:
    """Vue nodes that are of another width than the file says, or higher or lower than that and their content."""
    boxes, wanted = page.evaluate(BOXES), read_saved_sizes(name)
    found = {key: [one["box"][2] - one["box"][0], one["box"][3] - one["box"][1]] for key, one in boxes.items()}
    own = {
        key: [width, max(height + TITLE, boxes[key]["content"]) if key in boxes else height + TITLE]
        for key, (width, height) in wanted.items()
    }
    return [different(found, own), list_overlaps({key: one["box"] for key, one in boxes.items()})]


def test_vue_nodes_match_saved_sizes_without_overlap(page: Any):
    render(page, True)
    for name in NAMES:
        load(page, name)
        # Each is measured as it is drawn.
        until(
            lambda name=name: wrong_boxes(page, name) == [{}, []],
            lambda name=name: f"{name}: {wrong_boxes(page, name)}",
        )
    page.screenshot(path=SCREENSHOTS / "sizes-vue.png")


def test_classic_nodes_keep_sizes_after_vue_rendering(page: Any):
    """The page makes room for every row that it finds shown, and what it has made stays."""
    name = examples.page("try_it_now").stem
    render(page, True)
    load(page, name)
    before = page.evaluate(SIZES)
    render(page, False)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    ours = page.evaluate("app.graph.nodes.filter(({ type }) => /TPU|Wan/.test(type)).map(({ id }) => String(id))")
    after = page.evaluate(SIZES)
    assert {key: after[key] for key in ours} == {key: before[key] for key in ours}
