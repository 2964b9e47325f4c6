"""The same call on fewer rows, as long as they show the fault."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor

from sherlorch.replay.call import Repro, comes_back, map_leaves, map_values, run, tensors_in

Cut = Callable[[Any], Any]


def reduced(repro: Repro) -> Repro:
    """The call on the rows that show the fault; the whole call where no cut shows it."""
    outcome = run(repro)
    if not comes_back(repro, outcome):
        return repro
    element = _element(repro)
    if element is not None:
        return element
    for cut in _cuts(repro, outcome.index):
        fewer = replace(repro, args=tuple(map_leaves(cut, repro.args)), kwargs=map_values(cut, repro.kwargs))
        if _shows(fewer):
            return replace(fewer, small=True)
    return repro


def _shows(repro: Repro) -> bool:
    return comes_back(repro, run(repro))


def _cuts(repro: Repro, index: tuple[int, ...] | None) -> Iterator[Cut]:
    """To the bad row under broadcasting; along the first dimension of all tensors of one size, or of one."""
    if not index:
        return
    tensors = [tensor for tensor in tensors_in((repro.args, repro.kwargs)) if _has_rows(tensor)]
    yield partial(_broadcast_row, index=index)
    for size in sorted({tensor.shape[0] for tensor in tensors if tensor.shape[0] > index[0]}, reverse=True):
        yield partial(_row_where, at=index[0], chosen=partial(_has_size, size=size))
    for tensor in tensors:
        if tensor.shape[0] > index[0]:
            yield partial(_row_where, at=index[0], chosen=partial(operator.is_, tensor))


def _has_size(tensor: Tensor, size: int) -> bool:
    return tensor.shape[0] == size


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.dim() > 0


def _row_where(value: Any, at: int, chosen: Callable[[Tensor], bool]) -> Any:
    return value[at : at + 1].clone() if _has_rows(value) and chosen(value) else value


def _broadcast_row(value: Any, index: tuple[int, ...]) -> Any:
    """The last dimension stays whole."""
    if not _has_rows(value):
        return value
    offset = len(index) - value.dim()
    for axis in range(value.dim() - 1):
        at = axis + offset
        if at >= 0 and value.shape[axis] > index[at]:
            value = value.narrow(axis, index[at], 1)
    return value.clone()


def _element(repro: Repro) -> Repro | None:
    """Of a ``_foreach_`` call: the one element of its lists that shows the fault."""
    lists = [value for value in (*repro.args, *repro.kwargs.values()) if isinstance(value, (list, tuple))]
    length = max(map(len, lists), default=0) if "_foreach_" in repro.op else 0
    for i in range(length):
        cut = partial(_element_of, i=i, length=length)
        fewer = replace(
            repro, args=tuple(map(cut, repro.args)), kwargs={k: cut(v) for k, v in repro.kwargs.items()}
        )
        if _shows(fewer):
            return replace(fewer, small=True)
    return None


def _element_of(value: Any, i: int, length: int) -> Any:
    return [value[i]] if isinstance(value, (list, tuple)) and len(value) == length else value
