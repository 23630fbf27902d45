"""The datapoints of a batch: those that the user gave, or those of the batch of a DataLoader that a forward uses."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.clock import UndecidedTag
from tracer.observing.part import ExporterPart, Ground
from tracer.observing.pytorch.tensors import leaves

_KEPT: Final = 16
"""How many batches may be drawn ahead of their forwards."""
_ELEMENTS: Final = 256
"""How many elements of a tensor are compared to recognize a copy of it."""
_COMPARED: Final = 8
"""The largest number of tensors of a batch that are compared."""


@dataclass(slots=True, eq=False)
class BatchSource:
    """An iterator of a DataLoader.

    Attributes
    ----------
    given : int
        How many batches it has yielded.
    forwards : int
        How many forwards there had been when it yielded its last batch.
    in_turn : bool
        Whether a forward ran between every two of its batches, so that no batch was drawn ahead or skipped.
    """

    given: int = 0
    forwards: int = -1
    in_turn: bool = True


@dataclass(slots=True, eq=False)
class Pulled:
    """A batch that a DataLoader yielded. Keeps no tensor of the batch alive.

    Attributes
    ----------
    ids : sequence of int
        The datapoints of the batch.
    number : int
        Its number among the batches of all iterators.
    forwards : int
        How many forwards there had been when it was yielded.
    source : BatchSource
        The iterator that yielded it.
    place : int
        Its number among the batches of its iterator.
    """

    ids: Sequence[int]
    number: int
    forwards: int
    source: BatchSource
    place: int
    _memory: list[tuple[StorageWeakRef, int, int]] = field(default_factory=list)
    _elements: list[tuple[torch.Size, Tensor]] = field(default_factory=list)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Note the memory of the batch's tensors, and some of their elements."""
        for one in tensors:
            if not _is_plain(one):
                continue
            extent = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            self._memory.append((StorageWeakRef(one.untyped_storage()), int(one.storage_offset()), extent))
            if one.is_cpu and len(self._elements) < _COMPARED:
                self._elements.append((one.shape, elements_of(one)))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a tensor of the batch, or a view of one."""
        storage, offset = tensor.untyped_storage()._cdata, tensor.storage_offset()
        return any(
            memory.cdata == storage and start <= offset < start + extent for memory, start, extent in self._memory
        )

    def has_shape(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of some tensors has the shape of a tensor of the batch."""
        return any(one.shape == shape for one in tensors for shape, _ in self._elements)

    def is_copied(self, tensors: Iterable[Tensor], known: dict[int, Tensor]) -> bool:
        """Whether tensors equal the batch's tensors of the same shapes; `known` caches elements by tensor id."""
        found = False
        for one in islice(tensors, _COMPARED):
            alike = [
                elements
                for shape, elements in self._elements
                if shape == one.shape and elements.is_complex() == one.is_complex()
            ]
            if alike:
                if id(one) not in known:
                    known[id(one)] = elements_of(one).cpu()
                if not any(torch.equal(each.to(one.dtype), known[id(one)]) for each in alike):
                    return False
                found = True
        return found


class Pulls:
    """The last batches that DataLoaders yielded, and the batch that each forward uses."""

    def __init__(self) -> None:
        self._last: deque[Pulled] = deque(maxlen=_KEPT)
        self._sources: weakref.WeakKeyDictionary[Any, BatchSource] = weakref.WeakKeyDictionary()
        self._count = 0
        self._used = -1  # the number of the batch that the last forward used
        self._copied: tuple[Pulled, int] | None = None  # the last batch used through a copy, and the forward's number

    def __len__(self) -> int:
        return len(self._last)

    @property
    def waiting(self) -> list[Pulled]:
        """The batches yielded after the one that the last forward used, by iterators that are still alive."""
        return [one for one in self._there() if one.number > self._used]

    def _there(self) -> list[Pulled]:
        """The last batches of the iterators that are still alive; other batches were used or never will be."""
        there = [*self._sources.values()]
        return [one for one in self._last if one.source in there]

    def add(self, iterator: Any, ids: Sequence[int], batch: Any, forwards: int) -> Pulled:
        """Take note of a batch.

        Parameters
        ----------
        iterator
            The DataLoader's iterator.
        ids : sequence of int
        batch
            Any structure of tensors.
        forwards : int
            How many forwards of the model there have been.
        """
        source = self._sources.setdefault(iterator, BatchSource())
        source.in_turn &= source.forwards != forwards
        source.forwards = forwards
        pulled = Pulled(ids, self._count, forwards, source, source.given)
        pulled.take(tensor for _, tensor in leaves(batch))
        source.given += 1
        self._count += 1
        self._last.append(pulled)
        return pulled

    def of_forward(self, arguments: Any, forwards: int | None) -> Pulled | None:
        """The batch that a forward uses; None if that is unknown.

        An input can be a tensor of the batch or a view of one. It can be a copy, for example on another device; then
        some of its elements identify the batch, unless the previous forward used a copy too and only the next batch of
        the same iterator was yielded since. Or it was computed from the batch; then the batch is identified only if
        each batch is used before the next is drawn.

        Parameters
        ----------
        arguments
            Any structure of tensors: the arguments of the model.
        forwards : int or None
            How many forwards of the model there have been, including this one. None with several models, whose forwards
            are not counted.
        """
        inputs = [one for _, one in leaves(arguments) if _is_plain(one)]
        found = next((one for one in reversed(self._last) if any(map(one.holds, inputs))), None)
        if found is None:
            found = self._next_copied(inputs, forwards) or self._copy(inputs)
            if found is not None and forwards is not None:
                self._copied = found, forwards
            elif found is None and forwards is not None:
                found = self._in_turn(inputs)
        if found is not None:
            self._used = found.number
        return found

    def use_first(self) -> None:
        """Mark the first waiting batch as used."""
        waiting = self.waiting
        if waiting:
            self._used = waiting[0].number

    def _next_copied(self, inputs: Sequence[Tensor], forwards: int | None) -> Pulled | None:
        """The batch that follows the one that was copied for the previous forward."""
        if self._copied is None or forwards is None or self._copied[1] != forwards - 1:
            return None
        before = self._copied[0]
        new = [one for one in self._last if one.forwards >= forwards - 1]
        if len(new) != 1 or new[0].source is not before.source:
            return None
        following = (one for one in self._last if one.source is before.source and one.place == before.place + 1)
        return next((one for one in following if one.has_shape(inputs)), None)

    def _copy(self, inputs: Sequence[Tensor]) -> Pulled | None:
        """The batch that the inputs are copies of. Of several equal batches, the first that is unused."""
        known: dict[int, Tensor] = {}
        alike = [one for one in self._last if one.is_copied(inputs, known)]
        return next((one for one in alike if one.number > self._used), alike[-1] if alike else None)

    def _in_turn(self, inputs: Sequence[Tensor]) -> Pulled | None:
        """The last batch, if it is the only one since the previous forward, and none was skipped."""
        last = self._last[-1] if self._last else None
        if last is None or not last.source.in_turn:
            return None
        if any(one is not last and one.forwards == last.forwards for one in self._there()):
            return None
        return last if any(one.ndim and len(one) == len(last.ids) for one in inputs) else None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own, and elements that can be compared."""
    return (
        tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)
        and torch._C._functorch.peek_interpreter_stack() is None
        and tensor.numel() > 0
        and tensor.dtype is not torch.complex32
    )


def elements_of(tensor: Tensor) -> Tensor:
    """Some elements of a tensor, of shape (elements,), on its device. The places are random but fixed for a shape."""
    return tensor.detach()[_places(tensor.shape)] if tensor.ndim else tensor.detach().reshape(1).clone()


@lru_cache(maxsize=256)
def _places(shape: torch.Size) -> tuple[Tensor, ...]:
    count = int(np.prod(shape))
    # a generator of its own leaves the program's random numbers alone
    flat = np.random.Generator(np.random.PCG64(count)).integers(0, count, _ELEMENTS) if count > _ELEMENTS else None
    chosen = np.arange(count) if flat is None else np.sort(flat)
    return tuple(map(torch.from_numpy, np.unravel_index(chosen, tuple(shape))))


class _Given(NamedTuple):
    """Ids that the user gave, the number of training forwards until then, and the step."""

    ids: Tensor
    forwards: int
    step: int


class SampleIds(ExporterPart):
    """Publishes the sample ids of each forward: those the user gave, or those of the DataLoader's batch."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground)
        self._pulls = Pulls()
        self._given: _Given | None = None
        self._calls: dict[str, int] = {}  # the number of training forwards in a step, by model name
        self._step = -1  # the step of `_calls`
        self._pid = os.getpid()

    def chosen(self, iterator: object) -> Sequence[int] | None:
        """Choose no ids (None): an observer leaves the loader's choice alone."""
        return None

    def pulled(self, iterator: object, ids: Sequence[int], batch: Any) -> None:
        """Note a batch that a DataLoader yielded."""
        if os.getpid() == self._pid:  # false in a worker process
            self._pulls.add(iterator, ids, batch, self.forwards.seen)

    def give(self, ids: Any) -> None:
        """Publish these ids with the next training forward, instead of those of the DataLoader's batch.

        Raises
        ------
        MessageError
            If they are not integers in one dimension.
        """
        tensor = _as_ids(ids)
        if self.gate.open:
            with self.gate.lock:
                self._given = _Given(tensor, self.forwards.training, self.clock.step)

    def of_forward(self, name: str, arguments: Any) -> Tensor | None:
        """The ids of a recorded forward that begins, if they are known; `name` is the model's, if there are several."""
        tag = self.gate.passes.now.tag
        if self.publisher.collecting is not None or not self.demand.wanted("sample_ids", None, tag):
            return None
        training = tag == DEFAULT_TAG
        ids = self._taken(name, counted=training) if training or type(tag) is UndecidedTag else None
        if ids is None:
            ids = self._pulled(name, arguments)
        if ids is not None and training:
            self.publisher.datapoints.batch_is(len(ids))
        return ids

    def publish(self, name: str, ids: Tensor | None) -> None:
        """Publish the ids of a recorded forward, after its inputs."""
        running = self.gate.passes.now
        call = self._count(name) if running.tag == DEFAULT_TAG else running.batch
        if ids is not None:
            self.publisher.publish("sample_ids", None, ids, running.tag, name, call)

    def _pulled(self, name: str, arguments: Any) -> Tensor | None:
        """The ids of the batch that a forward uses."""
        pulled = self._pulls.of_forward(arguments, None if name else self.forwards.seen) if self._pulls else None
        return None if pulled is None else torch.tensor(pulled.ids, dtype=torch.int64, device="cpu")

    def _count(self, name: str) -> int:
        """Count a training forward of a model; returns its number in the step."""
        step = self.clock.began.global_step
        if step != self._step:
            self._step, self._calls = step, {}
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return call

    def _taken(self, name: str, *, counted: bool) -> Tensor | None:
        """The ids that the user gave for this forward. Ids for a forward that is not recorded are dropped.

        `counted`: whether the forward is already counted among those of the training.
        """
        given, self._given = self._given, None
        if given is None:
            return None
        # forwards of several models are not counted
        due = given.step == self.clock.step if name else given.forwards == self.forwards.training - counted
        return given.ids if due else None

    def forget(self) -> None:
        """Forget all batches."""
        self._pulls = Pulls()
        self._given = None


def _as_ids(given: Any) -> Tensor:
    """Ids as a tensor of shape (batch,), int64.

    Examples
    --------
    >>> _as_ids([3, 1]), _as_ids(np.array([7], np.int32))
    (tensor([3, 1]), tensor([7]))
    """
    try:
        array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        array = None
    if array is None or array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or not array.size):
        found = type(given).__name__ if array is None else f"{array.dtype} of shape {array.shape}"
        raise MessageError(f"sample ids are integers in one dimension, one for each datapoint of a batch, not {found}")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise MessageError(f"sample ids are below 2**63, and one is {array.max()}")
    return torch.from_numpy(array.astype(np.int64))
