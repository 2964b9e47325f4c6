"""A line on a terminal that says how far a traced program is; the program's own output pushes it aside."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Callable

_EVERY = 0.5  # seconds
_CLEAR = "\r\x1b[2K"


class Progress:
    """Draws `line()` on standard error while its block runs; does nothing where that is no terminal.

    The line is cleared before the program writes, and drawn only while the program's last line is complete.
    No lock: a process forked while it is held would wait for ever.
    """

    def __init__(self, line: Callable[[float], str]) -> None:
        self._line = line
        self._on = sys.stderr is not None and sys.stderr.isatty()
        self._drawn = False
        self._at_start = True  # the cursor stands at the start of a line
        self._done = threading.Event()
        self._process = os.getpid()
        self._patched: list[Any] = []

    def __enter__(self) -> Progress:
        if self._on:
            for stream in {id(stream): stream for stream in (sys.stdout, sys.stderr)}.values():
                if stream is not None and stream.isatty():
                    self._patch(stream)
            threading.Thread(target=self._draw, name="sherlorch progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._clear()
        for stream in self._patched:
            del stream.write
        self._patched.clear()

    def _patch(self, stream: Any) -> None:
        write = stream.write

        def clear_and_write(text: str) -> int:
            self._clear()
            if text:
                self._at_start = text.endswith("\n")
            count: int = write(text)
            return count

        stream.write = clear_and_write
        self._patched.append(stream)

    def _draw(self) -> None:
        started = time.monotonic()
        while not self._done.wait(_EVERY):
            if self._at_start:
                _put(f"{_CLEAR}{self._line(time.monotonic() - started)}")
                self._drawn = True

    def _clear(self) -> None:
        if self._drawn and os.getpid() == self._process:
            self._drawn = False
            _put(_CLEAR)


def _put(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone, and with it the reader
        os.write(2, text.encode())
