"""What differs between the supported versions of torch."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any

import torch

_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)

# Can a code object be marked so that Dynamo neither compiles it nor what it calls (torch >= 2.6)?
CAN_MARK = hasattr(_frames, "set_code_exec_strategy")


def never_compile(code: CodeType) -> None:
    """Keep Dynamo away from a function and from all that it calls, at no cost per call; nothing where it
    cannot be marked."""
    if CAN_MARK:
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))


def eagerly() -> AbstractContextManager[Any]:
    """Inside, compiled functions run eagerly: Dynamo would trace into a function mode instead of calling it.

    Nothing before torch 2.6, or while Dynamo is not loaded (loading it takes seconds).
    """
    compiler: Any = getattr(torch, "compiler", None)
    stance: Any = getattr(compiler, "set_stance", None) if "torch._dynamo" in sys.modules else None
    return nullcontext() if stance is None else stance("force_eager")
