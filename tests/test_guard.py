"""A guarded step is a plain step until it goes wrong; then nothing is written, and it is explained."""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from needs import needs_eager_compiled, needs_scaler
from torch import Tensor, nn

import sherlorch
from sherlorch import Guard, NonFiniteError, NonFiniteWarning
from sherlorch.guard.guard import FALLS
from sherlorch.guard.look import all_finite

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine cost these small models more than all else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Dropout, running statistics, a large buffer, and a division that a row of zeros breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 1),
        )
        self.register_buffer("seen", torch.zeros(20_000))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[: len(x)] += 1
        x = x + 1e-3 * random.random() * np.random.rand()
        hidden = self.drop(self.norm(self.first(x - x.mean(1, keepdim=True))))
        return self.last(hidden / (x - x.mean(1, keepdim=True)).abs().sum(1, keepdim=True))


def good() -> Tensor:
    return torch.randn(6, 4)


def bad() -> Tensor:
    x = torch.ones(6, 4).cumsum(1)
    x[2] = 1  # equal to its own mean: 0 / 0
    return x


Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
}


class Training:
    """A model, an optimizer, and a step in one of the usual styles."""

    def __init__(self, style: str = "clear first", optimizer: Optimizer = OPTIMIZERS["adamw"]) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = Net()
        self.optimizer = optimizer(self.model.parameters())
        self.style = style
        self.calls = 0

    def step(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.style == "clear first":
            self.optimizer.zero_grad()
        if self.style == "zero first":
            self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss = self.model(x).square().mean()
        loss.backward()
        if self.style == "clip":
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.style != "only add":
            self.optimizer.step()
        if self.style in ("clear last", "clip"):
            self.optimizer.zero_grad()
        return loss

    def state(self) -> dict[str, Any]:
        """All that a step may change, copied."""
        state: dict[str, Any] = {
            f"model {name}": value.clone() for name, value in self.model.state_dict().items()
        }
        for name, parameter in self.model.named_parameters():
            state[f"grad {name}"] = parameter.grad.clone() if parameter.grad is not None else None
        for i, held in enumerate(self.optimizer.state_dict()["state"].items()):
            for key, value in held[1].items():
                state[f"optimizer {i} {key}"] = value.clone() if isinstance(value, Tensor) else value
        state["torch"], state["python"] = torch.get_rng_state(), random.getstate()
        state["numpy"] = torch.from_numpy(np.random.get_state()[1].astype("int64"))  # type: ignore[union-attr]
        return state


STYLES = ("clear first", "clear last", "zero first", "add", "only add", "clip")


def assert_equal(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert state.keys() == other.keys()
    for name, value in state.items():
        same = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, f"{name} differs"


def batches(count: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, generator=generator) for _ in range(count)]


# A clean step


@pytest.mark.parametrize("style", STYLES)
def test_a_guarded_run_is_bit_equal_to_a_plain_one(style: str) -> None:
    plain, guarded = Training(style), Training(style)
    for x in batches(5):
        plain.step(x)
    wanted = plain.state()
    guarded = Training(style)
    step = Guard(guarded.model, guarded.optimizer)(guarded.step)
    for x in batches(5):
        assert torch.isfinite(step(x))
    assert_equal(guarded.state(), wanted)
    assert guarded.calls == 5


def test_it_is_a_decorator_and_keeps_the_name() -> None:
    training = Training()

    @Guard(training.model, training.optimizer)
    def train_step(x: Tensor) -> Tensor:
        """One step."""
        return training.step(x)

    assert (train_step.__name__, train_step.__doc__) == ("train_step", "One step.")
    assert torch.isfinite(train_step(good()))


def test_it_can_wrap_a_method() -> None:
    training = Training()

    class Loop:
        @Guard(training.model, training.optimizer)
        def step(self, x: Tensor) -> Tensor:
            return training.step(x)

    assert torch.isfinite(Loop().step(good()))


def test_sums_of_healthy_gradients_may_overflow() -> None:
    big = torch.full((4,), 3e38)
    assert not all_finite([big])  # a closer look follows
    weight = nn.Parameter(torch.ones(4))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=1e-38)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = (weight * big).sum() * 0.1
        weight.grad = big.clone()
        optimizer.step()
        return loss

    Guard(model, optimizer)(step)()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_the_look_sees_one_bad_element(value: float, dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, 5, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones((), dtype=dtype)]
    assert all_finite(tensors)
    tensors[0][1, 2] = value
    assert not all_finite(tensors)


def test_the_look_reads_sparse_gradients() -> None:
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, float("nan")], (4,), check_invariants=True)
    assert not all_finite([sparse])
    assert all_finite([torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,), check_invariants=True)])


# A fault


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("style", STYLES)
def test_after_a_fault_all_is_as_before_and_the_run_goes_on_as_if_nothing_had_been(
    style: str, optimizer: str
) -> None:
    plain = Training(style, OPTIMIZERS[optimizer])
    for x in batches(6):
        plain.step(x)
    wanted = plain.state()
    training = Training(style, OPTIMIZERS[optimizer])
    step = Guard(training.model, training.optimizer)(training.step)
    for number, x in enumerate(batches(6)):
        if number in (0, 1, 4):  # in the very first step too
            before = training.state()
            with pytest.raises(NonFiniteError) as caught:
                step(bad())
            assert "could not" not in str(caught.value)
            assert "put back: weights, buffers, gradients, optimizer and random state" in str(caught.value)
            assert_equal(training.state(), before)
        step(x)
    assert_equal(training.state(), wanted)


@pytest.mark.parametrize("style", ["clear first", "clip"])
def test_the_report_is_that_of_a_traced_step(style: str) -> None:
    def prepared() -> Training:
        training = Training(style)
        for x in batches(2):
            training.step(x)
        return training

    def stop() -> None:
        raise KeyboardInterrupt  # where the optimizer would write

    x, traced = bad(), prepared()
    traced.optimizer.step = stop  # type: ignore[assignment]
    with sherlorch.trace(level="aten") as tracker:
        tracker.watch(traced.model)
        with pytest.raises(KeyboardInterrupt):
            traced.step(x)
    loss = traced.loss
    wanted = tracker.diagnose(loss)

    training = prepared()
    with pytest.raises(NonFiniteError) as caught:
        Guard(training.model, training.optimizer)(training.step)(x)
    report = caught.value.report
    assert str(report) == str(wanted)
    assert report.culprits[0].summary() == wanted.culprits[0].summary()
    assert report.to_dict() == wanted.to_dict()
    assert str(caught.value).startswith("NaN in `loss` ")


def test_the_message_says_what_was_seen_and_done() -> None:
    training = Training()
    with pytest.raises(NonFiniteError) as caught:
        Guard(training.model, training.optimizer)(training.step)(bad())
    last = str(caught.value).splitlines()[-2:]
    assert last == [
        "  step 1: the loss is nan; 6 of 6 gradients hold NaN: model.first.weight, model.first.bias, "
        "model.norm.weight, model.norm.bias and 2 more; seen before the optimizer wrote",
        "  put back: weights, buffers, gradients, optimizer and random state are as before the step",
    ]


def test_a_gradient_that_is_nan_though_the_loss_is_not() -> None:
    training = Training()

    def step(x: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        y = training.model.last(training.model.first(x).square())
        loss = torch.sqrt((y - y.detach()).square()).sum()
        loss.backward()
        training.optimizer.step()
        return loss

    x, before = good(), training.state()
    with pytest.raises(NonFiniteError) as caught:
        Guard(training.model, training.optimizer)(step)(x)
    assert_equal(training.state(), before)
    culprit = caught.value.report.culprits[0]
    assert culprit.phase == "backward"
    if culprit.forward is not None or hasattr(torch._C._autograd, "_get_sequence_nr"):  # not in torch 2.0
        assert culprit.forward is not None
        assert culprit.forward.op_name == "aten.sqrt.default"
    assert caught.value.report.target_name == "model.last.bias.grad"


def test_a_step_that_catches_everything_is_stopped_all_the_same() -> None:
    training = Training()

    def step(x: Tensor) -> None:
        try:
            training.step(x)
        except Exception:
            pytest.fail("the step saw it")

    with pytest.raises(NonFiniteError):
        Guard(training.model, training.optimizer)(step)(bad())


def test_a_bad_parameter_is_named() -> None:
    training = Training()
    with torch.no_grad():
        training.model.first.weight[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match=r"came in with parameter model\.first\.weight"):
        Guard(training.model, training.optimizer)(training.step)(good())


def test_an_error_of_the_step_itself_passes_through() -> None:
    training = Training()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Guard(training.model, training.optimizer)(training.step)(torch.randn(6, 3))


def test_an_error_that_a_nan_caused_is_explained() -> None:
    training = Training("only add")

    def step(x: Tensor) -> Tensor:
        loss = training.step(x)
        if not torch.isfinite(loss):
            raise ValueError("loss is bad")
        return loss

    before = training.state()
    with pytest.raises(NonFiniteError, match="the step raised ValueError: loss is bad") as caught:
        Guard(training.model, training.optimizer)(step)(bad())
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.report.culprits[0].op_name == "aten.div.Tensor"
    assert_equal(training.state(), before)


def test_clipping_that_raises_is_explained() -> None:
    training = Training()

    def step(x: Tensor) -> None:
        training.model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0, error_if_nonfinite=True)
        training.optimizer.step()

    with pytest.raises(NonFiniteError) as caught:
        Guard(training.model, training.optimizer)(step)(bad())
    assert caught.value.report.culprits[0].op_name == "aten.div.Tensor"


def test_every_looks_at_some_steps_only() -> None:
    training = Training()
    guard = Guard(training.model, training.optimizer, every=3)
    looked = []
    step = guard(lambda x: looked.append(guard._run is not None))
    for _ in range(7):
        step(good())
    assert looked == [True, False, False, True, False, False, True]


# Skipping


def test_skip_warns_and_goes_on() -> None:
    plain, training = Training(), Training()
    for x in batches(4):
        plain.step(x)
    wanted = plain.state()
    training = Training()
    step = Guard(training.model, training.optimizer, on_fault="skip")(training.step)
    for number, x in enumerate(batches(4)):
        if number == 2:
            with pytest.warns(
                NonFiniteWarning, match=r"NaN in `loss`[\s\S]*skipped \(1 in a row\)"
            ) as warned:
                assert step(bad()) is None
            assert warned[0].filename == __file__
        step(x)
    assert_equal(training.state(), wanted)


def test_too_many_bad_steps_in_a_row_raise() -> None:
    training = Training()
    step = Guard(training.model, training.optimizer, on_fault="skip", skip_limit=3)(training.step)
    for _ in range(2):
        for _ in range(2):
            with pytest.warns(NonFiniteWarning):
                step(bad())
        step(good())
    for _ in range(2):
        with pytest.warns(NonFiniteWarning):
            step(bad())
    with pytest.raises(NonFiniteError, match="3 bad steps in a row"):
        step(bad())


# Not reproduced


def once(value: float) -> Callable[[Tensor], Tensor]:
    """A fault of the machine: the first call only."""
    calls = []

    def fault(x: Tensor) -> Tensor:
        calls.append(1)
        return x * value if len(calls) == 1 else x * 1.0

    return fault


def test_a_fault_that_does_not_come_back_is_reported_as_that() -> None:
    training = Training()
    glitch = once(float("nan"))

    def step(x: Tensor) -> Tensor:
        training.optimizer.zero_grad()
        loss = glitch(training.model(x).square().mean())
        loss.backward()
        training.optimizer.step()
        return loss

    x, before = good(), training.state()
    with pytest.raises(NonFiniteError) as caught:
        Guard(training.model, training.optimizer)(step)(x)
    assert_equal(training.state(), before)
    report = caught.value.report
    assert report.ok
    text = str(caught.value)
    assert text.startswith("NOT REPRODUCED: step 1 went wrong (the loss is nan; 6 of 6 gradients hold NaN")
    assert "loss: nan then, 0." in report.notes[1]
    assert "not finite then and finite now: model.first.weight.grad" in text
    assert "suspect a race, uninitialised or damaged memory, or the hardware" in text
    with pytest.raises(sherlorch.SherlorchError, match="no repro to save"):
        report.save_repro("unused.pt")


def test_a_step_that_takes_its_batch_from_an_iterator_differs() -> None:
    training = Training()
    source = iter([good(), bad(), good(), good()])
    step = Guard(training.model, training.optimizer)(lambda: training.step(next(source)))
    step()
    with pytest.raises(NonFiniteError, match="NOT REPRODUCED"):
        step()


def test_gradients_that_differ_elsewhere_point_at_nondeterminism() -> None:
    training = Training()
    calls = []

    def step(x: Tensor) -> None:
        training.step(x)

    def disturb(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient + (float("nan") if len(calls) == 1 else 1e-3)

    training.model.first.bias.register_hook(disturb)
    training.model.last.bias.register_hook(lambda gradient: gradient + len(calls))
    with pytest.raises(NonFiniteError) as caught:
        Guard(training.model, training.optimizer)(step)(good())
    text = " ".join(caught.value.report.notes)
    assert "of the other 5 gradients 4 are bit-equal in both runs" in text
    assert "a nondeterministic kernel" in text
    assert "use_deterministic_algorithms" in text


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), KeyboardInterrupt()])
def test_a_replay_that_fails_leaves_the_state_in_order(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replay_step(step: Callable[[], Any], run: Any, use: Callable[[Any], None], *_: Any) -> Any:
        use(run)
        with contextlib.suppress(BaseException):
            step()
        raise error

    training = Training()
    step = Guard(training.model, training.optimizer)(training.step)
    step(good())
    monkeypatch.setattr("sherlorch.guard.guard.replay_step", replay_step)
    before = training.state()
    with pytest.raises((NonFiniteError, KeyboardInterrupt)) as caught:
        step(bad())
    assert_equal(training.state(), before)
    if caught.type is NonFiniteError:
        assert str(caught.value).startswith("step 2: the loss is nan")
        assert "the replay failed: RuntimeError: no kernel" in str(caught.value)
    step(good())


# The ways of training


def test_gradients_are_accumulated_over_steps() -> None:
    training, plain = Training(), Training()

    def step_of(which: Training) -> Callable[[Tensor, bool], Tensor]:
        def step(x: Tensor, last: bool) -> Tensor:
            loss = which.model(x).square().mean()
            loss.backward()
            if last:
                which.optimizer.step()
                which.optimizer.zero_grad()
            return loss

        return step

    plain = Training()
    for number, x in enumerate(batches(8)):
        step_of(plain)(x, number % 4 == 3)
    wanted = plain.state()
    training = Training()
    step = Guard(training.model, training.optimizer)(step_of(training))
    for number, x in enumerate(batches(8)):
        before = training.state()
        with pytest.raises(NonFiniteError):
            step(bad(), number % 4 == 3)
        assert_equal(training.state(), before)
        step(x, number % 4 == 3)
    assert_equal(training.state(), wanted)


class Pair:
    """Two models and two optimizers that take turns within one step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(3, 4), nn.Linear(4, 1)
        self.optimizers = [
            torch.optim.Adam(self.judge.parameters()),
            torch.optim.Adam(self.maker.parameters()),
        ]

    def step(self, x: Tensor, scale: float = 1.0) -> None:
        judged, made = self.optimizers
        judged.zero_grad()
        self.judge(self.maker(x).detach()).square().mean().backward()
        judged.step()
        made.zero_grad()
        loss = (self.judge(self.maker(x)) * scale).exp().mean()
        loss.backward()
        made.step()

    def state(self) -> list[Any]:
        held = [optimizer.state_dict() for optimizer in self.optimizers]
        return [
            *(p.detach().clone() for m in (self.maker, self.judge) for p in m.parameters()),
            *(
                None if p.grad is None else p.grad.clone()
                for m in (self.maker, self.judge)
                for p in m.parameters()
            ),
            *(v.clone() for each in held for entry in each["state"].values() for v in entry.values()),
        ]


def test_several_optimizers_the_first_of_which_had_written() -> None:
    pair, plain = Pair(), Pair()
    step = Guard({"maker": pair.maker, "judge": pair.judge}, pair.optimizers)(pair.step)
    torch.manual_seed(3)
    data = [torch.randn(5, 3) for _ in range(4)]
    for x in data:
        plain.step(x)
        before = pair.state()
        with pytest.raises(NonFiniteError, match="put back: weights") as caught:
            step(x, scale=1e6)
        assert "model" not in str(caught.value.report.culprits[0].module_path or "")
        for a, b in zip(before, pair.state()):
            assert a is b or torch.equal(a, b)
        assert len(before) == len(pair.state())
        step(x)
    for a, b in zip(pair.state(), plain.state()):
        assert torch.equal(a, b)


def test_an_inner_loop_is_learned() -> None:
    training = Training()

    def step(xs: list[Tensor]) -> None:
        for x in xs:
            training.step(x)

    guarded = Guard(training.model, training.optimizer)(step)
    with pytest.raises(NonFiniteError, match=r"put back: all but model\.first\.weight"):
        guarded([good(), bad()])  # that there would be a second write was not known
    training = Training()
    guarded = Guard(training.model, training.optimizer)(step)
    guarded([good(), good()])
    xs, before = [good(), bad()], training.state()
    with pytest.raises(NonFiniteError, match="put back: weights"):
        guarded(xs)
    assert_equal(training.state(), before)


@pytest.mark.parametrize("as_keyword", [False, True])
def test_lbfgs_writes_between_closures_and_is_put_back(as_keyword: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.LBFGS]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def step_of(model: nn.Module, optimizer: torch.optim.LBFGS) -> Callable[[Tensor, int], Any]:
        def step(x: Tensor, bad_after: int) -> Any:
            calls = []

            def closure() -> Tensor:
                calls.append(1)
                optimizer.zero_grad()
                out = model(x)
                loss = (
                    out.square() + (torch.log(out - out.detach()) if len(calls) > bad_after else 0)
                ).mean()
                loss.backward()
                return loss

            return optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)

        return step

    def state(model: nn.Module, optimizer: torch.optim.LBFGS) -> list[Any]:
        (held,) = optimizer.state_dict()["state"].values() or [{}]
        flat = [item for value in held.values() for item in (value if isinstance(value, list) else [value])]
        return [torch.as_tensor(v).clone() for v in (*model.parameters(), *flat) if v is not None]

    x = torch.randn(5, 3)
    plain, guarded = make(), make()
    step = Guard(*guarded)(step_of(*guarded))
    for _ in range(3):
        step_of(*plain)(x, 99)
        if guarded[1].state:
            before = state(*guarded)
            with pytest.raises(NonFiniteError) as caught:
                step(x, 2)
            assert caught.value.report.culprits[0].op_name == "aten.log.default"
            assert all(map(torch.equal, before, state(*guarded)))
        step(x, 99)
    assert all(map(torch.equal, state(*plain), state(*guarded)))


def test_a_closure_of_an_optimizer_that_calls_it_once() -> None:
    training = Training()

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            training.optimizer.zero_grad()
            loss = training.model(x).square().mean()
            loss.backward()
            return loss

        return training.optimizer.step(closure)

    guarded = Guard(training.model, training.optimizer)(step)
    guarded(good())
    before = training.state()
    with pytest.raises(NonFiniteError, match="seen before the optimizer wrote"):
        guarded(bad())
    assert_equal(training.state(), before)


class Scaled:
    """A step with autocast and a gradient scaler."""

    def __init__(self, scale: float = 2.0**16, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(self, x: Tensor, factor: float = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (self.model(x).float() * factor).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss


@needs_scaler
@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_normal(fused: bool) -> None:
    plain, training = Scaled(2.0**127, fused), Scaled(2.0**127, fused)
    step = Guard(training.model, training.optimizer)(training.step)
    torch.manual_seed(1)
    for _ in range(8):
        x = torch.randn(6, 4)
        step(x, 10.0)
        plain.step(x, 10.0)
    assert training.scaler.get_scale() < 2.0**127
    assert training.scaler.get_scale() == plain.scaler.get_scale()
    assert torch.equal(training.model.weight, plain.model.weight)


@needs_scaler
@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_that_keeps_falling_is_a_fault(fused: bool) -> None:
    training = Scaled(fused=fused)
    step = Guard(training.model, training.optimizer)(training.step)
    for _ in range(FALLS - 1):
        step(torch.ones(6, 4), float("nan"))
    scale = training.scaler.get_scale()
    with pytest.raises(NonFiniteError) as caught:
        step(torch.ones(6, 4), float("nan"))
    assert f"the gradient scaler left out {FALLS} steps in a row, and its scale fell to" in str(caught.value)
    assert caught.value.report.culprits[0].op_name == "aten.mul.Tensor"
    assert training.scaler.get_scale() == scale
    step(torch.ones(6, 4))  # a good step: the scaler was left in order
    for _ in range(FALLS - 1):
        step(torch.ones(6, 4), float("nan"))


@needs_scaler
def test_skipping_what_a_scaler_cannot_heal_ends_too() -> None:
    training = Scaled()
    step = Guard(training.model, training.optimizer, on_fault="skip", skip_limit=2)(training.step)
    for _ in range(FALLS - 1):
        step(torch.ones(6, 4), float("nan"))
    with pytest.warns(NonFiniteWarning):
        step(torch.ones(6, 4), float("nan"))
    with pytest.raises(NonFiniteError, match="2 bad steps in a row"):
        step(torch.ones(6, 4), float("nan"))


@needs_scaler
def test_a_fault_between_scaler_and_optimizer_leaves_the_scaler_usable() -> None:
    training = Scaled()

    def step(x: Tensor, poison: bool) -> None:
        training.optimizer.zero_grad()
        training.scaler.scale(training.model(x).square().mean()).backward()
        training.scaler.unscale_(training.optimizer)
        if poison:
            assert training.model.weight.grad is not None
            training.model.weight.grad.div_(torch.zeros(())).mul_(0)
        training.scaler.step(training.optimizer)
        training.scaler.update()

    guarded = Guard(training.model, training.optimizer)(step)
    guarded(torch.ones(6, 4), False)
    before = training.model.weight.detach().clone()
    with pytest.raises(NonFiniteError):
        guarded(torch.ones(6, 4), True)
    assert torch.equal(training.model.weight, before)
    guarded(torch.ones(6, 4), False)


def test_an_average_of_the_weights_is_not_touched() -> None:
    training = Training()
    average = torch.optim.swa_utils.AveragedModel(training.model)

    def step(x: Tensor) -> Tensor:
        loss = training.step(x)
        average.update_parameters(training.model)
        return loss

    guarded = Guard(training.model, training.optimizer)(step)
    guarded(good())
    before = [value.clone() for value in average.state_dict().values()]
    with pytest.raises(NonFiniteError):
        guarded(bad())
    assert all(map(torch.equal, before, average.state_dict().values()))


@needs_eager_compiled
@pytest.mark.skipif(not hasattr(torch, "compile") or sys.platform == "win32", reason="torch.compile")
@pytest.mark.parametrize("whole_step", [False, True])
def test_compiled_code_is_replayed_as_it_was_written(whole_step: bool) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = model if whole_step else torch.compile(model, backend="aot_eager")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.log(compiled(x).abs().mean() * x.sum())
        loss.backward()
        optimizer.step()
        return loss

    guarded = Guard(compiled, optimizer)(torch.compile(step, backend="aot_eager") if whole_step else step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.isfinite(guarded(torch.ones(3, 4)))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(NonFiniteError) as caught:
            guarded(torch.zeros(3, 4) - 1)
        assert all(map(torch.equal, before, model.parameters()))
        assert torch.isfinite(guarded(torch.ones(3, 4)))
    assert caught.value.report.culprits[0].op_name == "aten.log.default"
    assert "_orig_mod" not in str(caught.value)
    torch._dynamo.reset()


def test_without_an_optimizer_a_fault_is_seen_on_return() -> None:
    training = Training("only add")
    guarded = Guard(training.model)(training.step)
    guarded(good())
    before = training.state()
    with pytest.raises(NonFiniteError, match="seen on return"):
        guarded(bad())
    assert_equal(training.state(), before)


def test_without_an_optimizer_it_says_what_was_written() -> None:
    training = Training()
    guarded = Guard(training.model)(training.step)
    with pytest.raises(NonFiniteError, match=r"put back: all but model.*give the Guard the optimizer"):
        guarded(bad())


@pytest.mark.parametrize("shape", [lambda v: v, lambda v: (v, 1), lambda v: {"loss": v}, float])
def test_a_step_without_backward_is_judged_by_the_loss_it_returns(shape: Callable[[Tensor], Any]) -> None:
    model = nn.Linear(3, 1)
    step = Guard(model)(lambda x: shape((-model(x).abs()).log().mean().detach()))
    with torch.no_grad(), pytest.raises(NonFiniteError, match="the loss is nan") as caught:
        step(torch.randn(4, 3))
    assert caught.value.report.culprits[0].op_name == "aten.log.default"


# What a step writes


def test_parameters_that_the_step_writes_are_learned() -> None:
    training = Training()

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            training.model.first.weight.clamp_(-0.1, 0.1).mul_(0.99)
        return training.step(x)

    guarded = Guard(training.model, training.optimizer)(step)
    with pytest.raises(NonFiniteError, match=r"put back: all but model\.first\.weight"):
        guarded(bad())
    guarded(good())
    before = training.state()
    with pytest.raises(NonFiniteError, match="put back: weights"):
        guarded(bad())
    assert_equal(training.state(), before)


def test_a_batch_that_the_step_writes_is_learned() -> None:
    training = Training()

    def step(x: Tensor) -> Tensor:
        return training.step(x.mul_(0.5))

    guarded = Guard(training.model, training.optimizer)(step)
    guarded(good())
    x = bad()
    with pytest.raises(NonFiniteError, match="put back: weights"):
        guarded(x)
    assert torch.equal(x, bad())


def test_a_buffer_that_the_step_replaces_is_put_back() -> None:
    training = Training()
    model = training.model

    def step(x: Tensor) -> Tensor:
        model.seen = model.seen + 1
        return training.step(x)

    guarded = Guard(model, training.optimizer)(step)
    guarded(good())
    seen, values = model.seen, model.seen.clone()
    with pytest.raises(NonFiniteError):
        guarded(bad())
    assert model.seen is seen
    assert torch.equal(seen, values)


def test_a_learning_rate_set_before_the_fault_is_put_back() -> None:
    training = Training()

    def step(x: Tensor) -> Tensor:
        training.optimizer.param_groups[0]["lr"] *= 0.5
        return training.step(x)

    with pytest.raises(NonFiniteError):
        Guard(training.model, training.optimizer)(step)(bad())
    assert training.optimizer.param_groups[0]["lr"] == 1e-3


# Loops


def test_check_between_backward_and_step() -> None:
    training = Training()
    guard = Guard(training.model, training.optimizer)
    loss = training.model(good()).square().mean()
    loss.backward()
    assert guard.check(loss)
    loss = training.model(bad()).square().mean()
    loss.backward()
    with pytest.raises(NonFiniteError) as caught:
        guard.check(loss)
    text = str(caught.value)
    assert text.startswith("the loss is nan; 6 of 6 gradients hold NaN")
    assert "`guarded = Guard(model, optimizer)(step)`" in text


def test_check_that_skips_returns_false() -> None:
    training = Training()
    guard = Guard(training.model, training.optimizer, on_fault="skip")
    (training.model(bad()).square().mean()).backward()
    with pytest.warns(NonFiniteWarning, match="6 of 6 gradients"):
        assert not guard.check()


# Leaving no trace


def test_taps_and_hooks_are_gone() -> None:
    backward = torch.autograd.backward
    training = Training()
    guard = Guard(training.model, training.optimizer)
    step = guard(training.step)
    step(good())
    with pytest.raises(NonFiniteError):
        step(bad())
    assert torch.autograd.backward is backward
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in training.model.modules())
    assert len(training.optimizer._optimizer_step_pre_hooks) == 1  # type: ignore[attr-defined]
    del guard, step
    gc.collect()
    assert not training.optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]


def test_a_step_within_a_step_belongs_to_the_outer_one() -> None:
    training = Training()
    guard = Guard(training.model, training.optimizer)
    inner = guard(training.step)
    outer = guard(lambda x: inner(x))
    with pytest.raises(NonFiniteError):
        outer(bad())
    assert guard.steps == 1


def test_another_guards_stop_is_not_swallowed() -> None:
    training = Training()
    inner = Guard(nn.Linear(2, 2))(training.step)
    outer = Guard(training.model, training.optimizer)(lambda x: inner(x))
    with pytest.raises(NonFiniteError, match="put back: weights"):
        outer(bad())


def test_no_growth_over_ten_thousand_steps() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 2)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    guarded = Guard(model, optimizer)(step)
    for _ in range(100):
        guarded()
    gc.collect()
    before, tensors = sys.getallocatedblocks(), _tensors()
    for _ in range(10_000):
        guarded()
    gc.collect()
    assert _tensors() <= tensors  # what other tests left may go meanwhile
    assert sys.getallocatedblocks() - before < 500


def _tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_a_fault_keeps_nothing_but_its_report() -> None:
    training = Training()
    step = Guard(training.model, training.optimizer, on_fault="skip", skip_limit=1000)(training.step)
    step(good())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(bad())
        gc.collect()
        before = _tensors()
        for _ in range(5):
            step(bad())
        gc.collect()
    assert _tensors() == before


# Wrong use


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3,), {}, "a Guard takes an nn.Module, or several as a list or dict, got int"),
        (([],), {}, "got list"),
        ((nn.Linear(1, 1), 3), {}, r"a Guard takes a torch.optim.Optimizer or a list of them, got int"),
        (
            (nn.Linear(1, 1),),
            {"on_fault": "explode"},
            "on_fault='explode' is unknown: use one of 'raise', 'skip'",
        ),
        ((nn.Linear(1, 1),), {"every": 0}, "every takes a whole number of at least 1, got 0"),
        ((nn.Linear(1, 1),), {"skip_limit": True}, "skip_limit takes a whole number of at least 1, got True"),
    ],
)
def test_wrong_arguments(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Guard(*arguments, **options)


def test_it_goes_around_a_function() -> None:
    with pytest.raises(TypeError, match="goes around a function that does one step, got int"):
        Guard(nn.Linear(1, 1))(3)  # type: ignore[type-var]


# The example


@pytest.fixture
def example(tmp_path: Path) -> Callable[..., str]:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-W", "error", str(ROOT / "examples" / "guarded_training.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_the_example_survives_a_bad_batch_at_the_step_you_choose(
    example: Callable[..., str], tmp_path: Path
) -> None:
    output = example("7")
    assert "step 7: the loss is nan" in output
    assert "NaN in `loss` " in output
    assert "step 20  loss 0." in output
    (command,) = (line.partition("repro: ")[2] for line in output.splitlines() if "repro: " in line)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert "the fault comes back" in done.stdout
