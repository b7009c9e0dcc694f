"""Z-Image's single files: the denoiser with Tongyi-MAI's keys, as ComfyUI repackages it. Its VAE is a shared one."""

from ...formats.file_signature import Config, FileLayout, TensorShapes
from ...model_spec.upstream import UpstreamConfig


def denoiser_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of the transformer from its tensors' shapes; `base` is the published config."""
    dim, patch = shapes.require("all_x_embedder.2-1.weight", 2)
    (head_dim,) = shapes.require("layers.0.attention.norm_q.weight", 1)
    return {
        "cap_feat_dim": shapes.require("cap_embedder.1.weight", 2)[1],
        "dim": dim,
        "in_channels": patch // 4,
        "n_heads": dim // head_dim,
        "n_kv_heads": dim // head_dim,
        "n_layers": shapes.count("layers"),
        "n_refiner_layers": shapes.count("noise_refiner"),
    }


LAYOUTS = (
    FileLayout(
        class_name="ZImageTransformer2DModel",
        # Lumina 2 is the same network without these learnt padding tokens.
        marks=(
            ("x_pad_token", "noise_refiner.0.attention.qkv.weight"),
            ("x_pad_token", "noise_refiner.0.attention.to_q.weight"),
        ),
        relatives={r"\bde-?(turbo|distill)": "a Z-Image Turbo that was trained to be guided again"},
        refused={
            "siglip_embedder": "Z-Image Omni, which is given images",
            "siglip_refiner": "Z-Image Omni, which is given images",
            "dec_net": "Z-Image in pixels",
            "control_": "a Z-Image with a ControlNet",
        },
        config=denoiser_config,
        # Present in the original code, but unused.
        ignored=("norm_final.",),
    ),
)
