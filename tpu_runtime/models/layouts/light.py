"""Files of TAEHV, a light decoder: under one set of names, by two makers, for the latents of several models."""

from collections.abc import Mapping
from typing import Any

from ...files import CheckpointError
from ...formats.layout import Config, FileLayout, Shapes

# Of models that are not run here, with as many channels as Wan's: by how the makers' files begin.
_OTHERS = {"taehv.": "HunyuanVideo 1", "taehv_": "HunyuanVideo 1", "taecvx": "CogVideoX", "taeos": "Open-Sora"}


def config(shapes: Shapes, base: Mapping[str, Any]) -> Config:
    """Whose file it is, its name says, or else the format of its numbers, as in ComfyUI's `sd.py`: Ollin Boer Bohan's
    are float16.
    """
    name = shapes.path.name.lower()
    if other := next((model for start, model in _OTHERS.items() if name.startswith(start)), None):
        raise CheckpointError(
            f"{shapes.path} decodes the latents of {other}, by its name, for which no light decoder is supported here. "
            "Use taew2_1 or lighttaew2_1 for Wan 2.1 and 2.2, or the model's own VAE."
        )
    is_named = "tae" in name
    return {
        "latent_channels": shapes.of("decoder.1.weight", 4)[1],
        "patch_size": round((shapes.of("decoder.22.weight", 4)[0] / 3) ** 0.5),
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
