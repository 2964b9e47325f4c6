"""Marks for what an older torch does not carry."""

from __future__ import annotations

import pytest
import torch

from sherlorch.compat import SEES_ASSIGNMENTS

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def has_torch(version: str) -> bool:
    """Is this torch `version` ("2.6") or newer?"""
    return tuple(map(int, version.split("."))) <= TORCH


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """Skips below `version`, and says for what it is needed."""
    return pytest.mark.skipif(not has_torch(version), reason=f"{what}: torch {version}")


# Torch 2.0 does not tell the numbers of autograd nodes: a backward kernel has no forward op, line or module.
needs_forward_lines = needs_torch("2.1", "backward kernels know their forward op")
EAGER_COMPILED = "compiled functions run eagerly under a trace"
needs_eager_compiled = needs_torch("2.6", EAGER_COMPILED)


def skip_compiled() -> None:
    """`needs_eager_compiled` for one case of a test."""
    if not has_torch("2.6"):
        pytest.skip(f"{EAGER_COMPILED}: torch 2.6")


def skip_as_subclass(under_dispatch_mode: bool) -> None:
    """Ends a test that makes a subclass of a tensor under a dispatch mode, whichever mode it is."""
    if under_dispatch_mode and not has_torch("2.6"):
        pytest.skip("`as_subclass` under a dispatch mode: torch 2.6")


def skip_unseen_assignments(level: str) -> None:
    """Ends a test of `x[i] = ...` at a level that does not see it."""
    if level == "function" and not SEES_ASSIGNMENTS:
        pytest.skip("assignments to parts seen at level='function': torch 2.1")
