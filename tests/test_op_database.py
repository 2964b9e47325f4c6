"""PyTorch's own operator database, traced: no bit changes, nothing raises, every node tells the truth."""

from __future__ import annotations

import math
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from sherlorch import ProvenanceTracker, trace

PARTS = 24
LEVELS = ("function", "aten")
POISON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "largest": None}
OTHER_DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.complex64)

# What cannot be run here at all, and why.
LEFT_OUT = {
    "grid_sampler_2d": "reads out of bounds on NaN coordinates, untraced as well",
    "grid_sampler_3d": "reads out of bounds on NaN coordinates, untraced as well",
    "nn.functional.grid_sample": "reads out of bounds on NaN coordinates, untraced as well",
    "sgn": "some builds crash on complex NaN, untraced as well",
}
# LAPACK does not return from NaN, or ends the process.
CLEAN_ONLY = (
    "linalg.", "cholesky", "svd", "pca_lowrank", "qr", "geqrf", "lu", "ormqr", "triangular_solve",
    "pinverse", "logdet", "matrix_exp", "norm", "cdist", "lobpcg",
)  # fmt: skip
# Memory as it is: two untraced runs differ as well.
UNSTABLE = ("empty", "new_empty", "resize_", "resize_as_")


def operators() -> list[Any]:
    """The database; its module wants `expecttest` for a base class and freezes the backends' flags."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stub.ACCEPT = True  # type: ignore[attr-defined]  # torch 2.0 asks for it
        sys.modules["expecttest"] = stub
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        pytest.skip(f"this torch has no operator database that imports here: {error}")
    finally:
        if getattr(sys.modules.get("expecttest"), "__file__", None) is None:
            sys.modules.pop("expecttest", None)
        torch.backends.__allow_nonbracketed_mutation_flag = True
    return op_db


class Idle(TorchDispatchMode):
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Case:
    """One call of an operator: what to call, with what, and how it is described."""

    def __init__(
        self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, *, differentiate: bool
    ) -> None:
        self.name, self.call, self.args, self.kwargs = name, call, args, kwargs
        self.differentiate = differentiate

    def run(self) -> list[Any]:
        """Results, written arguments and gradients of a run on fresh copies."""
        args, kwargs = tree_map(fresh, (self.args, self.kwargs))
        torch.manual_seed(0)
        given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        results, _ = tree_flatten(self.call(*args, **kwargs))
        everything = [*results, *given]
        if self.differentiate:
            wanted = [value for value in given if value.requires_grad]
            sources = [value for value in results if isinstance(value, Tensor) and value.requires_grad]
            if wanted and sources:
                seeds = [torch.ones_like(value) for value in sources]
                everything += torch.autograd.grad(sources, wanted, seeds, allow_unused=True)
        return everything


def fresh(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def poisoned(value: Any, poison: float | None) -> Any:
    """The arguments with two elements of the first floating tensor replaced."""
    done = False

    def change(item: Any) -> Any:
        nonlocal done
        usable = (
            isinstance(item, Tensor) and item.layout is torch.strided and item.numel() and not item.is_nested
        )
        if done or not usable or not (item.is_floating_point() or item.is_complex()):
            return item
        done = True
        copy = item.detach().clone(memory_format=torch.contiguous_format)
        number = torch.finfo(item.dtype).max if poison is None else poison
        copy.view(-1)[0] = number
        copy.view(-1)[copy.numel() // 2] = number
        return copy.requires_grad_(item.requires_grad)

    changed = tree_map(change, value)
    return changed if done else None


def cases_of(op: Any, dtype: torch.dtype, turn: int) -> Iterator[Case]:
    """Clean and poisoned calls of one operator: everything in float32, one poison by turns elsewhere."""
    differentiate = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    kinds = list(POISON)
    clean_only = op.name.startswith(CLEAN_ONLY) or "linalg" in op.name
    torch.manual_seed(turn)
    samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=differentiate), 2))
    for number, sample in enumerate(samples if dtype is torch.float32 else samples[:1]):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        label = (
            f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''} {dtype} sample {number}"
        )
        everything = dtype is torch.float32 and number == 0
        chosen = [] if clean_only else kinds if everything else [kinds[(turn + number) % 4]]
        variants = [(label, args)]
        for kind in chosen:
            bad = poisoned(args, POISON[kind])
            if bad is not None:
                variants.append((f"{label} {kind}", bad))
        for name, given in variants:
            yield Case(name, op.op, given, kwargs, differentiate=differentiate)
        if number:
            continue
        plain = tree_map(
            lambda value: value.detach() if isinstance(value, Tensor) else value, (variants, kwargs)
        )
        for name, given in plain[0][:2]:
            if op.inplace_variant is not None:
                yield Case(f"{name} in place", op.inplace_variant, given, plain[1], differentiate=False)
            if op.supports_out:
                yield Case(f"{name} out=", into_out(op), given, plain[1], differentiate=False)


def into_out(op: Any) -> Callable[..., Any]:
    """A call that has `op` write its results into tensors made for them."""

    def call(*args: Any, **kwargs: Any) -> Any:
        expected = op.op(*args, **kwargs)
        out = tree_map(lambda value: torch.full_like(value, 1), expected)
        return op.op(*args, **kwargs, out=tuple(out) if isinstance(out, (list, tuple)) else out)

    return call


def outcome(case: Case) -> list[Any] | BaseException:
    try:
        return case.run()
    except Exception as error:
        return error


def same(left: Any, right: Any) -> bool:
    """Equal to the last bit, NaN payloads and signs of zero included."""
    if isinstance(left, BaseException) or isinstance(right, BaseException):
        return type(left) is type(right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if not isinstance(left, Tensor):
        return type(left) is type(right) and repr(left) == repr(right)
    if left.shape != right.shape or left.dtype is not right.dtype or left.layout is not right.layout:
        return False
    if left.layout is not torch.strided:
        return same(left.to_dense(), right.to_dense())
    return torch.equal(bits(left), bits(right))


def bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def lies(tracker: ProvenanceTracker, values: list[Any]) -> Iterator[str]:
    """Results of which the node says something else than their elements."""
    for place, value in enumerate(values):
        if not isinstance(value, Tensor):
            continue
        dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        try:
            node = tracker.node(value)
        except KeyError:
            yield f"value {place} has no node"
            continue
        floating = dense.is_floating_point() or dense.is_complex()
        nan, inf = bool(floating and dense.isnan().any()), bool(floating and dense.isinf().any())
        if (node.has_nan, node.has_inf) != (nan, inf):
            yield f"value {place} holds nan={nan} inf={inf}, its node says {node.summary()}"


def problems(case: Case, level: str) -> Iterator[str]:
    untraced = outcome(case)
    tracker = trace(level=level)
    with tracker:
        traced = outcome(case)
    if not same(untraced, traced) and not is_unstable(case, untraced, traced, level):
        yield f"{level}: {case.name}: {describe(untraced)} untraced, but traced {describe(traced)}"
    if isinstance(traced, list):
        yield from (f"{level}: {case.name}: {lie}" for lie in lies(tracker, traced))
    unseen = tracker.diagnose().coverage.unseen
    if unseen:
        yield f"{level}: {case.name}: not recorded: {unseen}"


def is_unstable(case: Case, untraced: Any, traced: Any, level: str) -> bool:
    """Do untraced runs differ among themselves, or does a dispatch mode that does nothing change the same?

    Under any such mode autograd takes formulas without branches on values (prod), and leaves some checks out.
    """
    if case.name.startswith(UNSTABLE) or not same(untraced, outcome(case)):
        return True
    if level == "function":
        return False
    with Idle():
        return same(traced, outcome(case))


def describe(result: Any) -> str:
    if isinstance(result, list):
        return f"{len(result)} values"
    return f"{type(result).__name__}: {result}"[:200]


@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_runs_as_untraced_and_its_nodes_tell_the_truth(part: int) -> None:
    database = operators()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for turn, op in enumerate(database):
                if turn % PARTS != part or op.name in LEFT_OUT:
                    continue
                dtypes = [torch.float32, OTHER_DTYPES[turn // PARTS % len(OTHER_DTYPES)]]
                for dtype in dtypes:
                    if dtype in op.supported_dtypes("cpu"):
                        for case in cases_of(op, dtype, turn):
                            for level in LEVELS:
                                found.extend(problems(case, level))
    finally:
        torch.set_num_threads(threads)
    assert not found, f"{len(found)} problems:\n" + "\n".join(found)
