"""What checks inside compiled kernels cost: ratios to plain `torch.compile` for a self-attention block.

It prints a table for the forward pass (without gradients), one for a training step with AdamW, and two
verdicts.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _timing import BASELINE, CLOCKS, Step, default_clock, interleave
from overhead import Block
from tabulate import tabulate
from torch import Tensor

import sherlorch

MARKS = {512: 1.08, 128: 1.12}  # of a training step with checks
WORKS = ("forward", "training")
CHECKED = "with checks"


def checked(block: Block) -> Any:
    return sherlorch.compile(block)


def asserting(block: Block) -> Any:
    """As with `TORCHINDUCTOR_NAN_ASSERTS=1`."""
    return torch.compile(block, options={"nan_asserts": True})


VARIANTS: dict[str, Callable[[Block], Any]] = {
    BASELINE: torch.compile,
    CHECKED: checked,
    "nan_asserts": asserting,
    "eager": lambda block: block,
    "instrumented": lambda block: sherlorch.instrument(block),
    "eager, traced": lambda block: block,
}


def make_step(name: str, work: str, width: int, batch: int, tokens: int) -> Step:
    torch.manual_seed(0)
    block = Block(width, tokens)
    model, x = VARIANTS[name](block), torch.randn(batch, tokens, width)
    step = training_step(model, block, x) if work == "training" else forward_step(model, x)
    if name != "eager, traced":
        return step

    def traced() -> None:
        with sherlorch.trace(level="aten"):
            step()

    return traced


def forward_step(model: Any, x: Tensor) -> Step:
    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


def training_step(model: Any, block: Block, x: Tensor) -> Step:
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


class Row(NamedTuple):
    work: str
    d_model: int
    variant: str
    milliseconds: float
    ratio: float  # to plain, median over rounds
    ratio_low: float  # quartiles
    ratio_high: float
    rounds: int
    clock: str
    threads: int
    torch: str


def measure(work: str, width: int, options: argparse.Namespace) -> list[Row]:
    torch._dynamo.reset()
    names = [name for name in VARIANTS if name in options.variants or name == BASELINE]
    steps = {name: make_step(name, work, width, options.batch, options.tokens) for name in names}
    timing = interleave(steps, options.rounds, options.sample_ms / 1000, clock=options.clock)
    rows = []
    for name in names:
        ratio = timing.ratio(name)
        step = timing.step(name).median * 1000
        setting = (options.rounds, options.clock, options.threads, torch.__version__)
        rows.append(Row(work, width, name, step, ratio.median, ratio.low, ratio.high, *setting))
    return rows


def table(rows: Sequence[Row], work: str) -> str:
    cells: Mapping[tuple[str, int], Row] = {
        (row.variant, row.d_model): row for row in rows if row.work == work
    }
    sizes = list(dict.fromkeys(size for _, size in cells))
    lines = []
    for name in dict.fromkeys(name for name, _ in cells):
        line = [name]
        for size in sizes:
            row = cells[name, size]
            plain = name == BASELINE
            line.append(
                f"{row.milliseconds:.2f} ms"
                if plain
                else f"{row.ratio:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}]"
            )
        lines.append(line)
    align = ("left", *("right" for _ in sizes))
    return tabulate(lines, [f"{work}, d_model", *map(str, sizes)], colalign=align, disable_numparse=True)


def verdicts(rows: Sequence[Row]) -> list[str]:
    found = []
    for row in rows:
        mark = MARKS.get(row.d_model)
        if row.work == "training" and row.variant == CHECKED and mark is not None:
            word = "reached" if row.ratio <= mark else "NOT REACHED"
            found.append(f"{CHECKED}, training, d_model {row.d_model}: {row.ratio:.3f}, mark {mark}: {word}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 512], help="values of d_model")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--sample-ms", type=float, default=20, help="least time of one plain sample")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, help="cpu where one thread does all the work, else wall")
    parser.add_argument("--out", type=Path, help="folder for compiled.csv")
    options = parser.parse_args(argv)
    options.clock = options.clock or default_clock("cpu", options.threads)
    torch.set_num_threads(options.threads)
    rows = [row for work in options.works for width in options.sizes for row in measure(work, width, options)]
    setting = f"torch {torch.__version__}, {options.threads} thread(s), {options.clock} time"
    shape = f"batch {options.batch}, {options.tokens} tokens"
    print(f"{setting}, {options.rounds} rounds, {shape}; ratios with their quartiles\n")
    for work in options.works:
        print(table(rows, work), end="\n\n")
    print(*verdicts(rows), sep="\n")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / "compiled.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Row._fields, *rows])


if __name__ == "__main__":
    main()
