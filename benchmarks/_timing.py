"""Interleaved timing: each round runs every variant once, and variants are compared within a round.

A machine that slows down for a second slows all variants of that round, so the ratios stay honest.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Step = Callable[[], object]
BASELINE = "plain"
# "cpu" is what one thread itself uses: on an idle machine the same as "wall", and on a busy one far steadier.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def default_clock(device: str, threads: int) -> str:
    """The CPU's time tells the truth only where one thread does all the work."""
    return "cpu" if device == "cpu" and threads == 1 else "wall"


@dataclass(frozen=True)
class Spread:
    """The median of some values and their quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, statistics.median(values), high)


@dataclass(frozen=True)
class Timing:
    """Seconds per step of each variant; entry i of every list comes from round i."""

    seconds: Mapping[str, list[float]]

    def step(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def ratio(self, name: str, base: str = BASELINE) -> Spread:
        """The spread over rounds of `name`'s time divided by `base`'s time in the same round."""
        return Spread.of([a / b for a, b in zip(self.seconds[name], self.seconds[base])])


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def sample(step: Step, repeats: int, device: str, clock: str) -> float:
    """Seconds per call of `step`, over `repeats` calls timed as one."""
    read = CLOCKS[clock]
    gc.collect()
    synchronize(device)
    start = read()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (read() - start) / repeats


def repeats_for(step: Step, seconds: float, device: str, clock: str) -> int:
    """How often `step` must run for one sample to last `seconds`."""
    fastest = min(sample(step, 1, device, clock) for _ in range(5))
    return max(1, math.ceil(seconds / fastest))


def interleave(
    steps: Mapping[str, Step],
    rounds: int,
    sample_seconds: float = 0.005,
    device: str = "cpu",
    clock: str = "wall",
    baseline: str = BASELINE,
) -> Timing:
    """Time every step once per round, in an order shuffled anew for each round."""
    for step in steps.values():
        step()
    repeats = repeats_for(steps[baseline], sample_seconds, device, clock)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    gc.freeze()  # what is alive now would only make the collection before each sample slow
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                seconds[name].append(sample(steps[name], repeats, device, clock))
    finally:
        gc.unfreeze()
    return Timing(seconds)
