"""PixArt-Sigma text to image: the inputs of its nodes, in the order that saved workflows rely on."""

from ..tpu_runtime.models import spec_for_family
from .family import decoder, pipeline, sampler, text_encoder

SPEC = spec_for_family("PixArt")
LABEL = "PixArt-Sigma"

_PROMPTS = ("prompt", "negative_prompt")
_EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
_NUMBERS = ("height", "width", "num_inference_steps", "guidance_scale", "seed")
_MODEL = ("model_id", "model", "precision")

TEXT_ENCODER = text_encoder(SPEC, LABEL, *_PROMPTS, *_MODEL)
SAMPLER = sampler(SPEC, LABEL, *_EMBEDS, *_NUMBERS, *_MODEL)
DECODER = decoder(SPEC, LABEL, "latents", *_MODEL)
STAGES = (TEXT_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(SPEC, LABEL, STAGES, *_PROMPTS, *_NUMBERS, *_MODEL)

NODES = (*STAGES, PIPELINE)
