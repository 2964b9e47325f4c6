"""Somebody's script or module, loaded and run as `__main__`, as `python` itself would."""

from __future__ import annotations

import importlib.abc
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

from sherlorch import source
from sherlorch.errors import SherlorchError


@dataclass(frozen=True)
class Program:
    """Compiled code, and what it will find in `sys`."""

    code: CodeType
    path: str
    arguments: tuple[str, ...]
    search: str  # goes first on `sys.path`
    loader: Any
    spec: ModuleSpec | None = None  # as with `python -m`; worker processes start from it

    def run(self) -> None:
        """Execute the code; whatever it raises comes out."""
        main = ModuleType("__main__")
        main.__dict__.update(
            __file__=self.path,
            __loader__=self.loader,
            __spec__=self.spec,
            __package__=self.spec.parent if self.spec is not None else None,
            __builtins__=__builtins__,
        )
        sys.argv = [self.path if self.spec is not None else self.arguments[0], *self.arguments[1:]]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = self.search
        # It stays when the program is over: its threads, its exit handlers and what it pickles refer to it.
        sys.modules["__main__"] = main
        exec(self.code, main.__dict__)


def script(arguments: Sequence[str]) -> Program:
    """The script of a command line ``train.py --lr 1``; SherlorchError where there is no such file."""
    name = arguments[0]
    path = os.path.abspath(name)
    if os.path.isdir(path):
        raise SherlorchError(f"`{name}` is a directory: name the script in it, or use -m for a package")
    try:
        with io.open_code(path) as file:
            text = file.read()
    except OSError as error:
        raise SherlorchError(f"cannot read the script `{name}`: {error.strerror or error}") from error
    loader = SourceFileLoader("__main__", path)
    search = os.path.dirname(os.path.realpath(path))
    return Program(_compiled(text, path), path, tuple(arguments), search, loader)


def module(arguments: Sequence[str]) -> Program:
    """The module of a command line ``package.train --lr 1``; SherlorchError where there is none."""
    name = arguments[0]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
        if spec is None:
            raise SherlorchError(
                f"`{name}` is a package without a __main__ module: name the module in it that is to run"
            )
    if spec is None:
        raise SherlorchError(
            f"there is no module `{name}`: start from the directory that it is imported from"
        )
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, _HasCode) else None
    if code is None:
        raise SherlorchError(f"`{name}` has no Python code to run")
    return Program(code, spec.origin or name, tuple(arguments), os.getcwd(), spec.loader, spec)


_HasCode = importlib.abc.InspectLoader


def _find(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise
    except ValueError as error:  # an empty or relative name, or a module without a spec
        raise SherlorchError(f"`{name}` cannot be run as a module: {error}") from error


def _compiled(text: bytes, path: str) -> CodeType:
    code: CodeType = compile(text, path, "exec", dont_inherit=True)
    return code


def own_part(traceback: TracebackType | None, program: Program) -> TracebackType | None:
    """A traceback without the frames that started the program."""
    step = traceback
    while step is not None and step.tb_frame.f_code is not program.code:
        step = step.tb_next
    return step if step is not None else traceback


def user_steps(traceback: TracebackType | None) -> list[TracebackType]:
    """The steps of a traceback that are the user's code, outermost first."""
    steps = []
    while traceback is not None:
        if source.classify(traceback.tb_frame) == source.USER:
            steps.append(traceback)
        traceback = traceback.tb_next
    return steps


def down_to_user(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback cut behind its last step in the user's code, where a debugger should open."""
    steps = []
    last = 0
    while traceback is not None:
        steps.append(traceback)
        if source.classify(traceback.tb_frame) == source.USER:
            last = len(steps)
        traceback = traceback.tb_next
    cut: TracebackType | None = None
    for step in reversed(steps[:last]):
        cut = TracebackType(cut, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return cut
