"""What a notebook shows of a report: the answer, small, with its styles inside."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from sherlorch.reports import html
from sherlorch.reports.json import to_dict
from sherlorch.reports.report import DiagnosisReport

_MOST_CULPRITS = 3


def render(report: DiagnosisReport) -> str:
    """Verdict, evidence, why and what to try of the first culprits, and the whole text folded away."""
    data = to_dict(report)
    culprits = "".join(
        f'<p class="verdict"><b>{escape(culprit["verdict"])}</b></p>{html.excerpt(culprit)}'
        f"{html.evidence_table(culprit['evidence'])}"
        f"<p><b>why</b> {escape(culprit['explanation']['why'])}<br>"
        f"<b>try</b> {escape(culprit['explanation']['remedy'])}</p>"
        for culprit in data["culprits"][:_MOST_CULPRITS]
    )
    if report.ok:
        culprits = f'<p class="verdict"><b>{escape(data["text"].splitlines()[0])}</b></p>'
    style = files("sherlorch.reports").joinpath("notebook.css").read_text(encoding="utf-8")
    return (
        f'<div class="sherlorch-report"><style>{style}</style>{culprits}'
        f"<details><summary>the whole report</summary><pre>{escape(data['text'])}</pre></details></div>"
    )
