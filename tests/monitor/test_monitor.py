"""The monitor without a server: readings and their faults, the shared sample, the two routes, the terminal."""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.cli import monitor
from comfyui_tpu.nodes import DECLARATIONS
from comfyui_tpu.nodes.comfyui import routes
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime.monitor import feed as feeds
from comfyui_tpu.tpu_runtime.monitor.feed import Feed
from comfyui_tpu.tpu_runtime.monitor.readings import Sampler, read_libtpu
from rich.console import Console

web = pytest.importorskip("aiohttp.web")
test_utils = pytest.importorskip("aiohttp.test_utils")


PACK = Path(__file__).parents[2]
GIB = 2**30


def chip(index: int, **known: Any) -> dict[str, Any]:
    fields = ("coords", "hbm_used", "hbm_peak", "hbm_limit", "tensorcore_utilization", "duty_cycle")
    memory = {"hbm_used": 3 * GIB, "hbm_peak": 5 * GIB, "hbm_limit": 32 * GIB}
    return dict.fromkeys(fields) | {"index": index, "kind": "TPU v6e"} | memory | known


def tpu(num_chips: int = 8, **changes: Any) -> dict[str, Any]:
    return {
        "platform": "tpu",
        "message": f"{num_chips} x TPU v6e",
        "chips": [chip(index) for index in range(num_chips)],
        "resident": [
            {"id": "vae/x", "component": "vae", "model": "tiny/wan21", "bytes_per_chip": GIB, "last_used": time.time()}
        ],
        "running": None,
        "last_run": None,
        "caches": [{"name": "xla", "path": "/cache/xla", "files": 3, "bytes": 4096}],
        "counts": {"load": 1, "encode": 1, "compile": 2},
    } | changes


def libtpu(**metrics: Sequence[str] | Exception) -> Callable[[str], Sequence[str]]:
    """A libtpu that knows these metrics; an exception among them is raised."""

    def read(metric: str) -> Sequence[str]:
        answer = metrics[metric]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return read


# --- readings ---------------------------------------------------------------------------------------------------------


def test_libtpus_metrics_fill_what_the_runtime_does_not_know():
    read = libtpu(tensorcore_util=["10.5"] * 8, duty_cycle_pct=[str(10 * i) for i in range(8)])
    stats = Sampler(read, deadline_s=PATIENCE_S).complete(tpu())
    assert [one["duty_cycle"] for one in stats["chips"]] == [0, 10, 20, 30, 40, 50, 60, 70]
    assert {one["tensorcore_utilization"] for one in stats["chips"]} == {10.5}
    assert stats["notes"] == []


def test_memory_comes_from_libtpu_only_where_the_runtime_has_none():
    read = libtpu(
        tensorcore_util=["0", "0"], duty_cycle_pct=["0", "0"], hbm_capacity_usage=["7", "8"],
        hbm_capacity_total=["90", "91"],
    )  # fmt: skip
    stats = Sampler(read, deadline_s=PATIENCE_S).complete(tpu(chips=[chip(0), chip(1, hbm_used=None)]))
    assert [one["hbm_used"] for one in stats["chips"]] == [3 * GIB, 8]


def test_a_chip_with_two_cores_has_their_mean():
    read = libtpu(tensorcore_util=["10", "30", "50", "70"], duty_cycle_pct=["1", "2"])
    stats = Sampler(read, deadline_s=PATIENCE_S).complete(tpu(2))
    assert [one["tensorcore_utilization"] for one in stats["chips"]] == [20, 60]


def test_the_hosts_load_is_read_and_nothing_is_asked_of_libtpu_without_a_tpu():
    def never(metric: str) -> Sequence[str]:
        raise AssertionError(f"{metric} was read on a machine without a TPU")

    for platform in (None, "cpu"):
        stats = Sampler(never, deadline_s=PATIENCE_S).complete(tpu(platform=platform))
        assert 0 <= stats["host"]["cpu_percent"] <= 100
        assert 0 < stats["host"]["process_ram"] < stats["host"]["ram_used"] < stats["host"]["ram_total"]
        assert stats["notes"] == []


def test_what_the_runtime_measured_itself_stays():
    given = tpu(platform="cpu", host={"cpu_percent": 1.0}, notes=["from the runtime"])
    stats = Sampler().complete(given)
    assert (stats["host"], stats["notes"]) == ({"cpu_percent": 1.0}, ["from the runtime"])


# --- faults -----------------------------------------------------------------------------------------------------------


def missing(metric: str) -> Sequence[str]:
    raise ModuleNotFoundError("No module named 'libtpu.sdk'")


@pytest.mark.parametrize(
    ("read", "note"),
    [
        (missing, "Utilisation is not known: libtpu's monitoring module is missing (pip install -U libtpu)."),
        (
            libtpu(tensorcore_util=RuntimeError("no chips"), duty_cycle_pct=["5"] * 8),
            "tensorcore_util is not known: libtpu says RuntimeError: no chips",
        ),
        (
            libtpu(tensorcore_util=["5"] * 7, duty_cycle_pct=["5"] * 8),
            "tensorcore_util is not known: libtpu gave 7 values for 8 chips.",
        ),
        (
            libtpu(tensorcore_util=[], duty_cycle_pct=["5"] * 8),
            "tensorcore_util is not known: libtpu gave 0 values for 8 chips.",
        ),
        (
            libtpu(tensorcore_util=["5"] * 6 + ["nan", "?"], duty_cycle_pct=["5"] * 8),
            "tensorcore_util is not known for 2 of 8 cores.",
        ),
    ],
)
def test_a_fault_of_libtpu_leaves_the_rest_and_is_noted(read: Callable, note: str):
    stats = Sampler(read, deadline_s=PATIENCE_S).complete(tpu())
    assert stats["notes"] == [note]
    assert stats["chips"][7]["tensorcore_utilization"] is None
    assert stats["chips"][7]["hbm_used"] == 3 * GIB
    if read is not missing:
        assert stats["chips"][7]["duty_cycle"] == 5


def test_a_chip_that_stops_answering_costs_one_deadline_and_one_thread():
    release = threading.Event()

    def hang(metric: str) -> Sequence[str]:
        release.wait(PATIENCE_S)
        return ["1"] * 8

    sampler = Sampler(hang, deadline_s=0.1)
    try:
        assert sampler.complete(tpu())["notes"] == ["libtpu did not answer within 0.1 s. Utilisation is not known."]
        num_threads = threading.active_count()
        sampler._deadline_s = PATIENCE_S  # an unanswered question must not cost its deadline again
        stats = sampler.complete(tpu())
        assert stats["notes"] == ["libtpu does not answer: a chip may hang. Utilisation is not known."]
        assert stats["chips"][0]["hbm_used"] == 3 * GIB
        assert threading.active_count() == num_threads
    finally:
        release.set()
    until(lambda: sampler.complete(tpu())["notes"] == [])


def test_libtpus_own_module_has_the_metrics_we_ask_for():
    """In a process of its own: loading libtpu here would start what other tests must not see."""
    pytest.importorskip("libtpu")
    program = "from libtpu import sdk; print(*sdk.tpumonitoring.list_supported_metrics())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        pytest.skip(f"this libtpu has no monitoring module: {done.stderr.splitlines()[-1]}")
    from comfyui_tpu.tpu_runtime.monitor.readings import MEMORY, UTILISATION

    assert {*UTILISATION.values(), *MEMORY.values()} <= set(done.stdout.split())
    assert read_libtpu.__doc__


# --- one sample for everybody -----------------------------------------------------------------------------------------


class Counting:
    """A runtime that counts how often it is asked, and from which thread."""

    def __init__(self, stats: Mapping[str, Any] | None = None) -> None:
        self.moments: list[float] = []
        self.threads: set[str] = set()
        self.stats = stats or tpu(platform="cpu")

    @property
    def calls(self) -> int:
        return len(self.moments)

    def __call__(self) -> dict[str, Any]:
        self.moments.append(time.monotonic())
        self.threads.add(threading.current_thread().name)
        return dict(self.stats)


def test_ten_clients_cost_one_sample_and_none_on_the_event_loop():
    runtime = Counting()
    feed = Feed(runtime, patience_s=PATIENCE_S)

    async def ask() -> list[bytes]:
        answers = await asyncio.gather(*(feed.answer() for _ in range(10)))
        return [*answers, await feed.answer()]

    answers = asyncio.run(ask())
    assert (len(set(answers)), runtime.calls) == (1, 1)
    assert threading.main_thread().name not in runtime.threads
    assert json.loads(answers[0])["resident"][0]["id"] == "vae/x"


def test_it_samples_at_most_twice_a_second():
    runtime = Counting()
    feed = Feed(runtime, patience_s=PATIENCE_S)

    async def ask() -> None:
        while runtime.calls < 3:
            await feed.answer()
            await asyncio.sleep(0.01)

    asyncio.run(ask())
    pauses = [later - before for before, later in pairwise(runtime.moments)]
    assert min(pauses) >= feeds.FRESH_S, pauses


def test_256_chips_cost_the_event_loop_under_5_ms():
    feed = Feed(Counting(tpu(256, platform="cpu")), patience_s=PATIENCE_S)
    assert len(json.loads(asyncio.run(feed.answer()))["chips"]) == 256
    begun = time.thread_time()
    asyncio.run(_many(feed, 100))
    each_ms = (time.thread_time() - begun) * 10
    print(f"\n  an answer costs the event loop {each_ms:.3f} ms")
    assert each_ms < 5


async def _many(feed: Feed, count: int) -> None:
    for _ in range(count):
        await feed.answer()


def test_a_runtime_that_hangs_gives_old_numbers_with_a_note():
    release = threading.Event()
    runtime = Counting()
    feed = Feed(lambda: runtime() if runtime.calls == 0 else release.wait(PATIENCE_S) and runtime(), patience_s=0.5)

    async def ask() -> dict[str, Any]:
        return json.loads(await feed.answer())

    async def ask_until(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not condition(answer := await ask()):
            assert time.monotonic() < deadline, answer
            await asyncio.sleep(0.05)
        return answer

    async def follow() -> None:
        first = await ask_until(lambda answer: answer["chips"] and answer["notes"] == [])
        await ask_until(lambda answer: answer["notes"])
        answers = await asyncio.gather(*(ask() for _ in range(10)))
        assert all(one["chips"] == first["chips"] for one in answers)
        (note,) = answers[0]["notes"]
        assert re.fullmatch(r"The runtime has not answered for \d+ s; these numbers are old.", note)
        release.set()
        await ask_until(lambda answer: answer["notes"] == [])

    asyncio.run(follow())


def test_a_runtime_that_raises_is_noted():
    def broken() -> dict[str, Any]:
        raise KeyError("coords")

    answer = json.loads(asyncio.run(Feed(broken, patience_s=PATIENCE_S).answer()))
    assert answer["notes"] == ["The runtime cannot say: KeyError: 'coords'"]
    assert answer["resident"] == []


def test_numbers_that_json_does_not_have_become_null():
    runtime = Counting(tpu(1, platform="cpu", running={"seconds_per_unit": float("nan"), "elapsed_s": float("inf")}))
    answer = asyncio.run(Feed(runtime, patience_s=PATIENCE_S).answer())
    assert json.loads(answer)["running"] == {"seconds_per_unit": None, "elapsed_s": None}
    assert b"NaN" not in answer


# --- the routes -------------------------------------------------------------------------------------------------------


class Requests:
    """The routes on a small server, with fakes behind them."""

    def __init__(self) -> None:
        self.unloads = 0
        self.freed: list[tuple[str, ...]] = []

    def _unload(self) -> None:
        self.unloads += 1

    def _free(self, *, ids: tuple[str, ...]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.freed.append(ids)

    def send(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        async def go() -> tuple[int, Any]:
            table = web.RouteTableDef()
            feed = Feed(Counting(), patience_s=PATIENCE_S)
            routes.add_routes(table, request_unload=self._unload, feed=feed, free=self._free)
            app = web.Application()
            app.add_routes(table)
            async with test_utils.TestClient(test_utils.TestServer(app)) as client:
                answer = await client.request(method, path, data=body)
                return answer.status, await answer.json()

        return asyncio.run(go())


def test_stats_are_a_json_object():
    status, stats = Requests().send("GET", "/tpu/stats")
    assert status == 200
    assert {"platform", "message", "chips", "host", "resident", "running", "caches", "notes"} <= set(stats)


@pytest.mark.parametrize("body", [None, "", "{}", '{"ids": null}'])
def test_free_without_ids_only_asks_comfyui_to_unload(body: str | None):
    requests = Requests()
    assert requests.send("POST", "/tpu/free", body) == (200, {"freed": "requested"})
    assert (requests.unloads, requests.freed) == (1, [])


def test_free_with_ids_frees_those_off_the_event_loop():
    requests = Requests()
    assert requests.send("POST", "/tpu/free", '{"ids": ["a", "b"]}') == (200, {"freed": ["a", "b"]})
    assert (requests.unloads, requests.freed) == (0, [("a", "b")])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("{", "The body is not JSON"),
        ("[]", "The body is []; it must be empty, or"),
        ('{"id": "a"}', 'The body is {"id": "a"}; it must be empty, or'),
        ('{"ids": "a"}', 'ids is "a"; it must be empty, or {"ids": ["..."]}'),
        ('{"ids": [1]}', "ids is [1]; it must be empty, or"),
    ],
)
def test_a_wrong_body_is_refused_with_a_sentence(body: str, sentence: str):
    requests = Requests()
    status, answer = requests.send("POST", "/tpu/free", body)
    assert status == 400 and sentence in answer["error"], answer
    assert (requests.unloads, requests.freed) == (0, [])


def test_importing_the_monitor_starts_no_thread_and_touches_no_device():
    program = """
        import sys, threading
        import comfyui_tpu
        from comfyui_tpu.cli import monitor
        from comfyui_tpu.nodes.comfyui import routes
        from comfyui_tpu.tpu_runtime.monitor import feed, readings
        from aiohttp import web
        routes.add_routes(web.RouteTableDef(), request_unload=lambda: None)
        bridge = sys.modules.get("jax._src.xla_bridge")
        print(threading.active_count(), "libtpu" in sys.modules, bool(getattr(bridge, "_backends", {})))
    """
    lines = [line.strip() for line in program.strip().splitlines()]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["1", "False", "False"], done.stdout + done.stderr


# --- the terminal -----------------------------------------------------------------------------------------------------


def shown(stats: Any, note: str = "", width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(monitor.render(stats, note))
    return console.export_text()


RUNNING = {
    "stage": "denoise", "model": "tiny/wan21", "text": "", "done": 3, "total": 50, "unit": "step",
    "seconds_per_unit": 6.4, "elapsed_s": 19.2, "compiling": False,
}  # fmt: skip


def test_the_terminal_shows_chips_residents_and_the_running_stage():
    chips = [chip(0, tensorcore_utilization=87.0), *(chip(index) for index in range(1, 8))]
    last_run = {"model": "m", "stages": [{"stage": "decode", "seconds": 61}], "steps_per_second": 0.5, "peak_hbm": GIB}
    text = shown(tpu(running=RUNNING, chips=chips, last_run=last_run, notes=["a chip hangs"]))
    for expected in (
        "8 x TPU v6e", "memory 24.0 of 256 GiB on 8 chips", "3.0 of 32.0 GiB", "87 %", "vae of tiny/wan21", "just now",
        "step 3 of 50, 6.4 s each, 5:01 left", "VAE decoder 1:01, 2.0 s a step, peak 1.0 GiB", "a chip hangs",
    ):  # fmt: skip
        assert expected in text, f"{expected}\n{text}"
    assert len(re.findall(r"\d TPU v6e ", text)) == 8


def test_the_terminal_stays_readable_with_256_chips_and_80_columns():
    chips = [chip(index, hbm_used=index * 2**20) for index in range(256)]
    text = shown(tpu(chips=chips), width=80)
    assert "on 256 chips" in text and "255 TPU v6e" in text
    assert len(text.splitlines()) < 30
    assert "…" not in text


@pytest.mark.parametrize(
    "stats",
    [{}, {"chips": [{}], "resident": [{}], "running": {}, "last_run": {}, "caches": [{}]}, {"chips": [None, 1]}],
)
def test_the_terminal_survives_what_is_missing(stats: dict):
    assert "–" in shown(stats)


def test_the_terminal_obeys_neither_markup_nor_control_characters():
    text = shown(tpu(resident=[{"component": "[red]a[/red]", "model": "x\x1b[2Jy"}]))
    assert "[red]a[/red] of x?[2Jy" in text


def test_an_unreachable_server_is_a_sentence_with_what_to_do(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["monitor", "--once", "--url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9" in said and "Start ComfyUI, or give its address" in said


def test_a_wrong_interval_is_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["monitor", "--interval", "0"]) == 2
    assert "--interval is 0; it must be at least 0.5 s." in capsys.readouterr().err


def test_the_terminal_follows_a_server_through_a_restart(monkeypatch: pytest.MonkeyPatch):
    answers = iter([tpu(), monitor.Unreachable("gone"), tpu(message="back again")])

    def fetch(url: str) -> Any:
        answer = next(answers, None)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(monitor, "fetch", fetch)
    monkeypatch.setattr(monitor.time, "sleep", lambda seconds: None)
    console = Console(width=100, record=True, file=open("/dev/null", "w"), force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        monitor.run(SimpleNamespace(url="x", once=False, interval=1.0), console)
    text = console.export_text()
    assert "not reachable, trying again" in text and "back again" in text


# --- what the page is made of -----------------------------------------------------------------------------------------


def test_the_page_runs_one_module_of_ours_by_itself():
    """ComfyUI runs every .js under the folder; a helper among them would run on its own."""
    assert [path.name for path in (PACK / "web").rglob("*.js")] == ["monitor.js"]


@pytest.mark.parametrize("path", [*(PACK / "web").rglob("*.js"), *(PACK / "web").rglob("*.mjs")], ids=lambda p: p.name)
def test_the_pages_modules_never_parse_html(path: Path):
    source = path.read_text()
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert forbidden not in source, f"{path.name} uses {forbidden}"


def test_every_node_has_a_help_page():
    missing_pages = [node for node in DECLARATIONS if not (PACK / "web" / "docs" / f"{node}.md").is_file()]
    assert missing_pages == []
