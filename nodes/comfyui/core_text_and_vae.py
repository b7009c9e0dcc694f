"""ComfyUI's own CLIP and VAE whose networks run on the TPU: weights of words, templates, ratios, batches are core's."""

from collections.abc import Callable, Sequence
from typing import Any

import comfy.ops
import comfy.sd
import comfy.sd1_clip
import comfy.text_encoders.cogvideo
import comfy.text_encoders.flux
import comfy.text_encoders.hunyuan_image
import comfy.text_encoders.hunyuan_video
import comfy.text_encoders.qwen_image
import comfy.text_encoders.wan
import folder_paths
import numpy as np
import torch

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import ModelRef
from ..model import CLIP_TYPES
from .core_model import CPU, CorePatcher, MakeHost, ask, held_as

META = torch.device("meta")


# --- CLIP -------------------------------------------------------------------------------------------------------------

# The tokenizers that files carry along, as core calls them.
CARRIED = ("spiece_model", "tekken_model", "tokenizer_json")


def _core_classes(model: ModelRef) -> tuple[Any, Any]:
    """Core's text encoder and tokenizer of a model, as `comfy.sd.load_text_encoder_state_dicts` chooses them."""
    te = comfy.text_encoders
    flux, name = te.flux, model.spec.name
    if name.startswith("flux2-klein"):
        is_larger = "9b" in name
        made = flux.klein_te(model_type="qwen3_8b" if is_larger else "qwen3_4b")
        return made, flux.KleinTokenizer8B if is_larger else flux.KleinTokenizer
    return {
        "Flux2": lambda: (flux.flux2_te(), flux.Flux2Tokenizer),
        "ZImage": lambda: (te.z_image.te(), te.z_image.ZImageTokenizer),
        "QwenImage": lambda: (te.qwen_image.te(), te.qwen_image.QwenImageTokenizer),
        "CogVideoX": lambda: (te.cogvideo.cogvideo_te(), te.cogvideo.CogVideoXTokenizer),
        "HunyuanVideo15": lambda: (te.hunyuan_image.te(), te.hunyuan_video.HunyuanVideo15Tokenizer),
    }.get(model.spec.family, lambda: (te.wan.te(), te.wan.WanT5Tokenizer))()


def type_of(path: str) -> str:
    """The type of the text encoder in a checkpoint's file."""
    family = pipeline.choose_part(pipeline.SPECS, path).spec.family
    return next(kind for kind, families in CLIP_TYPES.items() if family in families)


def clip(paths: Sequence[str], kind: str, precision: str, host: MakeHost) -> comfy.sd.CLIP:
    """Core's CLIP of text encoders in files; `kind` is the type that core's loaders are told."""
    if kind not in CLIP_TYPES:
        raise ValueError(
            f"type is {kind}; on the TPU run text encoders of the types {', '.join(CLIP_TYPES)}. Choose one of them, "
            "or use ComfyUI's own loader."
        )
    specs = [spec for spec in pipeline.SPECS if spec.family in CLIP_TYPES[kind]]
    model = pipeline.choose_part(specs, pipeline.SEPARATOR.join(paths), precision=precision)
    networks = pipeline.held_networks(model.model_id)
    carried = {name: pipeline.held_tensor(held, name) for held in networks for name in CARRIED}
    target = CoreTarget()
    target.clip, target.tokenizer = _core_classes(model)
    options = {
        "custom_operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "initial_device": META,
        "load_device": CPU, "offload_device": CPU,
    }  # fmt: skip
    found = comfy.sd.CLIP(
        target,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        tokenizer_data={name: x for name, x in carried.items() if x is not None},
        model_options=options,
        disable_dynamic=True,
    )
    inner = [one for one in found.cond_stage_model.modules() if isinstance(one, comfy.sd1_clip.SDClipModel)]
    for number, one in enumerate(inner):
        one.transformer = Encoder(model, number, host)
        one.process_tokens = _checked(one.process_tokens, model)
    found.patcher = CorePatcher(found.cond_stage_model, load_device=CPU, offload_device=CPU, size=1)
    found.patcher.is_clip = True
    return found


class CoreTarget:
    """What core's CLIP is made of."""

    clip: Any
    tokenizer: Any

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}


class Encoder(torch.nn.Module):
    """In place of core's text model: tokens stay numbers until they reach ours."""

    def __init__(self, model: ModelRef, number: int, host: MakeHost) -> None:
        super().__init__()
        self.model, self.number, self.host = model, number, host

    def get_input_embeddings(self) -> Callable[..., torch.Tensor]:
        return lambda tokens, out_dtype=None: tokens.unsqueeze(-1).to(torch.float32)  # exact: there are under 2**24

    def forward(
        self, tokens: None, attention_mask: torch.Tensor | None, embeds: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states that the denoiser gets, `[rows, tokens, dim]`, in the places of core's last and inner layers."""
        ids = embeds[..., 0].to(torch.int32)
        text = self.model.spec.text_encoders[self.number]
        length, most = ids.shape[1], text.prefix + text.max_length
        if length > most:
            raise ValueError(
                f"{self.model.spec.title}: the prompt has {length} tokens, and the "
                f"{text.component.replace('_', ' ')} takes {most}. Shorten it."
            )
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(torch.int32)
        ids, mask = (torch.nn.functional.pad(x, (0, most - length)) for x in (ids, mask))
        # One row a call: so every prompt is the same program's.
        rows = [
            ask(
                "states", self.model, self.host,
                encoder=self.number, ids=_numbers(row), mask=_numbers(seen),
            )
            for row, seen in zip(ids, mask, strict=True)
        ]  # fmt: skip
        states = torch.cat(rows)[:, :length]
        layers = options.get("intermediate_output")
        if isinstance(layers, list):  # of several layers, side by side: core wants them apart
            return states, states.unflatten(2, (len(layers), -1)).movedim(2, 1)
        return states, states


def _numbers(row: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(row[None].numpy())


def _checked(process: Callable[..., Any], model: ModelRef) -> Callable[..., Any]:
    def process_tokens(tokens: list[list[Any]], device: Any) -> Any:
        if any(not isinstance(token, int | np.integer) for row in tokens for token in row):
            raise ValueError(
                f"{model.spec.title}: the prompt holds an embedding or a picture, which its text encoder on the TPU "
                "does not take. Leave it out, or load the text encoder with ComfyUI's own loader."
            )
        return process(tokens, device)

    return process_tokens


# --- VAE --------------------------------------------------------------------------------------------------------------


def vae(path: str, precision: str, host: MakeHost) -> "VAE":
    """Core's VAE of a file."""
    specs = [spec for spec in pipeline.SPECS if spec.vae.encode is not None]
    model = pipeline.choose_part(specs, path, precision=precision)
    held = held_as(model, model.spec.vae.component)
    with META:
        shapes = {name: torch.empty(tensor.shape) for name, tensor in held.tensors.items()}
        found = VAE(shapes, device=CPU, dtype=torch.float32)
    found.first_stage_model = Autoencoder(model, host)
    found.patcher = CorePatcher(found.first_stage_model, load_device=CPU, offload_device=CPU, size=1)
    return found


class VAE(comfy.sd.VAE):
    """Core's, without tiles: the chips decode and encode one latent frame at a time, each a part of it."""

    @property
    def first_stage_model(self) -> torch.nn.Module:
        return self._network

    @first_stage_model.setter
    def first_stage_model(self, network: torch.nn.Module) -> None:
        # Core's own, which it makes in the published sizes, is neither filled nor kept.
        vars(network)["load_state_dict"] = lambda *args, **options: ([], [])
        self._network = network

    def decode_tiled(self, samples: torch.Tensor, **tiles: Any) -> torch.Tensor:
        return self.decode(samples)

    def encode_tiled(self, pixel_samples: torch.Tensor, **tiles: Any) -> torch.Tensor:
        return self.encode(pixel_samples)


class Autoencoder(torch.nn.Module):
    """In place of core's network. Pixels are `[rows, 3, frames, height, width]` in -1..1; pictures have no frames."""

    def __init__(self, model: ModelRef, host: MakeHost) -> None:
        super().__init__()
        self.model, self.host = model, host

    def decode(self, samples: torch.Tensor, **options: Any) -> torch.Tensor:
        rows = [ask("decode", self.model, self.host, latents={"samples": row[None]}) for row in samples]
        pixels = torch.stack(rows).movedim(-1, 1) * 2.0 - 1.0
        return pixels[:, :, 0] if samples.ndim == 4 else pixels

    def encode(self, pixels: torch.Tensor, **options: Any) -> torch.Tensor:
        frames = pixels if pixels.ndim == 5 else pixels.unsqueeze(2)
        rows = [ask("latents", self.model, self.host, pixels=row[None].clone()) for row in frames]
        return torch.cat(rows)
