"""Parameter rules: which dimension of which parameter is on which mesh axes.

A rule names *logical* axes (`"heads"`, `"mlp"`, `"fsdp"`); one table maps these to mesh axes, so another strategy edits
one line. Everything is decided from names and shapes, without weights or devices, and whatever is not spelled out is an
error that names the parameter.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .shape import MeshShape

MIB = 2**20
# A parameter of up to this size may be copied to every chip; more must be split or be declared replicated.
SMALL_BYTES = 1 * MIB
# The most that a rule's own fallback may replicate.
REPLICATE_BYTES = 64 * MIB

# `fsdp` dimensions are split at rest and gathered just before use (`fsdp_beside_tp` where another dimension is on
# `tp`); `heads` and `mlp` stay split while in use.
LOGICAL_AXES: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("dp", "sp", "tp"),
    "fsdp_beside_tp": ("dp", "sp"),
    "heads": ("tp",),
    "mlp": ("tp",),
    "all_heads": ("dp", "sp", "tp"),
    "all_mlp": ("dp", "sp", "tp"),
    "all_embed": ("dp", "sp", "tp"),
}
GATHERED_AXES = frozenset({"fsdp", "fsdp_beside_tp"})

Entries = tuple[tuple[str, ...] | None, ...]


class ShardingError(ValueError):
    """A parameter that the rules do not lay out on this mesh."""


REPLICATED: tuple[()] = ()
# Layout and fallback of weights, of one layer or of scanned blocks, that are split over all chips and gathered for use.
GATHERED = (("fsdp", None), ((None, "fsdp"),))
BLOCK_GATHERED = ((None, "fsdp", None), ((None, None, "fsdp"),))
# Of weights `[layers, outs, ins]` of products with tokens.
BLOCK_PRODUCT = (*BLOCK_GATHERED, (2,))


@dataclass(frozen=True)
class Rule:
    """Parameters whose name matches `pattern` carry the logical `axes`, one per dimension (`None`: not split).
    `REPLICATED` instead declares that the parameter is replicated.

    In a pattern `*` stands for one dotted part of the name, `**` for any number of them. Stacked block parameters are
    named with a literal `*` for the layer number and have the layer as dimension 0. Where a dimension does not divide,
    `fallbacks` are tried in order, and then replication up to `REPLICATE_BYTES`. `over` are the dimensions over which a
    product with tokens sums, of weights that are only used in such by `DenoiserRun`: these may be int8.
    """

    pattern: str
    axes: tuple[str | None, ...]
    fallbacks: tuple[tuple[str | None, ...], ...] = ()
    over: tuple[int, ...] = ()

    def matches(self, name: str) -> bool:
        return re.fullmatch(_regex(self.pattern), name) is not None


@dataclass(frozen=True, kw_only=True)
class Param:
    """A parameter before it has values."""

    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Mesh axes of each dimension, at rest and in use (after `fsdp` dimensions were gathered); `()` is replicated.

    The entries are what `jax.sharding.PartitionSpec` takes.
    """

    at_rest: Entries
    in_use: Entries


def _regex(pattern: str) -> str:
    parts = [".+" if part == "**" else re.escape(part).replace(r"\*", r"[^.]+") for part in pattern.split(".")]
    return r"\.".join(parts)


def _layout(axes: Sequence[str | None], shape: tuple[int, ...], mesh: MeshShape) -> Layout | None:
    """The layout, or None where a dimension does not divide."""
    at_rest: list[tuple[str, ...] | None] = []
    for dim, axis in zip(shape, axes, strict=True):
        mesh_axes = tuple(name for name in LOGICAL_AXES[axis] if mesh.sizes[name] > 1) if axis else ()
        if dim % math.prod(mesh.sizes[name] for name in mesh_axes):
            return None
        at_rest.append(mesh_axes or None)
    used = [name for entry in at_rest if entry for name in entry]
    if len(used) != len(set(used)):
        raise ShardingError(f"axes {tuple(axes)} put one mesh axis on two dimensions: {at_rest}.")
    in_use = [None if axis in GATHERED_AXES else entry for axis, entry in zip(axes, at_rest, strict=True)]
    return Layout(at_rest=tuple(at_rest), in_use=tuple(in_use))


def _place(name: str, param: Param, rule: Rule, mesh: MeshShape) -> Layout:
    if rule.axes == REPLICATED:
        return Layout(at_rest=(), in_use=())
    for axes in (rule.axes, *rule.fallbacks):
        if len(axes) != len(param.shape):
            raise ShardingError(
                f"{name} has shape {param.shape}, but the rule {rule.pattern!r} names {len(axes)} dimensions: {axes}."
            )
        if layout := _layout(axes, param.shape, mesh):
            return layout
    if param.size_bytes <= REPLICATE_BYTES:
        return Layout(at_rest=(), in_use=())
    raise ShardingError(
        f"{name} with shape {param.shape} ({param.size_bytes / MIB:.0f} MiB) cannot be split on the mesh {mesh}: no "
        f"dimension named by {rule.pattern!r} divides, and it is too large to be copied to every chip "
        f"(limit {REPLICATE_BYTES // MIB} MiB). Use 1, 2, 4 or 8 chips."
    )


def lay_out(params: Mapping[str, Param], rules: Iterable[Rule], mesh: MeshShape) -> dict[str, Layout]:
    """Lays every parameter out by the first rule that matches its name.

    Raises `ShardingError` for a rule that matches nothing, for a parameter over `SMALL_BYTES` without a rule, and for
    one that neither divides nor may be replicated.
    """
    rules = tuple(rules)
    unused = set(rules)
    layouts: dict[str, Layout] = {}
    for name, param in params.items():
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is not None:
            unused.discard(rule)
            layouts[name] = _place(name, param, rule, mesh)
        elif param.size_bytes <= SMALL_BYTES:
            layouts[name] = Layout(at_rest=(), in_use=())
        else:
            raise ShardingError(
                f"no sharding rule matches {name} with shape {param.shape} ({param.size_bytes / MIB:.1f} MiB); "
                f"parameters over {SMALL_BYTES // MIB} MiB need one."
            )
    if unused:
        patterns = ", ".join(sorted(rule.pattern for rule in unused))
        raise ShardingError(f"sharding rules that match no parameter: {patterns}.")
    return layouts
