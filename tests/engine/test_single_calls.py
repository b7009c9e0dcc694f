"""Single calls of networks for nodes of ComfyUI's own, where they are not to be had."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from comfyui_tpu.distributed.multihost.coordinator import HostGroup
from comfyui_tpu.tests.files.test_comfyui_encoders import QWEN3
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef, choose_partial_model
from comfyui_tpu.tpu_runtime.engine.engine import Engine
from comfyui_tpu.tpu_runtime.engine.stage_functions import CALL_FUNCTIONS
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.progress import SilentProgress

pytestmark = pytest.mark.slow


class NeverTold(HostGroup):
    def stage(self, *args: object) -> object:
        raise AssertionError("the other hosts were told")


@pytest.mark.parametrize("call", CALL_FUNCTIONS)
def test_engine_call_on_several_hosts_raises_before_sending(call: str):
    model = ModelRef(spec_name="wan2.1-t2v-14b", model_id="tiny/wan21")
    with raises_message(ValueError, "stage.several_hosts_unsupported"):
        Engine(hosts=NeverTold()).run(call, model, SilentProgress())


def test_engine_states_of_shared_text_encoder_match_each_model(tmp_path: Path):
    """FLUX.2 klein 27 layers of Qwen3, Z-Image 35 of the same."""
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 36}
    file = replace(QWEN3, model="z-image-turbo", sizes={**QWEN3.sizes, **sizes}).write(tmp_path, "qwen")
    engine, ids = Engine(), np.arange(512, dtype=np.int32)[None] % 64

    def states(name: str) -> np.ndarray:
        model = choose_partial_model([lookup_spec(name)], str(file))
        return engine.run("states", model, SilentProgress(), encoder=0, ids=ids, mask=np.ones_like(ids))[0].numpy()

    names = "flux2-klein-4b", "z-image-turbo"
    first = {name: states(name) for name in names}
    assert [found.shape[1] for found in first.values()] == [3 * 256, 256]
    for name in names:
        np.testing.assert_array_equal(states(name), first[name])
