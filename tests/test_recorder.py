"""A call becomes nodes, whatever kind of tensor it is given; what cannot be recorded is counted and told."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from needs import has_torch, needs_jagged, skip_as_subclass
from stand_in import stand_in
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import sherlorch
from sherlorch import ProvenanceTracker
from sherlorch.tracers.ledger import Ledger
from sherlorch.tracers.memory import Memory
from sherlorch.tracers.recorder import Recorder

LEVELS = pytest.mark.parametrize("level", ["function", "aten"])
WAYS = pytest.mark.parametrize(
    ("level", "defer"), [("function", False), ("function", True), ("aten", False), ("aten", True)]
)
PROTOTYPES = pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support is in beta state", "ignore:The PyTorch API of nested tensors"
)


class Functions(Tensor):
    """A subclass that only sees functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(Tensor):
    """A subclass that wraps a tensor and has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        return tree_map(lambda x: Wrapper(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


def negative() -> Tensor:
    return -torch.ones(3)


def batched() -> Tensor:
    return torch.func.vmap(lambda x: torch.log(x.sum()))(-torch.ones(3, 2))


def batched_with_a_named_value() -> Tensor:
    return torch.func.vmap(lambda x: torch.log((x * 2).clamp_min(-5.0)))(-torch.ones(3, 2))


def quantized() -> Tensor:
    return torch.log(torch.quantize_per_tensor(negative(), 0.1, 0, torch.qint8).dequantize())


def jagged() -> Tensor:
    parts = [-torch.ones(2, 2), torch.ones(1, 2)]
    return torch.log(torch.nested.nested_tensor(parts, layout=torch.jagged))


def values_of_jagged() -> Tensor:
    return jagged().values() * 2


def strided_nested() -> Tensor:
    nested = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(1, 2)])
    return torch.log(torch.nested.to_padded_tensor(nested, -1.0))


def beside_meta_tensors() -> Tensor:
    assert (torch.ones(3, device="meta") * 2).is_meta
    return torch.log(negative())


def beside_fake_tensors() -> Tensor:
    with torch._subclasses.FakeTensorMode():
        assert (torch.ones(3) * 2).shape == (3,)
    return torch.log(negative())


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        x = torch.ones(3)
        x.mul_(-1)
        return torch.log(x)


def subclass_of_functions() -> Tensor:
    return torch.log(negative().as_subclass(Functions))


def wrapper() -> Tensor:
    return torch.log(Wrapper(torch.ones(3)) * -1)


def wrapper_in_place() -> Tensor:
    x = Wrapper(torch.ones(3))
    x.mul_(-1).log_()
    return x


def of_numpy() -> Tensor:
    numpy = pytest.importorskip("numpy")
    return torch.log(torch.from_numpy(numpy.array([-1.0, 1.0])))


def sparse() -> Tensor:
    return torch.log(torch.tensor([[0.0, -1.0], [2.0, 0.0]]).to_sparse().to_dense())


def sparse_product() -> Tensor:
    bad = torch.log(negative()).unsqueeze(1)
    return torch.sparse.mm(torch.eye(3).to_sparse(), bad)


def product_of_compressed_rows() -> Tensor:
    return torch.eye(3).to_sparse_csr() @ torch.log(negative()).unsqueeze(1)


def mkldnn() -> Tensor:
    return torch.log(-torch.relu(torch.ones(2, 2).to_mkldnn()).to_dense())


def functional_call() -> Tensor:
    model = nn.Linear(2, 2)
    weights = {"weight": torch.ones(2, 2), "bias": -9 * torch.ones(2)}
    return torch.log(torch.func.functional_call(model, weights, torch.ones(1, 2)))


def lazy_module() -> Tensor:
    return torch.log(nn.LazyLinear(2)(torch.ones(1, 2)) * 0 - 1)


def half_of_a_complex_number() -> Tensor:
    return torch.log(torch.view_as_complex(-torch.ones(2, 2)).conj().imag * -1)


def compiled() -> Tensor:
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # torch 2.0 warns of the backend that another test has used
    return torch.compile(lambda x: torch.log(x), backend="eager")(negative())


PROGRAMS = [
    batched, batched_with_a_named_value, quantized, pytest.param(jagged, marks=needs_jagged),
    pytest.param(values_of_jagged, marks=needs_jagged), strided_nested,
    beside_meta_tensors, beside_fake_tensors, in_inference_mode, subclass_of_functions, wrapper,
    wrapper_in_place, of_numpy, sparse, sparse_product, product_of_compressed_rows, mkldnn,
    functional_call, lazy_module, half_of_a_complex_number, compiled,
]  # fmt: skip


@PROTOTYPES
@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*TF32", "ignore:Lazy modules")
@WAYS
@pytest.mark.parametrize("program", PROGRAMS)
def test_odd_tensors_are_followed(program: Callable[[], Tensor], level: str, defer: bool) -> None:
    if program is subclass_of_functions:
        skip_as_subclass(level == "aten")
    with ProvenanceTracker(level, _defer=defer) as tracker:
        result = program()
    report = tracker.diagnose(result)
    (name,) = (culprit.op_name for culprit in report.culprits)
    assert name in ("log", "log_", "aten.log.default", "aten.log_.default")
    assert report.culprits[0].origin == "introduced"
    if program is not compiled or has_torch("2.6"):  # before, compiled functions are not kept eager
        assert report.culprits[0].location.startswith(__file__)
    assert report.coverage.unseen == {}


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x).sum()


DIFFERENTIATED = {
    "grad": lambda: torch.func.grad(root)(torch.zeros(3)),
    "jvp": lambda: torch.func.jvp(torch.sqrt, (torch.zeros(2),), (torch.ones(2),))[1],
    "jacrev": lambda: torch.func.jacrev(torch.sqrt)(torch.zeros(2)),
    "jacfwd": lambda: torch.func.jacfwd(torch.sqrt)(torch.zeros(2)),
    "vmap of grad": lambda: torch.func.vmap(torch.func.grad(lambda x: torch.sqrt(x).sum()))(
        torch.zeros(3, 2)
    ),
    "hessian": lambda: torch.func.hessian(root)(torch.zeros(3)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on first use of jvp
@WAYS
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_derivatives_of_functions(name: str, level: str, defer: bool) -> None:
    plain = DIFFERENTIATED[name]()
    with ProvenanceTracker(level, _defer=defer) as tracker:
        result = DIFFERENTIATED[name]()
    assert torch.equal(result, plain) or (torch.equal(result.isnan(), plain.isnan()) and result.isnan().any())
    assert tracker._recorder.unseen == {}
    if level == "aten":
        assert tracker.diagnose(result).culprits[0].op_name == "aten.div.Tensor"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@WAYS
def test_forward_mode_and_its_zeros_without_memory(level: str, defer: bool) -> None:
    with ProvenanceTracker(level, _defer=defer, fast_shape_ops=False) as tracker, forward_ad.dual_level():
        zero = torch._efficientzerotensor((2,))
        assert torch.equal(zero.view(2, 1) + torch.ones(2, 1), torch.ones(2, 1))
        dual = forward_ad.make_dual(torch.zeros(2), torch.ones(2))
        tangent = forward_ad.unpack_dual(torch.sqrt(dual)).tangent
    assert tracker.node(tangent).has_inf
    assert tracker._recorder.unseen == {}


@LEVELS
def test_memory_that_numpy_wrote_is_read_again(level: str) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.array([1.0, 1.0])
    with sherlorch.trace(level=level) as tracker:
        x = torch.from_numpy(array)
        assert torch.isfinite(x * 2).all()
        array[0] = numpy.nan
        y = x * 3
    (culprit,) = tracker.diagnose(y).culprits
    assert culprit.origin == "outside"
    assert "did not look" in culprit.name


def test_what_another_thread_made_is_a_leaf() -> None:
    made = []
    with sherlorch.trace(level="aten") as tracker:
        thread = threading.Thread(target=lambda: made.append(torch.log(negative())))
        thread.start()
        thread.join()
        y = made[0] + 1
    assert tracker.diagnose(y).culprits[0].origin == "outside"


# What cannot be recorded.


class Planted(Exception):
    pass


def fail(*_: Any, **__: Any) -> Any:
    raise Planted("on purpose\nand more")


@LEVELS
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Recorder, "add_results"),
        (Recorder, "add_result"),
        (Recorder, "add_write"),
        (Recorder, "inputs"),
        (Recorder, "gather"),
        (Recorder, "where"),
        (Recorder, "tie"),
        (Recorder, "tie_made"),
        (Ledger, "settle"),
        (Ledger, "node_of"),
        (Ledger, "leaf"),
        (Ledger, "note_gradient"),
        (Memory, "read"),
        (Memory, "write"),
        (Memory, "adopt"),
        (Memory, "start_leaf"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_failure_while_recording_is_counted_and_told(
    level: str, owner: type, name: str, monkeypatch
) -> None:
    def program() -> Tensor:
        model = nn.Linear(2, 2)
        x = torch.ones(2, 2)
        x[0].mul_(2)
        torch.add(x, 1, out=torch.empty(2, 2))
        torch._foreach_mul_([x, x.clone()], 0.5)
        loss = torch.cat([model(x), x[:, :1].expand(2, 2)]).log().sum()
        loss.backward()
        return (loss + model.weight.grad.sum()).detach()

    torch.manual_seed(0)
    plain = program()
    monkeypatch.setattr(owner, name, fail)
    torch.manual_seed(0)
    with sherlorch.trace(level=level) as tracker:
        traced = program()
    assert torch.equal(plain, traced) or plain.isnan().all()
    unseen = tracker._recorder.unseen
    assert all("Planted: on purpose" in text and "\n" not in text for text in unseen)
    monkeypatch.undo()
    report = tracker.diagnose()
    assert report.coverage.not_seen == sum(unseen.values())
    if unseen:
        assert f"{report.coverage.not_seen} not seen" in str(report)
        assert "Planted: on purpose" in " ".join(str(report).split())


OUTSIDE = torch.ones(5)


@LEVELS
def test_failures_of_a_kind_are_told_once_with_their_number(level: str, monkeypatch) -> None:
    monkeypatch.setattr(Recorder, "first_sight", fail)
    with sherlorch.trace(level=level) as tracker:
        assert (OUTSIDE + 1).sum() + (OUTSIDE + 1).sum() == 20
    assert sorted(tracker._recorder.unseen.values()) == [1, 2, 3]  # eq, sum, add
    report = str(tracker.diagnose())
    assert "6 not seen" in report
    assert "3 x" in report


@LEVELS
def test_the_errors_of_the_program_are_its_own(level: str) -> None:
    with sherlorch.trace(level=level) as tracker:
        with pytest.raises(RuntimeError, match="size"):
            torch.ones(2) + torch.ones(3)
        with pytest.raises(RuntimeError):
            torch.ones(2).add_(torch.ones(3))
        with pytest.raises(IndexError):
            torch.ones(2)[5]
        after = torch.log(negative())
    assert tracker._recorder.unseen == {}
    assert not tracker.diagnose(after).ok


# What the tracer must not do.


@WAYS
def test_no_tensor_is_kept_alive(level: str, defer: bool) -> None:
    with ProvenanceTracker(level, _defer=defer) as tracker:
        x = torch.ones(1000, requires_grad=True)
        y = (x * 0).log()
        z = y.view(10, 100).t()
        z.sum().backward()
        gone = [weakref.ref(tensor) for tensor in (x, y, z, x.grad)]
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, y)]
        del x, y, z
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
    assert [storage.expired() for storage in storages] == [True] * 2
    assert not tracker.diagnose().ok


@WAYS
def test_results_gradients_and_random_numbers_stay_the_same(level: str, defer: bool) -> None:
    def step() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for divisor in (1.0, 1.0, 0.0):
            loss = (model(torch.randn(4, 8)) / divisor).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        parameters = [*model.parameters()]
        return [
            torch.rand(3),
            loss.detach(),
            *(p.detach() for p in parameters),
            *(p.grad for p in parameters),
        ]

    plain = step()
    with ProvenanceTracker(level, _defer=defer):
        traced = step()
    for one, two in zip(plain, traced):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@WAYS
@pytest.mark.parametrize("fast", [True, False])
def test_scans_are_hidden_from_modes_further_out(level: str, defer: bool, fast: bool) -> None:
    def program() -> None:
        x = torch.zeros(3, 3, requires_grad=True)
        bad = torch.log(x) - torch.log(x)
        part = bad.detach()[0]
        part.fill_(1.0)
        torch.stack([part, bad[1]]).sum().backward()

    plain = Watching()
    with plain, stand_in(level):
        program()
    outer = Watching()
    with outer, ProvenanceTracker(level, fast_shape_ops=fast, _defer=defer) as tracker:
        program()
    assert outer.seen == plain.seen
    assert tracker._recorder.unseen == {}


@WAYS
def test_the_tracer_does_not_see_its_own_looks(level: str, defer: bool) -> None:
    with ProvenanceTracker(level, _defer=defer) as tracker:
        x = torch.log(torch.zeros(3))
        seen = tracker._recorder.seq
        str(tracker.diagnose(x))
        str(tracker.diagnose())
        assert tracker.has_issue(x)
        assert tracker.node(x).has_inf
        assert len(tracker.graph) == len(tracker.nodes)
        assert tracker._recorder.seq == seen


@pytest.mark.parametrize("before", ["", "with sherlorch.trace(level): torch.log(x)"])
@LEVELS
def test_what_is_compiled_inside_runs_traced_without_a_word(level: str, before: str) -> None:
    """In a fresh process Dynamo is not loaded when the block begins."""
    program = f"""
import warnings, torch, sherlorch
warnings.simplefilter("error", UserWarning)
level, x = {level!r}, torch.ones(3)
{before}
with sherlorch.trace(level) as tracker:
    loss = torch.compile(lambda x: torch.log(x - 1).sum(), backend="eager")(x)
print(tracker.diagnose(loss).culprits[0].op_name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "log" in done.stdout
    assert not done.stderr


def mul(x: Tensor) -> Tensor:
    """A function of the user's that has the name of one that carries, and absorbs."""
    return handle_torch_function(mul, (x,), x) if has_torch_function_unary(x) else torch.nan_to_num(x)


ABSORBING: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled away by position": lambda x: torch.addmm(0, x, torch.ones(2, 2), torch.ones(2, 2)),
    "scaled away by keyword": lambda x: torch.addmm(x, torch.ones(2, 2), torch.ones(2, 2), beta=0),
    "a method": lambda x: x.addmm(0, torch.ones(2, 2), torch.ones(2, 2)),
    "a function of that name": mul,
    "an operator of that name": lambda x: torch.ops.sherlorch_tests.mul(x),
    "no rows": lambda x: F.linear(torch.ones(0, 2), x),
    "relu": lambda x: torch.relu(torch.nan_to_num(x)),
}


@pytest.fixture(scope="module")
def own_operator() -> Iterator[None]:
    library = torch.library.Library("sherlorch_tests", "DEF")
    library.define("mul(Tensor x) -> Tensor")
    library.impl("mul", torch.nan_to_num, "CompositeExplicitAutograd")
    yield
    library._destroy() if hasattr(library, "_destroy") else None


@pytest.mark.filterwarnings("ignore:This overload of addmm")
@LEVELS
@pytest.mark.parametrize("name", ABSORBING)
def test_a_bad_leaf_is_known_though_the_result_is_finite(name: str, level: str, own_operator: None) -> None:
    bad = torch.full((2, 2), torch.nan)
    with sherlorch.trace(level=level) as tracker:
        result = ABSORBING[name](bad)
    assert tracker.node(result).is_finite
    assert tracker.node(bad).has_nan
