"""Probes: fixed inputs on which a model is run between steps, so that its activations can be compared over time."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tracer import walking
from tracer.tensors import leaves

NO_PROBES = (
    "the model's parameters are distributed, so a pass of one rank waits for all others; evaluate it yourself, on all "
    "ranks, within `run.tag(name)`"
)
"""Why sharded models are not probed."""
PROBED = ("layer_inputs", "activations", "network_output")
"""What is published of a pass of a probe."""


class Probe:
    """Fixed inputs, and when they are due; see `tracer.exporter.Exporter.probe`."""

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

    @staticmethod
    def call(model: nn.Module, inputs: Any) -> None:
        """Run a model on inputs, however it takes them."""
        if isinstance(inputs, Mapping):
            model(**inputs)
        elif isinstance(inputs, tuple):
            model(*inputs)
        else:
            model(inputs)


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
    python_state, numpy_state = random.getstate(), np.random.get_state()
    device_type = next((p.device.type for p in walking.parameters(model)), "cpu")
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.autocast(device_type, enabled=False):
            model.eval()
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for one, mode in modes:
            one.training = mode
        with torch.no_grad():
            for one, name, buffer, content, version in buffers:
                if buffer._version != version or not _same_bytes(buffer, content):
                    buffer.copy_(content)
                if one._buffers.get(name) is not buffer:
                    one._buffers[name] = buffer


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
