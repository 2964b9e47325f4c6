"""What a tensor's values say: the one place that reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Union

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

FINITE = 0
NAN = 1
INF = 2
NONFINITE = NAN | INF

FLOATING = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
    if not name.startswith("float4")  # every pattern of which is a finite number
)
# Kinds whose range is wide enough for the sum of healthy values to stay finite as a rule (float16 is not).
SUMMED = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128})

_MKLDNN = getattr(torch, "_mkldnn", None)
_sum = torch.sum
_aminmax = torch.aminmax
Number = Union[int, float, complex]


def scan(tensor: Tensor) -> int:
    """State flags of a strided tensor, exact; call it where autograd and modes are off.

    A finite sum proves that every element is finite, since NaN and Inf survive any sum. A sum that is not
    finite proves
    nothing (it may have overflowed), so then the elements themselves are asked.
    """
    if tensor.dtype in SUMMED and not tensor._is_zerotensor():
        try:
            total = tensor.item() if tensor.dim() == 0 else _sum(tensor).item()
        except (RuntimeError, NotImplementedError):
            return _look_closely(tensor)
        if total - total == 0:
            return FINITE
    return _look_closely(tensor)


def values_of(tensor: Tensor) -> Tensor | None:
    """A strided real floating tensor that holds every value of `tensor`; None where there is none (integers,
    no data)."""
    tensor = _unwrap(tensor)
    if _has_no_memory(tensor) or isinstance(tensor, FakeTensor):
        return None
    layout = tensor.layout
    if layout is torch.sparse_coo:
        tensor = tensor._values()
    elif layout is _MKLDNN:
        tensor = tensor.to_dense()
    elif layout is not torch.strided and layout is not getattr(torch, "jagged", None):
        tensor = tensor.values()
    elif tensor.is_nested:
        tensor = (
            tensor.values()
            if layout is getattr(torch, "jagged", None)
            else torch.cat([t.flatten() for t in tensor.unbind()])
        )
    if tensor.dtype not in FLOATING:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if (
        tensor.element_size() == 1
    ):  # float8 has neither aminmax nor isinf; every value of it is exact in float32
        tensor = tensor.float()
    return tensor


def _has_no_memory(tensor: Tensor) -> bool:
    # The zeros of forward-mode differentiation have no memory: below the dispatcher a kernel reads address 0.
    return tensor.is_meta or tensor._is_zerotensor()


def _unwrap(tensor: Tensor) -> Tensor:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest value, NaN if there is one."""
    try:
        low, high = _aminmax(values)
    except RuntimeError:  # half precision on the CPU before torch 2.2, forward-mode derivatives in torch 2.0
        wide = values.float() if values.element_size() < 4 else values
        low, high = wide.amin(), wide.amax()
    return low, high


def _look_closely(tensor: Tensor) -> int:
    values = values_of(tensor)
    if values is None or values.numel() == 0:
        return FINITE
    low, high = (bound.item() for bound in _bounds(values))
    if low - low == 0 and high - high == 0:
        return FINITE
    if low == low:
        return INF
    return NAN | (INF if bool(torch.isinf(values).any()) else 0)


def examine(tensor: Tensor) -> int:
    """State flags of any tensor, from anywhere: autograd, modes and tracing do not see the look."""
    with unseen():
        return _look_closely(tensor.detach())


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, autograd and every mode are off; tensor subclasses keep their own handlers."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        yield


def scan_unseen(tensor: Tensor) -> int:
    """`scan` for where autograd may be on or other modes may listen."""
    with unseen():
        return scan(tensor)


def begin_scan_unseen(tensor: Tensor, mask: bool = False) -> tuple[Tensor, ...] | None:
    """`begin_scan` for where autograd may be on or other modes may listen."""
    with unseen():
        return begin_scan(tensor, mask)


def begin_scan(tensor: Tensor, mask: bool = False) -> tuple[Tensor, ...] | None:
    """Start a look whose answer stays on the device: min, max, any Inf; if asked, nothing but -Inf and zeros?

    None where nothing can be wrong.
    """
    values = values_of(tensor)
    if values is None or values.numel() == 0:
        return None
    looks = [*_bounds(values), torch.isinf(values).any()]
    if mask:
        looks.append(((values == 0) | torch.isneginf(values)).all())
    return tuple(look if type(look) is Tensor else torch.tensor(look.item()) for look in looks)


def finish_scans(scans: Sequence[tuple[Tensor, ...]]) -> list[tuple[int, float, float, bool]]:
    """Read many started looks in one transfer per device: (state flags, min, max, is it a mask) each."""
    if not scans:
        return []
    with unseen():
        return _finish(scans)


def _finish(scans: Sequence[tuple[Tensor, ...]]) -> list[tuple[int, float, float, bool]]:
    rows = [
        torch.stack([_widened(look) for look in (*looks, torch.zeros_like(looks[2]))[:4]]) for looks in scans
    ]
    device = rows[0].device
    table = torch.stack([row if row.device == device else row.to(device) for row in rows]).tolist()
    answers = []
    for low, high, inf, mask in table:
        flags = _flags(low, high, bool(inf))
        answers.append((flags, low, high, flags == INF and bool(mask)))
    return answers


def _widened(look: Tensor) -> Tensor:
    return look.float() if look.device.type == "mps" else look.double()  # Apple's devices have no float64


def _flags(low: float, high: float, inf: bool) -> int:
    return (NAN if math.isnan(low) or math.isnan(high) else 0) | (INF if inf else 0)


@dataclass(frozen=True)
class TensorStats:
    """One row of the evidence table: what a tensor held at the moment of the fault (min and max over finite
    values)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    min: float | None = None
    max: float | None = None
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    numel: int = 0
    at: Number | None = None  # the value at the fault's first bad index, where the shapes allow it

    @property
    def nonfinite(self) -> int:
        return self.nan + self.posinf + self.neginf


def describe(tensor: Tensor, name: str) -> TensorStats:
    """Count and bound the values of `tensor`; call it where autograd and modes are off."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).replace("torch.", "")
    values = values_of(tensor)
    if values is None:
        values = None if _has_no_memory(tensor) or tensor.dtype is torch.bool else tensor
    if values is None or values.numel() == 0:
        return TensorStats(name, shape, dtype, numel=tensor.numel(), zeros=_false_count(tensor))
    if values.dtype not in FLOATING:
        low, high = (int(v) for v in _bounds(values))
        return TensorStats(
            name, shape, dtype, low, high, zeros=int((values == 0).sum()), numel=values.numel()
        )
    finite = values[torch.isfinite(values)]
    low, high = (float(v) for v in _bounds(finite)) if finite.numel() else (None, None)  # type: ignore[assignment]
    return TensorStats(
        name,
        shape,
        dtype,
        low,
        high,
        nan=int(torch.isnan(values).sum()),
        posinf=int(torch.isposinf(values).sum()),
        neginf=int(torch.isneginf(values).sum()),
        zeros=int((values == 0).sum()),
        numel=tensor.numel(),
    )


def _false_count(tensor: Tensor) -> int:
    if _has_no_memory(tensor) or tensor.dtype is not torch.bool:
        return 0
    return int((~tensor).sum())


def first_bad_index(tensor: Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN in row-major order, else of the first Inf; None for a finite or unindexable
    tensor."""
    if tensor.layout is not torch.strided or tensor.dtype not in FLOATING or tensor.is_nested:
        return None
    values = tensor.float() if tensor.element_size() == 1 else tensor
    for bad in (torch.isnan(values), torch.isinf(values)):
        if bool(bad.any()):
            flat = int(bad.flatten().to(torch.uint8).argmax())
            return tuple(int(i) for i in _unravel(flat, tensor.shape))
    return None


def _unravel(flat: int, shape: Sequence[int]) -> list[int]:
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return index[::-1]


def value_at(tensor: Tensor, index: Sequence[int], shape: Sequence[int]) -> Number | None:
    """The element of `tensor` that meets `index` of a result of `shape` under broadcasting; None if it does
    not broadcast."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dim() > len(shape):
        return None
    offset = len(shape) - tensor.dim()
    position = []
    for axis, size in enumerate(tensor.shape):
        if size not in (1, shape[axis + offset]):
            return None
        position.append(0 if size == 1 else index[axis + offset])
    item: Number = tensor[tuple(position)].item()
    return item
