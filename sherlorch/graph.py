"""What was recorded: compact records while tracing, `OpNode` and the DiGraph when someone asks."""

from __future__ import annotations

from collections import _tuplegetter  # type: ignore[attr-defined]
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

from sherlorch import source
from sherlorch.health import INF, NAN, NONFINITE

if TYPE_CHECKING:
    import networkx as nx

    from sherlorch.evidence import Evidence

# Bits of `Record.bits` above the state flags of `health`.
GRADIENT = 4  # computed from gradients: a backward result, or what a no-grad op made of one
INHERITED = 8  # the state follows from the inputs by a law; the values were not scanned
LEAF = 16  # first seen as an argument
ALIAS = 32  # the same memory read through another view, after writes that the view did not make
CONSTANT = 64  # the call put an infinity or NaN there that the program names
PENDING = 128  # the state is still on the device
CONSUMED = 256  # non-finite, and some later call took it as input

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"
CONDENSED = 1024  # its parents stand for a longer way that was let go
SCRATCH = 2048  # memory that an op hands to its own backward, in part as it lay there
GRAPH = 512  # non-finite, and autograd will differentiate through it
ARRIVING = 4096  # other processes are writing it: nobody has looked yet


class Scope:
    """Phase and module of a call; shared by all calls of one module."""

    __slots__ = ("module", "phase")

    def __init__(self, phase: str, module: str | None = None) -> None:
        self.phase = phase
        self.module = module


class OpFacts:
    """What is known of an op before it runs, as far as graph and diagnosis need it."""

    __slots__ = ("arrives", "base", "combines", "constant", "moves", "name", "uninitialised")

    def __init__(
        self,
        name: str,
        base: str,
        *,
        moves: bool = False,
        constant: bool = False,
        uninitialised: bool = False,
        combines: bool = False,
        arrives: bool = False,
    ) -> None:
        self.name = name
        self.base = base
        self.moves = moves  # a view, copy or cast: computes nothing
        self.constant = (
            constant  # writes values that the program names (full, fill_, masked_fill, scalar_tensor)
        )
        self.uninitialised = uninitialised  # hands out memory as it is (empty)
        self.combines = combines  # a reduction or product: its result belongs to no single input element
        self.arrives = arrives  # a collective: its result comes in part from other processes


class Record:
    """One node, as small as it can be. Finite records may have given up their parents
    (`keep="nonfinite"`)."""

    __slots__ = (
        "autograd",
        "bits",
        "call",
        "code",
        "device",
        "dtype",
        "extra",
        "facts",
        "instruction",
        "link",
        "parents",
        "scope",
        "seq",
        "shape",
    )

    def __init__(
        self,
        seq: int,
        call: int,
        facts: OpFacts,
        shape: tuple[int, ...],
        dtype: Any,
        device: Any,
        bits: int,
        parents: tuple[Record, ...],
        code: CodeType | None,
        instruction: int,
        scope: Scope,
        link: Record | None,
        autograd: Any,
        extra: Any,
    ) -> None:
        self.seq = seq
        self.call = call
        self.facts = facts
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.bits = bits
        self.parents = parents
        self.code = code
        self.instruction = instruction
        self.scope = scope
        self.link = link
        self.autograd = autograd
        self.extra = extra

    @property
    def state(self) -> int:
        """NAN and INF flags."""
        return self.bits & NONFINITE


_FIELDS = (
    "seq", "call", "facts", "shape", "dtype", "device", "bits", "parents",
    "code", "instruction", "scope", "link", "autograd", "extra",
)  # fmt: skip

if TYPE_CHECKING:

    def finite_record(fields: tuple[Any, ...]) -> Record: ...

else:

    class finite_record(tuple):
        """A record, of its fields in the order of `Record`, of a finite result: nothing more is learnt of it.

        It is made in half the time.
        """

        __slots__ = ()
        state = 0
        # Like any record it is itself only, and its parents are not to be walked through.
        __eq__, __ne__, __hash__, __repr__ = object.__eq__, object.__ne__, object.__hash__, object.__repr__
        __lt__, __le__, __gt__, __ge__ = object.__lt__, object.__le__, object.__gt__, object.__ge__

    for _number, _name in enumerate(_FIELDS):
        setattr(finite_record, _name, _tuplegetter(_number, None))


class Extra:
    """What only few records have: a leaf's name, a fault's evidence, elements that are newly bad."""

    __slots__ = ("born", "evidence", "mask", "name", "negative", "range")

    def __init__(
        self,
        name: str = "",
        evidence: Evidence | None = None,
        born: int = 0,
        negative: bool = False,
        mask: bool = False,
    ) -> None:
        self.name = name  # "parameter model.head.weight"
        self.evidence = evidence
        self.born = born  # state flags of elements that went bad here although their own inputs were good
        self.negative = negative  # a constant: the program named only negative infinities
        self.mask = mask  # a leaf that holds -Inf beside zeros only, as an additive attention mask does
        self.range: tuple[float, float] | None = None  # min and max where the state was read late


def forward_of(record: Record) -> Record | None:
    """The forward record whose backward this is, through any number of double backwards."""
    seen = record
    while seen.link is not None and seen.scope.phase == BACKWARD:
        seen = seen.link
    return seen if seen is not record else None


def site_of(record: Record) -> Record:
    """The record that knows line and module: the forward one of a backward kernel, else the record itself."""
    if record.code is not None:
        return record
    return forward_of(record) or record


def location_of(record: Record) -> str | None:
    """``path/file.py:19`` of the user's line."""
    site = site_of(record)
    return source.location_of(site.code, site.instruction) if site.code is not None else None


def origin_of(record: Record) -> str | None:
    """Why a record is non-finite, in the words of DESIGN section 2; None for a finite one."""
    state = record.state
    if not state:
        return None
    if record.bits & LEAF:
        return "constant" if record.bits & CONSTANT else "outside"
    inputs = 0
    for parent in record.parents:
        inputs |= parent.bits & NONFINITE
    if not inputs:
        if record.facts.uninitialised:
            return "uninitialised"
        if record.facts.arrives:
            return "outside"
        return "constant" if record.bits & CONSTANT else "introduced"
    if state & NAN and not inputs & NAN:
        return "converted"
    return "propagated"


class OpNode:
    """One tensor that a call produced or wrote. Compares equal to another view of the same node."""

    __slots__ = ("_record",)

    def __init__(self, record: Record) -> None:
        self._record = record

    @property
    def seq(self) -> int:
        return self._record.seq

    @property
    def call(self) -> int:
        """Number that the nodes of one call share."""
        return self._record.call

    @property
    def op_name(self) -> str:
        return self._record.facts.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._record.shape)

    @property
    def dtype(self) -> str:
        return str(self._record.dtype)

    @property
    def device(self) -> str:
        return str(self._record.device)

    @property
    def has_nan(self) -> bool:
        return bool(self._record.bits & NAN)

    @property
    def has_inf(self) -> bool:
        return bool(self._record.bits & INF)

    @property
    def is_finite(self) -> bool:
        return not self._record.bits & NONFINITE

    @property
    def origin(self) -> str | None:
        """introduced, converted, propagated, outside, constant, uninitialised; None for a finite node."""
        return origin_of(self._record)

    @property
    def inherited(self) -> bool:
        """True where the state follows from the inputs by an op law and the values were not scanned."""
        return bool(self._record.bits & INHERITED)

    @property
    def phase(self) -> str:
        return self._record.scope.phase

    @property
    def parents(self) -> list[OpNode]:
        return [OpNode(parent) for parent in self._record.parents]

    @property
    def location(self) -> str | None:
        """``path/file.py:19``: the user's line; of the forward op for a backward node."""
        return location_of(self._record)

    @property
    def module_path(self) -> str | None:
        return site_of(self._record).scope.module

    @property
    def autograd_node(self) -> str | None:
        """Name of the autograd node that ran this backward kernel, such as ``SqrtBackward0``."""
        autograd = self._record.autograd
        return autograd.__name__ if autograd is not None else None

    @property
    def forward(self) -> OpNode | None:
        """The forward node whose backward this is."""
        forward = forward_of(self._record) if self._record.scope.phase == BACKWARD else None
        return OpNode(forward) if forward is not None else None

    @property
    def name(self) -> str:
        """What a leaf is called ("parameter model.head.weight"); empty for results."""
        return self._record.extra.name if self._record.extra is not None else ""

    @property
    def evidence(self) -> Evidence | None:
        return self._record.extra.evidence if self._record.extra is not None else None

    def summary(self) -> str:
        """One line: number, op, shape, dtype, module, line and what is wrong."""
        flags = " & ".join(word for word, bad in (("NaN", self.has_nan), ("Inf", self.has_inf)) if bad)
        parts = [f"[{self.seq}] {self.op_name}", f"shape={self.shape} dtype={self.dtype}"]
        if self.name:
            parts.append(self.name)
        if self.module_path:
            parts.append(f"[{self.module_path}]")
        if self.location:
            parts.append(f"({self.location})")
        if flags:
            parts.append(f"<-- {flags} ({self.origin})")
        return "  ".join(parts)

    def attributes(self) -> dict[str, Any]:
        """The fields that are a str, int, float or bool, as node attributes of a DiGraph."""
        fields = {
            "seq": self.seq,
            "call": self.call,
            "op_name": self.op_name,
            "shape": str(self.shape),
            "dtype": self.dtype,
            "device": self.device,
            "has_nan": self.has_nan,
            "has_inf": self.has_inf,
            "is_finite": self.is_finite,
            "inherited": self.inherited,
            "phase": self.phase,
        }
        optional = {
            "origin": self.origin,
            "location": self.location,
            "module_path": self.module_path,
            "autograd_node": self.autograd_node,
            "name": self.name or None,
        }
        return {**fields, **{key: value for key, value in optional.items() if value is not None}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpNode) and other._record is self._record

    def __hash__(self) -> int:
        return id(self._record)

    def __repr__(self) -> str:
        return f"OpNode({self.summary()})"


def closure(records: Iterable[Record]) -> Iterator[Record]:
    """The given records and every record that they still refer to, each once."""
    seen: set[int] = set()
    stack = list(records)
    while stack:
        record = stack.pop()
        if id(record) in seen:
            continue
        seen.add(id(record))
        yield record
        stack.extend(record.parents)


def to_networkx(records: Iterable[Record]) -> nx.DiGraph[int]:
    """DiGraph over `records` and their ancestors: nodes are `OpNode.seq`, edges run from input to result."""
    import networkx as nx

    graph: nx.DiGraph[int] = nx.DiGraph()
    for record in sorted(closure(records), key=lambda record: record.seq):
        graph.add_node(record.seq, **OpNode(record).attributes())
        graph.add_edges_from((parent.seq, record.seq) for parent in record.parents)
    return graph
