"""ComfyUI's page in a real browser, as tests of workflows look at it."""

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfyui_tpu.tests.support.comfyui_server import PACK, Server
from comfyui_tpu.tests.support.patience import PATIENCE_S

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = "--headless --no-sandbox --disable-gpu --disable-background-networking".split()
# The nodes are known, and the workflow that the page opens with is there: it would replace what a test adds before.
READY = """() => window.app?.graph && Object.keys(LiteGraph.registered_node_types).length > 50
    && app.extensionManager?.workflow?.activeWorkflow"""
SCREENSHOTS = PACK / "output" / "screenshots"
IS_DRAWN = "app.graph.links.size > 0 && [...app.graph.links.values()].every((link) => link.path)"
# What the page made of a workflow, and what it would queue.
FOUND = """async () => ({
    nodes: app.graph.nodes.map((node) => ({
        id: String(node.id),
        type: node.type,
        known: node.type in LiteGraph.registered_node_types,
        errors: Boolean(node.has_errors),
        widgets: Object.fromEntries((node.widgets ?? []).map((widget) => [widget.name, widget.value])),
        hidden: (node.widgets ?? []).filter((widget) => widget.hidden).map((widget) => widget.name),
    })),
    queued: (await app.graphToPrompt()).output,
})"""
# Links that the page draws behind a node's frame, and nodes that lie on each other.
COVERED = """() => {
    const [context, found] = [document.createElement("canvas").getContext("2d"), []];
    const boxes = app.graph.nodes.map((node) => [node.id, ...node.boundingRect]);
    context.lineWidth = 4;
    for (const [id, x, y, width, height] of boxes) {
        for (const [other, left, top, ...size] of boxes) {
            const apart = x + width <= left || left + size[0] <= x || y + height <= top || top + size[1] <= y;
            if (id < other && !apart) found.push(`${id} on ${other}`);
        }
        const edge = [];
        for (let at = 0; at <= width; at += 3) edge.push([x + at, y], [x + at, y + height]);
        for (let at = 0; at <= height; at += 3) edge.push([x, y + at], [x + width, y + at]);
        for (const link of app.graph.links.values()) {
            const own = id === link.origin_id || id === link.target_id;
            const crosses = !own && edge.some((point) => context.isPointInStroke(link.path, ...point));
            if (crosses) found.push(`link ${link.id} behind ${id}`);
        }
    }
    return found;
}"""
# Alerts of the page that say something: newer frontends keep empty ones.
ALERTS = "[...document.querySelectorAll('[role=alert]')].map((one) => one.innerText.trim()).filter(Boolean)"
# What the page has to complain of: its stores of missing nodes, models and media, and what pops up.
COMPLAINTS = """() => {
    const stores = document.querySelector("#vue-app").__vue_app__.config.globalProperties.$pinia.state.value;
    const missing = [stores.missingModel.missingModelCandidates, stores.missingMedia.missingMediaCandidates];
    const nodes = stores.missingNodesError.missingNodesError;
    const shown = [...document.querySelectorAll("[role=dialog], [role=alert], [role=status], .p-toast-message")];
    // The queue's banner tells how the prompts of other tests ended ("Job completed", "2 jobs completed").
    const own = shown.filter((one) => one.dataset.testid !== "queue-notification-banner");
    // Some of them are always there, and empty until something is said.
    const texts = own.map((one) => one.innerText.trim()).filter(Boolean);
    return [...missing.flatMap((found) => found ?? []), ...(nodes ? [nodes] : []), ...texts];
}"""

# A script that ends in time: playwright itself waits for a script's promise without end.
ENDS_IN_TIME = """async ([script, given, seconds]) => {
    let timer;
    const late = new Promise((_, fail) => {
        timer = setTimeout(() => fail(new Error(`no end within ${seconds} s: ${script}`)), 1000 * seconds);
    });
    const made = (0, eval)(script);
    const value = typeof made === "function" ? made(given) : made;
    return Promise.race([value, late]).finally(() => clearTimeout(timer));
}"""

needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome on the PATH")


@contextlib.contextmanager
def launch_browser() -> Iterator[Any]:
    """Yield a headless Chromium; it ends with the block."""
    playwright_sync = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install playwright")
    with playwright_sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def patient(page: Any, seconds: float = PATIENCE_S) -> Any:
    """The page, in which whatever does not happen within these seconds is an error that says what was waited for."""
    page.set_default_timeout(1000 * seconds)
    page.evaluate = functools.partial(_evaluate, page.evaluate, seconds)
    return page


def _evaluate(evaluate: Callable[..., Any], seconds: float, expression: str, arg: Any = None) -> Any:
    return evaluate(ENDS_IN_TIME, [expression, arg, seconds])


def _open_page(page: Any, url: str) -> Any:
    patient(page)
    page.goto(url, wait_until="domcontentloaded")
    page.wait_for_function(READY)
    return page


@contextlib.contextmanager
def opened(server: Server) -> Iterator[Any]:
    """The page of a server, ready to load a workflow."""
    # Its first visit would open a gallery of templates over the canvas.
    server.post("/settings", {"Comfy.TutorialCompleted": True})
    with launch_browser() as browser:
        yield _open_page(browser.new_page(viewport={"width": 1600, "height": 1000}), server.url)


@contextlib.contextmanager
def fresh(page: Any) -> Iterator[Any]:
    """The server's page as somebody sees it who was never there, next to `page`, with ComfyUI's default workflow."""
    context = page.context.browser.new_context(viewport=page.viewport_size)
    try:
        yield _open_page(context.new_page(), page.url)
    finally:
        context.close()


@contextlib.contextmanager
def small(page: Any) -> Iterator[None]:
    """While a prompt runs: the page draws its progress all the time, which takes half a core at its own size."""
    size = page.viewport_size
    page.set_viewport_size({"width": 320, "height": 200})
    try:
        yield
    finally:
        page.set_viewport_size(size)


def click(page: Any, selector: str, text: str = "") -> None:
    """As the page's own code would: a dialog that still moves and loads is not waited for."""
    script = """([selector, text]) => {
        const all = [...document.querySelectorAll(selector)];
        const found = all.find((one) => !text || (one.childElementCount === 0 && one.textContent.trim() === text));
        found?.click();
        return Boolean(found);
    }"""
    page.wait_for_function(script, arg=[selector, text])
