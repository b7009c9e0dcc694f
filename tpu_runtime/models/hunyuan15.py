"""HunyuanVideo 1.5, text to video: hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v. The oracle is
`diffusers.HunyuanVideo15Pipeline`.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ...sharding.rules import REPLICATED, Rule
from ..model_spec import (
    Component,
    Denoiser,
    FloatLimit,
    HeadNorms,
    IntLimit,
    LatentGeometry,
    Miniature,
    ModelSpec,
    Need,
    Published,
    Recipe,
    Same,
    Settings,
    StepReuse,
    Switch,
    Table,
    Vae,
    split,
    swapped,
)
from . import layers
from .autoencoders.hunyuan15 import VAE_DECODER, decode, denormalize_latents
from .text_encoders.hunyuan15 import GLYPH_ENCODER, NEGATIVE_PROMPT, PROMPT, TEXT_ENCODER, TEXT_ENCODERS

if TYPE_CHECKING:
    import torch

# Rows of `cond_type_embed`: what kind of text a token is.
TEXT, GLYPHS, IMAGE = 0, 1, 2


def solver_arguments(config: Mapping[str, Any], latent_shape: tuple[int, ...], settings: Settings) -> dict[str, Any]:
    import numpy as np

    return {"sigmas": np.linspace(1.0, 0.0, settings.num_inference_steps + 1)[:-1]}


def forward(
    transformer: Any, sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """The flow (velocity) of `[rows, 32, latent_frames, latent_height, latent_width]` at one timestep.

    Upstream's forward, part by part: it asks for the values of a tensor and sorts tokens by a mask, which a traced
    program cannot. Here the sorting is a gather by the texts' lengths.
    """
    hidden, text, *rest = enter_blocks(transformer, sample, timestep, inputs)
    for block in transformer.transformer_blocks:
        hidden, text = block(hidden, text, *rest)
    return leave_blocks(transformer, hidden, rest[0], sample)


def enter_blocks(
    transformer: Any, sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> tuple:
    """What the first block takes: latent tokens, text, time, the text's length, rotary tables."""
    import torch

    rows, channels, *size = sample.shape
    zeros = torch.zeros((rows, channels + 1, *size), dtype=sample.dtype, device=sample.device)
    latents = torch.cat([sample, inputs.get("condition", zeros)], dim=1)
    text, text_length = join_texts(transformer, timestep.expand(rows), inputs)
    hidden = transformer.x_embedder(latents)
    temb = embed_time(transformer, timestep, sample, inputs)
    return hidden, text, temb, text_length, transformer.rope(latents)


def embed_time(
    transformer: Any, timestep: "torch.Tensor", sample: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "torch.Tensor":
    """The timestep as a vector, `[rows, dim]`; of a mean flow it is told where the flow is to end, too."""
    time_embed, rows = transformer.time_embed, len(sample)
    temb = time_embed.timestep_embedder(time_embed.time_proj(timestep.expand(rows)).to(sample.dtype))
    if not time_embed.use_meanflow:
        return temb
    end = time_embed.time_proj_r(inputs["next_timestep"].expand(rows))
    return temb + time_embed.timestep_embedder_r(end.to(sample.dtype))


def leave_blocks(
    transformer: Any, hidden: "torch.Tensor", temb: "torch.Tensor", sample: "torch.Tensor"
) -> "torch.Tensor":
    flow = transformer.proj_out(transformer.norm_out(hidden, temb))
    return flow.reshape(len(sample), *sample.shape[2:], -1).permute(0, 4, 1, 2, 3)


def keep(
    transformer: Any, sample: "torch.Tensor", timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
    """`forward`, and what the last block starts from."""
    hidden, text, *rest = enter_blocks(transformer, sample, timestep, inputs)
    hidden, text = transformer.transformer_blocks.layers(slice(None, -1))(hidden, text, *rest)
    features = {"hidden": hidden, "text": text, "text_length": rest[1]}
    return last_block(transformer, features, rest[0], sample), features


def reuse(
    transformer: Any,
    features: "dict[str, torch.Tensor]",
    sample: "torch.Tensor",
    timestep: "torch.Tensor",
    inputs: "dict[str, torch.Tensor]",
) -> "torch.Tensor":
    """DeepCache: only the last block runs, on what it got before, with this step's time. `sample` is not looked at."""
    return last_block(transformer, features, embed_time(transformer, timestep, sample, inputs), sample)


def last_block(
    transformer: Any, features: "dict[str, torch.Tensor]", temb: "torch.Tensor", sample: "torch.Tensor"
) -> "torch.Tensor":
    last = transformer.transformer_blocks.layers(slice(-1, None))
    rest = (temb, features["text_length"], transformer.rope(sample))
    hidden, _ = last(features["hidden"], features["text"], *rest)
    return leave_blocks(transformer, hidden, temb, sample)


def join_texts(
    transformer: Any, timestep: "torch.Tensor", inputs: "dict[str, torch.Tensor]"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """All texts as one, `[rows, tokens, dim]`, and how many of its tokens are real, `[rows]`: those come first.

    The picture's tokens lead; without a picture upstream masks them all, so there are none.
    """
    import torch

    from ..programs import torch_bridge

    kind = transformer.cond_type_embed.weight
    lengths = [inputs["text_2_length"], inputs["text_length"]]
    mask = torch.arange(inputs["text"].shape[1], device=timestep.device)[None] < inputs["text_length"][:, None]
    parts = [
        transformer.context_embedder_2(inputs["text_2"]) + kind[GLYPHS],
        transformer.context_embedder(inputs["text"], timestep, mask) + kind[TEXT],
    ]
    if "image_embeds" in inputs:
        image = transformer.image_embedder(inputs["image_embeds"]) + kind[IMAGE]
        lengths.insert(0, torch.full_like(lengths[0], image.shape[1]))
        parts.insert(0, image)
    return torch_bridge.call_jax(layers.valid_first, tuple(parts), tuple(lengths))


class RefinerProcessor:
    """`AttnProcessor2_0` for the token refiner, with padding masked as keys alone.

    Upstream masks padding as queries too, which leaves rows without any key; what they give is never used.
    """

    def __call__(
        self, attn: Any, hidden_states: "torch.Tensor", attention_mask: "torch.Tensor", **_: Any
    ) -> "torch.Tensor":
        import torch

        query, key, value = (
            project(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        # The first token is always real, so its row is the mask of keys.
        keys = attention_mask[:, :, :1].expand(-1, -1, query.shape[2], -1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=keys)
        return attn.to_out[0](out.transpose(1, 2).flatten(2, 3))


def run_block(
    fuses: Any,
    block: Any,
    hidden_states: "torch.Tensor",
    encoder_hidden_states: "torch.Tensor",
    temb: "torch.Tensor",
    text_length: "torch.Tensor",
    freqs_cis: "tuple[torch.Tensor, torch.Tensor]",
) -> "tuple[torch.Tensor, torch.Tensor]":
    """`HunyuanVideo15TransformerBlock` (see `layers.run_joint_block`)."""

    def attend(latent: "torch.Tensor", text: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        return block.attn(latent, text, text_length, image_rotary_emb=freqs_cis)

    vectors = [norm.linear(norm.silu(temb)).chunk(6, dim=1) for norm in (block.norm1, block.norm1_context)]
    modulations = [(layers.modulated(*v[:3]), layers.modulated(*v[3:])) for v in vectors]
    hidden = hidden_states, encoder_hidden_states
    return layers.run_joint_block(fuses, attend, hidden, modulations, (block.ff, block.ff_context))


def prepare_denoiser(network: Any, sequence: Any) -> None:
    """Puts our attention, token placement and patch embedding where upstream lets us."""
    transformer = network.module
    blocks = network.blocks("transformer_blocks")
    blocks.block.attn.set_processor(layers.JointProcessor(sequence.joint_attention))
    fuses = layers.fused_norms(sequence, blocks.block.norm2.eps)
    blocks.block.forward = partial(run_block, fuses, blocks.block)
    for block in transformer.context_embedder.token_refiner.refiner_blocks:
        block.attn.set_processor(RefinerProcessor())

    enter = partial(layers.enter_joint, sequence, "freqs_cis")
    blocks.scan = sequence.scan("transformer_blocks", enter, ("hidden_states", "encoder_hidden_states"))
    projection = transformer.x_embedder.proj
    projection.forward = lambda latents: layers.embed_patches(projection, latents).transpose(1, 2)


# Where a block of the text's refiner lies.
_REFINER = "context_embedder.token_refiner.refiner_blocks.*"
# Tencent's names; and ComfyUI's, which has some of its own.
MAKERS_NAMES: Table = {
    "img_in.proj": "x_embedder.proj",
    "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
    "time_in.in_layer": "time_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
    "time_in.out_layer": "time_embed.timestep_embedder.linear_2",
    "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
    "txt_in.t_embedder.in_layer": "context_embedder.time_text_embed.timestep_embedder.linear_1",
    "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
    "txt_in.t_embedder.out_layer": "context_embedder.time_text_embed.timestep_embedder.linear_2",
    "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.in_layer": "context_embedder.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
    "txt_in.c_embedder.out_layer": "context_embedder.time_text_embed.text_embedder.linear_2",
    "txt_in.input_embedder": "context_embedder.proj_in",
    "txt_in.individual_token_refiner.blocks.*.norm1": f"{_REFINER}.norm1",
    "txt_in.individual_token_refiner.blocks.*.norm2": f"{_REFINER}.norm2",
    "txt_in.individual_token_refiner.blocks.*.self_attn_qkv": split(
        f"{_REFINER}.attn.to_q", f"{_REFINER}.attn.to_k", f"{_REFINER}.attn.to_v"
    ),
    "txt_in.individual_token_refiner.blocks.*.self_attn.qkv": split(
        f"{_REFINER}.attn.to_q", f"{_REFINER}.attn.to_k", f"{_REFINER}.attn.to_v"
    ),
    "txt_in.individual_token_refiner.blocks.*.self_attn_proj": f"{_REFINER}.attn.to_out.0",
    "txt_in.individual_token_refiner.blocks.*.self_attn.proj": f"{_REFINER}.attn.to_out.0",
    "txt_in.individual_token_refiner.blocks.*.mlp.fc1": f"{_REFINER}.ff.net.0.proj",
    "txt_in.individual_token_refiner.blocks.*.mlp.0": f"{_REFINER}.ff.net.0.proj",
    "txt_in.individual_token_refiner.blocks.*.mlp.fc2": f"{_REFINER}.ff.net.2",
    "txt_in.individual_token_refiner.blocks.*.mlp.2": f"{_REFINER}.ff.net.2",
    "txt_in.individual_token_refiner.blocks.*.adaLN_modulation.1": f"{_REFINER}.norm_out.linear",
    "byt5_in.layernorm": "context_embedder_2.norm",
    "byt5_in.fc1": "context_embedder_2.linear_1",
    "byt5_in.fc2": "context_embedder_2.linear_2",
    "byt5_in.fc3": "context_embedder_2.linear_3",
    "vision_in.proj.0": "image_embedder.norm_in",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "vision_in.proj.4": "image_embedder.norm_out",
    "cond_type_embedding": "cond_type_embed",
    "double_blocks.*.img_mod.linear": "transformer_blocks.*.norm1.linear",
    "double_blocks.*.img_mod.lin": "transformer_blocks.*.norm1.linear",
    "double_blocks.*.img_attn_q": "transformer_blocks.*.attn.to_q",
    "double_blocks.*.img_attn_k": "transformer_blocks.*.attn.to_k",
    "double_blocks.*.img_attn_v": "transformer_blocks.*.attn.to_v",
    "double_blocks.*.img_attn_qkv": split(
        "transformer_blocks.*.attn.to_q", "transformer_blocks.*.attn.to_k", "transformer_blocks.*.attn.to_v"
    ),
    "double_blocks.*.img_attn.qkv": split(
        "transformer_blocks.*.attn.to_q", "transformer_blocks.*.attn.to_k", "transformer_blocks.*.attn.to_v"
    ),
    "double_blocks.*.img_attn_q_norm": "transformer_blocks.*.attn.norm_q",
    "double_blocks.*.img_attn_k_norm": "transformer_blocks.*.attn.norm_k",
    "double_blocks.*.img_attn.norm.query_norm": "transformer_blocks.*.attn.norm_q",
    "double_blocks.*.img_attn.norm.key_norm": "transformer_blocks.*.attn.norm_k",
    "double_blocks.*.img_attn_proj": "transformer_blocks.*.attn.to_out.0",
    "double_blocks.*.img_attn.proj": "transformer_blocks.*.attn.to_out.0",
    "double_blocks.*.img_mlp.fc1": "transformer_blocks.*.ff.net.0.proj",
    "double_blocks.*.img_mlp.0": "transformer_blocks.*.ff.net.0.proj",
    "double_blocks.*.img_mlp.fc2": "transformer_blocks.*.ff.net.2",
    "double_blocks.*.img_mlp.2": "transformer_blocks.*.ff.net.2",
    "double_blocks.*.txt_mod.linear": "transformer_blocks.*.norm1_context.linear",
    "double_blocks.*.txt_mod.lin": "transformer_blocks.*.norm1_context.linear",
    "double_blocks.*.txt_attn_q": "transformer_blocks.*.attn.add_q_proj",
    "double_blocks.*.txt_attn_k": "transformer_blocks.*.attn.add_k_proj",
    "double_blocks.*.txt_attn_v": "transformer_blocks.*.attn.add_v_proj",
    "double_blocks.*.txt_attn_qkv": split(
        "transformer_blocks.*.attn.add_q_proj",
        "transformer_blocks.*.attn.add_k_proj",
        "transformer_blocks.*.attn.add_v_proj",
    ),
    "double_blocks.*.txt_attn.qkv": split(
        "transformer_blocks.*.attn.add_q_proj",
        "transformer_blocks.*.attn.add_k_proj",
        "transformer_blocks.*.attn.add_v_proj",
    ),
    "double_blocks.*.txt_attn_q_norm": "transformer_blocks.*.attn.norm_added_q",
    "double_blocks.*.txt_attn_k_norm": "transformer_blocks.*.attn.norm_added_k",
    "double_blocks.*.txt_attn.norm.query_norm": "transformer_blocks.*.attn.norm_added_q",
    "double_blocks.*.txt_attn.norm.key_norm": "transformer_blocks.*.attn.norm_added_k",
    "double_blocks.*.txt_attn_proj": "transformer_blocks.*.attn.to_add_out",
    "double_blocks.*.txt_attn.proj": "transformer_blocks.*.attn.to_add_out",
    "double_blocks.*.txt_mlp.fc1": "transformer_blocks.*.ff_context.net.0.proj",
    "double_blocks.*.txt_mlp.0": "transformer_blocks.*.ff_context.net.0.proj",
    "double_blocks.*.txt_mlp.fc2": "transformer_blocks.*.ff_context.net.2",
    "double_blocks.*.txt_mlp.2": "transformer_blocks.*.ff_context.net.2",
    "final_layer.adaLN_modulation.1": swapped("norm_out.linear"),
    "final_layer.linear": "proj_out",
}

TRANSFORMER = Component(
    name="transformer",
    library="diffusers",
    class_name="HunyuanVideo15Transformer3DModel",
    config={
        "attention_head_dim": 128,
        "image_embed_dim": 1152,
        "in_channels": 65,
        "mlp_ratio": 4.0,
        "num_attention_heads": 16,
        "num_layers": 54,
        "num_refiner_layers": 2,
        "out_channels": 32,
        "patch_size": 1,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "rope_axes_dim": (16, 56, 56),
        "rope_theta": 256.0,
        "target_size": 960,
        "task_type": "t2v",
        "text_embed_2_dim": 1472,
        "text_embed_dim": 3584,
        "use_meanflow": False,
    },
    tiny={
        "attention_head_dim": 20,
        "image_embed_dim": 28,
        "mlp_ratio": 3.0,
        "num_attention_heads": 6,
        "num_layers": 3,
        "rope_axes_dim": (4, 8, 8),
        "target_size": 96,
        "text_embed_2_dim": 44,
        "text_embed_dim": 60,
    },
    needs={
        # Latents, a picture's latents and the mask of what is given.
        "in_channels": Need((2 * 32 + 1,)),
        "out_channels": Need((32,)),
        "patch_size": Need((1,)),
        "patch_size_t": Need((1,)),
        "qk_norm": Need(("rms_norm",)),
        "text_embed_2_dim": Same("text_encoder_2", "d_model"),
        "text_embed_dim": Same("text_encoder", "hidden_size"),
        # Step-distilled checkpoints are told the next timestep too.
        "use_meanflow": Need((False,)),
    },
    blocks=("transformer_blocks",),
    makers_names=MAKERS_NAMES,
    rules=(
        Rule("transformer_blocks.**.bias", REPLICATED),
        Rule("transformer_blocks.*.attn.norm_*.weight", REPLICATED),
        # Modulation is of one vector: where its weights lie, it is computed, and the vector is gathered.
        Rule("transformer_blocks.*.norm1.linear.weight", (None, "all_embed", None)),
        Rule("transformer_blocks.*.norm1_context.linear.weight", (None, "all_embed", None)),
        Rule("transformer_blocks.*.attn.to_out.0.weight", *layers.BLOCK_GATHERED),
        Rule("transformer_blocks.*.attn.*.weight", *layers.BLOCK_GATHERED),
        Rule("transformer_blocks.*.*.net.0.proj.weight", *layers.BLOCK_GATHERED),
        Rule("transformer_blocks.*.*.net.2.weight", *layers.BLOCK_GATHERED),
        Rule("context_embedder.token_refiner.refiner_blocks.*.norm*.weight", REPLICATED),
        Rule("context_embedder.token_refiner.refiner_blocks.**.weight", *layers.GATHERED),
        Rule("context_embedder.proj_in.weight", *layers.GATHERED),
        Rule("context_embedder.time_text_embed.*.*.weight", *layers.GATHERED),
        Rule("context_embedder_2.linear_*.weight", *layers.GATHERED),
        Rule("image_embedder.linear_*.weight", *layers.GATHERED),
        Rule("time_embed.timestep_embedder.*.weight", *layers.GATHERED),
        Rule("norm_out.linear.weight", *layers.GATHERED),
    ),
)

# As the published 720p checkpoint configures it; 480p has a shift of 5.
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 9.0,
    "use_dynamic_shifting": False,
}

SPEC = ModelSpec(
    name="hunyuanvideo1.5-t2v-720p",
    family="HunyuanVideo15",
    title="HunyuanVideo 1.5 T2V",
    category="HunyuanVideo1.5",
    published=Published(
        hub_id="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        pipeline_classes=("HunyuanVideo15Pipeline",),
        index={"guider": ("diffusers", "ClassifierFreeGuidance")},
        files={"guider/guider_config.json": {"_class_name": "ClassifierFreeGuidance", "guidance_scale": 6.0}},
    ),
    miniature=Miniature(id="tiny/hunyuan15", inputs={"height": 80, "width": 112, "num_frames": 9}),
    components=(TEXT_ENCODER, GLYPH_ENCODER, TRANSFORMER, VAE_DECODER),
    geometry=LatentGeometry(channels=32, stride_t=4, stride_hw=16, patch_thw=(1, 1, 1)),
    text_encoders=TEXT_ENCODERS,
    inputs={
        "height": IntLimit(default=720, low=64, high=1920, multiple_of=16),
        "width": IntLimit(default=1280, low=64, high=1920, multiple_of=16),
        "num_frames": IntLimit(default=121, low=1, high=241, multiple_of=4, plus=1),
        "num_inference_steps": IntLimit(default=50, low=1, high=100),
        # Below 1 upstream still guides, by less than the prompt alone.
        "guidance_scale": FloatLimit(default=6.0, low=1.0, high=20.0),
        "seed": IntLimit(default=42, low=0, high=2**64 - 1),
        # 0: the checkpoint's own shift, which differs between 480p, 720p and image to video.
        "flow_shift": FloatLimit(default=0.0, low=0.0, high=20.0, step=0.5),
        "fps": IntLimit(default=24, low=1, high=120),
        "step_cache": Switch(default=False),
        # Reuse is for the middle of 50 steps: the first compose the video, the last draw its details.
        "cache_start": IntLimit(default=11, low=0, high=100),
        "cache_end": IntLimit(default=45, low=0, high=100),
        "cache_interval": IntLimit(default=4, low=1, high=100),
    },
    texts={"prompt": PROMPT, "negative_prompt": NEGATIVE_PROMPT},
    recipe=Recipe(scheduler=SCHEDULER, shift_key="shift", solver_arguments=solver_arguments),
    denoiser=Denoiser(
        forward=forward,
        prepare=prepare_denoiser,
        step_reuse=StepReuse(keep=keep, reuse=reuse, tokens=("hidden",), whole=("text", "text_length")),
        head_norms=(
            HeadNorms(
                queries=("transformer_blocks.*.attn.norm_q", "transformer_blocks.*.attn.norm_added_q"),
                keys=("transformer_blocks.*.attn.norm_k", "transformer_blocks.*.attn.norm_added_k"),
            ),
        ),
    ),
    vae=Vae(latent_format="HunyuanVideo15", denormalize=denormalize_latents, decode=decode),
)
