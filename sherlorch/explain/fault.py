"""What a pattern sees of a fault, and what it says about it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Callable, Union

from sherlorch.capture.names import SWAPPED, plain_name
from sherlorch.evidence import Evidence
from sherlorch.health import TensorStats

# Makers that only hand values on, so the question is who made theirs.
_HOPS = frozenset({
    "", "view", "reshape", "expand", "expand_as", "broadcast_to", "unsqueeze", "squeeze", "t", "transpose",
    "permute", "select", "slice", "index", "index_select", "gather", "getitem", "stack", "cat", "clone",
    "contiguous", "detach", "alias", "copy", "to_copy", "to", "float", "half", "neg", "negative",
})  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One faulty call in its context; every field that is not known keeps its default."""

    op: str  # base name: "div"
    op_name: str  # as reported: "aten.div.Tensor", or "div" at function level
    phase: str  # forward, backward, recompute, optimizer
    origin: str  # introduced, converted, propagated, outside, constant, uninitialised
    has_nan: bool
    has_inf: bool
    dtype: str  # "float16"
    evidence: Evidence | None = None
    forward_op: str | None = None  # base name of the forward op whose derivative this is
    autograd_node: str | None = None  # "SqrtBackward0"
    parents: tuple[str, ...] = ()  # ops that made the inputs, in the order of the inputs; "" for leaves
    grandparents: tuple[str, ...] = ()
    downstream: tuple[str, ...] = ()  # ops from the culprit to the target
    constants: tuple[str, ...] = ()  # infinities written on purpose: "masked_fill at train.py:12"
    leaf: str | None = None  # "parameter model.head.weight", "buffer ...", "argument"
    module: str | None = None
    bounded: bool = False  # finite inputs provably give this op a finite result
    source: str = ""  # the text of the user's line

    @cached_property
    def name(self) -> str:
        """`op` in its one spelling: `_softmax` is softmax, `__rtruediv__` is div, `SqrtBackward0` is sqrt."""
        return plain_name(_forward_of(self.op) if "Backward" in self.op else self.op)

    @cached_property
    def derivative_of(self) -> frozenset[str]:
        """Names of the forward op whose derivative this call is part of; empty in the forward pass."""
        names = {self.forward_op or "", _forward_of(self.autograd_node or ""), _forward_of(self.op)} - {""}
        return frozenset(plain_name(name) for name in names) if self.phase == "backward" else frozenset()

    def differentiates(self, *names: str) -> bool:
        return not self.derivative_of.isdisjoint(names)

    def is_fresh(self, *names: str) -> bool:
        """Whether one of `names` made this itself: it did not come in."""
        return self.name in names and self.origin not in ("propagated", "outside")

    @property
    def zero_meets_inf(self) -> bool:
        sizes = [abs(value) for value in self.operands if value is not None]
        return 0 in sizes and math.inf in sizes

    @property
    def zero_may_meet_inf(self) -> bool:
        """As far as is known: an operand that nobody saw may be either."""
        return self.zero_meets_inf or len(self.operands) < 2 or None in self.operands

    @property
    def backward(self) -> bool:
        return self.phase == "backward"

    @property
    def half(self) -> bool:
        return self.dtype in ("float16", "bfloat16") or self.dtype.startswith("float8")

    @property
    def inputs(self) -> tuple[TensorStats, ...]:
        return self.evidence.inputs if self.evidence else ()

    @property
    def operands(self) -> tuple[float | None, ...]:
        """Operands at the first bad index in mathematical order; a complex one by its magnitude."""
        if self.evidence is None:
            return ()
        found = self.evidence.operands or tuple(row.at for row in self.evidence.inputs)
        return tuple(abs(value) if isinstance(value, complex) else value for value in found)

    def operand(self, position: int) -> float | None:
        return self.operands[position] if position < len(self.operands) else None

    def may_be(self, position: int, holds: Callable[[float], bool]) -> bool:
        """Whether the operand fits as far as is known: one that nobody saw does."""
        value = self.operand(position)
        return value is None or holds(value)

    def may_be_zero(self, position: int) -> bool:
        value, row = self.operand(position), self._row(position)
        if value is None and row is not None and row.numel:
            return row.zeros > 0 or (row.min is None and not row.nonfinite)
        return value is None or value == 0

    def may_vanish(self, position: int) -> bool:
        """Zero as far as is known, or so small that dividing by it overflows."""
        value = self.operand(position)
        return self.may_be_zero(position) or (self.has_inf and value is not None and abs(value) < 1e-18)

    def is_number(self, position: int) -> bool:
        """Whether the operand was a number and no tensor."""
        return self._row(position) is None and self.operand(position) is not None

    def integral(self, position: int) -> bool:
        row = self._row(position)
        return row is not None and ("int" in row.dtype or row.dtype == "bool")

    def _row(self, position: int) -> TensorStats | None:
        place = self._tensor_at(position)
        return self.inputs[place] if place is not None and place < len(self.inputs) else None

    def _tensor_at(self, position: int) -> int | None:
        """Which of the tensor inputs is the operand at `position`."""
        tensors = len(self.inputs) or len(self.parents)
        if self.op in SWAPPED or self.op_name in SWAPPED:
            return 1 - position if tensors > 1 else 0 if position == 1 else None
        return position if position < max(tensors, 1) else None

    def maker(self, position: int) -> str:
        """The op that made the operand at `position`; "" for a leaf or a number."""
        place = self._tensor_at(position)
        made = self.parents[place] if place is not None and place < len(self.parents) else ""
        return plain_name(made)

    def made_by(self, position: int, *names: str) -> bool:
        """Whether one of `names` made the operand, looking through an op that only hands values on."""
        made = self.maker(position)
        if made in names:
            return True
        place = self._tensor_at(position)
        known = place is not None and place < len(self.parents)
        return known and made in _HOPS and self.has_ancestor(*names)

    def has_ancestor(self, *names: str) -> bool:
        return any(plain_name(name) in names for name in (*self.parents, *self.grandparents) if name)

    def later(self, *names: str) -> bool:
        """Whether one of `names` lies between the culprit and the target."""
        return any(plain_name(name) in names for name in self.downstream)

    def scalar(self, *names: str) -> float | None:
        """The first of the named number arguments that the call had."""
        given = self.evidence.scalars if self.evidence else {}
        found = [given[name] for name in names if isinstance(given.get(name), (int, float))]
        return found[0] if found else None

    @property
    def count(self) -> int | None:
        return self.evidence.count if self.evidence else None

    @property
    def row(self) -> tuple[float, ...]:
        """Both ends of what went into the bad element of a reduction or product."""
        return (*self.evidence.largest, *self.evidence.smallest) if self.evidence else ()

    def note(self, *words: str) -> str:
        """The first note that contains every one of `words`, else ""."""
        notes = self.evidence.notes if self.evidence else ()
        return next((note for note in notes if all(word in note for word in words)), "")


def _forward_of(name: str) -> str:
    """`SqrtBackward0`, `softplus_backward` -> sqrt, softplus; "" for what is no derivative."""
    node = re.fullmatch(r"(?:.*::)?(\w+?)Backward\d*", name)
    if node:
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node[1]).lower()
        return snake.replace("log1_p", "log1p")
    kernel = re.fullmatch(r"(\w+?)_backward(?:_\w+)?", name)
    return kernel[1] if kernel else ""


@dataclass(frozen=True)
class Explanation:
    """One sentence of cause and one of remedy, and the name of the pattern that fitted."""

    pattern: str
    why: str
    remedy: str


Text = Union[str, Callable[[Fault], str]]


@dataclass(frozen=True)
class Pattern:
    """A row of the table: a kind of fault, how it is recognised, and what to say."""

    name: str
    when: Callable[[Fault], bool]
    why: Text
    remedy: Text

    def explain(self, fault: Fault) -> Explanation:
        return Explanation(self.name, _said(self.why, fault), _said(self.remedy, fault))


def _said(text: Text, fault: Fault) -> str:
    return text if isinstance(text, str) else text(fault)
