"""What is worked out once for each op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sherlorch
from sherlorch.tracers.plan import plan_overload

LIBRARY = torch.library.Library("sherlorch_plan", "DEF")  # one for all: torch 2.0 never opens a name again
DEFINED: list[str] = []


def overloads() -> Iterator[Any]:
    for name in torch.ops.aten:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            yield getattr(packet, overload)


def test_no_tensor_comes_after_the_last_that_is_looked_at() -> None:
    seen = 0
    for func in overloads():
        until = plan_overload(func, True).tensors_until
        types = [str(argument.type) for argument in func._schema.arguments if not argument.kwarg_only]
        assert not [kind for kind in types[until:] if "Tensor" in kind or "[t]" in kind], (str(func), until)
        seen += until < len(types)
    assert seen > 100


@pytest.mark.parametrize(
    ("schema", "args"),
    [
        ("(int n, float f, Tensor x, bool b) -> Tensor", lambda x: (1, 2.0, x, True)),
        ("(int[] n, Tensor[] xs, str s) -> Tensor", lambda x: ([1, 2], [x, x], "s")),
        ("(Scalar n, Tensor? x, Tensor? y, int? i) -> Tensor", lambda x: (1, x, None, None)),
        ("(int n, Tensor?[] xs) -> Tensor", lambda x: (1, [None, x])),
        ("(int n, *, Tensor x) -> Tensor", None),
    ],
)
def test_a_tensor_is_found_wherever_the_schema_has_it(schema: str, args: Any) -> None:
    name = f"op{len(DEFINED)}"
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, lambda *args, **kwargs: torch.ones(2), "CPU")
    DEFINED.append(name)
    op = getattr(torch.ops.sherlorch_plan, name)
    x = torch.tensor([1.0, float("inf")])
    with sherlorch.trace(level="aten") as tracker:
        bad = torch.log(x - x)
        y = op(1, x=bad) if args is None else op(*args(bad))
    assert any(parent.op_name == "aten.log.default" for parent in tracker.node(y).parents)
