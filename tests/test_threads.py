"""Each trace sees its own thread, and its report names the threads that no tracer watched."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from needs import needs_eager_compiled
from torch import Tensor

import sherlorch
from sherlorch import cli

LEVELS = pytest.mark.parametrize("level", ["function", "aten"])
UNSEEN = "started meanwhile without a tracer, not seen"
MAYBE = "another thread may have made it"


def words(report: sherlorch.DiagnosisReport) -> str:
    return " ".join(str(report).split())


def bad() -> Tensor:
    return torch.log(-torch.ones(3))


def in_thread(work: Callable[[], object], name: str | None = None) -> list[object]:
    made: list[object] = []
    thread = threading.Thread(target=lambda: made.append(work()), name=name)
    thread.start()
    thread.join()
    return made


@LEVELS
@pytest.mark.parametrize("work", [bad, lambda: torch.ones(3)])
def test_a_thread_without_a_tracer_is_named(level: str, work: Callable[[], Tensor]) -> None:
    with sherlorch.trace(level=level) as tracker:
        (made,) = in_thread(work)
        assert isinstance(made, Tensor)
        y = made * 2
        inside = words(tracker.diagnose(y))
    report = tracker.diagnose(y)
    for text in (inside, words(report), words(tracker.diagnose())):
        assert f"1 other thread {UNSEEN}" in text
    assert (f"{MAYBE}: 1 other thread ran without a tracer" in words(report)) == (not report.ok)
    assert any(UNSEEN in note for note in report.to_dict()["coverage"]["notes"])


@LEVELS
def test_threads_of_a_pool_are_named(level: str) -> None:
    with sherlorch.trace(level=level) as tracker, ThreadPoolExecutor(1, "loader") as pool:
        y = pool.submit(bad).result() * 2
        text = words(tracker.diagnose(y))
    assert f"1 other thread {UNSEEN}" in text
    assert MAYBE in text


@LEVELS
def test_a_thread_that_ran_before_the_block_may_have_made_what_came_in(level: str) -> None:
    asked: queue.Queue[bool] = queue.Queue()
    made: queue.Queue[Tensor] = queue.Queue()

    def work() -> None:
        while asked.get():
            made.put(bad())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with sherlorch.trace(level=level) as tracker:
            asked.put(True)
            y = made.get() * 2
            report, own = tracker.diagnose(y), tracker.diagnose(bad())
    finally:
        asked.put(False)
        thread.join()
    assert MAYBE in words(report)
    assert MAYBE not in words(own)
    assert UNSEEN not in words(report)


@LEVELS
def test_without_threads_none_is_named(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        y = bad() + 1
        z = torch.ones(3) * torch.tensor([1.0, float("nan"), 1.0])
        in_block = words(tracker.diagnose(y))
    in_thread(bad)  # after the block: none of its business
    for text in (in_block, words(tracker.diagnose(y)), words(tracker.diagnose(z)), words(tracker.diagnose())):
        assert "other thread" not in text


@LEVELS
def test_threads_that_are_traced_themselves_are_not_named(level: str) -> None:
    wrong: list[str] = []

    def work() -> None:
        with sherlorch.trace(level=level) as own:
            x = bad()
        text = words(own.diagnose(x))
        if "log" not in text or "other thread" in text:
            wrong.append(text)

    with sherlorch.trace(level=level) as tracker:
        for name in (None, "named"):
            in_thread(work, name)
        y = bad()
    assert wrong == []
    assert "other thread" not in words(tracker.diagnose(y))


@LEVELS
def test_workers_that_load_data_are_no_alarm(level: str) -> None:
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    with sherlorch.trace(level=level) as tracker:
        for workers in (0, 1):
            for (batch,) in torch.utils.data.DataLoader(data, num_workers=workers):
                loss = (batch / 0).sum()
    text = words(tracker.diagnose(loss))
    assert "div" in text
    assert "other thread" not in text


@LEVELS
def test_names_of_threads_are_as_untraced(level: str) -> None:
    def number() -> int:
        thread = threading.Thread()
        return int(thread.name.partition("-")[2].partition(" ")[0])

    before = number()
    with sherlorch.trace(level=level) as tracker:
        str(tracker.diagnose(bad()))
    assert number() == before + 1


@pytest.mark.parametrize("threads", [0, 1])
def test_a_program_run_by_the_command_is_told_of_its_threads(
    threads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"""
import threading, torch
made = [torch.ones(3)]
def work():
    made.append(torch.log(-torch.ones(3)))
for _ in range({threads}):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
(made[-1] * 2).sum()
""")
    assert cli.main(["run", str(script)]) == threads
    told = " ".join(capsys.readouterr().out.split())
    assert (f"1 other thread {UNSEEN}" in told) == bool(threads)
    assert (MAYBE in told) == bool(threads)


@needs_eager_compiled
def test_compiled_functions_run_eagerly_until_the_last_trace_of_any_thread_ends() -> None:
    compilations: list[object] = []

    def backend(graph: object, inputs: object) -> object:
        compilations.append(graph)
        return graph

    compiled = torch.compile(lambda x: torch.log(x), backend=backend)  # loads Dynamo
    first_began, second_began, first_ends = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with sherlorch.trace():
            first_began.set()
            second_began.wait()
        first_ends.set()

    other = threading.Thread(target=work)
    other.start()
    first_began.wait()
    with sherlorch.trace() as tracker:
        second_began.set()
        first_ends.wait()  # the one that began first ends first
        y = compiled(-torch.ones(3))
        assert [culprit.op_name for culprit in tracker.diagnose(y).culprits] == ["log"]
    other.join()
    assert compilations == []
    compiled(torch.ones(3))
    assert len(compilations) == 1  # as untraced
    torch._dynamo.reset()
