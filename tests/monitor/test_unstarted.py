"""Chips that nobody has started, or that another process holds: read from a fake bus and a fake metrics service."""

import asyncio
import glob
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from comfyui_tpu.tests.support.messages import Expected, assert_message
from comfyui_tpu.tests.support.patience import until
from comfyui_tpu.tpu_runtime.engine import lifecycle
from comfyui_tpu.tpu_runtime.machine import pci
from comfyui_tpu.tpu_runtime.monitor import metrics_service, snapshot
from comfyui_tpu.tpu_runtime.monitor.host_stats import Sampler
from comfyui_tpu.tpu_runtime.monitor.idle import NO_TPU, IdleStats
from comfyui_tpu.tpu_runtime.monitor.stats_feed import StatsFeed

tpu_info = pytest.importorskip("tpu_info.device", reason="no tpu-info: it is for Linux")
fake_tpu = pytest.importorskip("comfyui_tpu.tests.support.fake_tpu")

from comfyui_tpu.tests.support.fake_tpu import GIB, closed, plug, process, serving, silent  # noqa: E402


def stats(root: Path, port: int, deadline_s: float = 10.0) -> dict[str, Any]:
    """What the page would get, of a runtime without an engine."""
    return Sampler(unstarted=IdleStats(root, [port], deadline_s=deadline_s)).complete(dict(NOTHING_STARTED))


NOTHING_STARTED = {"platform": None, "message": snapshot.NOT_STARTED, "chips": [], "host": {"cpu_percent": 1.0}}


@pytest.mark.parametrize("num_chips", [1, 4, 8])
@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p", "v6e", "TPU7x"])
def test_detect_chips_names_and_counts_chips_on_pci_bus(
    tmp_path: Path, kind: str, num_chips: int, monkeypatch: pytest.MonkeyPatch
):
    found = pci.detect_chips(plug(tmp_path, kind, num_chips))
    assert str(found) == f"{num_chips} x {kind}"
    assert found.num_devices == num_chips * (2 if kind == "TPU7x" else 1)
    assert len(pci.find_device_files(tmp_path)) == num_chips
    # tpu-info itself, whose count is of PCI functions, says the same of devices it can read.
    (tmp_path / "sys/bus/pci/devices/0000:00:09.0").rmdir()
    real = glob.glob
    monkeypatch.setattr(glob, "glob", lambda pattern: real(f"{tmp_path}{pattern}"))
    theirs, count = tpu_info.get_local_chips()
    assert (theirs.value.hbm_gib * GIB, count) == (found.hbm_bytes_per_chip, found.num_devices)


def test_idle_stats_without_chips_report_no_tpu(tmp_path: Path):
    for root in (tmp_path / "empty", plug(tmp_path / "network", "v6e", 0)):
        assert pci.detect_chips(root) is None
        assert stats(root, closed())["message"] == NO_TPU


@pytest.mark.parametrize(
    ("chips", "files", "given", "platforms"),
    [
        (0, False, {}, "cpu"), (0, False, {"JAX_PLATFORMS": "tpu,cpu"}, "tpu,cpu"), (8, True, {}, None),
        (8, False, {}, None),
    ],
)  # fmt: skip
def test_configure_without_tpu_selects_cpu_only_without_chips(
    chips: int,
    files: bool,
    given: dict[str, str],
    platforms: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    pci.configure_without_tpu(plug(tmp_path, "v6e", chips, files=files))
    assert environment.get("JAX_PLATFORMS") == platforms
    assert environment.get("TPU_SKIP_MDS_QUERY") == (None if chips else "1")


def test_configure_without_tpu_keeps_installed_gpu_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ["jax_cuda12_plugin"])
    pci.configure_without_tpu(tmp_path)
    assert os.environ == {"TPU_SKIP_MDS_QUERY": "1"}


@pytest.mark.skipif(bool(pci.find_device_files()), reason="this machine has a TPU")
def test_jax_start_without_tpu_prints_nothing():
    program = "from comfyui_tpu.tpu_runtime.machine import pci; pci.configure_without_tpu(); import jax; jax.devices()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "TPU"))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("num_chips", [1, 4, 8])
def test_idle_stats_before_first_run_report_not_started(tmp_path: Path, num_chips: int):
    said = stats(plug(tmp_path, "v6e", num_chips), closed())
    assert said["message"] == f"{num_chips} x v6e, not started"
    assert [(chip["index"], chip["hbm_used"], chip["hbm_limit"]) for chip in said["chips"]] == [
        (index, None, 32 * GIB) for index in range(num_chips)
    ]
    assert said["notes"] == []


@pytest.mark.parametrize(("kind", "num_chips"), [("v6e", 1), ("v6e", 4), ("v5p", 8), ("TPU7x", 4)])
def test_idle_stats_read_memory_from_metrics_service(tmp_path: Path, kind: str, num_chips: int):
    root = plug(tmp_path, kind, num_chips)
    process(root, 4711, "/usr/bin/python3", "/home/me/ComfyUI/main.py", "--token", "secret", opens=["/dev/vfio/0"])
    process(root, 4712, "/usr/bin/bash", opens=["/dev/null", "/dev/vfio/vfio"])
    num_devices = pci.detect_chips(root).num_devices
    with serving(num_devices, num_chips) as port:
        # Its deadline is short, for a page: on a busy machine the first answer may come later.
        until(lambda: all(chip["hbm_used"] is not None for chip in stats(root, port)["chips"]))
        said = stats(root, port)
    assert said["message"] == f"{num_chips} x {kind}, held by another process"
    process_4711 = Expected("monitor.process", program="python3 main.py", pid=4711)
    (note,) = said["notes"]
    assert_message(note, "monitor.held_by", who=[process_4711])
    each = num_devices // num_chips
    assert [(chip["hbm_used"], chip["hbm_limit"], chip["duty_cycle"]) for chip in said["chips"]] == [
        ((index + 1) * GIB, 31 * GIB, 10.0 * (index // each)) for index in range(num_devices)
    ]


def test_idle_stats_of_idle_process_have_zero_duty_cycle(tmp_path: Path):
    with serving(4, 0) as port:
        said = stats(plug(tmp_path, "v6e", 4), port)
    assert [(chip["hbm_used"] // GIB, chip["duty_cycle"]) for chip in said["chips"]] == [(n, 0.0) for n in (1, 2, 3, 4)]


def test_idle_stats_of_chips_held_by_this_process_have_no_notes(tmp_path: Path):
    process(plug(tmp_path, "v6e", 4), os.getpid(), "python3", "main.py", opens=["/dev/vfio/0"])
    with serving(4) as port:
        said = stats(tmp_path, port)
    assert (said["message"], said["notes"]) == ("4 x v6e, held by this process", [])


def test_idle_stats_note_devices_missing_from_service(tmp_path: Path):
    with serving(4) as port:
        said = stats(plug(tmp_path, "v6e", 8), port)
    assert_message(said["notes"][1], "monitor.memory_partly_known", count=4, num_devices=8)
    assert [chip["hbm_used"] for chip in said["chips"]] == [GIB, 2 * GIB, 3 * GIB, 4 * GIB, None, None, None, None]


DEADLINE_S = 1.5


def test_idle_stats_silent_service_costs_one_deadline(tmp_path: Path):
    process(plug(tmp_path, "v6e", 8), 4711, "train", opens=["/dev/vfio/3"])
    with silent() as port:
        unstarted = IdleStats(tmp_path, [port], deadline_s=DEADLINE_S)
        begun = time.monotonic()
        said = [Sampler(unstarted=unstarted).complete(dict(NOTHING_STARTED)) for _ in range(20)]
        elapsed_s = time.monotonic() - begun
    assert all(one["message"] == "8 x v6e, held by another process" for one in said)
    assert_message(said[-1]["notes"][0], "monitor.memory_unknown", error=re.compile(f"localhost:{port} "))
    assert [chip["hbm_used"] for chip in said[-1]["chips"]] == [None] * 8
    assert elapsed_s < 20 * DEADLINE_S  # twenty times it would be more


def test_read_usage_combines_several_metrics_ports(tmp_path: Path):
    assert metrics_service.metrics_ports({"TPU_RUNTIME_METRICS_PORTS": "8431,8432"}) == [8431, 8432]
    assert (
        metrics_service.metrics_ports({"TPU_RUNTIME_METRICS_PORTS": "?"}) == metrics_service.metrics_ports({}) == [8431]
    )
    with serving(1) as first, serving(2) as second:
        assert len(metrics_service.read_usage([first, second, closed()], 10.0)) == 3


def test_metrics_service_names_exist_in_tpu_info():
    metrics = pytest.importorskip("tpu_info.metrics")
    assert set(metrics_service.METRICS.values()) <= {each.value for each in metrics.MetricName}


def test_idle_stats_without_tpu_info_note_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tpu_info.device", None)
    plug(tmp_path, "v6e", 8)
    said = stats(tmp_path, closed())
    (note,) = said["notes"]
    assert_message(note, "monitor.tpu_info_missing")
    assert (said["message"], said["chips"]) == (snapshot.NOT_STARTED, [])


def test_stats_feed_returns_idle_stats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifecycle, "_engine", None)  # another test of this process may have started one
    with serving(4) as port:
        unstarted = IdleStats(plug(tmp_path, "v6e", 4), [port], deadline_s=10.0)
        feed = StatsFeed(snapshot.take_snapshot, Sampler(unstarted=unstarted), patience_s=60.0)
        answer = json.loads(asyncio.run(feed.answer()))
    assert answer["message"] == "4 x v6e, held by another process"
    assert [chip["hbm_used"] // GIB for chip in answer["chips"]] == [1, 2, 3, 4]


def test_metrics_service_imports_grpc_only_when_port_listens(tmp_path: Path):
    """In a process of its own: the old packs' SIGABRT was protobuf loaded twice."""
    program = f"""
        import io, sys
        from pathlib import Path
        from comfyui_tpu.tpu_runtime.machine import pci
        from comfyui_tpu.tpu_runtime.monitor import metrics_service
        print(pci.detect_chips(Path("{plug(tmp_path, "v6e", 8)}")))
        assert metrics_service.read_usage([{closed()}]) == []
        print(*(name in sys.modules for name in ("grpc", "google.protobuf", "jax", "libtpu")))
        import tpu_info.proto.tpu_metric_service_pb2_grpc
        import sentencepiece
        model = io.BytesIO()
        words = iter(["a b c a b", "hello world a b"] * 5)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=words, model_writer=model, vocab_size=20, hard_vocab_limit=False, minloglevel=9
        )
        print(len(sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode("hello")) > 0)
    """
    lines = "\n".join(line[8:] for line in program.strip("\n").splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["8 x v6e", "False False False False", "True"], done.stderr
