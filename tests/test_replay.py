"""A repro of one call: what is written, what comes back, what a damaged or foreign file is answered."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sherlorch
from sherlorch import Guard, NonFiniteError, SherlorchError, cli, replay
from sherlorch.health import INF, NAN
from sherlorch.replay.call import resolve
from sherlorch.reports.report import DiagnosisReport


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def report_of(compute: Callable[[Tensor], Tensor], x: Tensor) -> DiagnosisReport:
    """What a Guard says of a step whose loss is the sum of `compute(x)`."""
    weight = nn.Parameter(torch.ones_like(x))

    def step() -> Tensor:
        loss = compute(x * weight).sum()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteError) as caught:
        Guard(nn.ParameterList([weight]))(step)()
    report: DiagnosisReport = caught.value.report
    return report


def call(overload: Any, *args: Any, expected: int = NAN, **kwargs: Any) -> replay.Repro:
    repro = replay.take(overload, args, kwargs)
    repro.expected = expected
    return repro


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 5).contiguous()


# What a Guard's report writes


CULPRITS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    "aten::log.": (torch.log, torch.tensor([1.0, -1.0, 2.0])),
    "aten::div.Tensor": (lambda x: x / x, column(1, 0, 3)),
    "aten::exp.": (torch.exp, column(1, 100, 3)),
    "aten::mm.": (lambda x: x @ x.T, column(1, 1e20, 3)),
    "aten::_to_copy.": (lambda x: x.to(torch.float16), column(1, 1e5, 3)),
    "aten::sqrt_.": (lambda x: x.clone().sqrt_(), column(1, -4, 9)),
    "aten::linalg_vector_norm.": (lambda x: x.norm(), column(1, 1e30, 2)),
    "aten::mul.Tensor": (lambda x: x * 1e38 * 10 - x * 1e38 * 10, column(0, 1, 0)),
    "aten::native_layer_norm.": (
        lambda x: nn.functional.layer_norm(x * 1e38, (5,), eps=0.0),
        column(0, 1, 2),
    ),
}


@pytest.mark.parametrize("op", CULPRITS)
def test_the_culprit_comes_back_alone(op: str, tmp_path: Path) -> None:
    report = report_of(*CULPRITS[op])
    path = tmp_path / "repro.pt"
    report.save_repro(path)
    repro = replay.load(path)
    assert f"{repro.op}.".startswith(op)
    assert report.culprits[0].op_name.startswith(repro.op.replace("::", "."))
    assert replay.comes_back(repro, replay.run(repro))
    assert repro.verdict == str(report).splitlines()[0]
    assert repro.versions == {"sherlorch": sherlorch.__version__, "torch": str(torch.__version__)}


def test_a_backward_kernel_comes_back_alone(tmp_path: Path) -> None:
    report = report_of(lambda x: torch.sqrt(x - x.detach()) * x.detach(), torch.zeros(3))
    assert report.culprits[0].phase == "backward"
    report.save_repro(tmp_path / "repro.pt")
    repro = replay.load(tmp_path / "repro.pt")
    assert report.culprits[0].op_name.startswith(repro.op.replace("::", "."))
    assert replay.comes_back(repro, replay.run(repro))


def test_what_came_in_bad_is_saved_with_the_first_op_that_used_it(tmp_path: Path) -> None:
    report = report_of(torch.sigmoid, torch.tensor([1.0, float("nan")]))
    assert report.culprits[0].origin == "outside"
    report.save_repro(tmp_path / "repro.pt")
    assert replay.load(tmp_path / "repro.pt").op == "aten::mul.Tensor"


def test_random_numbers_are_drawn_again(tmp_path: Path) -> None:
    torch.manual_seed(5)
    report = report_of(lambda x: torch.log(nn.functional.dropout(x, 0.5)), torch.ones(64))
    report.save_repro(tmp_path / "log.pt")
    repro = call(torch.ops.aten.bernoulli.p, torch.ones(64), 0.5)
    torch.rand(1)
    first, state = torch.ops.aten.bernoulli.p(torch.ones(64), 0.5), torch.get_rng_state()
    del first
    replay.run(repro)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_file_is_plain_data(tmp_path: Path) -> None:
    report_of(*CULPRITS["aten::_to_copy."]).save_repro(tmp_path / "repro.pt")
    content = torch.load(tmp_path / "repro.pt", weights_only=True)
    assert content["format"] == "sherlorch-repro"
    assert content["kwargs"] == {"dtype": {"dtype": "float16"}}


def test_a_view_of_a_large_tensor_makes_a_small_file(tmp_path: Path) -> None:
    replay.save(call(torch.ops.aten.log.default, torch.full((1_000_000,), -1.0)[:4]), tmp_path / "repro.pt")
    assert (tmp_path / "repro.pt").stat().st_size < 20_000


def test_the_same_tensor_twice_stays_one(tmp_path: Path) -> None:
    x = torch.zeros(3)
    replay.save(call(torch.ops.aten.div.Tensor, x, x), tmp_path / "repro.pt")
    repro = replay.load(tmp_path / "repro.pt")
    assert repro.args[0] is not x
    assert repro.args[0].data_ptr() == repro.args[1].data_ptr()


def test_strides_are_kept(tmp_path: Path) -> None:
    replay.save(call(torch.ops.aten.log.default, torch.full((3, 4), -1.0).T), tmp_path / "repro.pt")
    assert replay.load(tmp_path / "repro.pt").args[0].stride() == (1, 4)


@pytest.mark.parametrize(
    "value",
    [
        1,
        2.5,
        True,
        None,
        "mean",
        1 + 2j,
        float("inf"),
        torch.float16,
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
        [1, [2.0]],
    ],
)
def test_every_kind_of_argument_comes_back(value: Any, tmp_path: Path) -> None:
    replay.save(call(torch.ops.aten.log.default, torch.tensor(-1.0), extra=value), tmp_path / "repro.pt")
    loaded = replay.load(tmp_path / "repro.pt").kwargs["extra"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_a_plain_trace_has_no_arguments_and_says_how_to_get_them() -> None:
    with sherlorch.trace() as tracker:
        y = torch.log(torch.tensor(-1.0))
    with pytest.raises(
        SherlorchError, match=r"a trace keeps no tensors.*`sherlorch\.Guard\(model, optimizer\)` has them"
    ):
        tracker.diagnose(y).save_repro("unused.pt")


def test_save_dir_gets_one_file_for_each_fault(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @Guard(nn.ParameterList([weight]), optimizer, save_dir=tmp_path / "new" / "faults")
    def step(x: Tensor) -> Tensor:
        loss = torch.log(weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss

    for x in (torch.ones(3), -torch.ones(3), torch.ones(3), torch.zeros(3)):
        with contextlib.suppress(NonFiniteError):
            step(x)
    assert sorted(path.name for path in (tmp_path / "new" / "faults").iterdir()) == ["step-2.pt", "step-4.pt"]


def test_a_save_dir_that_cannot_be_written_does_not_hide_the_report(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    weight = nn.Parameter(torch.ones(3))
    step = Guard(nn.ParameterList([weight]), save_dir=tmp_path / "file")(lambda: torch.log(-weight).sum())
    with pytest.raises(NonFiniteError, match="no repro saved: ") as caught:
        step()
    assert str(caught.value).startswith("NaN in `loss`")


# Fewer rows


@pytest.mark.parametrize(
    ("repro", "shapes"),
    [
        (
            call(torch.ops.aten.div.Tensor, column(1, 0, 3), torch.tensor([[1.0], [0.0], [1.0]])),
            [(1, 5), (1, 1)],
        ),
        (call(torch.ops.aten.div.Tensor, torch.ones(4, 3), torch.zeros(3), expected=INF), [(1, 3), (3,)]),
        (
            call(torch.ops.aten.mm.default, column(1, 1e30, 1), torch.full((5, 3), 1e30), expected=INF),
            [(1, 5), (5, 3)],
        ),
        (call(torch.ops.aten._softmax.default, column(1, float("-inf"), 1), 1, False), [(1, 5)]),
        (
            call(
                torch.ops.aten._foreach_log.default, [torch.ones(2), torch.tensor([-1.0, 1.0]), torch.ones(3)]
            ),
            [(2,)],
        ),
        (call(torch.ops.aten.sum.default, torch.tensor([3e38, 3e38]), expected=INF), [(2,)]),
    ],
)
def test_small_keeps_the_rows_that_show_the_fault(repro: replay.Repro, shapes: Any, tmp_path: Path) -> None:
    replay.save(repro, tmp_path / "repro.pt", small=True)
    loaded = replay.load(tmp_path / "repro.pt")
    tensors = [
        item
        for arg in loaded.args
        for item in (arg if isinstance(arg, list) else [arg])
        if isinstance(item, Tensor)
    ]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    assert replay.comes_back(loaded, replay.run(loaded))


# Running


def test_float64_tells_range_from_logic() -> None:
    overflow = call(torch.ops.aten.exp.default, torch.tensor([100.0]), expected=INF)
    text, came_back = replay.describe(overflow)
    assert came_back
    assert "float32 on cpu  Inf at [0]: the fault comes back\n" in text
    wide = "float64 on cpu  all finite: the fault does not come back"
    assert f"{wide}; the range or precision of float32 is the cause" in text
    text, _ = replay.describe(call(torch.ops.aten.log.default, torch.tensor([-1.0])))
    assert "float64 on cpu  NaN at [0]: the fault comes back, so the dtype is not the cause" in text


def test_a_cast_is_made_wide_too() -> None:
    repro = call(torch.ops.aten._to_copy.default, torch.tensor([1e5]), expected=INF, dtype=torch.float16)
    assert replay.run(repro).state == INF
    assert replay.run(repro, double=True).state == 0


def test_a_fault_that_does_not_come_back() -> None:
    text, came_back = replay.describe(
        call(torch.ops.aten.log.default, torch.tensor([1.0], dtype=torch.float64))
    )
    assert not came_back
    assert text.count("all finite: the fault does not come back") == 1  # float64 is its own dtype: one run


def test_what_a_call_writes_counts() -> None:
    repro = call(torch.ops.aten._foreach_sqrt_.default, [torch.ones(2), -torch.ones(2)])
    assert replay.run(repro).state == NAN
    assert torch.equal(repro.args[0][1], -torch.ones(2))  # a run works on copies


def test_a_call_that_cannot_run_says_why() -> None:
    text, came_back = replay.describe(call(torch.ops.aten.mm.default, torch.ones(2, 3), torch.ones(2, 3)))
    assert not came_back
    assert re.search("could not run: RuntimeError: .*mat1 and mat2 shapes cannot be multiplied", text)


# The command


def save(path: Path) -> Path:
    replay.save(call(torch.ops.aten.div.Tensor, column(1, 0, 3), column(1, 0, 3)), path)
    return path


def test_the_command_shows_the_call_and_exits_with_1(tmp_path: Path) -> None:
    path = save(tmp_path / "repro.pt")
    command = [sys.executable, "-W", "error", "-m", "sherlorch", "replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        done.stdout
        == f"""\
aten.div.Tensor

  argument    shape    dtype    min    max    zeros    nan    +inf    -inf
  self        (3, 5)   float32  0      3      5        0      0       0
  other       (3, 5)   float32  0      3      5        0      0       0

  float32 on cpu  NaN at [1, 0]: the fault comes back
  float64 on cpu  NaN at [1, 0]: the fault comes back, so the dtype is not the cause

  saved by sherlorch {sherlorch.__version__}, torch {torch.__version__} on cpu
"""
    )


def test_the_command_exits_with_0_where_the_fault_stays_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay.save(call(torch.ops.aten.log.default, torch.ones(2)), tmp_path / "repro.pt")
    assert cli.main(["replay", str(tmp_path / "repro.pt")]) == 0
    assert "the fault does not come back" in capsys.readouterr().out


def test_another_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(save(tmp_path / "repro.pt")), "--device", "meta"]) == 0
    assert (
        "float32 on meta  could not run: SherlorchError: tensors on the meta device"
        in capsys.readouterr().out
    )
    assert cli.main(["replay", str(save(tmp_path / "repro.pt")), "--device", "nowhere"]) == 0
    assert "could not run: RuntimeError: Expected one of cpu" in capsys.readouterr().out


# Files that are no repro


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["replay", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sherlorch replay: ")
    return captured.err


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read" in refused(tmp_path / "none.pt", capsys)
    assert "No such file or directory" in refused(tmp_path / "none.pt", capsys)
    assert "cannot read" in refused(tmp_path, capsys)


@pytest.mark.parametrize("keep", [0, 1, 10, 200, 900, -1, -40])
def test_a_file_cut_short(keep: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "repro.pt")
    path.write_bytes(path.read_bytes()[:keep])
    assert "is damaged, or no file of `report.save_repro`" in refused(path, capsys)


def test_flipped_bytes_never_end_in_anything_but_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = save(tmp_path / "repro.pt").read_bytes()
    path = tmp_path / "flipped.pt"
    for position in range(0, len(original), max(1, len(original) // 120)):
        path.write_bytes(original[:position] + bytes([original[position] ^ 0x55]) + original[position + 1 :])
        assert cli.main(["replay", str(path)]) in (0, 1, 2)
        capsys.readouterr()


def test_nothing_in_a_file_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trap = tmp_path / "trap"
    for write in (
        lambda path: path.write_bytes(pickle.dumps(Evil(trap))),
        lambda path: torch.save(Evil(trap), path),
        lambda path: torch.save({"format": "sherlorch-repro", "version": 1, "op": Evil(trap)}, path),
    ):
        write(tmp_path / "evil.pt")
        assert "is damaged, or no file of `report.save_repro`" in refused(tmp_path / "evil.pt", capsys)
        assert not trap.exists()


def content(**changes: Any) -> dict[str, Any]:
    return {
        "format": "sherlorch-repro",
        "version": 1,
        "op": "aten::log",
        "args": [torch.tensor([-1.0])],
        "kwargs": {},
        "expected": NAN,
        "device": "cpu",
        "random": {},
        "verdict": "",
        "versions": {},
        "small": False,
        **changes,
    }


def test_the_smallest_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(content(), tmp_path / "repro.pt")
    assert cli.main(["replay", str(tmp_path / "repro.pt")]) == 1
    assert "the fault comes back" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        ([1, 2], "it was not written by `report.save_repro`"),
        ({"weight": torch.ones(2)}, "it was not written by `report.save_repro`"),
        (content(version=2), "its format is version 2, this sherlorch reads 1"),
        (content(op=3), "`op` should be a str and is '3'"),
        (content(args=None), "`args` should be a list and is 'None'"),
        (content(args=[{"os": "system"}]), "an argument is \"{'os': 'system'}\""),
        (content(args=[{"dtype": "load"}]), "an argument is \"{'dtype': 'load'}\""),
        (content(args=[{"complex": ["1", 2]}]), "an argument is"),
        (content(kwargs={3: 1}), "a name is no text"),
        (content(expected=0), "the fault that it should show is 0"),
        (content(random={"cpu": 3}), "a random state is no tensor"),
        (content(op="aten::save"), "has no op `aten::save` that takes a tensor"),
        (
            content(op="aten::from_file", args=["x", True, 4]),
            "has no op `aten::from_file` that takes a tensor",
        ),
        (content(op="aten::no_such_op"), "has no op `aten::no_such_op`"),
        (content(op="aten::__class__"), "has no op `aten::__class__`"),
        (content(op="os::system", args=["true"]), "`os::system` is not one of PyTorch's own ops"),
        (content(op="aten::log; import os"), "is not one of PyTorch's own ops"),
    ],
)
def test_a_foreign_file(
    foreign: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(foreign, tmp_path / "foreign.pt")
    assert message in refused(tmp_path / "foreign.pt", capsys)


def test_text_of_a_file_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(content(verdict="\x1b[2Jgone", versions={"torch": "\x1b]0;"}), tmp_path / "repro.pt")
    cli.main(["replay", str(tmp_path / "repro.pt")])
    assert "\x1b" not in capsys.readouterr().out


def test_ops_that_open_files_are_not_found() -> None:
    for op in ("aten::save", "aten::from_file", "aten::__getstate__", "prims::__class__"):
        with pytest.raises(SherlorchError, match="has no op"):
            resolve(op)
