"""How long a diagnosis takes over a graph of a million records."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

import sherlorch

SECONDS_MARK = 2.0


def chain(records: int) -> Tensor:
    """One NaN carried along a single line, as deep as it is long."""
    x = torch.full((), -1.0).log()
    for _ in range(records - 2):
        x = x.neg()
    return x


def ladder(records: int) -> Tensor:
    """One NaN through residual sums: the number of paths doubles with every second record."""
    x = torch.full((), -1.0).log()
    for _ in range((records - 2) // 2):
        x = x + x.neg()
    return x


def late(records: int) -> Tensor:
    """A fault at the very end of a long healthy run."""
    x = torch.full((), 1.0)
    for _ in range(records - 3):
        x = x.neg()
    return (x * 0).log() * 0


GRAPHS: dict[str, Callable[[int], Tensor]] = {"chain": chain, "ladder": ladder, "late": late}


class Row(NamedTuple):
    graph: str
    nodes: int
    path: int  # nodes on the longest path from a culprit
    record_seconds: float
    diagnose_seconds: float
    text_seconds: float

    @property
    def reached(self) -> bool:
        return self.diagnose_seconds < SECONDS_MARK


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - start


def measure(graph: str, level: str, records: int) -> Row:
    with torch.no_grad(), sherlorch.trace(level=level) as tracker:
        target, recording = timed(GRAPHS[graph], records)
    report, diagnosing = timed(tracker.diagnose, target)
    _, writing = timed(str, report)
    longest = max(len(path) for path in report.paths.values())
    return Row(graph, report.total_nodes_seen, longest, recording, diagnosing, writing)


def table(rows: Sequence[Row]) -> str:
    lines = [[*row, "reached" if row.reached else "NOT REACHED"] for row in rows]
    headers = ["graph", "nodes", "longest path", "record, s", "diagnose, s", "text, s", "verdict"]
    return tabulate(lines, headers, floatfmt=".2f")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"Time to diagnose: mark {SECONDS_MARK} s.")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--level", default="function")
    parser.add_argument("--out", type=Path, help="folder for diagnose.csv")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = [measure(graph, options.level, options.records) for graph in options.graphs]
    print(table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / "diagnose.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Row._fields, *rows])


if __name__ == "__main__":
    main()
