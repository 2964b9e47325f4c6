"""The report as plain data and as strict JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from sherlorch.graph import OpNode
from sherlorch.reports.report import DiagnosisReport

SCHEMA = 1


def to_dict(report: DiagnosisReport) -> dict[str, Any]:
    """Everything the text says; numbers that JSON cannot hold (nan, inf) are strings."""
    data = {
        "schema": SCHEMA,
        "ok": report.ok,
        "target_name": report.target_name,
        "target": _node(report.target) if report.target is not None else None,
        "culprits": [
            {
                **_node(culprit),
                "explanation": asdict(report.explanations[culprit.seq]),
                "path": [_node(node) for node in report.paths.get(culprit.seq, [])],
                "causes": [_node(node) for node in report.causes.get(culprit.seq, [])],
            }
            for culprit in report.culprits
        ],
        "also_seen": list(report.also_seen),
        "total_nodes_seen": report.total_nodes_seen,
        "coverage": {**asdict(report.coverage), "not_seen": report.coverage.not_seen},
        "notes": list(report.notes),
        "text": str(report),
    }
    plain: dict[str, Any] = _plain(data)
    return plain


def render(report: DiagnosisReport, **options: Any) -> str:
    """`to_dict` as JSON text."""
    return json.dumps(to_dict(report), **{"allow_nan": False, "indent": 2, **options})


def _node(node: OpNode) -> dict[str, Any]:
    evidence = node.evidence
    forward = node.forward
    return {
        **node.attributes(),
        "shape": list(node.shape),
        "parents": [parent.seq for parent in node.parents],
        "forward": forward.seq if forward is not None else None,
        "forward_op": forward.op_name if forward is not None else None,
        "evidence": evidence.to_dict() if evidence is not None else None,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
