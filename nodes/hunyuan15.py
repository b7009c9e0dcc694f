"""HunyuanVideo 1.5, text and image to video: its nodes. With a `condition` the sampler is image to video."""

from ..tpu_runtime.model_spec import SIZE_INPUTS
from ..tpu_runtime.models import lookup_spec, spec_for_family
from .family import decoder, image_encoder, pipeline, sampler, text_encoder
from .inputs import FEW_STEPS

SPEC = spec_for_family("HunyuanVideo15")
IMAGE_SPEC = lookup_spec("hunyuanvideo1.5-i2v-720p")
LABEL = "HunyuanVideo 1.5"

_PROMPTS = ("prompt", "negative_prompt")
_NUMBERS = (*SIZE_INPUTS, "num_inference_steps", "guidance_scale", "seed")
_SOCKETS = ("prompt_embeds", "negative_prompt_embeds", "condition")
_MODEL = ("model_id", "model", "precision")
_CACHE = ("step_cache", "cache_start", "cache_end", "cache_interval")
_RECIPE = (*_CACHE, *FEW_STEPS)

TEXT_ENCODER = text_encoder(SPEC, LABEL, *_PROMPTS, *_MODEL)
IMAGE_ENCODER = image_encoder(IMAGE_SPEC, LABEL, "image", *SIZE_INPUTS, "resize", *_MODEL)
SAMPLER = sampler(SPEC, LABEL, *_SOCKETS, *_NUMBERS, "flow_shift", *_MODEL, *_RECIPE, image_spec=IMAGE_SPEC)
DECODER = decoder(SPEC, LABEL, "latents", "fps", *_MODEL)
STAGES = (TEXT_ENCODER, IMAGE_ENCODER, SAMPLER, DECODER)
PIPELINE = pipeline(
    SPEC, LABEL, STAGES, *_PROMPTS, *_NUMBERS, "flow_shift", "fps", *_MODEL, "image", "resize", *_RECIPE
)

NODES = (*STAGES, PIPELINE)
