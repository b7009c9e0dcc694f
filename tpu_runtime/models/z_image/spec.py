"""Z-Image, text to image: Tongyi-MAI/Z-Image-Turbo, distilled to 8 steps, and Tongyi-MAI/Z-Image, which is not.

The oracle is `diffusers.ZImagePipeline`, the paper https://arxiv.org/abs/2511.22699. Both checkpoints are licensed
under Apache-2.0. The VAE is that of FLUX.1, diffusers' `AutoencoderKL` with 16 channels.
"""

from dataclasses import replace
from typing import Any

from ...model_spec import (
    DenoiserSpec,
    FloatInput,
    HeadNorms,
    HubCheckpoint,
    IntInput,
    LatentGeometry,
    ModelSpec,
    Parallelism,
    SamplingConfig,
    TinyModel,
    VaeSpec,
    make_distilled_advice,
)
from ...model_spec.upstream import UpstreamConfig
from ..common import kl
from . import control
from .core_inputs import CORE
from .text_encoder import TEXT, TEXT_ENCODER
from .transformer import PATCH, STACKS, TRANSFORMER, forward

# The number of steps that Turbo was distilled for, as its model card says.
TURBO_STEPS = 8


def solver_arguments(
    config: UpstreamConfig, latent_shape: tuple[int, ...], num_steps: int, shift: float | None
) -> dict[str, Any]:
    """Return upstream's arguments of `set_timesteps`, besides the number of steps.

    config: the scheduler's. latent_shape: `(..., height, width)`. num_steps: of the schedule.
    shift: unused here; it is a key of the scheduler's config.
    """
    import numpy as np
    from diffusers.pipelines.z_image.pipeline_z_image import calculate_shift

    height, width = latent_shape[-2:]
    defaults = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
    numbers = (config.get(name, default) for name, default in defaults.items())
    mu = calculate_shift(height // 2 * (width // 2), *numbers)
    return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": mu}


# The published config of Turbo; the other model has a shift of 6.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": False,
}

RECIPE = SamplingConfig(scheduler=SCHEDULER, shift_key="shift", solver_arguments=solver_arguments)
PROMPT = "A small steam train on a snowy mountain at sunrise, its smoke spells the word JAX"

SPEC = ModelSpec(
    name="z-image-turbo",
    family="ZImage",
    title="Z-Image Turbo",
    category="Z-Image",
    published=HubCheckpoint(hub_id="Tongyi-MAI/Z-Image-Turbo", pipeline_classes=("ZImagePipeline",)),
    miniature=TinyModel(
        id="tiny/zimage",
        inputs={"height": 80, "width": 112},
        texts={"prompt": "a large red circle left on blue", "negative_prompt": ""},
    ),
    components=(
        TEXT_ENCODER,
        TRANSFORMER,
        *kl.make_vae(
            {
                "latent_channels": 16,
                "scaling_factor": 0.3611,
                "shift_factor": 0.1159,
                "use_post_quant_conv": False,
                "use_quant_conv": False,
            }
        ),
    ),
    # Latents `[1, 16, height / 8, width / 8]`; a token is 2 x 2 of them.
    geometry=LatentGeometry(channels=16, stride_t=0, stride_hw=8, patch_thw=(1, PATCH, PATCH)),
    text_encoders=(TEXT,),
    inputs={
        "height": IntInput(default=1024, low=64, high=2048, multiple_of=16),
        "width": IntInput(default=1024, low=64, high=2048, multiple_of=16),
        "num_inference_steps": IntInput(default=TURBO_STEPS, low=1, high=100),
        # 1 disables guidance, as in ComfyUI; upstream's scale is one less.
        "guidance_scale": FloatInput(default=1.0, low=1.0, high=20.0),
        "seed": IntInput(default=42, low=0, high=2**64 - 1),
        # 0: the checkpoint's own shift.
        "flow_shift": FloatInput(default=0.0, low=0.0, high=20.0, step=0.5),
    },
    texts={"prompt": PROMPT, "negative_prompt": ""},
    recipe=replace(RECIPE, advice=make_distilled_advice(TURBO_STEPS, "needs none (1.0)")),
    denoiser=DenoiserSpec(
        forward=forward,
        head_norms=tuple(
            HeadNorms(queries=(f"{stack}.*.attention.norm_q",), keys=(f"{stack}.*.attention.norm_k",))
            for stack in STACKS
        ),
        controls=(control.CONTROL,),
        controlled=control.forward,
    ),
    parallelism=Parallelism(heads_key="n_heads"),
    vae=VaeSpec(latent_format="Flux", denormalize=kl.denormalize_latents, decode=kl.decode, encode=kl.encode_pixels),
    core=CORE,
)

BASE = replace(
    SPEC,
    name="z-image",
    title="Z-Image",
    published=replace(SPEC.published, hub_id="Tongyi-MAI/Z-Image"),
    miniature=replace(SPEC.miniature, id="tiny/zimagebase"),
    inputs={
        **SPEC.inputs,
        "num_inference_steps": IntInput(default=50, low=1, high=100),
        # The model card's 4, to which upstream adds 1.
        "guidance_scale": FloatInput(default=5.0, low=1.0, high=20.0),
    },
    recipe=replace(RECIPE, scheduler={**SCHEDULER, "shift": 6.0}),
)
