"""The monitor's tab in a real ComfyUI page, in headless Chromium."""

import contextlib
import random
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.tests.browser.page import launch_browser, needs_browser, patient
from comfyui_tpu.tests.support.citizen import CITIZEN_PACK
from comfyui_tpu.tests.support.comfyui_server import PACK, Server, needs_comfyui, tiny_workflow
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime.monitor import snapshot
from comfyui_tpu.tpu_runtime.monitor.host_stats import Sampler
from comfyui_tpu.tpu_runtime.monitor.idle import IdleStats

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")

PATIENCE_MS = 1000 * PATIENCE_S
playwright.expect.set_options(timeout=PATIENCE_MS)
SCREENSHOTS = PACK / "output" / "screenshots"
APP = "window.comfyAPI.app.app.extensionManager"
PANEL = ".comfyui-tpu-panel"
VIEWPORT = {"width": 1280, "height": 1000}
# What tests change, as a new user has it.
SETTINGS = {"Comfy.ColorPalette": "dark", "TPU.Monitor.Rate": 1, "TPU.Monitor.Badge": "while the tab is open"}
# By the colour itself: frontends differ in whether they mark the page, and where.
IS_DARK = """() => {
    const context = document.createElement("canvas").getContext("2d");
    context.fillStyle = getComputedStyle(document.body).getPropertyValue("--comfy-menu-bg");
    const parts = context.fillStyle.match(/[0-9a-f]{2}/g).map((part) => parseInt(part, 16));
    return Math.max(...parts) < 128;
}"""
GIB = 2**30

pytestmark = [needs_comfyui, needs_browser]


class Tab:
    """A page of ComfyUI with our tab, and what it asked and complained of."""

    def __init__(self, page: Any, server: Server) -> None:
        self.page = page
        self.server = server
        self.asked: list[float] = []
        self._give: Callable[[], Any] | None = None
        self.faults: list[str] = []
        page.on("request", lambda request: "/tpu/stats" in request.url and self.asked.append(time.monotonic()))
        page.on("pageerror", self._raised)
        page.on("console", self._heard)

    def _raised(self, error: Any) -> None:
        """Old frontends raise errors of their own on a newer ComfyUI; ours have our folder in their stack."""
        if "ComfyUI-TPU" in (error.stack or "") or not error.stack:
            self.faults.append(str(error))

    def _heard(self, message: Any) -> None:
        """Keeps complaints about our files. That a server went away Chromium says itself, of its address."""
        where = message.location.get("url", "")
        is_ours = "ComfyUI-TPU" in where or "comfyui-tpu" in message.text.lower()
        if is_ours and message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text} ({where})")

    def load(self) -> None:
        self.page.goto(self.server.url)
        tabs = f"{APP.replace('.', '?.')}?.getSidebarTabs()"
        self.page.wait_for_function(f"{tabs}?.some((tab) => tab.id === 'comfyui-tpu')")
        # The page answers before it has drawn its sidebar.
        self.page.wait_for_selector(".side-tool-bar-container, .sidebar-item-group, .side-bar-button")

    def toggle(self) -> None:
        self.page.evaluate(f"{APP}.command.execute('Workspace.ToggleSidebarTab.comfyui-tpu')")

    def open(self) -> None:
        """With an answer that came since: what the tab showed when it was closed, it still has."""
        with self.page.expect_response(lambda response: response.url.endswith("/tpu/stats")) as answered:
            self.toggle()
        answered.value.finished()
        self.page.wait_for_selector(PANEL)
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def theme(self, name: str) -> None:
        self.page.evaluate(f"(name) => {APP}.setting.set('Comfy.ColorPalette', name)", name)
        self.page.wait_for_function(f"({IS_DARK})() === {str(name == 'dark').lower()}")
        fading = "document.getAnimations().filter((one) => one.effect.getComputedTiming().endTime < Infinity)"
        self.page.evaluate(f"Promise.allSettled({fading}.map((one) => one.finished)).then(() => null)")

    def section(self, title: str) -> Any:
        return self.page.locator(f"{PANEL} section[aria-label='{title}']")

    def text(self, title: str) -> str:
        return self.section(title).inner_text()

    def answer_with(self, stats: Any) -> None:
        """From now on the page gets `stats`, or what it returns, in place of the server's."""
        is_routed, self._give = self._give is not None, stats if callable(stats) else lambda: stats
        if not is_routed:  # else an answer of the server could come in between
            self.page.route("**/tpu/stats", lambda route: route.fulfill(json=self._give()))

    def clear(self) -> None:
        """As after `load`, whatever a test has done."""
        self.page.unroute_all()
        self._give = None
        self.page.set_viewport_size(VIEWPORT)
        _show_document(self, True)
        for name, value in SETTINGS.items():
            self.page.evaluate(f"([name, value]) => {APP}.setting.set(name, value)", [name, value])
        if self.page.locator(PANEL).count():
            parts = f"document.querySelectorAll('{PANEL}, {PANEL} section')"
            self.page.evaluate(f"{parts}.forEach((part) => part.removeAttribute('style'))")
            self.toggle()
            self.page.wait_for_selector(PANEL, state="detached")
        self.asked, self.faults = [], []

    def screenshot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")


@pytest.fixture(scope="module")
def server(start_comfyui: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    # A cold cache: there is more to see while programs compile and prompts are encoded.
    started = start_comfyui(cache=tmp_path_factory.mktemp("cold-cache"), packs={"citizen": CITIZEN_PACK})
    # A new user is shown a tour, and first a picture of templates over everything.
    started.post("/settings", {"Comfy.TutorialCompleted": True, "Comfy.InstalledVersion": "1.0.0"})
    return started


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with launch_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def loaded(chromium: Any, server: Server) -> Iterator[Tab]:
    """A page that the module's tests look at in turn: loading it takes longer than most of them."""
    page = patient(chromium.new_page(viewport=VIEWPORT))
    tab = Tab(page, server)
    tab.load()
    yield tab
    page.close()


@pytest.fixture
def tab(loaded: Tab) -> Iterator[Tab]:
    """That page as it was when it was loaded, its tab closed. Fails the test if our files raised or complained."""
    yield loaded
    faults = loaded.faults
    loaded.clear()
    assert faults == []


def fake(num_chips: int = 8, **changes: Any) -> dict[str, Any]:
    """What a busy v6e would say."""
    model = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
    sizes = {"text_encoder": 1.3, "transformer": 3.5, "transformer_2": 3.5, "vae": 0.24}
    parts = {"encode": 3.2, "image": 5.0, "denoise": 257.1, "decode": 31.8}
    return {
        "platform": "tpu",
        "message": f"{num_chips} x TPU v6e",
        "chips": [
            {
                "index": index, "kind": "TPU v6e", "coords": [index % 2, index // 2, 0],
                "hbm_used": (8 + index * 5 % 9) * GIB, "hbm_peak": 18 * GIB, "hbm_limit": 31 * GIB,
                "hbm_reserved": 4 * GIB, "hbm_reserved_peak": 11.5 * GIB,
                "tensorcore_utilization": 60 + index * 7 % 30, "duty_cycle": 97,
            }
            for index in range(num_chips)
        ],
        "host": {"cpu_percent": 23.4, "ram_used": 55 * GIB, "ram_total": 1400 * GIB, "process_ram": 12 * GIB},
        "resident": [
            {"id": name, "component": name, "model": model, "bytes_per_chip": size * GIB, "last_used": time.time()}
            for name, size in sizes.items()
        ],
        "running": {
            "stage": "denoise", "model": model, "text": "Denoising", "done": 13, "total": 40, "unit": "step",
            "seconds_per_unit": 6.42, "elapsed_s": 91.3, "compiling": False,
        },
        "behind": [{"title": "the vae decoder", "elapsed_s": 90.2}, {"title": "<b>", "elapsed_s": None}],
        "last_run": {
            "model": model, "steps_per_second": 0.155, "peak_hbm": 18 * GIB,
            "stages": [{"stage": stage, "seconds": seconds} for stage, seconds in parts.items()],
        },
        "caches": [{"name": "xla", "path": "/cache/xla", "files": 63, "bytes": 1.2 * GIB}],
        "counts": {"load": 4, "encode": 2, "compile": 6},
        "notes": [],
        "queue": {"prompts": 3, "seconds": 754.0, "unknown": 0},
    } | changes  # fmt: skip


def resident(server: Server) -> int:
    return len(server.get("/tpu/stats")["resident"])


def test_panel_shows_idle_running_and_finished_run(tab: Tab, server: Server):
    is_first = not server.get("/tpu/stats")["chips"]  # unless other tests have run a workflow there
    tab.open()
    if is_first:
        tab.page.get_by_text("No TPU in this machine").wait_for()
        assert not tab.section("Chips").is_visible()
    running = tab.section("Running")
    # Held in the middle: where one core runs the server and the page, this may look at no step of a whole run.
    server.post("/citizen/faults", {"hold": "step", "after": 5})
    workflow = tiny_workflow("browser", num_inference_steps=20)
    workflow["1"]["inputs"]["prompt"] = "followed"  # what is encoded already would be no stage of the run
    prompt = server.queue(workflow)["prompt_id"]
    for text in ("Denoiser", re.compile(r"step [1-9]\d* of 20", re.IGNORECASE)):
        running.get_by_text(text).first.wait_for()
    running.get_by_text("Queue: 1 prompt · 1 of a kind that has not run yet").wait_for()
    server.get("/citizen/release")
    until(lambda: server.get(f"/history/{prompt}"))
    tab.section("Last run").get_by_text("VAE decoder").wait_for()  # between two stages nothing is running either
    running.get_by_text("Nothing is running.").wait_for()
    assert not tab.section("Chips").is_visible() and not tab.section("Last two minutes").is_visible()
    assert tab.page.get_by_text("no TPU, running on CPU with 8 simulated chips").is_visible()
    assert {"Text encoder", "Denoiser", "VAE decoder"} <= set(tab.text("Last run").splitlines())
    assert tab.section("Loaded").get_by_role("button", name="Free all").is_visible()
    assert resident(server) >= 3
    playwright.expect(tab.section("Loaded").locator("li")).to_have_count(resident(server))
    tab.screenshot("monitor-after-run")


def test_free_buttons_free_one_component_then_all(tab: Tab, server: Server):
    if not resident(server):
        server.run(tiny_workflow("free", seed=random.randrange(10**6)))
    tab.open()
    rows = tab.section("Loaded").locator("li")
    rows.first.wait_for()
    before, used = rows.count(), _used_bytes(server)
    first = rows.first.get_by_role("button")
    assert first.get_attribute("aria-label").startswith("Free ")
    first.focus()
    tab.page.keyboard.press("Enter")
    playwright.expect(rows).to_have_count(before - 1)
    assert resident(server) == before - 1
    until(lambda: _used_bytes(server) < used)
    tab.page.wait_for_function("document.activeElement.closest('section')?.ariaLabel == 'Loaded'")
    tab.section("Loaded").get_by_role("button", name="Free all").click()
    tab.section("Loaded").get_by_text("Nothing is loaded.").wait_for()
    until(lambda: resident(server) == 0 and _used_bytes(server) == 0)


def _used_bytes(server: Server) -> int:
    """Bytes in use on all chips, as of half a second ago."""
    return sum(chip["hbm_used"] or 0 for chip in server.get("/tpu/stats")["chips"])


def test_hidden_tab_sends_no_stats_requests(tab: Tab):
    tab.page.wait_for_timeout(1500)
    assert tab.asked == [], "a closed tab asks"
    tab.open()
    _wait_for_more(tab, 2)
    _assert_quiet(tab, tab.toggle, "a tab that was closed asks")
    tab.open()
    _wait_for_more(tab, 1)
    _assert_quiet(tab, lambda: _show_document(tab, False), "a hidden window asks")
    _show_document(tab, True)
    _wait_for_more(tab, 1)


def _wait_for_more(tab: Tab, count: int) -> None:
    wanted, deadline = len(tab.asked) + count, time.monotonic() + PATIENCE_S
    while len(tab.asked) < wanted:
        assert time.monotonic() < deadline, "a tab that is seen must ask"
        tab.page.wait_for_timeout(100)


def _assert_quiet(tab: Tab, hide: Callable[[], None], message: str) -> None:
    """Three seconds without a question, which a tab asks every second; what was under way may still come before."""
    hide()
    deadline = time.monotonic() + PATIENCE_S
    num_asked = None
    while len(tab.asked) != num_asked:
        assert time.monotonic() < deadline, message
        num_asked = len(tab.asked)
        tab.page.wait_for_timeout(3000)


def _show_document(tab: Tab, is_visible: bool) -> None:
    """What the browser does when its window is covered; headless windows never are."""
    tab.page.evaluate(
        "(state) => { Object.defineProperty(document, 'visibilityState', { value: state, configurable: true });"
        " document.dispatchEvent(new Event('visibilitychange')); }",
        "visible" if is_visible else "hidden",
    )


def test_panel_modules_are_served_with_no_cache(server: Server):
    with urllib.request.urlopen(f"{server.url}/extensions/ComfyUI-TPU/monitor/panel.mjs") as answer:
        assert answer.headers["Cache-Control"] == "no-cache"
        assert "javascript" in answer.headers["Content-Type"]


def test_panel_is_readable_in_both_themes_at_narrow_widths(tab: Tab):
    tab.answer_with(fake(notes=["duty_cycle_pct is not known: libtpu returned 7 values for 8 chips."]))
    tab.open()
    tab.page.get_by_text("8 x TPU v6e").wait_for()
    for theme in ("light", "dark"):
        tab.theme(theme)
        tab.page.eval_on_selector(PANEL, "(panel) => { panel.style.width = ''; }")
        tab.screenshot(f"monitor-{theme}")
        for width_px in (200, 300):
            tab.page.eval_on_selector(PANEL, f"(panel) => {{ panel.style.width = '{width_px}px'; }}")
            assert tab.page.evaluate(WIDER) == [], f"text runs out of the panel at {width_px} px"
            assert tab.page.evaluate(OVERLAPS) == [], f"numbers run into each other at {width_px} px"
        assert tab.page.evaluate(CONTRASTS) == [], f"text is too faint, {theme}"


# Elements that reach beyond the panel's right edge.
WIDER = f"""() => {{
    const panel = document.querySelector("{PANEL}");
    const edge = panel.getBoundingClientRect().right + 0.5;
    return [...panel.querySelectorAll("*")].filter((one) => one.getBoundingClientRect().right > edge)
        .map((one) => one.className + ": " + one.textContent);
}}"""

# Numbers whose text is wider than their place, so that it lies upon the next.
OVERLAPS = f"""() => [...document.querySelectorAll("{PANEL} :is(.tpu-number, .tpu-tile-value)")]
    .filter((one) => one.checkVisibility() && one.scrollWidth > one.clientWidth + 1)
    .map((one) => one.textContent)"""

# Texts, and what is drawn, whose contrast to the ground behind them is below what WCAG asks for: 4.5 and 3 to 1.
CONTRASTS = f"""() => {{
    const context = Object.assign(document.createElement("canvas"), {{ width: 1, height: 1 }})
        .getContext("2d", {{ willReadFrequently: true }});
    const paint = (colours) => {{
        context.clearRect(0, 0, 1, 1);
        for (const colour of colours) {{ context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }}
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }};
    const light = (rgb) => rgb.map((one) => one / 255)
        .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
        .reduce((sum, one, index) => sum + one * [0.2126, 0.7152, 0.0722][index], 0);
    const grounds = (one) => (one ? [...grounds(one.parentElement), getComputedStyle(one).backgroundColor] : ["#fff"]);
    const faint = [];
    const look = (what, behind, colour, least) => {{
        const pair = [light(paint(behind)), light(paint([...behind, colour]))];
        const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
        if (ratio < least) faint.push(`${{what}}: ${{ratio.toFixed(2)}}`);
    }};
    const isSeen = (one) => one.checkVisibility({{ visibilityProperty: true }});
    for (const one of document.querySelectorAll("{PANEL} *, .comfyui-tpu-badge *")) {{
        const isText = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (isText && isSeen(one)) look(one.textContent, grounds(one), getComputedStyle(one).color, 4.5);
    }}
    for (const one of document.querySelectorAll("{PANEL} :is(.tpu-fill, .tpu-swatch, .tpu-part, .tpu-key i)")) {{
        const {{ backgroundColor, borderTopColor }} = getComputedStyle(one);
        const colour = one.matches(".tpu-key i") ? borderTopColor : backgroundColor;
        if (isSeen(one)) look(`${{one.className}} ${{one.dataset.stage ?? ""}}`, grounds(one.parentElement), colour, 3);
    }}
    return faint;
}}"""


def test_panel_shows_loading_in_bytes_and_reserved_memory(tab: Tab):
    loading = {"done": 12_000, "total": 27_000, "unit": "MiB", "seconds_per_unit": 2**20 / 0.85e9, "text": "Loading"}
    stats = fake()
    stats["running"] |= loading
    stats["last_run"] |= {"loaded_bytes": 28.6e9, "loading_s": 33.6}
    tab.answer_with(stats)
    tab.open()
    tab.section("Running").get_by_text("12.6 of 28.3 GB · 0.85 GB/s · 18.5 s left").wait_for()
    assert "28.6 GB loaded at 0.85 GB/s" in tab.text("Last run")
    tiles = dict(tile.split("\n")[::-1] for tile in tab.section("Chips").locator(".tpu-tile").all_inner_texts())
    assert (tiles["In use per chip"], tiles["Peak per chip"]) == ("16.0 of 31.0 GiB", "18.0 GiB")
    assert (tiles["Reserved per chip"], tiles["Peak reserved per chip"]) == ("4.00 GiB", "11.5 GiB")
    first = tab.section("Chips").locator("[role=progressbar]").first
    assert "reserved 4.00 GiB, at most 11.5 GiB reserved" in first.get_attribute("aria-valuetext")
    share = first.locator(".tpu-reserved").evaluate("(one) => one.offsetWidth / one.parentElement.offsetWidth")
    assert abs(share - (8 + 4) / 31) < 0.03  # behind what is in use
    assert "Memory 52 %" in tab.text("Last two minutes")  # 128 of 248
    # Simulated chips do not say what is reserved.
    for chip in stats["chips"]:
        del chip["hbm_reserved"], chip["hbm_reserved_peak"]
    tab.answer_with(stats)
    playwright.expect(tab.section("Chips").get_by_text("Reserved per chip", exact=True)).to_be_hidden()
    # Nor a limit: a bar would have a scale of its own, which changes as memory is used.
    for chip in stats["chips"]:
        del chip["hbm_limit"]
    tab.answer_with(stats)
    without = tab.section("Chips").locator("[role=progressbar]:not([aria-valuenow])")
    playwright.expect(without).to_have_count(len(stats["chips"]))
    assert "8.00 GiB" in without.first.get_attribute("aria-valuetext")


def test_panel_fits_256_chips_and_shows_notes(tab: Tab):
    tab.answer_with(fake(256, notes=["tensorcore_util is not known: libtpu raised RuntimeError: no chips"]))
    tab.open()
    playwright.expect(tab.section("Chips").locator("[role=progressbar]")).to_have_count(256)
    assert tab.page.evaluate(WIDER) == []
    assert tab.section("Chips").bounding_box()["height"] < 600
    assert tab.page.get_by_text("libtpu raised RuntimeError: no chips").is_visible()
    last = tab.section("Chips").locator("[role=progressbar]").last
    assert last.get_attribute("aria-label") == "Chip 255"
    assert re.match(r"Chip 255: TPU v6e at \(1, 127, 0\), .* of 31.0 GiB", last.get_attribute("aria-valuetext"))
    tab.screenshot("monitor-256-chips")


def test_panel_shows_chips_before_first_run(tab: Tab, tmp_path: Path):
    """What `/tpu/stats` says on a machine whose chips nobody has started, and where another process holds them."""
    fake_tpu = pytest.importorskip("comfyui_tpu.tests.support.fake_tpu", reason="no tpu-info: it is for Linux")
    fake_tpu.plug(tmp_path, "v6e", 8)
    tab.open()
    for port in (contextlib.nullcontext(fake_tpu.closed()), fake_tpu.serving(8)):
        is_held = not isinstance(port, contextlib.nullcontext)
        with port as asked:
            sampler = Sampler(unstarted=IdleStats(tmp_path, [asked], deadline_s=PATIENCE_S))
            given = snapshot.take_snapshot() | {"platform": None, "message": snapshot.NOT_STARTED, "chips": []}
            tab.answer_with(sampler.complete(given))
        tab.page.get_by_text(f"8 x v6e, {'held by another process' if is_held else 'not started'}").wait_for()
        assert tab.section("Chips").locator("[role=progressbar]").count() == 8
        assert ("8.00 of 31.0 GiB" if is_held else "– of 32.0 GiB") in tab.text("Chips")
        assert tab.section("Last two minutes").is_visible() == is_held
        assert tab.page.get_by_text("a run here can start after that process has ended").is_visible() == is_held
        assert tab.page.evaluate(WIDER) == tab.page.evaluate(OVERLAPS) == []
        tab.screenshot(f"monitor-{'held' if is_held else 'not-started'}")


def test_badge_shows_memory_and_opens_tab(tab: Tab):
    badge = tab.page.locator(".comfyui-tpu-badge")
    if not badge.count():
        pytest.skip("this frontend has no buttons in the action bar")
    tab.answer_with(fake())
    badge.click()
    tab.page.get_by_text("8 x TPU v6e").wait_for()
    assert badge.get_attribute("data-memory") == "128 of 248 GiB"  # in use and reserved
    tab.page.evaluate(f"{APP}.setting.set('TPU.Monitor.Badge', 'hidden')")
    playwright.expect(badge).to_be_hidden()
    tab.page.evaluate(f"{APP}.setting.set('TPU.Monitor.Badge', 'while the tab is open')")
    playwright.expect(badge).to_be_visible()


EVIL = ("<img src=x onerror='window.pwned=1'>", "<script>window.pwned=1</script>", "javascript:window.pwned=1",
        "\"><svg onload=window.pwned=1>", "__proto__", "constructor", "{{7*7}}", "\u202e\u0000")  # fmt: skip
WRONG = (None, True, -1, 1e308, "12", [], [[]], {}, {"toString": 1}, ["<b>"])


def evil(value: Any, dice: random.Random) -> Any:
    """`value` with its texts replaced by attacks, and some of anything by what has no business there."""
    if dice.random() < 0.08:
        return dice.choice((*EVIL, *WRONG))
    if isinstance(value, dict):
        return {name: evil(one, dice) for name, one in value.items()}
    if isinstance(value, list):
        return [evil(one, dice) for one in value]
    return dice.choice(EVIL) if isinstance(value, str) and dice.random() < 0.7 else value


def test_hostile_stats_inject_no_elements_into_panel(tab: Tab):
    dice = random.Random(6)
    queue = iter([evil(fake(dice.choice((1, 8, 20)), notes=["a", "b"]), dice) for _ in range(30)])
    tab.answer_with(lambda: next(queue, fake(5)))  # five chips are shown when all has been
    tab.page.evaluate(f"{APP}.setting.set('TPU.Monitor.Rate', 0.5)")
    tab.open()
    tab.page.get_by_text("5 x TPU v6e").wait_for()
    assert tab.page.evaluate("window.pwned") is None
    assert tab.page.locator(f"{PANEL} :is(img, script, svg, a, iframe)").count() == 0
    assert tab.faults == []


def test_tab_reconnects_after_server_restart(tab: Tab, server: Server):
    tab.open()
    tab.page.locator(PANEL).get_by_text("Host").wait_for()
    server.kill()
    tab.page.get_by_text("The server is not reachable, trying again.").wait_for()
    tab.screenshot("monitor-unreachable")
    server.start()
    tab.page.get_by_text("The server is not reachable, trying again.").wait_for(state="hidden")
    tab.page.get_by_text("No TPU in this machine").wait_for()
