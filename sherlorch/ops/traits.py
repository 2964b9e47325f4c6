"""What else the tracers must know of an op, read off its schema or listed here with the reason."""

from __future__ import annotations

from typing import Any

# These write their first argument without reading it.
OVERWRITES = frozenset(
    {
        "copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "geometric_", "cauchy_",
        "log_normal_", "random_",
        "bernoulli_", "_foreach_copy_", "_foreach_zero_", "eye_",
        "trunc_normal_",
    }
)  # fmt: skip

# These change where a tensor looks; they write nothing unless its storage has to grow.
RESIZES = frozenset({"resize_", "resize_as_", "_resize_output_"})

# These hand out memory as it is.
UNINITIALISED = frozenset(
    {
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
        "_empty_affine_quantized",
        "_efficientzerotensor", "resize_", "empty_quantized",
    }
) - {"_efficientzerotensor"}  # fmt: skip

# These put a tensor on other memory and write none.
MOVES_TENSOR = frozenset({"set_"})

# Copies and casts: no arithmetic, though a cast can overflow. A leaf's line is that of the first op not
# among these.
MOVES = frozenset(
    {
        "copy_", "_to_copy", "to", "clone", "detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy",
        "contiguous", "_copy_from",
        "float", "half", "double", "bfloat16", "cpu", "cuda", "type", "type_as", "requires_grad_",
        "long", "int", "short", "char", "byte",
        "pin_memory", "copy", "_foreach_copy_",
        "set_", "set_data", "data", "real", "imag", "view", "view_as", "as_strided",
        "reshape", "isnan", "isinf",
        "isfinite", "isposinf", "isneginf",
        "__deepcopy__", "deepcopy", "_pin_memory", "share_memory_", "numpy", "tolist", "item",
        "_local_scalar_dense", "nan_to_num",
        "nan_to_num_", "is_nonzero", "equal", "allclose", "isclose", "eq", "ne",
    }
)  # fmt: skip

# Inputs are gathered over whole rows or the whole tensor: the result belongs to no single element.
COMBINES = frozenset(
    {
        "sum", "mean", "prod", "norm", "linalg_vector_norm", "linalg_norm", "linalg_matrix_norm", "var",
        "std", "var_mean", "std_mean",
        "logsumexp", "max", "min", "amax", "amin", "aminmax", "median", "nanmedian", "nansum", "nanmean",
        "mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "__matmul__", "__rmatmul__", "linear",
        "mv", "addmv", "dot", "vdot", "einsum", "tensordot", "inner", "conv1d", "conv2d", "conv3d",
        "convolution", "trace", "dist", "cdist", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
        "cross_entropy",
        "nll_loss", "nll_loss_forward", "binary_cross_entropy", "binary_cross_entropy_with_logits",
        "kl_div", "ctc_loss", "_ctc_loss",
    }
)  # fmt: skip

# These absorb nothing, unless a keyword scales a term away: a NaN or infinity in any element of any input
# leaves a non-finite element in the (first) result, if that has any. Products and sums do so by IEEE 754
# (0 * inf, inf - inf and NaN with anything are NaN), a normalised row by its mean. So a finite result proves
# every input finite.
CARRIES = frozenset(
    {
        "mm", "bmm", "addmm", "baddbmm", "matmul", "__matmul__", "__rmatmul__", "linear",
        "native_layer_norm", "layer_norm",
        "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__",
    }
)  # fmt: skip
SCALES = frozenset({"alpha", "beta"})

# Ops that put a value named by the program into the result.
FILLS = frozenset(
    {
        "full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "index_fill",
        "index_fill_", "scalar_tensor",
        "where", "constant_pad_nd", "pad", "scatter", "scatter_", "__setitem__", "tensor", "as_tensor",
    }
)  # fmt: skip


# Their results of more than one dimension are for their own backward: logarithms of probabilities, of which
# zero is one, and raw memory beyond the end of the shorter sequences.
HAVE_SCRATCH = frozenset({"_ctc_loss"})


def ignores_values(base: str) -> bool:
    """Does the result depend on no value of the inputs (``zeros_like``, ``new_empty``...)?"""
    return base.endswith("_like") or base.startswith("new_")


# Written although the schema does not say so: the running statistics of batch norm in training.
UNMARKED_WRITES = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}


def base_of(func: Any) -> str:
    """``aten::div_.Tensor`` -> ``div_``: the name without namespace and overload."""
    schema = getattr(func, "_schema", None)
    name: str = schema.name if schema is not None else getattr(func, "__name__", str(func))
    return name.rpartition("::")[2]


def root_of(base: str) -> str:
    """``div_``, ``_foreach_div_``, ``__truediv__`` -> ``div``: the arithmetic, however it was called."""
    name = base
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        name = _OPERATORS.get(name, name)
    for prefix in ("_foreach_", "_fused_"):
        name = name[len(prefix) :] if name.startswith(prefix) else name
    return name.rstrip("_") or base


_OPERATORS = {
    "truediv": "div", "rtruediv": "div", "itruediv": "div", "rdiv": "div", "idiv": "div", "radd": "add",
    "iadd": "add", "rsub": "sub",
    "isub": "sub", "rmul": "mul", "imul": "mul", "rpow": "pow", "ipow": "pow", "rmatmul": "matmul",
    "imatmul": "matmul",
    "getitem": "index", "setitem": "index_put", "floordiv": "floor_divide", "rfloordiv": "floor_divide",
    "mod": "remainder",
}  # fmt: skip


def written_arguments(schema: Any, base: str) -> list[tuple[int, str, bool]]:
    """(position or -1, name, is it an ``out=``) of each argument that a call of this schema writes."""
    if base in MOVES_TENSOR:
        return []
    unmarked = UNMARKED_WRITES.get(base, ())
    return [
        (-1 if argument.kwarg_only else position, argument.name, bool(argument.kwarg_only))
        for position, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in unmarked
    ]


def is_random(func: Any) -> bool:
    """Does a call advance the random generator?"""
    import torch

    tag: Any | None = getattr(torch.Tag, "nondeterministic_seeded", None)
    return tag is not None and tag in getattr(func, "tags", ())


def is_pointwise(func: Any) -> bool:
    """Does element i of the result depend on element i of the inputs alone?"""
    import torch

    return torch.Tag.pointwise in getattr(func, "tags", ())
