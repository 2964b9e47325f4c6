"""Let a graph return one small tensor more: the largest magnitude that each of its checked nodes had.

A maximum over all elements fuses into the loop that computes them, it carries NaN and Inf out, and it tells
how near the end of the range finite values came. Nothing is read while the program runs, so nothing waits.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.passes.infra.pass_base import PassResult

from sherlorch.checks.log import Table
from sherlorch.checks.site import LEAF_FACTS, Site, named_values
from sherlorch.graph import BACKWARD, FORWARD
from sherlorch.health import FLOATING
from sherlorch.ops import Law, traits
from sherlorch.passes.sites import facts_of, law_of_node, location_of, module_of
from sherlorch.tracers.plan import plan_overload

aten = torch.ops.aten
_INCOMING = "a gradient from outside the compiled graph"
# Every element of the input is in the result, as often as asked; the sizes of a compiled graph are not zero.
_REPEATS = frozenset({"expand", "repeat", "broadcast_in_dim"})


def return_flags(
    graph_module: fx.GraphModule,
    *,
    leaves: Mapping[str, str],
    outputs: Mapping[int, str],
    name: str = "model",
    forward: Table | None = None,
    bounded: bool = True,
) -> tuple[PassResult, Table]:
    """Add the flags as last output, in place, to a graph that AOTAutograd hands to a compiler.

    That is one of aten ops, with fake values. `leaves` names placeholders and `outputs` results; `forward` is
    the table of the forward graph whose backward this is.
    """
    reader = _Reader(graph_module, leaves, outputs, name, forward)
    table = reader.table
    wanted = {
        node: place
        for node, place in reader.places.items()
        if place not in table.known and _wants_flag(node, table.sites[place], bounded)
    }
    for place in wanted.values():
        table.sites[place].checked = True
    _add_output(graph_module, table, wanted)
    return PassResult(graph_module, bool(wanted)), table


class _Reader:
    """The graph as a `Table`; what a decomposition computes on its way has no site of its own."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        leaves: Mapping[str, str],
        outputs: Mapping[int, str],
        name: str,
        forward: Table | None,
    ) -> None:
        self.leaves, self.name, self.forward = leaves, name, forward
        self.graph_module = graph_module
        self.phase = FORWARD if forward is None else BACKWARD
        self.places: dict[fx.Node, int] = {}
        self.table = Table([], {}, forward=forward)
        self.results = {
            node: outputs[position]
            for position, node in enumerate(results_of(graph_module))
            if isinstance(node, fx.Node) and position in outputs
        }
        for node in graph_module.graph.nodes:
            self.table.names[node.name] = -1
            value = node.meta.get("val")
            if node.op != "output" and isinstance(value, Tensor) and value.dtype in FLOATING:
                self._read(node)

    def _read(self, node: fx.Node) -> None:
        origin = self.forward.names.get(node.name) if self.forward is not None else None
        leaf = node.op in ("placeholder", "get_attr")
        if (origin == -1 and not leaf) or (origin is None and not leaf and _is_inside(node)):
            return
        place = len(self.table.sites)
        if origin is not None and origin >= 0:
            self.table.known[place] = origin  # saved, or computed once more
        elif self.forward is None:
            self.table.sequence.setdefault(node.meta.get("seq_nr"), place)
        self.places[node] = self.table.names[node.name] = place
        self.table.sites.append(self._leaf(node) if leaf else self._site(node))

    def _leaf(self, node: fx.Node) -> Site:
        known = _INCOMING if node.name.startswith("tangents") else "constant" if node.op == "get_attr" else ""
        site = Site(node.name, LEAF_FACTS, phase=self.phase, leaf=self.leaves.get(node.name, known))
        return _measured(site, node)

    def _site(self, node: fx.Node) -> Site:
        source = _call_of(node)
        plan = plan_overload(_original(source), True)
        link = self.forward.sequence.get(node.meta.get("seq_nr")) if self.forward is not None else None
        site = Site(
            node.name,
            facts_of(plan, law_of_node(source, plan_overload(source.target, True)), plan.root),
            tuple(dict.fromkeys(self._parents(source))),
            location=location_of(node),
            module=module_of(node, self.name),
            phase=self.phase,
            named=0 if plan.combines else self._named(source),
            output=self.results.get(node, ""),
            link=link,
        )
        return _measured(site, node)

    def _named(self, node: fx.Node) -> int:
        """NAN and INF that the arguments name, also where a decomposition made tensors of them."""
        named = named_values([*node.args, *node.kwargs.values()])
        for each in node.all_input_nodes:
            if each not in self.places and each.op == "call_function":
                named |= self._named(each)
        return named

    def _parents(self, node: fx.Node) -> Iterable[int]:
        """Through nodes that have no site."""
        for each in node.all_input_nodes:
            if each in self.places:
                yield self.places[each]
            elif each.op == "call_function":
                yield from self._parents(each)


def _measured(site: Site, node: fx.Node) -> Site:
    value = node.meta["val"]
    site.shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    site.dtype, site.device = str(value.dtype), str(value.device)
    return site


def _call_of(node: fx.Node) -> fx.Node:
    maker = node.args[0] if node.target is operator.getitem else None
    return maker if isinstance(maker, fx.Node) else node


def _original(node: fx.Node) -> Any:
    """The op that the program called, where a decomposition made the node."""
    original = node.meta.get("original_aten")
    return original if isinstance(original, OpOverload) else node.target


def _decomposition(node: fx.Node) -> tuple[Any, str, str] | None:
    """What tells one decomposed call from another; None for a call that stayed whole."""
    original = node.meta.get("original_aten")
    if not isinstance(original, OpOverload) or str(original) == str(node.target):
        return None
    return node.meta.get("seq_nr"), str(original), node.meta.get("stack_trace") or ""


def _is_inside(node: fx.Node) -> bool:
    """Is it used only by other parts of the decomposition that it is a part of?"""
    own = _decomposition(_call_of(node))
    return (
        own is not None
        and bool(node.users)
        and all(_decomposition(_call_of(user)) == own for user in node.users)
    )


def results_of(graph_module: fx.GraphModule) -> Sequence[Any]:
    output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    results: Any = output.args[0]
    return list(results)


# Which nodes are checked, and how.


def _wants_flag(node: fx.Node, site: Site, bounded: bool) -> bool:
    value = node.meta["val"]
    if value.layout is not torch.strided or any(isinstance(size, int) and size == 0 for size in value.shape):
        return False
    if site.leaf is not None:
        return site.phase == FORWARD or site.leaf == _INCOMING
    if site.facts.uninitialised or not site.parents or (site.facts.bounded and not bounded):
        return False
    source = _call_of(node)
    law = law_of_node(source, plan_overload(source.target, True))
    return not (law is Law.PERMUTES or (law is Law.SELECTS and traits.base_of(source.target) in _REPEATS))


def _add_output(graph_module: fx.GraphModule, table: Table, wanted: Mapping[fx.Node, int]) -> None:
    graph = graph_module.graph
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    if not wanted:
        return
    mode = next(iter(wanted)).meta["val"].fake_mode
    dtype = (
        torch.float64 if any(node.meta["val"].dtype is torch.float64 for node in wanted) else torch.float32
    )
    write = _Writer(graph, mode, dtype)
    with graph.inserting_before(output):
        flags: list[fx.Node] = []
        for node, place in wanted.items():
            table.slots[place] = len(flags)
            flags.append(write.largest(node))
            site = table.sites[place]
            if site.leaf is not None and site.phase == FORWARD and not site.leaf.startswith("parameter"):
                table.masks[place] = len(flags)
                flags.append(write.is_no_mask(node))
        joined = write.call(aten.cat.default, flags)
    output.args = ([*results_of(graph_module), joined],)
    graph.lint()
    graph_module.recompile()


class _Writer:
    """Adds nodes with their fake values."""

    def __init__(self, graph: fx.Graph, mode: Any, dtype: torch.dtype) -> None:
        self.graph, self.mode, self.dtype = graph, mode, dtype

    def call(self, target: OpOverload, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda each: each.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values)
        return node

    def largest(self, node: fx.Node) -> fx.Node:
        """Largest magnitude as a tensor of one element; NaN where there is one."""
        values = self._real(node)
        if _may_be_empty(values.meta["val"]):  # a maximum of nothing does not exist; the sum is 0 or NaN
            return self._flag(self.call(aten.sum.default, self.call(aten.mul.Tensor, values, 0.0)))
        magnitudes = self.call(aten.abs.default, values)
        return self._flag(
            self.call(aten.amax.default, magnitudes) if values.meta["val"].dim() else magnitudes
        )

    def is_no_mask(self, node: fx.Node) -> fx.Node:
        """0 where every element is 0 or -Inf, as in an additive attention mask."""
        values = self._real(node)
        other = self.call(
            aten.logical_and.default,
            self.call(aten.ne.Scalar, values, 0.0),
            self.call(aten.ne.Scalar, values, -torch.inf),
        )
        return self._flag(self.call(aten.any.default, other))

    def _real(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        if value.is_complex():
            return self.call(aten.view_as_real.default, node)
        return self._cast(node, torch.float32) if value.element_size() == 1 else node

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return (
            node
            if node.meta["val"].dtype is dtype
            else self.call(torch.ops.prims.convert_element_type.default, node, dtype)
        )

    def _flag(self, node: fx.Node) -> fx.Node:
        return self.call(aten.view.default, self._cast(node, self.dtype), [1])


def _may_be_empty(value: Tensor) -> bool:
    return any(not isinstance(size, int) and _is_unbacked(size) for size in value.shape)


def _is_unbacked(size: Any) -> bool:
    return getattr(getattr(size, "node", None), "hint", None) is None
