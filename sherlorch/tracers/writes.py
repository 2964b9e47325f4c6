"""Calls that write several arguments, or that may: ``out=``, ``_foreach_*_``, ``_fused_*_``, batch norm,
Python functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sherlorch.graph import CONSUMED, PENDING, Record
from sherlorch.health import NONFINITE
from sherlorch.ops import traits
from sherlorch.tracers.arguments import share_memory, storage_of, tensors_in, version_of
from sherlorch.tracers.memory import anchor
from sherlorch.tracers.plan import Plan

if TYPE_CHECKING:
    from sherlorch.tracers.ledger import Site
    from sherlorch.tracers.recorder import Recorder


class Writing:
    """One call that writes arguments: what must be known before it runs, and what is known after."""

    def __init__(
        self, recorder: Recorder, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.recorder, self.plan, self.args, self.kwargs = recorder, plan, args, kwargs
        self.versions: list[int] | None = None
        self.others: dict[Any, tuple[list[Tensor], set[int]]] = {}  # what else the call was given
        self.targets = list(self._find_targets() if plan.has_schema else self._find_candidates())
        written = {id(target) for target, _, reads in self.targets if not reads}
        # Inputs are looked up before the call: afterwards their memory may hold something else.
        self.inputs = [(value, self._nodes(value, written)) for value in (*args, *kwargs.values())]
        self.old = self._keep_old()
        self.sizes = [_size(target) for target, _, _ in self.targets] if plan.base in traits.RESIZES else None
        for target, _, reads in self.targets:
            known = None if reads else recorder.find(target)
            if known is not None and known.bits & (NONFINITE | PENDING):
                known.bits |= CONSUMED

    def _find_targets(self) -> Iterator[tuple[Tensor, int, bool]]:
        """(tensor, its place in a list or -1, is its old value an input) of each written argument."""
        plan, args = self.plan, self.args
        for position, name, is_out in plan.writes:
            value = args[position] if 0 <= position < len(args) else self.kwargs.get(name)
            if plan.unmarked and name in traits.UNMARKED_WRITES[plan.base] and not self._trains():
                continue
            reads = not (is_out or (plan.overwrites and position == 0))
            if isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    if isinstance(item, Tensor):
                        row = index if plan.by_element else -1
                        yield item, row, reads or self._overlaps(item, position, name)
            elif isinstance(value, Tensor):
                yield value, -1, reads or self._overlaps(value, position, name)

    def _find_candidates(self) -> Iterator[tuple[Tensor, int, bool]]:
        """At function level there is no schema: what was written shows in the tensors' version counters."""
        plan = self.plan
        self.versions = []
        named: list[tuple[Any, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        for name, value in named:
            in_list = isinstance(value, (list, tuple)) and plan.by_element
            for index, tensor in enumerate(tensors_in(value)):
                # A subclass that unwraps itself writes below the version counter.
                certain = name == "out" or (name == 0 and plan.in_place) or self._is_statistic(name)
                self.versions.append(-2 if certain else version_of(tensor))
                reads = name != "out" and not (plan.overwrites and name == 0)
                row = index if in_list else -1
                yield tensor, row, reads or self._overlaps(tensor, name, name)

    def _is_statistic(self, name: Any) -> bool:
        # torch.nn.functional.batch_norm has them second and third, torch.batch_norm fourth and fifth.
        places = (1, 2) if isinstance(self.plan.func, FunctionType) else (3, 4)
        if not self.plan.unmarked or name not in (*places, "running_mean", "running_var"):
            return False
        training = self.kwargs.get(
            "training", self.kwargs.get("use_input_stats", self.args[5] if len(self.args) > 5 else False)
        )
        return bool(training) or self.plan.base == "_batch_norm_with_update"

    def _drop_unwritten(self) -> None:
        if (
            self.sizes is not None
        ):  # a tensor that looks elsewhere now, at memory that its writers have told of
            grown = [_size(target[0]) > size for target, size in zip(self.targets, self.sizes)]
            self.targets = [target for target, grew in zip(self.targets, grown) if grew]
            return
        if self.versions is not None:
            written = {
                id(target[0]): target
                for target, version in zip(self.targets, self.versions)
                if version == -2 or version_of(target[0]) != version
            }
            self.targets = list(written.values())

    def _trains(self) -> bool:
        named = self.plan.name_arguments(self.args, self.kwargs)
        return bool(named.get("training", True))

    def _overlaps(self, target: Tensor, position: Any, name: Any) -> bool:
        """Does a full overwrite of the argument there read memory that it writes?"""
        if name not in self.others:
            args = [value for place, value in enumerate(self.args) if place != position]
            kwargs = {key: value for key, value in self.kwargs.items() if key != name}
            others = [*tensors_in((args, kwargs))]
            self.others[name] = others, {storage_of(other) for other in others}
        others, storages = self.others[name]
        return storage_of(target) in storages and share_memory(target, others)

    def _nodes(self, value: Any, written: set[int]) -> list[Record | None]:
        node_of = self.recorder.node_of
        return [None if id(tensor) in written else node_of(tensor) for tensor in tensors_in(value)]

    def _keep_old(self) -> dict[str, Tensor]:
        """Copies of what the call is about to overwrite, where a fault could not be explained without."""
        plan = self.plan
        if plan.by_element or plan.overwrites:
            return {}
        old = {}
        named = None
        for target, _, reads in self.targets:
            if not reads or target.dtype not in self.recorder.floating:
                continue
            bad = any(
                node is not None and node.bits & NONFINITE for _, nodes in self.inputs for node in nodes
            )
            if plan.keeps_old or bad:
                named = named or plan.name_arguments(self.args, self.kwargs)
                name = next((name for name, value in named.items() if value is target), "self")
                old[name] = self.recorder.copy(target)
        return old

    def _parents(self, index: int) -> tuple[Record, ...]:
        parents: list[Record] = []
        for value, nodes in self.inputs:
            if index >= 0 and isinstance(value, (list, tuple)):
                if index < len(nodes) and len(nodes) == len(value) and nodes[index] is not None:
                    parents.append(nodes[index])  # type: ignore[arg-type]
            else:
                parents.extend(node for node in nodes if node is not None)
        return tuple(parents)

    def keep_changed(self) -> None:
        """After a failure: keep the targets that are no longer in the state that is known of them."""
        recorder = self.recorder
        self.versions = None
        self.targets = [
            target
            for target in self.targets
            if recorder.defer or recorder.state_of(anchor(target[0])) != recorder.node_of(target[0]).state
        ]

    def finish(self, out: Any, site: Site) -> None:
        """The call has run: add a node for each written argument, then for each other result."""
        recorder, plan = self.recorder, self.plan
        self._drop_unwritten()
        if plan.ignored and not self.targets:
            return
        call = recorder.seq + 1
        whole = None
        record: Record | None = None
        recorder.written = [target for target, _, _ in self.targets]
        try:
            for target, index, _ in self.targets:
                if index < 0:
                    whole = parents = whole if whole is not None else self._parents(-1)
                else:
                    parents = self._parents(index)
                bits = 0
                for parent in parents:
                    bits |= parent.bits
                record = recorder.add_write(
                    plan, self.args, self.kwargs, target, parents, bits, *site, call, self.old
                )
        finally:
            recorder.written = ()
        written = {id(target) for target, _, _ in self.targets}
        for result in tensors_in(out):
            if id(result) in written:
                continue
            whole = whole if whole is not None else self._parents(-1)
            bits = 0
            for parent in whole:
                bits |= parent.bits
            record = (
                recorder.add_result(plan, self.args, self.kwargs, result, whole, bits, *site, call) or record
            )
        if record is not None:
            recorder.tie_made(record)


def _size(tensor: Tensor) -> int:
    held = anchor(tensor)
    return held.untyped_storage().nbytes() if held is not None else 0
