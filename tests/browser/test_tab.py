"""The tab for a screen reader, in a page as narrow as a telephone's, by keyboard alone, and how still it is."""

import random
import re
from typing import Any

from comfyui_tpu.tests.browser import test_monitor
from comfyui_tpu.tests.browser.page import needs_browser
from comfyui_tpu.tests.browser.test_monitor import GIB, OVERLAPS, PANEL, WIDER, Tab, chromium, fake, loaded, server, tab
from comfyui_tpu.tests.support.comfyui_server import needs_comfyui

__all__ = ["chromium", "loaded", "server", "tab"]

pytestmark = [needs_comfyui, needs_browser]


def test_tab_opening_shifts_no_layout(tab: Tab):
    """For the first time in its page, which loads what it is made of: no other test may come before."""
    tab.answer_with(fake(notes=["duty_cycle_pct is not known: libtpu returned 7 values for 8 chips."]))
    tab.page.evaluate(WATCH)
    tab.open()
    tab.page.get_by_text("8 x TPU v6e").wait_for()
    test_monitor._wait_for_more(tab, 2)
    assert tab.page.evaluate("window.shifted") == []


def test_tab_elements_have_accessible_names_and_values(tab: Tab):
    tab.answer_with(fake())
    tab.open()
    tab.page.get_by_text("8 x TPU v6e").wait_for()
    nameless = f"() => [...document.querySelectorAll('{PANEL} :is(button, [role=progressbar], [role=img], canvas)')]"
    nameless += ".filter((one) => !(one.ariaLabel || one.textContent.trim())).map((one) => one.outerHTML)"
    assert tab.page.evaluate(nameless) == []
    progress = tab.section("Running").locator("[role=progressbar]")
    values = [progress.get_attribute(name) for name in ("aria-valuenow", "aria-valuetext")]
    assert values == ["33", "Step 13 of 40"]
    behind = tab.section("Running").get_by_role("list", name="Compiling in the background").get_by_role("listitem")
    texts = [text.split("\n")[0] for text in behind.all_inner_texts()]
    queue = tab.section("Running").get_by_text("Queue: 3 prompts").inner_text()
    assert re.fullmatch(r"Queue: 3 prompts · done at about \d+:\d\d.*", queue)
    assert texts == ["Compiling in the background: the vae decoder", "Will compile: <b>"]
    assert "TensorCore" in tab.section("Last two minutes").locator("canvas").get_attribute("aria-label")


def test_tab_fits_320_pixels_and_keyboard_reaches_all_buttons(tab: Tab):
    tab.answer_with(fake(notes=["duty_cycle_pct is not known: libtpu returned 7 values for 8 chips."]))
    tab.open()
    tab.page.get_by_text("8 x TPU v6e").wait_for()
    tab.page.set_viewport_size({"width": 320, "height": 800})
    tab.page.wait_for_function(f"document.querySelector('{PANEL}').getBoundingClientRect().right <= innerWidth")
    assert tab.page.evaluate(WIDER) == tab.page.evaluate(OVERLAPS) == []
    tab.screenshot("monitor-320")
    wanted = tab.page.locator(f"{PANEL} button:visible").count()
    assert wanted == 5  # one for each of four components, and for all
    # From the list on, by Tab alone, and back.
    tab.section("Loaded").locator("ul").focus()
    reached = []
    for _ in range(wanted):
        tab.page.keyboard.press("Tab")
        reached.append(tab.page.evaluate(FOCUSED))
    assert all(is_seen for _, is_seen in reached), reached
    names = [name for name, _ in reached]
    assert len(set(names)) == wanted and names[-1] == "Free all"
    tab.page.keyboard.press("Shift+Tab")
    assert tab.page.evaluate(FOCUSED)[0] == names[-2]


# What has the keyboard's focus, and whether a ring shows it within the page.
FOCUSED = f"""() => {{
    const one = document.activeElement, box = one.getBoundingClientRect(), style = getComputedStyle(one);
    const isRinged = style.outlineStyle !== "none" || style.boxShadow !== "none";
    const isThere = one.closest("{PANEL}") && box.left >= 0 && box.right <= innerWidth && box.height > 0;
    return [one.ariaLabel ?? one.textContent, Boolean(isThere && isRinged)];
}}"""


def test_tab_shortcut_toggles_panel_and_moves_focus(tab: Tab):
    tab.answer_with(fake())
    tab.page.locator("body").click(position={"x": 640, "y": 400})
    tab.page.keyboard.press("Alt+Shift+T")
    tab.page.wait_for_function(f"document.activeElement === document.querySelector('{PANEL}')")
    tab.section("Loaded").get_by_role("button").first.wait_for()
    tab.page.keyboard.press("Tab")
    name, is_seen = tab.page.evaluate(FOCUSED)
    assert name.startswith("Free ") and is_seen, name
    tab.page.keyboard.press("Alt+Shift+T")
    tab.page.locator(PANEL).wait_for(state="detached")


def test_changing_stats_shift_no_layout(tab: Tab):
    """Chromium counts what shifts without the user's doing; entries of the page's own elements are left out."""
    dice = random.Random(3)

    def answer() -> dict[str, Any]:
        stats = fake()
        stats["running"] |= {"done": dice.randint(1, 39), "elapsed_s": dice.random() * 5000}
        stats["host"] |= {"cpu_percent": dice.random() * 100, "ram_used": dice.randint(1, 1400) * GIB}
        for chip in stats["chips"]:
            chip |= {"hbm_used": dice.randint(0, 31) * GIB, "tensorcore_utilization": dice.randint(0, 100)}
        return stats

    tab.answer_with(answer)
    tab.open()
    tab.page.get_by_text("8 x TPU v6e").wait_for()
    test_monitor._wait_for_more(tab, 2)  # the curve of the history comes with its second point
    tab.page.evaluate(WATCH)
    test_monitor._wait_for_more(tab, 5)
    assert tab.page.evaluate("window.shifted") == []
    # Nor as prompts begin and end; a list of what compiles behind them grows, and what is below moves.
    idle, busy = fake(running=None, behind=[], queue=None), fake(behind=[])
    tab.answer_with(busy)
    test_monitor._wait_for_more(tab, 2)
    tab.page.evaluate(WATCH)
    for now in (idle, busy, idle):
        tab.answer_with(now)
        test_monitor._wait_for_more(tab, 2)
    assert tab.page.evaluate("window.shifted") == []
    # And it does see what shifts.
    tab.page.evaluate(f"document.querySelector('{PANEL} section').style.marginTop = '90px'")
    tab.page.wait_for_function("window.shifted.length")


def test_idle_tab_updates_only_changed_sections(tab: Tab):
    quiet = fake(running=None, behind=[], resident=[], queue=None)
    tab.answer_with(lambda: {**quiet, "host": quiet["host"] | {"cpu_percent": 100 * random.random()}})
    tab.open()
    tab.page.get_by_text("Nothing is running.").wait_for()
    test_monitor._wait_for_more(tab, 2)
    tab.page.evaluate(TOUCHED)
    tab.page.wait_for_function("window.touched.length")
    assert tab.page.evaluate("window.touched") == ["Host"]
    tab.answer_with(quiet | {"message": "8 x TPU v6e", "last_run": quiet["last_run"] | {"steps_per_second": 1.0}})
    tab.page.wait_for_function("window.touched.includes('Last run')")


# The sections in which anything was changed, each once; what draws the curve changes its size, to the same.
TOUCHED = f"""() => {{
    window.touched = [];
    new MutationObserver((changes) => {{
        for (const {{ target }} of changes) {{
            const one = target.nodeType === 1 ? target : target.parentElement;
            const name = one.closest("section")?.ariaLabel ?? one.className;
            if (one.tagName !== "CANVAS" && !window.touched.includes(name)) window.touched.push(name);
        }}
    }}).observe(document.querySelector("{PANEL}"),
        {{ subtree: true, childList: true, attributes: true, characterData: true }});
}}"""

WATCH = f"""() => {{
    window.shifted = [];
    const isOurs = (node) => Boolean((node?.nodeType === 1 ? node : node?.parentElement)?.closest("{PANEL}"));
    new PerformanceObserver((list) => {{
        for (const entry of list.getEntries()) {{
            const texts = entry.sources.filter(({{ node }}) => isOurs(node)).map(({{ node }}) => node.textContent);
            if (texts.length) window.shifted.push(texts);
        }}
    }}).observe({{ type: "layout-shift" }});
}}"""
