"""`sherlorch.instrument`: a module in, the same module with checks in its graph out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from sherlorch.passes.graphs import graph_of
from sherlorch.passes.insert import insert_checks


def instrument(
    module: Any,
    example_inputs: Sequence[Any] | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    backward: bool = True,
    bounded: bool = True,
    name: str = "model",
) -> fx.GraphModule:
    """A graph of `module` that checks every value as it runs; its `checks.diagnose()` tells what they saw.

    `module` is an nn.Module, a GraphModule or an ExportedProgram. An nn.Module is traced symbolically, with
    `example_inputs` or `example_kwargs` through `torch.export`, which sees every aten op. It stays as it is,
    and the result computes with the same parameters. `backward` checks gradients too, `bounded=False` leaves
    out ops that cannot leave the finite range. Raises `SherlorchError` where there is no way to a graph.

    >>> import torch
    >>> checked = instrument(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softplus(beta=1e-40)))
    >>> _ = checked(torch.ones(1, 2))
    >>> checked.checks.diagnose().ok
    False
    """
    graph = graph_of(module, example_inputs, example_kwargs)
    insert_checks(graph, bounded=bounded, backward=backward, name=name)
    return graph
