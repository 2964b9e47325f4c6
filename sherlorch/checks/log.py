"""What compiled graphs reported: one small tensor for each run of a graph, read when someone asks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sherlorch.checks.records import Builder
from sherlorch.checks.runs import clock, worth_keeping
from sherlorch.checks.site import Site, shown
from sherlorch.graph import Extra, OpNode, Record
from sherlorch.health import INF, NAN
from sherlorch.reports.report import Coverage, DiagnosisReport

_WAITING = 512  # flags that may wait on the device before all are looked at in one transfer
_MOST_OPEN = 64  # forward runs that may wait for their backward run


@dataclass
class Table:
    """The sites of one compiled graph, and which entry of its flags belongs to which."""

    sites: list[Site]
    slots: dict[int, int]  # site to entry
    masks: dict[int, int] = field(default_factory=dict)  # site to the entry that is 0 for an additive mask
    known: dict[int, int] = field(
        default_factory=dict
    )  # site to the site of the forward graph with its value
    names: dict[str, int] = field(default_factory=dict)  # node to its site, -1 for a node without one
    sequence: dict[int | None, int] = field(
        default_factory=dict
    )  # number of an autograd function to its site
    forward: Table | None = None  # of a backward graph
    open: deque[Entry] = field(default_factory=lambda: deque(maxlen=_MOST_OPEN))

    @cached_property
    def shown(self) -> frozenset[int]:
        return frozenset(self.slots[place] for place in shown(self.sites) if place in self.slots)

    def states(self, flags: Sequence[float]) -> dict[int, int]:
        return {site: _state(flags[slot]) for site, slot in self.slots.items()}


def _state(largest: float) -> int:
    return NAN if math.isnan(largest) else INF if math.isinf(largest) else 0


class Entry:
    """One run of a compiled graph. `flags` holds the largest magnitude that each checked node had."""

    __slots__ = ("flags", "forward", "pattern", "table", "time", "values")

    def __init__(self, table: Table, flags: Tensor, forward: Entry | None) -> None:
        self.time = next(clock)
        self.table = table
        self.flags = flags
        self.forward = forward
        self.pattern: tuple[int, ...] = ()  # state of each entry of the flags
        self.values: list[float] | None = None

    def read(self) -> list[float]:
        if self.values is None:
            self.values = self.flags.tolist()
        return self.values


class Log:
    """Every run since the last reset that may have been bad."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.clear()

    def clear(self) -> None:
        self._waiting: list[Entry] = []
        self._bad: list[Entry] = []
        self.runs = 0
        self.checks = 0
        self.nodes = 0

    def add(self, table: Table, flags: Tensor) -> None:
        """A graph has run; nothing is read yet."""
        forward = None
        if table.forward is not None and table.forward.open:
            forward = table.forward.open.pop()
        entry = Entry(table, flags, forward)
        if table.forward is None:
            table.open.append(entry)
        self._waiting.append(entry)
        if len(self._waiting) >= _WAITING:
            self._read()

    def _read(self) -> None:
        """Look at all waiting flags, with one transfer for each graph."""
        waiting, self._waiting = self._waiting, []
        groups: dict[int, list[Entry]] = {}
        for entry in waiting:
            self.runs += 1
            self.checks += len(entry.table.slots)
            self.nodes += len(entry.table.sites) - len(entry.table.known)
            groups.setdefault(id(entry.table), []).append(entry)
        for group in groups.values():
            flags = torch.stack([entry.flags for entry in group])
            for entry, states in zip(group, (flags.isnan() * NAN + flags.isinf() * INF).tolist()):
                entry.pattern = tuple(states)
                self._bad += [entry] if any(states) else []
        self._bad = worth_keeping(
            sorted(self._bad, key=lambda entry: entry.time),
            lambda entry: (id(entry.table), entry.pattern),
            lambda entry: any(entry.pattern[slot] for slot in entry.table.shown),
        )

    def report(self) -> DiagnosisReport:
        self._read()
        builder = Builder()
        done: dict[int, list[Record]] = {}
        largest: dict[Record, float] = {}
        for entry in self._bad:
            self._records(builder, entry, done, largest)
        coverage = Coverage(self.nodes, self.checks, self.nodes - self.checks)
        graphs = f"{self.runs} runs of {len(self.tables)} compiled graphs, nothing outside of them"
        coverage.notes = (graphs if self.runs else "no compiled graph has run yet",)
        report = builder.report(coverage)
        report.notes = _magnitudes(report, largest)
        return report

    def _records(
        self, builder: Builder, entry: Entry, done: dict[int, list[Record]], largest: dict[Record, float]
    ) -> list[Record]:
        known = done.get(id(entry))
        if known is not None:
            return known
        forward: Sequence[Record] = ()
        if entry.forward is not None:
            forward = self._records(builder, entry.forward, done, largest)
        table = entry.table
        flags = entry.read()
        extras = {
            place: Extra(table.sites[place].leaf or "", mask=flags[slot] == 0)
            for place, slot in table.masks.items()
        }
        block = builder.block(table.sites, table.states(flags), extras, forward, table.known)
        largest.update((block[place], flags[slot]) for place, slot in table.slots.items())
        done[id(entry)] = block
        return block


def _magnitudes(report: DiagnosisReport, largest: Mapping[Record, float]) -> tuple[str, ...]:
    """What a compiled graph has for evidence: how large the values were that went into the first culprit."""
    found = []
    for culprit in report.culprits[:1]:
        for parent in culprit._record.parents:
            while parent not in largest and len(parent.parents) == 1:
                parent = parent.parents[0]
            if math.isfinite(largest.get(parent, math.inf)):
                found.append(f"{OpNode(parent).name or parent.facts.base} {largest[parent]:.3g}")
    return (
        (f"largest magnitudes that went into {report.culprits[0].op_name}: " + ", ".join(found),)
        if found
        else ()
    )
