"""Tiny files under the names that templates load, of sizes that ComfyUI's own torch code takes."""

import json
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from comfyui_tpu.tests.comfyui.test_core_networks import (
    _QWEN25,
    DENOISERS_BY_NAME,
    TEXTS,
    VAES,
    WAN22_VAE,
    write_denoiser,
)
from comfyui_tpu.tests.files import single_files, test_comfyui_encoders
from comfyui_tpu.tests.files.comfyui_oracle import saved
from comfyui_tpu.tests.files.test_comfyui_encoders import UMT5
from comfyui_tpu.tpu_runtime.checkpoints import tiny
from comfyui_tpu.tpu_runtime.model_spec import Component
from comfyui_tpu.tpu_runtime.models import lookup_spec
from safetensors import safe_open
from safetensors.torch import load_file, save_file

# For each loader, ComfyUI's folder of its files, and how many of its first widgets name one.
FOLDERS: Mapping[str, tuple[str, int]] = {
    "UNETLoader": ("diffusion_models", 1),
    "CLIPLoader": ("text_encoders", 1),
    "DualCLIPLoader": ("text_encoders", 2),
    "VAELoader": ("vae", 1),
    "CLIPVisionLoader": ("clip_vision", 1),
    "LoraLoaderModelOnly": ("loras", 1),
    "UpscaleModelLoader": ("upscale_models", 1),
    "LoadImage": ("input", 1),
    "ControlNetLoader": ("controlnet", 1),
    "ModelPatchLoader": ("model_patches", 1),
}
# By folder, the tiny file for a name: the first whose pattern is in it.
KINDS: Mapping[str, Mapping[str, str]] = {
    "diffusion_models": {
        "z_image": "z-image",
        "qwen_image_edit_2511": "qwen-image edit",
        "qwen_image": "qwen-image",
        "ti2v": "wan 2.2 ti2v",
        "wan2.1_i2v": "wan 2.1 i2v",
        "wan2.1_flf2v": "wan 2.1 flf2v",
        "wan2.2_i2v": "wan 2.2 i2v",
        "wan2.*t2v": "wan t2v",
        "hunyuanvideo1.5_720p": "hunyuanvideo 1.5 t2v",
        "klein": "flux.2 klein",
        "flux2_dev": "flux.2 dev",
    },
    "text_encoders": {"umt5": "umt5", "mistral": "mistral", "qwen_2.5_vl": "qwen25", "byt5": "byt5", "qwen_3": "qwen3"},
    "vae": {
        "qwen_image_vae|wan_2.1_vae|wan_alpha|marigold": "wan",
        "wan2.2_vae": "wan 2.2 ti2v",
        "flux2-vae|small_decoder": "flux.2",
        "^ae": "z-image",
        "hunyuanvideo15_vae": "hunyuanvideo 1.5",
    },
    "clip_vision": {"sigclip": "hunyuanvideo1.5-i2v-720p", "clip_vision_h": "wan2.1-i2v-14b-480p"},
    "loras": {"qwen|marigold": "qwen", "z_image": "z-image", "flux": "flux2", "wan|lightx2v": "wan"},
    "upscale_models": {"esrgan": "esrgan"},
    "input": {".": "image"},
}
# Widths that the tiny text encoders have.
_WIDTHS: Mapping[str, Mapping[str, Any]] = {
    "flux.2": {"joint_attention_dim": 3 * 64},
    "z-image": {"cap_feat_dim": 64},
    "qwen-image": {"joint_attention_dim": 128},
    "hunyuanvideo": {"text_embed_dim": 128},
}
# For each family of LoRAs, the layers of some blocks in names of trainers, with their inputs and outputs.
_LAYERS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "wan": {
        "diffusion_model.blocks.0.self_attn.q": (128, 128),
        "diffusion_model.blocks.1.cross_attn.k": (128, 128),
        "diffusion_model.blocks.1.ffn.0": (128, 256),
    },
    "qwen": {
        "diffusion_model.transformer_blocks.0.attn.to_q": (256, 256),
        "transformer_blocks.1.img_mlp.net.0.proj": (256, 1024),
        "transformer_blocks.1.attn.to_out.0": (256, 256),
    },
    "flux2": {
        "diffusion_model.double_blocks.0.img_attn.qkv": (256, 768),
        "diffusion_model.double_blocks.1.txt_attn.proj": (256, 256),
    },
    "z-image": {
        "diffusion_model.layers.0.attention.to_q": (1152, 1152),
        "diffusion_model.layers.1.feed_forward.w2": (3072, 1152),
    },
}
_BYT5 = {"d_model": 1472, "vocab_size": 1510}
# Sizes of the tower that sees images in prompts; all but some of core's layers see windows.
_SEEING = {"depth": 8, "fullatt_block_indexes": (7,), "window_size": 112}
_VISION = {"intermediate_size": 64, "num_attention_heads": 16, "num_hidden_layers": 3}
_VISION_CONFIGS = {"wan": "clip_vision_config_h.json", "hun": "clip_vision_siglip_384.json"}


@dataclass(frozen=True, kw_only=True)
class File:
    """A file that a template names."""

    folder: str
    name: str
    type: str = ""  # the widget `type` of loaders of text encoders

    @property
    def kind(self) -> str:
        """Return which tiny file stands for it; "" without one."""
        kinds = KINDS.get(self.folder, {})
        found = (kind for pattern, kind in kinds.items() if re.search(pattern, self.name.lower()))
        return next(found, "")


def list_files(document: Mapping[str, Any]) -> Iterator[File]:
    """Yield the files that the loaders in a template name, also of muted nodes."""
    for graph in (document, *(document.get("definitions") or {}).get("subgraphs", [])):
        for node in graph["nodes"]:
            values = node.get("widgets_values")
            if node["type"] in FOLDERS and isinstance(values, list) and values:
                folder, number = FOLDERS[node["type"]]
                kind = values[number] if folder == "text_encoders" else ""
                yield from (File(folder=folder, name=name, type=kind) for name in values[:number])


class TinyFiles:
    """Writes tiny files into the folders of a ComfyUI, each network once."""

    def __init__(self, base: Path, made: Path) -> None:
        self.base, self.made = base, made
        self._written: dict[tuple[str, str], Path] = {}

    def write(self, file: File) -> bool:
        """Write a file under its name; return False if no tiny file stands for it."""
        if not file.kind:
            return False
        target = self.base / ("input" if file.folder == "input" else f"models/{file.folder}") / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            return True
        if file.folder == "input":
            _image(file.name, target)
        elif file.folder == "loras":
            save_file(_lora(file.kind, file.name), target)
        else:
            key = (file.folder, file.kind)
            if key not in self._written:
                self._written[key] = _WRITERS[file.folder](self.made, file.kind)
            self._copy(self._written[key], target)
        return True

    def _copy(self, source: Path, target: Path) -> None:
        if "low_noise" not in target.name:
            shutil.copy(source, target)
            return
        # The second of two experts differs from the first.
        with safe_open(source, "pt") as opened:
            metadata = opened.metadata()
        save_file({name: x * 0.9 if x.ndim == 2 else x for name, x in load_file(source).items()}, target, metadata)


def _denoiser(made: Path, kind: str) -> Path:
    one = DENOISERS_BY_NAME[kind]
    widths = next((widths for family, widths in _WIDTHS.items() if kind.startswith(family)), {})
    return write_denoiser(made, replace(one, config={**one.config, **widths}), re.sub(r"\W", "_", kind))


def _text_encoder(made: Path, kind: str) -> Path:
    if kind == "qwen25":
        return _seeing_encoder(made)
    encoder, carried = {
        "umt5": (replace(UMT5, sizes=_UMT5), "spiece_model"),
        "mistral": TEXTS["flux.2 dev"][3][0],
        "qwen3": TEXTS["z-image"][3][0],  # has the layers of FLUX.2 klein's too
        "byt5": (_byt5(), ""),
    }[kind]
    change = test_comfyui_encoders.carrying(carried) if carried else single_files.same
    return encoder.write(made, kind, change)


_UMT5 = {**UMT5.sizes, "num_layers": 2, "d_ff": 64, "d_model": 4096, "num_heads": 1}


def _byt5() -> test_comfyui_encoders.Encoder:
    _, (encoder, _) = TEXTS["hunyuanvideo 1.5"][3]
    return replace(encoder, sizes={**encoder.sizes, **_BYT5})


def _seeing() -> dict[str, Any]:
    return {**lookup_spec("qwen-image-edit-2511").component("image_encoder").tiny, **_SEEING}


def _seeing_encoder(made: Path) -> Path:
    spec = lookup_spec("qwen-image-edit-2511")
    whole = tiny.list_networks(spec)["text_encoder"]
    text = {**spec.component("text_encoder").tiny, **_QWEN25}
    seeing = {**_seeing(), "out_hidden_size": _QWEN25["hidden_size"]}
    folder = made / "qwen25"
    tiny.write_weights(replace(whole, tiny={"text_config": text, "vision_config": seeing}), folder / "text_encoder", 0)
    return single_files.write_folder(made / "qwen25.safetensors", folder, spec, "text_encoder")


def _vae(made: Path, kind: str) -> Path:
    name, config, *_ = VAES[kind]
    stem = re.sub(r"\W", "_", kind)
    return single_files.write(made / f"{stem}_vae.safetensors", saved(name, made / f"{stem} vae", **config), name)


def _vision_component(model: str) -> Component:
    return lookup_spec(model).component("image_encoder")


def _vision(made: Path, model: str) -> Path:
    component = _vision_component(model)
    sizes = {**component.tiny, **_VISION, "hidden_size": component.config["hidden_size"]}
    tiny.write_weights(replace(component, tiny=sizes), made / model, 0)
    return single_files.write(made / f"{model}.safetensors", made / model, component.class_name)


def _upscaler(made: Path, kind: str) -> Path:
    """Write an ESRGAN of one block, in the names of its authors."""
    generator, found = torch.Generator().manual_seed(3), {}
    sizes = {"conv_first": (3, 8), "conv_body": (8, 8), "conv_up1": (8, 8), "conv_up2": (8, 8), "conv_hr": (8, 8)}
    sizes |= {"conv_last": (8, 3)}
    for block in range(3):
        for number in range(1, 6):
            out = 8 if number == 5 else 4
            sizes[f"body.0.rdb{block + 1}.conv{number}"] = (8 + 4 * (number - 1), out)
    for name, (inputs, outputs) in sizes.items():
        found[f"{name}.weight"] = 0.2 * torch.randn(outputs, inputs, 3, 3, generator=generator)
        found[f"{name}.bias"] = 0.1 * torch.randn(outputs, generator=generator)
    save_file(found, made / f"{kind}.safetensors")
    return made / f"{kind}.safetensors"


_WRITERS = {
    "diffusion_models": _denoiser, "text_encoders": _text_encoder, "vae": _vae, "clip_vision": _vision,
    "upscale_models": _upscaler,
}  # fmt: skip


def _lora(kind: str, name: str) -> dict[str, torch.Tensor]:
    """Return a LoRA that is another for each name."""
    generator, found = torch.Generator().manual_seed(zlib.crc32(name.encode())), {}
    for layer, (inputs, outputs) in _LAYERS[kind].items():
        found[f"{layer}.lora_A.weight"] = 0.1 * torch.randn(4, inputs, generator=generator)
        found[f"{layer}.lora_B.weight"] = 0.1 * torch.randn(outputs, 4, generator=generator)
    return found


def _image(name: str, target: Path) -> None:
    """Draw an image of an odd size, with transparency and another content for each name."""
    from PIL import Image

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    coarse = (255 * torch.rand(5, 7, 3, generator=generator)).byte().numpy()
    image = Image.fromarray(coarse).resize((90, 70), Image.Resampling.BICUBIC)
    if target.suffix.lower() == ".png":
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    image.save(target)


# --- sizes for ComfyUI's own loaders ----------------------------------------------------------------------------------


def describe_sizes(files: set[File]) -> str:
    """Return what `small_core.py` reads: the sizes of the encoders by file name, and of networks by class, as JSON."""
    clips = {f"{file.type.upper()}/{file.name}": found for file in files if (found := _clip(file)) is not None}
    visions = {
        file.name: {
            "config": _VISION_CONFIGS[file.kind[:3]],
            "sizes": {**_VISION, "hidden_size": _vision_component(file.kind).config["hidden_size"]},
        }
        for file in files
        if file.folder == "clip_vision" and file.kind
    }
    seeing = _seeing()
    smaller = {name: seeing[name] for name in ("hidden_size", "intermediate_size", "num_heads")}
    networks = {
        "comfy.text_encoders.qwen_vl.Qwen2VLVisionTransformer": {**smaller, "num_layers": seeing["depth"]},
        "comfy.ldm.wan.vae2_2.WanVAE": {"dim": WAN22_VAE["base_dim"], "dec_dim": WAN22_VAE["decoder_base_dim"]},
        **VAES["hunyuanvideo 1.5"][4],
    }
    return json.dumps({"clip": clips, "vision": visions, "networks": networks})


def _clip(file: File) -> dict[str, Any] | None:
    if file.folder != "text_encoders" or file.kind in ("", "byt5"):
        return None
    name = {
        "wan": "wan", "flux2": "flux.2 dev" if file.kind == "mistral" else "flux.2 klein", "lumina2": "z-image",
        "qwen_image": "qwen-image", "hunyuan_video_15": "hunyuanvideo 1.5",
    }[file.type]  # fmt: skip
    _, encoder, tokenizer, encoders = TEXTS[name]
    arguments, options = {}, {}
    for one, _ in encoders:
        options |= one.job()["options"]
    if name == "wan":
        options = replace(UMT5, sizes=_UMT5).job()["options"]
    if name == "hunyuanvideo 1.5":
        options |= _byt5().job()["options"]
    if name == "flux.2 klein":
        (sizes,) = options.values()
        sizes = {**sizes, "num_hidden_layers": TEXTS["z-image"][3][0][0].sizes["num_hidden_layers"]}
        model = "qwen3_8b" if "8b" in file.name else "qwen3_4b"
        arguments = {"model_type": model}
        tokenizer = f"{tokenizer}8B" if model == "qwen3_8b" else tokenizer
        options = {f"{model}_model_config": sizes}
    plain = {key: {k: v for k, v in sizes.items() if k != "rope_scaling"} for key, sizes in options.items()}
    return {"encoder": encoder, "tokenizer": tokenizer, "arguments": arguments, "options": plain}
