"""Flux.2 text to image: the inputs of its nodes, in the order that saved workflows rely on."""

from ..tpu_runtime.models import spec_for_family
from .family import decoder, image_encoder, pipeline, sampler, text_encoder

SPEC = spec_for_family("Flux2")
LABEL = "Flux.2"

_NUMBERS = ("height", "width", "num_inference_steps", "guidance_scale", "seed")
# Newer than the rest, so after it.
_NEW = ("model", "precision")

# References are optional, and several encoders may follow each other: so this is no stage of the pipeline.
IMAGE_ENCODER = image_encoder(SPEC, LABEL, "image", "condition", "model_id", *_NEW)
TEXT_ENCODER = text_encoder(SPEC, LABEL, "prompt", "model_id", *_NEW)
SAMPLER = sampler(SPEC, LABEL, "prompt_embeds", "condition", *_NUMBERS, "model_id", *_NEW)
DECODER = decoder(SPEC, LABEL, "latents", "model_id", *_NEW)
STAGES = (TEXT_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(SPEC, LABEL, STAGES, "prompt", "condition", *_NUMBERS, "model_id", *_NEW)

NODES = (*STAGES, IMAGE_ENCODER, PIPELINE)
