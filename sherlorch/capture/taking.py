"""From a faulty call to its `Evidence`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Callable, TypeVar

from torch import Tensor

from sherlorch.capture.call import Call
from sherlorch.capture.names import ALONG
from sherlorch.capture.rows import count_of, terms_of
from sherlorch.capture.truth import headroom_of
from sherlorch.evidence import Evidence
from sherlorch.health import TensorStats, describe, first_bad_index, value_at

EXTREMES = 3  # magnitudes kept from each end of a row
_NONE: Mapping[str, Any] = MappingProxyType({})

T = TypeVar("T")


def capture(
    op: str,
    arguments: Mapping[str, Any],
    result: Tensor,
    *,
    results_name: str = "out",
    old: Mapping[str, Tensor] = _NONE,
    labels: Mapping[str, str] = _NONE,
) -> Evidence:
    """What went into the first bad element of `result`; call it where autograd and modes are off.

    `arguments` come by name and in order, `old` holds copies of those that the call overwrote, `labels` the
    names to print. What cannot be read gets a row without values and a note; nothing is changed or kept.
    """
    call = Call(op, arguments, result, old)
    attempt = _Attempts(call.notes)
    index = attempt("the first bad index", lambda: first_bad_index(call.result))
    pointwise = index is not None and bool(attempt("the kind of op", call.is_pointwise))
    operands = attempt("the operands", lambda: call.operands(index or ())) if pointwise else None
    terms = None if pointwise or call.batched else attempt("the row", lambda: terms_of(call, index))
    largest, smallest = attempt("the extremes", lambda: _extremes(terms)) or ((), ())
    inputs = []
    for name, tensor in call.tensors:
        meets = _has_index(call, tensor, pointwise)
        inputs.append(_row(tensor, labels.get(name, name), call, attempt, index if meets else None))
    return Evidence(
        inputs=tuple(inputs),
        result=_row(call.result, results_name, call, attempt, index),
        index=index,
        scalars=call.scalars(),
        largest=largest,
        smallest=smallest,
        headroom=attempt("the true value", lambda: headroom_of(call, operands or (), terms, index)),
        operands=operands or (),
        count=attempt("the count", lambda: count_of(call, terms)),
        notes=tuple(dict.fromkeys(call.notes)),
    )


class _Attempts:
    """Runs one look at a time; one that fails leaves a note."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def __call__(self, what: str, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except Exception as error:  # tensors come in kinds that nobody has seen
            lines = str(error).splitlines() or [""]
            self._notes.append(f"{what} could not be read: {type(error).__name__}: {lines[0][:120]}")
            return None


def _row(
    tensor: Tensor | None, label: str, call: Call, attempt: _Attempts, index: tuple[int, ...] | None
) -> TensorStats:
    if tensor is None:
        call.notes.append(f"{label} was overwritten by the call; what it held before is not known")
        return TensorStats(label, tuple(call.result.shape), _dtype(call.result))
    shape = attempt(f"the shape of {label}", lambda: _sizes(tensor)) or ()
    row = attempt(label, lambda: replace(describe(tensor, label), shape=shape))
    row = row or TensorStats(label, shape, _dtype(tensor))
    if index is None:
        return row
    at = attempt(f"the value of {label}", lambda: value_at(tensor, index, tuple(call.result.shape)))
    return replace(row, at=at)


def _has_index(call: Call, tensor: Tensor | None, pointwise: bool) -> bool:
    if pointwise or tensor is None or tensor.is_nested:
        return pointwise
    return call.name in ALONG and tensor.shape == call.result.shape


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    """With -1 for a size that is a symbol: ragged, or not known yet."""
    return tuple(size if type(size) is int else -1 for size in tensor.shape)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).replace("torch.", "")


def _extremes(terms: Tensor | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Signed values of largest and of smallest magnitude, the most extreme first."""
    if terms is None or not terms.numel():
        return (), ()
    magnitudes = terms.abs()
    values = magnitudes if terms.is_complex() else terms
    amount = min(EXTREMES, magnitudes.numel())
    largest, smallest = (magnitudes.topk(amount, largest=up).indices for up in (True, False))
    return tuple(values[largest].tolist()), tuple(values[smallest].tolist())
