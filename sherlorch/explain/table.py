"""The ordered table: what the origin decides first, then the special before the general."""

from __future__ import annotations

import warnings
from typing import Callable

from sherlorch.explain import (
    derivatives,
    divisions,
    domains,
    infinities,
    losses,
    matrices,
    moments,
    origins,
    ranges,
    updates,
)
from sherlorch.explain.fault import Explanation, Fault, Pattern, Text

PATTERNS: list[Pattern] = [
    *origins.PATTERNS,
    ranges.FAULTY_KERNEL,
    *updates.PATTERNS,
    *losses.PATTERNS,
    *moments.PATTERNS,
    *matrices.PATTERNS,
    *derivatives.PATTERNS,
    *divisions.PATTERNS,
    *domains.PATTERNS,
    *infinities.PATTERNS,
    *ranges.PATTERNS,
]


def explain(fault: Fault) -> Explanation:
    """What the first fitting pattern says; where none fits, what is known and what would tell more."""
    for pattern in PATTERNS:
        try:
            if pattern.when(fault):
                return pattern.explain(fault)
        except Exception as error:  # one bad pattern must not cost the user the report
            warnings.warn(f"the pattern {pattern.name!r} failed: {error!r}", RuntimeWarning, stacklevel=2)
    return LAST_RESORT.explain(fault)


def register(
    name: str, *, when: Callable[[Fault], bool], why: Text, remedy: Text, before: str | None = None
) -> None:
    """Add a pattern of your own in front of the built-in ones, or right before the one named `before`.

    `why` and `remedy` are sentences, or functions of the `Fault` that return one.
    """
    names = [pattern.name for pattern in PATTERNS]
    if not isinstance(name, str) or not name:
        raise TypeError(f"a pattern needs a name, not {name!r}")
    if name in names:
        raise ValueError(f"there is a pattern {name!r} already; choose another name")
    if not callable(when):
        raise TypeError(f"`when` of {name!r} must be a function of a Fault, not {when!r}")
    for what, text in (("why", why), ("remedy", remedy)):
        if not isinstance(text, str) and not callable(text):
            raise TypeError(f"`{what}` of {name!r} must be a sentence or a function of a Fault, not {text!r}")
    if before is not None and before not in names:
        raise ValueError(f"no pattern {before!r} to stand before; there are {', '.join(names)}")
    PATTERNS.insert(0 if before is None else names.index(before), Pattern(name, when, why, remedy))


def _known(fault: Fault) -> str:
    made = "NaN" if fault.has_nan else "Inf"
    if fault.origin == "introduced":
        return f"finite inputs, but a result with {made} from one opaque operation, {fault.op_name}"
    if fault.origin == "converted":
        return f"{fault.op_name} turned an Inf of its inputs into NaN"
    return f"the {made} came into {fault.op_name} with one of its inputs"


def _next_step(fault: Fault) -> str:
    if not fault.op_name.startswith("aten."):
        return (
            "trace the same step with `sherlorch.trace(level='aten')`, which sees the kernels inside "
            "this call"
        )
    if fault.backward:
        return "run the forward op alone in float64 with `torch.autograd.gradcheck` on these values"
    return "run this one call again in float64, or on the CPU, with the same inputs and compare"


LAST_RESORT = Pattern("no_pattern", when=lambda fault: True, why=_known, remedy=_next_step)
