"""Wan 2.2 image to video: the inputs of its nodes, in the order that saved workflows rely on.

Without an image, models for which it is optional take the video's size from the sampler.
"""

from ..tpu_runtime.model_spec import SIZE_INPUTS
from ..tpu_runtime.models import spec_for_family
from .family import decoder, image_encoder, pipeline, sampler, text_encoder
from .inputs import FEW_STEPS, TWO_EXPERTS

SPEC = spec_for_family("Wan22I2V")
LABEL = "Wan 2.2 I2V"

_PROMPTS = ("prompt", "negative_prompt")
_NUMBERS = ("num_inference_steps", "guidance_scale", "shift", "seed")
_SOCKETS = ("prompt_embeds", "negative_prompt_embeds", "condition")
# Newer than the rest, so after it.
_NEW = ("model", "precision")
_RECIPE = (*FEW_STEPS, *TWO_EXPERTS)

IMAGE_ENCODER = image_encoder(SPEC, LABEL, "image", *SIZE_INPUTS, "model_id", "resize", *_NEW, "last_image")
TEXT_ENCODER = text_encoder(SPEC, LABEL, *_PROMPTS, "model_id", *_NEW)
SAMPLER = sampler(SPEC, LABEL, *_SOCKETS, *_NUMBERS, "model_id", "guidance_scale_2", *_NEW, *_RECIPE, sizes=SIZE_INPUTS)
DECODER = decoder(SPEC, LABEL, "latents", "model_id", "fps", *_NEW)
STAGES = (TEXT_ENCODER, IMAGE_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(
    SPEC, LABEL, STAGES, "image", *_PROMPTS, *SIZE_INPUTS, *_NUMBERS, "model_id", "fps", "resize", "guidance_scale_2",
    *_NEW, "last_image", *_RECIPE,
)  # fmt: skip

NODES = (*STAGES, PIPELINE)
