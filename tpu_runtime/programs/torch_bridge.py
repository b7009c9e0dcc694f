"""The only file that uses torchax: upstream torch modules as pure functions of JAX arrays.

`call` runs a torch function on JAX arrays inside a scoped torchax environment. `functional` turns an `nn.Module` into a
pure function of its weights. Nothing is enabled globally: outside these calls torch is plain torch.
"""

import contextlib
import functools
import importlib.metadata
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jaxtyping import PyTree

from .. import versions
from ..messages import compose

_BUILD_LOCK = threading.Lock()
# The release that is patched; requirements.txt pins it. Other releases are imported without the patch.
TORCHAX = "0.0.13"


class _RemovedOperator:
    """Name of an ATen operator (a packet of overloads) that this torch lacks: a key for tables only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"removed:aten.{self.name}"

    def __getattr__(self, overload: str) -> str:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return f"{self!r}.{overload}"


@contextlib.contextmanager
def _name_removed_operators() -> Iterator[None]:
    """Let this thread name operators of `aten` that torch lacks; other threads see torch unchanged.

    torchax 0.0.13 names each operator of its tables when it is imported and when its environment is built. torch 2.13
    dropped the `*dimname*` and `*names*` overloads (google/torchax #102), torch 2.14 the packets `cholesky` and `qr`.
    No torch code can call an operator that its torch lacks, so an inert name in the table is enough.
    """
    thread = threading.get_ident()
    namespace: Any = torch._ops._OpNamespace
    packet: Any = torch._ops.OpOverloadPacket
    get_packet, get_overload = namespace.__getattr__, packet.__getattr__

    def is_named(key: str) -> bool:
        return threading.get_ident() == thread and not key.startswith("__")

    def packet_or_name(self: Any, key: str) -> Any:
        try:
            return get_packet(self, key)
        except AttributeError:
            if self is torch.ops.aten and is_named(key):
                return _RemovedOperator(key)
            raise

    def overload_or_name(self: Any, key: str) -> Any:
        try:
            return get_overload(self, key)
        except AttributeError:
            if str(self).startswith("aten.") and is_named(key):
                return f"removed:{self}.{key}"
            raise

    namespace.__getattr__, packet.__getattr__ = packet_or_name, overload_or_name
    try:
        yield
    finally:
        namespace.__getattr__, packet.__getattr__ = get_packet, get_overload


def _import_torchax() -> tuple[Any, Any]:
    """Return the module torchax and its default environment. One thread at a time may call this."""
    is_known = importlib.metadata.version("torchax") == TORCHAX
    with _name_removed_operators() if is_known else contextlib.nullcontext():
        import torchax
        import torchax.tensor

        return torchax, torchax.default_env()


def _cast_like(self: Any, other: Any) -> Any:
    """Return `self` cast to the dtype of `other`, as a new tensor `[...]`."""
    return type(self)(self._elem.astype(other._elem.dtype), self._env)


def _upsample_nearest(self: Any, size: Any = None, scales: Any = None, *_: Any) -> Any:
    """Return `self` `[..., height, width]` upsampled by whole factors: by repetition, instead of torchax's gathers.

    XLA would gather all shards of an image that is split over chips before it gathers pixels from them.

    size: of the result; None: `scales` are used, the factors of height and width.
    """
    *lead, height, width = self.shape
    target = tuple(size) if size is not None else (int(height * scales[0]), int(width * scales[1]))
    factors = target[0] // height, target[1] // width
    if (height * factors[0], width * factors[1]) != target:
        raise NotImplementedError(compose("program.upsampling_not_whole", height=height, width=width, target=target))
    pixels = jnp.broadcast_to(
        self._elem[..., :, None, :, None], (*lead, height, factors[0], width, factors[1])
    ).reshape(*lead, *target)
    return type(self)(pixels, self._env)


@functools.cache
def _environment() -> Any:
    """Return torchax's environment, built once per process.

    Raises `UnsupportedPackages` if torchax cannot be imported.
    """
    versions.check()
    mha_fastpath = torch.backends.mha.get_fastpath_enabled()
    with _BUILD_LOCK, torch.inference_mode(False):
        torchax, environment = _import_torchax()
    # torch code requests int64, JAX uses int32. This is intended; JAX would warn once per operation.
    warnings.filterwarnings("ignore", message="Explicitly requested dtype int64", category=UserWarning)
    # Importing torchax turns this off for every model in the process.
    torch.backends.mha.set_fastpath_enabled(mha_fastpath)
    # torchax 0.0.13 writes the cast into the receiver and keeps the receiver's torch dtype. Other users of the tensor
    # then see it changed, and convolutions see two dtypes.
    torchax.tensor.Tensor.type_as = _cast_like
    for packet in (torch.ops.aten.upsample_nearest2d, torch.ops.aten._upsample_nearest_exact2d):
        for operation in (packet.default, packet.vec):
            environment.override_op_definition(operation, _upsample_nearest)
    return environment


def to_torch(tree: PyTree) -> PyTree:
    """Return a pytree with its JAX arrays as torch tensors (no copy)."""
    return _environment().j2t_iso(tree)


def to_jax(tree: PyTree) -> PyTree:
    """Return a pytree with its torch views as JAX arrays (no copy)."""
    return _environment().t2j_iso(tree)


def call(function: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
    """Call a torch function on JAX arrays and return JAX arrays. For use under `jax.jit`."""
    environment = _environment()
    with torch.inference_mode(False), torch.no_grad(), environment:
        views, keywords = to_torch((args, kwargs))
        return to_jax(function(*views, **keywords))


class _FunctionModule(torch.nn.Module):
    """Module whose forward is a given function of another module: `functional_call` only knows `forward`."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., PyTree]) -> None:
        super().__init__()
        self.inner = module
        self.function = function

    def forward(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.function(self.inner, *args, **kwargs)


def call_functional(
    module: torch.nn.Module,
    weights: Mapping[str, jax.Array],
    function: Callable[..., PyTree],
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    """Return `function(module, *args, **kwargs)` on JAX arrays, with `weights` `[...]` as the module's parameters.

    Parameters that are missing in `weights` must not be used. Missing buffers are constants of the trace.
    """
    buffers = {name: _constant(buffer) for name, buffer in module.named_buffers() if name not in weights}
    renamed = {f"inner.{name}": weight for name, weight in {**buffers, **weights}.items()}

    def run(weights: dict, args: tuple, kwargs: dict) -> PyTree:
        return torch.func.functional_call(_FunctionModule(module, function), weights, args, kwargs)

    return call(run, renamed, args, kwargs)


def _constant(buffer: torch.Tensor) -> jax.Array:
    """Return a buffer `[...]` as a JAX array."""
    elem = getattr(buffer, "_elem", None)
    return elem if elem is not None else jnp.asarray(buffer.numpy())


def infer_shapes(function: Callable[..., PyTree], *tensors: PyTree) -> PyTree:
    """Return the shapes of the results of a torch function, without computing them. For use inside a traced module."""
    results = jax.eval_shape(lambda *args: _arrays_only(to_jax(function(*to_torch(args)))), *to_jax(tensors))
    return jax.tree.map(lambda x: tuple(x.shape), results)


def _arrays_only(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, tree)


def call_jax(function: Callable[..., PyTree], *tensors: PyTree) -> PyTree:
    """Apply a JAX function to torch views and return torch views. For use inside a traced module."""
    return to_torch(function(*to_jax(tensors)))
