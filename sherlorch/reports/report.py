"""`DiagnosisReport`: the answer as data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sherlorch.diagnosis import Diagnosis, Sighting
from sherlorch.errors import SherlorchError
from sherlorch.explain import Explanation, Fault, explain
from sherlorch.graph import OpNode, Record, forward_of, location_of, origin_of
from sherlorch.health import NAN
from sherlorch.ops import traits
from sherlorch.replay import Repro, save
from sherlorch.source import short, text_of


@dataclass
class Coverage:
    """What the tool saw and what it did not: counts of nodes, and each kind of call it could not record."""

    nodes: int = 0
    scanned: int = 0
    inherited: int = 0
    unseen: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def not_seen(self) -> int:
        return sum(self.unseen.values())

    def __str__(self) -> str:
        text = (
            f"{self.nodes} ops: {self.scanned} scanned, {self.inherited} inherited, {self.not_seen} not seen"
        )
        return "; ".join(
            [text, *(f"{count} x {what}" for what, count in list(self.unseen.items())[:3]), *self.notes]
        )


@dataclass
class DiagnosisReport:
    """Culprits of a target tensor, in order of blame, with the way from each to the target.

    `paths` maps a culprit's `seq` to the nodes from the culprit to the target. `target` is None only where
    nothing was traced.
    """

    target: OpNode | None
    culprits: list[OpNode] = field(default_factory=list)
    paths: dict[int, list[OpNode]] = field(default_factory=dict)
    total_nodes_seen: int = 0
    also_seen: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    target_name: str = ""
    causes: dict[int, list[OpNode]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    repro: Repro | None = field(default=None, repr=False)  # the first culprit's call; only a `Guard` has it
    repro_problem: str = ""  # why a `Guard` could not take it

    @property
    def ok(self) -> bool:
        """Is the target finite?"""
        return not self.culprits

    @cached_property
    def explanations(self) -> dict[int, Explanation]:
        """Why and what to try, by the culprit's `seq`."""
        return {culprit.seq: explain(self.fault(culprit)) for culprit in self.culprits}

    def fault(self, culprit: OpNode) -> Fault:
        """What the patterns of `explain` may look at."""
        return _fault_of(
            culprit._record,
            [node._record for node in self.paths.get(culprit.seq, [])],
            self._constants(culprit),
        )

    def _constants(self, culprit: OpNode) -> tuple[str, ...]:
        return tuple(_named(node) for node in self.causes.get(culprit.seq, []))

    def table(self, tablefmt: str = "simple", **options: Any) -> str:
        """The culprits as a table; `tablefmt` and other options go to `tabulate.tabulate`."""
        from sherlorch.reports.table import render

        return render(self, tablefmt=tablefmt, **options)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: everything the text says, under stable names."""
        from sherlorch.reports.json import to_dict

        return to_dict(self)

    def to_json(self, **options: Any) -> str:
        """`to_dict` as strict JSON text; options go to `json.dumps`."""
        from sherlorch.reports.json import render

        return render(self, **options)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no network: text, evidence, and a picture of the way to the target."""
        from sherlorch.reports.html import render

        Path(path).write_text(render(self), encoding="utf-8")

    def to_dot(self) -> str:
        """The paths and what went into them as graphviz text: ``dot -Tsvg`` draws it."""
        from sherlorch.reports.dot import render

        return render(self)

    def save_repro(self, path: str | os.PathLike[str], *, small: bool = False) -> None:
        """Write the first culprit's call to a file for ``sherlorch replay``; `small`: only the bad rows.

        Raises `SherlorchError` where nobody kept its arguments: a trace keeps no tensors, a `Guard` does.
        """
        if self.repro is None:
            problem = self.repro_problem or "a trace keeps no tensors, so the culprit's arguments are gone"
            raise SherlorchError(
                f"no repro to save: {problem}; the report of a `sherlorch.Guard(model, optimizer)` has them"
            )
        save(self.repro, path, small=small)

    def __str__(self) -> str:
        from sherlorch.reports.text import render

        return render(self)

    def _repr_html_(self) -> str:
        from sherlorch.reports.notebook import render

        return render(self)

    def __rich__(self) -> Any:
        from sherlorch.reports.colour import coloured

        return coloured(str(self))


def make_report(
    diagnosis: Diagnosis,
    *,
    nodes: int,
    also: Sequence[Sighting],
    coverage: Coverage,
    target_name: str = "",
    notes: tuple[str, ...] = (),
) -> DiagnosisReport:
    """The report on a diagnosis, in the public types."""
    if diagnosis.left_out:
        notes = (*notes, f"{diagnosis.left_out} further culprits, later ones, are left out")
    return DiagnosisReport(
        target=OpNode(diagnosis.target),
        culprits=[OpNode(record) for record in diagnosis.culprits],
        paths={seq: [OpNode(record) for record in path] for seq, path in diagnosis.paths.items()},
        total_nodes_seen=nodes,
        also_seen=[_sighting_text(sighting) for sighting in also],
        coverage=coverage,
        target_name=target_name,
        causes={seq: [OpNode(record) for record in records] for seq, records in diagnosis.causes.items()},
        notes=notes,
    )


def _sighting_text(sighting: Sighting) -> str:
    node = OpNode(sighting.record)
    times = f" ({sighting.count} times)" if sighting.count > 1 else ""
    return f"{kind_of(node)} from {_named(node)}{times}: {sighting.note}, not blamed"


def kind_of(node: OpNode) -> str:
    """``NaN``, ``Inf`` or ``NaN and Inf``: what a node holds; the sign of Inf where the evidence tells."""
    evidence = node.evidence
    if node.has_nan:
        return "NaN and Inf" if node.has_inf else "NaN"
    if evidence is not None and evidence.result.neginf and not evidence.result.posinf:
        return "-Inf"
    if node._record.extra is not None and node._record.extra.negative:
        return "-Inf"
    return "Inf"


def _named(node: OpNode) -> str:
    where = "" if " at " in node.name else short(node.location)
    what = node.name or traits.root_of(node._record.facts.base)
    return f"{what} at {where}" if where else what


def _root(record: Record | None) -> str:
    return traits.root_of(record.facts.base) if record is not None and record.parents else ""


def _made_by(record: Record) -> Record:
    """The record behind views and copies."""
    while record.facts.moves and len(record.parents) == 1:
        record = record.parents[0]
    return record


_FAR = 200  # steps of a path beyond which nothing explains the culprit


def _until_nan(path: Sequence[Record]) -> list[Record]:
    """What happened to the culprit's value: up to the op that made NaN of an Inf."""
    steps = []
    for record in path[1:_FAR]:
        steps.append(record)
        if record.bits & NAN and not path[0].bits & NAN:
            break
    return steps


def _fault_of(record: Record, path: Sequence[Record], constants: tuple[str, ...]) -> Fault:
    node = OpNode(record)
    forward = forward_of(record)
    makers = [_made_by(parent) for parent in record.parents]
    location = location_of(record)
    return Fault(
        op="an assignment" if node.origin == "constant" and node.name else traits.root_of(record.facts.base),
        op_name=record.facts.name,
        phase=node.phase,
        origin=origin_of(record) or "",
        has_nan=node.has_nan,
        has_inf=node.has_inf,
        dtype=node.dtype.replace("torch.", ""),
        evidence=node.evidence,
        forward_op=traits.root_of(forward.facts.base) if forward is not None else None,
        autograd_node=node.autograd_node,
        parents=tuple(
            traits.root_of(maker.facts.base) if maker.parents or maker.facts.base != "leaf" else ""
            for maker in makers
        ),
        grandparents=tuple(_root(_made_by(parent)) for maker in makers for parent in maker.parents),
        downstream=tuple(traits.root_of(step.facts.base) for step in _until_nan(path)),
        constants=constants,
        leaf=node.name or ("argument" if record.facts.base == "leaf" else None),
        module=node.module_path,
        bounded=bool(getattr(record.facts, "bounded", False)),
        source=text_of(location) if location else "",
    )
