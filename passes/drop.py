"""Take out the checks that the laws make redundant."""

from __future__ import annotations

from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from sherlorch.checks import Checks
from sherlorch.passes.insert import checks_in


def drop_checks(module: fx.GraphModule, *, bounded: bool = False) -> PassResult:
    """Drop, in place, the checks of nodes that move data under a law, with `bounded` also of bounded ones."""
    modules = dict(module.named_modules())
    dropped = 0
    for node in checks_in(module):
        checks = modules[str(node.target)]
        assert isinstance(checks, Checks)
        site = checks.sites[int(str(node.args[1]))]
        if site.facts.inherits or (bounded and site.facts.bounded):
            site.checked = False
            module.graph.erase_node(node)
            dropped += 1
    module.graph.lint()
    module.recompile()
    return PassResult(module, bool(dropped))
