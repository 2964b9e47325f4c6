"""Runs the tests on the supported pairs of Python and torch, and writes what ran into CONTRIBUTING.md.

    python tests/versions.py                    every pair, one after the other
    python tests/versions.py 2.0.1 newest       the pairs with this torch
    python tests/versions.py 2.0.1 -- -n 1      what follows `--` goes to pytest
    python tests/versions.py 2.0.1 --in FOLDER  in this environment, already made for the pair

Otherwise each pair gets a fresh one, deleted at its end; an old torch is a download of about 2 GB. A pair
runs with the `python3.9` and so on of the PATH; where there is none it is told as not run and keeps its row.
"""

from __future__ import annotations

import collections
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- written by tests/versions.py -->", "<!-- end -->"
HEAD = "| asked for | Python | torch | passed | failed | skipped | on |\n|---|---|---|---|---|---|---|"
NEWEST = "newest"
TELL = "import platform, torch; print(platform.python_version(), torch.__version__)"


class Pair(NamedTuple):
    python: str
    torch: str
    with_it: tuple[str, ...] = ()  # what else an old torch needs to be old

    @property
    def key(self) -> str:
        """How its lines on the page begin, after their mark."""
        return f" {self.python}, {self.torch}"


PAIRS = (
    Pair("3.9", "2.0.1", ("numpy<2", "transformers<4.49")),  # newer ones turn such a torch away
    Pair("3.11", "2.4.1", ("transformers<5",)),
    Pair("3.11", "2.13.0"),
    Pair(NEWEST, NEWEST),
)


class Row(NamedTuple):
    text: str  # of the table
    skipped: str  # for which reasons
    good: bool


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    wanted, options = arguments[:end], arguments[end + 1 :]
    made = wanted.pop(wanted.index("--in") + 1) if "--in" in wanted else None
    wanted = [word for word in wanted if word != "--in"]
    unknown = [word for word in wanted if word not in {pair.torch for pair in PAIRS}]
    if unknown:
        sys.exit(f"no pair has torch {unknown[0]}: there are {', '.join(pair.torch for pair in PAIRS)}")
    failed = False
    for pair in PAIRS:
        if wanted and pair.torch not in wanted:
            continue
        row = run(pair, options, made)
        if row is None:
            print(f"not run: Python {pair.python} with torch {pair.torch}", flush=True)
        else:
            print(row.text, row.skipped, sep="\n", flush=True)
            write(row)
            failed |= not row.good
    return int(failed)


def run(pair: Pair, options: list[str], made: str | None = None) -> Row | None:
    """One pair in an environment of its own, or the one that is made; None where it cannot be made."""
    if made is not None:
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            return tested(python_of(Path(made)), pair, Path(folder), options)
    for python in pythons(pair.python):
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            environment = Path(folder, "environment")
            subprocess.run([python, "-m", "venv", str(environment)], check=True)
            own = python_of(environment)
            if install(own, pair):
                return tested(own, pair, Path(folder), options)
    return None


def pythons(version: str) -> list[str]:
    """The interpreters of that version on the PATH; for the newest, all from the newest down."""
    versions = [f"3.{minor}" for minor in range(30, 8, -1)] if version == NEWEST else [version]
    found = [path for path in (shutil.which(f"python{version}") for version in versions) if path]
    return [
        path for path in found if subprocess.run([path, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0
    ]


def python_of(environment: Path) -> str:
    return str(environment / ("Scripts" if os.name == "nt" else "bin") / "python")


def install(python: str, pair: Pair) -> bool:
    torch = "torch" if pair.torch == NEWEST else f"torch=={pair.torch}"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    # torch first: so pip takes the newest, where another package would be content with less.
    return all(
        subprocess.run([*pip, *what], cwd=ROOT).returncode == 0
        for what in ((torch, *pair.with_it), ("-e", ".[dev]", torch, *pair.with_it))
    )


def tested(python: str, pair: Pair, folder: Path, options: list[str]) -> Row:
    versions = subprocess.run([python, "-c", TELL], capture_output=True, text=True, check=True)
    record = folder / "tests.xml"
    print(f"Python and torch: {versions.stdout.strip()}", flush=True)
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    command = [python, "-m", "pytest", "-q", f"--junitxml={record}", *options]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path})
    passed, failed, skipped = counts(record)
    day = datetime.date.today().isoformat()
    cells = (pair.key.strip(), *versions.stdout.split(), passed, failed, skipped, day)
    return Row(f"| {' | '.join(cells)} |", f"-{pair.key}: skipped {skips(record)}", failed == "0")


def counts(record: Path) -> list[str]:
    """Passed, failed, skipped."""
    if not record.exists():
        return ["-", "pytest did not end", "-"]
    suite = ElementTree.parse(record).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return [str(total - failed - skipped), str(failed), str(skipped)]


def skips(record: Path) -> str:
    """Why tests were skipped, and how many for each reason."""
    if not record.exists():
        return "is unknown"
    found = ElementTree.parse(record).getroot().iter("skipped")
    reasons = collections.Counter(" ".join(str(skip.get("message")).split()) for skip in found)
    return ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common()) or "nothing"


def write(row: Row) -> None:
    """The row into the page, in the place of the one that this pair had."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    lines = [*old.splitlines(), row.text, row.skipped]
    latest = {line.partition(":" if line[0] == "-" else " | ")[0]: line for line in lines if line}
    table, told = (
        [latest[begin + pair.key] for pair in PAIRS if begin + pair.key in latest] for begin in "|-"
    )
    text = "\n".join([BEGIN, HEAD, *table, "", *told, END])
    PAGE.write_text(f"{before}{text}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
