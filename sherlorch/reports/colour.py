"""The report's text in colour: needs `rich`."""

from __future__ import annotations

import re

from rich.text import Text

_WORDS = (
    (r"\bNaN\b|\bnan\b", "bold red"),
    (r"(?<![\w.])[-+]?[Ii]nf\b", "bold yellow"),
    (r"`[^`]+`", "cyan"),
)
_LINES = (  # the first that fits; what it captures is what it colours
    (r"^(?:NaN|[-+]?Inf)\b.* (?:in|of) .*$", "bold"),
    (r"^No non-finite.*$", "bold green"),
    (r"^( +\d+ \|).*$", "dim"),
    (r"^(  (?:why|try)) .*$", "bold green"),
    (r"^(  [a-z]{2,5}) +\S.*$", "bold"),
    (r"^(  tensor .*)$", "dim"),
)


def coloured(text: str) -> Text:
    """`text` with the verdict, the labels and every NaN and Inf marked; not a character changed."""
    result = Text(no_wrap=True)
    for number, line in enumerate(text.split("\n")):
        result.append("\n" if number else "")
        result.append_text(_line(line))
    return result


def _line(line: str) -> Text:
    marked = Text(line)
    for pattern, style in _LINES:
        found = re.match(pattern, line)
        if found:
            marked.stylize(style, *found.span(1 if found.re.groups else 0))
            break
    for pattern, style in _WORDS:
        for word in re.finditer(pattern, line):
            marked.stylize(style, *word.span())
    return marked
