"""What was seen at the moment of a fault. Numbers only: no tensor is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from sherlorch.health import Number, TensorStats


@dataclass(frozen=True)
class Evidence:
    """Values of one faulty call: a row for each tensor input, one for the result, and where it first went wrong."""

    inputs: tuple[TensorStats, ...]
    result: TensorStats
    index: Optional[tuple[int, ...]] = None  # first bad element of the result
    scalars: Mapping[str, Any] = field(default_factory=dict)  # the call's other arguments by name (alpha, dim, eps...)
    largest: tuple[float, ...] = ()  # reductions and products: largest magnitudes that went into the bad element
    smallest: tuple[float, ...] = ()  # and the smallest
    headroom: Optional[float] = None  # true value of the bad element over the largest finite value of its dtype
    notes: tuple[str, ...] = ()
    operands: tuple[Optional[Number], ...] = ()  # pointwise: what met at `index`, numbers too, `__rsub__` turned round
    count: Optional[int] = None  # reductions and products: how many elements went into the bad one

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers."""
        return asdict(self)
