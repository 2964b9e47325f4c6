"""`sherlorch.compile` and the backend "sherlorch": full Inductor with checks in the kernels it generates.

The compiler of AOTAutograd's graphs is wrapped: it sees the forward and the backward graph right before
Inductor lowers them, adds one output to each, and takes it off again when the compiled graph has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sherlorch.checks.log import Log, Table
from sherlorch.errors import SherlorchError
from sherlorch.passes.flags import results_of, return_flags
from sherlorch.passes.sites import plain_path
from sherlorch.reports.report import DiagnosisReport

OLDEST = (2, 4)


class CompiledChecks:
    """What the checks in compiled graphs saw."""

    def __init__(self) -> None:
        self._log = Log()

    def diagnose(self) -> DiagnosisReport:
        """On the earliest fault since the last `reset` that was not absorbed; waits for the device."""
        return self._log.report()

    def reset(self) -> None:
        """Forget what was seen; the compiled code stays."""
        self._log.clear()

    def __repr__(self) -> str:
        return f"CompiledChecks({len(self._log.tables)} graphs)"


class Backend:
    """A backend for `torch.compile`; each has checks of its own."""

    def __init__(self, name: str = "model", bounded: bool = True) -> None:
        self.name = name
        self.bounded = bounded
        self.checks = CompiledChecks()
        self.__name__ = "sherlorch"

    def __call__(
        self,
        graph_module: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        require_torch()
        from torch._functorch import config as functorch_config
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}
        graphs = _Graphs(self, graph_module)
        # An entry of AOTAutograd's cache would be one without checks.
        cache = {"enable_autograd_cache": False} if hasattr(functorch_config, "enable_autograd_cache") else {}
        with functorch_config.patch(cache):
            return compile_fx(
                graph_module, example_inputs, inner_compile=graphs.compile, config_patches=patches
            )


class _Graphs:
    """The forward and backward graph that come of one graph of Dynamo."""

    def __init__(self, backend: Backend, graph_module: fx.GraphModule) -> None:
        self.backend = backend
        self.inputs = _input_names(graph_module, backend.name)
        self.results = len(results_of(graph_module))
        self.forward: Table | None = None

    def compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        """In place of Inductor's `compile_fx_inner`."""
        from torch._inductor.compile_fx import compile_fx_inner

        backward = bool(options.get("is_backward"))
        result, table = return_flags(
            graph_module,
            leaves=self._leaves(graph_module),
            outputs=self._outputs(graph_module, options, backward),
            name=self.backend.name,
            forward=self.forward if backward else None,
            bounded=self.backend.bounded,
        )
        if not backward:
            self.forward = table
        compiled = compile_fx_inner(graph_module, example_inputs, **options)
        if not result.modified:
            return compiled
        context = torch._guards.TracingContext.try_get()
        strides = getattr(context, "output_strides", None)
        if strides:
            strides.pop()  # of the flags, which AOTAutograd does not know
        return _without_flags(compiled, self.backend.checks._log, table)

    def _leaves(self, graph_module: fx.GraphModule) -> dict[str, str]:
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        names = {}
        for position, node in enumerate(placeholders):
            place = getattr(node.meta.get("desc"), "idx", None)
            if place is None and node.name.startswith("primals_"):
                place = int(node.name.partition("_")[2]) - 1
            if place is None and node.name.startswith("arg"):
                place = position
            if place is not None and place < len(self.inputs) and not node.name.startswith("tangents"):
                names[node.name] = self.inputs[place]
        return names

    def _outputs(
        self, graph_module: fx.GraphModule, options: Mapping[str, Any], backward: bool
    ) -> dict[int, str]:
        results = results_of(graph_module)
        if backward:
            names = [name.rpartition(" ")[2] for name in self.inputs]
            return {i: f"{names[i]}.grad" if i < len(names) else "a gradient" for i in range(len(results))}
        output = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
        visible = output.meta.get("user_visible_output_idxs")
        if visible is None:
            known = options.get("user_visible_outputs") or ()
            visible = [i for i, node in enumerate(results) if getattr(node, "name", None) in known]
        if options.get("is_inference") and not visible:
            visible = range(len(results))
        visible = list(visible) or list(range(min(self.results, len(results))))
        return {place: f"output[{i}]" if self.results > 1 else "output" for i, place in enumerate(visible)}


def _without_flags(compiled: Callable[..., Any], log: Log, table: Table) -> Callable[[list[Any]], Any]:
    """The compiled graph with the results that AOTAutograd expects; the flags go to the log."""
    log.tables.append(table)

    def run(args: list[Any]) -> Any:
        results = compiled(args)
        flags: Tensor = results[-1]
        # The memory of a CUDA graph's results is written anew by its next run.
        log.add(table, flags.clone() if flags.is_cuda else flags)
        return results[:-1]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _input_names(graph_module: fx.GraphModule, name: str) -> list[str]:
    """What the inputs of AOTAutograd's graphs are called: first what the module owns, then placeholders."""
    sources = getattr(graph_module, "_param_name_to_source", None) or {}  # Dynamo gave them flat names

    def owned(key: str) -> str:
        return plain_path(sources[key].name() if key in sources else key, name)

    names = [f"parameter {owned(key)}" for key, _ in graph_module.named_parameters(remove_duplicate=False)]
    names += [f"buffer {owned(key)}" for key, _ in graph_module.named_buffers(remove_duplicate=False)]
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node.meta.get("grapharg"), "source", None)
            path = getattr(source, "name", "")
            names.append(_kind_and_name(str(path() if callable(path) else path) or str(node.target), name))
    return names


def _kind_and_name(path: str, name: str) -> str:
    plain = plain_path(path, name)
    for mark, kind in (("._parameters[", "parameter"), ("._buffers[", "buffer")):
        if mark in path:
            return f"{kind} {plain}"
    return f"input {plain}"


def torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def require_torch() -> None:
    """Compiled checks use interfaces of torch that changed; say so before they fail."""
    if torch_version() < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise SherlorchError(
            f"compiled checks need torch {needed} or newer, this is {torch.__version__}: upgrade torch, "
            "or use sherlorch.instrument(model) or sherlorch.trace() on the model before it is compiled"
        )


_backend = Backend()


def sherlorch(graph_module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
    """The backend of `torch.compile(model, backend="sherlorch")`; `compiled_checks()` answers for it."""
    return _backend(graph_module, example_inputs, **options)


def compiled_checks() -> CompiledChecks:
    """The checks of all that was compiled with `torch.compile(..., backend="sherlorch")`."""
    return _backend.checks


def compile(model: Any = None, *, name: str = "model", bounded: bool = True, **options: Any) -> Any:
    """`torch.compile` with checks fused into the generated kernels; `.checks.diagnose()` tells what they saw.

    Takes the options of `torch.compile` but `backend`; without a model it is a decorator. `name` is what
    reports call the model, `bounded=False` leaves out checks of ops that cannot leave the finite range.
    """
    if "backend" in options:
        raise TypeError("sherlorch.compile() is torch.compile() with Inductor: leave out `backend`")
    if model is None:
        return functools.partial(compile, name=name, bounded=bounded, **options)
    require_torch()
    backend = Backend(name, bounded)
    compiled = torch.compile(model, backend=backend, **options)
    if isinstance(compiled, nn.Module):
        compiled.__dict__["checks"] = (
            backend.checks
        )  # not of the wrapped model, to which others attributes go
    else:
        compiled.checks = backend.checks  # type: ignore[attr-defined]
    return compiled
