"""The TPU chips there are, as data: one record a generation, which kernels, programs, plans and the self-test read."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip. A chip is one JAX device, but for TPU7x: two, each with half the peak and bandwidth.

    `hbm_gib` is per device and what libtpu leaves to programs (it names the number when a program asks for too much).
    `vmem_mib` is the on-chip memory of one core, `scoped_vmem_mib` the part of it for XLA's own operations in a
    denoising step: with the compiler's default of 16 MiB, which None is, matrix products are a quarter slower.
    `mxu_width`: how deep a contraction must be to fill a matrix unit. `link_gb_s` is one direction of one link to a
    neighbouring chip. `cores` are the tensor cores of one device: XLA and kernels with a "parallel" grid use them all.
    `gathers_on_sparse_core`: a SparseCore gathers weights while the tensor cores compute, where libtpu is told to; on
    v5p, which has SparseCores too, gathers stay on the tensor cores whatever it is told. `estimates_kernels`: libtpu
    can estimate a kernel's cycles; elsewhere that aborts ("unsupported" in its DMA model).
    """

    generation: str
    device_kind: str
    peak_tflop_s: float  # bfloat16, per chip
    clock_ghz: float
    hbm_gib: float
    hbm_gb_s: float  # per chip
    vmem_mib: int
    scoped_vmem_mib: int | None = None
    links: int
    link_gb_s: float
    mxu_width: int
    cores: int = 1
    devices: int = 1
    gathers_on_sparse_core: bool = False
    estimates_kernels: bool = False

    @property
    def clock_hz(self) -> float:
        return self.clock_ghz * 1e9

    @property
    def hbm_bytes(self) -> int:
        """Per device."""
        return int(self.hbm_gib * 2**30)

    @property
    def flop_per_cycle(self) -> float:
        """The bfloat16 peak of one device in one clock cycle."""
        return self.peak_tflop_s * 1e12 / self.devices / self.clock_hz


# Peak, HBM bandwidth: https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. Links: the same pages and
# https://jax-ml.github.io/scaling-book/tpus (one-way bandwidth per link; 7x: the lower of 90 and 100). MXU width, VMEM
# and cores: jax/_src/pallas/mosaic/tpu_info.py. Usable HBM: the refusals of libtpu 0.0.42.1. Clock: peak / (FLOP of all
# MXUs per cycle), which agrees with the LLO schedules.
CHIPS: tuple[Chip, ...] = (
    Chip(
        generation="v4", device_kind="TPU v4", peak_tflop_s=275.0, clock_ghz=1.05, hbm_gib=30.75, hbm_gb_s=1228.0,
        vmem_mib=16, links=6, link_gb_s=45.0, mxu_width=128, cores=2,
    ),
    Chip(
        generation="v5e", device_kind="TPU v5 lite", peak_tflop_s=197.0, clock_ghz=1.5, hbm_gib=15.75, hbm_gb_s=819.0,
        vmem_mib=128, scoped_vmem_mib=64, links=4, link_gb_s=45.0, mxu_width=128,
        estimates_kernels=True,
    ),
    Chip(
        generation="v5p", device_kind="TPU v5", peak_tflop_s=459.0, clock_ghz=1.75, hbm_gib=95.74, hbm_gb_s=2765.0,
        vmem_mib=64, links=6, link_gb_s=90.0, mxu_width=128, cores=2,
        estimates_kernels=True,
    ),
    Chip(
        generation="v6e", device_kind="TPU v6 lite", peak_tflop_s=918.0, clock_ghz=1.75, hbm_gib=31.25, hbm_gb_s=1638.0,
        vmem_mib=128, scoped_vmem_mib=64, links=4, link_gb_s=90.0, mxu_width=256, gathers_on_sparse_core=True,
        estimates_kernels=True,
    ),
    Chip(
        generation="tpu7x", device_kind="TPU7x", peak_tflop_s=2307.0, clock_ghz=2.2, hbm_gib=94.75, hbm_gb_s=7380.0,
        vmem_mib=64, links=6, link_gb_s=90.0, mxu_width=256, devices=2, gathers_on_sparse_core=True,
    ),
)  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls `device_kind`; None for another, or no TPU."""
    return next((chip for chip in CHIPS if chip.device_kind == device_kind), None)
