"""Denominators that are zero: epsilons that vanished, means of nothing, quotients."""

from __future__ import annotations

from sherlorch.explain.fault import Fault, Pattern
from sherlorch.explain.figures import aftermath, epsilon_for, largest, rounds_to_zero, show, spacing, tiny
from sherlorch.explain.line import literals, spelled

_LOGS = ("log", "log2", "log10")
_SUMS = ("sum", "nansum", "cumsum", "count_nonzero", "einsum")
_EXPONENTIALS = ("exp", "softmax", "sigmoid", "softplus", "exp2")
_MASKS = ("mul", "masked_fill", "where", "index_put", "scatter", "threshold", "relu", "dropout")
_ADDS = ("add", "clamp", "clamp_min", "maximum", "max")
_LIMITS = ("clamp", "clamp_max", "minimum")
_NORMALISING = (
    "normalize", "cosine_similarity", "layer_norm", "group_norm", "batch_norm", "rms_norm", "instance_norm",
)  # fmt: skip
_DEFAULT_EPSILON = {"normalize": 1e-12, "cosine_similarity": 1e-8}
_DENOMINATOR = {  # op: position of what must not be zero
    "div": 1, "remainder": 1, "fmod": 1, "addcdiv": 2, "reciprocal": 0, "rsqrt": 0, "log": 0, "log2": 0,
    "log10": 0, "pow": 0,
}  # fmt: skip


def _denominator(fault: Fault) -> int:
    return _DENOMINATOR.get(fault.name, 1)


def _lost_epsilon(fault: Fault) -> bool:
    """A zero where an epsilon was added, and that epsilon is nothing in this dtype."""
    if fault.origin != "introduced":
        return False
    given = fault.scalar("eps") or _DEFAULT_EPSILON.get(fault.name)
    if fault.name in _NORMALISING:
        return given is not None and rounds_to_zero(given, fault.dtype)
    place = _denominator(fault)
    if fault.name not in _DENOMINATOR or not fault.may_be_zero(place):
        return False
    written = any(rounds_to_zero(number, fault.dtype) for number in literals(fault.source))
    under_root = fault.maker(place) == "sqrt" and fault.has_ancestor(*_ADDS)
    added = fault.made_by(place, *_ADDS) or under_root
    return written or (added and fault.dtype in ("float16", "float8_e4m3fn", "float8_e5m2"))


def _lost_epsilon_why(fault: Fault) -> str:
    given = (*literals(fault.source), fault.scalar("eps") or _DEFAULT_EPSILON.get(fault.name, 0))
    small = [number for number in given if rounds_to_zero(number, fault.dtype)]
    which = f"an epsilon of {show(small[0])}" if small else "the epsilon added here"
    return (
        f"{which} rounds to zero in {fault.dtype}, whose smallest number is {show(tiny(fault.dtype))}: it "
        f"underflows and leaves {_outcome(fault)}{aftermath(fault)}"
    )


def _outcome(fault: Fault) -> str:
    if fault.name in _LOGS:
        return "log(0) = -inf"
    if fault.name in ("rsqrt", "reciprocal"):
        return f"{fault.name}(0) = inf"
    return "0 / 0 = NaN" if fault.has_nan else "x / 0 = inf"


def _lost_beside_one(fault: Fault) -> bool:
    """clamp(p, eps, 1 - eps) with an eps below half the spacing at one."""
    if not fault.is_fresh(*_LOGS, "log1p", "atanh", "logit", "div", "erfinv"):
        return False
    place = 1 if fault.name == "div" else 0
    if fault.name in ("atanh", "logit", "log1p", "erfinv"):
        return fault.may_be(place, lambda value: abs(value) == 1) and fault.made_by(place, *_LIMITS)
    return fault.may_be_zero(place) and fault.made_by(place, "sub") and fault.has_ancestor(*_LIMITS)


def _renormalised(fault: Fault) -> bool:
    """p * mask / (p * mask).sum() of a row in which nothing is left."""
    return (
        fault.is_fresh("div")
        and fault.has_nan
        and not fault.backward
        and fault.may_be_zero(0)
        and fault.may_be_zero(1)
        and fault.made_by(1, "sum", "einsum")
        and fault.has_ancestor(*_EXPONENTIALS)
        and fault.has_ancestor(*_MASKS)
    )


def _nothing_counted(fault: Fault) -> bool:
    """sum / count of a selection that is empty."""
    if not fault.is_fresh("div") or not fault.has_nan or fault.backward:
        return False
    words = ("mask", "count", "valid", "len(", "weight", "num")
    counted = fault.integral(1) or fault.is_number(1) or any(word in fault.source.lower() for word in words)
    summed = fault.made_by(0, *_SUMS) and (fault.made_by(1, *_SUMS) or fault.is_number(1))
    return fault.may_be_zero(0) and fault.may_be_zero(1) and summed and counted


def _both_zero(fault: Fault) -> bool:
    if not fault.is_fresh("div", "remainder", "fmod", "floor_divide") or not fault.has_nan:
        return False
    if fault.name in ("remainder", "fmod"):
        return fault.may_be_zero(1)
    return fault.origin == "introduced" and fault.may_be_zero(0) and fault.may_be_zero(1)


def _zero_because(fault: Fault, position: int) -> str:
    """Why the operand is zero, from the op that made it."""
    reasons = (
        (("norm",), "the norm is zero, of a zero vector"),
        (("std", "var"), "the deviation is zero: constant values"),
        (_EXPONENTIALS, f"{fault.maker(position)} underflowed to exactly 0"),
        (_SUMS, "the sum is exactly zero"),
        (("max", "amax"), "the peak is zero: silence, or an all-zero slice"),
        (("mean",), "the mean is exactly zero"),
        (("prod",), "the product is zero"),
        (("pow", "square", "mul"), "a product or square that is zero or underflowed to 0"),
        (("sub",), "the difference is exactly zero: equal values"),
        (("abs", "add"), "each of its parts is zero"),
    )
    return next(
        (reason for names, reason in reasons if fault.made_by(position, *names)),
        "the denominator is exactly zero",
    )


def _guard(fault: Fault) -> str:
    divisor = spelled(fault.source, "div", 1, "divisor")
    if fault.is_number(1):
        return f"divide by at least one, `max({divisor}, 1)`, or skip the division when the count is 0"
    whole = spelled(fault.source, "div", 0, "x")
    if fault.made_by(1, "norm") and whole in divisor:
        return (
            f"use `F.normalize({whole}, dim=-1)`, which floors the norm with an epsilon, or "
            f"`{divisor}.clamp_min({epsilon_for(fault.dtype)})`"
        )
    return (
        f"floor the denominator, `{divisor}.clamp_min({epsilon_for(fault.dtype)})`, or add an epsilon to it"
    )


def _guard_reciprocal(fault: Fault) -> str:
    divisor = spelled(fault.source, "div", 1, "")
    if divisor:
        return f"floor the denominator, `1 / {divisor}.clamp_min({epsilon_for(fault.dtype)})`"
    argument = spelled(fault.source, fault.name, 0, "x")
    return f"add an epsilon before: `torch.{fault.name}({argument} + {epsilon_for(fault.dtype)})`"


def _over_zero(fault: Fault) -> bool:
    if not fault.is_fresh("div", "addcdiv") or not fault.has_inf:
        return False
    return fault.origin == "introduced" and fault.may_be_zero(_denominator(fault))


def _small_denominator(fault: Fault) -> bool:
    if (
        not fault.is_fresh("div", "addcdiv", "reciprocal")
        or not fault.has_inf
        or fault.origin != "introduced"
    ):
        return False
    place = _denominator(fault)
    value = fault.operand(place)
    if value is not None and value != 0:
        return abs(value) < 1
    made = fault.made_by(place, *_EXPONENTIALS, "pow", "square", "prod", "cumprod")
    return made and fault.may_be_zero(place)


def _small_denominator_why(fault: Fault) -> str:
    value = fault.operand(_denominator(fault))
    if value is not None and value != 0:
        return (
            f"the denominator underflowed to {show(value)}, so small that the quotient overflows "
            f"{fault.dtype} ({show(largest(fault.dtype))})"
        )
    made = fault.maker(_denominator(fault)) or "it"
    return (
        f"the denominator underflowed: {made} gave exactly 0 in {fault.dtype}, and x / 0 = "
        f"inf{aftermath(fault)}"
    )


PATTERNS = [
    Pattern(
        "epsilon_rounds_to_zero",
        when=_lost_epsilon,
        why=_lost_epsilon_why,
        remedy=lambda fault: (
            f"use an epsilon that {fault.dtype} can hold ({epsilon_for(fault.dtype)} or so), or do this "
            "step in float32: `x.float()`"
        ),
    ),
    Pattern(
        "epsilon_lost_beside_one",
        when=_lost_beside_one,
        why=lambda fault: (
            f"1 - eps rounds to exactly 1 in {fault.dtype} (its spacing at one is "
            f"{show(spacing(fault.dtype))}), so the clamp does nothing: "
            f"{'log(0) = -inf' if fault.name in _LOGS else 'an infinite value at the edge of the domain'}"
            f"{aftermath(fault)}"
        ),
        remedy="use a larger epsilon, `p.clamp(1e-6, 1 - 1e-6)`, or compute from the logits (logsigmoid, "
        "binary_cross_entropy_with_logits)",
    ),
    Pattern(
        "renormalisation_after_masking",
        when=_renormalised,
        why="renormalisation after masking: the probabilities that the mask leaves sum to 0 (all masked, "
        "or underflowed to zero), so dividing by their sum is 0 / 0 = NaN",
        remedy="mask the logits before softmax, `logits.masked_fill(~mask, "
        "torch.finfo(logits.dtype).min)`, not the probabilities after it",
    ),
    Pattern(
        "mean_of_nothing_by_hand",
        when=_nothing_counted,
        why="a mean of nothing: no element is selected (or every weight is zero), so sum and count are "
        "both 0, and 0 / 0 = NaN",
        remedy=lambda fault: (
            f"divide by at least one: `{spelled(fault.source, 'div', 1, 'count')}.clamp_min(1)`"
        ),
    ),
    Pattern(
        "zero_over_zero",
        when=_both_zero,
        why=lambda fault: (
            f"a remainder of a division by 0 is NaN: {_zero_because(fault, 1)}"
            if fault.name in ("remainder", "fmod")
            else f"0 / 0 is NaN: {_zero_because(fault, 1)}"
        ),
        remedy=_guard,
    ),
    Pattern(
        "denominator_underflow",
        when=_small_denominator,
        why=_small_denominator_why,
        remedy=_guard,
    ),
    Pattern(
        "x_over_zero",
        when=_over_zero,
        why=lambda fault: (
            f"{show(fault.operand(0))} / 0 is {'-inf' if (fault.operand(0) or 0) < 0 else 'inf'}: "
            f"{_zero_because(fault, _denominator(fault))} (x / 0){aftermath(fault)}"
        ),
        remedy=_guard,
    ),
    Pattern(
        "reciprocal_of_zero",
        when=lambda fault: fault.is_fresh("reciprocal", "rsqrt") and fault.has_inf and fault.may_be_zero(0),
        why=lambda fault: f"{fault.name}(0) = inf, 1 / 0: {_zero_because(fault, 0)}{aftermath(fault)}",
        remedy=_guard_reciprocal,
    ),
]
