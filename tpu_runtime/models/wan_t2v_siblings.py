"""Wan 2.1 T2V 1.3B and Wan 2.2 T2V A14B: Wan 2.1 T2V 14B in another size, and with two experts. The oracle is
`diffusers.WanPipeline`.
"""

from dataclasses import replace

from ..limits import FloatLimit, IntLimit
from . import wan21

_INPUTS = wan21.SPEC.inputs

_SMALL = replace(
    wan21.TRANSFORMER,
    config={**wan21.TRANSFORMER.config, "ffn_dim": 8960, "num_attention_heads": 12, "num_layers": 30},
    tiny={
        **wan21.TRANSFORMER.tiny,
        "attention_head_dim": 12,
        "ffn_dim": 130,
        "num_attention_heads": 12,
        "num_layers": 2,
    },
)

WAN21_1_3B = replace(
    wan21.SPEC,
    name="wan2.1-t2v-1.3b",
    title="Wan 2.1 T2V 1.3B",
    hub_id="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    tiny_id="tiny/wan21_1.3b",
    components=(wan21.TEXT_ENCODER, _SMALL, wan21.VAE_DECODER),
    inputs={
        **_INPUTS,
        # As its makers run it.
        "height": replace(wan21.SPEC.whole_numbers("height"), default=480),
        "width": replace(wan21.SPEC.whole_numbers("width"), default=832),
        "guidance_scale": FloatLimit(default=6.0, low=0.0, high=20.0),
        "flow_shift": FloatLimit(default=8.0, low=0.1, high=20.0, step=0.5),
    },
)

EXPERTS = (wan21.TRANSFORMER, replace(wan21.TRANSFORMER, name="transformer_2", folder="transformer_2"))

WAN22_A14B = replace(
    wan21.SPEC,
    name="wan2.2-t2v-a14b",
    title="Wan 2.2 T2V A14B",
    hub_id="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    tiny_id="tiny/wan22t2v",
    components=(wan21.TEXT_ENCODER, *EXPERTS, wan21.VAE_DECODER),
    inputs={
        **_INPUTS,
        "num_inference_steps": IntLimit(default=40, low=1, high=100),
        "guidance_scale": FloatLimit(default=4.0, low=0.0, high=20.0),
        "guidance_scale_2": FloatLimit(default=3.0, low=0.0, high=20.0),
        # The makers'; the checkpoint's scheduler says 3.
        "flow_shift": FloatLimit(default=12.0, low=0.1, high=20.0, step=0.5),
    },
    experts=tuple(expert.name for expert in EXPERTS),
    # The first expert composes: it runs while the timestep is at least this share of the training timesteps.
    index={"boundary_ratio": 0.875},
)

SPECS = (WAN21_1_3B, WAN22_A14B)
