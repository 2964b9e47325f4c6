"""What differs between the supported versions of torch."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode

_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

# Can a code object be marked so that Dynamo neither compiles it nor what it calls (torch >= 2.6)?
CAN_MARK = hasattr(_frames, "set_code_exec_strategy")


# Does torch tell the numbers of autograd nodes (torch >= 2.1)?
NUMBERS_NODES = hasattr(torch._C._autograd, "_get_sequence_nr")

# Number of the next autograd node. Torch 2.0 does not tell it: backward kernels have no line there.
get_sequence_nr: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 0)


# Are the frames of an fx node told from the innermost one on? So it was in torch 2.0.
STACKS_BEGIN_INSIDE = not NUMBERS_NODES


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# `tensor.nbytes`, which came with torch 2.1.
bytes_of: Callable[[torch.Tensor], int] = attrgetter("nbytes") if hasattr(torch.Tensor, "nbytes") else _nbytes


_Enabled: Any = torch._C._EnableTorchFunction


class _EnabledWhileHeld:
    """The same as a context for torch 2.0, where the object works for as long as it lives."""

    __slots__ = ("_held",)

    def __enter__(self) -> None:
        self._held = _Enabled()

    def __exit__(self, *exc: Any) -> None:
        del self._held


# Inside, function modes see calls again that were kept from them.
enable_torch_function: Any = _Enabled if hasattr(_Enabled, "__enter__") else _EnabledWhileHeld


def _sees_parts() -> bool:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensor, value = torch.zeros(1), torch.ones(())
    with Mode():
        tensor[0] = value
    return bool(seen)


# Does a function mode see `x[i]` and `x[i] = ...`? Torch 2.0 shows few of them.
SEES_PARTS = _sees_parts()


def never_compile(function: Any) -> None:
    """Keep Dynamo away from a handler and from all that it calls, at no cost per call."""
    function._torchdynamo_disable = True  # where Dynamo, loaded since, compiles what runs under the mode
    function._torchdynamo_disable_msg = "a tracer looks at values"
    if CAN_MARK:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))


class _ForcedEager:
    """What ``torch.compiler.set_stance("force_eager")`` does, in a tenth of its time.

    The stance is the process's: it ends with the last block, in whatever order those of several threads end.
    """

    __slots__ = ("_frames",)
    _lock: ClassVar[Any] = threading.Lock()
    _open: ClassVar[int] = 0
    _before: ClassVar[Any] = None

    def __init__(self, frames: Any) -> None:
        self._frames = frames

    def __enter__(self) -> None:
        with self._lock:
            if not _ForcedEager._open:
                _ForcedEager._before = self._frames._stance
                self._frames._stance = self._frames.DynamoStance("force_eager")
            _ForcedEager._open += 1

    def __exit__(self, *exc: Any) -> None:
        with self._lock:
            _ForcedEager._open -= 1
            if not _ForcedEager._open:
                self._frames._stance = _ForcedEager._before


NOTHING_TO_DO = nullcontext()


def eagerly() -> AbstractContextManager[Any]:
    """Inside, compiled functions run eagerly: Dynamo would trace into a function mode instead of calling it.

    Nothing before torch 2.6, or while Dynamo is not loaded (loading it takes seconds).
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return NOTHING_TO_DO
    if hasattr(frames, "_stance") and hasattr(frames, "DynamoStance"):
        return _ForcedEager(frames)
    compiler: Any = getattr(torch, "compiler", None)
    stance: Any = getattr(compiler, "set_stance", None)
    return NOTHING_TO_DO if stance is None else stance("force_eager")


class _Handles:
    """Calls before and after each step of every optimizer, until `remove`."""

    __slots__ = ("_handles",)

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._handles = (
            optimizer.register_optimizer_step_pre_hook(before),
            optimizer.register_optimizer_step_post_hook(after),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


_before_steps: Any = getattr(optimizer, "_global_optimizer_pre_hooks", None)
_after_steps: Any = getattr(optimizer, "_global_optimizer_post_hooks", None)


class _Entries:
    """The same without PyTorch's own handles, which cost five times as much."""

    __slots__ = ()

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        _before_steps[self] = before
        _after_steps[self] = after

    def remove(self) -> None:
        _before_steps.pop(self, None)
        _after_steps.pop(self, None)


StepHooks: Any = _Handles if _before_steps is None or _after_steps is None else _Entries


def _object_lives_with_storage() -> bool:
    # Not told by a weak reference: those of torch 2.0 are not cleared when the object goes, and dangle.
    tensor = torch.empty(1)
    held = tensor.untyped_storage()
    return tensor.untyped_storage() is held


class _CountedReference:
    """A weak reference to a storage for torch 2.0, where its Python object is made anew each time.

    The weak count keeps the address of a dead storage from being used again; the dead are swept now and then.
    """

    __slots__ = ("__weakref__", "_callback", "_storage")
    # Weakly: a tracker that goes takes its references with it.
    _made: ClassVar[list[weakref.ref[_CountedReference]]] = []
    _sweep_at: ClassVar[int] = 32

    def __init__(self, storage: Any, callback: Callable[[Any], None]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._callback = callback
        self._made.append(weakref.ref(self))
        if len(self._made) >= _CountedReference._sweep_at:
            self._sweep()

    def __call__(self) -> Any:
        return torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)

    @classmethod
    def _sweep(cls) -> None:
        made = cls._made.copy()
        del cls._made[: len(made)]  # what another thread adds meanwhile stays
        for known in made:
            reference: Any = known()
            if reference is None:
                continue
            if reference._storage.expired():
                reference._callback(reference)
            else:
                cls._made.append(known)
        _CountedReference._sweep_at = max(32, 2 * len(cls._made))


# A weak reference to a storage that calls back when the storage is gone.
StorageReference: Any = weakref.ref if _object_lives_with_storage() else _CountedReference
