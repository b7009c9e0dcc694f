"""`comfyui-tpu monitor`: what a server says, in a terminal."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_tpu.cli import main as cli
from comfyui_tpu.cli import monitor
from comfyui_tpu.tests.support.chips import GIB, chip, tpu
from comfyui_tpu.tpu_runtime.engine import lifecycle
from comfyui_tpu.tpu_runtime.monitor.host_stats import Sampler
from comfyui_tpu.tpu_runtime.monitor.idle import IdleStats
from rich.console import Console


@pytest.fixture(autouse=True)
def nothing_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tests before have started in this process: the command starts nothing."""
    monkeypatch.setattr(lifecycle, "_engine", None)


def render_stats(stats: Any, note: str = "", width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(monitor.render(stats, note))
    return console.export_text()


RUNNING = {
    "stage": "denoise", "model": "tiny/wan21", "text": "", "done": 3, "total": 50, "unit": "step",
    "seconds_per_unit": 6.4, "elapsed_s": 19.2, "compiling": False,
}  # fmt: skip


def test_monitor_shows_chips_components_and_running_stage():
    chips = [chip(0, tensorcore_utilization=87.0), *(chip(index) for index in range(1, 8))]
    last_run = {"model": "m", "stages": [{"stage": "decode", "seconds": 61}], "steps_per_second": 0.5, "peak_hbm": GIB}
    behind = [{"title": "the vae decoder", "elapsed_s": 62.0}, {"title": "the other", "elapsed_s": None}]
    text = render_stats(tpu(running=RUNNING, behind=behind, chips=chips, last_run=last_run, notes=["a chip hangs"]))
    for expected in (
        "8 x TPU v6e", "memory 24.0 of 256.0 GiB on 8 chips", "3.0 of 32.0 GiB", "87 %", "vae of tiny/wan21",
        "just now", "step 3 of 50, 6.4 s each, 5:01 left", "VAE decoder 1:01, 2.0 s a step, peak 1.0 GiB",
        "a chip hangs", "compiling in the background  the vae decoder 1:02, the other waits",
    ):  # fmt: skip
        assert expected in text, f"{expected}\n{text}"
    assert len(re.findall(r"\d TPU v6e ", text)) == 8


def test_monitor_shows_reserved_memory_and_loading_rate():
    loading = {**RUNNING, "unit": "MiB", "done": 12_000, "total": 27_000, "seconds_per_unit": 2**20 / 0.85e9}
    last_run = {"model": "m", "stages": [], "loaded_bytes": 28_600_000_000, "loading_s": 33.6}
    chips = [chip(0, hbm_reserved=7 * GIB, hbm_reserved_peak=27 * GIB), chip(1)]
    text = render_stats(tpu(running=loading, chips=chips, last_run=last_run))
    assert "11.7 of 26.4 GiB, 0.85 GB/s, 18.5 s left" in text
    assert "28.6 GB loaded at 0.85 GB/s" in text
    assert re.search(r"memory +peak +reserved +its peak", text)
    assert re.search(r"3.0 of 32.0 GiB +5.0 GiB +7.0 GiB +27.0 GiB", text)
    assert "reserved" not in render_stats(tpu())


def test_monitor_fits_256_chips_in_80_columns():
    chips = [chip(index, hbm_used=index * 2**20) for index in range(256)]
    text = render_stats(tpu(chips=chips), width=80)
    assert "on 256 chips" in text and "255 TPU v6e" in text
    assert len(text.splitlines()) < 30
    assert "…" not in text


@pytest.mark.parametrize(
    "stats",
    [{}, {"chips": [{}], "resident": [{}], "running": {}, "last_run": {}, "caches": [{}]}, {"chips": [None, 1]}],
)
def test_monitor_renders_incomplete_stats(stats: dict):
    assert "–" in render_stats(stats)


def test_monitor_escapes_markup_and_control_characters():
    text = render_stats(tpu(resident=[{"component": "[red]a[/red]", "model": "x\x1b[2Jy"}]))
    assert "[red]a[/red] of x?[2Jy" in text


def test_monitor_unreachable_server_error_names_remedy(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["monitor", "--once", "--url", "http://127.0.0.1:9"]) == 2
    said = capsys.readouterr().err
    assert "no server answers at http://127.0.0.1:9" in said and "Start ComfyUI, or give its address" in said


def test_monitor_interval_below_minimum_is_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["monitor", "--interval", "0"]) == 2
    assert "--interval is 0; it must be at least 0.5 s." in capsys.readouterr().err


def test_monitor_reconnects_after_server_restart(monkeypatch: pytest.MonkeyPatch):
    answers = iter([tpu(), monitor.NoStatistics("gone"), tpu(message="back again")])

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


# --- without a server -------------------------------------------------------------------------------------------------

NOBODY = "http://127.0.0.1:9"


def render_local_chips(root: Path, port: int, url: str = NOBODY, **options: Any) -> str:
    """What one look shows on a machine with the chips below `root`."""
    sampler = Sampler(unstarted=IdleStats(root, [port], deadline_s=10.0))
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    monitor.run(SimpleNamespace(url=url, once=True, interval=1.0, **options), console, sampler)
    return console.export_text()


@pytest.mark.parametrize("num_devices", [0, 1, 4, 8])
def test_monitor_without_server_shows_local_chips(tmp_path: Path, num_devices: int):
    fake = pytest.importorskip("comfyui_tpu.tests.support.fake_tpu")
    fake.plug(tmp_path, "v6e", num_devices or 8)
    with fake.serving(num_devices) if num_devices else contextlib.nullcontext(fake.closed()) as port:
        text = render_local_chips(tmp_path, port)
    count = num_devices or 8
    assert f"{count} x v6e, {'held by another process' if num_devices else 'not started'}" in text
    assert len(re.findall(r"\d v6e ", text)) == count
    assert ("1.0 of 31.0 GiB" if num_devices else "– of 32.0 GiB") in text
    assert f"no server answers at {NOBODY}" in text and "of it ComfyUI" not in text


@pytest.mark.parametrize(("kind", "url"), [(None, NOBODY), ("v6e", "http://[2001:db8::1]:bad")])
def test_monitor_without_usable_source_raises_no_statistics(tmp_path: Path, kind: str | None, url: str):
    """Another machine's server has nothing to do with the chips of this one."""
    fake = pytest.importorskip("comfyui_tpu.tests.support.fake_tpu")
    fake.plug(tmp_path, "v6e", 8 if kind else 0)
    with pytest.raises(monitor.NoStatistics, match="no server answers") as error:
        render_local_chips(tmp_path, fake.closed(), url)
    assert str(error.value).startswith("this machine has no TPU") == (kind is None)


def test_monitor_switches_to_server_that_starts_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = pytest.importorskip("comfyui_tpu.tests.support.fake_tpu")
    answers = iter([monitor.NoServer("nobody"), monitor.NoServer("nobody"), tpu(message="here I am")])

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
    sampler = Sampler(unstarted=IdleStats(fake.plug(tmp_path, "v5e", 4), [fake.closed()]))
    with pytest.raises(KeyboardInterrupt):
        monitor.run(SimpleNamespace(url=NOBODY, once=False, interval=1.0), console, sampler)
    text = console.export_text()
    assert text.count("4 x v5e, not started") == 2 and "here I am" in text
