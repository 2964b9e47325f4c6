"""Each benchmark runs, and writes the columns that it promises."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_overhead_gives_a_positive_ratio_for_every_variant(tmp_path: Path) -> None:
    options = ("--quick", "--no-old", "--sizes", "16", "--batch", "2", "--tokens", "4", "--rounds", "2")
    text = run("overhead.py", *options, "--out", str(tmp_path))
    rows = read(tmp_path / "overhead.csv")
    assert set(rows[0]) >= {"work", "d_model", "variant", "microseconds", "ratio", "to_floor", "calls"}
    assert {row["work"] for row in rows} == {"forward", "training"}
    assert {row["variant"] for row in rows} >= {"plain", "function", "aten", "aten floor", "detect_anomaly"}
    assert all(float(row["ratio"]) > 0 for row in rows)
    assert "aten: time / floor" in text
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "overhead-forward.png").exists()
        assert (tmp_path / "overhead-training.png").exists()


def test_memory_measures_nodes_and_long_runs(tmp_path: Path) -> None:
    run("memory.py", "--quick", "--levels", "aten", "--out", str(tmp_path))
    nodes, samples = read(tmp_path / "nodes.csv"), read(tmp_path / "resident.csv")
    assert [row["measured_by"] for row in nodes] == ["rss", "tracemalloc"]
    assert float(nodes[1]["bytes_per_node"]) > 0
    assert {row["run"] for row in samples} == {"clean", "poisoned"}
    assert all(int(row["resident_bytes"]) > 0 for row in samples)


def test_diagnose_walks_deep_graphs(tmp_path: Path) -> None:
    run("diagnose.py", "--records", "5000", "--out", str(tmp_path))
    rows = read(tmp_path / "diagnose.csv")
    assert [row["graph"] for row in rows] == ["chain", "ladder", "late"]
    assert all(int(row["nodes"]) >= 4990 for row in rows)


def test_guard_compares_every_variant_with_the_plain_step(tmp_path: Path) -> None:
    text = run(
        "guard.py",
        "--sizes",
        "2x128",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--tokens",
        "8",
        "--out",
        str(tmp_path),
    )
    rows = read(tmp_path / "guard.csv")
    assert [row["variant"] for row in rows] == ["plain", "plain again", "guarded", "detect_anomaly"]
    assert all(float(row["ratio"]) > 0 for row in rows)
    assert "REACHED" in text.upper()
