"""FLUX.2 and its klein siblings, text to image: the inputs of its nodes, in the order that saved workflows rely on."""

from ..tpu_runtime.models import spec_for_family
from .family import decoder, image_encoder, pipeline, sampler, text_encoder
from .inputs import FEW_STEPS

SPEC = spec_for_family("Flux2")
LABEL = "FLUX.2"

_NUMBERS = ("height", "width", "num_inference_steps", "guidance_scale", "seed")
# Newer than the rest, so after it.
_NEW = ("model", "precision")
# For the siblings that are guided by a negative prompt.
_NEGATIVE, _NEGATIVE_EMBEDS = "negative_prompt", "negative_prompt_embeds"

# References are optional, and several encoders may follow each other: so it is not a stage of the pipeline.
IMAGE_ENCODER = image_encoder(SPEC, LABEL, "image", "condition", "model_id", *_NEW)
TEXT_ENCODER = text_encoder(SPEC, LABEL, "prompt", "model_id", *_NEW, _NEGATIVE)
SAMPLER = sampler(SPEC, LABEL, "prompt_embeds", "condition", *_NUMBERS, "model_id", *_NEW, _NEGATIVE_EMBEDS, *FEW_STEPS)
DECODER = decoder(SPEC, LABEL, "latents", "model_id", *_NEW)
STAGES = (TEXT_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(SPEC, LABEL, STAGES, "prompt", "condition", *_NUMBERS, "model_id", *_NEW, _NEGATIVE, *FEW_STEPS)

NODES = (*STAGES, IMAGE_ENCODER, PIPELINE)
