"""ComfyUI's own CLIP, VAE and CLIP_VISION whose networks run on the TPU.

Prompt weights, templates, aspect ratios, batches and image crops are core's.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import comfy.clip_model
import comfy.clip_vision
import comfy.ops
import comfy.sd
import comfy.sd1_clip
import folder_paths
import torch

from ...tpu_runtime.checkpoints import checkpoint
from ...tpu_runtime.checkpoints.file_resolution import SEPARATOR
from ...tpu_runtime.checkpoints.model_ref import ModelRef, choose_partial_model
from ...tpu_runtime.files import TensorFile
from ...tpu_runtime.messages import compose, compose_term
from ...tpu_runtime.models import SPECS
from ...tpu_runtime.progress import SilentProgress
from ..model import specs_of_clip_type
from .core_encoder import Encoder, EncoderSlot, check_owner, check_tokens_before
from .core_model import MakeContext, run_stage
from .model_patcher import CPU, CorePatcher, LazyProxy
from .weights.lazy_tensor import from_file

META = torch.device("meta")


# --- CLIP -------------------------------------------------------------------------------------------------------------


def _core_classes(model: ModelRef) -> tuple[type, type]:
    """Return core's text encoder and tokenizer of a model, as `comfy.sd.load_text_encoder_state_dicts` chooses them."""
    clip = model.spec.core.clip
    return _find_class(clip.encoder)(**clip.options), _find_class(clip.tokenizer)


def _find_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"comfy.text_encoders.{module}"), name)


def detect_clip_type(path: str) -> str:
    """Return the type, as in core's loaders, of the text encoder in a checkpoint's file."""
    return choose_partial_model(SPECS, path).spec.core.clip_type


def load_clip(paths: Sequence[str], kind: str, precision: str, host: MakeContext) -> "CLIP":
    """Return core's CLIP of text encoders in files.

    paths: of the files. kind: the `type` of core's loaders. precision: as a node has it. host: returns the running
        node's progress.
    Raises ValueError for an unsupported type.
    """
    specs = specs_of_clip_type(kind)
    model = choose_partial_model(specs, SEPARATOR.join(paths), precision=precision)
    file = checkpoint.export_network(model.locate(), model.spec.text_encoders[0].component, host())
    with_vision = [spec for spec in specs if spec.text_encoders[0].place_beside]
    if with_vision and any("visual." in name for name in file.tensors):
        model = choose_partial_model(with_vision, model.model_id, precision=precision)
    loaded = defer_clip(model, host)
    loaded.resolve()
    return loaded


def defer_clip(model: ModelRef, host: MakeContext) -> "CLIP":
    """Return core's CLIP of a model's text encoders, created on first use."""
    return CLIP.later(lambda clip: _make_clip(clip, model, host))


def _make_clip(found: "CLIP", model: ModelRef, host: MakeContext) -> None:
    carried = checkpoint.export_tokenizers(model.locate(), host())
    if not carried and model.spec.core.clip.needs_tokenizer:
        raise ValueError(compose("comfyui.tokenizer_not_readable", model_id=model.model_id))
    target = ClipTarget()
    target.clip, target.tokenizer = _core_classes(model)
    options = {
        "custom_operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "initial_device": META,
        "load_device": CPU, "offload_device": CPU,
    }  # fmt: skip
    patcher = found.patcher
    comfy.sd.CLIP.__init__(
        found,
        target,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        tokenizer_data={name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in carried.items()},
        model_options=options,
        disable_dynamic=True,
    )
    network = found.cond_stage_model
    encoders = {name: part for name, part in network.named_modules() if isinstance(part, comfy.sd1_clip.SDClipModel)}
    can_see = can_take_images(model)
    for number, (name, encoder) in enumerate(encoders.items()):
        encoder.transformer = Encoder(
            model, number, host, EncoderSlot(f"{name}.transformer." if name else "transformer.", network, encoder)
        )
        encoder.num_layers = encoder.transformer.depth  # core's own number is that of the published model
        encoder.process_tokens = check_tokens_before(encoder.process_tokens, model, can_see)
    patcher.fill(network)
    patcher.is_clip = True
    found.patcher = patcher


def can_take_images(model: ModelRef) -> bool:
    """Return whether text encoders of this type take images in a prompt, if their file has a vision tower."""
    return any(spec.text_encoders[0].place_beside for spec in specs_of_clip_type(model.spec.core.clip_type))


class LazyOwner(LazyProxy):
    """An object with a patcher, which core looks up on every output of a node. Using the patcher creates both."""

    patcher: CorePatcher

    def get_models(self) -> list[object]:
        """Return nothing: core calls this on every output of a node, used or not."""
        return []

    @classmethod
    def later(cls, make: Callable[[Self], None]) -> Self:
        """Return an object that `make` initializes on first use, of it or of its patcher."""
        proxy = super().later(make)
        proxy.patcher = CorePatcher.later(lambda patcher: proxy.resolve())
        return proxy


class CLIP(LazyOwner, comfy.sd.CLIP):
    """Core's CLIP, whose encoders see the changes that nodes have made to it."""

    def clone(self, *args: object, **options: object) -> "CLIP":
        self.resolve()
        copied = CLIP.__new__(CLIP)
        copied.__dict__.update(super().clone(*args, **options).__dict__)
        return copied

    def load_model(self, tokens: Any = None) -> object:
        """Check changes by nodes, before the encoders run and before they are saved."""
        check_owner(self.patcher, "CLIP", compose_term("component", "text_encoder"))
        self.cond_stage_model.tpu_patcher = self.patcher
        return super().load_model(tokens or {})


class ClipTarget:
    """The classes that core creates a CLIP from."""

    clip: type
    tokenizer: type

    def __init__(self) -> None:
        self.params: dict[str, object] = {}


# --- VAE --------------------------------------------------------------------------------------------------------------

_LIGHT = "TAEHV"


def load_vae(path: str, precision: str, host: MakeContext) -> "VAE":
    """Return core's VAE of a file.

    path: of the file. precision: as a node has it. host: returns the running node's progress.
    """
    loaded = defer_vae(_choose_vae_model(path, precision), host)
    loaded.resolve()
    return loaded


def _choose_vae_model(path: str, precision: str) -> ModelRef:
    """Return the model of a VAE's file: one that encodes, or for an all-in-one checkpoint one that does not."""
    try:
        return choose_partial_model(_ENCODING, path, precision=precision)
    except ValueError:
        return choose_partial_model(SPECS, path, precision=precision)


def defer_vae(model: ModelRef, host: MakeContext) -> "VAE":
    """Return core's VAE of a model, created on first use."""
    return VAE.later(lambda vae: _make_vae(vae, model, host))


def _make_vae(found: "VAE", model: ModelRef, host: MakeContext) -> None:
    file = checkpoint.export_network(model.locate(), model.spec.vae.component, host())
    patcher = found.patcher
    with META:
        shapes = {name: torch.empty(tensor.shape) for name, tensor in file.tensors.items()}
        comfy.sd.VAE.__init__(found, shapes, device=CPU, dtype=torch.float32)
    if file.layout.class_name == _LIGHT:
        found.process_output = lambda pixels: pixels.div_(2.0).add_(0.5)  # core's network has them in 0..1
    found.first_stage_model = Autoencoder(model, _encoding(model, file), host, lambda: found.patcher, file.tensors)
    patcher.fill(found.first_stage_model)
    found.patcher = patcher


_ENCODING = tuple(spec for spec in SPECS if spec.vae.encode is not None)


def _encoding(model: ModelRef, file: Any) -> ModelRef | None:
    """Return the model whose VAE encodes; None if there is only a light decoder, or the VAE has several files.

    A model without encoding uses the same file as another model's. With a light decoder it is the model's own, if it
    has one.
    """
    is_light = file.layout.class_name == _LIGHT
    if model.spec.vae.encode is not None and not (is_light and model.is_partial):
        return model
    if is_light:
        return None
    files = list({tensor.path for tensor in file.tensors.values()})
    if len(files) > 1:
        return None
    # An all-in-one checkpoint may be of a model that does not encode; its VAE is another model's too.
    only = file.layout.class_name
    return choose_partial_model(_ENCODING, str(files[0]), precision=model.precision, only=only)


class VAE(LazyOwner, comfy.sd.VAE):
    """Core's VAE without tiles: the chips decode and encode one latent frame at a time, each chip a part of it."""

    @property
    def first_stage_model(self) -> torch.nn.Module:
        return self._network

    @first_stage_model.setter
    def first_stage_model(self, network: torch.nn.Module) -> None:
        # Core's own network, in the published sizes, gets no weights and is not kept.
        vars(network)["load_state_dict"] = lambda *args, **options: ([], [])
        self._network = network

    def decode_tiled(self, samples: torch.Tensor, **tiles: object) -> torch.Tensor:
        """Decode latents `[batch, channels, (frames,) height, width]`, as `decode` does; `tiles` are ignored."""
        return self.decode(samples)

    def encode_tiled(self, pixel_samples: torch.Tensor, **tiles: object) -> torch.Tensor:
        """Encode pixels `[batch, height, width, 3]` in 0..1, as `encode` does; `tiles` are ignored."""
        return self.encode(pixel_samples)


class Autoencoder(torch.nn.Module):
    """Replacement for core's network. Pixels are `[rows, 3, frames, height, width]` in -1..1; images have no frames."""

    def __init__(
        self,
        model: ModelRef,
        encoding: ModelRef | None,
        host: MakeContext,
        patcher: Callable[[], CorePatcher],
        tensors: Mapping[str, TensorFile],
    ) -> None:
        super().__init__()
        self.model, self.encoding, self.host = model, encoding, host
        self._patcher, self._tensors = patcher, tensors

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        self._check()
        for name, tensor in self._tensors.items():
            destination[prefix + name] = from_file(tensor)

    def _check(self) -> None:
        patcher = self._patcher()
        check_owner(patcher, "VAE", "network")
        if patcher.patches:
            raise ValueError(compose(
                "comfyui.vae_weights_changed", title=self.model.spec.title, patches=next(iter(patcher.patches)),
            ))  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                compose("comfyui.vae_part_not_available", title=self.model.spec.title, name=name)
            ) from None

    def decode(self, samples: torch.Tensor, **options: object) -> torch.Tensor:
        """Decode latents `[rows, channels, (frames,) height, width]` to pixels."""
        self._check()
        rows = [run_stage("decode", self.model, self.host, latents={"samples": row[None]}) for row in samples]
        pixels = torch.stack(rows).movedim(-1, 1) * 2.0 - 1.0
        return pixels[:, :, 0] if samples.ndim == 4 else pixels

    def encode(self, pixels: torch.Tensor, **options: object) -> torch.Tensor:
        """Encode pixels `[rows, 3, (frames,) height, width]` to latents; ValueError if the model has no encoder."""
        if self.encoding is None:
            raise ValueError(
                compose("comfyui.vae_encoder_not_in_file", title=self.model.spec.title, model_id=self.model.model_id)
            )
        self._check()
        frames = pixels if pixels.ndim == 5 else pixels.unsqueeze(2)
        rows = [run_stage("latents", self.encoding, self.host, pixels=row[None].clone()) for row in frames]
        return torch.cat(rows)


# --- CLIP_VISION ------------------------------------------------------------------------------------------------------


def load_clip_vision(path: str, precision: str, host: MakeContext) -> "CLIPVision":
    """Return core's CLIP_VISION of an image encoder in a file.

    path: of the file. precision: as a node has it. host: returns the running node's progress.
    """
    specs = [spec for spec in SPECS if spec.core.vision and "image_encoder" in spec.image_encoders]
    return CLIPVision(choose_partial_model(specs, path, precision=precision), host)


class CLIPVision(comfy.clip_vision.ClipVisionModel):
    """Core's CLIP_VISION, which prepares images; its network is ours."""

    def __init__(self, model: ModelRef, host: MakeContext) -> None:
        # Core's own network is not created; `__getattr__` refuses its attributes.
        vision = model.spec.core.vision
        assert vision is not None
        self.states_name = vision.states
        config = json.loads((Path(comfy.clip_vision.__file__).parent / vision.config).read_text("utf-8"))
        image_size = model.resolve(SilentProgress()).configs["image_encoder"]["image_size"]
        self.config = {**config, "image_size": image_size}
        self.image_size, self.model_type = self.config["image_size"], self.config["model_type"]
        self.image_mean = config.get("image_mean", [0.48145466, 0.4578275, 0.40821073])
        self.image_std = config.get("image_std", [0.26862954, 0.26130258, 0.27577711])
        self._model, self._host = model, host

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(compose("comfyui.clip_vision_part_not_available", name=name))

    def get_sd(self) -> dict[str, torch.Tensor]:
        """Return the weights, for saving with a checkpoint's other networks."""
        file = checkpoint.export_network(self._model.locate(), "image_encoder", self._host())
        return {name: from_file(tensor) for name, tensor in file.tensors.items()}

    def load_sd(self, sd: Mapping[str, torch.Tensor]) -> NoReturn:
        raise ValueError(compose("comfyui.clip_vision_weights_changed", title=self._model.spec.title, count=len(sd)))

    def encode_image(self, image: torch.Tensor, crop: bool = True) -> "VisionOutput":
        """Encode images `[rows, height, width, 3]` in 0..1. crop: to the center; otherwise they are stretched."""
        pixels = comfy.clip_model.clip_preprocess(
            image.to(CPU), size=self.image_size, mean=self.image_mean, std=self.image_std, crop=crop
        ).float()
        output = VisionOutput(self.states_name)
        output[self.states_name] = run_stage("look", self._model, self._host, prepared=(pixels,))
        output["image_sizes"] = [pixels.shape[1:]] * len(pixels)
        return output


class VisionOutput(comfy.clip_vision.Output):
    """The output of an image encoder."""

    def __init__(self, gives: str) -> None:
        self.states_name = gives

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(compose("comfyui.vision_output_not_available", states_name=self.states_name, name=name))
