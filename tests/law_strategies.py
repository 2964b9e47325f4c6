"""Calls for the rows of the op laws: one small recipe per row, and the strategy that fills it with values."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from needs import has_torch

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = tuple(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name))
FLOATING = (*REAL, torch.complex64, torch.complex128, *FLOAT8)  # float8 since torch 2.1

FINITE = ("0", "-0", "subnormal", "-subnormal", "max", "-max", "max/2", "1", "-1", "-2.5", "0.3", "3")
NONFINITE = ("nan", "inf", "-inf")


def number(name, dtype):
    """The value of that name in this dtype, as a Python float."""
    info = torch.finfo(dtype)
    sign, name = (-1.0, name[1:]) if name[0] == "-" else (1.0, name)
    named = {"subnormal": info.tiny / 2, "max": info.max, "max/2": info.max / 2}
    return math.copysign(1.0, sign) * named[name] if name in named else sign * float(name)


class Maker:
    """Makes the tensors of one call; `draw` is hypothesis's."""

    def __init__(self, draw, dtype, nonfinite):
        self.draw = draw
        self.dtype = dtype
        self.names = st.lists(st.sampled_from(FINITE + NONFINITE * nonfinite), min_size=1, max_size=3)

    def size(self, low=0, high=3):
        return self.draw(st.integers(low, high))

    def layout(self):
        return self.draw(st.sampled_from(("contiguous", "transposed", "strided", "expanded")))

    def drawn_names(self):
        return self.draw(self.names)

    def values(self, shape):
        """A contiguous tensor in which the drawn values take turns."""
        names = self.drawn_names()
        values = [number(name, self.dtype) for name in names]
        count = math.prod(shape)
        real = torch.tensor((values * count)[:count], dtype=torch.float64).reshape(shape)
        if self.dtype.is_complex:
            part = torch.empty(0, dtype=self.dtype).real.dtype
            return torch.complex(real.to(part), real.flip(tuple(range(real.dim()))).to(part))
        return real.to(self.dtype)

    def flat(self, *shape):
        return self.values(shape)

    def x(self, *shape):
        """A tensor of this shape with drawn strides."""
        layout = self.layout()
        if layout == "transposed" and len(shape) > 1:
            return self.values(shape[::-1]).permute(*range(len(shape) - 1, -1, -1))
        if layout == "strided" and shape:
            return self.values((*shape[:-1], 2 * shape[-1]))[..., ::2]
        if layout == "expanded" and shape and shape[0] > 0:
            return self.values((1, *shape[1:])).expand(shape)
        return self.values(shape)

    def any(self):
        """A tensor of any shape, empty and 0-d ones too."""
        return self.x(*(self.size() for _ in range(self.size())))

    def pair(self):
        """Two tensors that broadcast."""
        rows, columns = self.size(), self.size()
        other = ((rows, columns), (columns,), (1, columns), ())[self.size()]
        return self.x(rows, columns), self.x(*other)

    def index(self, high, *shape):
        count = math.prod(shape)
        return torch.arange(self.size(), self.size() + 3 * count + 3)[:count].reshape(shape) % high

    def mask(self, *shape):
        return self.index(2, *shape).bool()


class PlainMaker(Maker):
    """The same without hypothesis: ordinary values, to see which recipe fits which function."""

    def __init__(self, dtype):
        super().__init__(None, dtype, False)

    def size(self, low=0, high=3):
        return max(low, min(2, high))

    def layout(self):
        return "contiguous"

    def drawn_names(self):
        return ["1", "-2.5", "3"]


@st.composite
def calls(draw, fitting, nonfinite):
    """`(args, kwargs)` of one of the fitting `(recipe, dtype)` pairs."""
    recipe, dtype = draw(st.sampled_from(fitting))
    return arguments(recipe, Maker(draw, dtype, nonfinite))


def arguments(recipe, maker):
    args = recipe(maker)
    return (args[:-1], args[-1]) if args and isinstance(args[-1], dict) else (args, {})


CASES = {}


def case(names, *recipes):
    for name in names.split():
        CASES[name] = CASES.get(name, []) + list(recipes)


# Permutes
case(
    """
    alias alias_copy conj contiguous data detach detach_copy flatten positive ravel requires_grad_
    resolve_conj resolve_neg squeeze squeeze_copy clone conj_physical _conj _conj_copy _neg_view
    _neg_view_copy lift lift_fresh lift_fresh_copy _conj_physical prims.view_of prims.clone
    """,
    lambda m: (m.any(),),
)
case("adjoint mH mT matrix_H t t_copy numpy_T T H fliplr flipud", lambda m: (m.x(m.size(), m.size()),))
case(
    "squeeze squeeze_copy prims.squeeze",
    lambda m: (m.x(1, m.size()), 0),
    lambda m: (m.x(1, m.size(), 1), [0, 2]),
)
case("flatten", lambda m: (m.x(2, m.size(), m.size()), 0, 1))
case("permute permute_copy prims.transpose", lambda m: (m.x(m.size(), m.size(), m.size()), [2, 0, 1]))
case("reshape _reshape_copy prims.reshape", lambda m: (m.x(2, 3), [3, 2]), lambda m: (m.x(), [1, 1]))
case("view view_copy _unsafe_view", lambda m: (m.flat(2, 3), [3, 2]), lambda m: (m.x(), [1, 1]))
case("_reshape_alias _reshape_alias_copy", lambda m: (m.flat(2, 3), [3, 2], [2, 1]))
case(
    "moveaxis movedim swapaxes swapdims transpose transpose_copy",
    lambda m: (m.x(m.size(), m.size(), m.size()), 0, 2),
    lambda m: (m.x(m.size(), m.size()), [0, 1], [1, 0]),
)
case("unflatten", lambda m: (m.x(4, m.size()), 0, [2, 2]))
case("prims.split_dim", lambda m: (m.x(4, m.size()), 0, 2))
case("prims.collapse_view", lambda m: (m.flat(2, 3, m.size()), 0, 1))
case("unsqueeze unsqueeze_copy", lambda m: (m.any(), 0))
case("view_as_complex view_as_complex_copy", lambda m: (m.flat(m.size(), 2),))
case("view_as_real view_as_real_copy", lambda m: (m.any(),))
case("as_subclass", lambda m: (m.any(), torch.Tensor))
# Given nothing the kernel of torch 2.0 divides by zero, and takes the process with it.
SOME = 0 if has_torch("2.1") else 1
case("channel_shuffle", lambda m: (m.x(m.size(), 4, 2, 1), 2))
case("native_channel_shuffle", lambda m: (m.x(m.size(SOME), 4, 2, 1), 2))
case("flip prims.rev", lambda m: (m.x(m.size(), m.size(), m.size()), [0, 2]))
case("pixel_shuffle", lambda m: (m.x(m.size(), 4, 2, 1), 2))
case("pixel_unshuffle", lambda m: (m.x(m.size(), 1, 4, 2), 2))
case("roll", lambda m: (m.any(), [1]), lambda m: (m.x(m.size(), m.size()), [1, 2], [0, 1]))
case("rot90", lambda m: (m.x(m.size(), m.size()), 1, [0, 1]))
case("cat concat concatenate", lambda m: ([m.x(m.size(), 2), m.x(m.size(), 2), m.x(0)], 0))
case("stack column_stack row_stack dstack hstack vstack", lambda m: ([m.x(2, 3), m.x(2, 3)],))
case("complex", lambda m: m.pair())

# Selects
case("atleast_1d atleast_2d atleast_3d", lambda m: (m.any(),), lambda m: ([m.any(), m.any()],))
case("chunk unsafe_chunk", lambda m: (m.x(m.size(), 2), 2))
case("diagonal diagonal_copy linalg_diagonal tril triu", lambda m: (m.x(m.size(), m.size()),))
case("dsplit hsplit vsplit", lambda m: (m.x(2, 2, 2), 2), lambda m: (m.x(2, 2, 3), [1]))
case(
    "tensor_split",
    lambda m: (m.x(m.size(), 2), 2),
    lambda m: (m.x(3, m.size()), [1]),
    lambda m: (m.x(3, 1), torch.tensor([1])),
)
case("imag real", lambda m: (m.any(),))
case("narrow narrow_copy", lambda m: (m.x(3, m.size()), 0, 1, 2), lambda m: (m.x(3), 0, torch.tensor(1), 1))
case("reshape_as view_as", lambda m: (m.flat(2, 3), m.x(3, 2)))
case("select select_copy", lambda m: (m.x(3, m.size()), 0, 1))
case("slice slice_copy", lambda m: (m.x(m.size(), m.size()), 0, 1, 3, 2))
case(
    "split split_copy unsafe_split split_with_sizes split_with_sizes_copy unsafe_split_with_sizes",
    lambda m: (m.x(3, m.size()), 2),
    lambda m: (m.x(3, m.size()), [1, 2]),
)
case("unbind unbind_copy", lambda m: (m.x(m.size(), m.size()),))
case("unfold unfold_copy", lambda m: (m.x(4, m.size()), 0, 2, m.size(1)))
case("unfold", lambda m: (m.x(1, 2, 3, 3), 2, 1, m.size(0, 1)))
case("im2col", lambda m: (m.x(1, 2, 3, 3), [2, 2], [1, 1], [m.size(0, 1)] * 2, [1, 1]))
case(
    "__getitem__",
    lambda m: (m.x(3, m.size()), 0),
    lambda m: (m.x(3, m.size()), (slice(1, None), None, ...)),
    lambda m: (m.x(3, m.size()), m.index(3, m.size())),
    lambda m: (m.x(2, 3), m.mask(2, 3)),
)
case("index_select", lambda m: (m.x(3, m.size()), 0, m.index(3, m.size())))
case("masked_select", lambda m: (m.x(2, 3), m.mask(2, 3)))
case("take", lambda m: (m.x(2, 3), m.index(6, m.size(), 2)))
case("take_along_dim", lambda m: (m.x(2, 3), m.index(2, m.size(), 3), 0))
case("gather", lambda m: (m.x(2, 3), 0, m.index(2, m.size(), 3)))
case(
    "embedding",
    lambda m: (m.x(3, m.size()), m.index(3, m.size())),
    lambda m: (m.index(3, m.size()), m.x(3, m.size())),
)
case("index _unsafe_index", lambda m: (m.x(3, m.size()), [m.index(3, m.size())]))
case("broadcast_tensors", lambda m: m.pair(), lambda m: (list(m.pair()),))
case("broadcast_to expand expand_copy", lambda m: (m.x(1, 2), [m.size(), 2]))
case("expand_as", lambda m: (m.x(1, 2), m.x(m.size(), 2)))
case("cartesian_prod", lambda m: (m.x(m.size()), m.x(2)), lambda m: ([m.x(m.size()), m.x(2)],))
case("combinations", lambda m: (m.x(m.size()), 2))
case(
    "meshgrid",
    lambda m: (m.x(m.size()), m.x(2)),
    lambda m: ([m.x(m.size()), m.x(2)],),
    lambda m: ([m.x(m.size()), m.x(2)], {"indexing": "ij"}),
)
case("repeat tile", lambda m: (m.x(1, 2), [m.size(), 2]))
case(
    "repeat_interleave",
    lambda m: (m.any(), m.size()),
    lambda m: (m.x(3), m.index(3, 3), 0),
    lambda m: (m.index(3, 3),),
)
case("_pad_circular reflection_pad1d replication_pad1d", lambda m: (m.x(1, 2, 3), [1, 2]))
case("_pad_circular reflection_pad2d replication_pad2d", lambda m: (m.x(1, 2, 2, 3), [1, 2, 1, 0]))
case("reflection_pad3d replication_pad3d", lambda m: (m.x(1, 1, 2, 2, 2), [1, 1, 1, 0, 0, 1]))
for rank in (1, 2, 3):
    case(
        f"upsample_nearest{rank}d _upsample_nearest_exact{rank}d",
        lambda m, rank=rank: (m.x(1, 2, *[2] * rank), [m.size(1)] * rank),
        lambda m, rank=rank: (m.x(1, 2, *[2] * rank), None, [1.5] * rank),
    )
case("prims.broadcast_in_dim", lambda m: (m.x(1, 2), [m.size(), 2], [0, 1]))
case("diag", lambda m: (m.x(m.size()),), lambda m: (m.x(m.size(), m.size()),))
case("diag_embed diagflat", lambda m: (m.x(m.size(), m.size()),))
case("diagonal_backward", lambda m: (m.x(2), [2, 3], 0, 0, 1))
case("select_backward", lambda m: (m.x(2), [3, 2], 0, 1))
case("slice_backward", lambda m: (m.x(2, 2), [4, 2], 0, 1, 3, 1))
case("value_selecting_reduction_backward", lambda m: (m.x(2), 0, m.index(3, 2), [3, 2], False))
case("amax amin", lambda m: (m.x(2, m.size()), [0], False))
case("aminmax", lambda m: (m.x(2, 3),), lambda m: (m.x(2, m.size()), {"dim": 0}))
case("cummax cummin msort", lambda m: (m.x(m.size(), m.size()), 0))
case("kthvalue", lambda m: (m.x(3, m.size()), m.size(1), 0))
case("mode", lambda m: (m.x(3, m.size()), 0))
case("msort", lambda m: (m.any(),))
case(
    "sort",
    lambda m: (m.x(m.size(), m.size()), 0),
    lambda m: (m.x(m.size(), m.size()), {"stable": True, "dim": 0}),
)
case("topk", lambda m: (m.x(3, m.size()), m.size(), 0))
case("max min", lambda m: (m.x(2, 3),), lambda m: (m.x(2, m.size()), 0), lambda m: m.pair())
case("index_copy", lambda m: (m.x(3, 2), 0, m.index(3, 2), m.x(2, 2)))
case("masked_scatter", lambda m: (m.x(2, 3), m.mask(2, 3), m.x(2, 3)))
case("scatter", lambda m: (m.x(3, 2), 0, m.index(3, 2, 2), m.x(2, 2)))
case("block_diag", lambda m: (m.x(2, m.size()), m.x(1, 2)), lambda m: ([m.x(2, m.size()), m.x(1, 2)],))
case("diagonal_scatter", lambda m: (m.x(3, 3), m.x(3)))
case("fmax fmin maximum minimum", lambda m: m.pair())
case("select_scatter", lambda m: (m.x(3, 2), m.x(2), 0, 1))
case("slice_scatter", lambda m: (m.x(4, m.size(2, 2)), m.x(2, 2), 0, 1, 3))
case("threshold_backward", lambda m: (*m.pair(), 0.0))
case("hardtanh_backward", lambda m: (*m.pair(), -1.0, 1.0))
case(
    "where",
    lambda m: (m.mask(2, 3), m.x(2, 3), m.x(3)),
    lambda m: (m.x(2, 3), m.mask(2, 3), m.x(2, 1)),
    lambda m: (m.any(),),
)
case(
    "index_put _unsafe_index_put",
    lambda m: (m.x(3, 2), (m.index(3, 2),), m.x(2, 2)),
    lambda m: (m.x(3, 2), [m.index(3, 2)], m.x(2), False),
)
case("put", lambda m: (m.x(2, 3), m.index(6, 4), m.x(4)))

# Bounded
case(
    """
    abs absolute ceil deg2rad fix floor frac hardshrink nan_to_num neg negative relu sign sgn trunc
    __abs__ __neg__ log_sigmoid logsigmoid log_sigmoid_forward mish relu6 silu softshrink softsign
    tanhshrink angle arctan atan cos erf erfc sigmoid sin tanh expit hardsigmoid special_erf special_erfc
    special_expit round
    """,
    lambda m: (m.any(),),
)
case("hardshrink softshrink", lambda m: (m.any(), 1.5))
case("nan_to_num", lambda m: (m.any(), {"nan": math.inf}))
case("glu", lambda m: (m.x(4, m.size()), 0))
case(
    "softmax softmin _safe_softmax _softmax special_softmax",
    lambda m: (m.x(m.size(), m.size()), m.size(0, 1)),
    lambda m: (m.x(m.size(), m.size()), m.size(0, 1), False),
)
case("arctan2 atan2 copysign", lambda m: m.pair())
case("copysign", lambda m: (m.any(), -1.0))
case(
    "clamp clip hardtanh threshold",
    lambda m: (m.any(), -1.0, 1.0),
    lambda m: (m.any(), None, 100),
    lambda m: (*m.pair(), m.x()),
)
case("clamp_max clamp_min", lambda m: (m.any(), 1.0), lambda m: m.pair())
for rank in (1, 2, 3):
    case(
        f"max_pool{rank}d max_pool{rank}d_with_indices",
        lambda m, rank=rank: (
            m.x(1, m.size(1), *[3] * rank),
            [m.size(2)] * rank,
            [m.size(1)] * rank,
            [1] * rank,
        ),
    )
    case(
        f"adaptive_max_pool{rank}d adaptive_max_pool{rank}d_with_indices",
        lambda m, rank=rank: (m.x(1, m.size(1), *[m.size(1)] * rank), [m.size(1)] * rank),
    )
