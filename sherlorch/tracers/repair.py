"""A second look at a call with non-finite inputs: is something wrong that they did not cause?

A tensor can hold a harmless Inf in one row while a real fault happens in another. For a pointwise op the
elements that no bad
input touched are looked at; any other op runs again on copies of its inputs with the bad elements repaired.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sherlorch import health
from sherlorch.health import FLOATING
from sherlorch.tracers.plan import Plan

_HARMLESS = 0.5  # a value at which hardly any function is singular


def newly_bad(plan: Plan, args: Any, kwargs: Any, out: Tensor, old: Mapping[str, Tensor]) -> int:
    """State flags of the elements of `out` that are bad for a reason of this call's own; 0 where there are
    none."""
    if out.layout is not torch.strided or out.is_nested or plan.moves:
        return 0
    named = plan.name_arguments(args, kwargs)
    written = [name for name, value in named.items() if value is out]
    if written and not all(name in old for name in written):
        return 0
    results = {name for position, name, _ in plan.writes if position < 0}
    inputs = {name: old.get(name, value) for name, value in named.items() if name not in results}
    if plan.pointwise:
        return _untouched(out, [value for value in inputs.values() if isinstance(value, Tensor)])
    return _rerun(plan, inputs, kwargs, out)


def _bad(tensor: Tensor) -> Tensor:
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return ~torch.isfinite(tensor)


def _untouched(out: Tensor, inputs: list[Tensor]) -> int:
    bad = _bad(out)
    for tensor in inputs:
        if tensor.dtype in FLOATING:
            bad = bad & ~_bad(tensor).expand_as(bad)
    return health.scan(out[bad].contiguous()) if bool(bad.any()) else 0


def _repaired(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype not in FLOATING or value.layout is not torch.strided:
        return value.clone()
    return torch.where(_bad(value), torch.full((), _HARMLESS, dtype=value.dtype), value)


def _rerun(plan: Plan, inputs: Mapping[str, Any], kwargs: Any, out: Tensor) -> int:
    positional = [value for name, value in inputs.items() if name not in kwargs]
    keywords = {name: value for name, value in inputs.items() if name in kwargs}
    again = plan.call(*tree_map(_repaired, positional), **tree_map(_repaired, keywords))
    if again is None:
        return 0
    results = [again] if isinstance(again, Tensor) else [item for item in again if isinstance(item, Tensor)]
    for result in results:
        if result.shape == out.shape and result.dtype == out.dtype and result.layout is torch.strided:
            both = _bad(result) & _bad(out)
            return health.scan(result[both]) if bool(both.any()) else 0
    return 0
