"""What the callbacks share: where the report on a bad batch goes, and what becomes of the training."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from sherlorch.errors import NonFiniteError
from sherlorch.reports.report import DiagnosisReport

log = logging.getLogger("sherlorch")

_ON_FAULT = ("raise", "stop", "skip")
_OUTCOMES = {
    "raise": "training stopped before the weights were written",
    "stop": "training ends here; the weights were not written",
    "skip": "left out; training goes on with the weights as they were",
}


class Faults:
    """Logs and writes what is known of each bad batch, and decides whether training may go on.

    `on_fault`: ``"raise"`` `NonFiniteError`, ``"stop"`` the training in good order, or ``"skip"`` the batch
    and go on, up to `skip_limit` bad batches in a row. `folder`: where the files go.
    """

    def __init__(self, on_fault: str, folder: str | os.PathLike[str] | None, skip_limit: int) -> None:
        if on_fault not in _ON_FAULT:
            raise ValueError(
                f"on_fault={on_fault!r} is unknown: use one of {', '.join(map(repr, _ON_FAULT))}"
            )
        if isinstance(skip_limit, bool) or not isinstance(skip_limit, int) or skip_limit < 1:
            raise ValueError(f"skip_limit takes a whole number of at least 1, got {skip_limit!r}")
        self.on_fault = on_fault
        self.skip_limit = skip_limit
        self.folder = Path(folder) if folder is not None else None
        self.reports: list[DiagnosisReport] = []
        self._in_a_row = 0

    def good(self) -> None:
        """A batch was fine."""
        self._in_a_row = 0

    def meet(self, report: DiagnosisReport, text: str, *, name: str, where: str, folder: Path) -> None:
        """A batch was bad; returns only if training is not to be broken off with an exception.

        `name`: what the files are called. `where`: which batch, in words. `folder`: where the files go if the
        user named no place.
        """
        self.reports.append(report)
        self._in_a_row += 1
        outcome = _OUTCOMES[self.on_fault]
        goes_on = self.on_fault == "stop" or (self.on_fault == "skip" and self._in_a_row < self.skip_limit)
        if self.on_fault == "skip":
            outcome += f" ({self._in_a_row} bad in a row)"
            if not goes_on:
                outcome = f"{self._in_a_row} bad in a row: training stopped, weights as before the batch"
        message = f"{text}\n  {where}: {outcome}"
        message += "".join(f"\n  {line}" for line in _write(report, message, self.folder or folder, name))
        log.error("%s", message)
        if not goes_on:
            raise NonFiniteError(message, report)


def _write(report: DiagnosisReport, text: str, folder: Path, name: str) -> list[str]:
    """Put the report into files; what to tell of them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stem = _free_stem(folder, name)
        stem.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
        stem.with_suffix(".json").write_text(report.to_json(), encoding="utf-8")
        lines = [f"report: {stem}.txt, .json"]
        to_html: Any = getattr(report, "to_html", None)
        if to_html is not None:
            to_html(stem.with_suffix(".html"))
            lines[0] += ", .html"
        if report.repro is not None:
            report.save_repro(stem.with_suffix(".pt"))
            lines.append(f"repro: sherlorch replay {stem}.pt")
    except Exception as error:  # a full disk must not hide what was found
        return [f"not all was written to files: {type(error).__name__}: {error}"]
    return lines


def _free_stem(folder: Path, name: str) -> Path:
    """`name`, or `name-2` and so on where an earlier report has it."""
    number, stem = 1, folder / name
    while stem.with_suffix(".txt").exists():
        number += 1
        stem = folder / f"{name}-{number}"
    return stem
