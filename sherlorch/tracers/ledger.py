"""The nodes of one trace: made on first sight or added by a recorder, kept or let go, settled when their
state is known."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

from sherlorch import health, source
from sherlorch.compat import bytes_of, get_sequence_nr
from sherlorch.diagnosis import went_wrong
from sherlorch.graph import (
    ALIAS,
    ARRIVING,
    BACKWARD,
    CONDENSED,
    CONSTANT,
    FORWARD,
    GRADIENT,
    GRAPH,
    INHERITED,
    LEAF,
    OPTIMIZER,
    PENDING,
    Extra,
    OpFacts,
    Record,
    Scope,
    finite_record,
)  # fmt: skip
from sherlorch.health import FLOATING, NAN, NONFINITE, SUMMED
from sherlorch.source import short
from sherlorch.tracers.faults import (
    Examiner,
    explains,
    is_mask,
    leaf_evidence,
    loses_infinity,
    mark_consumed,
    place_leaves,
)
from sherlorch.tracers.memory import PLAIN, Entry, Flight, Memory, More, anchor, shape_of
from sherlorch.tracers.plan import Plan

CPU = torch.device("cpu")
_sum = torch.sum
_FORWARD_SCOPE, _BACKWARD_SCOPE, _OPTIMIZER_SCOPE = Scope(FORWARD), Scope(BACKWARD), Scope(OPTIMIZER)
_LEAF = OpFacts("leaf", "leaf", moves=True)
_VIEW = OpFacts("view", "view", moves=True)
_GRADIENTS_KEPT = 10_000
_MOST_SUSPECTS = 8
_PENDING_LIMIT = 4096
_KEPT_FOR_EACH_SITE = 64
_MOST_CONDENSED_PARENTS = 8
_LONGEST_REASON = 200  # torch lists every backend where an operator lacks one


class Site(NamedTuple):
    """Where a call happened: the user's frame, phase and module, and the forward record of a backward
    kernel."""

    code: Any
    instruction: int
    scope: Scope
    link: Record | None
    autograd: Any


class Late(NamedTuple):
    """What must be remembered of a call until the state of its result is known."""

    named: Sequence[float] = ()  # non-finite values that the program gave it
    inherits: bool = False  # a law gives the state of the result
    consumes: bool = True  # it took its inputs in, rather than stand for one of them
    differentiable: bool = False  # autograd will differentiate through it
    scratch: bool = False  # its result is memory of the op's own, where infinities are meant


_AT_ONCE = Late()


def kind_of_leaf(tensor: Tensor) -> str:
    """What a leaf is called that nobody named."""
    return "parameter" if type(tensor) is torch.nn.Parameter else ""


def _unknown(tensor: Tensor, *_: Any) -> float:
    return math.nan


class Ledger:
    """The records of one trace, how they are found again, and which of them wait or went wrong."""

    # More attributes than a class without slots reads fast.
    __slots__ = (
        "__weakref__",
        "_backward",
        "_examiner",
        "_optimizer",
        "_sites",
        "bad_number",
        "begin_scan",
        "by_object",
        "capture_stack",
        "dead",
        "defer",
        "direct",
        "faults",
        "flights",
        "floating",
        "forget",
        "forward_scope",
        "grad_off",
        "gradients",
        "has_names",
        "inherited",
        "keep_all",
        "last_backward",
        "leaf_name",
        "links",
        "links_longest",
        "links_start",
        "links_step",
        "loose",
        "memory",
        "on_fault",
        "pending",
        "plain_links",
        "records",
        "scan",
        "scope",
        "seq",
        "sequence",
        "step_line",
        "table",
        "total",
        "unseen",
        "usual",
        "usual_leaves",
        "was_backward",
        "written",
        "written_view",
    )

    def __init__(
        self,
        *,
        capture_stack: bool,
        check_dtypes: Iterable[torch.dtype] | None,
        keep_all: bool,
        defer: bool = False,
        on_fault: Callable[[Record], None] | None = None,
        by_object: bool = False,
    ) -> None:
        self.capture_stack = capture_stack
        self.floating = health.FLOATING if check_dtypes is None else frozenset(check_dtypes)
        self.keep_all = keep_all
        self.defer = defer  # treat every device as an accelerator
        self.leaf_name: Callable[[Tensor], str] = kind_of_leaf
        self.on_fault = on_fault
        self.by_object = by_object
        self.has_names = False  # are there watched modules to ask?
        self.scan = health.scan
        self.begin_scan: Callable[[Tensor, bool], tuple[Tensor, ...] | None] = health.begin_scan_unseen
        # May the usual call be taken the short way: all dtypes scanned, on the CPU, out of nobody's sight?
        self.usual = check_dtypes is None and not defer
        self.usual_leaves = self.usual and keep_all  # and no module watched, whose names leaves would bear
        self.direct = False  # may a scan run as it is, with autograd off and no mode listening?
        self.grad_off = False  # the tracer itself has turned autograd off
        self.total: Callable[..., Any] = _unknown
        self.forward_scope = self.scope = _FORWARD_SCOPE
        self.step_line: tuple[Any, int] | None = (
            None  # the user's line of the torch optimizer step that runs now
        )
        self._backward = _BACKWARD_SCOPE
        self._optimizer = _OPTIMIZER_SCOPE
        self.clear()

    def clear(self) -> None:
        """Forget every node."""
        self.records: list[Record] = []
        self.faults: list[Record] = []  # the non-finite ones
        self._sites: dict[tuple[Any, ...], int] = {}
        self.seq = 0
        self.inherited = 0
        self.unseen: dict[str, int] = {}
        self._examiner = Examiner()
        self.memory = Memory(self, self.by_object)
        self.flights: list[Flight] = []  # what other processes write, until somebody looks
        self.table = self.memory.table
        self.dead = self.memory.dead
        self.forget = self.memory.forget
        self.loose: dict[int, tuple[Any, Record]] = {}
        self.bad_number: Record | None = None  # the tensor of which the program last read a bad number
        # Number of the newest autograd node; the function level sees no kernels that could belong to one.
        self.sequence = 0 if self.by_object else get_sequence_nr()
        self.links: list[Record | None] = []
        # Does a new autograd node belong to the newest record, with nothing else to do?
        self.plain_links = self.keep_all and not self.by_object
        self.written: Sequence[Tensor] = ()  # by the call that is being recorded, where it writes several
        self.written_view: Record | None = None  # autograd was about to make further nodes for it
        self.links_start = self.sequence
        self.links_step = self.sequence  # where the newest step of the program began
        self.links_longest = 0
        self.was_backward = False
        self.pending: list[tuple[Record, Any, Late]] = []
        self.gradients: dict[int, weakref.ref[Tensor]] = {}
        self.last_backward: tuple[Plan, Record, Site] | None = None

    def ask_names(self, leaf_name: Callable[[Tensor], str]) -> None:
        """From now on leaves may have names: modules are watched."""
        self.leaf_name = leaf_name
        self.has_names = True
        self.usual_leaves = False

    def node_of(self, tensor: Tensor) -> Record:
        """The node that any tensor is; a leaf is made on first sight."""
        try:
            storage = tensor.untyped_storage()
            entry = self.memory.entry_of(storage) if self.dead else self.table.get(storage._cdata)
        except (NotImplementedError, RuntimeError):
            return self.node_without_storage(tensor)
        if entry is None:
            return (
                self.first_sight(tensor, storage) if type(tensor) in PLAIN else self.memory.start_leaf(tensor)
            )
        if entry.views is None:
            node = entry.node
            if not node.bits & NONFINITE:  # type: ignore[union-attr]
                return node  # type: ignore[return-value]
        elif entry.more is None:
            try:
                return entry.views[(tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)]
            except (KeyError, RuntimeError):  # nested tensors have no shape
                pass
        return self.memory.read(entry, tensor)

    def node_without_storage(self, tensor: Tensor) -> Record:
        """Sparse, functorch-wrapped and opaque tensors."""
        held = anchor(tensor)
        if held is not None:
            return self.node_of(held)
        found = self.loose.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        record = self.leaf(tensor)
        self.loose[id(tensor)] = (WeakIdRef(tensor), record)
        return record

    def find(self, tensor: Tensor) -> Record | None:
        """The node that a tensor is, or None for one never seen."""
        held = anchor(tensor)
        if held is not None:
            return self.memory.find(held)
        found = self.loose.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def written_unseen(self, tensor: Tensor) -> Record:
        """The leaf that a known tensor is from now on: NumPy, C++ or another thread has made it bad."""
        with health.unseen():
            held = anchor(tensor)
            leaf = self.leaf_unseen(tensor if held is None else held)
            if held is None:
                self.loose[id(tensor)] = (WeakIdRef(tensor), leaf)
            else:
                self.memory.write(held, leaf)
        return leaf

    def leaf_unseen(self, tensor: Tensor) -> Record:
        """The leaf of a bad tensor that was made good, as far as was seen."""
        leaf = self.leaf(tensor)
        if leaf.extra is not None:
            leaf.extra.mask = False  # it was no mask when it was seen
            leaf.extra.name = leaf.extra.name or "tensor that was written where the tracer did not look"
        return leaf

    def first_sight(
        self, tensor: Tensor, storage: Any, unproved: list[tuple[Tensor, Record]] | None = None
    ) -> Record:
        """The leaf of a plain tensor whose storage was never seen; the usual one is dense and finite.

        Given a list, the leaf is taken for finite and put there unread, for `prove` to read if need be.
        """
        if (
            not self.usual_leaves
            or bytes_of(tensor) != storage.nbytes()
            or not tensor.is_contiguous()
            or not tensor.is_cpu
        ):
            return self.memory.start_leaf(tensor)
        dtype = tensor.dtype
        try:
            shape = tensor.shape
        except RuntimeError:  # a nested one
            return self.memory.start_leaf(tensor)
        if dtype in SUMMED:
            if unproved is None:
                if self.direct:
                    total = _sum(tensor).item() if shape else tensor.item()
                else:
                    total = self.total(tensor)
                if total - total != 0:
                    return self.memory.start_leaf(tensor)
        elif dtype in FLOATING:
            return self.memory.start_leaf(tensor)
        seq = self.seq + 1
        scope = self.forward_scope
        record = finite_record(
            (seq, seq, _LEAF, shape, dtype, CPU, LEAF, (), None, 0, scope, None, None, None)
        )
        self.seq = seq
        self.records.append(record)
        self.memory.start(storage, record).earlier = True
        if unproved is not None:
            unproved.append((tensor, record))
        return record

    def prove(self, unproved: Iterable[tuple[Tensor, Record]], parents: list[Record]) -> int:
        """Read the leaves that no finite result has proved finite; `parents` is told of the bad ones, and the
        bits of all are joined anew."""
        for tensor, leaf in unproved:
            if self.scan(tensor):
                self.records.remove(leaf)
                bad = self.memory.start_leaf(tensor)
                parents[:] = [bad if parent is leaf else parent for parent in parents]
        bits = 0
        for parent in parents:
            bits |= parent.bits
        return bits

    def leaf(self, tensor: Tensor) -> Record:
        dtype = tensor.dtype
        bits = LEAF | GRADIENT if self.gradients and self._is_gradient(tensor) else LEAF
        device = CPU if tensor.is_cpu else tensor.device
        state = 0
        if dtype in self.floating:
            state = self.scan(tensor) if device is CPU and not self.defer else PENDING
        extra = None
        if self.has_names or state & (NONFINITE | PENDING):
            name = self.leaf_name(tensor)
            extra = Extra(name) if name or state & NONFINITE else None
        if state & NONFINITE and extra is not None:
            extra.evidence = leaf_evidence(tensor)
            extra.mask = is_mask(extra.evidence.result)
        if state & (NONFINITE | PENDING):
            born = self._gradient_of_backward(tensor, state, extra)
            if born is not None:
                return born
        seq = self.seq = self.seq + 1
        scope = self.scope if self.scope.phase == FORWARD else self.forward_scope
        record = Record(
            seq,
            seq,
            _LEAF,
            shape_of(tensor),
            dtype,
            device,
            state | bits,
            (),
            None,
            0,
            scope,
            None,
            None,
            extra,
        )
        self._add(record, tensor)
        return record

    def _gradient_of_backward(self, tensor: Tensor, state: int, extra: Extra | None) -> Record | None:
        """At function level a bad gradient comes out of the `backward` call, which is one node there."""
        if self.last_backward is None or not self._is_gradient(tensor):
            return None
        plan, loss, site = self.last_backward
        suspects = () if (loss.bits & NONFINITE or state & PENDING) else self._suspects(loss)
        self.seq += 1
        record = Record(
            self.seq, self.seq, plan, tensor.shape, tensor.dtype, CPU if tensor.is_cpu else tensor.device,
            state | GRADIENT, (loss, *suspects),
            site.code, site.instruction, self._backward, None, None, extra,
        )  # fmt: skip
        self._add(record, tensor)
        return record

    def _suspects(self, loss: Record) -> tuple[Record, ...]:
        """Faults before a finite `loss` that went no further, but through which autograd differentiates."""
        wrong: dict[Record, None] = {}
        for record in self.faults:
            earlier = record.seq < loss.seq
            if earlier and (went_wrong(record) or any(parent in wrong for parent in record.parents)):
                wrong[record] = None
        return tuple(record for record in wrong if record.bits & GRAPH)[:_MOST_SUSPECTS]

    def note_gradient(self, gradient: Tensor) -> None:
        """Function level: the program got this tensor as a gradient."""
        if len(self.gradients) >= _GRADIENTS_KEPT:
            self.gradients = {number: ref for number, ref in self.gradients.items() if ref() is not None}
        self.gradients[id(gradient)] = weakref.ref(gradient)
        self.usual_leaves = False  # a leaf may be one of them

    def _is_gradient(self, tensor: Tensor) -> bool:
        reference = self.gradients.get(id(tensor))
        return reference is not None and reference() is tensor

    def _name_lifted(self, leaf: Record, code: Any, instruction: int) -> None:
        """A leaf of data in the program: it has the line that made it for a name; a lone number is a
        constant."""
        if leaf.bits & PENDING:
            leaf.extra = leaf.extra or Extra()
        elif not leaf.bits & NONFINITE or leaf.extra is None:
            return
        if leaf.bits & NAN and self.bad_number is not None:
            leaf.parents = (self.bad_number,)
            leaf.bits &= ~LEAF
        elif not leaf.shape:
            leaf.bits |= CONSTANT
            leaf.extra.name = "a number of the program"
            leaf.code, leaf.instruction = code, instruction
        elif code is not None:
            leaf.extra.name = f"tensor made at {short(source.location_of(code, instruction))}"

    def merged(self, tensor: Tensor, parts: Sequence[Record]) -> Record:
        mark_consumed(parts)
        bits = 0
        for part in parts:
            bits |= part.bits
        state = bits & GRADIENT
        if bits & ARRIVING:
            state |= PENDING | ARRIVING
        elif not bits & (NONFINITE | PENDING) and all(part.dtype is tensor.dtype for part in parts):
            state |= INHERITED
            self.inherited += 1
        elif tensor.dtype in self.floating:
            state |= self.scan(tensor) if tensor.is_cpu and not self.defer else PENDING
        first = parts[0]
        self.seq += 1
        keep = self.keep_all or state & (NONFINITE | PENDING)
        record = Record(
            self.seq, self.seq, _VIEW, tensor.shape, tensor.dtype, first.device, state | ALIAS, tuple(parts)
            if keep else (), first.code,
            first.instruction, first.scope, first.link, first.autograd, None,
        )  # fmt: skip
        self._add(record, tensor)
        return record

    def _add(self, record: Record, tensor: Tensor) -> None:
        """A record that no call made: a leaf, or memory read through another view."""
        if self.keep_all:
            self.records.append(record)
        if record.bits & PENDING:
            self._wait(record, tensor)
        elif record.bits & NONFINITE:
            self._archive(record)

    def settle(
        self,
        plan: Plan,
        held: Tensor | None,
        record: Record,
        parents: Sequence[Record],
        late: Late = _AT_ONCE,
    ) -> None:
        """A record that is not finite, or not yet known to be."""
        if record.bits & PENDING:
            self._wait(record, held, late)
            return
        if not plan.moves:
            place_leaves(parents, record)
        self._archive(record)
        if self.on_fault is not None:
            self.on_fault(record)

    def _archive(self, record: Record) -> None:
        """Keep a non-finite record for good; in bounded memory only the first ones of each line and op."""
        if not self.keep_all:
            site = (record.facts.name, id(record.code), record.instruction, id(record.autograd))
            count = self._sites[site] = self._sites.get(site, 0) + 1
            if count > _KEPT_FOR_EACH_SITE:
                _condense(record)
                return
            self.records.append(record)
        self.faults.append(record)

    def miss(self, plan: OpFacts, problem: BaseException, what: str = "") -> None:
        """Count what could not be recorded; the report tells."""
        text = f"{what}{plan.name}: {type(problem).__name__}: {problem}".split("\n")[0][:_LONGEST_REASON]
        self.unseen[text] = self.unseen.get(text, 0) + 1

    # Collectives: what other processes write is looked at when it has arrived.

    def land(self, entry: Entry, told: bool = True) -> None:
        """Look at what has arrived on a storage; `told`: of a fault `on_fault` is told."""
        flights = entry.more.flights if entry.more is not None else ()
        aloft = tuple(flight for flight in flights if not flight.has_arrived())
        if entry.more is not None:
            entry.more.flights = ()
        landed = [flight for flight in flights if flight not in aloft]
        for flight in landed:
            self._look_at(flight)
        if aloft:
            entry.more = entry.more or More()
            self.memory.views(entry, None)
            entry.more.flights = aloft
        for flight in landed if told and self.on_fault is not None else ():
            if flight.record.bits & NONFINITE and self.on_fault is not None:
                self.on_fault(flight.record)

    def _look_at(self, flight: Flight) -> None:
        record = flight.record
        record.bits &= ~(PENDING | ARRIVING)
        with health.unseen():
            held = flight.place()
            self.memory.write(held, record)
            state = self.state_of(held)
            record.bits |= state
            if state & PENDING:
                self._wait(record, held)
            elif state:
                record.extra = Extra(evidence=leaf_evidence(held))
        if state & NONFINITE:
            place_leaves(record.parents, record)
            self._archive(record)
        elif not state and not self.keep_all:
            record.parents = ()

    def sweep_flights(self, landing: bool = False) -> None:
        """Let go of work that is done and of what nobody can read any more; look at the rest if so asked."""
        self.flights = [flight for flight in self.flights if flight.is_aloft()]
        for flight in self.flights:
            if flight.has_arrived() and landing and flight.is_aloft():
                self.land(flight.entry, told=False)

    # Accelerators: states that are read later.

    def _wait(self, record: Record, tensor: Tensor | None, late: Late = _AT_ONCE) -> None:
        scan = None
        if not late.inherits and tensor is not None and not record.bits & ARRIVING:
            try:
                scan = self.begin_scan(tensor, bool(record.bits & LEAF))
            except Exception as problem:
                self.miss(record.facts, problem, "the values of ")
        self.pending.append((record, scan, late))
        if len(self.pending) >= _PENDING_LIMIT or self.on_fault is not None:
            self.resolve()

    def resolve(self) -> None:
        """Read every waiting state in one transfer, in the order of the program."""
        if self.flights:
            self.sweep_flights(landing=True)
        waiting, self.pending = self.pending, []
        if not waiting:
            return
        with health.unseen():
            answers = iter(health.finish_scans([scan for _, scan, _ in waiting if scan is not None]))
        for record, scan, late in waiting:
            answer = next(answers) if scan is not None else None
            self._learn(record, answer, late)

    def _learn(self, record: Record, answer: tuple[int, float, float, bool] | None, late: Late) -> None:
        """The state of a record that waited, and what follows from it."""
        inputs = 0
        for parent in record.parents:
            inputs |= parent.bits & NONFINITE
        facts = record.facts
        if late.consumes and (record.dtype in self.floating or loses_infinity(facts, inputs, record.dtype)):
            mark_consumed(record.parents, late.differentiable)
        state = (inputs | INHERITED if late.inherits else 0) if answer is None else answer[0]
        record.bits = record.bits & ~(PENDING | ARRIVING) | state
        if record.bits & LEAF and record.parents:
            self._compare(record)
        if not state & NONFINITE:
            if facts is not _LEAF and self.last_backward is not None and facts is self.last_backward[0]:
                # A healthy gradient says nothing of its origin.
                record.facts, record.parents, record.code, record.scope = _LEAF, (), None, self.forward_scope
                record.bits |= LEAF
            if not self.keep_all:
                record.parents = ()
            return
        if answer is not None and not facts.uninitialised:
            record.extra = record.extra or Extra()
            record.extra.range = answer[1:3]
            record.extra.mask = answer[3]
        named = explains(late.named, state)
        if not inputs and (named or late.scratch):
            record.bits |= CONSTANT
            record.extra = record.extra or Extra()
            record.extra.negative = all(value < 0 for value in late.named)
        if getattr(facts, "lifts", False) and not record.parents:
            code, record.code = record.code, None
            record.bits = record.bits & ~CONSTANT | LEAF
            record.extra = record.extra or Extra()
            self._name_lifted(record, code, record.instruction)
        elif record.parents and not facts.moves:
            place_leaves(record.parents, record)
        if self.last_backward is not None and facts is self.last_backward[0] and not inputs:
            record.parents += self._suspects(record.parents[0])
        self._archive(record)
        if self.on_fault is not None and not record.bits & LEAF:
            self.on_fault(record)

    @staticmethod
    def _compare(leaf: Record) -> None:
        """Memory that may have been written unseen was read as a leaf: is what is bad its parent's still?"""
        known = leaf.parents[0].state
        if known == leaf.state or (leaf.state and not leaf.state & ~known):
            leaf.facts = _VIEW
            leaf.bits = leaf.bits & ~LEAF | ALIAS
        else:
            leaf.parents = ()

    def state_of(self, held: Tensor | None) -> int:
        """State of memory that was just written."""
        if held is None or held.dtype not in self.floating:
            return 0
        return self.scan(held) if held.is_cpu and not self.defer else PENDING


def _condense(record: Record) -> None:
    """Let a record refer to what its condensed parents refer to, so that a poisoned run does not grow a
    chain for ever."""
    record.bits |= CONDENSED
    kept: dict[int, Record] = {}
    for parent in record.parents:
        if parent.bits & NONFINITE:
            further = [p for p in parent.parents if p.bits & NONFINITE] if parent.bits & CONDENSED else []
            kept.update((id(p), p) for p in further or [parent])
    record.parents = tuple(kept.values())[:_MOST_CONDENSED_PARENTS]
