"""Qwen-Image in ComfyUI's own nodes."""

from ...messages import compose
from ...model_spec.core_inputs import Arguments, CoreClip, CoreInputs, PredictionRequest
from ..common import core_inputs as core

# The reference method of Edit from 2511 on.
_OF_2511 = "index_timestep_zero"


def convert(network: core.CoreNetwork, given: Arguments) -> PredictionRequest:
    """Convert a call of `QwenImage`, `x` `[rows, 16, 1, height, width]`, whose timestep is in 0..1.

    Its texts have their own lengths; ours are padded.

    Core numbers the tokens of odd grids, and the text with larger references, differently from upstream.
    """
    import numpy as np

    x, timestep, context, mask, references, method = core.take(
        given, "x", "timesteps", "context", "attention_mask", "ref_latents", "ref_latents_method"
    )
    core.refuse_rest(network, given)
    core.check_channels(network, x)
    if references:
        own = _OF_2511 if network.config.get("zero_cond_t") else "index"
        if method == _OF_2511 != own:
            title = network.spec.title
            raise ValueError(compose("comfyui.reference_method_needs_2511", title=title, method=method, own=own))
        core.check_method(network, method, own)
    inputs = core.pad_text(network, 0, context, core.text_lengths(network, given, context, mask))
    for number, latents in enumerate(references or ()):
        inputs[f"reference_{number}"] = core.to_array(core.pad_to_patches(latents, (1, 2, 2)))
    inputs["comfyui_positions"] = np.ones(1, np.float32)
    sample = core.pad_to_patches(x, (1, 2, 2))
    return PredictionRequest(sample=sample, timestep=1000.0 * core.one_timestep(network, timestep), inputs=inputs)


CORE = CoreInputs(
    model_classes=("QwenImage",),
    clip_type="qwen_image",
    clip=CoreClip(encoder="qwen_image.te", tokenizer="qwen_image.QwenImageTokenizer"),
    convert=convert,
    timestep="timesteps",
    padded_texts=("c_crossattn",),
    takes_references=True,
)
