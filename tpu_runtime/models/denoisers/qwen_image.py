"""The denoiser of Qwen-Image as data: its sizes and sharding rules."""

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig

# Each group of `tp` holds all weights; eight chips are two groups (see `shard_heads_in_pairs`). A step would take 1.5
# times as
# long if weights were gathered from the other group.
_RULES = (
    Rule("transformer_blocks.**.bias", REPLICATED),
    Rule("transformer_blocks.*.attn.to_out.0.weight", (None, None, "heads"), over=(2,)),
    Rule("transformer_blocks.*.attn.to_add_out.weight", (None, None, "heads"), over=(2,)),
    Rule("transformer_blocks.*.attn.*_proj.weight", (None, "heads", None), over=(2,)),
    Rule("transformer_blocks.*.attn.to_*.weight", (None, "heads", None), over=(2,)),
    Rule("transformer_blocks.*.*.net.0.proj.weight", (None, "mlp", None), over=(2,)),
    Rule("transformer_blocks.*.*.net.2.weight", (None, None, "mlp"), over=(2,)),
    # Used on one vector or, outside the blocks, on the text: outputs are gathered instead of weights.
    Rule("transformer_blocks.*.*_mod.1.weight", (None, "all_mlp", None)),
    Rule("time_text_embed.*.linear_1.weight", REPLICATED),
    Rule("time_text_embed.*.linear_2.weight", ("all_mlp", None)),
    Rule("norm_out.linear.weight", ("all_mlp", None)),
    Rule("txt_in.weight", ("all_mlp", None)),
)

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="QwenImageTransformer2DModel",
    config={
        "attention_head_dim": 128,
        "axes_dims_rope": (16, 56, 56),
        "guidance_embeds": False,
        "in_channels": 64,
        "joint_attention_dim": 3584,
        "num_attention_heads": 24,
        "num_layers": 60,
        "out_channels": 16,
        "patch_size": 2,
    },
    tiny={
        "attention_head_dim": 24,
        "axes_dims_rope": (4, 10, 10),
        "joint_attention_dim": 60,
        "num_attention_heads": 6,
        "num_layers": 3,
    },
    needs={
        "guidance_embeds": ConfigRequirement((False,)),
        "in_channels": ConfigRequirement((64,)),
        "joint_attention_dim": EqualsConfig("text_encoder", "hidden_size"),
        "out_channels": ConfigRequirement((16,)),
        "patch_size": ConfigRequirement((2,)),
        # True in Qwen-Image-Layered.
        "use_additional_t_cond": ConfigRequirement((False,)),
        "use_layer3d_rope": ConfigRequirement((False,)),
        # True in Edit models from 2511 on, which embed reference latents at timestep 0.
        "zero_cond_t": ConfigRequirement((False,)),
    },
    blocks=("transformer_blocks",),
    rules=_RULES,
    lora_prefixes=("", "transformer.", "lycoris_"),
)
