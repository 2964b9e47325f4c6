"""What pytest loads at its start; the rest of the plugin, and torch with it, only under ``--sherlorch``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options."""
    group = parser.getgroup("sherlorch", "NaN and Inf, by sherlorch")
    group.addoption(
        "--sherlorch",
        action="store_true",
        help="fail each test in which a torch operation introduces a NaN or Inf, with the report",
    )
    group.addoption(
        "--sherlorch-level",
        choices=("function", "aten"),
        default="aten",
        help="aten (default): what ran, backward included; function: what was called, cheaper",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; trace if asked."""
    config.addinivalue_line(
        "markers", "sherlorch_allow: this test means its NaN and Inf; `pytest --sherlorch` leaves it alone"
    )
    if config.getoption("sherlorch"):
        from sherlorch.pytest_plugin import TracedTests

        config.pluginmanager.register(TracedTests(config.getoption("sherlorch_level")), "sherlorch-tests")
