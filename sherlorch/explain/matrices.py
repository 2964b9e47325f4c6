"""Decompositions, determinants and solvers."""

from __future__ import annotations

from sherlorch.explain.fault import Fault, Pattern

_SPECTRAL = ("eigh", "eig", "svd", "eigvals", "eigvalsh", "svdvals", "matrix_norm")
_SINGULAR = (
    "slogdet", "logdet", "det", "inv", "pinv", "lstsq", "solve", "solve_triangular", "triangular_solve",
    "cholesky", "cholesky_solve", "cholesky_inverse", "lu", "lu_factor", "lu_solve", "qr", "ldl_factor",
    "tensorinv", "tensorsolve",
)  # fmt: skip


def _spectral(fault: Fault) -> str:
    return next((name for name in _SPECTRAL if fault.differentiates(name)), "eigh")


PATTERNS = [
    Pattern(
        "repeated_eigenvalues",
        when=lambda fault: fault.differentiates(*_SPECTRAL) and fault.origin in ("introduced", "converted"),
        why=lambda fault: (
            f"the backward of {_spectral(fault)} contains 1 / (l_i - l_j), which is "
            f"{'0 / 0' if fault.has_nan else 'x / 0'} for repeated "
            f"{'singular values' if 'svd' in _spectral(fault) else 'eigenvalues'} (equal or zero)"
        ),
        remedy="split them with a little jitter, `a + 1e-6 * torch.diag(torch.rand(n))`, or "
        "differentiate a function that does not need the vectors (svdvals, eigvalsh, a Sylvester solve "
        "for the matrix square root)",
    ),
    Pattern(
        "singular_matrix_derivative",
        when=lambda fault: fault.differentiates(*_SINGULAR),
        why=lambda fault: (
            f"the derivative of {_named(fault)} needs the inverse of a matrix that is singular: its "
            "determinant is zero (equal or dependent rows), so it divides by zero"
        ),
        remedy="add jitter to the diagonal, `a + 1e-6 * torch.eye(n)`, or keep the rows apart",
    ),
    Pattern(
        "singular_matrix",
        when=lambda fault: fault.name in _SINGULAR and fault.origin == "introduced",
        why=lambda fault: (
            f"{fault.name} of a singular matrix: two rows are equal or dependent, the determinant is zero"
            + (" and its logarithm log(0) = -inf" if "det" in fault.name else ", so it divides by zero")
        ),
        remedy="add jitter to the diagonal, `a + 1e-6 * torch.eye(n)`, use `torch.linalg.pinv`, or drop "
        "singular terms with a log-sum-exp over several determinants",
    ),
]


def _named(fault: Fault) -> str:
    return next((name for name in _SINGULAR if fault.differentiates(name)), fault.name)
