"""Known values of a node's outputs before it runs: numbers, texts, sizes of images, latents and conditionings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from ..declare import Value

# Longest side of an image or latent, and largest batch or number of frames, that is predicted.
MAX_SIDE = 2**16


class NotKnown(Exception):
    """Raised by a rule whose node has outputs that are known only once it has run."""


class Unknown:
    """An output that is known only once its node has run."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = Unknown()


@dataclass(frozen=True, kw_only=True)
class ImageSize:
    """An IMAGE or MASK."""

    height: int  # pixels
    width: int  # pixels
    batch: int = 1  # images


@dataclass(frozen=True, kw_only=True)
class LatentSize:
    """A LATENT, in pixels of the decoded images."""

    height: int  # pixels
    width: int  # pixels
    num_frames: int = 1
    batch: int = 1
    images: int = 0  # encoded images: a video model's frames, an image model's batch; 0 if not encoded from images
    stride: int = 0  # pixels of a side per latent; 0 for the model's own
    is_rescaled: bool = False  # whether samplers scale it from `stride` to the model's own

    def size(self, stride: int) -> tuple[int, int]:
        """Return height and width in latents for a model of `stride` pixels per latent, as its sampler has them."""
        own = self.stride or stride
        sides = (self.height // own, self.width // own)
        if self.is_rescaled and own != stride:
            return round(sides[0] * (own / stride)), round(sides[1] * (own / stride))
        return sides


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """A CONDITIONING of one prompt."""

    pictures: frozenset[str] = frozenset()  # images that nodes add, by the names of their inputs
    references: tuple[LatentSize, ...] = ()  # latents of reference images, in their order


@dataclass(frozen=True, kw_only=True)
class LoaderOutput:
    """A MODEL, CLIP, VAE or CLIP_VISION: an output of a loader, through nodes that change no shape."""

    node_id: str
    kind: str  # the loader's type
    values: Mapping[str, Value]  # its inputs, by name
    output: int  # index of the output
    window: int = 0  # frames that the network gets at once; 0 for all

    @property
    def key(self) -> tuple[str, int]:
        """Return a key that differs between outputs of loaders."""
        return self.node_id, self.output


@dataclass(frozen=True, kw_only=True)
class Guider:
    """A GUIDER."""

    model: LoaderOutput
    conditionings: tuple[Conditioning, ...]  # those that are evaluated in each step


# `None` stands for an input that is absent.
Known: TypeAlias = (
    bool | int | float | str | ImageSize | LatentSize | Conditioning | LoaderOutput | Guider | Unknown | None
)
# A node's outputs in their order; those that are missing are unknown.
Outputs: TypeAlias = tuple[Known, ...]


class Facts(Protocol):
    """Answers about files that a workflow names; None for those that are not known."""

    def image_size(self, name: str) -> ImageSize | None:
        """Return the size of a file that a LoadImage node names."""

    def stride(self, loaded: LoaderOutput) -> int | None:
        """Return the pixels per latent of a side for a MODEL or VAE."""


class NoFacts:
    """`Facts` of no file."""

    def image_size(self, name: str) -> ImageSize | None:
        return None

    def stride(self, loaded: LoaderOutput) -> int | None:
        return None
