"""What a tensor's values say: exact for every dtype, layout and size, whatever the sums do."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import needs_float8, needs_jagged
from torch import Tensor

from sherlorch import health
from sherlorch.health import FINITE, INF, NAN

REAL = sorted((dtype for dtype in health.FLOATING if dtype.is_floating_point), key=str)
SIZES = {dtype: torch.finfo(dtype).bits // 8 for dtype in REAL}
BYTES = [dtype for dtype in REAL if SIZES[dtype] == 1]
WIDE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wanted(values: Tensor) -> int:
    return (NAN if torch.isnan(values).any() else 0) | (INF if torch.isinf(values).any() else 0)


def every_way(tensor: Tensor) -> set[int]:
    """The state as each entrance of the module tells it."""
    with torch.no_grad():
        begun = health.begin_scan(tensor)
        late = health.finish_scans([begun])[0][0] if begun is not None else FINITE
        return {health.scan(tensor), health.scan_unseen(tensor), health.examine(tensor), late}


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_every_bit_pattern_of_one_byte(dtype: torch.dtype) -> None:
    for pattern in range(256):
        tensor = torch.tensor([0, pattern], dtype=torch.uint8).view(dtype)
        assert every_way(tensor) == {wanted(tensor.float())}, hex(pattern)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_bit_pattern_of_two_bytes(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    bad = ~torch.isfinite(patterns)
    assert every_way(patterns[~bad]) == {FINITE}
    for tensor in patterns[bad][::37]:
        assert every_way(tensor) == {wanted(tensor)}


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    dtype=st.sampled_from(WIDE),
    data=st.data(),
    strided=st.booleans(),
)
def test_any_bits_of_any_kind(dtype: torch.dtype, data: st.DataObject, strided: bool) -> None:
    bits = 8 * SIZES[dtype]
    special = [math.inf, -math.inf, math.nan, torch.finfo(dtype).max, -torch.finfo(dtype).max, 0.0, -0.0]
    chosen = [
        torch.tensor(value, dtype=dtype)
        if isinstance(value, float)
        else torch.tensor(value, dtype=INTEGERS[SIZES[dtype]]).view(dtype)
        for value in data.draw(
            st.lists(
                st.sampled_from(special) | st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), max_size=9
            )
        )
    ]
    tensor = torch.stack(chosen) if chosen else torch.empty(0, dtype=dtype)
    if strided:
        tensor = torch.stack([tensor, torch.full_like(tensor, math.nan)], dim=-1)[..., 0]
    assert every_way(tensor) == {wanted(tensor)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2,), (3, 1000), (65536,)])
def test_a_sum_that_overflows_is_no_alarm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    largest = torch.full(shape, torch.finfo(dtype).max, dtype=dtype)
    assert largest.sum().isinf()
    assert every_way(largest) == {FINITE}
    assert every_way(-largest) == {FINITE}
    largest[..., 1] = -math.inf
    assert every_way(largest) == {INF}
    largest[..., 0] = math.nan
    assert every_way(largest) == {NAN | INF}


def test_opposite_infinities_do_not_cancel() -> None:
    assert every_way(torch.tensor([math.inf, -math.inf])) == {INF}
    assert every_way(torch.tensor([math.inf, -math.inf, math.nan])) == {INF | NAN}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
@pytest.mark.parametrize("part", [complex(1, math.nan), complex(math.inf, 1), complex(-math.inf, math.nan)])
def test_complex_numbers_are_bad_in_either_part(dtype: torch.dtype, part: complex) -> None:
    tensor = torch.tensor([1 + 1j, part]).to(dtype)
    state = wanted(torch.view_as_real(torch.tensor([part])))
    assert every_way(tensor) == {state}
    assert every_way(tensor.conj()) == {state}
    assert every_way(tensor[0]) == {FINITE}
    assert every_way(tensor.conj().imag) == {wanted(torch.tensor([part.imag]))}


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, torch.int64, torch.bool, torch.uint8], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_nothing_is_finite(dtype: torch.dtype) -> None:
    assert every_way(torch.empty(0, dtype=dtype)) == {FINITE}
    assert every_way(torch.empty((2, 0, 3), dtype=dtype)) == {FINITE}
    assert every_way(torch.zeros((), dtype=torch.uint8 if dtype in BYTES else dtype)) == {FINITE}


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_a_lone_number(value: float) -> None:
    assert every_way(torch.tensor(value)) == {wanted(torch.tensor(value))}
    assert every_way(torch.tensor(value, dtype=torch.float16)) == {wanted(torch.tensor(value))}


SPARSE = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((1, 1)),
    "bsc": lambda dense: dense.to_sparse_bsc((1, 1)),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("value", [1.0, math.nan, -math.inf])
def test_sparse_tensors_carry_their_state_in_their_values(layout: str, value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = SPARSE[layout](torch.tensor([[0.0, value], [2.0, 0.0]]))
    assert health.examine(sparse) == wanted(torch.tensor(value))
    assert health.scan_unseen(sparse) == wanted(torch.tensor(value))


def test_an_uncoalesced_sparse_tensor() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, math.nan], (2,), check_invariants=False)
    assert health.examine(sparse) == NAN


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", ["strided", pytest.param("jagged", marks=needs_jagged)])
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_nested_tensors(layout: str, value: float) -> None:
    parts = [torch.ones(2, 2), torch.tensor([[value, 1.0]])]
    options = {"layout": torch.jagged} if layout == "jagged" else {}  # no such option in torch 2.0
    nested = torch.nested.nested_tensor(parts, **options)
    assert health.examine(nested) == wanted(torch.tensor(value))
    assert health.scan_unseen(nested) == wanted(torch.tensor(value))


def test_tensors_without_values_are_finite() -> None:
    assert health.examine(torch.empty(3, device="meta")) == FINITE
    assert health.examine(torch.tensor([1, 2])) == FINITE
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3)
    assert health.examine(fake) == FINITE
    with pytest.raises(RuntimeError, match="aten"):
        health.describe(fake, "x")


def test_negated_views_and_gradients_are_read_through() -> None:
    negative = torch.tensor([1 + 1j, complex(1, math.inf)]).conj().imag
    assert negative.is_neg()
    assert every_way(negative) == {INF}
    assert health.examine(torch.ones(2, requires_grad=True) * math.nan) == NAN


def test_a_look_is_seen_by_nobody() -> None:
    seen = []

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class WatchingFunctions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.tensor([1.0, math.nan], requires_grad=True)
    state = torch.get_rng_state()
    with Watching(), WatchingFunctions():
        seen.clear()
        assert health.examine(tensor) == NAN
        assert health.scan_unseen(tensor) == NAN
        assert seen == []
    assert torch.equal(state, torch.get_rng_state())
    assert tensor.grad_fn is None


def test_many_looks_are_read_at_once() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([math.nan]), torch.tensor([-math.inf, 0.0]).half()]
    scans = [health.begin_scan(tensor, mask=True) for tensor in tensors]
    assert [(state, mask) for state, _, _, mask in health.finish_scans(scans)] == [
        (FINITE, False),
        (NAN, False),
        (INF, True),
    ]
    assert health.finish_scans(scans)[0][1:3] == (1.0, 2.0)
    assert health.finish_scans([]) == []


def test_description_bounds_finite_values_and_counts_the_others() -> None:
    tensor = torch.tensor([[0.0, math.nan, -3.0], [math.inf, -math.inf, 2.0]])
    stats = health.describe(tensor, "x")
    assert (stats.name, stats.shape, stats.dtype, stats.min, stats.max) == ("x", (2, 3), "float32", -3.0, 2.0)
    assert (stats.nan, stats.posinf, stats.neginf, stats.zeros, stats.numel) == (1, 1, 1, 1, 6)
    assert stats.nonfinite == 3


def test_description_of_what_has_no_range() -> None:
    assert health.describe(torch.full((2,), math.nan), "x").min is None
    assert health.describe(torch.empty(0), "x").max is None
    assert health.describe(torch.tensor([True, False]), "x").zeros == 1
    assert health.describe(torch.tensor([3, 0, -1]), "x").min == -1
    assert health.describe(torch.empty(2, device="meta"), "x").numel == 2


def test_first_bad_index_prefers_nan() -> None:
    tensor = torch.tensor([[1.0, math.inf], [math.nan, 1.0]])
    assert health.first_bad_index(tensor) == (1, 0)
    assert health.first_bad_index(tensor[:1]) == (0, 1)
    assert health.first_bad_index(tensor.t()) == (0, 1)
    assert health.first_bad_index(torch.ones(2)) is None
    assert health.first_bad_index(torch.tensor(math.nan)) == ()
    assert health.first_bad_index(torch.tensor([1, 2])) is None


@needs_float8
def test_first_bad_index_of_float8() -> None:
    tensor = torch.tensor([[1.0, math.inf], [math.nan, 1.0]])
    assert health.first_bad_index(tensor.to(torch.float8_e5m2)) == (1, 0)


def test_value_at_broadcasts() -> None:
    tensor = torch.tensor([[1.0], [2.0]])
    assert health.value_at(tensor, (1, 4), (2, 5)) == 2.0
    assert health.value_at(tensor, (0, 1, 4), (3, 2, 5)) == 2.0
    assert health.value_at(torch.tensor(7.0), (1, 4), (2, 5)) == 7.0
    assert health.value_at(torch.ones(3), (1, 4), (2, 5)) is None
    assert health.value_at(torch.ones(1, 1, 1), (0, 0), (1, 1)) is None
