"""`Pulls`: the last batches that DataLoaders gave, and which of them a forward is of."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tracer.observing.pytorch.tensors import leaves

_KEPT: Final = 16
"""So many batches may be drawn ahead of the forwards that they are for."""
_ELEMENTS: Final = 256
"""By so many elements of a tensor a copy of it is known."""
_COMPARED: Final = 8
"""So many tensors of a batch are compared, at most."""


@dataclass(slots=True, eq=False)
class Source:
    """What is known of an iterator of a DataLoader.

    Attributes
    ----------
    given : int
        How many batches it gave.
    forwards : int
        How many forwards there had been when it gave the last one.
    in_turn : bool
        Whether there was a forward between each two of its batches, so that none was drawn ahead or left out.
    """

    given: int = 0
    forwards: int = -1
    in_turn: bool = True


@dataclass(slots=True, eq=False)
class Pulled:
    """A batch that a DataLoader gave. It keeps no tensor of the batch alive.

    Attributes
    ----------
    ids : sequence of int
        Which datapoints it is made of.
    number : int
        Which one it is of all batches.
    forwards : int
        How many forwards there had been before.
    source : Source
        The iterator that gave it.
    place : int
        Which one it is of those of its iterator.
    """

    ids: Sequence[int]
    number: int
    forwards: int
    source: Source
    place: int
    _memory: list[tuple[StorageWeakRef, int, int]] = field(default_factory=list)
    _elements: list[tuple[torch.Size, Tensor]] = field(default_factory=list)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Note where its tensors are, and some of their elements."""
        for one in tensors:
            if not _is_plain(one):
                continue
            extent = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            self._memory.append((StorageWeakRef(one.untyped_storage()), int(one.storage_offset()), extent))
            if one.is_cpu and len(self._elements) < _COMPARED:
                self._elements.append((one.shape, elements_of(one)))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of its tensors, or a view of one."""
        storage, offset = tensor.untyped_storage()._cdata, tensor.storage_offset()
        return any(
            memory.cdata == storage and start <= offset < start + extent for memory, start, extent in self._memory
        )

    def has_shape(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of some tensors has the shape of one of its own."""
        return any(one.shape == shape for one in tensors for shape, _ in self._elements)

    def is_copied(self, tensors: Iterable[Tensor], known: dict[int, Tensor]) -> bool:
        """Whether tensors have the elements of its own, as far as they have their shapes; `known`: by tensor's id."""
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
    """The last batches that DataLoaders gave, and which of them a forward is of."""

    def __init__(self) -> None:
        self._last: deque[Pulled] = deque(maxlen=_KEPT)
        self._sources: weakref.WeakKeyDictionary[Any, Source] = weakref.WeakKeyDictionary()
        self._count = 0
        self._used = -1  # the number of the batch that the last forward was of
        self._copied: tuple[Pulled, int] | None = None  # the last batch that was copied for a forward, and which one

    def __len__(self) -> int:
        return len(self._last)

    @property
    def waiting(self) -> list[Pulled]:
        """The batches that were given after the one that the last forward was of, by iterators that are still there."""
        return [one for one in self._there() if one.number > self._used]

    def _there(self) -> list[Pulled]:
        """The last batches of iterators that are still there. What the others gave is used, or never will be."""
        there = [*self._sources.values()]
        return [one for one in self._last if one.source in there]

    def add(self, iterator: Any, ids: Sequence[int], batch: Any, forwards: int) -> Pulled:
        """Take note of a batch.

        Parameters
        ----------
        iterator
            Of the DataLoader that gave it.
        ids : sequence of int
        batch
            Any structure of tensors.
        forwards : int
            How many forwards of the model there have been.
        """
        source = self._sources.setdefault(iterator, Source())
        source.in_turn &= source.forwards != forwards
        source.forwards = forwards
        pulled = Pulled(ids, self._count, forwards, source, source.given)
        pulled.take(tensor for _, tensor in leaves(batch))
        source.given += 1
        self._count += 1
        self._last.append(pulled)
        return pulled

    def of_forward(self, arguments: Any, forwards: int | None) -> Pulled | None:
        """The batch that a forward is of; None if that is not known.

        An input is a tensor of the batch, or a view of one. Or it is a copy, on another device say, which is known by
        some of its elements; these are not looked at if it was so with the forward before, and its batch was followed
        by one. Or it was computed from the batch, which is known where each batch is used before the next is drawn.

        Parameters
        ----------
        arguments
            Any structure of tensors: what the model is given.
        forwards : int or None
            How many forwards of the model there have been, this one included. None: they are not counted, as there are
            several models.
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
        """Take the first batch that waits for the one that the last forward was of."""
        waiting = self.waiting
        if waiting:
            self._used = waiting[0].number

    def _next_copied(self, inputs: Sequence[Tensor], forwards: int | None) -> Pulled | None:
        """The batch that follows the one that was copied for the forward before."""
        if self._copied is None or forwards is None or self._copied[1] != forwards - 1:
            return None
        before = self._copied[0]
        new = [one for one in self._last if one.forwards >= forwards - 1]
        if len(new) != 1 or new[0].source is not before.source:
            return None
        following = (one for one in self._last if one.source is before.source and one.place == before.place + 1)
        return next((one for one in following if one.has_shape(inputs)), None)

    def _copy(self, inputs: Sequence[Tensor]) -> Pulled | None:
        """The batch of which the inputs are copies: of several that are alike the first that was not used."""
        known: dict[int, Tensor] = {}
        alike = [one for one in self._last if one.is_copied(inputs, known)]
        return next((one for one in alike if one.number > self._used), alike[-1] if alike else None)

    def _in_turn(self, inputs: Sequence[Tensor]) -> Pulled | None:
        """The last batch, if it is the only one that was given since the forward before, and none was left out."""
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
    """Some elements of a tensor, always at the same random places: of shape (elements,), on its device."""
    return tensor.detach()[_places(tensor.shape)] if tensor.ndim else tensor.detach().reshape(1).clone()


@lru_cache(maxsize=256)
def _places(shape: torch.Size) -> tuple[Tensor, ...]:
    count = int(np.prod(shape))
    # with a generator of its own
    flat = np.random.Generator(np.random.PCG64(count)).integers(0, count, _ELEMENTS) if count > _ELEMENTS else None
    chosen = np.arange(count) if flat is None else np.sort(flat)
    return tuple(map(torch.from_numpy, np.unravel_index(chosen, tuple(shape))))
