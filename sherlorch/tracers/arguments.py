"""What the arguments of a call are: the tensors in them, the numbers in them, what memory they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from sherlorch.tracers.memory import anchor, geometry, inner_tensors, may_overlap

SCALAR, TENSOR, NESTED, WRAPPER = 0, 1, 2, 3

kinds: dict[type, int] = {
    int: SCALAR, float: SCALAR, bool: SCALAR, complex: SCALAR, str: SCALAR, type(None): SCALAR, torch.dtype:
    SCALAR, torch.device: SCALAR,
    torch.layout: SCALAR, torch.memory_format: SCALAR, torch.Size: SCALAR, slice: NESTED, Tensor: TENSOR,
    torch.nn.Parameter: TENSOR,
    list: NESTED, tuple: NESTED, dict: NESTED,
}  # fmt: skip


def kind_of(cls: type) -> int:
    """SCALAR, TENSOR, NESTED or WRAPPER for the type of an argument, remembered in `kinds`."""
    kind = SCALAR
    if issubclass(cls, Tensor):
        kind = WRAPPER if hasattr(cls, "__tensor_flatten__") else TENSOR
        if issubclass(cls, (UninitializedParameter, UninitializedBuffer, FakeTensor)):
            kind = SCALAR  # it has no memory, or none yet
    elif issubclass(cls, (list, tuple, dict)):
        kind = NESTED
    kinds[cls] = kind
    return kind


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order; of a wrapper those that it consists of."""
    kind = kinds.get(type(value))
    if kind is None:
        kind = kind_of(type(value))
    if kind == TENSOR:
        yield value
    elif kind == NESTED and not isinstance(value, slice):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
    elif kind == NESTED:
        for item in (value.start, value.stop, value.step):
            yield from tensors_in(item)
    elif kind == WRAPPER:
        for item in inner_tensors(value):
            yield from tensors_in(item)


def numbers_in(value: Any) -> Iterator[Any]:
    """Every float and complex number in nested lists, tuples and dicts."""
    if isinstance(value, (float, complex)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers_in(item)


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor; 0 where it has none."""
    held = anchor(tensor)
    return held.untyped_storage()._cdata if held is not None else 0


def share_memory(target: Tensor, others: Any) -> bool:
    """Does a tensor among `others` lie on memory of `target`?"""
    held = anchor(target)
    if held is None:
        return False
    storage = held.untyped_storage()._cdata
    for tensor in tensors_in(others):
        other = anchor(tensor)
        if (
            other is not None
            and other.untyped_storage()._cdata == storage
            and may_overlap(geometry(other), geometry(held))
        ):
            return True
    return False


def version_of(tensor: Tensor) -> int:
    """The version counter; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version
