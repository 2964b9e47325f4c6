"""Take every check out again."""

from __future__ import annotations

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from sherlorch.checks import Checks
from sherlorch.passes.insert import checks_in


def remove_checks(module: fx.GraphModule) -> PassResult:
    """Give back, in place, the nodes that `insert_checks` started from."""
    checks = checks_in(module)
    for check in checks:
        inputs = check.all_input_nodes
        module.graph.erase_node(check)
        for node in inputs:
            if node.op == "get_attr" and not node.users:
                module.graph.erase_node(node)  # fetched for the check alone
    for name, child in list(module.named_children()):
        if isinstance(child, Checks):
            delattr(module, name)
    module.graph.lint()
    module.recompile()
    return PassResult(module, bool(checks))
