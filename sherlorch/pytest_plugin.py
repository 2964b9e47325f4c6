"""``pytest --sherlorch``: a test that meets a NaN or Inf fails with the report.

Off without the option. What a test writes on purpose fails no test: masks and other constants, NaN in its own
data; nor does what was absorbed. A test that means its NaN is marked ``@pytest.mark.sherlorch_allow``. Only
the test itself is traced, not its fixtures, and only in its own thread. Traced tests are many times slower.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from sherlorch.diagnosis import diagnose, earliest
from sherlorch.graph import OpNode, Record
from sherlorch.reports.report import DiagnosisReport
from sherlorch.tracker import ProvenanceTracker


class TracedTests:
    """Traces each test; `level` is that of `sherlorch.trace`."""

    def __init__(self, level: str) -> None:
        self._level = level

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Run the test under a trace, and fail it if something went wrong in it."""
        if item.get_closest_marker("sherlorch_allow") is not None:
            yield
            return
        with ProvenanceTracker(self._level, keep="nonfinite") as tracker:
            outcome = yield
        report = _first_fault(tracker)
        if report is None:
            return
        text = f"{report}\n\n  meant?  mark the test with @pytest.mark.sherlorch_allow"
        if outcome.excinfo is None:
            outcome.force_exception(pytest.fail.Exception(text, pytrace=False))
        else:
            item.add_report_section("call", "sherlorch", text)


def _first_fault(tracker: ProvenanceTracker) -> DiagnosisReport | None:
    """The earliest fault, but for what the test wrote into its data."""
    report = tracker.diagnose()
    if report.ok:
        return None
    recorder = tracker._recorder
    faults = [record for record in recorder.faults if not _is_data_of_the_test(record)]
    fault = earliest(faults, tracker.level == "aten", recorder.memory.lasting())
    return tracker._report(diagnose(fault)) if fault is not None else None


def _is_data_of_the_test(record: Record) -> bool:
    """Did a line that was traced make it from numbers, as ``torch.tensor([1.0, nan])`` does?"""
    node = OpNode(record)
    return node.origin == "outside" and node.name.startswith("tensor made at ")
