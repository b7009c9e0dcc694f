"""Parameter rules: the mesh axes of each dimension of each parameter.

A rule names *logical* axes (`"heads"`, `"mlp"`, `"fsdp"`). One table maps these to mesh axes, so that another strategy
changes one line. Layouts follow from names and shapes, without weights or devices. A parameter without a layout is an
error that names it.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .shape import MeshShape

MIB = 2**20
# Parameters up to this size are replicated without a rule; larger ones need a rule that splits or replicates them.
MAX_UNRULED_BYTES = 1 * MIB
# Maximum size that is replicated if the dimensions of a rule do not divide.
MAX_REPLICATED_BYTES = 64 * MIB

# `fsdp` dimensions are split at rest and gathered just before use (`fsdp_beside_tp` if another dimension is on `tp`);
# `heads` and `mlp` stay split while in use.
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
    """Failure of the rules to lay a parameter out on a mesh."""


REPLICATED: tuple[()] = ()
# Axes and fallbacks of weights that are split over all chips and gathered for use: of one layer, and of scanned blocks.
GATHERED = (("fsdp", None), ((None, "fsdp"),))
BLOCK_GATHERED = ((None, "fsdp", None), ((None, None, "fsdp"),))
# The same with `over`, for weights `[layers, outs, ins]` of products with tokens.
BLOCK_PRODUCT = (*BLOCK_GATHERED, (2,))


@dataclass(frozen=True)
class Rule:
    """Logical axes of the parameters whose name matches a pattern.

    If a dimension does not divide, the fallbacks are tried in order, and then replication up to `MAX_REPLICATED_BYTES`.
    """

    # Dotted name: `*` matches one part of it, `**` any number of parts. Stacked block parameters have a literal `*` as
    # the layer number, and the layer as dimension 0.
    pattern: str
    axes: tuple[str | None, ...]  # one per dimension, None: not split; or `REPLICATED`
    fallbacks: tuple[tuple[str | None, ...], ...] = ()
    # Contracting dimensions of a weight that is only used in products with tokens by `ShardedOps`: it may be int8.
    over: tuple[int, ...] = ()

    def matches(self, name: str) -> bool:
        return re.fullmatch(_regex(self.pattern), name) is not None


@dataclass(frozen=True, kw_only=True)
class Param:
    """Shape and size of a parameter that has no values yet."""

    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Mesh axes of each dimension, as arguments of `jax.sharding.PartitionSpec`; `()` is replicated."""

    at_rest: Entries
    in_use: Entries  # after `fsdp` dimensions are gathered


def _regex(pattern: str) -> str:
    """Return the regular expression of a rule's pattern."""
    parts = [".+" if part == "**" else re.escape(part).replace(r"\*", r"[^.]+") for part in pattern.split(".")]
    return r"\.".join(parts)


def _layout(axes: Sequence[str | None], shape: tuple[int, ...], mesh: MeshShape) -> Layout | None:
    """Return the layout of `shape` by logical `axes`, or None if a dimension does not divide."""
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
    """Return the layout of one parameter by its rule. Raises `ShardingError` if no layout is possible."""
    if rule.axes == REPLICATED:
        return Layout(at_rest=(), in_use=())
    for axes in (rule.axes, *rule.fallbacks):
        if len(axes) != len(param.shape):
            raise ShardingError(
                f"{name} has shape {param.shape}, but the rule {rule.pattern!r} names {len(axes)} dimensions: {axes}."
            )
        if layout := _layout(axes, param.shape, mesh):
            return layout
    if param.size_bytes <= MAX_REPLICATED_BYTES:
        return Layout(at_rest=(), in_use=())
    raise ShardingError(
        f"{name} with shape {param.shape} ({param.size_bytes / MIB:.0f} MiB) cannot be split on the mesh {mesh}: no "
        f"dimension named by {rule.pattern!r} divides, and it is too large to be copied to every chip "
        f"(limit {MAX_REPLICATED_BYTES // MIB} MiB). Use 1, 2, 4 or 8 chips."
    )


def lay_out(params: Mapping[str, Param], rules: Iterable[Rule], mesh: MeshShape) -> dict[str, Layout]:
    """Return the layout of every parameter, by the first rule that matches its name.

    Raises `ShardingError` if a rule matches nothing, if a parameter over `MAX_UNRULED_BYTES` has no rule, or if one
    does not divide and is too large to be replicated.

    params: shapes and sizes by name. rules: in order of priority. mesh: shape of the mesh.
    """
    rules = tuple(rules)
    unused = set(rules)
    layouts: dict[str, Layout] = {}
    for name, param in params.items():
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is not None:
            unused.discard(rule)
            layouts[name] = _place(name, param, rule, mesh)
        elif param.size_bytes <= MAX_UNRULED_BYTES:
            layouts[name] = Layout(at_rest=(), in_use=())
        else:
            raise ShardingError(
                f"no sharding rule matches {name} with shape {param.shape} ({param.size_bytes / MIB:.1f} MiB); "
                f"parameters over {MAX_UNRULED_BYTES // MIB} MiB need one."
            )
    if unused:
        patterns = ", ".join(sorted(rule.pattern for rule in unused))
        raise ShardingError(f"sharding rules that match no parameter: {patterns}.")
    return layouts
