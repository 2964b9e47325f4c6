"""Who is blamed: the rule on records made by hand, and on programs."""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from needs import needs_filled_memory, needs_forward_lines
from torch import Tensor, nn

import sherlorch
from sherlorch import DiagnosisReport, ProvenanceTracker
from sherlorch.diagnosis import Diagnosis, also_seen, diagnose, earliest
from sherlorch.graph import CONSTANT, CONSUMED, FORWARD, GRAPH, LEAF, Extra, OpFacts, Record, Scope, origin_of
from sherlorch.health import INF, NAN

ADD, SUM, VIEW = (
    OpFacts("add", "add"),
    OpFacts("sum", "sum", combines=True),
    OpFacts("view", "view", moves=True),
)
FULL, EMPTY = OpFacts("full", "full", constant=True), OpFacts("empty", "empty", uninitialised=True)
ARGUMENT = OpFacts("leaf", "leaf", moves=True)
HERE = Scope(FORWARD)
WAYS = pytest.mark.parametrize(
    ("level", "defer"), [("function", False), ("function", True), ("aten", False), ("aten", True)]
)
LEVELS = pytest.mark.parametrize("level", ["function", "aten"])


class Records:
    """Makes records in the order of a program."""

    def __init__(self) -> None:
        self.all: list[Record] = []

    def __call__(
        self, bits: int, *parents: Record, facts: OpFacts = ADD, extra: Extra | None = None
    ) -> Record:
        seq = len(self.all) + 1
        record = Record(
            seq, seq, facts, (2,), "float32", "cpu", bits, parents, None, seq, HERE, None, None, extra
        )
        self.all.append(record)
        return record


@pytest.fixture
def record() -> Records:
    return Records()


def seqs(diagnosis: Diagnosis) -> list[int]:
    return [culprit.seq for culprit in diagnosis.culprits]


def test_a_finite_target_has_no_culprit(record: Records) -> None:
    bad = record(NAN)
    assert seqs(diagnose(record(0, bad))) == []


def test_the_first_bad_result_of_good_inputs_is_blamed(record: Records) -> None:
    good = record(0)
    culprit = record(NAN, good)
    target = record(NAN, record(NAN, culprit, facts=VIEW))
    diagnosis = diagnose(target)
    assert seqs(diagnosis) == [culprit.seq]
    assert [step.seq for step in diagnosis.paths[culprit.seq]] == [2, 3, 4]


def test_where_nan_came_in_goes_before_where_inf_came_in(record: Records) -> None:
    infinite = record(INF)
    nan = record(NAN)
    target = record(NAN, infinite, nan)
    assert seqs(diagnose(target)) == [nan.seq, infinite.seq]
    assert seqs(diagnose(record(INF, infinite, nan))) == [infinite.seq, nan.seq]


def test_within_a_rank_the_earlier_goes_first(record: Records) -> None:
    one, two, three = record(NAN), record(INF), record(NAN)
    assert seqs(diagnose(record(NAN, three, two, one))) == [one.seq, three.seq, two.seq]


def test_inf_turned_into_nan_is_traced_to_the_inf(record: Records) -> None:
    overflow = record(INF)
    converted = record(NAN, overflow)
    assert origin_of(converted) == "converted"
    assert seqs(diagnose(converted)) == [overflow.seq]


def test_origins(record: Records) -> None:
    assert origin_of(record(0)) is None
    assert origin_of(record(INF, record(0))) == "introduced"
    assert origin_of(record(INF | LEAF)) == "outside"
    assert origin_of(record(INF | LEAF | CONSTANT)) == "constant"
    assert origin_of(record(INF | CONSTANT, facts=FULL)) == "constant"
    assert origin_of(record(NAN, facts=EMPTY)) == "uninitialised"
    assert origin_of(record(INF, record(INF))) == "propagated"
    assert origin_of(record(INF, record(NAN))) == "propagated"
    assert origin_of(record(NAN, record(INF))) == "converted"
    assert origin_of(record(NAN, record(INF), record(NAN))) == "propagated"


@pytest.mark.parametrize(("bits", "facts"), [(INF | LEAF, ARGUMENT), (NAN, EMPTY)])
def test_leaves_and_unwritten_memory_are_culprits(record: Records, bits: int, facts: OpFacts) -> None:
    culprit = record(bits, facts=facts)
    assert seqs(diagnose(record(bits & (NAN | INF), culprit))) == [culprit.seq]


def test_a_constant_is_blamed_on_what_made_nan_of_it(record: Records) -> None:
    mask = record(INF | CONSTANT, facts=FULL)
    scores = record(INF, mask, record(0))
    softmax = record(NAN, scores)
    target = record(NAN, softmax, facts=SUM)
    diagnosis = diagnose(target)
    assert seqs(diagnosis) == [softmax.seq]
    assert diagnosis.causes[softmax.seq] == [mask]
    assert [step.seq for step in diagnosis.paths[softmax.seq]] == [softmax.seq, target.seq]


def test_a_constant_is_blamed_on_the_reduction_that_carries_it_out(record: Records) -> None:
    mask = record(INF | CONSTANT, facts=FULL)
    total = record(INF, record(INF, mask), facts=SUM)
    assert seqs(diagnose(record(INF, total))) == [total.seq]


def test_a_constant_that_simply_is_the_target_is_itself_to_blame(record: Records) -> None:
    mask = record(INF | CONSTANT, facts=FULL)
    assert seqs(diagnose(mask)) == [mask.seq]
    assert seqs(diagnose(record(INF, mask, facts=VIEW))) == [mask.seq]


def test_a_constant_beside_a_fault_is_not_blamed_for_the_faults_nan(record: Records) -> None:
    mask = record(INF | CONSTANT, facts=FULL)
    fault = record(NAN)
    target = record(NAN, mask, fault)
    assert seqs(diagnose(target)) == [fault.seq]


def test_a_mask_from_outside_acts_like_a_constant(record: Records) -> None:
    extra = Extra()
    extra.mask = True
    mask = record(INF | LEAF, facts=ARGUMENT, extra=extra)
    softmax = record(NAN, record(INF, mask))
    assert seqs(diagnose(softmax)) == [softmax.seq]


def test_what_went_bad_for_its_own_reason_is_a_culprit_too(record: Records) -> None:
    mask = record(INF | CONSTANT, facts=FULL)
    fault = record(NAN | INF, mask, extra=Extra(born=NAN))
    target = record(NAN, fault)
    assert seqs(diagnose(target)) == [fault.seq]
    other = record(NAN)
    both = record(NAN, other, extra=Extra(born=NAN))
    assert seqs(diagnose(both)) == [other.seq, both.seq]


def test_the_path_is_the_shortest(record: Records) -> None:
    culprit = record(NAN)
    far = record(NAN, record(NAN, culprit))
    target = record(NAN, far, culprit)
    assert diagnose(target).paths[culprit.seq] == [culprit, target]


def test_the_earliest_lasting_fault(record: Records) -> None:
    absorbed = record(INF | CONSUMED)
    healthy = record(0, absorbed)
    fault = record(NAN | CONSUMED)
    last = record(NAN, fault)
    assert earliest([absorbed, fault, last]) is fault
    assert earliest([absorbed]) is None
    assert earliest([]) is None
    assert healthy.state == 0


def test_an_absorbed_fault_is_suspect_where_the_backward_pass_is_not_seen(record: Records) -> None:
    absorbed = record(INF | CONSUMED | GRAPH)
    assert earliest([absorbed], backward_seen=True) is None
    assert earliest([absorbed], backward_seen=False) is absorbed


def test_constants_and_unread_memory_are_no_faults(record: Records) -> None:
    mask = record(INF | CONSTANT, facts=FULL)
    unread = record(NAN, facts=EMPTY)
    assert earliest([mask, unread]) is None


def test_also_seen_tells_who_absorbed_it(record: Records) -> None:
    mask = record(INF | CONSTANT, facts=FULL)
    scores = record(INF, mask)
    record(0, scores, facts=OpFacts("softmax", "softmax"))
    fault = record(NAN)
    sightings = also_seen([mask, scores, fault], diagnose(fault), record.all)
    assert [(s.record, s.count, s.note) for s in sightings] == [(mask, 1, "a mask, absorbed by softmax")]


# Size.


# Seconds. Python 3.9 and 3.10 are slower; what is not linear takes many minutes anywhere.
LONG = 2 if sys.version_info >= (3, 11) else 6


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


@pytest.fixture
def uncollected() -> Iterator[None]:
    """A million records are no garbage: the collector would look at them again and again."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_chain_of_a_million(record: Records, uncollected: None) -> None:
    last = record(NAN)
    for _ in range(1_000_000):
        last = record(NAN | CONSUMED, last)
    assert seconds(lambda: diagnose(last)) < LONG
    assert seqs(diagnose(last)) == [1]
    assert len(diagnose(last).paths[1]) == 1_000_001
    assert seconds(lambda: earliest(record.all)) < LONG


def test_a_million_side_by_side(record: Records, uncollected: None) -> None:
    source = record(INF | CONSUMED)
    target = record(NAN, *[record(NAN | CONSUMED, source) for _ in range(1_000_000)])
    assert seconds(lambda: diagnose(target)) < LONG
    assert seqs(diagnose(target)) == [1]
    assert seconds(lambda: earliest(record.all)) < LONG


@pytest.mark.parametrize(
    ("bits", "facts"), [(NAN, ADD), (INF, ADD), (INF | LEAF, ARGUMENT), (INF | CONSTANT, FULL)]
)
def test_a_new_cause_at_every_step(record: Records, bits: int, facts: OpFacts) -> None:
    last = record(bits, facts=facts)
    for _ in range(20_000):
        last = record(bits & (NAN | INF), last, record(bits, facts=facts))
    assert seconds(lambda: diagnose(last)) < LONG
    diagnosis = diagnose(last)
    assert diagnosis.culprits[0].seq == 1
    assert len(diagnosis.culprits) == 1000
    assert len(diagnosis.culprits) + diagnosis.left_out >= 20_000
    assert {path[-1] for path in diagnosis.paths.values()} == {last}
    assert sum(map(len, diagnosis.paths.values())) < 2_000_000


def test_many_masks_that_become_nan_in_one_op(record: Records) -> None:
    masks = [record(INF | CONSTANT, facts=FULL) for _ in range(20_000)]
    softmax = record(NAN, *masks)
    assert seconds(lambda: diagnose(softmax)) < LONG
    assert seqs(diagnose(softmax)) == [softmax.seq]
    assert diagnose(softmax).causes[softmax.seq] == masks


# Programs.


def trace(program: Callable[[], Tensor], level: str, defer: bool = False, **options) -> DiagnosisReport:
    with ProvenanceTracker(level, _defer=defer, **options) as tracker:
        result = program()
    return tracker.diagnose(result)


def names(report: DiagnosisReport) -> list[str]:
    return [
        name.split(".")[1].strip("_") if "." in name else name
        for name in (c.op_name for c in report.culprits)
    ]


def scores(mask: list[list[bool]]) -> Tensor:
    return torch.ones(2, 2).masked_fill(torch.tensor(mask), -math.inf)


@WAYS
def test_a_mask_that_softmax_absorbs(level: str, defer: bool) -> None:
    with ProvenanceTracker(level, _defer=defer) as tracker:
        weights = torch.softmax(scores([[True, False], [False, False]]), -1)
        out = weights @ torch.ones(2)
    assert tracker.diagnose(out).ok
    report = tracker.diagnose()
    assert report.ok
    assert len(report.also_seen) == 1
    assert "masked_fill" in report.also_seen[0]
    assert "absorbed by" in report.also_seen[0]
    assert "softmax" in report.also_seen[0]


@WAYS
def test_a_row_that_is_masked_altogether(level: str, defer: bool) -> None:
    report = trace(lambda: torch.softmax(scores([[True, True], [False, True]]), -1).sum(), level, defer)
    assert names(report) == ["softmax"]
    assert report.culprits[0].origin == "converted"
    (cause,) = report.causes[report.culprits[0].seq]
    assert cause.origin == "constant"
    assert "masked_fill" in str(report)


FIRST = torch.tensor([[True, False], [False, False]])
MASK = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
BATCH = torch.tensor([1.0, math.nan, 2.0])


@WAYS
def test_a_mask_that_was_built_outside(level: str, defer: bool) -> None:
    report = trace(lambda: torch.softmax(torch.ones(2, 2) + MASK, -1), level, defer)
    assert names(report) == ["softmax"]


@WAYS
def test_zero_times_a_constant_infinity(level: str, defer: bool) -> None:
    report = trace(lambda: torch.full((2,), math.inf) * torch.zeros(2), level, defer)
    assert names(report) == ["mul"]
    assert report.culprits[0].origin == "converted"


@WAYS
def test_constants_that_simply_are_the_value(level: str, defer: bool) -> None:
    assert names(trace(lambda: torch.full((2,), math.inf), level, defer)) == ["full"]
    assert names(trace(lambda: torch.full((2,), math.inf).view(1, 2), level, defer)) == ["full"]
    assert names(trace(lambda: torch.full((2,), math.inf).sum(), level, defer)) == ["sum"]


@WAYS
def test_overflow_that_becomes_nan(level: str, defer: bool) -> None:
    def program() -> Tensor:
        large = torch.exp(torch.tensor([1.0, 1000.0]))
        return (large - large).view(2, 1).sum()

    report = trace(program, level, defer)
    assert names(report) == ["exp"]
    assert "sub [Inf -> NaN]" in str(report)


@WAYS
def test_a_bad_batch_is_called_by_its_line(level: str, defer: bool) -> None:
    report = trace(lambda: (BATCH.view(3, 1).t() * 2).sum(), level, defer)
    (culprit,) = report.culprits
    assert culprit.origin == "outside"
    assert "BATCH.view(3, 1)" in str(report)


@WAYS
def test_a_bad_parameter_is_called_by_its_name(level: str, defer: bool) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    with ProvenanceTracker(level, _defer=defer) as tracker:
        tracker.watch(model)
        out = model(torch.ones(2))
    (culprit,) = tracker.diagnose(out).culprits
    assert (culprit.origin, culprit.name, culprit.module_path) == (
        "outside", "parameter model.weight", "model",
    )  # fmt: skip


@pytest.fixture
def bad_memory() -> Iterator[None]:
    """Memory of `empty` is full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@needs_filled_memory
@WAYS
def test_memory_that_is_read_before_it_is_written(level: str, defer: bool, bad_memory: None) -> None:
    report = trace(lambda: (torch.empty(3) + 1).sum(), level, defer)
    (culprit,) = report.culprits
    assert culprit.origin == "uninitialised"
    assert "uninitialised" in str(report)


@needs_filled_memory
@WAYS
def test_memory_that_is_written_in_time(level: str, defer: bool, bad_memory: None) -> None:
    with ProvenanceTracker(level, _defer=defer) as tracker:
        whole, part, target = torch.empty(3), torch.empty(2, 3), torch.empty(3)
        whole.fill_(1.0)
        part[0].copy_(whole)
        torch.add(whole, 1, out=target)
        results = [whole + 1, part[0] + 1, target * 2]
        unread = torch.empty(5)
    assert all(tracker.diagnose(result).ok for result in results)
    assert tracker.diagnose().ok
    assert tracker.diagnose(unread).culprits[0].origin == "uninitialised"
    with tracker:
        forgotten = part.sum()
    assert tracker.diagnose(forgotten).culprits[0].origin == "uninitialised"


@WAYS
@pytest.mark.parametrize(
    "heal",
    [
        lambda x: torch.nan_to_num(x),
        lambda x: torch.where(x.isnan(), torch.zeros(2), x),
        lambda x: x.masked_fill(x.isnan(), 0.0),
        lambda x: x.nan_to_num_(),
        lambda x: x.fill_(1.0),
        lambda x: torch.nanmean(x).clone(),
    ],
    ids=["nan_to_num", "where", "masked_fill", "in place", "overwritten", "nanmean"],
)
def test_values_that_healed(level: str, defer: bool, heal: Callable[[Tensor], Tensor]) -> None:
    with ProvenanceTracker(level, _defer=defer) as tracker:
        healed = heal(torch.log(torch.tensor([-1.0, 1.0])))
        out = healed.sum() * 2
    assert tracker.diagnose(out).ok
    assert tracker.diagnose().ok


@WAYS
def test_two_faults_that_meet(level: str, defer: bool) -> None:
    def program() -> Tensor:
        return torch.log(torch.tensor([-1.0])) + torch.ones(1) / torch.zeros(1)

    report = trace(program, level, defer)
    assert names(report) == ["log", "div"]
    for culprit in report.culprits:
        assert report.paths[culprit.seq][0] == culprit
        assert report.paths[culprit.seq][-1] == report.target


@LEVELS
def test_a_mask_and_a_fault_in_one_tensor(level: str) -> None:
    def forward() -> Tensor:
        values = torch.tensor([[4.0, 4.0], [1.0, -1.0]])
        return torch.sqrt(values.masked_fill(FIRST, math.inf))

    report = trace(forward, level)
    assert names(report)[0] == "sqrt"


@needs_forward_lines
def test_a_mask_and_a_fault_in_one_gradient() -> None:
    with sherlorch.trace(level="aten") as tracker:
        x = torch.tensor([[1.0, 2.0], [0.0, 4.0]], requires_grad=True)
        y = torch.sqrt(x)
        y.masked_fill(FIRST, -math.inf).exp().sum().backward()
    report = tracker.diagnose(x.grad)
    assert report.culprits[0].forward.op_name == "aten.sqrt.default"
    assert report.culprits[0].phase == "backward"


@needs_forward_lines
@LEVELS
def test_the_culprit_of_a_gradient_is_the_backward_of_an_op(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        x = torch.zeros(2, requires_grad=True)
        loss = torch.sqrt(x).sum()
        loss.backward()
    assert tracker.diagnose(loss).ok
    if level == "aten":
        (culprit,) = tracker.diagnose(x.grad).culprits
        assert (culprit.phase, culprit.forward.op_name, culprit.autograd_node) == (
            "backward", "aten.sqrt.default", "SqrtBackward0",
        )  # fmt: skip


# Bounded memory.


def living_records() -> int:
    gc.collect()
    return sum(type(thing) is Record for thing in gc.get_objects())


def training(steps: int, learning_rate: float = 0.01) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)

    def run() -> Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
        return loss

    return run


@WAYS
def test_healthy_steps_leave_nothing_behind(level: str, defer: bool) -> None:
    warm_up, steps = training(160), training(80)
    with ProvenanceTracker(level, keep="nonfinite", _defer=defer) as tracker:
        warm_up()
        before = living_records()
        steps()
        steps()
        # Late states wait in numbers, and what waits keeps its inputs.
        assert living_records() < (12_000 if defer else before + 50)
        bad = torch.log(torch.zeros(1) - 1) + 1
    assert names(tracker.diagnose(bad)) == ["log"]
    assert names(tracker.diagnose()) == ["log"]


@LEVELS
def test_poisoned_steps_stay_bounded(level: str) -> None:
    with ProvenanceTracker(level, keep="nonfinite") as tracker:
        total = torch.log(torch.zeros(1) - 1)
        for _ in range(300):
            total = total * 2
        before = living_records()
        for _ in range(3000):
            total = total * 2
        assert living_records() < before + 100
    report = tracker.diagnose(total)
    assert names(report) == ["log"]
    assert report.paths[report.culprits[0].seq][-1] == tracker.node(total)
