"""What the look at a step found, and what differs when the step runs again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sherlorch import health
from sherlorch.health import INF, NAN, NONFINITE

_MOST_NAMES = 4
_UNKNOWN = (
    "a nondeterministic kernel, or state that a Guard does not know: "
    "a generator of its own, an iterator, a file, a cache"
)
_WORDS = {NAN: "NaN", INF: "Inf", NONFINITE: "NaN and Inf"}


@dataclass
class Fault:
    """A step that went wrong.

    `look`: how often an optimizer had been about to write, 0 where it was seen on return.
    """

    what: list[str]
    look: int = 0
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        return "; ".join(self.what)


def name_bad(losses: Sequence[float], gradients: Mapping[str, Tensor], *, scaled: bool = False) -> list[str]:
    """Sentences on what is not finite; empty where all is well.

    A scaled loss may be Inf: its scaler deals with that.
    """
    what = [
        f"the loss is {value}" for value in losses if math.isnan(value) or (math.isinf(value) and not scaled)
    ][:1]
    bad = {name: _WORDS[state] for name, gradient in gradients.items() if (state := health.examine(gradient))}
    if bad:
        kinds = " or ".join(sorted(set(bad.values())))
        what.append(f"{len(bad)} of {len(gradients)} gradients hold {kinds}: {listed(list(bad))}")
    return what


def listed(names: Sequence[str]) -> str:
    """The first few names."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def differences(fault: Fault, losses: Sequence[float], gradients: Mapping[str, Tensor]) -> tuple[str, ...]:
    """How a second run of the step, in which the fault did not come back, differs from the first."""
    notes = []
    same_losses = len(losses) == len(fault.losses) and all(map(_same_number, losses, fault.losses))
    if fault.losses and not same_losses:
        first, second = (
            ", ".join(f"{value:.9g}" for value in values[:3]) for values in (fault.losses, losses)
        )
        notes.append(f"loss: {first} then, {second or 'none'} now")
    shared = [name for name in fault.gradients if name in gradients]
    healed = [
        name
        for name in shared
        if health.examine(fault.gradients[name]) and not health.examine(gradients[name])
    ]
    others = [name for name in shared if name not in healed]
    changed = [name for name in others if not _same_bits(fault.gradients[name], gradients[name])]
    if healed:
        notes.append(f"not finite then and finite now: {listed([name + '.grad' for name in healed])}")
    if others:
        notes.append(
            f"of the other {len(others)} gradients {len(others) - len(changed)} are bit-equal in both runs"
        )
    if not fault.losses and not shared:
        return (*notes, "nothing else of the two runs can be compared")
    if changed or not (same_losses or any(value != value or math.isinf(value) for value in fault.losses)):
        hint = (
            ""
            if torch.are_deterministic_algorithms_enabled()
            else "; torch.use_deterministic_algorithms(True) narrows it down"
        )
        return (*notes, f"the two runs differ elsewhere too: suspect {_UNKNOWN}{hint}")
    return (*notes, "all else is equal: suspect a race, uninitialised or damaged memory, or the hardware")


def _same_number(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout or a.layout is not torch.strided:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
