"""The op laws are sound (no call breaks a row), sharp (what is outside breaks) and complete (all tried)."""

from __future__ import annotations

import functools
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from law_strategies import CASES, FLOATING, REAL, PlainMaker, arguments, calls
from needs import needs, needs_half, needs_torch
from torch.utils._pytree import tree_map_only

from sherlorch import health
from sherlorch.ops import (
    GROUPS,
    Group,
    Law,
    law_of_call,
    law_of_function,
    law_of_name,
    law_of_overload,
    lookup,
    traits,
)
from sherlorch.ops.law import tensors_in

aten = torch.ops.aten
REFUSALS = (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError)
PROFILE = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def overloads_of(name):
    """Every overload, in place or not, to which the lookup gives the row of this name.

    But for those that take names of dimensions, which the schemas of an old torch call strings.
    """
    namespace, _, base = name.rpartition(".")
    for spelling in (base, f"{base}_"):
        packet = getattr(getattr(torch.ops, namespace or "aten"), spelling, None)
        for overload in packet.overloads() if packet else ():
            found = getattr(packet, overload)
            if lookup._group_of_overload(found) is not None and "name" not in overload:
                yield found


LAWS = {name: group.law for group in GROUPS for name in (*group.function_names, *group.aten_names)}
FUNCTIONS = {
    name: list(dict.fromkeys(lookup._functions_called(name)))
    for group in GROUPS
    for name in group.function_names
}
OVERLOADS = {name: list(overloads_of(name)) for group in GROUPS for name in group.aten_names}


# Rows of what an old torch does not have.
NEWER = {"_safe_softmax": needs_torch("2.5", "aten._safe_softmax")}
ROWS = [pytest.param(name, marks=NEWER.get(name, ())) for name in LAWS]


def called(function, args, kwargs):
    """The tensors it returns, or None where it refuses these arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [tensor.resolve_neg() for tensor in tensors_in((function(*args, **kwargs),), {})]
        except REFUSALS:
            return None


def flags(tensor):
    """`(has NaN, has Inf)`."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False, False
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    wide = plain.to(torch.float64)
    return bool(wide.isnan().any()), bool(wide.isinf().any())


def refutes(law, function, args, kwargs):
    """Whether this call breaks the law."""
    before = [flags(tensor) for tensor in tensors_in(args, kwargs)]
    state = any(nan for nan, _ in before), any(inf for _, inf in before)
    results = called(function, args, kwargs)
    if results is None:
        return False
    after = [flags(tensor) for tensor in results if tensor.is_floating_point() or tensor.is_complex()]
    if law is Law.PERMUTES:
        return any(result != state for result in after)
    return not any(state) and any(any(result) for result in after)


def fresh(function, args, kwargs):
    """The arguments, or copies where this function writes in place."""
    name = getattr(function, "__name__", "").partition(".")[0]
    if not name.endswith("_") or name.endswith("__"):
        return args, kwargs
    return tree_map_only(torch.Tensor, torch.clone, (args, kwargs))


# Rows of ops that an old torch does not have.
NEWER = {"_unsafe_index": "2.1", "_unsafe_index_put": "2.1", "_safe_softmax": "2.5"}
ROWS = [
    pytest.param(name, marks=needs(hasattr(aten, name), NEWER[name], name)) if name in NEWER else name
    for name in LAWS
]


@functools.cache
def fitting(name):
    """Each `(recipe, dtype)` with the functions of this name that accept it and that have a law for it."""
    pairs = {}
    for pair in itertools.product(CASES[name], FLOATING):
        for function in (*FUNCTIONS.get(name, ()), *OVERLOADS.get(name, ())):
            args, kwargs = arguments(pair[0], PlainMaker(pair[1]))
            if law_of_call(function, args, kwargs) and called(function, args, kwargs) is not None:
                pairs.setdefault(pair, []).append(function)
    return pairs


@pytest.mark.parametrize("name", ROWS)
def test_each_row_exists_and_has_a_recipe(name: str) -> None:
    for found in (FUNCTIONS.get(name), OVERLOADS.get(name)):
        assert found or found is None
    for function in (*FUNCTIONS.get(name, ()), *OVERLOADS.get(name, ())):
        assert any(function in accepted for accepted in fitting(name).values()), function


def test_no_recipe_is_without_its_row() -> None:
    assert set(CASES) == set(LAWS)


@pytest.mark.parametrize("name", ROWS)
def test_each_row_is_sound(name: str) -> None:
    @settings(max_examples=20, **PROFILE)
    @given(calls(list(fitting(name)), LAWS[name] is Law.PERMUTES))
    def nothing_refutes(call):
        for function in (*FUNCTIONS.get(name, ()), *OVERLOADS.get(name, ())):
            args, kwargs = fresh(function, *call)
            law = law_of_call(function, args, kwargs)
            assert law in (LAWS[name], None), function
            assert law is None or not refutes(law, function, args, kwargs), function

    nothing_refutes()


WITNESSES = {
    Law.PERMUTES: {
        "a part of it": (torch.narrow, lambda m: (m.x(3), 0, 1, 2)),
        "expand to nothing": (torch.Tensor.expand, lambda m: (m.x(1), m.size())),
        "complex": (torch.complex, lambda m: m.pair()),
        "tril": (torch.tril, lambda m: (m.x(2, 2),)),
        "the bits of another dtype": (torch.Tensor.view, lambda m: (m.flat(2), torch.bfloat16)),
        "cat with promotion": (torch.cat, lambda m: ([m.x(2), torch.tensor([100_000])],)),
        "a cast": (torch.Tensor.to, lambda m: (m.x(2), torch.float16)),
    },
    Law.SELECTS: {
        "add": (torch.add, lambda m: m.pair()),
        "median of nothing": (torch.median, lambda m: (m.x(m.size()),)),
        "pad": (F.pad, lambda m: (m.x(2), (1, 1), "constant", math.inf)),
        "masked_fill": (torch.masked_fill, lambda m: (m.x(2), m.mask(2), -math.inf)),
        "where with a number": (torch.where, lambda m: (m.mask(2), m.x(2), math.inf)),
        "where with promotion": (
            torch.where,
            lambda m: (m.mask(2), m.x(2), torch.tensor(1e300, dtype=torch.float64)),
        ),
        "slice_scatter with a cast": (torch.slice_scatter, lambda m: (m.x(2), m.x(2).double() * 1e300)),
        "scatter with reduce": (
            torch.scatter,
            lambda m: (m.x(2), 0, m.index(2, 2), m.x(2), {"reduce": "multiply"}),
        ),
        "index_put that adds": (torch.index_put, lambda m: (m.x(2), (m.index(2, 2),), m.x(2), True)),
    },
    Law.BOUNDED: {
        "exp": (torch.exp, lambda m: (m.any(),)),
        "square": (torch.square, lambda m: (m.any(),)),
        "sinc": (torch.sinc, lambda m: (m.any(),)),
        "selu": (torch.selu, lambda m: (m.any(),)),
        "hardswish": (F.hardswish, lambda m: (m.any(),)),
        "log_softmax": (torch.log_softmax, lambda m: (m.x(2, 2), 0)),
        "mean": (torch.mean, lambda m: (m.any(),)),
        "round to decimals": (torch.round, lambda m: (m.any(), {"decimals": 2})),
        "clamp to infinity": (torch.clamp, lambda m: (m.any(), math.inf)),
        "softmax with a cast": (torch.softmax, lambda m: (m.x(2), 0, torch.float16)),
        "max_pool with gaps": (F.max_pool1d, lambda m: (m.x(1, 1, 9), 2, 1, 1, 10)),
        "abs of a complex number": (torch.abs, lambda m: (torch.complex(m.x(2).float(), m.x(2).float()),)),
    },
}


@pytest.mark.parametrize(
    ("law", "name"),
    [
        pytest.param(law, name, marks=needs_half if name == "softmax with a cast" else ())
        for law, names in WITNESSES.items()
        for name in names
    ],
)
def test_the_same_strategy_breaks_what_is_outside_the_law(law: Law, name: str) -> None:
    function, recipe = WITNESSES[law][name]
    strategy = calls([(recipe, dtype) for dtype in REAL], law is Law.PERMUTES)

    args, kwargs = find(
        strategy,
        lambda call: refutes(law, function, *call),
        settings=settings(max_examples=500, phases=[Phase.generate], **PROFILE),
    )

    assert law_of_call(function, args, kwargs) is not law


def test_a_witness_that_obeys_is_not_found() -> None:
    strategy = calls([(lambda m: (m.any(),), torch.float32)], False)
    with pytest.raises(NoSuchExample):
        find(strategy, lambda call: refutes(Law.BOUNDED, torch.tanh, *call), settings=settings(**PROFILE))


UNARY = {
    name: function
    for name, functions in FUNCTIONS.items()
    for function in functions
    if law_of_function(function) is Law.BOUNDED
    and not name.endswith("softmax")
    and name not in ("glu", "softmin")
}


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bounded_function_is_finite_at_every_short_float(name: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.isfinite()]
    for values in (finite, finite.float(), finite.double()):
        assert not refutes(Law.BOUNDED, UNARY[name], (values.clone(),), {}), values.dtype


@pytest.mark.parametrize(
    ("func", "law"),
    [
        (torch.reshape, Law.PERMUTES),
        (torch.Tensor.reshape, Law.PERMUTES),
        (torch.Tensor.T.__get__, Law.PERMUTES),
        (torch.Tensor.data.__get__, Law.PERMUTES),
        (torch.Tensor.real.__get__, Law.SELECTS),
        (torch.Tensor.__getitem__, Law.SELECTS),
        (torch.split, Law.SELECTS),
        (torch.Tensor.split, Law.SELECTS),
        (F.softmax, Law.BOUNDED),
        (F.gelu, None),
        (F.relu_, Law.BOUNDED),
        (torch.special.expit, Law.BOUNDED),
        (torch.Tensor.grad.__get__, None),
        (torch.Tensor.shape.__get__, None),
        (torch.Tensor.to, None),
        (torch.Tensor.copy_, None),
        (torch.Tensor.__setitem__, None),
        (torch.as_strided, None),
        (torch.cat, None),  # of two dtypes it promotes
        (torch.where, None),
        (torch.clamp, None),
        (aten.view.default, Law.PERMUTES),
        (aten.view, None),
    ],
)
def test_law_of_function(func: object, law: Law | None) -> None:
    assert law_of_function(func) is law


def test_a_law_is_conditional_where_the_arguments_decide() -> None:
    assert lookup.has_conditional_law(torch.cat)
    assert lookup.has_conditional_law(aten.where.self)
    assert not lookup.has_conditional_law(torch.reshape)
    assert not lookup.has_conditional_law(torch.add)


def test_a_function_of_the_user_has_no_law() -> None:
    def view(tensor):
        return tensor / 0

    class Unhashable:
        __hash__ = None

        def view(self):
            return None

    view.__module__ = "torch"
    assert law_of_function(view) is None
    assert law_of_call(Unhashable().view, (torch.ones(2),)) is None
    assert law_of_call(Unhashable(), (torch.ones(2),)) is None


@pytest.mark.parametrize(
    ("overload", "law"),
    [
        (aten.view.default, Law.PERMUTES),
        (aten.view.dtype, None),
        (aten._unsafe_view.default, Law.PERMUTES),
        (aten.transpose.int, Law.PERMUTES),
        (aten.t_.default, Law.PERMUTES),
        (aten.detach.default, Law.PERMUTES),
        (aten.clone.default, Law.PERMUTES),
        (aten.clone.out, None),
        (aten._to_copy.default, None),
        (aten.copy_.default, None),
        (aten.expand.default, Law.SELECTS),
        (aten.slice.Tensor, Law.SELECTS),
        (aten.slice_backward.default, Law.SELECTS),
        (aten.embedding.default, Law.SELECTS),
        (aten.embedding_dense_backward.default, None),
        (aten.scatter.src, Law.SELECTS),
        (aten.scatter_.src, Law.SELECTS),
        (aten.scatter.value, None),
        (aten.scatter.reduce, None),
        (aten.max.dim, Law.SELECTS),
        (aten.max.other, None),
        (aten.sort.values, None),
        (aten.sort.int, None),
        (aten.masked_fill.Scalar, None),
        (aten.masked_fill.Tensor, None),
        (aten.index_fill.int_Scalar, None),
        (aten.constant_pad_nd.default, None),
        (aten.as_strided.default, None),
        (aten.relu_.default, Law.BOUNDED),
        (aten._softmax.default, Law.BOUNDED),
        (aten.softmax.int, None),  # takes a dtype
        (aten._log_softmax.default, None),
        (aten.add.Tensor, None),
        (aten.cat.default, None),  # of two dtypes it promotes
        (aten.where.self, None),
        (torch.ops.prims.transpose.default, Law.PERMUTES),
        (torch.ops.prims.convert_element_type.default, None),
    ],
)
def test_law_of_overload(overload: torch._ops.OpOverload, law: Law | None) -> None:
    assert law_of_overload(overload) is law
    assert law_of_name(str(overload)) is law


def test_only_the_namespaces_of_torch_have_laws() -> None:
    library = torch.library.Library("sherlorch_test_ops", "DEF")
    library.define("view(Tensor x) -> Tensor")
    assert law_of_overload(torch.ops.sherlorch_test_ops.view.default) is None


half, single, double = torch.ones(2).half(), torch.ones(2), torch.tensor(1e300, dtype=torch.float64)
mask, places = torch.tensor([True, False]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "law"),
    [
        (torch.Tensor.view, (single, [2]), {}, Law.PERMUTES),
        (torch.Tensor.view, (single, torch.int32), {}, None),
        (torch.Tensor.view, (single,), {"dtype": torch.int32}, None),
        (torch.cat, ([single, single],), {}, Law.PERMUTES),
        (torch.cat, (), {"tensors": [single, single]}, Law.PERMUTES),
        (torch.cat, ([half, single],), {}, None),
        (torch.cat, ([single, single],), {"out": half}, None),
        (aten.cat.default, ([single, single], 0), {}, Law.PERMUTES),
        (aten.cat.default, ([half, places],), {}, None),
        (torch.where, (mask, single, single), {}, Law.SELECTS),
        (torch.where, (mask, single, double), {}, None),
        (torch.where, (mask, single, math.inf), {}, None),
        (aten.where.self, (mask, half, half), {}, Law.SELECTS),
        (torch.scatter, (single, 0, places, single), {}, Law.SELECTS),
        (torch.scatter, (single, 0, places), {"src": single}, Law.SELECTS),
        (torch.scatter, (single, 0, places, 1.0), {}, None),
        (torch.scatter, (single, 0, places), {"value": math.inf}, None),
        (torch.scatter, (single, 0, places, single), {"reduce": "add"}, None),
        (torch.Tensor.index_put_, (single, (places,), single), {}, Law.SELECTS),
        (torch.Tensor.index_put_, (single, (places,), single), {"accumulate": True}, None),
        (F.embedding, (places, torch.ones(2, 2)), {"max_norm": None}, Law.SELECTS),
        (F.embedding, (places, torch.ones(2, 2)), {"max_norm": 1.0}, None),
        (F.embedding, (places, torch.ones(2, 2), None, 1.0), {}, None),
        (torch.clamp, (single, -1, 1), {}, Law.BOUNDED),
        (torch.clamp, (single,), {"max": math.inf}, None),
        (torch.clamp, (half, -1e5), {}, None),
        (torch.clamp, (places, 0.5), {}, Law.BOUNDED),
        (torch.clamp, (single, math.nan), {}, None),
        (torch.clamp, (single, double), {}, None),
        (F.max_pool2d, (single, 2), {"dilation": (1, 1)}, Law.BOUNDED),
        (F.max_pool2d, (single, 2), {"dilation": 2}, None),
        (aten.max_pool2d_with_indices.default, (single, [2, 2], [2, 2], [0, 0], [1, 2]), {}, None),
        (torch.round, (single,), {}, Law.BOUNDED),
        (torch.round, (single,), {"decimals": 1}, None),
        (F.softmax, (single, 0, 3), {"dtype": None}, Law.BOUNDED),
        (F.softmax, (single, 0), {"dtype": torch.float16}, None),
        (torch.sin, (single,), {"out": half}, None),
        (torch.sin, (torch.ones(1, dtype=torch.complex64),), {}, None),
        (torch.Tensor.add, (single, single), {}, None),
    ],
)
def test_law_of_call(func: object, args: tuple, kwargs: dict, law: Law | None) -> None:
    assert law_of_call(func, args, kwargs) is law


@pytest.mark.parametrize(
    ("op_name", "law"),
    [
        ("view", Law.PERMUTES),
        ("relu_", Law.BOUNDED),
        ("cat", None),
        ("aten.no_such_op.default", None),
        ("", None),
    ],
)
def test_law_of_name(op_name: str, law: Law | None) -> None:
    assert law_of_name(op_name) is law


def group(**changes):
    return Group(
        **{"law": Law.SELECTS, "equation": "y = x", "proof": "Nothing is done.", "names": ("x",)} | changes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"law": "selects"}, r"must be a Law such as Law\.SELECTS, got 'selects'"),
        ({"names": "view"}, r"must be a tuple of str such as \('view', 'reshape'\), got 'view'"),
        ({"aten": (aten.view,)}, r"must be a tuple of str"),
        ({"condition": True}, r"condition must be callable with .*, got True"),
        ({"names": ()}, r"'y = x' names none"),
    ],
)
def test_a_wrong_group_is_refused(changes: dict, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        group(**changes)


def test_a_second_row_of_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`x` has two rows, in 'y = x' and in 'y = 2x': remove one"):
        lookup._index([("x", group()), ("x", group(equation="y = 2x"))])


def test_each_group_gives_its_reason() -> None:
    for each in GROUPS:
        assert each.equation
        assert each.proof.endswith(".")
        assert not set(each.left_out) & {*each.function_names, *each.aten_names}
        assert each.overloads_excluded <= set(each.left_out)


def _affine(maker):
    return (maker.x(2, 3), (3,), maker.x(3), maker.x(3))


CARRYING = {  # by the names in traits.CARRIES: recipes for the functions and overloads of that name
    "mm": (lambda m: (m.x(2, 3), m.x(3, 2)),),
    "bmm": (lambda m: (m.x(2, 2, 3), m.x(2, 3, 2)),),
    "addmm": (lambda m: (m.x(2), m.x(2, 3), m.x(3, 2)),),
    "baddbmm": (lambda m: (m.x(2, 2), m.x(2, 2, 3), m.x(2, 3, 2)),),
    "matmul": (
        lambda m: (m.x(3), m.x(3)),
        lambda m: (m.x(2, 3), m.x(3)),
        lambda m: (m.x(4, 2, 3), m.x(3, 2)),
    ),
    "linear": (lambda m: (m.x(2, 3), m.x(4, 3), m.x(4)), lambda m: (m.x(3), m.x(4, 3))),
    "native_layer_norm": (lambda m: (*_affine(m), 1e-5),),
    "layer_norm": (_affine,),
    "add": (lambda m: m.pair(), lambda m: (m.any(), 2.0)),
    "sub": (lambda m: m.pair(), lambda m: (m.any(), 2.0)),
    "mul": (lambda m: m.pair(), lambda m: (m.any(), 0.0), lambda m: (m.x(2), m.mask(2))),
}
OPERATORS = {"__matmul__": "matmul", "__rmatmul__": "matmul"} | {
    f"__{side}{name}__": name for side in ("", "r") for name in ("add", "sub", "mul")
}
SUMMED = sorted(health.SUMMED, key=str)


def absorbs(function, args, kwargs):
    """Has a call lost every NaN and infinity of its inputs?"""
    results = called(function, args, kwargs)
    if not results or not results[0].numel():
        return False
    return not any(flags(results[0])) and any(any(flags(tensor)) for tensor in tensors_in(args, kwargs))


def test_each_op_that_carries_has_a_recipe() -> None:
    assert set(CARRYING) | set(OPERATORS) == traits.CARRIES


@pytest.mark.parametrize("name", sorted(traits.CARRIES))
def test_what_carries_absorbs_nothing(name: str) -> None:
    recipes = CARRYING[OPERATORS.get(name, name)]
    homes = (torch, torch.Tensor, F, torch._C._nn)
    functions = [found for home in homes if callable(found := getattr(home, name, None))]
    packet = getattr(aten, name, None)
    functions += [getattr(packet, each) for each in packet.overloads() if "out" not in each] if packet else []
    assert functions

    @settings(max_examples=60, **PROFILE)
    @given(calls(list(itertools.product(recipes, SUMMED)), True))
    def nothing_is_absorbed(call):
        for function in functions:
            assert not absorbs(function, *call), function

    nothing_is_absorbed()


@pytest.mark.parametrize(
    ("function", "recipe"),
    [
        (torch.relu, lambda m: (m.any(),)),
        (torch.div, lambda m: m.pair()),
        (torch.maximum, lambda m: m.pair()),
        (torch.softmax, lambda m: (m.x(2, 2), 0)),
        (torch.add, lambda m: (*m.pair(), {"alpha": 0.0})),
        (torch.addmm, lambda m: (m.x(2), m.x(2, 3), m.x(3, 2), {"beta": 0.0})),
        (torch.embedding, lambda m: (m.x(3, 2), m.index(2, 2))),
    ],
    ids=lambda it: getattr(it, "__name__", ""),
)
def test_the_same_strategy_finds_what_absorbs(function: object, recipe: object) -> None:
    strategy = calls([(recipe, dtype) for dtype in (torch.float32, torch.float64)], True)
    if function is torch.add:  # 0 * NaN is NaN: adding nothing of it still carries
        with pytest.raises(NoSuchExample):
            find(strategy, lambda call: absorbs(function, *call), settings=settings(**PROFILE))
        return
    find(strategy, lambda call: absorbs(function, *call), settings=settings(max_examples=1000, **PROFILE))
