"""`SherlorchCallback` for `lightning.Trainer`, or where only `pytorch_lightning` is installed for its."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import Tensor

from sherlorch.callbacks.faults import Faults
from sherlorch.callbacks.live import LiveTrace
from sherlorch.errors import NonFiniteError
from sherlorch.guard import Guard
from sherlorch.guard.guard import FALLS
from sherlorch.guard.look import all_finite
from sherlorch.guard.state import State
from sherlorch.health import examine
from sherlorch.reports.report import DiagnosisReport

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback, LightningModule, Trainer
    except ModuleNotFoundError:
        from pytorch_lightning import Callback, LightningModule, Trainer


class SherlorchCallback(Callback):
    """Stops a `Trainer` before a bad batch reaches the weights, and says which operation made it bad.

    ``Trainer(..., callbacks=[SherlorchCallback()])``. A good batch costs one look at loss and gradients after
    backward and a copy of the buffers; under gradient accumulation a copy of the gradients too. Only a bad
    batch runs again, a few times, plainly and traced, each time from the state that it began with; the
    weights are not written in between. In distributed training nothing runs again. Validation is not watched.
    What the step logged stays logged.

    `on_fault`: ``"raise"`` `NonFiniteError`, ``"stop"`` (`fit()` returns as usual), or ``"skip"`` the batch
    and go on, up to `skip_limit` bad ones in a row. The report goes to the log `sherlorch` and into `folder`
    (default: `sherlorch/` in the trainer's log directory). Overflows that a gradient scaler handles are left
    to it; a loss that is NaN is not, nor a scale that falls and falls. `trace_always=True` traces every
    batch: many times slower, for faults that do not come back.
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
        self._batch: _Batch | None = None
        self._state: State | None = None
        self._live: LiveTrace | None = None
        self._scale = 1.0
        self._falls = 0  # steps in a row that the scaler left out

    @property
    def reports(self) -> list[DiagnosisReport]:
        """What was found so far, a report for each bad batch."""
        return self._faults.reports

    # A training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn what a batch may write."""
        self._state = State({"model": pl_module}, list(trainer.optimizers))
        self._live = LiveTrace(pl_module) if self._trace_always else None
        scaler = _scaler_of(trainer)
        self._scale, self._falls = float(scaler.get_scale()) if scaler is not None else 1.0, 0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep nothing."""
        self._let_go()
        self._state = self._live = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the trace, if one is on."""
        self.on_train_end(trainer, pl_module)

    def _let_go(self) -> None:
        if self._live is not None:
            self._live.end()
        if self._state is not None and self._batch is not None:
            self._state.let_go()
        self._batch = None

    # A batch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the state that the batch begins with."""
        if self._state is None:
            return
        self._state.remember(batch)
        self._batch = _Batch(batch, batch_idx)
        if self._live is not None:
            self._live.begin()

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """The batch is the first of those whose gradients are added up."""
        if self._batch is not None:
            self._batch.clears_gradients = True

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss for the look after backward."""
        if self._batch is not None:
            self._batch.losses.append(loss.detach())

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the loss and the gradients."""
        batch, state = self._batch, self._state
        if batch is None or state is None or batch.is_replay:
            return
        scaler = _scaler_of(trainer)
        losses, batch.losses = batch.losses, []
        gradients = [each.grad for each in state.parameters() if each.grad is not None]
        if scaler is None:
            bad = not all_finite([*losses, *gradients]) and any(map(examine, [*losses, *gradients]))
        else:  # it leaves out what overflows, and lowers its scale
            bad = any(bool(loss.isnan().any()) for loss in losses)
        if bad:
            self._explain(trainer, pl_module, batch, state, losses)
        elif not batch.wrote:
            state.notice_writes()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """From here on the weights are not what they were when the batch began."""
        if self._batch is not None:
            self._batch.wrote = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch is over."""
        running, state = self._batch, self._state
        if running is not None and state is not None and not running.was_bad:
            if self._scale_keeps_falling(_scaler_of(trainer), running.wrote):
                running.why = f"the gradient scaler left out {FALLS} steps in a row"
                running.why += f", and its scale fell to {self._scale:g}"
                running.factor, running.wrote = self._scale, False  # the scaler left the step out
                self._explain(trainer, pl_module, running, state, [])
            else:
                state.settle()
                self._faults.good()
        self._let_go()

    def _scale_keeps_falling(self, scaler: Any, wrote: bool) -> bool:
        if scaler is None or not wrote:
            return False
        scale = float(scaler.get_scale())
        self._falls = self._falls + 1 if scale < self._scale else 0
        self._scale = scale
        return self._falls >= FALLS

    # A bad batch

    def _explain(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: _Batch,
        state: State,
        losses: list[Tensor],
    ) -> None:
        batch.was_bad = batch.is_replay = True
        bad_gradients = [(each, each.grad) for each in state.parameters()]
        gradients = [gradient for _, gradient in bad_gradients if gradient is not None]
        values = ", ".join(f"{loss.item():g}" for loss in losses if loss.numel() == 1)
        batch.why = batch.why or f"the loss is {values}, or a gradient is not finite"
        live = None
        if self._live is not None:
            self._live.end()
            live = self._live.report(losses, gradients)
        state.put_back()
        step = f"batch {batch.index} of epoch {trainer.current_epoch}"
        if live is not None and not live.ok:
            report, text = live, f"{live}\n\n  {step}: traced as it ran"
        elif batch.wrote:
            report, text = _untold(
                step, batch, "not run again: an optimizer had already written in this batch"
            )
        else:
            report, text = self._run_again(trainer, pl_module, batch, state, step)
        if self._faults.on_fault != "raise":
            _leave_out(trainer, pl_module, batch, bad_gradients)
            if self._faults.on_fault == "stop":
                trainer.should_stop = True
        batch.is_replay = False
        self._faults.meet(
            report,
            text,
            name=f"epoch-{trainer.current_epoch}-batch-{batch.index}",
            where=f"{step}, step {trainer.global_step}",
            folder=Path(trainer.log_dir or trainer.default_root_dir) / "sherlorch",
        )

    def _run_again(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: _Batch,
        state: State,
        step: str,
    ) -> tuple[DiagnosisReport, str]:
        again = _step_again(trainer, pl_module, batch)
        optimizers = None if pl_module.automatic_optimization else list(trainer.optimizers)
        guard = Guard(pl_module, optimizers)
        guard.steps = trainer.global_step  # the guard adds one
        try:
            with _silent(pl_module), torch.enable_grad():
                guard(again)(batch.given)
        except NonFiniteError as error:
            why = f"\n  {batch.why}" if batch.factor != 1.0 else ""
            return error.report, str(error) + why
        finally:
            state.put_back()
        return _untold(step, batch, "NOT REPRODUCED: it was finite when it ran again from the same state")


class _Batch:
    """What is known of the running batch."""

    def __init__(self, given: Any, index: int) -> None:
        self.given = given
        self.index = index
        self.losses: list[Tensor] = []
        self.why = ""  # it is bad
        self.factor = 1.0  # what the loss is scaled with when it runs again
        self.clears_gradients = False
        self.wrote = False  # an optimizer did, or is about to
        self.was_bad = False
        self.is_replay = False


def _scaler_of(trainer: Trainer) -> Any:
    return getattr(trainer.precision_plugin, "scaler", None)


def _step_again(trainer: Trainer, pl_module: LightningModule, batch: _Batch) -> Callable[[Any], Any]:
    """Forward and backward of the batch, without the trainer's bookkeeping."""
    names = inspect.signature(pl_module.training_step).parameters
    takes_index = "batch_idx" in names or len(names) > 1
    index = (batch.index,) if takes_index else ()

    def step(given: Any) -> Any:
        if batch.clears_gradients:
            for parameter in pl_module.parameters():
                parameter.grad = None
        output = trainer.strategy.training_step(given, *index)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not pl_module.automatic_optimization or not isinstance(loss, Tensor):
            return output
        loss = loss / trainer.accumulate_grad_batches
        if batch.factor != 1.0:
            loss = loss * batch.factor
        pl_module.backward(loss)
        return loss.detach()

    return step


def _leave_out(
    trainer: Trainer, pl_module: LightningModule, batch: _Batch, bad: list[tuple[Tensor, Any]]
) -> None:
    """Make the optimizer pass over the batch: it writes no parameter that has no gradient."""
    if _scaler_of(trainer) is not None:  # wants to see them, and leaves out the step by itself
        for parameter, gradient in bad:
            parameter.grad = gradient
    elif batch.clears_gradients or not pl_module.automatic_optimization:
        for parameter, _ in bad:
            parameter.grad = None


@contextmanager
def _silent(pl_module: LightningModule) -> Iterator[None]:
    """Inside, `self.log` and `self.log_dict` do nothing: the batch was logged once already."""
    names = [name for name in ("log", "log_dict") if name not in vars(pl_module)]
    for name in names:
        object.__setattr__(pl_module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(pl_module, name)


def _untold(step: str, batch: _Batch, why: str) -> tuple[DiagnosisReport, str]:
    """The report where nothing could be traced."""
    what = f"{step}: {batch.why}"
    return DiagnosisReport(None, notes=(what, why)), f"{what}\n  note  {why}"
