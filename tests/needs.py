"""Marks for what an older torch does not carry."""

from __future__ import annotations

import pytest
import torch

from sherlorch.compat import SEES_PARTS

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def has_torch(version: str) -> bool:
    """Is this torch `version` ("2.6") or newer?"""
    return tuple(map(int, version.split("."))) <= TORCH


def needs_torch(version: str, what: str) -> pytest.MarkDecorator:
    """Skips below `version`, and says for what it is needed."""
    return needs(has_torch(version), version, what)


def needs(there: bool, version: str, what: str) -> pytest.MarkDecorator:
    """Skips where something is not `there`, and names the version that brought it."""
    return pytest.mark.skipif(not there, reason=f"{what}: torch {version}")


# Torch 2.0 does not tell the numbers of autograd nodes: a backward kernel has no forward op, line or module.
needs_forward_lines = needs_torch("2.1", "backward kernels know their forward op")
needs_eager_compiled = needs_torch("2.6", "compiled functions run eagerly under a trace")


def skip_as_subclass(under_dispatch_mode: bool) -> None:
    """Ends a test that makes a subclass of a tensor under a dispatch mode, whichever mode it is."""
    if under_dispatch_mode and not has_torch("2.6"):
        pytest.skip("`as_subclass` under a dispatch mode: torch 2.6")


needs_examples = needs_torch("2.1", "instrument(example_inputs=)")
needs_export = needs(hasattr(torch, "export"), "2.1", "torch.export")
needs_float8 = needs(hasattr(torch, "float8_e5m2"), "2.1", "float8")
needs_jagged = needs(hasattr(torch, "jagged"), "2.2", "jagged nested tensors")
needs_filled_memory = needs(
    hasattr(torch.utils, "deterministic"), "2.2", "memory that was never written is filled with NaN"
)
needs_scaler = needs(hasattr(torch.amp, "GradScaler"), "2.3", "a GradScaler on the CPU")
needs_fused = needs_torch("2.4", "fused optimizers on the CPU")
# Came one by one from 2.1 on. 2.4 has all that is used here.
needs_half = needs_torch("2.4", "half-precision kernels on the CPU")
needs_half_autocast = needs_torch("2.4", "autocast to half precision on the CPU")


def skip_unseen_parts(level: str) -> None:
    """Ends a test of `x[i]` or `x[i] = ...` at a level that does not see it."""
    if level == "function" and not SEES_PARTS:
        pytest.skip("x[i] and x[i] = ... seen at level='function': torch 2.1")
