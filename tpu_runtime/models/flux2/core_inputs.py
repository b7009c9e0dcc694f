"""FLUX.2 in ComfyUI's own nodes."""

from ...model_spec.core_inputs import Arguments, CoreClip, CoreInputs, PredictionRequest
from ..common import core_inputs as core


def convert(network: core.CoreNetwork, given: Arguments) -> PredictionRequest:
    """Convert a call of `Flux2`, `x` `[rows, 128, height, width]`, whose timestep is in 0..1.

    Each reference's latents are one input.
    """
    x, timestep, context, guidance, references, method = core.take(
        given, "x", "timestep", "context", "guidance", "ref_latents", "ref_latents_method"
    )
    core.refuse_rest(network, given, {"y"})
    core.check_method(network, method, "index")
    core.check_channels(network, x)
    inputs = {"text": core.whole_text(network, context)}
    if guidance is not None and network.config.get("guidance_embeds", True):
        inputs["guidance"] = core.to_array(guidance)
    inputs |= {f"reference_{number}": core.to_array(latents) for number, latents in enumerate(references or ())}
    return PredictionRequest(sample=x, timestep=1000.0 * core.one_timestep(network, timestep), inputs=inputs)


CORE = CoreInputs(
    model_classes=("Flux2",),
    clip_type="flux2",
    clip=CoreClip(encoder="flux.flux2_te", tokenizer="flux.Flux2Tokenizer", needs_tokenizer=True),
    convert=convert,
    takes_guidance=True,
    takes_references=True,
)
KLEIN_4B = CoreClip(encoder="flux.klein_te", tokenizer="flux.KleinTokenizer", options={"model_type": "qwen3_4b"})
KLEIN_9B = CoreClip(encoder="flux.klein_te", tokenizer="flux.KleinTokenizer8B", options={"model_type": "qwen3_8b"})
