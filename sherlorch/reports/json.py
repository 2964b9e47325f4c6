"""The report as plain data and as strict JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from sherlorch.graph import OpNode
from sherlorch.reports.report import DiagnosisReport, kind_of
from sherlorch.reports.text import verdict
from sherlorch.source import lines_around

SCHEMA = 1
_LINES_AROUND = 4


def to_dict(report: DiagnosisReport) -> dict[str, Any]:
    """Everything the text says; numbers that JSON cannot hold (nan, inf) are strings."""
    data = {
        "schema": SCHEMA,
        "ok": report.ok,
        "target_name": report.target_name,
        "target": node_to_dict(report.target) if report.target is not None else None,
        "culprits": [
            {
                **node_to_dict(culprit),
                "verdict": " ".join(line.strip() for line in verdict(report, culprit)),
                "source": _source(culprit),
                "explanation": asdict(report.explanations[culprit.seq]),
                "path": [node_to_dict(node) for node in report.paths.get(culprit.seq, [])],
                "causes": [node_to_dict(node) for node in report.causes.get(culprit.seq, [])],
            }
            for culprit in report.culprits
        ],
        "also_seen": list(report.also_seen),
        "total_nodes_seen": report.total_nodes_seen,
        "coverage": {**asdict(report.coverage), "not_seen": report.coverage.not_seen},
        "notes": list(report.notes),
        "text": str(report),
    }
    result: dict[str, Any] = plain(data)
    return result


def render(report: DiagnosisReport, **options: Any) -> str:
    """`to_dict` as JSON text."""
    return json.dumps(to_dict(report), **{"allow_nan": False, "indent": 2, **options})


def _source(node: OpNode) -> dict[str, Any] | None:
    first, lines = lines_around(node.location, _LINES_AROUND) if node.location else (0, [])
    return {"first": first, "lines": lines} if lines else None


def node_to_dict(node: OpNode) -> dict[str, Any]:
    """The attributes of a node, what it holds in words, its relatives and its evidence."""
    evidence = node.evidence
    forward = node.forward
    return {
        **node.attributes(),
        "shape": list(node.shape),
        "state": "finite" if node.is_finite else kind_of(node),
        "moves": bool(node._record.facts.moves),
        "parents": [parent.seq for parent in node.parents],
        "forward": forward.seq if forward is not None else None,
        "forward_op": forward.op_name if forward is not None else None,
        "evidence": evidence.to_dict() if evidence is not None else None,
    }


def plain(value: Any) -> Any:
    """`value` in what JSON knows; numbers that it does not know are strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
