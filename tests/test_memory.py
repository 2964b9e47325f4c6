"""Which node a tensor is: random programs of views and writes, each of whose nodes tells the truth."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from needs import skip_unseen_parts
from torch import Tensor

import sherlorch
from sherlorch import ProvenanceTracker


def copy_one_by_one(targets, sources) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source)


copy_each = getattr(torch, "_foreach_copy_", copy_one_by_one)  # torch 2.1

NAN, INF = math.nan, math.inf
MOST_TENSORS = 10

LEVELS = pytest.mark.parametrize("level", ["function", "aten"])
WAYS = [
    pytest.param({"level": level, **options}, id="-".join([level, *options]))
    for level in ("function", "aten")
    for options in ({}, {"_defer": True}, {"keep": "nonfinite"}, {"fast_shape_ops": False})
]


class Program:
    """Tensors that live, numbers that choose, and values to write."""

    def __init__(self, tracker: ProvenanceTracker, values: tuple[float, ...], outside: list[Tensor]) -> None:
        self.tracker = tracker
        self.pool: list[Tensor] = []
        self.values = values
        self.outside = outside
        self.numbers: list[int] = []
        self.used = 0

    def number(self, bound: int) -> int:
        """The next choice out of `bound`."""
        self.used += 1
        return self.numbers[(self.used - 1) % len(self.numbers)] % max(bound, 1)

    def value(self) -> float:
        return self.values[self.number(len(self.values))]

    def any(self) -> Tensor:
        return self.pool[self.number(len(self.pool))]

    def fits(self, test: Callable[[Tensor], bool]) -> Tensor | None:
        found = [tensor for tensor in self.pool if test(tensor)]
        return found[self.number(len(found))] if found else None

    def floats(self) -> Tensor:
        found = self.fits(lambda tensor: tensor.dtype is torch.float32)
        return found if found is not None else self.fresh()

    def like(self, tensor: Tensor) -> Tensor:
        """Another tensor of the same shape and dtype if there is one."""
        found = self.fits(lambda other: other.shape == tensor.shape and other.dtype == tensor.dtype)
        return found if found is not None else tensor

    def matrix(self) -> Tensor:
        found = self.fits(
            lambda tensor: tensor.dtype is torch.float32 and tensor.dim() == 2 and tensor.numel() > 0
        )
        return found if found is not None else self.fresh()

    def fresh(self) -> Tensor:
        return torch.full((4, 6), 1.5)

    def dim(self, tensor: Tensor) -> int:
        return self.number(tensor.dim())

    def run(self, step: Callable[[Program], Tensor | None], numbers: list[int]) -> None:
        self.numbers, self.used = numbers, 0
        try:
            made = step(self)
        except (RuntimeError, IndexError, ValueError):
            return  # torch refuses it: nothing happened
        if isinstance(made, Tensor) and all(made is not tensor for tensor in self.pool):
            self.pool.append(made)
        if len(self.pool) > MOST_TENSORS:
            del self.pool[self.number(MOST_TENSORS)]


def part_of(p: Program, tensor: Tensor) -> Tensor:
    """A view of some of it."""
    if tensor.dim() == 0:
        return tensor
    dim = p.dim(tensor)
    size = tensor.shape[dim]
    kind = p.number(4)
    if kind == 0:
        return tensor.select(dim, p.number(size))
    start = p.number(size)
    if kind == 1:
        return tensor.narrow(dim, start, 1 + p.number(size - start))
    if kind == 2 and tensor.dim() == 2:
        return tensor[:, start % tensor.shape[1] :: 2]
    return tensor[start::2]


# Each step is one thing that a program may do. It returns a tensor that lives on, or None.


def make(p: Program) -> Tensor:
    return p.fresh()


def make_literal(p: Program) -> Tensor:
    return torch.tensor([[p.value(), 1.0, 2.0], [p.value(), 0.0, -1.0]])


def make_complex(p: Program) -> Tensor:
    return torch.full((2, 3), 0.5, dtype=torch.complex64)


def use_outside(p: Program) -> Tensor:
    tensor = p.outside[p.number(len(p.outside))]
    _ = tensor + 1
    return tensor


def use_part_of_outside(p: Program) -> Tensor:
    part = part_of(p, p.outside[p.number(len(p.outside))])
    _ = part * 1
    return part


def empty_partly_written(p: Program) -> Tensor:
    memory = torch.empty(3, 4)
    column = memory[:, p.number(4)]
    column.fill_(p.value())
    return column


def view_part(p: Program) -> Tensor:
    return part_of(p, p.any())


def transpose(p: Program) -> Tensor:
    return p.matrix().t()


def flatten(p: Program) -> Tensor:
    return p.any().reshape(-1)


def expand(p: Program) -> Tensor:
    return p.any().unsqueeze(0).expand(2, *([-1] * p.pool[0].dim()))


def diagonal(p: Program) -> Tensor:
    return p.matrix().diagonal()


def same_view(p: Program) -> Tensor:
    tensor = p.any()
    return tensor.view(tensor.shape)


def detach(p: Program) -> Tensor:
    return p.any().detach()


def data(p: Program) -> Tensor:
    return p.any().data


def as_strided(p: Program) -> Tensor:
    tensor = p.floats()
    return tensor.as_strided((2, 2), (p.number(3), 1), p.number(tensor.storage_offset() + 2))


def bits(p: Program) -> Tensor:
    return p.floats().view(torch.int32)


def halves(p: Program) -> Tensor:
    return p.floats().view(torch.float16)


def from_bits(p: Program) -> Tensor | None:
    tensor = p.fits(lambda tensor: tensor.dtype is torch.int32)
    return tensor.view(torch.float32) if tensor is not None else None


def real_parts(p: Program) -> Tensor | None:
    tensor = p.fits(Tensor.is_complex)
    return torch.view_as_real(tensor) if tensor is not None else None


def imaginary(p: Program) -> Tensor | None:
    tensor = p.fits(Tensor.is_complex)
    return tensor.imag if tensor is not None else None


def conjugate(p: Program) -> Tensor | None:
    tensor = p.fits(Tensor.is_complex)
    return tensor.conj() if tensor is not None else None


def halve_and_add(p: Program) -> Tensor:
    tensor = p.floats()
    return tensor * 0.25 + p.like(tensor) * 0.25


def clone(p: Program) -> Tensor:
    return p.any().clone()


def join(p: Program) -> Tensor:
    tensor = p.floats()
    return torch.cat([tensor.reshape(-1), p.like(tensor).reshape(-1)])[:12]


def choose(p: Program) -> Tensor:
    tensor = p.floats()
    return torch.where(tensor > 0, tensor, p.like(tensor))


def cast(p: Program) -> Tensor:
    return p.floats().double().float()


def average(p: Program) -> Tensor:
    return p.matrix().mean(p.number(2))


def fill(p: Program) -> None:
    p.any().fill_(p.value())


def fill_part(p: Program) -> None:
    part_of(p, p.any()).fill_(p.value())


def fill_bits(p: Program) -> None:
    tensor = p.fits(lambda tensor: tensor.dtype is torch.int32)
    if tensor is not None:
        part_of(p, tensor).fill_((0, 1, 0x3F800000)[p.number(3)] if NAN not in p.values else 0x7FC00000)


def zero(p: Program) -> None:
    part_of(p, p.any()).zero_()


def copy(p: Program) -> None:
    tensor = p.any()
    tensor.copy_(p.like(tensor))


def copy_part(p: Program) -> None:
    part = part_of(p, p.any())
    part.copy_(p.like(part))


def copy_shifted(p: Program) -> None:
    tensor = p.floats()
    tensor[1:].copy_(tensor[:-1])


def assign(p: Program) -> None:
    tensor = p.floats()
    if tensor.dim():
        tensor[p.number(tensor.shape[0])] = p.value()


def assign_masked(p: Program) -> None:
    tensor = p.floats()
    tensor[tensor > 1] = p.value()


def assign_indexed(p: Program) -> None:
    tensor = p.matrix()
    tensor[torch.tensor([0]), torch.tensor([p.number(tensor.shape[1])])] = torch.tensor(p.value())


def accumulate(p: Program) -> None:
    tensor = p.matrix()
    tensor.index_put_((torch.tensor([0, 0]),), tensor[:1].clone() * 0.25, accumulate=True)


def fill_index(p: Program) -> None:
    tensor = p.matrix()
    tensor.index_fill_(p.number(2), torch.tensor([0]), p.value())


def fill_mask(p: Program) -> None:
    tensor = p.floats()
    tensor.masked_fill_(tensor == 0, p.value())


def copy_index(p: Program) -> None:
    tensor = p.matrix()
    tensor.index_copy_(0, torch.tensor([tensor.shape[0] - 1]), tensor[:1].clone())


def fill_diagonal(p: Program) -> None:
    p.matrix().fill_diagonal_(p.value())


def add_in_place(p: Program) -> None:
    part = part_of(p, p.floats())
    part.mul_(0.25).add_(p.like(part), alpha=0.25)


def heal(p: Program) -> None:
    part_of(p, p.floats()).nan_to_num_(0.0, 1.0, -1.0)


def out_of_add(p: Program) -> None:
    target = p.floats()
    torch.add(p.like(target) * 0.25, 0.5, out=target)


def out_of_part(p: Program) -> None:
    part = part_of(p, p.floats())
    torch.mul(p.like(part), 0.25, out=part)


def out_resized(p: Program) -> Tensor:
    source = p.floats()
    target = torch.empty(0)
    torch.mul(source, 0.5, out=target)
    return target


def foreach_scale(p: Program) -> None:
    torch._foreach_mul_([p.floats(), part_of(p, p.floats())], 0.25)


def foreach_copy(p: Program) -> None:
    tensor = p.floats()
    copy_each([tensor, torch.zeros(2)], [p.like(tensor), torch.ones(2)])


def foreach_new(p: Program) -> Tensor:
    return torch._foreach_mul([p.floats(), p.floats()], 0.25)[p.number(2)]


def set_data(p: Program) -> None:
    tensor = p.floats()
    tensor.data = p.like(tensor)


def set_data_to_new(p: Program) -> None:
    tensor = p.floats()
    tensor.data = tensor.data * 0.5


def set_storage(p: Program) -> None:
    tensor = p.floats()
    tensor.set_(p.floats())


def resize_smaller(p: Program) -> None:
    tensor = p.floats()
    tensor.resize_(max(tensor.numel() // 2, 1))


def swap_rows(p: Program) -> None:
    tensor = p.matrix()
    tensor[[0, -1]] = tensor[[-1, 0]]


def forget(p: Program) -> None:
    if len(p.pool) > 2:
        del p.pool[p.number(len(p.pool))]


def write_unseen(p: Program) -> None:
    p.tracker.disable()
    try:
        part_of(p, p.floats()).fill_(p.value())
    finally:
        p.tracker.enable()


def look_away(p: Program) -> None:
    p.tracker.disable()
    p.tracker.enable()


STEPS = [
    make, make_literal, make_complex, use_outside, use_part_of_outside, empty_partly_written, view_part,
    transpose, flatten, expand, diagonal, same_view, detach, data, as_strided, bits, halves, from_bits,
    real_parts, imaginary, conjugate, halve_and_add, clone, join, choose, cast, average, fill, fill_part,
    fill_bits, zero, copy, copy_part, copy_shifted, assign, assign_masked, assign_indexed, accumulate,
    fill_index, fill_mask, copy_index, fill_diagonal, add_in_place, heal, out_of_add, out_of_part,
    out_resized, foreach_scale, foreach_copy, foreach_new, set_data, set_data_to_new, set_storage,
    resize_smaller, swap_rows, forget, write_unseen, look_away,
]  # fmt: skip

numbers = st.lists(st.integers(0, 11), min_size=6, max_size=6)
programs = st.lists(st.tuples(st.sampled_from(STEPS), numbers), min_size=1, max_size=25)
bounded = settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


def truth(tensor: Tensor) -> tuple[bool, bool]:
    values = tensor.detach().clone()
    if values.dtype not in (torch.float32, torch.float16, torch.complex64):
        return False, False
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return bool(torch.isnan(values).any()), bool(torch.isinf(values).any())


def outside_tensors(value: float) -> list[Tensor]:
    """Made before the trace; several lie on one storage, which no one of them fills or fills once."""
    bad, flat = torch.ones(4, 6), torch.zeros(30)
    bad[1, 2] = flat[20] = value
    return [
        torch.ones(4, 6),
        bad,
        flat[3:27].view(4, 6),
        flat,
        flat[:6].expand(5, 6),
        bad[2:],
        bad[:, 2],
        bad.t(),
    ]


def assert_truth(tracker: ProvenanceTracker, program: Program, done: list[str]) -> None:
    with tracker_off(tracker):
        wanted = [truth(tensor) for tensor in program.pool]
    for tensor, (nan, inf) in zip(program.pool, wanted):
        node = tracker.node(tensor)
        assert (node.has_nan, node.has_inf) == (nan, inf), (
            f"{node} is said to be {node.has_nan, node.has_inf} but {tensor} is {nan, inf} after {done}"
        )


class tracker_off:
    """Looks that are no part of the program; `disable` would make the tracker read everything afresh."""

    def __init__(self, tracker: ProvenanceTracker) -> None:
        self.tracker = tracker

    def __enter__(self) -> None:
        self.tracker._mode.enabled = False

    def __exit__(self, *_: object) -> None:
        self.tracker._mode.enabled = True


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@pytest.mark.parametrize("options", WAYS)
@bounded
@given(steps=programs, ask_each_time=st.booleans())
def test_every_node_tells_the_truth_after_each_step(options, steps, ask_each_time) -> None:
    skip_unseen_parts(options["level"])
    tracker = ProvenanceTracker(**options)
    program = Program(tracker, (0.0, 1.5, -2.0, INF, NAN, -INF), outside_tensors(NAN))
    done = []
    with tracker:
        program.pool += [torch.full((4, 6), 1.0), torch.full((2, 3), 2.0)]
        for step, chosen in steps:
            program.run(step, chosen)
            done.append(step.__name__)
            if ask_each_time:
                assert_truth(tracker, program, done)
        assert_truth(tracker, program, done)
    assert not tracker._recorder.unseen


# Faults: nothing else in these programs makes a NaN or Inf.


def log_of_negative(p: Program) -> Tensor:
    return torch.log(-p.floats().abs() - 1)


def log_of_part_in_place(p: Program) -> None:
    part = part_of(p, p.floats())
    part.abs_().add_(1).neg_().log_()


def divide_into_out(p: Program) -> None:
    part = part_of(p, p.floats())
    torch.div(part, torch.zeros(()), out=part)


def divide_elements(p: Program) -> None:
    one, two = part_of(p, p.floats()), p.floats()
    torch._foreach_div_([one, two], [torch.zeros(()), torch.ones(())])


def root_into_new(p: Program) -> Tensor:
    return torch.sqrt(p.floats().abs().neg() - 1, out=torch.empty(0))


FAULTS = {
    log_of_negative: "log",
    log_of_part_in_place: "log",
    divide_into_out: "div",
    divide_elements: "div",
    root_into_new: "sqrt",
}
BITWISE = (bits, halves, from_bits, fill_bits)  # these read other numbers than were written
quiet_programs = st.lists(
    st.tuples(st.sampled_from([s for s in STEPS if s not in BITWISE]), numbers), max_size=12
)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@pytest.mark.parametrize("options", WAYS)
@bounded
@given(before=quiet_programs, fault=st.sampled_from(list(FAULTS)), chosen=numbers, after=quiet_programs)
def test_whatever_holds_a_planted_fault_names_it(options, before, fault, chosen, after) -> None:
    skip_unseen_parts(options["level"])
    tracker = ProvenanceTracker(**options)
    program = Program(tracker, (0.0, 1.5, -2.0), outside_tensors(2.0))
    with tracker:
        program.pool += [torch.full((4, 6), 1.0), torch.full((2, 3), 2.0)]
        for step, numbers in [*before, (fault, chosen), *after]:
            program.run(step, numbers)
    done = [step.__name__ for step, _ in [*before, (fault, chosen), *after]]
    for tensor in program.pool:
        report = tracker.diagnose(tensor)
        assert report.ok == (not any(truth(tensor)))
        if report.ok:
            continue
        names = {
            culprit.op_name.split(".")[-2 if options["level"] == "aten" else -1]
            for culprit in report.culprits
        }
        names = {name.replace("_foreach_", "").rstrip("_") for name in names}
        assert names == {FAULTS[fault]}, f"{done}\n{report}"
        for culprit in report.culprits:
            path = report.paths[culprit.seq]
            assert (path[0], path[-1]) == (culprit, tracker.node(tensor))
            assert all(one in two.parents for one, two in zip(path, path[1:]))


# Single cases.


@LEVELS
def test_bits_of_integers_are_read_as_numbers(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        x = torch.zeros(4)
        x.view(torch.int32)[1:].fill_(0x7FC00000)
        assert tracker.node(x).has_nan
        half = x.view(torch.float16)
        x.fill_(1.5)
        x.view(torch.int32)[0].fill_(0x00007C00)
        assert tracker.node(half).has_inf
        assert tracker.node(x).is_finite


@LEVELS
def test_a_part_that_was_seen_says_nothing_of_the_whole(level: str) -> None:
    whole = torch.ones(4, 4)
    whole[3, 3] = NAN
    part, repeated = whole[:2], whole.view(-1)[:4].expand(4, 4)
    with sherlorch.trace(level=level) as tracker:
        assert torch.isfinite(part + 1).all()
        assert torch.isfinite(repeated + 1).all()
        product = whole * 2
    assert tracker.node(part).is_finite
    assert tracker.node(repeated).is_finite
    (culprit,) = tracker.diagnose(product).culprits
    assert culprit.origin == "outside"


@LEVELS
def test_many_rows_written_one_by_one(level: str) -> None:
    skip_unseen_parts(level)
    with sherlorch.trace(level=level) as tracker:
        x = torch.zeros(1000, 2)
        for row in range(1000):
            x[row] = torch.ones(2) * row
        assert max(len(entry.views or ()) for entry in tracker._recorder.table.values()) <= 64
        x[500] = torch.log(torch.zeros(2))
        total = x.sum()
    assert tracker.node(x).has_inf
    (culprit,) = tracker.diagnose(total).culprits
    assert culprit.op_name in ("log", "aten.log.default")


@LEVELS
def test_what_is_copied_onto_itself_has_its_old_origin(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        x = torch.log(torch.zeros(4) - 1)
        x.copy_(x)
        x[1:].copy_(x[:-1].clone())
        torch.mul(x, 0.5, out=x)
        copy_each([x], [x])
    (culprit,) = tracker.diagnose(x).culprits
    assert culprit.op_name in ("log", "aten.log.default")


@LEVELS
def test_a_copy_from_beside_does_not_keep_what_it_overwrites(level: str) -> None:
    skip_unseen_parts(level)
    with sherlorch.trace(level=level) as tracker:
        x = torch.zeros(6)
        x[:3] = torch.log(torch.zeros(3) - 1)
        x[3:] = torch.ones(3) / torch.zeros(3)
        x[:3].copy_(x[3:])
    assert tracker.node(x).has_inf
    names = [
        culprit.op_name.split(".")[-2 if level == "aten" else -1] for culprit in tracker.diagnose(x).culprits
    ]
    # `x[:3] = ...` is a write of all of `x` at function level.
    assert names == (["div"] if level == "aten" else ["log", "div"])
