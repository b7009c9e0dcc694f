"""The table of number formats: complete, and no format stands in for another."""

import jax.numpy as jnp
import pytest
from comfyui_tpu.attention import policy as policy_module
from comfyui_tpu.attention.local import attend_with_reference
from comfyui_tpu.attention.policy import AttentionPolicy
from comfyui_tpu.kernels import registry
from comfyui_tpu.kernels.attention_config import SCORE_TILES, choose_config
from comfyui_tpu.kernels.attention_reference import keys_of_length
from comfyui_tpu.kernels.number_formats import EXACT, FORMATS, LINEAR_CHIPS, SCORE_CHIPS, SCORES
from comfyui_tpu.sharding.chips import CHIPS


def test_number_formats_are_complete():
    assert {name for chip in CHIPS for name in chip.linear_formats} == set(FORMATS)
    assert {name for chip in CHIPS for name in chip.score_formats} == set(SCORES) == set(SCORE_TILES)
    assert set(registry.ATTENTION_BY_SCORES) == {EXACT, *SCORES}
    assert {*registry.LINEARS, *registry.ATTENTION_BY_SCORES.values()} <= set(registry.KERNELS)
    assert registry.LINEARS == tuple(row.kernel for row in FORMATS.values())
    assert len({row.dtype for row in FORMATS.values()}) == len(FORMATS)


def test_number_formats_name_chips_with_integer_matrix_units():
    assert LINEAR_CHIPS == {"int8": ("TPU v5 lite", "TPU v6 lite")}
    assert SCORE_CHIPS == {"int8": ("TPU v6 lite",)}


def test_unknown_score_format_is_not_computed_as_int8(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_module, "LONG_SEQUENCE_TOKENS", 0)
    x, policy = jnp.ones((1, 16, 128)), AttentionPolicy(kernel="reference", scores="int4")
    with pytest.raises(KeyError, match="int4"):
        attend_with_reference(x, [keys_of_length(x, x, 16)], head_dim=128, log_sums=False, policy=policy)
    with pytest.raises(KeyError, match="int4"):
        choose_config(
            "TPU v6 lite", "sampled", scores="int4", q_seq=16, kv_rows=[16], heads=1, head_dim=128, itemsize=2
        )
