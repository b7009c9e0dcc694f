"""A new process imports its libraries while the chips are being opened."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
from comfyui_tpu.tpu_runtime import api
from comfyui_tpu.tpu_runtime.engine import lifecycle
from comfyui_tpu.tpu_runtime.progress import SilentProgress

assert not {"jax", "torch", "diffusers", "transformers"} & set(sys.modules)
real, attempts = lifecycle.open_devices, []

def open_devices(report, check_cancelled):
    # As slow as a driver that waits until the libraries are there; cancelled the first time.
    attempts.append(time.monotonic())
    while "transformers.modeling_utils" not in sys.modules:
        assert time.monotonic() < attempts[0] + 100, "nothing is imported while the chips are opened"
        time.sleep(0.05)
    if len(attempts) == 1:
        raise InterruptedError
    return real(report, check_cancelled)

lifecycle.open_devices = open_devices
try:
    lifecycle.get_engine(SilentProgress())
except InterruptedError:
    assert lifecycle.current_engine() is None
engine = lifecycle.get_engine(SilentProgress())
assert engine is lifecycle.get_engine(SilentProgress()) and len(engine.devices) == 2 == len(attempts)
import diffusers, transformers
assert issubclass(diffusers.WanTransformer3DModel, diffusers.ModelMixin)
assert issubclass(transformers.UMT5EncoderModel, transformers.PreTrainedModel)
"""

BROKEN_TORCH = """
import builtins
if getattr(builtins, "was_imported", False):
    raise ImportError("`torch` can only be initialized once per process")
builtins.was_imported = True
raise ImportError("libcudnn.so.9: cannot open shared object file: No such file or directory")
"""
TWO_ATTEMPTS = """
from comfyui_tpu.tpu_runtime.engine import lifecycle
from comfyui_tpu.tpu_runtime.progress import SilentProgress

for _ in range(2):
    try:
        lifecycle.get_engine(SilentProgress())
    except ImportError as error:
        print(error)
"""


def test_get_engine_import_error_names_the_cause_at_every_attempt(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(BROKEN_TORCH)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", TWO_ATTEMPTS], env=environment, capture_output=True, text=True, timeout=200
    )
    cause = "libcudnn.so.9: cannot open shared object file: No such file or directory"
    assert done.stdout.splitlines() == [cause, cause], done.stderr[-2000:]


def test_get_engine_imports_libraries_while_devices_open():
    chips = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **chips}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
