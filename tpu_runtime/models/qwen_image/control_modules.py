"""Torch modules of the control networks of Qwen-Image that no library has; `control` computes with them.

Parameters are named as in the published files: DiffSynth-Studio's block-wise ControlNets, and alibaba-pai's Fun
ControlNet.
"""

from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import nn

EPS = 1e-6


class BlockWiseBlock(nn.Module):
    """The part of a block-wise ControlNet after one of the denoiser's blocks."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.x_rms, self.y_rms = RMSNorm(dim, eps=EPS), RMSNorm(dim, eps=EPS)
        self.input_proj, self.output_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)


class BlockWiseNetwork(nn.Module, ConfigMixin):
    """DiffSynth-Studio's ControlNet (canny, depth, inpainting)."""

    config_name = "config.json"

    @register_to_config
    def __init__(self, dim: int = 3072, in_features: int = 64, num_layers: int = 60) -> None:
        super().__init__()
        self.img_in = nn.Linear(in_features, dim)
        self.controlnet_blocks = nn.ModuleList(BlockWiseBlock(dim) for _ in range(num_layers))


class FunNetwork(nn.Module, ConfigMixin):
    """alibaba-pai's ControlNet, without the embeddings, which are the denoiser's."""

    config_name = "config.json"

    @register_to_config
    def __init__(
        self, attention_head_dim: int = 128, in_features: int = 132, num_attention_heads: int = 24, num_layers: int = 5
    ) -> None:
        super().__init__()
        dim = num_attention_heads * attention_head_dim
        self.control_img_in, self.before_proj = nn.Linear(in_features, dim), nn.Linear(dim, dim)
        self.control_blocks = nn.ModuleList(
            QwenImageTransformerBlock(
                dim=dim, num_attention_heads=num_attention_heads, attention_head_dim=attention_head_dim
            )
            for _ in range(num_layers)
        )
        for block in self.control_blocks:
            block.after_proj = nn.Linear(dim, dim)
