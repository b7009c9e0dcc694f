"""The monitor without a server: readings and their faults, the shared sample, the two routes, the page's files."""

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
from typing import Any

import pytest
from comfyui_tpu.nodes.comfyui import routes
from comfyui_tpu.tests.support.chips import GIB, chip, tpu
from comfyui_tpu.tests.support.messages import Expected, assert_message
from comfyui_tpu.tests.support.patience import PATIENCE_S, until
from comfyui_tpu.tpu_runtime.monitor import stats_feed as feeds
from comfyui_tpu.tpu_runtime.monitor.host_stats import Sampler, read_libtpu
from comfyui_tpu.tpu_runtime.monitor.stats_feed import StatsFeed

web = pytest.importorskip("aiohttp.web")
test_utils = pytest.importorskip("aiohttp.test_utils")


PACK = Path(__file__).parents[2]


def libtpu(**metrics: Sequence[str] | Exception) -> Callable[[str], Sequence[str]]:
    """A libtpu that knows these metrics; an exception among them is raised."""

    def read(metric: str) -> Sequence[str]:
        answer = metrics[metric]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return read


# --- readings ---------------------------------------------------------------------------------------------------------


def test_sampler_adds_libtpu_metrics_to_runtime_stats():
    read = libtpu(tensorcore_util=["10.5"] * 8, duty_cycle_pct=[str(10 * i) for i in range(8)])
    stats = Sampler(read, deadline_s=PATIENCE_S).complete(tpu())
    assert [one["duty_cycle"] for one in stats["chips"]] == [0, 10, 20, 30, 40, 50, 60, 70]
    assert {one["tensorcore_utilization"] for one in stats["chips"]} == {10.5}
    assert stats["notes"] == []


def test_sampler_reads_libtpu_memory_only_when_runtime_has_none():
    read = libtpu(
        tensorcore_util=["0", "0"], duty_cycle_pct=["0", "0"], hbm_capacity_usage=["7", "8"],
        hbm_capacity_total=["90", "91"],
    )  # fmt: skip
    stats = Sampler(read, deadline_s=PATIENCE_S).complete(tpu(chips=[chip(0), chip(1, hbm_used=None)]))
    assert [one["hbm_used"] for one in stats["chips"]] == [3 * GIB, 8]


def test_sampler_averages_two_cores_per_chip():
    read = libtpu(tensorcore_util=["10", "30", "50", "70"], duty_cycle_pct=["1", "2"])
    stats = Sampler(read, deadline_s=PATIENCE_S).complete(tpu(2))
    assert [one["tensorcore_utilization"] for one in stats["chips"]] == [20, 60]


def test_sampler_without_tpu_reads_host_load_but_not_libtpu():
    def never(metric: str) -> Sequence[str]:
        raise AssertionError(f"{metric} was read on a machine without a TPU")

    for platform in (None, "cpu"):
        stats = Sampler(never, deadline_s=PATIENCE_S).complete(tpu(platform=platform))
        assert 0 <= stats["host"]["cpu_percent"] <= 100
        assert 0 < stats["host"]["process_ram"] < stats["host"]["ram_used"] < stats["host"]["ram_total"]
        assert stats["notes"] == []


def test_sampler_keeps_values_measured_by_runtime():
    given = tpu(platform="cpu", host={"cpu_percent": 1.0}, notes=["from the runtime"])
    stats = Sampler().complete(given)
    assert (stats["host"], stats["notes"]) == ({"cpu_percent": 1.0}, ["from the runtime"])


# --- faults -----------------------------------------------------------------------------------------------------------


def raise_missing_module(metric: str) -> Sequence[str]:
    raise ModuleNotFoundError("No module named 'libtpu.sdk'")


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (raise_missing_module, Expected("monitor.monitoring_module_missing")),
        (
            libtpu(tensorcore_util=RuntimeError("no chips"), duty_cycle_pct=["5"] * 8),
            Expected("monitor.metric_raised", metric="tensorcore_util", type="RuntimeError", answer="no chips"),
        ),
        (
            libtpu(tensorcore_util=["5"] * 7, duty_cycle_pct=["5"] * 8),
            Expected("monitor.metric_count_wrong", metric="tensorcore_util", count=7, num_chips=8),
        ),
        (
            libtpu(tensorcore_util=["5"] * 6 + ["nan", "?"], duty_cycle_pct=["5"] * 8),
            Expected("monitor.cores_unknown", metric="tensorcore_util", unknown=2, cores=8),
        ),
    ],
)
def test_sampler_notes_libtpu_failure_and_keeps_other_values(read: Callable, expected: Expected):
    stats = Sampler(read, deadline_s=PATIENCE_S).complete(tpu())
    (note,) = stats["notes"]
    assert_message(note, expected)
    assert stats["chips"][7]["tensorcore_utilization"] is None
    assert stats["chips"][7]["hbm_used"] == 3 * GIB
    if read is not raise_missing_module:
        assert stats["chips"][7]["duty_cycle"] == 5


@pytest.mark.parametrize(("running", "said"), [(None, 0.0), ({"stage": "denoise"}, None)])
def test_sampler_empty_libtpu_metrics_are_zero_only_when_idle(running: Any, said: float | None):
    """Neither an error nor 100 %; while something runs nobody knows."""
    stats = Sampler(libtpu(tensorcore_util=[], duty_cycle_pct=[]), deadline_s=PATIENCE_S).complete(tpu(running=running))
    assert {(one["tensorcore_utilization"], one["duty_cycle"]) for one in stats["chips"]} == {(said, said)}
    assert stats["notes"] == []


def test_sampler_missing_libtpu_memory_is_none():
    read = libtpu(tensorcore_util=["0"], duty_cycle_pct=["0"], hbm_capacity_usage=[], hbm_capacity_total=[])
    (one,) = Sampler(read, deadline_s=PATIENCE_S).complete(tpu(chips=[chip(0, hbm_used=None)]))["chips"]
    assert one["hbm_used"] is None and one["hbm_limit"] == 32 * GIB


def test_sampler_hanging_libtpu_costs_one_deadline_and_one_thread():
    release = threading.Event()

    def hang(metric: str) -> Sequence[str]:
        release.wait(PATIENCE_S)
        return ["1"] * 8

    sampler = Sampler(hang, deadline_s=0.1)
    try:
        (note,) = sampler.complete(tpu())["notes"]
        assert_message(note, "monitor.libtpu_not_in_time", deadline_s=0.1)
        num_threads = threading.active_count()
        sampler._deadline_s = PATIENCE_S  # an unanswered question must not cost its deadline again
        stats = sampler.complete(tpu())
        (note,) = stats["notes"]
        assert_message(note, "monitor.libtpu_does_not_answer")
        assert stats["chips"][0]["hbm_used"] == 3 * GIB
        assert threading.active_count() <= num_threads  # one of another test may have ended
    finally:
        release.set()
    until(lambda: sampler.complete(tpu())["notes"] == [])


def test_libtpu_module_supports_requested_metrics():
    """In a process of its own: loading libtpu here would start what other tests must not see."""
    pytest.importorskip("libtpu")
    program = "from libtpu import sdk; print(*sdk.tpumonitoring.list_supported_metrics())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        pytest.skip(f"this libtpu has no monitoring module: {done.stderr.splitlines()[-1]}")
    from comfyui_tpu.tpu_runtime.monitor.host_stats import MEMORY, UTILISATION

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


def test_stats_feed_shares_one_sample_among_ten_clients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feeds, "MAX_AGE_S", PATIENCE_S)
    runtime = Counting()
    feed = StatsFeed(runtime, patience_s=PATIENCE_S)

    async def ask() -> list[bytes]:
        answers = await asyncio.gather(*(feed.answer() for _ in range(10)))
        return [*answers, await feed.answer()]

    answers = asyncio.run(ask())
    assert (len(set(answers)), runtime.calls) == (1, 1)
    assert threading.main_thread().name not in runtime.threads
    assert json.loads(answers[0])["resident"][0]["id"] == "vae/x"


def test_stats_feed_samples_at_most_twice_per_second():
    runtime = Counting()
    feed = StatsFeed(runtime, patience_s=PATIENCE_S)

    async def ask() -> None:
        while runtime.calls < 3:
            await feed.answer()
            await asyncio.sleep(0.01)

    asyncio.run(ask())
    pauses = [later - before for before, later in pairwise(runtime.moments)]
    assert min(pauses) >= feeds.MAX_AGE_S, pauses


def test_stats_feed_answer_for_256_chips_takes_under_5_ms():
    feed = StatsFeed(Counting(tpu(256, platform="cpu")), patience_s=PATIENCE_S)
    assert len(json.loads(asyncio.run(feed.answer()))["chips"]) == 256
    begun = time.thread_time()
    asyncio.run(_many(feed, 100))
    each_ms = (time.thread_time() - begun) * 10
    print(f"\n  an answer costs the event loop {each_ms:.3f} ms")
    assert each_ms < 5


async def _many(feed: StatsFeed, count: int) -> None:
    for _ in range(count):
        await feed.answer()


def test_stats_feed_with_hanging_runtime_returns_old_stats_with_note():
    release = threading.Event()
    runtime = Counting()
    feed = StatsFeed(
        lambda: runtime() if runtime.calls == 0 else release.wait(PATIENCE_S) and runtime(), patience_s=0.5
    )

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


def test_stats_feed_slow_sample_does_not_delay_answers():
    """The numbers before are answered meanwhile, without a note; the new ones as soon as they are there."""
    release, runtime = threading.Event(), Counting()
    later = lambda: release.wait(PATIENCE_S) and {**runtime(), "chips": []}  # noqa: E731
    feed = StatsFeed(lambda: later() if runtime.calls else runtime(), patience_s=PATIENCE_S)

    async def follow() -> None:
        first = await feed.answer()
        await asyncio.sleep(feeds.MAX_AGE_S)
        answers = await asyncio.wait_for(asyncio.gather(*(feed.answer() for _ in range(10))), 60)
        assert set(answers) == {first} and json.loads(first)["notes"] == []
        release.set()
        while json.loads(await feed.answer())["chips"]:
            await asyncio.sleep(0.01)

    asyncio.run(follow())


def test_stats_feed_runtime_error_becomes_note():
    def broken() -> dict[str, Any]:
        raise KeyError("coords")

    answer = json.loads(asyncio.run(StatsFeed(broken, patience_s=PATIENCE_S).answer()))
    assert answer["notes"] == ["The runtime has no statistics: KeyError: 'coords'"]
    assert answer["resident"] == []


def test_stats_feed_serializes_nan_and_infinity_as_null():
    runtime = Counting(tpu(1, platform="cpu", running={"seconds_per_unit": float("nan"), "elapsed_s": float("inf")}))
    answer = asyncio.run(StatsFeed(runtime, patience_s=PATIENCE_S).answer())
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
            feed = StatsFeed(Counting(), patience_s=PATIENCE_S)
            routes.add_routes(table, request_unload=self._unload, feed=feed, free=self._free)
            app = web.Application()
            app.add_routes(table)
            async with test_utils.TestClient(test_utils.TestServer(app)) as client:
                answer = await client.request(method, path, data=body)
                return answer.status, await answer.json()

        return asyncio.run(go())


def test_stats_endpoint_returns_json_object():
    status, stats = Requests().send("GET", "/tpu/stats")
    assert status == 200
    assert {"platform", "message", "chips", "host", "resident", "running", "behind", "caches", "notes"} <= set(stats)


@pytest.mark.parametrize("body", [None, "", "{}", '{"ids": null}'])
def test_free_endpoint_without_ids_requests_comfyui_unload(body: str | None):
    requests = Requests()
    assert requests.send("POST", "/tpu/free", body) == (200, {"freed": "requested"})
    assert (requests.unloads, requests.freed) == (1, [])


def test_free_endpoint_with_ids_frees_components():
    requests = Requests()
    assert requests.send("POST", "/tpu/free", '{"ids": ["a", "b"]}') == (200, {"freed": ["a", "b"]})
    assert (requests.unloads, requests.freed) == (0, [("a", "b")])


def test_free_endpoint_cancelled_requests_leave_no_threads():
    """Freeing waits for a running stage, perhaps for minutes, and a page that was closed does not wait for it."""
    begun, released, freed = threading.Event(), threading.Event(), []

    def free(*, ids: tuple[str, ...]) -> None:
        begun.set()
        released.wait(PATIENCE_S)
        freed.extend(ids)

    async def go() -> None:
        table = web.RouteTableDef()
        routes.add_routes(
            table, request_unload=lambda: None, feed=StatsFeed(Counting(), patience_s=PATIENCE_S), free=free
        )
        app = web.Application()
        app.add_routes(table)
        async with test_utils.TestClient(test_utils.TestServer(app)) as client:
            first = asyncio.create_task(client.post("/tpu/free", json={"ids": ["first"]}))
            await asyncio.to_thread(begun.wait, PATIENCE_S)
            before = threading.active_count()
            others = [asyncio.create_task(client.post("/tpu/free", json={"ids": [f"{n}"]})) for n in range(50)]
            handled = client.server.handler
            while len(handled.connections) < 51:
                await asyncio.sleep(0.01)
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            while len(handled.connections) > 1:
                await asyncio.sleep(0.01)
            assert threading.active_count() <= before
            last = asyncio.create_task(client.post("/tpu/free", json={"ids": ["last"]}))
            while len(handled.connections) < 2:
                await asyncio.sleep(0.01)
            released.set()
            assert (await first).status == (await last).status == 200

    asyncio.run(go())
    assert freed[0] == "first" and "last" in freed


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
def test_free_endpoint_invalid_body_returns_400(body: str, sentence: str):
    requests = Requests()
    status, answer = requests.send("POST", "/tpu/free", body)
    assert status == 400 and sentence in answer["error"], answer
    assert (requests.unloads, requests.freed) == (0, [])


def test_upgrade_endpoint_converts_separate_pack_workflow():
    workflow = {"1": {"class_type": "Flux2TPUVAEDecoder", "inputs": {"height": 64, "latents": ["2", 0]}}}
    status, answer = Requests().send("POST", "/tpu/upgrade", json.dumps(workflow))
    assert status == 200 and len(answer["changes"]) == 2
    assert answer["workflow"]["1"]["inputs"] == {"latents": ["2", 0]}


def test_miniature_endpoint_returns_tiny_values_by_node():
    """Of nodes in a subgraph too, as the page names them; a LoRA is left out, and nodes of others stay."""
    workflow = {
        "7:1": {
            "class_type": "TPUModelLoader",
            "inputs": {"model_id": "Wan-AI/Wan2.2-I2V-A14B-Diffusers", "family": "Wan22I2V"},
        },
        "2": {"class_type": "TPULoraLoader", "inputs": {"model": ["7:1", 0], "lora_name": "a.safetensors"}},
        "3": {"class_type": "Wan22I2VImageEncoder", "inputs": {"model": ["2", 0], "image": ["4", 0], "height": 720}},
        "4": {"class_type": "LoadImage", "inputs": {"image": "wan_i2v_input.jpg"}},
        "5": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "model_id": "mine"}},
    }
    status, answer = Requests().send("POST", "/tpu/miniature", json.dumps(workflow))
    assert status == 200 and answer["without"] == ["2"], answer
    assert answer["values"]["7:1"] == {"model_id": "tiny/wan22i2v"}
    assert answer["values"]["3"]["height"] == 80 and answer["values"]["4"] == {"image": "wan_i2v_shapes.png"}
    assert "5" not in answer["values"]
    many = {str(number): {"class_type": "TPULoraLoader", "inputs": {}} for number in range(5001)}
    for body in ([], {"a": 1}, {"a": {"class_type": "b"}}, many):
        status, answer = Requests().send("POST", "/tpu/miniature", json.dumps(body))
        assert status == 400 and answer["error"].startswith(
            ("The body is not a workflow", "The workflow has 5001 nodes")
        ), answer


@pytest.mark.parametrize("body", ["{}", "[]", "3", '"x"', "null", '{"nodes": [], "links": []}'])
def test_upgrade_endpoint_other_document_returns_no_changes(body: str):
    assert Requests().send("POST", "/tpu/upgrade", body) == (200, {"changes": []})


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "The body is not a workflow in JSON"),
        ("{", "The body is not a workflow in JSON"),
        ("\xff", "The body is not a workflow in JSON"),
        ("[" * 100_000, "nested more than"),
        (f'{{"nodes": [{"[" * 10_000}{"]" * 10_000}]}}', "nested more than"),
        ('"' + "x" * 2**24 + '"', "The body is longer than 16 MiB, which no workflow is."),
    ],
    ids=["empty", "half", "bytes", "open", "deep", "long"],
)
@pytest.mark.parametrize("path", ["/tpu/upgrade", "/tpu/offer", "/tpu/free"])
def test_endpoint_hostile_body_returns_short_error(path: str, body: str, sentence: str):
    status, answer = Requests().send("POST", path, body)
    if path == "/tpu/free" and not body:
        assert status == 200
    else:
        assert status == 400 and (path == "/tpu/free" or sentence in answer["error"]), answer
        assert len(answer["error"]) < 500


def test_monitor_import_starts_no_thread_and_no_device():
    program = """
        import sys, threading
        import comfyui_tpu
        from comfyui_tpu.cli import monitor
        from comfyui_tpu.nodes.comfyui import routes
        from comfyui_tpu.tpu_runtime.monitor import host_stats, stats_feed
        from aiohttp import web
        routes.add_routes(web.RouteTableDef(), request_unload=lambda: None)
        bridge = sys.modules.get("jax._src.xla_bridge")
        print(threading.active_count(), "libtpu" in sys.modules, bool(getattr(bridge, "_backends", {})))
    """
    lines = [line.strip() for line in program.strip().splitlines()]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["1", "False", "False"], done.stdout + done.stderr


# --- what the page is made of -----------------------------------------------------------------------------------------


def test_web_js_files_are_extensions_without_exports():
    """ComfyUI runs every .js under the folder; a helper among them would run on its own."""
    found = sorted((PACK / "web").rglob("*.js"))
    names = "commands monitor node_search node_widgets notes provenance server_messages templates upgrade whats_new"
    assert [path.stem for path in found] == names.split()
    assert all("app.registerExtension(" in path.read_text() and "export " not in path.read_text() for path in found)


@pytest.mark.parametrize("path", [*(PACK / "web").rglob("*.js"), *(PACK / "web").rglob("*.mjs")], ids=lambda p: p.name)
def test_web_modules_contain_no_html_parsing(path: Path):
    source = path.read_text()
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert forbidden not in source, f"{path.name} uses {forbidden}"
