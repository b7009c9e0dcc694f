"""How an attention call is computed: a frozen value that a model's spec chooses, never a branch on its name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from . import tiles

MIB = 2**20
SPILLED_BYTES = 4 * MIB  # registers that the compiler spills: 3 MiB of the largest form
SCORE_BOUND = 100  # in base 2: exponentials of up to 2^27 such scores sum to less than float32's largest number
Maximum = Literal["zero", "sampled", "online"]
Kernel = Literal["auto", "reference", "pallas"]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the kernel goes about a call.

    `maximum` under which exponentials are taken: `"zero"` where scores are bounded, `"sampled"` from the first keys
    (and all again `"online"` for a block of queries that it fails), `"online"`: running. `block_q` queries a grid step,
    in products of `columns` (None: all); `step` keys a step (`online_step` under a running maximum), `unroll` steps a
    turn of the loop. `block_kv`: keys in VMEM at once, None: all. `heads` a grid step; 128 lanes at least.
    """

    maximum: Maximum = "sampled"
    block_q: int = 2048
    step: int = 1024
    unroll: int = 2
    online_step: int = 256
    columns: int | None = None
    block_kv: int | None = None
    heads: int = 1
    single_buffered: bool = False
    vmem_mib: int = 100

    def __post_init__(self) -> None:
        for name in ("block_q", "columns"):
            if (getattr(self, name) or 0) % 128:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of 128.")
        for name in ("step", "online_step", "block_kv"):
            if (getattr(self, name) or 0) % 16:
                raise ValueError(f"{name}={getattr(self, name)} must be a multiple of 16.")
        if self.unroll % 2:
            raise ValueError(f"unroll={self.unroll} must be even: steps alternate between two buffers.")


@dataclass(frozen=True, kw_only=True)
class AttentionPolicy:
    """`kernel`: `"auto"` is the Pallas kernel on a TPU and the reference elsewhere.

    `bounded`: the weights guarantee scores within `SCORE_BOUND` of zero in base 2, so no maximum is needed.
    `form` None: chosen by shape and chip.
    """

    kernel: Kernel = "auto"
    bounded: bool = False
    form: Form | None = None

    def takes_kernel(self, platform: str) -> bool:
        """Whether Pallas kernels run on devices of `platform` (in interpret mode on any but a TPU)."""
        return self.kernel == "pallas" or (self.kernel == "auto" and platform == "tpu")

    def form_for(
        self, device_kind: str, *, q_seq: int, kv_rows: Sequence[int], heads: int, head_dim: int, itemsize: int
    ) -> Form:
        """The fastest form that fits the chip's VMEM: keys whole, then whole without a second buffer, then divided."""
        if self.form is not None:
            return self.form
        wanted = tiles.tiles_for(device_kind, head_dim=head_dim, kv_rows=sum(kv_rows), heads=heads)
        form = Form(maximum="zero" if self.bounded else "sampled", **wanted)
        vmem = tiles.VMEM_MIB.get(device_kind, 16)
        form = replace(form, vmem_mib=vmem - tiles.RESERVED_MIB)
        candidates = list(_candidates(form))
        fitting = (f for f in candidates if vmem_bytes(f, q_seq, kv_rows, head_dim, itemsize) <= form.vmem_mib * MIB)
        # The compiler says if even the last is too much.
        return next(fitting, candidates[-1])


def _candidates(form: Form) -> Iterator[Form]:
    """Forms of falling speed that need ever less VMEM."""
    yield form
    for block_q, step in ((1, 1), (1, 2), (2, 2)):
        yield replace(_smaller(form, block_q, step), single_buffered=True)
    # A rerun needs all keys.
    divided = replace(form, maximum="online" if form.maximum == "sampled" else form.maximum)
    for shrink in (1, 2, 4, 8):
        for block_kv in (16384, 8192, 4096, 2048, 1024):
            yield replace(_smaller(divided, shrink, shrink), block_kv=block_kv)
    yield replace(_smaller(divided, 8, 8), block_kv=512)


def _smaller(form: Form, block_q: int, step: int) -> Form:
    wanted = max(128, form.block_q // block_q)
    columns = form.columns and min(form.columns, wanted)
    return replace(form, block_q=wanted, step=max(128, form.step // step), columns=columns)


def vmem_bytes(form: Form, q_seq: int, kv_rows: Sequence[int], head_dim: int, itemsize: int) -> int:
    """What a form needs of the memory on the chip."""
    width = max(128, form.heads * head_dim)
    block_q = min(form.block_q, tiles.round_up(q_seq, 128))
    rows = [min(kv_rows[0], form.block_kv or kv_rows[0]), *kv_rows[1:]]
    step = min(form.step, max(rows))
    heads = width // head_dim
    buffers = (1 if form.single_buffered else 2) * 2 * sum(rows) * width * itemsize + 4 * block_q * width * itemsize
    lanes = max(128, head_dim)
    held = heads * block_q * ((lanes + 2 * step) * itemsize + 4 * (head_dim + 8))
    if form.maximum != "zero":
        held += heads * block_q * 4 * (32 + 2 * min(form.online_step, step))
    return buffers + held + SPILLED_BYTES
