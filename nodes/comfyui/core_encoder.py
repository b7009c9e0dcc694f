"""A text encoder in place of core's, within core's CLIP: its states, its weights by core's names, what nodes change."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import comfy.sd1_clip
import comfy.text_encoders.qwen_vl
import numpy as np
import torch

from ...tpu_runtime import pipeline
from ...tpu_runtime.pipeline import HeldTensors, Lora, ModelRef
from . import core_patches
from .core_model import MakeHost, ask
from .weights import sources
from .weights.stored import of_file


class EncoderPlace:
    """Where an encoder stands in core's CLIP: the names of its weights after `prefix`, and which layer is chosen."""

    def __init__(self, prefix: str, network: torch.nn.Module, one: comfy.sd1_clip.SDClipModel) -> None:
        self.prefix, self._network, self._one = prefix, network, one
        self.names = tuple(one.transformer.state_dict())

    @property
    def patcher(self) -> Any:
        return self._network.tpu_patcher

    def layer(self, number: int) -> int | None:
        """How many of `number` layers a node chose, counted from the first; None for the encoder's own choice."""
        one = self._one
        if isinstance(one.layer, list) or (one.layer, one.layer_idx) == one.options_default[:2]:
            return None
        if one.layer == "last":
            return number
        return one.layer_idx % number + 1


class Part:
    """A module of core's text model by name, which nodes such as LoraSave look up; the patcher has its weights."""

    comfy_cast_weights = False

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __getattr__(self, name: str) -> "Part":
        below = [one.removeprefix(f"{name}.") for one in self._names if one.startswith(f"{name}.")]
        if not below:
            raise AttributeError(f"core's text model has no {name} here")
        return Part(below)


class Encoder(torch.nn.Module):
    """In place of core's text model: tokens stay numbers until they reach ours, and those of pictures are below 0."""

    def __init__(self, model: ModelRef, number: int, host: MakeHost, place: EncoderPlace) -> None:
        super().__init__()
        self.model, self.number, self.host, self.place = model, number, host, place
        self._changed: tuple[Any, ModelRef] | None = None

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[str, Any]]:
        """Our names of its weights and where they are, by core's."""
        component = self.model.spec.text_encoders[self.number].component
        own = pipeline.checkpoint.own_tensors(self.model.locate(), component, self.host())
        return {core: (name, own[name]) for name, core in sources.names_like(self.place.names, own).items()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """For core's names of LoRAs, for merges, and for saving."""
        for name, (_, tensor) in self.tensors.items():
            destination[prefix + name] = of_file(tensor)

    def _with_changes(self, *, sees: bool) -> ModelRef:
        """The model with the weights that nodes have changed in this encoder."""
        patcher, prefix = self.place.patcher, self.place.prefix
        if self._changed is None or self._changed[0] != patcher.patches_uuid:
            source = sources.CoreWeights({prefix + name: tensor for name, (_, tensor) in self.tensors.items()})
            found: dict[str, torch.Tensor] = {}
            for key, patches in patcher.patches.items():
                if key.startswith(prefix):
                    found |= core_patches.difference(self.tensors[key.removeprefix(prefix)][0], key, patches, source)
            title, component = "what nodes change in the CLIP", self.model.spec.text_encoders[self.number].component
            held = HeldTensors(title=title, digest=f"{patcher.patches_uuid}/{prefix}", tensors=found)
            lora = Lora(path=title, strength=1.0, held=held, component=component)
            self._changed = patcher.patches_uuid, replace(self.model, loras=(lora,)) if found else self.model
        eyes = next((key for key in patcher.patches if key.startswith(f"{prefix}visual.")), "")
        if sees and eyes:
            raise ValueError(
                f"{self.model.spec.title}: a node changes {eyes}, with which the text encoder sees images, and this "
                "prompt shows it one. On the TPU its other weights can be changed. Leave the image or that node out, "
                "or load the text encoder with ComfyUI's own loader."
            )
        return self._changed[1]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "place" not in vars(self):
                raise
            return getattr(Part(self.place.names), name)

    @functools.cached_property
    def depth(self) -> int:
        """How many layers it has."""
        config = self.model.resolve(pipeline.Silent()).configs[self.model.spec.text_encoders[self.number].component]
        config = config.get("text_config", config)
        return int(config["num_layers"] if "num_layers" in config else config["num_hidden_layers"])

    def _layers(self) -> int | None:
        """How many layers run, where a node chose others than the encoder's own."""
        text, number = self.model.spec.text_encoders[self.number], self.depth
        chosen = self.place.layer(number)
        if chosen is not None and not text.depth_key:
            raise ValueError(
                f"{self.model.spec.title}: CLIPSetLastLayer asks for the states after {chosen} of {number} layers, and "
                "its text encoder on the TPU gives those that the model was trained with. Remove CLIPSetLastLayer, or "
                "load the text encoder with ComfyUI's own loader."
            )
        return chosen if chosen != number else None

    def get_input_embeddings(self) -> Callable[..., torch.Tensor]:
        return lambda tokens, out_dtype=None: tokens.unsqueeze(-1).to(torch.float32)  # exact: there are under 2**24

    def preprocess_embed(self, embed: Mapping[str, Any], device: Any) -> tuple[torch.Tensor | None, Any]:
        """A picture `[rows, height, width, 3]` in 0..1 among tokens: a place for each of its own, and these."""
        if embed["type"] != "image":
            return None, None
        patches, grid = comfy.text_encoders.qwen_vl.process_qwen2vl_images(embed["data"])
        seen = ask("look", self.model, self.host, prepared=(patches.float().numpy(), tuple(grid[0, 1:].tolist())))
        return -torch.ones(1, seen.shape[1] * seen.shape[2], 1), seen

    def forward(
        self, tokens: None, attention_mask: torch.Tensor | None, embeds: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The states that the denoiser gets, `[rows, tokens, dim]`, in the places of core's last and inner layers."""
        ids = embeds[..., 0].to(torch.int32)
        text = self.model.spec.text_encoders[self.number]
        self._check_vocabulary(text, int(ids.max()))
        seen = [each["extra"] for each in options.get("embeds_info") or () if each["type"] == "image"]
        length, most = ids.shape[1], text.prefix + text.max_length
        if length > most:
            advice = "Shorten it."
            if seen:
                advice = "Shorten it, or show it fewer or smaller pictures, as TextEncodeQwenImageEditPlus does."
            raise ValueError(
                f"{self.model.spec.title}: the prompt has {length} tokens, and the "
                f"{text.component.replace('_', ' ')} takes {most}. {advice}"
            )
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(torch.int32)
        ids, mask = (torch.nn.functional.pad(x, (0, most - length)) for x in (ids, mask))
        # One row a call: so every prompt is the same program's.
        model, layers = self._with_changes(sees=bool(seen)), self._layers()
        rows = [
            ask(
                "states", model, self.host,
                encoder=self.number, ids=_numbers(row), mask=_numbers(real), seen=seen, layers=layers,
            )
            for row, real in zip(ids, mask, strict=True)
        ]  # fmt: skip
        states = torch.cat(rows)[:, :length]
        layers = options.get("intermediate_output")
        if isinstance(layers, list):  # of several layers, side by side: core wants them apart
            return states, states.unflatten(2, (len(layers), -1)).movedim(2, 1)
        return states, states

    def generate(self, *args: Any, **options: Any) -> Any:
        raise ValueError(
            f"{self.model.spec.title}: a node such as TextGenerate asks the text encoder to write text, and on the TPU "
            "it encodes prompts only. Load a language model with ComfyUI's own loader for that node."
        )

    def _check_vocabulary(self, text: Any, most: int) -> None:
        config = self.model.resolve(pipeline.Silent()).configs[text.component]
        rows = config.get("text_config", config)["vocab_size"]
        if most >= rows:
            raise ValueError(
                f"{self.model.spec.title}: the prompt has a token {most}, and {self.model.model_id} has embeddings of "
                f"{rows}: its tokenizer is not ComfyUI's. Use this pack's own text encoder for it."
            )


def check_owner(patcher: Any, kind: str, network: str) -> None:
    """Raises ValueError for what nodes of other packs, and LoraLoaderBypass, hang on a CLIP or VAE beside weights."""
    hung = {
        "injections": "modules beside its own, as LoraLoaderBypass does",
        "object_patches": "another module in place of one of its own",
        "weight_wrapper_patches": "functions around its weights",
    }
    for name, what in hung.items():
        if getattr(patcher, name, None):
            raise ValueError(
                f"A node puts {what} into this {kind}. Its {network} runs compiled on the TPU, where LoRAs of "
                f"LoraLoader and merges of a CLIP can change weights, and nothing else. Remove that node, or load the "
                f"{kind} with ComfyUI's own loader."
            )


def _numbers(row: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(row[None].numpy())


def checked(process: Callable[..., Any], model: ModelRef, can_see: bool) -> Callable[..., Any]:
    """Check the tokens before core's `process`. can_see: an encoder of this type may take images."""

    def process_tokens(tokens: list[list[Any]], device: Any) -> Any:
        other = [token for row in tokens for token in row if not isinstance(token, int | np.integer)]
        pictures = [token for token in other if isinstance(token, dict) and token.get("type") == "image"]
        if pictures and can_see and not model.spec.text_encoders[0].place_beside:
            raise ValueError(
                f"{model.spec.title}: the prompt holds a picture, and the text encoder {model.model_id} cannot see on "
                "the TPU (it has no visual.). Leave the picture out, or choose a file with it, such as "
                "qwen_2.5_vl_7b.safetensors."
            )
        if len(pictures) < len(other) or (pictures and not model.spec.text_encoders[0].place_beside):
            what = "an embedding (textual inversion)" if len(pictures) < len(other) else "a picture"
            raise ValueError(
                f"{model.spec.title}: the prompt holds {what}, which its text encoder on the TPU does not take. Leave "
                "it out, or load the text encoder with ComfyUI's own loader."
            )
        return process(tokens, device)

    return process_tokens
