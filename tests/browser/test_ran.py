"""What ran for a result, in the file that ComfyUI's own nodes save, and read back by dropping the file on the page."""

import base64
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.nodes.graphs.provenance import KEY
from comfyui_tpu.tests.browser.page import IS_DRAWN, SCREENSHOTS, needs_browser, opened, small
from comfyui_tpu.tests.browser.test_commands import NOTICE, says
from comfyui_tpu.tests.browser.test_examples import OPEN
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui
from comfyui_tpu.tests.support.patience import until
from PIL import Image

pytestmark = [needs_comfyui, needs_browser]

STAGES = ["encode", "denoise", "decode"]
LINE = "Denoiser: tiny/wan21, exact, float32, no TPU, running on CPU with 8 simulated chips, "
# As a file that is dropped on the graph; the page finds out by itself what is in it.
DROP = """async ([name, type, bytes]) => {
    await app.handleFile(new File([Uint8Array.from(atob(bytes), (one) => one.charCodeAt())], name, {type}));
}"""
# The frames to a sheet as well, and as a WebP that moves.
SAVE_TOO = """(decoder) => {
    const add = (kind, values = {}) => {
        const node = LiteGraph.createNode(kind);
        app.graph.add(node);
        for (const widget of node.widgets ?? []) if (widget.name in values) widget.value = values[widget.name];
        return node;
    };
    const source = app.graph.nodes.find((node) => node.type.endsWith("TPUVAEDecoder"));
    const [webp, sheet] = [add("SaveAnimatedWEBP", {filename_prefix: "moving", fps: 8}), add("SaveImage")];
    const compare = add("TPUCompare", {layout: "contact sheet", pictures: 6, columns: 3, labels: "a circle"});
    source.connect(0, webp, 0);
    source.connect(0, compare, 0);
    compare.connect(0, sheet, 0);
}"""
TYPES = {".mp4": "video/mp4", ".webp": "image/webp", ".png": "image/png", ".json": "application/json"}


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server]) -> Server:
    return start_comfyui()


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Any]:
    with opened(server) as page:
        yield page


def open_example(page: Any, stem: str = "try_it_now") -> None:
    page.evaluate(OPEN, examples.page(stem).stem)
    page.wait_for_function(IS_DRAWN)


def queue(page: Any, server: Server) -> None:
    before = len(server.get("/history"))
    with small(page):
        page.evaluate("app.queuePrompt(0)")
        until(lambda: len(server.get("/history")) == before + 1)


def newest(server: Server, suffix: str) -> Path:
    return max((server.base / "output").rglob(f"*{suffix}"), key=lambda path: path.stat().st_mtime_ns)


def drop(page: Any, path: Path) -> None:
    page.evaluate(f"document.querySelector('{NOTICE}')?.remove()")
    page.evaluate(DROP, [path.name, TYPES[path.suffix], base64.b64encode(path.read_bytes()).decode()])


def read_saved_workflow(path: Path) -> dict[str, Any]:
    """The workflow in an MP4 of ComfyUI's."""
    with av.open(str(path)) as container:
        return json.loads(container.metadata["workflow"])


def test_dropped_result_file_shows_run_record(page: Any, server: Server):
    open_example(page)
    page.evaluate(SAVE_TOO)
    queue(page, server)
    files = [newest(server, suffix) for suffix in (".mp4", ".webp", ".png")]
    assert Image.open(files[1]).n_frames == 17 and Image.open(files[2]).size == (3 * 112, 2 * (80 + 24))
    for path in files:
        open_example(page)
        drop(page, path)
        says(page, "How this file was made:")
        said = page.locator(f"{NOTICE} li").all_inner_texts()
        assert [line.split(":")[0] for line in said] == ["Text encoder", "Denoiser", "VAE decoder"]
        assert said[1].startswith(LINE) and re.fullmatch(r"[\d.]+ s", said[1].removeprefix(LINE))
        # The workflow is there, without what ran: it is of the file, not of what runs next.
        assert page.evaluate("app.graph.nodes.some((node) => node.type === 'TPUCompare')")
        assert page.evaluate(f"app.graph.serialize().extra['{KEY}']") is None
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "ran.png")
    text = json.dumps(read_saved_workflow(files[0])["extra"][KEY])
    assert str(server.base) not in text and "/" not in text.replace("tiny/wan21", "")
    # Asked for once more, and gone with another workflow.
    page.evaluate(f"document.querySelector('{NOTICE}').remove()")
    page.evaluate("app.extensionManager.command.execute('comfyui-tpu.ran')")
    says(page, "How this file was made:")
    open_example(page)
    page.evaluate("app.extensionManager.command.execute('comfyui-tpu.ran')")
    says(page, "Drop an image or video generated on a TPU here")


def test_cached_results_keep_record_of_original_run(page: Any, server: Server):
    open_example(page)
    page.evaluate("app.graph.nodes.flatMap((node) => node.widgets ?? []).forEach((widget) => {"
                  " if (widget.name === 'control_after_generate') widget.value = 'fixed'; })")  # fmt: skip
    queue(page, server)
    ran = read_saved_workflow(newest(server, ".mp4"))["extra"][KEY]
    page.evaluate("app.graph.nodes.find((node) => node.type === 'SaveVideo').widgets[0].value = 'again'")
    queue(page, server)
    assert newest(server, ".mp4").name.startswith("again")
    assert read_saved_workflow(newest(server, ".mp4"))["extra"][KEY] == ran
    assert [notes[0]["stage"] for notes in ran.values()] == STAGES


@pytest.mark.recorded
def test_pipeline_node_records_each_stage(page: Any, server: Server):
    pipeline = json.loads((examples.FOLDER / "pipeline" / "wan21_t2v_720p.json").read_text())
    page.evaluate("async (workflow) => { await app.loadGraphData(workflow, true, true, 'pipeline'); }", pipeline)
    page.evaluate("""() => {
        const values = {model_id: "tiny/wan21", height: 80, width: 112, num_frames: 5, num_inference_steps: 2};
        for (const widget of app.graph.nodes.flatMap((node) => node.widgets ?? [])) {
            if (widget.name in values) widget.value = values[widget.name];
        }
    }""")
    queue(page, server)
    (notes,) = read_saved_workflow(newest(server, ".mp4"))["extra"][KEY].values()
    assert [note["stage"] for note in notes] == STAGES


def test_cli_result_opens_in_page_without_local_paths(page: Any, tmp_path: Path):
    """In API form, which holds what really ran; a picture's path on this machine is none of the file's."""
    workflow = tmp_path / "workflow.json"
    document = json.loads((examples.FOLDER / "api" / "wan22_i2v_720p.json").read_text())
    picture = tmp_path / "secret" / "input.jpg"
    picture.parent.mkdir()
    picture.write_bytes((examples.FOLDER / "wan_i2v_input.jpg").read_bytes())
    workflow.write_text(json.dumps(document))
    changes = [
        f"LoadImage.image={picture}",
        "Wan22I2VTPUSampler.num_inference_steps=2",
        # A size that `tests/nodes/test_stages.py` compiles too.
        *(
            f"Wan22I2VImageEncoder.{name}={value}"
            for name, value in {"height": 64, "width": 96, "num_frames": 5}.items()
        ),
    ]
    arguments = ["run", str(workflow), "--tiny", "--out", str(tmp_path), *(f"--set={change}" for change in changes)]
    assert cli.main(arguments) == 0
    (made,) = tmp_path.glob("*.mp4")
    assert b"secret" not in made.read_bytes()
    drop(page, made)
    says(page, "Image encoder: tiny/wan22i2v, exact, float32")
    assert page.locator(f"{NOTICE} li").count() == 4
    assert page.evaluate("app.graph.nodes.find((node) => node.type === 'LoadImage').widgets[0].value") == "input.jpg"


EVIL = "<img src=x onerror='window.pwned=1'>"
NOTE = {"stage": EVIL, "model": EVIL * 100, "quality": ["x"], "precision": {}, "chips": None, "seconds": "soon"}


HOSTILE = (
    {"1": [NOTE] * 300, "__proto__": [NOTE], "toString": 1}, {"1": {"2": NOTE}}, [[NOTE]], EVIL, None,
    {str(number): None for number in range(3000)}, {"1": [[NOTE]], "2": [1, EVIL]},
)  # fmt: skip


def hostile(form: str) -> Iterator[dict[str, Any]]:
    """Workflows with such records; one in API form has one at each node."""
    if form == "api":
        document = json.loads((examples.FOLDER / "api" / "wan21_t2v_720p.json").read_text())
        for node, record in zip(document.values(), itertools.cycle(HOSTILE), strict=False):
            node["_meta"][KEY] = record
        yield document
        return
    document = json.loads(examples.page("try_it_now").read_text())
    for record in HOSTILE:
        yield {**document, "extra": {**document["extra"], KEY: record}}


@pytest.mark.parametrize("form", ["page", "api"])
def test_hostile_run_record_does_not_break_page(page: Any, tmp_path: Path, form: str):
    faults: list[str] = []
    page.on("pageerror", listener := lambda error: faults.append(str(error)))
    open_example(page)  # what is drawn where a file is refused
    for document in hostile(form):
        (path := tmp_path / "evil.json").write_text(json.dumps(document))
        drop(page, path)
        page.wait_for_function(IS_DRAWN)
        assert faults == [] and page.evaluate("window.pwned") is None
        assert page.evaluate("app.graph.nodes.some((node) => node.type === 'Wan21TPUSampler')")
        lines = page.locator(f"{NOTICE} li").all_inner_texts()
        assert len(lines) <= 32 and all(len(line) < 500 for line in lines)
        assert page.locator(f"{NOTICE} img").count() == 0
    page.remove_listener("pageerror", listener)
