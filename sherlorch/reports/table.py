"""The culprits as a table."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from sherlorch.reports.report import DiagnosisReport, kind_of
from sherlorch.source import short


def render(report: DiagnosisReport, tablefmt: str = "simple", **options: Any) -> str:
    """One row for each culprit: number, op, what it made, origin, phase, line, module, cause."""
    rows = [
        {
            "#": number,
            "op": node.name or node.op_name,
            "made": kind_of(node),
            "origin": node.origin,
            "phase": node.phase,
            "line": short(node.location),
            "module": node.module_path or "",
            "cause": report.explanations[node.seq].why,
        }
        for number, node in enumerate(report.culprits, start=1)
    ]
    options.setdefault("headers", "keys")
    if rows and "maxcolwidths" not in options:
        options["maxcolwidths"] = [None] * (len(rows[0]) - 1) + [40]
    return tabulate(rows, tablefmt=tablefmt, **options) if rows else "No non-finite values: no culprits."
