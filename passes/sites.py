"""The nodes of an fx graph as sites: what each computes, under which law, and where the user wrote it."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from sherlorch import errors
from sherlorch.checks import Site, SiteFacts
from sherlorch.checks.site import LEAF_FACTS, Input, named_values
from sherlorch.compat import STACKS_BEGIN_INSIDE
from sherlorch.graph import OpFacts
from sherlorch.health import FLOATING
from sherlorch.ops import Law, law_of_call
from sherlorch.ops.lookup import has_conditional_law
from sherlorch.tracers.plan import Plan, plan_function, plan_overload

_INTERNAL = tuple(os.path.dirname(os.path.abspath(str(each.__file__))) + os.sep for each in (torch, errors))
_USERS = (os.path.join(_INTERNAL[1], "demo.py"),)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NO_TENSOR = frozenset({"size", "dim", "numel", "stride", "getattr", "_guards_fn", "sym_size", "item"})


Fetched = Mapping[fx.Node, Mapping[str, fx.Node]]  # of a called module: its tensors by name, as nodes


def sites_of(
    graph_module: fx.GraphModule, name: str = "model", fetched: Fetched | None = None
) -> tuple[list[Site], dict[fx.Node, int]]:
    """A site for each node that can hold a floating tensor, in order, and the place of each node in it."""
    places: dict[fx.Node, int] = {}
    sites: list[Site] = []
    modules = dict(graph_module.named_modules())
    results = _outputs(graph_module)
    for node in graph_module.graph.nodes:
        if node.op == "output" or not holds_floats(node, modules):
            continue
        places[node] = len(sites)
        sites.append(_site(graph_module, node, places, name, results.get(node, ""), fetched or {}))
    return sites, places


def holds_floats(node: fx.Node, modules: Mapping[str, Any]) -> bool:
    """May the value be, or contain, a floating tensor?"""
    if node.op not in ("get_attr", "placeholder") and base_name(node) in _NO_TENSOR:
        return False
    if node.op == "call_module" and node.target not in modules:
        return False
    value = node.meta.get("val")
    return value is None or any(True for _ in floats_in(value))


def floats_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors in the (fake) value of a node."""
    if isinstance(value, Tensor):
        if value.dtype in FLOATING:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from floats_in(item)


def base_name(node: fx.Node) -> str:
    if node.op in ("call_method", "call_module"):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def source_of(node: fx.Node) -> fx.Node:
    """The node whose call made the value: for an item of a call with several results, that call."""
    if node.op == "call_function" and node.target is operator.getitem:
        maker = node.args[0]
        if isinstance(maker, fx.Node) and has_several_results(maker):
            return maker
    return node


def has_several_results(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if value is not None:
        return isinstance(value, (list, tuple))
    return isinstance(node.target, OpOverload) and len(node.target._schema.returns) > 1


def tensors_of(graph_module: fx.GraphModule, node: fx.Node) -> list[str]:
    """Names of the floating parameters and buffers that a called module owns."""
    if node.op != "call_module":
        return []
    module = graph_module.get_submodule(str(node.target))
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if tensor.dtype in FLOATING]


def attribute_of(graph_module: torch.nn.Module, target: str) -> Any:
    value: Any = graph_module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def plan_of(graph_module: fx.GraphModule, node: fx.Node) -> Plan:
    """What the tracers know of the call that a node is."""
    if isinstance(node.target, OpOverload):
        return plan_overload(node.target, True)
    if node.op == "call_method":
        return plan_function(getattr(Tensor, str(node.target), str(node.target)), True)
    if node.op == "call_module":
        kind = type(graph_module.get_submodule(str(node.target))).__name__
        return Plan(None, kind, _snake(kind))
    return plan_function(node.target, True)


def _snake(name: str) -> str:
    """
    >>> [_snake(name) for name in ("LayerNorm", "GELU", "Conv2d", "LogSoftmax", "BCELoss")]
    ['layer_norm', 'gelu', 'conv2d', 'log_softmax', 'bce_loss']
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def law_of_node(node: fx.Node, plan: Plan) -> Law | None:
    """The law that this very call obeys; None where it cannot be known before it runs."""
    if node.op == "call_function" and node.target is operator.getitem:
        return Law.SELECTS
    if node.op not in ("call_function", "call_method") or plan.func is None:
        return None
    if has_conditional_law(plan.func) and any("val" not in each.meta for each in node.all_input_nodes):
        return None  # it depends on dtypes that a symbolic trace does not know
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val", each))
    try:
        return law_of_call(plan.func, args, kwargs)
    except (AttributeError, TypeError, RuntimeError):  # a condition met a node without a value
        return None


def facts_of(plan: OpFacts, law: Law | None, root: str) -> SiteFacts:
    """Plain facts: a plan holds on to functions that cannot be pickled."""
    return SiteFacts(
        plan.name,
        plan.base,
        root,
        inherits=law in (Law.PERMUTES, Law.SELECTS),
        bounded=law is Law.BOUNDED,
        moves=plan.moves,
        constant=plan.constant,
        uninitialised=plan.uninitialised,
        combines=plan.combines,
    )


def location_of(node: fx.Node) -> str | None:
    """``path/file.py:19``: the innermost line that is neither torch's nor sherlorch's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for path, line in frames if STACKS_BEGIN_INSIDE else reversed(frames):
        if path in _USERS or not path.startswith((*_INTERNAL, "<eval_with_key>", "<frozen")):
            return f"{path}:{line}"
    return None


def module_of(node: fx.Node, name: str) -> str | None:
    """Qualified name of the module that made a node; of its forward node for a backward one."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return name if stack is not None else None
    key, entry = list(stack.items())[-1]
    if isinstance(entry, type):  # torch 2.0
        entry = key
    return plain_path(entry[0] if isinstance(entry, (list, tuple)) else str(entry), name)


def plain_path(path: str, name: str) -> str:
    """
    >>> plain_path("L['self']._modules['blocks']._modules['0'].gate", "model")
    'model.blocks.0.gate'
    >>> plain_path("blocks.0", "model"), plain_path("L['net'].head", "model"), plain_path("", "model")
    ('model.blocks.0', 'net.head', 'model')
    """
    path = re.sub(r"\._(?:modules|parameters|buffers)\b", "", path)
    local = re.match(r"[LG]\['(\w+)'\]", path)
    rest = path[local.end() :] if local else path
    root = local[1] if local and local[1] != "self" else name
    rest = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", rest).strip(".")
    return f"{root}.{rest}" if rest else root


def _outputs(graph_module: fx.GraphModule) -> dict[fx.Node, str]:
    """What the caller gets: the nodes that the output refers to, through views as well."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    found: dict[fx.Node, str] = {}
    nodes: list[fx.Node] = []
    fx.node.map_arg(output.args, nodes.append)
    for position, node in enumerate(dict.fromkeys(nodes)):
        found[node] = "output" if len(nodes) == 1 else f"output[{position}]"
    return found


def _site(
    graph_module: fx.GraphModule,
    node: fx.Node,
    places: Mapping[fx.Node, int],
    name: str,
    output: str,
    fetched: Fetched,
) -> Site:
    value = next(floats_in(node.meta.get("val")), None)
    shape = () if value is None else tuple(size if isinstance(size, int) else -1 for size in value.shape)
    dtype = "" if value is None else str(value.dtype)
    device = "" if value is None else str(value.device)
    if node.op in ("placeholder", "get_attr"):
        leaf = _leaf_name(graph_module, node, name)
        return Site(node.name, LEAF_FACTS, (), shape, dtype, device, leaf=leaf, output=output)
    source = source_of(node)
    plan = plan_of(graph_module, source)
    law = law_of_node(source, plan)
    facts = facts_of(plan, law, plan.root)
    if source.target is operator.getitem:
        facts.moves = True
    inputs = inputs_of(source, places, fetched)
    position = {each: place for place, each in enumerate(inputs)}
    args, kwargs = _replaced((source.args, source.kwargs), position)
    owned = {key: Input(position[each]) for key, each in fetched.get(source, {}).items()}
    return Site(
        node.name,
        facts,
        tuple(places[each] for each in inputs),
        shape,
        dtype,
        device,
        location_of(node),
        module_of(node, name),
        named=0 if plan.combines else named_values([*source.args, *source.kwargs.values()]),
        arguments={**plan.name_arguments(args, kwargs), **owned},
        output=output,
        absorbed=any(_is_mask_or_index(user) for user in node.users),
    )


def _is_mask_or_index(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype not in FLOATING


def _replaced(value: Any, position: Mapping[fx.Node, int]) -> Any:
    """Plain containers with `Input` for each node whose tensor is an input."""
    if isinstance(value, Mapping):
        return {key: _replaced(item, position) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, position) for item in value]
    if isinstance(value, fx.Node):
        return Input(position[value]) if value in position else str(value)
    return value if isinstance(value, (int, float, complex, str, type(None), torch.dtype)) else str(value)


def inputs_of(node: fx.Node, places: Mapping[fx.Node, int], fetched: Fetched | None = None) -> list[fx.Node]:
    """The nodes whose tensors a call computes with."""
    owned = (fetched or {}).get(node, {}).values()
    return [each for each in dict.fromkeys([*node.all_input_nodes, *owned]) if each in places]


def _leaf_name(graph_module: fx.GraphModule, node: fx.Node, name: str) -> str:
    if node.op == "placeholder":
        return f"input {node.target}"
    value = attribute_of(graph_module, str(node.target))
    if isinstance(value, torch.nn.Parameter):
        return f"parameter {name}.{node.target}"
    return f"buffer {name}.{node.target}"
