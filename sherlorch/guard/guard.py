"""`Guard`: what a user puts around a training step."""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Callable, TypeVar

import torch
from torch import Tensor, nn

from sherlorch import source
from sherlorch.errors import NonFiniteError, NonFiniteWarning, SherlorchError
from sherlorch.guard.again import Replay, culprit_call, loss_of, replay_step, take_culprit
from sherlorch.guard.fault import Fault, differences, listed, name_bad
from sherlorch.guard.look import all_finite
from sherlorch.guard.run import Run, Stopped, listening
from sherlorch.guard.state import State, parameters_of
from sherlorch.reports.report import DiagnosisReport

FALLS = 10  # steps in a row in which a gradient scaler found an overflow and lowered its scale
_ON_FAULT = ("raise", "skip")
_F = TypeVar("_F", bound=Callable[..., Any])


class Guard:
    """Goes around a training step: costs next to nothing on a good one, explains a bad one.

    When loss or gradients are not finite the step ends before the optimizer writes. Buffers, gradients,
    optimizer state and random state are put back, the step runs again under ``trace(level="aten")``, and
    `NonFiniteError` carries the report.

    `model`: a module, or several as a list or by name. `optimizer`: one or a list; without it a fault is seen
    only when the step returns. `on_fault="skip"` warns instead, returns None, and raises after `skip_limit`
    bad steps in a row. `save_dir`: a file for ``sherlorch replay`` goes there on every fault. `every`: look
    at every n-th step.

    The step must do the same when it is called again: take its batch as an argument, not from an iterator.
    What it keeps elsewhere in Python (counters, schedulers, files) is not put back, and what it prints comes
    several times. Gradients that are there when a step begins are held until it ends: clear them after the
    optimizer's step rather than before the forward pass where that memory is dear.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module] | Mapping[str, nn.Module],
        optimizer: Any = None,
        *,
        on_fault: str = "raise",
        save_dir: str | os.PathLike[str] | None = None,
        every: int = 1,
        skip_limit: int = 10,
    ) -> None:
        if on_fault not in _ON_FAULT:
            raise ValueError(
                f"on_fault={on_fault!r} is unknown: use one of {', '.join(map(repr, _ON_FAULT))}"
            )
        self.on_fault = on_fault
        self.every = _positive("every", every)
        self.skip_limit = _positive("skip_limit", skip_limit)
        self.save_dir = Path(save_dir) if save_dir is not None else None
        self.steps = 0  # guarded steps so far, this one included
        self._models = _models_of(model)
        self._optimizers = _optimizers_of(optimizer)
        self._state = State(self._models, self._optimizers)
        self._run: Run | None = None
        self._writes_expected = len(self._optimizers)  # optimizer steps in one guarded step
        self._skipped = 0
        self._falls = 0  # steps in a row that the scaler left out
        self._scale: float | None = None
        self._fault: Fault | None = None  # what stopped the step
        for each in self._optimizers:
            _hook(each, self)

    # Around a step

    def __call__(self, step: _F) -> _F:
        """The guarded step. It returns what `step` returns; None where a bad step was skipped."""
        if not callable(step):
            raise TypeError(f"a Guard goes around a function that does one step, got {type(step).__name__}")

        @functools.wraps(step)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self._guard(step, args, kwargs)

        return guarded  # type: ignore[return-value]

    def _guard(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._run is not None:  # a step within a step
            return step(*args, **kwargs)
        self.steps += 1
        if (self.steps - 1) % self.every:
            return step(*args, **kwargs)
        state, run = self._state, Run()
        run.on_scaler = self._meet_scaler
        for optimizer in self._optimizers:
            _listens(optimizer)
        state.remember((args, kwargs))
        self._run = run
        cause: Exception | None = None
        try:
            with listening(run):
                result = step(*args, **kwargs)
            fault = self._look_on_return(run, loss_of(result))
        except Stopped:
            fault = self._fault
            if fault is None:  # another guard's
                raise
        except Exception as error:
            fault, cause = self._look_after_error(run, error), error
            if fault is None:
                raise
        finally:
            self._run = None
            self._fault = None
        if fault is None:
            self._writes_expected = max(self._writes_expected, run.looks)
            state.settle()
            self._skipped = 0
            return result
        result = None
        try:
            return self._explain(fault, functools.partial(step, *args, **kwargs), cause)
        finally:
            self._run = None
            state.let_go()

    # Looking

    def _before_write(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """The optimizer's pre-hook."""
        run = self._run
        if run is None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._look(run, optimizer)
            return None
        if not run.is_replay and not _evaluates_once(optimizer):
            self._state.keep_before_write(optimizer)

        def watched() -> Any:
            loss = closure()
            self._look(run, optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _look(self, run: Run, optimizer: Any) -> None:
        run.looks += 1
        if run.is_replay:
            if run.looks == run.stop_at:
                raise Stopped
            return
        if getattr(optimizer, "found_inf", None) is not None:
            run.scaler_decides = True  # a fused optimizer leaves the step out by itself
        else:
            parameters = parameters_of(optimizer)
            self._fault = self._find_fault(run, parameters, run.looks)
            if self._fault is not None:
                raise Stopped
        if run.looks == 1:
            self._state.notice_writes()
        if run.looks < self._writes_expected:
            self._state.keep_before_write(optimizer)

    def _find_fault(self, run: Run, parameters: list[Tensor], look: int, result: Any = None) -> Fault | None:
        losses, run.losses = run.losses, []
        if run.backwards:
            result = None  # the roots of backward say it
        if isinstance(result, Tensor):
            losses = [result.detach()]
        given = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if all_finite([*given, *losses]) and not (isinstance(result, float) and result - result != 0):
            return None
        values = [loss.item() for loss in losses] + ([result] if isinstance(result, float) else [])
        names = self._state.names()
        gradients = {names.get(id(p), "a parameter"): p.grad for p in parameters if p.grad is not None}
        what = name_bad(values, gradients, scaled=run.scaler is not None)
        if not what:  # a sum of healthy values overflowed
            return None
        old = self._state.is_old  # these are written when they are put back
        return Fault(
            what,
            look,
            values,
            {name: each.clone() if old(each) else each for name, each in gradients.items()},
        )

    def _look_on_return(self, run: Run, result: Any) -> Fault | None:
        if run.scaler is not None:
            return self._look_at_scale(run)
        if run.looks and not run.losses:
            return None
        return self._find_fault(run, self._state.parameters(), 0, result)

    def _look_at_scale(self, run: Run) -> Fault | None:
        """A skipped step is the scaler's business, until its scale falls and falls."""
        if run.looks and not run.scaler_decides:
            self._falls = 0
            return None
        scale = float(run.scaler.get_scale())
        fell = self._scale is not None and scale < self._scale
        if fell:
            self._falls += 1
            if self._falls >= FALLS:  # the scale will be put back: do not remember it
                return Fault(
                    [
                        f"the gradient scaler left out {self._falls} steps in a row, "
                        f"and its scale fell to {scale:g}"
                    ]
                )
        elif run.looks or run.scaler._get_growth_tracker() > 0:  # it counts the steps since the last fall
            self._falls = 0
        self._scale = scale
        return None

    def _meet_scaler(self, scaler: Any) -> None:
        if self._scale is None:
            self._scale = float(scaler.get_scale())
        self._state.keep_scaler(scaler)

    def _look_after_error(self, run: Run, error: Exception) -> Fault | None:
        """A step that raised may have done so because of a NaN that it met."""
        if run.scaler is not None:
            return None
        try:
            fault = self._find_fault(run, self._state.parameters() if run.backwards else [], 0)
        except Exception:  # the device may be gone; the step's own error is what matters
            return None
        if fault is not None:
            fault.what.append(f"the step raised {type(error).__name__}: {error}")
        return fault

    # A fault

    def _explain(self, fault: Fault, step: Callable[[], Any], cause: Exception | None) -> None:
        lost = self._state.put_back()
        what = f"step {self.steps}: {fault}"
        if _is_distributed():
            report = _untraced(what, "not replayed: the other processes would have to run the step again too")
        else:
            try:
                report = self._run_again(step, fault, lost)
            except (
                Exception
            ) as problem:  # what went wrong with the step matters more, and is told all the same
                report = _untraced(what, f"the replay failed: {type(problem).__name__}: {problem}")
        self._tell(report, self._message(report, fault, lost), cause)

    def _run_again(self, step: Callable[[], Any], fault: Fault, lost: list[str]) -> DiagnosisReport:
        try:
            replay = self._replay(step, fault)
            self._state.put_back()
            if replay.report.ok:
                self._say_not_reproduced(replay.report, fault, replay, lost)
            else:
                self._take_culprit(step, fault, replay)
        finally:
            self._state.put_back()
        return replay.report

    def _use(self, run: Run) -> None:
        self._run = run

    def _replay(self, step: Callable[[], Any], fault: Fault) -> Replay:
        run = Run(is_replay=True, stop_at=fault.look)
        replay = replay_step(step, run, self._use, self._models, self._gradients)
        names = self._state.names()
        gradients = {names[id(p)]: p.grad for p in self._state.parameters() if p.grad is not None}
        if replay.report.ok:
            replay.notes = differences(fault, replay.losses, gradients)
        return replay

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._state.parameters() if parameter.grad is not None]

    def _take_culprit(self, step: Callable[[], Any], fault: Fault, replay: Replay) -> None:
        node = culprit_call(replay.report)
        if node is None or replay.call is None:
            replay.report.repro_problem = "the culprit is not a call of its own"
            return
        repro, problem = take_culprit(
            step, Run(is_replay=True, stop_at=fault.look), self._use, node, replay.call
        )
        if repro is not None:
            repro.verdict = str(replay.report).partition("\n")[0]
        replay.report.repro, replay.report.repro_problem = repro, problem

    def _say_not_reproduced(
        self, report: DiagnosisReport, fault: Fault, replay: Replay, lost: list[str]
    ) -> None:
        notes = [
            f"NOT REPRODUCED: step {self.steps} went wrong ({fault}), "
            "and did not when it ran again from the same state",
            *replay.notes,
        ]
        if lost:
            notes.append(f"the state was not quite the same: {listed(lost)} could not be put back")
        if replay.problem is not None:
            notes.append(f"the second run raised {type(replay.problem).__name__}: {replay.problem}")
        report.notes = (*report.notes, *notes)

    def _message(self, report: DiagnosisReport, fault: Fault, lost: list[str]) -> str:
        when = "before the optimizer wrote" if fault.look else "on return"
        lines = [_text(report), "", f"  step {self.steps}: {fault}; seen {when}"]
        if lost:
            hint = (
                "" if self._optimizers else "; give the Guard the optimizer, and it stops before that writes"
            )
            lines.append(f"  put back: all but {listed(lost)}{hint}")
        else:
            lines.append(
                "  put back: weights, buffers, gradients, optimizer and random state are as before the step"
            )
        return "\n".join([*lines, *self._save(report)])

    def _save(self, report: DiagnosisReport) -> list[str]:
        if self.save_dir is None:
            return []
        if report.repro is None:
            return [f"  no repro saved: {report.repro_problem}"] if report.repro_problem else []
        path = self.save_dir / f"step-{self.steps}.pt"
        try:
            self.save_dir.mkdir(parents=True, exist_ok=True)
            report.save_repro(path)
        except (OSError, RuntimeError, SherlorchError) as error:  # a full disk must not hide the report
            return [f"  no repro saved: {error}"]
        return [f"  repro: sherlorch replay {path}"]

    def _tell(self, report: DiagnosisReport, message: str, cause: Exception | None = None) -> None:
        self._skipped += 1
        if self.on_fault == "raise":
            raise NonFiniteError(message, report) from cause
        if self._skipped >= self.skip_limit:
            skipped, self._skipped = self._skipped, 0
            raise NonFiniteError(
                f"{message}\n  {skipped} bad steps in a row: not skipped any more", report
            ) from cause
        warnings.warn(
            f"{message}\n  skipped ({self._skipped} in a row)", NonFiniteWarning, stacklevel=_stacklevel()
        )

    # Loops that are no functions

    def check(self, loss: Tensor | None = None) -> bool:
        """Between backward and the optimizer's step: are loss and gradients finite? Nothing is replayed.

        Raises `NonFiniteError`; under ``on_fault="skip"`` it warns and returns False: leave the optimizer's
        step out, and clear the gradients.
        """
        run = Run()
        run.losses = [loss.detach()] if loss is not None else []
        fault = self._find_fault(run, self._state.parameters(), 1)
        if fault is None:
            self._skipped = 0
            return True
        hint = (
            "not replayed: to see the operation, put the step in a function and the Guard around it, "
            "`guarded = Guard(model, optimizer)(step)`"
        )
        report = _untraced(str(fault), hint)
        self._tell(report, _text(report))
        return False


def _text(report: DiagnosisReport) -> str:
    """The report, or where it found nothing to blame what there is to say instead."""
    return str(report) if not report.ok else "\n  note  ".join(report.notes)


def _untraced(what: str, hint: str) -> DiagnosisReport:
    return DiagnosisReport(None, notes=(what, hint))


def _positive(option: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{option} takes a whole number of at least 1, got {value!r}")
    return value


def _models_of(model: Any) -> dict[str, nn.Module]:
    if isinstance(model, nn.Module):
        return {"model": model}
    named = (
        dict(model)
        if isinstance(model, Mapping)
        else {f"model{i}": each for i, each in enumerate(model)}
        if isinstance(model, Iterable)
        else {}
    )
    if not named or not all(isinstance(each, nn.Module) for each in named.values()):
        raise TypeError(
            f"a Guard takes an nn.Module, or several as a list or dict, got {type(model).__name__}"
        )
    return named


def _optimizers_of(optimizer: Any) -> list[Any]:
    given = (
        [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    )
    return [_inner(each) for each in given]


def _inner(optimizer: Any) -> Any:
    """The torch optimizer in a framework's wrapper."""
    seen = optimizer
    while not hasattr(seen, "_optimizer_step_pre_hooks"):
        inner = getattr(seen, "optimizer", None)
        if inner is None or inner is seen:
            raise TypeError(
                f"a Guard takes a torch.optim.Optimizer or a list of them, got {type(optimizer).__name__}"
            )
        seen = inner
    return seen


def _hook(optimizer: Any, guard: Guard) -> None:
    """Stand before the optimizer's step for as long as the guard lives."""
    method = weakref.WeakMethod(guard._before_write)

    def before_write(optimizer: Any, args: Any, kwargs: Any) -> Any:
        bound = method()
        return bound(optimizer, args, kwargs) if bound is not None else None

    handle = optimizer.register_step_pre_hook(before_write)
    weakref.finalize(guard, handle.remove)


def _listens(optimizer: Any) -> None:
    """See to it that the optimizer's hooks are called: Dynamo of torch 2.0 takes them off its class."""
    cls = type(optimizer)
    code = getattr(cls.step, "__code__", None)
    if code is not None and "pre_hook" not in code.co_varnames and hasattr(cls, "profile_hook_step"):
        cls.step = optimizer.profile_hook_step(cls.step)
        cls.step.hooked = True


def _evaluates_once(optimizer: Any) -> bool:
    """Does it call its closure once, before it writes? All of torch's do but LBFGS; others are not known."""
    return type(optimizer).__module__.startswith("torch.optim") and not isinstance(
        optimizer, torch.optim.LBFGS
    )


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _stacklevel() -> int:
    """`stacklevel` that points a warning at the line that called the guarded step."""
    depth, frame = 1, sys._getframe(1)
    user = source.user_frame(frame)
    while frame.f_back is not None and frame is not user:
        frame = frame.f_back
        depth += 1
    return depth
