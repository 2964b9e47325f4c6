"""Means, variances and the layers made of them."""

from __future__ import annotations

from sherlorch.explain.fault import Fault, Pattern

_SPREAD = ("var", "std", "var_mean", "std_mean")
_MEAN_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "cross_entropy", "nll_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits",
)  # fmt: skip


def _empty(fault: Fault) -> bool:
    return fault.count == 0 or (fault.count is None and bool(fault.inputs) and fault.inputs[0].numel == 0)


def _unseen(fault: Fault) -> bool:
    return fault.evidence is None and fault.origin == "introduced"


def _of_nothing(fault: Fault) -> bool:
    if not fault.has_nan or fault.backward:
        return False
    if fault.name in ("mean", "nanmean"):
        return _empty(fault) or _unseen(fault)
    return fault.name in _MEAN_LOSSES and (_empty(fault) or _unseen(fault))


def _correction(fault: Fault) -> float:
    given = fault.scalar("correction", "unbiased")
    return 1.0 if given is None else float(given)


def _too_few(fault: Fault) -> bool:
    if fault.differentiates(*_SPREAD):
        return fault.name == "mul" and fault.origin == "introduced" and _infinite_factor(fault)
    if fault.name not in _SPREAD or not (fault.has_nan or fault.has_inf):
        return False
    return _unseen(fault) or (fault.count is not None and fault.count <= _correction(fault))


def _infinite_factor(fault: Fault) -> bool:
    """2 / (N - correction) is a plain number in var's backward, and infinite for N = 1."""
    if fault.evidence is None:
        return fault.has_inf
    written = fault.evidence.scalars.values()
    return any(isinstance(value, float) and value in (float("inf"), float("-inf")) for value in written)


def _too_few_why(fault: Fault) -> str:
    kind = next(
        (name for name in ("std", "var") if name in fault.name or fault.differentiates(name)), fault.name
    )
    word = {"std": "standard deviation", "var": "variance"}.get(kind, "spread")
    if fault.count == 0:
        return f"{kind} of nothing: the slice is empty, and its {word} is 0 / 0 = NaN"
    amount = "one element" if fault.count in (None, 1) else f"{fault.count} elements"
    return (
        f"{kind} of {amount}: the unbiased {word} is undefined, it divides by N - "
        f"{_correction(fault):.0f} = 0, so a single row or sample gives 0 / 0 = NaN"
    )


PATTERNS = [
    Pattern(
        "batch_norm_over_one_row",
        when=lambda fault: (
            fault.name == "batch_norm" and fault.origin == "introduced" and fault.count in (None, 0, 1)
        ),
        why=lambda fault: (
            f"batch norm over {'no rows' if fault.count == 0 else 'one row'}: the unbiased variance for "
            "the running statistics divides by N - 1 = 0, and 0 / 0 = NaN stays in running_var"
        ),
        remedy="drop the last incomplete batch, `DataLoader(..., drop_last=True)`, or use `nn.GroupNorm` "
        "/ `nn.LayerNorm`",
    ),
    Pattern(
        "infinite_input_of_a_norm_layer",
        when=lambda fault: (
            fault.name in ("batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm")
            and fault.origin == "converted"
        ),
        why=lambda fault: (
            f"{fault.name} subtracts a mean that is inf because its input contains inf: inf - inf = NaN"
        ),
        remedy="look at the operation before it that overflowed; in half precision clamp its result to "
        "the finite range or keep it in float32",
    ),
    Pattern(
        "mean_of_nothing",
        when=_of_nothing,
        why=lambda fault: (
            f"{fault.name} of an empty tensor: the mean of nothing is 0 / 0 = NaN (no element was selected)"
        ),
        remedy="add the term only when something is selected, `if mask.any():`, or divide a sum: "
        "`x.sum() / max(x.numel(), 1)`",
    ),
    Pattern(
        "deviation_of_one",
        when=_too_few,
        why=_too_few_why,
        remedy="skip the normalisation for a batch of one, use `x.std(unbiased=False)`, or drop the last "
        "incomplete batch (`drop_last=True`)",
    ),
]
