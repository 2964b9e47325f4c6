"""Tracing changes no result and no random number, keeps nothing alive and leaves nothing behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import PROGRAMS, Program, make_program
from needs import has_torch
from stand_in import stand_in
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sherlorch
from sherlorch import ProvenanceTracker
from sherlorch.compat import get_sequence_nr

LEVELS = ["aten", "function"]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "thorough": {"fast_shape_ops": False},
    "bounded": {"keep": "nonfinite", "capture_stack": False},
    "deferred": {"_defer": True},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums are added up in one order only, and tensors this small are not worth more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def poisoned(program: Program) -> Program:
    """With faults of many kinds from the start: one bad weight is enough."""
    with torch.no_grad():
        next(program.model.parameters()).view(-1)[3] = float("nan")
        list(program.model.parameters())[-1].view(-1)[0] = float("inf")
    return program


# Results.


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def outcome(program: Program, tracker: ProvenanceTracker | None, steps: int = 2) -> dict[str, Any]:
    """Everything that a few steps leave behind, to the bit."""
    left: dict[str, Any] = {}
    start = get_sequence_nr()
    for number in range(steps):
        if tracker is None:
            loss = program.step()
        else:
            with tracker.watch(program.model):
                loss = program.step()
                tracker.diagnose()
        left[f"loss {number}"] = bits(loss)
    left["random numbers"] = bits(torch.get_rng_state())
    left["autograd nodes made"] = get_sequence_nr() - start
    for name, tensor in program.tensors():
        left[name] = bits(tensor)
        if tracker is None or tracker.level == "function":  # any dispatch mode changes how these are counted
            left[f"version of {name}"] = tensor._version
    for number, state in enumerate(program.optimizer.state.values()):
        left.update({f"{key} {number}": bits(v) for key, v in state.items() if isinstance(v, Tensor)})
    return left


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    different = [name for name in found if found[name] != wanted.get(name)]
    assert found.keys() >= {name for name in wanted if not name.startswith("version of")}
    assert not different, different


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_result_and_no_random_number_changes(name: str, level: str) -> None:
    wanted = outcome(make_program(name), None)
    for options in VARIANTS.values():
        assert_same(outcome(make_program(name), ProvenanceTracker(level, **options)), wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_result_changes_while_faults_are_examined(name: str, level: str) -> None:
    wanted = outcome(poisoned(make_program(name)), None)
    for options in VARIANTS.values():
        tracker = ProvenanceTracker(level, **options)
        assert_same(outcome(poisoned(make_program(name)), tracker), wanted)
        assert not tracker.diagnose().ok


# What other modes see.


class Dispatched(TorchDispatchMode):
    """Lists the aten calls that reach it, and holds what they return weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.made: list[tuple[int, weakref.ref[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for result in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(result, Tensor):
                self.made.append((len(self.calls), weakref.ref(result)))
        self.calls.append(str(func))
        return out

    def alive(self) -> list[str]:
        return [f"{number} {self.calls[number]}" for number, tensor in self.made if tensor() is not None]


class Called(TorchFunctionMode):
    """Lists the torch functions that reach it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Torch 2.0 shows the overloads that the mode above calls for an index, which itself it does not show.
        if has_torch("2.1") or not isinstance(func, OpOverload):
            self.calls.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "poisoned"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mode_further_out_sees_the_program_alone(name: str, level: str, bad: bool) -> None:
    prepare = poisoned if bad else lambda program: program
    seen = []
    for traced in (False, True):
        program = prepare(make_program(name))
        tracing = sherlorch.trace(level=level) if traced else stand_in(level)
        with Dispatched() as dispatched, Called() as called, tracing:
            program.step()
        seen.append((dispatched.calls, called.calls))
    assert seen[1][0] == seen[0][0]
    assert seen[1][1] == seen[0][1]


# Lifetimes.


def lives(program: Program, level: str, tracker: ProvenanceTracker | None = None) -> list[list[str]]:
    """Which of the tensors that a step makes are alive after each of its phases, no garbage collected."""
    stages = []
    gc.disable()
    try:
        with Dispatched() as below, stand_in(level) if tracker is None else tracker:
            program.step(lambda phase: stages.append(below.alive()))
            stages.append(below.alive())
    finally:
        gc.enable()
    if tracker is not None:
        tracker.diagnose()
    stages.append(below.alive())
    owned = [weakref.ref(tensor) for _, tensor in program.tensors()]
    program.model, program.batch, program.optimizer = nn.Module(), {}, None  # type: ignore[assignment]
    gc.collect()
    stages.append([str(tensor()) for tensor in owned if tensor() is not None])
    stages.append(below.alive())
    return stages


@pytest.fixture
def _little_garbage() -> Iterator[None]:
    """What was there before need not be gone through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "poisoned"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("_little_garbage")
def test_tensors_die_when_they_would_have_died(name: str, level: str, bad: bool) -> None:
    prepare = poisoned if bad else lambda program: program
    wanted = lives(prepare(make_program(name)), level)
    assert wanted[-1] == wanted[-2] == []
    for options in VARIANTS.values():
        tracker = ProvenanceTracker(level, **options)
        assert lives(prepare(make_program(name)), level, tracker) == wanted
        assert tracker.diagnose().ok is (not bad)


# What is left behind.


def standing(model: nn.Module) -> dict[str, Any]:
    """Every hook, mode and switch that a trace could have left changed."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    own = {
        f"{key} of {name}": len(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if "_hooks" in key
    }
    tensors = {f"hooks of {name}": len(p._backward_hooks or ()) for name, p in model.named_parameters()}
    everywhere = {
        key: len(value)
        for place in (modules, optimizers)
        for key, value in vars(place).items()
        if key.startswith("_global_") and "hooks" in key
    }
    assert everywhere
    return {
        **own,
        **tensors,
        **everywhere,
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
    }


class Stop(BaseException):
    """Not an Exception: like a KeyboardInterrupt."""


def _stop(*_: Any) -> None:
    raise Stop


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("where", ["nowhere", "forward", "backward", "optimizer"])
def test_no_hook_and_no_mode_is_left_behind(where: str, level: str) -> None:
    program = make_program("cnn")
    before = standing(program.model)
    tracker = sherlorch.trace(level=level, on_nonfinite="warn")
    stops = []
    if where == "forward":
        stops = [program.model.block[2].register_forward_hook(_stop)]
    elif where == "backward":
        stops = [program.model.head.weight.register_hook(_stop)]
    elif where == "optimizer":
        stops = [program.optimizer.register_step_post_hook(_stop)]
    try:
        with tracker:
            tracker.watch(program.model)
            assert standing(program.model) != before
            program.step()
    except Stop:
        assert stops
    else:
        assert not stops
    for stop in stops:
        stop.remove()
    assert standing(program.model) == before
    nodes = len(tracker.nodes)
    program.step()
    assert len(tracker.nodes) == nodes
    with tracker:
        program.step()
    assert [node.phase for node in tracker.nodes[nodes:]].count("forward") > 10
    assert tracker.diagnose().ok


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_of_an_op_passes_through(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        x = torch.ones(3)
        with pytest.raises(RuntimeError, match="size"):
            x + torch.ones(4)
        with pytest.raises(RuntimeError, match="size"):
            x.add_(torch.ones(4))
        y = x / 0
    assert [culprit.location for culprit in tracker.diagnose(y).culprits] == [tracker.node(y).location]
    assert tracker.diagnose(x).ok
    assert not tracker.diagnose().coverage.not_seen


# Blocks in blocks, blocks after blocks.


def summaries(tracker: ProvenanceTracker) -> list[tuple[Any, ...]]:
    """All of it but the states: what raw memory holds is chance."""
    return [
        (
            node.seq,
            node.call,
            node.op_name,
            node.shape,
            node.phase,
            node.location,
            [p.seq for p in node.parents],
        )
        for node in tracker.nodes
    ]


@pytest.mark.parametrize("outer", LEVELS)
@pytest.mark.parametrize("inner", LEVELS)
@pytest.mark.parametrize("name", ["gpt2", "in_place", "checkpointed"])
def test_nested_traces_each_see_what_they_see_alone(name: str, outer: str, inner: str) -> None:
    alone = []
    noticed = stand_in(inner) if outer == "aten" else nullcontext()
    for level, further_in in ((outer, noticed), (inner, nullcontext())):
        program = poisoned(make_program(name))
        with sherlorch.trace(level=level) as tracker, further_in:
            program.step()
        alone.append(summaries(tracker))
    program = poisoned(make_program(name))
    with sherlorch.trace(level=outer) as first, sherlorch.trace(level=inner) as second:
        program.step()
    assert [summaries(first), summaries(second)] == alone


@pytest.mark.parametrize("level", LEVELS)
def test_a_trace_in_itself_counts_once(level: str) -> None:
    tracker = sherlorch.trace(level=level)
    before = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    with tracker:
        with tracker:
            x = torch.zeros(3)
        y = x / x
    assert (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()) == before
    assert [node.op_name.split(".")[-2:][0] for node in tracker.nodes] in (["zeros", "div"], ["leaf", "div"])
    assert tracker.diagnose(y).culprits == [tracker.node(y)]


@pytest.mark.parametrize("level", LEVELS)
def test_one_tracker_over_several_blocks_and_steps(level: str) -> None:
    program = make_program("in_place")
    tracker = sherlorch.trace(level=level)
    counts = []
    for _ in range(3):
        before = len(tracker.nodes)
        with tracker:
            program.step()
        counts.append(len(tracker.nodes) - before)
        assert tracker.diagnose().ok
    assert counts[1] == counts[2]
    weight = program.model.leave.weight
    with torch.no_grad():
        weight[0, 0] = float("nan")  # between two blocks: nobody looks
    with tracker:
        loss = program.step()
    (culprit,) = tracker.diagnose(loss).culprits
    assert (culprit.origin, culprit.shape) == ("outside", tuple(weight.shape))


@pytest.mark.parametrize("level", LEVELS)
def test_disable_enable_and_reset(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        x = torch.ones(3)
        tracker.disable()
        unseen = x / 0
        x.mul_(float("inf"))
        tracker.enable()
        y = x - 1
        with pytest.raises(KeyError):
            tracker.node(unseen)
        (culprit,) = tracker.diagnose(y).culprits
        assert culprit.origin == "outside"
        tracker.reset()
        assert not tracker.nodes
        with pytest.raises(KeyError):
            tracker.node(y)
        z = torch.ones(2).log() / torch.zeros(2)
        assert [c.op_name.split(".")[-2:][0] for c in tracker.diagnose(z).culprits] == ["div"]


# Threads.


@pytest.mark.parametrize("level", LEVELS)
def test_each_thread_sees_its_own(level: str) -> None:
    names = ["cnn", "in_place", "vae", "checkpointed"]
    alone = {}
    for name in names:
        program = make_program(name)
        with sherlorch.trace(level=level) as tracker:
            tracker.watch(program.model)
            program.step()
        alone[name] = [(n.op_name, n.shape, n.phase, n.location, n.module_path) for n in tracker.nodes]
    programs = {name: make_program(name) for name in names}
    barrier, seen, problems = threading.Barrier(len(names)), {}, []

    def work(name: str) -> None:
        try:
            program = programs[name]
            barrier.wait(60)
            for _ in range(4):
                with sherlorch.trace(level=level) as tracker:
                    tracker.watch(program.model)
                    program.step()
                seen.setdefault(name, []).append(tracker)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    for name in names:
        first, *others = seen[name]
        assert [(n.op_name, n.shape, n.phase, n.location, n.module_path) for n in first.nodes] == alone[name]
        assert {len(tracker.nodes) for tracker in others} != set()
        assert all(tracker.diagnose().ok for tracker in seen[name])


def test_a_thread_without_a_trace_is_not_seen() -> None:
    model = nn.Linear(2, 2)
    program = make_program("cnn")
    with sherlorch.trace(level="aten") as tracker:
        tracker.watch(model)
        x = model(torch.ones(1, 2))
        thread = threading.Thread(target=lambda: (program.step(), model(torch.ones(1, 2))))
        thread.start()
        thread.join()
        with torch.no_grad():
            y = x * 2
    assert tracker.node(y).phase == "forward"
    assert len(tracker.nodes) < 12
