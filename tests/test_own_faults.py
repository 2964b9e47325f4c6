"""Whatever fails inside a traced block fails as it would untraced, and leaves no hook or mode behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import sherlorch
from sherlorch.tracers import dispatch, function
from sherlorch.tracers.ledger import Ledger
from sherlorch.tracers.recorder import Recorder
from sherlorch.tracers.writes import Writing

LEVELS = ("function", "aten")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Modes and global hooks are what they were before the test."""
    before = left_behind()
    yield
    assert left_behind() == before


def left_behind() -> tuple[Any, ...]:
    return (
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
        len(optimizers._global_optimizer_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


def module_hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
        for module in model.modules()
    )


class Wrong(Exception):
    pass


def fails_in_code(model: nn.Module, x: Tensor) -> None:
    model(x)
    raise Wrong("code")


def is_interrupted(model: nn.Module, x: Tensor) -> None:
    model(x)
    raise KeyboardInterrupt


def fails_in_module_hook(model: nn.Module, x: Tensor) -> None:
    def hook(*_: Any) -> None:
        raise Wrong("hook")

    handle = model[1].register_forward_hook(hook)
    try:
        model(x)
    finally:
        handle.remove()


def fails_in_gradient_hook(model: nn.Module, x: Tensor) -> None:
    def hook(gradient: Tensor) -> None:
        raise Wrong("gradient hook")

    y = model(x)
    y.register_hook(hook)
    y.sum().backward()


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Wrong("backward")


def fails_in_backward(model: nn.Module, x: Tensor) -> None:
    Broken.apply(model(x)).sum().backward()


def fails_in_an_op(model: nn.Module, x: Tensor) -> None:
    model(x) @ torch.ones(7, 7)


def fails_in_a_write(model: nn.Module, x: Tensor) -> None:
    model(x).detach().add_(torch.ones(7, 7))


def fails_in_an_optimizer(model: nn.Module, x: Tensor) -> None:
    class Stops(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise Wrong("step")

    Stops(model.parameters(), lr=0.1).step()


FAILURES = (
    fails_in_code,
    is_interrupted,
    fails_in_module_hook,
    fails_in_gradient_hook,
    fails_in_backward,
    fails_in_an_op,
    fails_in_a_write,
    fails_in_an_optimizer,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_an_exception_comes_out_as_untraced_and_nothing_stays(
    failure: Callable[..., None], level: str
) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(BaseException) as untraced:  # noqa: PT011 - whatever it is
        failure(net(), x)
    model = net()
    tracker = sherlorch.trace(level=level)
    with pytest.raises(type(untraced.value)) as traced, tracker:  # noqa: PT012
        tracker.watch(model)
        failure(model, x)
    assert str(traced.value) == str(untraced.value)
    assert module_hooks(model) == 0
    # The trace can be used on, and the next step of an optimizer is the first again.
    with tracker:
        loss = torch.log(model(x) * 0).sum()
    report = tracker.diagnose(loss)
    assert report.culprits[0].op_name in ("log", "aten.log.default")
    assert report.culprits[0].phase == "forward"
    assert report.coverage.unseen == {}


def test_an_exception_caught_inside_the_block_leaves_the_trace_whole(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        for failure in FAILURES:
            with pytest.raises(BaseException):  # noqa: B017, PT011
                failure(net(), torch.ones(2, 3))
        loss = torch.log(torch.zeros(3)).sum()
    report = tracker.diagnose(loss)
    assert report.culprits[0].op_name in ("log", "aten.log.default")
    assert report.culprits[0].phase == "forward"
    assert report.coverage.unseen == {}


def training_step(model: nn.Sequential) -> list[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    buffer = torch.zeros(2, 2)
    out = torch.empty(2, 2)
    for _ in range(2):
        y = model(torch.ones(2, 3))
        buffer.add_(y.detach())[0].mul_(3)
        torch.mul(buffer, 2, out=out)
        buffer[0] = 1
        loss = (y.softmax(-1).log() + torch.cat([y, y])[:2]).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [buffer, out, loss.detach(), *(parameter.detach() for parameter in model.parameters())]


PLANTS: list[tuple[Any, str]] = [
    (Recorder, "record"),
    (Recorder, "add_results"),
    (Recorder, "add_result"),
    (Recorder, "add_write"),
    (Recorder, "node_of"),
    (Recorder, "where"),
    (Recorder, "tie"),
    (Recorder, "gather"),
    (Recorder, "inputs"),
    (Recorder, "copy"),
    (Ledger, "leaf"),
    (Ledger, "settle"),
    (Writing, "__init__"),
    (Writing, "finish"),
    (function, "plan_function"),
    (dispatch, "plan_overload"),
]


@pytest.mark.parametrize(("owner", "name"), PLANTS, ids=lambda plant: getattr(plant, "__name__", plant))
def test_a_fault_of_the_recorder_is_counted_and_the_program_goes_on(
    owner: Any, name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = training_step(net())
    planted = 0

    def plant(*_: Any, **__: Any) -> Any:
        nonlocal planted
        planted += 1
        raise RuntimeError("planted")

    for module in (function, dispatch):
        monkeypatch.setattr(module, "_PLANS", {True: {}, False: {}})
    monkeypatch.setattr(owner, name, plant)
    with sherlorch.trace(level=level) as tracker:
        actual = training_step(net())
    monkeypatch.undo()
    assert all(torch.equal(left, right) for left, right in zip(expected, actual))
    counted = sum(count for text, count in tracker.diagnose().coverage.unseen.items() if "planted" in text)
    assert (counted > 0) == (planted > 0)
    if planted:
        assert f"{counted} not seen" in str(tracker.diagnose())


def test_a_fault_of_the_recorder_loses_one_call_only(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder.record

    def plant(self: Recorder, plan: Any, *rest: Any) -> None:
        if "sqrt" in plan.name:
            raise RuntimeError("planted")
        record(self, plan, *rest)

    monkeypatch.setattr(Recorder, "record", plant)
    with sherlorch.trace(level=level) as tracker:
        x = torch.full((3,), -1.0).sqrt()
        loss = x.sum()
    report = tracker.diagnose(loss)
    assert not report.ok
    assert report.culprits[0].origin == "outside"  # not blamed on the sum
    assert len(report.coverage.unseen) == 1
    assert "1 not seen" in str(report)


def test_a_callback_raising_on_a_fault_is_the_only_exception_of_ours(level: str) -> None:
    with pytest.raises(sherlorch.NonFiniteError), sherlorch.trace(level=level, on_nonfinite="raise"):
        torch.zeros(3).log()


@pytest.mark.parametrize("level", ["function", "aten"])
def test_what_a_call_wrote_before_it_failed_is_seen(level):
    with sherlorch.trace(level=level) as tracker:
        one, two = torch.ones(3), torch.ones(1).expand(3)
        with pytest.raises(RuntimeError, match="single memory location"):
            torch._foreach_div_([one, two], [torch.zeros(()), torch.ones(())])
        total = one.sum()
    assert tracker.node(one).has_inf == bool(torch.isinf(one).any())
    assert tracker.diagnose(total).ok == bool(torch.isfinite(total))
    if not tracker.diagnose(total).ok:
        assert "_foreach_div_" in tracker.diagnose(total).culprits[0].op_name
