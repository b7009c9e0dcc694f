"""A real ComfyUI on a machine that refuses, halts and computes nonsense: the sentence in the node, what ran in its
place, the right frames.

The machine is a layer in the place of PJRT, in the server's process.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comfyui_tpu.tests.machine import fake_pjrt
from comfyui_tpu.tests.machine.fake_pjrt import Fault, Layer
from comfyui_tpu.tests.support.citizen import Listener
from comfyui_tpu.tests.support.comfyui_server import Server, needs_comfyui, prepare, tiny_workflow
from comfyui_tpu.tests.support.patience import until
from PIL import Image

pytestmark = [needs_comfyui, pytest.mark.slow]

ASYNC, VMEM, SPARSE = (
    "xla_tpu_enable_async_all_to_all", "xla_tpu_scoped_vmem_limit_kib",
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
)  # fmt: skip
OPTIONS = {ASYNC: "true", VMEM: "65536", SPARSE: "true"}
NO_OPTION = f"INVALID_ARGUMENT: No such compile option: '{ASYNC}'"
# As libtpu 0.0.42.1 says it of a kernel's scratch.
NO_ROOM = "RESOURCE_EXHAUSTED: Allocation (size=2) would exceed memory (size=1) :: #a [space=vmem] :: attention.1"
HALT = "INTERNAL: Core halted unexpectedly: TPU program continuator has halted: HLO: %attention.3"
HOST = "RESOURCE_EXHAUSTED: ioctl failed: Cannot allocate memory: VFIO_IOMMU_MAP_DMA"
WEIGHT = r"float32\["  # what is put while a text encoder is loaded; tokens are whole numbers
ATTENTION = r'["/]attention(_with_rerun)?/while'  # not the folder

Starts = Callable[..., Server]


def start_server(layer: Layer, base: Path, **environment: str) -> Server:
    """A ComfyUI on the machine of a layer, with a cache of its own."""
    # Quicker with one chip.
    flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    server = prepare(base, environment={"XLA_FLAGS": flags, **environment})
    server.environment = {**server.environment, **fake_pjrt.environment(layer, base / "stubs")}
    try:
        server.start()
    except BaseException:
        server.stop()
        raise
    return server


@pytest.fixture
def on_machine(tmp_path: Path) -> Iterator[Starts]:
    """Starts one for a test."""
    started: list[Server] = []

    def start(layer: Layer, **environment: str) -> Server:
        started.append(start_server(layer, tmp_path / f"server{len(started)}", **environment))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@dataclass(frozen=True)
class Ran:
    """A server after one prompt, its entry in the history, and what stood on its nodes."""

    server: Server
    entry: dict[str, Any]
    texts: list[str]


@pytest.fixture(scope="module")
def rungs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """A machine that refuses an option and a kernel, and computes nonsense with transfers beside computation."""
    layer = Layer(
        pallas=True, options=OPTIONS, limit_bytes=2**31, reserved_bytes=2**27,
        faults=[
            Fault(at="compile", option=ASYNC, says=NO_OPTION),
            Fault(at="compile", holds=ATTENTION, says=NO_ROOM),
            Fault(at="run", option=SPARSE, does="nonsense"),
        ],
    )  # fmt: skip
    server = start_server(layer, tmp_path_factory.mktemp("rungs"))
    try:
        yield Ran(server, *run_prompt(server, "rungs"))
    finally:
        server.stop()


def workflow(prefix: str) -> dict[str, Any]:
    """The tiny workflow of one frame, saved as a picture: a video's codec makes much of a rounding."""
    graph = tiny_workflow(prefix, num_frames=1)
    for name in [name for name, node in graph.items() if node["class_type"] in ("SaveVideo", "CreateVideo")]:
        del graph[name]
    (decoder,) = (name for name, node in graph.items() if node["class_type"].endswith("TPUVAEDecoder"))
    graph["saved"] = {"class_type": "SaveImage", "inputs": {"images": [decoder, 0], "filename_prefix": prefix}}
    return graph


def frames(folder: Path, prefix: str) -> np.ndarray:
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in sorted(folder.glob(f"{prefix}*.png"))]
    assert len(pictures) == 1
    return np.stack(pictures).astype(int)


def run_prompt(server: Server, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """The history entry of a prompt, and what stood on its nodes."""
    with Listener(server) as listener:
        entry = listener.finish(listener.queue(workflow(prefix)))
        return entry, listener.texts()


def machine(server: Server) -> dict[str, Any]:
    (found,) = json.loads((server.cache / "machine.json").read_text()).values()
    return found


def compiled_options(server: Server) -> list[list[str]]:
    """The options of each denoising step that was compiled, in order."""
    return [json.loads(line) for line in re.findall(r"^FAKE_PJRT options (\[.+\])$", server.log.read_text(), re.M)]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The frames of a machine without faults: the same workflow, without ComfyUI."""
    from comfyui_tpu.nodes.declare import Folders
    from comfyui_tpu.nodes.headless.runner import TerminalContext, run_workflow

    output = tmp_path_factory.mktemp("right")
    folders = Folders(models=(), loras=(), input=output, output=output, workflow=output)
    run_workflow(workflow("right"), TerminalContext(folders))
    return frames(output, "right")


# Pictures have 8 bits.
ONE_STEP = 1


def assert_right(found: np.ndarray, right: np.ndarray) -> None:
    """To the step of a picture: ComfyUI cuts off what is between two, the headless runner rounds it."""
    assert found.shape == right.shape and np.ptp(right) > 50
    steps = np.abs(found - right)
    assert steps.max() <= ONE_STEP


@pytest.mark.recorded
def test_fallbacks_handle_refused_options_kernels_and_nonfinite_values(rungs: Ran, right: np.ndarray):
    """Four rungs in one prompt; the next prompt of another process takes none of them again."""
    server, entry, texts = rungs.server, rungs.entry, rungs.texts
    assert entry["status"]["status_str"] == "success", f"{entry['status']}\n{server.log_tail()}"
    said = [text for text in texts if "this machine" in text or "once more" in text]
    assert ASYNC in said[0] and "is compiled without" in said[0]
    assert "attention" in said[1] and "uses smaller tiles" in said[1]
    assert "attention" in said[2] and "uses XLA instead" in said[2]
    assert said[3] == "The values are not finite: trying once more without overlapped transfers."
    assert len(said) == 4
    assert_right(frames(server.base / "output", "rungs"), right)
    found = machine(server)
    assert found["kernels_off"] == found["kernels_small"] == ["attention"]
    assert any(SPARSE.startswith(one) for one in found["options_off"]) and ASYNC in found["options_off"]
    # What ran in their place: steps with the option, without, on smaller tiles, by XLA, and without overlap.
    assert compiled_options(server)[0] == list(OPTIONS) and compiled_options(server)[-1] == [VMEM]
    stats = server.get("/tpu/stats")
    assert stats["notes"] == found["sentences"]
    (chip,) = stats["chips"]
    assert (chip["hbm_limit"], chip["hbm_reserved"], chip["hbm_reserved_peak"]) == (2**31, 2**27, 2**27)
    assert 0 < chip["hbm_used"] <= chip["hbm_peak"] < 2**31
    server.restart()
    entry, texts = run_prompt(server, "again")
    assert entry["status"]["status_str"] == "success"
    assert not [text for text in texts if "this machine" in text or "once more" in text]
    assert_right(frames(server.base / "output", "again"), right)


@pytest.mark.recorded
def test_panel_shows_active_fallbacks(rungs: Ran):
    from comfyui_tpu.tests.browser.page import BROWSER, launch_browser
    from comfyui_tpu.tests.browser.test_monitor import PANEL, Tab, playwright

    if BROWSER is None:
        pytest.skip("no chromium on this machine")
    rungs.server.post("/settings", {"Comfy.TutorialCompleted": True, "Comfy.InstalledVersion": "1.0.0"})
    with launch_browser() as browser:
        tab = Tab(browser.new_page(viewport={"width": 1280, "height": 1000}), rungs.server)
        tab.load()
        tab.open()
        said, sentences = tab.page.locator(f"{PANEL} .tpu-notes li"), machine(rungs.server)["sentences"]
        playwright.expect(said).to_have_text(sentences)
        assert len(sentences) == 4 and said.last.is_visible()
        tab.screenshot("monitor-ladder")
        assert tab.faults == []


def test_halting_kernel_is_disabled_after_process_restart(on_machine: Starts, right: np.ndarray):
    layer = Layer(pallas=True, faults=[Fault(at="run", holds=ATTENTION, does="halt", says=HALT)])
    server = on_machine(layer, COMFYUI_TPU_RESTARTS="1")
    assert server.process is not None
    before = server.process.pid, server.log.read_text().count("To see the GUI go to")
    queued = server.queue(workflow("halted"))["prompt_id"]

    def ended() -> bool:
        return server.log.read_text().count("To see the GUI go to") > before[1]

    until(ended, server.log_tail)
    assert queued and "halted the chips" in server.log.read_text()
    assert "restart it, unless it restarts by itself" in server.log.read_text()
    assert server.is_running and server.process.pid == before[0]
    assert machine(server)["kernels_off"] == ["attention"]
    entry, _ = run_prompt(server, "after")
    assert entry["status"]["status_str"] == "success", f"{entry['status']}\n{server.log_tail()}"
    assert_right(frames(server.base / "output", "after"), right)
    assert "halted the chips" in server.get("/tpu/stats")["notes"][0]


@pytest.mark.recorded
def test_host_memory_error_gives_advice_and_chip_memory_error_retries(on_machine: Starts, right: np.ndarray):
    """The first is the user's to mend; of the chips everything is unloaded, and it is tried once more."""
    layer = Layer(faults=[Fault(at="run", says=HOST, times=1), Fault(at="run", says=fake_pjrt.NO_ROOM, times=1)])
    server = on_machine(layer)
    entry, _ = run_prompt(server, "host")
    assert entry["status"]["status_str"] == "error"
    assert "The host could not map memory" in str(entry["status"]) and "ulimit -l unlimited" in str(entry["status"])
    entry, texts = run_prompt(server, "chips")
    assert entry["status"]["status_str"] == "success", f"{entry['status']}\n{server.log_tail()}"
    assert any(text.startswith("Out of memory: unloaded ") for text in texts)
    assert_right(frames(server.base / "output", "chips"), right)


# `tests/machine/test_ladder.py` has the same faults in an engine, and the halt above what ComfyUI's own node shows.
@pytest.mark.recorded
def test_out_of_memory_during_weight_transfer_retries_loading(on_machine: Starts, right: np.ndarray):
    """What was on the chips so far leaves, and loading begins again; of the host it is said what to allow."""
    full = Fault(at="put", holds=WEIGHT, says=fake_pjrt.NO_ROOM, after=5, times=1)
    unmapped = Fault(at="put", holds=WEIGHT, says=HOST, after=5 + 30, times=1)  # of the second loading
    server = on_machine(Layer(faults=[full, unmapped]))
    entry, texts = run_prompt(server, "put")
    assert any(text.startswith("Out of memory: unloaded ") for text in texts)
    assert entry["status"]["status_str"] == "error" and "The host could not map memory" in str(entry["status"])
    entry, texts = run_prompt(server, "after")
    assert entry["status"]["status_str"] == "success", f"{entry['status']}\n{server.log_tail()}"
    assert_right(frames(server.base / "output", "after"), right)


@pytest.mark.recorded
def test_out_of_memory_loading_cached_program_keeps_cache_entry(on_machine: Starts, right: np.ndarray):
    layer = Layer(faults=[Fault(at="load", says=fake_pjrt.NO_ROOM, times=1)])
    server = on_machine(layer)
    run_prompt(server, "stored")
    entries = {path.name for path in (server.cache / "xla").rglob("*") if path.is_file()}
    server.restart()
    entry, _ = run_prompt(server, "loaded")
    assert entry["status"]["status_str"] == "success", f"{entry['status']}\n{server.log_tail()}"
    assert entries <= {path.name for path in (server.cache / "xla").rglob("*") if path.is_file()}
    assert_right(frames(server.base / "output", "loaded"), right)
