"""Divisions, logarithms, roots and powers outside their domain; infinities that meet."""

from __future__ import annotations

import math

from sherlorch.explain.fault import Fault, Pattern
from sherlorch.explain.line import literals, spelled
from sherlorch.explain.numbers import aftermath, epsilon_for, largest, rounds_to_zero, show, spacing, tiny

_LOGS = ("log", "log2", "log10")
_SUMS = ("sum", "nansum", "cumsum", "count_nonzero", "einsum")
_NORMS = ("norm", "std", "var", "sqrt", "hypot")
_PEAKS = ("max", "amax", "min", "amin", "abs")
_EXPONENTIALS = ("exp", "softmax", "sigmoid", "softplus", "exp2")
_MASKS = ("mul", "masked_fill", "where", "index_put", "scatter", "threshold", "relu", "dropout")
_ADDS = ("add", "clamp", "clamp_min", "maximum", "max")
_PRODUCTS = ("mm", "bmm", "matmul", "addmm", "baddbmm", "linear", "dot", "mv", "einsum", "convolution")
_EPSILON_ARGUMENT = (
    "normalize",
    "cosine_similarity",
    "layer_norm",
    "group_norm",
    "batch_norm",
    "rms_norm",
    "instance_norm",
)
_DEFAULT_EPSILON = {"normalize": 1e-12, "cosine_similarity": 1e-8}
_DENOMINATOR = {"div": 1, "reciprocal": 0, "rsqrt": 0, "log": 0, "log2": 0, "log10": 0, "addcdiv": 2, "pow": 0, "remainder": 1,
                "fmod": 1}  # fmt: skip


def _fresh(fault: Fault, *names: str) -> bool:
    return fault.name in names and fault.origin not in ("propagated", "outside")


def _denominator(fault: Fault) -> int:
    return _DENOMINATOR.get(fault.name, 1)


def _lost_epsilon(fault: Fault) -> bool:
    """A zero where an epsilon was added, and that epsilon is nothing in this dtype."""
    if fault.origin != "introduced":
        return False
    given = fault.scalar("eps") or _DEFAULT_EPSILON.get(fault.name)
    if fault.name in _EPSILON_ARGUMENT:
        return given is not None and rounds_to_zero(given, fault.dtype)
    if fault.name not in _DENOMINATOR or not fault.may_be_zero(_denominator(fault)):
        return False
    written = any(rounds_to_zero(number, fault.dtype) for number in literals(fault.source))
    added = fault.made_by(_denominator(fault), *_ADDS) or (
        fault.maker(_denominator(fault)) == "sqrt" and fault.has_ancestor(*_ADDS)
    )
    return written or (added and fault.dtype in ("float16", "float8_e4m3fn", "float8_e5m2"))


def _lost_epsilon_why(fault: Fault) -> str:
    small = [
        number
        for number in (*literals(fault.source), fault.scalar("eps") or 0)
        if rounds_to_zero(number, fault.dtype)
    ]
    which = f"an epsilon of {show(small[0])}" if small else "the epsilon added here"
    return (
        f"{which} rounds to zero in {fault.dtype}, whose smallest number is {show(tiny(fault.dtype))}: "
        "it underflows and "
        f"leaves {_outcome(fault)}{aftermath(fault)}"
    )


def _outcome(fault: Fault) -> str:
    if fault.name in _LOGS:
        return "log(0) = -inf"
    if fault.name in ("rsqrt", "reciprocal"):
        return f"{fault.name}(0) = inf"
    return "0 / 0 = NaN" if fault.has_nan else "x / 0 = inf"


def _lost_beside_one(fault: Fault) -> bool:
    """clamp(p, eps, 1 - eps) with an eps below half the spacing at one."""
    if not _fresh(fault, *_LOGS, "log1p", "atanh", "logit", "div", "erfinv"):
        return False
    place = 1 if fault.name == "div" else 0
    if fault.name in ("atanh", "logit", "log1p", "erfinv"):
        at_edge = fault.may_be(place, lambda value: abs(value) == 1) and fault.made_by(
            place, "clamp", "clamp_max", "minimum"
        )
    else:
        at_edge = (
            fault.may_be_zero(place)
            and fault.made_by(place, "sub")
            and fault.has_ancestor("clamp", "clamp_max", "minimum")
        )
    return at_edge


def _renormalised(fault: Fault) -> bool:
    """p * mask / (p * mask).sum() of a row in which nothing is left."""
    return (
        _fresh(fault, "div")
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
    if not _fresh(fault, "div") or not fault.has_nan or fault.backward:
        return False
    words = ("mask", "count", "valid", "len(", "weight", "num")
    counted = fault.integral(1) or fault.is_number(1) or any(word in fault.source.lower() for word in words)
    summed = fault.made_by(0, *_SUMS) and (fault.made_by(1, *_SUMS) or fault.is_number(1))
    return fault.may_be_zero(0) and fault.may_be_zero(1) and summed and counted


def _both_zero(fault: Fault) -> bool:
    if not _fresh(fault, "div", "remainder", "fmod", "floor_divide") or not fault.has_nan:
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
    if fault.made_by(1, "norm"):
        whole = spelled(fault.source, "div", 0, "x")
        return (
            f"use `F.normalize({whole}, dim=-1)`, which floors the norm with an epsilon, or "
            f"`{divisor}.clamp_min({epsilon_for(fault.dtype)})`"
        )
    return (
        f"floor the denominator, `{divisor}.clamp_min({epsilon_for(fault.dtype)})`, or add an epsilon to it"
    )


def _over_zero(fault: Fault) -> bool:
    if not _fresh(fault, "div", "addcdiv") or not fault.has_inf:
        return False
    return fault.origin == "introduced" and fault.may_be_zero(_denominator(fault))


def _small_denominator(fault: Fault) -> bool:
    if not _fresh(fault, "div", "addcdiv", "reciprocal") or not fault.has_inf or fault.origin != "introduced":
        return False
    value = fault.operand(_denominator(fault))
    if value is not None and value != 0:
        return abs(value) < 1 and math.isfinite(value)
    return fault.may_be_zero(_denominator(fault)) and fault.made_by(
        _denominator(fault), *_EXPONENTIALS, "pow", "square", "prod", "cumprod"
    )


def _small_denominator_why(fault: Fault) -> str:
    value = fault.operand(_denominator(fault))
    if value is not None and value != 0:
        return (
            f"the denominator underflowed to {show(value)}, so small that the quotient overflows "
            f"{fault.dtype} "
            f"({show(largest(fault.dtype))})"
        )
    made = fault.maker(_denominator(fault)) or "it"
    return (
        f"the denominator underflowed: {made} gave exactly 0 in {fault.dtype}, and x / 0 = "
        f"inf{aftermath(fault)}"
    )


def _log_zero_why(fault: Fault) -> str:
    value = "log(1 - 1) = " if fault.made_by(0, "sub") else ""
    return f"{value}log(0) = -inf: {_log_zero_because(fault)}{aftermath(fault)}"


def _log_zero_because(fault: Fault) -> str:
    made = fault.maker(0)
    if fault.made_by(0, "sub"):
        return (
            "1 - p is exactly 0 because p saturated to 1"
            if fault.has_ancestor("sigmoid", "softmax", "tanh")
            else "the difference is exactly 0"
        )
    if fault.made_by(0, *_EXPONENTIALS):
        source = (
            made
            if made in _EXPONENTIALS
            else next(name for name in _EXPONENTIALS if fault.has_ancestor(name))
        )
        return (
            f"{source} underflowed to exactly 0 for an input far below the others"
            if source == "softmax"
            else f"{source} of a very negative number underflows to exactly 0"
        )
    if fault.made_by(0, *_LOGS):
        return "its argument is -log(1) = 0, because log(1) is 0"
    return "its argument is exactly zero"


def _log_remedy(fault: Fault) -> str:
    if fault.made_by(0, "softmax"):
        return (
            "use `F.log_softmax(logits, dim)` (or cross_entropy on the logits) instead of log(softmax(...))"
        )
    if fault.made_by(0, "sigmoid") or (fault.made_by(0, "sub") and fault.has_ancestor("sigmoid")):
        return (
            "use `F.binary_cross_entropy_with_logits` or `F.logsigmoid` on the logits, or clamp the "
            "log at -100"
        )
    if fault.made_by(0, "exp", "softplus"):
        return (
            "bound its input from below, `log_std.clamp(min=-20)`, or add the epsilon outside: "
            "`torch.log(scale + 1e-8)`"
        )
    argument = spelled(fault.source, fault.name, 0, "x")
    entropy = "; for p * log(p) use `torch.xlogy` or `torch.special.entr`" if "*" in fault.source else ""
    return (
        "keep its argument above zero: "
        f"`torch.log({argument}.clamp_min({epsilon_for(fault.dtype)}))`, or add an epsilon to it{entropy}"
    )


def _opposite(fault: Fault) -> bool:
    if fault.origin != "converted" or not fault.has_nan:
        return False
    if fault.name in ("add", "sub", "rsub", "lerp"):
        known = [value for value in fault.operands[:2] if value is not None]
        return len(known) < 2 or all(abs(value) == math.inf for value in known)
    if fault.name in (
        "sum",
        "mean",
        "cumsum",
        "var",
        "std",
        "nansum",
        "index_add",
        "scatter_add",
        "layer_norm",
    ):
        return True
    return fault.name in _PRODUCTS and not any(math.isnan(value) for value in fault.row) and bool(fault.row)


def _opposite_why(fault: Fault) -> str:
    if fault.name == "sub" and fault.operands[:2] == (-math.inf, -math.inf):
        return (
            "-inf - (-inf) = NaN (inf - inf): both are -inf, as in a fully masked row less its "
            f"maximum{_where_from(fault)}"
        )
    if fault.name in ("var", "std"):
        return f"{fault.name} of values that contain inf: it subtracts a mean of inf, inf - inf = NaN"
    return f"inf - inf = NaN: two infinities of opposite effect meet in {fault.name}{_where_from(fault)}"


def _zero_inf(fault: Fault) -> bool:
    if fault.origin == "propagated" or not fault.has_nan:
        return False
    if fault.name in ("mul", "addcmul"):
        values = [abs(value) for value in fault.operands if value is not None]
        return (0 in values and math.inf in values) or (len(values) < 2 and fault.origin == "converted")
    return fault.name in _PRODUCTS and fault.origin == "converted"


def _zero_inf_why(fault: Fault) -> str:
    values = [value for value in fault.operands if value is not None]
    inf = next((value for value in values if abs(value) == math.inf), math.inf)
    shown = "(-inf)" if inf < 0 else "inf"
    mask = "; a mask that multiplies cannot remove an infinity" if fault.name == "mul" else ""
    note = fault.note("largest of")
    return (
        f"0 * {shown} = NaN: a zero factor meets an infinity in "
        f"{fault.name}{_where_from(fault)}{mask}{f' ({note})' if note else ''}"
    )


def _where_from(fault: Fault) -> str:
    return f" (the infinity was written by {', '.join(fault.constants)})" if fault.constants else ""


def _domain(fault: Fault) -> str:
    return {"acosh": "[1, inf)", "erfinv": "(-1, 1)", "logit": "(0, 1)", "atanh": "(-1, 1)"}.get(
        fault.name, "[-1, 1]"
    )


def _edge(fault: Fault) -> str:
    value = fault.operand(0)
    call = f"{fault.name}({show(value, '1')})"
    if fault.has_nan and not (value is not None and abs(value) <= 1):
        return f"{call} is NaN: the input is outside the domain {_domain(fault)}, often by rounding"
    return f"{call} is infinite: the input lies at the end of the domain {_domain(fault)}"


def _poles(fault: Fault) -> bool:
    return _fresh(
        fault,
        "lgamma",
        "digamma",
        "polygamma",
        "zeta",
        "mvlgamma",
        "tan",
        "xlogy",
        "xlog1py",
        "entr",
        "igamma",
        "igammac",
        "log_ndtr",
    )


PATTERNS = [
    Pattern(
        "epsilon_rounds_to_zero",
        when=_lost_epsilon,
        why=_lost_epsilon_why,
        remedy=lambda fault: (
            f"use an epsilon that {fault.dtype} can hold ({epsilon_for(fault.dtype)} or so), or do this "
            "step in "
            "float32: `x.float()`"
        ),
    ),
    Pattern(
        "epsilon_lost_beside_one",
        when=_lost_beside_one,
        why=lambda fault: (
            f"1 - eps rounds to exactly 1 in {fault.dtype} (its spacing at one is "
            f"{show(spacing(fault.dtype))}), so the "
            "clamp does nothing: "
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
        "or underflowed to "
        "zero), so dividing by their sum is 0 / 0 = NaN",
        remedy="mask the logits before softmax, `logits.masked_fill(~mask, "
        "torch.finfo(logits.dtype).min)`, not the "
        "probabilities after it",
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
        when=lambda fault: _fresh(fault, "reciprocal", "rsqrt") and fault.has_inf and fault.may_be_zero(0),
        why=lambda fault: f"{fault.name}(0) = inf, 1 / 0: {_zero_because(fault, 0)}{aftermath(fault)}",
        remedy=lambda fault: f"add an epsilon before: `torch.{fault.name}(x + {epsilon_for(fault.dtype)})`",
    ),
    Pattern(
        "log_of_zero",
        when=lambda fault: (
            _fresh(fault, *_LOGS) and fault.has_inf and not fault.has_nan and fault.may_be_zero(0)
        ),
        why=_log_zero_why,
        remedy=_log_remedy,
    ),
    Pattern(
        "log1p_of_minus_one",
        when=lambda fault: _fresh(fault, "log1p") and fault.may_be(0, lambda value: value <= -1),
        why=lambda fault: (
            f"log1p({show(fault.operand(0), '-1')}) is "
            f"{'NaN: the log of a negative number' if fault.has_nan else '-inf: it is log(0)'}"
        ),
        remedy="keep its input above -1: `torch.log1p(x.clamp_min(-1 + 1e-6))`",
    ),
    Pattern(
        "log_of_negative",
        when=lambda fault: (
            _fresh(fault, *_LOGS) and fault.has_nan and fault.may_be(0, lambda value: value < 0)
        ),
        why=lambda fault: f"log({show(fault.operand(0))}) is NaN: the logarithm of a negative number",
        remedy=lambda fault: (
            "make its argument positive: "
            f"`torch.log({spelled(fault.source, fault.name, 0, 'x')}.clamp_min(1e-8))`, "
            "or predict the logarithm itself"
        ),
    ),
    Pattern(
        "root_of_negative",
        when=lambda fault: (
            _fresh(fault, "sqrt", "rsqrt") and fault.has_nan and fault.may_be(0, lambda value: value < 0)
        ),
        why=lambda fault: (
            f"{fault.name}({show(fault.operand(0))}) is NaN: the square root of a negative number (often "
            "a variance or "
            "distance that rounding took below zero)"
        ),
        remedy=lambda fault: (
            f"clamp before the root: `{spelled(fault.source, fault.name, 0, 'x')}.clamp_min(0)`, plus an "
            "epsilon "
            "where it is differentiated"
        ),
    ),
    Pattern(
        "negative_base",
        when=lambda fault: (
            _fresh(fault, "pow")
            and fault.has_nan
            and fault.origin == "introduced"
            and fault.may_be(0, lambda base: base < 0)
            and fault.may_be(1, lambda exponent: exponent != round(exponent))
        ),
        why=lambda fault: (
            f"({show(fault.operand(0))}) ** {show(fault.operand(1), 'p')} is NaN: a negative number to a "
            "fractional power "
            "(negative base, fractional exponent)"
        ),
        remedy=lambda fault: (
            f"clamp the base at zero, `{spelled(fault.source, 'pow', 0, 'x')}.clamp_min(0)`, or use its "
            "absolute value"
        ),
    ),
    Pattern(
        "zero_to_negative_power",
        when=lambda fault: (
            _fresh(fault, "pow")
            and fault.has_inf
            and fault.may_be_zero(0)
            and (fault.operands != () or not fault.half)
            and fault.may_be(1, lambda exponent: exponent < 0)
        ),
        why=lambda fault: (
            f"0 ** {show(fault.operand(1), '-p')} is inf: a negative power divides by zero (x / "
            f"0){aftermath(fault)}"
        ),
        remedy=lambda fault: (
            "keep the base above zero: "
            f"`{spelled(fault.source, 'pow', 0, 'x')}.clamp_min({epsilon_for(fault.dtype)})`"
        ),
    ),
    Pattern(
        "end_of_domain",
        when=lambda fault: (
            _fresh(fault, "acos", "asin", "atanh", "acosh", "erfinv", "logit", "ndtri")
            and fault.origin == "introduced"
        ),
        why=lambda fault: _edge(fault) + aftermath(fault),
        remedy=lambda fault: (
            "pull the input slightly inside the domain: "
            f"`{spelled(fault.source, fault.name, 0, 'x')}.clamp({'1e-6, ' if fault.name in ('logit', 'ndtri') else '-1 + 1e-6, '}1 - 1e-6)`"
        ),
    ),
    Pattern(
        "pole",
        when=lambda fault: _poles(fault) and fault.origin == "introduced",
        why=lambda fault: (
            f"{fault.name}({', '.join(show(value) for value in fault.operands) or 'x'}) has no finite value: "
            + (
                "it contains log(0) or the log of a negative number"
                if "log" in fault.name or fault.name == "entr"
                else "the input is a pole of the function"
            )
        ),
        remedy="keep its input inside the domain with clamp: `x.clamp_min(1e-6)`",
    ),
    Pattern(
        "masks_added",
        when=lambda fault: (
            _fresh(fault, "add", "sub")
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
            f"negative finite {fault.dtype} "
            "are added, min + min overflows to -inf, and a row masked everywhere twice is all -inf, "
            "which softmax turns into NaN"
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
