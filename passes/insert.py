"""Put a check behind each node that may give birth to a non-finite value."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from sherlorch.checks import Checks, Site
from sherlorch.health import FLOATING
from sherlorch.passes.sites import (
    Fetched,
    attribute_of,
    has_several_results,
    inputs_of,
    sites_of,
    source_of,
    tensors_of,
)

NAME = "checks"  # of the submodule


def insert_checks(
    module: fx.GraphModule | torch.export.ExportedProgram,
    *,
    everywhere: bool = False,
    bounded: bool = True,
    backward: bool = True,
    name: str = "model",
) -> PassResult:
    """Insert in place; of an `ExportedProgram` into the module that it unlifts to.

    Nodes that move data under a law get no check unless `everywhere`; `bounded=False` leaves out those as
    well that compute and yet cannot leave the finite range. With `backward` gradients are checked too. The
    result has the submodule `checks`; `name` is what reports call the model.
    """
    if not isinstance(module, fx.GraphModule):
        module = module.module()
    if checks_in(module):
        raise ValueError("the graph has checks already: use `remove_checks` first")
    fetched = _fetch_tensors(module)
    sites, places = sites_of(module, name, fetched)
    chosen = [node for node in places if everywhere or _wants_check(node, sites[places[node]], bounded)]
    owned = {node for each in fetched.values() for node in each.values()}
    chosen = [node for node in chosen if node in owned or _is_checkable(module, node)]
    for node in chosen:
        sites[places[node]].checked = True
    target = _free_name(module)
    module.add_submodule(target, Checks(sites, backward))
    head = _last_placeholder(module)
    early = set(itertools.takewhile(lambda node: node is not head, module.graph.nodes)) if head else set()
    for node in reversed(chosen):  # each behind its node, so the last one first
        inputs = tuple(inputs_of(source_of(node), places, fetched)) if sites[places[node]].parents else ()
        with module.graph.inserting_after(head if head is not None and node in early else node):
            module.graph.call_module(target, (node, places[node], inputs))
    if (getattr(module, "_tracer_cls", None) or fx.Tracer).call_module is not fx.Tracer.call_module:
        module._tracer_cls = fx.Tracer  # unpickling traces anew, and must not trace into the checks
    module.graph.lint()
    module.recompile()
    return PassResult(module, bool(chosen))


def _last_placeholder(module: fx.GraphModule) -> fx.Node | None:
    """Leaves read before it are checked behind it, as signatures end there."""
    return next((node for node in reversed(module.graph.nodes) if node.op == "placeholder"), None)


def checks_in(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that are checks."""
    modules = dict(module.named_modules())
    return [
        node
        for node in module.graph.nodes
        if node.op == "call_module" and isinstance(modules.get(str(node.target)), Checks)
    ]


def _free_name(module: fx.GraphModule) -> str:
    name = NAME
    while hasattr(module, name):
        name = f"_{name}"
    return name


def _wants_check(node: fx.Node, site: Site, bounded: bool) -> bool:
    if site.leaf is not None:
        return True
    return not (site.facts.inherits or site.facts.uninitialised or (site.facts.bounded and not bounded))


def _is_checkable(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        value: Any = attribute_of(module, str(node.target))
        return isinstance(value, Tensor) and value.dtype in FLOATING and bool(node.users)
    if node.op == "placeholder":
        return bool(node.users)
    items = node.users and all(source_of(user) is node for user in node.users)
    return not (items and has_several_results(node))  # its items are checked, each by itself


def _fetch_tensors(module: fx.GraphModule) -> Fetched:
    """Let the graph read what called modules own, so that a bad parameter can be told from a bad result."""
    known: dict[str, fx.Node] = {}
    fetched: dict[fx.Node, dict[str, fx.Node]] = {}
    for node in list(module.graph.nodes):
        for name in tensors_of(module, node):
            target = f"{node.target}.{name}"
            if target not in known:
                with module.graph.inserting_before(node):
                    known[target] = module.graph.get_attr(target)
            fetched.setdefault(node, {})[name] = known[target]
    return fetched
