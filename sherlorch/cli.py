"""The command `sherlorch`: the only place that prints errors and picks exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata

from sherlorch import demo, replay
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
    code: int = arguments.run(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sherlorch",
        description="Find the operation that introduced a NaN or Inf into a PyTorch program, and say why.",
        epilog=f"exit codes: {CLEAN} clean, {CULPRIT_FOUND} a culprit was found, {USAGE} wrong usage",
    )
    parser.add_argument("--version", action="version", version=f"sherlorch {metadata.version('sherlorch')}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

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


def _demo(arguments: argparse.Namespace) -> int:
    demo.run()
    return CLEAN


def _replay(arguments: argparse.Namespace) -> int:
    try:
        text, came_back = replay.describe(replay.load(arguments.file), arguments.device)
    except SherlorchError as error:
        print(f"sherlorch replay: {error}", file=sys.stderr)
        return USAGE
    print(text)
    return CULPRIT_FOUND if came_back else CLEAN
