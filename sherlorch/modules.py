"""Which nn.Module is running, and what its parameters and buffers are called."""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import Any, Callable

import torch
from torch import nn


class ModuleWatch:
    """Forward hooks on the watched modules only; `current` is the qualified name of the innermost one that
    runs.

    `on_change` is called with the new name (None outside every watched module) each time it changes.
    """

    def __init__(self, on_change: Callable[[str | None], None]) -> None:
        self._on_change = on_change
        self.thread: int | None = None  # modules that run in another thread are none of this watch's business
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str, str]] = {}

    def watch(self, model: nn.Module, name: str) -> None:
        """Hook `model` and all its submodules, and remember the names of its parameters and buffers."""
        for path, module in model.named_modules():
            self._hook(module, f"{name}.{path}" if path else name)
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for path, tensor in named:
                self._names[id(tensor)] = (weakref.ref(tensor), kind, f"{name}.{path}")

    def unwatch(self) -> None:
        """Remove every hook; names stay, since reports are asked for after the block."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()
        self._on_change(None)

    def name_of(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """(``"parameter"`` or ``"buffer"``, qualified name) of a watched model's tensor."""
        found = self._names.get(id(tensor))
        return found[1:] if found is not None and found[0]() is tensor else None

    def gradient_name(self, tensor: torch.Tensor) -> str:
        """``model.head.weight.grad`` for the gradient of a watched parameter; empty for anything else."""
        for reference, _, name in self._names.values():
            owner = reference()
            if owner is not None and owner.is_leaf and owner.grad is tensor:
                return f"{name}.grad"
        return ""

    def _hook(self, module: nn.Module, name: str) -> None:
        stack, changed = self._stack, self._on_change

        def enter(module: nn.Module, args: Any) -> None:
            if self.thread is not None and self.thread != get_ident():
                return
            stack.append(name)
            changed(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self.thread is not None and self.thread != get_ident():
                return
            # An exception caught further out may have left names of modules that never returned.
            while stack and stack.pop() != name:
                pass
            changed(stack[-1] if stack else None)

        self._handles.append(module.register_forward_pre_hook(enter))
        # Called on exceptions too, so that a caught one leaves no module running.
        self._handles.append(module.register_forward_hook(leave, **_ALWAYS))


_ALWAYS: dict[str, bool] = (
    {"always_call": True} if "always_call" in (nn.Module.register_forward_hook.__kwdefaults__ or {}) else {}
)
