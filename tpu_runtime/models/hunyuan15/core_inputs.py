"""HunyuanVideo 1.5 in ComfyUI's own nodes."""

from collections.abc import Mapping
from typing import Any

from ...model_spec.core_inputs import Arguments, CoreClip, CoreInputs, CoreVision, PredictionRequest
from ..common import core_inputs as core


def convert(network: core.CoreNetwork, given: Arguments) -> PredictionRequest:
    """Convert a call of `HunyuanVideo15`, `x` `[rows, channels, frames, height, width]`.

    Its texts have their own lengths; ours are padded. Channels after the sample's are the condition of image to video.
    """
    import numpy as np

    x, timestep, context, glyphs, image_tokens, mask = core.take(
        given, "x", "timestep", "context", "txt_byt5", "clip_fea", "attention_mask"
    )
    core.refuse_rest(network, given, {"y", "guidance", "disable_time_r"})
    channels = network.spec.geometry.channels
    core.check_channels(network, x, channels + 1)
    glyph_lengths = given["options"].get(core.LENGTHS, {}).get("txt_byt5")
    glyph_lengths = glyph_lengths or [0 if glyphs is None else glyphs.shape[1]] * len(context)
    inputs = {
        **core.pad_text(network, 0, context, core.text_lengths(network, given, context, mask)),
        **core.pad_text(network, 1, glyphs, glyph_lengths),
    }
    if x[:, channels:].any():
        inputs["condition"] = core.to_array(x[:, channels:])
    if image_tokens is not None:
        inputs["image_embeds"] = core.to_array(image_tokens)
    if (following := _next_timestep(network, given["options"])) is not None:
        inputs["next_timestep"] = np.full(1, following, np.float32)
    return PredictionRequest(sample=x[:, :channels], timestep=core.one_timestep(network, timestep), inputs=inputs)


def _next_timestep(network: core.CoreNetwork, options: Mapping[str, Any]) -> float | None:
    """Return the timestep at the end of a step, an input of mean flow networks.

    Core looks it up in the sampler's sigmas; None if the network has no such input, or is evaluated between them.
    """
    sigmas, current = options.get("sample_sigmas"), options.get("sigmas")
    if not network.config.get("use_meanflow") or sigmas is None or current is None:
        return None
    steps = (current[0] == sigmas).nonzero()[:, 0].tolist()
    return 1000.0 * float(sigmas[steps[0] + 1]) if steps and steps[0] + 1 < len(sigmas) else None


CORE = CoreInputs(
    model_classes=("HunyuanVideo15",),
    clip_type="hunyuan_video_15",
    clip=CoreClip(encoder="hunyuan_image.te", tokenizer="hunyuan_video.HunyuanVideo15Tokenizer"),
    vision=CoreVision(config="clip_vision_siglip_384.json", states="last_hidden_state", width_key="image_embed_dim"),
    convert=convert,
    padded_texts=("c_crossattn", "txt_byt5"),
    more_texts=("conditioning_byt5small",),
    always_has_condition=True,
)
