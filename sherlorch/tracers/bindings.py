"""The kernel of an overload by way of torch's own Python binding, which parses arguments in half the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# None where `TensorBase` has another name yet: torch 2.0 dispatches some of its bindings twice (`detach`).
_BASE = getattr(torch._C, "TensorBase", None)
_HOMES = () if _BASE is None else (torch._C._VariableFunctions, _BASE, torch._C._nn)

# Overloads that their binding resolves to whenever it is given the arguments of one of their calls.
_RESOLVED = frozenset(
    {
        "add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor", "mul.Tensor", "mul_.Tensor",
        "div.Tensor", "div_.Tensor", "addcmul.default", "addcmul_.default", "addcdiv.default",
        "addcdiv_.default", "lerp_.Scalar", "mm.default", "bmm.default", "addmm.default",
        "baddbmm.default", "convolution.default", "exp.default", "log.default", "sqrt.default",
        "rsqrt.default", "reciprocal.default", "neg.default", "abs.default", "tanh.default",
        "sigmoid.default", "relu.default", "silu.default", "gelu.default", "pow.Tensor_Scalar",
        "_softmax.default", "_log_softmax.default", "_softmax_backward_data.default",
        "_log_softmax_backward_data.default", "native_layer_norm.default", "masked_fill.Scalar",
        "sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "cat.default",
        "stack.default", "view.default", "t.default", "transpose.int", "permute.default",
        "expand.default", "unsqueeze.default", "select.int", "clone.default", "detach.default",
    }
)  # fmt: skip


def binding_of(overload: Any) -> Callable[..., Any]:
    """What to call for an aten overload."""
    namespace, _, name = str(overload).partition(".")
    if namespace == "aten" and name in _RESOLVED:
        base = name.partition(".")[0]
        for home in _HOMES:
            found = getattr(home, base, None)
            if found is not None:
                return found  # type: ignore[no-any-return]
    return overload._op  # type: ignore[no-any-return]
