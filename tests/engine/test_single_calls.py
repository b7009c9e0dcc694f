"""Single calls of networks for nodes of ComfyUI's own, where they are not to be had."""

import pytest
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import ModelRef
from comfyui_tpu.tpu_runtime.engine.engine import Engine
from comfyui_tpu.tpu_runtime.engine.run import CALLS
from comfyui_tpu.tpu_runtime.hosts.together import Several
from comfyui_tpu.tpu_runtime.progress import Silent


class NeverTold(Several):
    def stage(self, *args: object) -> object:
        raise AssertionError("the other hosts were told")


@pytest.mark.parametrize("call", CALLS)
def test_several_hosts_are_told_before_anything_is_sent(call: str):
    model = ModelRef(spec_name="wan2.1-t2v-14b", model_id="tiny/wan21")
    with pytest.raises(ValueError, match="This TPU has several hosts, .* Use this pack's own nodes"):
        Engine(hosts=NeverTold()).run(call, model, Silent())
