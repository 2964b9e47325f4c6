"""What a law is, what a group of the table says, and the conditions that only a call's arguments can meet."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Callable

import torch

Arguments = tuple[object, ...]
Keywords = Mapping[str, object]
Condition = Callable[[Arguments, Keywords], bool]


class Law(enum.Enum):
    """What finite inputs promise about a result.  Every tensor input of the call must be known."""

    PERMUTES = "permutes"
    SELECTS = "selects"
    BOUNDED = "bounded"


@dataclass(frozen=True, eq=False)
class Group:
    """Operations that obey one law for one reason.

    `names` are rows at both levels, `functions` at the level of torch functions, methods and getters only,
    `aten` at the level of overloads only (a name of another namespace is written in full: `prims.rev`).
    Names in place (`relu_`) follow from the name without the underscore.
    """

    law: Law
    equation: str
    proof: str
    names: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    overloads_excluded: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)
    condition: Condition | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.law, Law):
            raise TypeError(f"a group's law must be a Law such as Law.SELECTS, got {self.law!r}")
        for rows in (self.names, self.functions, self.aten):
            if not isinstance(rows, tuple) or not all(isinstance(name, str) for name in rows):
                raise TypeError(
                    f"a group's names must be a tuple of str such as ('view', 'reshape'), got {rows!r}"
                )
        if self.condition is not None and not callable(self.condition):
            raise TypeError(
                f"a group's condition must be callable with (args, kwargs), got {self.condition!r}"
            )
        if not self.function_names and not self.aten_names:
            raise ValueError(f"a group must name at least one operation, {self.equation!r} names none")

    @property
    def function_names(self) -> tuple[str, ...]:
        """The rows at the level of torch functions."""
        return self.names + self.functions

    @property
    def aten_names(self) -> tuple[str, ...]:
        """The rows at the level of overloads."""
        return self.names + self.aten


def tensors_in(args: Arguments, kwargs: Keywords) -> list[torch.Tensor]:
    """The tensors of a call, those in lists and tuples included."""
    found: list[torch.Tensor] = []
    _collect(args, found)
    _collect(kwargs.values(), found)
    return found


def _collect(values: Iterable[object], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)


def _numbers(args: Arguments, kwargs: Keywords) -> Iterator[complex]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
            yield value


def same_dtype(args: Arguments, kwargs: Keywords) -> bool:
    """No tensor is promoted: 1e5 as an integer and 1e300 as a 0-d float64 are both Inf beside a float16."""
    return len({tensor.dtype for tensor in tensors_in(args, kwargs)} - {torch.bool}) <= 1


def tensors_only(args: Arguments, kwargs: Keywords) -> bool:
    """No tensor is promoted and no Python number takes part."""
    return same_dtype(args, kwargs) and not any(True for _ in _numbers(args, kwargs))


def numbers_fit(args: Arguments, kwargs: Keywords) -> bool:
    """No tensor is promoted and every Python number is finite in the result's dtype."""
    dtypes = {tensor.dtype for tensor in tensors_in(args, kwargs)} - {torch.bool}
    if len(dtypes) != 1:
        return False
    dtype = dtypes.pop()
    largest = torch.finfo(dtype if dtype.is_floating_point else torch.get_default_dtype()).max
    return all(abs(number) <= largest for number in _numbers(args, kwargs))


def undilated(args: Arguments, kwargs: Keywords) -> bool:
    """A pooling call (input, kernel, stride, padding, dilation, ...) has dilation 1."""
    dilation = args[4] if len(args) > 4 else kwargs.get("dilation", 1)
    return dilation == 1 or (isinstance(dilation, (list, tuple)) and all(step == 1 for step in dilation))


def source_is_tensor(args: Arguments, kwargs: Keywords) -> bool:
    """A scatter call (input, dim, index, source) copies a tensor and reduces nothing."""
    source = args[3] if len(args) > 3 else kwargs.get("src")
    return isinstance(source, torch.Tensor) and len(args) <= 4 and kwargs.get("reduce") is None


def overwrites(args: Arguments, kwargs: Keywords) -> bool:
    """An index_put or put call (the last argument is `accumulate`) writes and does not add."""
    return not (args[3] if len(args) > 3 else kwargs.get("accumulate", False))


def no_renorm(args: Arguments, kwargs: Keywords) -> bool:
    """An embedding call (indices, weight, padding_idx, max_norm, ...) leaves the weight as it is."""
    max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
    return max_norm is None or isinstance(max_norm, bool)
