"""The operations around a report's paths: what went into them, nearest first."""

from __future__ import annotations

from collections import deque

from sherlorch.graph import OpNode, Record
from sherlorch.reports.report import DiagnosisReport

LIMIT = 2000


def neighbourhood(report: DiagnosisReport, limit: int = LIMIT) -> list[OpNode]:
    """Culprits, paths, causes and their ancestors, in the order of the program; at most `limit` of them."""
    found: dict[Record, None] = {}
    queue = deque(node._record for node in _start(report))
    while queue and len(found) < limit:
        record = queue.popleft()
        if record not in found:
            found[record] = None
            queue.extend(record.parents)
    return [OpNode(record) for record in sorted(found, key=lambda record: record.seq)]


def _start(report: DiagnosisReport) -> list[OpNode]:
    nodes = [*report.culprits, *(parent for culprit in report.culprits for parent in culprit.parents)]
    for culprit in report.culprits:
        path = report.paths.get(culprit.seq, [])
        nodes += [*report.causes.get(culprit.seq, []), *path]
    return [*nodes, *([report.target] if report.target is not None else [])]
