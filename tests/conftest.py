"""What holds for every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from needs import TORCH


def modes() -> tuple[int, int]:
    """How many function and dispatch modes are on the stacks of this thread."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def pytest_configure(config: pytest.Config) -> None:
    if TORCH == (2, 4):  # whose checkpoint calls what it has deprecated itself
        config.addinivalue_line(
            "filterwarnings", "ignore:`torch.cpu.amp.autocast:FutureWarning:torch.utils.checkpoint"
        )
    if sys.version_info[:3] == (3, 13, 0):  # where Dynamo warns of that Python
        config.addinivalue_line(
            "filterwarnings", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"
        )
    if sys.version_info >= (3, 14):  # where torch's forward-mode derivatives still use what it has deprecated
        config.addinivalue_line(
            "filterwarnings", "ignore:`torch.jit.script` is not supported in Python 3.14:FutureWarning"
        )


@pytest.fixture(autouse=True)
def no_mode_stays() -> Iterator[None]:
    """A mode that a test leaves behind would listen to all tests after it."""
    before = modes()
    yield
    after = modes()
    assert after == before, f"(function, dispatch) modes: {before} before the test, {after} after it"
