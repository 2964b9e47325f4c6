"""The object a user holds: options in, nodes, graph and diagnoses out. It owns its mode; its nodes outlive
the block."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sherlorch import health, source
from sherlorch.compat import SEES_PARTS, StepHooks
from sherlorch.diagnosis import Diagnosis, also_seen, diagnose, earliest
from sherlorch.errors import NonFiniteError, NonFiniteWarning, UntracedTensorError
from sherlorch.graph import (
    ARRIVING,
    LEAF,
    OPTIMIZER,
    OpNode,
    Record,
    Scope,
    location_of,
    origin_of,
    to_networkx,
)
from sherlorch.modules import ModuleWatch
from sherlorch.reports.report import Coverage, DiagnosisReport, make_report
from sherlorch.threads import ThreadWatch
from sherlorch.tracers.dispatch import DispatchTracer
from sherlorch.tracers.function import FunctionTracer
from sherlorch.tracers.ledger import kind_of_leaf
from sherlorch.tracers.recorder import Recorder
from sherlorch.weak import weakly

if TYPE_CHECKING:
    import networkx as nx

_LEVELS = ("function", "aten")
_ON_NONFINITE = ("record", "warn", "raise")
_KEEP = ("all", "nonfinite")


def trace(
    level: str = "function",
    *,
    capture_stack: bool = True,
    fast_shape_ops: bool = True,
    check_dtypes: torch.dtype | Iterable[torch.dtype] | None = None,
    on_nonfinite: str = "record",
    keep: str = "all",
) -> ProvenanceTracker:
    """Trace the tensors of a ``with`` block: ``level="function"`` sees what you called, ``"aten"`` what ran,
    backward included.

    The options are those of `ProvenanceTracker`.

    >>> with trace(level="aten") as tracker:
    ...     loss = torch.log(torch.zeros(3)).sum()
    >>> tracker.diagnose(loss).culprits[0].op_name
    'aten.log.default'
    """
    return ProvenanceTracker(
        level,
        capture_stack=capture_stack,
        fast_shape_ops=fast_shape_ops,
        check_dtypes=check_dtypes,
        on_nonfinite=on_nonfinite,
        keep=keep,
    )


class ProvenanceTracker:
    """Records every tensor that a program makes while its ``with`` block runs, and names the op that broke
    one.

    `capture_stack`: the user's line for each node. `fast_shape_ops`: let ops that only move values inherit
    their state.
    `check_dtypes`: scan only these floating dtypes. `on_nonfinite`: ``"record"``, ``"warn"`` once for each
    culprit line, or
    ``"raise"`` `NonFiniteError` at the op. `keep`: ``"all"``, or ``"nonfinite"`` for bounded memory over any
    number of steps.
    Raises ValueError or TypeError for an unknown value.
    """

    # A trace around every step makes a tracker for each: what few of them change stands here.
    _modules: ModuleWatch | None = None  # made by the first `watch`
    _module: str | None = None  # that runs now
    _hooks: StepHooks | None = None
    _thread = 0  # of the block
    _depth = 0  # of blocks within each other
    _steps = 0  # of optimizers, within each other

    def __init__(
        self,
        level: str = "function",
        *,
        capture_stack: bool = True,
        fast_shape_ops: bool = True,
        check_dtypes: torch.dtype | Iterable[torch.dtype] | None = None,
        on_nonfinite: str = "record",
        keep: str = "all",
        _defer: bool = False,
    ) -> None:
        if level not in _LEVELS:
            raise _unknown("level", level, _LEVELS)
        if on_nonfinite not in _ON_NONFINITE:
            raise _unknown("on_nonfinite", on_nonfinite, _ON_NONFINITE)
        if keep not in _KEEP:
            raise _unknown("keep", keep, _KEEP)
        if type(capture_stack) is not bool:
            raise _not_bool("capture_stack", capture_stack)
        if type(fast_shape_ops) is not bool:
            raise _not_bool("fast_shape_ops", fast_shape_ops)
        self.level = level
        self.on_nonfinite = on_nonfinite
        self.keep = keep
        self._threads = ThreadWatch()
        self._scopes: dict[tuple[str, str | None], Scope] = {}
        self._warned: set[str | None] = set()
        self._fast = fast_shape_ops
        self._recorder = Recorder(
            capture_stack=capture_stack,
            check_dtypes=None if check_dtypes is None else _check_dtypes(check_dtypes),
            keep_all=keep == "all",
            defer=_defer,
            by_object=level == "function",
            on_fault=None if on_nonfinite == "record" else weakly(self._fault),
        )
        self._mode = self._make_mode()

    def _make_mode(self) -> DispatchTracer | FunctionTracer:
        return (DispatchTracer if self.level == "aten" else FunctionTracer)(self._recorder, self._fast)

    # The block.

    def __enter__(self) -> ProvenanceTracker:
        if self._depth == 0:
            if self._recorder.seq:
                self._recorder.memory.distrust()
            self._thread = get_ident()
            if self._modules is not None:
                self._modules.thread = self._thread
            self._hooks = StepHooks(self._before_step, self._after_step)
            self._threads.begin()
            self._mode.__enter__()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        try:
            self._mode.__exit__(kind, error, traceback)
        finally:
            if self._modules is not None:
                self._modules.unwatch()
                self._modules.thread = None
            self._threads.end()
            if self._hooks is not None:
                self._hooks.remove()
            if self._steps:  # the block was left within one
                self._steps = 0
                self._recorder.step_line = None
                self._set_scope()

    def enable(self) -> None:
        """Record again after `disable`; what was written meanwhile is read afresh."""
        if not self._mode.enabled:
            self._recorder.memory.distrust()
            self._mode.enabled = True

    def disable(self) -> None:
        """Stop recording without leaving the block; nodes made so far stay."""
        self._mode.enabled = False

    def reset(self) -> None:
        """Forget every node, for instance between steps."""
        self._recorder.clear()
        self._warned.clear()

    def watch(self, model: nn.Module, name: str = "model") -> ProvenanceTracker:
        """Tag nodes with the qualified name of the module that made them, and call parameters and buffers by
        theirs.

        Hooks `model` and its submodules only; they go with `unwatch` or with the end of the block, on an
        exception too.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"watch() takes an nn.Module, got {type(model).__name__}: pass the model itself")
        if self._modules is None:
            self._modules = ModuleWatch(weakly(self._enter_module))
            self._modules.thread = self._thread if self._depth else None
        self._modules.watch(model, name)
        self._recorder.ask_names(weakly(self._name_leaf))
        return self

    def unwatch(self) -> None:
        """Remove the hooks of `watch`; names and tags given so far stay."""
        if self._modules is not None:
            self._modules.unwatch()

    # Where the program is.

    def _enter_module(self, name: str | None) -> None:
        self._module = name
        self._set_scope()

    def _set_scope(self) -> None:
        phase = OPTIMIZER if self._steps else "forward"
        key = (phase, self._module)
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = Scope(phase, self._module)
        self._recorder.scope = scope

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread:
            return  # the hooks are everyone's, the modes are this thread's
        self._steps += 1
        self._set_scope()
        # All kernels of torch's own optimizers have the line that called step(), unless a closure runs user
        # code.
        if type(optimizer).__module__.startswith("torch.") and len(args) < 2 and not kwargs:
            user = source.user_frame(sys._getframe(1))
            self._recorder.step_line = (user.f_code, user.f_lasti) if user is not None else None

    def _after_step(self, *_: Any) -> None:
        if get_ident() != self._thread:
            return
        self._steps = max(0, self._steps - 1)
        self._recorder.step_line = None
        self._set_scope()

    def _name_leaf(self, tensor: Tensor) -> str:
        found = self._modules.name_of(tensor) if self._modules is not None else None
        return f"{found[0]} {found[1]}" if found is not None else kind_of_leaf(tensor)

    # Faults as they happen.

    def _fault(self, record: Record) -> None:
        culprit = self._fault_behind(record)
        if culprit is None:
            return
        diagnosis = diagnose(record)
        if not diagnosis.culprits:
            return
        if self.on_nonfinite == "raise":
            report = self._report(diagnosis)
            raise NonFiniteError(str(report), report)
        line = location_of(diagnosis.culprits[0])
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(str(self._report(diagnosis)), NonFiniteWarning, stacklevel=_depth_of_user_frame())

    def _fault_behind(self, record: Record) -> Record | None:
        """Is this a new fault, rather than one carried on or a value that the program wrote on purpose?"""
        origin = origin_of(record)
        if origin == "outside" and record.facts.arrives:
            return record
        if origin in ("introduced", "converted") or (record.extra is not None and record.extra.born):
            return record
        if origin == "propagated" and not record.facts.moves:
            for parent in record.parents:
                while parent.facts.moves and parent.parents:
                    parent = next((p for p in parent.parents if p.state), parent.parents[0])
                if (
                    parent.bits & LEAF
                    and origin_of(parent) == "outside"
                    and not (parent.extra and parent.extra.mask)
                ):
                    return record
        return None

    # Answers.

    def has_issue(self, tensor: Tensor) -> bool:
        """Does the tensor, traced or not, hold a NaN or Inf now?"""
        return bool(health.examine(_check_tensor(tensor, "has_issue")))

    def node(self, tensor: Tensor) -> OpNode:
        """The node that the tensor is now; raises `UntracedTensorError` (a KeyError) where there is none."""
        self._recorder.resolve()
        return OpNode(self._record_of(_check_tensor(tensor, "node")))

    def _record_of(self, tensor: Tensor) -> Record:
        tensor = _inner(tensor)
        with health.unseen():
            record = self._recorder.find(tensor)
            self._recorder.resolve()
        hidden = (
            self.level == "function"
            and (record is None or bool(record.bits & LEAF))
            and not (tensor.requires_grad and tensor.is_leaf)  # a parameter: no need for the long look
            and _gradient_owner(tensor) is not None
        )
        if record is None or hidden:
            raise UntracedTensorError(_why_untraced(tensor, self.level, hidden, bool(self._recorder.seq)))
        return record

    @property
    def graph(self) -> nx.DiGraph[int]:
        """The provenance graph: nodes are `OpNode.seq`, edges run from input to result, attributes are plain
        values."""
        self._recorder.resolve()
        return to_networkx(self._recorder.records)

    @property
    def nodes(self) -> list[OpNode]:
        """Every node kept, in the order of the program."""
        self._recorder.resolve()
        return [OpNode(record) for record in self._recorder.records]

    def diagnose(self, tensor: Tensor | None = None) -> DiagnosisReport:
        """Who made `tensor` non-finite, and why; without a tensor, the earliest fault seen that was not
        absorbed.

        Raises `UntracedTensorError` (a KeyError) for a tensor that was not traced.
        """
        with _without_collector():
            return self._diagnose(tensor, sys._getframe(1))

    def _diagnose(self, tensor: Tensor | None, frame: FrameType) -> DiagnosisReport:
        self._recorder.resolve()
        if tensor is None:
            return self._diagnose_earliest()
        _check_tensor(tensor, "diagnose")
        record = self._record_of(tensor)
        name = _name_in(frame, tensor) or self._known_name(tensor)
        notes: tuple[str, ...] = ()
        if record.bits & ARRIVING:
            notes = (f"{record.facts.name} is still writing the tensor: it is judged when it was waited for",)
            return self._report(diagnose(record), name, notes)
        now = health.examine(_inner(tensor))
        if now != record.state and record.dtype in self._recorder.floating:
            notes = (
                f"the tensor holds {_words(now)} now but held {_words(record.state)} when it was last seen: "
                "something wrote it where the tracer did not look",
            )
            if not record.state:
                record = self._recorder.written_unseen(_inner(tensor))
                self._recorder.resolve()
        return self._report(diagnose(record), name, notes)

    def _diagnose_earliest(self) -> DiagnosisReport:
        recorder = self._recorder
        fault = earliest(recorder.faults, self.level == "aten", recorder.memory.lasting())
        if fault is not None:
            return self._report(diagnose(fault), "")
        records = self._recorder.records
        report = DiagnosisReport(
            OpNode(records[-1]) if records else None, total_nodes_seen=self._recorder.seq
        )
        report.coverage = self._coverage()
        report.also_seen = self._report(Diagnosis(records[-1])).also_seen if records else []
        return report

    def _known_name(self, tensor: Tensor) -> str:
        if self._modules is None:
            return ""
        found = self._modules.name_of(tensor)
        return found[1] if found is not None else self._modules.gradient_name(tensor)

    def _report(self, diagnosis: Diagnosis, name: str = "", notes: tuple[str, ...] = ()) -> DiagnosisReport:
        recorder = self._recorder
        if any(culprit.facts.base == "backward" for culprit in diagnosis.culprits) and _other_processes():
            notes = (
                *notes,
                "it may have come from another process: level='aten' sees the collectives of backward",
            )
        if any(map(_may_be_of_a_thread, diagnosis.culprits)):
            others = max(self._threads.started(), self._threads.running())
            if others:
                notes = (*notes, f"another thread may have made it: {_threads(others)} ran without a tracer")
        also = also_seen(recorder.faults, diagnosis, recorder.records if self.keep == "all" else ())
        return make_report(
            diagnosis, nodes=recorder.seq, also=also, coverage=self._coverage(), target_name=name, notes=notes
        )

    def _other_threads(self) -> tuple[str, ...]:
        started = self._threads.started()
        return (f"{_threads(started)} started meanwhile without a tracer, not seen",) if started else ()

    def _coverage(self) -> Coverage:
        recorder = self._recorder
        notes: tuple[str, ...] = () if self.level == "aten" else ("backward not seen at this level",)
        notes += (*_other_processes(), *self._other_threads())
        if self.level == "function" and not SEES_PARTS:
            notes += ("most `x[i]` and `x[i] = y` not seen at this level before torch 2.1",)
        return Coverage(
            recorder.seq, recorder.seq - recorder.inherited, recorder.inherited, dict(recorder.unseen), notes
        )


def _threads(number: int) -> str:
    return f"{number} other thread" + "s" * (number != 1)


def _may_be_of_a_thread(culprit: Record) -> bool:
    """Is it a tensor that came in from nowhere that is known?"""
    name = culprit.extra.name if culprit.extra is not None else ""
    return bool(culprit.bits & LEAF) and not name.startswith(("parameter ", "buffer ", "tensor made at"))


def _other_processes() -> tuple[str, ...]:
    """Which part of the program this process is."""
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return ()
    processes = distributed.get_world_size()
    rank = distributed.get_rank()
    return (f"rank {rank} of {processes} processes, the others not seen",) if processes > 1 else ()


def _inner(tensor: Tensor) -> Tensor:
    """The plain tensor inside a wrapper subclass (DTensor and the like); the tensor itself otherwise."""
    while type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        if len(names) != 1:
            return tensor
        tensor = getattr(tensor, names[0])
    return tensor


def _gradient_owner(tensor: Tensor) -> Tensor | None:
    """The leaf whose ``grad`` the tensor is. Looks through every tensor of the process: for rare use."""
    for thing in gc.get_objects():
        if (
            issubclass(type(thing), Tensor)
            and thing is not tensor
            and thing.requires_grad
            and thing.is_leaf
            and thing.grad is tensor
        ):
            owner: Tensor = thing
            return owner
    return None


def _words(state: int) -> str:
    return {0: "only finite values", 1: "NaN", 2: "Inf", 3: "NaN and Inf"}[state]


def _name_in(frame: FrameType, tensor: Tensor) -> str:
    """What the caller calls the tensor: a local or global variable, or ``name.grad``."""
    if source.classify(frame) != source.USER:
        return ""
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in scope.items():
            if value is tensor and not name.startswith("_"):
                return name
            if isinstance(value, Tensor) and value.is_leaf and value.grad is tensor:
                return f"{name}.grad"
    return ""


def _why_untraced(tensor: Tensor, level: str, is_gradient: bool, traced: bool) -> str:
    nested = tensor.is_nested and tensor.layout is torch.strided  # has no shape to tell
    what = "nested tensor" if nested else f"tensor of shape {tuple(tensor.shape)}"
    what += f" and dtype {str(tensor.dtype).replace('torch.', '')}"
    if is_gradient:
        return (
            f"the {what} is a gradient, and level='function' does not see the backward pass: "
            "trace with sherlorch.trace(level='aten') to diagnose gradients"
        )
    if not traced:
        return (
            f"the {what} has no node: nothing was traced yet; "
            "compute it inside `with sherlorch.trace() as tracker:`"
        )
    hint = "" if level == "aten" else ", and with level='aten' if it was made in the backward pass"
    return (
        f"the {what} has no node: it was not made, used or written inside this trace, "
        "or it was made before reset(); "
        f"compute it inside the `with sherlorch.trace(...)` block{hint}"
    )


def _check_tensor(tensor: Any, method: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{method}() takes a torch.Tensor, got {type(tensor).__name__}: pass the tensor itself"
        )
    return tensor


@contextmanager
def _without_collector() -> Iterator[None]:
    """The garbage collector would walk a graph of a million records, in which there is no garbage, again and
    again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _unknown(option: str, value: Any, choices: tuple[str, ...]) -> ValueError:
    return ValueError(f"{option}={value!r} is unknown: use one of {', '.join(map(repr, choices))}")


def _not_bool(option: str, value: Any) -> TypeError:
    return TypeError(f"{option} takes True or False, got {value!r}")


def _check_dtypes(value: Any) -> frozenset[torch.dtype]:
    if not isinstance(value, (torch.dtype, Iterable)):
        raise TypeError(f"check_dtypes takes a torch.dtype or several, got {value!r}")
    dtypes = frozenset([value] if isinstance(value, torch.dtype) else value)
    for dtype in dtypes:
        if dtype not in health.FLOATING:
            raise ValueError(f"check_dtypes takes floating or complex dtypes, got {dtype!r}")
    return dtypes


def _depth_of_user_frame() -> int:
    """`stacklevel` that points a warning at the user's line."""
    depth, frame = 1, sys._getframe(1)
    user = source.user_frame(frame)
    while frame is not None and frame is not user:
        frame = frame.f_back  # type: ignore[assignment]
        depth += 1
    return depth
