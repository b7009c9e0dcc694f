"""The words of ComfyUI's page: what it calls our widgets, in English and Chinese, and what it says of a wrong value."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.graphs.loader_swap import LOADERS, swap_loaders
from comfyui_tpu.nodes.graphs.upgrade import upgrade_workflow
from comfyui_tpu.tests.browser.page import SCREENSHOTS, click, fresh, needs_browser, opened
from comfyui_tpu.tests.nodes import examples, separate_packs
from comfyui_tpu.tests.nodes.test_upgrade import in_api_form
from comfyui_tpu.tests.support.comfyui_server import TWO_CHIPS, Server, needs_comfyui, tiny_workflow
from comfyui_tpu.tests.support.patience import until
from comfyui_tpu.tpu_runtime.messages import find_messages

pytestmark = [needs_comfyui, needs_browser]

EXAMPLE = json.loads(examples.page("wan21_t2v_720p").read_text())
SAMPLER, ENCODER, CORE = "Wan21TPUSampler", "Wan21TextEncoder", "TPUVAELoader"
CORE_LOADERS = {
    kind: {"class_type": kind, "inputs": dict.fromkeys(names, "any.safetensors")}
    for core, (ours, names) in LOADERS.items()
    for kind in (core, ours)
}
# Labels of a node's widgets, and of its inputs and outputs, by name; the title of its definition.
WORDS = """(type) => {
    const node = app.graph.nodes.find((one) => one.type === type) ?? LiteGraph.createNode(type);
    const label = (one) => [one.name, one.label ?? one.localized_name ?? one.name];
    return {
        title: node.constructor.title,
        widgets: Object.fromEntries((node.widgets ?? []).map(label)),
        sockets: Object.fromEntries([...node.inputs, ...node.outputs].map(label)),
        placeholders: (node.widgets ?? []).map((one) => one.element?.placeholder).filter(Boolean),
    };
}"""
SET_FRAMES = """([type, frames]) => {
    const node = app.graph.nodes.find((one) => one.type === type);
    node.widgets.find((widget) => widget.name === "num_frames").value = frames;
}"""
NOTE = """() => {
    const note = app.graph.nodes.find((one) => one.type === "MarkdownNote");
    return [note.title, ...note.widgets[0].value.split("\\n")];
}"""
# Translations of texts of the server, after its messages are remembered.
SAID = """async ([found, texts]) => {
    const scripts = await (await fetch("/extensions")).json();
    const own = new URL(scripts.find((one) => one.endsWith("/server_messages.js")), location);
    const { remember, understood } = await import(new URL("monitor/i18n.mjs", own));
    remember(found);
    return texts.map(understood);
}"""
FAILED = """() => new Promise((resolve) => {
    const { api } = app;
    api.addEventListener("execution_error", ({ detail }) => setTimeout(() => resolve(detail.exception_message), 1000));
    app.queuePrompt(0);
})"""
SELECT = """(type) => {
    app.canvas.select(app.graph.nodes.find((one) => one.type === type));
    app.canvas.onSelectionChange?.(app.canvas.selected_nodes);  // newer pages see it themselves
}"""
NOTICE = "#comfyui-tpu-notice"
# What one of our nodes says, below its widgets; in Vue nodes it is a widget like others.
LINE = ".comfyui-tpu-line"
# No sidebar, no notice, no error, no node.
AS_NEW = f"""async () => {{
    const {{ sidebarTab }} = app.extensionManager;
    if (sidebarTab.activeSidebarTabId) sidebarTab.toggleSidebarTab(sidebarTab.activeSidebarTabId);
    document.querySelector("{NOTICE}")?.remove();
    app.lastNodeErrors = null;
    await app.loadGraphData({{nodes: [], links: [], version: 0.4}});
}}"""
QUEUE = """async () => { await app.queuePrompt(0).catch(() => {}); }"""


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    return start_comfyui(environment=TWO_CHIPS)


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with opened(server) as page:
        page.evaluate("(workflow) => app.loadGraphData(workflow)", EXAMPLE)
        yield page


@pytest.fixture(scope="module")
def in_chinese(page: Any, server: Server) -> Iterator[Any]:
    """Another page of the same server, which was opened while its language was Chinese."""
    server.post("/settings", {"Comfy.Locale": "zh"})
    try:
        with fresh(page) as chinese:
            yield chinese
    finally:
        server.post("/settings", {"Comfy.Locale": "en"})


@pytest.fixture
def chinese(in_chinese: Any) -> Any:
    """That page, without what an earlier test has opened in it."""
    dialogs = in_chinese.locator("[role=dialog]")

    def are_closed() -> bool:
        if dialogs.count():
            in_chinese.keyboard.press("Escape")
        return not dialogs.count()

    until(are_closed)
    in_chinese.evaluate(AS_NEW)
    in_chinese.wait_for_function(f"!document.querySelector('{NOTICE}, .comfyui-tpu-panel, [role=dialog]')")
    return in_chinese


def shot(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def test_widgets_use_comfyui_labels(page: Any):
    sampler = page.evaluate(WORDS, SAMPLER)
    assert sampler["widgets"]["num_inference_steps"] == "steps"
    assert sampler["widgets"]["guidance_scale"] == "cfg"
    assert sampler["widgets"]["num_frames"] == "length"
    assert sampler["sockets"]["prompt_embeds"] == "positive"
    assert page.evaluate(WORDS, ENCODER)["placeholders"] == ["prompt", "negative_prompt"]
    shot(page, "words-english")


def test_node_search_for_tpu_lists_model_loader_first(page: Any):
    page.evaluate("app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
    search = page.locator("[role=dialog] input[type=text], [role=dialog] input[role=combobox]").first
    search.fill("tpu")
    results = page.locator("[role=dialog] [role=option], [role=dialog] [data-testid^=result]")
    results.first.get_by_text("TPU Model Loader").wait_for()
    shot(page, "search")
    page.keyboard.press("Escape")


def test_queued_prompt_keeps_declared_input_names(page: Any):
    queued = page.evaluate("async () => (await app.graphToPrompt()).output")
    (sampler,) = (node for node in queued.values() if node["class_type"] == SAMPLER)
    assert {"num_inference_steps", "guidance_scale", "num_frames", "prompt_embeds"} <= set(sampler["inputs"])


def test_invalid_length_reports_one_error_at_widget(page: Any):
    page.evaluate(SET_FRAMES, [SAMPLER, 80])
    with page.expect_response("**/prompt") as answer:
        page.evaluate(QUEUE)
    (node,) = answer.value.json()["node_errors"].values()
    (error,) = node["errors"]
    assert error["extra_info"]["input_name"] == "num_frames"
    assert error["details"].startswith("length - Wan 2.1 T2V 14B: length is 80; it must be 4k + 1 between")
    page.get_by_text("rejected the value for num_frames").first.wait_for()
    shot(page, "one-error")


def test_narrow_node_shows_full_timing_text(page: Any):
    page.evaluate("(workflow) => app.loadApiJson(workflow, '')", tiny_workflow("words"))
    page.evaluate("() => { for (const node of app.graph.nodes) node.setSize([190, node.size[1]]); }")
    page.evaluate(QUEUE)
    lines = page.locator(LINE, has_text="Took")
    lines.nth(2).wait_for()
    shot(page, "narrow")
    assert not [text for text in lines.all_inner_texts() if "<" in text]
    fits = "(box) => box.scrollHeight <= box.clientHeight"
    assert [lines.nth(index).evaluate(fits) for index in range(3)] == [True] * 3


@pytest.mark.parametrize("is_vue", [False, True], ids=["classic", "vue"])
def test_node_timings_stay_visible_after_run(page: Any, server: Server, is_vue: bool):
    """Newer pages take the lines away as the job ends."""
    page.evaluate("(isVue) => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', isVue)", is_vue)
    try:
        page.evaluate("(workflow) => app.loadApiJson(workflow, '')", tiny_workflow("words", seed=7 + is_vue))
        page.evaluate(
            """() => new Promise((resolve) => {
                app.api.addEventListener("execution_success", () => setTimeout(resolve, 100), {once: true});
                app.queuePrompt(0);
            })"""
        )
        line = "widgets?.find(({ name }) => name.includes('text-preview'))?.value"
        said = page.evaluate(f"app.graph.nodes.map(({{ widgets }}) => String({line}))")
        assert len([text for text in said if text.startswith("Took")]) >= 2
        page.get_by_text(re.compile("Took .* a step")).first.wait_for()
        shot(page, f"took-{'vue' if is_vue else 'classic'}")
        page.evaluate("(type) => app.graph.remove(app.graph.nodes.find((one) => one.type === type))", SAMPLER)
        page.get_by_text(re.compile("Took .* a step")).first.wait_for(state="detached")
    finally:
        page.evaluate("app.extensionManager.setting.set('Comfy.VueNodes.Enabled', false)")


def test_page_in_chinese_translates_nodes_notes_and_errors(chinese: Any):
    edited = json.dumps(EXAMPLE).replace("Use `flow_shift` 5", "I use `flow_shift` 5")
    chinese.evaluate("(workflow) => app.loadGraphData(workflow)", json.loads(edited))
    title, *lines = chinese.evaluate(NOTE)
    assert title == "使用方法" and "**Wan 2.1 T2V 14B：文生视频**" in lines
    (own,) = (line for line in lines if "480p" in line)
    shot(chinese, "words-chinese-note")
    assert own == "- I use `flow_shift` 5 for 720p and 3 for 480p (832x480)."
    sampler = chinese.evaluate(WORDS, SAMPLER)
    assert sampler["widgets"]["num_inference_steps"] == "步数"
    assert sampler["sockets"]["negative_prompt_embeds"] == "负面条件"
    assert chinese.evaluate(WORDS, CORE)["widgets"]["vae_name"] == "VAE 名称"
    known = chinese.evaluate("(type) => LiteGraph.registered_node_types[type].nodeData.display_name", CORE)
    assert known == "加载 VAE（TPU）"
    chinese.evaluate("app.extensionManager.command.execute('Workspace.ToggleSidebarTab.comfyui-tpu')")
    chinese.get_by_text("没有任务在运行。").wait_for()
    shot(chinese, "words-chinese")
    # And what comes from the server: a refusal, what a real model means here, what a node did.
    chinese.evaluate(SET_FRAMES, [SAMPLER, 80])
    chinese.evaluate(QUEUE)
    chinese.wait_for_function("Object.values(app.lastNodeErrors ?? {}).length")
    (refused,) = chinese.evaluate("Object.values(app.lastNodeErrors).flatMap((node) => node.errors)")
    assert refused["details"].startswith("长度 - Wan 2.1 T2V 14B：长度为 80；必须是 4k + 1，介于")
    assert refused["details"].endswith("之间。请用 77 或 81。")
    chinese.evaluate(SET_FRAMES, [SAMPLER, 81])
    chinese.evaluate(QUEUE)
    chinese.get_by_text("此机器没有 TPU：Wan 2.1 T2V 14B 将在 CPU 上运行数小时").wait_for()
    shot(chinese, "words-chinese-without-tpu")
    chinese.keyboard.press("Escape")
    chinese.locator(NOTICE).wait_for(state="detached")
    chinese.evaluate("(workflow) => app.loadApiJson(workflow, '')", tiny_workflow("words"))
    chinese.evaluate(QUEUE)
    chinese.locator(LINE, has_text=re.compile(r"用时 .*秒：")).first.wait_for()
    shot(chinese, "words-chinese-run")


def test_node_error_dialog_is_translated_to_chinese(chinese: Any):
    chinese.wait_for_function("document.querySelector('canvas')")
    workflow = tiny_workflow("words")
    (sampler,) = (node for node in workflow.values() if node["class_type"].endswith("TPUSampler"))
    sampler["inputs"] |= {"start_step": 2, "end_step": 1}
    chinese.evaluate("(workflow) => app.loadApiJson(workflow, '')", workflow)
    said = chinese.evaluate(FAILED)
    assert "没有可运行的步。步数从 0 开始计数；“开始步数”必须小于“结束步数”" in said
    shot(chinese, "words-chinese-error")


def test_notices_and_command_reports_are_translated_to_chinese(chinese: Any):
    old = [upgrade_workflow(made, DECLARATIONS)[1] for pack in separate_packs.ALL for made in saved_by(pack)]
    loaders = [swap_loaders(CORE_LOADERS, (), back=back)[1] for back in (False, True)]
    lines = [line for lines in old + loaders for line in lines]
    said = chinese.evaluate(SAID, [find_messages(lines), lines])
    assert len(said) > 10 and not [line for line in said if re.search("[a-z] [a-z]", line)]
    chinese.evaluate("(workflow) => app.loadGraphData(workflow)", separate_packs.cogvideox())
    notice = chinese.locator(NOTICE)
    notice.get_by_text("此工作流由独立的 TPU 插件保存").wait_for()
    notice.get_by_text("embeddings 现为正面条件和负面条件").wait_for()
    shot(chinese, "words-chinese-upgrade")
    # The page keeps the values of widgets that a workflow in API form does not name.
    workflow = tiny_workflow("words", start_step=0, end_step=0)
    chinese.evaluate("(workflow) => app.loadApiJson(workflow, '')", workflow)
    chinese.keyboard.press("Alt+Shift+W")
    notice.get_by_text("其余已存在").wait_for()
    shot(chinese, "words-chinese-warmup")


def saved_by(pack: str) -> tuple[Any, Any]:
    """A workflow of a separate pack, in both forms."""
    return separate_packs.ALL[pack](), in_api_form(pack)


def test_node_help_is_translated_to_chinese(chinese: Any):
    chinese.evaluate("(workflow) => app.loadGraphData(workflow)", EXAMPLE)
    help_button = "[data-testid=info-button]"

    def has_help() -> bool:
        chinese.evaluate(SELECT, SAMPLER)
        return bool(chinese.locator(help_button).count())

    until(has_help, "the page shows no help button beside a node that is selected")
    click(chinese, help_button)
    chinese.get_by_text("用检查点自带的调度器 UniPC 从随机噪声去噪得到 Latent。").wait_for()
    chinese.get_by_role("heading", name="Wan 2.1 TPU 采样器").first.wait_for()
    shot(chinese, "words-chinese-help")


def test_i18n_endpoint_translates_every_node(server: Server):
    """Those of the loaders of ComfyUI's kind too, which the tool cannot import."""
    translated = server.get("/i18n")["zh"]["nodeDefs"]
    for name, node in server.get("/object_info").items():
        if "ComfyUI-TPU" not in node.get("python_module", ""):
            continue
        inputs = {each for kind in ("required", "optional") for each in node["input"].get(kind, {})}
        assert inputs == set(translated[name]["inputs"]), name
        assert len(node["output"]) == len(translated[name]["outputs"]), name
