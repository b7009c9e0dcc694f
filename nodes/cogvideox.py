"""CogVideoX 1.5, text and image to video: the inputs of its nodes, in the order that saved workflows rely on.

With a `condition` the sampler is image to video.
"""

from ..tpu_runtime.model_spec import SIZE_INPUTS
from ..tpu_runtime.models import lookup_spec, spec_for_family
from .family import decoder, image_encoder, pipeline, sampler, text_encoder

SPEC = spec_for_family("CogVideoX")
IMAGE_SPEC = lookup_spec("cogvideox1.5-5b-i2v")
LABEL = "CogVideoX"

_PROMPTS = ("prompt", "negative_prompt")
_NUMBERS = (*SIZE_INPUTS, "num_inference_steps", "guidance_scale", "seed")
_EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
# Newer than the rest, so after it. Early samplers and decoders took the model from the node before them.
_NEW = ("model", "precision")
_RECIPE = ("scheduler", "use_dynamic_cfg")

TEXT_ENCODER = text_encoder(SPEC, LABEL, *_PROMPTS, "model_id", *_NEW)
IMAGE_ENCODER = image_encoder(IMAGE_SPEC, LABEL, "image", *SIZE_INPUTS, "resize", "model_id", *_NEW)
SAMPLER = sampler(SPEC, LABEL, *_EMBEDS, *_NUMBERS, "model_id", *_NEW, *_RECIPE, "condition", image_spec=IMAGE_SPEC)
DECODER = decoder(SPEC, LABEL, "latents", "fps", "model_id", *_NEW)
STAGES = (TEXT_ENCODER, IMAGE_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(SPEC, LABEL, STAGES, *_PROMPTS, *_NUMBERS, "model_id", "fps", *_NEW, *_RECIPE, "image", "resize")

NODES = (*STAGES, PIPELINE)
