"""Backward: derivatives that are infinite, and zeros that meet them."""

from __future__ import annotations

import math

from sherlorch.explain.fault import Fault, Pattern
from sherlorch.explain.figures import aftermath, over, show
from sherlorch.explain.line import spelled

_NORMS = (
    "norm", "cdist", "pairwise_distance", "dist", "hypot", "atan2", "angle", "abs", "normalize", "renorm",
    "cosine_similarity", "polar",
)  # fmt: skip
_ARCS = ("acos", "asin", "atanh", "acosh")
_LOGS = ("log", "log2", "log10", "log1p")
_EXPONENTIALS = ("exp", "expm1", "exp2", "cosh", "sinh")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv")


def _divides_by_zero(fault: Fault) -> bool:
    return fault.name in ("div", "reciprocal", "rsqrt") and fault.may_be_zero(0 if fault.name != "div" else 1)


def _at_zero(fault: Fault, *forward: str) -> bool:
    """The derivative of `forward` divided by zero, or went wrong where nothing finer is known."""
    if not fault.differentiates(*forward) or fault.origin == "propagated":
        return False
    if fault.name == "div":
        return fault.may_vanish(1)
    return fault.name in forward or fault.name.endswith("backward") or fault.name in ("reciprocal", "rsqrt")


def _quotient(fault: Fault, divisor: str) -> str:
    """The division that took place: "0 / 0 = NaN" or "0.5 / 0 = inf", with what the divisor was."""
    if fault.has_nan:
        routed = "; a branch, hinge, slice or mask that does not select the element sends this zero gradient"
        return f"the gradient that arrives is 0 and backward divides it by {divisor}: 0 / 0 = NaN{routed}"
    top = fault.operand(0) if fault.name == "div" else None
    return f"{show(top or None, 'the gradient')} is divided by {divisor}: x / 0 = inf{_then(fault)}"


def _then(fault: Fault) -> str:
    if "var" in fault.source or fault.has_ancestor("var", "var_mean"):
        return ", and var's backward multiplies it by a zero deviation from the mean: 0 * inf = NaN"
    return aftermath(fault)


def _root_remedy(fault: Fault) -> str:
    inside = spelled(fault.source, "sqrt", 0, "x")
    return (
        f"add or clamp inside the root, `torch.sqrt({inside} + 1e-12)` or "
        f"`{inside}.clamp_min(1e-12).sqrt()` (an eps after the root does not help), use "
        "torch.linalg.vector_norm or Tensor.std, whose derivative at 0 is 0, or apply where() to the "
        "input of the root as well"
    )


def _forward_of(fault: Fault, *names: str) -> str:
    return next((name for name in names if fault.differentiates(name)), fault.name)


def _power(fault: Fault) -> bool:
    if not fault.differentiates("pow", "norm") or fault.origin == "propagated":
        return False
    if fault.name == "pow" and fault.operands:
        return fault.may_be_zero(0) and fault.may_be(1, lambda exponent: exponent < 0)
    return fault.differentiates("pow") and (
        (fault.name == "mul" and fault.zero_meets_inf) or not fault.operands
    )


def _power_why(fault: Fault) -> str:
    exponent = fault.operand(1) if fault.name == "pow" else None
    written = "x ** p for p < 1" if exponent is None else f"x ** {show(exponent + 1)}"
    formed = "0 to a negative power" if exponent is None else f"0 ** {show(exponent)}"
    met = (
        "; the zero gradient times it is 0 * inf = NaN"
        if fault.has_nan
        else "; it then meets a zero factor: 0 * inf = NaN"
    )
    return f"the derivative of {written} at x = 0 is infinite: the backward of pow forms {formed} = inf{met}"


def _product_rule(fault: Fault) -> bool:
    custom = any("prod" in name for name in fault.derivative_of)
    return fault.origin != "propagated" and (
        fault.differentiates("prod", "cumprod") or (custom and _divides_by_zero(fault))
    )


def _product_rule_why(fault: Fault) -> str:
    if fault.name == "div" and fault.has_nan:
        return (
            "the gradient of a product taken as gradient * product / factor is 0 / 0 = NaN where a "
            "factor is zero, although the true derivative, the product of the other factors, is finite"
        )
    return (
        "the backward of prod multiplies prefix and suffix products of the factors; one of them "
        "overflows to inf and meets a zero factor: 0 * inf = NaN"
    )


def _custom(fault: Fault) -> bool:
    """A hand-written torch.autograd.Function divided by zero."""
    node = fault.autograd_node or ""
    return (
        fault.backward
        and node.endswith("Backward")
        and _divides_by_zero(fault)
        and fault.origin == "introduced"
    )


def _repeated_product(fault: Fault) -> bool:
    if not fault.backward or fault.name not in (*_PRODUCTS, "add", "mul") or fault.origin != "introduced":
        return False
    if fault.has_nan or not fault.differentiates(*_PRODUCTS, "mul", "add"):
        return False
    before = [*fault.parents, *fault.grandparents]
    return sum(name.strip("_") in _PRODUCTS for name in before) >= 2


def _unselected(fault: Fault) -> bool:
    return (
        fault.backward
        and fault.has_nan
        and fault.name in ("mul", "where", "masked_fill", *_EXPONENTIALS)
        and fault.origin == "converted"
        and (fault.zero_meets_inf or not fault.operands)
    )


def _unselected_why(fault: Fault) -> str:
    forward = _forward_of(fault, *_EXPONENTIALS, *fault.derivative_of)
    if _gradient_is_inf(fault):
        return f"the backward of {forward} multiplies an infinite gradient by a zero: 0 * inf = NaN"
    return (
        f"the backward of {forward} multiplies the saved inf by a zero gradient: 0 * inf = NaN; where(), "
        "a slice or a mask hid the inf from the result by not selecting that branch, and sends the zero "
        "gradient back"
    )


def _gradient_is_inf(fault: Fault) -> bool:
    return fault.operand(0) is not None and abs(fault.operand(0) or 0) == math.inf


def _unselected_remedy(fault: Fault) -> str:
    forward = _forward_of(fault, *fault.derivative_of)
    if _gradient_is_inf(fault):
        return (
            f"remove the infinite derivative of what follows {forward}, such as a root: `torch.sqrt(x + eps)`"
        )
    return (
        "give the unused branch a harmless input, before and not after: `x_safe = torch.where(condition, "
        f"x, 0)`, then `{forward}(x_safe)`; or clamp the input to where the branch is used"
    )


PATTERNS = [
    Pattern(
        "sqrt_derivative_at_zero",
        when=lambda fault: _at_zero(fault, "sqrt"),
        why=lambda fault: "sqrt'(0) is infinite: " + _quotient(fault, "2 * sqrt(0) = 0"),
        remedy=_root_remedy,
    ),
    Pattern(
        "norm_derivative_at_zero",
        when=lambda fault: (
            _at_zero(fault, *_NORMS)
            or (fault.differentiates("norm", "cdist") and fault.name == "pow" and fault.may_be_zero(0))
            or (
                fault.differentiates("angle", "atan2", "hypot")
                and fault.name == "mul"
                and fault.origin == "converted"
            )
        ),
        why=lambda fault: (
            f"the derivative of {_forward_of(fault, *_NORMS)} at the origin is undefined: "
            + (
                _quotient(fault, "re**2 + im**2 = 0 (or so small that it underflows)")
                if fault.differentiates("atan2", "angle")
                else _quotient(fault, "a norm of 0 (two identical points, a zero vector)")
            )
        ),
        remedy=lambda fault: (
            "mask or floor small magnitudes before taking the phase, `torch.where(z.abs() > 1e-6, z, "
            "torch.ones_like(z))`"
            if fault.differentiates("atan2", "angle")
            else "add eps under the root, `(x.pow(2).sum(-1) + eps).sqrt()`, or keep zero vectors out"
        ),
    ),
    Pattern(
        "std_derivative_at_zero",
        when=lambda fault: _at_zero(fault, "std", "std_mean"),
        why=lambda fault: (
            "the derivative of std for constant values is undefined: " + _quotient(fault, "2 * std = 0")
        ),
        remedy="use `torch.sqrt(x.var(...) + eps)`, with eps inside the root",
    ),
    Pattern(
        "pow_derivative_at_zero",
        when=_power,
        why=_power_why,
        remedy=lambda fault: (
            "keep the base away from zero before the power, "
            f"`{spelled(fault.source, 'pow', 0, 'x')}.clamp_min(eps) ** p`, or use an exponent >= 1"
        ),
    ),
    Pattern(
        "pow_derivative_in_the_exponent",
        when=lambda fault: (
            fault.differentiates("pow")
            and fault.name in ("log", "mul")
            and fault.origin == "introduced"
            and fault.may_be(0, lambda base: base <= 0)
        ),
        why=lambda fault: (
            "the derivative of base ** exponent with respect to the exponent contains log(base), and the "
            f"base is {show(fault.operand(0), 'zero or negative')}: "
            f"{'log of a negative = NaN' if fault.has_nan else 'log(0) = -inf'}"
        ),
        remedy="clamp the base, `base.clamp_min(eps) ** exponent`, or detach the exponent",
    ),
    Pattern(
        "arc_derivative_at_one",
        when=lambda fault: fault.differentiates(*_ARCS) and fault.origin != "propagated",
        why=lambda fault: (
            f"the derivative of {_forward_of(fault, *_ARCS)}(x) at x = 1 or -1 is infinite: it divides by "
            f"{'1 - x**2' if fault.differentiates('atanh') else 'sqrt(1 - x**2)'} = 0"
            + (", and a zero gradient times it is 0 * inf = NaN" if fault.has_nan else aftermath(fault))
        ),
        remedy=lambda fault: (
            f"clamp its input inside the domain: `torch.{_forward_of(fault, *_ARCS)}(x.clamp(-1 + 1e-6, 1 "
            "- 1e-6))`, or use atan2 for angles"
        ),
    ),
    Pattern(
        "product_derivative",
        when=_product_rule,
        why=_product_rule_why,
        remedy="use a division-free gradient (exclusive prefix and suffix products), or work with "
        "logarithms: `x.log().sum().exp()`",
    ),
    Pattern(
        "log_derivative_at_zero",
        when=lambda fault: _at_zero(fault, *_LOGS),
        why=lambda fault: (
            f"the derivative of {_forward_of(fault, *_LOGS)} at zero is infinite: "
            + _quotient(fault, "x = 0" if not fault.differentiates("log1p") else "1 + x = 0")
        ),
        remedy="take the logarithm of a clamped value, `torch.log(x.clamp_min(eps))`, or use log_softmax "
        "/ logsigmoid",
    ),
    Pattern(
        "reciprocal_derivative",
        when=lambda fault: (
            fault.differentiates("rsqrt", "reciprocal", "logit")
            and fault.origin != "propagated"
            and not fault.zero_meets_inf
        ),
        why=lambda fault: (
            f"the derivative of {_forward_of(fault, 'rsqrt', 'reciprocal', 'logit')} near zero exceeds "
            f"the range of {fault.dtype}: it is a power of 1 / x (x / 0 = inf)"
        ),
        remedy="add the epsilon before, `torch.rsqrt(x + eps)`, with eps large enough for its cube",
    ),
    Pattern(
        "custom_backward",
        when=_custom,
        why=lambda fault: (
            f"the hand-written backward of {_name_of(fault)} divides by zero: "
            f"{'0 / 0 = NaN' if fault.has_nan else 'x / 0 = inf'}"
        ),
        remedy=lambda fault: (
            f"guard the division in its backward: divide by `{spelled(fault.source, 'div', 1, 'x')}` only "
            "where it is not zero"
        ),
    ),
    Pattern(
        "quotient_derivative_at_zero",
        when=lambda fault: _at_zero(fault, "div", "remainder"),
        why=lambda fault: (
            "the derivative of a / b divides the gradient by b, and b is 0: " + _quotient(fault, "b = 0")
        ),
        remedy="select the valid entries before dividing, not after, or make the denominator non-zero "
        "where it is not used: `a / torch.where(b == 0, torch.ones_like(b), b)`",
    ),
    Pattern(
        "zero_times_inf_in_backward",
        when=_unselected,
        why=_unselected_why,
        remedy=_unselected_remedy,
    ),
    Pattern(
        "infinite_gradient",
        when=lambda fault: (
            fault.backward and fault.has_nan and fault.origin == "converted" and "_backward" in fault.name
        ),
        why=lambda fault: (
            f"an infinite gradient arrives at the backward of {_forward_of(fault, *fault.derivative_of)}, "
            "where it meets a zero derivative (0 * inf) or another infinity (inf - inf): NaN"
        ),
        remedy="find what made the gradient infinite: the derivative of a root, logarithm, power or "
        "quotient at zero that comes later in the forward pass",
    ),
    Pattern(
        "exploding_gradient",
        when=_repeated_product,
        why=lambda fault: (
            "an exploding gradient: each recurrent step multiplies the gradient by the same matrix "
            f"again, and after many steps it exceeds the {fault.dtype} range (overflow): it is "
            f"{over(fault)}"
        ),
        remedy="clip the gradient norm, `torch.nn.utils.clip_grad_norm_(params, 1.0)`, shorten or "
        "truncate the unroll (`state = state.detach()`), or keep the recurrent matrix near orthogonal",
    ),
]


def _name_of(fault: Fault) -> str:
    return f"`{(fault.autograd_node or '').rsplit('Backward', 1)[0]}`"
