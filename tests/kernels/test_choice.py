"""A kernel that is called by name raises what it refuses; an automatic choice says once why XLA computes instead."""

import functools
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comfyui_tpu.attention.prologue import HeadLayout
from comfyui_tpu.kernels import attention, convolution, dispatch, modulation, prologue, registry, residual_norm
from comfyui_tpu.kernels.attention_config import AttentionConfig, Maximum, Scores
from comfyui_tpu.kernels.attention_reference import keys_of_length
from comfyui_tpu.tpu_runtime.cost_model import chips, kernels
from jax.sharding import Mesh


def abstract_array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def attend(q: jax.Array, head_dim: int, form: AttentionConfig) -> jax.Array:
    return attention.flat_attention(
        q, [keys_of_length(q, q, 48)], head_dim=head_dim, form=form, log_sums=False, scale=1.0
    )[0]


def run_residual_norm(x: jax.Array, vector: jax.Array) -> jax.Array:
    return residual_norm.residual_norm_kernel(x, None, None, vector, vector, None, eps=1e-6, interpret=False)[1]


NAMED: dict[str, tuple[Callable, tuple, str]] = {
    "attention": (
        functools.partial(attend, head_dim=40, form=AttentionConfig()), (abstract_array(1, 48, 120),),
        "3 heads of 40 lanes: a head must have a multiple of 128 lanes, or 64 if the number of heads is even",
    ),
    "attention_prologue": (
        lambda x: prologue.split_heads(x, 2, 1, None, None, head_dim=24), (abstract_array(1, 48, 96),),
        "heads have 24 lanes, not 64 or 128; a chip's heads have 48 lanes, not a multiple of 128",
    ),
    "residual_norm": (
        run_residual_norm, (abstract_array(1, 48, 96), abstract_array(1, 96)),
        "tokens have 96 lanes, not a multiple of 128",
    ),
    "convolution": (
        functools.partial(convolution.convolution, bias=None, repeats=False),
        (abstract_array(1, 8, 4, 8, 16), abstract_array(8, 8, 1, 5, 5)),
        "a kernel of 5 rows and 5 columns has more than 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_kernel_called_directly_raises_refusal_reasons(name: str):
    call, arrays, reasons = NAMED[name]
    with pytest.raises(NotImplementedError) as error:
        jax.eval_shape(call, *arrays)
    assert str(error.value) == f"The kernel {name} does not compute this call: {reasons}."


def warnings(caplog: pytest.LogCaptureFixture, run: Callable[[], object]) -> list[str]:
    dispatch._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        run()
        run()
    return [record.getMessage() for record in caplog.records if record.name == dispatch.__name__]


def test_automatic_choice_warns_once_when_xla_computes(caplog: pytest.LogCaptureFixture):
    layout, x = HeadLayout(head_dim=24, kernel=True, interpret=True), jnp.ones((1, 7, 96))
    (warning,) = warnings(caplog, lambda: layout.divide(x, 2, 1))
    reasons = "heads have 24 lanes, not 64 or 128; a chip's heads have 48 lanes, not a multiple of 128"
    assert warning == f"The kernel attention_prologue does not compute this call: {reasons}. XLA computes it."


def test_head_layout_parts_emits_no_warning(caplog: pytest.LogCaptureFixture):
    assert not warnings(caplog, lambda: HeadLayout(head_dim=64, kernel=True).parts(3 * 64))


@pytest.mark.parametrize(
    ("topology", "reasons"),
    [("v4:2x2x1", ("TPU v4 has 16 MiB of on-chip memory (VMEM), less than 64",)), ("v6e-1", ())], ids=str,
)  # fmt: skip
def test_check_support_small_vmem_keeps_xla_forms(
    topology: str, reasons: tuple[str, ...], caplog: pytest.LogCaptureFixture
):
    device = chips.compile_devices(chips.topology(topology))[0]
    with jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("sp",)).abstract_mesh):
        refusals = convolution.check_support(abstract_array(8, 8, 1, 3, 3)), modulation.check_support()
        found = warnings(caplog, lambda: [*map(dispatch.should_use, refusals)])
    assert [refusal.reasons for refusal in refusals] == [reasons] * 2
    assert found == [f"{refusal} XLA computes it." for refusal in refusals if reasons]


def test_should_use_without_tpu_emits_no_warning(caplog: pytest.LogCaptureFixture):
    assert modulation.check_support().reasons == (dispatch.NO_TPU,)
    assert not warnings(caplog, lambda: dispatch.should_use(modulation.check_support()))


@pytest.mark.parametrize(
    ("scores", "maximum"),
    [("exact", "zero"), ("exact", "sampled"), ("exact", "online"), ("int8", "sampled"), ("int8", "online")],
)
def test_mosaic_call_reruns_follows_kernel_name(scores: Scores, maximum: Maximum):
    form = AttentionConfig(scores=scores, maximum=maximum, block_q=128, step=32)
    traced = jax.make_jaxpr(functools.partial(attend, head_dim=128, form=form))(jnp.ones((1, 48, 128)))
    *_, call = (equation for equation in traced.eqns if equation.primitive.name == "pallas_call")
    kernel = kernels.MosaicCall(name=call.params["name"], config="", operands=(), results=())
    assert kernel.reruns == (maximum == "sampled")
    plain = {"exact": registry.ATTENTION, "int8": registry.ATTENTION_INT8}[scores]
    assert registry.HELPER_KERNELS.get(kernel.name, kernel.name) == plain == form.kernel
