"""A call becomes nodes: who the inputs are, what state the results are in, and where in the program it happened.

Everything here runs once for each call of the traced program, so the common way is written out flat: the rest of the file
serves the rare calls. Nothing is decided while recording that can be decided later (origins and culprits are not).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from sherlorch import health, source
from sherlorch.capture import capture
from sherlorch.errors import NonFiniteError
from sherlorch.evidence import Evidence
from sherlorch.graph import (
    ALIAS, BACKWARD, CONSTANT, CONSUMED, FORWARD, GRADIENT, GRAPH, INHERITED, LEAF, OPTIMIZER, PENDING, RECOMPUTE, Extra, OpFacts, Record, Scope, location_of,
)  # fmt: skip
from sherlorch.health import INF, NAN, NONFINITE
from sherlorch.ops import traits
from sherlorch.source import ENGINE, INTERNAL, USER
from sherlorch.tracers.memory import Entry, Memory, anchor
from sherlorch.tracers.plan import PERMUTES, Plan

CPU = torch.device("cpu")
SCALAR, TENSOR, NESTED = 0, 1, 2
_LEAF = OpFacts("leaf", "leaf", moves=True)
_VIEW = OpFacts("view", "view", moves=True)
_MOST_RERUNS = 2000
_PENDING_LIMIT = 4096
_LINKS_KEPT = 200_000
_NOTHING: dict[str, Any] = {}
_strided = torch.strided
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"

_current_autograd_node = torch._C._current_autograd_node
_get_sequence_nr = torch.autograd._get_sequence_nr
_frame_kinds = source.kinds

kinds: dict[type, int] = {
    int: SCALAR, float: SCALAR, bool: SCALAR, complex: SCALAR, str: SCALAR, type(None): SCALAR, torch.dtype: SCALAR, torch.device: SCALAR,
    torch.layout: SCALAR, torch.memory_format: SCALAR, torch.Size: SCALAR, slice: NESTED, Tensor: TENSOR, torch.nn.Parameter: TENSOR,
    list: NESTED, tuple: NESTED, dict: NESTED,
}  # fmt: skip


def kind_of(cls: type) -> int:
    """SCALAR, TENSOR or NESTED for the type of an argument, remembered in `kinds`."""
    kind = SCALAR
    if issubclass(cls, Tensor):
        kind = TENSOR
    elif issubclass(cls, (list, tuple, dict)):
        kind = NESTED
    kinds[cls] = kind
    return kind


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    kind = kinds.get(type(value))
    if kind is None:
        kind = kind_of(type(value))
    if kind == TENSOR:
        yield value
    elif kind == NESTED and not isinstance(value, slice):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
    elif kind == NESTED:
        for item in (value.start, value.stop, value.step):
            yield from tensors_in(item)


def mark_consumed(parents: Iterable[Record]) -> None:
    """A call took these as input; of interest for non-finite ones only."""
    for parent in parents:
        if parent.bits & NONFINITE:
            parent.bits |= CONSUMED


class Site(NamedTuple):
    """Where a call happened: the user's frame, phase and module, and the forward record of a backward kernel."""

    code: Any
    instruction: int
    scope: Scope
    link: Optional[Record]
    autograd: Any


class Recorder:
    """The records of one trace and what is needed to add to them."""

    def __init__(
        self,
        *,
        capture_stack: bool,
        check_dtypes: Optional[Iterable[torch.dtype]],
        keep_all: bool,
        defer: bool = False,
        leaf_name: Callable[[Tensor], str] = lambda tensor: "",
        on_fault: Optional[Callable[[Record], None]] = None,
        by_object: bool = False,
        is_gradient: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        self.capture_stack = capture_stack
        self.floating = health.FLOATING if check_dtypes is None else frozenset(check_dtypes)
        self.keep_all = keep_all
        self.defer = defer  # treat every device as an accelerator
        self.leaf_name = leaf_name
        self.on_fault = on_fault
        self.by_object = by_object
        self.is_gradient = is_gradient
        self.has_names = False  # are there watched modules to ask?
        self.scan = health.scan
        self.forward_scope = self.scope = Scope(FORWARD)
        self.step_line: Optional[tuple[Any, int]] = None  # the user's line of the torch optimizer step that runs now
        self._backward = Scope(BACKWARD)
        self._optimizer = Scope(OPTIMIZER)
        self.clear()

    def clear(self) -> None:
        """Forget every node."""
        self.records: list[Record] = []
        self.faults: list[Record] = []  # the non-finite ones
        self.seq = 0
        self.inherited = 0
        self.unseen: dict[str, int] = {}
        self.reruns = 0
        self.memory = Memory(self._leaf, self._merged, self.by_object)
        self.table = self.memory.table
        self.loose: dict[int, tuple[Any, Record]] = {}
        self.sequence = _get_sequence_nr()
        self.links: list[Optional[Record]] = []
        self.links_start = self.sequence
        self.pending: list[tuple[Record, Any, bool]] = []
        self.last_backward: Optional[tuple[Plan, Record, Site]] = None

    # The common way: an op that writes none of its arguments.

    def record(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, frame: Any) -> None:
        """Add the results of a call that wrote none of its arguments; `frame` made the call."""
        parents, bits = self.inputs(args, kwargs)
        if plan.blind:
            parents.clear()
            bits = 0
        code, instruction, scope, link, autograd = self.where(frame)
        sequence = _get_sequence_nr()
        if bits & GRADIENT and autograd is None and sequence == self.sequence and scope.phase == FORWARD:
            scope = self._optimizer  # works on gradients without recording a graph

        if type(out) is Tensor:
            # One plain result, the usual thing; the same as `add_result`, without the call.
            record = self.add_result(plan, args, kwargs, out, tuple(parents), bits, code, instruction, scope, link, autograd)
            if sequence != self.sequence:
                self.tie(record, sequence)
            return
        if plan.by_element and isinstance(out, (list, tuple)) and len(out) > 1:
            site = Site(code, instruction, scope, link, autograd)
            self._record_elements(plan, args, kwargs, out, site)
            return
        call = self.seq + 1
        record = None
        for result in tensors_in(out):
            record = self.add_result(plan, args, kwargs, result, tuple(parents), bits, code, instruction, scope, link, autograd, call)
        if sequence != self.sequence:
            self.tie(record, sequence)

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Record], int]:
        """The nodes of every tensor argument, and their bits joined."""
        parents: list[Record] = []
        bits = 0
        table = self.table
        for arg in args:
            kind = kinds.get(type(arg))
            if kind == TENSOR:
                try:
                    entry = table.get(arg.untyped_storage()._cdata)
                except (NotImplementedError, RuntimeError):
                    node = self.node_of(arg)
                else:  # as `node_of`, without the call
                    if entry is None:
                        node = self.memory.start_leaf(arg)
                    elif entry.views is None:
                        node = entry.node  # type: ignore[assignment]
                        if node.bits & NONFINITE:
                            node = self.memory.read(entry, arg)
                    elif entry.more is None:
                        found = entry.views.get((arg.storage_offset(), arg.shape, arg.stride(), arg.dtype))
                        node = found if found is not None else self.memory.read(entry, arg)
                    else:
                        node = self.memory.read(entry, arg)
                parents.append(node)
                bits |= node.bits
            elif kind != SCALAR:
                for item in tensors_in(arg) if kind is None or type(arg) is not list else arg:
                    kind = kinds.get(type(item))
                    if kind == TENSOR:
                        node = self.node_of(item)
                        parents.append(node)
                        bits |= node.bits
                    elif kind != SCALAR:
                        for tensor in tensors_in(item):
                            node = self.node_of(tensor)
                            parents.append(node)
                            bits |= node.bits
        if kwargs:
            for value in kwargs.values():
                if kinds.get(type(value)) != SCALAR:
                    for tensor in tensors_in(value):
                        node = self.node_of(tensor)
                        parents.append(node)
                        bits |= node.bits
        return parents, bits

    def add_result(
        self,
        plan: Plan,
        args: Any,
        kwargs: Any,
        out: Tensor,
        parents: tuple[Record, ...],
        bits: int,
        code: Any,
        instruction: int,
        scope: Scope,
        link: Optional[Record],
        autograd: Any,
        call: int = 0,
    ) -> Optional[Record]:
        """Add one result; None where it is one of the arguments itself."""
        try:
            storage = out.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return self._add_loose(plan, args, kwargs, out, parents, bits, Site(code, instruction, scope, link, autograd), call)
        key = storage._cdata
        entry = self.table.get(key)
        if entry is not None:
            for arg in args:
                if arg is out:
                    if plan.lifts:
                        self._name_lifted(parents[0], code, instruction)
                    return None
        dtype = out.dtype
        device = CPU if out.is_cpu else out.device
        extra = None
        state = 0
        seq = self.seq = self.seq + 1
        if dtype in self.floating:
            law = plan.law if not plan.conditional else plan.law_for(args, kwargs or {})
            if law and parents and not bits & (NONFINITE | PENDING):
                state = INHERITED
                self.inherited += 1
            elif law == PERMUTES and bits & NONFINITE and not bits & PENDING:
                state = INHERITED | (bits & NONFINITE)
                self.inherited += 1
            elif device is CPU and not self.defer:
                state = self.scan(out)
            else:
                state = PENDING
        if scope.phase == BACKWARD or (scope is self._optimizer and bits & GRADIENT):
            state |= GRADIENT
        if state & NONFINITE:
            state, extra = self._examine(plan, args, kwargs, out, parents, state, None)
            if plan.uninitialised:
                extra = None
        keep = self.keep_all or state & (NONFINITE | PENDING)
        record = Record(
            seq, call or seq, plan, out.shape, dtype, device, state, parents if keep else (), code, instruction, scope, link, autograd, extra
        )
        if keep:
            self.records.append(record)
        if state & NONFINITE:
            if plan.lifts and not parents:
                record.bits = record.bits & ~CONSTANT | LEAF
                record.extra = Extra(evidence=_leaf_evidence(out))
                record.code = None
                self._name_lifted(record, code, instruction)
            if out.requires_grad:
                record.bits |= GRAPH
        if entry is None:
            entry = self.table[key] = Entry(storage, self.memory.forget)  # as `Memory.start`, without the call
            entry.key = key
            entry.node = record
            entry.views = None
            entry.more = None
        else:
            shape = record.shape
            if entry.views is None or entry.views.setdefault((out.storage_offset(), shape, out.stride(), dtype), record) is not record:
                source = args[0] if args and kinds.get(type(args[0])) == TENSOR else None
                if not self.memory.adopt(entry, out, record, source) and state & NONFINITE:
                    record.bits |= CONSUMED  # stands for a tensor that is known by an older node
                    bits = 0
        if bits & NONFINITE and dtype in self.floating:
            mark_consumed(parents)
        if state & (NONFINITE | PENDING):
            self._settle(plan, out, record, parents, bits)
        return record

    def _add_loose(
        self, plan: Plan, args: Any, kwargs: Any, out: Tensor, parents: tuple[Record, ...], bits: int, site: Site, call: int
    ) -> Optional[Record]:
        """Add a result that has no storage of its own (sparse, opaque)."""
        if any(out is arg for arg in args):
            return None
        held = anchor(out)
        state = self._state(held, plan, bits)
        mark_consumed(parents)
        extra = None
        if state & NONFINITE:
            state, extra = self._examine(plan, args, kwargs, out, parents, state, None)
        self.seq += 1
        keep = self.keep_all or state & (NONFINITE | PENDING)
        record = Record(
            self.seq, call or self.seq, plan, out.shape, out.dtype, CPU if out.is_cpu else out.device, state, parents if keep else (),
            site.code, site.instruction, site.scope, site.link, site.autograd, extra,
        )  # fmt: skip
        if keep:
            self.records.append(record)
        if held is None:
            self.loose[id(out)] = (WeakIdRef(out), record)
        elif held.untyped_storage()._cdata in self.table:
            self.memory.adopt(self.table[held.untyped_storage()._cdata], held, record)
        else:
            self.memory.start(held, record)
        if state & (NONFINITE | PENDING):
            self._settle(plan, held, record, parents, bits)
        return record

    def _record_elements(self, plan: Plan, args: Any, kwargs: Any, out: Sequence[Tensor], site: Site) -> None:
        """Results of a ``_foreach_`` op: element i comes from element i of each list."""
        call = self.seq + 1
        record = None
        for index, result in enumerate(out):
            row = [value[index] if isinstance(value, (list, tuple)) and len(value) == len(out) else value for value in args]
            parents = tuple(self.node_of(tensor) for tensor in tensors_in((row, kwargs)))
            bits = 0
            for parent in parents:
                bits |= parent.bits
            record = self.add_result(plan, row, kwargs, result, parents, bits, *site, call) or record
        sequence = _get_sequence_nr()
        if sequence != self.sequence and record is not None:
            self.tie(record, sequence)

    def tie(self, record: Optional[Record], sequence: int) -> None:
        """Give the autograd nodes made since the last call to this record: it is their forward op."""
        made = sequence - self.sequence
        self.sequence = sequence
        if made < 0 or made > _LINKS_KEPT:  # another thread's numbers, or a long stretch without recording
            self.links.clear()
            self.links_start = sequence
            return
        self.links.extend([record] * made)
        if not self.keep_all and len(self.links) > _LINKS_KEPT:
            del self.links[: _LINKS_KEPT // 2]
            self.links_start += _LINKS_KEPT // 2

    def where(self, frame: Any) -> tuple[Any, int, Scope, Optional[Record], Any]:
        """Of a call made by `frame`: code and instruction of the user's line, scope, forward record, autograd node."""
        current = _current_autograd_node()
        if current is not None:
            number = current._sequence_nr() - self.links_start
            link = self.links[number] if 0 <= number < len(self.links) else None
            if frame is None or _frame_kinds.get(id(frame.f_code)) == ENGINE:
                return None, 0, self._backward, link, type(current)
            return self._inside_backward(frame, link, type(current))
        scope = self.scope
        if scope.phase == OPTIMIZER:
            if torch.is_grad_enabled():
                scope = self.forward_scope  # a closure computes the loss again
            elif self.step_line is not None and _frame_kinds.get(id(frame.f_code)) == INTERNAL:
                code, instruction = self.step_line
                return code, instruction, scope, None, None
        if self.capture_stack:
            while frame is not None:
                code = frame.f_code
                kind = _frame_kinds.get(id(code))
                if kind == USER:
                    return code, frame.f_lasti, scope, None, None
                if kind is None:
                    source.classify(frame)
                else:
                    frame = frame.f_back
        return None, 0, scope, None, None

    def _inside_backward(self, frame: Any, link: Optional[Record], autograd: Any) -> tuple[Any, int, Scope, Optional[Record], Any]:
        """Python that the autograd engine runs: a custom backward, a hook, a checkpoint's second forward."""
        user = source.user_frame(frame, past_engine=False)
        if user is None:
            return None, 0, self._backward, link, autograd
        if torch.is_grad_enabled() and source.runs_checkpoint(frame):
            return user.f_code, user.f_lasti, Scope(RECOMPUTE, self.scope.module), None, None
        return user.f_code, user.f_lasti, Scope(BACKWARD, self._module_of(link)), link, autograd

    def _module_of(self, link: Optional[Record]) -> Optional[str]:
        while link is not None and link.link is not None:
            link = link.link
        return link.scope.module if link is not None else self.scope.module

    def note_backward(self, plan: Plan, loss: Tensor, frame: Any) -> None:
        """Function level: gradients seen from now on come from this call."""
        self.last_backward = (plan, self.node_of(loss), Site(*self.where(frame)))

    # Ops that write.

    def call_writing(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], frame: Any) -> Any:
        """Run a call that writes arguments, and add what it wrote and what it returned."""
        if plan.in_place and type(args[0]) in _PLAIN:
            return self._call_in_place(plan, args, kwargs, frame)
        try:
            writing = _Writing(self, plan, args, kwargs)
        except Exception as problem:
            self.miss(plan, problem)
            return plan.call(*args, **kwargs)
        out = plan.call(*args, **kwargs)
        try:
            writing.finish(out, Site(*self.where(frame)))
        except _PASSES_THROUGH:
            raise
        except Exception as problem:
            self.miss(plan, problem)
        return out

    def _call_in_place(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], frame: Any) -> Any:
        """The usual write: ``x.op_(...)`` on one plain tensor."""
        target = args[0]
        old: Mapping[str, Tensor] = _NOTHING
        version = -1
        problem: Optional[Exception] = None
        try:
            # Inputs are looked up before the call: afterwards their memory may hold something else.
            if plan.overwrites and (len(args) == 1 or not _share_memory(target, args[1:])):
                parents, bits = self.inputs(args[1:], kwargs)
                known = self.find(target)
                if known is not None:
                    known.bits |= CONSUMED
            else:
                parents, bits = self.inputs(args, kwargs)
                if plan.keeps_old or bits & NONFINITE:
                    old = {plan.arguments[0] if plan.arguments else "arg0": self.copy(target)}
            if not plan.arguments:
                version = _version(target)
        except Exception as reason:
            problem = reason
        out = plan.call(*args, **kwargs) if kwargs else plan.call(*args)
        try:
            if problem is not None:
                raise problem
            if version < 0 or _version(target) != version:
                record = self.add_write(plan, args, kwargs, target, tuple(parents), bits, *self.where(frame), 0, old)
                sequence = _get_sequence_nr()
                if sequence != self.sequence:
                    self.tie(record, sequence)
        except _PASSES_THROUGH:
            raise
        except Exception as reason:
            self.miss(plan, reason)
        return out

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy that autograd and other modes do not see."""
        if self.scan is health.scan:
            return tensor.clone()
        with health.unseen():
            return tensor.detach().clone()

    def add_write(
        self,
        plan: Plan,
        args: Any,
        kwargs: Any,
        target: Tensor,
        parents: tuple[Record, ...],
        bits: int,
        code: Any,
        instruction: int,
        scope: Scope,
        link: Optional[Record],
        autograd: Any,
        call: int,
        old: Any,
    ) -> Record:
        """Add the node of an argument that was just written."""
        held = target if type(target) in _PLAIN and target.layout is _strided else anchor(target)
        dtype = target.dtype
        device = CPU if target.is_cpu else target.device
        state = 0
        if dtype in self.floating and held is not None:
            state = self.scan(held) if device is CPU and not self.defer else PENDING
        if bits & NONFINITE:
            mark_consumed(parents)
        if bits & GRADIENT:
            if scope.phase == FORWARD and not torch.is_grad_enabled():
                scope = self._optimizer
            if parents[0].bits & GRADIENT and scope.phase != FORWARD:
                state |= GRADIENT
        elif scope.phase == BACKWARD:
            state |= GRADIENT
        extra = None
        if state & NONFINITE:
            state, extra = self._examine(plan, args, kwargs, target, parents, state, old)
            if plan.base == _UNSCALE:
                state |= CONSUMED  # GradScaler has noticed and will skip the step
        seq = self.seq = self.seq + 1
        keep = self.keep_all or state & (NONFINITE | PENDING)
        record = Record(
            seq, call or seq, plan, target.shape, dtype, device, state, parents if keep else (), code, instruction, scope, link, autograd, extra
        )
        if keep:
            self.records.append(record)
        if held is None:
            self.loose[id(target)] = (WeakIdRef(target), record)
        else:
            self.memory.write(held, record)
        if state & (NONFINITE | PENDING):
            self._settle(plan, held, record, parents, bits)
        return record

    def _state(self, held: Optional[Tensor], plan: Plan, bits: int) -> int:
        if held is None or held.dtype not in self.floating:
            return 0
        if held.is_cpu and not self.defer:
            return self.scan(held)
        return PENDING

    # Inputs.

    def node_of(self, tensor: Tensor) -> Record:
        """The node that any tensor is; a leaf is made on first sight."""
        try:
            entry = self.table.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return self._node_without_storage(tensor)
        if entry is None:
            return self.memory.start_leaf(tensor)
        if entry.views is None:
            node = entry.node
            if not node.bits & NONFINITE:  # type: ignore[union-attr]
                return node  # type: ignore[return-value]
        elif entry.more is None:
            found = entry.views.get((tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype))
            if found is not None:
                return found
        return self.memory.read(entry, tensor)

    def _node_without_storage(self, tensor: Tensor) -> Record:
        """Sparse, functorch-wrapped and opaque tensors."""
        held = anchor(tensor)
        if held is not None:
            return self.node_of(held)
        found = self.loose.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        record = self._leaf(tensor)
        self.loose[id(tensor)] = (WeakIdRef(tensor), record)
        return record

    def find(self, tensor: Tensor) -> Optional[Record]:
        """The node that a tensor is, or None for one never seen."""
        held = anchor(tensor)
        if held is not None:
            return self.memory.find(held)
        found = self.loose.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _leaf(self, tensor: Tensor) -> Record:
        dtype = tensor.dtype
        device = CPU if tensor.is_cpu else tensor.device
        state = 0
        if dtype in self.floating:
            state = self.scan(tensor) if device is CPU and not self.defer else PENDING
        extra = None
        if self.has_names or state & NONFINITE:
            name = self.leaf_name(tensor)
            extra = Extra(name) if name or state & NONFINITE else None
        if state & NONFINITE and extra is not None:
            extra.evidence = _leaf_evidence(tensor)
            extra.mask = _is_mask(extra.evidence.result)
            born = self._gradient_of_backward(tensor, state, extra)
            if born is not None:
                return born
        seq = self.seq = self.seq + 1
        scope = self.scope if self.scope.phase == FORWARD else self.forward_scope
        record = Record(seq, seq, _LEAF, tensor.shape, dtype, device, state | LEAF, (), None, 0, scope, None, None, extra)
        if self.keep_all or state & (NONFINITE | PENDING):
            self.records.append(record)
        if state & NONFINITE:
            self.faults.append(record)
        elif state & PENDING:
            self._wait(record, tensor, False)
        return record

    def _gradient_of_backward(self, tensor: Tensor, state: int, extra: Extra) -> Optional[Record]:
        """At function level a bad gradient comes out of the `backward` call, which is one node there."""
        if self.last_backward is None or not self.is_gradient(tensor):
            return None
        plan, loss, site = self.last_backward
        self.seq += 1
        record = Record(
            self.seq, self.seq, plan, tensor.shape, tensor.dtype, CPU if tensor.is_cpu else tensor.device, state | GRADIENT, (loss,),
            site.code, site.instruction, self._backward, None, None, extra,
        )  # fmt: skip
        self.records.append(record)
        self.faults.append(record)
        return record

    def _name_lifted(self, leaf: Record, code: Any, instruction: int) -> None:
        """A leaf of data in the program: it has the line that made it for a name; a lone number is a constant."""
        if not leaf.bits & NONFINITE or leaf.extra is None:
            return
        leaf.extra.name = "tensor made" + (f" at {source.location_of(code, instruction)}" if code is not None else "")
        if not leaf.shape:
            leaf.bits |= CONSTANT

    def _merged(self, tensor: Tensor, parts: Sequence[Record]) -> Record:
        mark_consumed(parts)
        bits = 0
        for part in parts:
            bits |= part.bits
        state = INHERITED | (bits & GRADIENT)
        if bits & (NONFINITE | PENDING) and tensor.dtype in self.floating:
            state |= self.scan(tensor) if tensor.is_cpu and not self.defer else PENDING
        first = parts[0]
        self.seq += 1
        keep = self.keep_all or state & (NONFINITE | PENDING)
        record = Record(
            self.seq, self.seq, _VIEW, tensor.shape, tensor.dtype, first.device, state | ALIAS, tuple(parts) if keep else (), first.code,
            first.instruction, first.scope, first.link, first.autograd, None,
        )  # fmt: skip
        if keep:
            self.records.append(record)
        if state & NONFINITE:
            self.faults.append(record)
        elif state & PENDING:
            self._wait(record, tensor, False)
        return record

    # Faults.

    def _examine(
        self, plan: Plan, args: Any, kwargs: Any, out: Tensor, parents: Sequence[Record], state: int, old: Any
    ) -> tuple[int, Optional[Extra]]:
        """Look closer at a non-finite result: was it meant, what went in, which elements are newly bad."""
        inputs = 0
        for parent in parents:
            inputs |= parent.bits & NONFINITE
        if plan.moves and inputs:
            return state, None
        if not inputs and _meant(plan, args, kwargs, state):
            return state | CONSTANT, None
        if inputs & NAN or (inputs & INF and not state & NAN):  # propagated
            born = self._newly_bad(plan, args, kwargs, out, old)
            if not born:
                return state, None
            return state, Extra(evidence=self._evidence(plan, args, kwargs, out, old), born=born)
        return state, Extra(evidence=self._evidence(plan, args, kwargs, out, old))

    def _evidence(self, plan: Plan, args: Any, kwargs: Any, out: Tensor, old: Any) -> Optional[Evidence]:
        try:
            with health.unseen(), _quiet():
                return capture(plan.root, plan.name_arguments(args, kwargs), out, old=old or {})
        except Exception as problem:
            self.miss(plan, problem, "evidence of ")
            return None

    def _newly_bad(self, plan: Plan, args: Any, kwargs: Any, out: Tensor, old: Any) -> int:
        from sherlorch.tracers.repair import newly_bad

        if plan.random or plan.by_element or self.reruns >= _MOST_RERUNS:
            return 0
        self.reruns += 1
        try:
            with health.unseen(), _quiet():
                return newly_bad(plan, args, kwargs, out, old or {})
        except Exception as problem:
            self.miss(plan, problem, "a second look at ")
            return 0

    def _settle(self, plan: Plan, held: Optional[Tensor], record: Record, parents: Sequence[Record], bits: int) -> None:
        """A record that is not finite, or not yet known to be."""
        if record.bits & PENDING:
            self._wait(record, held, plan.law == PERMUTES and bool(parents))
            return
        self.faults.append(record)
        if not plan.moves:
            self._place_leaves(parents, record)
        if self.on_fault is not None:
            self.on_fault(record)

    def _place_leaves(self, parents: Sequence[Record], user: Record) -> None:
        """`user` computes with its parents: a bad leaf among them now has its line."""
        for parent in parents:
            seen = parent
            while seen.facts.moves and seen.parents:
                seen = next((p for p in seen.parents if p.bits & NONFINITE), seen.parents[0])
            if user.code is None or not seen.bits & NONFINITE:
                continue
            if seen.bits & LEAF and seen.code is None:
                seen.code, seen.instruction, seen.scope = user.code, user.instruction, user.scope
            elif seen.facts.uninitialised and seen.extra is None:
                seen.extra = Extra(f"memory of {seen.facts.base}" + (f" at {location_of(seen)}" if seen.code is not None else ""))
                seen.code, seen.instruction, seen.scope = user.code, user.instruction, user.scope

    def miss(self, plan: OpFacts, problem: BaseException, what: str = "") -> None:
        """Count what could not be recorded; the report tells."""
        text = f"{what}{plan.name}: {type(problem).__name__}: {problem}".split("\n")[0]
        self.unseen[text] = self.unseen.get(text, 0) + 1

    # Accelerators: states that are read later.

    def _wait(self, record: Record, tensor: Optional[Tensor], inherits: bool) -> None:
        scan = None if inherits or tensor is None else health.begin_scan(tensor)
        self.pending.append((record, scan, inherits))
        if len(self.pending) >= _PENDING_LIMIT or self.on_fault is not None:
            self.resolve()

    def resolve(self) -> None:
        """Read every waiting state in one transfer."""
        waiting, self.pending = self.pending, []
        answers = iter(health.finish_scans([scan for _, scan, _ in waiting if scan is not None]))
        for record, scan, inherits in waiting:
            mark_consumed(record.parents)
            state = 0
            if inherits:
                for parent in record.parents:
                    state |= parent.bits & NONFINITE
                state |= INHERITED
            elif scan is not None:
                state, low, high = next(answers)
                if state:
                    record.extra = record.extra or Extra()
                    record.extra.range = (low, high)
            record.bits = record.bits & ~PENDING | state
            if state & NONFINITE:
                self.faults.append(record)
                if record.parents and not record.facts.moves:
                    self._place_leaves(record.parents, record)
                if self.on_fault is not None and not record.bits & LEAF:
                    self.on_fault(record)
            elif not self.keep_all:
                record.parents = ()
        if not self.keep_all:
            self.records = [record for record in self.records if record.bits & (NONFINITE | PENDING)]


class _Writing:
    """One call that writes arguments: what must be known before it runs, and what is known after."""

    def __init__(self, recorder: Recorder, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.recorder, self.plan, self.args, self.kwargs = recorder, plan, args, kwargs
        self.versions: Optional[list[int]] = None
        self.targets = list(self._find_targets() if plan.arguments else self._find_candidates())
        written = {id(target) for target, _, reads in self.targets if not reads}
        # Inputs are looked up before the call: afterwards their memory may hold something else.
        self.inputs = [(value, self._nodes(value, written)) for value in (*args, *kwargs.values())]
        self.old = self._keep_old()
        for target, _, reads in self.targets:
            known = None if reads else recorder.find(target)
            if known is not None:
                mark_consumed([known])

    def _find_targets(self) -> Iterator[tuple[Tensor, int, bool]]:
        """(tensor, its place in a list or -1, is its old value an input) of each written argument."""
        plan, args = self.plan, self.args
        for position, name, is_out in plan.writes:
            value = args[position] if 0 <= position < len(args) else self.kwargs.get(name)
            if plan.unmarked and name in traits.UNMARKED_WRITES[plan.base] and not self._trains():
                continue
            reads = not (is_out or (plan.overwrites and position == 0))
            if isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    if isinstance(item, Tensor):
                        yield item, index if plan.by_element else -1, reads
            elif isinstance(value, Tensor):
                yield value, -1, reads or self._overlaps(value)

    def _find_candidates(self) -> Iterator[tuple[Tensor, int, bool]]:
        """At function level there is no schema: what was written shows in the tensors' version counters."""
        plan = self.plan
        self.versions = []
        named: list[tuple[Any, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        for name, value in named:
            in_list = isinstance(value, (list, tuple)) and plan.by_element
            for index, tensor in enumerate(tensors_in(value)):
                self.versions.append(-2 if name == "out" or self._is_statistic(name) else _version(tensor))
                reads = name != "out" and not (plan.overwrites and name == 0)
                yield tensor, index if in_list else -1, reads or self._overlaps(tensor)

    def _is_statistic(self, name: Any) -> bool:
        if not self.plan.unmarked or name not in (1, 2, "running_mean", "running_var"):
            return False
        training = self.kwargs.get("training", self.kwargs.get("use_input_stats", self.args[5] if len(self.args) > 5 else False))
        return bool(training)

    def _drop_unwritten(self) -> None:
        if self.versions is not None:
            self.targets = [
                target for target, version in zip(self.targets, self.versions) if version == -2 or _version(target[0]) != version
            ]

    def _trains(self) -> bool:
        named = self.plan.name_arguments(self.args, self.kwargs)
        return bool(named.get("training", True))

    def _overlaps(self, target: Tensor) -> bool:
        """Does a full overwrite read memory that it writes?"""
        return _share_memory(target, (self.args, self.kwargs))

    def _nodes(self, value: Any, written: set[int]) -> list[Optional[Record]]:
        node_of = self.recorder.node_of
        return [None if id(tensor) in written else node_of(tensor) for tensor in tensors_in(value)]

    def _keep_old(self) -> dict[str, Tensor]:
        """Copies of what the call is about to overwrite, where a fault could not be explained without."""
        plan = self.plan
        if plan.by_element or plan.overwrites:
            return {}
        old = {}
        named = None
        for target, _, reads in self.targets:
            if not reads or target.dtype not in self.recorder.floating:
                continue
            bad = any(node is not None and node.bits & NONFINITE for _, nodes in self.inputs for node in nodes)
            if plan.keeps_old or bad:
                named = named or plan.name_arguments(self.args, self.kwargs)
                name = next((name for name, value in named.items() if value is target), "self")
                old[name] = self.recorder.copy(target)
        return old

    def _parents(self, index: int) -> tuple[Record, ...]:
        parents: list[Record] = []
        for value, nodes in self.inputs:
            if index >= 0 and isinstance(value, (list, tuple)):
                if index < len(nodes) and len(nodes) == len(value) and nodes[index] is not None:
                    parents.append(nodes[index])  # type: ignore[arg-type]
            else:
                parents.extend(node for node in nodes if node is not None)
        return tuple(parents)

    def finish(self, out: Any, site: Site) -> None:
        """The call has run: add a node for each written argument, then for each other result."""
        recorder, plan = self.recorder, self.plan
        self._drop_unwritten()
        if plan.ignored and not self.targets:
            return
        call = recorder.seq + 1
        whole = None
        record: Optional[Record] = None
        for target, index, _ in self.targets:
            if index < 0:
                whole = parents = whole if whole is not None else self._parents(-1)
            else:
                parents = self._parents(index)
            bits = 0
            for parent in parents:
                bits |= parent.bits
            record = recorder.add_write(plan, self.args, self.kwargs, target, parents, bits, *site, call, self.old)
        written = {id(target) for target, _, _ in self.targets}
        for result in tensors_in(out):
            if id(result) in written:
                continue
            whole = whole if whole is not None else self._parents(-1)
            bits = 0
            for parent in whole:
                bits |= parent.bits
            record = recorder.add_result(plan, self.args, self.kwargs, result, whole, bits, *site, call) or record
        sequence = _get_sequence_nr()
        if sequence != recorder.sequence and record is not None:
            recorder.tie(record, sequence)


def _share_memory(target: Tensor, others: Any) -> bool:
    held = anchor(target)
    if held is None:
        return False
    key = held.untyped_storage()._cdata
    for tensor in tensors_in(others):
        other = anchor(tensor) if tensor is not target else None
        if other is not None and other.untyped_storage()._cdata == key:
            return True
    return False


def _version(tensor: Tensor) -> int:
    """The version counter; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


_PASSES_THROUGH = (NonFiniteError,)


def _meant(plan: Plan, args: Any, kwargs: Any, state: int) -> bool:
    """Did the program name the non-finite value itself, as an argument of this call?"""
    named = [value for value in _numbers_in((args, kwargs)) if value - value != 0]
    if state & NAN:
        return any(value != value for value in named)
    return bool(named)


def _numbers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (float, complex)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _numbers_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers_in(item)


@contextmanager
def _quiet() -> Iterator[None]:
    """Computing something again must not warn the user again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _leaf_evidence(tensor: Tensor) -> Evidence:
    index = health.first_bad_index(tensor)
    stats = health.describe(tensor, "tensor")
    if index is not None:
        stats = replace(stats, at=health.value_at(tensor, index, tensor.shape))
    return Evidence((), stats, index)


def _is_mask(stats: health.TensorStats) -> bool:
    """Only -Inf beside zeros, as in an additive attention mask, or nothing but -Inf."""
    return stats.neginf > 0 and not stats.nan and not stats.posinf and stats.neginf + stats.zeros == stats.numel
