"""The way from a culprit to the target as an SVG: a column of steps, their other inputs, modules as boxes.

Works on the plain data of `reports.json`, so that a saved report can be drawn too. It fits a phone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any, Union

Node = dict[str, Any]

_WIDTH = 358
_STEP = 190  # width of a step
_SIDE = 110  # width of another input
_MARGIN = 4
_NEST = 5  # a module's box lies this far outside of what is in it
_DEEPEST = 3  # boxes in boxes
_RAIL = 11  # where in a step the arrow from the last one ends
_PITCH = 6.85  # width of a character of 11px, a little more than any monospace font has
_LINE = 15
_GAP = 22  # for the arrow between two steps
_MOST_STEPS = 300
_MOST_SIDES = 4


@dataclass
class Fold:
    """Steps that are drawn as one."""

    nodes: list[Node]
    text: str


Step = Union[Node, Fold]


@dataclass
class _Drawing:
    shapes: list[str] = field(default_factory=list)  # from back to front
    boxes: list[str] = field(default_factory=list)
    y: float = 6
    previous: float | None = None  # where the last step ended
    opened: bool = False  # nothing stands below the last title yet
    drawn: list[Node] = field(default_factory=list)


def steps_of(path: Sequence[Node]) -> list[Step]:
    """The nodes of a path, runs of views folded, and the middle of a very long path."""
    steps: list[Step] = []
    for is_view, run in groupby(path[1:], key=lambda node: bool(node.get("moves")) and not node.get("name")):
        nodes = list(run)
        steps += [Fold(nodes, f"{len(nodes)} views")] if is_view and len(nodes) > 1 else nodes
    steps = [*path[:1], *steps]
    if len(steps) > _MOST_STEPS:
        half = _MOST_STEPS // 2
        hidden = [
            node for step in steps[half:-half] for node in (step.nodes if isinstance(step, Fold) else [step])
        ]
        steps = [*steps[:half], Fold(hidden, f"{len(hidden)} more operations"), *steps[-half:]]
    return steps


def draw(culprit: Node, target_name: str, known: dict[int, Node]) -> tuple[str, list[Node]]:
    """The SVG text and the nodes that it shows; `known` has the nodes by number, for the other inputs."""
    drawing = _Drawing()
    path = culprit["path"] or [culprit]
    causes = list(culprit["causes"])
    steps = steps_of(path)
    rows = [
        (step, _sides(step, steps[i - 1] if i else None, known, causes if i == 0 else []))
        for i, step in enumerate(steps)
    ]
    phase = ""
    for module, part in groupby(rows, key=lambda row: _first(row[0]).get("phase", "")):
        if module != phase and phase:
            _divide(drawing, module)
        phase = module
        _nest(drawing, list(part), culprit, 0, 0)
    _end(drawing, target_name or "the tensor", path[-1].get("state", ""))
    height = drawing.y + 6
    picture = "".join([*drawing.boxes, *drawing.shapes])
    way = escape(f"the way from {label(culprit)} to {target_name or 'the tensor'}")
    svg = (
        f'<svg class="picture" width="{_WIDTH}" height="{height:.0f}" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'role="img" aria-label="{way}">{picture}</svg>'
    )
    return svg, drawing.drawn


def label(node: Node) -> str:
    """What a node is called: its name, its autograd node, else its op without namespace and overload."""
    if node.get("name"):
        return str(node["name"])
    if node.get("phase") == "backward" and node.get("autograd_node"):
        return str(node["autograd_node"])
    parts = str(node["op_name"]).split(".")
    return "input" if parts == ["leaf"] else parts[1] if len(parts) > 2 else parts[-1]


def shape_text(shape: Sequence[int]) -> str:
    return str(tuple(shape))


def dtype_text(node: Node) -> str:
    return str(node.get("dtype", "")).replace("torch.", "")


def kind(node: Node) -> str:
    """The class that colours a node: nan, inf or finite."""
    return "nan" if node.get("has_nan") else "inf" if node.get("has_inf") else "finite"


def _first(step: Step) -> Node:
    return step.nodes[0] if isinstance(step, Fold) else step


def _last(step: Step) -> Node:
    return step.nodes[-1] if isinstance(step, Fold) else step


def _module(step: Step) -> str:
    """The module of a step; of a fold only where all of it is in one."""
    nodes = step.nodes if isinstance(step, Fold) else [step]
    modules = {str(node.get("module_path") or "") for node in nodes}
    return modules.pop() if len(modules) == 1 else ""


def _sides(step: Step, before: Step | None, known: dict[int, Node], causes: list[Node]) -> list[Node]:
    """What else went into a step, the non-finite first; a cause is drawn even where it is no direct input."""
    if isinstance(step, Fold):
        return []
    came = _last(before)["seq"] if before is not None else None
    parents = [known[seq] for seq in step.get("parents", []) if seq != came and seq in known]
    made = [_behind_views(parent, known) for parent in parents]
    others = {node["seq"]: node for node in (*causes, *made) if node["seq"] != came}
    return sorted(others.values(), key=lambda node: bool(node.get("is_finite")))


def _behind_views(node: Node, known: dict[int, Node]) -> Node:
    while node.get("moves") and not node.get("name") and len(node.get("parents", [])) == 1:
        parent = known.get(node["parents"][0])
        if parent is None or parent["seq"] >= node["seq"]:
            break
        node = parent
    return node


Row = tuple[Step, list[Node]]


def _nest(drawing: _Drawing, rows: Sequence[Row], culprit: Node, depth: int, known: int) -> None:
    """Draw rows of one phase; `known` components of their module paths are told by boxes further out."""
    if depth == _DEEPEST:
        for row in rows:
            _row(drawing, row, culprit, depth)
        return
    for part, run in groupby(rows, key=lambda row: _component(_module(row[0]), known, depth)):
        inside = list(run)
        if not part:
            for row in inside:
                _row(drawing, row, culprit, depth)
            continue
        common = _common([_parts(_module(row[0])) for row in inside])
        title = ".".join(common[known:])
        top = _open(drawing, title, depth)
        _nest(drawing, inside, culprit, depth + 1, len(common))
        _close(drawing, title, top, depth)


def _component(module: str, known: int, depth: int) -> str:
    parts = _parts(module)
    return ".".join(parts[known:] if depth == _DEEPEST - 1 else parts[known : known + 1])


def _parts(module: str) -> list[str]:
    """``blocks.0`` of ``model.blocks.0.gate`` is one part: a list of modules is no module that runs."""
    parts: list[str] = []
    for part in module.split(".") if module else []:
        if part.isdigit() and parts:
            parts[-1] += f".{part}"
        else:
            parts.append(part)
    return parts


def _common(paths: list[list[str]]) -> list[str]:
    common = []
    for parts in zip(*paths):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return common


def _left(depth: int) -> float:
    return _MARGIN + depth * _NEST


def _step_left() -> float:
    return _left(_DEEPEST) + _NEST


def _title_room(depth: int) -> float:
    return _WIDTH - _left(depth) - 8 - (_step_left() + _RAIL + 12)


def _open(drawing: _Drawing, title: str, depth: int) -> tuple[float, int]:
    """Leave room for a box's upper edge and title; where it starts, and its place among the boxes."""
    drawing.y += _GAP / 2 if drawing.previous is not None and not drawing.opened else 0
    drawing.opened = True
    top = drawing.y
    drawing.y += 6 + _LINE * len(_wrap(title, _title_room(depth)))
    drawing.boxes.append("")
    return top, len(drawing.boxes) - 1


def _close(drawing: _Drawing, title: str, start: tuple[float, int], depth: int) -> None:
    top, place = start
    drawing.y += 8
    x, width = _left(depth), _WIDTH - 2 * _left(depth)
    lines = _wrap(title, _title_room(depth))
    drawing.boxes[place] = (
        f'<rect class="module" x="{x}" y="{top:.0f}" width="{width}" height="{drawing.y - top:.0f}" rx="8"/>'
        + _text(lines, _step_left() + _RAIL + 12, top + 13, "module-name")
    )
    drawing.y += 6


def _row(drawing: _Drawing, row: Row, culprit: Node, depth: int) -> None:
    step, sides = row
    hidden = len(sides) - _MOST_SIDES
    sides = sides[:_MOST_SIDES]
    lines = _lines(step, culprit)
    height = 10 + _LINE * len(lines)
    pills = [_wrap(_side_label(node, _module(step)), _SIDE - 14) for node in sides]
    beside = sum(12 + _LINE * len(pill) for pill in pills) + (_LINE if hidden > 0 else 0)
    if drawing.previous is not None:
        drawing.y = max(drawing.y, drawing.previous + _GAP)
    top = drawing.y
    x = _step_left()
    rail = x + _RAIL
    if drawing.previous is not None:
        drawing.shapes.append(_arrow(rail, drawing.previous, rail, top))
    drawing.shapes.append(_box(step, culprit, lines, x, top, height))
    drawing.drawn += step.nodes if isinstance(step, Fold) else [step]
    side_x = x + _STEP + 16
    side_y = top
    for node, pill in zip(sides, pills):
        tall = 6 + _LINE * len(pill)
        entry = min(side_y + tall / 2, top + height - 6)
        drawing.shapes.append(
            _arrow(side_x, side_y + tall / 2, x + _STEP, entry)
            + _group(node, "side", pill, side_x, side_y, _SIDE, tall)
        )
        drawing.drawn.append(node)
        side_y += tall + 6
    if hidden > 0:
        drawing.shapes.append(_text([f"and {hidden} more"], side_x + 6, side_y + 10, "small"))
    drawing.previous = top + height
    drawing.opened = False
    drawing.y = top + max(height, beside)


def _side_label(node: Node, module: str) -> str:
    """Inside the box of its module, ``parameter model.head.weight`` is ``parameter weight``."""
    state = node.get("state", "finite")
    name = label(node).replace(f" {module}.", " ") if module else label(node)
    return name if state == "finite" else f"{name} {state}"


def _lines(step: Step, culprit: Node) -> list[tuple[str, str]]:
    """(style, text) of each line in a step's box."""
    room = _STEP - 22
    if isinstance(step, Fold):
        return [("name", line) for line in _wrap(step.text, room)]
    lines = [("name", line) for line in _wrap(label(step), room)]
    origin = step.get("origin")
    if step["seq"] == culprit["seq"]:
        lines.append(("mark", f"culprit: {origin}"))
    elif origin == "converted":
        lines.append(("mark", "Inf turns into NaN"))
    held = f"{step.get('state', '')} {shape_text(step.get('shape', ()))} {dtype_text(step)}"
    lines += [("small", line) for line in _wrap(held, room)]
    where = str(step.get("location") or "").replace("\\", "/").rpartition("/")[2]
    return lines + [("small", line) for line in _wrap(where, room)]


def _box(step: Step, culprit: Node, lines: list[tuple[str, str]], x: float, y: float, height: float) -> str:
    if isinstance(step, Fold):
        numbers = " ".join(str(node["seq"]) for node in step.nodes[:200])
        attributes = f'class="node fold {kind(_last(step))}" data-fold="{numbers}"'
    else:
        blamed = " culprit" if step["seq"] == culprit["seq"] else ""
        attributes = f'class="node {kind(step)}{blamed}" data-seq="{step["seq"]}"'
    texts = "".join(_text([text], x + 13, y + 16 + _LINE * i, style) for i, (style, text) in enumerate(lines))
    return (
        f'<g {attributes} tabindex="0" role="button"><rect class="body" x="{x}" y="{y:.0f}" width="{_STEP}" '
        f'height="{height}" rx="6"/><rect class="bar" x="{x}" y="{y:.0f}" width="6" height="{height}" rx="3"'
        f"/>{texts}</g>"
    )


def _group(node: Node, style: str, lines: list[str], x: float, y: float, width: float, height: float) -> str:
    round_ = min(height / 2, 12)
    return (
        f'<g class="node {style} {kind(node)}" data-seq="{node["seq"]}" tabindex="0" role="button">'
        f'<rect class="body" x="{x}" y="{y:.0f}" width="{width}" height="{height}" rx="{round_}"/>'
        f"{_text(lines, x + 8, y + 14, 'small')}</g>"
    )


def _divide(drawing: _Drawing, phase: str) -> None:
    drawing.y = max(drawing.y, (drawing.previous or 0)) + 20
    drawing.shapes.append(
        f'<line class="divider" x1="0" x2="{_WIDTH}" y1="{drawing.y:.0f}" y2="{drawing.y:.0f}"/>'
        + _text([phase], _WIDTH - 8 - _PITCH * len(phase), drawing.y + 14, "phase")
    )
    drawing.y += 18


def _end(drawing: _Drawing, name: str, state: str) -> None:
    x = _step_left()
    start = drawing.previous or 0
    drawing.y = max(drawing.y + 12, start + _GAP)
    lines = _wrap(f"{name}: {state}", _STEP - 22)
    height = 10 + _LINE * len(lines)
    drawing.shapes.append(_arrow(x + _RAIL, start, x + _RAIL, drawing.y))
    drawing.shapes.append(
        f'<rect class="target" x="{x}" y="{drawing.y:.0f}" width="{_STEP}" height="{height}" rx="12"/>'
        + _text(lines, x + 13, drawing.y + 16, "name")
    )
    drawing.y += height


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    if x1 == x2:
        head = f"M{x2 - 4} {y2 - 7:.1f}L{x2} {y2 - 1:.1f}L{x2 + 4} {y2 - 7:.1f}"
    else:
        head = f"M{x2 + 7} {y2 - 4:.1f}L{x2 + 1} {y2:.1f}L{x2 + 7} {y2 + 4:.1f}"
    return f'<path class="edge" d="M{x1} {y1:.1f}L{x2} {y2:.1f}{head}"/>'


def _text(lines: Sequence[str], x: float, y: float, style: str) -> str:
    return "".join(
        f'<text class="{style}" x="{x:.1f}" y="{y + _LINE * i:.1f}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    )


def _wrap(text: str, width: float) -> list[str]:
    """`text` in lines that fit `width`, broken behind a space, dot or underscore where there is one."""
    return list(_broken(text, max(4, int(width / _PITCH)))) if text else []


def _broken(text: str, most: int) -> Iterator[str]:
    while len(text) > most:
        cut = max(text.rfind(mark, 1, most) for mark in " ._/,") + 1
        cut = cut if cut > most // 3 else most
        yield text[:cut].rstrip()
        text = text[cut:].lstrip()
    if text:
        yield text
