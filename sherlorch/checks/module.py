"""The module whose calls are the checks of an instrumented graph."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Callable

import torch
from torch import Tensor, nn

from sherlorch import health
from sherlorch.capture import capture
from sherlorch.checks.records import Builder
from sherlorch.checks.runs import Gradient, Run, build, worth_keeping
from sherlorch.checks.site import Site, shown
from sherlorch.compat import NUMBERS_NODES
from sherlorch.evidence import Evidence
from sherlorch.graph import Extra
from sherlorch.health import NAN
from sherlorch.reports.report import Coverage, DiagnosisReport
from sherlorch.tracers.faults import is_mask, leaf_evidence

_MOST_RUNS = 100  # with something bad, harmless masks too; then only those worth keeping stay
_MOST_EVIDENCE = 20  # of one site


def _never() -> bool:
    return False


_is_compiling: Callable[[], bool] = torch.compiler.is_compiling if hasattr(torch, "compiler") else _never


class Checks(nn.Module):
    """Looks at values as they pass; `diagnose` tells which one went bad first, and why.

    On an accelerator each check waits for the device. Under `torch.compile` and `torch.export` a check is a
    few tensor operations that write the buffer `flags`: which nodes went bad is known then, evidence and
    gradients are not.
    """

    flags: Tensor
    _is_impure = True  # so that no pass takes a check for dead code

    def __init__(self, sites: Sequence[Site], backward: bool = True) -> None:
        super().__init__()
        self.sites = list(sites)
        self.backward = backward and NUMBERS_NODES
        self._notes = ("gradients not checked before torch 2.1",) if backward and not NUMBERS_NODES else ()
        self.register_buffer("flags", torch.zeros(len(self.sites)), persistent=False)
        self._run = Run()
        self._runs: list[Run] = []
        self._evidence: Counter[int] = Counter()  # how often it was taken, by site

    def reset(self) -> None:
        """Forget what was seen."""
        self._run = Run()
        self._runs = []
        self._evidence.clear()
        self.flags.zero_()

    def diagnose(self) -> DiagnosisReport:
        """On the earliest fault since the last `reset` that was not absorbed."""
        checked = sum(site.checked for site in self.sites)
        coverage = Coverage(len(self.sites), checked, len(self.sites) - checked, notes=self._notes)
        if self._runs or not self.flags.any():
            return build(self.sites, self._runs).report(coverage)
        coverage.notes = ("ran inside compiled code: gradients not seen",)
        builder = Builder()
        builder.block(
            self.sites, {site: int(flag) for site, flag in enumerate(self.flags.tolist()) if flag}, {}
        )
        return builder.report(coverage)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": Run(), "_runs": []}

    def extra_repr(self) -> str:
        return f"{sum(site.checked for site in self.sites)} checks on {len(self.sites)} nodes"

    # The check itself.

    def forward(self, value: Any, site: int, inputs: tuple[Any, ...] = ()) -> None:
        """Look at what node `site` made of `inputs`."""
        if _is_compiling():
            self._flag(value, site)
        else:
            self._look(value, site, inputs)

    def _flag(self, value: Any, site: int) -> None:
        for tensor in _tensors(value):
            values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            state = values.isnan().any() + 2 * values.isinf().any()
            self.flags[site] = torch.maximum(self.flags[site], state.to(self.flags.dtype))

    def _look(self, value: Any, index: int, inputs: tuple[Any, ...]) -> None:
        if index <= self._run.last:
            self._run = Run()
        run = self._run
        run.last = index
        tensors = list(_tensors(value))
        state = _state(tensors)
        if state:
            self._fault(run, index, state, tensors, inputs)
        if self.backward and torch.is_grad_enabled():
            if self.sites[index].leaf is not None:
                _own(run, self.sites[index], tensors)
            self._hook(run, index, tensors)

    def _fault(
        self, run: Run, index: int, state: int, made: Sequence[Tensor], inputs: tuple[Any, ...]
    ) -> None:
        self._keep(run)
        run.states[index] = state
        site = self.sites[index]
        if site.leaf is not None:
            run.extras[index] = _leaf_extra(site.leaf, made)
            return
        storages = {_storage(tensor) for tensor in made}
        came_in = self._look_at_inputs(run, index, storages, inputs)
        run.writers.update(dict.fromkeys(storages, index))
        new = not site.meant(state) if not came_in else state & NAN and not came_in & NAN
        if new and self._evidence[index] < _MOST_EVIDENCE:
            self._evidence[index] += 1
            run.extras[index] = Extra(evidence=_evidence(site.facts.root, site.given(inputs), made))

    def _look_at_inputs(self, run: Run, user: int, written: set[int], inputs: tuple[Any, ...]) -> int:
        """State of what went in, and who is answerable for values that no check looked at."""
        came_in = 0
        for place, value in zip(self.sites[user].parents, inputs):
            tensors = list(_tensors(value))
            storages = {_storage(tensor) for tensor in tensors}
            if place not in run.states and written.isdisjoint(storages):
                state = _state(tensors)
                came_in |= state
                if state:
                    self._answer_for(run, user, place, state, storages)
            came_in |= run.states.get(place, 0)
        return came_in

    def _answer_for(self, run: Run, user: int, place: int, state: int, storages: set[int]) -> None:
        """An input is bad and nobody saw it go bad: a view or copy, or written through another view."""
        way = [place]
        while not self.sites[way[-1]].checked and len(self.sites[way[-1]].parents) == 1:
            way.append(self.sites[way[-1]].parents[0])
        writers = [run.writers[storage] for storage in storages if storage in run.writers]
        if writers and way[-1] not in run.states:
            run.written.setdefault(user, []).extend(writers)
        else:
            run.states.update((each, state) for each in way if not self.sites[each].checked)

    def _keep(self, run: Run) -> None:
        if not run.is_faulty:
            if len(self._runs) >= _MOST_RUNS:
                outside = shown(self.sites)
                self._runs = worth_keeping(
                    self._runs, lambda each: each.pattern, lambda each: each.lasts(outside)
                )
            self._runs.append(run)

    # Gradients.

    def _hook(self, run: Run, index: int, tensors: Sequence[Tensor]) -> None:
        """Watch each backward function that the node made, and those of unchecked nodes before it."""
        functions = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        while functions:
            function = functions.pop()
            number = _number(function)
            if number is None or number < run.start or number in run.hooked:
                continue
            run.hooked.add(number)
            following = [each for each, _ in function.next_functions]
            targets = [_number(each) for each in following]
            owners = [run.owners.get(id(getattr(each, "variable", None)), "") for each in following]
            function.register_hook(
                partial(self._backward, run, index, function.name(), number, targets, owners)
            )
            functions += [each for each in following if each is not None]

    def _backward(
        self,
        run: Run,
        index: int,
        name: str,
        number: int,
        targets: Sequence[int | None],
        owners: Sequence[str],
        made: Sequence[Tensor | None],
        came: Sequence[Tensor | None],
    ) -> None:
        states = [_state([tensor]) if tensor is not None else 0 for tensor in made]
        state = _union(states)
        if not state:
            absorbed = run.bad_into.pop(number, None)
            if absorbed:
                run.gradients.append(Gradient(index, name, 0, absorbed, 0))
            return
        self._keep(run)
        incoming = _state([tensor for tensor in came if tensor is not None])
        sources = run.bad_into.pop(number, []) if incoming else []
        fault = Gradient(index, name, state, sources, 0 if sources else incoming)
        if not incoming:
            arguments = {f"grad{i or ''}": tensor for i, tensor in enumerate(came) if tensor is not None}
            bad = [tensor for tensor, each in zip(made, states) if each and tensor is not None]
            fault.evidence = _evidence(name, arguments, bad)
        for target, owner, each in zip(targets, owners, states):
            if each and target is not None:
                run.bad_into.setdefault(target, []).append(fault)
            if each and owner:
                fault.owners.append(f"{owner}.grad")
        run.gradients.append(fault)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The floating tensors of a value."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _union(states: Sequence[int]) -> int:
    state = 0
    for each in states:
        state |= each
    return state


def _state(tensors: Sequence[Tensor]) -> int:
    if not tensors:
        return 0
    with health.unseen():
        return _union([health.scan(tensor.detach()) for tensor in tensors if not tensor.is_meta])


def _number(function: Any) -> int | None:
    """What an autograd function is known by; None for the one that accumulates a leaf's gradient."""
    return None if function is None or hasattr(function, "variable") else int(function._sequence_nr())


def _own(run: Run, site: Site, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf:
            run.owners[id(tensor)] = (site.leaf or "").rpartition(" ")[2]


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without one
        return id(tensor)


def _evidence(op: str, arguments: Mapping[str, Any], made: Sequence[Tensor]) -> Evidence | None:
    bad = next((tensor for tensor in made if _state([tensor])), made[0])
    with health.unseen(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # computing something again must not warn the user again
        return capture(op, arguments, bad)


def _leaf_extra(name: str, made: Sequence[Tensor]) -> Extra:
    evidence = leaf_evidence(made[0].detach())
    return Extra(name, evidence, mask=is_mask(evidence.result))
