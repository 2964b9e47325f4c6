"""What was recorded: `OpNode`, and the graph as networkx and its writers take it."""

from __future__ import annotations

import inspect
import io
import json
import math

import networkx as nx
import pytest
import torch
from networkx.readwrite import json_graph
from torch import nn

import sherlorch
from sherlorch import OpNode, ProvenanceTracker
from sherlorch.graph import FORWARD, LEAF, OpFacts, Record, Scope, closure, to_networkx

LEVELS = pytest.mark.parametrize("level", ["function", "aten"])
FIELDS = {
    "seq": int,
    "call": int,
    "op_name": str,
    "shape": str,
    "dtype": str,
    "device": str,
    "has_nan": bool,
    "has_inf": bool,
    "is_finite": bool,
    "inherited": bool,
    "phase": str,
}


def record(seq: int, *parents: Record, bits: int = 0, name: str = "op") -> Record:
    facts = OpFacts(name, name)
    return Record(
        seq, seq, facts, (2,), torch.float32, "cpu", bits, parents, None, 0, Scope(FORWARD), None, None, None
    )


def traced(level: str) -> tuple[ProvenanceTracker, torch.Tensor]:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with sherlorch.trace(level=level) as tracker:
        tracker.watch(model)
        loss = (model(torch.ones(3, 2)).t().log().sum() - math.inf).sqrt()
        loss.backward()
    return tracker, loss


@LEVELS
def test_the_graph_runs_from_inputs_to_results(level: str) -> None:
    tracker, loss = traced(level)
    graph = tracker.graph
    assert isinstance(graph, nx.DiGraph)
    assert nx.is_directed_acyclic_graph(graph)
    node = tracker.node(loss)
    assert set(graph.predecessors(node.seq)) == {parent.seq for parent in node.parents}
    assert all(source < target for source, target in graph.edges)
    assert set(graph) >= {node.seq for node in tracker.nodes}


@LEVELS
def test_attributes_are_plain_values(level: str) -> None:
    tracker, _ = traced(level)
    optional = {"origin", "location", "module_path", "autograd_node", "name"}
    for seq, attributes in tracker.graph.nodes(data=True):
        assert attributes["seq"] == seq
        assert FIELDS.keys() <= attributes.keys() <= FIELDS.keys() | optional
        for field, value in attributes.items():
            assert type(value) is FIELDS.get(field, str), field


@LEVELS
def test_graphml_keeps_everything(level: str) -> None:
    tracker, _ = traced(level)
    graph = tracker.graph
    file = io.BytesIO()
    nx.write_graphml(graph, file)
    file.seek(0)
    again = nx.read_graphml(file, node_type=int)
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert set(again.edges) == set(graph.edges)


@LEVELS
def test_json_keeps_everything(level: str) -> None:
    tracker, _ = traced(level)
    graph = tracker.graph
    older = "edges" not in inspect.signature(json_graph.node_link_data).parameters  # networkx 3.4
    keys = {"link" if older else "edges": "edges"}
    text = json.dumps(json_graph.node_link_data(graph, **keys), allow_nan=False)
    again = json_graph.node_link_graph(json.loads(text), **keys)
    assert dict(again.nodes(data=True)) == dict(graph.nodes(data=True))
    assert set(again.edges) == set(graph.edges)


def test_fields_of_a_node() -> None:
    with sherlorch.trace() as tracker:
        x = torch.ones(2, 3)
        y = torch.log(x * 0)
        z = y.view(6)
    node = tracker.node(y)
    assert node.op_name == "log"
    assert node.shape == (2, 3)
    assert (node.dtype, node.device, node.phase) == ("torch.float32", "cpu", "forward")
    assert (node.has_nan, node.has_inf, node.is_finite, node.origin) == (False, True, False, "introduced")
    assert (node.inherited, node.module_path, node.autograd_node, node.forward, node.name) == (
        False, None, None, None, "",
    )  # fmt: skip
    assert [parent.op_name for parent in node.parents] == ["mul"]
    assert node.parents[0].parents == [tracker.node(x)]
    assert node.location.startswith(__file__)
    assert node.evidence.result.neginf == 6
    view = tracker.node(z)
    assert (view.op_name, view.inherited, view.has_inf, view.origin) == ("view", True, True, "propagated")
    assert tracker.node(x).origin is None


def test_summary_is_one_line() -> None:
    model = nn.ReLU()
    with sherlorch.trace() as tracker:
        tracker.watch(model)
        y = torch.log(model(-torch.ones(2)))
        z = model(y)
    line = tracker.node(y).summary()
    assert "\n" not in line
    assert line.startswith(f"[{tracker.node(y).seq}] log  shape=(2,) dtype=torch.float32  (")
    assert line.endswith("<-- Inf (introduced)")
    assert "[model]" in tracker.node(z).summary()
    assert repr(tracker.node(y)) == f"OpNode({line})"
    assert "<--" not in tracker.nodes[0].summary()


def test_nodes_are_equal_by_what_they_stand_for() -> None:
    with sherlorch.trace() as tracker:
        x = torch.ones(2)
        y, z = x + 1, x + 1
    assert tracker.node(y) == tracker.node(y)
    assert tracker.node(y) is not tracker.node(y)
    assert tracker.node(y) != tracker.node(z)
    assert tracker.node(y) != tracker.node(y).seq
    assert len({tracker.node(y), tracker.node(y), tracker.node(z)}) == 2


def test_results_of_one_call_share_its_number() -> None:
    with sherlorch.trace() as tracker:
        values, places = torch.ones(3, 2).max(dim=0)
    one, two = tracker.node(values), tracker.node(places)
    assert one.call == two.call
    assert one.seq != two.seq


def test_the_graph_reaches_what_only_parents_refer_to() -> None:
    first = record(1, bits=LEAF)
    second = record(2, first)
    last = record(3, second, first)
    assert {node.seq for node in closure([last])} == {1, 2, 3}
    graph = to_networkx([last])
    assert sorted(graph.edges) == [(1, 2), (1, 3), (2, 3)]


def test_a_long_chain_needs_no_recursion() -> None:
    chain = record(1)
    for seq in range(2, 20_000):
        chain = record(seq, chain)
    assert len(to_networkx([chain])) == 19_999


def test_an_empty_trace_has_an_empty_graph() -> None:
    with sherlorch.trace() as tracker:
        pass
    assert len(tracker.graph) == 0
    assert tracker.nodes == []


def test_a_node_cannot_be_changed() -> None:
    with sherlorch.trace() as tracker:
        x = torch.ones(2) + 1
    with pytest.raises(AttributeError):
        tracker.node(x).op_name = "mine"
    assert isinstance(tracker.node(x), OpNode)
