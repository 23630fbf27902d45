"""Restores everything that a pass of our own through a model may change."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from tracer import walking
from tracer.observing.pytorch.tensors import bytes_of


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, without gradients and autocast; restore modes, buffers, attributes and generators."""
    modes = [(one, one.training) for one in walking.modules(model)]
    try:
        with restored(model), torch.no_grad():
            model.eval()
            yield
    finally:
        for one, mode in modes:
            one.training = mode


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Disable autocast; restore a model's buffers, its modules' attributes, and all random generators.

    The contents of attributes that are tensors or Python containers are restored too, recursively.
    """
    buffers = [
        (one, name, buffer, buffer.detach().clone(), buffer._version)
        for one in walking.modules(model)
        for name, buffer in one._buffers.items()
        if buffer is not None and not buffer.is_inference()
    ]
    devices = sorted({p.device.index or 0 for p in walking.parameters(model) if p.device.type == "cuda"})
    attributes = [(one, _own(one)) for one in walking.modules(model)]
    contents = _Contents(value for _, own in attributes for value in own.values())
    python_state, numpy_state = random.getstate(), np.random.get_state()
    device_type = next((p.device.type for p in walking.parameters(model)), "cpu")
    try:
        with torch.random.fork_rng(devices=devices), torch.autocast(device_type, enabled=False):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        contents.restore()
        for one, own in attributes:
            now = _own(one)
            vars(one).update({name: value for name, value in own.items() if now.get(name, _NOTHING) is not value})
            for name in now.keys() - own.keys():
                del vars(one)[name]
        with torch.no_grad():
            for one, name, buffer, content, version in buffers:
                if buffer._version != version or not _same_bytes(buffer, content):
                    buffer.data.copy_(content)  # through `data`, which a graph that saved the buffer does not notice
                if one._buffers.get(name) is not buffer:
                    one._buffers[name] = buffer


class _Contents:
    """The contents of lists, dictionaries, sets and tensors, recursively, to be restored.

    A module may hold its whole data set, so tensors above `_LARGE` bytes, and values after the first `_MOST`, are not
    restored.

    Parameters
    ----------
    values : iterable
        Values of other classes are ignored.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        seen, waiting = set[int](), deque(values)
        while waiting and len(seen) < _MOST:  # breadth first: attributes before their contents
            value = waiting.popleft()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if type(value) in _CONTAINERS:
                self._containers.append((value, value.copy()))
                waiting += value.values() if isinstance(value, Mapping) else value
            elif type(value) is tuple:
                waiting += value
            elif _can_be_put_back(value):
                self._tensors.append((value, value.detach().clone(), value._version))

    def restore(self) -> None:
        """Restore the contents in place."""
        for container, before in self._containers:
            if _held(container) != _held(before):  # an unchanged container may be in use by a loop
                container.clear()
                (container.extend if isinstance(container, list | deque) else container.update)(before)
        with torch.no_grad():
            for tensor, before, version in self._tensors:
                if tensor._version != version:
                    tensor.data.copy_(before)


def _held(container: Any) -> Any:
    """The items of a container, by identity."""
    ids = [*map(id, container), *map(id, container.values() if isinstance(container, Mapping) else ())]
    return set(ids) if isinstance(container, set) else ids


def _can_be_put_back(value: Any) -> bool:
    plain = type(value) is Tensor and value.layout is torch.strided
    return plain and not value.is_inference() and value.nbytes <= _LARGE


_MOST: Final = 10_000
_LARGE: Final = 16 << 20
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_NOTHING = object()
_OF_TORCH = frozenset(vars(nn.Module()))


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes that a module's class adds to those of `nn.Module`, such as a recurrent network's state."""
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes; True if they cannot be compared easily.

    Versions do not suffice, because torch's batch norm changes buffers without counting a version.
    """
    easy = type(one) is Tensor and one.layout is torch.strided and not (one.is_quantized or one.is_meta)
    if not easy or one.is_conj() or one.is_neg():
        return True
    return torch.equal(bytes_of(one), bytes_of(other))
