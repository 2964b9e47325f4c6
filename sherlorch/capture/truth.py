"""What the bad element would be with enough range: Python's doubles, where the formula is a simple one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Callable

import torch
from torch import Tensor

from sherlorch.capture.call import Call
from sherlorch.capture.names import CASTS, CONVOLUTIONS, PRODUCTS
from sherlorch.health import Number, value_at

# Of the operands and of `alpha` or `value`, 1 where the call has none.
_OF_OPERANDS: dict[str, Callable[[Sequence[float], float], float]] = {
    "add": lambda v, scale: v[0] + scale * v[1],
    "sub": lambda v, scale: v[0] - scale * v[1],
    "mul": lambda v, scale: v[0] * v[1],
    "div": lambda v, scale: v[0] / v[1],
    "pow": lambda v, scale: v[0] ** v[1],
    "square": lambda v, scale: v[0] * v[0],
    "exp": lambda v, scale: math.exp(v[0]),
    "exp2": lambda v, scale: 2.0 ** v[0],
    "expm1": lambda v, scale: math.expm1(v[0]),
    "sinh": lambda v, scale: math.sinh(v[0]),
    "cosh": lambda v, scale: math.cosh(v[0]),
    "reciprocal": lambda v, scale: 1.0 / v[0],
    "addcmul": lambda v, scale: v[0] + scale * v[1] * v[2],
    "addcdiv": lambda v, scale: v[0] + scale * v[1] / v[2],
    "lerp": lambda v, scale: v[0] + v[2] * (v[1] - v[0]),
    "hypot": lambda v, scale: math.hypot(v[0], v[1]),
}
_OF_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "nansum": torch.nansum,
    "cumsum": torch.sum,
    "mean": torch.mean,
    "prod": torch.prod,
    "cumprod": torch.prod,
    "var": torch.var,
    "std": torch.std,
    "norm": lambda row: row.square().sum().sqrt(),
    "einsum": torch.sum,
}
_BIAS = {"addmm": 0, "baddbmm": 0, "addmv": 0, "linear": 2}


def headroom_of(
    call: Call, operands: Sequence[Number | None], terms: Tensor | None, index: tuple[int, ...] | None
) -> float | None:
    """How many times over the largest finite value of its dtype the element at `index` truly is."""
    dtype = call.result.dtype
    if index is None or not dtype.is_floating_point or dtype is torch.float64:
        return None
    true = _of_operands(call, operands) if terms is None else _of_row(call, terms, index)
    return None if true is None or not math.isfinite(true) else abs(true) / torch.finfo(dtype).max


def _of_operands(call: Call, operands: Sequence[Number | None]) -> float | None:
    values = [float(value) for value in operands if isinstance(value, (int, float))]
    if not values or len(values) < len(operands):
        return None
    if call.name in CASTS:
        return values[-1]
    formula = _OF_OPERANDS.get(call.name)
    scale = call.arguments.get("alpha", call.arguments.get("value"))
    try:
        true = None if formula is None else formula(values, 1 if scale is None else scale)
    except (OverflowError, ZeroDivisionError, IndexError):  # beyond double precision, or no number at all
        return None
    return true if isinstance(true, (int, float)) else None


def _of_row(call: Call, terms: Tensor, index: tuple[int, ...]) -> float | None:
    product = call.name in PRODUCTS or call.name in CONVOLUTIONS
    formula = torch.sum if product else _OF_ROW.get(call.name)
    if formula is None or terms.is_complex() or not terms.numel():
        return None
    if call.name == "norm" and call.argument("ord", 1) not in (None, 2, "fro"):
        return None
    true = formula(terms).item()
    if not product:
        return float(true)
    return float(_number(call, "alpha") * true + _number(call, "beta") * _bias(call, index))


def _number(call: Call, name: str) -> float:
    value = call.arguments.get(name)
    return value if isinstance(value, (int, float)) else 1.0


def _bias(call: Call, index: tuple[int, ...]) -> float:
    bias = call.tensor(2 if call.name in CONVOLUTIONS else _BIAS.get(call.name, -1))
    if bias is None:
        return 0.0
    if call.name in CONVOLUTIONS:
        return float(bias[index[1]]) if len(index) > 2 else 0.0
    value = value_at(bias, index, tuple(call.result.shape))
    return float(value) if isinstance(value, (int, float)) else 0.0
