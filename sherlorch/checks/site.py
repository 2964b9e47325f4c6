"""One node of a checked graph, as far as a report needs it: plain data that copies and pickles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

from sherlorch.graph import FORWARD, OpFacts
from sherlorch.health import INF, NAN, NONFINITE


class SiteFacts(OpFacts):
    """Facts of the op of a site."""

    __slots__ = ("bounded", "inherits", "root")

    def __init__(
        self, name: str, base: str, root: str, *, inherits: bool = False, bounded: bool = False, **flags: bool
    ) -> None:
        super().__init__(name, base, **flags)
        self.root = root  # the arithmetic, however it was called: "div"
        self.inherits = inherits  # moves data under a law, so finite inputs give a finite result
        self.bounded = bounded


LEAF_FACTS = SiteFacts("leaf", "leaf", "leaf", moves=True)


@dataclass(frozen=True)
class Input:
    """In the arguments of a site: the tensor of its node's input number `position`."""

    position: int


@dataclass
class Site:
    """A node: what it computes from which other sites, and where in the user's program that is written."""

    name: str
    facts: SiteFacts
    parents: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()  # -1 for a size that is not known before the run
    dtype: str = ""
    device: str = ""
    location: str | None = None  # path/file.py:19
    module: str | None = None
    phase: str = FORWARD
    leaf: str | None = None  # what a leaf is called: "parameter model.head.weight", or ""; None for results
    named: int = 0  # NAN and INF that the call's own arguments name
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the call, tensors as `Input`
    checked: bool = False
    output: str = ""  # what the caller of the graph gets as this: "output[0]", "head.weight.grad"
    link: int | None = None  # the forward site whose backward this is
    absorbed: bool = False  # an infinity is, by a mask or an index computed from it, which has no site

    def meant(self, state: int) -> bool:
        """Did the call name such a value itself?"""
        return bool(self.named & NAN if state & NAN else self.named & INF)

    def given(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """The call's arguments by name, with the tensors of this run in their places."""
        return {name: _filled(value, inputs) for name, value in self.arguments.items()}


def _filled(value: Any, inputs: Sequence[Any]) -> Any:
    if isinstance(value, Input):
        return inputs[value.position]
    if isinstance(value, (list, tuple)):
        return [_filled(item, inputs) for item in value]
    return value


def shown(sites: Sequence[Site]) -> frozenset[int]:
    """The checked sites whose values leave the graph, as they are or through unchecked sites."""
    found = set()
    waiting = [place for place, site in enumerate(sites) if site.output]
    while waiting:
        place = waiting.pop()
        if sites[place].checked:
            found.add(place)
        else:
            waiting.extend(sites[place].parents)
    return frozenset(found)


def named_values(value: Any) -> int:
    """NAN and INF flags of the numbers in a call's arguments."""
    if isinstance(value, (float, complex)):
        return 0 if value - value == 0 else NAN if value != value else INF
    if isinstance(value, Mapping):
        value = list(value.values())
    flags = 0
    if isinstance(value, (list, tuple)):
        for item in value:
            flags |= named_values(item)
    return flags & NONFINITE


def _template() -> None: ...


@lru_cache(maxsize=4096)
def code_at(location: str) -> tuple[CodeType, int]:
    """A code object and an offset in it that `source.location_of` turns back into this location."""
    path, _, line = location.rpartition(":")
    return _template.__code__.replace(co_filename=path, co_firstlineno=int(line)), -1
