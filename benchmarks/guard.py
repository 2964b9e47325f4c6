"""What a Guard costs on a clean training step, beside `detect_anomaly`: GPT-2 shaped models, dropout, AdamW.

Each variant trains in a process of its own, as two would share a memory allocator otherwise. They take turns:
every round runs each for a few steps, in an order drawn anew, and ratios are taken within a round. The step
"plain again" is the plain one in another process: its distance from 1 is what this machine's noise can do.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import random
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _timing import BASELINE, Step, Timing, synchronize
from tabulate import tabulate
from torch import Tensor, nn

import sherlorch

SIZES = {"2x128": (2, 128), "4x384": (4, 384), "6x512": (6, 512)}  # layers, width
MARKS = {"2x128": 1.05, "4x384": 1.02}  # guarded / plain, at most
AGAIN = "plain again"
VARIANTS = (BASELINE, AGAIN, "guarded", "detect_anomaly")
WARM_UP = 3  # steps, before anything is timed
VOCABULARY, HEADS, DROPOUT = 1024, 4, 0.1


class Block(nn.Module):
    """A pre-norm transformer block with fused causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(DROPOUT)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """GPT-2's shape: learned positions, blocks, a last norm, the head tied to the embedding."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.dropout, self.norm = nn.Dropout(DROPOUT), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.words(ids) + self.places.weight[: ids.shape[1]])
        return self.norm(self.blocks(x)) @ self.words.weight.T


def make_step(variant: str, size: str, batch: int, tokens: int, device: str) -> Step:
    """A training step as it is, guarded, or under `detect_anomaly`."""
    torch.manual_seed(0)
    model = Model(*SIZES[size], tokens).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(VOCABULARY, (batch, tokens + 1), device=device)

    def plain() -> Tensor:
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss

    def anomaly() -> Tensor:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            return plain()

    if variant == "guarded":
        return sherlorch.Guard(model, optimizer)(plain)
    return {BASELINE: plain, AGAIN: plain, "detect_anomaly": anomaly}[variant]


def work(connection: Connection, threads: int, steps: int, device: str, *which: Any) -> None:
    """A variant's process: run some steps each time it is asked, and send its seconds per step."""
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", "Anomaly Detection")
    step = make_step(*which, device)
    for _ in range(WARM_UP):
        step()
    connection.send(None)
    while connection.recv():
        synchronize(device)
        clock, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        synchronize(device)
        connection.send(((time.perf_counter() - clock) / steps, (time.process_time() - cpu) / steps))


def interleave(size: str, options: argparse.Namespace) -> tuple[Timing, Timing]:
    """Wall and CPU seconds of every variant, round by round."""
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    for variant in VARIANTS:
        ends[variant], theirs = context.Pipe()
        which = (variant, size, options.batch, options.tokens)
        args = (theirs, options.threads, options.steps, options.device, *which)
        context.Process(target=work, args=args, daemon=True).start()
        ends[variant].recv()
    wall: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    cpu: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    shuffle = random.Random(0).shuffle
    order = list(VARIANTS)
    for _ in range(options.rounds):
        shuffle(order)
        for variant in order:
            ends[variant].send(True)
            seconds, cpu_seconds = ends[variant].recv()
            wall[variant].append(seconds)
            cpu[variant].append(cpu_seconds)
    for end in ends.values():
        end.send(False)
    return Timing(wall), Timing(cpu)


class Row(NamedTuple):
    size: str
    variant: str
    milliseconds: float
    ratio_low: float  # the quartiles over rounds
    ratio: float
    ratio_high: float
    cpu_ratio: float
    mark: float | None

    @property
    def verdict(self) -> str:
        return "" if self.mark is None else "reached" if self.ratio <= self.mark else "NOT REACHED"


def measure(size: str, options: argparse.Namespace) -> list[Row]:
    wall, cpu = interleave(size, options)
    rows = []
    for name in VARIANTS:
        ratio, milliseconds = wall.ratio(name), wall.step(name).median * 1e3
        mark = MARKS.get(size) if name == "guarded" else None
        rows.append(
            Row(size, name, milliseconds, ratio.low, ratio.median, ratio.high, cpu.ratio(name).median, mark)
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    headers = [
        "layers x width",
        "step",
        "ms",
        "ratio to plain",
        "quartiles",
        "CPU time",
        "at most",
        "verdict",
    ]
    return tabulate(map(line, rows), headers, disable_numparse=True)


def line(row: Row) -> list[object]:
    quartiles = f"{row.ratio_low:.3f} to {row.ratio_high:.3f}"
    ratios = [f"{row.ratio:.3f}", quartiles, f"{row.cpu_ratio:.3f}"]
    return [row.size, row.variant, f"{row.milliseconds:.2f}", *ratios, row.mark, row.verdict]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Cost of a Guard on clean steps.")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3, help="steps of one variant in one round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="folder for guard.csv")
    options = parser.parse_args(argv)
    rows = [row for size in options.sizes for row in measure(size, options)]
    print(table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / "guard.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Row._fields, *rows])


if __name__ == "__main__":
    main()
