"""The file of a repro: tensors, plain values and names. Reading one runs nothing that is in it."""

from __future__ import annotations

import io
import os
import warnings
from typing import Any, Union

import torch
from torch import Tensor

from sherlorch.errors import SherlorchError
from sherlorch.health import NONFINITE
from sherlorch.replay.call import NATIVE, Repro, resolve
from sherlorch.replay.rows import reduced

FORMAT, VERSION = "sherlorch-repro", 1
Path = Union[str, "os.PathLike[str]"]

_NAMED = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_PLAIN = (type(None), bool, int, float, str)
_FIELDS: dict[str, type] = {
    "op": str,
    "args": list,
    "kwargs": dict,
    "expected": int,
    "device": str,
    "random": dict,
    "verdict": str,
    "versions": dict,
    "small": bool,
}


class _ForeignError(Exception):
    """The content of a file is not what `save` writes."""


def save(repro: Repro, path: Path, *, small: bool = False) -> None:
    """Write the call to `path`; `small` keeps only the rows that show the fault, where fewer rows do."""
    repro = reduced(repro) if small else repro
    encoded = {
        "args": _encode(repro.args),
        "kwargs": {name: _encode(value) for name, value in repro.kwargs.items()},
    }
    torch.save({"format": FORMAT, "version": VERSION, **vars(repro), **encoded}, path)


def load(path: Path) -> Repro:
    """Read a repro file. Raises `SherlorchError` for one that is missing, damaged or not a repro."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            written = io.BytesIO(file.read())
    except OSError as error:
        raise SherlorchError(f"cannot read `{name}`: {error.strerror or error}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(written, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"
        raise SherlorchError(f"`{name}` is damaged, or no file of `report.save_repro` ({reason})") from None
    try:
        return _checked(content)
    except _ForeignError as problem:
        raise SherlorchError(f"`{name}` is no usable repro file: {problem}") from None


def _encode(value: Any) -> Any:
    """Only what ``torch.load(weights_only=True)`` accepts in every version."""
    if type(value) in _PLAIN or isinstance(value, Tensor):
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
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return value
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict) and len(value) == 1:
        ((name, item),) = value.items()
        if name == "complex" and isinstance(item, list) and [type(part) for part in item] == [float, float]:
            return complex(*item)
        if name == "device" and isinstance(item, str):
            return torch.device("cpu")  # each run puts its own there
        found = vars(torch).get(item) if isinstance(item, str) else None
        if name in _NAMED and isinstance(found, _NAMED[name]):
            return found
    raise _ForeignError(f"an argument is {str(value)[:60]!r}")


def _checked(content: Any) -> Repro:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _ForeignError("it was not written by `report.save_repro`")
    if content.get("version") != VERSION:
        raise _ForeignError(
            f"its format is version {content.get('version')!r}, this sherlorch reads {VERSION}"
        )
    values: dict[str, Any] = {name: content.get(name) for name in _FIELDS}
    for name, kind in _FIELDS.items():
        if type(values[name]) is not kind:
            raise _ForeignError(f"`{name}` should be a {kind.__name__} and is {str(values[name])[:60]!r}")
    if not all(isinstance(key, str) for field in ("kwargs", "versions", "random") for key in values[field]):
        raise _ForeignError("a name is no text")
    if not all(isinstance(state, Tensor) for state in values["random"].values()):
        raise _ForeignError("a random state is no tensor")
    if not 0 < values["expected"] <= NONFINITE:
        raise _ForeignError(f"the fault that it should show is {values['expected']}")
    values["args"], values["kwargs"] = (
        tuple(_decode(values["args"])),
        {k: _decode(v) for k, v in values["kwargs"].items()},
    )
    _check_op(values["op"])
    return Repro(**values)


def _check_op(op: str) -> None:
    """An op of someone's own can be read; one in PyTorch's name must be PyTorch's."""
    if NATIVE.fullmatch(op):
        try:
            resolve(op)
        except SherlorchError as error:
            raise _ForeignError(str(error)) from None
