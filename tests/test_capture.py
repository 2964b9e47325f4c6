"""Evidence of faulty calls: what is captured, from odd tensors too, and that nothing changes."""

import gc
import json
import math

import pytest
import torch
from needs import needs_float8, needs_half, needs_jagged
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sherlorch.capture import capture, plain_name
from sherlorch.evidence import Evidence

NAN, INF = math.nan, math.inf


def half(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float16)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("_softmax", "softmax"),
        ("__rtruediv__", "div"),
        ("true_divide", "div"),
        ("_foreach_addcdiv_", "addcdiv"),
        ("linalg_vector_norm", "norm"),
        ("special_xlogy", "xlogy"),
        ("_native_batch_norm_legit_functional", "batch_norm"),
        ("native_batch_norm_backward", "batch_norm_backward"),
        ("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
        ("nll_loss_forward", "nll_loss"),
    ],
)
def test_an_op_has_one_name(op: str, name: str) -> None:
    assert plain_name(op) == name


def test_pointwise_operands_at_the_first_bad_index() -> None:
    top, bottom = torch.tensor([[1.0], [0.0]]), torch.tensor([2.0, 0.0])
    seen = capture("div", {"self": top, "other": bottom}, top / bottom, labels={"self": "z"})
    assert seen.index == (1, 1)  # NaN goes before the Inf at (0, 1)
    assert seen.operands == (0.0, 0.0)
    assert [(row.name, row.shape, row.at) for row in seen.inputs] == [
        ("z", (2, 1), 0.0),
        ("other", (2,), 0.0),
    ]
    assert (seen.result.name, seen.result.nan, seen.result.posinf) == ("out", 1, 1)
    assert math.isnan(seen.result.at)


def test_numbers_are_operands_too_and_reversed_ops_are_turned_round() -> None:
    x = torch.tensor([0.0, 1.0])
    assert capture("pow", {"self": x, "exponent": -1}, x**-1).operands == (0.0, -1)
    assert capture("__rtruediv__", {"self": x, "other": 3.0}, 3.0 / x).operands == (3.0, 0.0)
    assert capture("add", {"self": x, "other": x, "alpha": 2}, x * INF).operands == (
        0.0,
        0.0,
    )  # alpha is none


def test_scalars_are_small_and_fit_for_json() -> None:
    x = torch.tensor([NAN])
    arguments = {"self": x, "dim": [0, 1], "dtype": torch.float16, "memory": None, "value": 1j, "f": len}
    scalars = capture("clone", {**arguments, "text": "a" * 200, "many": list(range(99))}, x).scalars
    assert scalars == {"dim": [0, 1], "dtype": "float16", "value": "1j", "text": "a" * 77 + "..."}
    json.dumps(scalars)


def nan(*shape: int) -> Tensor:
    return torch.full(shape, NAN)


# op, arguments, result, what went into its first bad element
REDUCTIONS = {
    "over dim 1": ("sum", {"self": torch.tensor([[1.0, 2.0], [INF, -INF]]), "dim": [1]}, nan(2), (1.0, 2.0)),
    "kept dim": (
        "mean",
        {"self": torch.tensor([[INF, -INF]]), "dim": [1], "keepdim": True},
        nan(1, 1),
        (INF, -INF),
    ),
    "negative dim": ("logsumexp", {"arg0": torch.full((2, 3), -INF), "arg1": -1}, nan(2), (-INF,) * 3),
    "one element": ("var", {"self": torch.full((1, 4), 5.0), "dim": [0]}, nan(4), (5.0,)),
    "a bool is no dim": ("std", {"arg0": torch.ones(1), "arg1": True}, nan(), (1.0,)),
    "nothing": ("mean", {"self": torch.empty(0, 3), "dim": [0]}, nan(3), ()),
    "dim comes third": ("norm", {"arg0": torch.full((2, 2), INF), "arg1": 2, "arg2": 1}, nan(2), (INF, INF)),
    "a row of scores": ("softmax", {"input": torch.full((2, 3), -INF), "dim": -1}, nan(2, 3), (-INF,) * 3),
    "up to here": (
        "cumsum",
        {"self": torch.tensor([INF, -INF, 1.0]), "dim": 0},
        torch.tensor([INF, NAN, NAN]),
        (INF, -INF),
    ),
    "a channel": ("native_batch_norm", {"input": torch.ones(1, 3)}, nan(3), (1.0,)),
    "a row": (
        "layer_norm",
        {"input": torch.full((2, 2), INF), "normalized_shape": (2,)},
        nan(2, 2),
        (INF, INF),
    ),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_went_into_a_reduction(name: str) -> None:
    op, arguments, result, terms = REDUCTIONS[name]
    seen = capture(op, arguments, result)
    assert sorted(seen.largest) == sorted(terms)
    assert seen.count == len(terms)


def test_dims_that_the_arguments_do_not_tell_are_read_off_the_shapes() -> None:
    x = torch.tensor([[[INF]], [[1.0]]])
    assert capture("sum", {"x": x, "how": "strangely"}, x.sum((1, 2))).largest == ()  # two dims: not certain
    assert capture("sum", {"x": x, "how": "strangely"}, x.sum(0)).largest == (INF, 1.0)


A, B = torch.full((2, 3, 4), 1e20), torch.full((2, 4, 5), 1e20)
PRODUCTS = {
    "mm": ({"self": A[0], "mat2": B[0]}, A[0] @ B[0]),
    "bmm": ({"self": A, "mat2": B}, A @ B),
    "matmul": ({"self": A[:, None], "other": B[0]}, A[:, None] @ B[0]),
    "mv": ({"self": A[0], "vec": B[0, :, 0]}, A[0] @ B[0, :, 0]),
    "dot": ({"self": A[0, 0], "tensor": B[0, :, 0]}, A[0, 0] @ B[0, :, 0]),
    "linear": ({"arg0": A, "weight": B[0].T, "bias": torch.ones(5)}, A @ B[0]),
    "inner": ({"self": A[0], "other": B[0].T}, A[0] @ B[0]),
    "addmm": ({"self": torch.ones(5), "mat1": A[0], "mat2": B[0]}, A[0] @ B[0]),
    "einsum": ({"equation": "bij,bjk->bik", "operands": [A, B]}, A @ B),
}


@pytest.mark.parametrize("op", PRODUCTS)
def test_row_and_column_of_a_product(op: str) -> None:
    arguments, result = PRODUCTS[op]
    seen = capture(op, arguments, result)
    assert seen.count == 4
    assert seen.largest == pytest.approx((1e40,) * 3)
    assert seen.headroom == pytest.approx(4e40 / torch.finfo(torch.float32).max, rel=1e-5)
    assert op == "einsum" or "largest of 4 products: 1e+20 * 1e+20" in seen.notes


@needs_half
@pytest.mark.parametrize("padding", [0, 1])
def test_patch_of_a_convolution(padding: int) -> None:
    x, w = torch.full((1, 4, 5, 5), 100.0).half(), torch.full((6, 2, 3, 3), 100.0).half()
    result = torch.conv2d(x, w, None, 1, padding, 1, 2)
    arguments = {"input": x, "weight": w, "bias": None, "arg3": 1, "arg4": padding, "arg5": 1, "arg6": 2}
    seen = capture("conv2d", arguments, result)
    # The corner of a padded input meets only four of the kernel's nine places, in two channels.
    assert seen.count == (8 if padding else 18)
    assert seen.headroom == pytest.approx(seen.count * 1e4 / 65504)


HEADROOM = {
    "add": ({"self": half(6e4), "other": half(6e4), "alpha": 2}, 18e4),
    "sub": ({"self": half(-6e4), "other": half(6e4)}, 12e4),
    "mul": ({"self": half(300), "other": half(300)}, 9e4),
    "square": ({"self": half(300)}, 9e4),
    "pow": ({"self": half(300), "exponent": 2}, 9e4),
    "exp": ({"self": half(12)}, math.exp(12)),
    "_to_copy": ({"self": torch.tensor([1e5]), "dtype": torch.float16}, 1e5),
    "copy_": ({"self": half(0), "src": torch.tensor([1e5])}, 1e5),
    "addcdiv": ({"self": half(1), "tensor1": half(6e4), "tensor2": half(0.5), "value": -1}, -119999),
}


@pytest.mark.parametrize("op", HEADROOM)
def test_headroom_of_half_precision(op: str) -> None:
    arguments, true = HEADROOM[op]
    seen = capture(op, arguments, half(INF))
    assert seen.headroom == pytest.approx(abs(true) / 65504, rel=1e-3)


def test_headroom_of_reductions() -> None:
    x = torch.full((100,), 1000.0).half()
    assert capture("sum", {"self": x}, x.sum()).headroom == pytest.approx(1e5 / 65504)


@needs_float8
def test_headroom_of_float8() -> None:
    wide = torch.tensor([1e6])
    narrow = torch.tensor([INF]).to(torch.float8_e5m2)
    assert capture("_to_copy", {"self": wide}, narrow).headroom == pytest.approx(1e6 / 57344)


def test_no_headroom_without_a_true_value() -> None:
    zero = half(0)
    assert capture("div", {"self": half(1), "other": zero}, half(1) / zero).headroom is None
    assert (
        capture("exp", {"self": torch.tensor([1e3], dtype=torch.float64)}, torch.tensor([INF])).headroom
        is None
    )


def test_an_overwritten_argument_needs_its_copy() -> None:
    x = torch.tensor([0.0, 1.0])
    before = x.clone()
    x.div_(0.0)
    blind = capture("div_", {"self": x, "other": 0.0}, x)
    assert blind.inputs[0].numel == 0
    assert blind.operands == (None, 0.0)
    assert any("overwritten" in note for note in blind.notes)
    seen = capture("div_", {"self": x, "other": 0.0}, x, old={"self": before})
    assert seen.inputs[0].zeros == 1
    assert seen.operands == (0.0, 0.0)
    assert not seen.notes


def test_foreach_takes_the_element_that_was_written() -> None:
    many = [torch.ones(2), torch.tensor([INF, 1.0])]
    arguments = {"self": many, "scalars": [torch.ones(2), torch.tensor([0.0, 1.0])]}
    seen = capture("_foreach_mul_", arguments, many[1], old={"self[1]": torch.tensor([INF, 1.0])})
    assert [row.name for row in seen.inputs] == ["self[1]", "scalars[1]"]
    seen = capture("_foreach_mul_", arguments, many[1])
    assert any("self[1] was overwritten" in note for note in seen.notes)


def test_long_lists_are_cut() -> None:
    parts = [torch.tensor([NAN])] * 20
    seen = capture("cat", {"tensors": parts, "dim": 0}, torch.cat(parts))
    assert [row.name for row in seen.inputs] == [f"tensors[{i}]" for i in range(8)]
    assert "tensors: the first 8 of 20 tensors" in seen.notes


def test_targets_and_alignments_are_counted() -> None:
    scores, ignored = torch.randn(3, 4), torch.full((3,), -100)
    seen = capture("cross_entropy", {"input": scores, "target": ignored}, torch.tensor(NAN))
    assert (seen.count, seen.notes[0]) == (0, "0 of 3 targets count (ignore_index -100)")
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0])
    arguments = {"self": scores, "target": torch.ones(3, dtype=torch.long), "weight": weight}
    seen = capture("nll_loss_forward", arguments, torch.tensor(NAN))
    assert "the weights of the counted targets sum to 0" in seen.notes
    arguments = {"log_probs": torch.randn(3, 2, 5), "targets": torch.tensor([[1, 2, 0], [3, 3, 4]])}
    lengths = {"input_lengths": [3, 3], "target_lengths": torch.tensor([2, 3])}
    seen = capture("_ctc_loss", {**arguments, **lengths}, torch.tensor([1.0, INF]))
    assert seen.notes == ("sample 1: 3 labels with 1 repeats need 4 frames, there are 3",)


def fake() -> Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


BAD = torch.tensor([1.0, NAN])
ODD = {
    "sparse": BAD.to_sparse,
    "csr": lambda: BAD[None].to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([BAD, BAD[:1]]),
    "jagged": lambda: torch.nested.nested_tensor([BAD, BAD[:1]], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "float8": lambda: BAD.to(torch.float8_e4m3fn),
    "complex": lambda: BAD.to(torch.complex64),
    "conjugate": lambda: BAD.to(torch.complex64).conj(),
    "meta": lambda: torch.empty(2, device="meta"),
    "empty": lambda: torch.empty(0),
    "scalar": lambda: torch.tensor(NAN),
    "integers": lambda: torch.tensor([1, 2]),
    "booleans": lambda: torch.tensor([True, False]),
    "fake": fake,
    "expanded": lambda: torch.tensor([NAN]).expand(3, 2),
}
ODD_NEEDS = {"jagged": needs_jagged, "float8": needs_float8}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "op", ["mul", "sum", "softmax", "mm", "conv2d", "einsum", "cross_entropy", "unheard_of"]
)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=ODD_NEEDS.get(kind, ())) for kind in ODD])
def test_odd_tensors_never_raise(kind: str, op: str) -> None:
    odd = ODD[kind]()
    for result in (odd, BAD, torch.tensor(NAN)):
        seen = capture(op, {"self": odd, "other": odd, "dim": 0, "many": [odd, None]}, result)
        assert isinstance(seen, Evidence)
        assert json.loads(json.dumps(seen.to_dict(), default=str))


def test_what_cannot_be_read_leaves_a_note() -> None:
    seen = capture("add", {"self": fake(), "other": 1}, BAD)
    assert any(note.startswith("self could not be read") for note in seen.notes)


def test_inside_vmap_the_values_are_all_of_them() -> None:
    found = []

    def divide(x: Tensor) -> Tensor:
        result = x / 0
        found.append(capture("div", {"self": x, "other": 0}, result))
        return result.sum()

    torch.func.vmap(torch.func.grad(divide))(torch.ones(3, 2))
    assert found[0].operands == (1.0, 0)
    assert found[0].inputs[0].shape == (3, 2)


@needs_half
def test_nothing_changes_and_nothing_is_kept() -> None:
    x, y = torch.randn(4, 4).half() * 1e4, torch.randn(4, 4).half() * 1e4
    result = x @ y
    before = [t.clone() for t in (x, y, result)]
    versions = [t._version for t in (x, y, result)]
    state = torch.get_rng_state()
    seen = capture("mm", {"self": x, "mat2": y}, result)
    assert torch.equal(state, torch.get_rng_state())
    for now, then in zip((x, y, result), before):
        assert torch.equal(now.view(torch.int16), then.view(torch.int16))
    assert versions == [t._version for t in (x, y, result)]
    held = [StorageWeakRef(t.untyped_storage()) for t in (x, y, result)]
    del x, y, result, now, then
    gc.collect()
    assert [storage.expired() for storage in held] == [True] * 3
    assert seen.largest
