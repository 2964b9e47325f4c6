"""One name for each op, and the groups of ops whose elements are found in the same way."""

from __future__ import annotations

# After underscores and the prefixes below are gone.
SPELLINGS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "rtruediv": "div", "itruediv": "div",
    "rdiv": "div", "idiv": "div", "multiply": "mul", "rmul": "mul", "imul": "mul", "radd": "add",
    "iadd": "add",
    "subtract": "sub", "rsub": "sub", "isub": "sub", "rpow": "pow", "ipow": "pow", "float_power": "pow",
    "mod": "remainder", "rmod": "remainder", "imod": "remainder", "rmatmul": "matmul", "imatmul": "matmul",
    "arccos": "acos", "arcsin": "asin", "arctanh": "atanh", "arccosh": "acosh", "arctan2": "atan2",
    "vector_norm": "norm", "frobenius_norm": "norm", "matrix_norm": "norm", "expit": "sigmoid",
    "psi": "digamma", "gammaln": "lgamma", "inverse": "inv", "inv_ex": "inv", "cholesky_ex": "cholesky",
    "solve_ex": "solve", "lu_factor_ex": "lu_factor", "eig_and_eigh": "eigh", "symeig": "eigh",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss", "nll_loss_nd": "nll_loss",
    "nll_loss2d": "nll_loss", "cross_entropy_loss": "cross_entropy", "euclidean_dist": "cdist",
    "cdist_forward": "cdist", "convolution_overrideable": "convolution", "safe_softmax": "softmax",
    "thnn_fused_lstm_cell": "lstm_cell",
}  # fmt: skip
PREFIXES = ("foreach_", "special_", "linalg_", "native_", "unsafe_")

# The left operand is the second argument.
SWAPPED = frozenset({"rsub", "__rsub__", "__rtruediv__", "__rdiv__", "__rpow__", "__rmod__", "__rmatmul__"})

CASTS = frozenset({"to", "to_copy", "copy", "half", "bfloat16", "type", "type_as", "convert_element_type"})

# op: positions of its left and right factor
PRODUCTS = {
    "mm": (0, 1), "bmm": (0, 1), "matmul": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1),
    "inner": (0, 1), "linear": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2),
}  # fmt: skip
CONVOLUTIONS = frozenset({"convolution", "conv1d", "conv2d", "conv3d"})

# op: position of `dim`
REDUCTIONS = {
    "sum": 1, "nansum": 1, "mean": 1, "nanmean": 1, "prod": 1, "norm": 2, "var": 1, "std": 1, "var_mean": 1,
    "std_mean": 1, "logsumexp": 1, "amax": 1, "amin": 1,
}  # fmt: skip
ALONG = {  # the shape stays, elements mix along `dim`
    "softmax": 1, "log_softmax": 1, "softmin": 1, "cumsum": 1, "cumprod": 1, "logcumsumexp": 1,
    "softmax_backward_data": 2, "log_softmax_backward_data": 2,
}  # fmt: skip
PREFIX_SUMS = frozenset({"cumsum", "cumprod", "logcumsumexp"})
NORMALISING = frozenset({"layer_norm", "rms_norm", "fused_rms_norm", "batch_norm", "instance_norm"})
TARGETED = frozenset({"cross_entropy", "nll_loss"})

ROWED = (
    frozenset(PRODUCTS) | set(REDUCTIONS) | set(ALONG) | CONVOLUTIONS | NORMALISING | TARGETED
    | {"einsum", "group_norm", "cdist", "dist", "multi_head_attention_forward"}
)  # fmt: skip


def plain_name(op: str) -> str:
    """
    >>> [plain_name(op) for op in ("_softmax", "__rtruediv__", "linalg_vector_norm", "_foreach_mul_")]
    ['softmax', 'div', 'norm', 'mul']
    """
    name = op.strip("_")
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
    if "batch_norm" in name and "backward" not in name:
        return "batch_norm"
    if name.startswith("scaled_dot_product") and "backward" not in name:
        return "scaled_dot_product_attention"
    return SPELLINGS.get(name, name)
