"""Files of control networks. Only headers are read, and values that no shape determines."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import CheckpointError, TensorFile
from ..formats import single_file
from ..formats.file_signature import TensorShapes
from ..formats.single_file import NetworkFile
from ..messages import compose
from ..model_spec import ControlSpec, Json, ModelSpec
from ..models import LAYOUTS, SPECS
from . import checkpoint, file_resolution, virtual_folder

if TYPE_CHECKING:
    from ..programs.upstream_network import Network

# Tensors that are read for `ControlSpec.read_values` may have this many values.
_MOST_VALUES = 2**26


@dataclass(frozen=True, kw_only=True)
class ControlFile:
    """A control network, in a file."""

    spec: ControlSpec
    network: NetworkFile
    config: Json

    @property
    def path(self) -> Path:
        return self.network.path

    @property
    def identity(self) -> str:
        """Return a digest that changes when the file does."""
        return virtual_folder.stat_signature(self.network)

    def match_weights(self, network: "Network") -> dict[str, tuple[TensorFile, ...]]:
        """Return the tensors of each weight of the built network, by name (see `checkpoint.match_weights`)."""
        tensors = virtual_folder.translate_tensors(self.network)
        return checkpoint.match_weights(network, tensors, self.path, self.network)


def read_control(path: str) -> ControlFile:
    """Return the network in a file. Raises `CheckpointError` if it is not a control network of a supported denoiser."""
    try:
        stat = os.stat(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(compose("file.unreadable", path=path, strerror=str(error))) from error
    return _read(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _read(path: str, size: int, modified: int) -> ControlFile:
    kinds = {kind.component.class_name: kind for kind in list_controls(SPECS)}
    networks = single_file.find_networks(Path(path), LAYOUTS)
    known = [network for network in networks if network.layout.class_name in kinds]
    if len(networks) != 1 or not known:
        titles = ", ".join(kind.title for kind in kinds.values())
        class_names = ", ".join(network.layout.class_name for network in networks)
        raise CheckpointError(compose("control.file_of_another_kind", path=path, found=class_names, titles=titles))
    (network,) = known
    spec = kinds[network.layout.class_name]
    tensors, published = virtual_folder.translate_tensors(network), dict(spec.component.config)
    try:
        # Without the config in the file's metadata, which could contradict the tensors.
        derived = network.layout.config(TensorShapes(tensors), published)
    except (ValueError, ZeroDivisionError, TypeError, KeyError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        class_name = spec.component.class_name
        raise CheckpointError(compose("checkpoint.tensor_sizes_wrong", path=path, class_name=class_name)) from error
    return ControlFile(
        spec=spec, network=network, config={**published, **derived, **spec.read_values(tensors, _read_tensor)}
    )


def _read_tensor(tensor: TensorFile) -> object:
    values = 1
    for length in tensor.shape:
        values *= length
    if values > _MOST_VALUES:
        raise CheckpointError(compose(
            "control.tensor_too_large", path=tensor.path, name=tensor.name, shape=tensor.shape, most=_MOST_VALUES,
        ))  # fmt: skip
    return file_resolution.read_tensor(tensor)


def list_controls(specs: Sequence[ModelSpec]) -> list[ControlSpec]:
    """Return the kinds of control networks of these models."""
    return list({id(kind): kind for spec in specs for kind in spec.denoiser.controls}.values())


def check_fits(control: ControlFile, spec: ModelSpec, denoiser: Mapping[str, object]) -> None:
    """Raise `CheckpointError` if a network is not a control network of a denoiser.

    spec, denoiser: the model, and the config of its denoiser.
    """
    if control.spec not in spec.denoiser.controls:
        allowed = ", ".join(kind.title for kind in spec.denoiser.controls) or compose("control.no_kind")
        raise CheckpointError(compose(
            "control.of_another_model", path=control.path, kind=control.spec.title, title=spec.title, allowed=allowed,
        ))  # fmt: skip
    if problem := control.spec.problem(denoiser, control.config):
        raise CheckpointError(compose("control.does_not_fit", path=control.path, title=spec.title, problem=problem))
