"""Wan 2.1 text to video: the inputs of its nodes, in the order that saved workflows rely on."""

from ..tpu_runtime.models import spec_for_family
from .family import decoder, pipeline, sampler, text_encoder
from .inputs import FEW_STEPS, TWO_EXPERTS

SPEC = spec_for_family("Wan21")
LABEL = "Wan 2.1"

_PROMPTS = ("prompt", "negative_prompt")
_NUMBERS = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "seed")
_EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
# Newer than the rest, so after it.
_NEW = ("model", "precision")
_RECIPE = (*FEW_STEPS, "guidance_scale_2", *TWO_EXPERTS)

TEXT_ENCODER = text_encoder(SPEC, LABEL, *_PROMPTS, "model_id", *_NEW)
SAMPLER = sampler(SPEC, LABEL, *_EMBEDS, *_NUMBERS, "model_id", "flow_shift", *_NEW, *_RECIPE)
DECODER = decoder(SPEC, LABEL, "latents", "model_id", "fps", *_NEW)
STAGES = (TEXT_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(SPEC, LABEL, STAGES, *_PROMPTS, *_NUMBERS, "model_id", "fps", "flow_shift", *_NEW, *_RECIPE)

NODES = (*STAGES, PIPELINE)
