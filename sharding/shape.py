"""Shape of the mesh, all that parameter rules need: layouts are decided without devices or JAX."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

AXES = ("dp", "sp", "tp")


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Number of devices on each axis."""

    dp: int = 1  # batch rows: the two branches of classifier-free guidance
    sp: int = 1  # the token sequence, or image width in a VAE
    tp: int = 1  # heads and feed-forward columns

    def __post_init__(self) -> None:
        if min(self.dp, self.sp, self.tp) < 1:
            raise ValueError(f"mesh {self}: every axis needs at least 1 device.")

    def __str__(self) -> str:
        return f"dp={self.dp} sp={self.sp} tp={self.tp}"

    @property
    def sizes(self) -> Mapping[str, int]:
        return {"dp": self.dp, "sp": self.sp, "tp": self.tp}

    def fit_heads(self, heads: int) -> "MeshShape":
        """Return a shape for the same devices whose `tp` divides `heads`; the other devices share the sequence."""
        tp = math.gcd(self.tp, heads)
        return MeshShape(dp=self.dp, sp=self.sp * (self.tp // tp), tp=tp)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())
