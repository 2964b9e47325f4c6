"""A closer look at a result that is not finite: was it meant, what went in, which elements are newly bad."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sherlorch import health
from sherlorch.capture import capture
from sherlorch.evidence import Evidence
from sherlorch.graph import CONSTANT, CONSUMED, GRAPH, LEAF, SCRATCH, Extra, OpFacts, Record, location_of
from sherlorch.health import NAN, NONFINITE
from sherlorch.ops import traits
from sherlorch.source import short
from sherlorch.tracers.arguments import numbers_in
from sherlorch.tracers.plan import Plan
from sherlorch.tracers.repair import newly_bad

Miss = Callable[[OpFacts, BaseException, str], None]
_MOST_RERUNS = 2000
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


class Examiner:
    """Looks at faulty calls."""

    __slots__ = ("_reruns",)

    def __init__(self) -> None:
        self._reruns = 0

    def examine(
        self,
        plan: Plan,
        args: Any,
        kwargs: Any,
        out: Tensor,
        parents: Sequence[Record],
        state: int,
        old: Any,
        miss: Miss,
    ) -> tuple[int, Extra | None]:
        """Look closer at a non-finite result: was it meant, what went in, which elements are newly bad?

        `miss` is told what could not be looked at.
        """
        inputs = 0
        for parent in parents:
            inputs |= parent.bits & NONFINITE
        if plan.moves and inputs:
            return state, None
        born = 0
        if not inputs:
            named = meant(plan, args, kwargs, state)
            if named:
                return state | CONSTANT, Extra(negative=all(value < 0 for value in named))
            if is_scratch(plan, out):
                return state | CONSTANT, Extra(negative=True)  # it may lie there as it was found
        else:
            born = self._newly_bad(plan, args, kwargs, out, old, miss)
            if born and (meant(plan, args, kwargs, born) or is_scratch(plan, out)):
                born = 0
            propagated = inputs & NAN or not state & NAN
            if propagated and not born and not (plan.combines and self._reruns < _MOST_RERUNS):
                return state, None  # a reduction may be where a constant does its damage
        return state, Extra(evidence=_evidence(plan, args, kwargs, out, old, miss), born=born)

    def _newly_bad(self, plan: Plan, args: Any, kwargs: Any, out: Tensor, old: Any, miss: Miss) -> int:
        if plan.random or plan.by_element or self._reruns >= _MOST_RERUNS:
            return 0
        self._reruns += 1
        try:
            with health.unseen(), _quiet():
                return newly_bad(plan, args, kwargs, out, old or {})
        except Exception as problem:
            miss(plan, problem, "a second look at ")
            return 0


def _evidence(plan: Plan, args: Any, kwargs: Any, out: Tensor, old: Any, miss: Miss) -> Evidence | None:
    try:
        with health.unseen(), _quiet():
            return capture(plan.base, plan.name_arguments(args, kwargs), out, old=old or {})
    except Exception as problem:
        miss(plan, problem, "evidence of ")
        return None


def mark_consumed(parents: Iterable[Record], differentiable: bool = False) -> None:
    """A call took these as input; of interest for non-finite ones only."""
    for parent in parents:
        if parent.bits & NONFINITE:
            parent.bits |= CONSUMED | GRAPH if differentiable else CONSUMED


def loses_infinity(plan: OpFacts, bits: int, dtype: torch.dtype) -> bool:
    """Was an infinity cast to integers? A NaN there is a fault all the same."""
    return plan.moves and not bits & NAN and dtype in _INTEGERS


def place_leaves(parents: Sequence[Record], user: Record) -> None:
    """`user` computes with its parents: a bad leaf among them now has its line."""
    for parent in parents:
        seen = parent
        while seen.facts.moves and seen.parents:
            seen = next((p for p in seen.parents if p.bits & NONFINITE), seen.parents[0])
        if user.code is None or not seen.bits & NONFINITE:
            continue
        if seen.bits & LEAF and seen.code is None:
            seen.code, seen.instruction, seen.scope = user.code, user.instruction, user.scope
        elif seen.facts.uninitialised and seen.extra is None:
            seen.extra = Extra(
                f"memory of {seen.facts.base}"
                + (f" at {short(location_of(seen))}" if seen.code is not None else "")
            )
            seen.code, seen.instruction, seen.scope = user.code, user.instruction, user.scope


def meant(plan: Plan, args: Any, kwargs: Any, state: int) -> list[float]:
    """The non-finite values that the program itself named as arguments, if they are what the result holds."""
    named = named_values(plan, (args, kwargs))
    return named if explains(named, state) else []


def named_values(plan: OpFacts, values: Any) -> list[float]:
    """The non-finite numbers among the arguments that a result may hold."""
    if plan.combines:
        return []  # an infinite order of a norm is no value
    return [value for value in numbers_in(values) if value - value != 0]


def explains(named: Sequence[float], state: int) -> bool:
    """Does a call that named these values make such a result on purpose?"""
    return bool(named) and (not state & NAN or any(value != value for value in named))


def is_scratch(plan: OpFacts, out: Tensor) -> bool:
    """Is this what an op hands to its own backward, rather than a result?"""
    return plan.base in traits.HAVE_SCRATCH and out.dim() > 1


def without_scratch(parents: Iterable[Record]) -> tuple[list[Record], int]:
    """The parents that can be to blame, and their bits joined."""
    kept = [parent for parent in parents if not parent.bits & SCRATCH]
    bits = 0
    for parent in kept:
        bits |= parent.bits
    return kept, bits


def takes_bad_number(plan: OpFacts, values: Any) -> bool:
    """May a bad number among the arguments have come out of a tensor?

    An infinity that fills is the program's own.
    """
    named = [value for value in numbers_in(values) if value - value != 0]
    return any(value != value for value in named) or bool(named and not plan.constant and not plan.combines)


@contextmanager
def _quiet() -> Iterator[None]:
    """Computing something again must not warn the user again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def leaf_evidence(tensor: Tensor) -> Evidence:
    """What a bad leaf holds."""
    with health.unseen():
        index = health.first_bad_index(tensor)
        stats = health.describe(tensor, "tensor")
        if index is not None:
            stats = replace(stats, at=health.value_at(tensor, index, tensor.shape))
    return Evidence((), stats, index)


def is_mask(stats: health.TensorStats) -> bool:
    """Only -Inf beside zeros, as in an additive attention mask, or nothing but -Inf."""
    return (
        stats.neginf > 0 and not stats.nan and not stats.posinf and stats.neginf + stats.zeros == stats.numel
    )
