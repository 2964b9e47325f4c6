"""Collectives of torch.distributed: what they write comes in part from other processes, and is judged when it
was waited for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sherlorch import source
from sherlorch.errors import NonFiniteError, NonFiniteWarning
from sherlorch.graph import ARRIVING, BACKWARD, GRADIENT, PENDING, Record
from sherlorch.ops.collectives import MIXES, NOWHERE, PLACES, RETURNS, ROOT, WRAPS, Collective
from sherlorch.tracers.arguments import tensors_in
from sherlorch.tracers.faults import mark_consumed
from sherlorch.tracers.ledger import CPU, Site
from sherlorch.tracers.memory import anchor
from sherlorch.tracers.plan import Plan

if TYPE_CHECKING:
    from sherlorch.tracers.recorder import Recorder


def call(recorder: Recorder, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], frame: Any) -> Any:
    """Run a collective, and let its results be judged when they are there."""
    recorder.sweep_flights()
    targets: list[tuple[Tensor, tuple[Record, ...]]] = []
    collective = plan.collective
    assert collective is not None
    returns = collective.how == RETURNS
    try:
        named = _named(plan, collective, args, kwargs)
        # Inputs are looked up before the call: afterwards their memory may hold something else.
        targets = [*_targets(recorder, collective, named)]
        own = _nodes(recorder, [*args, *kwargs.values()]) if returns else ()
    except (NonFiniteError, NonFiniteWarning):
        raise
    except Exception as problem:
        recorder.miss(plan, problem)
        return plan.call(*args, **kwargs)
    out = plan.call(*args, **kwargs)
    try:
        if returns:
            targets = [(tensor, own) for tensor in tensors_in(out)]
        site = _site(recorder, frame)
        waited = not plan.has_schema and not returns and not _is_work(out)
        work = None if waited else _work_of(out, named)
        number = recorder.seq + 1
        for tensor, parents in targets:
            bits = 0
            for parent in parents:
                bits |= parent.bits
            if waited:
                recorder.add_write(plan, (), {}, tensor, parents, bits, *site, number, None)
            else:
                _depart(recorder, plan, tensor, parents, bits, site, number, work)
    except (NonFiniteError, NonFiniteWarning):
        raise
    except Exception as problem:
        recorder.miss(plan, problem)
    return out


def _site(recorder: Recorder, frame: Any) -> Site:
    """Where the call is; one that a hook of the backward pass makes is where that pass was asked for."""
    site = Site(*recorder.where(frame))
    user = source.user_frame(frame) if site.code is None and recorder.capture_stack else None
    return site if user is None else site._replace(code=user.f_code, instruction=user.f_lasti)


def _depart(
    recorder: Recorder, plan: Plan, tensor: Tensor, parents: tuple[Record, ...], bits: int, site: Site,
    number: int, work: Any,
) -> None:  # fmt: skip
    """A node whose state is asked for when something reads it."""
    held = anchor(tensor)
    if held is None:
        return
    state = PENDING | ARRIVING | (GRADIENT if bits & GRADIENT or site.scope.phase == BACKWARD else 0)
    seq = recorder.seq = recorder.seq + 1
    device = CPU if held.is_cpu else held.device
    record = Record(
        seq, number, plan, tensor.shape, tensor.dtype, device, state, parents, *site, None
    )  # fmt: skip
    mark_consumed(parents)
    if recorder.keep_all:
        recorder.records.append(record)
    recorder.flights.append(recorder.memory.expect(held, record, work))


def _named(
    plan: Plan, collective: Collective, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    if plan.has_schema or collective.how in (RETURNS, WRAPS):
        return plan.name_arguments(args, kwargs)
    return dict(inspect.signature(plan.func).bind(*args, **kwargs).arguments)


def _targets(
    recorder: Recorder, collective: Collective, named: Mapping[str, Any]
) -> Iterator[tuple[Tensor, tuple[Record, ...]]]:
    """What the call writes, each with the nodes of this process that go into it."""
    how, writes, reads = collective
    written = [*tensors_in(named.get(writes))]
    if not written or how in (RETURNS, WRAPS):
        return
    if how == NOWHERE:
        yield from ((tensor, ()) for tensor in written)
        return
    own = [*tensors_in(named.get(reads))]
    if how == MIXES:
        nodes = _nodes(recorder, own)
        yield from ((tensor, nodes) for tensor in written)
        return
    rank = _rank(named)
    if how == ROOT:
        is_root = rank == _root(named)
        if is_root and writes == reads:
            return  # a broadcast from here
        nodes = _nodes(recorder, own[rank : rank + 1]) if is_root else ()
        yield from ((tensor, nodes) for tensor in written)
    elif how == PLACES:
        nodes = _nodes(recorder, own[rank : rank + 1] if len(own) == len(written) else own)
        for place, tensor in enumerate(written):
            yield tensor, nodes if place == rank else ()


def _nodes(recorder: Recorder, values: Any) -> tuple[Record, ...]:
    return tuple(recorder.node_of(tensor) for tensor in tensors_in(values))


def _rank(named: Mapping[str, Any]) -> int:
    """The rank of this process in the group of a call."""
    import torch.distributed as distributed

    group = named.get("process_group")
    if group is not None:  # an operator's; it has no rank of its own
        unbox = getattr(distributed.ProcessGroup, "unbox", None)
        return int(unbox(group).rank()) if unbox is not None else distributed.get_rank()
    return distributed.get_rank(named.get("group"))


def _root(named: Mapping[str, Any]) -> int:
    """The rank in the group of a call that the values come from."""
    import torch.distributed as distributed

    for name in ("root_rank", "group_src"):
        if named.get(name) is not None:
            return int(named[name])
    source, group = named.get("src") or 0, named.get("group")
    return int(source if group is None else distributed.get_group_rank(group, source))


def _is_work(value: Any) -> bool:
    work = getattr(torch.distributed, "Work", None)
    return work is not None and isinstance(value, work)


def _work_of(out: Any, named: Mapping[str, Any]) -> Any:
    """What can tell when the values are there; None where the program waits at once, or nothing can tell."""
    if _is_work(out):
        return out
    if named.get("async_op", True) is False:
        return None
    unbox = getattr(getattr(torch.distributed, "Work", None), "unbox", None)
    boxed = out[-1] if isinstance(out, (list, tuple)) and out else out
    return unbox(boxed) if unbox is not None and isinstance(boxed, torch.ScriptObject) else None
