"""The optimizer: what clipping, moments and step sizes do to parameters."""

from __future__ import annotations

from sherlorch.explain.fault import Fault, Pattern
from sherlorch.explain.figures import epsilon_for, over, show

_ADAM = ("adam", "adamw", "fused_adam", "fused_adamw", "adagrad", "fused_adagrad", "adamax", "rmsprop")
_STEPS = ("add", "sub", "addcdiv", "lerp", "sgd", "fused_sgd")
_CLIPS = ("clip_grad_norm", "clip_grad_norm_", "clip_grads_with_norm")


def _denominator(fault: Fault) -> int | None:
    return {"addcdiv": 2, "div": 1}.get(fault.name)


def _zero_epsilon(fault: Fault) -> bool:
    if fault.phase != "optimizer" or fault.origin != "introduced":
        return False
    place = _denominator(fault)
    if place is None:
        return fault.name in _ADAM and (fault.half or fault.scalar("eps") == 0)
    if not fault.may_be_zero(place):
        return False
    return fault.name == "addcdiv" or (fault.made_by(place, "add", "sqrt") and fault.has_ancestor("sqrt"))


def _zero_epsilon_why(fault: Fault) -> str:
    reason = (
        f"an epsilon of 1e-8 rounds to zero in {fault.dtype}"
        if fault.dtype == "float16"
        else "its epsilon is zero"
    )
    result = (
        "0 / 0 = NaN for entries whose gradient is 0" if fault.has_nan else "x / 0 = inf for small gradients"
    )
    return f"Adam's epsilon: sqrt(v) + eps is 0 because {reason}, so the update divides by zero, {result}"


def _clipped(fault: Fault) -> bool:
    meets = fault.zero_may_meet_inf
    clips = (
        any(word in fault.source for word in ("clip", "norm")) or fault.later(*_CLIPS) or fault.name in _CLIPS
    )
    return (
        fault.origin == "converted"
        and fault.has_nan
        and fault.name in ("mul", *_CLIPS)
        and meets
        and (fault.phase == "optimizer" or (clips and fault.phase == "forward" and "clip" in fault.source))
    )


def _too_large(fault: Fault) -> bool:
    if fault.phase != "optimizer" or fault.origin != "introduced" or not fault.has_inf:
        return False
    return fault.name in _STEPS or (fault.name == "mul" and (fault.is_number(0) or fault.is_number(1)))


def _too_large_why(fault: Fault) -> str:
    step = fault.scalar("alpha", "value")
    size = "" if step is None else f" (step size {show(abs(step))})"
    move = fault.operand(1)
    times = "" if move is None else f" times a gradient of {show(move)}"
    return f"the update overflows{size}: the learning rate{times} is {over(fault)}"


PATTERNS = [
    Pattern(
        "adam_epsilon",
        when=_zero_epsilon,
        why=_zero_epsilon_why,
        remedy=lambda fault: (
            f"raise it, `Adam(params, eps={epsilon_for(fault.dtype)})`, or keep float32 master weights"
        ),
    ),
    Pattern(
        "clipping_by_infinite_norm",
        when=_clipped,
        why="clipping by an Inf norm: one gradient entry is inf, so the total norm is inf, the clip "
        "coefficient max_norm / inf = 0, and inf * 0 = NaN",
        remedy="pass `error_if_nonfinite=True` to clip_grad_norm_, and remove what makes the gradient "
        "infinite",
    ),
    Pattern(
        "squared_gradient_overflow",
        when=lambda fault: (
            fault.phase == "optimizer"
            and fault.name == "addcmul"
            and fault.has_inf
            and fault.origin == "introduced"
        ),
        why=lambda fault: (
            f"the optimizer squares the gradient, and {show(fault.operand(1), 'its')} ** 2 overflows "
            f"{fault.dtype}: {over(fault)}"
        ),
        remedy="clip the gradient before the step, `torch.nn.utils.clip_grad_norm_(params, 1.0)`, and "
        "find why it is so large",
    ),
    Pattern(
        "learning_rate_too_high",
        when=_too_large,
        why=_too_large_why,
        remedy="lower the learning rate (start with a tenth of it), add warm-up, and clip the gradients: "
        "`torch.nn.utils.clip_grad_norm_(params, 1.0)`",
    ),
]
