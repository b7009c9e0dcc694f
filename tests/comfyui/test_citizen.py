"""Examples, memory, cancelling, previews and caches in a real ComfyUI server, on eight simulated chips and tiny
checkpoints.
"""

import functools
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from comfyui_tpu.tests.nodes import examples
from comfyui_tpu.tests.nodes.test_examples import FEW_STEPS
from comfyui_tpu.tests.support.citizen import BUDGET_MIB, CITIZEN_PACK, EXAMPLES, Listener, digest, example, workflow
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui, saved_video
from comfyui_tpu.tests.support.patience import slower, until
from PIL import Image, ImageStat

pytestmark = needs_comfyui

MIB = 2**20
ASK_AGAIN_S = 2


def fullest_chip_bytes(server: Server) -> int:
    """Bytes on the chip that holds most."""
    return max((chip["hbm_used"] for chip in server.get("/citizen/stats")["chips"]), default=0)


def resident(server: Server) -> list[dict]:
    return server.get("/citizen/stats")["resident"]


def forget(server: Server) -> None:
    """Manager's second button: no models, no kept outputs. ComfyUI does it between prompts, so wait until it has."""
    ask_until(server, WAYS["Manager's second button"], lambda: not resident(server))


def ask_until(server: Server, ask: Callable[[Server], object], condition: Callable[[], bool]) -> None:
    """Ask for an unload until there is one and ComfyUI owes no other.

    ComfyUI misses a flag that is set after it has looked at its flags and before it waits for the next prompt, while it
    collects garbage. A prompt that is queued before ComfyUI has looked runs first, and is unloaded right behind.
    """
    ask(server)
    asked_s = time.monotonic()

    def is_done() -> bool:
        nonlocal asked_s
        if condition() and not server.get("/citizen/flags")["pending"]:
            return True
        if time.monotonic() - asked_s > ASK_AGAIN_S:
            ask(server)
            asked_s = time.monotonic()
        return False

    until(is_done, server.log_tail)


def hold(server: Server, where: str, after: int = 0) -> None:
    """Lets the next run wait at a unit of its work, after so many others, until `release`."""
    server.post("/citizen/faults", {"hold": where, "after": after})


def wait_until_held(server: Server) -> None:
    until(lambda: is_held(server), server.log_tail)


def is_held(server: Server) -> bool:
    return server.get("/citizen/held")["held"]


def release(server: Server) -> None:
    server.get("/citizen/release")


@pytest.fixture(scope="module")
def start(start_comfyui: Callable[..., Server]) -> Callable[..., Server]:
    """Starts servers that have the neighbour pack; see `start_comfyui`."""
    return functools.partial(start_comfyui, packs={"citizen": CITIZEN_PACK})


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start(arguments=("--preview-method", "auto"))


@pytest.fixture(autouse=True)
def release_server(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        found = request.getfixturevalue("server")
        if found.is_running:
            release(found)
            found.post("/citizen/budget", {"gib": ""})


# --- previews, progress -----------------------------------------------------------------------------------------------


# Recipes of few steps run headless.
RUNNABLE, PIPELINES = (
    [path.stem for path in paths if not path.stem.startswith(FEW_STEPS)] for paths in (examples.API, examples.PIPELINES)
)


def check_result(server: Server, graph: dict, prefix: str) -> None:
    """That the picture, or the video with its rate, is there."""
    if any(node["class_type"] == "SaveImage" for node in graph.values()):
        (image,) = (server.base / "output").glob(f"{prefix}_0*.png")
        assert Image.open(image).size == (112, 80)
    else:
        (fps,) = (node["inputs"]["fps"] for node in graph.values() if isinstance(node["inputs"].get("fps"), int))
        (frames,) = {node["inputs"]["num_frames"] for node in graph.values() if "num_frames" in node["inputs"]}
        assert saved_video(server, f"{prefix}_0") == (frames, 112, 80, fps)


# Those of which the fourteen prompts over seven families run the family too.
SLOWER = (
    "qwen_image_2512",
    "qwen_image_edit_2511",
    "cogvideox_t2v_768p",
    "hunyuan15_i2v_720p",
    "hunyuan15_t2v_720p",
    "z_image_turbo",
    "wan22_i2v_720p",
)


# The first template has the nodes and the miniature of Wan 2.1's, and `tests/browser/test_examples.py` runs it.
@pytest.mark.parametrize("stem", slower(RUNNABLE, *SLOWER, "try_it_now"))
def test_example_run_returns_result_progress_text_and_previews(server: Server, stem: str):
    """On the built-in checkpoints at their sizes; the picture came with the pack."""
    forget(server)  # what an earlier test loaded is not loaded again
    graph = example(stem, is_random=False, num_inference_steps=3, seed=11, filename_prefix=stem)
    with Listener(server) as client:
        entry = client.finish(client.queue(graph))
        assert entry["status"]["status_str"] == "success", server.log_tail()
    check_result(server, graph, stem)
    steps = [(data["value"], data["max"]) for data in client.values("progress") if data["max"] == 3]
    assert (3, 3) in steps, client.values("progress")
    assert any(text.startswith("Denoising") for text in client.texts()), client.texts()
    assert any(text.startswith("Loading") for text in client.texts()), client.texts()
    took = [text for text in client.texts() if text.startswith("Took")]
    assert re.fullmatch(r"Took \d+\.\d\u00a0s(: .+)?", client.texts()[-1]), client.texts()
    # What is over in less than a twentieth of a second is not listed: loading, on a fast machine.
    assert any(re.search(r"(loading|compiling|running) \d+\.\d\u00a0s", text) for text in took), took
    pictures = client.pictures()
    assert pictures, f"no preview of {stem}\n{server.log_tail()}"
    # The latents of 112x80; FLUX.2's show their 2x2 pixels. ComfyUI may enlarge, keeping the shape.
    wanted = (14, 10)
    assert all(abs(picture.width * wanted[1] - picture.height * wanted[0]) <= 14 * 2 for picture in pictures), [
        picture.size for picture in pictures
    ]
    spread = [max(high - low for low, high in picture.convert("RGB").getextrema()) for picture in pictures]
    assert max(spread) > 20, f"a preview of one colour: {spread}"
    if stem == "wan21_t2v_720p":  # trained: "a red circle moves right on blue", in the colours that ComfyUI expects
        red, _, blue = ImageStat.Stat(pictures[-1].convert("RGB")).mean
        assert blue > red + 40, (red, blue)


@pytest.mark.parametrize("stem", slower(PIPELINES, *SLOWER))
def test_pipeline_example_run_returns_result(server: Server, stem: str):
    """Pipeline nodes have no API form of their own: theirs is made from the page's. Its checkpoint is the stages'."""
    prefix = f"{stem}_pipeline"
    graph = example(stem, is_random=False, is_pipeline=True, filename_prefix=prefix)
    server.run(graph)
    check_result(server, graph, prefix)


def test_cached_outputs_hold_no_device_memory(server: Server):
    server.run(workflow("Wan22I2V", seed=12, num_frames=1))
    found = server.get("/citizen/walk")
    assert found["executors"] == 1 and found["seen"] > 20 and found["wrong"] == []


# --- unloading --------------------------------------------------------------------------------------------------------

WAYS = {
    "the menu and Manager's button": lambda server: server.post("/free", {"unload_models": True}),
    "Manager's second button": lambda server: server.post("/free", {"unload_models": True, "free_memory": True}),
    "POST /tpu/free": lambda server: server.post("/tpu/free", None),
    "the official call": lambda server: server.get("/citizen/unload"),
    "TPUFreeMemory": lambda server: server.run(
        {
            "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
            "2": {"class_type": "TPUFreeMemory", "inputs": {"anything": ["1", 0]}},
            "digest": {"class_type": "CitizenDigest", "inputs": {"image": ["2", 0]}},
        }
    ),
}


@pytest.mark.parametrize(
    "way", slower(WAYS, "the menu and Manager's button", "Manager's second button", "TPUFreeMemory")
)
def test_unload_frees_memory_and_next_run_gives_same_result(server: Server, way: str):
    forget(server)
    before = digest(server.run(workflow("Wan21", seed=21)))
    peak = fullest_chip_bytes(server)
    assert peak > 0 and resident(server)
    ask_until(server, WAYS[way], lambda: fullest_chip_bytes(server) <= 0.01 * peak and resident(server) == [])
    forget(server)
    assert digest(server.run(workflow("Wan21", seed=21))) == before


def test_concurrent_unloads_during_stage_all_finish(server: Server):
    graph = workflow("Wan21", seed=22)
    hold(server, "step")
    prompt_id = server.queue(graph)["prompt_id"]
    wait_until_held(server)
    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.get, "/citizen/unload") for _ in range(3)]
        until(lambda: server.get("/citizen/unloading")["count"] == 3)
        release(server)
        for answer in answers:
            answer.result()
    assert server.finish(prompt_id)["status"]["status_str"] == "success", server.log_tail()
    server.run({**graph, "2": {**graph["2"], "inputs": {**graph["2"]["inputs"], "seed": 23}}})


def test_unload_on_event_loop_does_not_wait_for_running_stage(server: Server):
    """Other packs call it there; whoever waited would freeze the page until the stage ends."""
    hold(server, "step")
    prompt_id = server.queue(workflow("Wan21", seed=24))["prompt_id"]
    wait_until_held(server)
    server.get("/citizen/unload_here")
    assert is_held(server), "the page was frozen until the stage ended"
    release(server)
    assert server.finish(prompt_id)["status"]["status_str"] == "success", server.log_tail()
    until(lambda: fullest_chip_bytes(server) == 0 and resident(server) == [], server.log_tail)


# --- cancelling -------------------------------------------------------------------------------------------------------


# What is interrupted: where, in units of work, the cancel comes; the frames; the bar (its node and length), and how far
# it may come.
CANCELS = {
    "load": {"after": 3, "num_frames": 5},
    "step": {"after": 2, "num_frames": 1, "bar": ("2", 8), "at_most": 3},
    # Four chunks: three would be as long as the bar of its weights, 3 MiB.
    "decode": {"after": 1, "num_frames": 13, "bar": ("3", 4), "at_most": 2},
}


@pytest.mark.parametrize("where", CANCELS)
def test_cancel_stops_within_one_unit_and_next_runs_agree(server: Server, where: str):
    cancel = CANCELS[where]
    steps = 8 if where == "step" else 4
    seed = 100 + sum(map(ord, where))
    graph = workflow("Wan21", num_frames=cancel["num_frames"], num_inference_steps=steps, seed=seed)
    server.get("/citizen/unload")
    hold(server, where, cancel["after"])
    with Listener(server) as client:
        prompt_id = client.queue(graph)
        wait_until_held(server)
        server.post("/interrupt", None)
        release(server)
        entry = client.finish(prompt_id)
    assert any(name == "execution_interrupted" for name, _ in entry["status"]["messages"]), entry["status"]
    if "bar" in cancel:
        bars = {(data["node"], data["max"]): data["value"] for data in client.values("progress")}
        assert bars[cancel["bar"]] <= cancel["at_most"], bars
    after = digest(server.run(graph))
    forget(server)
    assert digest(server.run(graph)) == after


# --- out of memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", slower(("load", "step", "decode"), "load", "decode"))
def test_out_of_memory_error_gives_advice_and_frees_memory(server: Server, where: str):
    server.get("/citizen/unload")
    graph = workflow("Wan21", seed=sum(map(ord, where)))
    server.post("/citizen/faults", {"fail": where})
    entry = server.finish(server.queue(graph)["prompt_id"])
    (failure,) = [data for name, data in entry["status"]["messages"] if name == "execution_error"]
    assert "OutOfMemory" in failure["exception_type"], failure["exception_type"]
    message = failure["exception_message"]
    assert "Wan 2.1 T2V 14B ran out of TPU memory in stage" in message and "allocating 123456789 bytes" in message
    assert "To use less: " in message and "comfyui-tpu plan --model wan2.1-t2v-14b" in message
    if where == "step":
        assert "num_frames 1 instead of 5 (50 % less next to the weights)" in message, message
    until(lambda: fullest_chip_bytes(server) == 0 and resident(server) == [], server.log_tail)
    assert "trying once more" in server.log_tail()
    release(server)
    server.run(graph)


# --- many prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.recorded)])
def test_repeated_prompts_leak_no_memory_and_compile_nothing(server: Server, count: int):
    graph = workflow("Wan21", num_inference_steps=1, num_frames=1)
    sampler = next(node for node in graph.values() if node["class_type"] == "Wan21TPUSampler")
    encoder = next(node for node in graph.values() if node["class_type"] == "Wan21TextEncoder")

    def run(number: int) -> None:
        sampler["inputs"]["seed"] = number
        encoder["inputs"]["prompt"] = f"a house, number {number % 4}"
        server.run(graph)

    for number in range(count // 3):
        run(number)
    living, memory = server.get("/citizen/living"), owned_memory(server)
    compiled, counts = server.get("/citizen/compilations")["backend"], server.get("/tpu/stats")["counts"]
    for number in range(count // 3, count):
        run(number)
    # ComfyUI may hold some of the last prompt a moment longer.
    until(lambda: server.get("/citizen/living") == living, lambda: f"{living}, {server.get('/citizen/living')}")
    grown = owned_memory(server) / memory
    assert grown < 1.05, server.log_tail()
    assert server.get("/citizen/compilations")["backend"] == compiled
    now = server.get("/tpu/stats")["counts"]
    assert (now["compile"], now["load"]) == (counts["compile"], counts["load"])


def owned_memory(server: Server) -> int:
    """Bytes that the server has taken for itself, in RAM or swapped out.

    Its mapped files are not among them: the kernel drops their pages and reads them again as other work on the machine
    allows.
    """
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    kib = dict(re.findall(r"^(RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE))
    return (int(kib["RssAnon"]) + int(kib["VmSwap"])) * 1024


# --- a budget ---------------------------------------------------------------------------------------------------------


TWO = ("Wan21", "HunyuanVideo15")


# `tests/engine/test_memory.py` has what is evicted and when, `tests/models/wan/test_wan22_i2v.py` a real generation
# within a budget, and the next test here a budget in a server.
@pytest.mark.recorded
@pytest.mark.parametrize("families", [TWO, tuple(EXAMPLES)], ids=len)
def test_alternating_families_stay_within_memory_budget(server: Server, families: Sequence[str]):
    """The neediest program, HunyuanVideo's step, fits with its own weights and no other family's beside it."""
    server.get("/citizen/unload")
    server.post("/citizen/budget", {"gib": BUDGET_MIB / 1024})
    start, samples, done = len(server.log.read_text()), [], threading.Event()

    def sample() -> None:
        while not done.wait(0.25):
            samples.extend(chip["hbm_used"] for chip in server.get("/tpu/stats")["chips"])

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        for number, family in enumerate(2 * families):
            server.run(workflow(family, seed=number))
    finally:
        done.set()
        watcher.join()
    assert samples and 0 < max(samples) <= BUDGET_MIB * MIB
    lines = [line for line in server.log.read_text()[start:].splitlines() if "is unloaded from the devices" in line]
    left = {re.search(r"of (tiny/[\w-]+) is unloaded", line).group(1) for line in lines}
    assert len(left) >= len(families) // 2 and len(lines) > len(families), lines


def test_model_over_memory_budget_is_refused_before_loading(server: Server):
    server.get("/citizen/unload")
    server.post("/citizen/budget", {"gib": 0.0001})
    assert resident(server) == []
    before = server.get("/tpu/stats")["counts"]["load"]
    entry = server.finish(server.queue(workflow("Wan21", seed=99))["prompt_id"])
    (failure,) = [data for name, data in entry["status"]["messages"] if name == "execution_error"]
    assert "MiB for its weights and" in failure["exception_message"], failure["exception_message"]
    assert resident(server) == []
    assert server.get("/tpu/stats")["counts"]["load"] == before


# --- warm starts, broken caches ---------------------------------------------------------------------------------------


def test_second_process_compiles_and_encodes_nothing(start: Callable[..., Server], server: Server):
    first = digest(server.run(workflow("Wan21", seed=51)))
    second = start()
    assert digest(second.run(workflow("Wan21", seed=51))) == first
    assert second.get("/citizen/compilations")["backend"] == 0
    assert second.get("/tpu/stats")["counts"] == {"load": 2, "merge": 0, "encode": 0, "compile": 0}
    second.stop()


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path) -> Path:
    """A copy of the warm cache with its manifests, to be broken; without files that other workers are writing."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name == "plans" or (name.startswith(".") and not name.endswith(".json"))]

    own = shutil.copytree(cache, tmp_path / "cache", ignore=left_out, symlinks=True)
    for link in (path for path in own.rglob("*") if path.is_symlink()):
        target = own / link.resolve().relative_to(cache.resolve())
        link.unlink()
        link.symlink_to(target)
    return own


@pytest.fixture(scope="module")
def right(server: Server) -> tuple[dict, str]:
    """A prompt and the digest of its picture."""
    graph = workflow("Wan21", seed=61)
    return graph, digest(server.run(graph))


@pytest.mark.recorded
def test_damaged_cache_entries_and_killed_writer_are_recovered(
    start: Callable[..., Server], right: tuple[dict, str], own_cache: Path
):
    for kind in ("xla", "prompts"):
        for number, path in enumerate(sorted((own_cache / kind).glob("*.bin"))):
            content = path.read_bytes()  # cut off, changed in the middle, emptied
            path.write_bytes((content[: len(content) // 2], content[:900] + b"?" + content[901:], b"")[number % 3])
    broken = start(cache=own_cache)
    hold(broken, "write")
    broken.queue(right[0])
    wait_until_held(broken)
    broken.kill()
    assert list(own_cache.glob("*/.*-*")), "nothing was left half written"
    broken.start()
    assert digest(broken.run(right[0])) == right[1]
    assert "is dropped: it is damaged. It is recreated." in broken.log.read_text()
    broken.stop()


@pytest.mark.recorded
def test_unwritable_cache_folder_falls_back_to_temporary_folder(
    start: Callable[..., Server], right: tuple[dict, str], own_cache: Path, tmp_path: Path
):
    """No folder can be made where a file lies: not even root writes there."""
    (tmp_path / "file").write_text("")
    shutil.move(own_cache, tmp_path / f"comfyui-tpu-{os.getuid()}").chmod(0o700)
    wanted = tmp_path / "file" / "cache"
    blocked = start(cache=wanted, environment={"TMPDIR": str(tmp_path)})
    assert digest(blocked.run(right[0])) == right[1]
    assert f"the cache folder {wanted} cannot be written" in blocked.log.read_text()
    blocked.stop()


def test_full_disk_skips_cache_write_and_run_succeeds(
    start: Callable[..., Server], right: tuple[dict, str], own_cache: Path
):
    """The kernel refuses to let the process's files grow, as a full disk does."""
    shutil.rmtree(own_cache / "xla")
    full = start(cache=own_cache)
    largest = max(path.stat().st_size for path in full.base.rglob("*") if path.is_file())
    limit = max(largest + 2**16, 2**17)
    resource.prlimit(full.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    assert digest(full.run(right[0])) == right[1]
    assert re.search(r"the cache entry .*\.bin was not written \(.*File too large", full.log.read_text())
    manifests = {folder.with_name(f".{folder.name}.json") for folder in own_cache.glob("*/*") if folder.is_dir()}
    assert not set(own_cache.glob("*/.*-*")) - manifests, "half an entry was left"
    full.stop()
