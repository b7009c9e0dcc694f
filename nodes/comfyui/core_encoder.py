"""The text encoder that replaces ComfyUI's own inside its CLIP.

It returns the same states, names its weights as ComfyUI does, and applies the changes that nodes make to them.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import comfy.sd1_clip
import comfy.text_encoders.qwen_vl
import numpy as np
import torch

from ...tpu_runtime.checkpoints import checkpoint
from ...tpu_runtime.checkpoints.model_ref import InMemoryLora, Lora, ModelRef
from ...tpu_runtime.files import TensorFile
from ...tpu_runtime.messages import compose, compose_term
from ...tpu_runtime.progress import SilentProgress
from . import model_patcher
from .core_model import MakeContext, run_stage
from .weights import sources
from .weights.lazy_tensor import from_file

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


class EncoderSlot:
    """The position of an encoder in core's CLIP: names of its weights after `prefix`, and the chosen layer."""

    def __init__(self, prefix: str, network: torch.nn.Module, core: comfy.sd1_clip.SDClipModel) -> None:
        self.prefix, self._network, self._core = prefix, network, core
        self.names = tuple(core.transformer.state_dict())

    @property
    def patcher(self) -> "ModelPatcher":
        return self._network.tpu_patcher

    def layer(self, number: int) -> int | None:
        """Return how many of `number` layers a node chose, from the first; None for the encoder's own choice."""
        core = self._core
        if isinstance(core.layer, list) or (core.layer, core.layer_idx) == core.options_default[:2]:
            return None
        if core.layer == "last":
            return number
        return core.layer_idx % number + 1


class TextPart:
    """A module of core's text model by name, which nodes such as LoraSave look up; the patcher has its weights."""

    comfy_cast_weights = False

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def __getattr__(self, name: str) -> "TextPart":
        below = [entry.removeprefix(f"{name}.") for entry in self._names if entry.startswith(f"{name}.")]
        if not below:
            raise AttributeError(f"core's text model has no {name} here")
        return TextPart(below)


class Encoder(torch.nn.Module):
    """Replacement for core's text model. Tokens stay numbers until they reach ours; those of images are below 0."""

    def __init__(self, model: ModelRef, number: int, host: MakeContext, place: EncoderSlot) -> None:
        super().__init__()
        self.model, self.number, self.host, self.place = model, number, host, place
        self._changed: tuple[object, ModelRef] | None = None

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[str, TensorFile]]:
        """Return our name and the file's tensor of each weight, by core's name."""
        component = self.model.spec.text_encoders[self.number].component
        files = checkpoint.read_own_tensors(self.model.locate(), component, self.host())
        return {core: (name, files[name]) for name, core in sources.match_names(self.place.names, files).items()}

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        """Write the weights by core's names, for LoRAs, merges and saving."""
        for name, (_, tensor) in self.tensors.items():
            destination[prefix + name] = from_file(tensor)

    def _with_changes(self, *, sees: bool) -> ModelRef:
        """Return the model with the weights that nodes have changed in this encoder.

        sees: whether the prompt has images. Raises ValueError if a node then changes weights of the vision tower.
        """
        patcher, prefix = self.place.patcher, self.place.prefix
        if self._changed is None or self._changed[0] != patcher.patches_uuid:
            source = sources.CoreWeights({prefix + name: tensor for name, (_, tensor) in self.tensors.items()})
            deltas: dict[str, torch.Tensor] = {}
            for key, patches in patcher.patches.items():
                if key.startswith(prefix):
                    deltas |= model_patcher.lora_difference(
                        self.tensors[key.removeprefix(prefix)][0], key, patches, source
                    )
            title, component = "changes of nodes to the CLIP", self.model.spec.text_encoders[self.number].component
            in_memory = InMemoryLora(title=title, digest=f"{patcher.patches_uuid}/{prefix}", tensors=deltas)
            lora = Lora(path=title, strength=1.0, held=in_memory, component=component)
            self._changed = patcher.patches_uuid, replace(self.model, loras=(lora,)) if deltas else self.model
        vision = next((key for key in patcher.patches if key.startswith(f"{prefix}visual.")), "")
        if sees and vision:
            raise ValueError(compose("comfyui.vision_weights_changed", title=self.model.spec.title, vision=vision))
        return self._changed[1]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "place" not in vars(self):
                raise
            return getattr(TextPart(self.place.names), name)

    @functools.cached_property
    def depth(self) -> int:
        """Return the number of layers."""
        config = self.model.resolve(SilentProgress()).configs[self.model.spec.text_encoders[self.number].component]
        config = config.get("text_config", config)
        return int(config["num_layers"] if "num_layers" in config else config["num_hidden_layers"])

    def _layers(self) -> int | None:
        """Return how many layers run; None for the encoder's own choice."""
        text, number = self.model.spec.text_encoders[self.number], self.depth
        chosen = self.place.layer(number)
        if chosen is not None and not text.depth_key:
            raise ValueError(compose(
                "comfyui.last_layer_fixed", title=self.model.spec.title, chosen=chosen, number=number,
            ))  # fmt: skip
        return chosen if chosen != number else None

    def get_input_embeddings(self) -> Callable[..., torch.Tensor]:
        return lambda tokens, out_dtype=None: tokens.unsqueeze(-1).to(torch.float32)  # exact: ids are below 2**24

    def preprocess_embed(
        self, embed: Mapping[str, Any], device: object
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return placeholders for the tokens of an image `[rows, height, width, 3]` in 0..1, and its encoded tokens."""
        if embed["type"] != "image":
            return None, None
        patches, grid = comfy.text_encoders.qwen_vl.process_qwen2vl_images(embed["data"])
        encoded = run_stage(
            "look", self.model, self.host, prepared=(patches.float().numpy(), tuple(grid[0, 1:].tolist()))
        )
        return -torch.ones(1, encoded.shape[1] * encoded.shape[2], 1), encoded

    def forward(
        self, tokens: None, attention_mask: torch.Tensor | None, embeds: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the denoiser's states `[rows, tokens, dim]`, as core's last and inner layers.

        tokens: unused.
        attention_mask: [rows, tokens], or None.
        embeds: [rows, tokens, 1], token ids.
        """
        ids = embeds[..., 0].to(torch.int32)
        text = self.model.spec.text_encoders[self.number]
        self._check_vocabulary(text.component, int(ids.max()))
        images = [embed["extra"] for embed in options.get("embeds_info") or () if embed["type"] == "image"]
        length, most = ids.shape[1], text.prefix + text.max_length
        if length > most:
            advice = compose("comfyui.shorten")
            if images:
                advice = compose("comfyui.shorten_or_show_fewer_images")
            raise ValueError(compose(
                "comfyui.prompt_too_long", title=self.model.spec.title, length=length,
                component=compose_term("component", text.component), most=most, advice=advice,
            ))  # fmt: skip
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(torch.int32)
        ids, mask = (torch.nn.functional.pad(x, (0, most - length)) for x in (ids, mask))
        # One row per call, so that one program serves every prompt.
        model, layers = self._with_changes(sees=bool(images)), self._layers()
        rows = [
            run_stage(
                "states", model, self.host,
                encoder=self.number, ids=_as_batch(row), mask=_as_batch(real), seen=images, layers=layers,
            )
            for row, real in zip(ids, mask, strict=True)
        ]  # fmt: skip
        states = torch.cat(rows)[:, :length]
        layers = options.get("intermediate_output")
        if isinstance(layers, list):  # ours are concatenated, core expects a dimension of layers
            return states, states.unflatten(2, (len(layers), -1)).movedim(2, 1)
        return states, states

    def generate(self, *args: object, **options: object) -> NoReturn:
        """Raise ValueError: the encoder does not write text."""
        raise ValueError(compose("comfyui.text_generation_unsupported", title=self.model.spec.title))

    def _check_vocabulary(self, component: str, last: int) -> None:
        config = self.model.resolve(SilentProgress()).configs[component]
        rows = config.get("text_config", config)["vocab_size"]
        if last >= rows:
            raise ValueError(compose(
                "comfyui.token_without_embedding", title=self.model.spec.title, last=last,
                model_id=self.model.model_id, rows=rows,
            ))  # fmt: skip


def check_owner(patcher: "ModelPatcher", kind: str, network: str) -> None:
    """Raise ValueError for changes other than of weights that nodes, such as LoraLoaderBypass, make to a CLIP or VAE.

    kind: "CLIP" or "VAE". network: its name in the error.
    """
    hung = {
        "injections": "more modules, as LoraLoaderBypass does,",
        "object_patches": "a replacement for one of its modules",
        "weight_wrapper_patches": "functions around its weights",
    }
    for name, what in hung.items():
        if getattr(patcher, name, None):
            raise ValueError(compose("comfyui.patch_unsupported", what=what, kind=kind, network=network))


def _as_batch(row: torch.Tensor) -> np.ndarray:
    """Return a row `[tokens]` as an array `[1, tokens]`."""
    return np.ascontiguousarray(row[None].numpy())


def check_tokens_before(process: Callable[..., object], model: ModelRef, can_see: bool) -> Callable[..., object]:
    """Check the tokens before core's `process`. can_see: an encoder of this type may take images."""

    def process_tokens(tokens: list[list[Any]], device: object) -> object:
        other = [token for row in tokens for token in row if not isinstance(token, int | np.integer)]
        images = [token for token in other if isinstance(token, dict) and token.get("type") == "image"]
        if images and can_see and not model.spec.text_encoders[0].place_beside:
            raise ValueError(
                compose("comfyui.text_encoder_cannot_see", title=model.spec.title, model_id=model.model_id)
            )
        if len(images) < len(other) or (images and not model.spec.text_encoders[0].place_beside):
            what = "an embedding (textual inversion)" if len(images) < len(other) else "an image"
            raise ValueError(compose("comfyui.prompt_entry_unsupported", title=model.spec.title, what=what))
        return process(tokens, device)

    return process_tokens
