"""The report as one page that needs nothing else, readable on a phone and in the dark."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from sherlorch.reports import picture
from sherlorch.reports.json import node_to_dict, plain, to_dict
from sherlorch.reports.neighbourhood import neighbourhood
from sherlorch.reports.picture import Node
from sherlorch.reports.report import DiagnosisReport

_MOST_CULPRITS = 5
_COLUMNS = ("tensor", "shape", "dtype", "min", "max", "zeros", "nan", "+inf", "-inf", "at")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render(report: DiagnosisReport) -> str:
    """The page of a report, with the operations around it."""
    return page(to_dict(report), [plain(node_to_dict(node)) for node in neighbourhood(report)])


def page(data: dict[str, Any], nodes: Sequence[Node] = ()) -> str:
    """The page of a report's data; without `nodes` it knows those of the paths only."""
    culprits = data["culprits"]
    known = _known(culprits, nodes)
    shown = [
        _culprit(culprit, data, known, number) for number, culprit in enumerate(culprits[:_MOST_CULPRITS], 1)
    ]
    title = culprits[0]["verdict"] if culprits else data["text"].split("\n")[0]
    body = "".join(
        [*shown, _rest(culprits[_MOST_CULPRITS:]), _closing(data), _operations(known), _as_text(data)]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body>"
        f'<main><p class="brand">sherlorch</p>{"" if culprits else _healthy(title)}{body}</main>'
        '<aside id="details" aria-live="polite"><p class="hint">Click an operation to see what it held.</p>'
        "</aside>"
        f'<script type="application/json" id="nodes">{_script_data(known)}</script>'
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("sherlorch.reports").joinpath(name).read_text(encoding="utf-8")


def _known(culprits: Iterable[dict[str, Any]], nodes: Iterable[Node]) -> dict[int, Node]:
    known = {node["seq"]: node for node in nodes}
    for culprit in culprits:
        for node in (*culprit["path"], *culprit["causes"]):
            known.setdefault(node["seq"], node)
    return dict(sorted(known.items()))


def _script_data(known: dict[int, Node]) -> str:
    """JSON that no text in it can close the script element of."""
    kept = {
        seq: {key: value for key, value in node.items() if value not in (None, "", []) and key != "seq"}
        for seq, node in known.items()
    }
    return json.dumps(kept, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")


def _healthy(title: str) -> str:
    return f'<section><h1 class="verdict ok">{escape(title)}</h1></section>'


def _culprit(culprit: dict[str, Any], data: dict[str, Any], known: dict[int, Node], number: int) -> str:
    svg, drawn = picture.draw(culprit, data.get("target_name", ""), known)
    for node in drawn:
        known.setdefault(node["seq"], node)
    heading = "h1" if number == 1 else "h2"
    count = f'<p class="count">culprit {number}</p>' if number > 1 else ""
    explanation = culprit["explanation"]
    return (
        f'<section class="culprit">{count}'
        f'<{heading} class="verdict {picture.kind(culprit)}">{_marked(culprit["verdict"])}</{heading}>'
        f"{excerpt(culprit)}{evidence_table(culprit.get('evidence'))}"
        f'<dl class="reasons"><dt>why</dt><dd>{_marked(explanation["why"])}</dd>'
        f"<dt>try</dt><dd>{_marked(explanation['remedy'])}</dd></dl>"
        f'<figure><figcaption>{_legend()}</figcaption><div class="scroll">{svg}</div></figure></section>'
    )


def _marked(text: str) -> str:
    """Escaped text; what stands in backticks is code."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def excerpt(culprit: dict[str, Any]) -> str:
    """The lines of source around the culprit's, which is marked; empty where they are not known."""
    source = culprit.get("source")
    if not source:
        return ""
    location = culprit.get("location") or ""
    here = int(location.rpartition(":")[2] or 0)
    lines = "".join(
        f'<span class="line{" here" if number == here else ""}"><span class="number">{number}</span>'
        f'<span class="code">{escape(text) or " "}</span></span>'
        for number, text in enumerate(_dedented(source["lines"]), start=source["first"])
    )
    return f'<figure class="source"><figcaption>{escape(location)}</figcaption><pre>{lines}</pre></figure>'


def _dedented(lines: Sequence[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).split("\n")


def evidence_table(evidence: dict[str, Any] | None) -> str:
    """What went in and what came out; the notes below it."""
    if not evidence:
        return ""
    rows = [_evidence_row("in", stats) for stats in evidence["inputs"]] + [
        _evidence_row("out", evidence["result"])
    ]
    index = evidence.get("index")
    at = f"at {list(index)}" if index is not None else "at"
    heads = "".join(f"<th>{escape(head)}</th>" for head in ("", *_COLUMNS[:-1], at))
    notes = [*evidence.get("notes", ())]
    if evidence.get("headroom") is not None:
        notes.insert(
            0, f"{_number(evidence['headroom'])} times the largest finite {evidence['result']['dtype']}"
        )
    if evidence.get("largest"):
        notes.insert(
            0, "largest in the bad row: " + ", ".join(_number(value) for value in evidence["largest"][:4])
        )
    return (
        f'<table class="evidence"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        + "".join(f'<p class="note">{escape(str(note))}</p>' for note in notes)
    )


def _evidence_row(side: str, stats: dict[str, Any]) -> str:
    cells = [
        "" if side == "out" and stats["name"] == "out" else stats["name"],
        picture.shape_text(stats["shape"]),
        stats["dtype"],
        *(_number(stats[key]) for key in ("min", "max", "zeros", "nan", "posinf", "neginf", "at")),
    ]
    bad = ("nan", "posinf", "neginf")
    styles = ["", "", "", "", "", "", *("bad" if stats[key] else "" for key in bad), ""]
    body = "".join(
        f'<td data-label="{escape(name)}"{f" class={style}" if style else ""}>{escape(cell)}</td>'
        for name, style, cell in zip(_COLUMNS, styles, cells)
    )
    return f'<tr><th scope="row">{side}</th>{body}</tr>'


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _legend() -> str:
    kinds = (("nan", "NaN"), ("inf", "Inf"), ("finite", "finite"))
    return "".join(f'<span class="chip {kind}">{text}</span>' for kind, text in kinds)


def _rest(culprits: Sequence[dict[str, Any]]) -> str:
    if not culprits:
        return ""
    items = "".join(f"<li>{_marked(culprit['verdict'])}</li>" for culprit in culprits)
    summary = f"<summary>{len(culprits)} more culprits</summary>"
    return f"<section><details>{summary}<ul>{items}</ul></details></section>"


def _closing(data: dict[str, Any]) -> str:
    coverage = data["coverage"]
    seen = f"{coverage['nodes']} ops: {coverage['scanned']} scanned, {coverage['inherited']} inherited, " + (
        f"{coverage['not_seen']} not seen"
    )
    unseen = [f"{count} x {what}" for what, count in coverage.get("unseen", {}).items()]
    seen = "; ".join([seen, *unseen, *coverage.get("notes", ())])
    items = [("also", text) for text in data.get("also_seen", ())] + [
        ("note", text) for text in data.get("notes", ())
    ]
    rows = "".join(
        f"<dt>{label}</dt><dd>{_marked(str(text))}</dd>" for label, text in [*items, ("seen", seen)]
    )
    return f'<section><dl class="reasons">{rows}</dl></section>'


def _operations(known: dict[int, Node]) -> str:
    if not known:
        return ""
    rows = "".join(_operation(node) for node in known.values())
    return (
        '<section class="operations"><h2>Operations around it</h2><p>'
        '<input type="search" id="search" placeholder="op, module, line, state" '
        'aria-label="search the operations"> '
        f'<span id="found">{len(known)}</span></p>'
        f'<div class="rows" id="rows">{rows}</div></section>'
    )


def _operation(node: Node) -> str:
    where = str(node.get("location") or "").replace("\\", "/").rpartition("/")[2]
    cells = (
        ("seq", str(node["seq"])),
        ("op", node.get("name") or node["op_name"]),
        (f"chip {picture.kind(node)}", node.get("state", "")),
        ("shape", f"{picture.shape_text(node.get('shape', ()))} {picture.dtype_text(node)}"),
        ("module", node.get("module_path") or ""),
        ("where", where),
    )
    spans = "".join(f'<span class="{style}">{escape(str(text))}</span>' for style, text in cells if text)
    return f'<div class="row" data-seq="{node["seq"]}" tabindex="0" role="button">{spans}</div>'


def _as_text(data: dict[str, Any]) -> str:
    return (
        f"<section><details><summary>as text</summary><pre>{escape(data['text'])}</pre></details></section>"
    )
