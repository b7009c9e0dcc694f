"""Chips that another process holds are recognized, waited for, and never replaced by the CPU."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
from comfyui_tpu.tests.support import fake_tpu
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.machine import device_access, pci
from comfyui_tpu.tpu_runtime.machine.device_access import DevicesBusy

# Quoted from public reports: vllm-project/tpu-inference 2921 and 2629, pytorch/xla 6286, google/jax issues.
BUSY_TEXTS = [
    "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 3411.",
    "Unable to initialize backend 'tpu': ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "
    '"$ sudo rm /tmp/libtpu_lockfile".',
    "UNKNOWN: TPU initialization failed: open(/dev/accel0): Device or resource busy",
    "Couldn't open iommu group /dev/vfio/0: Device or resource busy",
    "FAILED_PRECONDITION: Failed to open iommu group 3",
]
OTHER_TEXTS = [
    "Unable to initialize backend 'tpu': UNAVAILABLE: No TPU devices available.",
    "INVALID_ARGUMENT: No such compile option: 'xla_tpu_x'",
    "RESOURCE_EXHAUSTED: Error allocating device buffer",
    "UNKNOWN: Failed to add port to server: Address already in use",  # the coordinator's port, of several hosts
]


class FakeClock:
    """Replaces the module's `time`: sleeping moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(device_access, "time", fake)
    return fake


@pytest.mark.parametrize("text", BUSY_TEXTS)
def test_is_busy_recognizes_published_busy_messages(text: str):
    assert device_access.is_busy(text)


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_is_busy_rejects_other_failures(text: str):
    assert not device_access.is_busy(text)


def test_open_devices_retries_until_chips_are_free(clock: FakeClock, monkeypatch: pytest.MonkeyPatch):
    def start() -> list[str]:
        if clock.now < 120:
            raise RuntimeError(BUSY_TEXTS[0])
        return ["chip"]

    monkeypatch.setattr(jax, "devices", start)
    monkeypatch.setattr("jax.extend.backend.clear_backends", lambda: None)
    lines: list[str] = []
    assert device_access.open_devices(lines.append) == ("chip",)
    assert 120 <= clock.now < 140 and len(lines) == 4  # after 2, 6, 14 and 30 s
    assert lines[0].endswith("a process of another user or container; waited 0 s so far")


def test_wait_while_busy_raises_devices_busy_after_one_minute(clock: FakeClock):
    def start() -> None:
        raise RuntimeError(BUSY_TEXTS[2])

    with raises_message(DevicesBusy, "machine.chips_held", waited_s=60):
        device_access.wait_while_busy(start)
    assert 160 <= clock.now < 161


def test_wait_while_busy_raises_other_errors_immediately(clock: FakeClock):
    def start() -> None:
        raise RuntimeError(OTHER_TEXTS[0])

    with pytest.raises(RuntimeError, match="No TPU devices"):
        device_access.wait_while_busy(start)
    assert clock.now == 100


def test_wait_while_busy_ends_within_one_second_of_cancel(clock: FakeClock):
    class Cancelled(Exception):
        pass

    def check_cancelled() -> None:
        if clock.now > 103:
            raise Cancelled

    def start() -> None:
        raise RuntimeError(BUSY_TEXTS[0])

    with pytest.raises(Cancelled):
        device_access.wait_while_busy(start, check_cancelled=check_cancelled)
    assert clock.now < 104


def test_open_devices_after_busy_start_clears_jax_backends():
    """JAX keeps the back ends that started before the failing one, and would return the CPU's devices."""
    program = f"""
        import jax
        from jax._src import xla_bridge
        from comfyui_tpu.tpu_runtime.machine import device_access
        device_access.FIRST_PAUSE_S = 0.0
        attempts = []
        def factory():
            attempts.append(1)
            if len(attempts) < 3:
                raise RuntimeError({BUSY_TEXTS[0]!r})
            return xla_bridge.make_cpu_client()
        xla_bridge.register_backend_factory("chips", factory, priority=1000, fail_quietly=False)
        jax.config.update("jax_platforms", "cpu,chips")
        device_access.open_devices(timeout_s=30.0)
        assert len(attempts) == 3, attempts
    """
    import textwrap

    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_try_to_start_retries_busy_subprocess(tmp_path: Path, clock: FakeClock):
    attempts = tmp_path / "attempts"
    program = (
        "import pathlib, sys\n"
        f"file = pathlib.Path({str(attempts)!r})\n"
        "file.write_text((file.read_text() if file.exists() else '') + 'x')\n"
        f"sys.exit({BUSY_TEXTS[2]!r} if len(file.read_text()) < 3 else 0)\n"
    )
    done = device_access.try_to_start([sys.executable, "-c", program], {}, 60.0)
    assert done.returncode == 0 and attempts.read_text() == "xxx"


def test_wait_for_release_names_holders_until_chips_are_released(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
):
    root = fake_tpu.plug(tmp_path, "v6e", 1)
    fake_tpu.process(root, 123, "/usr/bin/python3", "/srv/main.py", "--secret", opens=["/dev/vfio/0"])
    assert device_access.describe_holders(root) == "python3 main.py (process 123)"
    lines: list[str] = []
    assert not device_access.wait_for_release(lines.append, timeout_s=5.0, root=root)
    assert lines[0] == "The TPU chips are still held by python3 main.py (process 123)"

    def ends(seconds: float) -> None:
        (root / "proc/123/fd/0").unlink(missing_ok=True)

    monkeypatch.setattr(clock, "sleep", ends)
    assert device_access.wait_for_release(timeout_s=5.0, root=root)
    assert pci.find_holders(root) == []


@pytest.mark.parametrize(
    ("version", "is_sandbox"),
    [
        ("Linux version 4.4.0 #1 SMP Sun Jan 10 15:06:54 PST 2016\n", True),
        ("Linux version 6.1.0-28-cloud-amd64 (debian-kernel@lists.debian.org) #1 SMP Debian 6.1.119-1\n", False),
        ("Linux version 4.4.0-210-generic (buildd@lgw01) #242-Ubuntu SMP\n", False),
    ],
)
def test_allows_one_process_detects_gvisor_kernel(tmp_path: Path, version: str, is_sandbox: bool):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text(version)
    assert device_access.allows_one_process(tmp_path) == is_sandbox
