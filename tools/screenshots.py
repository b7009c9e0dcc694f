"""Take the READMEs' images: `docs/images/page.jpg` and `docs/images/monitor.jpg` of ComfyUI's page, and `demo.png`.

The first shows the page after a run of the first template on eight simulated chips, with its video and the TPU tab. The
second shows the tab alone, with invented numbers of a busy v6e-8. The third shows five frames of `setup.py demo`.

Run: python tools/screenshots.py. It needs a ComfyUI in COMFYUI_PATH or ~/ComfyUI, playwright, and Chromium.
With --demo it takes only the third, and needs none of these.
"""

import io
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import av
import numpy as np
from comfyui_tpu.installer import demo_and_tests
from comfyui_tpu.tests.browser import test_monitor
from comfyui_tpu.tests.browser.page import launch_browser
from comfyui_tpu.tests.support import comfyui_server
from comfyui_tpu.tests.support.patience import until
from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
EXAMPLE = ROOT / "examples" / "TPU - try it now.json"
# No tour, and no panel over the graph.
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.InstalledVersion": "1.0.0", "Comfy.Minimap.Visible": False}
# Large enough that the page draws text in nodes; the images are scaled down.
SIZE, WIDTH, TALL = (2400, 900), 1600, 1400
RUN = """async ([workflow, name]) => {
    await app.loadGraphData(workflow, true, true, name);
    await app.queuePrompt(0);
}"""
# Places the graph next to the open tab, and makes the video large enough that its controls cover little of it.
PLACE = """(left) => {
    app.graph.nodes.find((node) => node.type === "SaveVideo").setSize([350, 420]);
    app.canvas.draw(true, true);  // which measures it
    document.querySelector("video").currentTime = 0.95;
    const boxes = app.graph.nodes.map((node) => Array.from(node.boundingRect ?? node.getBounding()));
    const [x, y] = [0, 1].map((axis) => Math.min(...boxes.map((box) => box[axis])));
    const [right, bottom] = [0, 1].map((axis) => Math.max(...boxes.map((box) => box[axis] + box[axis + 2])));
    const scale = Math.min(1, (innerWidth - left - 60) / (right - x), (innerHeight - 200) / (bottom - y));
    Object.assign(app.canvas.ds, {scale, offset: [(left + 30) / scale - x, 110 / scale - y]});
    app.canvas.draw(true, true);
}"""


def main() -> None:
    take_demo()
    if "--demo" not in sys.argv:
        take_pages()


def take_demo() -> None:
    """Save five frames at the video's own size, side by side."""
    with av.open(str(demo_and_tests.DEMO_VIDEO)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    chosen = [frames[round(index * (len(frames) - 1) / 4)] for index in range(5)]
    Image.fromarray(np.concatenate(chosen, axis=1)).save(IMAGES / "demo.png", optimize=True)


def take_pages() -> None:
    base = Path(tempfile.mkdtemp(prefix="screenshots-"))
    server = comfyui_server.prepare(base)
    try:
        server.start()
        server.post("/settings", SETTINGS)
        with launch_browser() as browser:
            page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
            take(test_monitor.Tab(page, server))
    finally:
        server.stop()
        shutil.rmtree(base, ignore_errors=True)


def take(tab: test_monitor.Tab) -> None:
    """Take both images of the page."""
    tab.load()
    tab.open()
    tab.page.evaluate(RUN, [json.loads(EXAMPLE.read_text("utf-8")), EXAMPLE.stem])
    until(lambda: tab.server.get("/history"))
    time.sleep(10)  # until the notice of the finished run has disappeared
    panel = tab.page.locator(test_monitor.PANEL)
    box = panel.bounding_box()
    assert box
    tab.page.evaluate(PLACE, box["x"] + box["width"])
    time.sleep(1)
    picture = Image.open(io.BytesIO(tab.page.screenshot()))
    picture.resize((WIDTH, WIDTH * SIZE[1] // SIZE[0]), Image.Resampling.LANCZOS).convert("RGB").save(
        IMAGES / "page.jpg", quality=80, optimize=True
    )
    tab.page.set_viewport_size({"width": 1280, "height": TALL})
    tab.answer_with(lambda: test_monitor.fake(behind=[{"title": "the vae decoder", "elapsed_s": 90.2}]))
    time.sleep(4)
    panel.screenshot(path=IMAGES / "monitor.jpg", type="jpeg", quality=85)


if __name__ == "__main__":
    main()
