"""Sites with the states of one run become the records that diagnosis and reports know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace

from sherlorch import diagnosis
from sherlorch.checks.site import Site, code_at
from sherlorch.diagnosis import also_seen, earliest
from sherlorch.graph import (
    BACKWARD,
    CONSTANT,
    CONSUMED,
    GRADIENT,
    INHERITED,
    LEAF,
    Extra,
    OpNode,
    Record,
    Scope,
)
from sherlorch.health import NAN, NONFINITE
from sherlorch.reports.report import Coverage, DiagnosisReport, make_report


class Builder:
    """Adds records in the order of the program."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.faults: list[Record] = []
        self.outputs: dict[Record, str] = {}
        self._scopes: dict[tuple[str, str | None], Scope] = {}

    def block(
        self,
        sites: Sequence[Site],
        states: Mapping[int, int],
        extras: Mapping[int, Extra],
        forward: Sequence[Record] = (),
        known: Mapping[int, int] = MappingProxyType({}),
        written: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> list[Record]:
        """Records of one run of a graph.

        `known` maps sites to those of the `forward` run with their value, `written` to those that wrote into
        their inputs.
        """
        block: list[Record] = []
        for index, site in enumerate(sites):
            if index in known and known[index] < len(forward):
                block.append(forward[known[index]])
                continue
            parents = tuple(block[parent] for parent in (*site.parents, *written.get(index, ())))
            state = states.get(index)
            if state is None:
                state = _inherited(site, parents)
            link = forward[site.link] if site.link is not None and site.link < len(forward) else None
            block.append(self.add(site, state, parents, link=link, extra=extras.get(index)))
        return block

    def add(
        self,
        site: Site,
        state: int,
        parents: tuple[Record, ...],
        *,
        link: Record | None = None,
        autograd: str = "",
        extra: Extra | None = None,
        output: str = "",
    ) -> Record:
        """One record; its parents count as consumed, unless the caller of the graph gets them as well."""
        seq = len(self.records) + 1
        code, instruction = code_at(site.location) if site.location else (None, 0)
        record = Record(
            seq,
            seq,
            site.facts,
            site.shape,
            site.dtype,
            site.device,
            self._bits(site, state),
            parents,
            code,
            instruction,
            self._scope(site.phase, site.module),
            link,
            SimpleNamespace(__name__=autograd) if autograd else None,
            extra if extra is not None else Extra(site.leaf) if site.leaf else None,
        )
        self.records.append(record)
        for parent in parents:
            if parent.bits & NONFINITE and parent not in self.outputs:
                parent.bits |= CONSUMED
        if state & NONFINITE:
            self.faults.append(record)
            if output or site.output:
                self.outputs[record] = output or site.output
            elif site.absorbed and not state & NAN:
                record.bits |= CONSUMED
            self._place_leaves(record)
        return record

    def _bits(self, site: Site, state: int) -> int:
        bits = state if site.checked else state | INHERITED
        if site.leaf is not None:
            bits |= LEAF
        if site.phase == BACKWARD:
            bits |= GRADIENT
        if state and site.meant(state):
            bits |= CONSTANT
        return bits

    def _scope(self, phase: str, module: str | None) -> Scope:
        return self._scopes.setdefault((phase, module), Scope(phase, module))

    def _place_leaves(self, user: Record) -> None:
        """A bad leaf has the line of the first op that computes with it."""
        if user.facts.moves or user.code is None:
            return
        for seen in user.parents:
            while seen.facts.moves and seen.parents:
                seen = next((parent for parent in seen.parents if parent.state), seen.parents[0])
            if seen.bits & LEAF and seen.state and seen.code is None:
                seen.code, seen.instruction, seen.scope = user.code, user.instruction, user.scope

    def report(self, coverage: Coverage, notes: tuple[str, ...] = ()) -> DiagnosisReport:
        """On the earliest fault that was not absorbed, as far as its damage reached."""
        fault = earliest(self.faults)
        if fault is None:
            last = self.records[-1] if self.records else None
            return DiagnosisReport(
                OpNode(last) if last is not None and not last.state else None,
                total_nodes_seen=coverage.nodes,
                also_seen=self._harmless(),
                coverage=coverage,
                notes=notes,
            )
        target = self._reached(fault)
        found = diagnosis.diagnose(target)
        return make_report(
            found,
            nodes=coverage.nodes,
            also=also_seen(self.faults, found, self.records),
            coverage=coverage,
            target_name=self.outputs.get(target, ""),
            notes=notes,
        )

    def _harmless(self) -> list[str]:
        if not self.records:
            return []
        nothing = diagnosis.Diagnosis(self.records[-1])
        sightings = also_seen(self.faults, nothing, self.records)
        return make_report(nothing, nodes=0, also=sightings, coverage=Coverage()).also_seen

    def _reached(self, fault: Record) -> Record:
        """Where the damage shows: the first output of its pass that a fault reached, else where it ends."""
        damaged = [fault]
        seen = {fault}
        for record in self.faults:
            if record.seq > fault.seq and not seen.isdisjoint(record.parents):
                seen.add(record)
                if record.scope.phase == fault.scope.phase:
                    damaged.append(record)
        shown = [record for record in damaged if record in self.outputs]
        return min(shown, key=lambda record: _order(self.outputs[record])) if shown else damaged[-1]


def _order(name: str) -> tuple[int, str]:
    """output[2] before output[10]."""
    return len(name), name


def _inherited(site: Site, parents: Sequence[Record]) -> int:
    """The state of a site that nobody looked at."""
    if site.checked:
        return 0
    state = 0 if parents else site.named  # a constant such as full(-inf)
    for parent in parents:
        state |= parent.state
    return state
