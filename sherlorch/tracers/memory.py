"""Which node a tensor is: storages, the views of each, and who wrote last where.

Identity is by memory, not by object: in backward the saved tensors come back as new objects on the same
storage. An `Entry` is
a weak reference to a storage, so it dies with it and a reused address can never give a stale answer. (Since
torch 2.1 the
Python object of a storage lives as long as the storage.)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sherlorch.compat import StorageReference
from sherlorch.graph import ALIAS, PENDING, Record
from sherlorch.health import FLOATING, NONFINITE, unseen

Geometry = tuple[Any, Sequence[int], Sequence[int], torch.dtype]  # offset, shape, strides, dtype
_LARGEST_MASK = 1 << 28  # bytes of a storage up to which overlap is computed cell by cell
_MANY_TWINS = 32
_MANY_VIEWS = 64
PLAIN = frozenset({Tensor, torch.nn.Parameter})


class Entry(StorageReference):  # type: ignore[misc]
    """One storage: `node` made all of it, and `views` are the nodes of other regions, once any was read.

    While `views` is None every tensor on the storage is `node` or a finite part of it.
    """

    # `earlier` is set for a storage that the program had before a call was seen to make it: a parameter, a
    # buffer, a batch. (No class of its own: CPython reads attributes faster where all are of one class.)
    __slots__ = ("earlier", "key", "more", "node", "views")
    key: int
    node: Record | None
    views: dict[Geometry, Record] | None
    more: More | None


class More:
    """What few storages need: parts written since `Entry.node` made the whole, twins of views, doubt."""

    __slots__ = ("flights", "mixed", "stale", "sweep_at", "trusted", "twins", "writes")

    def __init__(self) -> None:
        self.writes: dict[Geometry, Record] = {}  # oldest first
        # Results with the geometry of an older node (detach, a view of the same shape) are told apart by
        # object.
        self.twins: dict[int, tuple[weakref.ref[Tensor], Geometry, Record]] = {}
        self.sweep_at = _MANY_TWINS
        self.mixed = False  # viewed as several dtypes: the bits of a finite number may be NaN as another
        self.stale = False  # someone may have written while the tracer was not looking
        self.trusted: set[Geometry] = set()  # what was read or written since
        self.flights: tuple[Flight, ...] = ()  # what other processes are writing

    def newest_first(self) -> list[tuple[Geometry, Record]]:
        return list(self.writes.items())[::-1]


def _is_done(work: Any) -> bool:
    """May whoever waited have gone on? Some wait for the future, which is done before the work says so."""
    if work.is_completed():
        return True
    try:
        return bool(work.get_future().done())
    except RuntimeError:  # a work without a future
        return False


class Flight:
    """Values on their way from other processes into a region of memory."""

    __slots__ = ("entry", "record", "region", "work")

    def __init__(self, record: Record, entry: Entry, region: Geometry, work: Any) -> None:
        self.record = record
        self.entry = entry
        self.region = region
        self.work = work  # None where the program waits before anything else can look

    def has_arrived(self) -> bool:
        """Is the work done? On an accelerator waiting only orders the stream: whoever reads has waited."""
        if self.work is not None and (self.record.device.type != "cpu" or _is_done(self.work)):
            self.work = None  # it keeps its tensors alive
        return self.work is None

    def is_aloft(self) -> bool:
        """Has nobody looked yet, and nothing written over it?"""
        more = self.entry.more
        return more is not None and self in more.flights and self.entry() is not None

    def place(self) -> Tensor:
        """The tensor that it fills."""
        offset, shape, strides, dtype = self.region
        storage = self.entry()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def geometry(tensor: Tensor) -> Geometry:
    """Where in its storage a strided tensor lies."""
    return (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """What a wrapper (DTensor, jagged nested...) consists of, the tensors with values first."""
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    found = [getattr(tensor, name) for name in names]
    return sorted(found, key=lambda inner: inner.dtype not in FLOATING)


def anchor(tensor: Tensor) -> Tensor | None:
    """The strided tensor whose memory holds the values of `tensor`; None where there is no such memory."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return anchor(torch._C._functorch.get_unwrapped(tensor))
    if type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        inner = inner_tensors(tensor)
        return anchor(inner[0]) if inner else None
    layout = tensor.layout
    try:
        if layout is torch.sparse_coo:
            with unseen():
                return tensor._values()
        if tensor.is_nested and not tensor.is_contiguous():
            return None  # a part of the elements of another one
        if layout is not torch.strided or tensor.is_nested:
            with unseen():
                return anchor(tensor.values())
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return tensor if storage is not None else None


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape; of a nested tensor, which has none, how many elements it has."""
    return torch.Size((tensor.numel(),)) if tensor.is_nested else tensor.shape


def values_of_nested(tensor: Tensor) -> Tensor:
    """The strided tensor of all elements of a nested one."""
    with unseen():
        return tensor.values()


def covers_storage(tensor: Tensor) -> bool:
    """Does the tensor hold each byte of its storage once?"""
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
        return False
    return tensor.is_contiguous() or _is_dense(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Is each element at a place of its own (expanded and overlapping tensors are not)?"""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


class Owner(Protocol):
    """Who makes the records of a memory."""

    def leaf(self, tensor: Tensor) -> Record:
        """Of memory never seen before."""

    def merged(self, tensor: Tensor, parts: Sequence[Record]) -> Record:
        """Of a region that several nodes wrote."""

    def state_of(self, held: Tensor | None) -> int:
        """A look that makes none."""

    def node_without_storage(self, tensor: Tensor) -> Record:
        """Of a tensor that is no region of its storage."""

    def land(self, entry: Entry) -> None:
        """Look at what has arrived on a storage."""


class Memory:
    """The table of storages.

    `by_object`: the tensors seen are the user's own objects, so that two with one geometry can be told apart.
    The entries of storages that died are in `dead` until the table is next asked, which is by `entry_of`, or
    after the same as it does: their addresses may be in use again.
    """

    def __init__(self, owner: Owner, by_object: bool = False) -> None:
        self.table: dict[int, Entry] = {}
        self.dead: list[Entry] = []
        self.forget = self.dead.append  # what a storage calls as it dies, often: hence nothing of our own
        self.by_object = by_object
        self._reference = weakref.ref(owner)

    @property
    def _owner(self) -> Owner:
        owner = self._reference()
        assert owner is not None, "the owner of this memory is gone"
        return owner

    def entry_of(self, storage: Any) -> Entry | None:
        """What is known of a storage that lives."""
        self.sweep()
        return self.table.get(storage._cdata)

    def sweep(self) -> None:
        """Let go of the storages that died."""
        table, dead = self.table, self.dead
        while dead:
            entry = dead.pop()
            if table.get(entry.key) is entry:
                del table[entry.key]

    def find(self, tensor: Tensor) -> Record | None:
        """The node that a strided tensor is, or None for memory never seen."""
        entry = self.entry_of(tensor.untyped_storage())
        return self.read(entry, tensor) if entry is not None else None

    def start(self, storage: Any, record: Record) -> Entry:
        """`record` made a storage, or is the first that is known of it."""
        entry = Entry(storage, self.forget)
        entry.key = storage._cdata
        entry.node = record
        entry.views = None
        entry.more = None
        self.table[entry.key] = entry
        return entry

    def start_earlier(self, storage: Any, record: Record) -> Entry:
        """The same for a storage that the program had before."""
        entry = self.start(storage, record)
        entry.earlier = True
        return entry

    def start_leaf(self, tensor: Tensor) -> Record:
        """First sight of an argument. A leaf that does not fill its storage speaks only for its own
        region."""
        if tensor.is_nested:
            if not tensor.is_contiguous():
                return self._owner.node_without_storage(tensor)
            tensor = values_of_nested(tensor)
        record = self._owner.leaf(tensor)
        entry = self.start_earlier(tensor.untyped_storage(), record)
        if not covers_storage(tensor):
            entry.node = None
            entry.views = {geometry(tensor): record}
            entry.more = More()
            entry.more.writes[geometry(tensor)] = record
        return record

    def read(self, entry: Entry, tensor: Tensor) -> Record:
        """The node of `tensor` on a known storage."""
        if tensor.is_nested:
            if not tensor.is_contiguous():
                return self._owner.node_without_storage(tensor)
            tensor = values_of_nested(tensor)
        if entry.more is not None and entry.more.flights:
            self._owner.land(entry)
        if entry.views is None:
            node = entry.node
            assert node is not None
            if node.shape == tensor.shape and node.dtype == tensor.dtype:
                return node
        views = self.views(entry, None)
        key = geometry(tensor)
        more = entry.more
        known = None
        if more is not None:
            if more.stale and key not in more.trusted:
                known = self._read_again(entry, more, key, tensor)
            twins = entry.more.twins if entry.more is not None else {}
            twin = twins.get(id(tensor))
            if twin is not None and twin[0]() is tensor and twin[1] == key:  # `resize_` moves a tensor
                return twin[2]
        if known is not None:
            return known
        record = views.get(key)
        if record is None:
            record = views[key] = self._assemble(entry, key, tensor)
        return record

    def views(self, entry: Entry, source: Tensor | None) -> dict[Geometry, Record]:
        """The entry's views; begun now if need be, `source` being a tensor that is known to be
        `entry.node`."""
        views = entry.views
        if views is None:
            node = entry.node
            assert node is not None
            try:
                known = source is not None and source.untyped_storage()._cdata == entry.key
            except (NotImplementedError, RuntimeError):  # a sparse tensor, of its values
                known = False
            if known and source is not None and not source.is_nested:
                views = entry.views = {geometry(source): node}
            else:
                shape = torch.Size(node.shape)
                views = entry.views = {(0, shape, _contiguous_strides(shape), node.dtype): node}
        return views

    def adopt(self, entry: Entry, tensor: Tensor, record: Record, source: Tensor | None = None) -> bool:
        """`record` is a new view on a known storage, made from `source` where that is on the same storage.

        False where an older node keeps standing for this very region.
        """
        views = entry.views
        if views is None:
            views = self.views(entry, source)
        if (
            views.setdefault((tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype), record)
            is record
        ):
            return True
        if self.by_object:
            more = entry.more = entry.more or More()
            if len(more.twins) >= more.sweep_at:
                for dead in [number for number, (ref, *_) in more.twins.items() if ref() is None]:
                    del more.twins[dead]
                more.sweep_at = max(_MANY_TWINS, 2 * len(more.twins))
            more.twins[id(tensor)] = (weakref.ref(tensor), geometry(tensor), record)
        return self.by_object

    def write(self, tensor: Tensor, record: Record) -> None:
        """`record` wrote the memory of `tensor`: every overlapping view is another value now."""
        storage = tensor.untyped_storage()
        entry = self.entry_of(storage)
        if entry is None:
            entry = self.start_earlier(storage, record)
            if covers_storage(tensor):
                return
            entry.node = None
        node = entry.node
        views = entry.views
        dtype = tensor.dtype
        if views is None and node is not None:
            if node.shape == tensor.shape and node.dtype == dtype:
                entry.node = record  # no other view was ever read
                return
            views = self.views(entry, None)
        views = views or {}
        more = entry.more
        mixed = (more is not None and more.mixed) or any(other[3] is not dtype for other in views)
        key = geometry(tensor)
        if covers_storage(tensor):
            entry.node = record
            entry.views = entry.more = None
            if mixed:
                entry.views = {key: record}
                entry.more = More()
                entry.more.mixed = True
            return
        more = entry.more = more or More()
        more.mixed = mixed
        more.twins.clear()
        # A view that is let go is put together again when it is read.
        kept = {other: seen for other, seen in views.items() if not may_overlap(other, key)}
        entry.views = kept if len(kept) < _MANY_VIEWS else {}
        entry.views[key] = record
        more.writes.pop(key, None)
        more.writes[key] = record
        if more.stale:
            more.trusted.add(key)

    def expect(self, tensor: Tensor, record: Record, work: Any) -> Flight:
        """Other processes are writing `tensor`; its state is asked for when it is read."""
        self.write(tensor, record)
        entry = self.entry_of(tensor.untyped_storage())
        assert entry is not None, "what was written is known"
        if entry.views is None:
            entry.views = {geometry(tensor): record}
        more = entry.more = entry.more or More()
        flight = Flight(record, entry, geometry(tensor), work)
        more.flights = (*more.flights, flight)
        return flight

    def expect_no_more(self, tensor: Tensor) -> None:
        """An op has computed with `tensor`: whatever other processes wrote there has arrived."""
        entry = self.entry_of(tensor.untyped_storage())
        for flight in entry.more.flights if entry is not None and entry.more is not None else ():
            flight.work = None

    def lasting(self) -> Iterator[Record]:
        """Who wrote what is in memory that the program had before, where any of it is bad."""
        self.sweep()
        for entry in list(self.table.values()):
            storage = entry()
            if not hasattr(entry, "earlier") or storage is None:
                continue
            writes = entry.more.newest_first() if entry.more is not None else []
            base = [entry.node] if entry.node is not None else []
            if not any(record.bits & NONFINITE for record in [*base, *(node for _, node in writes)]):
                continue
            with unseen():
                seen, rest = _visible(storage.nbytes(), None, writes)
            for record in seen + (base if rest is None or bool(rest.any()) else []):
                yield from record.parents if record.bits & ALIAS else (record,)

    def distrust(self, tensors: Iterable[Tensor] | None = None) -> None:
        """These storages, or all, may be written from now on without notice: read each again before its node
        is believed."""
        self.sweep()
        entries: Iterable[Entry | None] = list(self.table.values())
        if tensors is not None:
            entries = [self.entry_of(tensor.untyped_storage()) for tensor in tensors]
        for entry in filter(None, entries):
            if entry.node is not None:
                self.views(entry, None)
            entry.more = entry.more or More()
            entry.more.stale = True
            entry.more.trusted.clear()

    def _read_again(self, entry: Entry, more: More, key: Geometry, tensor: Tensor) -> Record:
        """The node of a tensor that may have been written unseen: the one known, if that is what it holds."""
        views = entry.views if entry.views is not None else {}
        known = views.get(key)
        if known is None and (entry.node is not None or more.writes):
            known = views[key] = self._assemble(entry, key, tensor)
        more = entry.more = entry.more or more
        state = self._owner.state_of(tensor)
        if known is not None and not state & PENDING and known.state == state:
            more.trusted.add(key)
            return known
        if known is not None and state and not state & ~known.state:
            fresh = self._owner.merged(tensor, [known])  # some of what was bad is
        else:
            fresh = self._owner.leaf(tensor)
            if known is not None and state & PENDING:
                fresh.parents = (known,)  # `Ledger.resolve` will compare the two
        self.write(tensor, fresh)
        return fresh

    def _assemble(self, entry: Entry, key: Geometry, tensor: Tensor) -> Record:
        """The node of a region that no single node made."""
        more = entry.more
        written = more.newest_first() if more is not None else []
        wanted = [pair for pair in written if may_overlap(pair[0], key)]
        base = entry.node
        if base is None and not wanted:
            record = self._owner.leaf(tensor)
            more = entry.more = more or More()
            more.writes[key] = record
            return record
        whole = covers_storage(tensor)
        parts = [node for _, node in wanted] + ([base] if base is not None else [])
        if base is None or (len(parts) > 1 and any(part.bits & (NONFINITE | PENDING) for part in parts)):
            with unseen():
                parts, rest = _visible(tensor.untyped_storage().nbytes(), key, wanted)
                if rest is None or bool(rest.any()):
                    if base is None:
                        base = self._leaf_of(tensor, key, rest)
                        if whole:
                            entry.node = base
                        elif more is not None:
                            more.writes = {key: base, **more.writes}
                    parts.append(base)
        record = self._owner.merged(tensor, parts)
        if whole and (not record.bits & (NONFINITE | PENDING) or len(written) > _MANY_VIEWS):
            # It stands for everything written so far: later reads need not look behind it. What is bad or may
            # be is better known by its parts, since some of them may be overwritten.
            entry.node = record
            if more is not None:
                more.writes.clear()
        return record

    def _leaf_of(self, tensor: Tensor, key: Geometry, rest: Tensor | None) -> Record:
        """First sight of some cells of `tensor`, other tensors having been seen on the others."""
        if rest is None:
            return self._owner.leaf(tensor)
        cells = _cells(rest, key).any(-1).to(tensor.device)
        return self._owner.leaf(torch.where(cells, tensor, torch.zeros_like(tensor)))


def _visible(
    size: int, key: Geometry | None, writes: Sequence[tuple[Geometry, Record]]
) -> tuple[list[Record], Tensor | None]:
    """Of the writes (newest first) to a storage of `size` bytes those of which a cell of the region is still
    to be seen, and the cells that none wrote (None in a storage too large to tell)."""
    if size > _LARGEST_MASK:
        return [node for _, node in writes], None
    missing = torch.zeros(size, dtype=torch.bool, device="cpu")
    (missing if key is None else _cells(missing, key)).fill_(True)
    seen = []
    for region, node in writes:
        cells = _cells(missing, region)
        if bool(cells.any()):
            seen.append(node)
            cells.fill_(False)
    return seen, missing


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _extent(key: Geometry) -> tuple[int, int]:
    """First and one past the last byte that a region can touch."""
    offset, shape, strides, dtype = key
    if 0 in shape:
        return 0, 0
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
    width = _width(dtype)
    return offset * width, (last + 1) * width


def may_overlap(one: Geometry, other: Geometry) -> bool:
    """Do two regions of one storage share a byte? Never a false no."""
    low, high = _extent(one)
    other_low, other_high = _extent(other)
    if low >= other_high or other_low >= high:
        return False
    return not _interleaved(one, other)


def _interleaved(one: Geometry, other: Geometry) -> bool:
    """Two columns (or other slices of one grid) lie in each other's extent without sharing a cell.

    Let all steps above some threshold be multiples of G and the smaller ones of a region span `inner` cells:
    then its cells
    have residues offset ... offset + inner modulo G, and regions whose residues are disjoint share no cell.
    """
    if one[3] != other[3]:
        return False
    steps = [[(stride, size) for stride, size in zip(key[2], key[1]) if size > 1] for key in (one, other)]
    shift = other[0] - one[0]
    for threshold in {stride for pairs in steps for stride, _ in pairs if stride > 0}:
        grid = math.gcd(*(stride for pairs in steps for stride, _ in pairs if stride >= threshold))
        inner = [sum((size - 1) * stride for stride, size in pairs if stride < threshold) for pairs in steps]
        if shift % grid > inner[0] and -shift % grid > inner[1]:
            return True
    return False


def _cells(mask: Tensor, key: Geometry) -> Tensor:
    """The bytes of a region as a view on a mask with one cell for each byte of the storage."""
    offset, shape, strides, dtype = key
    width = _width(dtype)
    return mask.as_strided((*shape, width), (*(stride * width for stride in strides), 1), offset * width)


_widths: dict[Any, int] = {}


def _width(dtype: torch.dtype) -> int:
    if dtype not in _widths:
        with unseen():
            _widths[dtype] = torch.empty((), dtype=dtype, device="meta").element_size()
    return _widths[dtype]
