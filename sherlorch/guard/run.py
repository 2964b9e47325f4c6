"""One run of a guarded step: what passes by, and the taps in torch that tell it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sherlorch import source
from sherlorch.compat import CAN_MARK, never_compile


class Stopped(BaseException):
    """Ends a step before its optimizer writes.

    No Exception, so that a step that catches those does not catch this.
    """


class Run:
    """What a running step has shown so far."""

    def __init__(self, *, is_replay: bool = False, stop_at: int = 0) -> None:
        self.is_replay = is_replay
        self.stop_at = stop_at  # a replay stops at this look; 0 runs to the end
        self.looks = 0  # times that an optimizer was about to write
        self.backwards = 0
        self.losses: list[Tensor] = []  # roots of backward calls not looked at yet
        self.roots: list[
            tuple[Tensor, str]
        ] = []  # in a replay: the roots themselves, with the user's names for them
        self.scaler: Any = None
        self.scaler_decides = False  # a fused optimizer was called, and leaves the step out by itself
        self.on_scaler: Callable[[Any], None] | None = None

    def saw_backward(self, tensors: Any) -> None:
        """`torch.autograd.backward` was called."""
        self.backwards += 1
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
            if not isinstance(tensor, Tensor) or tensor.numel() != 1:
                continue
            if self.is_replay:
                self.roots.append((tensor, _name_of(tensor)))
            else:
                self.losses.append(tensor.detach())

    def saw_scaler(self, scaler: Any) -> None:
        """A gradient scaler scaled a loss."""
        if self.scaler is None:
            self.scaler = scaler
            if self.on_scaler is not None:
                self.on_scaler(scaler)


def _name_of(tensor: Tensor) -> str:
    """The user's variable that holds `tensor`."""
    frame = source.user_frame(sys._getframe(1))
    names = (name for name, value in frame.f_locals.items() if value is tensor) if frame is not None else ()
    return next((name for name in names if not name.startswith("_")), "")


# The taps. They are in place only while a guarded step runs, and speak only to the run of their own thread.

_local = threading.local()
_lock = threading.Lock()
_listening = 0
_taps: tuple[Any, Any] = (None, None)
_amp: Any = torch.amp if hasattr(torch.amp, "GradScaler") else torch.cuda.amp
_scaler_class: Any = _amp.GradScaler
_backward = torch.autograd.backward
_scale = _scaler_class.scale


def _tapped_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    run: Run | None = getattr(_local, "run", None)
    if run is not None:
        run.saw_backward(tensors)
    return _backward(tensors, *args, **kwargs)


def _tapped_scale(self: Any, *args: Any, **kwargs: Any) -> Any:
    run: Run | None = getattr(_local, "run", None)
    if run is not None and self.is_enabled():
        run.saw_scaler(self)
    return _scale(self, *args, **kwargs)


functools.update_wrapper(_tapped_backward, _backward)
functools.update_wrapper(_tapped_scale, _scale)
never_compile(_tapped_backward)
never_compile(_tapped_scale)


def _tap(function: Any) -> Any:
    """Kept away from Dynamo, which would take the backward call behind it into its graph."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.disable(function) if dynamo is not None and not CAN_MARK else function


@contextmanager
def listening(run: Run) -> Iterator[None]:
    """Inside, the run hears of each backward call and of gradient scalers."""
    global _listening, _backward, _scale, _taps
    outer = getattr(_local, "run", None)
    with _lock:
        if not _listening:
            _backward, _scale = torch.autograd.backward, _scaler_class.scale
            _taps = _tap(_tapped_backward), _tap(_tapped_scale)
            torch.autograd.backward, _scaler_class.scale = _taps
        _listening += 1
    _local.run = run
    try:
        yield
    finally:
        _local.run = outer
        with _lock:
            _listening -= 1
            if not _listening:
                # Where someone else has put a tap over this one, this one stays below it and hears nothing.
                if torch.autograd.backward is _taps[0]:
                    torch.autograd.backward = _backward
                if _scaler_class.scale is _taps[1]:
                    _scaler_class.scale = _scale
