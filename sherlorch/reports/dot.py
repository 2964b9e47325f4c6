"""The report's graph as text that graphviz draws."""

from __future__ import annotations

from collections.abc import Sequence

from sherlorch.graph import OpNode
from sherlorch.reports.json import node_to_dict
from sherlorch.reports.neighbourhood import neighbourhood
from sherlorch.reports.picture import kind, label
from sherlorch.reports.report import DiagnosisReport

_COLOURS = {"nan": ("#c6262e", "#fdecec"), "inf": ("#a15c00", "#fdf3e0"), "finite": ("#2f7d4f", "#edf7f0")}
_LIMIT = 400  # graphviz takes minutes over more


def render(report: DiagnosisReport) -> str:
    """A digraph of the paths and what went into them: states coloured, modules as clusters, culprits bold."""
    nodes = neighbourhood(report, _LIMIT)
    culprits = {node.seq for node in report.culprits}
    lines = [
        "digraph sherlorch {",
        '  graph [rankdir=TB, fontname="monospace", fontsize=11];',
        '  node [shape=box, style="rounded,filled", fontname="monospace", fontsize=11];',
    ]
    by_module: dict[str, list[OpNode]] = {}
    for node in nodes:
        by_module.setdefault(node.module_path or "", []).append(node)
    for number, (module, inside) in enumerate(by_module.items()):
        drawn = [_node(node, node.seq in culprits) for node in inside]
        lines += _cluster(number, module, drawn) if module else [f"  {line}" for line in drawn]
    known = {node.seq for node in nodes}
    way = {pair for path in report.paths.values() for pair in zip(_numbers(path), _numbers(path)[1:])}
    for node in nodes:
        for parent in dict.fromkeys(parent.seq for parent in node.parents):
            if parent in known:
                bold = ' [color="#c6262e", penwidth=2]' if (parent, node.seq) in way else ""
                lines.append(f"  n{parent} -> n{node.seq}{bold};")
    if report.target is not None and report.target.seq in known:
        lines.append(
            f"  target [label={_quoted(report.target_name or 'the tensor')}, shape=ellipse, style=solid];"
        )
        lines.append(f"  n{report.target.seq} -> target;")
    return "\n".join([*lines, "}", ""])


def _numbers(path: Sequence[OpNode]) -> list[int]:
    return [node.seq for node in path]


def _cluster(number: int, module: str, drawn: Sequence[str]) -> list[str]:
    return [
        f"  subgraph cluster_{number} {{",
        f'    label={_quoted(module)}; style=rounded; color="#9aa4af";',
        *(f"    {line}" for line in drawn),
        "  }",
    ]


def _node(node: OpNode, blamed: bool) -> str:
    data = node_to_dict(node)
    line, fill = _COLOURS[kind(data)]
    where = (node.location or "").replace("\\", "/").rpartition("/")[2]
    state = "" if node.is_finite else f"{data['state']}, {node.origin}"
    texts = [label(data), state, f"{node.shape} {node.dtype.replace('torch.', '')}", where]
    text = _quoted("\n".join(text for text in texts if text))
    width = ", penwidth=3" if blamed else ""
    return f'n{node.seq} [label={text}, color="{line}", fillcolor="{fill}"{width}];'


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
