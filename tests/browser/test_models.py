"""What a model does with the widgets of the page's nodes, in both renderers: those that do nothing are hidden,
with their values; the list of models says how much there is to download; the prompt boxes say which they are.
"""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfyui_tpu.nodes.inputs import list_unused_widgets
from comfyui_tpu.tests.browser.page import IS_DRAWN, SCREENSHOTS, needs_browser, opened
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.models import lookup_spec

playwright_sync = pytest.importorskip("playwright.sync_api", reason="no playwright; pip install playwright")

pytestmark = [needs_comfyui, needs_browser]

EXAMPLE = json.loads(examples.page("wan21_t2v_720p").read_text("utf-8"))
ONE, TWO = lookup_spec("wan2.1-t2v-14b"), lookup_spec("wan2.2-t2v-a14b")
ENCODER, SAMPLER = "Wan21TextEncoder", "Wan21TPUSampler"
OF_EXPERTS = {"guidance_scale_2", "high_noise_steps"}
REPLACED = {"model_id", "precision"}
# Names of a node's widgets that are hidden; on the canvas by their own mark, in Vue nodes by their place in the page.
HIDDEN = """([type, isVue]) => {
    const node = app.graph.nodes.find((one) => one.type === type);
    if (!isVue) return node.widgets.filter((widget) => !node.isWidgetVisible(widget)).map((widget) => widget.name);
    const shown = document.querySelector(`[data-node-id="${node.id}"]`).innerText.split("\\n");
    return node.widgets.filter((one) => !shown.includes(one.label ?? one.name)).map((one) => one.name);
}"""
CHOOSE = """(id) => {
    const node = app.graph.nodes.find((one) => one.type === "TPUModelLoader");
    const widget = node.widgets.find((one) => one.name === "model_id");
    widget.value = id;
    widget.callback(id);
}"""
SAVED = "() => app.graph.serialize().nodes.map((node) => [node.id, node.widgets_values])"


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    return start_comfyui()


@pytest.fixture(scope="module", params=[False, True], ids=["canvas", "vue"])
def is_vue(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def page(server: Server, is_vue: bool) -> Iterator[Any]:
    server.post("/settings", {"Comfy.VueNodes.Enabled": is_vue, "Comfy.Node.AlwaysShowAdvancedWidgets": True})
    with opened(server) as page:
        yield page
    server.post("/settings", {"Comfy.VueNodes.Enabled": False, "Comfy.Node.AlwaysShowAdvancedWidgets": False})


def load(page: Any, document: Any = EXAMPLE, *, is_shown: bool = True) -> None:
    page.evaluate("(workflow) => app.loadGraphData(workflow)", document)
    page.wait_for_function(IS_DRAWN)
    page.evaluate("(is_on) => app.graph.nodes.forEach((node) => { node.showAdvanced = is_on; })", is_shown)


def shot(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def is_hidden(page: Any, is_vue: bool, names: set[str], *, among: set[str], kind: str = SAMPLER) -> None:
    """Waits until of the widgets `among` these are hidden in the node; Vue draws a moment later."""
    wanted = f"""([of, hidden, shown]) => {{
        const found = new Set(({HIDDEN})(of));
        return hidden.every((name) => found.has(name)) && !shown.some((name) => found.has(name));
    }}"""
    page.wait_for_function(wanted, arg=[[kind, is_vue], sorted(names & among), sorted(among - names)])


def test_sampler_hides_widgets_unused_by_chosen_model(page: Any, is_vue: bool):
    load(page)
    is_hidden(page, is_vue, OF_EXPERTS | REPLACED, among=OF_EXPERTS | REPLACED)
    shot(page, f"models-one-expert-{'vue' if is_vue else 'canvas'}")
    page.evaluate(CHOOSE, TWO.published.hub_id)
    is_hidden(page, is_vue, REPLACED, among=OF_EXPERTS | REPLACED)
    shot(page, f"models-two-experts-{'vue' if is_vue else 'canvas'}")
    page.evaluate(CHOOSE, ONE.miniature.id)
    is_hidden(page, is_vue, OF_EXPERTS | REPLACED, among=OF_EXPERTS | REPLACED)
    page.evaluate(CHOOSE, "someone/unknown")  # of which the page knows nothing
    is_hidden(page, is_vue, REPLACED, among=OF_EXPERTS | REPLACED)


def test_sampler_without_loader_hides_widgets_by_default_model(page: Any, is_vue: bool):
    load(page)
    page.evaluate(
        """(type) => {
            const node = app.graph.nodes.find((one) => one.type === type);
            node.disconnectInput(node.inputs.findIndex((one) => one.type === "TPU_MODEL"));
        }""",
        SAMPLER,
    )
    is_hidden(page, is_vue, OF_EXPERTS, among=OF_EXPERTS | REPLACED)


def test_saved_workflow_keeps_values_of_hidden_widgets(page: Any):
    document = copy.deepcopy(EXAMPLE)
    (sampler,) = (node for node in document["nodes"] if node["type"] == SAMPLER)
    names = [widget["name"] for widget in sampler["inputs"] if "widget" in widget]
    assert not names  # values by position, as ComfyUI saved them before there were hidden ones
    load(page, document)
    position = page.evaluate(
        "(type) => app.graph.nodes.find((one) => one.type === type).widgets"
        ".findIndex((one) => one.name === 'guidance_scale_2')",
        SAMPLER,
    )
    sampler["widgets_values"][position] = 7.5
    load(page, document)
    saved = dict(page.evaluate(SAVED))
    ours = [node for node in document["nodes"] if node["type"].startswith(("Wan21", "TPU"))]
    assert {node["id"]: node["widgets_values"] for node in ours}.items() <= saved.items()
    queued = page.evaluate("async () => (await app.graphToPrompt()).output")
    assert queued[str(sampler["id"])]["inputs"]["guidance_scale_2"] == 7.5


def test_model_list_shows_download_sizes(page: Any, is_vue: bool):
    load(page)
    label = page.evaluate(
        """(id) => app.graph.nodes.find((one) => one.type === "TPUModelLoader")
            .widgets.find((one) => one.name === "model_id").options.getOptionLabel(id)""",
        TWO.published.hub_id,
    )
    assert label == f"{TWO.published.hub_id} (to download; as files fp8 36 GB, fp16 69 GB)"
    if is_vue:
        page.locator("button[aria-haspopup=listbox][aria-label=model_id]").first.click()
    else:
        page.evaluate(
            """() => {
                const node = app.graph.nodes.find((one) => one.type === "TPUModelLoader");
                const widget = node.widgets.find((one) => one.name === "model_id");
                const event = new PointerEvent("pointerdown", {clientX: 400, clientY: 100});
                widget.onClick({e: Object.assign(event, {canvasX: node.pos[0] + 150}), node, canvas: app.canvas});
            }"""
        )
    page.get_by_text("fp8 36 GB, fp16 69 GB").first.wait_for()
    shot(page, f"models-list-{'vue' if is_vue else 'canvas'}")
    page.keyboard.press("Escape")


def test_scheduler_labels_include_core_sampler_names(page: Any, server: Server):
    load(page)
    names = server.get("/object_info/Wan21TPUSampler")["Wan21TPUSampler"]["input"]["optional"]["scheduler"][1][
        "options"
    ]
    labels = page.evaluate(
        """(names) => names.map((name) => LiteGraph.createNode("Wan21TPUSampler")
            .widgets.find((one) => one.name === "scheduler").options.getOptionLabel(name))""",
        names,
    )
    own = ["euler", "uni_pc_bh2", "dpmpp_2m", "lcm"]
    assert labels == ["checkpoint", *(f"{core} ({name})" for core, name in zip(own, names[1:], strict=True))]


def test_model_list_starts_with_tiny_models(server: Server, page: Any):
    (name, options) = server.get("/object_info/TPUModelLoader")["TPUModelLoader"]["input"]["required"]["model_id"]
    assert name == "COMBO" and options["default"] == ONE.published.hub_id  # a new node's value is what it was
    trained = [tiny.is_trained(one) for one in options["options"] if one.startswith("tiny/")]
    assert options["options"][: len(trained)] == [one for one in options["options"] if one.startswith("tiny/")]
    assert trained == sorted(trained, reverse=True) and trained[0]
    load(page)
    label = page.evaluate(
        """() => app.graph.nodes.find((one) => one.type === "TPUModelLoader")
            .widgets.find((one) => one.name === "model_id").options.getOptionLabel("tiny/wan21")"""
    )
    assert label == "tiny/wan21 (built-in tiny model)"


BUTTONS = {"Wan 2.1 TPU Sampler", "TPU Model Loader"}


def test_advanced_inputs_are_hidden_until_shown_or_set(page: Any, is_vue: bool):
    """Of a Vue node ComfyUI hides those that are set, too."""
    advanced = {"scheduler", "sigmas", "end_step", "step_cache"}
    toggle = f"""() => {{
        const node = app.graph.nodes.find((one) => one.type === "{SAMPLER}");
        const before = node.size[1];
        node.toggleAdvanced();
        return node.size[1] - before;
    }}"""
    page.evaluate(ALWAYS, False)
    try:
        load(page, is_shown=False)
        is_hidden(page, is_vue, advanced, among=advanced)
        is_hidden(
            page, is_vue, {"quality", "precision"}, among={"quality", "precision", "family"}, kind="TPUModelLoader"
        )
        if is_vue:  # a button for them alone that has something to show
            buttons = page.locator("[data-node-id]", has_text="Show advanced inputs")
            playwright_sync.expect(buttons).to_have_count(2)
            assert {buttons.nth(index).inner_text().split("\n")[0] for index in range(2)} == BUTTONS
        else:
            assert page.evaluate(toggle) > 0
            is_hidden(page, is_vue, set(), among=advanced)
            assert page.evaluate(toggle) < 0
            is_hidden(page, is_vue, advanced, among=advanced)
            document = copy.deepcopy(EXAMPLE)
            (sampler,) = (node for node in document["nodes"] if node["type"] == SAMPLER)
            sampler["widgets_values"][sampler["widgets_values"].index("checkpoint")] = "FlowMatchEulerDiscreteScheduler"
            load(page, document, is_shown=False)
            is_hidden(page, is_vue, advanced - {"scheduler"}, among=advanced)
    finally:
        page.evaluate(ALWAYS, True)
    is_hidden(page, is_vue, set(), among=advanced)


ALWAYS = "(is_on) => app.extensionManager.setting.set('Comfy.Node.AlwaysShowAdvancedWidgets', is_on)"


def test_prompt_widgets_label_default_negative_prompt(page: Any, is_vue: bool):
    load(page)
    labels = f"""() => app.graph.nodes.find((one) => one.type === "{ENCODER}").widgets
        .filter((one) => one.name.endsWith("prompt")).map((one) => one.label ?? one.name)"""
    assert page.evaluate(labels) == ["prompt", "negative_prompt: the authors' default"]
    if is_vue:
        page.get_by_text("negative_prompt: the authors' default").first.wait_for()
    page.evaluate(
        f"""() => {{
            const node = app.graph.nodes.find((one) => one.type === "{ENCODER}");
            node.widgets.find((one) => one.name === "negative_prompt").value = "blurred";
        }}"""
    )
    page.wait_for_function(f"({labels})()[1] === 'negative_prompt'")


def test_models_endpoint_returns_unused_widgets_by_model_id(server: Server):
    known = server.get("/tpu/models")
    assert set(known[ONE.published.hub_id]["unused"]) == OF_EXPERTS == set(list_unused_widgets(ONE))
    assert known[TWO.published.hub_id]["unused"] == []
    assert known["wan2.1_t2v_14B_fp8_scaled.safetensors"]["title"] == ONE.title
    klein = known["black-forest-labs/FLUX.2-klein-4B"]["unused"]
    assert {"guidance_scale", "negative_prompt"} <= set(klein)
    assert "guidance_scale" not in known["black-forest-labs/FLUX.2-dev"]["unused"]
