"""One element of one op's output is corrupted below the tracer, anywhere in a real training step: the first
culprit is that very call.

`SHERLORCH_INJECTIONS=300 pytest tests/test_injection.py` tries as many in each program instead of a few.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from models import PROGRAMS, Program, make_program
from needs import needs_forward_lines, needs_fused
from stand_in import stand_in
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

import sherlorch
from sherlorch import DiagnosisReport, OpNode, ProvenanceTracker
from sherlorch.compat import NUMBERS_NODES
from sherlorch.ops import Law, law_of_call

INJECTIONS = int(os.environ.get("SHERLORCH_INJECTIONS", "12"))
SEED = int(os.environ.get("SHERLORCH_SEED", "0"))
LEVELS = ["aten", "function"]
UNSEEN = "tensor that was written where the tracer did not look"
_NOT_THE_USERS = {"torch", "sherlorch", "contextlib", "functools", "test_injection"}
_STATISTICS = ("running_mean", "running_var")


@dataclass
class Call:
    """One call as a mode below the tracer sees it."""

    number: int
    op: str
    occurrence: int  # which of the calls of this op it is
    phase: str
    line: str | None  # the user's, of the forward op if this is a backward kernel
    autograd: str | None  # "SqrtBackward0"
    places: list[int]  # which of the tensors that it wrote or made can be corrupted
    moves: bool  # only moves values: the tracer looks at the result only if asked to look at all


@dataclass
class Fault:
    """What was done to a call."""

    call: Call
    place: int
    index: tuple[int, ...]
    value: float
    fast: bool  # did the tracer trust the ops that only move values?

    def __str__(self) -> str:
        call, way = self.call, "fast" if self.fast else "thorough"
        return (
            f"{self.value} into {call.op} [{call.occurrence}] of {call.phase} at {call.line}, "
            f"tensor {self.place}{list(self.index)}, {way}: "
        )


@dataclass
class Injector:
    """Lists the calls of a program that make tensors and corrupts one element of what call `number` made."""

    number: int = -1
    rng: random.Random = field(default_factory=random.Random)
    phase: str = "forward"
    calls: list[Call] = field(default_factory=list)
    fault: tuple[Call, int, tuple[int, ...], float] | None = None
    _seen: dict[str, int] = field(default_factory=dict)

    def enter(self, phase: str) -> None:
        self.phase = phase

    def saw(self, op: str, made: Sequence[Tensor | None], frame: Any, moves: bool) -> None:
        """`made`: what the call wrote, then what it made; None in place of what is no site of a fault."""
        if not made:
            return
        self._seen[op] = self._seen.get(op, 0) + 1
        phase, line = _where(frame, self.phase)
        node = torch._C._current_autograd_node() if phase == "backward" else None
        if node is not None and line is None:
            line = _line_of_traceback(node.metadata.get("traceback_", ()))
        autograd = node.name().rpartition("::")[2] if node is not None else None
        places = [place for place, tensor in enumerate(made) if tensor is not None]
        call = Call(len(self.calls), op, self._seen[op], phase, line, autograd, places, moves)
        self.calls.append(call)
        if call.number == self.number:
            place = self.rng.choice(places)
            tensor = made[place]
            assert tensor is not None
            self.fault = (call, place, *_corrupt(tensor, self.rng))


class BelowAten(TorchDispatchMode):
    """Shows an injector every call of an aten overload."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self.injector = injector

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        moves = law_of_call(func, args, kwargs) in (Law.PERMUTES, Law.SELECTS)
        self.injector.saw(
            str(func), list(_made_by_overload(func, args, kwargs, out)), sys._getframe(1), moves
        )
        return out


class BelowFunctions(TorchFunctionMode):
    """Shows an injector every call of a torch function."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self.injector = injector

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            moves = law_of_call(func, args, kwargs) in (Law.PERMUTES, Law.SELECTS)
            made = list(_made_by_function(func, args, kwargs, out))
        self.injector.saw(getattr(func, "__name__", str(func)), made, sys._getframe(1), moves)
        return out


def _made_by_overload(func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[Tensor | None]:
    name = func._schema.name.partition("::")[2]
    named = dict(zip((argument.name for argument in func._schema.arguments), args), **kwargs)
    written: list[Tensor] = []
    for argument in func._schema.arguments:
        marked = argument.alias_info is not None and argument.alias_info.is_write
        unmarked = name == "native_batch_norm" and argument.name in _STATISTICS and named["training"]
        if marked or unmarked:
            written += _tensors(named.get(argument.name))
    memory = _memory_of((args, kwargs))
    raw = "empty" in name or name.startswith("resize")
    for tensor in written:
        yield None if raw or not _can_go_bad(tensor) else tensor
    for tensor in _tensors(out):
        if not any(tensor is argument for argument in written):
            yield None if raw or not _can_go_bad(tensor) or _is_view(tensor, memory) else tensor


def _made_by_function(func: Any, args: Any, kwargs: Any, out: Any) -> Iterator[Tensor | None]:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "requires_grad_", "tensor", "as_tensor"):  # attributes, data of the program
        return
    memory, given = _memory_of((args, kwargs)), _tensors((args, kwargs))
    written = _tensors(kwargs.get("out")) + _tensors(args[:1] if name.endswith("_") else ())
    for tensor in _tensors(out):
        if any(tensor is argument for argument in written):
            yield tensor if _can_go_bad(tensor) else None
        elif not any(tensor is argument for argument in given):
            yield None if "empty" in name or not _can_go_bad(tensor) or _is_view(tensor, memory) else tensor


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]


def _memory_of(values: Any) -> set[int]:
    strided = [tensor for tensor in _tensors(values) if tensor.layout is torch.strided]
    return {tensor.untyped_storage()._cdata for tensor in strided}


def _is_view(tensor: Tensor, memory: set[int]) -> bool:
    return tensor.untyped_storage()._cdata in memory


def _can_go_bad(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    return bool(tensor.detach().isfinite().any())


def _corrupt(tensor: Tensor, rng: random.Random) -> tuple[tuple[int, ...], float]:
    """Put NaN or an infinity in place of one finite element, behind autograd's back."""
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        values = tensor.data
        places = values.isfinite().nonzero().tolist()
        clean = len(places) == values.numel()
        place = tuple(rng.choice(places))
        value = rng.choice([math.nan, math.inf, -math.inf]) if clean else math.nan
        values[place] = value
    return place, value


ENTERS = "torch.autograd.graph" if hasattr(torch.autograd.graph, "_engine_run_backward") else "torch.autograd"


def _where(frame: Any, phase: str) -> tuple[str, str | None]:
    """Phase and the user's line, found by walking up from the call; no line for a kernel of the engine."""
    line, recomputes, prepares = None, False, False
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        prepares = prepares or frame.f_code.co_name == "_make_grads"  # the engine is yet to be entered
        if module == ENTERS and not prepares:  # from here the engine was entered
            return "recompute" if line is not None and recomputes else "backward", line
        recomputes = recomputes or module == "torch.utils.checkpoint"
        if line is None and module.partition(".")[0] not in _NOT_THE_USERS:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ("optimizer" if phase == "optimizer" else "forward"), line


def _line_of_traceback(lines: Sequence[str]) -> str | None:
    """The innermost line of the user in the traceback that anomaly mode keeps of a forward op."""
    for text in reversed(lines):
        found = re.match(r'\s*File "(.+?)", line (\d+), in', text)
        if found is not None and not re.search(r"/torch/|/sherlorch/|/(contextlib|functools)\.py", found[1]):
            return None if "test_injection" in found[1] else f"{found[1]}:{found[2]}"
    return None


BELOW = {"aten": BelowAten, "function": BelowFunctions}


def warmed(name: str, warm: int) -> Program:
    """The program after `warm` steps: the first step makes the optimizer's state."""
    program = make_program(name, SEED)
    for _ in range(warm):
        program.step()
    return program


def calls_of(name: str, warm: int, level: str) -> list[Call]:
    """Every call of one training step, untraced, with the forward line of each backward kernel."""
    program, injector = warmed(name, warm), Injector()
    with torch.autograd.set_detect_anomaly(True, check_nan=False), BELOW[level](injector), stand_in(level):
        program.step(injector.enter)
    return injector.calls


def trial(name: str, warm: int, level: str, call: Call, rng: random.Random) -> str:
    """Corrupt one call and ask for the culprit; returns what is wrong with the answer, or nothing."""
    program, injector = warmed(name, warm), Injector(call.number, rng)
    fast = not call.moves or rng.random() < 0.5
    loss = None
    with (
        BELOW[level](injector),
        sherlorch.trace(level=level, fast_shape_ops=fast) as tracker,
        contextlib.suppress(RuntimeError, ValueError, IndexError),  # the program may choke on what it got
    ):
        loss = program.step(injector.enter)
    assert injector.fault is not None, f"{name}: {call} was never reached"
    seen, *done = injector.fault
    fault = Fault(call, *done, fast)
    if (seen.op, seen.occurrence, seen.phase) != (call.op, call.occurrence, call.phase):
        return f"{name}: {fault}{seen} was there when traced"
    return "; ".join([f"{name}: {fault}{problem}" for problem in _problems(tracker, program, loss, fault)])


def _problems(
    tracker: ProvenanceTracker, program: Program, loss: Tensor | None, fault: Fault
) -> Iterator[str]:
    first = {node.call: node for node in tracker.nodes if node.op_name == fault.call.op}
    number = list(first)[fault.call.occurrence - 1]
    nodes = [node for node in tracker.nodes if node.call == number]
    node = (
        nodes[fault.place]
        if tracker.level == "aten"
        else next((n for n in nodes if not n.is_finite), nodes[0])
    )
    inherited = fault.fast and node.inherited
    if node.is_finite and not inherited:
        yield f"its node is finite: {node.summary()}"
    targets = [("loss", loss)] if loss is not None else []
    targets += [
        (name, tensor) for name, tensor in program.tensors() if not _is_gradient_unseen(name, tracker)
    ]
    bad = [(name, tensor) for name, tensor in targets if not bool(tensor.detach().isfinite().all())]
    for name, tensor in bad:
        yield from _wrong(tracker.diagnose(tensor), f"diagnose({name})", node, fault)
    report = tracker.diagnose()
    if (bad and not inherited) or not report.ok:
        yield from _wrong(report, "diagnose()", node, fault)
    if report.coverage.not_seen:
        yield f"not all was seen: {report.coverage}"


def _is_gradient_unseen(name: str, tracker: ProvenanceTracker) -> bool:
    return tracker.level == "function" and name.endswith(".grad")


def _wrong(report: DiagnosisReport, asked: str, node: OpNode, fault: Fault) -> Iterator[str]:
    call = fault.call
    if report.ok:
        yield f"{asked} finds nothing"
        return
    culprit = report.culprits[0]
    if node.inherited and fault.fast:  # the next op that computes with it found it out
        in_place = culprit.op_name.split(".")[-2:][0].endswith("_")  # nobody knows what it overwrote
        unseen = culprit.name == UNSEEN or culprit.op_name == "backward"  # absorbed before anyone looked
        if not unseen and not in_place:
            yield f"{asked} blames {culprit.summary()} instead of what happened to {node.summary()}"
        return
    for other in report.culprits[1:]:
        if other.seq > node.seq:  # what came before is the program's own
            yield f"{asked} blames {other.summary()} as well"
    if culprit != node:
        yield f"{asked} blames {culprit.summary()} instead of {node.summary()}"
        return
    harmless = any(not parent.is_finite for parent in node.parents)  # an input with a masked infinity, say
    if culprit.origin != "introduced" and not harmless:
        yield f"{asked} says origin {culprit.origin}"
    if culprit.phase != call.phase and call.op.startswith("aten."):
        yield f"{asked} says phase {culprit.phase}"
    knows_forward = call.autograd is None or NUMBERS_NODES  # torch 2.0 does not tell the forward op
    if (
        call.line is not None
        and knows_forward
        and call.autograd != "AccumulateGrad"
        and culprit.location != call.line
    ):
        yield f"{asked} says {culprit.location}"
    if call.autograd is not None and culprit.autograd_node != call.autograd:
        yield f"{asked} says {culprit.autograd_node} for {call.autograd}"
    if call.autograd not in (None, "AccumulateGrad") and call.line is not None and knows_forward:
        forward = culprit.forward
        if forward is None or not _belongs(forward.op_name, call.autograd):
            yield f"{asked} says forward {forward and forward.op_name} for {call.autograd}"
    if culprit.evidence is None or culprit.evidence.index != fault.index:
        yield f"{asked} has evidence {culprit.evidence}"


def _belongs(op: str, autograd: str) -> bool:
    """Is `op` ("aten.mul.Tensor") the forward of `autograd` ("MulBackward0")?"""
    base = op.split(".")[1].strip("_").replace("_", "").lower()
    node = re.sub(r"Backward\d*$", "", autograd).lower()
    return base in node or node in base or node in ("copyslices", "asstrided")  # any in-place op on a view


def trials(name: str, level: str, count: int, rng: random.Random) -> Iterator[str]:
    """Half of them in a first step, half in a second one."""
    for warm in (0, 1):
        sites = [call for call in calls_of(name, warm, level) if call.places]
        for call in rng.sample(sites, min(count // 2, len(sites))):
            yield trial(name, warm, level, call, rng)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Tensors this small are not worth a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_the_first_culprit_is_the_corrupted_call(name: str, level: str) -> None:
    count = INJECTIONS if level == "aten" else INJECTIONS // 2
    wrong = [problem for problem in trials(name, level, count, random.Random(SEED)) if problem]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_answer_would_be_noticed() -> None:
    call = next(call for call in calls_of("vae", 0, "aten") if call.op == "aten.exp.default")
    program, injector = warmed("vae", 0), Injector(call.number, random.Random(0))
    with BelowAten(injector), sherlorch.trace(level="aten") as tracker:
        loss = program.step(injector.enter)
    assert injector.fault is not None
    fault = Fault(call, *injector.fault[1:], fast=True)
    report = tracker.diagnose(loss)
    (culprit,) = report.culprits
    assert not list(_wrong(report, "", culprit, fault))
    assert list(_wrong(report, "", culprit.parents[0], fault))
    assert list(_wrong(tracker.diagnose(program.batch["x"]), "", culprit, fault))
    for change in ({"line": "models.py:1"}, {"phase": "backward"}, {"autograd": "ExpBackward0"}):
        assert list(_wrong(report, "", culprit, replace(fault, call=replace(call, **change))))
    assert list(_wrong(report, "", culprit, replace(fault, index=(9, 9))))


# Kinds of faults that long runs got wrong once.


@needs_forward_lines
def test_the_forward_op_of_a_write_is_the_write_and_not_the_copy_that_autograd_makes_for_it() -> None:
    w = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
    with sherlorch.trace(level="aten") as tracker:
        x = torch.ones(3)
        x.mul_(w)
        x.pow_(2.5)
        x.sum().backward()
    pairs = {(node.autograd_node, node.forward.op_name) for node in tracker.nodes if node.forward is not None}
    assert pairs == {
        ("MulBackward0", "aten.mul_.Tensor"),
        ("PowBackward0", "aten.pow_.Scalar"),
        ("SumBackward0", "aten.sum.default"),
    }


@needs_forward_lines
def test_the_line_of_a_write_to_a_view_is_its_own() -> None:
    w = torch.zeros(3, requires_grad=True)
    with sherlorch.trace(level="aten") as tracker:
        board = torch.zeros(2, 3)
        board[0].add_(w).sqrt_()  # the slope is infinite
        loss = board.mul(3).sum()
        loss.backward()
    (culprit,) = tracker.diagnose(w.grad).culprits
    assert culprit.phase == "backward"
    assert _text(culprit.location) == "board[0].add_(w).sqrt_()  # the slope is infinite"


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_may_be_read_as_well(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        x = torch.zeros(2) / 0
        torch.maximum(x, torch.ones(2), out=x)
    assert [_base(culprit) for culprit in tracker.diagnose(x).culprits] == ["div"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_number_read_out_of_a_tensor_carries_its_fault(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        scale = (torch.zeros(2) / 0).mean().item()
        y = torch.ones(2) * scale
        z = torch.tensor([1.0, scale]).sum()
        mask = torch.ones(3).masked_fill(torch.tensor([True, False, False]), float("-inf")).softmax(0)
    for bad in (y, z):
        assert [_base(culprit) for culprit in tracker.diagnose(bad).culprits] == ["div"]
    assert tracker.diagnose(mask).ok


@pytest.mark.parametrize("level", LEVELS)
def test_a_buffer_gone_bad_is_not_forgotten_because_something_absorbed_it(level: str) -> None:
    scale = torch.ones(3)
    with sherlorch.trace(level=level) as tracker:
        scale.mul_(torch.tensor([1.0, 1.0, 0.0]).reciprocal())
        y = torch.ones(3) / scale
    assert tracker.diagnose(y).ok
    assert [_base(culprit) for culprit in tracker.diagnose().culprits] == ["reciprocal"]


@pytest.mark.parametrize("level", LEVELS)
def test_an_infinity_that_becomes_an_integer_is_absorbed(level: str) -> None:
    distance = torch.arange(4)
    with sherlorch.trace(level=level) as tracker:  # as T5 sorts distances into buckets
        far = torch.log(distance.float()).to(torch.long)
        bucket = torch.where(distance < 2, distance, far)
        loss = torch.ones(4)[bucket.clamp(max=3)].sum()
    assert tracker.diagnose().ok
    assert tracker.diagnose(loss).ok


@pytest.mark.parametrize("level", LEVELS)
def test_a_write_behind_the_back_is_found_where_it_is_asked_for(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        x = torch.ones(3).clone()
        x.numpy()[1] = math.nan
    report = tracker.diagnose(x)
    assert [(culprit.name, culprit.origin) for culprit in report.culprits] == [(UNSEEN, "outside")]


@pytest.mark.parametrize("level", LEVELS)
def test_a_healthy_ctc_loss_has_no_fault(level: str) -> None:
    logits = torch.linspace(-1, 1, 70).view(7, 2, 5).requires_grad_()
    with sherlorch.trace(level=level, on_nonfinite="raise") as tracker:
        loss = torch.nn.functional.ctc_loss(
            logits.log_softmax(-1), torch.tensor([[1, 2], [3, 3]]), torch.tensor([7, 5]), torch.tensor([2, 1])
        )
        loss.backward()
    assert tracker.diagnose().ok


@pytest.mark.parametrize(
    "options",
    [pytest.param({"fused": True}, marks=needs_fused), {"foreach": True}, {"foreach": False}],
    ids=str,
)
def test_function_level_sees_every_kind_of_optimizer_step(options: dict[str, bool]) -> None:
    for below in (contextlib.nullcontext(), BelowAten(Injector())):
        p = torch.ones(3, requires_grad=True)
        optimizer = torch.optim.AdamW([p], **options)
        with below, sherlorch.trace(level="function") as tracker:
            loss = (p / torch.tensor([0.0, 1.0, 1.0])).sum()
            loss.backward()
            optimizer.step()
        assert [_base(culprit) for culprit in tracker.diagnose(p).culprits] == ["div"]


def test_function_level_reads_accumulated_gradients_again() -> None:
    p = torch.ones(3, requires_grad=True)
    with sherlorch.trace(level="function") as tracker:
        (p * 2).sum().backward()
        norm = p.grad.norm()
        (p / torch.tensor([0.0, 1.0, 1.0])).sum().backward()
        p.grad.mul_(2)
        worse = p.grad.norm()
    assert tracker.diagnose(norm).ok
    assert [_base(culprit) for culprit in tracker.diagnose(worse).culprits] == ["div"]


def _base(node: OpNode) -> str:
    return node.op_name.split(".")[-2:][0].strip("_")


def _text(location: str | None) -> str:
    path, _, line = (location or "").rpartition(":")
    return linecache.getline(path, int(line)).strip()
