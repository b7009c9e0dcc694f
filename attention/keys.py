"""The keys of a call: one or several runs of them, none of which needs to be copied to stand beside another."""

from dataclasses import dataclass

from jaxtyping import Array, Float, Int


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The first `rows` rows of `keys` and `values` may be real; what follows may hold anything.

    The first `certain` of them are real in every batch row, of the rest those before `length` (None: all).
    """

    keys: Float[Array, "batch kv_seq lanes"]
    values: Float[Array, "batch kv_seq lanes"]
    rows: int
    certain: int
    length: Int[Array, " batch"] | None = None


def first(keys: Array, values: Array, length: int | Int[Array, " batch"], *, certain: int = 0) -> Keys:
    """The first `length` rows, a number or one for each batch row, of which `certain` are known before the trace."""
    if isinstance(length, int):
        return Keys(keys=keys, values=values, rows=length, certain=length)
    return Keys(keys=keys, values=values, rows=keys.shape[1], certain=certain, length=length)
