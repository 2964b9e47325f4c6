"""The user's line: in whatever kind of code a call stands, the report points at it and not at torch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import linecache
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sherlorch
from sherlorch import source

LEVELS = pytest.mark.parametrize("level", ["function", "aten"])


def line_with(mark: str) -> str:
    """``path/test_source.py:19`` of the line that ends with ``# <mark>``."""
    with open(__file__, encoding="utf-8") as file:
        (number,) = [number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# <{mark}>")]
    return f"{__file__}:{number}"


def culprit_line(level: str, program: Callable[[], Tensor]) -> str | None:
    with sherlorch.trace(level=level) as tracker:
        result = program()
    return tracker.diagnose(result).culprits[0].location


def fault() -> Tensor:
    return torch.log(torch.zeros(2) - 1)  # <plain>


@LEVELS
def test_a_plain_function(level: str) -> None:
    assert culprit_line(level, fault) == line_with("plain")


def timed(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    @functools.wraps(function)
    def wrapper() -> Tensor:
        return function()

    return wrapper


@contextlib.contextmanager
def settings_changed() -> Iterator[None]:
    yield


@LEVELS
def test_decorators_are_looked_through(level: str) -> None:
    @timed
    @torch.no_grad()
    @settings_changed()
    @functools.lru_cache
    def decorated() -> Tensor:
        return torch.log(torch.zeros(2) - 1)  # <decorated>

    assert culprit_line(level, decorated) == line_with("decorated")


@LEVELS
def test_a_lambda(level: str) -> None:
    assert culprit_line(level, lambda: torch.log(torch.zeros(2) - 1)) == line_with("lambda")  # <lambda>


@LEVELS
def test_the_line_within_a_long_expression(level: str) -> None:
    x = torch.ones(2)

    def long() -> Tensor:
        return (
            x.abs()
            + torch.log(
                -x,
            )  # the call begins two lines above
            + x.abs()
        )

    location = culprit_line(level, long)
    with open(__file__, encoding="utf-8") as file:
        assert "torch.log(" in file.readlines()[int(location.rpartition(":")[2]) - 1]


@LEVELS
def test_comprehensions_generators_and_coroutines(level: str) -> None:
    values = [1.0, -1.0]

    def in_list() -> Tensor:
        return torch.stack([torch.log(torch.tensor([value])) for value in values])  # <comprehension>

    def generate() -> Iterator[Tensor]:
        for value in values:
            yield torch.log(torch.tensor([value]))  # <generator>

    async def wait() -> Tensor:
        await asyncio.sleep(0)
        return torch.log(-torch.ones(2))  # <coroutine>

    assert culprit_line(level, in_list) == line_with("comprehension")
    assert culprit_line(level, lambda: torch.stack([*generate()])) == line_with("generator")
    assert culprit_line(level, lambda: asyncio.run(wait())) == line_with("coroutine")


@LEVELS
def test_operators_and_methods_of_modules(level: str) -> None:
    class Inverse(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1 / x  # <operator>

    model = torch.nn.Sequential(torch.nn.ReLU(), Inverse())
    assert culprit_line(level, lambda: model(-torch.ones(2))) == line_with("operator")


@LEVELS
def test_code_of_exec_has_the_place_it_was_given(level: str) -> None:
    scope: dict[str, object] = {"torch": torch}
    exec("def f():\n    x = torch.zeros(2)\n    return 1 / x\n", scope)
    assert culprit_line(level, scope["f"]) == "<string>:3"
    bare: dict[str, object] = {"torch": torch, "__name__": None}
    exec(compile("def f():\n    return 1 / torch.zeros(2)\n", "/tmp/ipykernel_7/123.py", "exec"), bare)
    assert culprit_line(level, bare["f"]) == "/tmp/ipykernel_7/123.py:2"


def test_a_notebook_cell_shows_its_text() -> None:
    name = "<ipython-input-1-0123456789ab>"
    text = "y = 1 / torch.zeros(2)\n"
    linecache.cache[name] = (len(text), None, [text], name)
    scope: dict[str, object] = {"torch": torch, "__name__": "__main__"}
    with sherlorch.trace() as tracker:
        exec(compile(text, name, "exec"), scope)
    report = tracker.diagnose(scope["y"])
    assert report.culprits[0].location == f"{name}:1"
    assert "1 |     y = 1 / torch.zeros(2)" in str(report)


@LEVELS
def test_packages_that_only_sound_like_torch_are_the_users(level: str) -> None:
    scope: dict[str, object] = {"torch": torch, "__name__": "torch_geometric_of_mine.layers"}
    exec(compile("def f():\n    return 1 / torch.zeros(2)\n", "layers.py", "exec"), scope)
    assert culprit_line(level, scope["f"]) == "layers.py:2"


def test_without_lines_there_are_none() -> None:
    with sherlorch.trace(capture_stack=False) as tracker:
        result = fault()
    assert tracker.diagnose(result).culprits[0].location is None
    assert "unknown line" in str(tracker.diagnose(result))


def test_the_user_frame_is_above_torch_and_sherlorch() -> None:
    frames = []

    class Look(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            frames.append(source.user_frame(sys._getframe().f_back))
            return x

    Look()(torch.ones(1))
    assert frames[0].f_code.co_name == "test_the_user_frame_is_above_torch_and_sherlorch"
    assert source.user_frame(None) is None


def test_frames_below_the_engine_are_told_from_those_above() -> None:
    seen = {}

    def hook(gradient: Tensor) -> None:
        frame = sys._getframe()
        seen["hook"] = source.user_frame(frame, past_engine=False)
        seen["below"] = source.user_frame(frame.f_back, past_engine=False)
        seen["above"] = source.user_frame(frame.f_back)

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    assert seen["hook"].f_code.co_name == "hook"
    assert seen["below"] is None
    assert seen["above"].f_code.co_name == "test_frames_below_the_engine_are_told_from_those_above"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_that_runs_again_is_known(reentrant: bool) -> None:
    seen = []

    def block(x: Tensor) -> Tensor:
        seen.append(source.runs_checkpoint(sys._getframe()))
        return x * 2

    x = torch.ones(2, requires_grad=True)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert seen[-1] is True
    assert source.runs_checkpoint(sys._getframe()) is False


def test_lines_of_bytecode() -> None:
    code = fault.__code__
    first = code.co_firstlineno
    assert source.line_of(code, 0) in (first, first + 1)
    assert source.line_of(code, len(code.co_code) - 1) == first + 1
    assert source.location_of(code, len(code.co_code) - 1) == line_with("plain")


def test_text_of_a_line_that_is_not_there() -> None:
    assert source.text_of("nowhere.py:3") == ""
    assert source.text_of("<string>:1") == ""
    assert source.text_of("no line") == ""
    assert source.text_of(line_with("plain")).startswith("return torch.log")
