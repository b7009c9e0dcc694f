"""The one file that uses torchax: upstream torch modules as pure functions of JAX arrays.

`call` runs a torch function on JAX arrays inside a scoped torchax environment, `functional` turns an `nn.Module`
into a pure function of its weights. Nothing is enabled globally: outside these calls torch is plain torch.
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

from .. import versions

_BUILD_LOCK = threading.Lock()
# The release that is mended; requirements.txt pins it. For the tables of another nothing is named.
TORCHAX = "0.0.13"


class _RemovedOperator:
    """An ATen operator (a packet of overloads) that this torch lacks: a key for tables, and nothing to call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"removed:aten.{self.name}"

    def __getattr__(self, overload: str) -> str:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return f"{self!r}.{overload}"


@contextlib.contextmanager
def _removed_operators_named() -> Iterator[None]:
    """Lets this thread name operators of `aten` that torch lacks; other threads see torch as it is.

    torchax 0.0.13 names each operator of its tables when it is imported and when its environment is built. torch 2.13
    dropped the `*dimname*` and `*names*` overloads (google/torchax #102), torch 2.14 the packets `cholesky` and `qr`.
    No torch code can call what its torch lacks, so an inert name in the table is enough.
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
    """Returns the module torchax and its default environment; one thread at a time may call this."""
    is_known = importlib.metadata.version("torchax") == TORCHAX
    with _removed_operators_named() if is_known else contextlib.nullcontext():
        import torchax
        import torchax.tensor

        return torchax, torchax.default_env()


def _type_as(self: Any, other: Any) -> Any:
    return type(self)(self._elem.astype(other._elem.dtype), self._env)


def _upsample_nearest(self: Any, size: Any = None, scales: Any = None, *_: Any) -> Any:
    """Nearest upsampling of `[..., height, width]` by whole factors: repeats, where torchax's own gathers.

    XLA gathers all shards of an image that is split over chips before it gathers pixels from them.
    """
    *lead, height, width = self.shape
    wanted = tuple(size) if size is not None else (int(height * scales[0]), int(width * scales[1]))
    factors = wanted[0] // height, wanted[1] // width
    if (height * factors[0], width * factors[1]) != wanted:
        raise NotImplementedError(f"nearest upsampling from {height}x{width} to {wanted} is not by whole factors.")
    pixels = jnp.broadcast_to(
        self._elem[..., :, None, :, None], (*lead, height, factors[0], width, factors[1])
    ).reshape(*lead, *wanted)
    return type(self)(pixels, self._env)


@functools.cache
def _environment() -> Any:
    """torchax's environment, built once per process. Raises `UnsupportedPackages` where torchax cannot be imported."""
    versions.check()
    mha_fastpath = torch.backends.mha.get_fastpath_enabled()
    with _BUILD_LOCK, torch.inference_mode(False):
        torchax, environment = _import_torchax()
    # torch code asks for int64, JAX has int32: meant so, and said once per operation otherwise.
    warnings.filterwarnings("ignore", message="Explicitly requested dtype int64", category=UserWarning)
    # Importing torchax turns this off for every model in the process.
    torch.backends.mha.set_fastpath_enabled(mha_fastpath)
    # torchax 0.0.13 writes the cast into the receiver and keeps the receiver's torch dtype: the argument of the cast
    # changes under its other users, and convolutions then see two dtypes.
    torchax.tensor.Tensor.type_as = _type_as
    for packet in (torch.ops.aten.upsample_nearest2d, torch.ops.aten._upsample_nearest_exact2d):
        for operation in (packet.default, packet.vec):
            environment.override_op_definition(operation, _upsample_nearest)
    return environment


def to_torch(tree: Any) -> Any:
    """JAX arrays in a pytree, seen as torch tensors (no copy)."""
    return _environment().j2t_iso(tree)


def to_jax(tree: Any) -> Any:
    """Torch views in a pytree, seen as JAX arrays (no copy)."""
    return _environment().t2j_iso(tree)


def call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls a torch function on JAX arrays and returns JAX arrays; to be traced under `jax.jit`."""
    environment = _environment()
    with torch.inference_mode(False), torch.no_grad(), environment:
        views, keywords = to_torch((args, kwargs))
        return to_jax(function(*views, **keywords))


class _Called(torch.nn.Module):
    """A module whose forward is a given function of another module: `functional_call` only knows `forward`."""

    def __init__(self, module: torch.nn.Module, function: Callable) -> None:
        super().__init__()
        self.inner = module
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.inner, *args, **kwargs)


def functional(
    module: torch.nn.Module, weights: Mapping[str, jax.Array], function: Callable, *args: Any, **kwargs: Any
) -> Any:
    """`function(module, *args, **kwargs)` on JAX arrays, with `weights` in place of the module's parameters, by name.

    Parameters that are not given must not be used. Buffers that are not given are constants of the trace.
    """
    buffers = {name: _constant(buffer) for name, buffer in module.named_buffers() if name not in weights}
    renamed = {f"inner.{name}": weight for name, weight in {**buffers, **weights}.items()}

    def run(weights: dict, args: tuple, kwargs: dict) -> Any:
        return torch.func.functional_call(_Called(module, function), weights, args, kwargs)

    return call(run, renamed, args, kwargs)


def _constant(buffer: torch.Tensor) -> jax.Array:
    elem = getattr(buffer, "_elem", None)
    return elem if elem is not None else jnp.asarray(buffer.numpy())


def shapes(function: Callable, *tensors: Any) -> Any:
    """For use inside a traced module: the shapes of what a torch function would return, without computing it."""
    found = jax.eval_shape(lambda *args: _arrays_only(to_jax(function(*to_torch(args)))), *to_jax(tensors))
    return jax.tree.map(lambda x: tuple(x.shape), found)


def _arrays_only(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, tree)


def call_jax(function: Callable, *tensors: Any) -> Any:
    """For use inside a traced module: applies a JAX function to torch views and returns torch views."""
    return to_torch(function(*to_jax(tensors)))
