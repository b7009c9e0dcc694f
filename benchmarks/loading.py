"""Measure how fast weights are read and decoded for the chips, by format and number of readers, compared with `dd`.

The file is a denoiser of published sizes with upstream's names, written as a sparse file: it contains zeros, uses no
disk space, and is decoded like any other. Shards are for eight simulated chips and are dropped, because a host does not
keep them either.

    python benchmarks/loading.py --model wan2.1-t2v-14b --layers 8 --formats bf16 fp8_scaled Q4_K
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, placement, weight_loader
from comfyui_tpu.tpu_runtime.files import TensorFile
from comfyui_tpu.tpu_runtime.formats import gguf_file, quantization, single_file
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs import upstream_network, weights

GB = 10**9
SAFETENSORS = {"bf16": "BF16", "f32": "F32", "fp8": "F8_E4M3", "fp8_scaled": "F8_E4M3", "int8": "I8"}
GGUF = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "IQ4_NL")
_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1}


@dataclass
class Peak:
    """The most memory of this process that is no file's, above what it had."""

    start: int = 0
    most: int = 0

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self.start, done = self.now(), threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                self.most = max(self.most, self.now() - self.start)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def write(path: Path, kind: str, network: upstream_network.Network) -> dict[str, TensorFile]:
    """A sparse file with the network's tensors; what reads them."""
    shapes = {source: weight.tensor_shape for weight in network.weights.values() for source in weight.sources}
    return _write_gguf(path, kind, shapes) if kind in GGUF else _write_safetensors(path, kind, shapes)


def _write_safetensors(path: Path, kind: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorFile]:
    header: dict[str, object] = {}
    place = 0

    def add(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal place
        size = math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, place + size]}
        place += size

    for name, shape in shapes.items():
        is_coded = len(shape) == 2
        add(name, SAFETENSORS[kind] if is_coded else "BF16", shape)
        if is_coded and kind in ("fp8_scaled", "int8"):
            add(name.removesuffix("weight") + "weight_scale", "F32", (shape[0], 1) if kind == "int8" else ())
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    return quantization.decode_tensors(*single_file.read_safetensors_header(path))


def _write_gguf(path: Path, kind: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorFile]:
    """The tensors of such a file, as its reader describes them."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found, place = {}, 0
    for name, shape in shapes.items():
        own = kind if len(shape) == 2 and shape[1] % 256 == 0 else "F32"
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[own]]
        made = gguf_file.GgufTensor(path=path, offset=place, kind=own, shape=shape, block=block, size=size)
        found[name] = TensorFile(path=path, name=name, shape=shape, made=made)
        place += math.prod(shape) // block * size
    with path.open("wb") as file:
        file.truncate(place)
    return found


def dd(path: Path) -> float:
    """Seconds that `dd` takes for the file."""
    started = time.monotonic()
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M"], check=True, capture_output=True)
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wan2.1-t2v-14b")
    parser.add_argument("--layers", type=int, default=0, help="of the denoiser; default: all")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8", "fp8_scaled", "int8", "Q8_0", "Q4_K"])
    parser.add_argument("--readers", nargs="+", type=int, default=[weight_loader.READ_THREADS])
    parser.add_argument("--folder", type=Path, default=None, help="where the file goes; default: a temporary one")
    options = parser.parse_args()

    spec = lookup_spec(options.model)
    component = spec.component(spec.denoiser.experts[0])
    config = dict(component.config) | ({"num_layers": options.layers} if options.layers else {})
    network = upstream_network.build_network(replace(component, config=config), config)
    mesh = make_mesh(jax.devices()[:8], MeshShape(sp=8))
    wanted = weights.abstract_weights(network, mesh, "bfloat16")
    size = sum(int(np.prod(want.shape)) * want.dtype.itemsize for want in wanted.values())
    print(f"{spec.title}: {size / GB:.1f} GB on the chips, {os.cpu_count()} cores")
    titles = ("file GB", "dd GB/s", "s", "file GB/s", "chip GB/s", "peak GB")
    print(f"{'format':12} {'readers':>7} " + " ".join(f"{title:>9}" for title in titles))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for kind in options.formats:
            path = Path(folder) / f"{kind}.bin"
            files = checkpoint.match_weights(network, write(path, kind, network), Path(folder))
            on_disk = path.stat().st_size
            plain = dd(path)
            for readers in options.readers:
                weight_loader.READ_THREADS, peak = readers, Peak()
                started = time.monotonic()
                with peak.watched(), contextlib.ExitStack() as stack:
                    reader = weight_loader.TensorReader(stack, lambda: None)
                    in_flight = placement.PutsInFlight()
                    shards = stack.enter_context(
                        weight_loader.read_shards(reader.for_background_threads(), network, files, wanted, in_flight)
                    )
                    for _ in shards:
                        pass
                took = time.monotonic() - started
                print(
                    f"{kind:12} {readers:7} {on_disk / GB:9.2f} {on_disk / GB / plain:9.2f} {took:9.1f} "
                    f"{on_disk / GB / took:9.2f} {size / GB / took:9.2f} {peak.most / GB:9.2f}",
                    flush=True,
                )
            path.unlink()


if __name__ == "__main__":
    main()
