"""In which precision products are computed: in the programs of every model, and in the kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from comfyui_tpu.kernels import attention, convolution
from comfyui_tpu.kernels.attention_config import AttentionConfig
from comfyui_tpu.kernels.attention_reference import Keys
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.plan.products import assert_as_written
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.model_spec import STAGES, ModelSpec
from comfyui_tpu.tpu_runtime.models import SPECS
from comfyui_tpu.tpu_runtime.programs import denoising_plan
from comfyui_tpu.tpu_runtime.programs.program import Program, shape_struct


def products_key(spec: ModelSpec, stage: str) -> tuple[Any, ...]:
    """What models have in common whose programs of a stage have the same products."""
    functions = {
        "encode": [text.encode for text in spec.text_encoders],
        "image": [spec.pictures.encode],
        "denoise": [spec.denoiser.forward, spec.recipe.guidance, spec.denoiser.step_reuse],
        "decode": [spec.vae.decode],
    }
    names = {
        "encode": [text.component for text in spec.text_encoders],
        "image": [part.name for part in spec.components if part.name in ("vae_encoder", "image_encoder")],
        "denoise": spec.denoiser.experts[:1],
        "decode": [spec.vae.component],
    }
    parts = [(spec.component(name).class_name, str(spec.component(name).config)) for name in names[stage]]
    return stage, str(parts), str(functions[stage])


# Each program once; "image" of a model that takes none has no programs.
CASES = {
    products_key(spec, stage): (spec, stage)
    for spec in reversed(SPECS)
    for stage in STAGES
    if stage != "image" or spec.pictures.encode is not None
}


def list_stage_programs(spec: ModelSpec, stage: str) -> list[Program]:
    devices = chips.compile_devices(chips.topology("v6e-1"))
    found = [*denoising_plan.list_programs(spec, spec.settings(), devices, stages=(stage,))]
    if stage == "denoise" and spec.denoiser.step_reuse is not None:
        found += denoising_plan.list_programs(spec, spec.settings(step_cache=True), devices, stages=(stage,))
    return found


@pytest.mark.recorded
@pytest.mark.parametrize(
    ("spec", "stage"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in CASES.values()]
)
def test_float32_products_run_in_float32_in_every_program(spec: ModelSpec, stage: str):
    """Every sibling at its own size. The suite looks at each flagship where it is compiled, in `plan/test_plan.py`."""
    assert any([assert_as_written(program) for program in list_stage_programs(spec, stage)])


def run_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    keys = Keys(keys=k, values=v, rows=k.shape[1], certain=k.shape[1])
    form = AttentionConfig(block_q=128, step=128)
    return attention.flat_attention(q, [keys], head_dim=64, form=form, log_sums=False, scale=0.125)[0]


def run_convolution(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return convolution.convolution(x, weight, bias, repeats=False)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(run_attention, [(1, 256, 128)] * 3), (run_convolution, [(1, 128, 2, 8, 16), (128, 128, 1, 3, 3), (128,)])],
)
def test_kernels_compile_under_any_default_matmul_precision(function: Callable, shapes: list[tuple[int, ...]]):
    mesh = make_mesh(chips.compile_devices(chips.topology("v6e-1")), MeshShape())
    args = tuple(shape_struct(mesh, shape, jnp.bfloat16) for shape in shapes)
    program = Program(name="kernel", fn=function, args=args, mesh=mesh, precision="bfloat16")
    with jax.default_matmul_precision("highest"):
        lowered = program.lower()
        assert program.compile(lowered).memory_analysis() is not None
