"""`sherlorch ops`: the table of laws, for reading."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

import torch
import torch.nn.functional as F

from sherlorch.errors import SherlorchError
from sherlorch.ops import GROUPS, Group, Law

_WIDTH = 100
_PROMISES = {
    Law.PERMUTES: "the state passes exactly, both ways; nothing is scanned",
    Law.SELECTS: "finite inputs give a finite result without a scan; others are scanned",
    Law.BOUNDED: "finite inputs provably give a finite result; scanned all the same: a kernel can be wrong",
}
_HOMES = (torch, torch.Tensor, F, torch.special, torch.linalg, torch.fft)


def describe(name: str | None = None) -> str:
    """The laws of one operation, or the whole table; SherlorchError for a name that nobody knows."""
    return _table() if name is None else _operation(name)


def _table() -> str:
    lines = []
    for law in Law:
        groups = [group for group in GROUPS if group.law is law]
        lines += [f"{law.value}: {_PROMISES[law]}", ""]
        for group in groups:
            lines += [f"  {group.equation}", *_wrapped(" ".join(_names(group)), "    "), ""]
    lines.append(
        "Every other operation is scanned. `sherlorch ops NAME` says why a law holds, and what is left out."
    )
    return "\n".join(lines)


def _operation(name: str) -> str:
    plain = _plain(name)
    found = [group for group in GROUPS if plain in _names(group)]
    left_out = [
        (group, group.left_out[key]) for group in GROUPS for key in (name, plain) if key in group.left_out
    ]
    if not found and not left_out and not _exists(name, plain):
        raise SherlorchError(f"torch has no operation called `{name}`{_hint(plain)}")
    blocks = ["\n".join(_group(plain, group)) for group in found]
    if not found:
        lines = [f"{plain}: no law, every result is scanned"]
        for group, reason in dict.fromkeys(left_out):
            lines += _wrapped(
                f"{reason}; so it is not among those that obey {group.equation!r} ({group.law.value})", "  "
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _group(name: str, group: Group) -> list[str]:
    levels = {True: "function and aten", False: "aten"}[name in group.function_names]
    if name not in group.aten_names:
        levels = "function"
    lines = [
        f"{name}: {group.law.value}",
        *_item("means", _PROMISES[group.law]),
        *_item("law", group.equation),
        *_item("why", group.proof),
        *_item("level", levels),
    ]
    if group.condition is not None:
        lines += _item("if", _first_sentence(group.condition.__doc__) or group.condition.__name__)
    excluded = sorted(overload for overload in group.overloads_excluded if overload.startswith(f"{name}."))
    if excluded:
        lines += _item("not", "for the overloads " + ", ".join(excluded))
    if group.left_out:
        lines.append("  look-alikes left out")
        for other, reason in group.left_out.items():
            lines += _wrapped(f"{other}: {reason}", "    ", "      ")
    return lines


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _names(group: Group) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*group.function_names, *group.aten_names)))


def _plain(name: str) -> str:
    """`aten.relu_.default`, `aten::relu_` and `torch.relu_` are the row `relu`."""
    plain = name.replace("::", ".")
    rows = {row for group in GROUPS for row in _names(group)}
    for prefix in ("torch.ops.", "torch.nn.functional.", "torch.Tensor.", "torch.", "Tensor.", "F."):
        plain = plain[len(prefix) :] if plain.startswith(prefix) else plain
    if plain.startswith("aten."):
        plain = plain[len("aten.") :].partition(".")[0]
    for candidate in (plain, plain[:-1] if plain.endswith("_") else plain):
        if candidate in rows:
            return candidate
    return plain


def _exists(*names: str) -> bool:
    return any(hasattr(torch.ops.aten, name) or any(hasattr(home, name) for home in _HOMES) for name in names)


def _hint(name: str) -> str:
    known: Iterable[str] = sorted({row for group in GROUPS for row in _names(group)} | {*dir(torch), *dir(F)})
    close = difflib.get_close_matches(name, [row for row in known if not row.startswith("__")], n=3)
    return (
        f"; did you mean {', '.join(f'`{row}`' for row in close)}?"
        if close
        else "; `sherlorch ops` lists the table"
    )


def _item(label: str, text: str) -> list[str]:
    return _wrapped(text, f"  {label:<6}", " " * 8)


def _wrapped(text: str, indent: str, further: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent if further is None else further,
        break_long_words=False,
    )  # fmt: skip
