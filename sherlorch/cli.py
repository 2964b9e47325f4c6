"""The command `sherlorch`: the only place that prints errors and picks exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sherlorch import __version__, demo, replay
from sherlorch.commands import ops, output, run, saved
from sherlorch.errors import SherlorchError

CLEAN = 0
CULPRIT_FOUND = 1
USAGE = 2  # what argparse exits with


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return its exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.error("name a command, for example `sherlorch demo`")
    try:
        code: int = arguments.run(arguments)
    except SherlorchError as error:
        print(f"sherlorch {arguments.command}: {error}", file=sys.stderr)
        return USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sherlorch",
        description="Find the operation that introduced a NaN or Inf into a PyTorch program, and say why.",
        epilog=f"exit codes: {CLEAN} clean, {CULPRIT_FOUND} a culprit was found, {USAGE} wrong usage; "
        "`sherlorch run` keeps the program's own where it finds none",
    )
    parser.add_argument("--version", action="version", version=f"sherlorch {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_run(commands)

    command = commands.add_parser("report", help="show a report that was saved as JSON")
    command.add_argument("file", help="what `report.to_json()` or `sherlorch run --json` wrote")
    command.add_argument("--html", metavar="FILE", help="write it as a page too")
    command.set_defaults(run=_report)

    command = commands.add_parser(
        "ops", help="show the law of an operation: why a result needs no scan, or does"
    )
    command.add_argument(
        "name", nargs="?", help="such as softmax or aten.view.default (default: the whole table)"
    )
    command.set_defaults(run=_ops)

    command = commands.add_parser(
        "demo", help="train a small transformer with a planted bug, and find the bug"
    )
    command.set_defaults(run=_demo)

    command = commands.add_parser(
        "replay", help="run one faulty operation from a file again, in its own dtype and in float64"
    )
    command.add_argument("file", help="what `report.save_repro` or a Guard's `save_dir` wrote")
    command.add_argument("--device", default="cpu", help="where to run it (default: cpu)")
    command.set_defaults(run=_replay)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "run",
        help="run a training script unchanged, up to its first NaN or Inf",
        usage="sherlorch run [options] script.py ...  or  sherlorch run [options] -m module ...",
        allow_abbrev=False,
    )
    command.add_argument("-m", dest="module", action="store_true", help="run a module, as `python -m` does")
    command.add_argument(
        "--level",
        choices=("aten", "function"),
        default="aten",
        help="aten: all that runs, backward and optimizer included (default); "
        "function: what the program calls, forward only, cheaper",
    )
    command.add_argument(
        "--on-nonfinite",
        choices=("raise", "report"),
        default="raise",
        help="raise: stop at the first fault (default); report: go on, and report what lasts",
    )
    command.add_argument("--html", metavar="FILE", help="write the report as a page")
    command.add_argument("--json", metavar="FILE", help="write the report as JSON")
    command.add_argument("--pdb", action="store_true", help="open the debugger at the faulty line")
    command.add_argument("script", help="the script or module")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    options = run.Options(
        arguments.level, arguments.on_nonfinite, arguments.html, arguments.json, arguments.pdb
    )
    return run.run([arguments.script, *arguments.arguments], options, as_module=arguments.module)


def _report(arguments: argparse.Namespace) -> int:
    data = saved.load(arguments.file)
    output.show(data["text"])
    if arguments.html is not None:
        page = saved.page(arguments.file, data)
        output.write(arguments.html, lambda path: path.write_text(page, encoding="utf-8"))
    return CLEAN if data["ok"] else CULPRIT_FOUND


def _ops(arguments: argparse.Namespace) -> int:
    output.show(ops.describe(arguments.name))
    return CLEAN


def _demo(arguments: argparse.Namespace) -> int:
    demo.run()
    return CLEAN


def _replay(arguments: argparse.Namespace) -> int:
    text, came_back = replay.describe(replay.load(arguments.file), arguments.device)
    print(text)
    return CULPRIT_FOUND if came_back else CLEAN
