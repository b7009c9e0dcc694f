"""Compute the cost of one call of an attention kernel on a described chip.

This is also the script that compiles the kernel in its own process: libtpu reads the flags for dumping its schedule
once, when it is loaded.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

TIMEOUT_S = 900
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Call:
    """Attention of `q_rows` queries to `kv_rows` keys and then to `text_rows`, whose number is known at run time.

    `form`: fields of an `AttentionConfig` that replace the table's. `kernel`: "ours", or one to compare with. `kept`:
    with keys in blocks of 1024 with 1008 valid ones, the number of blocks that a block of queries attends to; at run
    time it may also attend to all.
    """

    title: str
    heads: int
    head_dim: int
    q_rows: int
    kv_rows: int
    text_rows: int = 0
    kept: int = 0
    bounded: bool = False
    kernel: Literal["ours", "splash", "online"] = "ours"
    topology: str = "v6e:1x1"
    form: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> int:
        return self.heads * self.q_rows * (self.kv_rows + self.text_rows)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Cycles are predicted. `error`: why there are none. `cpu_s`: processor time of compiling, on all cores."""

    mcycles: float = 0.0
    least_mcycles: float = 0.0
    rerun_mcycles: float = 0.0
    bundles: int = 0
    vmem_mib: float = 0.0
    compile_s: float = 0.0
    cpu_s: float = 0.0
    form: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


def cost(call: Call) -> Found:
    """Compiles `call` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="attention-") as folder:
        command = [sys.executable, __file__, folder]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        try:
            done = subprocess.run(
                command,
                input=json.dumps(asdict(call)),
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Found(error=f"not compiled after {TIMEOUT_S} s")
        result = Path(folder, "found.json")
        if not result.exists():
            return Found(error=f"the compiler ended with exit code {done.returncode}: {done.stderr[-300:]}")
        return Found(**json.loads(result.read_text()))


def arrays(call: Call) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and formats of query, keys, values, then the text's and its length."""
    width = call.heads * call.head_dim
    rows = [call.q_rows, call.kv_rows, call.kv_rows, *([call.text_rows] * 2 if call.text_rows else [])]
    scalars = [((1,), "int32")] * bool(call.text_rows) + [((), "bool")] * bool(call.kept)
    return [((1, n, width), "bfloat16") for n in rows] + scalars


def function(call: Call, device_kind: str) -> tuple[Callable[..., Any], Any]:
    """What to compile, of `arrays`; and the form of ours."""
    import jax.numpy as jnp
    import numpy as np
    from comfyui_tpu.kernels import attention
    from comfyui_tpu.kernels.attention_config import AttentionConfig, choose_config
    from comfyui_tpu.kernels.attention_reference import BlockSparsity, keys_in_blocks, keys_of_length

    if call.kernel != "ours":
        from other_kernels import online, splash

        attend = {"splash": splash.attention, "online": online.attention}[call.kernel]

        def run(*flat: Any) -> Any:
            q, k, v = (x.reshape(*x.shape[:2], call.heads, call.head_dim) for x in flat[:3])
            if call.text_rows:
                texts = [x.reshape(*x.shape[:2], call.heads, call.head_dim) for x in flat[3:5]]
                k, v = jnp.concatenate([k, texts[0]], axis=1), jnp.concatenate([v, texts[1]], axis=1)
            return attend(q, k, v)

        return run, None

    chosen = choose_config(
        device_kind,
        "zero" if call.bounded else "sampled",
        q_seq=call.q_rows,
        kv_rows=[call.kv_rows, *([call.text_rows] if call.text_rows else [])],
        heads=call.heads,
        head_dim=call.head_dim,
        itemsize=2,
    )
    form = AttentionConfig(**{**asdict(chosen), **call.form})

    def run_ours(q: Any, k: Any, v: Any, *text: Any) -> Any:
        own = keys_of_length(k, v, call.kv_rows)
        if call.kept:
            text, is_sparse = text[:-1], text[-1]
            real = np.full(call.kv_rows // 1024, 1008, np.int32)
            kept = (np.arange(len(real))[:, None] + np.arange(len(real), dtype=np.int32)) % len(real)
            left_out = len(real) - call.kept
            own = keys_in_blocks(
                k, v, BlockSparsity(size=1024, real=real, kept=kept, left_out=left_out, is_sparse=is_sparse)
            )
        keys = [own, *([keys_of_length(*text)] if text else [])]
        return attention.flat_attention(
            q, keys, head_dim=call.head_dim, form=form, log_sums=False, scale=call.head_dim**-0.5
        )[0]

    return run_ours, form


def _compile(call: Call, folder: str) -> Found:
    from comfyui_tpu.tpu_runtime.cost_model import bundles, chips, hlo, kernels

    os.environ["LIBTPU_INIT_ARGS"] = bundles.DUMP_FLAGS.format(folder)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, SingleDeviceSharding

    device = chips.compile_devices(chips.topology(call.topology))[0]
    sharding = SingleDeviceSharding(device)
    run, form = function(call, device.device_kind)
    given = [jax.ShapeDtypeStruct(shape, jnp.dtype(name), sharding=sharding) for shape, name in arrays(call)]
    started = time.monotonic()
    try:
        with jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("x",)).abstract_mesh):
            compiled = jax.jit(run).lower(*given).compile()
    except jax.errors.JaxRuntimeError as error:
        return Found(error=str(error).partition("\n")[0][:300], form=asdict(form) if form else {})
    elapsed = time.monotonic() - started
    found = {
        kernel: _count(kernel, folder) for kernel in kernels.find_kernels(hlo.parse_module(compiled.as_text() or ""))
    }
    kernel = max(found, key=lambda kernel: found[kernel].longest)
    counted = found[kernel]
    report = "".join(path.read_text() for path in Path(folder).glob("*-vmem_report.html"))
    used = re.search(rf'"{re.escape(kernel.name)}": \{{.*?"total_size": (\d+)', report, re.DOTALL)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Found(
        mcycles=sum(one.longest for one in found.values()) / 1e6,
        least_mcycles=sum(one.shortest for one in found.values()) / 1e6,
        rerun_mcycles=counted.rerun / 1e6,
        bundles=counted.length,
        vmem_mib=int(used.group(1)) / MIB if used else 0.0,
        compile_s=elapsed,
        cpu_s=usage.ru_utime + usage.ru_stime,
        form=asdict(form) if form else {},
    )


def _count(kernel: Any, folder: str) -> Any:
    """The `bundles.Cost` of a kernel from what the compiler left in `folder`."""
    from comfyui_tpu.tpu_runtime.cost_model import bundles

    grid = bundles.read_grid(json.loads(kernel.config)["custom_call_config"]["body"])
    (dump,) = (path for path in Path(folder).glob("*-[0-9][0-9]-final_bundles.txt") if f"-{kernel.name}-" in path.name)
    return bundles.count_cycles(dump.read_text(), grid, reruns=kernel.reruns, skipped=kernel.skipped)


def floor_mcycles(call: Call) -> float:
    """The least that the matrix units allow: contractions shallower than they are deep cost as much as full ones."""
    from comfyui_tpu.tpu_runtime.cost_model import chips

    chip = chips.topology(call.topology).chip
    depth = max(call.head_dim, chip.mxu_width)
    flop = call.scores * 2 * (depth + call.head_dim)
    return flop / chip.flop_per_cycle / 1e6


def measured_s(call: Call, repeats: int = 5) -> float | None:
    """Seconds of one call on this machine's TPU; None where there is none."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    if device.platform != "tpu":
        return None
    run = jax.jit(function(call, device.device_kind)[0])
    given = [
        jnp.full(shape, name == "bool" or call.text_rows, name)
        if name in ("int32", "bool")
        else jax.random.normal(jax.random.key(n), shape, name)
        for n, (shape, name) in enumerate(arrays(call))
    ]
    out = jax.block_until_ready(run(*given))
    started = time.monotonic()
    for _ in range(repeats):
        out = run(*given)
    jax.block_until_ready(out)
    return (time.monotonic() - started) / repeats


if __name__ == "__main__":
    found = _compile(Call(**json.load(sys.stdin)), sys.argv[1])
    Path(sys.argv[1], "found.json").write_text(json.dumps(asdict(found)))
