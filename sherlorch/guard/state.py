"""What a step may change before an optimizer writes: remembered when it begins, put back when it fails.

On a clean step nothing large is copied. Parameters and optimizer state are not written before the look at the
gradients. Gradients of earlier steps are held by reference, and copied only once a step was seen to add to
them. Buffers are copied only where their version counter moved, or where they are so small that a copy is
cheaper than to ask.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

TINY = 8192  # elements; running statistics are smaller (batch norm writes them without moving their version)
PutBack = Callable[[], Any]


def keep(value: Any) -> PutBack:
    """Copy nested dicts, lists and tensors; what is returned puts them back, as often as it is called."""
    if isinstance(value, Tensor):
        return _keep_tensor(value)
    if isinstance(value, dict):
        return _keep_dict(value)
    if isinstance(value, list):
        items = [keep(item) for item in value]

        def back() -> Any:
            value[:] = [item() for item in items]
            return value

        return back
    return lambda: value


def _keep_tensor(tensor: Tensor) -> PutBack:
    with torch.no_grad():
        copy = tensor.detach().clone()

    def back() -> Tensor:
        with torch.no_grad():
            tensor.detach().copy_(copy)
        return tensor

    return back


def _keep_dict(value: dict[Any, Any]) -> PutBack:
    items = {key: keep(item) for key, item in value.items()}

    def back() -> Any:
        kept = {key: item() for key, item in items.items()}
        value.clear()
        value.update(kept)
        return value

    return back


def keep_optimizer(optimizer: Any) -> PutBack:
    """Parameters and state of an optimizer that is about to write although the step may still fail."""
    parameters = [
        _keep_tensor(parameter) for group in optimizer.param_groups for parameter in group["params"]
    ]
    state = keep(optimizer.state)

    def back() -> None:
        for parameter in parameters:
            parameter()
        state()

    return back


class Generators:
    """The random generators that a step may advance: torch's on each device, Python's, NumPy's if loaded."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]

    def state(self) -> list[PutBack]:
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        back: list[PutBack] = [
            lambda: torch.set_rng_state(torch_state),
            lambda: random.setstate(python_state),
        ]
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):
            numpy_state = numpy.random.get_state()
            back.append(lambda: numpy.random.set_state(numpy_state))
        back += [_device_generator(device) for device in self._devices]
        return back


def _device_generator(device: torch.device) -> PutBack:
    module = getattr(torch, device.type, None)
    if not hasattr(module, "get_rng_state"):
        return lambda: None
    assert module is not None
    place = () if device.type == "mps" else (device,)
    state = module.get_rng_state(*place)
    return lambda: module.set_rng_state(state, *place)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class _Buffer:
    """The last copy of one buffer, and whether steps were seen to write it."""

    __slots__ = ("copy", "steps", "tensor", "tiny", "version", "written")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.copy: Tensor | None = tensor.detach().clone()
        self.version = _version(tensor)
        self.tiny = tensor.numel() <= TINY
        self.written = False
        self.steps = 0

    def remember(self) -> None:
        """Make the copy current; drop that of a large buffer that a whole step left alone."""
        self.steps += 1
        version = _version(self.tensor)
        if version != self.version:
            self.written = True
        elif not self.tiny:
            if not self.written and self.steps == 2:
                self.copy = None
            return
        self.version = version
        if self.copy is None or self.copy.shape != self.tensor.shape:
            self.copy = self.tensor.detach().clone()
        else:
            self.copy.copy_(self.tensor)

    def put_back(self) -> bool:
        """False where the step wrote a buffer that no step had written, so that there is no copy."""
        if self.copy is None:
            self.written = True
            return _version(self.tensor) == self.version
        if self.tiny or _version(self.tensor) != self.version:
            self.tensor.detach().copy_(self.copy)
        return True


class State:
    """Everything that a guarded step may write before its optimizer does."""

    def __init__(self, models: Mapping[str, nn.Module], optimizers: list[Any]) -> None:
        self.models = models
        self.optimizers = optimizers
        self._modules = [module for model in models.values() for module in model.modules()]
        self._buffers: dict[int, _Buffer] = {}
        self._adds_to_gradients: bool | None = None  # unknown until a step began with gradients
        self._writes_parameters: set[int] = set()
        self._writes_arguments = False
        self._gradient_versions: dict[int, int] = {}
        self._generators = Generators({parameter.device for parameter in self.parameters()})

    def parameters(self) -> list[Tensor]:
        """Of the models and the optimizers, each once."""
        found = {
            id(p): p
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        for module in self._modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    found[id(parameter)] = parameter
        return list(found.values())

    def names(self) -> dict[int, str]:
        """``model.head.weight`` by the parameter's id."""
        found = {
            id(p): f"parameter {i} of {type(o).__name__}"
            for o in self.optimizers
            for i, p in enumerate(parameters_of(o))
        }
        for prefix, model in self.models.items():
            for name, parameter in model.named_parameters():
                found[id(parameter)] = f"{prefix}.{name}"
        return found

    def is_old(self, gradient: Tensor) -> bool:
        """Was it there when the step began?"""
        return id(gradient) in self._gradient_versions

    # Each step

    def remember(self, arguments: Any) -> None:
        """A step begins."""
        parameters = self._parameters = self.parameters()
        self._random = self._generators.state()
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        given = [gradient for _, gradient in self._gradients if gradient is not None]
        with torch.no_grad():
            self._remember_gradients(given)
            self._remember_buffers()
            self._versions = [parameter._version for parameter in parameters]
            wrote = self._writes_parameters
            self._copies = (
                [keep(parameter) for parameter in parameters if id(parameter) in wrote] if wrote else []
            )
            self._remember_arguments(arguments)
        self._groups = [
            [(group, dict(group)) for group in optimizer.param_groups] for optimizer in self.optimizers
        ]
        self._written: list[PutBack] = []
        self._kept: list[Any] = []
        self._lost: list[str] | None = None

    def _remember_gradients(self, given: list[Tensor]) -> None:
        self._gradient_versions = {id(gradient): gradient._version for gradient in given}
        copies = self._adds_to_gradients is not False
        self._gradient_copies = {id(gradient): gradient.clone() for gradient in given} if copies else {}

    def _remember_buffers(self) -> None:
        self._tables = [(module, dict(module._buffers)) for module in self._modules if module._buffers]
        if not self._tables:
            return
        current: dict[int, _Buffer] = {}
        for _, table in self._tables:
            for tensor in table.values():
                if tensor is None or id(tensor) in current:
                    continue
                buffer = self._buffers.get(id(tensor))
                if buffer is None or buffer.tensor is not tensor:
                    buffer = _Buffer(tensor)
                else:
                    buffer.remember()
                current[id(tensor)] = buffer
        self._buffers = current

    def _remember_arguments(self, arguments: Any) -> None:
        self._arguments = [
            (leaf, leaf._version)
            for leaf in tree_flatten(arguments)[0]
            if type(leaf) is Tensor and not leaf.is_inference()
        ]
        self._argument_copies = [keep(leaf) for leaf, _ in self._arguments] if self._writes_arguments else []

    def keep_before_write(self, optimizer: Any) -> None:
        """An optimizer is about to write, and the step may still fail afterwards."""
        if optimizer not in self._kept:
            self._kept.append(optimizer)
            self._written.append(keep_optimizer(optimizer))

    def keep_scaler(self, scaler: Any) -> None:
        """A GradScaler is used for the first time in this step."""
        self._written.append(keep(vars(scaler)))

    def notice_writes(self) -> None:
        """No optimizer has written yet: parameters written by now are copied at each step from now on."""
        for parameter, version in zip(self._parameters, self._versions):
            if parameter._version != version:
                self._writes_parameters.add(id(parameter))

    def settle(self) -> None:
        """The step was clean: learn what it wrote, and let go of what only a failure would need."""
        if self._gradient_versions:
            held = (gradient for _, gradient in self._gradients if gradient is not None)
            added = any(gradient._version != self._gradient_versions[id(gradient)] for gradient in held)
            if added or self._adds_to_gradients is None:
                self._adds_to_gradients = added
        if any(leaf._version != version for leaf, version in self._arguments):
            self._writes_arguments = True
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing of the step."""
        self._gradients, self._gradient_versions, self._gradient_copies = [], {}, {}
        self._copies, self._written, self._kept = [], [], []
        self._arguments, self._argument_copies, self._random, self._groups = [], [], [], []

    # On a fault

    def put_back(self) -> list[str]:
        """Make everything what it was when the step began; the names of what could not be.

        Can be called again after a replay.
        """
        lost: list[str] = []
        with torch.no_grad():
            if self._lost is None:
                self._find_lost_parameters(lost)
            for back in (*reversed(self._written), *self._copies, *self._argument_copies):
                back()
            for groups in self._groups:
                for group, values in groups:
                    group.clear()
                    group.update(values)
            self._put_back_gradients(lost)
            self._put_back_buffers(lost)
            if not self._argument_copies and any(
                leaf._version != version for leaf, version in self._arguments
            ):
                self._writes_arguments = True
                lost.append("the step's arguments")
        for back in self._random:
            back()
        if self._lost is None:
            self._lost = lost
        return self._lost

    def _find_lost_parameters(self, lost: list[str]) -> None:
        kept = {id(parameter) for optimizer in self._kept for parameter in parameters_of(optimizer)}
        names: dict[int, str] = {}
        for parameter, version in zip(self._parameters, self._versions):
            changed = parameter._version != version and id(parameter) not in self._writes_parameters
            if changed and id(parameter) not in kept:
                names = names or self.names()
                lost.append(names.get(id(parameter), "a parameter"))

    def _put_back_gradients(self, lost: list[str]) -> None:
        names: dict[int, str] = {}
        for parameter, gradient in self._gradients:
            if gradient is not None and gradient._version != self._gradient_versions[id(gradient)]:
                copy = self._gradient_copies.get(id(gradient))
                if copy is None:
                    names = names or self.names()
                    lost.append(f"{names.get(id(parameter), 'a parameter')}.grad")
                    self._adds_to_gradients = True
                    gradient = None
                else:
                    gradient.copy_(copy)
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def _put_back_buffers(self, lost: list[str]) -> None:
        for module, table in self._tables:
            module._buffers.clear()
            module._buffers.update(table)
            for name, tensor in table.items():
                buffer = self._buffers.get(id(tensor))
                if buffer is not None and not buffer.put_back():
                    lost.append(f"buffer {name} of {type(module).__name__}")


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
