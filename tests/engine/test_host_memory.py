"""Memory of the host: what is left, by what Linux says, and a sentence before more is taken than that."""

import errno
import mmap
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.host import Runner
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime import host_memory
from comfyui_tpu.tpu_runtime.checkpoints import weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.memory_errors import HostMemoryError
from comfyui_tpu.tpu_runtime.models import spec_for_family
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from comfyui_tpu.tpu_runtime.units import GIB, MIB

MEMINFO = "MemTotal: 24000000 kB\nMemFree: 100 kB\nMemAvailable: 8388608 kB\nSwapFree: 0 kB\n"
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"proc/meminfo": "MemFree: 100 kB\n"}, None),
        ({"proc/meminfo": MEMINFO}, 8 * GIB),
        ({"proc/meminfo": MEMINFO.replace("SwapFree: 0", "SwapFree: 1048576")}, 9 * GIB),
        # A container: its own group is mounted, at whatever place it has on the host.
        (
            {
                "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/docker/abc\n", f"{V2}/memory.max": f"{4 * GIB}\n",
                f"{V2}/memory.current": f"{3 * GIB}\n", f"{V2}/memory.stat": f"inactive_file {GIB}\nactive_file 7\n",
            },
            2 * GIB + 7,
        ),
        # A slice above the own group has less.
        (
            {
                "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user.slice/me.scope\n",
                f"{V2}/user.slice/memory.max": f"{GIB}", f"{V2}/user.slice/memory.current": "0",
                f"{V2}/user.slice/me.scope/memory.max": "max", f"{V2}/user.slice/me.scope/memory.current": "5",
            },
            GIB,
        ),
        (
            {
                "proc/meminfo": MEMINFO, "proc/self/cgroup": "9:name=systemd:/\n4:memory:/a/b\n0::/\n",
                f"{V1}/a/b/memory.limit_in_bytes": f"{3 * GIB}", f"{V1}/a/b/memory.usage_in_bytes": f"{2 * GIB}",
                f"{V1}/a/b/memory.stat": "cache 9\ntotal_inactive_file 100\ntotal_active_file 11\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712", f"{V1}/memory.usage_in_bytes": "9",
            },
            GIB + 111,
        ),
        # More than it may have: nothing is left, and that is not the same as not to know.
        (
            {
                "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": "100", f"{V2}/memory.current": "200",
            },
            0,
        ),
        ({"proc/meminfo": MEMINFO, "proc/self/cgroup": "\n0\n:\n", f"{V2}/memory.max": "many"}, 8 * GIB),
    ],
)  # fmt: skip
def test_available_bytes_is_minimum_of_all_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], left: int | None
):
    for name, text in files.items():
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)
    assert host_memory.available_bytes() == left


def test_available_bytes_respects_process_limit(monkeypatch: pytest.MonkeyPatch):
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    limit = int(held.split()[1]) * 1024 + 100 * MIB
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        left = host_memory.available_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert left is not None and 50 * MIB < left <= 101 * MIB


def torch_allocates() -> None:
    torch.empty(2**50)


def numpy_allocates() -> None:
    np.empty(2**55, np.uint8)


def no_pages() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def rust_maps() -> None:
    raise ValueError("Error while opening: Cannot allocate memory (os error 12)")


def system_maps() -> None:
    mmap.mmap(-1, 2**52)


@pytest.mark.parametrize("allocate", [torch_allocates, numpy_allocates, no_pages, rust_maps, system_maps])
def test_translate_errors_allocation_failure_raises_host_memory_error(allocate: Callable[[], None]):
    with raises_message(
        HostMemoryError, "memory.host_exhausted", what="Decoding", what_to_do="memory.free_host_memory"
    ):
        with host_memory.translate_errors("Decoding"):
            allocate()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"), OSError(errno.ENOSPC, "No space left"), RuntimeError("no"),
        RuntimeError("RESOURCE_EXHAUSTED: ioctl: Cannot allocate memory"), HostMemoryError("said"), KeyboardInterrupt(),
    ],
)  # fmt: skip
def test_translate_errors_passes_other_errors(error: BaseException):
    with pytest.raises(type(error)) as raised, host_memory.translate_errors("Decoding"):
        raise error
    assert raised.value is error


# --- while models load ------------------------------------------------------------------------------------------------

SPEC = spec_for_family("Flux2")
MODEL = ModelRef(spec_name=SPEC.name, model_id=SPEC.miniature.random_id, precision="float32")


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each component asked for before it was loaded."""
    asked: list[int] = []
    require = host_memory.require
    monkeypatch.setattr(host_memory, "require", lambda size, what: (asked.append(size), require(size, what)))
    return asked


def test_encode_checks_host_memory_before_loading_weights(monkeypatch: pytest.MonkeyPatch, sizes: list[int]):
    """The kernel would have ended the server. Afterwards what fits runs again."""
    runner = Runner(jax.devices()[:2])
    first = runner.encode(MODEL, "a cat", "", SilentProgress())
    (size,) = sizes
    assert size > 2 * 2**18, "weights on devices of the host count"
    runner.free()
    fits = size + host_memory.RESERVE_BYTES
    opened: list[Any] = []
    read = weight_loader.TensorReader.slice
    monkeypatch.setattr(weight_loader.TensorReader, "slice", lambda *args: (opened.append(args), read(*args))[1])
    monkeypatch.setattr(host_memory, "available_bytes", lambda: fits - 1)
    with raises_message(HostMemoryError, "memory.host_too_small", what=re.compile(r"Loading text_encoder of")) as said:
        runner.encode(MODEL, "a dog", "", SilentProgress())
    assert not opened and "End other programs" in str(said.value)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: fits)
    second = runner.encode(MODEL, "a dog", "", SilentProgress())
    assert opened and len(first) == len(second)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    runner.free()
    runner.encode(MODEL, "a bird", "", SilentProgress())


def test_encode_on_full_host_evicts_other_models(monkeypatch: pytest.MonkeyPatch):
    """Without a TPU their weights are in the host's memory."""
    other = spec_for_family("ZImage")
    runner = Runner(jax.devices()[:2])
    runner.encode(
        ModelRef(spec_name=other.name, model_id=other.miniature.random_id, precision="float32"),
        "a cat",
        "",
        SilentProgress(),
    )
    cache = runner.device_cache
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0 if cache.list() else None)
    assert runner.encode(MODEL, "a fish", "", SilentProgress())
    assert [one.model for one in cache.list()] == [MODEL.model_id]


def test_encode_under_process_limit_raises_host_memory_error():
    runner = Runner(jax.devices()[:2])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (int(held.split()[1]) * 1024 + host_memory.RESERVE_BYTES, hard))
    try:
        with raises_message(HostMemoryError, "memory.host_too_small"):
            runner.encode(MODEL, "a horse", "", SilentProgress())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    runner.encode(MODEL, "a horse", "", SilentProgress())
