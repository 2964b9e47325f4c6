"""A repro as text: the call, its arguments, and whether the fault comes back."""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import Tensor

from sherlorch import health
from sherlorch.health import INF, NAN, NONFINITE
from sherlorch.replay.call import Outcome, Repro, comes_back, resolve, run, tensors_in

_HEADERS = ("argument", "shape", "dtype", "min", "max", "zeros", "nan", "+inf", "-inf")
_MOST_ROWS = 8
_WORDS = {NAN: "NaN", INF: "Inf", NONFINITE: "NaN and Inf"}


def describe(repro: Repro, device: str = "cpu") -> tuple[str, bool]:
    """Run the call on `device`, in its own dtype and in float64: the text, and the answer for its own.

    Raises `SherlorchError` for an op that is not one of PyTorch's own.
    """
    func = resolve(repro.op)
    own = run(repro, device=device)
    outcomes = [own] if own.dtype == "float64" else [own, run(repro, device=device, double=True)]
    places = [f"{outcome.dtype} on {outcome.device}" for outcome in outcomes]
    versions = ", ".join(f"{name} {version}" for name, version in repro.versions.items())
    lines = [
        str(func),
        *([f"  {_printable(repro.verdict)}"] if repro.verdict else []),
        "",
        *_arguments(repro, [argument.name for argument in func._schema.arguments]),
        "",
        *(
            f"  {place:<{max(map(len, places))}}  {_verdict(repro, each, own)}"
            for place, each in zip(places, outcomes)
        ),
        "",
        "  " + _printable(f"saved by {versions} on {repro.device}"),
    ]
    if repro.versions.get("torch") != torch.__version__:
        lines.append(f"  this is torch {torch.__version__}: its kernels may differ")
    return "\n".join(lines), comes_back(repro, own)


def _verdict(repro: Repro, outcome: Outcome, own: Outcome) -> str:
    if outcome.problem:
        return f"could not run: {outcome.problem}"
    also = outcome is not own and comes_back(repro, own)
    if comes_back(repro, outcome):
        at = f" at {list(outcome.index)}" if outcome.index is not None else ""
        return f"{_WORDS[outcome.state]}{at}: the fault comes back" + (
            ", so the dtype is not the cause" if also else ""
        )
    what = f"only {_WORDS[outcome.state]}" if outcome.state else "all finite"
    cause = f"; the range or precision of {own.dtype} is the cause" if also else ""
    return f"{what}: the fault does not come back{cause}"


def _arguments(repro: Repro, names: list[str]) -> list[str]:
    positional = {names[i] if i < len(names) else f"arg{i}": value for i, value in enumerate(repro.args)}
    rows: list[list[object]] = []
    plain = []
    for name, value in {**positional, **repro.kwargs}.items():
        tensors = list(tensors_in(value))
        for i, tensor in enumerate(tensors[:_MOST_ROWS]):
            rows.append(_row(tensor, name if isinstance(value, Tensor) else f"{name}[{i}]"))
        if len(tensors) > _MOST_ROWS:
            rows.append([f"({len(tensors) - _MOST_ROWS} more)"])
        if not tensors and value is not None:
            plain.append(f"{name}={value!r}"[:60])
    text = tabulate(rows, headers=_HEADERS, tablefmt="plain", disable_numparse=True)
    lines = ["  " + line.rstrip() for line in text.splitlines()]
    lines += ["  " + _printable(", ".join(plain))] if plain else []
    return lines + (["  only the rows that show the fault"] if repro.small else [])


def _row(tensor: Tensor, name: str) -> list[object]:
    stats = health.describe(tensor, name)
    bounds = ["-" if bound is None else f"{bound:.4g}" for bound in (stats.min, stats.max)]
    counts = (stats.zeros, stats.nan, stats.posinf, stats.neginf)
    return [_printable(stats.name), str(stats.shape), stats.dtype, *bounds, *counts]


def _printable(text: str) -> str:
    """Without what could steer a terminal: the file may be anyone's."""
    return "".join(character if character.isprintable() else "?" for character in text)
