"""Compare predictions with a published measurement: a plain port of Wan 2.1 14B.

The plain port is upstream's block unchanged: rotary embedding by strided writes, and float32 norms over tokens that
every chip of `tp` holds. Heads and feed-forward are split four ways, and the branches of guidance run side by side. An
online-softmax kernel has tiles of 3328 x 2816 x 256. The published time of such a port is 4.54 s a step on a v6e-8 at
1280x720 with 81 frames.

Run: python benchmarks/calibrate.py
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from comfyui_tpu.sharding.mesh import Device
from comfyui_tpu.sharding.rules import REPLICATED, Rule
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.models.wan.spec import SPEC
from comfyui_tpu.tpu_runtime.models.wan.transformer import TRANSFORMER
from comfyui_tpu.tpu_runtime.plan import plan
from comfyui_tpu.tpu_runtime.plan.compile import PlanRequest
from comfyui_tpu.tpu_runtime.programs import torch_bridge, upstream_network, weights
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget, Program, shape_struct
from comfyui_tpu.tpu_runtime.programs.weights import Weights
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from other_kernels import online

PUBLISHED_S, PUBLISHED_KERNEL_S = 4.54, 3.03
COLUMNS, ROWS = (None, "heads", None), (None, None, "heads")
RULES = (
    Rule("blocks.**.bias", REPLICATED),
    Rule("blocks.*.*.norm_q.weight", REPLICATED),
    Rule("blocks.*.*.norm_k.weight", REPLICATED),
    Rule("blocks.*.norm2.weight", REPLICATED),
    Rule("blocks.*.scale_shift_table", REPLICATED),
    Rule("blocks.*.*.to_out.0.weight", ROWS),
    Rule("blocks.*.*.*.weight", COLUMNS),
    Rule("blocks.*.ffn.net.0.proj.weight", COLUMNS),
    Rule("blocks.*.ffn.net.2.weight", ROWS),
    Rule("condition_embedder.time_proj.weight", REPLICATED),
    Rule("condition_embedder.*.*.weight", REPLICATED),
)


def attend(mesh: Mesh, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Heads on `tp`, the whole sequence on each chip."""

    def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return online.attention(q, k, v)

    heads = P("dp", None, "tp", None)
    return jax.shard_map(local, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False)(q, k, v)


def plain_port(devices: tuple[Device, ...]) -> Program:
    """One denoiser call of both branches, upstream's blocks scanned and otherwise untouched."""
    from diffusers.models.transformers import transformer_wan

    target = CompileTarget(devices=devices, precision="bfloat16")
    mesh = target.mesh(MeshShape(dp=2, tp=4))
    network = upstream_network.build_network(replace(TRANSFORMER, rules=RULES), TRANSFORMER.config)

    def dispatch(query: Any, key: Any, value: Any, **_: Any) -> Any:
        return torch_bridge.call_jax(lambda q, k, v: attend(mesh, q, k, v), query, key, value)

    def forward(transformer: Any, sample: Any, timestep: Any, text: Any) -> Any:
        return transformer(sample, timestep.expand(len(sample)), text, return_dict=False)[0]

    def call(weights: Weights, sample: jax.Array, timestep: jax.Array, text: jax.Array) -> jax.Array:
        transformer_wan.dispatch_attention_fn = dispatch  # pyright: ignore[reportPrivateImportUsage]
        return torch_bridge.call_functional(network.module, weights, forward, sample, timestep, text)

    settings = SPEC.settings()
    latent = SPEC.geometry.latent_shape(settings)
    return Program(
        name="plain_port",
        fn=call,
        weights=weights.abstract_weights(network, mesh, "bfloat16"),
        components=("transformer",),
        args=(
            shape_struct(mesh, (2, *latent[1:]), jnp.bfloat16, "dp"),
            shape_struct(mesh, (1,), jnp.int32),
            shape_struct(mesh, (2, 512, 4096), jnp.bfloat16, "dp"),
        ),
        mesh=mesh,
        precision="bfloat16",
    )


class PlainPort(PlanRequest):
    def programs(self) -> tuple[Program, ...]:
        return (plain_port(chips.compile_devices(self.topology)),)


def main() -> None:
    request = PlainPort(spec=SPEC, settings=SPEC.settings(), topology=chips.topology("v6e:2x4"), stages=("denoise",))
    (found,) = plan.make_plan(request, print).programs
    timing, clock = found.timing, request.topology.chip.clock_hz
    assert found.predicted_s is not None and timing is not None  # it fits
    kernel_s, rest_s = timing.kernels / clock, timing.xla / clock
    published_rest_s = PUBLISHED_S - PUBLISHED_KERNEL_S
    print("                            step   kernel   operations   waiting for links, s")
    print(
        f"predicted by the compiler   {found.predicted_s:.2f}   {kernel_s:.2f}     {rest_s:.2f}         "
        f"{found.predicted_s - kernel_s - rest_s:.2f}"
    )
    print(f"published, measured         {PUBLISHED_S}   {PUBLISHED_KERNEL_S}     {published_rest_s:.2f} together")
    print(
        f"the prediction is {kernel_s / PUBLISHED_KERNEL_S - 1:+.0%} in the kernel and "
        f"{(found.predicted_s - kernel_s) / published_rest_s - 1:+.0%} in the rest"
    )


if __name__ == "__main__":
    main()
