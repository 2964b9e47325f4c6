"""The exceptions of sherlorch."""

from __future__ import annotations

from typing import Any


class SherlorchError(Exception):
    """Base of every error that sherlorch raises on purpose."""


class UntracedTensorError(SherlorchError, KeyError):
    """The tensor has no node: the message says why and what to do."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which would quote and escape the sentence.
        return str(self.args[0]) if self.args else ""


class NonFiniteError(SherlorchError, ArithmeticError):
    """A NaN or Inf was born under ``on_nonfinite="raise"``; `report` is the diagnosis."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        # A report holds frames' code objects, which do not pickle; its text crosses process borders.
        return (type(self), (str(self),))


class NonFiniteWarning(UserWarning):
    """A NaN or Inf was born under ``on_nonfinite="warn"``; one warning for each culprit line."""
