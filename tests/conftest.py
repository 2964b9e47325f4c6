"""What holds for every test; what an old torch does not have is skipped, and says which version has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import missing

PACKAGE = Path(__file__).resolve().parent.parent / "sherlorch"


def modes() -> tuple[int, int]:
    """How many function and dispatch modes are on the stacks of this thread."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


@pytest.fixture(autouse=True)
def no_mode_stays() -> Iterator[None]:
    """A mode that a test leaves behind would listen to all tests after it."""
    before = modes()
    yield
    after = modes()
    assert after == before, f"(function, dispatch) modes: {before} before the test, {after} after it"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _or_skipped()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _or_skipped()


def _or_skipped() -> Iterator[None]:
    outcome: Any = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    reason = missing(error) if error is not None else None
    if reason and (not isinstance(error, AttributeError) or not _raised_in_the_package(error)):
        outcome.force_exception(pytest.skip.Exception(reason))


def _raised_in_the_package(error: BaseException) -> bool:
    """The product may not ask for what torch lacks."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and PACKAGE in Path(traceback.tb_frame.f_code.co_filename).parents
