"""Z-Image in ComfyUI's own nodes."""

from ...model_spec.core_inputs import Arguments, CoreClip, CoreInputs, PredictionRequest
from ..common import core_inputs as core


def convert(network: core.CoreNetwork, given: Arguments) -> PredictionRequest:
    """Convert a call of `Lumina2`, `x` `[rows, 16, height, width]`, whose timestep is in 0..1.

    Its texts have their own lengths; ours are padded.
    """
    x, timestep, context = core.take(given, "x", "timesteps", "context")
    # Core's network ignores these, or has no weights for them.
    core.refuse_rest(network, given, {"num_tokens", "attention_mask", "clip_text_pooled"})
    core.check_channels(network, x)
    return PredictionRequest(
        sample=core.pad_to_patches(x, (2, 2)),
        timestep=1000.0 * core.one_timestep(network, timestep),
        inputs=core.pad_text(network, 0, context, core.text_lengths(network, given, context)),
    )


CORE = CoreInputs(
    model_classes=("Lumina2",),
    clip_type="lumina2",
    clip=CoreClip(encoder="z_image.te", tokenizer="z_image.ZImageTokenizer"),
    convert=convert,
    timestep="timesteps",
    padded_texts=("c_crossattn",),
)
