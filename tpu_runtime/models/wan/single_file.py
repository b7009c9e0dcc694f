"""Wan's single files: the denoiser (ComfyUI's `comfy/model_detection.py`) and both VAEs, with Wan-Video's keys."""

import math
import re
from collections.abc import Iterable

from ...files import CheckpointError
from ...formats.file_signature import Config, FileLayout, TensorShapes, count_layers, prefix_keys
from ...messages import compose
from ...model_spec import KeyTable
from ...model_spec.upstream import UpstreamConfig
from ..common.encoder_single_files import (
    T5_ATTENTION,
    VISION_QUERY,
    t5_config,
    t5_llama_table,
    vision_config,
    vision_table,
)

# Networks with further input channels, by the numbers of input and output channels.
_OF_CHANNELS = {
    (48, 16): "Wan 2.1 Fun Control, or another that is given a video",
    (52, 16): "Wan 2.2 Fun Control",
    (96, 48): "Lucy Edit",
    (100, 48): "Wan 2.2 Fun Inpaint 5B",
    (148, 48): "Wan 2.2 Fun Control 5B",
}
# The values of ComfyUI's `model_type` in a file's config that are supported here.
_TYPES = ("t2v", "i2v", "flf2v", "ti2v")


def denoiser_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of the transformer from its tensors' shapes. Raises CheckpointError for unsupported variants.

    shapes: of the file's tensors. base: the published config, from which the head size is taken: tensors do not show
        it.
    """
    dim, in_channels, *patch = shapes.require("patch_embedding.weight", 5)
    out_channels = shapes.require("proj_out.weight", 2)[0] // math.prod(patch)
    kind = "a Wan of causal blocks" if base.get("causal_ar") else base.get("model_type", "t2v")
    if other := _OF_CHANNELS.get((in_channels, out_channels)) or (kind not in _TYPES and kind):
        raise CheckpointError(compose(
            "file.wan_variant_unsupported", path=shapes.path, other=other, in_channels=in_channels,
            out_channels=out_channels,
        ))  # fmt: skip
    embedder = "condition_embedder"
    config: Config = {
        "ffn_dim": shapes.require("blocks.0.ffn.net.0.proj.weight", 2)[0],
        "freq_dim": shapes.require(f"{embedder}.time_embedder.linear_1.weight", 2)[1],
        "in_channels": in_channels,
        "num_attention_heads": dim // base["attention_head_dim"],
        "num_layers": shapes.count("blocks"),
        "out_channels": out_channels,
        "patch_size": tuple(patch),
        "text_dim": shapes.require(f"{embedder}.text_embedder.linear_1.weight", 2)[1],
    }
    # None if the file lacks their tensors, even if the published config has them.
    norm, places = f"{embedder}.image_embedder.norm1.weight", f"{embedder}.image_embedder.pos_embed"
    config["added_kv_proj_dim"] = dim if norm in shapes else None
    config["image_dim"] = shapes.require(norm, 1)[0] if norm in shapes else None
    # GGUF writers omit the first dimension, which is 1.
    config["pos_embed_seq_len"] = shapes[places][-2] if places in shapes else None
    return config


_RESIDUAL = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2"}
_BLOCK = {**_RESIDUAL, "shortcut": "conv_shortcut"}
_SAMPLER = {"resample.1": "resample.1", "time_conv": "time_conv"}


def vae_table(names: Iterable[str]) -> KeyTable:
    """Return the key table of both VAEs, from Wan-Video's names to diffusers'.

    names: keys of the file, original or diffusers'. Wan 2.1's decoder is one list of layers, which diffusers splits
    into levels; Wan 2.2's has levels in both. The last layer of a level changes the size.
    """
    names = list(names)
    table = _build_shared_table()
    if not any(name.startswith(_OF_LEVELS) for name in names):
        length = _length(names, "decoder.upsamples", "decoder.up_blocks.0.resnets")
        for level in range(4):
            for index in range(length - 1):
                resnet = f"decoder.up_blocks.{level}.resnets.{index}"
                table |= prefix_keys(f"decoder.upsamples.{level * length + index}", resnet, _BLOCK)
            upsampler = f"decoder.up_blocks.{level}.upsamplers.0"
            table |= prefix_keys(f"decoder.upsamples.{level * length + length - 1}", upsampler, _SAMPLER)
        return table | prefix_keys("encoder.downsamples.*", "encoder.down_blocks.*", {**_BLOCK, **_SAMPLER})
    for network, theirs, blocks, sampler in (
        ("encoder", "downsamples", "down_blocks", "downsampler"),
        ("decoder", "upsamples", "up_blocks", "upsampler"),
    ):
        inner = f"{network}.{theirs}.*.{theirs}"
        length = _length(names, f"{network}.{theirs}.0.{theirs}", f"{network}.{blocks}.0.resnets")
        for index in range(length - 1):
            table |= prefix_keys(f"{inner}.{index}", f"{network}.{blocks}.*.resnets.{index}", _BLOCK)
        table |= prefix_keys(f"{inner}.{length - 1}", f"{network}.{blocks}.*.{sampler}", _SAMPLER)
    return table


# Prefixes that only a VAE with levels in its encoder has: the original one, and diffusers'.
_OF_LEVELS = ("decoder.upsamples.0.upsamples.", "encoder.down_blocks.0.resnets.")


def _length(names: Iterable[str], theirs: str, own: str) -> int:
    """Return the number of layers of a level, with the one that changes the size.

    names: keys of the file. theirs: the original list of layers. own: diffusers' list.
    """
    matches = (re.fullmatch(rf"{re.escape(theirs)}\.(\d{{1,2}})\.resample\.1\.weight", name) for name in names)
    samplers = [int(match[1]) for match in matches if match]
    return min(1 + (min(samplers) if samplers else count_layers(names, own) or 3), 16)


def _build_shared_table() -> dict[str, str]:
    """Return the key table that both VAEs share."""
    table: dict[str, str] = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
    for network in ("encoder", "decoder"):
        table |= {f"{network}.conv1": f"{network}.conv_in", f"{network}.head.2": f"{network}.conv_out"}
        table[f"{network}.head.0"] = f"{network}.norm_out"
        table |= prefix_keys(f"{network}.middle.0", f"{network}.mid_block.resnets.0", _BLOCK)
        table |= prefix_keys(f"{network}.middle.2", f"{network}.mid_block.resnets.1", _BLOCK)
        attention = {name: name for name in ("norm", "to_qkv", "proj")}
        table |= prefix_keys(f"{network}.middle.1", f"{network}.mid_block.attentions.0", attention)
    return table


def vae_config(shapes: TensorShapes, base: UpstreamConfig) -> Config:
    """Return the config of either VAE from its tensors' shapes; the second's decoder has its own width."""
    resnets = shapes.count("decoder.up_blocks.0.resnets")
    config: Config = {"z_dim": shapes.require("post_quant_conv.weight", 5)[0], "num_res_blocks": max(resnets - 1, 0)}
    width, channels = shapes.require("encoder.conv_in.weight", 5)[:2]
    out, decoder_width = shapes.require("decoder.conv_out.weight", 5)[:2]
    config["base_dim"] = width
    if "encoder.down_blocks.0.resnets.0.conv1.weight" in shapes:
        config |= {"decoder_base_dim": decoder_width, "in_channels": channels, "out_channels": out, "is_residual": True}
    return config


_SMALL = "decoder.up_blocks.0.resnets.0.norm1.gamma"
LAYOUTS = (
    FileLayout(
        class_name="WanTransformer3DModel",
        marks=(
            ("head.modulation", "patch_embedding.weight"),
            ("condition_embedder.time_proj.weight", "patch_embedding.weight"),
        ),
        refused={
            "vace_patch_embedding": "VACE",
            "vace_blocks": "VACE",
            "control_adapter": "Wan 2.1 Fun Camera",
            "casual_audio_encoder": "Wan 2.2 S2V",
            "audio_injector": "Wan 2.2 S2V",
            "audio_proj": "a model with sound",
            "multitalk_audio_proj": "a model with sound",
            "blocks.*.audio_cross_attn": "a model with sound",
            "blocks.*.cross_attn.k_fusion": "Ovi, which makes sound too",
            "face_adapter": "Wan 2.2 Animate",
            "motion_encoder": "Wan 2.2 Animate",
            "pose_patch_embedding": "Wan 2.2 Animate",
            "patch_embedding_mask": "SCAIL",
            "patch_embedding_pose": "SCAIL",
            "patch_embedding_global": "WanDancer",
            "ref_conv": "Wan 2.1 Fun Control",
            "blocks.*.to_gate_compress": "FastWan with sparse attention (VSA)",
            "blocks.*.self_attn.to_gate_compress": "FastWan with sparse attention (VSA)",
            "blocks.*.self_attn.attn_op": "TurboDiffusion's Wan",
            "blocks.*.attn1.attn_op": "TurboDiffusion's Wan",
            "blocks.*.attn1.attn_impl": "TurboDiffusion's Wan",
            "blocks.*.cam_encoder": "ReCamMaster",
            "blocks.*.cross_attn.ip_adapter": "Lynx",
            "blocks.*.self_attn.ref_adapter": "Lynx",
            "blocks.*.cross_attn.emo_k_proj": "FlashPortrait",
            "blocks.*.control_blocks_dense": "LongVie 2",
            "blocks.*.motion_attn": "MTV-Crafter",
            "blocks.*.ffn.w1": "LongCat-Video",
            "blocks.*.ref_attn_k_img": "One-to-All Animation",
            "image_to_cond": "One-to-All Animation",
            "condition_embedding_": "SteadyDancer",
            "patch_embedding_fuse": "SteadyDancer",
            "text_projection": "BindWeave",
            "fps_embedding": "SkyReels V2 with a noise of its own for each frame",
            "LQ_proj_in": "FlashVSR",
            "add_conv_in": "a Wan that is given more latents",
        },
        # These have the tensors of text or image to video. Their further inputs or attention masks are not in a file.
        relatives={
            r"bernini": "Bernini-R, whose source videos and images are further tokens",
            r"phantom": "Phantom, whose subjects are further frames",
            r"mocha": "MoCha, whose video, mask and subject are further tokens",
            r"bind-?weave": "BindWeave, whose subjects are read by a language model",
            r"sky-?reels-?(a2|v3)": "SkyReels A2 or V3, which are given subjects, videos or sound",
            r"sky-?reels-?v2-df\b|diffusion-?forcing": "SkyReels V2 with a noise of its own for each frame",
            r"forcing|self-?forced|causal|long-?live|real-?time": "a model that makes blocks of frames in turn",
            r"chrono-?edit": "ChronoEdit, whose last frame has a place in time of its own",
            r"flow-?rvs": "FlowRVS, which starts from a video and not from noise",
            r"flash-?vsr": "FlashVSR, which makes a video larger",
            r"uni-?lumos": "UniLumos, which is given a video and its new light",
            r"dancer": "a model that is given music or poses",
            r"animate": "Wan Animate",
            r"echo-?shot|holo-?cine": "a model of several shots, each with a prompt of its own",
            r"long-?cat": "LongCat-Video",
            r"re-?cam-?master|lucy-?edit|\bvace\b": "a model that is given a video",
            r"(multi|infinite)-?talk|\b(stand-?in|lynx|hu-?mo|s2v|ovi|scail)\b": "a model that is given more than text",
            r"fun-?(5b-|a?14b-|1-3b-)?(control|camera)": "Fun Control or Fun Camera, which are given a video or a path",
        },
        config=denoiser_config,
    ),
    FileLayout(
        class_name="AutoencoderKLWan",
        marks=(("decoder.middle.0.residual.0.gamma",),),
        table=vae_table,
        config=vae_config,
    ),
    FileLayout(class_name="AutoencoderKLWan", marks=((_SMALL, "encoder.conv_in.weight"),), config=vae_config),
    FileLayout(
        class_name="UMT5EncoderModel",
        # UMT5 has a table of relative positions in every block; T5 has one.
        marks=(
            (f"{T5_ATTENTION}.q.weight", f"{T5_ATTENTION.replace('.0.', '.1.', 1)}.relative_attention_bias.weight"),
        ),
        config=t5_config,
        ignored=("spiece_model", "decoder.", "lm_head.", "logit_scale"),
    ),
    FileLayout(
        class_name="UMT5EncoderModel",
        marks=(("enc.blk.0.attn_q.weight", "enc.blk.1.attn_rel_b.weight"),),
        table=t5_llama_table,
        config=t5_config,
        ignored=("dec.", "output."),
    ),
    FileLayout(
        class_name="CLIPVisionModel",
        marks=(("vision_model.embeddings.class_embedding",), ("embeddings.class_embedding", VISION_QUERY)),
        table=vision_table,
        config=vision_config,
        ignored=("visual_projection", "text_model.", "text_projection", "logit_scale"),
    ),
)
