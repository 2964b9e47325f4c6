"""The step once more, under a trace; and once more to take the arguments of the one culprit call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sherlorch import health
from sherlorch.compat import eagerly
from sherlorch.errors import UntracedTensorError
from sherlorch.graph import OpNode
from sherlorch.guard.run import Run, Stopped, listening
from sherlorch.replay import Repro, state_of, take
from sherlorch.reports.report import DiagnosisReport
from sherlorch.tracker import ProvenanceTracker

Step = Callable[[], Any]
Call = tuple[str, int]  # op, and how often it had been called by then
_DISABLED = torch._C._disabled_torch_dispatch_impl


@dataclass
class Replay:
    """What the step gave when it ran again."""

    report: DiagnosisReport
    losses: list[float] = field(default_factory=list)
    problem: Exception | None = None
    call: Call | None = None  # the culprit's
    notes: tuple[str, ...] = ()  # on what differs from the first run, where the fault did not come back


def replay_step(
    step: Step,
    run: Run,
    use: Callable[[Run], None],
    models: Mapping[str, nn.Module],
    gradients: Callable[[], list[Tensor]],
) -> Replay:
    """Run the step under ``trace(level="aten")``; diagnose its loss, or gradients, or the earliest fault.

    `use` makes `run` the one that the guard's hooks speak to.
    """
    tracker = ProvenanceTracker("aten")
    counter = _Counter(tracker)
    result: Any = None
    problem: Exception | None = None
    use(run)
    with eagerly(), counter, tracker, listening(run):
        for name, model in models.items():
            tracker.watch(plain(model), name=name)
        try:
            result = step()
        except Stopped:
            pass
        except Exception as error:
            problem = error.with_traceback(None)
    loss = loss_of(result)
    report = _diagnose(tracker, run, loss, gradients())
    roots = [root for root, _ in run.roots] or ([] if loss is None else [loss])
    losses = [root.item() if isinstance(root, Tensor) else root for root in roots]
    run.roots.clear()
    return Replay(report, losses, problem, counter.find(culprit_call(report)))


def plain(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` wrapped."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def loss_of(result: Any) -> Any:
    """What a step returns as its loss: a number or tensor, the first of several, the one called `loss`."""
    if isinstance(result, Mapping):
        result = result.get("loss")
    elif isinstance(result, (list, tuple)):
        result = result[0] if result else None
    if hasattr(result, "loss") and not isinstance(result, Tensor):
        result = result.loss
    if isinstance(result, Tensor):
        return result if result.numel() == 1 and result.dtype in health.FLOATING else None
    return result if isinstance(result, float) else None


def _diagnose(tracker: ProvenanceTracker, run: Run, loss: Any, gradients: list[Tensor]) -> DiagnosisReport:
    roots = [*run.roots, (loss, "loss")] if isinstance(loss, Tensor) else run.roots
    for tensor, name in roots:
        if tracker.has_issue(tensor):
            return _of(tracker, tensor, name or "loss")
    for gradient in reversed(gradients):
        if tracker.has_issue(gradient):
            return _of(tracker, gradient, "")
    return tracker.diagnose()


def _of(tracker: ProvenanceTracker, tensor: Tensor, name: str) -> DiagnosisReport:
    try:
        report = tracker.diagnose(tensor)
    except UntracedTensorError:
        return tracker.diagnose()
    report.target_name = name or report.target_name
    return report


def culprit_call(report: DiagnosisReport) -> OpNode | None:
    """The node whose call a repro should run: the first culprit, or of a leaf the first op that used it."""
    for culprit in report.culprits[:1]:
        path = report.paths.get(culprit.seq, [culprit])
        return next((node for node in path if node.parents), None)
    return None


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Numbers the calls of each op, the same way in each replay.

    Not all calls together: old versions of torch detach saved tensors once for each mode that listens.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(getattr(cls, "__torch_dispatch__", _DISABLED) is not _DISABLED for cls in types):
            return NotImplemented
        name = str(func)
        number = self._counts[name] = self._counts.get(name, 0) + 1
        return self.see((name, number), func, args, kwargs or {})

    def see(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the call."""
        return func(*args, **kwargs)


class _Counter(_Calls):  # type: ignore[no-untyped-call, unused-ignore]
    """Stands outside the tracer, and notes how many nodes there were when each call ran."""

    def __init__(self, tracker: ProvenanceTracker) -> None:
        super().__init__()
        self._recorder = tracker._recorder
        self._nodes: list[int] = []
        self._calls: list[Call] = []

    def see(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        self._nodes.append(self._recorder.seq)
        self._calls.append(call)
        return func(*args, **kwargs)

    def find(self, node: OpNode | None) -> Call | None:
        """Which call made `node`."""
        if node is None:
            return None
        position = bisect_left(self._nodes, node.call) - 1
        call = self._calls[position] if position >= 0 else ("", 0)
        return call if call[0] == node.op_name else None


class _Taker(_Calls):  # type: ignore[no-untyped-call, unused-ignore]
    """Takes the arguments of call `wanted`, lets it run, and ends the step if it showed the fault."""

    def __init__(self, wanted: Call, expected: int) -> None:
        super().__init__()
        self._wanted, self._expected = wanted, expected
        self.repro: Repro | None = None
        self.problem = ""

    def see(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        if call != self._wanted:
            return func(*args, **kwargs)
        try:
            with health.unseen():
                repro = take(func, args, kwargs)
        except Exception as error:  # a kind of argument that cannot be copied
            self.problem = f"{type(error).__name__}: {error}"
            raise Stopped from None
        out = func(*args, **kwargs)
        with health.unseen():
            state = state_of(func, args, kwargs, out)
        if state & self._expected:
            repro.expected = state & self._expected
            self.repro = repro
        else:
            self.problem = "the same call was finite this time"
        raise Stopped


def take_culprit(
    step: Step, run: Run, use: Callable[[Run], None], node: OpNode, call: Call
) -> tuple[Repro | None, str]:
    """Run the step up to the culprit call and copy its arguments: the repro, or why there is none."""
    taker = _Taker(call, (health.NAN if node.has_nan else 0) | (health.INF if node.has_inf else 0))
    use(run)
    try:
        with eagerly(), taker, listening(run):
            step()
    except Stopped:
        pass
    except Exception as error:
        taker.problem = taker.problem or f"{type(error).__name__}: {error}"
    return taker.repro, taker.problem or "the call did not come again"
