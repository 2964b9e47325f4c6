"""A call becomes nodes: who the inputs are, what state the results are in, and where in the program it
happened.

Everything here runs once for each call of the traced program, so the common way is written out flat: the rest
of the file serves the rare calls. Nothing is decided while recording that can be decided later (origins and
culprits are not).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from sherlorch import health, source
from sherlorch.compat import get_sequence_nr
from sherlorch.errors import NonFiniteError, NonFiniteWarning
from sherlorch.graph import (
    ARRIVING,
    BACKWARD,
    CONSTANT,
    CONSUMED,
    FORWARD,
    GRADIENT,
    GRAPH,
    INHERITED,
    LEAF,
    OPTIMIZER,
    PENDING,
    RECOMPUTE,
    SCRATCH,
    Extra,
    OpFacts,
    Record,
    Scope,
    finite_record,
)  # fmt: skip
from sherlorch.health import FLOATING, INF, NONFINITE, SUMMED
from sherlorch.ops.traits import SCALES
from sherlorch.source import INTERNAL, USER
from sherlorch.tracers import collectives
from sherlorch.tracers.arguments import (
    SCALAR,
    TENSOR,
    kinds,
    numbers_in,
    share_memory,
    tensors_in,
    version_of,
)
from sherlorch.tracers.faults import (
    is_scratch,
    leaf_evidence,
    loses_infinity,
    mark_consumed,
    meant,
    named_values,
    takes_bad_number,
    without_scratch,
)
from sherlorch.tracers.ledger import CPU, Late, Ledger, Site
from sherlorch.tracers.memory import PLAIN, Entry, anchor, shape_of, values_of_nested
from sherlorch.tracers.plan import NO_LAW, PERMUTES, Plan
from sherlorch.tracers.writes import Writing

_LINKS_KEPT = 1_000_000
_LINKS_STEPS = 4
_LINKS_FEW = 1000
_NODES_AFTER_A_WRITTEN_VIEW = 2
_NEAR = 4  # nodes from one call to the next, leaves included
_NOTHING: dict[str, Any] = {}
_SEQUENCES = frozenset({tuple, list})
_SCALARS = frozenset(cls for cls, kind in kinds.items() if kind == SCALAR)
_READ = OpFacts("item", "item")
_strided = torch.strided
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"

_UNUSUAL = NONFINITE | PENDING
_sum = torch.sum
_amin, _amax = torch.amin, torch.amax
_current_autograd_node = torch._C._current_autograd_node
_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_frame_kinds = source.kinds
_not_users = source.not_users
_engines = source.engines
_is_grad_enabled = torch.is_grad_enabled


class Recorder(Ledger):
    """Adds the calls of a program to a ledger."""

    __slots__ = ()

    # The common way: an op that writes none of its arguments.

    def record(
        self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, frame: Any
    ) -> None:
        """Add the results of a call that wrote none of its arguments; `frame` made the call.

        The usual call (dense CPU tensors, finite inputs, one finite result) is written out here from end to
        end, since calls of its own are most of what Python costs. The unusual goes to `add_results`.
        """
        proved = None
        if plan.plain_inputs:
            parents, bits = self.inputs(args[: plan.tensors_until], kwargs)
        elif plan.blind:
            self.inputs(args, kwargs)  # seen, but not taken in
            parents, bits = [], 0
        elif kwargs and not SCALES.isdisjoint(kwargs):
            parents, bits = self.inputs(args, kwargs)
        else:
            unproved: list[tuple[Tensor, Record]] = []
            parents, bits = self.inputs(args, kwargs, unproved)
            if unproved:
                proved = out if type(out) is Tensor else out[0]
                total = math.nan
                if type(proved) is Tensor and proved.is_cpu and proved.numel():
                    total = _sum(proved).item() if self.direct else self.total(proved)
                if total - total != 0:
                    bits = self.prove(unproved, parents)
                    proved = None

        code = link = autograd = None
        instruction = state = 0
        scope = self.scope
        sequence = 0 if self.by_object else get_sequence_nr()
        current = _current_autograd_node()
        if current is None and scope.phase == FORWARD:
            if self.capture_stack:
                try:
                    code = frame.f_code
                    while id(code) in _not_users:
                        frame = frame.f_back
                        code = frame.f_code
                    if id(code) not in _frame_kinds:
                        frame = source.user_frame(frame)
                        code = frame.f_code
                    instruction = frame.f_lasti
                except AttributeError:  # no frame of the user's
                    code = None
            if bits & GRADIENT and sequence == self.sequence and not _differentiable(out):
                scope = self._optimizer  # works on gradients without recording a graph
                state = GRADIENT
        elif current is not None and (frame is None or id(frame.f_code) in _engines):
            link = self.forward_of(current)
            scope = self._backward
            autograd = type(current)
            state = GRADIENT
        else:
            code, instruction, scope, link, autograd = self.where(frame)
            if autograd is not None:
                state = GRADIENT

        law = plan.law
        if bits & _UNUSUAL or plan.careful or not self.usual:
            if bits & SCRATCH:
                parents, bits = without_scratch(parents)
            if bits & PENDING or plan.unusual or not self.usual:
                site = Site(code, instruction, scope, link, autograd)
                self.add_results(plan, args, kwargs, out, parents, bits, site, sequence)
                return
            law = NO_LAW if bits & NONFINITE else law if not plan.conditional else plan.law_for(args, kwargs)
        if type(out) is Tensor:
            results: Sequence[Tensor] = (out,)
        elif type(out) in _SEQUENCES and all(type(each) is Tensor for each in out):
            results = out
        else:
            site = Site(code, instruction, scope, link, autograd)
            self.add_results(plan, args, kwargs, out, parents, bits, site, sequence)
            return
        inputs = tuple(parents)
        keep_all = self.keep_all
        kept = inputs if keep_all else ()
        call = self.seq + 1
        record: Record | None = None
        for result in results:
            if not result.is_cpu:
                site = Site(code, instruction, scope, link, autograd)
                added = self.add_result(plan, args, kwargs, result, inputs, bits, *site, call)
                record = added or record
                continue
            try:
                storage = result.untyped_storage()
                shape = result.shape
            except (NotImplementedError, RuntimeError):  # sparse, opaque, nested
                site = Site(code, instruction, scope, link, autograd)
                added = self.add_result(plan, args, kwargs, result, inputs, bits, *site, call)
                record = added or record
                continue
            key = storage._cdata
            entry = self.table.get(key)
            dtype = result.dtype
            if entry is None:
                if law and inputs:
                    flags = state | INHERITED
                    self.inherited += 1
                elif result is proved:
                    flags = state
                elif dtype in SUMMED:
                    if self.direct:
                        total = _sum(result).item() if shape else result.item()
                    else:
                        total = self.total(result)
                    if total - total != 0:
                        site = Site(code, instruction, scope, link, autograd)
                        added = None
                        if plan.constant and total == total and not bits & NONFINITE:
                            added = self.add_constant(
                                plan, args, kwargs, result, total, inputs, state, site, call
                            )
                        if added is None:
                            added = self.add_result(plan, args, kwargs, result, inputs, bits, *site, call)
                        record = added or record
                        continue
                    if bits & NONFINITE:
                        mark_consumed(inputs, result.requires_grad)
                    flags = state
                elif dtype not in FLOATING and not bits & NONFINITE:
                    flags = state
                else:
                    site = Site(code, instruction, scope, link, autograd)
                    added = self.add_result(plan, args, kwargs, result, inputs, bits, *site, call)
                    record = added or record
                    continue
                record = finite_record((
                    seq := self.seq + 1, call, plan, shape, dtype, CPU, flags, kept,
                    code, instruction, scope, link, autograd, None,
                ))  # fmt: skip
                self.seq = seq
                entry = self.table[key] = Entry(storage, self.forget)
                entry.key = key
                entry.node = record
                entry.views = None
                entry.more = None
            elif (
                law
                and inputs
                and result is not (viewed := args[0])
                and type(viewed) in PLAIN
                and (result is out or all(result is not arg for arg in args))
            ):
                record = finite_record((
                    seq := self.seq + 1, call, plan, shape, dtype, CPU, state | INHERITED, kept,
                    code, instruction, scope, link, autograd, None,
                ))  # fmt: skip
                self.seq = seq
                self.inherited += 1
                views = entry.views
                if views is None:
                    if inputs[0] is entry.node and not viewed.is_nested:
                        region = (viewed.storage_offset(), viewed.shape, viewed.stride(), viewed.dtype)
                        views = entry.views = {region: inputs[0]}
                    else:
                        views = self.memory.views(entry, viewed)
                region = (result.storage_offset(), shape, result.stride(), dtype)
                if views.setdefault(region, record) is not record:
                    self.memory.adopt(entry, result, record)
            else:
                site = Site(code, instruction, scope, link, autograd)
                added = self.add_result(plan, args, kwargs, result, inputs, bits, *site, call)
                record = added or record
                continue
            if keep_all:
                self.records.append(record)
        if sequence != self.sequence:
            if self.plain_links and sequence == self.sequence + 1:
                self.sequence = sequence
                self.links.append(record)
            else:
                self.tie(record, sequence)

    def add_constant(
        self,
        plan: Plan,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Tensor,
        total: float,
        parents: tuple[Record, ...],
        bits: int,
        site: Site,
        call: int,
    ) -> Record | None:
        """Add the usual mask: new memory that is finite but for the infinity that the call was given.

        None where it is not as usual.
        """
        named = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) is float and value - value != 0:
                if value != total:
                    return None
                named = True
        if not named:
            return None
        reduction = _amin if total < 0 else _amax
        if (reduction(result).item() if self.direct else self.total(result, reduction)) != total:
            return None  # the sum overflowed
        seq = self.seq = self.seq + 1
        bits |= INF | CONSTANT | GRAPH if result.requires_grad else INF | CONSTANT
        extra = Extra("", None, 0, total < 0)
        record = Record(seq, call, plan, result.shape, result.dtype, CPU, bits, parents, *site, extra)
        if self.keep_all:
            self.records.append(record)
        self.memory.start(result.untyped_storage(), record)
        self.settle(plan, result, record, parents)
        return record

    def add_results(
        self,
        plan: Plan,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        parents: list[Record],
        bits: int,
        site: Site,
        sequence: int,
    ) -> None:
        """Add the results of a call, whatever they are."""
        if plan.by_element and isinstance(out, (list, tuple)) and len(out) > 1:
            self._record_elements(plan, args, kwargs, out, site)
            return
        call = self.seq + 1
        record = None
        for result in tensors_in(out):
            record = self.add_result(plan, args, kwargs, result, tuple(parents), bits, *site, call) or record
        if sequence != self.sequence:
            self.tie(record, sequence)

    def gather(self, value: Any, parents: list[Record]) -> int:
        """Append the nodes of the tensors in a list or the like; their bits joined."""
        bits = 0
        for tensor in value if type(value) in _SEQUENCES else tensors_in(value):
            kind = kinds.get(type(tensor))
            if kind == TENSOR:
                node = self.node_of(tensor)
                parents.append(node)
                bits |= node.bits
            elif kind != SCALAR:
                bits |= self.gather([*tensors_in(tensor)], parents)
        return bits

    def inputs(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        unproved: list[tuple[Tensor, Record]] | None = None,
    ) -> tuple[list[Record], int]:
        """The nodes of every tensor argument, and their bits joined; `unproved` as for `first_sight`."""
        table = self.table
        dead = self.dead
        while dead:  # as `Memory.sweep`
            gone = dead.pop()
            if table.get(gone.key) is gone:
                del table[gone.key]
        parents: list[Record] = []
        bits = 0
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if (cls := type(arg)) in PLAIN:
                try:
                    storage = arg.untyped_storage()
                    entry = table.get(storage._cdata)
                    if entry is None:
                        node = self.first_sight(arg, storage, unproved)
                    elif entry.views is None:
                        node = entry.node  # type: ignore[assignment]
                        if node.bits & NONFINITE:
                            node = self.memory.read(entry, arg)
                    elif entry.more is None:
                        region = (arg.storage_offset(), arg.shape, arg.stride(), arg.dtype)
                        node = entry.views.get(region)  # type: ignore[assignment]
                        if node is None:
                            node = self.memory.read(entry, arg)
                    else:
                        node = self.memory.read(entry, arg)
                except (NotImplementedError, RuntimeError):  # sparse, opaque; nested ones have no shape
                    node = self.node_of(arg)
                parents.append(node)
                bits |= node.bits
            elif cls not in _SCALARS and not (
                cls is list and arg and type(arg[0]) is int and not self.by_object  # then they all are
            ):
                bits |= self.gather(arg, parents)
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
        link: Record | None,
        autograd: Any,
        call: int = 0,
    ) -> Record | None:
        """Add one result; None where it is one of the arguments itself."""
        try:
            storage = out.untyped_storage()
            shape = out.shape
        except (NotImplementedError, RuntimeError):
            return self._add_loose(
                plan, args, kwargs, out, parents, bits, Site(code, instruction, scope, link, autograd), call
            )
        entry = self.memory.entry_of(storage)
        if entry is not None:
            for arg in args:
                if arg is out:
                    if plan.lifts:
                        self._name_lifted(parents[0], code, instruction)
                    return None
        dtype = out.dtype
        device = CPU if out.is_cpu else out.device
        extra = None
        state = law = 0
        seq = self.seq = self.seq + 1
        if dtype in self.floating:
            law = plan.law if not plan.conditional else plan.law_for(args, kwargs or {})
            if law and parents and not bits & (NONFINITE | PENDING):
                state = INHERITED
                self.inherited += 1
            elif law == PERMUTES and bits & NONFINITE and not bits & PENDING:
                state = INHERITED | (bits & NONFINITE)
                self.inherited += 1
            elif bits & ARRIVING and entry is not None:
                state = PENDING | ARRIVING  # a view of what other processes are writing
            elif device is CPU and not self.defer:
                state = self.scan(out)
            else:
                state = PENDING
        if scope.phase == BACKWARD or (scope is self._optimizer and bits & GRADIENT):
            state |= GRADIENT
        named: Sequence[float] = ()
        if state & PENDING:
            parents, named = self._named(plan, parents, (args, kwargs))
        elif state & NONFINITE:
            if not bits & NONFINITE and not (plan.constant and meant(plan, args, kwargs, state)):
                if plan.base == "as_strided" and entry is not None:
                    parents = (*parents, self.memory.read(entry, out))  # it reaches what its input does not
                parents, bits = self._look_again(plan, parents, (args, kwargs))
            state, extra = self._examiner.examine(plan, args, kwargs, out, parents, state, None, self.miss)
            if plan.uninitialised:
                extra = None
        consumes = True
        keep = self.keep_all or state & _UNUSUAL
        record = Record(
            seq,
            call or seq,
            plan,
            shape,
            dtype,
            device,
            state,
            parents if keep else (),
            code,
            instruction,
            scope,
            link,
            autograd,
            extra,
        )
        if self.keep_all:
            self.records.append(record)
        if state & NONFINITE and plan.lifts and not parents:
            record.bits = record.bits & ~CONSTANT | LEAF
            record.extra = Extra(evidence=leaf_evidence(out))
            record.code = None
            self._name_lifted(record, code, instruction)
        if state & _UNUSUAL and out.requires_grad:
            record.bits |= GRAPH
        if entry is None:
            self.memory.start(storage, record)
        else:
            if (
                entry.views is None
                or entry.views.setdefault((out.storage_offset(), shape, out.stride(), dtype), record)
                is not record
            ):
                source = args[0] if args and kinds.get(type(args[0])) == TENSOR else None
                if not self.memory.adopt(entry, out, record, source) and state & _UNUSUAL:
                    record.bits |= CONSUMED  # stands for a tensor that is known by an older node
                    bits = 0
                    consumes = False
        if bits & NONFINITE and (dtype in self.floating or loses_infinity(plan, bits, dtype)):
            mark_consumed(parents, out.requires_grad)
        if state & _UNUSUAL:
            inherits = law == PERMUTES and bool(parents)
            scratch = is_scratch(plan, out)
            if scratch:
                record.bits |= SCRATCH
            late = Late(named, inherits, consumes, out.requires_grad, scratch)
            self.settle(plan, out, record, parents, late)
        elif bits & PENDING and plan.moves:
            self._wait(record, None)
        return record

    def _named(
        self, plan: Plan, parents: tuple[Record, ...], values: Any
    ) -> tuple[tuple[Record, ...], Sequence[float]]:
        """The parents of a call and the non-finite values it was given, which may come out of a tensor."""
        named = named_values(plan, values)
        if named and self.bad_number is not None and takes_bad_number(plan, values):
            parents = (*parents, self.bad_number)
        return parents, named

    def _add_loose(
        self,
        plan: Plan,
        args: Any,
        kwargs: Any,
        out: Tensor,
        parents: tuple[Record, ...],
        bits: int,
        site: Site,
        call: int,
    ) -> Record | None:
        """Add a result that has no storage of its own (sparse, opaque)."""
        if any(out is arg for arg in args):
            return None
        held = anchor(out)
        shape = shape_of(out)
        state = self.state_of(held if held is not None else out)
        mark_consumed(parents)
        extra = None
        named: Sequence[float] = ()
        if state & PENDING:
            parents, named = self._named(plan, parents, (args, kwargs))
        elif state & NONFINITE:
            state, extra = self._examiner.examine(plan, args, kwargs, out, parents, state, None, self.miss)
        self.seq += 1
        keep = self.keep_all or state & (NONFINITE | PENDING)
        record = Record(
            self.seq, call or self.seq, plan, shape, out.dtype, CPU if out.is_cpu else out.device, state,
            parents if keep else (),
            site.code, site.instruction, site.scope, site.link, site.autograd, extra,
        )  # fmt: skip
        if self.keep_all:
            self.records.append(record)
        if held is None:
            self.loose[id(out)] = (WeakIdRef(out), record)
        else:
            entry = self.memory.entry_of(held.untyped_storage())
            if entry is None:
                self.memory.start(held.untyped_storage(), record)
            else:
                self.memory.adopt(entry, held, record)
        if state & (NONFINITE | PENDING):
            self.settle(plan, held if held is not None else out, record, parents, Late(named))
        return record

    def _record_elements(self, plan: Plan, args: Any, kwargs: Any, out: Sequence[Tensor], site: Site) -> None:
        """Results of a ``_foreach_`` op: element i comes from element i of each list."""
        call = self.seq + 1
        record = None
        for index, result in enumerate(out):
            row = [
                value[index] if isinstance(value, (list, tuple)) and len(value) == len(out) else value
                for value in args
            ]
            parents = tuple(self.node_of(tensor) for tensor in tensors_in((row, kwargs)))
            bits = 0
            for parent in parents:
                bits |= parent.bits
            record = self.add_result(plan, row, kwargs, result, parents, bits, *site, call) or record
        if record is not None:
            self.tie_made(record)

    def _look_again(
        self,
        plan: Plan,
        parents: tuple[Record, ...],
        values: Any,
        written: Sequence[Tensor] = (),
        old: Mapping[str, Tensor] = _NOTHING,
    ) -> tuple[tuple[Record, ...], int]:
        """Before an op is blamed: are its inputs still what they were, and are there others?

        NumPy, C++ or another thread may have written them. An input that went bad unseen is a leaf from here
        on; of what the op itself has `written` there may be an `old` copy. A bad number that the program read
        out of a tensor may come back as an argument.
        """
        changed: dict[int, Record] = {}
        found: list[Record] = []
        for tensor in tensors_in(values) if not plan.blind else ():
            if tensor.dtype not in self.floating or not tensor.is_cpu or self.defer:
                continue
            held = anchor(tensor)
            known = self.find(tensor)
            if held is None or known is None or not (known.bits & NONFINITE or self.scan(held)):
                continue
            if share_memory(held, written):
                continue
            if known.bits & ARRIVING:
                self.memory.expect_no_more(held)
                known = self.node_of(tensor)
            if not known.bits & NONFINITE:
                changed[id(known)] = self.written_unseen(held)
            elif known not in parents:  # found out when an earlier result of this call was looked at
                found.append(known)
        found += [self.leaf_unseen(copy) for copy in old.values() if copy.is_cpu and self.state_of(copy)]
        parents = (*(changed.get(id(parent), parent) for parent in parents), *found)
        if self.bad_number is not None and takes_bad_number(plan, values):
            parents = (*parents, self.bad_number)
        bits = 0
        for parent in parents:
            bits |= parent.bits
        mark_consumed(parents)
        return parents, bits

    def tie(self, record: Record | None, sequence: int) -> int:
        """Give the autograd nodes made since the last call to this record, their forward op; how many it
        got."""
        if self.by_object:
            return 0  # kernels of the backward pass are not seen at function level
        made = sequence - self.sequence
        self.sequence = sequence
        if made < 0 or made > _LINKS_KEPT:  # another thread's numbers, or a long stretch without recording
            self.links.clear()
            self.links_start = sequence
            self.written_view = None
            return 0
        if self.written_view is not None:
            late = min(made, _NODES_AFTER_A_WRITTEN_VIEW)
            self.links.extend([self.written_view] * late)
            self.written_view = None
            self.plain_links = not self.by_object and self.keep_all
            made -= late
        self.links.extend([record] * made)
        if self.was_backward and not self.keep_all:
            self._drop_links(sequence)
        return made

    def _drop_links(self, sequence: int) -> None:
        """A step of the program has ended: of those before keep as many as the four longest could need."""
        self.was_backward = False
        self.links_longest = max(self.links_longest, sequence - self.links_step)
        self.links_step = sequence
        excess = len(self.links) - max(_LINKS_STEPS * self.links_longest, _LINKS_FEW)
        if excess > 0:
            del self.links[:excess]
            self.links_start += excess

    def tie_made(self, record: Record) -> None:
        """`tie` if any autograd node was made since the last call."""
        sequence = get_sequence_nr()
        if sequence != self.sequence:
            self.tie(record, sequence)

    def _tie_write(self, record: Record, target: Tensor) -> None:
        """`tie_made` for an in-place op.

        Autograd may have made its node before, and then copied the old value for it: the node is not the
        copy's. A write to a view ends in more nodes, made when the call is over: CopySlices and the view's
        own.
        """
        sequence = get_sequence_nr()
        if sequence != self.sequence:
            made = self.tie(record, sequence)
        else:
            last = self.links[-1] if self.links else None
            made = self._take_from(last, record) if last is not None and self._is_near(record) else 0
        if made and target._is_view():
            self.written_view = record
            self.plain_links = False

    def _is_near(self, record: Record) -> bool:
        last = self.links[-1]
        return last is not None and last.seq > record.seq - _NEAR

    def _take_from(self, copy: Record, record: Record) -> int:
        """Give the nodes of a copy that autograd made for an in-place op to that op."""
        if (
            copy.facts.base != "clone"
            or copy.code is not record.code
            or copy.instruction != record.instruction
            or copy.parents[:1] != record.parents[:1]
        ):
            return 0
        links, made = self.links, 0
        while made < len(links) and links[-1 - made] is copy:
            made += 1
            links[-made] = record
        return made

    def where(self, frame: Any) -> tuple[Any, int, Scope, Record | None, Any]:
        """Of a call made by `frame`: code and instruction of the user's line, scope, forward record,
        autograd node."""
        current = _current_autograd_node()
        if current is not None:
            link = self.forward_of(current)
            if frame is None or id(frame.f_code) in _engines:
                return None, 0, self._backward, link, type(current)
            return self._inside_backward(frame, link, type(current))
        scope = self.scope
        if scope.phase == OPTIMIZER:
            if self.grad_off or _is_grad_enabled():
                # A closure computes the loss again.
                scope = self.forward_scope if scope.module is None else Scope(FORWARD, scope.module)
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

    def forward_of(self, node: Any) -> Record | None:
        """The forward op of a running autograd node."""
        self.was_backward = True
        links = self.links
        try:
            number = node._sequence_nr() - self.links_start
            return links[number] if number < len(links) and number >= 0 else None
        except AttributeError:  # torch 2.0
            return None

    def _inside_backward(
        self, frame: Any, link: Record | None, autograd: Any
    ) -> tuple[Any, int, Scope, Record | None, Any]:
        """Python that the autograd engine runs: a custom backward, a hook, a checkpoint's second forward."""
        user = source.user_frame(frame, past_engine=False)
        if user is None:
            return None, 0, self._backward, link, autograd
        if (self.grad_off or _is_grad_enabled()) and source.runs_checkpoint(frame):
            return user.f_code, user.f_lasti, Scope(RECOMPUTE, self.scope.module), None, None
        return user.f_code, user.f_lasti, Scope(BACKWARD, self._module_of(link)), link, autograd

    def _module_of(self, link: Record | None) -> str | None:
        while link is not None and link.link is not None:
            link = link.link
        return link.scope.module if link is not None else self.scope.module

    def note_number(self, tensor: Tensor) -> None:
        """The program read a number that is not finite out of a tensor."""
        try:
            self.bad_number = self.node_of(next(tensors_in(tensor)))
        except Exception as problem:
            self.miss(_READ, problem)

    def note_backward(self, plan: Plan, losses: Any, frame: Any) -> None:
        """Function level: gradients seen from now on come from this call."""
        try:
            loss = next(tensors_in(losses), None)
            if loss is not None:
                self.last_backward = (plan, self.node_of(loss), Site(*self.where(frame)))
                gradients = [ref() for ref in self.gradients.values()]
                held = [anchor(gradient) for gradient in gradients if gradient is not None]
                self.memory.distrust(gradient for gradient in held if gradient is not None)
        except Exception as problem:
            self.miss(plan, problem)

    def note_gradients(self, plan: Plan, out: Any) -> None:
        """Function level: a call handed out gradients."""
        try:
            for gradient in tensors_in(out):
                self.note_gradient(gradient)
        except Exception as problem:
            self.miss(plan, problem)

    # Ops that write.

    def call_writing(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], frame: Any) -> Any:
        """Run a call that writes arguments, and add what it wrote and what it returned."""
        if plan.in_place and type(args[0]) in PLAIN:
            return self.write(plan, args, kwargs, frame)
        if plan.collective is not None:
            return collectives.call(self, plan, args, kwargs, frame)
        try:
            writing = Writing(self, plan, args, kwargs)
        except (NonFiniteError, NonFiniteWarning):
            raise  # what other processes sent
        except Exception as problem:
            self.miss(plan, problem)
            return plan.call(*args, **kwargs)
        try:
            out = plan.call(*args, **kwargs)
        except BaseException:
            self._after_failure(writing, frame)
            raise
        try:
            writing.finish(out, Site(*self.where(frame)))
        except (NonFiniteError, NonFiniteWarning):
            raise
        except Exception as problem:
            self.miss(plan, problem)
        return out

    def _after_failure(self, writing: Writing, frame: Any) -> None:
        """A call that raised may have written some of its arguments before (the first tensors of a list)."""
        try:
            writing.keep_changed()
            writing.finish(None, Site(*self.where(frame)))
        except Exception as problem:
            self.miss(writing.plan, problem)

    def write(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], frame: Any) -> Any:
        """Run the usual write, ``x.op_(...)`` on one plain tensor, and add what it wrote.

        Written out like `record`; the unusual goes to `add_write`.
        """
        target = args[0]
        old: Mapping[str, Tensor] = _NOTHING
        problem: Exception | None = None
        try:
            # Inputs are looked up before the call: afterwards their memory may hold something else.
            if plan.overwrites and (len(args) == 1 or not share_memory(target, args[1:])):
                parents, bits = self.inputs(args[1:], kwargs)
                known = self.find(target)
                if known is not None and known.bits & _UNUSUAL:
                    known.bits |= CONSUMED
            else:
                parents, bits = self.inputs(args, kwargs)
                if plan.keeps_old or bits & NONFINITE:
                    old = {plan.arguments[0] if plan.arguments else "arg0": self.copy(target)}
            version = -1 if plan.has_schema else version_of(target)
        except Exception as reason:
            problem = reason
        out = plan.call(*args, **kwargs) if kwargs else plan.call(*args)
        try:
            if problem is not None:
                raise problem
            if version >= 0 and version_of(target) == version:
                return out
            scope = self.scope
            if (
                self.step_line is not None
                and frame is not None
                and _frame_kinds.get(id(frame.f_code)) == INTERNAL
                and not _is_grad_enabled()
                and _current_autograd_node() is None
            ):
                code, instruction = self.step_line  # the usual kernel of an optimizer
                link = autograd = None
            else:
                code, instruction, scope, link, autograd = self.where(frame)
            entry = None
            if not bits & _UNUSUAL and self.usual and (dtype := target.dtype) in SUMMED and target.is_cpu:
                try:
                    storage = target.untyped_storage()
                    shape = target.shape
                    entry = self.table.get(storage._cdata)
                except (NotImplementedError, RuntimeError):  # a wrapper of functorch, nested
                    pass
            if entry is not None and entry.more is None and (known := entry.node) is not None:
                if entry.views is None:
                    whole = known.dtype is dtype and known.shape == shape
                else:
                    whole = (
                        target.is_contiguous()
                        and target.numel() * target.element_size() == storage.nbytes()
                        and not any(region[3] is not dtype for region in entry.views)
                    )
                if whole:
                    if self.direct:
                        total = _sum(target).item() if shape else target.item()
                    else:
                        total = self.total(target)
                    if total - total == 0:
                        flags = 0
                        if scope.phase == BACKWARD:
                            flags = GRADIENT
                        elif bits & GRADIENT:
                            if scope.phase == FORWARD and not _is_grad_enabled():
                                scope = self._optimizer
                            if scope.phase != FORWARD and parents[0].bits & GRADIENT:
                                flags = GRADIENT
                        keep_all = self.keep_all
                        record = entry.node = finite_record((
                            seq := self.seq + 1, seq, plan, shape, dtype, CPU, flags,
                            tuple(parents) if keep_all else (),
                            code, instruction, scope, link, autograd, None,
                        ))  # fmt: skip
                        self.seq = seq
                        entry.views = None
                        if keep_all:
                            self.records.append(record)
                        if not self.by_object and (
                            self.sequence != get_sequence_nr()
                            or (_is_grad_enabled() and self.links and self._is_near(record))
                        ):
                            self._tie_write(record, target)
                        return out
            record = self.add_write(
                plan,
                args,
                kwargs,
                target,
                tuple(parents),
                bits,
                code,
                instruction,
                scope,
                link,
                autograd,
                0,
                old,
            )
            self._tie_write(record, target)
        except (NonFiniteError, NonFiniteWarning):
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
        link: Record | None,
        autograd: Any,
        call: int,
        old: Any,
    ) -> Record:
        """Add the node of an argument that was just written."""
        held: Tensor | None = target
        if type(target) not in PLAIN or target.layout is not _strided or _is_functorch_wrapped(target):
            held = anchor(target)
        elif target.is_nested:
            held = target = values_of_nested(target)
        dtype = target.dtype
        device = CPU if target.is_cpu else target.device
        state = 0
        if dtype in self.floating and held is not None:
            state = self.scan(held) if device is CPU and not self.defer else PENDING
        if bits & NONFINITE:
            mark_consumed(parents)
        if bits & GRADIENT:
            if scope.phase == FORWARD and not _is_grad_enabled():
                scope = self._optimizer
            if parents[0].bits & GRADIENT and scope.phase != FORWARD:
                state |= GRADIENT
        if scope.phase == BACKWARD:
            state |= GRADIENT
        extra = None
        if state & NONFINITE:
            if not bits & NONFINITE:
                inputs = list(numbers_in((args, kwargs))) if plan.by_element else (args, kwargs)
                parents, bits = self._look_again(plan, parents, inputs, self.written or [target], old or {})
            state, extra = self._examiner.examine(plan, args, kwargs, target, parents, state, old, self.miss)
        named: Sequence[float] = ()
        if state & PENDING:
            parents, named = self._named(plan, parents, (args, kwargs))
        if plan.base == _UNSCALE and state & _UNUSUAL:
            state |= CONSUMED  # GradScaler has noticed and will skip the step
        seq = self.seq = self.seq + 1
        keep = self.keep_all or state & (NONFINITE | PENDING)
        record = Record(
            seq,
            call or seq,
            plan,
            target.shape,
            dtype,
            device,
            state,
            parents if keep else (),
            code,
            instruction,
            scope,
            link,
            autograd,
            extra,
        )
        if self.keep_all:
            self.records.append(record)
        if held is None:
            self.loose[id(target)] = (WeakIdRef(target), record)
        else:
            self.memory.write(held, record)
        if state & _UNUSUAL:
            self.settle(plan, held, record, parents, Late(named))
        return record


def _differentiable(out: Any) -> bool:
    """Will autograd differentiate through a result? Below autograd none tells yet."""
    return any(tensor.requires_grad for tensor in tensors_in(out))
