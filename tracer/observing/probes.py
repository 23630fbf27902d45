"""Probes: fixed inputs on which a model is run between steps, so that its activations can be compared over time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tracer import walking
from tracer.observing.pytorch.tensors import leaves, unobservable

NO_PROBES = (
    "the model's parameters are distributed, so a pass of one rank waits for all others; evaluate it yourself, on all "
    "ranks, within `run.tag(name)`"
)
"""Why sharded models are not probed."""
PROBED = ("layer_inputs", "activations", "network_output")
"""What is published of a pass of a probe."""


class Probe:
    """Fixed inputs, and when they are due; see `tracer.observing.exporter.Exporter.probe`."""

    def __init__(self, name: str, inputs: Any, labels: Tensor | None, every: int, batch_size: int | None) -> None:
        self.name = name
        self.inputs = inputs
        self.labels = labels
        self.every = every
        self.batch_size = batch_size
        self.last: int | None = None

    def batches(self) -> Iterator[Any]:
        """Copies of the inputs, which a model may overwrite, at most `batch_size` datapoints at a time."""
        tensors = [tensor for _, tensor in leaves(self.inputs) if tensor.ndim]
        if self.batch_size is None or not tensors:
            yield map_tensors(self.inputs, Tensor.clone)
            return
        for begin in range(0, tensors[0].shape[0], self.batch_size):
            part = slice(begin, begin + self.batch_size)
            yield map_tensors(self.inputs, functools.partial(rows_of, part))

    def ready(self, model: nn.Module) -> bool:
        """Whether there are inputs for this model."""
        return True

    @staticmethod
    def call(model: nn.Module, inputs: Any) -> None:
        """Run a model on inputs, however it takes them."""
        if isinstance(inputs, Arguments):
            model(*inputs.args, **inputs.kwargs)
        elif isinstance(inputs, Mapping):
            model(**inputs)
        elif isinstance(inputs, tuple):
            model(*inputs)
        else:
            model(inputs)


@dataclasses.dataclass
class Arguments:
    """What a model was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Classes of arguments that no forward can change."""


class FirstInputs(Probe):
    """A probe of the first datapoints that the model is given: in an evaluation before it is due, else in the training.

    Parameters
    ----------
    name : str
        The tag.
    count : int
        Datapoints: rows along the first axis of the first tensor among the arguments.
    every : int
        Steps between two passes; the first one is after so many.
    """

    def __init__(self, name: str, count: int, every: int) -> None:
        super().__init__(name, None, None, every, None)
        self.count = count
        self.refusal = "the model was never called"
        """Why there are no inputs."""
        self._given: dict[bool, list[tuple[int, Arguments]]] = {}
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def settled(self) -> bool:
        """Whether the inputs are chosen; then it takes no more."""
        return self.inputs is not None

    def offer(self, model: nn.Module, evaluation: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep copies of what a model is called with, as far as they are wanted."""
        if self._model is None or self._model() is not model:
            self._model, self._given = weakref.ref(model), {}
        kept = self._given.setdefault(evaluation, [])
        have = sum(size for size, _ in kept)
        if have >= self.count or (kept and kept[-1][0] == 0):
            return
        call = Arguments(tuple(args), dict(kwargs))
        tensors = [tensor for _, tensor in leaves(call)]
        size = next((one.shape[0] for one in tensors if one.ndim), 0)
        if not size or not _unchanging(call) or any(unobservable(one) for one in tensors):
            self.refusal = "the model is called with something else than tensors and plain values, or without tensors"
            return
        if kept and not _alike(kept[0], (size, call)):
            kept.append((0, call))  # no more of these
            return
        part = slice(0, self.count - have)

        def copy_of(tensor: Tensor) -> Tensor:
            whole = tensor.detach()
            return (whole[part] if _has_rows(whole, size) else whole).clone()

        kept.append((min(size, self.count - have), map_tensors(call, copy_of)))

    def ready(self, model: nn.Module) -> bool:
        """Choose the inputs, if there are any; from then on they stay."""
        if not self.settled and self._model is not None and self._model() is model:
            for evaluation in (True, False):
                kept = [one for one in self._given.get(evaluation, ()) if one[0]]
                if kept and not self.settled:
                    self.inputs = _joined(kept)
            self._given = {}
        return self.settled and self._model is not None and self._model() is model


def _has_rows(tensor: Tensor, size: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == size


def _unchanging(value: Any) -> bool:
    """Whether all in a value but its tensors is of a kind that no forward can change, such as a cache is not."""
    if value is None or isinstance(value, (Tensor, *_PLAIN)):
        return True
    if isinstance(value, Mapping):
        return all(_unchanging(part) for part in value.values())
    if isinstance(value, tuple | list):
        return all(_unchanging(part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_unchanging(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def _alike(first: tuple[int, Arguments], other: tuple[int, Arguments]) -> bool:
    """Whether two calls have the same tensors, but for the number of their rows."""
    one, another = leaves(first[1]), leaves(other[1])
    return [path for path, _ in one] == [path for path, _ in another] and all(
        a.dtype == b.dtype
        and _has_rows(a, first[0]) == _has_rows(b, other[0])
        and (a.shape[1:] == b.shape[1:] if _has_rows(a, first[0]) else a.shape == b.shape)
        for (_, a), (_, b) in zip(one, another, strict=True)
    )


def _joined(calls: Sequence[tuple[int, Arguments]]) -> Arguments:
    """One call with the rows of several."""
    size, first = calls[0]
    if len(calls) == 1:
        return first
    others = [iter([tensor for _, tensor in leaves(call)]) for _, call in calls[1:]]

    def joined(tensor: Tensor) -> Tensor:
        more = [next(one) for one in others]
        return torch.cat([tensor, *more]) if _has_rows(tensor, size) else tensor

    whole: Arguments = map_tensors(first, joined)
    return whole


def rows_of(part: slice, tensor: Tensor) -> Tensor:
    """A copy of some rows of a tensor; of the whole of a scalar."""
    return (tensor[part] if tensor.ndim else tensor).clone()


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure as `leaves` looks into, with the function's results for the tensors in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        same: Any = copy.copy(value)  # of its own class, which may have attributes
        for key, part in value.items():
            same[key] = map_tensors(part, function)
        return same
    if isinstance(value, Mapping):
        return {key: map_tensors(part, function) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, function) for part in value]
        if isinstance(value, list):
            return parts
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(same, field.name, map_tensors(getattr(value, field.name), function))
        return same
    return value


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients or autocast; afterwards modes, buffers and random generators are as before."""
    modes = [(one, one.training) for one in walking.modules(model)]
    buffers = [
        (one, name, buffer, buffer.detach().clone(), buffer._version)
        for one in walking.modules(model)
        for name, buffer in one._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    devices = sorted({p.device.index or 0 for p in walking.parameters(model) if p.device.type == "cuda"})
    attributes = [(one, _own(one)) for one in walking.modules(model)]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    device_type = next((p.device.type for p in walking.parameters(model)), "cpu")
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.autocast(device_type, enabled=False):
            model.eval()
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for one, own in attributes:
            now = _own(one)
            vars(one).update({name: value for name, value in own.items() if now.get(name, _NOTHING) is not value})
            for name in now.keys() - own.keys():
                del vars(one)[name]
        for one, mode in modes:
            one.training = mode
        with torch.no_grad():
            for one, name, buffer, content, version in buffers:
                if buffer._version != version or not _same_bytes(buffer, content):
                    buffer.copy_(content)
                if one._buffers.get(name) is not buffer:
                    one._buffers[name] = buffer


_NOTHING = object()
_OF_TORCH = frozenset(vars(nn.Module()))


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module has besides those of every module, such as the state of a recurrent one."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same, where that is easily told: torch's batch norm counts no versions."""
    easy = type(one) is Tensor and one.layout is torch.strided and not (one.is_quantized or one.is_meta)
    if not easy or one.is_conj() or one.is_neg():
        return True
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def joinable(parts: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Whether tensors of batches of these sizes are, one after another, the tensor of all: so many rows a datapoint."""
    if len(sizes) == 1:
        return True
    return len(parts) == len(sizes) and all(
        part.ndim > 0 and part.shape[0] * sizes[0] == parts[0].shape[0] * size and part.shape[0] % size == 0
        for part, size in zip(parts, sizes, strict=True)
    )
