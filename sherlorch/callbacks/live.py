"""A trace that is always on: for faults that do not come back when the batch runs again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor, nn

from sherlorch.errors import UntracedTensorError
from sherlorch.reports.report import DiagnosisReport
from sherlorch.tracker import ProvenanceTracker


class LiveTrace:
    """One tracker over all batches, on between `begin` and `end`; its memory is bounded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tracker = ProvenanceTracker("aten", keep="nonfinite")
        self._block = ExitStack()

    def begin(self) -> None:
        """A batch begins."""
        self.end()
        self._block.enter_context(self._tracker)
        self._tracker.watch(self._model)

    def end(self) -> None:
        """The batch is over; does nothing where none had begun."""
        self._block.close()

    def report(self, losses: Iterable[Tensor], gradients: Iterable[Tensor]) -> DiagnosisReport:
        """The diagnosis of the first bad loss, else of the first gradient that went bad, else of anything.

        What was traced is forgotten.
        """
        try:
            return self._diagnose(losses, gradients)
        finally:
            self._tracker.reset()

    def _diagnose(self, losses: Iterable[Tensor], gradients: Iterable[Tensor]) -> DiagnosisReport:
        for name, tensors in (("loss", losses), ("", reversed(list(gradients)))):
            for tensor in tensors:
                if not self._tracker.has_issue(tensor):
                    continue
                try:
                    report = self._tracker.diagnose(tensor)
                except UntracedTensorError:
                    continue
                report.target_name = name or report.target_name
                return report
        return self._tracker.diagnose()
