"""The Pallas kernels of a compiled program, and the cost of one call of each.

XLA's text does not contain a kernel's time: `measure` compiles each alone, by the script `bundles`.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ...kernels import registry
from ..cache.store import signature
from . import bundles, hlo
from .chips import Topology, compiler_environment

log = logging.getLogger(__name__)

TARGET = "tpu_custom_call"
TIMEOUT_S = 1800
# Kernels up to this length are estimated by libtpu, too. Longer ones take it minutes (46 s and 7.5 GiB for 13 600
# bundles, 1 s for 3 700), to little use: it skips conditional parts.
ESTIMATED_BUNDLES = 8000
# Prefixes of kernels that libtpu does not estimate: their loops over rows take it minutes and up to 16 GiB.
NOT_ESTIMATED = (registry.CONVOLUTION, registry.MODULATION, *registry.LINEARS)
_DTYPES = {
    "pred": "bool",
    **{f"s{bits}": f"int{bits}" for bits in (4, 8, 16, 32)},
    **{f"u{bits}": f"uint{bits}" for bits in (4, 8, 16, 32)},
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_SKIPPED = re.compile(rf"{registry.SKIPPED_TURNS}\W+(\d+)")
# Parts of the call's configuration that are the compiler's input; it adds the rest itself.
_GIVEN = ("flag_configs", "scoped_memory_configs", "custom_call_config")


@dataclass(frozen=True, kw_only=True)
class MosaicCall:
    """Mosaic kernel with the arrays that it is called on. Kernels with equal keys cost the same."""

    name: str
    config: str  # JSON
    operands: tuple[hlo.Array, ...]
    results: tuple[hlo.Array, ...]
    skipped: int = 0  # turns of its longest loop that it may skip

    @property
    def is_xla(self) -> bool:
        """Return whether XLA generated the kernel (softmax), not Pallas.

        Alone, such kernels make libtpu's estimate abort.
        """
        return not json.loads(self.config)["custom_call_config"].get("needs_hlo_passes", True)

    @property
    def reruns(self) -> bool:
        return registry.WITH_RERUN in self.name

    @property
    def moved_bytes(self) -> int | None:
        """Return the stated bytes of a kernel that reads one layer of a stack; None for others."""
        if not self.name.startswith(registry.LINEARS):
            return None
        estimate = json.loads(self.config)["custom_call_config"].get("cost_estimate", {})
        return int(estimate["bytes_accessed"]) if "bytes_accessed" in estimate else None

    @property
    def key(self) -> str:
        return signature(self.config, self.operands, self.results, self.skipped)


def parse_kernel(call: hlo.Instruction) -> MosaicCall | None:
    """Return the kernel that `call` runs; None if it does not call one."""
    if call.opcode != "custom-call" or TARGET not in (call.find_attribute("custom_call_target") or ""):
        return None
    config, skipped = call.backend_config, _SKIPPED.search(call.find_attribute("frontend_attributes") or "")
    return MosaicCall(
        name=call.name,
        config=json.dumps({name: config[name] for name in _GIVEN if name in config}, sort_keys=True),
        operands=hlo.parse_arrays(call.find_attribute("operand_layout_constraints") or ""),
        results=call.arrays,
        skipped=int(skipped.group(1)) if skipped else 0,
    )


def find_kernels(module: hlo.Module) -> tuple[MosaicCall, ...]:
    """Return the kernels of `module`, equal ones once."""
    calls = (call for computation in module.computations.values() for call in computation.instructions)
    kernels = {kernel.key: kernel for kernel in map(parse_kernel, calls) if kernel is not None}
    return tuple(kernels.values())


def measure_kernels(kernels: Iterable[MosaicCall], target: Topology) -> Mapping[str, bundles.Cost]:
    """Return the cost of one call of each kernel on one device of `target`, by key.

    The cost of a kernel that the compiler rejects alone has an `error`.
    """
    unique = {kernel.key: kernel for kernel in kernels}
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(unique, pool.map(lambda kernel: _measure_one(kernel, target), unique.values()), strict=True))


def _measure_one(kernel: MosaicCall, target: Topology) -> bundles.Cost:
    cost = _run(kernel, target, bundles.DUMP_FLAGS, TIMEOUT_S)
    is_long = cost.length > ESTIMATED_BUNDLES or kernel.name.startswith(NOT_ESTIMATED)
    if not target.chip.estimates_kernels or kernel.is_xla or cost.error or is_long:
        return cost
    return replace(cost, estimated=_run(kernel, target, bundles.PROFILE_FLAG, TIMEOUT_S).estimated)


def _run(kernel: MosaicCall, target: Topology, flags: str, timeout_s: float) -> bundles.Cost:
    """Return the cost from one compile in its own process: some kernels, such as XLA's, make the compiler abort.

    flags: of libtpu, which dump the result.
    """
    request = {
        "topology": target.name,
        "options": dict(target.options),
        "config": kernel.config,
        "reruns": kernel.reruns,
        "skipped": kernel.skipped,
        "operands": [(_DTYPES[array.dtype], array.dims) for array in kernel.operands],
        "results": [(_DTYPES[array.dtype], array.dims) for array in kernel.results],
    }
    with tempfile.TemporaryDirectory(prefix="kernel-") as folder:
        flags = flags.format(folder)
        environment = compiler_environment() | os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags}
        # -P: the script's folder holds modules of this package, which must not hide others.
        command = [sys.executable, "-P", str(Path(bundles.__file__)), folder]
        try:
            done = subprocess.run(
                command, input=json.dumps(request), env=environment, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return _make_failure(kernel, f"compiling it alone took more than {timeout_s:.0f} s")
        if done.returncode:
            log.debug("%s", done.stderr)
            return _make_failure(kernel, f"the compiler ended with exit code {done.returncode}")
        return bundles.Cost(**json.loads(Path(folder, bundles.RESULT).read_text()))


def _make_failure(kernel: MosaicCall, reason: str) -> bundles.Cost:
    """Return the cost of a kernel that could not be measured, and log the reason."""
    log.info("kernel %s: %s", kernel.name, reason)
    return bundles.Cost(error=reason)
