"""Faults that no arithmetic made: what came in from outside, what was never written, what was meant."""

from __future__ import annotations

from sherlorch.explain.fault import Fault, Pattern
from sherlorch.ops.collectives import NAMES

_AMP = frozenset(
    {"amp_foreach_non_finite_check_and_unscale", "amp_update_scale", "amp_non_finite_check_and_unscale"}
)


def _held(fault: Fault) -> str:
    """What the tensor held: "3 NaN of 12 values"."""
    rows = [
        row for row in ((fault.evidence.result, *fault.inputs) if fault.evidence else ()) if row.nonfinite
    ]
    if not rows:
        return "NaN" if fault.has_nan else "Inf"
    row = rows[0]
    counts = ((row.nan, "NaN"), (row.posinf, "+inf"), (row.neginf, "-inf"))
    return f"{', '.join(f'{count} {kind}' for count, kind in counts if count)} of {row.numel} values"


def _leaf(fault: Fault, kind: str) -> bool:
    return fault.origin == "outside" and (fault.leaf or "").startswith(kind)


def _batch_why(fault: Fault) -> str:
    leaf = fault.leaf or "an input"
    rows = (fault.evidence.result, *fault.inputs) if fault.evidence else ()
    sign = "-inf" if any(row.neginf and not row.posinf for row in rows) else "inf"
    missing = "the tensor contains NaN" if fault.has_nan else f"it is already {sign}"
    later = ""
    if fault.has_inf and not fault.has_nan:
        later = (
            "; zeroing the result afterwards does not help: backward multiplies the zero gradient by it, "
            "0 * inf = NaN"
        )
    return f"{leaf} is non-finite before any operation reads it ({_held(fault)}): {missing}{later}"


def _parameter(fault: Fault) -> str:
    leaf = fault.leaf or ""
    return leaf.split(" ")[-1] if leaf.startswith(("parameter ", "buffer ")) else "p"


PATTERNS = [
    Pattern(
        "skipped_step",
        when=lambda fault: fault.name in _AMP or fault.later(*_AMP),
        why="GradScaler checks the scaled gradients and found an Inf: the loss scale was too large for "
        "float16, the step is skipped and the scale halved, which is normal for the first steps",
        remedy="nothing to fix while it is rare; if it happens at every step, start with a smaller "
        "scale: `torch.amp.GradScaler(init_scale=2.0**10)`",
    ),
    Pattern(
        "uninitialised_memory",
        when=lambda fault: fault.origin == "uninitialised",
        why=lambda fault: (
            f"{fault.leaf or 'this tensor'} is uninitialised memory (torch.empty, to_empty or a forgotten "
            f"init): it was read before anything was written to it and held {_held(fault)}"
        ),
        remedy=lambda fault: (
            "initialise it before use: `torch.zeros(...)` in place of `torch.empty(...)`, or "
            f"`nn.init.zeros_({_parameter(fault)})` in init_weights or reset_parameters"
        ),
    ),
    Pattern(
        "bad_parameter",
        when=lambda fault: _leaf(fault, "parameter"),
        why=lambda fault: (
            f"{fault.leaf} was already non-finite when the trace began ({_held(fault)}): the "
            "initialisation, the checkpoint or an earlier optimizer step spoiled it"
        ),
        remedy="check the checkpoint with `[n for n, p in model.named_parameters() if not "
        "p.isfinite().all()]`, and trace the training step that writes this parameter",
    ),
    Pattern(
        "bad_buffer",
        when=lambda fault: _leaf(fault, "buffer"),
        why=lambda fault: (
            f"{fault.leaf} was already non-finite when the trace began ({_held(fault)}): running "
            "statistics keep the NaN or Inf of one bad batch for ever"
        ),
        remedy="restore or reset it (`module.reset_running_stats()`), and trace the training step that "
        "spoiled it",
    ),
    Pattern(
        "another_process",
        when=lambda fault: fault.origin == "outside" and not fault.leaf and fault.op in NAMES,
        why=lambda fault: (
            f"what this process gave to {fault.op} was finite: another process sent {_held(fault)}"
            + (", or the sum of finite values overflowed" if not fault.has_nan else "")
        ),
        remedy="look at the reports of the other ranks: that of the one which made it names the operation",
    ),
    Pattern(
        "bad_batch",
        when=lambda fault: fault.origin == "outside",
        why=_batch_why,
        remedy="check the data before it enters, `assert batch.isfinite().all()`; drop or mask the "
        "missing, degenerate or incomplete entries before the computation, not after: `batch = "
        "torch.where(batch.isfinite(), batch, 0)`",
    ),
    Pattern(
        "written_on_purpose",
        when=lambda fault: fault.origin == "constant",
        why=lambda fault: (
            f"the program itself writes this {'NaN' if fault.has_nan else 'infinity'} with {fault.name}, "
            "and nothing on the way removed it"
        ),
        remedy="fill with a finite number, `torch.finfo(x.dtype).min`, or drop these elements before "
        "they reach a result",
    ),
]
