"""A program's shapes before it is compiled, and while others are."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from comfyui_tpu.sharding.mesh import make_mesh
from comfyui_tpu.sharding.shape import MeshShape
from comfyui_tpu.tests.support.patience import PATIENCE_S
from comfyui_tpu.tpu_runtime.engine.program_cache import PendingCompilation, ProgramRequest
from comfyui_tpu.tpu_runtime.programs.program import TRACE_LOCK, Program, shape_struct


class Doubling:
    """A program, and how often its code was traced."""

    def __init__(self) -> None:
        self.traced = 0
        mesh = make_mesh(jax.devices()[:1], MeshShape())
        args = (shape_struct(mesh, (3, 5), jnp.float32),)
        self.program = Program(name="call", fn=self, args=args, mesh=mesh, precision="float32")

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        self.traced += 1
        return x[:, :2] * 2, x.astype(jnp.bfloat16), jnp.isfinite(x).all()


def test_program_zeros_and_compile_trace_once():
    call = Doubling()
    result, carried = call.program.zeros()
    assert isinstance(result, np.ndarray) and result.shape == (3, 2) and not result.any()
    assert carried.shape == (3, 5) and carried.dtype == jnp.bfloat16
    given = np.arange(15, dtype=np.float32).reshape(3, 5)
    assert np.array_equal(call.program.compile()(given)[0], given[:, :2] * 2)
    assert call.program.zeros()[0].shape == (3, 2) and call.traced == 1


def test_program_results_known_shapes_need_no_trace_lock():
    program = Doubling().program
    one = PendingCompilation(wanted=ProgramRequest(title="call", key=("call",), build=lambda: program), digest="call")
    one.program.compile()
    with ThreadPoolExecutor(1) as pool, TRACE_LOCK:
        found = pool.submit(lambda: one.program.results()).result(timeout=PATIENCE_S)
    assert [x.shape for x in found] == [(3, 2), (3, 5), ()]


def test_weights_digest_depends_on_number_format():
    """Weights of two quantized qualities have the same names and shapes; neither may take the other's on the chips."""
    mesh = make_mesh(jax.devices()[:1], MeshShape())

    def digest(dtype: jnp.dtype) -> str:
        weights = {"a": shape_struct(mesh, (2, 3), dtype), "a_worth": shape_struct(mesh, (2,), jnp.float32)}
        return Program(name="p", fn=jnp.add, weights=weights, args=(), mesh=mesh, precision="float32").weights_digest

    dtypes = [jnp.dtype(dtype) for dtype in (jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16)]
    assert len({*map(digest, dtypes)}) == len(dtypes) and digest(dtypes[0]) == digest(jnp.dtype(jnp.int8))
