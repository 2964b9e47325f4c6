"""The arguments of one call, ready to be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sherlorch.capture.names import CASTS, ROWED, SWAPPED, plain_name
from sherlorch.health import Number, value_at

LIST_LIMIT = 8  # tensors of one list that get a row of their own
_NOT_OPERANDS = frozenset({"alpha", "beta", "value", "out", "dtype", "rounding_mode"})


class Call:
    """A call with wrappers taken off its tensors and copies from before for what it overwrote."""

    def __init__(
        self, op: str, arguments: Mapping[str, Any], result: Tensor, old: Mapping[str, Tensor]
    ) -> None:
        self.name = plain_name(op)
        self.notes: list[str] = []
        self.batched = False  # under vmap: shapes are not those that the call's arguments speak of
        self.tensors: list[tuple[str, Tensor | None]] = []  # None: overwritten, and there is no copy
        self._given = result
        self.result = self._plain(result)
        element = _element_of(arguments, result)
        self.arguments = {name: self._take(name, value, old, element) for name, value in arguments.items()}
        values = list(self.arguments.values())
        swapped = op in SWAPPED and len(values) > 1
        self.positional = [values[1], values[0], *values[2:]] if swapped else values
        self._names = list(self.arguments)

    def _take(self, name: str, value: Any, old: Mapping[str, Tensor], element: int | None) -> Any:
        if isinstance(value, Tensor):
            before = old.get(name)
            lost = before is None and _same_memory(value, self._given)
            plain = None if lost else self._plain(value if before is None else before)
            self.tensors.append((name, plain))
            return plain
        if not _has_tensor(value):
            return value
        if element is not None and element < len(value):
            key = f"{name}[{element}]"
            return self._take(key, value[element], {key: old[name], **old} if name in old else old, None)
        if len(value) > LIST_LIMIT:
            self.notes.append(f"{name}: the first {LIST_LIMIT} of {len(value)} tensors")
        return [self._take(f"{name}[{i}]", item, old, None) for i, item in enumerate(value[:LIST_LIMIT])]

    def _plain(self, tensor: Tensor) -> Tensor:
        try:
            return self._unwrapped(tensor)
        except (RuntimeError, NotImplementedError) as error:
            self.notes.append(f"a tensor could not be unwrapped: {type(error).__name__}")
            return tensor

    def _unwrapped(self, tensor: Tensor) -> Tensor:
        functorch = torch._C._functorch
        while functorch.is_functorch_wrapped_tensor(tensor):
            self.batched = self.batched or functorch.is_batchedtensor(tensor)
            tensor = functorch.get_unwrapped(tensor)
        local = getattr(tensor, "_local_tensor", None)
        if isinstance(local, Tensor):  # DTensor: to read all of it would wait for the other ranks
            self.notes.append("a distributed tensor: these are the values of this rank")
            return local
        if tensor.is_nested and tensor.layout is torch.strided:  # it has no shape
            self.notes.append("a nested tensor: its values are shown as one row")
            return torch.cat([part.flatten() for part in tensor.unbind()])
        return tensor.dequantize() if tensor.is_quantized else tensor

    def tensor(self, position: int) -> Tensor | None:
        """The strided tensor at `position` of the arguments in mathematical order."""
        value = self.positional[position] if 0 <= position < len(self.positional) else None
        if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
            return None
        return value

    def argument(self, name: str, position: int) -> Any:
        """By name, or by position where the caller had no name for it (`arg1`)."""
        if name in self.arguments:
            return self.arguments[name]
        if 0 <= position < len(self._names) and self._names[position].startswith("arg"):
            return self.positional[position]
        return None

    def is_pointwise(self) -> bool:
        """By PyTorch's own tag; an op that it does not know counts if its tensors broadcast to the result."""
        if self.name in CASTS:
            return True
        if self.name in ROWED or self.name.endswith("_loss"):
            return False
        packet = getattr(torch.ops.aten, self.name, None)
        if packet is not None:
            return any(torch.Tag.pointwise in getattr(packet, each).tags for each in packet.overloads())
        shape = tuple(self.result.shape)
        return all(_broadcasts(tuple(t.shape), shape) for _, t in self.tensors if t is not None)

    def operands(self, index: tuple[int, ...]) -> tuple[Number | None, ...]:
        """What met at `index`, in mathematical order; None where it is not known."""
        lost = {name for name, tensor in self.tensors if tensor is None}
        shape = tuple(self.result.shape)
        found: list[Number | None] = []
        for name, value in zip(self._names, self.positional):
            if isinstance(value, Tensor):
                found.append(value_at(value, index, shape))
            elif isinstance(value, (int, float, complex)) and not isinstance(value, bool):
                found += [] if name in _NOT_OPERANDS else [value]
            elif value is None and name in lost:
                found.append(None)
        return tuple(found)

    def scalars(self) -> dict[str, Any]:
        """The arguments that are no tensors, small and fit for JSON."""
        plain = {name: _jsonable(value) for name, value in self.arguments.items() if not _has_tensor(value)}
        return {name: value for name, value in plain.items() if value is not None}


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    aligned = zip(reversed(shape), reversed(result))
    return len(shape) <= len(result) and all(size in (1, made) for size, made in aligned)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, Tensor) for item in value)
    return isinstance(value, Tensor)


def _jsonable(value: Any) -> Any:
    """None where there is no short plain form."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= 80 else value[:77] + "..."
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout)):
        return str(value).replace("torch.", "")
    if isinstance(value, (list, tuple)) and len(value) <= LIST_LIMIT:
        items = [_jsonable(item) for item in value]
        return None if None in items else items
    return None


def _same_memory(argument: Tensor, result: Tensor) -> bool:
    if argument is result:
        return True
    try:
        return (
            argument.numel() > 0
            and argument.untyped_storage()._cdata == result.untyped_storage()._cdata
            and argument.storage_offset() == result.storage_offset()
            and argument.shape == result.shape
            and argument.stride() == result.stride()
        )
    except (RuntimeError, NotImplementedError):  # no memory of its own: sparse, nested
        return False


def _element_of(arguments: Mapping[str, Any], result: Tensor) -> int | None:
    """Which element of its lists a `_foreach_` call wrote, where `result` is one; None for other calls."""
    for value in arguments.values():
        if isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, Tensor) and _same_memory(item, result):
                    return i
    return None
