"""Cycles of a Pallas kernel from its final instruction bundles, as libtpu dumps them.

One bundle issues per cycle, so bundles times trips is the least time the schedule allows: stalls are not in it.
A script of its own: libtpu reads its dump flags once, when it is loaded, so the kernels of a program are compiled
again, alone, in a process that has them. It imports nothing of this package.
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
_PIPELINE_STEPS = 2  # the grid loop runs two more times than the grid: to fetch ahead and to write back


@dataclass(frozen=True, kw_only=True)
class Cost:
    """`length`: bundles of the kernel; `step`: those of one grid step, loops and all. `longest`, `shortest`: over
    all steps, where of two parts that exclude each other one runs, and turns of a loop that may be skipped are.

    `rerun`: bundles, over all steps, of a part that repeats the work of a step where a flag computed in the kernel says
    so; they are in none of the other numbers. `estimated`: libtpu's own estimate, which knows DMA and stalls but skips
    what is conditional. `unknown_loops`: inner loops whose count is no constant; they are counted once. `error`: why
    the kernel could not be measured alone.
    """

    length: int = 0
    steps: int = 1
    step: int = 0
    longest: float = 0.0
    shortest: float = 0.0
    rerun: float = 0.0
    estimated: float | None = None
    unknown_loops: int = 0
    error: str = ""

    @property
    def cycles(self) -> float:
        return max(self.longest, self.estimated or 0.0)

    @property
    def cycles_at_best(self) -> float:
        return max(self.shortest, self.estimated or 0.0)


@dataclass(frozen=True, kw_only=True)
class _Branch:
    """At `address`, to `target`: backwards it closes a loop. `negated` is "!" or ""."""

    address: int
    target: int
    negated: str
    predicate: str

    @property
    def skipped(self) -> range:
        return range(self.address + _DELAY_SLOTS + 1, self.target)

    @property
    def repeated(self) -> range:
        return range(self.target, self.address + _DELAY_SLOTS + 1)


def cost_of(text: str, grid: tuple[int, ...], *, reruns: bool = False, skipped: int = 0) -> Cost:
    """The cost of the kernel with final bundles `text`, over all steps of `grid`. `reruns`: it has a part that repeats
    its work where that has failed. `skipped`: so many turns of its longest loop need not be taken.
    """
    found = list(_BUNDLE.finditer(text))
    ends = [bundle.start() for bundle in found[1:]] + [len(text)]
    bodies = {int(bundle.group(1), 16): text[bundle.end() : end] for bundle, end in zip(found, ends, strict=True)}
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
    saved = _skipped(loops, counts, grid_loop, repeated, weights, skipped) if skipped else 0
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
    """The constant that the loop's counter is compared with; counters start at 0."""
    found = re.search(rf"%{loop.predicate}_p\d+ = scmp\.\w+\.s32\.totalorder %\w+, (\d+)", text)
    return int(found.group(1)) if found and loop.predicate else None


def _grid_loop(loops: list[_Branch], counts: Mapping[_Branch, int | None], steps: int) -> tuple[_Branch | None, int]:
    """The loop over the grid, the longest there is, and its steps: half of them where two cores share the grid."""
    if steps <= 1 or not loops:
        return None, 1
    longest = max(loops, key=lambda loop: len(loop.repeated))
    shared = math.ceil(steps / 2)
    return longest, shared if counts[longest] == shared + _PIPELINE_STEPS else steps


def _rerun(branches: list[_Branch], guarded: list[_Branch]) -> range:
    """The addresses of the longest part under a predicate that holds no other of a tenth of its length: the guard of
    the step holds the rerun, and all others are a few transfers, or around one of the `guarded` loops, which may run no
    turn.
    """
    parts = [branch.skipped for branch in branches if branch.target > branch.address and branch.predicate]
    parts = [part for part in parts if not any(_is_around(part, loop.repeated) for loop in guarded)]

    def holds_another(part: range) -> bool:
        inner = (other for other in parts if other != part and other.start in part and other.stop <= part.stop)
        return any(len(other) > len(part) / 10 for other in inner)

    return max((part for part in parts if not holds_another(part)), key=len, default=range(0))


def _is_around(part: range, loop: range) -> bool:
    return loop.start in part and loop.stop - 1 in part and len(part) < 1.1 * len(loop)


def _skipped(
    loops: list[_Branch],
    counts: Mapping[_Branch, int | None],
    grid_loop: _Branch | None,
    rerun: range,
    weights: Mapping[int, int],
    turns: int,
) -> float:
    """The weight of so many turns of the longest loop within a step, but for what is repeated."""
    inner = [loop for loop in loops if loop != grid_loop and loop.target not in rerun and counts[loop]]
    longest = max(inner, key=lambda loop: len(loop.repeated))
    return sum(weights.get(address, 0) for address in longest.repeated) * turns / (counts[longest] or 1)


def _exclusive(branches: list[_Branch], weights: Mapping[int, int]) -> list[tuple[int, int]]:
    """The weights of parts that a predicate and its opposite jump over: one of the two runs."""
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


def grid_of(body: str) -> tuple[int, ...]:
    """The grid of the serialized Mosaic module `body`. Raises `ValueError` if it is not constant."""
    from jax.extend.mlir import ir
    from jaxlib.mosaic.python import tpu

    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        tpu.register_dialect(context)
        text = str(ir.Module.parse(base64.b64decode(body)))
    found = re.search(r"iteration_bounds = array<i64: ([^>]*)>", text)
    grid = tuple(int(size) for size in found.group(1).split(",")) if found else ()
    if any(size < 0 for size in grid):
        raise ValueError("its grid is not constant")
    return grid


def measure(request: Mapping[str, Any], folder: Path) -> Cost:
    """Compiles the kernel of `request` alone; libtpu must have been told to dump into `folder`, which is empty."""
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
        grid = grid_of(config["custom_call_config"]["body"])
        jax.jit(lambda *values: call(*values)).lower(*operands).compile()
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return Cost(error=str(error).partition("\n")[0][:300])
    # With the dump flags there are bundles, with the profile's an estimate.
    dumps = [path.read_text() for path in folder.glob("*-ffi_call*-[0-9][0-9]-final_bundles.txt")]
    profile = "".join(path.read_text() for path in folder.glob("ffi_call*_static_llo_profile.textproto"))
    estimated = re.search(r"estimated_cycles: (\d+)", profile)
    how = {"reruns": request["reruns"], "skipped": request["skipped"]}
    cost = cost_of(dumps[0], grid, **how) if dumps else Cost()
    return replace(cost, estimated=float(estimated.group(1)) if estimated else None)


def _main(folder: Path) -> None:
    cost = measure(json.load(sys.stdin), folder)
    (folder / RESULT).write_text(json.dumps(asdict(cost)))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
