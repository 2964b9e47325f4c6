"""Level ``function``: a TorchFunctionMode that sees what the user called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from sys import _getframe
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sherlorch import health
from sherlorch.compat import NOTHING_TO_DO, eagerly, enable_torch_function, never_compile
from sherlorch.errors import NonFiniteError, NonFiniteWarning
from sherlorch.tracers.arguments import SCALAR, kind_of, kinds
from sherlorch.tracers.plan import Plan, Switch, plan_function
from sherlorch.tracers.recorder import Recorder

_len_torch_function_stack = torch._C._len_torch_function_stack
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_set_grad_enabled = torch._C._set_grad_enabled
_is_grad_enabled = torch.is_grad_enabled
_sum = torch.sum
_NOTHING: dict[str, Any] = {}
_PLANS: dict[bool, dict[Any, Plan]] = {True: {}, False: {}}


class FunctionTracer(Switch, TorchFunctionMode):
    """Hands each torch function call and its results to a recorder."""

    def __init__(self, recorder: Recorder, fast: bool) -> None:
        super().__init__()
        self._ledger = recorder
        self.recorder: Any = recorder
        self._alone = True  # no function mode further out listens
        self._fast = fast
        self._plans = self._asked = _PLANS[fast]
        self._eager: AbstractContextManager[Any] = NOTHING_TO_DO

    def __enter__(self) -> FunctionTracer:
        # Scans must not show up in a mode further out.
        ledger = self._ledger
        if _len_torch_function_stack():
            ledger.scan, ledger.begin_scan = health.scan_unseen, health.begin_scan_unseen
            ledger.total = _unknown
            self._alone = False
            self.recorder = _Unseen(ledger)
        else:
            ledger.scan, ledger.begin_scan = _scan, _begin_scan
            ledger.total = _total
            self._alone = True
            self.recorder = ledger
        self._eager = eagerly()
        self._eager.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._eager.__exit__(*exc)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING
    ) -> Any:
        try:
            plan = self._asked[func]
        except KeyError:
            if not self.enabled:
                return func(*args, **kwargs)
            plan = self._plan(func)
        frame = _getframe(1)
        if plan.special or (kwargs and "out" in kwargs):
            return self._special(plan, args, kwargs, frame)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if type(out) is not Tensor:
            kind = kinds.get(type(out))
            if (kind if kind is not None else kind_of(type(out))) == SCALAR:
                if type(out) is float and out - out != 0 and args and isinstance(args[0], Tensor):
                    self.recorder.note_number(args[0])
                return out
        ledger = self._ledger
        grad = False
        try:
            if not plan.law and self._alone and not _len_torch_dispatch_stack():  # it will be scanned
                ledger.direct = True
                grad = _is_grad_enabled()
                if grad:  # off once for all scans of this call; torch.no_grad() costs a microsecond
                    _set_grad_enabled(False)
                    ledger.grad_off = True
            self.recorder.record(plan, args, kwargs, out, frame)
        except (NonFiniteError, NonFiniteWarning) as error:
            raise error.with_traceback(None)  # noqa: B904 - the user's frame comes next
        except Exception as problem:
            self.recorder.miss(plan, problem)
        finally:
            ledger.direct = False
            if grad:
                _set_grad_enabled(True)
                ledger.grad_off = False
        return out

    def _special(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], frame: Any) -> Any:
        """Calls that write arguments, hand out gradients, or make no value."""
        if plan.base == "backward":
            self.recorder.note_backward(plan, (args, kwargs), frame)
        if plan.writes or "out" in kwargs:
            return self.recorder.call_writing(plan, args, kwargs, frame)
        out = plan.func(*args, **kwargs)
        if plan.is_gradient and out is not None:
            self.recorder.note_gradients(plan, out)
        return out

    def _plan(self, func: Any) -> Plan:
        """The plan of a function met for the first time."""
        try:
            plan = plan_function(func, self._fast)
        except Exception as problem:
            name = getattr(func, "__name__", None) or type(func).__name__
            plan = Plan(func, name, name)
            self.recorder.miss(plan, problem, "what is known of ")
        self._plans[func] = plan
        return plan


never_compile(FunctionTracer.__torch_function__)


class _Unseen:
    """A recorder that works out of sight of the function modes further out: they see the program's own calls
    only."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._plans: dict[Plan, Plan] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._recorder, name)

        def work(*args: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return method(*args)

        return work

    def call_writing(self, plan: Plan, *rest: Any) -> Any:
        shown = self._plans.get(plan)
        if shown is None:
            shown = self._plans[plan] = copy(plan)
            shown.call = partial(_seen, plan.call)
        with torch._C.DisableTorchFunction():
            return self._recorder.call_writing(shown, *rest)


def _seen(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with enable_torch_function():
        return func(*args, **kwargs)


def _begin_scan(tensor: Tensor, mask: bool) -> tuple[Tensor, ...] | None:
    """`health.begin_scan` without autograd's notice and out of sight of other modes."""
    if _len_torch_dispatch_stack():
        return health.begin_scan_unseen(tensor, mask)
    if tensor.requires_grad and _is_grad_enabled():
        _set_grad_enabled(False)
        try:
            return health.begin_scan(tensor, mask)
        finally:
            _set_grad_enabled(True)
    return health.begin_scan(tensor, mask)


def _scan(tensor: Tensor) -> int:
    """`health.scan` without autograd's notice and out of sight of other modes."""
    if _len_torch_dispatch_stack():
        return health.scan_unseen(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        _set_grad_enabled(False)  # as torch.no_grad(), which costs a microsecond
        try:
            return health.scan(tensor)
        finally:
            _set_grad_enabled(True)
    return health.scan(tensor)


def _total(tensor: Tensor, reduction: Callable[[Tensor], Tensor] = _sum) -> Any:
    """Sum (or least, or greatest element) of a dense tensor without autograd's notice; NaN where other modes
    would listen."""
    if _len_torch_dispatch_stack():
        return math.nan
    if tensor.requires_grad and _is_grad_enabled():
        _set_grad_enabled(False)  # as torch.no_grad(), which costs a microsecond
        try:
            return reduction(tensor).item()
        finally:
            _set_grad_enabled(True)
    return reduction(tensor).item()


def _unknown(tensor: Tensor, reduction: Any = None) -> float:
    return math.nan
