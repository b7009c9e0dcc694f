"""CogVideoX in ComfyUI's own nodes."""

from ...messages import compose
from ...model_spec.core_inputs import Arguments, CoreClip, CoreInputs, PredictionRequest
from ..common import core_inputs as core


def convert(network: core.CoreNetwork, given: Arguments) -> PredictionRequest:
    """Convert a call of `CogVideoX`, `x` `[rows, channels, frames, height, width]`.

    An image's latent is the first frame of further channels.
    """
    x, timestep, context, ofs = core.take(given, "x", "timestep", "context", "ofs")
    core.refuse_rest(network, given)
    x = core.pad_to_patches(x, (2, 2, 2))
    channels = network.spec.geometry.channels
    takes_image = "image" in network.spec.pictures.condition_shapes(tuple(x[:, :channels].shape))
    core.check_channels(network, x, channels if takes_image else 0)
    inputs = {"text": core.whole_text(network, context)}
    if takes_image:
        if x[:, channels:, 1:].any() or (ofs is not None and not (ofs == 2.0).all()):
            raise ValueError(compose("comfyui.more_than_first_frame", title=network.spec.title))
        inputs["image"] = core.to_array(x[:, channels:, :1])
    return PredictionRequest(sample=x[:, :channels], timestep=core.one_timestep(network, timestep), inputs=inputs)


CORE = CoreInputs(
    model_classes=("CogVideoX",),
    clip_type="cogvideox",
    clip=CoreClip(encoder="cogvideo.cogvideo_te", tokenizer="cogvideo.CogVideoXTokenizer"),
    convert=convert,
)
