"""Ranges of the dtypes, and how numbers are written in a sentence."""

from __future__ import annotations

import math

import torch

from sherlorch.capture.names import plain_name
from sherlorch.explain.fault import Fault


def _info(dtype: str) -> torch.finfo:
    kind = getattr(torch, dtype, None)
    if isinstance(kind, torch.dtype) and (kind.is_floating_point or kind.is_complex):
        return torch.finfo(kind)
    return torch.finfo(torch.float32)


def largest(dtype: str) -> float:
    return float(_info(dtype).max)


def tiny(dtype: str) -> float:
    """The smallest number above zero."""
    info = _info(dtype)
    return float(info.tiny * info.eps)


def spacing(dtype: str) -> float:
    """The gap above one."""
    return float(_info(dtype).eps)


def rounds_to_zero(value: float, dtype: str) -> bool:
    return 0 < abs(value) <= tiny(dtype) / 2


def epsilon_for(dtype: str) -> str:
    """An epsilon to write that survives in `dtype`."""
    return {"float16": "1e-4", "bfloat16": "1e-6", "float64": "1e-12", "complex128": "1e-12"}.get(
        dtype, "1e-2" if dtype.startswith("float8") else "1e-8"
    )


def show(value: float | None, unknown: str = "x") -> str:
    """Four digits; `unknown` where nobody saw the value.

    >>> show(-0.0), show(float("-inf")), show(65504.0), show(None)
    ('0', '-inf', '65504', 'x')
    """
    if value is None:
        return unknown
    if value == 0:
        return "0"
    return (
        f"{value:.0f}"
        if math.isfinite(value) and value == round(value) and abs(value) < 1e6
        else f"{value:.4g}"
    )


def over(fault: Fault) -> str:
    """How far out of range the true value is: "3.25 times the largest float16, 65504"."""
    limit = f"the largest {fault.dtype}, {show(largest(fault.dtype))}"
    headroom = fault.evidence.headroom if fault.evidence else None
    if headroom is None:
        return f"more than {limit}"
    if 1 <= headroom < 1.001:
        return f"just over {limit}"
    on_the_way = "" if headroom > 1 else ", but a value on the way to it exceeds that"
    return f"{headroom:.4g} times {limit}{on_the_way}"


def written_by(fault: Fault) -> str:
    """Where an infinity comes from that was meant, in brackets."""
    return f" (the infinity was written by {', '.join(fault.constants)})" if fault.constants else ""


def aftermath(fault: Fault) -> str:
    """What the Inf of this fault does on its way, as the end of a sentence."""
    after = fault.downstream[1:] if fault.downstream[:1] == (fault.op,) else fault.downstream
    return next((_NEXT[name] for name in map(plain_name, after) if name in _NEXT), "")


_NEXT = {
    "mul": "; where it meets a factor of zero it is 0 * inf = NaN",
    "softmax": "; softmax of a row with +inf, or with nothing but -inf, is NaN",
    "log_softmax": "; log_softmax of a row with +inf, or with nothing but -inf, is NaN",
    "div": "; divided by another infinity it is NaN (inf / inf)",
    "batch_norm": "; batch norm averages it into running_mean and running_var, where it stays",
    "where": "; where() hides it from the result, but backward multiplies it by a zero gradient: 0 * inf "
    "= NaN",
}
