"""Which law a call, a function or an overload obeys."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

from sherlorch.ops.law import Arguments, Group, Keywords, Law, tensors_in
from sherlorch.ops.table import GROUPS

_HOMES = (torch, torch.Tensor, F, torch.special, torch._C._nn)


def law_of_call(func: object, args: Arguments = (), kwargs: Keywords | None = None) -> Law | None:
    """The law this very call obeys, at either level; it sees the arguments, so it knows the most.

    >>> law_of_call(torch.cat, ([torch.ones(2), torch.ones(3)],))
    <Law.PERMUTES: 'permutes'>
    >>> law_of_call(torch.cat, ([torch.ones(2).half(), torch.tensor([100_000])],))  # promotion makes Inf
    """
    group = _group_of(func)
    kwargs = kwargs or {}
    if group is None or _casts(args, kwargs):
        return None
    if group.condition is not None and not group.condition(args, kwargs):
        return None
    if group.law is Law.BOUNDED and any(tensor.is_complex() for tensor in tensors_in(args, kwargs)):
        return None
    return group.law


def law_of_overload(op: OpOverload) -> Law | None:
    """The law that every call of this overload obeys (`BOUNDED`: every call on real tensors).

    None for an overload whose law depends on the arguments, such as `aten.cat`: `law_of_call` knows more.
    """
    group = _group_of_overload(op)
    takes_dtype = any(argument.name == "dtype" for argument in op._schema.arguments)
    return None if takes_dtype else _unconditional(group)


def law_of_function(func: object) -> Law | None:
    """The law that every call of this torch function, method or getter obeys if given no dtype and no `out=`.

    None for a function whose law depends on the arguments, such as `torch.where`: `law_of_call` knows more.
    """
    return law_of_overload(func) if isinstance(func, OpOverload) else _unconditional(_group_of(func))


def law_of_name(op_name: str) -> Law | None:
    """The same by the name a node carries: `aten.tanh.default` is an overload, `tanh` a function."""
    namespace, _, rest = op_name.partition(".")
    if not rest:
        return _unconditional(_GROUP_OF_FUNCTION_NAME.get(_plain(namespace, _GROUP_OF_FUNCTION_NAME)))
    packet = getattr(getattr(torch.ops, namespace), rest.rpartition(".")[0], None)
    overload = getattr(packet, rest.rpartition(".")[2], None)
    return law_of_overload(overload) if isinstance(overload, OpOverload) else None


def has_conditional_law(func: object) -> bool:
    """Does the law of a call depend on its arguments? `law_of_call` decides then."""
    group = _group_of(func)
    return group is not None and group.condition is not None


def _unconditional(group: Group | None) -> Law | None:
    return None if group is None or group.condition is not None else group.law


def _casts(args: Arguments, kwargs: Keywords) -> bool:
    """`view(dtype)` reinterprets bits, `softmax(dtype=)` narrows, and `out=` has a dtype of its own."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is torch.dtype:
            return True
    return kwargs.get("out") is not None


def _group_of(func: object) -> Group | None:
    if isinstance(func, OpOverload):
        return _group_of_overload(func)
    try:
        return _GROUP_OF_FUNCTION.get(func)
    except TypeError:  # an unhashable callable is not torch's
        return None


@functools.cache  # overloads live as long as the process
def _group_of_overload(op: OpOverload) -> Group | None:
    namespace, _, name = op._schema.name.partition("::")
    base = _plain(name if namespace == "aten" else f"{namespace}.{name}", _GROUP_OF_ATEN_NAME)
    group = _GROUP_OF_ATEN_NAME.get(base)
    if group is None or f"{base}.{op._overloadname}" in group.overloads_excluded:
        return None
    arguments = op._schema.arguments
    has_out = any(argument.kwarg_only and argument.alias_info is not None for argument in arguments)
    takes_tensor = any("Tensor" in str(argument.type) for argument in arguments)
    returns_tensor = any("Tensor" in str(result.type) for result in op._schema.returns)
    return group if takes_tensor and returns_tensor and not has_out else None


def _plain(name: str, rows: dict[str, Group]) -> str:
    """The row's name: that of `relu_` is `relu`."""
    return name if name in rows or not name.endswith("_") else name[:-1]


def _index(names_and_groups: Iterable[tuple[str, Group]]) -> dict[str, Group]:
    rows: dict[str, Group] = {}
    for name, group in names_and_groups:
        if name in rows:
            raise ValueError(
                f"`{name}` has two rows, in {rows[name].equation!r} and in {group.equation!r}: remove one"
            )
        rows[name] = group
    return rows


def _functions_called(name: str) -> Iterator[object]:
    """What torch calls by this name: functions, methods, their in-place twins, an attribute's getter."""
    for home in _HOMES:
        for spelling in (name, f"{name}_"):
            found = getattr(home, spelling, None)
            if callable(found):
                yield found
            elif found is not None:
                yield found.__get__


_GROUP_OF_ATEN_NAME = _index((name, group) for group in GROUPS for name in group.aten_names)
_GROUP_OF_FUNCTION_NAME = _index((name, group) for group in GROUPS for name in group.function_names)
_GROUP_OF_FUNCTION = {
    function: group for name, group in _GROUP_OF_FUNCTION_NAME.items() for function in _functions_called(name)
}
