"""The user's line, read for the names to use in a remedy."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from sherlorch.capture.names import plain_name

_NAMESPACES = frozenset({"torch", "F", "functional", "linalg", "special", "nn", "np", "math"})
_OPERATORS = {
    ast.Div: "div",
    ast.Mult: "mul",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.Add: "add",
    ast.Sub: "sub",
}
_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?(?![\w.])")


def spelled(source: str, op: str, position: int, otherwise: str) -> str:
    """How the line spells an operand of its only `op`, in brackets where it needs them; else `otherwise`.

    >>> spelled("return x / x.norm(dim=1)", "div", 1, "the divisor")
    'x.norm(dim=1)'
    """
    found = [operands for name, operands in _calls(source) if name == op]
    if len(found) != 1 or position >= len(found[0]):
        return otherwise
    node = found[0][position]
    text = ast.unparse(node)
    if "\n" in text or len(text) > 60:
        return otherwise
    return (
        text
        if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
        else f"({text})"
    )


def literals(source: str) -> list[float]:
    """Every unsigned number written in the line."""
    return [float(text) for text in _NUMBER.findall(source.split("#")[0])]


def _calls(source: str) -> Iterator[tuple[str, list[ast.expr]]]:
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield _OPERATORS[type(node.op)], [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
            yield _OPERATORS[type(node.op)], [node.target, node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            last = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            method = [] if last in _NAMESPACES else [owner]
            yield plain_name(node.func.attr), [*method, *node.args]


def _parsed(source: str) -> ast.AST:
    text = source.strip()
    for attempt in (text, text + " pass", re.sub(r"^(el)?if |^with |^while ", "", text).rstrip(":")):
        try:
            return ast.parse(attempt)
        except (SyntaxError, ValueError):
            continue
    return ast.Module(body=[], type_ignores=[])
