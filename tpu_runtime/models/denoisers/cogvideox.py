"""The denoiser of CogVideoX 1.5 as data: its sizes, sharding rules, and the key names of other formats."""

from ....sharding.rules import BLOCK_PRODUCT, GATHERED, REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig

# Tokens of a text, padding included: all are attended to.
MAX_TOKENS = 226
# ComfyUI's keys; adapters for this model have these or diffusers'.
ORIGINAL_KEYS = {
    "time_embedding_linear_1": "time_embedding.linear_1",
    "time_embedding_linear_2": "time_embedding.linear_2",
    "blocks.*.norm1.linear": "transformer_blocks.*.norm1.linear",
    "blocks.*.norm1.norm": "transformer_blocks.*.norm1.norm",
    "blocks.*.norm2.linear": "transformer_blocks.*.norm2.linear",
    "blocks.*.norm2.norm": "transformer_blocks.*.norm2.norm",
    "blocks.*.q": "transformer_blocks.*.attn1.to_q",
    "blocks.*.k": "transformer_blocks.*.attn1.to_k",
    "blocks.*.v": "transformer_blocks.*.attn1.to_v",
    "blocks.*.norm_q": "transformer_blocks.*.attn1.norm_q",
    "blocks.*.norm_k": "transformer_blocks.*.attn1.norm_k",
    "blocks.*.attn_out": "transformer_blocks.*.attn1.to_out.0",
    "blocks.*.ff_proj": "transformer_blocks.*.ff.net.0.proj",
    "blocks.*.ff_out": "transformer_blocks.*.ff.net.2",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="CogVideoXTransformer3DModel",
    config={
        "attention_bias": True,
        "attention_head_dim": 64,
        "in_channels": 16,
        "max_text_seq_length": MAX_TOKENS,
        "num_attention_heads": 48,
        "num_layers": 42,
        "out_channels": 16,
        "patch_bias": False,
        "patch_size": 2,
        "patch_size_t": 2,
        "sample_frames": 81,
        "sample_height": 96,
        "sample_width": 170,
        "text_embed_dim": 4096,
        "time_embed_dim": 512,
        "use_rotary_positional_embeddings": True,
    },
    tiny={
        "attention_head_dim": 16,
        "num_attention_heads": 6,
        "num_layers": 3,
        "text_embed_dim": 40,
        "time_embed_dim": 36,
    },
    needs={
        "in_channels": ConfigRequirement((16,)),
        "max_text_seq_length": ConfigRequirement((MAX_TOKENS,)),
        "ofs_embed_dim": ConfigRequirement((None,)),
        "out_channels": ConfigRequirement((16,)),
        "patch_size": ConfigRequirement((2,)),
        # Absent in CogVideoX 1.0.
        "patch_size_t": ConfigRequirement((2,), required=True),
        "text_embed_dim": EqualsConfig("text_encoder", "d_model"),
        "use_learned_positional_embeddings": ConfigRequirement((False,)),
        "use_rotary_positional_embeddings": ConfigRequirement((True,), required=True),
    },
    blocks=("transformer_blocks",),
    original_keys=ORIGINAL_KEYS,
    rules=(
        Rule("transformer_blocks.**.bias", REPLICATED),
        Rule("transformer_blocks.*.attn1.norm_*.weight", REPLICATED),
        Rule("transformer_blocks.*.*.norm.weight", REPLICATED),
        # Modulation applies to one vector: it is computed on the chips that hold its weights, then gathered.
        Rule("transformer_blocks.*.*.linear.weight", (None, "all_embed", None)),
        Rule("transformer_blocks.*.attn1.**.weight", *BLOCK_PRODUCT),
        Rule("transformer_blocks.*.ff.net.**.weight", *BLOCK_PRODUCT),
        Rule("patch_embed.*.weight", *GATHERED),
        Rule("time_embedding.linear_*.weight", *GATHERED),
        Rule("norm_out.linear.weight", *GATHERED),
        Rule("proj_out.weight", *GATHERED),
    ),
)
