"""Infinities that meet: each other, or a zero."""

from __future__ import annotations

import math

from sherlorch.explain.fault import Fault, Pattern
from sherlorch.explain.figures import largest, show, written_by

_PRODUCTS = ("mm", "bmm", "matmul", "addmm", "baddbmm", "linear", "dot", "mv", "einsum", "convolution")
_SUMS = ("sum", "mean", "cumsum", "var", "std", "nansum", "index_add", "scatter_add")


def _opposite(fault: Fault) -> bool:
    if fault.origin != "converted" or not fault.has_nan:
        return False
    if fault.name in ("add", "sub", "rsub", "lerp"):
        known = [value for value in fault.operands[:2] if value is not None]
        return len(known) < 2 or all(abs(value) == math.inf for value in known)
    if fault.name in _SUMS:
        return True
    return fault.name in _PRODUCTS and not any(math.isnan(value) for value in fault.row) and bool(fault.row)


def _opposite_why(fault: Fault) -> str:
    if fault.name == "sub" and fault.operands[:2] == (-math.inf, -math.inf):
        return (
            "-inf - (-inf) = NaN (inf - inf): both are -inf, as in a fully masked row less its "
            f"maximum{written_by(fault)}"
        )
    if fault.name in ("var", "std"):
        return f"{fault.name} of values that contain inf: it subtracts a mean of inf, inf - inf = NaN"
    return f"inf - inf = NaN: two infinities of opposite effect meet in {fault.name}{written_by(fault)}"


def _zero_inf(fault: Fault) -> bool:
    if fault.origin == "propagated" or not fault.has_nan:
        return False
    if fault.name in ("mul", "addcmul"):
        return fault.zero_meets_inf or (fault.zero_may_meet_inf and fault.origin == "converted")
    return fault.name in _PRODUCTS and fault.origin == "converted"


def _zero_inf_why(fault: Fault) -> str:
    values = [value for value in fault.operands if value is not None]
    inf = next((value for value in values if abs(value) == math.inf), math.inf)
    shown = "(-inf)" if inf < 0 else "inf"
    mask = "; a mask that multiplies cannot remove an infinity" if fault.name == "mul" else ""
    note = fault.note("largest of")
    return (
        f"0 * {shown} = NaN: a zero factor meets an infinity in "
        f"{fault.name}{written_by(fault)}{mask}{f' ({note})' if note else ''}"
    )


PATTERNS = [
    Pattern(
        "masks_added",
        when=lambda fault: (
            fault.is_fresh("add", "sub")
            and fault.has_inf
            and fault.origin == "introduced"
            and len(fault.operands) > 1
            and all(
                value is not None and abs(value) > 0.25 * largest(fault.dtype) for value in fault.operands[:2]
            )
            and fault.phase != "optimizer"
        ),
        why=lambda fault: (
            f"{show(fault.operand(0))} + {show(fault.operand(1))}: two masks filled with the most "
            f"negative finite {fault.dtype} are added, min + min overflows to -inf, and a row masked "
            "everywhere twice is all -inf, which softmax turns into NaN"
        ),
        remedy="combine the masks as booleans, `(a | b)`, and fill once with the finite minimum",
    ),
    Pattern(
        "inf_over_inf",
        when=lambda fault: (
            fault.name == "div"
            and fault.origin == "converted"
            and fault.has_nan
            and fault.may_be(0, math.isinf)
            and fault.may_be(1, math.isinf)
        ),
        why="inf / inf = NaN: numerator and denominator both overflowed before this division",
        remedy="scale before dividing: subtract the maximum inside exp (softmax), or normalise by the "
        "largest magnitude first",
    ),
    Pattern(
        "zero_times_inf",
        when=_zero_inf,
        why=_zero_inf_why,
        remedy="select instead of multiplying, `torch.where(mask, x, 0)` or masked_fill, or use a large "
        "finite number in place of inf",
    ),
    Pattern(
        "inf_minus_inf",
        when=_opposite,
        why=_opposite_why,
        remedy="use finite bounds, `torch.finfo(x.dtype).min`, in place of -inf, or drop infinite "
        "entries before this operation",
    ),
]
