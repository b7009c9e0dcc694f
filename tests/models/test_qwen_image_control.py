"""A ControlNet beside Qwen-Image's denoiser against diffusers' modules on the CPU in float32."""

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.closeness import NETWORK
from comfyui_tpu.tpu_runtime.models import lookup_spec
from comfyui_tpu.tpu_runtime.programs import denoise_step, executables
from comfyui_tpu.tpu_runtime.programs.controls import ControlShape, join_weights, split_weights
from comfyui_tpu.tpu_runtime.programs.denoise_step import StepShape
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget
from comfyui_tpu.tpu_runtime.programs.weights import shared_network

SPEC = lookup_spec("qwen-image-2512")
SIZES = {
    "attention_head_dim": 24, "axes_dims_rope": (4, 10, 10), "joint_attention_dim": 60, "num_attention_heads": 6,
}  # fmt: skip
# 60 blocks, over which 7 hints are spread unevenly; 5 x 7 patches.
NUM_BLOCKS, NUM_HINTS, LATENTS, LENGTH, STRENGTH = 60, 7, (1, 16, 1, 10, 14), 9, 0.7


def make(kind: str, seed: int, **config: Any) -> Any:
    """A module of diffusers' with random weights, also where it begins with zeros."""
    torch.manual_seed(seed)
    module = getattr(diffusers, kind)(**config).eval()
    for parameter in module.parameters():
        if parameter.ndim > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return module


def stack(network: Any, module: Any, aliases: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The program's weights, by name, of a module."""
    own = {}
    for name, tensor in module.state_dict().items():
        start = max((alias for alias in aliases if name.startswith(alias)), key=len, default="")
        own[aliases.get(start, "") + name.removeprefix(start)] = tensor.numpy()
    return {
        name: np.stack([own[source] for source in weight.sources]) if weight.stacked else own[weight.sources[0]]
        for name, weight in network.weights.items()
    }


@pytest.mark.slow
def test_qwen_image_control_net_matches_diffusers(compare: Callable):
    component = SPEC.denoiser.controls[0].component
    configs = {
        "denoiser": {**SPEC.component("transformer").config, **SIZES, "num_layers": NUM_BLOCKS},
        "control": {**component.config, **SIZES, "num_layers": NUM_HINTS, "extra_condition_channels": 4},
    }
    dit = make("QwenImageTransformer2DModel", 1, **configs["denoiser"])
    control = make("QwenImageControlNetModel", 2, **configs["control"])
    torch.manual_seed(3)
    noise, hint, text = torch.randn(LATENTS), torch.randn(1, 17, *LATENTS[2:]), torch.randn(1, LENGTH, 60)
    call = {
        "hidden_states": pack(noise), "encoder_hidden_states": text, "timestep": torch.tensor([0.7]),
        "encoder_hidden_states_mask": torch.ones(1, LENGTH), "img_shapes": [[(1, 5, 7)]],
    }  # fmt: skip
    with torch.no_grad():
        hints = control(**call, controlnet_cond=pack(hint), conditioning_scale=STRENGTH, return_dict=False)
        wanted = dit(**call, controlnet_block_samples=hints, return_dict=False)[0]
        alone = dit(**call, return_dict=False)[0]
    assert (wanted - alone).norm() > 0.1 * alone.norm()

    shape = StepShape(
        latent_shape=LATENTS, branches=1, num_memory=0, timestep_dtype=np.dtype(np.float32),
        controls=(ControlShape(spec=SPEC.denoiser.controls[0], config=configs["control"], hint_shape=hint.shape),),
    )  # fmt: skip
    inputs = {"text": np.full((1, 20, 60), 30.0, np.float32), "text_length": np.array([LENGTH], np.int32)}
    inputs["text"][:, :LENGTH] = text
    program = denoise_step.build_prediction_program(
        SPEC, configs["denoiser"], CompileTarget(devices=tuple(jax.devices()[:3]), precision="float32"), shape, LATENTS,
        {name: (x.shape, x.dtype) for name, x in inputs.items()},
    )  # fmt: skip
    networks = (
        shared_network(SPEC.component("transformer"), configs["denoiser"]),
        shared_network(component, configs["control"]),
    )
    arrays = join_weights(stack(networks[0], dit, {}), [stack(networks[1], control, component.aliases)])
    assert program.weights is not None and split_weights(arrays, 1)[1][0].keys() == networks[1].weights.keys()
    weights = {name: jax.device_put(arrays[name], want.sharding) for name, want in program.weights.items()}
    executable, _ = executables.compile_or_load(program)
    found, _ = executable(weights, noise.numpy(), np.float32(700.0), inputs, (hint.numpy(),), (np.float32(STRENGTH),))
    compare("flow", pack(torch.from_numpy(np.array(found))).numpy(), wanted.numpy(), error=NETWORK)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Tokens `[1, patches, channels * 4]`, as upstream's pipeline packs latents `[1, channels, 1, height, width]`."""
    rows, channels, _, height, width = latents.shape
    cells = latents.view(rows, channels, height // 2, 2, width // 2, 2)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(rows, height // 2 * (width // 2), channels * 4)
