"""Predictions for small programs against hand counts. All compile for a TPU, none needs one."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.kernels import linear_int8, registry
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.cost_model import bundles, chips, collectives, flops, hlo, interconnect, kernels, step_time
from comfyui_tpu.tpu_runtime.plan import findings
from comfyui_tpu.tpu_runtime.programs.program import Program
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.slow

V6E = chips.topology("v6e-1").chip


def abstract_array(mesh: Mesh, shape: tuple[int, ...], *axes: Any, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


@functools.cache
def mesh_of(name: str, shape: tuple[int, ...] = (1, 1, 1)) -> Mesh:
    return Mesh(np.array(chips.compile_devices(chips.topology(name))).reshape(shape), ("dp", "sp", "tp"))


ONE = functools.partial(mesh_of, "v6e-1")
EIGHT = functools.partial(mesh_of, "v6e-8", (2, 4, 1))


def program(mesh: Mesh, fn: Callable, *args: Any, **more: Any) -> Program:
    return Program(name=fn.__name__, fn=fn, args=args, mesh=mesh, precision="bfloat16", **more)


def text_of(mesh: Mesh, fn: Callable, *args: Any, **options: Any) -> str:
    return program(mesh, fn, *args).lower().compile(compiler_options=options).as_text()


def timing_of(text: str, mesh: Mesh, at_best: bool = False) -> step_time.Timing:
    machine = step_time.TimingTarget(chip=V6E, devices=tuple(mesh.devices.flat), at_best=at_best)
    return step_time.predict_timing(hlo.parse_module(text), machine)


# --- XLA's own operations ---------------------------------------------------------------------------------------------


def test_predict_timing_matmul_matches_matrix_unit_cycles():
    """4096^3: 2 * 4096^3 FLOP over 2 units of 256 x 256, two rows a cycle. The compiler's schedule adds 15 %."""
    square = abstract_array(ONE(), (4096, 4096))
    found = timing_of(text_of(ONE(), lambda a, b: a @ b, square, square), ONE())
    by_hand = 2 * 4096**3 / (2 * 256 * 256 * 2 * 2)
    assert by_hand <= found.xla <= 1.25 * by_hand
    assert (found.kernels, found.waiting, found.collectives, found.uncounted) == (0, 0, (), ())


def chain(a: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, matrix: (x @ matrix, None), a, w)[0]


def test_predict_timing_loop_scales_with_trip_count():
    square = abstract_array(ONE(), (2048, 2048))
    five, ten = (
        timing_of(text_of(ONE(), chain, square, abstract_array(ONE(), (trips, 2048, 2048))), ONE()) for trips in (5, 10)
    )
    (body,) = {operation.cycles / 10 for operation in ten.operations if "dot_general" in operation.op_name}
    assert 2 * 2048**3 / 524288 <= body <= 1.5 * 2 * 2048**3 / 524288
    assert {o.times for o in five.operations if "dot_general" in o.op_name} == {5}
    per_trip = sum(o.cycles for o in ten.operations if o.times == 10) / 10
    assert ten.xla - five.xla == pytest.approx(5 * per_trip, rel=1e-6)


def test_predict_timing_nested_loop_multiplies_trip_counts():
    def nested(x: jax.Array) -> jax.Array:
        def outer(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            inner = jax.lax.fori_loop(3, 10, lambda j, y: jnp.sin(y @ y) + j.astype(y.dtype), x)
            return inner + i.astype(x.dtype), None

        return jax.lax.scan(outer, x, jnp.arange(5))[0]

    found = timing_of(text_of(ONE(), nested, abstract_array(ONE(), (512, 512))), ONE())
    assert max(operation.times for operation in found.operations) == 5 * 7


def test_predict_timing_data_dependent_loop_raises_not_implemented():
    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x[0, 0] < 5, lambda x: x @ x + 1, x)

    text = text_of(ONE(), until, abstract_array(ONE(), (512, 512)))
    with raises_message(NotImplementedError, "plan.loop_count_unknown", op_name="jit(until)/while"):
        timing_of(text, ONE())


def test_predict_timing_conditional_uses_longest_or_shortest_branch():
    def either(x: jax.Array, cheap: jax.Array) -> jax.Array:
        return jax.lax.cond(cheap, lambda x: x + 1, lambda x: x @ x @ x @ x, x)

    text = text_of(ONE(), either, abstract_array(ONE(), (1024, 1024)), abstract_array(ONE(), (), dtype=jnp.bool_))
    dear, cheap = (timing_of(text, ONE(), at_best=at_best).xla for at_best in (False, True))
    assert dear > 3 * 2 * 1024**3 / 524288
    assert dear > 2 * cheap > 0


# --- kernels ----------------------------------------------------------------------------------------------------------


def matmul_kernel(a: jax.Array, b: jax.Array, block: int = 512) -> jax.Array:
    def body(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32).astype(out_ref.dtype)

    return pl.pallas_call(
        body,
        grid=(a.shape[0] // block, b.shape[1] // block),
        in_specs=[
            pl.BlockSpec((block, a.shape[1]), lambda i, j: (i, 0)),
            pl.BlockSpec((a.shape[1], block), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=48 * 2**20),
    )(a, b)


def branching_kernel(x: jax.Array) -> jax.Array:
    """In each of 16 steps a loop of 8 products, then one of two parts that exclude each other."""

    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.zeros_like(out_ref)

        def add(i: jax.Array, _: tuple) -> tuple:
            rows = x_ref[pl.ds(pl.multiple_of(i * 64, 64), 64), :]
            out_ref[...] += jnp.dot(x_ref[...], rows.T, preferred_element_type=jnp.float32)[:, :1]
            return ()

        jax.lax.fori_loop(0, 8, add, ())
        large = jnp.max(x_ref[0:8, :].astype(jnp.float32)) > 2.0

        @pl.when(large)
        def _() -> None:
            out_ref[...] = jnp.exp(jnp.sin(out_ref[...]))

        @pl.when(jnp.logical_not(large))
        def _() -> None:
            out_ref[...] = out_ref[...] + 1

    return pl.pallas_call(
        body,
        grid=(16,),
        in_specs=[pl.BlockSpec((512, 256), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((512, 256), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
    )(x)


def checking_kernel(x: jax.Array, reruns: bool = False) -> jax.Array:
    """In each of 16 steps a product; where a flag says so, and if it `reruns`, a loop of 8 in its place."""

    def body(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.dot(x_ref[...], x_ref[0:64, :].T, preferred_element_type=jnp.float32)[:, :1]

        def again(i: jax.Array, _: None) -> None:
            rows = x_ref[pl.ds(pl.multiple_of(i * 64, 64), 64), :]
            out_ref[...] += jnp.dot(x_ref[...], rows.T, preferred_element_type=jnp.float32)[:, :1]

        if reruns:
            pl.when(jnp.max(out_ref[...]) > 2.0)(lambda: jax.lax.fori_loop(0, 8, again, None))

    return pl.pallas_call(
        body,
        grid=(16,),
        in_specs=[pl.BlockSpec((512, 256), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((512, 1), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((len(x), 1), jnp.float32),
        name="checking" + registry.WITH_RERUN * reruns,
    )(x)


def rerunning_kernel(x: jax.Array) -> jax.Array:
    return checking_kernel(x, reruns=True)


def skipping_kernel(x: jax.Array, first: jax.Array) -> jax.Array:
    """Eight products, of which the first are left out."""

    def body(first: Any, x: Any, out: Any) -> None:
        out[...] = jnp.zeros_like(out)

        def turn(_: Any, carry: None) -> None:
            out[...] += jnp.dot(x[...], x[:256], preferred_element_type=jnp.float32)

        jax.lax.fori_loop(first[0], 8, turn, None)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(x) // 512,),
            in_specs=[pl.BlockSpec((512, 256), lambda i, _: (i, 0))],
            out_specs=pl.BlockSpec((512, 256), lambda i, _: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        metadata={registry.SKIPPED_TURNS: "6"},
        name="skipping",
    )(first, x)


@pytest.fixture(scope="module")
def costs() -> Mapping[str, bundles.Cost]:
    """Of a matmul in 8 and in 32 steps, and of the kernels with parts; measured side by side, for it takes seconds."""
    found = {
        name: kernels.find_kernels(hlo.parse_module(text_of(ONE(), fn, *arrays)))[0]
        for name, fn, *arrays in (
            ("8 steps", matmul_kernel, abstract_array(ONE(), (1024, 2048)), abstract_array(ONE(), (2048, 2048))),
            ("32 steps", matmul_kernel, abstract_array(ONE(), (4096, 2048)), abstract_array(ONE(), (2048, 2048))),
            ("parts", branching_kernel, abstract_array(ONE(), (8192, 256))),
            ("checked", checking_kernel, abstract_array(ONE(), (8192, 256))),
            ("rerun", rerunning_kernel, abstract_array(ONE(), (8192, 256))),
            (
                "skips",
                skipping_kernel,
                abstract_array(ONE(), (8192, 256)),
                abstract_array(ONE(), (1,), dtype=jnp.int32),
            ),
        )
    }
    measured = kernels.measure_kernels(found.values(), chips.topology("v6e-1"))
    return {name: measured[kernel.key] for name, kernel in found.items()}


def test_measure_kernels_cost_is_body_times_grid(costs: Mapping[str, bundles.Cost]):
    """One step: 512 x 512 x 2048. The matrix units need 2048 cycles; with loads and stores the schedule takes more."""
    by_hand = 2 * 512 * 512 * 2048 / 524288
    for cost, steps in ((costs["8 steps"], 8), (costs["32 steps"], 32)):
        assert (cost.steps, cost.unknown_loops, cost.error) == (steps, 0, "")
        assert by_hand <= cost.step <= 1.5 * by_hand
        assert cost.estimated and by_hand * steps <= cost.cycles <= 2 * by_hand * steps
    added = (costs["32 steps"].longest - costs["8 steps"].longest) / 24
    assert added == pytest.approx(costs["8 steps"].step, rel=0.02)


def test_measure_kernels_counts_inner_loops_and_one_exclusive_branch(costs: Mapping[str, bundles.Cost]):
    cost = costs["parts"]
    assert (cost.steps, cost.unknown_loops, cost.error) == (16, 0, "")
    # 512 x 256 sums pass the two store slots of 1024 lanes in 64 bundles; so at least does each of the eight products.
    assert 16 * 8 * 64 < cost.shortest < cost.longest


def test_measure_kernels_shortest_path_omits_skippable_turns(costs: Mapping[str, bundles.Cost]):
    cost = costs["skips"]
    assert (cost.steps, cost.unknown_loops, cost.error) == (16, 0, "")
    assert cost.longest - cost.shortest > 16 * 6 * 64
    assert cost.longest / 8 < cost.shortest < cost.longest / 2


def test_measure_kernels_counts_rerun_separately(costs: Mapping[str, bundles.Cost]):
    """8 products of which each passes 64 bundles of stores at least, in each of 16 steps; beside them only the flag."""
    without, cost = costs["checked"], costs["rerun"]
    assert (without.rerun, cost.steps, cost.unknown_loops, cost.error) == (0, 16, 0, "")
    assert cost.rerun > 16 * 8 * 64
    assert without.longest < cost.longest < without.longest + cost.rerun / 4


def test_predict_timing_kernel_uses_measured_cost(costs: Mapping[str, bundles.Cost]):
    def twice(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (branching_kernel(x).astype(x.dtype), None), x, None, length=5)[0]

    module = hlo.parse_module(text_of(ONE(), twice, abstract_array(ONE(), (8192, 256))))
    (kernel,) = kernels.find_kernels(module)
    known = {kernel.key: replace(costs["parts"], estimated=None)}
    for at_best, cycles in ((False, costs["parts"].longest), (True, costs["parts"].shortest)):
        machine = step_time.TimingTarget(chip=V6E, devices=tuple(ONE().devices.flat), kernels=known, at_best=at_best)
        assert step_time.predict_timing(module, machine).kernels == 5 * cycles


# --- collectives ------------------------------------------------------------------------------------------------------


FUSED = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
}
ON_SPARSE_CORE = {"xla_tpu_enable_sparse_core_collective_offload_all_gather": "true"}


def layers(overlapped: bool, options: Mapping[str, str] = MappingProxyType({})) -> tuple[str, int]:
    """Six layers whose weights are gathered: the layer's own, or, so that it may overlap, the next one's."""
    mesh, rows, size = EIGHT(), 8192, 2048

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("dp", "sp"), P(None, "sp")), out_specs=P("dp", "sp"))
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        def gather(part: jax.Array) -> jax.Array:
            return jax.lax.all_gather(part, "sp", axis=0, tiled=True)

        def ahead(carry: tuple, part: jax.Array) -> tuple:
            x, whole = carry
            return (x + x @ whole, gather(part)), None

        def at_once(x: jax.Array, part: jax.Array) -> tuple:
            return x + x @ gather(part), None

        if overlapped:
            (x, _), _ = jax.lax.scan(ahead, (x, gather(w[0])), w)
        else:
            x, _ = jax.lax.scan(at_once, x, w)
        return jax.lax.all_to_all(x, "sp", split_axis=2, concat_axis=1, tiled=True).reshape(x.shape)

    arrays = abstract_array(mesh, (2, rows, size), "dp", "sp"), abstract_array(mesh, (6, size, size), None, "sp")
    return text_of(mesh, run, *arrays, **options), size * size * 2


def test_predict_timing_exposed_collectives_add_waiting_time():
    text, size = layers(overlapped=False)
    found = timing_of(text, EIGHT())
    gathers = [each for each in found.collectives if each.kind == "all-gather"]
    assert sum(each.times for each in gathers) == 6
    # Four chips in a square: three quarters of the matrix, over two links.
    assert {each.bytes for each in gathers} == {size * 3 / 4 / 2}
    assert sum(each.seconds for each in gathers) == pytest.approx(6 * (interconnect.START_S + size * 3 / 8 / 90e9))
    assert not any(each.overlapped for each in gathers)
    (exchange,) = (each for each in found.collectives if each.kind == "all-to-all")
    assert exchange.bytes == 8192 // 4 * 2048 * 2 * 2 / 4
    assert found.waiting / V6E.clock_hz == pytest.approx(sum(each.seconds for each in found.collectives), rel=1e-3)
    assert any("all_gather" in sentence for sentence in findings.find_exposed_collectives(found))


def test_predict_timing_overlapped_collective_adds_no_waiting_time():
    text, _ = layers(overlapped=True, options=FUSED)
    found = timing_of(text, EIGHT())
    inside = [each for each in found.collectives if each.kind == "all-gather" and each.times == 6]
    assert inside and all(each.overlapped for each in inside), found.collectives


def test_predict_timing_sparse_core_collective_has_same_duration():
    text, size = layers(overlapped=False, options=ON_SPARSE_CORE)
    assert " call-start(" in text
    gathers = [each for each in timing_of(text, EIGHT()).collectives if each.kind == "all-gather"]
    assert sum(each.seconds for each in gathers) == pytest.approx(6 * (interconnect.START_S + size * 3 / 8 / 90e9))


def test_predict_timing_unmeasured_kernel_costs_memory_traffic():
    def doubled(x: jax.Array) -> jax.Array:
        def body(x: Any, out: Any) -> None:
            out[...] = x[...] * 2

        blocks = pl.BlockSpec((512, 1024), lambda at: (at, 0))
        return pl.pallas_call(body, grid=(16,), in_specs=[blocks], out_specs=blocks, out_shape=x)(x)

    text = text_of(ONE(), doubled, abstract_array(ONE(), (8192, 1024)))
    by_hand = 2 * 8192 * 1024 * 2 / (V6E.hbm_gb_s * 1e9) * V6E.clock_hz
    assert timing_of(text, ONE()).kernels == pytest.approx(by_hand)  # nothing was measured of it


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", ((0, 1), (2, 3))),
        ("channel_id=1, replica_groups=[2,2]<=[4], to_apply=%add", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=1] {'b'}, dimensions={1}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={1}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, dimensions={1}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([4]) {'b'}, dimensions={1}", ((0, 1), (2, 3))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_parse_groups_reads_every_replica_group_format(written: str, groups: tuple):
    found = hlo.Instruction(
        name="x", shape="f32[8]", opcode="all-gather", operands=(), operand_text="", attributes=written
    )
    assert collectives.parse_groups(found) == groups


# --- FLOPs ------------------------------------------------------------------------------------------------------------


def test_count_flops_includes_loops_shards_and_kernels():
    mesh = EIGHT()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(None, "sp"), P()), out_specs=P(None, "sp"), check_vma=False
    )
    def shards(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_kernel(x[0], w)[None]

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]
        return shards(x, w)

    arrays = abstract_array(mesh, (1, 4096, 512), None, "sp"), abstract_array(mesh, (512, 512))
    counted = flops.count_flops(flops.trace_program(program(mesh, run, *arrays)), mxu_width=256)
    # All of `dp` do the same, so `sp` counts and `dp` does not.
    assert counted.total == 4 * 2 * 4096 * 512 * 512
    assert counted.kernels == 2 * 4096 * 512 * 512
    assert counted.charged == counted.total


def test_count_flops_charges_shallow_matmul_for_full_matrix_unit():
    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return (q @ k.T) @ k

    arrays = abstract_array(ONE(), (1024, 128)), abstract_array(ONE(), (1024, 128))
    counted = flops.count_flops(flops.trace_program(program(ONE(), attend, *arrays)), mxu_width=256)
    assert counted.total / counted.charged == pytest.approx(2 / 3)


def test_count_flops_charges_int8_matmul_half():
    """Or no kernel of theirs would be predicted faster than bfloat16's peak."""

    def run(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        weight = linear_int8.Int8Weight(w, jnp.ones(w.shape[0]))
        return linear_int8.linear_int8_kernel([x], [weight], block=256, activation=None, turned=False)

    arrays = abstract_array(ONE(), (1, 1024, 512)), abstract_array(ONE(), (1024, 512), dtype=jnp.int8)
    counted = flops.count_flops(flops.trace_program(program(ONE(), run, *arrays)), mxu_width=256)
    assert counted.total == 2 * 1024 * 512 * 1024
    # A quarter of the work, that of rotating tokens 256 deep for 1024 results, is in bfloat16.
    assert counted.kernels == counted.charged == pytest.approx(counted.total * (0.5 + 0.25) / 1.25)


# --- what is wasteful -------------------------------------------------------------------------------------------------


def test_find_replicated_weights_names_large_weight():
    arrays = {
        "ffn": {"weight": abstract_array(EIGHT(), (8192, 8192))},
        "fine": abstract_array(EIGHT(), (8192, 8192), "sp"),
    }
    found = findings.find_replicated_weights(
        program(EIGHT(), lambda weights: weights, arrays, components=("transformer",))
    )
    assert len(found) == 1
    assert "['ffn']['weight'] bfloat16[8192, 8192] of 128 MiB is replicated on all 8 devices" in found[0]


def rope_by_scatter(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    even, odd = x[..., 0::2], x[..., 1::2]
    out = jnp.zeros_like(x).at[..., 0::2].set(even * cos - odd * sin)
    return out.at[..., 1::2].set(even * sin + odd * cos)


def test_find_scatters_names_source_line():
    angles = abstract_array(ONE(), (4096, 1, 64))
    found = findings.find_scatters(
        text_of(ONE(), rope_by_scatter, abstract_array(ONE(), (4096, 4, 128)), angles, angles)
    )
    assert len(found) == 2
    assert all("jit(rope_by_scatter)/scatter; " in each and "test_timing.py:" in each for each in found), found


def test_find_float32_scores_names_attention_scores():
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32)
        out = jnp.einsum("hqk,hkd->hqd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
        # Without the sums XLA would make it a kernel of its own, which keeps the scores on the chip.
        return out, jax.nn.logsumexp(scores, axis=-1)

    heads = abstract_array(ONE(), (4, 4096, 128))
    text = text_of(ONE(), attend, heads, heads, heads)
    found = findings.find_float32_scores(text, limit=128 * 2**20)
    assert len(found) == 1
    assert "hqd,hkd->hqk/dot_general; " in found[0] and "256 MiB in float32, f32[4,4096,4096]" in found[0]
    assert findings.find_float32_scores(text, limit=2**30) == []
    dearest = step_time.most_expensive(timing_of(text, ONE()), 3)
    assert any("dot_general" in operation.op_name for operation in dearest)
    assert all("test_timing.py:" in operation.source for operation in dearest)


def test_find_huge_matmuls_names_oversized_scores():
    def attend(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32).max()

    heads = abstract_array(EIGHT(), (8, 65536, 128), None, "sp")
    found = findings.find_huge_matmuls(program(EIGHT(), attend, heads, heads))
    assert len(found) == 1 and "float32 matrix product of 16.0 GiB per device" in found[0]
    assert "hqd,hkd->hqk/dot_general at " in found[0] and "test_timing.py" in found[0]


def test_find_layout_copies_names_copy_before_kernel():
    def run(a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul_kernel(a.reshape(4, 512, 512).swapaxes(0, 1).reshape(2048, 512), b).T

    text = text_of(ONE(), run, abstract_array(ONE(), (2048, 512)), abstract_array(ONE(), (512, 512)))
    found = findings.find_layout_copies(text, timing_of(text, ONE()))
    assert any("before a kernel" in sentence and "test_timing.py" in sentence for sentence in found), text
