"""`SherlorchCallback` for `transformers.Trainer`."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from sherlorch.callbacks.faults import Faults
from sherlorch.callbacks.live import LiveTrace
from sherlorch.errors import NonFiniteError, SherlorchError
from sherlorch.guard import Guard
from sherlorch.guard.look import all_finite
from sherlorch.reports.report import DiagnosisReport


class SherlorchCallback(TrainerCallback):
    """Stops a `Trainer` before a bad batch reaches the weights, and says which operation made it bad.

    ``Trainer(..., callbacks=[SherlorchCallback()])``. While it trains, a `sherlorch.Guard` goes around the
    trainer's `training_step`: a good batch costs one look at loss and gradients and a copy of the buffers,
    and under gradient accumulation a copy of the gradients. Only a bad batch runs again, traced, from the
    state that it began with; the weights are not written in between. In distributed training nothing runs
    again. Evaluation is not watched.

    `on_fault`: ``"raise"`` `NonFiniteError`, ``"stop"`` (`train()` returns as usual), or ``"skip"`` the batch
    and go on, up to `skip_limit` bad ones in a row; a batch left out still counts as a step of the scheduler.
    The report goes to the log `sherlorch` and into `folder` (default: `output_dir`/sherlorch).
    `trace_always=True` traces every batch: many times slower, for faults that do not come back.
    """

    def __init__(
        self,
        *,
        on_fault: str = "raise",
        folder: str | os.PathLike[str] | None = None,
        trace_always: bool = False,
        skip_limit: int = 10,
    ) -> None:
        self._faults = Faults(on_fault, folder, skip_limit)
        self._trace_always = trace_always
        self._trainer: Trainer | None = None

    @property
    def reports(self) -> list[DiagnosisReport]:
        """What was found so far, a report for each bad batch."""
        return self._faults.reports

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the guard around the trainer's `training_step`."""
        self._let_go()  # of a training that ended with an exception
        trainer = self._trainer = _calling_trainer()
        step = _GuardedStep(trainer, self._faults, self._trace_always)
        trainer.training_step = functools.wraps(trainer.training_step)(step)  # type: ignore[method-assign]

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the guard away."""
        self._let_go()

    def _let_go(self) -> None:
        if self._trainer is not None and isinstance(
            self._trainer.__dict__.get("training_step"), _GuardedStep
        ):
            del self._trainer.training_step
        self._trainer = None


class _GuardedStep:
    """Stands in for one trainer's `training_step`."""

    def __init__(self, trainer: Trainer, faults: Faults, trace_always: bool) -> None:
        self._trainer = trainer
        self._faults = faults
        self._step = trainer.training_step
        self._model: Any = trainer.accelerator.unwrap_model(trainer.model)
        self._guard = Guard(self._model)
        self._live = LiveTrace(self._model) if trace_always else None
        self._live_report: DiagnosisReport | None = None
        self._guarded = self._guard(self._traced if trace_always else self._step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self._trainer.state
        self._guard.steps = state.global_step  # the guard adds one
        self._live_report = None
        try:
            loss = self._guarded(*args, **kwargs)
        except NonFiniteError as error:
            self._tell(error)
            return torch.zeros((), device=self._trainer.args.device)
        self._faults.good()
        return loss

    def _tell(self, error: NonFiniteError) -> None:
        trainer, report, text = self._trainer, error.report, str(error)
        if self._live_report is not None:
            report = self._live_report
            text = f"{report}\n\n  traced as it ran"
        step = trainer.state.global_step + 1
        self._faults.meet(
            report,
            text,
            name=f"step-{step}",
            where=f"batch of step {step}, epoch {trainer.state.epoch or 0:.2f}",
            folder=Path(trainer.args.output_dir or ".") / "sherlorch",
        )
        if self._faults.on_fault == "stop":
            trainer.control.should_training_stop = True

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        if self._live is None or self._live_report is not None:  # the guard runs the step again
            return self._step(*args, **kwargs)
        self._live.begin()
        try:
            loss = self._step(*args, **kwargs)
        finally:
            self._live.end()
        gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
        losses = [loss] if isinstance(loss, Tensor) else []
        if not all_finite([*losses, *gradients]):
            report = self._live.report(losses, gradients)
            self._live_report = None if report.ok else report
        return loss


def _calling_trainer() -> Trainer:
    """The trainer that runs the callback: transformers does not hand it over."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise SherlorchError(
        "SherlorchCallback was not called by a transformers.Trainer: "
        "put a sherlorch.Guard around the step instead"
    )
