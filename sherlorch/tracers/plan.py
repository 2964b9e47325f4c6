"""What a tracer works out once for each op: its name, its law, what it writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Callable

import torch

from sherlorch.graph import OpFacts
from sherlorch.ops import Law, law_of_call, law_of_function, law_of_overload, traits
from sherlorch.ops.collectives import Collective, collective_of
from sherlorch.ops.lookup import has_conditional_law
from sherlorch.tracers.bindings import binding_of

NO_LAW, PERMUTES, SELECTS = 0, 1, 2
_LAWS = {Law.PERMUTES: PERMUTES, Law.SELECTS: SELECTS}


class Plan(OpFacts):
    """Facts of one op for the recorder."""

    __slots__ = (
        "arguments",
        "blind",
        "bounded",
        "by_element",
        "call",
        "careful",
        "carries",
        "collective",
        "conditional",
        "func",
        "has_schema",
        "ignored",
        "in_place",
        "is_gradient",
        "keeps_old",
        "law",
        "lifts",
        "overwrites",
        "plain_inputs",
        "pointwise",
        "random",
        "root",
        "special",
        "tensors_until",
        "unmarked",
        "unusual",
        "writes",
    )

    def __init__(self, func: Any, name: str, base: str) -> None:
        root = traits.root_of(base)
        moves = base in traits.MOVES or root in traits.MOVES
        super().__init__(
            name,
            base,
            moves=moves,
            constant=base in traits.FILLS,
            uninitialised=base in traits.UNINITIALISED,
            combines=base in traits.COMBINES or root in traits.COMBINES,
        )
        self.root = root
        self.func = func  # keeps it alive: plans are found by its id
        self.call: Callable[..., Any] = func
        self.law = NO_LAW
        self.conditional = False  # the law depends on the arguments
        self.unusual = False  # zeros without memory, which must not be summed; results that go by element
        self.blind = traits.ignores_values(base)  # takes tensors for their shape only
        self.ignored = False  # makes no value: getters of gradients, switches
        self.carries = False  # a finite result proves the inputs finite
        self.plain_inputs = not self.blind  # neither blind, nor do they carry
        self.careful = False  # conditional or unusual
        self.special = False  # the function level must do more than record results
        self.bounded = False
        self.writes: list[tuple[int, str, bool]] = []
        self.unmarked = base in traits.UNMARKED_WRITES
        self.overwrites = base in traits.OVERWRITES
        self.by_element = False  # element i of a list result depends on element i of the lists only
        self.is_gradient = False  # the getter of ``grad``
        self.in_place = False  # writes its first argument, one tensor, and nothing else
        self.keeps_old = False
        self.lifts = False  # makes a tensor of data that the program holds
        self.pointwise = False
        self.random = False
        self.has_schema = False  # is it known from a schema what a call writes?
        self.arguments: tuple[str, ...] = ()
        self.tensors_until = sys.maxsize  # the position from which on no argument can hold a tensor
        self.collective: Collective | None = None  # what it writes comes in part from other processes

    def law_for(self, args: Any, kwargs: Mapping[str, Any]) -> int:
        """The law of this very call, for a plan whose law is conditional."""
        if self.law and not kwargs:  # every call's, but for one that is given a dtype
            for value in args:
                if type(value) is torch.dtype:
                    return NO_LAW
            return self.law
        law = law_of_call(self.func, args, kwargs)
        return _LAWS.get(law, NO_LAW) if law is not None else NO_LAW

    def name_arguments(self, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The call's arguments by name, in order."""
        names = self.arguments
        named = {
            names[i] if i < len(names) and names[i] not in kwargs else f"arg{i}": value
            for i, value in enumerate(args)
        }
        return {**named, **kwargs}


class Switch:
    """Turns a tracer on and off by the plans that it finds."""

    _plans: dict[Any, Plan]
    _asked: dict[Any, Plan]

    @property
    def enabled(self) -> bool:
        """Are calls recorded?"""
        return self._asked is self._plans

    @enabled.setter
    def enabled(self, value: bool) -> None:
        # Without plans every call is one met for the first time, so that no other has to ask.
        self._asked = self._plans if value else {}


# In-place ops that lose their input where the lost value is what explains a fault; the others' ranges say
# enough.
_CHEAP_IN_PLACE = frozenset(
    {
        "add",
        "sub",
        "mul",
        "lerp",
        "addcmul",
        "addcdiv",
        "clamp",
        "relu",
        "copy",
        "fill",
        "zero",
        "neg",
        "dropout",
    }
)


def plan_overload(func: Any, fast: bool) -> Plan:
    """Plan of an aten (or custom) overload."""
    base = traits.base_of(func)
    plan = Plan(func, str(func), base)
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher order operator
        return plan
    plan.call = binding_of(func)
    plan.has_schema = True
    plan.arguments = tuple(argument.name for argument in schema.arguments)
    plan.tensors_until = _tensors_until(schema)
    if _is_collective(plan):
        return plan
    law = law_of_overload(func)
    plan.law = _LAWS.get(law, NO_LAW) if fast and law is not None else NO_LAW
    plan.conditional = fast and law is None and has_conditional_law(func)
    plan.bounded = law is Law.BOUNDED
    plan.moves = plan.moves or law is Law.PERMUTES or (law is Law.SELECTS and _views(schema))
    plan.writes = traits.written_arguments(schema, base)
    plan.by_element = base.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
    plan.unusual = base == "_efficientzerotensor" or plan.by_element
    plan.keeps_old = (
        bool(plan.writes) and not plan.by_element and plan.root not in _CHEAP_IN_PLACE and not plan.overwrites
    )
    plan.in_place = [(position, is_out) for position, _, is_out in plan.writes] == [
        (0, False)
    ] and not plan.by_element
    plan.in_place = plan.in_place and base not in traits.RESIZES
    plan.lifts = base in ("lift_fresh", "lift_fresh_copy")
    plan.pointwise = traits.is_pointwise(func)
    plan.random = traits.is_random(func)
    plan.careful = plan.conditional or plan.unusual
    plan.carries = base in traits.CARRIES and schema.name.startswith("aten::")
    plan.plain_inputs = not (plan.blind or plan.carries)
    return plan


def _tensors_until(schema: Any) -> int:
    """One past the last positional argument that may be a tensor or hold some."""
    taking = [
        position
        for position, argument in enumerate(schema.arguments)
        if not argument.kwarg_only and not _WITHOUT_TENSORS.fullmatch(str(argument.type))
    ]
    return taking[-1] + 1 if taking else 0


# As schemas name the types of arguments. What is not known here may be anything.
_WITHOUT_TENSORS = re.compile(
    r"((Optional|List)\[)*(int|float|bool|complex|number|str|Device|Generator|ScalarType|Layout|MemoryFormat)\]*"
)


def _is_collective(plan: Plan) -> bool:
    """Does torch.distributed write what this call gives? Then that is all there is to know."""
    plan.collective = collective_of(plan.func)
    if plan.collective is None:
        return False
    plan.arrives = True
    plan.writes = [(0, plan.collective.writes, False)]
    plan.special = plan.random = True  # never to be run again for a second look
    return True


def _views(schema: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)


_NO_VALUES = frozenset(
    {
        "grad",
        "_grad",
        "backward",
        "requires_grad",
        "_set_grad_enabled",
        "set_grad_enabled",
        "register_hook",
        "retain_grad",
    }
)
_FUNCTION_STATS = frozenset(
    {
        "batch_norm",
        "instance_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
    }
)


# Torch's own functions of these names. Two still take a `beta` by position, which may scale an input away.
_CARRYING = frozenset(
    getattr(home, name)
    for name in traits.CARRIES - {"addmm", "baddbmm"}
    for home in (torch, torch.Tensor, torch.nn.functional)
    if hasattr(home, name)
)


def plan_function(func: Any, fast: bool) -> Plan:
    """Plan of a function as the user called it; `writes` only tells that arguments may be written."""
    name = getattr(func, "__name__", None) or str(func)
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    plan = Plan(func, name, name)
    if _is_collective(plan):
        return plan
    law = law_of_function(func)
    # `view` alone takes a dtype where others take sizes.
    plan.conditional = fast and (has_conditional_law(func) or name == "view")
    plan.law = _LAWS.get(law, NO_LAW) if fast and law is not None else NO_LAW
    plan.bounded = law is Law.BOUNDED
    plan.moves = plan.moves or law is Law.PERMUTES or (law is Law.SELECTS and plan.root in _SELECTING_VIEWS)
    differentiates = func is torch.autograd.grad  # shares its name with the getter
    plan.ignored = name in _NO_VALUES and not differentiates
    plan.is_gradient = name == "grad" and not differentiates
    plan.by_element = plan.unusual = name.startswith("_foreach_")
    plan.unmarked = name in _FUNCTION_STATS
    in_place = name.endswith("_") and not name.endswith("__") and name not in traits.MOVES_TENSOR
    if not plan.ignored and (in_place or name == "__setitem__" or plan.unmarked or _may_write(func)):
        plan.writes = [(0, "", False)]
    plan.keeps_old = (
        in_place and not plan.by_element and plan.root not in _CHEAP_IN_PLACE and not plan.overwrites
    )
    plan.in_place = in_place and not name.startswith("_") and not isinstance(func, FunctionType)
    plan.in_place = plan.in_place and name not in traits.RESIZES
    plan.lifts = name in ("tensor", "as_tensor", "from_numpy", "asarray", "frombuffer")
    plan.pointwise = _is_pointwise_function(plan.root)
    plan.random = plan.root in _RANDOM or differentiates  # neither can be computed again
    plan.arguments = _argument_names(func, plan.root)
    if name.startswith(_WRITES_UNCOUNTED) and in_place:
        schema = _schema_of(name)
        plan.writes = traits.written_arguments(schema, name) if schema is not None else plan.writes
        plan.has_schema = schema is not None
        plan.by_element = plan.unusual = True
    plan.careful = plan.conditional or plan.unusual
    plan.carries = func in _CARRYING
    plan.plain_inputs = not (plan.blind or plan.carries)
    plan.special = plan.ignored or bool(plan.writes) or name == "backward"
    return plan


# These write their arguments without a trace in the version counters, some only under a dispatch mode.
_WRITES_UNCOUNTED = ("_foreach_", "_fused_", "_amp_foreach_")


def _schema_of(name: str) -> Any:
    packet = getattr(torch.ops.aten, name, None)
    return getattr(packet, packet.overloads()[0])._schema if packet is not None else None


def _argument_names(func: Any, root: str) -> tuple[str, ...]:
    """Names for the evidence: those of the Python function, or of the aten op of the same name."""
    if isinstance(func, FunctionType):
        return func.__code__.co_varnames[: func.__code__.co_argcount]
    schema = _schema_of(root)
    if schema is None:
        return ()
    return tuple(argument.name for argument in schema.arguments if not argument.kwarg_only)


def _may_write(func: Any) -> bool:
    """Python functions: torch's own write only if asked to work in place; others may do anything.

    Of the built-in ones a few write statistics or noise (`_batch_norm_with_update`, `rrelu_with_noise`).
    """
    if not isinstance(func, FunctionType):
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            return False
        return any(
            argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
            for overload in packet.overloads()  # type: ignore[no-untyped-call]
            for argument in getattr(packet, overload)._schema.arguments
        )
    return not func.__module__.startswith("torch.") or "inplace" in func.__code__.co_varnames


_SELECTING_VIEWS = frozenset(
    {
        "index",
        "select",
        "narrow",
        "expand",
        "expand_as",
        "unbind",
        "split",
        "chunk",
        "diagonal",
        "broadcast_to",
    }
)
_RANDOM = frozenset(
    {
        "dropout",
        "rrelu",
        "gumbel_softmax",
        "bernoulli",
        "multinomial",
        "feature_alpha_dropout",
        "alpha_dropout",
    }
)


def _is_pointwise_function(root: str) -> bool:
    packet = getattr(torch.ops.aten, root, None)
    if packet is None:
        return False
    return any(traits.is_pointwise(getattr(packet, overload)) for overload in packet.overloads())
