"""The tracker of a program that nobody changed: it learns modules as they are called."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from sherlorch import source
from sherlorch.errors import NonFiniteError
from sherlorch.graph import Record
from sherlorch.modules import _ALWAYS, ModuleWatch
from sherlorch.reports import DiagnosisReport
from sherlorch.tracker import ProvenanceTracker
from sherlorch.weak import weakly

_is_compiling: Callable[[], bool] = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


class WatchEverywhere(ModuleWatch):
    """Hooks of the process instead of hooks of a model, which `torch.save(model)` would have to pickle.

    A module that is called from outside every known one is a root: it gives its submodules their names, and
    is itself called as the variable that holds it.
    """

    def __init__(self, on_change: Callable[[str | None], None]) -> None:
        super().__init__(on_change)
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Listen to every module of this thread until `unwatch`."""
        # Every hooked call of a compiled module would warn; the hooks have nothing to do there.
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        self._handles.append(hooks.register_module_forward_pre_hook(self._enter))
        self._handles.append(hooks.register_module_forward_hook(self._leave, **_ALWAYS))

    def _enter(self, module: nn.Module, args: Any) -> None:
        if _is_compiling() or threading.get_ident() != self._thread:
            return
        path = self._paths.get(module)
        if path is None:
            path = self._adopt(module, sys._getframe(1))
        self._stack.append(path)
        self._on_change(path)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_compiling() or threading.get_ident() != self._thread:
            return
        path = self._paths.get(module)
        while self._stack and self._stack.pop() != path:
            pass
        self._on_change(self._stack[-1] if self._stack else None)

    def _adopt(self, module: nn.Module, frame: FrameType) -> str:
        kind = type(module).__name__
        root = (
            f"{self._stack[-1]}.{kind}" if self._stack else _name_of(module, source.user_frame(frame)) or kind
        )
        for path, part in module.named_modules():
            inside = path.replace("_orig_mod.", "").replace("_orig_mod", "")  # of a compiled module
            self._paths[part] = f"{root}.{inside}" if inside else root
        return root


def _name_of(module: nn.Module, frame: FrameType | None) -> str:
    """``model`` for a variable or an attribute of `self` in the calling frame; empty where there is none."""
    if frame is None:
        return ""
    places = [frame.f_locals, getattr(frame.f_locals.get("self"), "__dict__", {}), frame.f_globals]
    for place in places:
        for name, value in list(place.items()):
            if value is module and not name.startswith("_"):
                return str(name)
    return ""


class ProgramTracker(ProvenanceTracker):
    """Bounded memory, every module, and the first fault kept even if the program catches the exception."""

    def __init__(self, level: str, on_nonfinite: str) -> None:
        super().__init__(level, on_nonfinite=on_nonfinite, keep="nonfinite")
        self.raised: DiagnosisReport | None = None
        self.steps = 0
        self._process = os.getpid()
        self._modules = self._everywhere = WatchEverywhere(weakly(self._enter_module))

    def __enter__(self) -> ProgramTracker:
        super().__enter__()
        self._everywhere.start()
        return self

    @property
    def seen(self) -> int:
        """How many nodes so far."""
        return self._recorder.seq

    def in_child(self) -> bool:
        """Is this a copy in a process that the program forked?"""
        return os.getpid() != self._process

    def so_far(self) -> DiagnosisReport:
        """The first fault that was raised, else the earliest that lasts."""
        if self.raised is not None:
            return self.raised
        report = self.diagnose()
        if report.ok:
            report.target = None  # of a healthy program few nodes are kept, and none of them is asked about
        return report

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        super()._after_step()

    def _fault(self, record: Record) -> None:
        try:
            super()._fault(record)
        except NonFiniteError as error:
            self.raised = self.raised or error.report
            raise
