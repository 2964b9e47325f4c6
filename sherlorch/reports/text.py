"""The report as text: verdict first, then evidence, cause, remedy, path, what else was seen, coverage."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby

from tabulate import tabulate

from sherlorch.capture import plain_name
from sherlorch.evidence import Evidence
from sherlorch.graph import OpNode
from sherlorch.health import TensorStats
from sherlorch.ops import traits
from sherlorch.reports.report import DiagnosisReport, kind_of
from sherlorch.source import short, text_of

WIDTH = 100
_MOST_ROWS = 6
_MOST_STEPS = 12
_MOST_NODES = 100
_MOST_CULPRITS = 5


def render(report: DiagnosisReport) -> str:
    """Plain text of at most 100 columns."""
    if report.ok:
        return "\n".join(_healthy(report))
    lines = _culprit(report, report.culprits[0])
    for number, node in enumerate(report.culprits[1:_MOST_CULPRITS], start=2):
        lines += ["", f"culprit {number}:", *_short(report, node)]
    hidden = len(report.culprits) - _MOST_CULPRITS
    if hidden > 0:
        lines += ["", f"and {hidden} more culprits: see report.table()"]
    return "\n".join([*lines, *_closing(report)])


def verdict(report: DiagnosisReport, node: OpNode) -> list[str]:
    """What, where it showed, which op, which line, which phase: one line that can be grepped.

    Where it would be too long the module, then the operands, go to a line of their own.
    """
    details = [
        detail for detail in (_forward_note(node) or _operands(node), node.module_path or "") if detail
    ]
    for moved in range(len(details) + 1):
        kept = details[: len(details) - moved]
        line = _claim(report, node, kept)
        if len(line) <= WIDTH:
            break
    below = [
        f"    in {detail}" if detail == node.module_path else f"   {detail}"
        for detail in details
        if detail not in kept
    ]
    return [*textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False), *below]


def _claim(report: DiagnosisReport, node: OpNode, details: Sequence[str]) -> str:
    target = f"`{report.target_name}`" if report.target_name else "the tensor"
    made = kind_of(node)
    showed = kind_of(report.target if report.target is not None else node)
    module = node.module_path if node.module_path in details else ""
    where = ", ".join(part for part in (module, short(node.location)) if part) or "an unknown line"
    end = f"at {where}  [{node.phase}]"
    if node.origin == "outside" and node._record.facts.arrives:
        return f"{showed} in {target} came in from another process with {node.op_name} {end}"
    if node.origin == "outside":
        return f"{showed} in {target} came in with {_leaf(node)}, first used {end}"
    if node.origin == "uninitialised":
        return f"{showed} in {target} was read from uninitialised {node.op_name}, first used {end}"
    if node.origin == "constant":
        return f"{showed} in {target} was written on purpose by {node.name or node.op_name} {end}"
    born = "was born" if made == showed else f"began as {made}"
    note = "".join(detail for detail in details if detail != module)
    return f"{showed} in {target} {born} in {node.op_name}{note} {end}"


def _leaf(node: OpNode) -> str:
    return node.name or "an input tensor"


def _forward_note(node: OpNode) -> str:
    forward = node.forward
    return f" (backward of {traits.root_of(forward._record.facts.base)})" if forward is not None else ""


_INFIX = {"div": "/", "mul": "*", "sub": "-", "add": "+", "pow": "**"}


def _operands(node: OpNode) -> str:
    """`` (0 / 0)`` where the operands at the first bad index are known."""
    evidence = node.evidence
    if evidence is None or any(value is None for value in evidence.operands):
        return ""
    root = plain_name(node._record.facts.base)
    values = [_number(value) for value in evidence.operands]
    if len(values) == 1 and root not in _INFIX:
        return f" ({root}({values[0]}))"
    return f" ({values[0]} {_INFIX[root]} {values[1]})" if len(values) == 2 and root in _INFIX else ""


def _culprit(report: DiagnosisReport, node: OpNode) -> list[str]:
    lines = [*verdict(report, node), *_source_line(node), ""]
    if node.evidence is not None:
        lines += [*_evidence(node.evidence), ""]
    return lines + _reasons(report, node)


def _short(report: DiagnosisReport, node: OpNode) -> list[str]:
    return [*verdict(report, node), *_source_line(node), *_reasons(report, node)]


def _source_line(node: OpNode) -> list[str]:
    text = text_of(node.location) if node.location else ""
    if not text:
        return []
    number = (node.location or "").rpartition(":")[2]
    return [_fit(f"{number:>6} |     {text}")]


def _reasons(report: DiagnosisReport, node: OpNode) -> list[str]:
    explanation = report.explanations[node.seq]
    path = _path(report.paths.get(node.seq, []), report.target_name)
    return [*_item("why", explanation.why), *_item("try", explanation.remedy), *_item("path", path)]


def _evidence(evidence: Evidence) -> list[str]:
    index = f"at {list(evidence.index)}" if evidence.index is not None else ""
    headers = ["tensor", "", "shape", "dtype", "min", "max", "zeros", "nan", "+inf", "-inf", index]
    rows = [_row("in", stats) for stats in evidence.inputs[:_MOST_ROWS]]
    hidden = len(evidence.inputs) - _MOST_ROWS
    if hidden > 0:
        rows.append(["in", f"({hidden} more)"])
    rows.append(_row("out", evidence.result))
    text = _table(rows, headers)
    extra = []
    if max(map(len, text)) > WIDTH:
        text = _table(rows, [*headers[:-1], "at"])
        extra.append(f"first bad element: {list(evidence.index)}" if evidence.index is not None else "")
    lines = [_fit(line) for line in text]
    if evidence.largest:
        extra.append("largest in the bad row: " + ", ".join(_number(value) for value in evidence.largest[:4]))
    if evidence.headroom is not None:
        extra.append(f"{evidence.headroom:.3g} times the largest finite {evidence.result.dtype}")
    extra.extend(evidence.notes)
    return lines + [
        line
        for note in extra
        for line in textwrap.wrap(note, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
    ]


def _table(rows: list[list[str]], headers: list[str]) -> list[str]:
    text = tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True)
    return ["  " + line.rstrip() for line in text.splitlines()]


def _row(side: str, stats: TensorStats) -> list[str]:
    shape = str(tuple(stats.shape)).replace(",)", ",)")
    bounds = [
        _number(stats.min) if stats.min is not None else "-",
        _number(stats.max) if stats.max is not None else "-",
    ]
    counts = [str(count) for count in (stats.zeros, stats.nan, stats.posinf, stats.neginf)]
    name = stats.name if len(stats.name) <= 16 else stats.name[:13] + "..."
    at = _number(stats.at) if stats.at is not None else ""
    return [side, "" if side == "out" and name == "out" else name, shape, stats.dtype, *bounds, *counts, at]


def _number(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, complex)):
        return str(value)
    return f"{value:.4g}"


def _path(path: Sequence[OpNode], target_name: str) -> str:
    if not path:
        return ""
    steps: list[str] = []
    hidden = max(0, len(path) - 2 * _MOST_NODES)
    near, far = (path[:_MOST_NODES], path[-_MOST_NODES:]) if hidden else (path, ())
    steps = [*_steps(near), *([f"({hidden} more)"] if hidden else []), *_steps(far)]
    if len(steps) > _MOST_STEPS:
        half = _MOST_STEPS // 2
        middle = len(steps) - _MOST_STEPS + hidden
        steps = [*steps[:half], f"({middle} more)", *steps[-half:]]
    return " -> ".join([*steps, target_name or "the tensor"])


def _steps(nodes: Sequence[OpNode]) -> list[str]:
    """Names of a stretch of the path, runs of views and of kernels of one autograd node folded."""
    steps: list[str] = []
    for is_view, run in groupby(nodes, key=lambda node: node._record.facts.moves and not node.name):
        folded = list(run)
        if is_view:
            steps.append(f"({len(folded)} views)" if len(folded) > 1 else "(view)")
        else:
            steps += [_step(node) for node in folded]
    return [step for step, _ in groupby(steps)]


def _step(node: OpNode) -> str:
    name = (
        node.name
        or ("input" if node._record.facts.base == "leaf" else "")
        or (node.autograd_node if node.phase == "backward" else None)
        or traits.root_of(node._record.facts.base)
    )
    return f"{name} [Inf -> NaN]" if node.origin == "converted" else name


def _item(label: str, text: str) -> list[str]:
    return (
        textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<6}", subsequent_indent=" " * 8) if text else []
    )


def _closing(report: DiagnosisReport) -> list[str]:
    lines = [line for text in report.also_seen for line in _item("also", text)]
    lines += [line for text in report.notes for line in _item("note", text)]
    return lines + _item("seen", str(report.coverage))


def _healthy(report: DiagnosisReport) -> list[str]:
    target = f" in `{report.target_name}`" if report.target_name else ""
    node: OpNode | None = report.target
    about = f" (node [{node.seq}] {node.op_name})" if node is not None else ""
    return [f"No non-finite values{target}{about}.", *_closing(report)]


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
