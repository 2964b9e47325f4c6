"""What a diagnosis says, and its renderers: functions from a `DiagnosisReport` to a str."""

from sherlorch.reports.report import DiagnosisReport

__all__ = ["DiagnosisReport"]
