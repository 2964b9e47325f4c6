"""Which threads of the program run where no tracer watches."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

# Threads of these packages compute nothing of the program's.
_HELPERS = frozenset({
    "torch", "sherlorch", "tqdm", "multiprocessing", "execnet", "xdist", "ipykernel", "IPython", "zmq",
    "tornado", "jupyter_client", "traitlets", "pydevd", "_pydevd_bundle", "debugpy", "tensorboard",
    "wandb", "fsspec",
})  # fmt: skip
_NUMBERED = re.compile(r"Thread-(\d+)")

_watched: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_watched_numbers: set[int] = set()


class _Here(threading.local):
    watched = False  # is this thread among them?


_here = _Here()
_counter: Any = getattr(getattr(threading, "_counter", None), "__self__", None)
_alive: Any = getattr(threading, "_active", None)  # what `threading.enumerate` lists, without its lock


def _number_in(counter: str) -> int:
    """The number that the next nameless thread will be called by; 0 where Python does not tell."""
    found = re.fullmatch(r"count\((\d+)\)", counter)  # looked at, not counted on
    return int(found[1]) if found else 0


def _threads() -> list[threading.Thread]:
    try:
        return list(_alive.values())
    except (AttributeError, RuntimeError):  # another Python; a thread that begins or ends meanwhile
        return threading.enumerate()


def _number_of(thread: threading.Thread) -> int | None:
    found = _NUMBERED.match(thread.name)
    return int(found[1]) if found else None


def _is_helper(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    homes = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return isinstance(thread, threading._DummyThread) or any(
        home.partition(".")[0] in _HELPERS for home in homes
    )


def _unwatched() -> Iterator[threading.Thread]:
    """The threads that run now, other than this one, where no tracer has been."""
    own = threading.current_thread()
    for thread in threading.enumerate():
        if thread is not own and thread not in _watched and not _is_helper(thread):
            yield thread


class ThreadWatch:
    """Counts the threads that started while a block was open and that no tracer watched."""

    _earlier: Sequence[threading.Thread] = ()
    _counted = ""  # how the counter of nameless threads looked
    _open = False

    def __init__(self) -> None:
        self._found: set[object] = set()

    def begin(self) -> None:
        """The block of this thread begins."""
        if not _here.watched:
            _here.watched = True
            own = threading.current_thread()
            _watched.add(own)
            number = _number_of(own)
            if number is not None:
                _watched_numbers.add(number)
        self._earlier = _threads()
        self._counted = repr(_counter)
        self._open = True

    def end(self) -> None:
        """The block ends; threads that start later are none of its business."""
        self._look()
        self._open = False
        self._earlier = ()

    def _look(self) -> None:
        if repr(_counter) == self._counted and _threads() == self._earlier:
            return  # none began
        helpers = {_number_of(thread) for thread in threading.enumerate() if _is_helper(thread)}
        numbers = range(_number_in(self._counted), _number_in(repr(_counter)))  # of those that ended, too
        self._found |= set(numbers) - helpers
        for thread in _unwatched():
            if thread not in self._earlier:
                number = _number_of(thread)
                self._found.add(thread.name if number is None else number)

    def started(self) -> int:
        """How many so far."""
        if self._open:
            self._look()
        return len(self._found - _watched_numbers)

    def running(self) -> int:
        """How many threads run now that no tracer watches, whenever they started."""
        return sum(1 for _ in _unwatched())
