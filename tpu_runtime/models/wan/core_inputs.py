"""Wan in ComfyUI's own nodes."""

from ...model_spec.core_inputs import Arguments, CoreClip, CoreInputs, CoreVision, PredictionRequest
from ..common import core_inputs as core


def convert(network: core.CoreNetwork, given: Arguments) -> PredictionRequest:
    """Convert a call of `WAN21` or `WAN22`, `x` `[rows, channels, frames, height, width]`.

    Channels after the sample's are the condition of image to video.
    """
    import numpy as np

    x, timestep, context, image_tokens = core.take(given, "x", "timestep", "context", "clip_fea")
    # Core's network uses a reference latent only if it has weights for it, which ours do not have.
    core.refuse_rest(network, given, {"denoise_mask", "reference_latent"})
    x = core.pad_to_patches(x, (1, 2, 2))
    channels = network.spec.geometry.channels
    conditions = network.spec.pictures.condition_shapes(tuple(x[:, :channels].shape))
    core.check_channels(network, x, conditions.get("condition", (0, 0))[1])
    inputs = {"text": core.whole_text(network, context)}
    if "condition" in conditions:
        inputs["condition"] = core.to_array(x[:, channels:])
    if "image_embeds" in conditions and image_tokens is not None:
        inputs["image_embeds"] = core.to_array(image_tokens)
    timestep = timestep.reshape(len(timestep), -1)
    if "is_given" in conditions:
        # Core passes one timestep per frame; a given first frame has timestep 0.
        is_given = timestep.shape[1] > 1 and bool((timestep[:, 0] == 0).all())
        inputs["is_given"] = np.full(1, is_given, np.float32)
        timestep = timestep[:, is_given:]
    return PredictionRequest(sample=x[:, :channels], timestep=core.one_timestep(network, timestep), inputs=inputs)


CORE = CoreInputs(
    model_classes=("WAN21", "WAN22"),
    clip_type="wan",
    clip=CoreClip(encoder="wan.te", tokenizer="wan.WanT5Tokenizer", needs_tokenizer=True),
    vision=CoreVision(config="clip_vision_config_h.json", states="penultimate_hidden_states", width_key="image_dim"),
    convert=convert,
    condition_may_have_mask=True,
)
