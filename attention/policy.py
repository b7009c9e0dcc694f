"""How an attention call is computed: a frozen value that a model's spec chooses, never a branch on its name."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The kernel's tiles in tokens, multiples of 128."""

    block_q: int
    block_kv: int
    block_kv_compute: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv", "block_kv_compute"):
            if getattr(self, name) % 128:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of 128.")
        if self.block_kv % self.block_kv_compute:
            raise ValueError(f"{self.block_kv=} must be a multiple of {self.block_kv_compute=}.")


# By the device's kind. Where a kernel may use 16 MiB of on-chip memory the large tiles do not compile.
SMALL = Tiles(block_q=1024, block_kv=1024, block_kv_compute=512)
BY_DEVICE = {"TPU v6 lite": Tiles(block_q=2048, block_kv=2048, block_kv_compute=1024)}


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy:
    """`kernel`: `"auto"` is the Pallas kernel on a TPU and the reference elsewhere. `tiles` None: the table's."""

    kernel: Literal["auto", "reference", "splash"] = "auto"
    tiles: Tiles | None = None

    def tiles_for(self, device_kind: str) -> Tiles:
        return self.tiles or BY_DEVICE.get(device_kind, SMALL)
