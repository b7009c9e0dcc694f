"""Writes the networks of a checkpoint in diffusers layout as single files, in the names of their makers and of ComfyUI.

The names are those of the makers' code and of diffusers' conversion scripts, from which they are written out here
one by one; the pack's own tables are not used. That upstream reads the files is the proof.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from comfyui_tpu.tpu_runtime.model_spec import ModelSpec
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Renames = tuple[tuple[str, str], ...]


def load_folder(folder: Path) -> Tensors:
    """All tensors of a component's folder."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def renamed(tensors: Tensors, renames: Renames) -> Tensors:
    """Tensors by their names after each (regular expression, replacement) in turn that matches."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        assert name not in found, name
        found[name] = tensor
    return found


WAN: Renames = (
    (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.norm2\.", ".norm3."),
    (r"\.ffn\.net\.0\.proj", ".ffn.0"),
    (r"\.ffn\.net\.2", ".ffn.2"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"_attn\.to_out\.0", "_attn.o"),
    (r"_attn\.to_([qkv])\.", r"_attn.\1."),
    (r"\.add_([kv])_proj", r".\1_img"),
    (r"\.norm_added_k", ".norm_k_img"),
)


def wan(tensors: Tensors) -> Tensors:
    return renamed(tensors, WAN)


_WAN_RESIDUAL: Renames = (
    (r"\.norm1\.gamma", ".residual.0.gamma"),
    (r"\.conv1\.", ".residual.2."),
    (r"\.norm2\.gamma", ".residual.3.gamma"),
    (r"\.conv2\.", ".residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
)
_WAN_VAE: Renames = (
    *_WAN_RESIDUAL,
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"coder\.conv_in\.", "coder.conv1."),
    (r"coder\.norm_out\.", "coder.head.0."),
    (r"coder\.conv_out\.", "coder.head.2."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
)


def wan_vae(tensors: Tensors) -> Tensors:
    """Wan 2.1's: levels of the decoder are one list, in which the last of each but the last changes the size."""
    length = 1 + len({name.split(".")[4] for name in tensors if name.startswith("decoder.up_blocks.0.resnets.")})

    def place(match: re.Match[str]) -> str:
        level, kind, index = int(match[1]), match[2], int(match[3])
        return f"decoder.upsamples.{level * length + (index if kind == 'resnets' else length - 1)}."

    found: Tensors = {}
    for name, tensor in renamed(tensors, _WAN_VAE).items():
        name = name.replace("encoder.down_blocks.", "encoder.downsamples.")
        found[re.sub(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.", place, name)] = tensor
    return found


def wan22_vae(tensors: Tensors) -> Tensors:
    """Wan 2.2's: a list of levels, each a list whose last changes the size."""
    found: Tensors = {}
    counts: dict[str, int] = {}
    for name in tensors:
        if match := re.match(r"((?:en|de)coder\.\w+_blocks\.\d+)\.resnets\.(\d+)\.", name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    for name, tensor in tensors.items():
        if match := re.match(r"((?:en|de)coder\.\w+_blocks\.\d+)\.(?:down|up)sampler\.", name):
            name = f"{match[1]}.resnets.{counts[match[1]]}.{name[match.end() :]}"
        name = re.sub(r"\.down_blocks\.(\d+)\.resnets\.", r".downsamples.\1.downsamples.", name)
        found[re.sub(r"\.up_blocks\.(\d+)\.resnets\.", r".upsamples.\1.upsamples.", name)] = tensor
    return renamed(found, _WAN_VAE)


def same(tensors: Tensors) -> Tensors:
    return dict(tensors)


def vision(tensors: Tensors) -> Tensors:
    """CLIP and SigLIP as transformers 4 wrote them."""
    return {f"vision_model.{name.removeprefix('vision_model.')}": tensor for name, tensor in tensors.items()}


def fused(tensors: Tensors, parts: Renames, kind: str) -> Tensors:
    """Three projections of a name `q`, `k`, `v` as one; `parts` are (theirs, ours) with `{}` for which."""
    found = dict(tensors)
    for theirs, ours in parts:
        pattern = re.compile(ours.format("q") + r"\.(weight|bias)$")
        for name in list(found):
            if match := pattern.search(name):
                names = [name[: match.start()] + re.sub(r"\\", "", ours.format(part)) + f".{match[1]}" for part in kind]
                whole = torch.cat([found.pop(each) for each in names])
                found[name[: match.start()] + f"{theirs}.{match[1]}"] = whole
    return found


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Its two halves in the other order."""
    first, second = tensor.chunk(2)
    return torch.cat([second, first])


# What FLUX.2 and HunyuanVideo 1.5 have in common: projections of both streams as one, embedders, and their attention.
FUSED: Renames = (("attn.qkv", r"attn\.to_{}"), ("attn.added", r"attn\.add_{}_proj"))


def embedder(ours: str, theirs: str) -> Renames:
    return (rf"^{ours}\.linear_1", f"{theirs}.in_layer"), (rf"^{ours}\.linear_2", f"{theirs}.out_layer")


def streams(weight: str) -> Renames:
    """The attention of blocks of two streams, whose norms' weights are called `weight`."""
    attention = r"^transformer_blocks\.(\d+)\.attn"
    return (
        (rf"{attention}\.qkv", r"double_blocks.\1.img_attn.qkv"),
        (rf"{attention}\.added", r"double_blocks.\1.txt_attn.qkv"),
        (rf"{attention}\.norm_q\.weight", rf"double_blocks.\1.img_attn.norm.query_norm.{weight}"),
        (rf"{attention}\.norm_k\.weight", rf"double_blocks.\1.img_attn.norm.key_norm.{weight}"),
        (rf"{attention}\.norm_added_q\.weight", rf"double_blocks.\1.txt_attn.norm.query_norm.{weight}"),
        (rf"{attention}\.norm_added_k\.weight", rf"double_blocks.\1.txt_attn.norm.key_norm.{weight}"),
        (rf"{attention}\.to_out\.0", r"double_blocks.\1.img_attn.proj"),
        (rf"{attention}\.to_add_out", r"double_blocks.\1.txt_attn.proj"),
    )


# Of the VAEs of both, whose code is latent diffusion's.
LATENT_DIFFUSION: Renames = (
    (r"\.down_blocks\.", ".down."),
    (r"(\.(?:up|down)\.\d+)\.resnets\.", r"\1.block."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.mid_block\.attentions\.0\.to_([qkv])\.", r".mid.attn_1.\1."),
)


def flux2(tensors: Tensors) -> Tensors:
    """Black Forest Labs': fused projections, shift before scale, norms' weights called scale."""
    tensors = fused(tensors, FUSED, "qkv")
    found = renamed(
        tensors,
        (
            (r"^x_embedder\.", "img_in."),
            (r"^context_embedder\.", "txt_in."),
            *embedder(r"time_guidance_embed\.timestep_embedder", "time_in"),
            *embedder(r"time_guidance_embed\.guidance_embedder", "guidance_in"),
            (r"_modulation(\w*)\.linear\.", r"_modulation\1.lin."),
            (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
            (r"^proj_out\.", "final_layer.linear."),
            (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj", r"single_blocks.\1.linear1"),
            (r"^single_transformer_blocks\.(\d+)\.attn\.to_out", r"single_blocks.\1.linear2"),
            (r"^single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
            (r"^single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
            *streams("scale"),
            (r"^transformer_blocks\.(\d+)\.ff\.linear_in", r"double_blocks.\1.img_mlp.0"),
            (r"^transformer_blocks\.(\d+)\.ff\.linear_out", r"double_blocks.\1.img_mlp.2"),
            (r"^transformer_blocks\.(\d+)\.ff_context\.linear_in", r"double_blocks.\1.txt_mlp.0"),
            (r"^transformer_blocks\.(\d+)\.ff_context\.linear_out", r"double_blocks.\1.txt_mlp.2"),
        ),
    )  # fmt: skip
    name = "final_layer.adaLN_modulation.1.weight"
    return {**found, name: swapped(found[name])}


def flux2_vae(tensors: Tensors) -> Tensors:
    """Latent diffusion's: the decoder's levels count from the last; attention is of 1 x 1 convolutions."""
    levels = len({name.split(".")[2] for name in tensors if name.startswith("decoder.up_blocks.")})
    found: Tensors = {}
    for name, tensor in tensors.items():
        if ".attentions.0." in name and tensor.ndim == 2:
            tensor = tensor[:, :, None, None]
        name = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{levels - 1 - int(match[1])}", name)
        found[name] = tensor
    return renamed(
        found,
        (
            (r"^quant_conv\.", "encoder.quant_conv."),
            (r"^post_quant_conv\.", "decoder.post_quant_conv."),
            *LATENT_DIFFUSION,
            (r"\.mid_block\.attentions\.0\.group_norm\.", ".mid.attn_1.norm."),
            (r"\.mid_block\.attentions\.0\.to_out\.0\.", ".mid.attn_1.proj_out."),
            (r"\.conv_norm_out\.", ".norm_out."),
        ),
    )


def z_image(tensors: Tensors) -> Tensors:
    """Tongyi-MAI's (`src/zimage/transformer.py`): fused projections, one embedder and one last layer."""
    found = renamed(
        fused(tensors, (("attention.qkv", r"attention\.to_{}"),), "qkv"),
        (
            (r"^all_x_embedder\.2-1\.", "x_embedder."),
            (r"^all_final_layer\.2-1\.", "final_layer."),
            (r"\.attention\.to_out\.0\.", ".attention.out."),
            (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
        ),
    )
    return {**found, "norm_final.weight": torch.ones(len(found["x_embedder.bias"]))}


def hunyuan15(tensors: Tensors) -> Tensors:
    """Tencent's, as ComfyUI repackages them: fused projections, shift before scale."""
    tensors = fused(tensors, FUSED, "qkv")
    found = renamed(
        tensors,
        (
            (r"^x_embedder\.", "img_in."),
            *embedder(r"time_embed\.timestep_embedder", "time_in"),
            *embedder(r"time_embed\.timestep_embedder_r", "time_r_in"),
            *embedder(r"context_embedder\.time_text_embed\.timestep_embedder", "txt_in.t_embedder"),
            *embedder(r"context_embedder\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
            (r"^context_embedder\.proj_in\.", "txt_in.input_embedder."),
            (r"^context_embedder\.token_refiner\.refiner_blocks\.", "txt_in.individual_token_refiner.blocks."),
            (r"(refiner\.blocks\.\d+)\.attn\.qkv", r"\1.self_attn.qkv"),
            (r"(refiner\.blocks\.\d+)\.attn\.to_out\.0", r"\1.self_attn.proj"),
            (r"(refiner\.blocks\.\d+)\.ff\.net\.0\.proj", r"\1.mlp.0"),
            (r"(refiner\.blocks\.\d+)\.ff\.net\.2", r"\1.mlp.2"),
            (r"(refiner\.blocks\.\d+)\.norm_out\.linear", r"\1.adaLN_modulation.1"),
            (r"^context_embedder_2\.norm\.", "byt5_in.layernorm."),
            (r"^context_embedder_2\.linear_(\d)\.", r"byt5_in.fc\1."),
            (r"^image_embedder\.norm_in\.", "vision_in.proj.0."),
            (r"^image_embedder\.linear_1\.", "vision_in.proj.1."),
            (r"^image_embedder\.linear_2\.", "vision_in.proj.3."),
            (r"^image_embedder\.norm_out\.", "vision_in.proj.4."),
            (r"^cond_type_embed\.", "cond_type_embedding."),
            (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
            (r"^proj_out\.", "final_layer.linear."),
            *streams("weight"),
            (r"^transformer_blocks\.", "double_blocks."),
            (r"(double_blocks\.\d+)\.norm1\.linear", r"\1.img_mod.lin"),
            (r"(double_blocks\.\d+)\.norm1_context\.linear", r"\1.txt_mod.lin"),
            (r"(double_blocks\.\d+)\.ff\.net\.0\.proj", r"\1.img_mlp.0"),
            (r"(double_blocks\.\d+)\.ff\.net\.2", r"\1.img_mlp.2"),
            (r"(double_blocks\.\d+)\.ff_context\.net\.0\.proj", r"\1.txt_mlp.0"),
            (r"(double_blocks\.\d+)\.ff_context\.net\.2", r"\1.txt_mlp.2"),
        ),
    )
    last = "final_layer.adaLN_modulation.1."
    return {name: swapped(tensor) if name.startswith(last) else tensor for name, tensor in found.items()}


def hunyuan15_vae(tensors: Tensors) -> Tensors:
    return renamed(
        tensors, ((r"\.up_blocks\.", ".up."), *LATENT_DIFFUSION, (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."))
    )


def cogvideox(tensors: Tensors) -> Tensors:
    """ComfyUI's own (`comfy/ldm/cogvideo/model.py`)."""
    return renamed(
        tensors,
        (
            (r"^transformer_blocks\.", "blocks."),
            (r"^time_embedding\.linear_", "time_embedding_linear_"),
            (r"^ofs_embedding\.linear_", "ofs_embedding_linear_"),
            (r"\.attn1\.to_([qkv])\.", r".\1."),
            (r"\.attn1\.norm_([qk])\.", r".norm_\1."),
            (r"\.attn1\.to_out\.0\.", ".attn_out."),
            (r"\.ff\.net\.0\.proj\.", ".ff_proj."),
            (r"\.ff\.net\.2\.", ".ff_out."),
        ),
    )


def in_model(tensors: Tensors) -> Tensors:
    """Qwen2.5-VL's language model, called `model` as in its makers' files."""
    return {f"model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}


def mistral(tensors: Tensors) -> Tensors:
    """The language model of Mistral 3 alone, as ComfyUI repackages it: the first 30 of its layers."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        match = re.search(r"language_model\.(?:model\.)?(layers\.(\d+)\.|embed_tokens\.)", name)
        if match and int(match[2] or 0) < 30:
            found["model." + name[match.start(1) :]] = tensor
    return found


def t5_llama(tensors: Tensors) -> Tensors:
    """llama.cpp's names of T5, from its `gguf/tensor_mapping.py`."""
    block = r"^encoder\.block\.(\d+)\.layer"
    return renamed(
        tensors,
        (
            (r"^shared\.", "token_embd."),
            (r"^encoder\.final_layer_norm\.", "enc.output_norm."),
            (rf"{block}\.0\.SelfAttention\.relative_attention_bias\.", r"enc.blk.\1.attn_rel_b."),
            (rf"{block}\.0\.SelfAttention\.([qkvo])\.", r"enc.blk.\1.attn_\2."),
            (rf"{block}\.0\.layer_norm\.", r"enc.blk.\1.attn_norm."),
            (rf"{block}\.1\.layer_norm\.", r"enc.blk.\1.ffn_norm."),
            (rf"{block}\.1\.DenseReluDense\.wi_0\.", r"enc.blk.\1.ffn_gate."),
            (rf"{block}\.1\.DenseReluDense\.wi_1\.", r"enc.blk.\1.ffn_up."),
            (rf"{block}\.1\.DenseReluDense\.wo\.", r"enc.blk.\1.ffn_down."),
        ),
    )


MAKERS: Mapping[str, Callable[[Tensors], Tensors]] = {
    "WanTransformer3DModel": wan,
    "Flux2Transformer2DModel": flux2,
    "HunyuanVideo15Transformer3DModel": hunyuan15,
    "CogVideoXTransformer3DModel": cogvideox,
    "ZImageTransformer2DModel": z_image,
    "QwenImageTransformer2DModel": same,
    "AutoencoderKL": flux2_vae,
    "AutoencoderKLFlux2": flux2_vae,
    "AutoencoderKLHunyuanVideo15": hunyuan15_vae,
    "AutoencoderKLCogVideoX": same,
    "UMT5EncoderModel": same,
    "T5EncoderModel": same,
    "Qwen3ForCausalLM": same,
    "Qwen2_5_VLTextModel": in_model,
    "Mistral3ForConditionalGeneration": mistral,
    "CLIPVisionModel": vision,
    "SiglipVisionModel": vision,
}


def makers(class_name: str, config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """A network's tensors in its makers' names."""
    if class_name == "AutoencoderKLWan":
        return wan22_vae(tensors) if config.get("is_residual") else wan_vae(tensors)
    if config.get("zero_cond_t"):
        # By which Comfy-Org's files of Qwen-Image Edit say it.
        return {**tensors, "__index_timestep_zero__": torch.zeros(0)}
    return MAKERS[class_name](tensors)


def write(
    path: Path, folder: Path, class_name: str, *, prefix: str = "", change: Callable[[Tensors], Tensors] = same
) -> Path:
    """A component's folder as one file; its config goes along, for a miniature's sizes are not to be told from it."""
    config = json.loads((folder / "config.json").read_text())
    tensors = change(makers(class_name, config, load_folder(folder)))
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if not key.startswith("_")}
    save_file(
        {prefix + name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path,
        {"format": "pt", "config": json.dumps(kept)},
    )  # fmt: skip
    return path


def write_folder(path: Path, source: Path, spec: ModelSpec, folder: str, **options: Any) -> Path:
    """A folder of a checkpoint as one file; where it holds a whole Qwen2.5-VL, by the names of transformers 4, as
    Comfy-Org repackages it, with the language model's config and that of what it sees with.
    """
    first, *others = spec.list_components(folder)
    if first.whole(others) == first.class_name:
        return write(path, source / folder, first.class_name, **options)
    config, tensors = json.loads((source / folder / "config.json").read_text()), {}
    for name, tensor in load_folder(source / folder).items():
        older = name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)
        tensors[older] = tensor.clone()
    said = {**config["text_config"], "vision_config": config["vision_config"]}
    save_file(tensors, path, {"format": "pt", "config": json.dumps(said)})
    return path
