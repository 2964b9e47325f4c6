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
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import torch
from torch import Tensor

from sherlorch.compat import StorageReference
from sherlorch.graph import ALIAS, Record
from sherlorch.health import NONFINITE, unseen

Geometry = tuple[Any, Sequence[int], Sequence[int], torch.dtype]  # offset, shape, strides, dtype
_LARGEST_MASK = 1 << 28  # bytes of a storage up to which overlap is computed cell by cell
_MANY_TWINS = 32


class Entry(StorageReference):  # type: ignore[misc]
    """One storage: `node` made all of it, and `views` are the nodes of other regions, once any was read.

    While `views` is None every tensor on the storage is `node` or a finite part of it.
    """

    __slots__ = ("key", "more", "node", "views")
    key: int
    node: Record | None
    views: dict[Geometry, Record] | None
    more: More | None


class EarlierEntry(Entry):
    """A storage that the program had before a call was seen to make it: a parameter, a buffer, a batch."""

    __slots__ = ()


class More:
    """What few storages need: parts written since `Entry.node` made the whole, twins of views, doubt."""

    __slots__ = ("stale", "twins", "writes")

    def __init__(self) -> None:
        self.writes: list[tuple[Geometry, Record]] = []
        # Results with the geometry of an older node (detach, a view of the same shape) are told apart by
        # object.
        self.twins: dict[int, tuple[weakref.ref[Tensor], Record]] = {}
        self.stale = False  # someone may have written while the tracer was not looking


def geometry(tensor: Tensor) -> Geometry:
    """Where in its storage a strided tensor lies."""
    return (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def anchor(tensor: Tensor) -> Tensor | None:
    """The strided tensor whose memory holds the values of `tensor`; None where there is no such memory."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        return anchor(tensor)
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._values()
    if layout is not torch.strided:
        values = getattr(tensor, "values", None)
        return anchor(values()) if values is not None else None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    return tensor if storage is not None else None


def covers_storage(tensor: Tensor) -> bool:
    """Does the tensor hold each byte of its storage once?"""
    return tensor.nbytes == tensor.untyped_storage().nbytes()


class Memory:
    """The table of storages.

    `leaf` makes the record of memory never seen before, `merge` that of a region which several nodes wrote.
    `by_object`: the
    tensors seen are the user's own objects, so that two with one geometry can be told apart.
    """

    def __init__(
        self,
        leaf: Callable[[Tensor], Record],
        merge: Callable[[Tensor, Sequence[Record]], Record],
        by_object: bool = False,
    ) -> None:
        self.table: dict[int, Entry] = {}
        self.by_object = by_object
        self._leaf = leaf
        self._merge = merge
        table = self.table

        def forget(entry: Entry) -> None:
            if table.get(entry.key) is entry:
                del table[entry.key]

        self.forget = forget

    def find(self, tensor: Tensor) -> Record | None:
        """The node that a strided tensor is, or None for memory never seen."""
        entry = self.table.get(tensor.untyped_storage()._cdata)
        return self.read(entry, tensor) if entry is not None else None

    def start(self, tensor: Tensor, record: Record, kind: type[Entry] = Entry) -> Entry:
        """`record` made the storage of `tensor`, or is the first that is known of it."""
        storage = tensor.untyped_storage()
        entry = kind(storage, self.forget)
        entry.key = storage._cdata
        entry.node = record
        entry.views = None
        entry.more = None
        self.table[entry.key] = entry
        return entry

    def start_leaf(self, tensor: Tensor) -> Record:
        """First sight of an argument. A leaf that does not fill its storage speaks only for its own
        region."""
        storage = tensor.untyped_storage()
        record = self._leaf(tensor)
        entry = self.table[storage._cdata] = EarlierEntry(storage, self.forget)
        entry.key = storage._cdata
        entry.node = record
        entry.views = None
        entry.more = None
        if tensor.nbytes != storage.nbytes():
            entry.node = None
            entry.views = {geometry(tensor): record}
            entry.more = More()
            entry.more.writes.append((geometry(tensor), record))
        return record

    def read(self, entry: Entry, tensor: Tensor) -> Record:
        """The node of `tensor` on a known storage."""
        if entry.views is None:
            node = entry.node
            assert node is not None
            if node.shape == tensor.shape and node.dtype == tensor.dtype:
                return node
        views = self.views(entry, None)
        more = entry.more
        if more is not None:
            if more.stale:
                return self._read_again(entry, views, tensor)
            twin = more.twins.get(id(tensor))
            if twin is not None and twin[0]() is tensor:
                return twin[1]
        key = geometry(tensor)
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
            if source is not None and source.untyped_storage()._cdata == entry.key:
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
            if len(more.twins) >= _MANY_TWINS:
                for dead in [number for number, (ref, _) in more.twins.items() if ref() is None]:
                    del more.twins[dead]
            more.twins[id(tensor)] = (weakref.ref(tensor), record)
        return self.by_object

    def write(self, tensor: Tensor, record: Record) -> None:
        """`record` wrote the memory of `tensor`: every overlapping view is another value now."""
        entry = self.table.get(tensor.untyped_storage()._cdata)
        if entry is None:
            entry = self.start(tensor, record, EarlierEntry)
            if covers_storage(tensor):
                return
            entry.node = None
        node = entry.node
        if node is not None:
            if entry.views is None and node.shape == tensor.shape and node.dtype == tensor.dtype:
                entry.node = record  # no other view was ever read
                return
            if covers_storage(tensor):
                entry.node = record
                entry.views = entry.more = None
                return
        key = geometry(tensor)
        views = self.views(entry, None) if node is not None else entry.views or {}
        more = entry.more = entry.more or More()
        more.twins.clear()
        entry.views = {other: seen for other, seen in views.items() if not _may_overlap(other, key)}
        entry.views[key] = record
        more.writes = [(other, seen) for other, seen in more.writes if other != key]
        more.writes.append((key, record))

    def lasting(self) -> Iterator[Record]:
        """What was written into memory that the program had before, and is there still."""
        for entry in list(self.table.values()):
            if isinstance(entry, EarlierEntry):
                written = [record for _, record in entry.more.writes] if entry.more is not None else []
                whole = [entry.node] if entry.node is not None else []
                if entry.views is not None:
                    current = set(entry.views.values())
                    written = [record for record in written if record in current]
                for record in whole + written:
                    yield from record.parents if record.bits & ALIAS else (record,)

    def distrust(self) -> None:
        """Storages may be written from now on without notice: read each again before its node is believed."""
        for entry in list(self.table.values()):
            if entry.node is not None:
                self.views(entry, None)
            entry.more = entry.more or More()
            entry.more.stale = True

    def _read_again(self, entry: Entry, views: dict[Geometry, Record], tensor: Tensor) -> Record:
        known = views.get(geometry(tensor))
        fresh = self._leaf(tensor)
        if known is not None and known.state == fresh.state:
            return known
        self.write(tensor, fresh)
        return fresh

    def _assemble(self, entry: Entry, key: Geometry, tensor: Tensor) -> Record:
        """The node of a region that no single node made."""
        more = entry.more
        wanted = [
            pair for pair in reversed(more.writes if more is not None else []) if _may_overlap(pair[0], key)
        ]
        base = entry.node
        if base is None and not wanted:
            record = self._leaf(tensor)
            more = entry.more = more or More()
            more.writes.append((key, record))
            return record
        parts = [node for _, node in wanted] + ([base] if base is not None else [])
        if len(parts) > 1 and any(part.bits & NONFINITE for part in parts):
            with unseen():
                parts = self._visible(tensor, key, wanted, base)
        record = self._merge(tensor, parts)
        if base is not None and covers_storage(tensor):
            # It stands for everything written so far: later reads need not look behind it.
            entry.node = record
            if more is not None:
                more.writes.clear()
        return record

    @staticmethod
    def _visible(
        tensor: Tensor, key: Geometry, writes: Sequence[tuple[Geometry, Record]], base: Record | None
    ) -> list[Record]:
        """Of the writes (newest first) those of which a cell of `tensor` is still to be seen."""
        size = tensor.untyped_storage().nbytes()
        if size > _LARGEST_MASK:
            return [node for _, node in writes] + ([base] if base is not None else [])
        missing = torch.zeros(size, dtype=torch.bool, device="cpu")
        _cells(missing, key).fill_(True)
        seen = []
        for region, node in writes:
            cells = _cells(missing, region)
            if bool(cells.any()):
                seen.append(node)
                cells.fill_(False)
        if base is not None and bool(missing.any()):
            seen.append(base)
        return seen


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


def _may_overlap(one: Geometry, other: Geometry) -> bool:
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
