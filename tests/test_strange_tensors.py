"""Tensors and settings that few programs have: results as untraced, nodes that tell the truth."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from needs import (
    has_torch,
    needs,
    needs_float8,
    needs_jagged,
    needs_torch,
    skip_as_subclass,
    skip_unseen_parts,
)
from stand_in import stand_in
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

import sherlorch
from sherlorch import ProvenanceTracker

LEVELS = ("function", "aten")
BAD = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])  # 1 / BAD has an Inf, BAD / BAD a NaN
PROGRAMS: list[Any] = []


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def prototypes_do_not_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*(beta state|prototype|invariant checks|not.*stable|deprecated).*"
        )
        yield


def program(run: Callable[[], Any]) -> Callable[[], Any]:
    """A program to run untraced and traced; its tensors are compared, and asked for their nodes."""
    return program_that()(run)


def program_that(*marks: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """The same for a program that an older torch cannot run."""

    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS.append(pytest.param(run, id=run.__name__, marks=marks))
        return run

    return add


def truth(tensor: Tensor) -> tuple[bool, bool]:
    """Has it NaN, has it Inf?"""
    values = dense(tensor)
    return bool(values.isnan().any()), bool(values.isinf().any())


def dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    if type(tensor) is not Tensor and hasattr(tensor, "to_local"):
        return tensor.to_local()
    if tensor.is_complex():  # which have no `nan_to_num` in torch 2.0
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 and tensor.is_floating_point() else tensor


def check(tracker: ProvenanceTracker, expected: Any, actual: Any) -> None:
    """Equal results, and nodes that say what they hold."""
    left, right = tree_flatten(expected)[0], tree_flatten(actual)[0]
    assert len(left) == len(right)
    for one, two in zip(left, right):
        if not isinstance(one, Tensor):
            assert one == two
            continue
        assert type(one) is type(two)
        assert one.is_nested or one.shape == two.shape
        if one.is_meta:
            continue
        assert torch.equal(dense(one).isnan(), dense(two).isnan())
        assert torch.equal(dense(one).nan_to_num(7.0), dense(two).nan_to_num(7.0))
        if tracker.level == "function" and is_gradient(two):
            continue
        node = tracker.node(two)
        assert (node.has_nan, node.has_inf) == truth(two), node.summary()
        report = tracker.diagnose(two)
        assert report.ok == (not any(truth(two)))
        assert str(report)
    assert tracker.diagnose().coverage.unseen == {}
    assert tracker.graph.number_of_nodes() == len(tracker.nodes)


GRADIENTS: list[Tensor] = []


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    GRADIENTS.append(tensor.grad)
    return tensor.grad


def is_gradient(tensor: Tensor) -> bool:
    return any(tensor is gradient for gradient in GRADIENTS)


def leaf(values: Tensor = BAD) -> Tensor:
    return values.clone().requires_grad_()


# Kinds of tensors.


@program_that(needs_float8)
def float8() -> Any:
    big = BAD * 1e4
    narrow, wide = big.to(torch.float8_e4m3fn), (1 / BAD).to(torch.float8_e5m2)
    nan = (BAD / BAD).to(torch.float8_e4m3fn)
    return narrow, wide, nan, narrow.float() * 2, wide.view(3, 2), wide.float(), nan.clone()


@program
def quantized() -> Any:
    q = torch.quantize_per_tensor(BAD, 0.1, 0, torch.qint8)
    channels = torch.quantize_per_channel(BAD, torch.ones(2), torch.zeros(2).long(), 0, torch.quint8)
    return q, channels, q.dequantize() / 0, q.reshape(3, 2), q.int_repr(), q.clone()


@program
def sparse_coo() -> Any:
    s = (1 / BAD).to_sparse()
    made = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, float("nan")]), (2, 2))
    return (
        s,
        s.coalesce(),
        made,
        made * 2,
        s.to_dense(),
        torch.sparse.mm(s, torch.ones(3, 2)),
        made + made,
        s.t(),
    )


@program
def sparse_coo_with_gradient() -> Any:
    x = leaf()
    s = x.to_sparse()
    y = torch.sparse.sum(s * 2)
    y.backward()
    return s, y, gradient_of(x)


@program
def sparse_embedding_gradient() -> Any:
    table = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    (table(torch.tensor([1, 1, 2])).sum() / 0).backward()
    optimizer.step()
    return table.weight


@program
def sparse_csr() -> Any:
    s = (1 / BAD).to_sparse_csr()
    made = torch.sparse_csr_tensor([0, 1, 2], [0, 1], torch.tensor([1.0, float("inf")]), (2, 2))
    return s, s * 2, s.to_dense(), made, made @ torch.ones(2, 2), s.clone(), s.values()


@program
def other_sparse() -> Any:
    x = torch.eye(4) / 0
    return (
        x.to_sparse_csc(),
        x.to_sparse_bsr((2, 2)),
        x.to_sparse_bsc((2, 2)),
        x.to_sparse_bsr((2, 2)).to_dense(),
    )


@program
def nested_strided() -> Any:
    n = torch.nested.nested_tensor([1 / BAD, torch.ones(1, 3)])
    return n, n * 2, n.to_padded_tensor(0.0), n.to_padded_tensor(1.0) - 1


@program_that(needs_jagged)
def nested_jagged() -> Any:
    n = torch.nested.nested_tensor([1 / BAD, torch.ones(1, 3)], layout=torch.jagged)
    return n, n * 2, n.values(), n.sin(), F.layer_norm(n, (3,)), n.unbind()[1]


@program_that(needs_jagged)
def nested_jagged_with_gradient() -> Any:
    x = leaf()
    n = torch.nested.as_nested_tensor([x, torch.ones(1, 3)], layout=torch.jagged)
    y = n.log().values().sum()
    y.backward()
    return y, gradient_of(x)


@program
def complex_and_its_views() -> Any:
    z = torch.complex(1 / BAD, BAD)
    conj, imag, real = z.conj(), z.conj().imag, torch.view_as_real(z)
    return (
        z,
        conj,
        imag,
        z.real,
        real,
        z.imag,
        conj * 2,
        imag + 1,
        torch.view_as_complex(real),
        z.abs(),
        conj.resolve_conj(),
    )


@program
def writes_through_complex_views() -> Any:
    z = torch.complex(torch.ones(2, 3), BAD.clone())
    z.imag.div_(0)
    w = torch.ones(2, 3, dtype=torch.complex64)
    torch.view_as_real(w)[0, 0, 1] = float("nan")
    neg = torch.ones(2, dtype=torch.complex64).conj().imag
    neg.add_(float("inf"))
    return z, z.real, w, w[1], neg


@program
def complex_gradient() -> Any:
    x = leaf()
    y = torch.fft.ifft(torch.fft.fft(x) / 0).abs().sum()
    y.backward()
    return y, gradient_of(x)


@program
def no_elements() -> Any:
    x = torch.empty(0, 3)
    return (
        x,
        x / 0,
        x.sum(),
        x.mean(),
        torch.cat([x, BAD]),
        x.view(3, 0),
        torch.zeros(0).prod(),
        x.softmax(-1),
    )


@program
def no_dimensions() -> Any:
    x = torch.tensor(0.0)
    y = x / x
    return x, y, y.clone(), x.log(), x.log().exp(), torch.tensor(float("inf")) * x, x.expand(3), y.reshape(1)


@program
def meta_tensors() -> Any:
    x = torch.empty(2, 3, device="meta")
    model = nn.Linear(3, 4, device="meta")
    y = model(x) / 0
    y.add_(1)
    y.sum().backward()
    return y, model.weight.grad


@program
def fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = torch.ones(2, 3, requires_grad=True)
        y = (nn.Linear(3, 4)(x) / 0).relu_()
        y.sum().backward()
        shapes = tuple(y.shape), tuple(x.grad.shape)
    fake = mode.from_tensor(BAD)
    with mode:
        return shapes, tuple((fake / 0).t().shape)


@program
def parametrised_weights() -> Any:
    weight_norm = getattr(nn.utils.parametrizations, "weight_norm", nn.utils.weight_norm)  # the older way
    model = weight_norm(nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    y = model(BAD)
    y.sum().backward()
    return y, model.weight


@program
def spectral_norm() -> Any:
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    return model(BAD), model(1 / BAD)


@program
def tied_weights() -> Any:
    torch.manual_seed(0)
    embed, head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    head.weight = embed.weight
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    loss = (head(embed(torch.tensor([0, 1]))) / 0).sum()
    loss.backward()
    optimizer.step()
    return loss, embed.weight, head.weight


class Tagged(Tensor):
    """A subclass with the default __torch_function__."""


class Logged(Tensor):
    """A subclass that runs its own code around each function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@program
def function_subclasses() -> Any:
    tagged, logged = BAD.clone().as_subclass(Tagged), BAD.clone().as_subclass(Logged)
    written = logged + 1
    written[0] = float("nan")
    written.mul_(2)
    return (
        tagged / 0,
        logged / 0,
        (tagged / 0).sum(),
        logged.t(),
        tagged.clone() - 1,
        written,
        written.view(3, 2),
    )


@program
def subclass_parameter() -> Any:
    weight = nn.Parameter(BAD.clone().as_subclass(Tagged))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    loss = (weight / weight).sum()
    loss.backward()
    optimizer.step()
    return loss, weight


class Wrapped(Tensor):
    """A wrapper around a tensor that computes in __torch_dispatch__."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map(
            lambda value: value.inner if isinstance(value, Wrapped) else value, (args, kwargs or {})
        )
        out = func(*plain[0], **plain[1])
        return tree_map(lambda value: Wrapped(value) if isinstance(value, Tensor) else value, out)


@program
def dispatch_subclass() -> Any:
    x = Wrapped(BAD.clone())
    y = (x + 1) / 0
    z = x * 2
    return tuple(value.inner.clone() for value in (y, y.t(), z, z / z))


@program
def from_numpy() -> Any:
    numpy = pytest.importorskip("numpy")
    array = numpy.array([0.0, 1.0], dtype="float32")
    x = torch.from_numpy(array)
    y = x.log()
    array[1] = float("nan")
    return y, x * 2, torch.as_tensor(array) + 1


# Transforms and autograd.


@program
def vmap() -> Any:
    return torch.func.vmap(lambda row: row / row.sum().clamp_max(0))(BAD), torch.vmap(torch.log, in_dims=1)(
        BAD
    )


@program
def func_grad() -> Any:
    gradient = torch.func.grad(lambda x: x.sqrt().sum())(BAD)
    value = torch.func.grad_and_value(lambda x: x.log().sum())(BAD)
    return gradient * 1, value[0] + 0, value[1] + 0


@program
def jvp_and_jacobians() -> Any:
    y, tangent = torch.func.jvp(torch.sqrt, (BAD,), (torch.ones_like(BAD),))
    jacobian = torch.func.jacrev(torch.sqrt)(BAD[0])
    forward = torch.func.jacfwd(torch.sqrt)(BAD[0])
    hessian = torch.func.hessian(lambda x: x.sqrt().sum())(BAD[0])
    return y + 0, tangent + 0, jacobian + 0, forward + 0, hessian + 0


@program
def vmap_of_grad() -> Any:
    weight = torch.ones(3)
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: (w * x).sum().log()), in_dims=(None, 0))
    return per_sample(weight, BAD) + 0, per_sample(weight, BAD * 0) + 0


@program
def functional_call() -> Any:
    model = nn.Linear(3, 2, bias=False)
    return torch.func.functional_call(model, {"weight": BAD[:2] / 0}, (torch.ones(3),))


@program
def saved_tensors_hooks() -> Any:
    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
        y = (x.sqrt() * x).sum()
    with torch.autograd.graph.save_on_cpu():
        z = (x.log() * 2).sum()
    (y + z).backward()
    return y, z, gradient_of(x)


def block(x: Tensor) -> Tensor:
    return (x.sqrt() * x).sin()


@program
def both_checkpoints() -> Any:
    grads = []
    for reentrant in (True, False):
        x = leaf()
        y = checkpoint(block, x * 1, use_reentrant=reentrant)
        y.sum().backward()
        grads.append((y, gradient_of(x)))
    return grads


@program
def double_backward() -> Any:
    x = leaf()
    (first,) = torch.autograd.grad(x.sqrt().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    first.sum().backward()
    return first, second, gradient_of(x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.log()


@program
def custom_function() -> Any:
    x = leaf()
    y = Cube.apply(x)
    y.sum().backward()
    return y, gradient_of(x)


def spoil(parameter: Tensor) -> None:
    gradient_of(parameter).mul_(float("nan"))


@program
def hooks_that_change_gradients() -> Any:
    x = leaf()
    y = x * 2
    y.register_hook(lambda gradient: gradient / 0)
    y.sum().backward()
    model = nn.Linear(3, 2, bias=False)
    nn.init.ones_(model.weight)
    model.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] / 0,))
    v = leaf()
    model(v).sum().backward()
    return y, gradient_of(x), gradient_of(v)


@program_that(needs(hasattr(Tensor, "register_post_accumulate_grad_hook"), "2.1", "hooks after accumulation"))
def hook_after_accumulation() -> Any:
    w = leaf()
    w.register_post_accumulate_grad_hook(spoil)
    (w * 2).sum().backward()
    return w, gradient_of(w)


@program
def gradients_set_by_hand() -> Any:
    x = leaf()
    x.grad = torch.zeros_like(x) / 0
    nn.utils.clip_grad_norm_([x], 1.0)
    with torch.no_grad():
        x -= 0.1 * x.grad
        x.data.add_(1)
    return x, x.detach()


# Settings.


@program
def inference_mode() -> Any:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    with torch.inference_mode():
        y = model(BAD)
        y.div_(0)
        return y, y.t(), y.clone(), y[0].add_(1), model(1 / BAD)


@program
def autocast() -> Any:
    x = leaf()
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 3e38)
    nn.init.zeros_(model.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
        z = F.softmax(y, -1)
    z.sum().backward()
    return y, z, gradient_of(x)


@program
def data_loader() -> Any:
    data = torch.utils.data.TensorDataset(BAD, torch.tensor([0, 1]))
    return [batch[0] / 0 for batch in torch.utils.data.DataLoader(data, batch_size=1)]


@program
def data_loader_workers() -> Any:
    data = torch.utils.data.TensorDataset(BAD, torch.tensor([0, 1]))
    loader = torch.utils.data.DataLoader(data, batch_size=1, num_workers=1)
    return [batch[0] / 0 for batch in loader]


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@program
def other_modes_inside() -> Any:
    x = leaf()
    with Functions(), Kernels():
        y = (x / x) @ torch.ones(3, 2)
        y.sum().backward()
    return y, gradient_of(x)


@program_that(needs_torch("2.1", "FlopCounterMode"))
def flop_counter_inside() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    x = leaf()
    with Functions(), Kernels(), FlopCounterMode(display=False) as flops:
        y = (x / x) @ torch.ones(3, 2)
        y.sum().backward()
    return y, gradient_of(x), flops.get_total_flops()


@program
def scaled_dot_product_attention() -> Any:
    q = leaf(torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)))
    mask = torch.full((4, 4), float("-inf"))
    mask[:, 0] = 0
    good = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    mask = torch.full((4, 4), float("-inf"))
    scores = (q @ q.transpose(-1, -2) + mask).softmax(-1)
    (good.sum() + scores.sum()).backward()
    return good, scores, gradient_of(q)


@program
def multiprocessing_shared_memory() -> Any:
    x = BAD.clone().share_memory_()
    x.div_(0)
    return x, x + 1


@program
def storage_changes_under_a_tensor() -> Any:
    x = BAD.clone()
    x.set_(torch.full((4,), float("inf")))
    y = BAD.clone()
    y.data = torch.tensor([float("nan")])
    z = torch.ones(2)
    z.resize_(1)
    w, v = torch.ones(2), torch.zeros(2) / 0
    torch.utils.swap_tensors(w, v) if hasattr(torch.utils, "swap_tensors") else None
    return x, y, z, w, v


@program
def training_step() -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for divisor in (1.0, 0.0):
        mask = torch.full((2, 2), float("-inf"))
        mask[:, 0] = 0
        hidden = checkpoint(model, torch.randn(2, 3), use_reentrant=False)
        hidden.register_hook(lambda gradient: gradient * 2)
        loss = ((hidden + mask).softmax(-1).log().clamp_min(-9) / divisor).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss, *model.parameters()


@pytest.mark.parametrize("run", PROGRAMS)
def test_results_are_as_untraced_and_nodes_tell_the_truth(run: Callable[[], Any], level: str) -> None:
    if run in (function_subclasses, subclass_parameter):
        skip_as_subclass(level == "aten")
    GRADIENTS.clear()
    torch.manual_seed(0)
    expected = run()
    GRADIENTS.clear()
    torch.manual_seed(0)
    with sherlorch.trace(level=level) as tracker:
        actual = run()
    check(tracker, expected, actual)


class Listening:
    """A mode that keeps the names of all calls that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __handle(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func).partition(" at 0x")[0])
        return func(*args, **(kwargs or {}))

    __torch_function__ = __torch_dispatch__ = __handle


class ListeningToFunctions(Listening, TorchFunctionMode):
    pass


class ListeningToKernels(Listening, TorchDispatchMode):
    pass


def heard(run: Callable[[], Any], mode: type, order: str, tracing: AbstractContextManager[Any]) -> list[str]:
    """What a mode outside or inside of the traced block sees of a program."""
    GRADIENTS.clear()
    torch.manual_seed(0)
    listening = mode()
    first, second = (tracing, listening) if order == "inside" else (listening, tracing)
    with first, second:
        run()
    return listening.calls


@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("mode", [ListeningToFunctions, ListeningToKernels])
@pytest.mark.parametrize("run", PROGRAMS)
def test_another_mode_sees_what_it_sees_untraced(
    run: Callable[[], Any], mode: type, order: str, level: str
) -> None:
    if run in (function_subclasses, subclass_parameter):
        skip_as_subclass(level == "aten" or mode is ListeningToKernels)
    heard(run, mode, order, nullcontext())  # what is cached on first use
    untraced = heard(run, mode, order, stand_in(level) if mode is ListeningToKernels else nullcontext())
    assert untraced or (run is fake_tensors and not has_torch("2.1"))  # of which 2.0 shows no kernel
    traced = heard(run, mode, order, sherlorch.trace(level=level))
    if unwraps_first(run, mode, order, level):
        assert traced != untraced
    else:
        assert traced == untraced


def unwraps_first(run: Callable[[], Any], mode: type, order: str, level: str) -> bool:
    """Does a subclass unwrap itself for the tracer before a mode further out sees the call?"""
    wraps = run in (nested_jagged, nested_jagged_with_gradient)
    return wraps and (mode, order, level) == (ListeningToKernels, "outside", "aten")


def nested(first: Tensor) -> Tensor:
    return torch.nested.nested_tensor([first, torch.ones(1, 3)])


ON_NESTED: dict[str, Callable[[Tensor], Any]] = {
    "unbind": lambda n: n.unbind(),
    "select a part": lambda n: n.select(0, 0),
    "select the other part": lambda n: n[1],
    "select a column": lambda n: n.select(2, 0),
    "narrow": lambda n: n.narrow(0, 1, 1),
    "chunk": lambda n: n.chunk(3, -1),
    "split": lambda n: n.split([1, 2], -1),
    "split_with_sizes": lambda n: torch.split_with_sizes(n, [1, 2], -1),
    "parts of a chunk": lambda n: n.chunk(3, -1)[0].unbind(),
    "a chunk computed with": lambda n: n.chunk(3, -1)[1] * 2,
    "values": lambda n: n.values(),
    "to_padded_tensor": lambda n: n.to_padded_tensor(0.0),
    "transpose": lambda n: n.transpose(1, 2).unbind()[0].sum(),
    "contiguous": lambda n: n.transpose(1, 2).contiguous(),
    "reshape": lambda n: n.reshape(2, -1, 3),
    "squeeze": lambda n: n.unsqueeze(1).squeeze(1),
    "clone": lambda n: n.clone().unbind(),
    "detach": lambda n: n.detach(),
    "to": lambda n: n.to(torch.float64),
    "cat": lambda n: torch.cat([n, n]),
    "as_nested_tensor": lambda n: torch.nested.as_nested_tensor([n[0], n[1]]),
    "mul": lambda n: n * 2,
    "add": lambda n: n + n,
    "relu": lambda n: n.relu(),
    "softmax": lambda n: n.softmax(-1),
    "sum": lambda n: n.sum(-1, keepdim=True),
    "linear": lambda n: F.linear(n, torch.ones(2, 3)),
    "matmul": lambda n: n @ n.transpose(1, 2),
    "attention": lambda n: F.scaled_dot_product_attention(n, n, n),
    "in place": lambda n: n.mul_(2).unbind(),
    "fill": lambda n: n.fill_(1.0),
}


@pytest.mark.parametrize("first", [BAD + 1, 1 / BAD], ids=["clean", "bad"])
@pytest.mark.parametrize("name", ON_NESTED)
def test_strided_nested_tensors(name: str, first: Tensor, level: str) -> None:
    if name == "select the other part":
        skip_unseen_parts(level)

    def run() -> Any:
        n = nested(first * 1.0)
        return ON_NESTED[name](n), n

    try:
        expected = run()
    except (RuntimeError, NotImplementedError) as problem:  # the program by itself, which nobody traces yet
        pytest.skip(f"this torch cannot: {str(problem).partition('. ')[0]}")
    with sherlorch.trace(level=level) as tracker:
        actual = run()
    check(tracker, expected, actual)


def test_modes_nested_in_each_other(level: str) -> None:
    with sherlorch.trace(level="aten") as outer, sherlorch.trace(level="function") as inner:
        y = (BAD / BAD).sum()
    with outer, inner, sherlorch.trace(level=level) as third, outer:
        z = (BAD / 0).sum()
    for tracker, tensor in ((outer, y), (inner, y), (outer, z), (inner, z), (third, z)):
        node = tracker.node(tensor)
        assert (node.has_nan, node.has_inf) == truth(tensor)
        assert "div" in tracker.diagnose(tensor).culprits[0].op_name
        assert tracker.diagnose().coverage.unseen == {}


def test_each_thread_traces_its_own(level: str) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        with sherlorch.trace(level=level) as tracker:
            x = torch.full((8,), float(number), requires_grad=True)
            for _ in range(20):
                y = (x / (x if number % 2 else x * 0)).log().sum()
                y.backward()
                node = tracker.node(y)
                if (node.has_nan, node.has_inf) != truth(y):
                    wrong.append(node.summary())
        if tracker.diagnose().coverage.unseen or tracker.diagnose(y).ok != bool(number % 2):
            wrong.append(f"{number}: {tracker.diagnose(y)}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_another_thread_made_is_a_leaf_here(level: str) -> None:
    made: list[Tensor] = []
    with sherlorch.trace(level=level) as tracker:
        thread = threading.Thread(target=lambda: made.append(1 / BAD))
        thread.start()
        thread.join()
        y = made[0] * 2
    culprit = tracker.diagnose(y).culprits[0]
    assert culprit.origin == "outside"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A gloo group of this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    path = tmp_path_factory.mktemp("group") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield distributed
    distributed.destroy_process_group()


def test_collectives(group: Any, level: str) -> None:
    def run() -> Any:
        x = 1 / BAD
        work = group.all_reduce(x, async_op=True)
        work.wait()
        y = BAD / BAD
        group.all_reduce(y)
        parts = [torch.zeros(2, 3)]
        group.all_gather(parts, x)
        one = torch.ones(2)
        group.broadcast(one, 0)
        return x, y, x + y, parts[0], parts[0] * 2, one

    expected = run()
    with sherlorch.trace(level=level) as tracker:
        actual = run()
    for left, right in zip(expected, actual):
        assert torch.equal(left.nan_to_num(7), right.nan_to_num(7))
        node = tracker.node(right)
        assert (node.has_nan, node.has_inf) == truth(right), node.summary()


def test_data_parallel_model(group: Any, level: str) -> None:
    def run() -> Any:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        y = model(BAD) / 0
        y.sum().backward()
        return y, gradient_of(model.module.weight)

    GRADIENTS.clear()
    expected = run()
    with sherlorch.trace(level=level) as tracker:
        y, gradient = run()
    assert torch.equal(expected[0].nan_to_num(7), y.nan_to_num(7))
    assert torch.equal(expected[1].nan_to_num(7), gradient.nan_to_num(7))
    assert "div" in tracker.diagnose(y).culprits[0].op_name


@needs_torch("2.2", "device meshes")
@pytest.mark.filterwarnings("ignore:DTensor random operators")  # of torch 2.4
def test_distributed_tensor(group: Any, level: str) -> None:
    tensor = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(tensor, "distribute_tensor"):  # before torch 2.5
        tensor = pytest.importorskip("torch.distributed._tensor")
    mesh = tensor.init_device_mesh("cpu", (1,)) if hasattr(tensor, "init_device_mesh") else None
    mesh = mesh or torch.distributed.device_mesh.init_device_mesh("cpu", (1,))

    def run() -> Any:
        x = tensor.distribute_tensor(BAD.clone(), mesh, [tensor.Shard(0)])
        y = (x / x).sum(0)
        return y.to_local().clone(), (x + 1).to_local().clone(), y.full_tensor() * 2

    expected = run()
    with sherlorch.trace(level=level) as tracker:
        actual = run()
    for left, right in zip(expected, actual):
        assert torch.equal(left.nan_to_num(7), right.nan_to_num(7))
        node = tracker.node(right)
        assert (node.has_nan, node.has_inf) == truth(right), node.summary()
