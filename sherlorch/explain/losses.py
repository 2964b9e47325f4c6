"""Losses, softmax and what is computed by rows of scores."""

from __future__ import annotations

import math

from sherlorch.explain.fault import Fault, Pattern
from sherlorch.explain.figures import written_by

_CLASSES = ("cross_entropy", "nll_loss")
_SOFTMAX = frozenset({"softmax", "log_softmax", "softmin", "gumbel_softmax"})
_ATTENTION = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})


def _neginf(fault: Fault) -> bool:
    """Whether -inf came in, as far as is known."""
    return fault.origin in ("converted", "propagated") and (
        not fault.inputs or any(row.neginf for row in fault.inputs)
    )


def _class_loss(fault: Fault) -> bool:
    return fault.name in _CLASSES or fault.differentiates(*_CLASSES)


def _smooths(fault: Fault) -> bool:
    return bool(fault.scalar("label_smoothing")) or "label_smoothing" in fault.source


def _none_counts(fault: Fault) -> bool:
    if fault.count is not None:
        return fault.count == 0
    return fault.origin == "introduced"


def _masked_row(fault: Fault) -> bool:
    if fault.name in _ATTENTION:
        return fault.has_nan and (
            not fault.inputs or any(_blocked(row.dtype, row.neginf, row.zeros) for row in fault.inputs)
        )
    if fault.name not in _SOFTMAX or not fault.has_nan or fault.origin == "introduced":
        return False
    if fault.row:
        return all(value == -math.inf for value in fault.row)
    return _neginf(fault) and not any(row.posinf or row.nan for row in fault.inputs)


def _blocked(dtype: str, neginf: int, zeros: int) -> bool:
    return bool(neginf) or (dtype == "bool" and bool(zeros))


def _masked_row_why(fault: Fault) -> str:
    size = f" {fault.count}" if fault.count else ""
    return (
        f"a fully masked row: all{size} scores of one row are -inf, so {fault.name} subtracts a maximum "
        f"of -inf and normalises by zero, NaN{written_by(fault)}"
    )


PATTERNS = [
    Pattern(
        "every_target_ignored",
        when=lambda fault: _class_loss(fault) and fault.has_nan and _none_counts(fault),
        why=lambda fault: (
            "every target is ignored: the mean over the targets that count divides 0 by 0 = NaN"
            + _in_brackets(fault.note("targets count"))
        ),
        remedy="skip such a batch, or sum and divide by hand: `F.cross_entropy(x, y, reduction='sum') / "
        "(y != -100).sum().clamp_min(1)`",
    ),
    Pattern(
        "class_weights_sum_to_zero",
        when=lambda fault: _class_loss(fault) and fault.has_nan and bool(fault.note("weights", "sum to 0")),
        why="the class weights of all targets in this batch are zero: the weighted mean divides 0 by 0 = NaN",
        remedy="give every class a positive weight, or use `reduction='sum'` and divide by "
        "`weight[y].sum().clamp_min(1e-8)`",
    ),
    Pattern(
        "label_smoothing_over_masked_classes",
        when=lambda fault: (
            _neginf(fault)
            and (
                (fault.name == "cross_entropy" and _smooths(fault))
                or (
                    fault.name in ("sum", "mean")
                    and "smooth" in fault.source
                    and fault.has_ancestor("log_softmax")
                )
            )
        ),
        why=lambda fault: (
            "label smoothing adds a share of every class's log-probability to the loss, including the "
            f"-inf of masked classes{written_by(fault)}"
        ),
        remedy="mask with a finite value, `logits.masked_fill(mask, torch.finfo(logits.dtype).min)`, or "
        "leave masked classes out of the smoothing term",
    ),
    Pattern(
        "target_class_is_masked",
        when=lambda fault: fault.name in _CLASSES and not fault.backward and _neginf(fault),
        why=lambda fault: (
            "the target's own class has a score of -inf, log(0): its probability is zero and its "
            "negative log-likelihood inf"
            f"{'' if fault.inputs else ', or label smoothing adds the -inf of masked classes'}"
            f"{written_by(fault)}"
        ),
        remedy="never mask the class that is the target: `mask.scatter_(1, target[:, None], False)`, or "
        "mask with a finite number",
    ),
    Pattern(
        "ctc_without_alignment",
        when=lambda fault: fault.name == "ctc_loss" or fault.differentiates("ctc_loss"),
        why=lambda fault: (
            "no CTC alignment exists: the label, with a blank between repeats, is longer than the input, so "
            "its probability is zero and the negative logarithm inf" + _in_brackets(fault.note("sample"))
        ),
        remedy="keep every input longer than its label plus repeats, or pass `zero_infinity=True` to "
        "ctc_loss",
    ),
    Pattern(
        "kl_div_at_zero",
        when=lambda fault: (
            (
                fault.differentiates("kl_div", "xlogy", "entr")
                and fault.name in ("div", "log", "xlogy", "mul", "kl_div")
            )
            or (fault.name == "kl_div" and _neginf(fault))
            or (fault.name == "mul" and "kl_div" in fault.source and fault.zero_meets_inf)
        ),
        why=lambda fault: (
            "kl_div of a probability that is exactly zero: "
            + (
                "the derivative of target * log(target) contains log(0) = -inf and target / target = 0 / "
                "0 = NaN where the target underflowed to 0"
                if fault.backward
                else "the input is log(0) = -inf, and a zero target times it is 0 * inf = NaN"
            )
        ),
        remedy="stay in log space: `F.kl_div(log_q, log_p, log_target=True)` with log_p from log_softmax",
    ),
    Pattern(
        "fully_masked_row",
        when=_masked_row,
        why=_masked_row_why,
        remedy="mask with a finite number instead of -inf, `scores.masked_fill(mask, "
        "torch.finfo(scores.dtype).min)`, or keep one position of every row open",
    ),
    Pattern(
        "inf_in_softmax",
        when=lambda fault: (
            fault.name in _SOFTMAX | {"logsumexp"}
            and fault.origin == "converted"
            and (math.inf in fault.row or any(row.posinf for row in fault.inputs))
        ),
        why=lambda fault: (
            f"{fault.name} of a row that contains +inf: it subtracts the maximum, and inf - inf = NaN"
        ),
        remedy="find the operation that overflowed before this one, or limit the scores: "
        "`scores.clamp(max=1e4)`",
    ),
    Pattern(
        "logsumexp_of_nothing",
        when=lambda fault: (
            fault.differentiates("logsumexp", "logcumsumexp", "logaddexp", "logaddexp2")
            and fault.has_nan
            and fault.may_be(0, lambda value: value == -math.inf or value != value)
            and fault.may_be(1, lambda value: value == -math.inf or value != value)
        ),
        why=lambda fault: (
            "the backward of logsumexp forms exp(x - logsumexp), and for a row made only of -inf this is "
            f"-inf - (-inf) = NaN{written_by(fault)}"
        ),
        remedy="use the most negative finite number, `torch.finfo(x.dtype).min`, as the neutral element "
        "instead of -inf, or mask such rows before logsumexp",
    ),
    Pattern(
        "softmax_derivative",
        when=lambda fault: fault.differentiates("softmax", "log_softmax") and fault.origin == "converted",
        why=lambda fault: (
            f"the backward of {_softmax_name(fault)} sums gradient * probability along the row, and an "
            "infinite gradient meets a probability of zero (0 * inf) or an opposite infinity (inf - "
            "inf): NaN"
        ),
        remedy="keep -inf log-probabilities out of the loss: select or mask them before they are summed, "
        "not after",
    ),
]


def _softmax_name(fault: Fault) -> str:
    return "log_softmax" if fault.differentiates("log_softmax") else "softmax"


def _in_brackets(note: str) -> str:
    return f" ({note})" if note else ""
