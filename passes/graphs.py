"""Any module as an fx graph whose nodes know their line."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn

from sherlorch import source
from sherlorch.errors import SherlorchError


def graph_of(
    module: Any, example_inputs: Sequence[Any] | None, example_kwargs: Mapping[str, Any] | None
) -> fx.GraphModule:
    """A graph with a life of its own over the module's own parameters."""
    if isinstance(module, fx.GraphModule):
        return fx.GraphModule(module, copy.deepcopy(module.graph), type(module).__name__)
    if not isinstance(module, nn.Module) and hasattr(module, "module"):
        unlifted: fx.GraphModule = module.module()  # an ExportedProgram
        return unlifted
    if not isinstance(module, nn.Module):
        raise TypeError(
            "instrument() takes an nn.Module, a GraphModule or an ExportedProgram, "
            f"got {type(module).__name__}"
        )
    if example_inputs is None and example_kwargs is None:
        return _symbolic(module)
    return _exported(module, tuple(example_inputs or ()), dict(example_kwargs or {}))


def _symbolic(module: nn.Module) -> fx.GraphModule:
    tracer = fx.Tracer()
    tracer.record_stack_traces = True
    try:
        return fx.GraphModule(module, tracer.trace(module), type(module).__name__)
    except Exception as error:
        raise SherlorchError(
            f"`{type(module).__name__}` cannot be traced without inputs{_where(error)}: "
            f"{_first_line(error)}; pass example_inputs=(...), or use sherlorch.trace(), which needs no graph"
        ) from error


def _exported(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    if not hasattr(torch, "export"):
        raise SherlorchError(
            f"example_inputs= needs torch 2.1 or newer, this is {torch.__version__}: "
            "leave them out, or use sherlorch.trace()"
        )
    try:
        exported = torch.export.export(module, args, kwargs, strict=False)
    except Exception as error:
        raise SherlorchError(
            f"`{type(module).__name__}` cannot be exported{_where(error)}: {_first_line(error)}; "
            "use sherlorch.trace(), which needs no graph, or sherlorch.compile(), which allows graph breaks"
        ) from error
    unlifted: fx.GraphModule = exported.module()
    return unlifted


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _where(error: BaseException) -> str:
    """`` at train.py:19``: the innermost user line of an exception."""
    found = ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if source.classify(traceback.tb_frame) == source.USER and not path.startswith("<"):
            found = f" at {path}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found
