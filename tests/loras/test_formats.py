"""Weights with a LoRA merged in on 8 simulated chips, against the same computed plainly: every format and family.

Names are those of published files: who trained with what is said at each.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from comfyui_tpu.tests.support.closeness import OPERATION, difference
from comfyui_tpu.tests.support.messages import raises_message
from comfyui_tpu.tpu_runtime.checkpoints import checkpoint, score_bound, tiny, weight_loader
from comfyui_tpu.tpu_runtime.checkpoints.model_ref import Lora
from comfyui_tpu.tpu_runtime.formats.key_map import KeyMap
from comfyui_tpu.tpu_runtime.loras import adapter, apply
from comfyui_tpu.tpu_runtime.models import SPECS, lookup_spec, spec_for_family
from comfyui_tpu.tpu_runtime.precision import Precision
from comfyui_tpu.tpu_runtime.programs import upstream_network, weights
from comfyui_tpu.tpu_runtime.programs.program import CompileTarget
from comfyui_tpu.tpu_runtime.programs.upstream_network import Network, WeightSlice
from comfyui_tpu.tpu_runtime.progress import SilentProgress
from diffusers.loaders import single_file_utils
from safetensors.torch import load_file, save_file

STRENGTH = -0.6


@functools.cache
def network(family: str) -> Network:
    return network_of(spec_for_family(family).name)


def network_of(name: str) -> Network:
    component = lookup_spec(name).component("transformer")
    return upstream_network.build_network(component, component.tiny)


@functools.cache
def base(family: str) -> dict[str, torch.Tensor]:
    folder = tiny.ensure_random(spec_for_family(family)) / "transformer"
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


Merged = list[tuple[str, WeightSlice | None, np.ndarray]]


def merged(family: str, path: Path, precision: Precision = "float32") -> Merged:
    """The changed weights by their name in a checkpoint, and what of the checkpoint's tensor they are."""
    spec, own = spec_for_family(family), network(family)
    target = CompileTarget(devices=tuple(jax.devices()[:8]), precision=precision)
    mesh = target.mesh(spec.parallelism.mesh(8, 2).fit_heads(own.component.tiny[spec.parallelism.heads_key]))
    folder = tiny.ensure_random(spec) / "transformer"
    files = checkpoint.match_weights(own, checkpoint.read_headers(folder, own.component), folder)
    changes = apply.make_merge((Lora(path=str(path), strength=STRENGTH),), own)
    wanted = {
        name: want for name, want in weights.abstract_weights(own, mesh, precision).items() if name in changes.names
    }
    loaded = weight_loader.load_weights(own, files, wanted, "test", SilentProgress(), changes)
    assert all(loaded[name].sharding == want.sharding for name, want in wanted.items())
    found = []
    for name, array in loaded.items():
        weight = own.weights[name]
        for layer, source in enumerate(weight.sources):
            found.append((source, weight.cut, np.asarray(array)[layer] if weight.stacked else np.asarray(array)))
    return found


class File:
    """A file in the making: tensors by name, and what it adds to weights, of matrices that may lie over several."""

    def __init__(self, family: str) -> None:
        self.base, self.tensors, self.added = base(family), {}, {}
        self.metadata: dict[str, str] = {}
        self.random = torch.Generator().manual_seed(1)

    def draw(self, name: str, *shape: int) -> torch.Tensor:
        self.tensors[name] = torch.randn(shape, generator=self.random) / math.sqrt(shape[-1])
        return self.tensors[name]

    def size(self, targets: tuple[str, ...]) -> tuple[int, int]:
        out = sum(self.base[name].shape[0] for name in targets)
        return out, sum(self.base[name].numel() for name in targets) // out

    def add(self, targets: tuple[str, ...], delta: torch.Tensor) -> None:
        for name, part in zip(targets, delta.split([self.base[name].shape[0] for name in targets]), strict=True):
            self.added[name] = part.reshape(self.base[name].shape)

    def lora(
        self, module: str, *targets: str, down: str = "lora_A.weight", up: str = "lora_B.weight", rank: int = 3,
        alpha: float | None = None, turn: Callable = lambda delta: delta,
    ) -> torch.Tensor:  # fmt: skip
        out, inner = self.size(targets)
        delta = self.draw(f"{module}.{up}", out, rank) @ self.draw(f"{module}.{down}", rank, inner)
        if alpha is not None:
            self.tensors[f"{module}.alpha"] = torch.tensor(alpha)
            delta *= alpha / rank
        self.add(targets, turn(delta))
        return delta

    def diff(self, name: str, target: str) -> None:
        self.added[target] = self.draw(name, *self.base[target].shape)

    def loha(self, module: str, *targets: str, alpha: float) -> None:
        out, inner = self.size(targets)
        one, two = (
            self.draw(f"{module}.hada_{w}_a", out, 2) @ self.draw(f"{module}.hada_{w}_b", 2, inner)
            for w in ("w1", "w2")
        )
        self.tensors[f"{module}.alpha"] = torch.tensor(alpha)
        self.add(targets, one * two * (alpha / 2))

    def lokr(self, module: str, *targets: str, whole: tuple[bool, bool], factor: int = 4, alpha: float = 3.0) -> None:
        out, inner = self.size(targets)
        sizes = (factor, factor), (out // factor, inner // factor)
        product = []
        for name, is_whole, (rows, columns) in zip(("lokr_w1", "lokr_w2"), whole, sizes, strict=True):
            if is_whole:
                product.append(self.draw(f"{module}.{name}", rows, columns))
            else:
                product.append(self.draw(f"{module}.{name}_a", rows, 2) @ self.draw(f"{module}.{name}_b", 2, columns))
        self.tensors[f"{module}.alpha"] = torch.tensor(alpha)
        self.add(targets, torch.kron(*product) * (1.0 if all(whole) else alpha / 2))

    def dora(self, module: str, target: str, dim: int, name: str = "dora_scale", **names: str) -> None:
        """`dim` is what the norm is over."""
        new = self.base[target] + self.lora(module, target, alpha=2.0, **names)
        norm = new.norm(dim=dim, keepdim=True)
        magnitude = self.draw(f"{module}.{name}", *norm.shape).abs_().add_(0.5)
        if name != "dora_scale":  # PEFT's has one dimension
            self.tensors[f"{module}.{name}"] = magnitude.flatten().clone()
        self.added[target] = new * magnitude / norm - self.base[target]


def wan_diffusers(file: File) -> None:
    """As diffusers' own training scripts save it; ranks differ."""
    file.lora("transformer.blocks.0.attn1.to_q", "blocks.0.attn1.to_q.weight", rank=5)
    file.lora("transformer.blocks.2.attn1.to_q", "blocks.2.attn1.to_q.weight", rank=17)
    file.lora("transformer.blocks.1.ffn.net.0.proj", "blocks.1.ffn.net.0.proj.weight")
    file.added["blocks.1.ffn.net.0.proj.bias"] = file.draw("transformer.blocks.1.ffn.net.0.proj.lora_B.bias", 200)


def wan_peft(file: File) -> None:
    file.lora("base_model.model.blocks.1.ffn.net.2", "blocks.1.ffn.net.2.weight")
    file.dora("base_model.model.blocks.0.attn2.to_k", "blocks.0.attn2.to_k.weight", 1, "lora_magnitude_vector")
    # As diffusers writes it: of a file without alphas.
    # Of the names that fit the end of a module's, from a dot on, the first counts.
    pattern = {"o_v": 999, r"^blocks\.0\.attn2\.to_v$": 12, "to_v": 7}
    config = {"transformer.lora_alpha": 6, "transformer.r": 3, "transformer.alpha_pattern": pattern}
    file.metadata["lora_adapter_metadata"] = json.dumps(config)
    file.lora("base_model.model.blocks.0.attn2.to_v", "blocks.0.attn2.to_v.weight")
    file.added["blocks.1.ffn.net.2.weight"] *= 2
    file.added["blocks.0.attn2.to_v.weight"] *= 4


def wan_lightx2v(file: File) -> None:
    """lightx2v/Wan2.1-Distill-Loras, Kijai/WanVideo_comfy: the makers' names with differences of all that is small."""
    names = {"down": "lora_down.weight", "up": "lora_up.weight"}
    file.lora("diffusion_model.blocks.0.self_attn.q", "blocks.0.attn1.to_q.weight", **names)
    file.lora("diffusion_model.blocks.1.cross_attn.o", "blocks.1.attn2.to_out.0.weight", **names)
    file.lora("diffusion_model.text_embedding.0", "condition_embedder.text_embedder.linear_1.weight", **names)
    file.lora("diffusion_model.time_projection.1", "condition_embedder.time_proj.weight", **names, alpha=1.5)
    file.diff("diffusion_model.time_projection.1.diff_b", "condition_embedder.time_proj.bias")
    file.diff("diffusion_model.time_embedding.2.diff_b", "condition_embedder.time_embedder.linear_2.bias")
    file.diff("diffusion_model.blocks.0.self_attn.q.diff_b", "blocks.0.attn1.to_q.bias")
    file.diff("diffusion_model.blocks.1.self_attn.norm_k.diff", "blocks.1.attn1.norm_k.weight")
    file.diff("diffusion_model.blocks.2.norm3.diff", "blocks.2.norm2.weight")
    file.diff("diffusion_model.blocks.2.norm3.diff_b", "blocks.2.norm2.bias")
    file.diff("diffusion_model.blocks.2.diff_m", "blocks.2.scale_shift_table")
    file.diff("diffusion_model.head.modulation.diff", "scale_shift_table")
    file.diff("diffusion_model.head.head.diff", "proj_out.weight")
    file.diff("diffusion_model.patch_embedding.diff", "patch_embedding.weight")


def wan_bare(file: File) -> None:
    """DiffSynth-Studio."""
    names = {"down": "lora_A.default.weight", "up": "lora_B.default.weight"}
    file.lora("blocks.0.cross_attn.v", "blocks.0.attn2.to_v.weight", **names)
    file.lora("blocks.2.ffn.2", "blocks.2.ffn.net.2.weight", **names)


def wan_musubi(file: File) -> None:
    names = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": 1.0}
    file.lora("lora_unet_blocks_0_self_attn_o", "blocks.0.attn1.to_out.0.weight", **names)
    file.lora("lora_unet_blocks_2_cross_attn_k", "blocks.2.attn2.to_k.weight", **names)
    file.lora("lora_unet_blocks_2_ffn_0", "blocks.2.ffn.net.0.proj.weight", **names)
    file.dora("lora_unet_blocks_1_ffn_2", "blocks.1.ffn.net.2.weight", 1)
    file.dora("lora_unet_blocks_0_ffn_2", "blocks.0.ffn.net.2.weight", 0)


def wan_fun(file: File) -> None:
    """alibaba-pai/Wan2.1-Fun-Reward-LoRAs: VideoX-Fun has one underscore more."""
    names = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": 2.0}
    file.lora("lora_unet__blocks_0_cross_attn_k", "blocks.0.attn2.to_k.weight", **names)
    file.lora("lora_unet__text_embedding_2", "condition_embedder.text_embedder.linear_2.weight", **names)
    file.lora("lora_unet__head_head", "proj_out.weight", **names)


def wan_lycoris(file: File) -> None:
    file.loha("lora_unet_blocks_0_self_attn_v", "blocks.0.attn1.to_v.weight", alpha=1.0)
    file.loha("lycoris_blocks_1_ffn_net_0_proj", "blocks.1.ffn.net.0.proj.weight", alpha=3.0)
    for layer, whole in enumerate(((True, True), (True, False), (False, True))):
        file.lokr(f"diffusion_model.blocks.{layer}.self_attn.k", f"blocks.{layer}.attn1.to_k.weight", whole=whole)
    file.lokr("lora_unet_blocks_0_ffn_2", "blocks.0.ffn.net.2.weight", whole=(False, False))
    file.diff("lora_unet_blocks_0_norm3.w_norm", "blocks.0.norm2.weight")
    file.diff("lora_unet_blocks_0_norm3.b_norm", "blocks.0.norm2.bias")


def qkv(block: str, *names: str) -> list[str]:
    return [f"{block}.attn.{name}.weight" for name in names]


def wan_ai_toolkit(file: File) -> None:
    """ostris' AI Toolkit, `toolkit/models/DoRA.py`: `magnitude` is the norm of each row, as PEFT's vector."""
    names = {"down": "lora_down.weight", "up": "lora_up.weight"}
    file.dora("diffusion_model.blocks.0.self_attn.q", "blocks.0.attn1.to_q.weight", 1, "magnitude", **names)
    file.dora("diffusion_model.blocks.1.cross_attn.k", "blocks.1.attn2.to_k.weight", 1, "magnitude", **names)
    two = "diffusion_model.blocks.1.cross_attn.k.magnitude"
    file.tensors[two] = file.tensors[two][:, None].clone()


def wan_prefixes(file: File) -> None:
    """DiffSynth-Studio's pipelines, OneTrainer's and kohya's with dots, adapters that were given a name."""
    named = {"down": "lora_A.high_noise.weight", "up": "lora_B.high_noise.weight"}
    short = {"down": "lora_down", "up": "lora_up"}
    file.lora("pipe.dit.blocks.0.cross_attn.v", "blocks.0.attn2.to_v.weight", **named)
    file.lora("dit.blocks.1.ffn.2", "blocks.1.ffn.net.2.weight", **short)
    file.lora("unet.blocks.2.attn1.to_q", "blocks.2.attn1.to_q.weight", **named)
    file.lora("lora_unet.blocks.0.self_attn.k", "blocks.0.attn1.to_k.weight", **short, alpha=2.0)
    file.dora(
        "blocks.2.self_attn.o", "blocks.2.attn1.to_out.0.weight", 1, "lora_magnitude_vector.high_noise.weight", **named
    )


IMAGE_QKV, TEXT_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def flux2_makers(file: File) -> None:
    """ostris' AI Toolkit, and what fal/FLUX.2-dev-Turbo has for ComfyUI."""
    file.lora("diffusion_model.double_blocks.0.img_attn.qkv", *qkv("transformer_blocks.0", *IMAGE_QKV))
    file.lora("diffusion_model.double_blocks.1.txt_attn.qkv", *qkv("transformer_blocks.1", *TEXT_QKV), rank=20)
    file.lora("diffusion_model.double_blocks.1.img_attn.proj", "transformer_blocks.1.attn.to_out.0.weight")
    file.lora("diffusion_model.double_blocks.0.img_mlp.0", "transformer_blocks.0.ff.linear_in.weight")
    file.lora("diffusion_model.single_blocks.2.linear1", "single_transformer_blocks.2.attn.to_qkv_mlp_proj.weight")
    file.lora("diffusion_model.single_blocks.0.linear2", "single_transformer_blocks.0.attn.to_out.weight")
    file.lora("diffusion_model.single_stream_modulation.lin", "single_stream_modulation.linear.weight")
    file.lora(
        "diffusion_model.final_layer.adaLN_modulation.1", "norm_out.linear.weight",
        turn=lambda delta: torch.cat(delta.chunk(2)[::-1]),
    )  # fmt: skip
    file.diff(
        "diffusion_model.single_blocks.1.norm.key_norm.scale.diff", "single_transformer_blocks.1.attn.norm_k.weight"
    )


def flux2_turbo(file: File) -> None:
    """fal/FLUX.2-dev-Turbo: diffusers' names, the guidance embedding's too; some of fal's have those of two kinds."""
    file.lora(
        "transformer.time_guidance_embed.guidance_embedder.linear_1",
        "time_guidance_embed.guidance_embedder.linear_1.weight",
    )
    file.lora("transformer.transformer_blocks.0.attn.add_k_proj", "transformer_blocks.0.attn.add_k_proj.weight")
    file.lora("transformer.transformer_blocks.1.attn.to_out.0", "transformer_blocks.1.attn.to_out.0.weight")
    file.lora(
        "transformer.single_transformer_blocks.2.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.2.attn.to_qkv_mlp_proj.weight",
    )
    file.lora("diffusion_model.guidance_in.out_layer", "time_guidance_embed.guidance_embedder.linear_2.weight")


def flux2_comfyui(file: File) -> None:
    """Differences that ComfyUI extracts, where norms have a `weight`; and x-flux' part of `linear1` as it names it."""
    norms = {
        "double_blocks.0.img_attn.norm.query_norm": "transformer_blocks.0.attn.norm_q",
        "double_blocks.1.txt_attn.norm.key_norm": "transformer_blocks.1.attn.norm_added_k",
        "single_blocks.2.norm.query_norm": "single_transformer_blocks.2.attn.norm_q",
    }
    for theirs, own in norms.items():
        file.diff(f"diffusion_model.{theirs}.diff", f"{own}.weight")
    file.diff("single_blocks.0.norm.key_norm.weight.diff", "single_transformer_blocks.0.attn.norm_k.weight")
    target = "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight"
    rows, columns = file.base[target].shape
    module = "diffusion_model.single_blocks.1.linear1_qkv"
    delta = file.draw(f"{module}.lora_up.weight", 3 * columns, 4) @ file.draw(f"{module}.lora_down.weight", 4, columns)
    file.added[target] = torch.cat([delta, torch.zeros(rows - 3 * columns, columns)])


def flux2_kohya(file: File) -> None:
    """musubi-tuner."""
    names = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": 1.0}
    file.lora("lora_unet_double_blocks_0_txt_attn_qkv", *qkv("transformer_blocks.0", *TEXT_QKV), **names)
    file.lora("lora_unet_double_blocks_1_txt_mlp_2", "transformer_blocks.1.ff_context.linear_out.weight", **names)
    file.lora("lora_unet_single_blocks_1_linear1", "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight", **names)
    file.dora("lora_unet_single_blocks_2_linear2", "single_transformer_blocks.2.attn.to_out.weight", 1)


def flux2_lycoris(file: File) -> None:
    whole = (True, False)
    file.lokr("diffusion_model.double_blocks.0.img_attn.qkv", *qkv("transformer_blocks.0", *IMAGE_QKV), whole=whole)
    file.lokr("lycoris_transformer_blocks_1_attn_to_q", "transformer_blocks.1.attn.to_q.weight", whole=whole)
    file.lokr(
        "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight", whole=whole,
    )  # fmt: skip


def hunyuan_makers(file: File) -> None:
    """Tencent's names as musubi-tuner has them, and ComfyUI's fused ones."""
    names = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": 2.0}
    file.lora("lora_unet_double_blocks_0_img_attn_q", "transformer_blocks.0.attn.to_q.weight", **names)
    file.lora("lora_unet_double_blocks_2_txt_mlp_fc1", "transformer_blocks.2.ff_context.net.0.proj.weight", **names)
    file.lora("diffusion_model.double_blocks.1.txt_attn.qkv", *qkv("transformer_blocks.1", *TEXT_QKV))
    refiner = "context_embedder.token_refiner.refiner_blocks.1"
    file.lora("diffusion_model.txt_in.individual_token_refiner.blocks.1.self_attn.qkv", *qkv(refiner, *IMAGE_QKV))
    file.diff("diffusion_model.double_blocks.0.img_mod.lin.diff_b", "transformer_blocks.0.norm1.linear.bias")


def z_image_makers(file: File) -> None:
    """Tongyi-MAI's names as ComfyUI's, and those of diffusers with its prefix, as ai-toolkit and others write them."""
    file.lora("diffusion_model.layers.0.attention.qkv", *z_image_qkv("layers.0"))
    file.lora("diffusion_model.layers.1.attention.out", "layers.1.attention.to_out.0.weight")
    file.lora("diffusion_model.noise_refiner.0.attention.to_k", "noise_refiner.0.attention.to_k.weight")
    file.lora("diffusion_model.context_refiner.0.feed_forward.w2", "context_refiner.0.feed_forward.w2.weight")
    file.lora("diffusion_model.final_layer.linear", "all_final_layer.2-1.linear.weight")
    file.diff("diffusion_model.x_embedder.diff", "all_x_embedder.2-1.weight")
    file.diff("diffusion_model.layers.2.attention.q_norm.diff", "layers.2.attention.norm_q.weight")


def z_image_diffusers(file: File) -> None:
    names = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": 2.0}
    file.lora("transformer.layers.0.attention.to_q", "layers.0.attention.to_q.weight")
    file.lora("transformer.layers.0.adaLN_modulation.0", "layers.0.adaLN_modulation.0.weight")
    file.lora("lora_unet_layers_1_attention_to_out_0", "layers.1.attention.to_out.0.weight", **names)
    file.lora("lora_unet_layers_2_feed_forward_w1", "layers.2.feed_forward.w1.weight", **names)
    file.lora("lora_unet_context_refiner_0_attention_qkv", *z_image_qkv("context_refiner.0"), **names)


def z_image_qkv(block: str) -> list[str]:
    return [f"{block}.attention.to_{name}.weight" for name in "qkv"]


def qwen_image(file: File) -> None:
    """Lightning's, diffusers' scripts', ai-toolkit's and musubi-tuner's: the makers' names are those of diffusers."""
    names = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": 2.0}
    file.lora("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q.weight", **names)
    file.lora("transformer_blocks.0.img_mod.1", "transformer_blocks.0.img_mod.1.weight", **names)
    file.lora(
        "transformer_blocks.1.attn.to_out.0",
        "transformer_blocks.1.attn.to_out.0.weight",
        down="lora_A.default.weight",
        up="lora_B.default.weight",
    )
    file.lora("transformer.transformer_blocks.1.attn.to_add_out", "transformer_blocks.1.attn.to_add_out.weight")
    file.lora("diffusion_model.transformer_blocks.2.txt_mlp.net.2", "transformer_blocks.2.txt_mlp.net.2.weight")
    file.lora(
        "lora_unet_transformer_blocks_2_img_mlp_net_0_proj", "transformer_blocks.2.img_mlp.net.0.proj.weight", **names
    )
    file.diff("diffusion_model.txt_norm.diff", "txt_norm.weight")


def cogvideox(file: File) -> None:
    """Diffusers' scripts, VideoX-Fun, and ComfyUI's names."""
    names = {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": 2.0}
    file.lora("transformer.transformer_blocks.0.attn1.to_out.0", "transformer_blocks.0.attn1.to_out.0.weight")
    file.lora("lora_unet__transformer_blocks_1_attn1_to_k", "transformer_blocks.1.attn1.to_k.weight", **names)
    file.lora("diffusion_model.blocks.2.ff_proj", "transformer_blocks.2.ff.net.0.proj.weight", **names)


CASES = {
    "Wan21": (
        wan_diffusers,
        wan_peft,
        wan_lightx2v,
        wan_bare,
        wan_musubi,
        wan_fun,
        wan_lycoris,
        wan_ai_toolkit,
        wan_prefixes,
    ),
    "Flux2": (flux2_makers, flux2_turbo, flux2_comfyui, flux2_kohya, flux2_lycoris),
    "ZImage": (z_image_makers, z_image_diffusers),
    "QwenImage": (qwen_image,),
    "HunyuanVideo15": (hunyuan_makers,),
    "CogVideoX": (cogvideox,),
}


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(family, case, id=case.__name__) for family, cases in CASES.items() for case in cases],
)
def test_merge_every_format_matches_reference(family: str, case: Callable[[File], None], tmp_path: Path):
    file = File(family)
    case(file)
    save_file(file.tensors, tmp_path / "lora.safetensors", file.metadata)
    found = merged(family, tmp_path / "lora.safetensors")
    assert adapter.read_adapter(str(tmp_path / "lora.safetensors"), network(family)).unused == ()
    for name, cut, value in found:
        whole = file.base[name] + STRENGTH * file.added.get(name, torch.zeros(()))
        expected = (cut.take(whole) if cut else whole.reshape(value.shape)).numpy()
        if name in file.added:
            assert difference(value, expected) <= OPERATION, name
            assert difference(whole, file.base[name]) > 1e-3
        else:  # another layer of a changed stack
            assert (value == expected).all(), name
    assert file.added.keys() <= {name for name, _, _ in found}


def test_merge_bfloat16_sum_is_rounded_once(tmp_path: Path):
    """But for sums that lie between two bfloat16 numbers as closely as float32 can tell."""
    file = File("Wan21")
    file.lora("blocks.0.attn1.to_q", "blocks.0.attn1.to_q.weight")
    save_file(file.tensors, tmp_path / "lora.safetensors")
    name = "blocks.0.attn1.to_q.weight"
    (found,) = (x for other, _, x in merged("Wan21", tmp_path / "lora.safetensors", "bfloat16") if other == name)
    expected = (file.base[name] + STRENGTH * file.added[name]).bfloat16()
    assert found.dtype == jax.numpy.bfloat16
    assert np.mean(found.astype(np.float32) == expected.float().numpy()) > 0.999


def test_merge_nan_raises_value_error(tmp_path: Path):
    file = File("Wan21")
    file.lora("blocks.0.attn1.to_q", "blocks.0.attn1.to_q.weight")
    file.tensors["blocks.0.attn1.to_q.lora_B.weight"][1, 1] = torch.nan
    save_file(file.tensors, tmp_path / "lora.safetensors")
    with raises_message(ValueError, "lora.not_finite", name="blocks.0.attn1.to_q.lora_B.weight"):
        merged("Wan21", tmp_path / "lora.safetensors")


def test_score_bound_includes_norm_changed_by_lora(tmp_path: Path):
    spec, file = spec_for_family("Flux2"), File("Flux2")
    file.diff("single_blocks.1.norm.key_norm.scale.diff", "single_transformer_blocks.1.attn.norm_k.weight")
    save_file(file.tensors, tmp_path / "lora.safetensors")
    for strength, is_bounded in ((0.01, True), (1e4, False)):
        loras = (Lora(path=str(tmp_path / "lora.safetensors"), strength=strength),)
        added = apply.sum_vector_deltas(loras, network("Flux2"), SilentProgress())
        component, folder = spec.component("transformer"), tiny.ensure_random(spec) / "transformer"
        assert score_bound.is_bounded(spec, component, folder, added) == is_bounded


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_original_keys_of_every_model_name_a_module(spec: Any):
    component = spec.component("transformer")
    own = upstream_network.build_network(component, component.tiny)
    names = KeyMap((source for weight in own.weights.values() for source in weight.sources), component.original_keys)
    for theirs in component.original_keys:
        assert names.find(theirs.replace("*", "1")), theirs
        assert names.find("lora_unet_" + theirs.replace("*", "1").replace(".", "_")), theirs
        assert not names.find(theirs.replace("*", "99")) or "*" not in theirs


@pytest.mark.parametrize(
    ("model", "convert"),
    [
        ("wan2.1-t2v-14b", single_file_utils.convert_wan_transformer_to_diffusers),
        ("wan2.1-i2v-14b-480p", single_file_utils.convert_wan_transformer_to_diffusers),
        ("flux2-dev", single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers),
    ],
)
def test_original_keys_match_diffusers_conversion(model: str, convert: Callable):
    own = network_of(model)
    sources = [source for weight in own.weights.values() for source in weight.sources]
    names = KeyMap(sources, own.component.original_keys)
    # Rows show where they went; entries for diffusers' own fused modules are no checkpoint's, nor are ComfyUI's names.
    others = ("transformer_", "query_norm", "key_norm", "query_norm.weight", "key_norm.weight", "linear1_qkv")
    makers = [
        name.replace("*", "1")
        for name in own.component.original_keys
        if not name.startswith(others[0]) and not name.endswith(others[1:])
    ]
    bare = (".scale", "modulation")
    tensors = {
        name if name.endswith(bare) else f"{name}.weight": torch.arange(6.0)[:, None] + 10 * number
        for number, name in enumerate(makers)
    }
    theirs = convert(dict(tensors))
    ours = {}
    for name, tensor in tensors.items():
        for rows in names.find(name.removesuffix(".weight")):
            target = rows.name if rows.name in names.weights else f"{rows.name}.weight"
            ours[target] = torch.cat([tensor.chunk(rows.of)[group] for group in rows.groups])
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
