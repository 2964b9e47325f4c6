"""Level ``aten``: a TorchDispatchMode that sees every kernel, backward and optimizer included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import _getframe
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sherlorch import health
from sherlorch.compat import CAN_MARK, never_compile
from sherlorch.errors import NonFiniteError, NonFiniteWarning
from sherlorch.tracers.memory import PLAIN
from sherlorch.tracers.plan import Plan, Switch, plan_overload
from sherlorch.tracers.recorder import Recorder

# False inside of DisableTorchFunction. Torch 2.0 cannot tell.
_function_modes_listen = getattr(torch._C, "_is_torch_function_mode_enabled", lambda: False)
_NUMBERS = frozenset({float, int, bool, complex, type(None)})
_NOTHING: dict[str, Any] = {}
_PLANS: dict[bool, dict[int, Plan]] = {
    True: {},
    False: {},
}  # by id of the overload, which its plan keeps alive


class DispatchTracer(Switch, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each aten call and its results to a recorder."""

    def __init__(self, recorder: Recorder, fast: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self._fast = fast
        self._plans = self._asked = _PLANS[fast]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The default wraps the handler so that Dynamo never compiles it, at a microsecond per call; the mark
        # below costs none.
        return not CAN_MARK

    def __enter__(self) -> DispatchTracer:
        # Scans must not show up in a mode further out.
        nested = bool(torch._C._len_torch_dispatch_stack())
        self.recorder.scan = health.scan_unseen if nested else health.scan
        self.recorder.begin_scan = health.begin_scan_unseen if nested else health.begin_scan
        self.recorder.direct = not nested
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING,
        depth: int = 1,
    ) -> Any:  # fmt: skip
        if _function_modes_listen():  # to a kernel that torch did not call by way of them
            with torch._C.DisableTorchFunction():
                return self.__torch_dispatch__(func, types, args, kwargs, 2)
        try:
            plan = self._asked[id(func)]
        except KeyError:
            if not self.enabled:
                return func(*args, **kwargs)
            plan = self._plan(func)
        if types and any(
            hasattr(cls, "__torch_dispatch__") and cls.__torch_dispatch__ is not _DISABLED for cls in types
        ):
            if any(issubclass(cls, FakeTensor) for cls in types):
                return func(*args, **kwargs)  # it has no values, and runs below every mode
            return NotImplemented  # the subclass unwraps itself; the calls on what it wraps come here
        try:
            frame: Any = _getframe(depth)
        except ValueError:  # a thread of the autograd engine has no Python above
            frame = None
        if plan.writes:
            if plan.in_place and type(args[0]) in PLAIN:
                return self.recorder.write(plan, args, kwargs, frame)
            return self.recorder.call_writing(plan, args, kwargs, frame)
        out = plan.call(*args, **kwargs) if kwargs else plan.call(*args)
        if type(out) in _NUMBERS:
            if plan.base == "_local_scalar_dense" and out - out != 0:
                self.recorder.note_number(args[0])
            return out
        try:
            self.recorder.record(plan, args, kwargs, out, frame)
        except (NonFiniteError, NonFiniteWarning) as error:
            raise error.with_traceback(None)  # noqa: B904 - the user's frame comes next
        except Exception as problem:
            self.recorder.miss(plan, problem)
        return out

    def _plan(self, func: Any) -> Plan:
        """The plan of an overload met for the first time."""
        try:
            plan = plan_overload(func, self._fast)
        except Exception as problem:
            name = str(func)
            plan = Plan(func, name, name)
            self.recorder.miss(plan, problem, "what is known of ")
        self._plans[id(func)] = plan
        return plan


never_compile(DispatchTracer.__torch_dispatch__)
_DISABLED = torch._C._disabled_torch_dispatch_impl
