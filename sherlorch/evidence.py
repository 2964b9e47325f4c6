"""What was seen at the moment of a fault. Numbers only: no tensor is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sherlorch.health import Number, TensorStats


@dataclass(frozen=True)
class Evidence:
    """Values of one faulty call: a row per tensor input, one for the result, where it first went wrong."""

    inputs: tuple[TensorStats, ...]
    result: TensorStats
    index: tuple[int, ...] | None = None  # first bad element of the result
    scalars: Mapping[str, Any] = field(default_factory=dict)  # the other arguments: alpha, dim, eps...
    largest: tuple[float, ...] = ()  # reductions, products: largest magnitudes behind the bad element
    smallest: tuple[float, ...] = ()  # and the smallest
    headroom: float | None = None  # true value of the bad element over the largest of its dtype
    notes: tuple[str, ...] = ()
    operands: tuple[Number | None, ...] = ()  # pointwise: what met at `index`, numbers included
    count: int | None = None  # reductions, products: how many elements went into the bad one

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers."""
        return asdict(self)
