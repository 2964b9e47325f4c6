"""Checks in graphs: where they stand, what they leave alone, and that they go as they came."""

import copy
import importlib
import pickle
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from needs import needs_export, needs_torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from sherlorch.checks import Checks
from sherlorch.passes import drop_checks, insert_checks, remove_checks
from sherlorch.passes.insert import checks_in


class Net(nn.Module):
    """Convolution, batch norm, work in place, views, several results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.act, self.drop, self.head = nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.drop(self.act(self.norm(self.conv(x))).mean((2, 3)))
        left, right = hidden.chunk(2, 1)
        hidden = torch.cat([right, left], 1)
        return F.cross_entropy(self.head(hidden), y), hidden


INPUTS = (torch.rand(2, 3, 6, 6), torch.tensor([1, 2]))


def symbolic(model: nn.Module) -> fx.GraphModule:
    return fx.symbolic_trace(model)


def exported(model: nn.Module) -> fx.GraphModule:
    return torch.export.export(model, INPUTS).module()


def by_make_fx(model: nn.Module) -> fx.GraphModule:
    return make_fx(lambda x, y: model.eval()(x, y))(*INPUTS)


def by_dynamo(model: nn.Module) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    importlib.import_module("torch._dynamo").reset()  # torch 2.0 has one backend at a time
    torch.compile(model, backend=keep)(*INPUTS)
    return graphs[0]


EXPORTED = pytest.param(exported, id="exported", marks=needs_export)
WAYS: list[Any] = [symbolic, EXPORTED, by_make_fx, by_dynamo]


def nodes(graph: fx.GraphModule) -> list[tuple[str, str, str, str]]:
    return [(node.op, node.name, str(node.target), str(node.args)) for node in graph.graph.nodes]


def step(run: Callable[..., Any], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss, hidden = run(*INPUTS)
    loss.backward()
    return [loss.detach(), hidden.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("way", WAYS)
def test_removal_gives_the_nodes_back(model: nn.Module, way: Any) -> None:
    graph = way(model)
    before, children = nodes(graph), set(graph._modules)
    assert insert_checks(graph).modified
    graph.graph.lint()
    assert len(checks_in(graph)) > 8
    assert remove_checks(graph).modified
    assert nodes(graph) == before
    assert set(graph._modules) == children
    assert not remove_checks(graph).modified


@pytest.mark.parametrize(
    "way",
    [symbolic, pytest.param(exported, marks=needs_torch("2.6", "an exported batch norm can be trained"))],
)
def test_results_and_gradients_are_equal_bit_by_bit(model: nn.Module, way: Any) -> None:
    graph = way(model)
    state = copy.deepcopy(model.state_dict())
    plain = step(graph, model)
    model.load_state_dict(state)
    insert_checks(graph, everywhere=True)
    checked = step(graph, model)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, checked))
    assert graph.checks.diagnose().ok
    assert set(graph.state_dict()) == set(state)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")  # torch's copy of an exported module
@pytest.mark.parametrize("way", WAYS)
def test_dead_code_elimination_and_copies_keep_the_checks(model: nn.Module, way: Any) -> None:
    graph = way(model)
    insert_checks(graph)
    count = len(checks_in(graph))
    graph.graph.eliminate_dead_code()
    assert len(checks_in(copy.deepcopy(graph))) == count


@pytest.mark.parametrize("way", [symbolic, by_make_fx])
def test_a_pickled_graph_still_checks(way: Any) -> None:
    graph = way(Log())
    insert_checks(graph)
    again = pickle.loads(pickle.dumps(graph))
    assert isinstance(again.checks, Checks)
    again(*INPUTS)
    assert again.checks.diagnose().ok
    again(-INPUTS[0], INPUTS[1])
    assert again.checks.diagnose().culprits[0].op_name.removeprefix("aten.").startswith("log")


class Log(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.log(x + 1e-3).flatten(1).transpose(0, 1).relu() * 2


def test_data_that_only_moves_gets_no_check() -> None:
    graph = symbolic(Log())
    insert_checks(graph)
    checked = {site.facts.root for site in graph.checks.sites if site.checked}
    assert checked == {"leaf", "add", "log", "relu", "mul"}
    remove_checks(graph)
    insert_checks(graph, bounded=False)
    assert "relu" not in {site.facts.root for site in graph.checks.sites if site.checked}


class Promoting(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.half(), y])  # 100000 is Inf in float16


TO_PROMOTE = (torch.ones(2), torch.tensor([100_000]))


@pytest.mark.parametrize(
    "way",
    [
        symbolic,
        pytest.param(
            lambda model: torch.export.export(model, TO_PROMOTE).module(), id="exported", marks=needs_export
        ),
    ],
)
def test_a_law_that_depends_on_dtypes_needs_to_know_them(way: Any) -> None:
    graph = way(Promoting())
    insert_checks(graph)
    graph(*TO_PROMOTE)
    assert "cat" in graph.checks.diagnose().culprits[0].op_name


def test_the_laws_drop_what_they_make_redundant() -> None:
    graph = symbolic(Log())
    insert_checks(graph, everywhere=True)
    everything = len(checks_in(graph))
    assert drop_checks(graph).modified
    assert len(checks_in(graph)) == everything - 2
    assert not drop_checks(graph).modified
    assert drop_checks(graph, bounded=True).modified
    assert len(checks_in(graph)) == everything - 3
    graph(-INPUTS[0], INPUTS[1])
    assert [node.op_name for node in graph.checks.diagnose().culprits] == ["log"]


@needs_torch("2.8", "a symbolic trace of a batch norm can be exported")
def test_checks_stay_in_an_export(model: nn.Module) -> None:
    graph = symbolic(model)
    insert_checks(graph)
    again = torch.export.export(graph, INPUTS).module()
    again(INPUTS[0] * torch.nan, INPUTS[1])
    assert again.checks.flags.count_nonzero() > 5


@needs_torch("2.8", "a buffer that compiled code is given twice and writes")
def test_checks_stay_in_compiled_code(model: nn.Module) -> None:
    graph = symbolic(model)
    insert_checks(graph)
    run = torch.compile(graph, backend="aot_eager")
    run(INPUTS[0] * torch.nan, INPUTS[1])
    report = graph.checks.diagnose()
    assert report.culprits[0].name == "input x"
    assert "ran inside compiled code" in str(report)


def test_an_infinity_that_becomes_an_index_is_absorbed_and_a_nan_is_not() -> None:
    graph = make_fx(lambda x: x.log().to(torch.long).clamp(0, 7), tracing_mode="fake")(torch.zeros(3))
    insert_checks(graph)
    graph(torch.zeros(3))
    assert graph.checks.diagnose().ok
    graph(torch.zeros(3) - 1)
    assert [node.op_name for node in graph.checks.diagnose().culprits] == ["aten.log.default"]


def test_checks_are_not_put_in_twice(model: nn.Module) -> None:
    graph = symbolic(model)
    insert_checks(graph)
    with pytest.raises(ValueError, match="remove_checks"):
        insert_checks(graph)


@needs_export
def test_a_program_of_torch_export_can_be_given_as_it_is(model: nn.Module) -> None:
    result = insert_checks(torch.export.export(model, INPUTS))
    result.graph_module(*INPUTS)
    assert result.graph_module.checks.diagnose().ok
