"""The denoiser of Z-Image as data: its sizes, sharding rules, and the key names of the original checkpoint."""

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig, split_rows

STACKS = ("noise_refiner", "context_refiner", "layers")

# All weights are replicated where they fit: 12.3 GB in bfloat16. In a step each of eight chips has 576 tokens, 15 ms of
# work; gathering the blocks' weights would take four times that.
_RULES = (
    Rule("*.*.attention.to_*.weight", REPLICATED, over=(2,)),
    Rule("*.*.attention.to_out.0.weight", REPLICATED, over=(2,)),
    Rule("*.*.feed_forward.*.weight", REPLICATED, over=(2,)),
    Rule("**", REPLICATED),
)

# Tongyi-MAI's keys; see `diffusers.loaders.single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers`.
ORIGINAL_KEYS = {
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
} | {
    f"{stack}.*.attention.{theirs}": keys
    for stack in STACKS
    for theirs, keys in {
        "qkv": split_rows(*(f"{stack}.*.attention.to_{name}" for name in "qkv")),
        "out": f"{stack}.*.attention.to_out.0",
        "q_norm": f"{stack}.*.attention.norm_q",
        "k_norm": f"{stack}.*.attention.norm_k",
    }.items()
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="ZImageTransformer2DModel",
    config={
        "all_f_patch_size": (1,),
        "all_patch_size": (2,),
        "axes_dims": (32, 48, 48),
        "axes_lens": (1536, 512, 512),
        "cap_feat_dim": 2560,
        "dim": 3840,
        "in_channels": 16,
        "n_heads": 30,
        "n_kv_heads": 30,
        "n_layers": 30,
        "n_refiner_layers": 2,
        "norm_eps": 1e-5,
        "qk_norm": True,
        "rope_theta": 256.0,
        "t_scale": 1000.0,
    },
    tiny={"axes_dims": (8, 6, 6), "cap_feat_dim": 40, "dim": 60, "n_heads": 3, "n_kv_heads": 3, "n_layers": 3},
    needs={
        "all_f_patch_size": ConfigRequirement(((1,),)),
        "all_patch_size": ConfigRequirement(((2,),)),
        "cap_feat_dim": EqualsConfig("text_encoder", "hidden_size"),
        "in_channels": ConfigRequirement((16,)),
        "qk_norm": ConfigRequirement((True,)),
        # Set in Z-Image Omni, which takes images.
        "siglip_feat_dim": ConfigRequirement((None,)),
    },
    blocks=STACKS,
    rules=_RULES,
    original_keys=ORIGINAL_KEYS,
    lora_prefixes=("diffusion_model.", "transformer.", "lycoris_", ""),
)
