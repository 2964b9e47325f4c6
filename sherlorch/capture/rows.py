"""Reductions and products: which numbers went into one element of the result."""

from __future__ import annotations

import string
from typing import Any

import torch
from torch import Tensor

from sherlorch.capture.call import Call
from sherlorch.capture.names import (
    ALONG,
    CONVOLUTIONS,
    NORMALISING,
    PREFIX_SUMS,
    PRODUCTS,
    REDUCTIONS,
    TARGETED,
)

ROW_LIMIT = 1 << 24  # elements of a row; a longer one is not copied to double precision
Index = tuple[int, ...]


def terms_of(call: Call, index: Index | None) -> Tensor | None:
    """What went into the element at `index`, flat and in double precision; None where that is not known.

    For a product these are the products. `index` is None where there is no bad element to point at.
    """
    row: Tensor | None = None
    if call.name in REDUCTIONS:
        row = _reduced(call, index)
    elif index is None:
        return None
    elif call.name in PRODUCTS:
        row = _product(call, index)
    elif call.name == "einsum":
        row = _einsum(call, index)
    elif call.name in CONVOLUTIONS:
        row = _patch(call, index)
    elif call.name in NORMALISING:
        row = _normalised(call, index)
    elif call.name in ALONG:
        row = _along(call, index)
    elif call.name == "dist":
        left, right = call.tensor(0), call.tensor(1)
        row = None if left is None or right is None else left - right
    return None if row is None or row.numel() > ROW_LIMIT else _wide(row.flatten())


def count_of(call: Call, terms: Tensor | None) -> int | None:
    """How many elements went into the bad one; for class targets, how many of them count."""
    if call.name in TARGETED:
        return _targets(call)
    if call.name == "ctc_loss":
        _alignments(call)
    source = call.tensor(0)
    if source is not None and call.name.endswith("_loss") and call.result.numel() == 1:
        return source.numel()
    return None if terms is None else terms.numel()


def _wide(values: Tensor) -> Tensor:
    values = values.resolve_conj().resolve_neg()
    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _product(call: Call, index: Index) -> Tensor | None:
    left, right = (call.tensor(position) for position in PRODUCTS[call.name])
    if left is None or right is None:
        return None
    if call.name == "linear":
        row, column = left[index[: left.dim() - 1]], right[index[-1]] if right.dim() > 1 else right
    elif call.name == "inner":
        row, column = left[index[: left.dim() - 1]], right[index[len(index) - right.dim() + 1 :]]
    else:
        batch = index[: len(index) - (left.dim() > 1) - (right.dim() > 1)]
        rest = index[len(batch) :]
        row, column = _of_batch(left, batch), _of_batch(right, batch)
        row = row[rest[0]] if left.dim() > 1 else row
        column = column[:, rest[-1]] if right.dim() > 1 else column
    return _multiplied(call, row, column)


def _of_batch(matrix: Tensor, batch: Index) -> Tensor:
    own = max(matrix.dim() - 2, 0)
    sizes = matrix.shape[:own]
    return matrix[tuple(0 if size == 1 else i for size, i in zip(sizes, batch[len(batch) - own :]))]


def _multiplied(call: Call, row: Tensor, column: Tensor) -> Tensor:
    left, right = _wide(row.flatten()), _wide(column.flatten())
    products = left * right
    if products.numel() and not products.is_complex():
        top = int(products.abs().argmax())
        factors = f"{left[top].item():.4g} * {right[top].item():.4g}"
        call.notes.append(f"largest of {products.numel()} products: {factors}")
    return products


def _einsum(call: Call, index: Index) -> Tensor | None:
    flat = [item for value in call.positional for item in (value if isinstance(value, list) else [value])]
    equation, factors = flat[0], flat[1:]
    if not isinstance(equation, str) or "->" not in equation or "." in equation or len(factors) != 2:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    fixed = dict(zip(output, index))
    rows, kept = [], []
    for factor, letters in zip(factors, inputs.split(",")):
        where: list[Any] = [fixed.get(letter, slice(None)) for letter in letters]
        rows.append(_wide(factor[tuple(where)]))
        kept.append("".join(letter for letter in letters if letter not in fixed))
    summed = "".join(letter for letter in string.ascii_letters if letter in kept[0] + kept[1])
    return torch.einsum(f"{kept[0]},{kept[1]}->{summed}", *rows)


def _patch(call: Call, index: Index) -> Tensor | None:
    """What a convolution multiplied: its kernel for one channel, and the part of the input below it."""
    source, weight = call.tensor(0), call.tensor(1)
    aten = call.name == "convolution"
    if source is None or weight is None or (aten and call.argument("transposed", 6)):
        return None
    space = weight.dim() - 2
    stride = _spread(call.argument("stride", 3), 1, space)
    padding = _spread(call.argument("padding", 4), 0, space)
    dilation = _spread(call.argument("dilation", 5), 1, space)
    groups = call.argument("groups", 8 if aten else 6) or 1
    if stride is None or padding is None or dilation is None:
        return None
    if source.dim() == space + 1:
        source, index = source[None], (0, *index) if len(index) == space + 1 else index
    width, channel = weight.shape[1], index[1]
    first = channel // (weight.shape[0] // groups) * width
    patch, kernel = source[index[0], first : first + width], weight[channel]
    for axis in range(space):
        start = index[2 + axis] * stride[axis] - padding[axis]
        places = [start + step * dilation[axis] for step in range(weight.shape[2 + axis])]
        inside = [step for step, place in enumerate(places) if 0 <= place < source.shape[2 + axis]]
        kernel = kernel.index_select(1 + axis, torch.tensor(inside, device=kernel.device, dtype=torch.long))
        where = torch.tensor([places[step] for step in inside], device=patch.device, dtype=torch.long)
        patch = patch.index_select(1 + axis, where)
    return _multiplied(call, patch, kernel)


def _spread(value: Any, default: int, space: int) -> list[int] | None:
    """One number for each spatial dimension; None for padding by name."""
    if isinstance(value, str):
        return None
    given = [default] if value is None else [value] if isinstance(value, int) else list(value)
    return given * space if len(given) == 1 else given


def _reduced(call: Call, index: Index | None) -> Tensor | None:
    source = call.tensor(0)
    dims = None if source is None else _reduced_dims(call, source)
    if source is None or dims is None:
        return None
    if len(dims) == source.dim():
        return source
    if index is None:
        return None
    if len(index) == source.dim():
        index = tuple(i for axis, i in enumerate(index) if axis not in dims)
    kept = iter(index)
    return source[tuple(slice(None) if axis in dims else next(kept) for axis in range(source.dim()))]


def _reduced_dims(call: Call, source: Tensor) -> set[int] | None:
    """As given where that explains the shape of the result, else as the shapes tell."""
    shape, made = tuple(source.shape), tuple(call.result.shape)
    given = call.argument("dim", REDUCTIONS[call.name])
    given = call.argument("axis", -1) if given is None else given
    given = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    if isinstance(given, (list, tuple)) and given and shape:
        dims = {each % len(shape) for each in given}
        if made in (_without(shape, dims), _without(shape, dims, keep=True)):
            return dims
    if all(size == 1 for size in made) and len(made) in (0, len(shape)):
        return set(range(len(shape)))
    if len(made) == len(shape):
        return {axis for axis, size in enumerate(shape) if size != made[axis]} or None
    fitting = [axis for axis in range(len(shape)) if _without(shape, {axis}) == made]
    return set(fitting) if len(fitting) == 1 else None


def _without(shape: Index, dims: set[int], keep: bool = False) -> Index:
    sizes = [(1 if keep else None) if axis in dims else size for axis, size in enumerate(shape)]
    return tuple(size for size in sizes if size is not None)


def _along(call: Call, index: Index) -> Tensor | None:
    source, dim = call.tensor(0), call.argument("dim", ALONG[call.name])
    if source is None or (source.dim() <= 1 and call.name not in PREFIX_SUMS):
        return source
    if not isinstance(dim, int) or source.shape != call.result.shape or not source.dim():
        return None
    axis = dim % source.dim()
    row = source[tuple(slice(None) if each == axis else i for each, i in enumerate(index))]
    return row[: index[axis] + 1] if call.name in PREFIX_SUMS else row


def _normalised(call: Call, index: Index) -> Tensor | None:
    source = call.tensor(0)
    if source is None or not index:
        return None
    if call.name in ("batch_norm", "instance_norm"):
        return source[:, index[1] if len(index) > 1 else index[0]] if source.dim() > 1 else None
    normalized = call.argument("normalized_shape", 1)
    width = len(normalized) if isinstance(normalized, (list, tuple)) else 1
    return source[index[: source.dim() - width]]


def _targets(call: Call) -> int | None:
    target = call.tensor(1)
    if target is None or target.is_floating_point():
        return None
    ignored = call.argument("ignore_index", 4)
    ignored = ignored if isinstance(ignored, int) else -100
    counted = target[target != ignored]
    call.notes.append(f"{counted.numel()} of {target.numel()} targets count (ignore_index {ignored})")
    weight = call.argument("weight", 2)
    if isinstance(weight, Tensor) and counted.numel():
        call.notes.append(f"the weights of the counted targets sum to {float(weight[counted].sum()):.4g}")
    return int(counted.numel())


def _alignments(call: Call) -> None:
    """Note the first sample whose label, with a blank between repeats, is longer than its input."""
    targets, frames, lengths = call.tensor(1), _numbers(call, 2), _numbers(call, 3)
    if targets is None or frames is None or lengths is None:
        return
    begin = 0
    for sample, (have, length) in enumerate(zip(frames, lengths)):
        label = targets[sample, :length] if targets.dim() == 2 else targets[begin : begin + length]
        begin += length
        repeats = int((label[1:] == label[:-1]).sum())
        if length + repeats > have:
            needs = f"{length} labels with {repeats} repeats need {length + repeats} frames"
            call.notes.append(f"sample {sample}: {needs}, there are {have}")
            return


def _numbers(call: Call, position: int) -> list[int] | None:
    value = call.positional[position] if position < len(call.positional) else None
    if isinstance(value, Tensor):
        return [int(each) for each in value.flatten().tolist()]
    return list(value) if isinstance(value, (list, tuple)) else None
