"""The graph as graphviz text."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

import sherlorch

GRAPHVIZ = shutil.which("dot")


def report_of(steps: int = 1, name: str = "model") -> sherlorch.DiagnosisReport:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    with sherlorch.trace(level="aten") as tracker:
        tracker.watch(model, name=name)
        x = torch.log(torch.zeros(1, 2))
        for _ in range(steps):
            x = x * 2
        loss = model(x).sum()
    return tracker.diagnose(loss)


def test_nodes_edges_and_the_way_are_there() -> None:
    report = report_of()
    text = report.to_dot()
    culprit = report.culprits[0]
    path = report.paths[culprit.seq]
    nodes = set(re.findall(r"^ +n(\d+) \[label=", text, flags=re.MULTILINE))
    assert {str(node.seq) for node in path} <= nodes
    assert f"n{path[0].seq} -> n{path[1].seq} [" in text
    assert re.search(
        rf'n{culprit.seq} \[label="log\\n-Inf, introduced\\n\(1, 2\) float32\\ntest_dot.py:', text
    )
    assert 'label="model.0"' in text
    assert f"n{path[-1].seq} -> target" in text
    assert 'target [label="loss"' in text


def test_names_are_quoted() -> None:
    text = report_of(name='a"b\\c').to_dot()
    assert 'label="a\\"b\\\\c.0"' in text


def test_a_healthy_report_is_a_graph_too() -> None:
    with sherlorch.trace() as tracker:
        y = torch.ones(2) + 1
    assert tracker.diagnose(y).to_dot().startswith("digraph sherlorch {")


@pytest.mark.skipif(GRAPHVIZ is None, reason="no graphviz here")
@pytest.mark.parametrize(("steps", "name"), [(1, 'a"b\\c <&>\n'), (1000, "model")])
def test_graphviz_draws_it(steps: int, name: str) -> None:
    assert GRAPHVIZ is not None
    text = report_of(steps, name).to_dot()
    done = subprocess.run([GRAPHVIZ, "-Tsvg"], input=text, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "<svg" in done.stdout
