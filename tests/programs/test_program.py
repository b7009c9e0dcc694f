"""A program's shapes before it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tpu_runtime.programs.program import Program, shaped


def test_what_is_asked_for_its_results_is_not_traced_again_to_be_compiled():
    mesh, traced = make_mesh(jax.devices()[:1], MeshShape()), []

    def call(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        traced.append(x.shape)
        return x[:, :2] + 1, x.astype(jnp.bfloat16), jnp.isfinite(x).all()

    program = Program(
        name="call", fn=call, args=(shaped(mesh, (3, 5), jnp.float32),), mesh=mesh, precision="float32"
    )  # fmt: skip
    result, carried = program.zeros()
    assert isinstance(result, np.ndarray) and result.shape == (3, 2) and not result.any()
    assert carried.shape == (3, 5) and carried.dtype == jnp.bfloat16
    given = np.arange(15, dtype=np.float32).reshape(3, 5)
    assert np.array_equal(program.compile()(given)[0], given[:, :2] + 1)
    assert traced == [(3, 5)]
