"""Predict the cost of merging a LoRA into a real-size denoiser on a described TPU: the chips' part.

`python benchmarks/merge.py --model wan2.1-t2v-14b --topology v6e:2x4 --rank 64`. It prints one line for each shape of
weight: the number of layers, microseconds for each, and the largest array on a chip besides the weights. Reading the
checkpoint and sending it to the chips is the host's part and is not predicted.
"""

import argparse
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from comfyui_tpu.tpu_runtime.cost_model import hlo
from comfyui_tpu.tpu_runtime.cost_model.chips import compile_devices
from comfyui_tpu.tpu_runtime.cost_model.chips import topology as parse_topology
from comfyui_tpu.tpu_runtime.loras import merge
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.plan.compile import compile_program
from comfyui_tpu.tpu_runtime.plan.plan import plan_program
from comfyui_tpu.tpu_runtime.programs import upstream_network, weights
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget, Program, shape_struct, shard_bytes
from comfyui_tpu.tpu_runtime.units import MIB
from jax.sharding import Mesh


def program(mesh: Mesh, stack: jax.ShapeDtypeStruct, rank: int) -> Program:
    """The merge of one layer of `stack` with a LoRA of `rank`."""
    assert isinstance(stack.sharding, jax.sharding.NamedSharding)
    shape = stack.shape[1:]
    spec = (*stack.sharding.spec, *[None] * (len(stack.shape) - len(stack.sharding.spec)))[1:]
    cut = len(shape) - 1  # a matrix, or cut out of one
    up = shape_struct(mesh, (*shape[:cut], rank), jnp.float32, *spec[:cut], None)
    down = shape_struct(mesh, (rank, *shape[cut:]), jnp.float32, None, *spec[cut:])
    start = shape_struct(mesh, shape, jnp.float32, *spec)
    layer = shape_struct(mesh, (), jnp.int32)
    changes = merge.WeightDeltas(products=(((up, down),),))  # type: ignore[arg-type] - shapes
    return Program(
        name=f"merge {'x'.join(map(str, shape))}",
        fn=merge.merge_layer,
        args=(stack, layer, start, changes),
        mesh=mesh,
        precision="float32",
        donate=(0,),
        out_shardings=stack.sharding,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="wan2.1-t2v-14b")
    parser.add_argument("--topology", default="v6e:2x4")
    parser.add_argument("--rank", type=int, default=64)
    options = parser.parse_args()
    spec, topology = lookup_spec(options.model), parse_topology(options.topology)
    component = spec.component(spec.denoiser.experts[0])
    devices = compile_devices(topology)
    mesh = CompileTarget(devices=devices, precision="bfloat16").mesh(
        spec.parallelism.mesh_shape(len(devices), 2 if spec.recipe.guidance == "cfg" else 1, component.config)
    )
    wanted = weights.abstract_weights(upstream_network.build_network(component, component.config), mesh, "bfloat16")
    stacks = {name: want for name, want in wanted.items() if name.startswith(component.blocks) and want.ndim > 2}
    layers: Counter[tuple] = Counter()
    examples = {}
    for name, want in stacks.items():
        if name.endswith(".weight"):
            layers[want.shape, str(want.sharding.spec)] += want.shape[0]
            examples[want.shape, str(want.sharding.spec)] = want
    total = 0.0
    for key, count in layers.items():
        done = compile_program(program(mesh, examples[key], options.rank), topology)
        assert done.text is not None, done.refusal
        plan = plan_program(done, hlo.parse_module(done.text), {}, topology)
        assert plan.predicted_s is not None and plan.timing is not None
        total += count * plan.predicted_s
        stack, _, start, _ = done.program.args
        beside = (done.memory.peak - shard_bytes(stack)) / MIB
        layer = int(np.prod(start.sharding.shard_shape(start.shape))) * 4 / MIB
        print(
            f"{done.program.name:<28} {count:>4} layers, {plan.predicted_s * 1e6:>6.0f} us each; beside the stack "
            f"{beside:.1f} MiB a chip, of which a float32 shard of the layer {layer:.1f}; "
            f"{len(plan.timing.collectives)} collectives"
        )
    print(
        f"{spec.title}, rank {options.rank}, {topology.name}: {total:.3f} s of the chips for every matrix of the blocks"
    )


if __name__ == "__main__":
    main()
