"""The user's line: which frame of the running program is neither torch's nor sherlorch's."""

from __future__ import annotations

import dis
import linecache
import sys
from functools import lru_cache
from types import CodeType, FrameType

INTERNAL = 0
USER = 1
ENGINE = 2  # torch's frame that enters the autograd engine: what it calls directly are backward kernels

_INTERNAL_PACKAGES = frozenset({"torch", "sherlorch", "functorch", "contextlib", "functools"})
_USER_MODULES = frozenset({"sherlorch.demo"})
_ENGINE_FUNCTIONS = frozenset({"_engine_run_backward", "backward", "grad"})

# id(code) -> INTERNAL, USER or ENGINE. Codes are kept alive so that an id can never name another code.
kinds: dict[int, int] = {}
not_users: set[int] = set()  # the ids of those that are INTERNAL or ENGINE
engines: set[int] = set()  # the ids of those that are ENGINE
_alive: list[CodeType] = []


def classify(frame: FrameType) -> int:
    """Kind of a frame's code, remembered in `kinds`."""
    code = frame.f_code
    module = frame.f_globals.get("__name__") or ""
    kind = USER
    if module.partition(".")[0] in _INTERNAL_PACKAGES and module not in _USER_MODULES:
        engine = module.startswith("torch.autograd") and code.co_name in _ENGINE_FUNCTIONS
        kind = ENGINE if engine and "torch.autograd.function" not in module else INTERNAL
    kinds[id(code)] = kind
    if kind != USER:
        not_users.add(id(code))
    if kind == ENGINE:
        engines.add(id(code))
    _alive.append(code)
    return kind


def user_frame(frame: FrameType | None, past_engine: bool = True) -> FrameType | None:
    """The nearest user frame at or above `frame`; None where there is none (before the engine, if so
    asked)."""
    while frame is not None:
        kind = kinds.get(id(frame.f_code))
        if kind is None:
            kind = classify(frame)
        if kind == USER:
            return frame
        if kind == ENGINE and not past_engine:
            return None
        frame = frame.f_back
    return None


def runs_checkpoint(frame: FrameType | None) -> bool:
    """Is a checkpointed forward pass being run again between `frame` and the autograd engine?"""
    while frame is not None:
        if kinds.get(id(frame.f_code)) == ENGINE:
            return False
        if "checkpoint" in (frame.f_globals.get("__name__") or ""):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=4096)
def line_of(code: CodeType, instruction: int) -> int:
    """Line number of a bytecode offset (``frame.f_lasti``)."""
    line = code.co_firstlineno
    for start, number in dis.findlinestarts(code):
        if start > instruction:
            break
        if number is not None:
            line = number
    return line


def location_of(code: CodeType, instruction: int) -> str:
    """``path/file.py:19`` of a bytecode offset; ``In[3]:19`` in the third cell of a notebook."""
    return f"{_cell_of(code.co_filename) or code.co_filename}:{line_of(code, instruction)}"


def _cells() -> dict[str, int]:
    """What IPython calls the sources of the cells that ran, with their numbers; empty outside of IPython."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    compiler = getattr(get_shell() if get_shell is not None else None, "compile", None)
    numbers: dict[str, int] = getattr(compiler, "_filename_map", {})
    return numbers


def _cell_of(path: str) -> str:
    number = _cells().get(path)
    return f"In[{number}]" if number is not None else ""


def _file_of(path: str) -> str:
    """Where `linecache` finds the source of a location's path."""
    return next((file for file in _cells() if _cell_of(file) == path), path)


def short(location: str | None) -> str:
    """``train.py:19`` of a location with its whole path."""
    return location.replace("\\", "/").rpartition("/")[2] if location else ""


def text_of(location: str) -> str:
    """The stripped source text of a ``path/file.py:19``; empty where the file cannot be read."""
    path, _, line = location.rpartition(":")
    return linecache.getline(_file_of(path), int(line)).strip() if line.isdigit() else ""


def lines_around(location: str, context: int) -> tuple[int, list[str]]:
    """The number of the first, and the lines up to `context` before and after a ``path/file.py:19``.

    None where the file cannot be read.
    """
    path, _, line = location.rpartition(":")
    lines = linecache.getlines(_file_of(path)) if line.isdigit() else []
    if not line.isdigit() or int(line) > len(lines):
        return 0, []
    first = max(1, int(line) - context)
    return first, [text.rstrip() for text in lines[first - 1 : int(line) + context]]
