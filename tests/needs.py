"""What an older torch does not carry: marks, and what torch itself says where a program asks for it."""

from __future__ import annotations

import re

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
needs_one_detach = needs_torch("2.1", "a mode further in changes how often `detach` is dispatched")
needs_eager_compiled = needs_torch("2.6", "compiled functions run eagerly under a trace")


def skip_unseen_assignments(level: str) -> None:
    """Ends a test of `x[i] = ...` at a level that does not see it."""
    if level == "function" and not SEES_ASSIGNMENTS:
        pytest.skip("assignments to parts seen at level='function': torch 2.1")


# What torch, or a test, says where a feature came later: (message, what it is, the version that has it). A
# version that was tried has it; the one in which it came may be older.
MISSING = [
    (r"not implemented for '(Half|ComplexFloat)'", "a kernel of this dtype on the CPU", "2.4"),
    (r"AutocastCPU only support Bfloat16", "autocast to float16 on the CPU", "2.4"),
    (r"`fused=True` requires all the params to be CUDA", "fused optimizers on the CPU", "2.4"),
    (r"unexpected keyword argument 'fused'", "fused SGD", "2.4"),
    (r"has no attribute 'GradScaler'", "a gradient scaler on the CPU", "2.3"),
    (r"has no attribute 'jagged'", "jagged nested tensors", "2.1"),
    (r"has no attribute 'float8_", "float8", "2.1"),
    (r"has no attribute '_foreach_copy_'", "_foreach_copy_", "2.4"),
    (r"'torch.utils' has no attribute 'deterministic'", "torch.utils.deterministic", "2.4"),
    (r"has no attribute 'export'", "torch.export", "2.1"),
    (r"^example_inputs= needs torch 2.1 or newer", "instrument(example_inputs=)", "2.1"),
    (r"No module named 'torch.utils.flop_counter'", "torch.utils.flop_counter", "2.4"),
    (r"has no attribute 'device_mesh'", "device meshes", "2.4"),
    (r"parametrizations' has no attribute 'weight_norm'", "parametrizations.weight_norm", "2.4"),
    (r"has no attribute 'register_post_accumulate_grad_hook'", "hooks after accumulation", "2.1"),
    (r"already associated to a python object", "as_subclass under a dispatch mode", "2.4"),
    (r"object has no attribute '_sequence_nr'", "numbers of autograd nodes", "2.1"),
    (r"^changing options to `torch.compile\(\)`", "compiling again with other options", "2.4"),
]


def missing(error: BaseException) -> str | None:
    """Why a test that ended so cannot run with this torch."""
    for message, what, version in MISSING:
        if not has_torch(version) and re.search(message, str(error)):
            return f"{what}: torch {version}"
    return None
