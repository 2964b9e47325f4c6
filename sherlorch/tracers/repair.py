"""A second look at a call with non-finite inputs: is something wrong that they did not cause?

A tensor can hold a harmless Inf in one row while a real fault happens in another. For a pointwise op the
elements that no bad
input touched are looked at; any other op runs again on copies of its inputs with the bad elements repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from sherlorch import health
from sherlorch.health import FLOATING
from sherlorch.tracers.plan import Plan

_OPAQUE = frozenset({"workspace", "reserve", "reserveSpace"})  # bytes that carry bad values past any repair
_HARMLESS = 0.5  # a value at which hardly any function is singular


def newly_bad(plan: Plan, args: Any, kwargs: Any, out: Tensor, old: Mapping[str, Tensor]) -> int:
    """State flags of the elements of `out` that are bad for a reason of this call's own; 0 where there are
    none."""
    if not _can_be_repaired((args, kwargs, out)) or plan.moves:
        return 0
    named = plan.name_arguments(args, kwargs)
    if not _OPAQUE.isdisjoint(named):
        return 0
    written = [name for name, value in named.items() if value is out]
    if written and (_overlaps_itself(out) or not all(name in old for name in written)):
        return 0
    results = {name for position, name, _ in plan.writes if position < 0} | {"out"}
    place = next((name for name in written if name not in results), None)
    inputs = {name: old.get(name, value) for name, value in named.items() if name not in results}
    if plan.has_schema and not results.isdisjoint(named):
        return 0  # the overload cannot run without the memory it writes
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    if plan.pointwise and all(_broadcasts(tensor, out) for tensor in tensors):
        own = _untouched(out, tensors)
    else:
        own = _bad_all_the_same(plan, inputs, kwargs, out, place)
    return own or _bad_this_once(plan, inputs, kwargs, out, place)


@contextmanager
def _random_numbers_kept() -> Iterator[Callable[[], bool]]:
    """Random numbers drawn inside are put back; the value tells whether there were any."""
    before = torch.get_rng_state()

    def drawn() -> bool:
        return not torch.equal(before, torch.get_rng_state())

    try:
        yield drawn
    finally:
        if drawn():
            torch.set_rng_state(before)


def _broadcasts(tensor: Tensor, out: Tensor) -> bool:
    """Does each element of `out` belong to one of `tensor`? (`max` also names a reduction: none does.)"""
    sizes = zip(tensor.shape[::-1], out.shape[::-1])
    return tensor.dim() <= out.dim() and all(size in (1, of_out) for size, of_out in sizes)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Do several elements lie in one place, so that a copy cannot be written as the tensor was?"""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return steps + 1 < tensor.numel()


def _can_be_repaired(value: Any) -> bool:
    """Sparse and nested tensors and those of functorch keep their bad values."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not any(
        isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested or wrapped(leaf))
        for leaf in tree_flatten(value)[0]
    )


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


def _bad_all_the_same(
    plan: Plan, inputs: Mapping[str, Any], kwargs: Any, out: Tensor, written: str | None
) -> int:
    """What is bad without any bad input too."""
    for result in _results_like(out, plan, inputs, kwargs, written, _repaired)[:1]:
        both = _bad(result) & _bad(out)
        return health.scan(result[both]) if bool(both.any()) else 0
    return 0


def _bad_this_once(
    plan: Plan, inputs: Mapping[str, Any], kwargs: Any, out: Tensor, written: str | None
) -> int:
    """What is not bad when the very same is computed again: a faulty kernel, bad memory, a race."""
    bad = _bad(out)
    results = _results_like(out, plan, inputs, kwargs, written, _cloned)
    for result in results:
        bad = bad & ~_bad(result)
    return health.scan(out[bad].contiguous()) if results and bool(bad.any()) else 0


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _results_like(
    out: Tensor,
    plan: Plan,
    inputs: Mapping[str, Any],
    kwargs: Any,
    written: str | None,
    prepare: Callable[[Any], Any],
) -> list[Tensor]:
    """The results that may be `out`, computed again, or the argument of that name which was `written`."""
    prepared = {name: tree_map(prepare, value) for name, value in inputs.items()}
    positional = [value for name, value in prepared.items() if name not in kwargs]
    keywords = {name: value for name, value in prepared.items() if name in kwargs}
    with _random_numbers_kept() as drawn:
        again = plan.func(*positional, **keywords)
        if drawn():
            return []  # nothing random is the same again
    if written is not None:
        again = prepared[written]
    return [
        result
        for result in ([again] if isinstance(again, Tensor) else again or ())
        if isinstance(result, Tensor)
        and result.shape == out.shape
        and result.dtype == out.dtype
        and result.layout is torch.strided
    ]
