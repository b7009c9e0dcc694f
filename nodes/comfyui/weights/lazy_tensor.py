"""Weights that stay in their files: core passes them on by name and shape; a computation reads them."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from ....tpu_runtime.checkpoints.file_resolution import read_tensor
from ....tpu_runtime.files import TensorFile
from ....tpu_runtime.messages import compose

CPU = torch.device("cpu")
# Formats that a saved file keeps; quantized ones are saved dequantized.
_KEPT = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Methods of a tensor that do not read its values.
_SHAPES = frozenset(
    getattr(torch.Tensor, name)
    for name in ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "stride")
)
_SAME = frozenset((torch.Tensor.contiguous, torch.Tensor.is_contiguous))
# Methods that return a memory address, which these tensors do not have.
_PLACES = frozenset((torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage))


class LazyTensor(torch.Tensor):
    """A CPU tensor of known shape and format whose values are read from a file at each use."""

    read: Callable[[], torch.Tensor]

    @classmethod
    def from_reader(cls, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Self:
        """Return a tensor of this shape `[...]` and format whose values `read` returns."""
        tensor = torch.Tensor._make_subclass(cls, torch.empty(tuple(shape), dtype=dtype, device="meta"))
        tensor.read = lambda: read().to(dtype)
        return tensor

    @property  # of values, not of the meta tensor below
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return CPU

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            return args[0] if func is torch.Tensor.contiguous else True
        if func in _PLACES:
            raise ValueError(compose("comfyui.weight_not_in_memory", shape=tuple(args[0].shape)))
        if func in _SHAPES or getattr(func, "__name__", "") == "__get__" and func.__self__ is not torch.Tensor.data:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(lambda x: x.read() if isinstance(x, LazyTensor) else x, (args, kwargs))
        return func(*args, **kwargs)


def from_file(tensor: TensorFile) -> LazyTensor:
    """Return a tensor of a file, in the file's format or in bfloat16."""
    return LazyTensor.from_reader(tensor.shape, _KEPT.get(tensor.dtype, torch.bfloat16), lambda: read_tensor(tensor))
