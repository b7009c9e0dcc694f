"""Cycles of a Pallas kernel from its final instruction bundles, as libtpu dumps them.

One bundle issues per cycle, so bundles times trips is the shortest time that the schedule allows: it excludes stalls.
This is a script of its own, because libtpu reads its dump flags only once, when it is loaded. The kernels of a program
are compiled again, alone, in a process with these flags. It imports nothing of this package.
"""

import base64
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

DUMP_FLAGS = "--xla_jf_dump_to={0} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
PROFILE_FLAG = "--xla_jf_dump_static_llo_profile_to={0}"

RESULT = "cost.json"

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*>*\s+\{", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)%(\w+?)_p\d+\) )?target = \$region(\d+)")
_REGION = re.compile(r"(?:Start/End empty|Start) region (\d+)\b")
_DELAY_SLOTS = 4  # bundles after a branch that run whether it is taken or not
_PIPELINE_STEPS = 2  # the grid loop runs two steps more than the grid: to prefetch and to write back


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one call of a kernel, in bundles or cycles."""

    length: int = 0  # bundles of the kernel's text
    steps: int = 1  # of the grid
    step: int = 0  # bundles of one grid step, with its loops
    longest: float = 0.0  # bundles over all steps, with the longer of two exclusive parts
    shortest: float = 0.0  # the same with the shorter part, and without loop turns that may be skipped
    rerun: float = 0.0  # bundles over all steps of a conditional part that repeats the work; not in other numbers
    estimated: float | None = None  # libtpu's own estimate: with DMA and stalls, but without conditional parts
    unknown_loops: int = 0  # inner loops without a constant count; each is counted once
    error: str = ""  # why the kernel could not be measured alone

    @property
    def cycles(self) -> float:
        return max(self.longest, self.estimated or 0.0)

    @property
    def cycles_at_best(self) -> float:
        return max(self.shortest, self.estimated or 0.0)


@dataclass(frozen=True, kw_only=True)
class _Branch:
    """Branch instruction. A backward branch closes a loop."""

    address: int
    target: int  # address
    negated: str  # "!" or ""
    predicate: str  # "" if unconditional

    @property
    def skipped(self) -> range:
        return range(self.address + _DELAY_SLOTS + 1, self.target)

    @property
    def repeated(self) -> range:
        return range(self.target, self.address + _DELAY_SLOTS + 1)


def count_cycles(text: str, grid: tuple[int, ...], *, reruns: bool = False, skipped: int = 0) -> Cost:
    """Return the cost of a kernel from the `text` of its final bundles, over all steps of `grid`.

    reruns: whether a conditional part repeats the work. skipped: turns of its longest loop that may be skipped.
    """
    matches = list(_BUNDLE.finditer(text))
    ends = [bundle.start() for bundle in matches[1:]] + [len(text)]
    bodies = {int(bundle.group(1), 16): text[bundle.end() : end] for bundle, end in zip(matches, ends, strict=True)}
    branches = _branches(bodies)
    loops = [branch for branch in branches if branch.target <= branch.address]
    counts = {loop: _exit_count(loop, text) for loop in loops}
    grid_loop, steps = _grid_loop(loops, counts, math.prod(grid))
    if grid_loop is not None:
        counts[grid_loop] = steps
    weights = {
        address: math.prod(counts[loop] or 1 for loop in loops if address in loop.repeated) for address in bodies
    }
    repeated = _rerun(branches, loops if skipped else []) if reruns else range(0)
    rerun = sum(weights[address] for address in bodies if address in repeated)
    weights = {address: 0 if address in repeated else weight for address, weight in weights.items()}
    total = sum(weights.values())
    pairs = _exclusive(branches, weights)
    saved = _weigh_skipped(loops, counts, grid_loop, repeated, weights, skipped) if skipped else 0
    longest = total - sum(min(pair) for pair in pairs)
    inside = len(grid_loop.repeated) if grid_loop else len(bodies)
    return Cost(
        length=len(bodies),
        steps=steps,
        step=round((longest - (len(bodies) - inside)) / steps),
        longest=longest,
        shortest=total - sum(max(pair) for pair in pairs) - saved,
        rerun=rerun,
        unknown_loops=sum(count is None for count in counts.values()),
    )


def _branches(bodies: Mapping[int, str]) -> list[_Branch]:
    regions: dict[str, int] = {}
    for address, body in bodies.items():
        for number in _REGION.findall(body):
            regions.setdefault(number, address)
    return [
        _Branch(address=address, target=regions[number], negated=negated, predicate=predicate)
        for address, body in bodies.items()
        for negated, predicate, number in _BRANCH.findall(body)
        if number in regions
    ]


def _exit_count(loop: _Branch, text: str) -> int | None:
    """Return the constant that the loop's counter is compared with; None if unknown.

    Counters start at 0.
    """
    match = re.search(rf"%{loop.predicate}_p\d+ = scmp\.\w+\.s32\.totalorder %\w+, (\d+)", text)
    return int(match.group(1)) if match and loop.predicate else None


def _grid_loop(loops: list[_Branch], counts: Mapping[_Branch, int | None], steps: int) -> tuple[_Branch | None, int]:
    """Return the loop over the grid, which is the longest, and its steps: half of the grid's if two cores share it."""
    if steps <= 1 or not loops:
        return None, 1
    longest = max(loops, key=lambda loop: len(loop.repeated))
    shared = math.ceil(steps / 2)
    return longest, shared if counts[longest] == shared + _PIPELINE_STEPS else steps


def _rerun(branches: list[_Branch], guarded: list[_Branch]) -> range:
    """Return the addresses of the longest conditional part without another one of a tenth of its length inside.

    The guard of a step contains the rerun. Other conditional parts are a few transfers, or surround one of the
    `guarded` loops, which may run no turn.
    """
    parts = [branch.skipped for branch in branches if branch.target > branch.address and branch.predicate]
    parts = [part for part in parts if not any(_is_around(part, loop.repeated) for loop in guarded)]

    def holds_another(part: range) -> bool:
        inner = (other for other in parts if other != part and other.start in part and other.stop <= part.stop)
        return any(len(other) > len(part) / 10 for other in inner)

    return max((part for part in parts if not holds_another(part)), key=len, default=range(0))


def _is_around(part: range, loop: range) -> bool:
    return loop.start in part and loop.stop - 1 in part and len(part) < 1.1 * len(loop)


def _weigh_skipped(
    loops: list[_Branch],
    counts: Mapping[_Branch, int | None],
    grid_loop: _Branch | None,
    rerun: range,
    weights: Mapping[int, int],
    turns: int,
) -> float:
    """Return the weight of `turns` turns of the longest loop within a step, outside the repeated part."""
    inner = [loop for loop in loops if loop != grid_loop and loop.target not in rerun and counts[loop]]
    longest = max(inner, key=lambda loop: len(loop.repeated))
    return sum(weights.get(address, 0) for address in longest.repeated) * turns / (counts[longest] or 1)


def _exclusive(branches: list[_Branch], weights: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the weights of pairs of parts that a predicate and its opposite jump over: one of the two runs."""
    waiting: dict[tuple[str, str], int] = {}
    pairs = []
    for branch in branches:
        if branch.target <= branch.address or not branch.predicate:
            continue
        skipped = sum(weights.get(address, 0) for address in branch.skipped)
        opposite = waiting.pop((branch.predicate, "" if branch.negated else "!"), None)
        if opposite is None:
            waiting[branch.predicate, branch.negated] = skipped
        else:
            pairs.append((opposite, skipped))
    return pairs


def read_grid(body: str) -> tuple[int, ...]:
    """Return the grid of a serialized Mosaic module. Raises `ValueError` if it is not constant."""
    from jax.extend.mlir import ir
    from jaxlib.mosaic.python import tpu

    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        tpu.register_dialect(context)
        text = str(ir.Module.parse(base64.b64decode(body)))
    match = re.search(r"iteration_bounds = array<i64: ([^>]*)>", text)
    grid = tuple(int(size) for size in match.group(1).split(",")) if match else ()
    if any(size < 0 for size in grid):
        raise ValueError("its grid is not constant")
    return grid


def measure_kernel(request: Mapping[str, Any], folder: Path) -> Cost:
    """Compile the kernel of `request` alone and return its cost.

    libtpu must dump into `folder`, which is empty before.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    described = topologies.get_topology_desc(request["topology"], platform="tpu", **request["options"])
    sharding = jax.sharding.SingleDeviceSharding(described.devices[0])
    config = json.loads(request["config"])
    operands = [jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding) for dtype, dims in request["operands"]]
    results = [jax.ShapeDtypeStruct(dims, jnp.dtype(dtype)) for dtype, dims in request["results"]]
    call = jax.ffi.ffi_call(
        "tpu_custom_call",
        results,
        has_side_effect=True,
        input_layouts=[tuple(range(len(operand.shape))) for operand in operands],
        output_layouts=[tuple(range(len(result.shape))) for result in results],
        custom_call_api_version=1,
        legacy_backend_config=request["config"],
    )
    try:
        grid = read_grid(config["custom_call_config"]["body"])
        jax.jit(lambda *values: call(*values)).lower(*operands).compile()
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return Cost(error=str(error).partition("\n")[0][:300])
    # The dump flags give bundles, the profile flag gives an estimate.
    dumps = [path.read_text() for path in folder.glob("*-ffi_call*-[0-9][0-9]-final_bundles.txt")]
    profile = "".join(path.read_text() for path in folder.glob("ffi_call*_static_llo_profile.textproto"))
    estimated = re.search(r"estimated_cycles: (\d+)", profile)
    options = {"reruns": request["reruns"], "skipped": request["skipped"]}
    cost = count_cycles(dumps[0], grid, **options) if dumps else Cost()
    return replace(cost, estimated=float(estimated.group(1)) if estimated else None)


def _main(folder: Path) -> None:
    cost = measure_kernel(json.load(sys.stdin), folder)
    (folder / RESULT).write_text(json.dumps(asdict(cost)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
