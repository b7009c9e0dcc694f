"""Measure the host time of ComfyUI's own sampler per step, with a network that costs nothing.

It is measured with our wrapper of its guidance, without the wrapper, and with a PyTorch network that returns zeros. Our
network returns zeros too, and the processor time of the program that replaces the chip is not counted. The rest is the
host's work, the transfers and the call. Needs a real ComfyUI (COMFYUI_PATH, else ~/ComfyUI).

    python benchmarks/comfyui/core_nodes.py --size 832x480x33 1280x720x81
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

STEPS = 12
_on_chips: list[float] = []  # seconds of each program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=["832x480x33", "1280x720x81"], help="width x height x frames")
    sizes = parser.parse_args().size
    home = Path(os.environ.get("COMFYUI_PATH") or "~/ComfyUI").expanduser()
    sys.path[:0] = [str(home), str(_stubs())]
    importlib.import_module("_comfyui_stubs")
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import torch

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = _file(Path(folder))
        _make_free()
        for size in sizes:
            print(json.dumps({"size": size, **_measured(path, *map(int, size.split("x")))}))


def _stubs() -> Path:
    """torchvision and torchaudio, which ComfyUI imports at its start."""
    from comfyui_tpu.tests.support.comfyui_server import STUBS

    folder = Path(tempfile.mkdtemp())
    (folder / "_comfyui_stubs.py").write_text(STUBS)
    return folder


def _file(folder: Path) -> Path:
    from comfyui_tpu.tests.files import single_files
    from comfyui_tpu.tests.files.comfyui_oracle import DENOISERS, saved

    kind = "WanTransformer3DModel"
    return single_files.write(folder / "wan_t2v.safetensors", saved(kind, folder / "wan", **DENOISERS[kind]), kind)


def _make_free() -> None:

    from comfyui_tpu.tpu_runtime.models import SPECS

    def forward(denoiser: Any, run: Any, sample: Any, timestep: Any, inputs: Any) -> Any:
        return sample * 0.0

    for spec in SPECS:
        object.__setattr__(spec.denoiser, "forward", forward)

    import jax
    from comfyui_tpu.sharding import placement
    from comfyui_tpu.tpu_runtime.programs.executables import Executable

    def call(executable: Any, weights: Any, *args: Any) -> Any:
        placed = jax.block_until_ready(placement.put_all(args, executable._shardings))
        started = time.perf_counter()
        found = jax.block_until_ready(executable.compiled(weights, *placed))
        _on_chips.append(time.perf_counter() - started)
        return found

    type.__setattr__(Executable, "__call__", call)


def _measured(path: Path, width: int, height: int, frames: int) -> dict[str, float]:
    """Milliseconds a step of core's KSampler with our MODEL."""
    import torch
    from comfy.patcher_extension import WrappersMP
    from comfyui_tpu.nodes.comfyui import core_model
    from comfyui_tpu.tpu_runtime.progress import SilentProgress

    import nodes

    model = core_model.load_model(str(path), "float32", SilentProgress)
    plain = model.clone()
    plain.remove_wrappers_with_key(WrappersMP.CALC_COND_BATCH, "comfyui_tpu")
    shape = (1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)
    prompts = [[[torch.randn(1, 512, 4096), {}]] for _ in range(2)]

    def sample(chosen: Any, steps: int) -> None:
        nodes.common_ksampler(chosen, 1, steps, 5.0, "euler", "simple", *prompts, {"samples": torch.zeros(shape)})

    found = {
        "with the wrapper": _each(lambda steps: sample(model, steps)),
        "without": _each(lambda steps: sample(plain, steps)),
    }
    model.model.diffusion_model._forward = lambda x, *args, **kwargs: torch.zeros_like(x)
    return found | {"ComfyUI alone": _each(lambda steps: sample(plain, steps))}


def _each(run: Any) -> float:
    """Between a long run and a short one, so that what is done once does not count."""
    run(2)
    times = []
    for steps in (2, 2 + STEPS):
        _on_chips.clear()
        started = time.perf_counter()
        run(steps)
        times.append(time.perf_counter() - started - sum(_on_chips))
    return round(1000 * (times[1] - times[0]) / STEPS, 1)


if __name__ == "__main__":
    main()
