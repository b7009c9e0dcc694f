"""Qwen-Image and its Edit sibling: the inputs of its nodes, in the order that saved workflows rely on."""

from ..tpu_runtime.models import lookup_spec, spec_for_family
from .family import decoder, image_encoder, pipeline, sampler, text_encoder
from .inputs import FEW_STEPS

SPEC, EDIT = spec_for_family("QwenImage"), lookup_spec("qwen-image-edit-2511")
LABEL = "Qwen-Image"

_PROMPTS = ("prompt", "negative_prompt")
_EMBEDS = ("prompt_embeds", "negative_prompt_embeds")
_NUMBERS = ("height", "width", "num_inference_steps", "guidance_scale", "seed")
_MODEL = ("model_id", "model", "precision")
_RECIPE = ("flow_shift", *FEW_STEPS)

# Edit's images are optional, and several encoders may follow each other: so it is not a stage of the pipeline.
IMAGE_ENCODER = image_encoder(EDIT, LABEL, "image", "condition", *_MODEL)
TEXT_ENCODER = text_encoder(SPEC, LABEL, *_PROMPTS, "condition", *_MODEL)
SAMPLER = sampler(SPEC, LABEL, *_EMBEDS, "condition", *_NUMBERS, *_MODEL, *_RECIPE, image_spec=EDIT)
DECODER = decoder(SPEC, LABEL, "latents", *_MODEL)
STAGES = (TEXT_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(SPEC, LABEL, STAGES, *_PROMPTS, "condition", *_NUMBERS, *_MODEL, *_RECIPE)

NODES = (*STAGES, IMAGE_ENCODER, PIPELINE)
