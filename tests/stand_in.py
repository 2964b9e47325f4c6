"""What a tracer is compared with where a mode that does nothing is noticed already."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode  # does nothing


class _Counting(BaseTorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _calls_seen(inner: AbstractContextManager[Any]) -> int:
    with _Counting() as outer, inner:
        torch.ones(1).detach()
    return outer.calls


# An old torch dispatches `detach` to a mode once more for each mode further in.
MODES_ARE_NOTICED = _calls_seen(BaseTorchDispatchMode()) != _calls_seen(nullcontext())


def stand_in(level: str) -> AbstractContextManager[Any]:
    """In the place of a tracer of that level: a mode that does nothing where any mode would be noticed,
    otherwise nothing at all."""
    return BaseTorchDispatchMode() if level == "aten" and MODES_ARE_NOTICED else nullcontext()
