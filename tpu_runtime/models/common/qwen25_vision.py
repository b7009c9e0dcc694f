"""The vision tower of Qwen2.5-VL (https://arxiv.org/abs/2502.13923): images to tokens of its language model.

It is transformers' `Qwen2_5_VisionTransformerPretrainedModel`. Patches have 14 x 14 pixels. After 32 layers of width
1280, a merger turns 2 x 2 patches into a token of width 3584.
"""

from typing import TYPE_CHECKING

from ....sharding.rules import REPLICATED, Rule
from ...model_spec import Component, ConfigRequirement, EqualsConfig
from ...model_spec.upstream import Net

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

# Pixels on a side of a patch; patches on a side of a token (upstream's `spatial_merge_size`).
PATCH, MERGE_SIZE = 14, 2


def cut_patches(image: "Image.Image") -> "tuple[np.ndarray, tuple[int, int]]":
    """Cut an image into patches `[patches, 3 * 2 * 14 * 14]`, as upstream's processor; also returns (rows, columns).

    Patches of one token are adjacent. An image is a video of two equal frames.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    features = Qwen2VLImageProcessorPil()(images=[image], return_tensors="np")
    _, rows, columns = features["image_grid_thw"][0].tolist()
    return features["pixel_values"], (rows, columns)


def patch_positions(grid: tuple[int, int]) -> "np.ndarray":
    """Return row and column of each patch, `[patches, 2]`, in the order of `cut_patches`."""
    import numpy as np

    rows, columns = grid
    cells = np.indices(grid).reshape(2, rows // MERGE_SIZE, MERGE_SIZE, columns // MERGE_SIZE, MERGE_SIZE)
    return cells.transpose(1, 3, 2, 4, 0).reshape(-1, 2).astype(np.int32)


def look(encoder: Net, patches: "torch.Tensor", positions: "torch.Tensor") -> "tuple[torch.Tensor, None]":
    """Return the tokens `[1, patches / 4, dim]` of an image.

    encoder: transformers' vision tower. patches, positions: see `cut_patches` and `patch_positions`. Patches attend to
    those of their window, and in some layers to all. Upstream reorders patches by window; here windows are a mask.
    """
    import torch

    from ...programs.upstream_network import scan_layers

    config = encoder.config
    window = positions // (config.window_size // PATCH)
    is_near = (window[:, None] == window[None]).all(dim=-1)
    # The patch embedding is a convolution whose kernel is a whole patch: one product, [patches, hidden_size].
    x = patches.to(encoder.patch_embed.proj.weight.dtype) @ encoder.patch_embed.proj.weight.flatten(1).T
    angles = (positions[..., None].float() * encoder.rotary_pos_emb.inv_freq.float()).flatten(1).repeat(1, 2)
    rotary = angles.cos(), angles.sin()

    def run(x: "torch.Tensor", layers: range, allowed: "torch.Tensor") -> "torch.Tensor":
        def body(block: Net, x: "torch.Tensor") -> "torch.Tensor":
            x = x + window_attention(block.attn, block.norm1(x), rotary, allowed)
            return x + block.mlp(block.norm2(x))

        return scan_layers(encoder.blocks, x, body, layers)[0] if layers else x

    start = 0
    for index in (*config.fullatt_block_indexes, config.depth):
        x = run(x, range(start, index), is_near)
        if index < config.depth:
            x = run(x, range(index, index + 1), torch.ones_like(is_near))
        start = index + 1
    return encoder.merger(x)[None], None


def window_attention(
    attn: Net, x: "torch.Tensor", rotary: "tuple[torch.Tensor, torch.Tensor]", allowed: "torch.Tensor"
) -> "torch.Tensor":
    """Return the self-attention update of `x` `[patches, dim]`.

    attn: transformers' module. rotary: cosines and sines `[patches, head_dim]`.
    allowed: `[patches, patches]`, true where attended to.
    """
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    query, key, value = attn.qkv(x).unflatten(1, (3, attn.num_heads, -1)).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *rotary)
    heads = (head.transpose(0, 1)[None] for head in (query, key, value))
    attended = scaled_dot_product_attention(*heads, attn_mask=allowed[None, None])
    return attn.proj(attended[0].transpose(0, 1).flatten(1))


def vision_tower_class() -> type:
    """Return upstream's class from its model's module: transformers exports it at top level only from 5.18 on."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    return Qwen2_5_VisionTransformerPretrainedModel


IMAGE_ENCODER = Component(
    name="image_encoder",
    folder="text_encoder",
    library="transformers",
    class_name="Qwen2_5_VisionTransformerPretrainedModel",
    own_class=vision_tower_class,
    # The full model, of which this is a part.
    class_aliases=("Qwen2_5_VLForConditionalGeneration",),
    config_part="vision_config",
    config={
        "depth": 32,
        "fullatt_block_indexes": (7, 15, 23, 31),
        "hidden_size": 1280,
        "in_channels": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
    tiny={
        "depth": 5,
        "fullatt_block_indexes": (1, 3),
        "hidden_size": 40,
        # Large enough that an image affects the result.
        "initializer_range": 0.2,
        "intermediate_size": 52,
        "num_heads": 5,
        "out_hidden_size": 60,
        "window_size": 56,
    },
    needs={
        "in_channels": ConfigRequirement((3,)),
        "out_hidden_size": EqualsConfig("text_encoder", "hidden_size"),
        "patch_size": ConfigRequirement((PATCH,)),
        "spatial_merge_size": ConfigRequirement((MERGE_SIZE,)),
        "temporal_patch_size": ConfigRequirement((2,)),
    },
    blocks=("blocks",),
    # Before and since transformers 4.52.
    aliases={"visual.": "", "model.visual.": ""},
    # 1.3 GB: split by the dimension that 8 and 16 chips divide.
    rules=(
        Rule("blocks.*.attn.*.weight", (None, "all_mlp", None)),
        Rule("blocks.*.mlp.down_proj.weight", (None, "all_mlp", None)),
        Rule("blocks.*.mlp.*.weight", (None, None, "all_mlp")),
        Rule("merger.mlp.0.weight", ("all_mlp", None)),
        Rule("merger.mlp.2.weight", (None, "all_mlp")),
        Rule("patch_embed.proj.weight", REPLICATED),
    ),
)
