"""`instrument`: the right line for faults of every kind, and the report that a tracer would give."""

from pathlib import Path

import pytest
import torch
from needs import needs_examples, needs_export, needs_forward_lines
from torch import Tensor, nn

import sherlorch
from sherlorch.errors import SherlorchError

SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def line_of(mark: str) -> str:
    (number,) = (number for number, line in enumerate(SOURCE, start=1) if line.endswith(f"# <- {mark}"))
    return f"{__file__}:{number}"


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(self.project(x)))  # <- forward


class Forward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(4), Gate()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y * self.gate(y)).sum()


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.abs() - x.abs())  # <- backward


class Backward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.root = nn.Linear(4, 4), Root()

    def forward(self, x: Tensor) -> Tensor:
        y = self.lift(x)
        return (y + self.root(y)).sum()


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lift(x)
        scores = (y @ y.transpose(0, 1)).masked_fill(self.mask, float("-inf"))  # <- mask
        return (scores.softmax(-1) @ y).sum()  # <- softmax


WAYS = {
    "symbolic": lambda model: sherlorch.instrument(torch.fx.symbolic_trace(model)),
    "plain": lambda model: sherlorch.instrument(model),
    "example": lambda model: sherlorch.instrument(model, (X,)),
    "exported": lambda model: sherlorch.instrument(torch.export.export(model, (X,))),
}
NEEDS = {"example": needs_examples, "exported": needs_export}
MARKED = [pytest.param(way, marks=NEEDS.get(way, ())) for way in WAYS]
WITH_LINES = [name for name in WAYS if name != "symbolic"]  # a graph without stack traces has no lines


@pytest.mark.parametrize("way", MARKED)
def test_a_forward_fault_is_named(way: str) -> None:
    torch.manual_seed(0)
    checked = WAYS[way](Forward())
    checked(X).backward()
    report = checked.checks.diagnose()
    culprit = report.culprits[0]
    assert (culprit.op_name.removeprefix("aten.").partition(".")[0], culprit.phase) == ("log", "forward")
    assert culprit.module_path == "model.gate"
    assert report.target_name == "output"
    assert [node.op_name for node in report.paths[culprit.seq]][-1].startswith(("sum", "aten.sum"))
    assert culprit.evidence is not None
    assert culprit.evidence.operands == (0.0,)
    if way in WITH_LINES:
        assert culprit.location == line_of("forward")


@needs_forward_lines
@pytest.mark.parametrize("way", MARKED)
def test_a_backward_fault_is_named_by_its_forward_node(way: str) -> None:
    torch.manual_seed(0)
    checked = WAYS[way](Backward())
    checked(X).backward()
    report = checked.checks.diagnose()
    culprit = report.culprits[0]
    assert (culprit.autograd_node, culprit.phase) == ("SqrtBackward0", "backward")
    assert culprit.forward is not None
    assert "sqrt" in culprit.forward.op_name
    assert culprit.module_path == "model.root"
    assert report.target_name.endswith(".grad")
    if way in WITH_LINES:
        assert culprit.location == line_of("backward")


@pytest.mark.parametrize("way", MARKED)
def test_a_causal_mask_is_not_blamed(way: str) -> None:
    checked = WAYS[way](Masked())
    checked(X).backward()
    report = checked.checks.diagnose()
    assert report.ok
    assert any("a mask, absorbed by" in text for text in report.also_seen)


def test_a_fully_masked_row_is_converted_by_the_softmax() -> None:
    model = Masked()
    checked = sherlorch.instrument(model)
    for _ in range(150):  # harmless all of them, and they must not crowd out what comes then
        checked(X)
    model.mask.fill_(True)
    checked(X)
    report = checked.checks.diagnose()
    assert report.culprits[0].location == line_of("softmax")
    assert report.causes[report.culprits[0].seq][0].location == line_of("mask")


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[0] /= 0.0  # <- in place
        return y.sum()


@needs_examples
def test_a_write_through_a_view_is_found() -> None:
    checked = sherlorch.instrument(InPlace(), (X,))
    checked(X)
    report = checked.checks.diagnose()
    assert report.culprits[0].location == line_of("in place")
    assert report.target_name == "output"


@pytest.mark.parametrize("way", [way for way in MARKED if way.values[0] in WITH_LINES])
def test_a_bad_parameter_is_called_by_its_name(way: str) -> None:
    model = Forward()
    torch.nn.init.constant_(model.gate.project.bias, torch.nan)
    checked = WAYS[way](model)
    checked(X)
    culprit = checked.checks.diagnose().culprits[0]
    assert (culprit.name, culprit.origin) == ("parameter model.gate.project.bias", "outside")


@needs_forward_lines
def test_a_gradient_that_comes_in_bad_is_not_the_models_fault() -> None:
    checked = sherlorch.instrument(nn.Linear(4, 4))
    (checked(X) * torch.nan).sum().backward()
    culprit = checked.checks.diagnose().culprits[0]
    assert (culprit.origin, culprit.name) == ("outside", "a gradient from outside the graph")


def test_reset_forgets() -> None:
    checked = sherlorch.instrument(Forward())
    checked(X)
    assert not checked.checks.diagnose().ok
    checked.checks.reset()
    assert str(checked.checks.diagnose()).startswith("No non-finite")


@needs_forward_lines
def test_the_first_fault_wins_over_its_consequences() -> None:
    model = Backward()
    checked = sherlorch.instrument(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        checked(X).backward()
        optimizer.step()
    assert checked.checks.diagnose().culprits[0].autograd_node == "SqrtBackward0"


def test_backward_can_be_left_out() -> None:
    checked = sherlorch.instrument(Backward(), backward=False)
    checked(X).backward()
    assert checked.checks.diagnose().ok


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # <- branch
            return x.log()
        return x


def test_what_cannot_be_traced_is_told_where_and_what_to_do() -> None:
    with pytest.raises(SherlorchError, match="pass example_inputs=") as error:
        sherlorch.instrument(Branching())
    assert line_of("branch") in str(error.value)
    with pytest.raises(SherlorchError, match=r"use sherlorch\.trace"):
        sherlorch.instrument(Branching(), (X,))
    with pytest.raises(TypeError, match="got function"):
        sherlorch.instrument(line_of)  # type: ignore[arg-type]
