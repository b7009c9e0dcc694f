"""CogVideoX 1.5 text to video: the inputs of its nodes, in the order that saved workflows rely on."""

from ..tpu_runtime.models import spec_for_family
from .family import decoder, pipeline, sampler, text_encoder

SPEC = spec_for_family("CogVideoX")
LABEL = "CogVideoX"

_PROMPTS = ("prompt", "negative_prompt")
_NUMBERS = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "seed")
_EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
# Newer than the rest, so after it. The sampler and the decoder once had the model from the node before.
_NEW = ("model", "precision")
_RECIPE = ("scheduler", "use_dynamic_cfg")

TEXT_ENCODER = text_encoder(SPEC, LABEL, *_PROMPTS, "model_id", *_NEW)
SAMPLER = sampler(SPEC, LABEL, *_EMBEDS, *_NUMBERS, "model_id", *_NEW, *_RECIPE)
DECODER = decoder(SPEC, LABEL, "latents", "fps", "model_id", *_NEW)
STAGES = (TEXT_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(SPEC, LABEL, STAGES, *_PROMPTS, *_NUMBERS, "model_id", "fps", *_NEW, *_RECIPE)

NODES = (*STAGES, PIPELINE)
