"""Table of TPU chips: one record per generation, which kernels, programs, plans and the self-test read."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip. It is one JAX device, except TPU7x: two devices, each with half the peak and bandwidth."""

    generation: str
    device_kind: str  # JAX's name
    peak_tflop_s: float  # bfloat16, per chip
    clock_ghz: float
    hbm_gib: float  # per device, as far as programs may use it: libtpu reports it when a program needs more
    hbm_gb_s: float  # per chip
    vmem_mib: int  # on-chip memory of one core
    # VMEM for XLA's own operations in a denoising step. None: the compiler's default of 16 MiB, with which matrix
    # products are a quarter slower.
    scoped_vmem_mib: int | None = None
    links: int  # to neighbouring chips
    link_gb_s: float  # one direction of one link
    mxu_width: int  # depth of a contraction that fills a matrix unit
    cores: int = 1  # tensor cores of one device: XLA and kernels with a "parallel" grid use all
    devices: int = 1  # JAX devices of one chip
    # Whether libtpu can let a SparseCore gather weights while the tensor cores compute. v5p has SparseCores too, but
    # gathers stay on its tensor cores.
    gathers_on_sparse_core: bool = False
    # Number formats (see `kernels/number_formats.py`) that the matrix units multiply faster than bfloat16, and those
    # whose attention scores save time.
    linear_formats: tuple[str, ...] = ()
    score_formats: tuple[str, ...] = ()
    estimates_kernels: bool = False  # whether libtpu can estimate a kernel's cycles; otherwise its DMA model aborts

    @property
    def clock_hz(self) -> float:
        return self.clock_ghz * 1e9

    @property
    def hbm_bytes(self) -> int:
        """Return the bytes of HBM of one device."""
        return int(self.hbm_gib * 2**30)

    @property
    def flop_per_cycle(self) -> float:
        """Return the bfloat16 peak of one device in one clock cycle."""
        return self.peak_tflop_s * 1e12 / self.devices / self.clock_hz


# Peak, HBM bandwidth: https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}. Links: the same pages and
# https://jax-ml.github.io/scaling-book/tpus (one-way bandwidth per link; 7x: the lower of 90 and 100). MXU width, VMEM
# and cores: jax/_src/pallas/mosaic/tpu_info.py. Usable HBM: errors of libtpu 0.0.42.1. Clock: peak / (FLOP of all
# MXUs per cycle), which agrees with the LLO schedules. int8 attention: v5e has no bfloat16 vector unit, and needs 4.0
# bundles per thousand scores with int8 and 3.9 without (docs/LOG.md). TPU7x has no integer matrix unit.
CHIPS: tuple[Chip, ...] = (
    Chip(
        generation="v4", device_kind="TPU v4", peak_tflop_s=275.0, clock_ghz=1.05, hbm_gib=30.75, hbm_gb_s=1228.0,
        vmem_mib=16, links=6, link_gb_s=45.0, mxu_width=128, cores=2,
    ),
    Chip(
        generation="v5e", device_kind="TPU v5 lite", peak_tflop_s=197.0, clock_ghz=1.5, hbm_gib=15.75, hbm_gb_s=819.0,
        vmem_mib=128, scoped_vmem_mib=64, links=4, link_gb_s=45.0, mxu_width=128,
        linear_formats=("int8",), estimates_kernels=True,
    ),
    Chip(
        generation="v5p", device_kind="TPU v5", peak_tflop_s=459.0, clock_ghz=1.75, hbm_gib=95.74, hbm_gb_s=2765.0,
        vmem_mib=64, links=6, link_gb_s=90.0, mxu_width=128, cores=2,
        estimates_kernels=True,
    ),
    Chip(
        generation="v6e", device_kind="TPU v6 lite", peak_tflop_s=918.0, clock_ghz=1.75, hbm_gib=31.25, hbm_gb_s=1638.0,
        vmem_mib=128, scoped_vmem_mib=64, links=4, link_gb_s=90.0, mxu_width=256, gathers_on_sparse_core=True,
        linear_formats=("int8",), score_formats=("int8",), estimates_kernels=True,
    ),
    Chip(
        generation="tpu7x", device_kind="TPU7x", peak_tflop_s=2307.0, clock_ghz=2.2, hbm_gib=94.75, hbm_gb_s=7380.0,
        vmem_mib=64, links=6, link_gb_s=90.0, mxu_width=256, devices=2, gathers_on_sparse_core=True,
    ),
)  # fmt: skip


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip that JAX calls `device_kind`; None for an unknown chip and for other devices."""
    return next((chip for chip in CHIPS if chip.device_kind == device_kind), None)
