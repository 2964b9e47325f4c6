"""A call with its arguments as they were before it ran, and how it runs again."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import Tensor

from sherlorch import health
from sherlorch.errors import SherlorchError

NATIVE = re.compile(r"(aten|prims)::(\w+)(?:\.(\w+))?")


@dataclass
class Repro:
    """A call that made a NaN or Inf.

    `expected` are the state flags that it showed, `device` is where it ran.
    """

    op: str  # "aten::div.Tensor"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: int = 0
    device: str = "cpu"
    random: dict[str, Tensor] = field(default_factory=dict)  # generator states by device type
    verdict: str = ""
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    small: bool = False  # only the rows that show the fault


@dataclass(frozen=True)
class Outcome:
    """What one run of the call gave: state flags and first bad index, or why it could not run."""

    dtype: str
    device: str
    state: int = 0
    index: tuple[int, ...] | None = None
    problem: str = ""


def _versions() -> dict[str, str]:
    # The facade is above this layer, but loaded; the package's metadata is missing where it is not installed.
    return {"sherlorch": str(sys.modules["sherlorch"].__version__), "torch": str(torch.__version__)}


def take(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Repro:
    """Copy a call that is about to run, to the CPU; call it where modes are off."""
    memo: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in memo:  # one tensor given twice stays one
            memo[id(value)] = value.detach().to("cpu", copy=True)
        return memo[id(value)]

    device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    name, overload = func._schema.name, func._schema.overload_name
    op = f"{name}.{overload}" if overload else name
    return Repro(
        op, tuple(map_leaves(copy, args)), map_values(copy, kwargs), device=device.type, random=random
    )


# Running


def resolve(op: str) -> Any:
    """The overload named ``aten::div.Tensor``.

    Raises `SherlorchError` where PyTorch has none that takes tensors.
    """
    match = NATIVE.fullmatch(op)
    if match is None:
        raise SherlorchError(
            f"`{op[:80]}` is not one of PyTorch's own ops: "
            "read the file with `sherlorch.replay.load`, and call it yourself"
        )
    namespace, name, overload = match.groups()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    func: Any = getattr(packet, overload or "default", None)
    # Only what the dispatcher knows: TorchScript's own operators, which can open files, are not there.
    if isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel(op):
        schema: Any = func._schema
        if any("Tensor" in str(argument.type) for argument in schema.arguments):
            return func
    raise SherlorchError(f"torch {torch.__version__} has no op `{op[:80]}` that takes a tensor")


def run(repro: Repro, *, device: str = "cpu", double: bool = False) -> Outcome:
    """Run the call alone, in its own dtypes or with every floating one made float64."""
    label = "float64" if double else own_dtype(repro)
    try:
        if torch.device(device).type == "meta":
            raise SherlorchError("tensors on the meta device have no values")
        func = resolve(repro.op)
        convert = _converter(device, double)
        args, kwargs = map_leaves(convert, repro.args), map_values(convert, repro.kwargs)
        with _generators(repro, device), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = func(*args, **kwargs)
        state, index = 0, None
        for result in _results(func, args, kwargs, out):
            flags = health.examine(result)
            state |= flags
            if flags & repro.expected and index is None:
                index = health.first_bad_index(result)
    except Exception as error:  # whatever a kernel says of arguments in another dtype or place
        return Outcome(label, device, problem=f"{type(error).__name__}: {str(error).splitlines()[0][:150]}")
    return Outcome(label, device, state, index)


def comes_back(repro: Repro, outcome: Outcome) -> bool:
    """Did the run show the fault again?"""
    return bool(outcome.state & repro.expected)


def state_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """State flags of all that a call has made or written."""
    state = 0
    for result in _results(func, args, kwargs, out):
        state |= health.examine(result)
    return state


def _results(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Iterator[Tensor]:
    yield from tensors_in(out)
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def own_dtype(repro: Repro) -> str:
    """The floating dtypes of the arguments, as text."""
    found = {t.dtype: None for t in tensors_in((repro.args, repro.kwargs)) if t.dtype in health.FLOATING}
    return " and ".join(str(dtype).replace("torch.", "") for dtype in found) or "its own dtype"


def _converter(device: str, double: bool) -> Callable[[Any], Any]:
    memo: dict[int, Tensor] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, torch.dtype) and double and value.is_floating_point:
            return torch.float64
        if isinstance(value, torch.device):
            return torch.device(device)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in memo:
            moved = value.to(device, copy=True)
            if double and moved.dtype in health.FLOATING:
                moved = moved.to(torch.complex128 if moved.is_complex() else torch.float64)
            memo[id(value)] = moved
        return memo[id(value)]

    return convert


@contextmanager
def _generators(repro: Repro, device: str) -> Iterator[None]:
    """The random generators as they were at the call; put back afterwards."""
    kind = torch.device(device).type
    with torch.random.fork_rng(devices=[device] if kind == "cuda" else []):
        if "cpu" in repro.random:
            torch.set_rng_state(repro.random["cpu"])
        if kind == "cuda" and "cuda" in repro.random:
            torch.cuda.set_rng_state(repro.random["cuda"], device)
        yield


# Nested arguments


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every leaf in nested lists and tuples, as lists."""
    if isinstance(value, (list, tuple)):
        return [map_leaves(function, item) for item in value]
    return function(value)


def map_values(function: Callable[[Any], Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`map_leaves` of each value."""
    return {name: map_leaves(function, value) for name, value in kwargs.items()}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
