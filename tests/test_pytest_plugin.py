"""``pytest --sherlorch``, run as a user runs it."""

from __future__ import annotations

import pytest
from needs import needs_forward_lines

import sherlorch.pytest_plugin  # noqa: F401  (here: a run within this process forgets what it imports)

pytest_plugins = ["pytester"]

TESTS = """
import pytest
import torch


@pytest.fixture
def bad():
    return torch.zeros(3) / 0


def test_good():
    x = torch.ones(3, requires_grad=True)
    x.exp().sum().backward()


def test_forward():
    torch.zeros(3) / torch.zeros(3)  # the culprit


def test_backward():
    x = torch.zeros(3, requires_grad=True)
    x.sqrt().sum().backward()


def test_mask():
    scores = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    assert scores.softmax(-1).isfinite().all()


def test_constants():
    torch.full((3,), float("inf"))
    data = torch.tensor([1.0, float("nan")]) + 1
    assert data.isnan().any()
    torch.where(torch.tensor([True, False]), torch.tensor(float("-inf")), torch.zeros(2))


def test_behind_constants():
    torch.tensor([1.0, float("nan")]) + 1
    torch.log(-torch.ones(3))


def test_fixture(bad):
    bad + 1


def test_absorbed():
    torch.log(torch.zeros(3)).exp()


@pytest.mark.sherlorch_allow
def test_meant():
    assert (torch.zeros(3) / torch.zeros(3)).isnan().all()


def test_that_fails_by_itself():
    assert torch.log(-torch.ones(1)).item() == 0


class TestsOfNaN:
    pytestmark = pytest.mark.sherlorch_allow

    def test_meant(self):
        torch.log(-torch.ones(1))
"""


def run(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    pytester.makepyfile(test_it=TESTS)
    return pytester.runpytest_inprocess("-p", "no:xdist", "--strict-markers", "-rf", "-q", *options)


@needs_forward_lines
def test_each_test_with_a_fault_fails_with_the_report(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--sherlorch")
    result.assert_outcomes(passed=6, failed=5)
    result.stdout.fnmatch_lines(
        [
            "*NaN in * was born in aten.div.Tensor (0 / 0) at test_it.py:16 *forward*",
            "*why   0 / 0 is NaN*",
            "*meant?  mark the test with @pytest.mark.sherlorch_allow",
            "*born in aten.*test_it.py:21 *backward*",
            "*born in aten.log.default (log(-1)) at test_it.py:38 *",
            "*came in with an input*first used at test_it.py:42*",
            "*assert nan == 0*",
            "*- Captured sherlorch call -*",
            "*aten.log.default*",
        ]
    )
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_backward*"])


def test_at_function_level_backward_is_not_seen(pytester: pytest.Pytester) -> None:
    result = run(pytester, "--sherlorch", "--sherlorch-level=function")
    result.assert_outcomes(passed=7, failed=4)
    result.stdout.fnmatch_lines(["*NaN in * was born in div (0 / 0) at test_it.py:16 *"])


def test_without_the_option_nothing_happens(pytester: pytest.Pytester) -> None:
    run(pytester).assert_outcomes(passed=10, failed=1)


def test_without_the_option_torch_is_not_imported(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("sherlorch")
            assert not {"torch", "sherlorch"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:xdist", "-W", "error").assert_outcomes(passed=1)


def test_workers_of_xdist_trace_too(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile("import torch\ndef test_it():\n    torch.log(-torch.ones(2))\n")
    result = pytester.runpytest_subprocess("--sherlorch", "-n1")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*born in aten.log.default*"])
