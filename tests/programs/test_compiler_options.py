"""What the compiler is told: taken by libtpu for every described chip, and nothing elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.cost_model import chips
from comfyui_tpu.tpu_runtime.programs.program import Program, shape_struct, step_compiler_options


def test_step_compiler_options_on_cpu_are_empty():
    mesh = make_mesh(jax.devices()[:1], MeshShape())
    assert step_compiler_options(mesh) == {}
    program = Program(
        name="add", fn=lambda x: x + 1, args=(shape_struct(mesh, (8,), jnp.float32),), mesh=mesh, precision="float32"
    )
    assert np.asarray(program.compile()(jnp.zeros(8)))[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_step_compiler_options_are_known_to_libtpu(name: str):
    """One that it does not know is an error there, not a warning: see the next test."""
    devices = chips.compile_devices(chips.topology(name))
    mesh = make_mesh(devices, MeshShape(sp=len(devices)))
    x = shape_struct(mesh, (256 * len(devices), 256), jnp.bfloat16, "sp")
    options = step_compiler_options(mesh)
    assert options
    program = Program(
        name="product", fn=lambda a: a @ a.T, args=(x,), mesh=mesh, precision="bfloat16", compiler_options=options
    )
    program.compile()


SPARSE_CORE = {
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
    "xla_tpu_sparse_core_all_gather_latency_multiplier",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_devices", "gathers", "has_vmem"),
    [
        ("v5e:2x2", 4, False, True),
        ("v5p:2x2x1", 4, False, False),
        ("v6e:2x2", 4, True, True),
        ("tpu7x:2x2x1", 8, True, False),  # two devices a chip
    ],
)
def test_step_compiler_options_depend_on_chip(name: str, num_devices: int, gathers: bool, has_vmem: bool):
    devices = chips.compile_devices(chips.topology(name))
    mesh = make_mesh(devices, MeshShape(sp=len(devices)))
    found = set(step_compiler_options(mesh))
    assert len(devices) == num_devices and "xla_tpu_enable_async_all_to_all" in found
    assert found & SPARSE_CORE == (SPARSE_CORE if gathers else set())
    assert ("xla_tpu_scoped_vmem_limit_kib" in found) == has_vmem


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "is_early"), [(MeshShape(sp=4), True), (MeshShape(tp=4), False)], ids=str)
def test_step_compiler_options_start_weight_gathers_early(shape: MeshShape, is_early: bool):
    options = step_compiler_options(make_mesh(chips.compile_devices(chips.topology("v6e:2x2")), shape))
    assert any("latency_multiplier" in name for name in options) == is_early


@pytest.mark.slow
def test_unknown_compiler_option_raises_runtime_error():
    mesh = make_mesh(chips.compile_devices(chips.topology("v6e:1x1")), MeshShape())
    program = Program(
        name="add", fn=lambda x: x + 1, args=(shape_struct(mesh, (8, 128), jnp.float32),), mesh=mesh,
        precision="float32",
        compiler_options={"xla_tpu_no_such_option": "true"},
    )  # fmt: skip
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_tpu_no_such_option'"):
        program.compile()
