"""Imports torchax, whose tables list ATen operators that newer releases of torch have removed.

torchax 0.0.13 names each operator when it is imported and when its environment is built: an operator that is gone is an
AttributeError there. torch 2.13 dropped the `*dimname*` and `*names*` overloads (google/torchax #102), torch 2.14 the
packets `cholesky` and `qr`. No torch code can call what its torch lacks, so an inert name in the table is enough.
"""

import importlib.metadata
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The release whose tables were looked at. Of another one nothing is renamed: requirements.txt pins this one.
RELEASE = "0.0.13"


class RemovedOperator:
    """An ATen operator (a packet of overloads) that this torch lacks: a key for tables, and nothing to call."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"removed:aten.{self.name}"

    def __getattr__(self, overload: str) -> str:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return f"{self!r}.{overload}"


@contextmanager
def _removed_operators_named() -> Iterator[None]:
    """Lets this thread name operators of `aten` that torch lacks; other threads see torch as it is."""
    thread = threading.get_ident()
    namespace, packet = torch._ops._OpNamespace, torch._ops.OpOverloadPacket
    get_packet, get_overload = namespace.__getattr__, packet.__getattr__

    def is_named(key: str) -> bool:
        return threading.get_ident() == thread and not key.startswith("__")

    def packet_or_name(self: Any, key: str) -> Any:
        try:
            return get_packet(self, key)
        except AttributeError:
            if self is torch.ops.aten and is_named(key):
                return RemovedOperator(key)
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


@contextmanager
def _unchanged() -> Iterator[None]:
    yield


def import_torchax() -> tuple[Any, Any]:
    """Returns the module torchax and its default environment; one thread at a time may call this."""
    is_known = importlib.metadata.version("torchax") == RELEASE
    with _removed_operators_named() if is_known else _unchanged():
        import torchax
        import torchax.tensor

        return torchax, torchax.default_env()
