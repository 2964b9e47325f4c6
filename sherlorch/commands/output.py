"""Where an answer goes: the terminal, in colour where `rich` is installed, and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from sherlorch.errors import SherlorchError
from sherlorch.reports import DiagnosisReport


def show(text: str) -> None:
    """Print a report's text; plain unless standard output is a terminal that wants colour.

    A reader that has seen enough (``| head``) and went away is no error.
    """
    try:
        _print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit


def _print(text: str) -> None:
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            from sherlorch.reports.colour import coloured

            Console(soft_wrap=True).print(coloured(text))
            return
    print(text)


def save(report: DiagnosisReport, *, json: str | None = None, html: str | None = None) -> None:
    """Write the files that were asked for; SherlorchError where that fails."""
    if json is not None:
        write(json, lambda path: path.write_text(report.to_json() + "\n", encoding="utf-8"))
    if html is not None:
        write(html, report.to_html)


def write(name: str, how: Callable[[Path], object]) -> None:
    """Call `how` with the path, and turn what the system says into a SherlorchError."""
    try:
        how(Path(name))
    except OSError as error:
        raise SherlorchError(f"cannot write `{name}`: {error.strerror or error}") from error
