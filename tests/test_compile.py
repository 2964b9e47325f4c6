"""Compiled checks: the right line out of generated kernels, however the model is compiled."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sherlorch
from sherlorch.errors import SherlorchError
from sherlorch.passes import compiled_checks
from sherlorch.passes.compiling import OLDEST, Backend, torch_version

pytestmark = [
    pytest.mark.skipif(torch_version() < OLDEST, reason="compiled checks need a newer torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
SOURCE = Path(__file__).read_text(encoding="utf-8").splitlines()
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def line_of(mark: str) -> str:
    (number,) = (number for number, line in enumerate(SOURCE, start=1) if line.endswith(f"# <- {mark}"))
    return f"{__file__}:{number}"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    compiled_checks().reset()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(torch.relu(self.project(x)))  # <- forward


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(4), Gate()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return (y * self.gate(y)).sum()


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lift(x)
        return (y + torch.sqrt(y * 0.0)).sum()  # <- backward


def test_a_forward_fault_is_named() -> None:
    compiled = sherlorch.compile(Gated(), fullgraph=True, mode="reduce-overhead")
    compiled(X).backward()
    report = compiled.checks.diagnose()
    culprit = report.culprits[0]
    assert (culprit.op_name, culprit.phase) == ("aten.log.default", "forward")
    assert (culprit.location, culprit.module_path) == (line_of("forward"), "model.gate")
    assert report.target_name == "output"
    assert [node.op_name for node in report.paths[culprit.seq]] == [
        "aten.log.default",
        "aten.mul.Tensor",
        "aten.sum.default",
    ]
    assert "clamp_min" in str(report)
    assert "largest magnitudes that went into aten.log.default: relu" in str(report)
    compiled.checks.reset()
    assert compiled.checks.diagnose().ok


def test_a_backward_fault_is_named_by_the_name_of_the_backend() -> None:
    model = Rooted()
    compiled = torch.compile(model, backend="sherlorch")
    compiled(X).backward()
    assert model.lift.weight.grad.isnan().any()
    report = compiled_checks().diagnose()
    culprit = report.culprits[0]
    assert culprit.phase == "backward"
    assert culprit.forward is not None
    assert culprit.forward.op_name == "aten.sqrt.default"
    assert culprit.location == line_of("backward")
    assert report.target_name in ("model.lift.weight.grad", "model.lift.bias.grad")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        y = self.lift(x)
        scores = (y @ y.transpose(0, 1)).masked_fill(self.mask, float("-inf"))  # <- mask
        return ((scores + bias).softmax(-1) @ y).sum()  # <- softmax


def test_masks_are_not_blamed_and_a_fully_masked_row_is() -> None:
    model = Masked()
    compiled = sherlorch.compile(model)
    bias = torch.full((3, 3), -torch.inf).triu(2)
    compiled(X, bias).backward()
    report = compiled.checks.diagnose()
    assert report.ok
    assert any("masked_fill" in text and "a mask, absorbed by" in text for text in report.also_seen)
    assert any("input bias" in text and "a mask, absorbed by" in text for text in report.also_seen)
    with torch.no_grad():
        for _ in range(600):  # harmless all of them, and they must not crowd out what comes then
            compiled(X, bias)
    model.mask.fill_(True)
    compiled(X, bias).backward()
    report = compiled.checks.diagnose()
    assert report.culprits[0].op_name == "aten._softmax.default"
    assert report.culprits[0].location == line_of("softmax")
    assert line_of("mask") in [cause.location for cause in report.causes[report.culprits[0].seq]]


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.lift(x))
        torch._dynamo.graph_break()
        return self.lift(x).reciprocal() - 1


def test_breaks_recompiles_shapes_and_calls_without_gradients() -> None:
    model = Stages()
    compiled = sherlorch.compile(model, dynamic=True)
    for size in (3, 5):
        x = torch.rand(size, 4)
        torch.testing.assert_close(compiled(x), model(x))
        compiled(compiled(x)).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X))
    assert compiled.checks.diagnose().ok
    nn.init.zeros_(model.lift.weight)
    nn.init.zeros_(model.lift.bias)
    with torch.no_grad():
        compiled(torch.rand(7, 4))
    culprit = compiled.checks.diagnose().culprits[0]
    assert culprit.op_name == "aten.reciprocal.default"
    nn.init.constant_(model.lift.bias, torch.nan)
    compiled.checks.reset()
    with torch.no_grad():
        compiled(torch.rand(7, 4))
    assert compiled.checks.diagnose().culprits[0].name == "parameter model.lift.bias"


def test_gradients_are_those_of_plain_compile_under_autocast() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    grads = []
    for run in (torch.compile(model), sherlorch.compile(model)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(X)
        assert out.dtype is torch.bfloat16
        out.float().square().sum().backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checked in zip(*grads):
        torch.testing.assert_close(checked, plain, rtol=2e-2, atol=1e-3)


def test_the_first_bad_run_is_told_not_its_consequences() -> None:
    scale = torch.ones((), requires_grad=True)

    @sherlorch.compile(name="loss")
    def loss(x: Tensor) -> Tensor:
        return (x * scale).log().sum()  # <- log

    optimizer = torch.optim.SGD([scale], lr=1.0)
    for _ in range(3):  # from the second on, scale itself is bad
        optimizer.zero_grad()
        loss(torch.tensor([1.0, 0.0])).backward()
        optimizer.step()
    assert loss.checks.diagnose().culprits[0].location == line_of("log")


def test_another_backend_is_refused_and_an_old_torch_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="leave out `backend`"):
        sherlorch.compile(nn.Linear(1, 1), backend="inductor")
    monkeypatch.setattr(torch, "__version__", "2.1.2+cpu")
    with pytest.raises(SherlorchError, match=r"need torch 2.4 or newer, this is 2.1.2"):
        sherlorch.compile(nn.Linear(1, 1))
    with pytest.raises(SherlorchError, match="upgrade torch"):
        Backend()(None, [])  # type: ignore[arg-type]


def test_the_benchmark_runs(tmp_path: Path) -> None:
    options = ["--sizes", "16", "--batch", "2", "--tokens", "4", "--rounds", "2", "--works", "forward"]
    options += ["--variants", "with checks", "--out", str(tmp_path)]
    command = [sys.executable, str(Path(__file__).parent.parent / "benchmarks" / "compiled.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "compiled.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[2] for line in lines] == ["variant", "plain", "with checks"]


def test_nothing_of_the_compiler_is_imported_before_it_is_used() -> None:
    check = "import sys, sherlorch.passes; print([m for m in sys.modules if m.startswith('torch._inductor')])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_model_keeps_its_own_attributes() -> None:
    model = nn.Linear(4, 4)
    compiled: Any = sherlorch.compile(model)
    assert not hasattr(model, "checks")
    assert str(compiled.checks.diagnose()).startswith("No non-finite")
