"""Measure the processor time that an open TPU tab costs the browser per answer while the machine is idle.

Run: python benchmarks/host/tab.py [--seconds-apart 2]. It needs ComfyUI, playwright and Chromium, as page tests do.
The answers differ only in the host's load and arrive without waiting; the page's clock is advanced accordingly. The
cost of the same frames without answers is subtracted. Only the thread's own time counts, without the requests.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from comfyui_tpu.tests.browser import test_monitor
from comfyui_tpu.tests.browser.page import launch_browser
from comfyui_tpu.tests.support import comfyui_server

ANSWERS, ROUNDS = 200, 4
# Shows so many answers, or none; a frame is painted after each.
SHOW = """async ([url, stats, count, apart, isShown]) => {
    const { Panel } = await import(url);
    if (!window.measured) {
        window.measured = new Panel({ free() {} });
        document.querySelector(".comfyui-tpu-panel").replaceWith(window.measured.element);
    }
    const now = Date.now;
    window.clock ??= now();
    Date.now = () => window.clock;
    for (let number = 0; number < count; number += 1) {
        window.clock += 1000 * apart;
        const host = { ...stats.host, cpu_percent: 5 * Math.random() };
        if (isShown) window.measured.show({ ...stats, host });
        await new Promise(requestAnimationFrame);
    }
    Date.now = now;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds-apart", type=float, default=2, help="between two answers to an idle tab (2)")
    apart = parser.parse_args().seconds_apart
    base = Path(tempfile.mkdtemp(prefix="tab-"))
    server = comfyui_server.prepare(base)
    try:
        server.start()
        server.post("/settings", {"Comfy.TutorialCompleted": True, "Comfy.InstalledVersion": "1.0.0"})
        with launch_browser() as browser:
            tab = test_monitor.Tab(browser.new_page(viewport={"width": 1280, "height": 1000}), server, "")
            each = measure(tab, apart)
    finally:
        server.stop()
        shutil.rmtree(base, ignore_errors=True)
    print(f"{1000 * each:.2f} ms an answer, {100 * each / apart:.3f} % of a core with one in {apart:g} s")


def measure(tab: test_monitor.Tab, apart: float) -> float:
    """Seconds of the page's thread for one answer."""
    quiet = test_monitor.fake(running=None, behind=[], resident=[], queue=None)
    tab.load()
    tab.answer_with(quiet)
    tab.open()
    tab.page.get_by_text("8 x TPU v6e").wait_for()
    devtools = tab.page.context.new_cdp_session(tab.page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent() -> float:
        found = devtools.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in found if one["name"] == "TaskDuration")

    url, sums = "/extensions/ComfyUI-TPU/monitor/panel.mjs", {True: 0.0, False: 0.0}
    for number in range(2 * ROUNDS + 2):
        is_shown, before = number % 2 == 0, spent()
        tab.page.evaluate(SHOW, [url, quiet, ANSWERS, apart, is_shown])
        if number > 1:  # the first pair compiles
            sums[is_shown] += spent() - before
    return (sums[True] - sums[False]) / (ROUNDS * ANSWERS)


if __name__ == "__main__":
    main()
