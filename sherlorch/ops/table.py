"""The table of laws: data only, grouped by law and reason.  Casts are in no group."""

from __future__ import annotations

from sherlorch.ops.law import (
    Group,
    Law,
    no_renorm,
    numbers_fit,
    overwrites,
    same_dtype,
    source_is_tensor,
    tensors_only,
    undilated,
)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_CAST = "may cast: narrowing makes Inf, saturation heals it"
_FILL = "writes a number, and that may be infinite"
_ADDS = "adds what meets in one place"
_PROMOTES = "promotes two tensors to one dtype"
_DOMAIN = "has finite inputs without a finite value"
_OVERFLOWS = "overflows near the largest finite value"

_PERMUTES = (
    Group(
        law=Law.PERMUTES,
        equation="y[i] = x[p(i)], p one-to-one and onto, by strides",
        proof="Only sizes, strides and lazy sign bits are rewritten, and no element is dropped.",
        names=_names("""
            adjoint alias_copy conj contiguous data detach detach_copy flatten mH mT moveaxis movedim
            permute permute_copy positive ravel requires_grad_ reshape resolve_conj resolve_neg squeeze
            squeeze_copy swapaxes swapdims t t_copy transpose transpose_copy unflatten unsqueeze
            unsqueeze_copy view view_as_complex view_as_complex_copy view_as_real view_as_real_copy
            view_copy
        """),
        functions=_names("H T as_subclass"),
        aten=_names("""
            _conj _conj_copy _neg_view _neg_view_copy _reshape_alias _reshape_alias_copy _reshape_copy
            _unsafe_view alias lift lift_fresh matrix_H numpy_T prims.collapse_view prims.reshape
            prims.split_dim prims.squeeze prims.transpose prims.view_of
        """),
        overloads_excluded=frozenset({"view.dtype", "view_copy.dtype"}),
        left_out={
            "view.dtype": "reads the bits as another dtype; so does `Tensor.view(dtype)`",
            "view_copy.dtype": "reads the bits as another dtype",
            "as_strided": "reaches elements of the storage that are not its input's",
            "set_": "swaps the storage",
            "resize_": "uncovers memory that nobody wrote",
            "grad": "reads another tensor than the one it is asked of",
        },
    ),
    Group(
        law=Law.PERMUTES,
        equation="y[i] = x[p(i)], p one-to-one and onto, by copying",
        proof="Every element is copied to exactly one place, at most with its imaginary part negated.",
        names=_names("""
            channel_shuffle clone conj_physical flip fliplr flipud pixel_shuffle pixel_unshuffle roll rot90
        """),
        aten=_names("_conj_physical lift_fresh_copy native_channel_shuffle prims.clone prims.rev"),
        left_out={
            "to": _CAST,
            "_to_copy": _CAST,
            "type_as": _CAST,
            "copy_": _CAST,
            "cpu": "a copy that does not block may be read before it is done",
            "cuda": "a copy that does not block may be read before it is done",
        },
    ),
    Group(
        law=Law.PERMUTES,
        equation="y = x1, x2, ..., xn side by side",
        proof="Each element of each input stands exactly once in the result, in the dtype it had.",
        names=_names("""
            cat column_stack concat concatenate dstack hstack row_stack stack vstack
        """),
        left_out={
            "cat of two dtypes": _PROMOTES,
            "complex": "broadcasts, to a size of zero too, which drops elements",
            "_chunk_cat": "pads",
            "pad_sequence": _FILL,
        },
        condition=same_dtype,
    ),
)

_SELECTS = (
    Group(
        law=Law.SELECTS,
        equation="y[i] = x[p(i)], by strides",
        proof="Each result is a view, or the copy of a view, of a part of one input.",
        names=_names("""
            atleast_1d atleast_2d atleast_3d chunk diagonal diagonal_copy dsplit hsplit imag narrow
            narrow_copy real reshape_as select select_copy slice_copy split split_copy split_with_sizes
            split_with_sizes_copy tensor_split unbind unbind_copy unfold_copy unsafe_chunk unsafe_split
            unsafe_split_with_sizes view_as vsplit
        """),
        functions=_names("__getitem__"),
        aten=_names("linalg_diagonal slice"),
        left_out={"slice_inverse": "reaches elements of the storage that are not its input's"},
    ),
    Group(
        law=Law.SELECTS,
        equation="y[i] = x[index(i)]",
        proof="Each element of the result is copied from the place that an index or a mask names.",
        names=_names("gather index_select masked_select take take_along_dim"),
        aten=_names("_unsafe_index embedding index"),
        left_out={
            "__setitem__": _FILL,
            "_unsafe_masked_index": _FILL,
            "embedding_bag": "sums, means or takes the maximum of a bag that may be empty",
        },
    ),
    Group(
        law=Law.SELECTS,
        equation="y[i] = x[p(i)], each place as often as asked",
        proof="Elements are repeated; to a size of zero they are dropped, so the state does not pass.",
        names=_names("""
            broadcast_tensors broadcast_to cartesian_prod combinations expand expand_as meshgrid repeat
            repeat_interleave tile
        """),
        functions=_names("upsample_nearest1d upsample_nearest2d upsample_nearest3d"),
        aten=_names("""
            _pad_circular _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
            expand_copy prims.broadcast_in_dim reflection_pad1d reflection_pad2d reflection_pad3d
            replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d
            upsample_nearest3d
        """),
        left_out={
            "pad": _FILL,
            "constant_pad_nd": _FILL,
            "interpolate": "has modes that compute",
            "expand_backward": _ADDS,
        },
    ),
    Group(
        law=Law.SELECTS,
        equation="y[i] = x[p(i)] or 0",
        proof="Elements keep their value or give way to zero.",
        names=_names("diag diag_embed diagflat tril triu unfold"),
        aten=_names(
            "diagonal_backward im2col select_backward slice_backward value_selecting_reduction_backward"
        ),
        left_out={
            "fill_diagonal_": _FILL,
            "masked_fill": _FILL,
            "index_fill": _FILL,
            "fold": _ADDS,
            "col2im": _ADDS,
            "unfold_backward": _ADDS,
            "index_select_backward": _ADDS,
            "embedding_dense_backward": _ADDS,
            "dropout": "divides what it keeps by 1 - p",
        },
    ),
    Group(
        law=Law.SELECTS,
        equation="y = some x[i], found by comparing",
        proof="A minimum, a maximum, an order statistic is an element of the input; over nothing they raise.",
        names=_names("amax amin aminmax cummax cummin kthvalue mode msort sort topk"),
        aten=_names("max min"),
        overloads_excluded=frozenset({"max.other", "min.other"}),
        left_out={
            "median": "of nothing is NaN",
            "nanmedian": "of nothing is NaN",
            "quantile": "interpolates",
            "logsumexp": "of nothing is -Inf, and adding log(n) may overflow",
            "max.other": _PROMOTES,
            "min.other": _PROMOTES,
        },
    ),
    Group(
        law=Law.SELECTS,
        equation="y[i] = x[i] or z[q(i)], in x's dtype",
        proof="Each place keeps its element or takes one of a source, whose dtype is checked to be the same.",
        names=_names("index_copy masked_scatter"),
        aten=_names("scatter"),
        overloads_excluded=frozenset({"scatter.value", "scatter.reduce", "scatter.value_reduce"}),
        left_out={
            "scatter.value": _FILL,
            "scatter.reduce": _ADDS,
            "scatter.value_reduce": _FILL,
            "scatter_add": _ADDS,
            "scatter_reduce": _ADDS,
            "index_add": _ADDS,
            "as_strided_scatter": "reaches elements of the storage that are not its input's",
        },
    ),
    Group(
        law=Law.SELECTS,
        equation="y[i] = x[i] or z[q(i)], x and z of one dtype",
        proof="Each element is copied from one of the tensors, and none is promoted or cast.",
        names=_names("""
            block_diag complex diagonal_scatter fmax fmin maximum minimum select_scatter slice_scatter
        """),
        functions=_names("max min"),
        aten=_names("hardtanh_backward threshold_backward"),
        left_out={"leaky_relu_backward": "multiplies by a slope that may exceed 1"},
        condition=same_dtype,
    ),
    Group(
        law=Law.SELECTS,
        equation="y[i] = c[i] ? x[i] : z[i]",
        proof="Each element is copied from one of two tensors, and none is promoted or cast.",
        names=_names("where"),
        overloads_excluded=frozenset({"where.Scalar", "where.ScalarSelf", "where.ScalarOther"}),
        left_out={"where.ScalarOther": _FILL, "where.ScalarSelf": _FILL, "where.Scalar": _FILL},
        condition=tensors_only,
    ),
    Group(
        law=Law.SELECTS,
        equation="y[index(i)] = z[i], else x[i]",
        proof="Without `reduce` and with a tensor as its source each place keeps or takes one element.",
        functions=_names("scatter"),
        condition=source_is_tensor,
    ),
    Group(
        law=Law.SELECTS,
        equation="y[index(i)] = z[i], else x[i]",
        proof="Without `accumulate` each place keeps or takes one element, of a source of the same dtype.",
        names=_names("index_put put"),
        aten=_names("_unsafe_index_put"),
        left_out={"index_put(accumulate=True)": _ADDS, "_index_put_impl_": _ADDS},
        condition=overwrites,
    ),
    Group(
        law=Law.SELECTS,
        equation="y[i] = w[index(i)]",
        proof="Without `max_norm` an embedding is a choice of rows.",
        functions=_names("embedding"),
        left_out={"embedding(max_norm=)": "rescales the rows in place by a norm that may overflow"},
        condition=no_renorm,
    ),
)

_BOUNDED = (
    Group(
        law=Law.BOUNDED,
        equation="|f(x)| <= |x| + 1",
        proof="The value lies between 0 and its input, or is the input rounded or with another sign.",
        names=_names("""
            abs absolute ceil deg2rad fix floor frac hardshrink nan_to_num neg negative relu sign sgn trunc
        """),
        functions=_names("""
            __abs__ __neg__ glu log_sigmoid logsigmoid mish relu6 silu softshrink softsign tanhshrink
        """),
        aten=_names("glu log_sigmoid log_sigmoid_forward mish relu6 silu softshrink"),
        left_out={
            "hardswish": "multiplies by up to 6 before it divides: " + _OVERFLOWS,
            "gelu": "doubles before it halves in a kernel of the CPU: " + _OVERFLOWS,
            "selu": "scales by 1.05: " + _OVERFLOWS,
            "elu": "has scales that are arguments",
            "celu": "divides by an argument",
            "leaky_relu": "has a slope that may exceed 1",
            "prelu": "has slopes that may exceed 1",
            "rrelu": "has slopes that may exceed 1",
            "softplus": "divides by an argument",
            "rad2deg": _OVERFLOWS,
            "logit": _DOMAIN,
        },
    ),
    Group(
        law=Law.BOUNDED,
        equation="|f(x)| <= pi",
        proof="The function is bounded on the whole real line, and so is its argument's reduction.",
        names=_names("""
            angle arctan atan cos erf erfc sigmoid sin tanh
        """),
        functions=_names("expit hardsigmoid"),
        aten=_names("hardsigmoid special_erf special_erfc special_expit"),
        left_out={
            "tan": "exceeds the largest float16 near a pole",
            "sinc": "multiplies by pi first: " + _OVERFLOWS,
            "asinh": "some vector libraries square the argument: " + _OVERFLOWS,
            "asin": _DOMAIN,
            "acos": _DOMAIN,
            "atanh": _DOMAIN,
            "exp": _OVERFLOWS,
            "sinh": _OVERFLOWS,
            "cosh": _OVERFLOWS,
            "square": _OVERFLOWS,
            "tanh_backward": "1 - y*y is bounded only for a y that tanh made",
            "sigmoid_backward": "y*(1 - y) is bounded only for a y that sigmoid made",
        },
    ),
    Group(
        law=Law.BOUNDED,
        equation="y[i] = exp(x[i] - m) / sum exp(x - m), m = max x",
        proof="No exponent is positive and one is zero, so each term is in [0, 1] and the sum at least 1.",
        names=_names("softmax"),
        functions=_names("softmin"),
        aten=_names("_safe_softmax _softmax special_softmax"),
        left_out={
            "log_softmax": "x - m overflows to -Inf where x and m lie far apart",
            "_softmax_backward_data": "multiplies gradients",
            "normalize": "divides by a norm, eps may be 0",
            "softmax(dtype=)": _CAST,
        },
    ),
    Group(
        law=Law.BOUNDED,
        equation="f(x, z) in [-pi, pi] or |f(x, z)| = |x|",
        proof="An angle is bounded, and a sign changes no magnitude; neither tensor is promoted.",
        names=_names("arctan2 atan2 copysign"),
        left_out={
            "hypot": _OVERFLOWS,
            "fmod": _DOMAIN,
            "remainder": _DOMAIN,
            "lerp": "has weights beyond [0, 1]",
        },
        condition=same_dtype,
    ),
    Group(
        law=Law.BOUNDED,
        equation="|y - x| <= 1/2",
        proof="To the nearest integer; where the dtype has no fractions it is the number itself.",
        names=_names("round"),
        overloads_excluded=frozenset({"round.decimals"}),
        left_out={"round.decimals": "multiplies by a power of ten first: " + _OVERFLOWS},
        condition=tensors_only,
    ),
    Group(
        law=Law.BOUNDED,
        equation="y[i] in {x[i], lower, upper}",
        proof="The result is the input or a bound, and the bounds are finite in its dtype.",
        names=_names("clamp clamp_max clamp_min clip hardtanh threshold"),
        left_out={"clamp(min=inf)": _FILL},
        condition=numbers_fit,
    ),
    Group(
        law=Law.BOUNDED,
        equation="y[i] = max over a window of x",
        proof="Padding is at most half a window, so a window without gaps holds an element of the input.",
        functions=_names("""
            max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
            max_pool3d_with_indices
        """),
        aten=_names("""
            max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
            max_pool3d_with_indices
        """),
        left_out={
            "max_pool2d(dilation=2)": "a window with gaps may hold nothing but padding, which is -Inf",
            "avg_pool2d": "sums: " + _OVERFLOWS,
            "mean": "sums: " + _OVERFLOWS,
            "max_unpool2d": "leaves to its indices what is written",
            "max_pool2d_with_indices_backward": _ADDS,
        },
        condition=undilated,
    ),
    Group(
        law=Law.BOUNDED,
        equation="y[i] = max over a part of x",
        proof="Each part that an adaptive pooling takes holds at least one element.",
        names=_names("adaptive_max_pool1d"),
        functions=_names("""
            adaptive_max_pool1d_with_indices adaptive_max_pool2d adaptive_max_pool2d_with_indices
            adaptive_max_pool3d adaptive_max_pool3d_with_indices
        """),
        aten=_names("adaptive_max_pool2d adaptive_max_pool3d"),
        left_out={"adaptive_avg_pool2d": "sums: " + _OVERFLOWS},
    ),
)

GROUPS = (*_PERMUTES, *_SELECTS, *_BOUNDED)
