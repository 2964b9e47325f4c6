"""Long runs: memory stays flat or within its bytes per node, and a reused address never gives an old answer.

Each runs short here; `pytest -m soak tests/test_soak.py` runs them at full length.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sherlorch
from sherlorch import ProvenanceTracker

LEVELS = ("function", "aten")
MOST_BYTES_PER_NODE = 400
MOST_GROWTH = 8 << 20  # bytes that a flat run may grow by: the allocator's own coming and going

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc for its memory")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def asked_for(request: pytest.FixtureRequest) -> None:
    """Minutes of running: only for those who name the mark."""
    if request.config.getoption("-m") != "soak":
        pytest.skip("runs for minutes: `pytest -m soak tests/test_soak.py`")


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def train(tracker: ProvenanceTracker, steps: int) -> int:
    """Growth of the process from the first tenth of a run on; some steps are poisoned, and skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begun = 0
    for step in range(steps):
        if step == steps // 10:
            begun = resident()
        x = torch.randn(4, 8)
        if step % 50 == 7:
            x = x / 0
        loss = model(x).square().mean()
        if torch.isfinite(loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert tracker.node(loss).is_finite
    return resident() - begun


def check_training(level: str, steps: int) -> None:
    with sherlorch.trace(level=level, keep="nonfinite") as tracker:
        growth = train(tracker, steps)
    nodes = tracker.diagnose().total_nodes_seen
    print(f"\n{level}: {steps} steps, {nodes} nodes, grew {growth / 2**20:.1f} MiB")
    assert growth < MOST_GROWTH
    assert len(tracker.nodes) < 5000
    assert "div" in tracker.diagnose().culprits[0].op_name
    assert tracker.diagnose().coverage.unseen == {}


def check_bytes_per_node(level: str, calls: int) -> None:
    with sherlorch.trace(level=level) as tracker:
        x = torch.ones(4)
        for _ in range(1000):
            x = x * 1.0
        before, seen = resident(), tracker._recorder.seq
        for _ in range(calls):
            x = x * 1.0
        used = resident() - before
    nodes = tracker._recorder.seq - seen
    print(f"\n{level}: {nodes} nodes, {used / nodes:.0f} bytes each")
    assert nodes == calls
    assert used / nodes <= MOST_BYTES_PER_NODE


def check_reuse(level: str, times: int) -> None:
    """Storages are freed and their addresses reused, with another state each time."""
    wrong = reused = 0
    seen: set[int] = set()
    with sherlorch.trace(level=level, keep="nonfinite") as tracker:
        one, zero = torch.ones(4), torch.zeros(4)
        for turn in range(times):
            y = one / (zero if turn % 3 == 0 else one)
            part = y[1:]
            if turn % 7 == 0:
                part.mul_(0)
            number = y.untyped_storage()._cdata
            reused += number in seen
            seen.add(number)
            record = tracker._recorder.find(part if turn % 2 else y)
            assert record is not None
            expected = 0
            if turn % 3 == 0:
                expected = 2 if turn % 7 else (1 if turn % 2 else 3)
            wrong += record.state != expected
            del y, part, record
    print(f"\n{level}: {times} storages, {reused} on a reused address, {wrong} wrong answers")
    assert reused > times // 20
    assert wrong == 0


def test_memory_is_flat_over_steps(level: str) -> None:
    check_training(level, 600)


def test_a_node_takes_few_bytes(level: str) -> None:
    check_bytes_per_node(level, 50_000)


def test_a_reused_address_is_another_tensor(level: str) -> None:
    check_reuse(level, 5_000)


@pytest.mark.soak
@pytest.mark.usefixtures("asked_for")
def test_memory_is_flat_over_20000_steps(level: str) -> None:
    check_training(level, 20_000)


@pytest.mark.soak
@pytest.mark.usefixtures("asked_for")
def test_two_million_nodes_take_few_bytes(level: str) -> None:
    check_bytes_per_node(level, 2_000_000)


@pytest.mark.soak
@pytest.mark.usefixtures("asked_for")
def test_a_million_reused_addresses_are_other_tensors(level: str) -> None:
    check_reuse(level, 1_000_000)
