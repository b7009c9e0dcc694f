"""Core's model patches that run on the TPU, compiled with the denoiser: their loader, checks, and inputs of a call.

Core's own nodes make the patches. They encode images with the VAE that the node has; the network of a patch runs
compiled with the denoiser.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import comfy.latent_formats
import comfy.ldm.lumina.controlnet
import comfy.model_management
import comfy.ops
import comfy.utils
import torch

from ...tpu_runtime.checkpoints.controls import ControlFile, check_fits, read_control
from ...tpu_runtime.messages import compose
from ...tpu_runtime.model_spec import ControlInput
from ...tpu_runtime.models.common import core_inputs
from ...tpu_runtime.models.common.core_inputs import CoreNetwork
from .model_patcher import CorePatcher

_LOADER = "TPUModelPatchLoader"
# Places of core's patches in a network, by the class of the patch; each of its patches is in all of them.
_PLACES: Mapping[str, set[str]] = {
    "ZImageControlPatch": {"noise_refiner", "double_block"},
    "DiffSynthCnetPatch": {"double_block"},
}


def load_patch(path: str) -> CorePatcher:
    """Return core's MODEL_PATCH of a file. Raises `CheckpointError` for a file of another kind."""
    file = read_control(path)
    if file.spec.component.class_name not in _NETWORKS:
        raise ValueError(compose("control.is_a_control_net", path=path, kind=file.spec.title))
    return CorePatcher.later(lambda patcher: patcher.fill(_make_network(file)))


def _make_network(file: ControlFile) -> torch.nn.Module:
    """Return core's network of a file without memory for weights. Core's nodes read the kind of patch from it."""
    network = _NETWORKS[file.spec.component.class_name](file)
    vars(network)["tpu_control"] = file
    network.forward = partial(_refuse_call, file)
    return network


def _refuse_call(file: ControlFile, *args: object) -> NoReturn:
    """Raise ValueError where a MODEL of core's own loader calls the network."""
    raise ValueError(compose("control.model_not_on_tpu", path=file.path, kind=file.spec.title))


def _make_z_image(file: ControlFile) -> torch.nn.Module:
    config = file.config
    return comfy.ldm.lumina.controlnet.ZImage_Control(
        dim=config["dim"], n_heads=config["n_heads"], n_kv_heads=config["n_heads"],
        n_control_layers=len(config["control_layers_places"]),
        additional_in_dim=config["control_in_dim"] - 16,
        refiner_control=config["add_control_noise_refiner"] is not None,
        device=torch.device("meta"), dtype=torch.float32, operations=comfy.ops.disable_weight_init,
    )  # fmt: skip


class BlockWiseNetwork(torch.nn.Module):
    """Stands for core's `QwenImageBlockWiseControlNet`: prepares hints, which are embedded on the TPU."""

    def __init__(self, file: ControlFile) -> None:
        super().__init__()
        self.additional_in_dim = file.config["in_features"] - 64

    def process_input_latent_image(self, latent_image: torch.Tensor) -> torch.Tensor:
        """Return latents `[rows, channels, 1, height, width]` in the denoiser's scale, padded to whole tokens."""
        latents = comfy.latent_formats.Wan21().process_in(latent_image[:, :16])
        return core_inputs.pad_to_patches(torch.cat([latents, latent_image[:, 16:]], dim=1), (1, 2, 2))

    def control_block(self, *args: object) -> NoReturn:
        """Refuse a call by core's own network."""
        _refuse_call(vars(self)["tpu_control"])


_NETWORKS: Mapping[str, Callable[[ControlFile], torch.nn.Module]] = {
    "ZImageControlNetModel": _make_z_image,
    "QwenImageBlockWiseControlNet": BlockWiseNetwork,
}


def list_patches(patches: Mapping[str, Sequence[Any]], network: CoreNetwork) -> list[Any] | None:
    """Return core's patches of control networks, in their order; None if there are others.

    patches: core's `transformer_options["patches"]`. network: the denoiser.
    Raises ValueError for a network of core's own loader, or of another denoiser.
    """
    listed = list({id(patch): patch for place in patches.values() for patch in place}.values())
    for patch in listed:
        places = {place for place, added in patches.items() if any(patch is other for other in added)}
        if _PLACES.get(type(patch).__name__) != places:
            return None
        file = _find_file(patch)
        if file is None:
            raise ValueError(compose("control.of_core_loader", title=network.spec.title, loader=_LOADER))
        check_fits(file, network.spec, network.config)
    return listed


def _find_file(patch: Any) -> ControlFile | None:
    model = getattr(patch.model_patch, "model", None)
    return getattr(model, "tpu_control", None)


def read_inputs(patches: Sequence[Any], x: torch.Tensor) -> tuple[tuple[str, ...], tuple[ControlInput, ...]]:
    """Return the files of patches, and their inputs for a call.

    patches: from `list_patches`. x: the sample `[rows, channels, (1,) height, width]`, before it is padded.
    Images of other sizes than the sample's are scaled and encoded, as core does it, once.
    """
    files, inputs = [], []
    for patch in patches:
        file = _find_file(patch)
        assert file is not None
        _encode_again(patch, x.shape[-2:])
        hint = patch.encoded_image.detach().cpu().float()
        if len(hint) not in (1, len(x)):
            raise ValueError(compose("control.images_differ", path=file.path, images=len(hint), rows=len(x)))
        files.append(str(file.path))
        inputs.append(ControlInput(hint=hint.contiguous().numpy(), strength=float(patch.strength)))
    return tuple(files), tuple(inputs)


def _encode_again(patch: Any, sides: Sequence[int]) -> None:
    """Scale and encode the images of a patch for latents of these `sides`, unless they have that size.

    It is the beginning of the patch's own call. Z-Image's network passes it a sample padded to whole tokens.
    """
    is_z_image = type(patch).__name__ == "ZImageControlPatch"
    stride = patch.vae.spacial_compression_encode()
    height, width = ((side + side % 2 * is_z_image) * stride for side in sides)
    if patch.encoded_image is not None and patch.encoded_image_size == (height, width):
        return

    def scale(image: torch.Tensor | None) -> torch.Tensor | None:
        if image is None:
            return None
        return comfy.utils.common_upscale(image.movedim(-1, 1), width, height, "area", "center").movedim(1, -1)

    loaded = comfy.model_management.loaded_models(only_currently_used=True)
    if is_z_image:
        patch.encoded_image = patch.encode_latent_cond(scale(patch.image), scale(patch.inpaint_image))
    else:
        encoded = patch.encode_latent_cond(scale(patch.image))
        patch.encoded_image = patch.model_patch.model.process_input_latent_image(encoded)
    patch.encoded_image_size = (height, width)
    comfy.model_management.load_models_gpu(loaded)


def select_rows(inputs: Sequence[ControlInput], rows: Sequence[int]) -> tuple[ControlInput, ...]:
    """Return the inputs of some of a call's rows."""
    return tuple(
        entry if len(entry.hint) == 1 else ControlInput(hint=entry.hint[list(rows)], strength=entry.strength)
        for entry in inputs
    )
