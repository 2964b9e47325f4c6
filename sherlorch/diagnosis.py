"""Who is blamed: the walk back from a non-finite record over its non-finite ancestors. Knows no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sherlorch.graph import CONSTANT, CONSUMED, GRAPH, LEAF, Record, location_of, origin_of
from sherlorch.health import NAN, NONFINITE
from sherlorch.source import short

_MOST_SUSPECTS = 100
_MOST_CULPRITS = 1000
_MOST_STEPS = 1_000_000  # in all paths together; further ones are told by their ends
_STEPS_OF_AN_END = 20
_SKIPS_THE_STEP = "_amp_foreach_non_finite_check_and_unscale_"
_BLAMED = ("introduced", "outside", "uninitialised")


@dataclass
class Diagnosis:
    """Culprits in order of blame, and for each the way to the target."""

    target: Record
    culprits: list[Record] = field(default_factory=list)
    paths: dict[int, list[Record]] = field(default_factory=dict)
    causes: dict[int, list[Record]] = field(
        default_factory=dict
    )  # culprit.seq -> constants that it turned into damage
    left_out: int = 0  # culprits beyond those


def _born(record: Record) -> int:
    """State flags of what went bad here for a reason of its own."""
    return record.extra.born if record.extra is not None else 0


def _bad_parents(record: Record) -> list[Record]:
    return [parent for parent in record.parents if parent.bits & NONFINITE]


def _origins_of_nan(record: Record, bad: list[Record]) -> list[Record]:
    """Of the bad parents of a record that has NaN those it may be from."""
    with_nan = [parent for parent in bad if parent.bits & NAN]
    return with_nan if with_nan or _born(record) & NAN else bad


class _Walk:
    """The non-finite ancestors of a record, nearest first.

    With `nan_first` it asks at a record that has NaN where that is from; where it so passes over other bad
    parents it is `narrow`.
    """

    def __init__(self, target: Record, nan_first: bool) -> None:
        self.child: dict[Record, Record | None] = {target: None}
        self.stops: list[Record] = []
        self.narrow = False
        child, stops, queue = self.child, self.stops, deque([target])
        while queue:
            record = queue.popleft()
            bad = [parent for parent in record.parents if parent.bits & NONFINITE]
            asked = NONFINITE
            if nan_first and record.bits & NAN:
                asked = NAN
                if len(bad) != 1 or not bad[0].bits & NAN:
                    everything, bad = bad, _origins_of_nan(record, bad)
                    self.narrow = self.narrow or len(bad) < len(everything)
            if not bad or (record.extra is not None and record.extra.born & asked):
                stops.append(record)
            for parent in bad:
                if parent not in child:
                    child[parent] = record
                    queue.append(parent)

    def path(self, record: Record, limit: int) -> list[Record]:
        """From `record` to the target; of a path of more than `limit` records the beginning and the end."""
        path = [record]
        following = self.child[record]
        while following is not None:
            if len(path) >= limit:
                path.append(next(iter(self.child)))
                break
            path.append(following)
            following = self.child[following]
        return path

    def downstream(self, sources: Iterable[Record]) -> set[Record]:
        """Visited records that descend from `sources` (which are among them)."""
        reached = set(sources)
        if reached:
            for record in sorted(self.child, key=lambda record: record.seq):
                if record not in reached and not reached.isdisjoint(record.parents):
                    reached.add(record)
        return reached


def diagnose(target: Record) -> Diagnosis:
    """Culprits of `target`: first what the NaN walk reaches, then what the walk over every non-finite parent
    adds.

    Linear in the number of non-finite ancestors, without recursion.
    """
    diagnosis = Diagnosis(target)
    if not target.bits & NONFINITE:
        return diagnosis
    steps = _MOST_STEPS
    for nan_first in (True, False):
        walk = _Walk(target, nan_first)
        known = {culprit.seq for culprit in diagnosis.culprits}
        for culprit in sorted(_blame(walk, diagnosis), key=lambda record: record.seq):
            if culprit.seq in known:
                continue
            if len(diagnosis.culprits) >= _MOST_CULPRITS:
                diagnosis.left_out += 1
                continue
            path = walk.path(culprit, max(steps, _STEPS_OF_AN_END))
            steps -= len(path)
            diagnosis.culprits.append(culprit)
            diagnosis.paths[culprit.seq] = path
        if not walk.narrow:
            break
    return diagnosis


def _blame(walk: _Walk, diagnosis: Diagnosis) -> set[Record]:
    blamed = {record for record in walk.stops if _is_fault(record)}
    named = [record for record in walk.stops if record not in blamed]
    if not named:
        return blamed
    tainted = walk.downstream(blamed)
    damage = _Damage(walk, tainted)
    causes: dict[int, dict[Record, None]] = {}
    for constant in named:
        culprit = damage.done_by(constant)
        if culprit is None or culprit in tainted:
            continue
        if culprit is constant and damage.is_tainted(constant):
            continue  # the op on the way that went wrong by itself had absorbed it
        blamed.add(culprit)
        if culprit is not constant:
            causes.setdefault(culprit.seq, {})[constant] = None
    for seq, constants in causes.items():
        known = dict.fromkeys(diagnosis.causes.get(seq, ()))
        diagnosis.causes[seq] = list({**known, **constants})
    return blamed


class _Damage:
    """What becomes of the constants of a walk on their way to its target."""

    def __init__(self, walk: _Walk, tainted: set[Record]) -> None:
        self._child = walk.child
        self._converts: dict[Record, bool] = {}
        # For each record the first on its way, itself included, that has NaN, that combines, that is tainted.
        self._nan: dict[Record, Record | None] = {}
        self._combining: dict[Record, Record | None] = {}
        self._tainted: set[Record] = set()
        for record, child in walk.child.items():  # the target first, each child before its parents
            self._nan[record] = record if record.bits & NAN else self._nan.get(child)  # type: ignore[arg-type]
            further = self._combining.get(child)  # type: ignore[arg-type]
            self._combining[record] = record if record.facts.combines else further
            if record in tainted or child in self._tainted:
                self._tainted.add(record)

    def is_tainted(self, constant: Record) -> bool:
        """Does the way of a constant lead over an op that a fault reached?"""
        return constant in self._tainted

    def done_by(self, constant: Record) -> Record | None:
        """The node that made NaN of a constant, else the reduction that carried it out, else itself.

        None where something else brought the NaN. A NaN of the program does its damage where it is written.
        """
        child = self._child[constant]
        if constant.bits & NAN or child is None:
            return constant
        converter = self._nan[child]
        if converter is not None:
            if converter not in self._converts:
                self._converts[converter] = origin_of(converter) == "converted"
            return converter if self._converts[converter] else None
        return self._combining[child] or constant


def _is_fault(record: Record) -> bool:
    if record.extra is not None and (record.extra.born or (record.extra.mask and record.bits & LEAF)):
        return bool(record.extra.born)
    return origin_of(record) in _BLAMED


@dataclass(frozen=True)
class Sighting:
    """Something non-finite that is not blamed: a record, how often its line made the like, and why it is
    harmless."""

    record: Record
    count: int
    note: str


def also_seen(
    faults: Iterable[Record], diagnosis: Diagnosis | None, records: Sequence[Record], limit: int = 5
) -> list[Sighting]:
    """Origins of non-finite values other than the culprits, one for each line, with the op that absorbed
    them."""
    excluded: set[int] = set()
    if diagnosis is not None:
        excluded.update(culprit.call for culprit in diagnosis.culprits)
        excluded.update(record.seq for causes in diagnosis.causes.values() for record in causes)
    groups: dict[tuple[str, object, int], list[Record]] = {}
    for record in faults:
        if not record.bits & (LEAF | CONSTANT) and (
            record.facts.moves or any(parent.bits & NONFINITE for parent in record.parents)
        ):
            continue  # carried on
        origin = origin_of(record)
        if origin == "uninitialised" and record.extra is None:
            continue  # nobody read it
        if origin in (None, "propagated", "converted") or record.call in excluded or record.seq in excluded:
            continue
        groups.setdefault((record.facts.name, record.code, record.instruction), []).append(record)
    sightings = []
    for group in sorted(groups.values(), key=lambda group: group[0].seq)[:limit]:
        first = group[0]
        sightings.append(Sighting(first, len(group), _harmless_because(first, records)))
    return sightings


def _harmless_because(record: Record, records: Sequence[Record]) -> str:
    what = origin_of(record) or ""
    if what == "constant" or (record.extra is not None and record.extra.mask):
        what = "written on purpose" if record.bits & NAN else "a mask"
    absorber = _absorber(record, records)
    if absorber is None:
        return what
    where = location_of(absorber)
    return f"{what}, absorbed by {absorber.facts.base}" + (f" at {short(where)}" if where else "")


def _absorber(record: Record, records: Sequence[Record]) -> Record | None:
    """The first op that computed finite values from what `record` brought; None where none is known."""
    carried = {record}
    for later in _after(records, record.seq):
        if not carried.isdisjoint(later.parents):
            if later.bits & NONFINITE:
                carried.add(later)
            elif not later.facts.moves:
                return later
    return None


def _after(records: Sequence[Record], seq: int) -> Iterable[Record]:
    low, high = 0, len(records)
    while low < high:
        middle = (low + high) // 2
        if records[middle].seq <= seq:
            low = middle + 1
        else:
            high = middle
    return (records[i] for i in range(low, len(records)))


def earliest(
    faults: Iterable[Record], backward_seen: bool = True, state: Iterable[Record] = ()
) -> Record | None:
    """The first record at which something went wrong that was not absorbed later on; None where all is well.

    Nothing absorbs what stays in the program's `state`, its parameters and buffers. Where the backward pass
    was not seen, an absorbed fault that autograd differentiates through is suspect too.
    """
    ordered = sorted(faults, key=lambda record: record.seq)
    lasting = {record for record in state if _stays_bad(record)}
    for record in reversed(ordered):
        if not record.bits & CONSUMED or record in lasting:
            lasting.add(record)
            bad = _bad_parents(record)
            lasting.update(_origins_of_nan(record, bad) if record.bits & NAN and _born(record) else bad)
    wrong = [record for record in ordered if went_wrong(record) or _spreads(record)]
    for record in wrong:
        if record in lasting:
            return record
    if backward_seen:
        return None
    suspects = [record for record in ordered if record.bits & GRAPH][:_MOST_SUSPECTS]
    return next((record for record in suspects if any(map(went_wrong, diagnose(record).culprits))), None)


def _stays_bad(record: Record) -> bool:
    return bool(record.bits & NONFINITE) and not record.bits & LEAF and record.facts.base != _SKIPS_THE_STEP


def _spreads(record: Record) -> bool:
    """A NaN that the program wrote and then computed with; where that lasts it is no mask."""
    return bool(record.bits & NAN and record.bits & CONSTANT and record.bits & CONSUMED)


def went_wrong(record: Record) -> bool:
    """Does the record start or convert something bad, rather than carry it on or hold what was meant?"""
    if record.facts.uninitialised and record.extra is None:
        return False  # never read
    if record.bits & LEAF and not record.bits & CONSUMED:
        return False  # data that nothing computed with
    return _is_fault(record) or origin_of(record) == "converted"
