"""What one run of a checked graph showed, forward and backward; kept only where something was wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from sherlorch.checks.records import Builder
from sherlorch.checks.site import Site, SiteFacts
from sherlorch.compat import get_sequence_nr
from sherlorch.evidence import Evidence
from sherlorch.graph import BACKWARD, Extra, Record

_MOST_LASTING, _MOST_OTHERS = 16, 48
clock = itertools.count()  # what happened first, over all runs


class Run:
    """States of the sites that were bad."""

    def __init__(self) -> None:
        self.time = next(clock)
        self.last = -1  # the site that ran last
        self.start = get_sequence_nr()  # autograd functions of this run have this number or more
        self.states: dict[int, int] = {}
        self.extras: dict[int, Extra] = {}
        self.writers: dict[int, int] = {}  # storage of a bad value, to the site that wrote it last
        self.written: dict[int, list[int]] = {}  # site, to the sites that wrote into its inputs
        self.owners: dict[int, str] = {}  # id of a leaf that wants a gradient, to its name
        self.hooked: set[int] = set()
        self.bad_into: dict[int, list[Gradient]] = {}  # number of an autograd function, to who fed it
        self.gradients: list[Gradient] = []

    @property
    def is_faulty(self) -> bool:
        return bool(self.states or self.gradients)

    @property
    def pattern(self) -> Hashable:
        return frozenset(self.states.items()), tuple((each.site, each.state) for each in self.gradients)

    def lasts(self, shown: frozenset[int]) -> bool:
        """Did anything bad leave the graph?"""
        return not shown.isdisjoint(self.states) or any(gradient.owners for gradient in self.gradients)


class Gradient:
    """One backward function of a site that gave a non-finite gradient, or absorbed one (state 0)."""

    def __init__(self, site: int, name: str, state: int, sources: Sequence[Gradient], came_in: int) -> None:
        self.time = next(clock)
        self.site = site
        self.name = name
        self.state = state
        self.sources = sources  # the functions that its bad gradient came from
        self.came_in = came_in  # state of what came from outside the graph
        self.owners: list[str] = []  # leaves whose gradient this is
        self.evidence: Evidence | None = None


Kept = TypeVar("Kept")


def worth_keeping(
    runs: Iterable[Kept], pattern: Callable[[Kept], Hashable], lasts: Callable[[Kept], bool]
) -> list[Kept]:
    """Of runs in the order of time the first of each pattern, with room of its own for damage that lasts."""
    seen: set[Hashable] = set()
    room = {True: _MOST_LASTING, False: _MOST_OTHERS}
    kept = []
    for run in runs:
        found = pattern(run)
        lasting = lasts(run)
        if found not in seen and room[lasting]:
            room[lasting] -= 1
            seen.add(found)
            kept.append(run)
    return kept


def build(sites: Sequence[Site], runs: Sequence[Run]) -> Builder:
    """Records of all that happened, in the order of time."""
    builder = Builder()
    forward: dict[int, list[Record]] = {}
    backward: dict[int, Record] = {}
    moments = [(run.time, run, gradient) for run in runs for gradient in (None, *run.gradients)]
    for _, run, gradient in sorted(
        moments, key=lambda each: each[2].time if each[2] is not None else each[0]
    ):
        if gradient is None:
            forward[id(run)] = builder.block(sites, run.states, run.extras, written=run.written)
        else:
            record = _add_gradient(builder, sites[gradient.site], gradient, forward[id(run)], backward)
            backward[id(gradient)] = record
    return builder


_INCOMING = Site(
    "gradient",
    SiteFacts("leaf", "leaf", "leaf", moves=True),
    phase=BACKWARD,
    leaf="a gradient from outside the graph",
    checked=True,
)


def _add_gradient(
    builder: Builder, site: Site, gradient: Gradient, forward: Sequence[Record], known: dict[int, Record]
) -> Record:
    of = forward[gradient.site]
    parents = [known[id(source)] for source in gradient.sources if id(source) in known]
    if gradient.came_in:
        parents.append(builder.add(_INCOMING, gradient.came_in, ()))
    parents += [parent for parent in of.parents if parent.state and gradient.state]
    made = Site(
        gradient.name,
        SiteFacts(gradient.name, gradient.name, gradient.name),
        shape=site.shape,
        dtype=site.dtype,
        device=site.device,
        location=site.location,
        module=site.module,
        phase=BACKWARD,
        checked=True,
        output=", ".join(gradient.owners),
    )
    extra = Extra(evidence=gradient.evidence)
    return builder.add(made, gradient.state, tuple(parents), link=of, autograd=gradient.name, extra=extra)
