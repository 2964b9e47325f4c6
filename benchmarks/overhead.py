"""What tracing costs: ratios to the plain program for a self-attention block of growing width.

It prints the tables and two verdicts; `--out` adds a CSV and plots, `--write-readme` refreshes the README.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from _timing import BASELINE, CLOCKS, Step, Timing, default_clock, interleave
from tabulate import tabulate
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import sherlorch

SIZES = (64, 128, 256, 512, 1024)
WORKS = ("forward", "training")
ROOT = Path(__file__).resolve().parent.parent
PLOTS = ROOT / "benchmarks" / "plots"
OLD = "0.1.0"
OLD_MARKS = {64: 1 / 4, 128: 1 / 4}  # of 0.1.0's overhead; a third at every other size
FLOOR_MARK = 1.25


# What is measured


class Block(nn.Module):
    """A pre-norm transformer block with the causal attention written out."""

    mask: Tensor

    def __init__(self, width: int, tokens: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("mask", torch.ones(tokens, tokens, dtype=torch.bool).triu(1))

    def attend(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(self.mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


def forward_step(block: Block, x: Tensor) -> Step:
    return lambda: block(x)


def training_step(block: Block, x: Tensor) -> Step:
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-5)

    def step() -> None:
        optimizer.zero_grad()
        block(x).square().mean().backward()
        optimizer.step()

    return step


def make_step(work: str, width: int, batch: int, tokens: int, device: str) -> Step:
    torch.manual_seed(0)
    block = Block(width, tokens).to(device)
    x = torch.randn(batch, tokens, width, device=device)
    return {"forward": forward_step, "training": training_step}[work](block, x)


# What it is measured with


class FunctionNoOp(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class AtenNoOp(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class AtenFloor(TorchDispatchMode):
    """The least that a scan of all values can cost: one `aminmax` over each tensor computed or written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        plan = write_plan(func)
        if plan.computes:
            scan(result)
        for position, name in plan.written:
            scan(args[position] if position < len(args) else kwargs.get(name))
        return result


class WritePlan(NamedTuple):
    computes: bool  # the results are new tensors
    written: tuple[tuple[int, str], ...]  # position and name of each argument that is written


@cache
def write_plan(func: Any) -> WritePlan:
    schema = func._schema
    aliased = any(result.alias_info is not None for result in schema.returns)
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    hidden_view = func is torch.ops.aten._unsafe_view.default  # shares storage, its schema does not say so
    return WritePlan(not aliased and not hidden_view, written)


def scan(value: Any) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            torch.aminmax(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            scan(item)


@dataclass(frozen=True)
class Variant:
    """A way to run a step: `open()` gives a fresh context, entered and left within the measured time."""

    name: str
    open: Callable[[], AbstractContextManager[Any]]
    works: tuple[str, ...] = WORKS
    level: str | None = None  # whose calls it pays for

    def wrap(self, step: Step) -> Step:
        def wrapped() -> None:
            with self.open():
                step()

        return wrapped


def traced(name: str, level: str, **options: Any) -> Variant:
    return Variant(name, partial(sherlorch.trace, level=level, **options), level=level)


VARIANTS = (
    Variant(BASELINE, nullcontext),
    Variant("function no-op", FunctionNoOp, level="function"),
    traced("function", "function"),
    traced("function, fast_shape_ops=False", "function", fast_shape_ops=False),
    traced("function, capture_stack=False", "function", capture_stack=False),
    Variant("aten no-op", AtenNoOp, level="aten"),
    Variant("aten floor", AtenFloor, level="aten"),
    traced("aten", "aten"),
    traced("aten, fast_shape_ops=False", "aten", fast_shape_ops=False),
    traced("aten, capture_stack=False", "aten", capture_stack=False),
    Variant("detect_anomaly", torch.autograd.detect_anomaly, ("training",)),
)


def debug_mode() -> list[Variant]:
    """PyTorch's own recorder of calls, where this PyTorch has it."""
    try:
        from torch.utils._debug_mode import DebugMode
    except ImportError:
        return []
    return [Variant("DebugMode", DebugMode, level="aten")]


def old_release(path: Path) -> list[Variant]:
    """The first release, which traces the forward pass at function level, with its defaults."""
    try:
        module = import_old(path)
    except (OSError, subprocess.CalledProcessError, ImportError) as error:
        print(f"no column for {OLD}: could not install it into {path} ({error})", file=sys.stderr)
        return []
    return [Variant(OLD, module.trace, ("forward",), level="function")]


def import_old(path: Path) -> ModuleType:
    """Import the old release under a name of its own, beside the present package."""
    package = path / "sherlorch"
    if not (package / "__init__.py").exists():
        requirement = f"sherlorch=={OLD}"
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(path)]
        subprocess.run([*pip, requirement], check=True)
    name = "sherlorch_" + OLD.replace(".", "_")
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if module.__version__ != OLD:
        raise ImportError(f"expected version {OLD}, found {module.__version__}")
    return module


def default_old_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sherlorch" / "benchmarks" / OLD


# Measuring


@dataclass(frozen=True)
class Row:
    """One line of the CSV."""

    work: str
    d_model: int
    variant: str
    microseconds: float  # per step
    ratio: float  # to plain, median over rounds
    ratio_low: float  # quartiles
    ratio_high: float
    to_floor: float  # ratio to the floor, median over rounds
    calls: int  # seen at the variant's level in one step
    microseconds_per_call: float  # above plain
    rounds: int
    clock: str
    device: str
    threads: int
    torch: str

    @property
    def overhead(self) -> float:
        return self.ratio - 1


class CountFunctions(FunctionNoOp):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class CountAten(AtenNoOp):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def count_calls(step: Step) -> dict[str | None, int]:
    step()  # the first training step also makes the optimizer's state
    with CountFunctions() as functions:
        step()
    with CountAten() as aten:
        step()
    return {"function": functions.calls, "aten": aten.calls, None: 0}


def measure(variants: Sequence[Variant], work: str, width: int, options: argparse.Namespace) -> list[Row]:
    step = make_step(work, width, options.batch, options.tokens, options.device)
    calls = count_calls(step)
    chosen = [variant for variant in variants if work in variant.works]
    steps = {variant.name: variant.wrap(step) for variant in chosen}
    timing = interleave(steps, options.rounds, options.sample_ms / 1000, options.device, options.clock)
    return [make_row(v, work, width, timing, calls[v.level], options) for v in chosen]


def make_row(
    variant: Variant, work: str, width: int, timing: Timing, calls: int, options: argparse.Namespace
) -> Row:
    ratio = timing.ratio(variant.name)
    plain = timing.step(BASELINE).median
    return Row(
        work=work,
        d_model=width,
        variant=variant.name,
        microseconds=timing.step(variant.name).median * 1e6,
        ratio=ratio.median,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        to_floor=timing.ratio(variant.name, "aten floor").median,
        calls=calls,
        microseconds_per_call=(ratio.median - 1) * plain * 1e6 / calls if calls else float("nan"),
        rounds=options.rounds,
        clock=options.clock,
        device=options.device,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
    )


# Telling


class Results:
    """The rows of one run, found by work, width and variant."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.index = {(row.work, row.d_model, row.variant): row for row in rows}
        self.variants = list(dict.fromkeys(row.variant for row in rows))
        self.sizes = sorted({row.d_model for row in rows})

    def get(self, work: str, size: int, variant: str) -> Row | None:
        return self.index.get((work, size, variant))

    def table(self, work: str, tablefmt: str = "simple") -> str:
        """Ratios to plain; the first line gives plain's own time."""
        lines = [[name, *(self.cell(work, size, name) for size in self.sizes)] for name in self.variants]
        kept = [line for line in lines if any(line[1:])]
        headers = [f"{work}, d_model", *map(str, self.sizes)]
        align = ("left", *("right" for _ in self.sizes))
        return tabulate(kept, headers, tablefmt=tablefmt, colalign=align, disable_numparse=True)

    def cell(self, work: str, size: int, variant: str) -> str:
        row = self.get(work, size, variant)
        if row is None:
            return ""
        if variant == BASELINE:
            return f"{row.microseconds / 1000:.2f} ms"
        return f"{row.ratio:.2f}"


class Verdict(NamedTuple):
    what: str
    d_model: int
    value: float
    mark: float

    @property
    def reached(self) -> bool:
        return self.value <= self.mark


def verdicts(results: Results) -> Iterator[Verdict]:
    for size in results.sizes:
        new, old = results.get("forward", size, "function"), results.get("forward", size, OLD)
        if new and old:
            share = new.overhead / old.overhead
            mark = OLD_MARKS.get(size, 1 / 3)
            yield Verdict(f"forward, function: overhead / overhead of {OLD}", size, share, mark)
    for work in WORKS:
        for size in results.sizes:
            aten = results.get(work, size, "aten")
            if aten:
                yield Verdict(f"{work}, aten: time / floor", size, aten.to_floor, FLOOR_MARK)


def verdict_table(results: Results) -> str:
    lines = [
        [v.what, v.d_model, f"{v.value:.3f}", f"{v.mark:.3f}", "reached" if v.reached else "NOT REACHED"]
        for v in verdicts(results)
    ]
    headers = ["mark", "d_model", "value", "at most", "verdict"]
    return tabulate(lines, headers, disable_numparse=True, colalign=("left", *["right"] * 3, "left"))


def call_table(results: Results) -> str:
    """Microseconds that one call costs above plain, at the smallest size, where nothing else counts."""
    size = results.sizes[0]
    lines = [
        [row.work, row.variant, row.calls, f"{row.microseconds_per_call:.2f}"]
        for row in results.rows
        if row.d_model == size and row.calls
    ]
    return tabulate(lines, [f"d_model {size}", "variant", "calls", "us per call"], disable_numparse=True)


def write_csv(results: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "overhead.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(rounded(row) for row in results.rows)


def rounded(row: Row) -> dict[str, Any]:
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(row).items()}


COLOURS = {"function": "tab:blue", "aten": "tab:orange", OLD: "tab:red", "DebugMode": "tab:purple"}
LINES = {  # by the end of the name: matplotlib's dash and marker
    "no-op": (":", "."),
    "floor": ("--", "."),
    "fast_shape_ops=False": ("-.", "^"),
    "capture_stack=False": ("-.", "v"),
}


def plot(results: Results, folder: Path) -> None:
    """Draw overhead against width, a picture for each kind of work; needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print('no plots: matplotlib is missing, pip install "sherlorch[benchmark]"', file=sys.stderr)
        return
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for work in WORKS:
        plot_work(results, work, folder / f"overhead-{work}.png")


def plot_work(results: Results, work: str, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in results.variants:
        rows = [row for size in results.sizes if (row := results.get(work, size, name))]
        if name != BASELINE and rows:
            axes.plot([r.d_model for r in rows], [100 * r.overhead for r in rows], label=name, **style(name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", nonpositive="mask")
    axes.set_xticks(results.sizes, map(str, results.sizes))
    axes.set(xlabel="d_model", ylabel="overhead over plain, %", title=f"{work} of an attention block")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def style(name: str) -> dict[str, Any]:
    colour = next((c for key, c in COLOURS.items() if name.startswith(key)), "tab:green")
    dash, marker = next((line for key, line in LINES.items() if name.endswith(key)), ("-", "o"))
    return {"color": colour, "linestyle": dash, "marker": marker, "alpha": 1 if dash == "-" else 0.6}


def write_readme(results: Results, readme: Path) -> None:
    """Replace what stands between the two overhead comments by the tables and plots of this run."""
    begin, end = "<!-- overhead:begin -->", "<!-- overhead:end -->"
    text = readme.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{readme.name} has no {begin} ... {end} to write between")
    before, after = text.split(begin)[0], text.split(end)[1]
    readme.write_text(f"{before}{begin}\n{readme_section(results)}\n{end}{after}", encoding="utf-8")


def readme_section(results: Results) -> str:
    row = results.rows[0]
    device = row.device if row.device == "cpu" else torch.cuda.get_device_name(row.device)
    setting = f"torch {row.torch}, {device}, {row.threads} thread(s), {row.clock} time, {row.rounds} rounds"
    parts = [f"Ratios to the plain program, by `python benchmarks/overhead.py --write-readme` ({setting}):"]
    for work in WORKS:
        picture = f"![overhead of {work} against d_model](benchmarks/plots/overhead-{work}.png)"
        parts += [results.table(work, tablefmt="github"), picture]
    return "\n\n".join(parts)


# The command


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ratios of traced to plain time for an attention block.")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="values of d_model")
    parser.add_argument("--rounds", type=int, default=21, help="rounds per size and kind of work")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--variants", nargs="+", help="only these (plain and the floor always run)")
    parser.add_argument("--sample-ms", type=float, default=50, help="least time of one plain sample")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, help="cpu where one thread does all the work, else wall")
    parser.add_argument("--quick", action="store_true", help="one small size, few rounds: only a smoke test")
    parser.add_argument("--no-old", action="store_true", help=f"leave out {OLD}, which pip has to fetch")
    parser.add_argument("--old-path", type=Path, default=default_old_path(), help=f"folder for {OLD}")
    parser.add_argument("--out", type=Path, help="folder for overhead.csv and the plots")
    parser.add_argument("--write-readme", action="store_true", help="refresh README.md and its plots")
    options = parser.parse_args(argv)
    options.clock = options.clock or default_clock(options.device, options.threads)
    if options.quick:
        options.sizes, options.rounds, options.sample_ms = options.sizes[:1], min(options.rounds, 3), 0.5
    return options


def choose_variants(options: argparse.Namespace) -> list[Variant]:
    variants = [*VARIANTS, *debug_mode()]
    if not options.no_old:
        variants[1:1] = old_release(options.old_path)
    if options.variants:
        always = (BASELINE, "aten floor")
        variants = [v for v in variants if v.name in options.variants or v.name in always]
    return variants


def run(options: argparse.Namespace) -> Results:
    variants = choose_variants(options)
    rows: list[Row] = []
    for size in options.sizes:
        for work in options.works:
            print(f"{work}, d_model {size} ...", file=sys.stderr, flush=True)
            rows += measure(variants, work, size, options)
    return Results(rows)


def report(results: Results, options: argparse.Namespace) -> None:
    tables = [results.table(work) for work in options.works]
    print(*tables, call_table(results), verdict_table(results), sep="\n\n")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
    setting = f"python {platform.python_version()}, {options.device}, {options.clock} time"
    print(f"torch {torch.__version__}, {setting}")
    results = run(options)
    report(results, options)
    if options.out:
        write_csv(results, options.out)
        plot(results, options.out)
    if options.write_readme:
        write_csv(results, PLOTS)
        plot(results, PLOTS)
        write_readme(results, ROOT / "README.md")


if __name__ == "__main__":
    main()
