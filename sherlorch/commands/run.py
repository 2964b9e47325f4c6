"""`sherlorch run`: somebody's training script, unchanged, up to its first NaN or Inf."""

from __future__ import annotations

import os
import pdb
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from sherlorch.commands import program as programs
from sherlorch.commands.everywhere import ProgramTracker
from sherlorch.commands.output import save, show
from sherlorch.commands.program import Program
from sherlorch.commands.progress import Progress
from sherlorch.errors import NonFiniteError, SherlorchError
from sherlorch.reports import DiagnosisReport
from sherlorch.source import short

INTERRUPTED = 130  # what a shell reports for Ctrl-C
_MOST_CALLS = 6


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    level: str = "aten"
    on_nonfinite: str = "raise"
    html: str | None = None
    json: str | None = None
    debugger: bool = False

    def check(self) -> None:
        """SherlorchError for what cannot be done, before the program has run for hours."""
        if self.debugger and self.on_nonfinite != "raise":
            raise SherlorchError(
                "--pdb stops at the first fault, --on-nonfinite report never stops: leave one out"
            )
        if self.html and self.json and os.path.abspath(self.html) == os.path.abspath(self.json):
            raise SherlorchError(f"--html and --json both write `{self.html}`: give them two names")
        for option, path in (("--html", self.html), ("--json", self.json)):
            if path is not None:
                _check_writable(option, path)


def _check_writable(option: str, path: str) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise SherlorchError(f"{option} `{path}` is a directory: name a file")
    if not os.path.isdir(folder):
        raise SherlorchError(
            f"{option} `{path}`: there is no directory `{os.path.dirname(path)}`, make it first"
        )
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise SherlorchError(f"{option} `{path}` cannot be written: permission denied")


@dataclass
class _Ending:
    """How the program ended: its exit code, and where it was stopped."""

    code: int = 0
    fault: NonFiniteError | None = None
    traceback: TracebackType | None = None
    interrupted: bool = False


def run(arguments: Sequence[str], options: Options, *, as_module: bool = False) -> int:
    """Run a program traced, print its report, and return 1 for a culprit, else its own exit code."""
    options.check()
    try:
        program = programs.module(arguments) if as_module else programs.script(arguments)
    except SyntaxError as error:
        sys.excepthook(type(error), error.with_traceback(None), None)
        return 1
    tracker = ProgramTracker(options.level, "raise" if options.on_nonfinite == "raise" else "record")
    output = sys.stdout
    ending = _execute(program, tracker)
    if tracker.in_child():
        return ending.code
    report = ending.fault.report if ending.fault is not None else tracker.so_far()
    _flush()
    sys.stdout = output
    _tell(report, ending, tracker)
    if report is not None:
        save(report, json=options.json, html=options.html)
    if ending.fault is not None and options.debugger:
        pdb.post_mortem(programs.down_to_user(ending.traceback))
    if report is None or not report.ok:
        return 1
    return ending.code


def _execute(program: Program, tracker: ProgramTracker) -> _Ending:
    ending = _Ending()

    def line(seconds: float) -> str:
        steps = f", {tracker.steps} optimizer step{'s' * (tracker.steps != 1)}" if tracker.steps else ""
        return f"sherlorch: {tracker.seen:,} ops, {tracker.seen / max(seconds, 1e-9):,.0f}/s{steps}"

    try:
        with Progress(line), tracker:
            program.run()
    except SystemExit as error:
        ending.code = _exit_code(error)
    except KeyboardInterrupt:
        ending.code, ending.interrupted = INTERRUPTED, True
    except NonFiniteError as error:
        ending.code, ending.fault = 1, error
        ending.traceback = programs.own_part(error.__traceback__, program)
    except BaseException as error:
        ending.code = 1
        own = programs.own_part(error.__traceback__, program)
        sys.excepthook(type(error), error.with_traceback(own), own)
    return ending


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _tell(report: DiagnosisReport | None, ending: _Ending, tracker: ProgramTracker) -> None:
    lines = [""]
    if ending.interrupted:
        lines += ["Interrupted. What was seen so far:", ""]
    lines.append(str(ending.fault) if report is None else str(report))
    if report is None:
        lines += _item(
            "note", "another process of the program found this fault: no page and no JSON of it here"
        )
    if ending.fault is not None:
        lines += _calls(ending.traceback)
        lines += _item(
            "stop", "at the first fault; `--on-nonfinite report` lets the program go on, and tells at the end"
        )
    elif tracker.raised is not None:
        lines += _item("note", "the program caught the NonFiniteError of this fault and went on")
    show("\n".join(lines))


def _calls(traceback: TracebackType | None) -> list[str]:
    """How the program came to the fault: its own frames, outermost first."""
    steps = [
        f"{short(step.tb_frame.f_code.co_filename)}:{step.tb_lineno}"
        for step in programs.user_steps(traceback)
    ]
    if len(steps) > _MOST_CALLS:
        half = _MOST_CALLS // 2
        steps = [*steps[:half], f"({len(steps) - 2 * half} more)", *steps[-half:]]
    return _item("calls", " -> ".join(steps))


def _item(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=f"  {label:<6}", subsequent_indent=" " * 8) if text else []
