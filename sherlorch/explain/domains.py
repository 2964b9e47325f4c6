"""Logarithms, roots, powers and inverse functions at the end of their domain or outside it."""

from __future__ import annotations

import re

from sherlorch.explain.fault import Fault, Pattern
from sherlorch.explain.figures import aftermath, epsilon_for, show
from sherlorch.explain.line import spelled

_LOGS = ("log", "log2", "log10")
_EXPONENTIALS = ("exp", "softmax", "sigmoid", "softplus", "exp2")
_INVERSES = ("acos", "asin", "atanh", "acosh", "erfinv", "logit", "ndtri")
_WITH_POLES = (
    "lgamma", "digamma", "polygamma", "zeta", "mvlgamma", "tan", "xlogy", "xlog1py", "entr", "igamma",
    "igammac", "log_ndtr",
)  # fmt: skip
_DOMAINS = {
    "acosh": "[1, inf)",
    "erfinv": "(-1, 1)",
    "logit": "(0, 1)",
    "ndtri": "(0, 1)",
    "atanh": "(-1, 1)",
}


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
            "use `F.binary_cross_entropy_with_logits` or `F.logsigmoid` on the logits, or clamp the log "
            "at -100"
        )
    if fault.made_by(0, "exp", "softplus"):
        return (
            "bound its input from below, `log_std.clamp(min=-20)`, or add the epsilon outside: "
            "`torch.log(scale + 1e-8)`"
        )
    if fault.made_by(0, *_LOGS):
        return (
            "keep the uniform number inside (0, 1), `u.clamp(1e-7, 1 - 1e-7)`, or draw the noise with "
            "`torch.empty_like(x).exponential_().log()`"
        )
    argument = spelled(fault.source, fault.name, 0, "x")
    entropy = (
        "; for p * log(p) use `torch.xlogy` or `torch.special.entr`" if _times_own_log(fault.source) else ""
    )
    return (
        f"keep its argument above zero: `torch.log({argument}.clamp_min({epsilon_for(fault.dtype)}))`, or "
        f"add an epsilon to it{entropy}"
    )


def _times_own_log(source: str) -> bool:
    """Whether the line writes p * log(p) or p * p.log()."""
    return re.search(r"(\w+)\s*\*\s*(?:torch\.|\()?(?:log\()?\1\b", source) is not None


def _edge(fault: Fault) -> str:
    value = fault.operand(0)
    call = f"{fault.name}({'1' if value is None else f'{value:.8g}'})"
    if fault.has_nan and not (value is not None and abs(value) <= 1):
        return (
            f"{call} is NaN: the input is outside the domain {_DOMAINS.get(fault.name, '[-1, 1]')}, often "
            "by rounding"
        )
    return (
        f"{call} is infinite: the input lies at the end of the domain {_DOMAINS.get(fault.name, '[-1, 1]')}"
    )


def _lower(fault: Fault) -> str:
    return {"logit": "1e-6", "ndtri": "1e-6", "acosh": "1 + 1e-6"}.get(fault.name, "-1 + 1e-6")


PATTERNS = [
    Pattern(
        "log_of_zero",
        when=lambda fault: (
            fault.is_fresh(*_LOGS) and fault.has_inf and not fault.has_nan and fault.may_be_zero(0)
        ),
        why=_log_zero_why,
        remedy=_log_remedy,
    ),
    Pattern(
        "log1p_of_minus_one",
        when=lambda fault: fault.is_fresh("log1p") and fault.may_be(0, lambda value: value <= -1),
        why=lambda fault: (
            f"log1p({show(fault.operand(0), '-1')}) is "
            f"{'NaN: the log of a negative number' if fault.has_nan else '-inf: it is log(0)'}"
        ),
        remedy="keep its input above -1: `torch.log1p(x.clamp_min(-1 + 1e-6))`",
    ),
    Pattern(
        "log_of_negative",
        when=lambda fault: (
            fault.is_fresh(*_LOGS) and fault.has_nan and fault.may_be(0, lambda value: value < 0)
        ),
        why=lambda fault: f"log({show(fault.operand(0))}) is NaN: the logarithm of a negative number",
        remedy=lambda fault: (
            "make its argument positive: "
            f"`torch.log({spelled(fault.source, fault.name, 0, 'x')}.clamp_min(1e-8))`, or predict the "
            "logarithm itself"
        ),
    ),
    Pattern(
        "root_of_negative",
        when=lambda fault: (
            fault.is_fresh("sqrt", "rsqrt") and fault.has_nan and fault.may_be(0, lambda value: value < 0)
        ),
        why=lambda fault: (
            f"{fault.name}({show(fault.operand(0))}) is NaN: the square root of a negative number (often "
            "a variance or distance that rounding took below zero)"
        ),
        remedy=lambda fault: (
            f"clamp before the root: `{spelled(fault.source, fault.name, 0, 'x')}.clamp_min(0)`, plus an "
            "epsilon where it is differentiated"
        ),
    ),
    Pattern(
        "negative_base",
        when=lambda fault: (
            fault.is_fresh("pow")
            and fault.has_nan
            and fault.origin == "introduced"
            and fault.may_be(0, lambda base: base < 0)
            and fault.may_be(1, lambda exponent: exponent % 1 != 0)
        ),
        why=lambda fault: (
            f"({show(fault.operand(0))}) ** {show(fault.operand(1), 'p')} is NaN: a negative number to a "
            "fractional power (negative base, fractional exponent)"
        ),
        remedy=lambda fault: (
            f"clamp the base at zero, `{spelled(fault.source, 'pow', 0, 'x')}.clamp_min(0)`, or use its "
            "absolute value"
        ),
    ),
    Pattern(
        "zero_to_negative_power",
        when=lambda fault: (
            fault.is_fresh("pow")
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
        when=lambda fault: fault.is_fresh(*_INVERSES) and fault.origin == "introduced",
        why=lambda fault: _edge(fault) + aftermath(fault),
        remedy=lambda fault: (
            "pull the input slightly inside the domain: "
            f"`{spelled(fault.source, fault.name, 0, 'x')}.clamp({_lower(fault)}, 1 - 1e-6)`"
        ),
    ),
    Pattern(
        "pole",
        when=lambda fault: fault.is_fresh(*_WITH_POLES) and fault.origin == "introduced",
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
]
