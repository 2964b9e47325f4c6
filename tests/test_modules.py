"""Which nn.Module is running: names while it runs, nothing left behind when it does not."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from needs import needs_forward_lines, needs_torch
from torch import Tensor, nn

import sherlorch
from sherlorch.modules import ModuleWatch

LEVELS = pytest.mark.parametrize("level", ["function", "aten"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.exp()


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


class Forgiving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(Failing()))

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except ValueError:
            return x + 1


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def names_seen(model: nn.Module, *inputs: Tensor, name: str = "model") -> list[str | None]:
    names: list[str | None] = []
    watch = ModuleWatch(names.append)
    watch.watch(model, name)
    model(*inputs)
    watch.unwatch()
    return names[:-1]  # the last one is that of unwatching


def test_the_innermost_module_has_the_word() -> None:
    assert names_seen(nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh())), torch.ones(1), name="net") == [
        "net", "net.0", "net", "net.1", "net.1.0", "net.1", "net", None,
    ]  # fmt: skip


@needs_torch("2.1", "forward hooks that are called on exceptions too")
def test_an_exception_that_is_caught_leaves_no_module_running() -> None:
    assert names_seen(Forgiving(), torch.ones(1))[-1] is None
    with sherlorch.trace() as tracker:
        model = Forgiving()
        tracker.watch(model)
        inside = model(torch.ones(1))
        outside = inside * 2
    assert tracker.node(inside).module_path == "model"
    assert tracker.node(outside).module_path is None


@LEVELS
def test_nodes_carry_the_qualified_name(level: str) -> None:
    model = Model()
    with sherlorch.trace(level=level) as tracker:
        tracker.watch(model, name="net")
        out = model(torch.ones(2))
        after = out.log()
    assert tracker.node(out).module_path == "net"
    assert tracker.node(after).module_path is None
    assert {"net.blocks.0.linear", "net.blocks.1.linear", "net.blocks.0", "net"} <= {
        node.module_path for node in tracker.nodes
    }


@LEVELS
def test_parameters_and_buffers_have_names(level: str) -> None:
    model = Model()
    with torch.no_grad():
        model.blocks[1].linear.bias[0] = torch.nan
        model.blocks[0].scale[0] = torch.inf
    with sherlorch.trace(level=level) as tracker:
        tracker.watch(model)
        out = model(torch.ones(2))
    names = {culprit.name for culprit in tracker.diagnose(out).culprits}
    assert names == {"parameter model.blocks.1.linear.bias", "buffer model.blocks.0.scale"}
    assert "`out`" in str(tracker.diagnose(out))
    bias = model.blocks[1].linear.bias
    assert tracker.diagnose(bias).culprits[0].name == "parameter model.blocks.1.linear.bias"


def test_gradients_are_called_after_their_parameter() -> None:
    model = nn.Linear(2, 1, bias=False)
    watch = ModuleWatch(lambda name: None)
    watch.watch(model, "model")
    model(torch.ones(2)).sum().backward()
    assert watch.gradient_name(model.weight.grad) == "model.weight.grad"
    assert watch.gradient_name(torch.ones(1, 2)) == ""
    assert watch.name_of(model.weight) == ("parameter", "model.weight")
    assert watch.name_of(torch.ones(1, 2)) is None


@LEVELS
def test_hooks_go_with_the_block(level: str) -> None:
    model = Model()
    with sherlorch.trace(level=level) as tracker:
        tracker.watch(model)
        assert hooks_of(model) == 2 * len([*model.modules()])
        model(torch.ones(2))
    assert hooks_of(model) == 0


@LEVELS
def test_hooks_go_with_an_exception(level: str) -> None:
    model = nn.Sequential(Failing())
    tracker = sherlorch.ProvenanceTracker(level)

    def run() -> None:
        with tracker:
            tracker.watch(model)
            model(torch.ones(2))

    with pytest.raises(ValueError, match="no"):
        run()
    assert hooks_of(model) == 0
    with tracker:
        after = torch.ones(2) * 2
    assert tracker.node(after).module_path is None


def test_unwatch_keeps_names_and_the_users_own_hooks() -> None:
    model = Block()
    calls: list[Any] = []
    model.register_forward_hook(lambda *_: calls.append(_))
    with sherlorch.trace() as tracker:
        tracker.watch(model)
        first = model(torch.ones(2))
        tracker.unwatch()
        second = model(torch.ones(2))
    assert hooks_of(model) == 1
    assert len(calls) == 2
    assert (tracker.node(first).module_path, tracker.node(second).module_path) == ("model", None)
    assert tracker.node(model.scale).name in ("buffer model.scale", "")


def test_only_the_watched_model_is_hooked() -> None:
    watched, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with sherlorch.trace() as tracker:
        tracker.watch(watched, name="watched")
        assert hooks_of(other) == 0
        one, two = watched(torch.ones(2)), other(torch.ones(2))
    assert tracker.node(one).module_path == "watched"
    assert tracker.node(two).module_path is None


def test_two_models_keep_their_names_apart() -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    with sherlorch.trace() as tracker:
        tracker.watch(generator, name="generator").watch(critic, name="critic")
        out = critic(generator(torch.ones(2)))
    assert tracker.node(out).module_path == "critic"
    assert "generator" in {node.module_path for node in tracker.nodes}


@needs_forward_lines
@LEVELS
def test_backward_nodes_belong_to_the_module_of_their_forward_op(level: str) -> None:
    model = Model()
    with sherlorch.trace(level=level) as tracker:
        tracker.watch(model)
        model(torch.ones(2)).sum().backward()
    backward = [node for node in tracker.nodes if node.phase == "backward"]
    if level == "function":
        assert backward == []
        return
    assert "model.blocks.0.linear" in {node.module_path for node in backward}


def test_a_watched_model_is_not_kept_alive() -> None:
    model = Model()
    with sherlorch.trace() as tracker:
        tracker.watch(model)
        model(torch.ones(2))
    gone = weakref.ref(model)
    weight = weakref.ref(model.blocks[0].linear.weight)
    del model
    gc.collect()
    assert gone() is None
    assert weight() is None
    assert tracker.diagnose().ok


def test_watch_wants_a_module() -> None:
    with sherlorch.trace() as tracker, pytest.raises(TypeError, match=r"takes an nn.Module, got function"):
        tracker.watch(lambda x: x)
