"""The shape of the mesh: all that parameter rules need, so that layouts are decided without devices or JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

AXES = ("dp", "sp", "tp")


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """How many devices lie on each axis.

    `dp` carries batch rows (the two branches of classifier-free guidance), `sp` the token sequence (or image width in a
    VAE), `tp` heads and feed-forward columns.
    """

    dp: int = 1
    sp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.sp, self.tp) < 1:
            raise ValueError(f"mesh {self}: every axis needs at least 1 device.")

    def __str__(self) -> str:
        return f"dp={self.dp} sp={self.sp} tp={self.tp}"

    @property
    def sizes(self) -> Mapping[str, int]:
        return {"dp": self.dp, "sp": self.sp, "tp": self.tp}

    def for_heads(self, heads: int) -> "MeshShape":
        """The same devices, with no more on `tp` than divide the heads; the others share the sequence."""
        tp = math.gcd(self.tp, heads)
        return MeshShape(dp=self.dp, sp=self.sp * (self.tp // tp), tp=tp)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())
