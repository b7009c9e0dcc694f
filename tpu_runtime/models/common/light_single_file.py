"""Single files of TAEHV, a small decoder: one set of keys, two authors, and the latents of several models."""

from ...files import CheckpointError
from ...formats.file_signature import Config, FileLayout, TensorShapes
from ...messages import compose
from ...model_spec.upstream import UpstreamConfig

# Models that are not supported here and have as many channels as Wan's, by the prefix of the published files.
_OTHERS = {"taehv.": "HunyuanVideo 1", "taehv_": "HunyuanVideo 1", "taecvx": "CogVideoX", "taeos": "Open-Sora"}


def config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of a TAEHV. The file's name decides whose weights they are, or else the dtype.

    As in ComfyUI's `sd.py`, Ollin Boer Bohan's weights are float16. Raises CheckpointError for unsupported models.
    shapes: of the file's tensors. base: unused.
    """
    name = shapes.path.name.lower()
    if other := next((model for start, model in _OTHERS.items() if name.startswith(start)), None):
        raise CheckpointError(compose("file.light_decoder_unsupported", path=shapes.path, other=other))
    is_named = "tae" in name
    return {
        "latent_channels": shapes.require("decoder.1.weight", 4)[1],
        "patch_size": round((shapes.require("decoder.22.weight", 4)[0] / 3) ** 0.5),
        "is_lightx2v": "lighttae" in name if is_named else shapes.dtype("decoder.1.weight") != "F16",
    }


LAYOUTS = (
    FileLayout(
        class_name="TAEHV",
        marks=(
            ("decoder.1.weight", "decoder.3.conv.0.weight", "decoder.7.conv.weight", "decoder.22.weight"),
            ("decoder.0.weight", "decoder.1.conv.3.weight"),
        ),
        refused={"decoder.0.weight": "a TAEHV of its larger form (super)"},
        config=config,
    ),
)
