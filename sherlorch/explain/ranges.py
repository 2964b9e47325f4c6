"""Finite numbers whose result does not fit the dtype, and kernels that broke a law."""

from __future__ import annotations

import math
import re

from sherlorch.capture.names import CASTS
from sherlorch.explain.fault import Fault, Pattern
from sherlorch.explain.figures import aftermath, largest, over, show
from sherlorch.explain.line import spelled

_EXPONENTIALS = ("exp", "expm1", "exp2", "cosh", "sinh", "i0", "ldexp", "logcumsumexp")
_MATRIX = (
    "mm", "bmm", "matmul", "addmm", "baddbmm", "linear", "mv", "addmv", "dot", "vdot", "inner", "einsum",
    "convolution", "conv1d", "conv2d", "conv3d", "bilinear", "cdist", "matrix_exp", "matrix_power",
    "multi_dot", "scaled_dot_product_attention",
)  # fmt: skip
_SUMS = (
    "sum", "mean", "cumsum", "nansum", "norm", "var", "std", "var_mean", "std_mean", "dist", "index_add",
    "scatter_add", "layer_norm", "batch_norm", "group_norm",
)  # fmt: skip
_PRODUCTS = (
    "mul",
    "prod",
    "cumprod",
    "addcmul",
    "add",
    "sub",
    "div",
    "lerp",
    "addcdiv",
    "hypot",
    "reciprocal",
)
_SQUARES = ("pow", "square")
_LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss", "gaussian_nll_loss")
_GROWN = 1e9  # no healthy activation, weight or gradient comes near it


def _overflows(fault: Fault, *names: str) -> bool:
    return fault.name in names and fault.has_inf and fault.origin == "introduced"


def _exponential(fault: Fault) -> bool:
    return _overflows(fault, *_EXPONENTIALS) and (
        fault.name == "ldexp" or fault.may_be(0, lambda value: abs(value) > 5)
    )


def _exponential_why(fault: Fault) -> str:
    limit = math.log2(largest(fault.dtype)) if fault.name == "exp2" else math.log(largest(fault.dtype))
    call = f"{fault.name}({show(fault.operand(0))})"
    return (
        f"{call} overflows {fault.dtype}, which ends at {fault.name}({limit:.4g}) = "
        f"{show(largest(fault.dtype))}{aftermath(fault)}"
    )


def _exponential_remedy(fault: Fault) -> str:
    source = fault.source
    argument = spelled(source, fault.name, 0, "x")
    if "sum" in source or fault.later("sum", "logsumexp"):
        return (
            f"subtract the maximum first (softmax, logsumexp): `torch.exp({argument} - "
            f"{argument}.amax(-1, keepdim=True))`"
        )
    if re.search(r"1(\.0)?\s*/\s*\(", source) or fault.later("reciprocal"):
        return "this is a sigmoid by hand: use `torch.sigmoid(x)`, which is finite everywhere"
    if re.search(r"\blog(1p)?\(", source) or fault.later("log", "log1p"):
        return (
            f"this is softplus or its inverse by hand: use `F.softplus({argument})`, or `x + "
            "torch.log(-torch.expm1(-x))` for log(exp(x) - 1)"
        )
    if fault.later("where"):
        return (
            f"clamp its input to where that branch is used, `torch.exp({argument}.clamp(max=0))`, or use "
            "expm1 / F.elu, before torch.where"
        )
    return (
        "clamp its input, "
        f"`torch.{fault.name}({argument}.clamp(max={math.log(largest(fault.dtype)) - 0.5:.0f}))`, or stay "
        "in log space"
    )


def _what(fault: Fault) -> str:
    """The computation in numbers: "5000 ** 2", "32 products, the largest 64 * 64"."""
    values = [show(value) for value in fault.operands if value is not None]
    sign = {"mul": "*", "pow": "**", "add": "+", "sub": "-", "div": "/"}.get(fault.name)
    if sign and len(values) > 1:
        return f" {values[0]} {sign} {values[1]}"
    if fault.name == "square" and values:
        return f" {values[0]} ** 2"
    if fault.name in CASTS and values:
        return f" {values[-1]}"
    note = fault.note("largest of")
    if note:
        return f" ({note})"
    if fault.count is not None and fault.row:
        return f" of {fault.count} values up to {show(max(fault.row, key=abs))}"
    return ""


def _half(fault: Fault) -> bool:
    return fault.half and fault.has_inf and fault.origin == "introduced"


def _kind(fault: Fault) -> str:
    if fault.name in CASTS:
        return f"the cast of{_what(fault)} to {fault.dtype}"
    if fault.name in _MATRIX:
        return f"the matrix product {fault.name}{_what(fault)}"
    if fault.name in _SUMS:
        return f"the {fault.name}{_what(fault)}"
    if fault.name in _SQUARES:
        return f"the square or power{_what(fault)}"
    if fault.name in ("mul", "prod", "cumprod", "addcmul"):
        return f"the product{_what(fault)}"
    return f"{fault.name}{_what(fault)}"


def _grown(fault: Fault) -> bool:
    sizes = [abs(bound) for row in fault.inputs for bound in (row.min, row.max) if bound is not None]
    return bool(sizes) and max(sizes) > _GROWN and not fault.half


def _grows(fault: Fault) -> str:
    if fault.has_ancestor(fault.name) and fault.name in _MATRIX:
        return (
            "as in a recurrence that multiplies by the same matrix at every step, or in training that "
            "diverges"
        )
    return "as in training that diverges (learning rate too high, no normalisation)"


def _half_backward(fault: Fault) -> bool:
    return _half(fault) and fault.backward


PATTERNS = [
    Pattern(
        "exponential_overflow",
        when=_exponential,
        why=_exponential_why,
        remedy=_exponential_remedy,
    ),
    Pattern(
        "half_gradient_overflow",
        when=_half_backward,
        why=lambda fault: (
            f"{_kind(fault)} overflows in backward, the gradient does not fit in half precision: it is "
            f"{over(fault)}; with a GradScaler the first steps do this on purpose and are skipped, which "
            "is normal"
        ),
        remedy="scale the loss with `torch.amp.GradScaler` (it skips such steps and lowers the scale), "
        "start it lower, or use bfloat16",
    ),
    Pattern(
        "half_overflow",
        when=_half,
        why=lambda fault: (
            f"{_kind(fault)} overflows, it does not fit in half precision: the value is "
            f"{over(fault)}{aftermath(fault)}"
        ),
        remedy=lambda fault: (
            "clamp before the cast, `x.clamp(-65504, 65504)`, or keep this tensor in float32"
            if fault.name in CASTS
            else "keep this operation in float32, `with torch.autocast(device, enabled=False): ... "
            "x.float()`, scale or normalise its inputs first, clamp to the half range, or use bfloat16"
        ),
    ),
    Pattern(
        "product_overflow",
        when=lambda fault: _overflows(fault, "prod", "cumprod"),
        why=lambda fault: (
            f"the product{_what(fault)} overflows {fault.dtype}: {over(fault)}{aftermath(fault)}"
        ),
        remedy="work with logarithms, `x.log().sum(dim).exp()` (cumsum of logs for cumprod), or rescale "
        "the factors",
    ),
    Pattern(
        "diverged",
        when=lambda fault: (
            _overflows(fault, *_MATRIX, *_SUMS, *_PRODUCTS, *_SQUARES, *_LOSSES) and _grown(fault)
        ),
        why=lambda fault: (
            f"{_kind(fault)} overflows {fault.dtype}: it is {over(fault)}; its inputs had grown to "
            f"{show(_size(fault))}, {_grows(fault)}"
        ),
        remedy="lower the learning rate, clip the gradients with `torch.nn.utils.clip_grad_norm_(params, "
        "1.0)`, or normalise the inputs of this operation",
    ),
    Pattern(
        "overflow",
        when=lambda fault: _overflows(fault, *CASTS, *_MATRIX, *_SUMS, *_PRODUCTS, *_SQUARES, *_LOSSES),
        why=lambda fault: f"{_kind(fault)} overflows {fault.dtype}: it is {over(fault)}{aftermath(fault)}",
        remedy="scale the inputs down before this operation, or compute it in float64 or in log space",
    ),
    Pattern(
        "came_in",
        when=lambda fault: fault.origin == "propagated",
        why=lambda fault: (
            f"the {'NaN' if fault.has_nan else 'Inf'} came in with {_carrier(fault)}: {fault.name} only "
            "passes it on"
        ),
        remedy="look at the operation that made that input",
    ),
]


def _size(fault: Fault) -> float:
    return max(abs(bound) for row in fault.inputs for bound in (row.min, row.max) if bound is not None)


def _carrier(fault: Fault) -> str:
    return next((f"`{row.name}`" for row in fault.inputs if row.nonfinite), "one of its inputs")


FAULTY_KERNEL = Pattern(
    "faulty_kernel",
    when=lambda fault: fault.bounded and fault.origin == "introduced",
    why=lambda fault: (
        f"{fault.op_name} cannot give {'NaN' if fault.has_nan else 'Inf'} from finite inputs: this is a "
        "faulty kernel, a race on the memory, or memory that is out of bounds or broken"
    ),
    remedy="run the same call again and on the CPU, and compare; try `CUDA_LAUNCH_BLOCKING=1` and "
    "compute-sanitizer, and another version of the kernel",
)
