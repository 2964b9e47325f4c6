"""What tracing keeps: bytes per recorded node, and resident memory over a long training run.

Each measurement has a process of its own, so that memory freed by one cannot hide what another takes.
"""

from __future__ import annotations

import argparse
import csv
import gc
import multiprocessing
import resource
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor, nn

import sherlorch

LEVELS = ("function", "aten")
BYTES_MARK = 400  # per node kept
FLAT_MARK = BYTES_MARK / 4  # bytes a step: less than a node every fourth step
POISON_STEP = 100


class SmallModel(nn.Module):
    """Attention under a causal -inf mask, dropout and batch norm, as small as they come."""

    mask: Tensor

    def __init__(self, width: int = 16, tokens: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 1)
        self.norm, self.dropout = nn.BatchNorm1d(tokens), nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(tokens, tokens, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask, float("-inf"))
        return self.out(self.norm(x + self.dropout(scores.softmax(-1) @ v)))


class Training:
    """A model, its optimizer, and a step that draws a new batch each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = SmallModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(4, 8, 16)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def poison(self) -> None:
        with torch.no_grad():
            self.model.qkv.weight.fill_(float("nan"))


def resident_bytes() -> int:
    """Resident memory now, or where there is no /proc the most it has ever been."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * resource.getpagesize()


def traced_bytes() -> int:
    return tracemalloc.get_traced_memory()[0]


# Bytes per node


class NodeRow(NamedTuple):
    level: str
    measured_by: str
    nodes: int
    bytes_per_node: float
    mark: int
    reached: bool


def measure_nodes(level: str, measured_by: str, nodes: int) -> NodeRow:
    """Record at least `nodes` nodes with keep="all", all tensors small and gone by the end."""
    torch.set_num_threads(1)
    training = Training()
    with sherlorch.trace(level=level):  # what is loaded or cached on first use is no node's
        training.step()
    if measured_by == "tracemalloc":
        tracemalloc.start()
    read = {"rss": resident_bytes, "tracemalloc": traced_bytes}[measured_by]
    gc.collect()
    before = read()
    with sherlorch.trace(level=level, keep="all") as tracker:
        seen = record(tracker, training.step, nodes)
    gc.collect()
    per_node = (read() - before) / seen
    return NodeRow(level, measured_by, seen, per_node, BYTES_MARK, per_node <= BYTES_MARK)


def record(tracker: Any, step: Callable[[], Tensor], nodes: int) -> int:
    """Run steps until the tracker has seen `nodes` nodes; how many it has seen."""
    seen = 0
    while seen < nodes:
        for _ in range(10):
            loss = step()
        seen = tracker.diagnose(loss).total_nodes_seen
    return seen


# Resident memory over many steps


class Sample(NamedTuple):
    level: str
    run: str
    step: int
    resident_bytes: int
    python_blocks: int  # live small allocations: moves with the first leaked object


def measure_run(level: str, run: str, steps: int, every: int) -> list[Sample]:
    """Sample a training run traced with keep="nonfinite"; "poisoned" has NaN weights from step 100 on."""
    torch.set_num_threads(1)
    training = Training()
    samples = []
    with sherlorch.trace(level=level, keep="nonfinite"):
        for step in range(1, steps + 1):
            if run == "poisoned" and step == POISON_STEP:
                training.poison()
            training.step()
            if step % every == 0:
                gc.collect()
                samples.append(Sample(level, run, step, resident_bytes(), sys.getallocatedblocks()))
    return samples


class Trend(NamedTuple):
    level: str
    run: str
    steps: int
    start_mib: float
    end_mib: float
    bytes_per_step: float
    blocks_per_step: float

    @property
    def flat(self) -> bool:
        return self.bytes_per_step <= FLAT_MARK


def trend(samples: Sequence[Sample]) -> Trend:
    """Least-squares slopes, the first fifth left out as warm-up."""
    settled = samples[len(samples) // 5 :]
    first, last = settled[0], settled[-1]
    steps = [s.step for s in settled]
    return Trend(
        level=first.level,
        run=first.run,
        steps=last.step,
        start_mib=first.resident_bytes / 2**20,
        end_mib=last.resident_bytes / 2**20,
        bytes_per_step=slope(steps, [s.resident_bytes for s in settled]),
        blocks_per_step=slope(steps, [s.python_blocks for s in settled]),
    )


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / spread if spread else 0.0


# The command


def in_new_process(function: Callable[..., Any], *args: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def node_table(rows: Iterable[NodeRow]) -> str:
    lines = [
        [r.level, r.measured_by, r.nodes, f"{r.bytes_per_node:.0f}", r.mark, verdict(r.reached)] for r in rows
    ]
    return tabulate(lines, ["level", "measured by", "nodes", "bytes per node", "at most", "verdict"])


def trend_table(trends: Iterable[Trend]) -> str:
    lines = [[*t, "flat" if t.flat else "NOT FLAT"] for t in trends]
    headers = ["level", "run", "steps", "MiB, settled", "MiB, end", "bytes/step", "blocks/step", "verdict"]
    return tabulate(lines, headers, floatfmt=".1f")


def verdict(reached: bool) -> str:
    return "reached" if reached else "NOT REACHED"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Memory that traces keep.")
    parser.add_argument("--nodes", type=int, default=200_000, help="nodes to record for the bytes per node")
    parser.add_argument("--steps", type=int, default=10_000, help="training steps of the long runs")
    parser.add_argument("--every", type=int, default=500, help="steps between samples of the long runs")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--quick", action="store_true", help="few nodes and steps: only a smoke test")
    parser.add_argument("--out", type=Path, help="folder for nodes.csv and resident.csv")
    options = parser.parse_args(argv)
    if options.quick:
        options.nodes, options.steps, options.every = 1_000, 20, 2
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    nodes = [
        in_new_process(measure_nodes, level, by, options.nodes)
        for level in options.levels
        for by in ("rss", "tracemalloc")
    ]
    print(node_table(nodes), flush=True)
    runs = [
        in_new_process(measure_run, level, run, options.steps, options.every)
        for level in options.levels
        for run in ("clean", "poisoned")
    ]
    print("", trend_table(map(trend, runs)), sep="\n")
    if options.out:
        write_csv(options.out / "nodes.csv", NodeRow._fields, nodes)
        write_csv(options.out / "resident.csv", Sample._fields, [sample for run in runs for sample in run])


if __name__ == "__main__":
    main()
