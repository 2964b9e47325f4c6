"""One faulty call on its own: saved with its arguments, loaded without running anything from the file, run again."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Callable, Optional, Union

import torch
from tabulate import tabulate
from torch import Tensor

from sherlorch import health
from sherlorch.errors import SherlorchError
from sherlorch.health import INF, NAN, NONFINITE

FORMAT, VERSION = "sherlorch-repro", 1
_OP = re.compile(r"(aten|prims)::(\w+)(?:\.(\w+))?")
_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_HEADERS = ("argument", "shape", "dtype", "min", "max", "zeros", "nan", "+inf", "-inf")

Path = Union[str, "os.PathLike[str]"]


@dataclass
class Repro:
    """A call that made a NaN or Inf, with its arguments as they were before it ran.

    `expected` are the state flags that the fault showed; `random` the generator states by device type; `device` where it ran.
    """

    op: str  # "aten::div.Tensor"
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: int
    device: str = "cpu"
    random: dict[str, Tensor] = field(default_factory=dict)
    verdict: str = ""
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    small: bool = False

    def save(self, path: Path, *, small: bool = False) -> None:
        """Write the call to `path`; `small` keeps only the rows that show the fault, where fewer rows still show it."""
        repro = reduced(self) if small else self
        content = {**vars(repro), "args": _encode(repro.args), "kwargs": {key: _encode(value) for key, value in repro.kwargs.items()}}
        torch.save({"format": FORMAT, "version": VERSION, **content}, path)


@dataclass(frozen=True)
class Outcome:
    """What one run of the call gave: state flags and first bad index, or why it could not run."""

    dtype: str
    device: str
    state: int = 0
    index: Optional[tuple[int, ...]] = None
    problem: str = ""


def take(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Repro:
    """Copy a call that is about to run; `expected` is filled in by who sees the result. Call it where modes are off."""
    memo: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        kept = memo.get(id(tensor))
        if kept is None:
            kept = memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
        return kept

    device = next((tensor.device for tensor in _tensors_in((args, kwargs))), torch.device("cpu"))
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    schema = func._schema
    op = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    return Repro(op, tuple(_map(copy, args)), {key: _map(copy, value) for key, value in kwargs.items()}, 0, device.type, random)


def load(path: Path) -> Repro:
    """Read a repro file. Raises `SherlorchError` for one that is missing, damaged or foreign; nothing in it is executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise SherlorchError(f"cannot read `{os.fspath(path)}`: {error.strerror or error}") from None
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:150]
        raise SherlorchError(
            f"`{os.fspath(path)}` is damaged, or no file of `report.save_repro`: {type(error).__name__}: {reason}"
        ) from None
    try:
        return _checked(content)
    except _Foreign as problem:
        raise SherlorchError(f"`{os.fspath(path)}` is no usable repro file: {problem}") from None


def run(repro: Repro, *, device: str = "cpu", double: bool = False) -> Outcome:
    """Run the call alone, in its own dtypes or with every floating one made float64, and look at all that it made or wrote."""
    own = _own_dtype(repro)
    label = "float64" if double else own
    try:
        func = resolve(repro.op)
        convert = _converter(device, double)
        with _generators(repro, device), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args, kwargs = _map(convert, repro.args), {key: _map(convert, value) for key, value in repro.kwargs.items()}
            out = func(*args, **kwargs)
            results = [*_tensors_in(out), *_written(func, args, kwargs)]
            state, index = 0, None
            for result in results:
                flags = health.examine(result)
                state |= flags
                if flags & repro.expected and index is None:
                    index = health.first_bad_index(result)
    except Exception as error:  # whatever a kernel says of arguments in another dtype or place
        return Outcome(label, device, problem=f"{type(error).__name__}: {str(error).split(chr(10))[0][:150]}")
    return Outcome(label, device, state, index)


def comes_back(repro: Repro, outcome: Outcome) -> bool:
    """Did the run show the fault again?"""
    return bool(outcome.state & repro.expected)


def describe(repro: Repro, device: str = "cpu") -> tuple[str, bool]:
    """The call, its arguments, and whether the fault comes back on `device` and in float64, as text; and the answer for its own dtype."""
    own = run(repro, device=device)
    outcomes = [own] if own.dtype == "float64" else [own, run(repro, device=device, double=True)]
    width = max(len(f"{outcome.dtype} on {outcome.device}") for outcome in outcomes)
    lines = [repro.op.replace("::", ".") + ("" if "." in repro.op else ".default")]
    lines += [f"  {repro.verdict}"] if repro.verdict else []
    lines += ["", *_argument_table(repro), ""]
    for outcome in outcomes:
        lines.append(f"  {outcome.dtype + ' on ' + outcome.device:<{width}}  {_verdict(repro, outcome, own)}")
    lines.append("")
    lines.append("  saved by " + ", ".join(f"{name} {version}" for name, version in repro.versions.items()) + f" on {repro.device}")
    if repro.versions.get("torch") != torch.__version__:
        lines.append(f"  this is torch {torch.__version__}: its kernels may differ")
    return "\n".join(lines), comes_back(repro, own)


def _verdict(repro: Repro, outcome: Outcome, own: Outcome) -> str:
    if outcome.problem:
        return f"could not run: {outcome.problem}"
    if comes_back(repro, outcome):
        at = f" at {list(outcome.index)}" if outcome.index is not None else ""
        tail = "" if outcome is own else ", so the dtype is not the cause" if comes_back(repro, own) else ""
        return f"{_words(outcome.state)}{at}: the fault comes back{tail}"
    what = "all finite" if not outcome.state else f"only {_words(outcome.state)}"
    tail = f"; the range or precision of {own.dtype} is the cause" if outcome is not own and comes_back(repro, own) else ""
    return f"{what}: the fault does not come back{tail}"


def _words(state: int) -> str:
    return {NAN: "NaN", INF: "Inf", NONFINITE: "NaN and Inf"}.get(state, "finite")


def _argument_table(repro: Repro) -> list[str]:
    schema = resolve(repro.op)._schema
    names = [argument.name for argument in schema.arguments]
    named = {**{names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(repro.args)}, **repro.kwargs}
    rows, plain = [], []
    for name, value in named.items():
        tensors = list(_tensors_in(value))
        for i, tensor in enumerate(tensors[:8]):
            stats = health.describe(tensor, name if isinstance(value, Tensor) else f"{name}[{i}]")
            bounds = ["-" if bound is None else f"{bound:.4g}" for bound in (stats.min, stats.max)]
            rows.append([stats.name, str(stats.shape), stats.dtype, *bounds, stats.zeros, stats.nan, stats.posinf, stats.neginf])
        if len(tensors) > 8:
            rows.append([f"({len(tensors) - 8} more)"])
        if not tensors and value is not None:
            plain.append(f"{name}={value!r}"[:60])
    text = tabulate(rows, headers=_HEADERS, tablefmt="plain", disable_numparse=True)
    lines = ["  " + line.rstrip() for line in text.splitlines()]
    lines += ["  " + ", ".join(plain)] if plain else []
    return lines + (["  only the rows that show the fault"] if repro.small else [])


# Running


def resolve(op: str) -> Any:
    """The overload named ``aten::div.Tensor``. Raises `SherlorchError` where it is none of PyTorch's own that takes tensors."""
    match = _OP.fullmatch(op)
    if match is None:
        raise SherlorchError(f"`{op[:80]}` is not one of PyTorch's own ops: load the file with `sherlorch.replay.load` and call it yourself")
    namespace, name, overload = match.groups()
    packet = getattr(getattr(torch.ops, namespace), name, None)
    func = getattr(packet, overload or "default", None)
    known = isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel(f"{namespace}::{name}")
    if not known or not any("Tensor" in str(argument.type) for argument in func._schema.arguments):
        raise SherlorchError(f"torch {torch.__version__} has no op `{op[:80]}` that takes a tensor")
    return func


def _converter(device: str, double: bool) -> Callable[[Any], Any]:
    memo: dict[int, Tensor] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, torch.dtype) and double and value.is_floating_point:
            return torch.float64
        if isinstance(value, torch.device):
            return torch.device(device)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in memo:  # one tensor given twice stays one
            moved = value.to(device, copy=True)
            wide = double and moved.dtype in health.FLOATING
            memo[id(value)] = moved.to(torch.complex128 if moved.is_complex() else torch.float64) if wide else moved
        return memo[id(value)]

    return convert


@contextmanager
def _generators(repro: Repro, device: str) -> Iterator[None]:
    """The random generators as they were at the call; put back afterwards."""
    kind = torch.device(device).type
    with torch.random.fork_rng(devices=[device] if kind == "cuda" else []):
        try:
            if "cpu" in repro.random:
                torch.set_rng_state(repro.random["cpu"])
            if kind == "cuda" and "cuda" in repro.random:
                torch.cuda.set_rng_state(repro.random["cuda"], device)
        except (RuntimeError, TypeError) as error:
            raise SherlorchError(f"the random state cannot be set: {error}") from None
        yield


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def _own_dtype(repro: Repro) -> str:
    kinds = {tensor.dtype: None for tensor in _tensors_in((repro.args, repro.kwargs)) if tensor.dtype in health.FLOATING}
    return " and ".join(str(dtype).replace("torch.", "") for dtype in kinds) or "its own dtype"


# Fewer rows


def reduced(repro: Repro) -> Repro:
    """The same call on the rows that show the fault; the whole call where no cut shows it."""
    outcome = run(repro)
    if not comes_back(repro, outcome):
        return repro
    for cut in _cuts(repro, outcome.index):
        smaller = replace(repro, args=tuple(_map(cut, repro.args)), kwargs={k: _map(cut, v) for k, v in repro.kwargs.items()}, small=True)
        if comes_back(repro, run(smaller)):
            return smaller
    element = _bad_element(repro)
    return element if element is not None else repro


def _cuts(repro: Repro, index: Optional[tuple[int, ...]]) -> Iterator[Callable[[Any], Any]]:
    """Ways to cut tensors down: to the bad row under broadcasting, then along the first dimension only, of all or of one tensor."""
    if not index:
        return
    tensors = [tensor for tensor in _tensors_in((repro.args, repro.kwargs)) if tensor.layout is torch.strided and tensor.dim()]
    depth = len(index)
    yield lambda value: _row_of(value, index, depth)
    sizes = sorted({tensor.shape[0] for tensor in tensors if tensor.shape[0] > index[0]}, reverse=True)
    for size in sizes:
        yield lambda value, size=size: value[index[0] : index[0] + 1].clone() if _leads(value, size) else value
    for chosen in tensors:
        if chosen.shape[0] > index[0]:
            yield lambda value, chosen=chosen: value[index[0] : index[0] + 1].clone() if value is chosen else value


def _leads(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.dim() > 0 and value.shape[0] == size


def _row_of(value: Any, index: tuple[int, ...], depth: int) -> Any:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    offset = depth - value.dim()
    for axis in range(value.dim() - 1):
        at = axis + offset
        if at >= 0 and value.shape[axis] > index[at]:
            value = value.narrow(axis, index[at], 1)
    return value.clone()


def _bad_element(repro: Repro) -> Optional[Repro]:
    """Of a ``_foreach_`` call: the one element of its lists that shows the fault."""
    lists = [value for value in (*repro.args, *repro.kwargs.values()) if isinstance(value, (list, tuple)) and any(_tensors_in(value))]
    if "_foreach_" not in repro.op or not lists:
        return None
    length = len(lists[0])
    for i in range(length):
        def cut(value: Any, i: int = i) -> Any:
            return [value[i]] if isinstance(value, (list, tuple)) and len(value) == length else value

        smaller = replace(repro, args=tuple(map(cut, repro.args)), kwargs={k: cut(v) for k, v in repro.kwargs.items()}, small=True)
        if comes_back(repro, run(smaller)):
            return smaller
    return None


# The file


class _Foreign(Exception):
    """The content of a file is not what `Repro.save` writes."""


def _versions() -> dict[str, str]:
    return {"sherlorch": metadata.version("sherlorch"), "torch": str(torch.__version__)}


def _encode(value: Any) -> Any:
    """Only what ``torch.load(weights_only=True)`` accepts: tensors, plain values, and names of dtypes and the like."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": value.type}
    for name, kind in _NAMED.items():
        if isinstance(value, kind):
            return {name: str(value).replace("torch.", "")}
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.Generator):
        return None
    raise SherlorchError(f"an argument of type {type(value).__name__} cannot be saved: call the op yourself")


def _decode(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, Tensor):
        return value
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        ((name, text),) = value.items()
        if name == "complex" and isinstance(text, list) and len(text) == 2:
            return complex(*text)
        if name == "device" and isinstance(text, str) and text.isalpha():
            return torch.device(text)
        found = vars(torch).get(text) if isinstance(text, str) else None
        if name in _NAMED and isinstance(found, _NAMED[name]):
            return found
    raise _Foreign(f"an argument is {str(value)[:60]!r}")


_FIELDS: dict[str, Any] = {
    "op": str, "args": list, "kwargs": dict, "expected": int, "device": str, "random": dict, "verdict": str, "versions": dict, "small": bool,
}  # fmt: skip


def _checked(content: Any) -> Repro:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _Foreign("it was not written by `report.save_repro`")
    if content.get("version") != VERSION:
        raise _Foreign(f"its format is version {content.get('version')!r}, this sherlorch reads {VERSION}")
    values = {name: content.get(name) for name in _FIELDS}
    for name, kind in _FIELDS.items():
        if type(values[name]) is not kind:
            raise _Foreign(f"`{name}` should be a {kind.__name__} and is {str(values[name])[:60]!r}")
    if not 0 < values["expected"] <= NONFINITE or not all(isinstance(state, Tensor) for state in values["random"].values()):
        raise _Foreign("the expected fault or the random state is missing")
    if not all(isinstance(key, str) for key in (*values["kwargs"], *values["versions"], *values["random"])):
        raise _Foreign("a name is no text")
    try:
        resolve(values["op"])
    except SherlorchError as error:
        if _OP.fullmatch(values["op"]):
            raise _Foreign(str(error)) from None
    args, kwargs = _decode(values["args"]), {key: _decode(value) for key, value in values["kwargs"].items()}
    return Repro(**{**values, "args": tuple(args), "kwargs": kwargs})


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every leaf in nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [_map(function, item) for item in value]
    return function(value)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
