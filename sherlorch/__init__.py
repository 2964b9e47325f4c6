"""sherlorch: find the operation that introduced a NaN or Inf into a PyTorch program."""

from sherlorch.errors import NonFiniteError, NonFiniteWarning, SherlorchError, UntracedTensorError
from sherlorch.graph import OpNode
from sherlorch.guard import Guard
from sherlorch.passes import compile, instrument
from sherlorch.reports.report import DiagnosisReport
from sherlorch.tracker import ProvenanceTracker, trace

__version__ = "0.2.0"

__all__ = [
    "DiagnosisReport",
    "Guard",
    "NonFiniteError",
    "NonFiniteWarning",
    "OpNode",
    "ProvenanceTracker",
    "SherlorchError",
    "UntracedTensorError",
    "compile",
    "instrument",
    "trace",
]
