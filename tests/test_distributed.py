"""Two processes: what another one sends is told to have come in at the collective, when it was waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import has_torch
from torch import Tensor, nn

import sherlorch
from sherlorch import ProvenanceTracker
from sherlorch.compat import NUMBERS_NODES
from sherlorch.tracers import memory

LEVELS = ("function", "aten")
PATIENCE = timedelta(seconds=30)
GOOD, BAD = 0, 1  # the rank that computes well, and the one that divides by zero

# The program of one process. Each part runs on both ranks and answers with plain data.


def given(rank: int) -> Tensor:
    """What a rank gives: ones, or a NaN beside an Inf."""
    return torch.ones(2) / torch.ones(2) if rank == GOOD else torch.tensor([0.0, 1.0]) / 0


def some(count: int = 2) -> list[Tensor]:
    return [torch.zeros(2) for _ in range(count)]


def all_reduce(rank: int) -> list[Tensor]:
    x = given(rank)
    dist.all_reduce(x)
    return [x]


def all_reduce_later(rank: int) -> list[Tensor]:
    x = given(rank)
    dist.all_reduce(x, async_op=True).wait()
    return [x]


def reduce(rank: int) -> list[Tensor]:
    x = given(rank)
    dist.reduce(x, GOOD)
    return [x]


def broadcast(rank: int) -> list[Tensor]:
    x = given(rank)
    dist.broadcast(x, BAD)
    return [x]


def all_gather(rank: int) -> list[Tensor]:
    parts = some()
    dist.all_gather(parts, given(rank))
    return [parts[BAD], parts[GOOD]]


def all_gather_of_views(rank: int) -> list[Tensor]:
    whole = torch.zeros(4)
    dist.all_gather(list(whole.chunk(2)), given(rank))
    return [whole[2:], whole[:2]]


def gather(rank: int) -> list[Tensor]:
    parts = some() if rank == GOOD else None
    dist.gather(given(rank), parts, GOOD)
    return [parts[BAD], parts[GOOD]] if parts else [given(rank)]


def scatter(rank: int) -> list[Tensor]:
    x = torch.zeros(2)
    dist.scatter(x, [given(rank), given(rank)] if rank == BAD else None, BAD)
    return [x]


def reduce_scatter(rank: int) -> list[Tensor]:
    x, own = torch.zeros(2), given(rank)
    dist.reduce_scatter(x, [own, own])
    return [x]


def all_to_all(rank: int) -> list[Tensor]:
    parts = some()
    dist.all_to_all(parts, [given(rank), given(rank)])
    return [parts[BAD], parts[GOOD]]


def all_to_all_single(rank: int) -> list[Tensor]:
    x = torch.zeros(2)
    dist.all_to_all_single(x, given(rank))
    return [x]


def send_and_receive(rank: int) -> list[Tensor]:
    x = torch.zeros(2)
    if rank == BAD:
        dist.send(given(rank), GOOD)
        return [given(rank)]
    dist.recv(x, BAD)
    return [x]


def receive_later(rank: int) -> list[Tensor]:
    x = torch.empty(2)
    if rank == BAD:
        dist.isend(given(rank), GOOD).wait()
        return [given(rank)]
    dist.irecv(x, BAD).wait()
    return [x]


COLLECTIVES: tuple[Callable[[int], list[Tensor]], ...] = (
    all_reduce, all_reduce_later, reduce, broadcast, all_gather, all_gather_of_views, gather, scatter,
    reduce_scatter, all_to_all, all_to_all_single, send_and_receive, receive_later,
)  # fmt: skip


def told(tracker: ProvenanceTracker, tensor: Tensor) -> dict[str, Any]:
    """What the tracker says of a tensor, and what the tensor holds."""
    report = tracker.diagnose(tensor)
    node = tracker.node(tensor)
    return {
        "held": [bool(tensor.isnan().any()), bool(tensor.isinf().any())],
        "node": [node.has_nan, node.has_inf],
        "ops": [culprit.op_name for culprit in report.culprits],
        "origins": [culprit.origin for culprit in report.culprits],
        "lines": [Path(culprit.location or "").name.partition(":")[0] for culprit in report.culprits],
        "phases": [culprit.phase for culprit in report.culprits],
        "text": " ".join(str(report).split()),
        "unseen": dict(report.coverage.unseen),
    }


def without(run: Callable[[int], list[Tensor]], rank: int) -> str:
    """Why gloo cannot run a collective by itself, which nobody traces; empty where it can."""
    try:
        run(rank)
    except RuntimeError as problem:
        return f"this torch cannot: {str(problem).splitlines()[0]}"
    return ""


def run_collective(run: Callable[[int], list[Tensor]], rank: int, level: str) -> Any:
    if not has_torch("2.13") and (reason := without(run, rank)):
        pytest.skip(reason)
    with sherlorch.trace(level=level) as tracker:
        tensors = run(rank)
        used = tensors[0] * 2
    answers = [told(tracker, tensors[0]), told(tracker, used)]
    return answers + [told(tracker, other) for other in tensors[1:]]


def run_unread(rank: int, level: str) -> Any:
    """Nothing reads the result before the report does."""
    with sherlorch.trace(level=level) as tracker:
        (x,) = all_reduce(rank)
    earliest = tracker.diagnose()
    return [told(tracker, x), {"text": " ".join(str(earliest).split()), "ok": earliest.ok}]


def run_in_flight(rank: int, level: str, store: Any) -> Any:
    """The other rank joins only when this one has looked."""
    with sherlorch.trace(level=level) as tracker:
        x = given(rank)
        if rank == BAD:
            store.wait([f"looked {level}"], PATIENCE)
            dist.all_reduce(x)
            return []
        work = dist.all_reduce(x, async_op=True)
        part = x[:1]
        before = [told(tracker, x), told(tracker, part), tracker.diagnose().ok]
        store.set(f"looked {level}", "yes")
        work.wait()
        after = [told(tracker, part * 2), told(tracker, x), told(tracker, part)]
    return [before, after, tracker.diagnose().ok]


def run_raising(rank: int, level: str) -> Any:
    try:
        with sherlorch.trace(level=level, on_nonfinite="raise"):
            x = torch.ones(2) if rank == GOOD else torch.tensor([1.0, float("nan")])
            dist.all_reduce(x)
            x.mul_(2)
    except sherlorch.NonFiniteError as error:
        return " ".join(str(error).split())
    return "nothing"


def run_overflow(rank: int, level: str) -> Any:
    with sherlorch.trace(level=level) as tracker:
        x = torch.full((2,), 3e38)
        dist.all_reduce(x)
        return told(tracker, x * 2)


def run_results(rank: int, level: str) -> Any:
    """Collectives that return their result; None where torch has none."""
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    with sherlorch.trace(level=level) as tracker:
        x = functional.all_reduce(given(rank), "sum", dist.group.WORLD)
        return told(tracker, x * 2)


def train(model: nn.Module, rank: int) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(1, 2)).sum()
    if rank == BAD:
        loss = loss / 0
    loss.backward()
    optimizer.step()
    return loss


def run_data_parallel(rank: int, level: str, views: bool) -> Any:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), gradient_as_bucket_view=views)
    with sherlorch.trace(level=level) as tracker:
        tracker.watch(model.module)
        loss = train(model, rank)
        weight = model.module.weight
        assert weight.grad is not None
        answers = [told(tracker, loss), told(tracker, weight)]
        if level == "aten":
            answers.append(told(tracker, weight.grad))
    return answers


def run_unsure(rank: int, level: str) -> Any:
    """No work ever says that it is done: only what computes with its result tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_is_done", lambda work: False)
        return run_data_parallel(rank, level, False)


def main(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=PATIENCE)
    answers: dict[str, Any] = {}
    for level in LEVELS:
        parts: dict[str, Callable[[], Any]] = {
            run.__name__: lambda run=run, level=level: run_collective(run, rank, level) for run in COLLECTIVES
        }
        parts["unread"] = lambda level=level: run_unread(rank, level)
        parts["in flight"] = lambda level=level: run_in_flight(rank, level, store)
        parts["raising"] = lambda level=level: run_raising(rank, level)
        parts["overflow"] = lambda level=level: run_overflow(rank, level)
        parts["results"] = lambda level=level: run_results(rank, level)
        parts["data parallel"] = lambda level=level: run_data_parallel(rank, level, False)
        parts["data parallel views"] = lambda level=level: run_data_parallel(rank, level, True)
        parts["data parallel unsure"] = lambda level=level: run_unsure(rank, level)
        for name, part in parts.items():
            try:
                answers[f"{name} {level}"] = part()
            except pytest.skip.Exception as reason:
                answers[f"{name} {level}"] = f"skipped: {reason}"
            except Exception:
                answers[f"{name} {level}"] = f"failed: {traceback.format_exc()}"
    (folder / f"rank{rank}.json").write_text(json.dumps(answers))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))


# What the two processes said.

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank said, from one run of both."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in (GOOD, BAD)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [folder / f"rank{rank}.json" for rank in (GOOD, BAD)]
    assert all(file.exists() for file in files), "\n".join(errors)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


# Older ones do not tell a function mode of their collectives.
TELLS = hasattr(torch.distributed.distributed_c10d, "handle_torch_function")


def answer(answers: list[dict[str, Any]], rank: int, name: str, level: str) -> Any:
    if level == "function" and not TELLS:
        pytest.skip("this torch does not show its collectives to level `function`")
    found = answers[rank][f"{name} {level}"]
    if isinstance(found, str) and found.startswith("skipped"):
        pytest.skip(found.partition(": ")[2])
    assert not (isinstance(found, str) and found.startswith("failed")), found
    return found


def check_came_in(said: dict[str, Any]) -> None:
    assert said["node"] == said["held"]
    assert said["origins"] == ["outside"], said["text"]
    assert "came in from another process with" in said["text"]
    assert "rank 0 of 2 processes, the others not seen" in said["text"]
    assert said["unseen"] == {}


@pytest.mark.parametrize("run", COLLECTIVES, ids=lambda run: run.__name__)
def test_what_another_process_sent_came_in_at_the_collective(
    run: Callable[..., Any], answers: list[dict[str, Any]], level: str
) -> None:
    first, used, *others = answer(answers, GOOD, run.__name__, level)
    for said in (first, used):
        assert any(said["held"])
        check_came_in(said)
        assert said["lines"] == [Path(__file__).name]
    for said in others:  # this process's own part is good
        assert said["node"] == said["held"] == [False, False]
        assert said["origins"] == []


@pytest.mark.parametrize(
    "run", [all_reduce, all_reduce_later, reduce, broadcast, all_gather, scatter, reduce_scatter]
)
def test_the_process_that_made_it_names_the_op(
    run: Callable[..., Any], answers: list[dict[str, Any]], level: str
) -> None:
    first, used, *_ = answer(answers, BAD, run.__name__, level)
    for said in (first, used):
        assert said["node"] == said["held"]
        assert len(said["ops"]) == 1
        assert "div" in said["ops"][0]
        assert said["origins"] == ["introduced"]
        assert said["unseen"] == {}


def test_what_nobody_read_is_judged_by_the_report(answers: list[dict[str, Any]], level: str) -> None:
    said, earliest = answer(answers, GOOD, "unread", level)
    check_came_in(said)
    assert not earliest["ok"]
    assert "came in from another process" in earliest["text"]


def test_what_is_on_its_way_is_not_judged_before_it_was_waited_for(
    answers: list[dict[str, Any]], level: str
) -> None:
    (whole, part, ok), after, ok_after = answer(answers, GOOD, "in flight", level)
    if level == "aten" and not hasattr(dist.Work, "unbox"):
        pytest.skip("an operator tells when its work is done: torch 2.4")
    for said in (whole, part):
        assert said["node"] == [False, False]
        assert said["origins"] == []
    assert "judged when it was waited for" in whole["text"]
    assert ok
    for said in after:
        assert any(said["held"])
        check_came_in(said)
    assert not ok_after


def test_a_trace_that_raises_does_so_where_it_came_in(answers: list[dict[str, Any]], level: str) -> None:
    assert "came in from another process with" in answer(answers, GOOD, "raising", level)


def test_a_sum_over_processes_that_overflows_says_so(answers: list[dict[str, Any]], level: str) -> None:
    said = answer(answers, GOOD, "overflow", level)
    check_came_in(said)
    assert "or the sum of finite values overflowed" in said["text"]


def test_collectives_that_return_their_result(answers: list[dict[str, Any]], level: str) -> None:
    check_came_in(answer(answers, GOOD, "results", level))


@pytest.mark.parametrize("name", ["data parallel", "data parallel views", "data parallel unsure"])
def test_a_gradient_from_another_process(answers: list[dict[str, Any]], level: str, name: str) -> None:
    loss, weight, *gradient = answer(answers, GOOD, name, level)
    assert loss["node"] == loss["held"] == [False, False]
    assert any(weight["held"])
    assert weight["node"] == weight["held"]
    assert "rank 0 of 2 processes, the others not seen" in weight["text"]
    if level == "aten":
        for said in (weight, *gradient):
            check_came_in(said)
            assert said["ops"] == ["c10d.allreduce_.default"]
            assert said["phases"] == ["backward"]
            assert said["lines"] == [Path(__file__).name]  # of loss.backward()
    else:
        assert weight["ops"] == ["backward"]
        assert "it may have come from another process" in weight["text"]
    loss, weight, *gradient = answer(answers, BAD, name, level)
    for said in (loss, weight, *gradient):
        assert said["node"] == said["held"]
        assert "div" in said["ops"][0]
        if NUMBERS_NODES or said["phases"][0] != "backward":  # in torch 2.0 a backward kernel has no line
            assert said["lines"][0] == Path(__file__).name
