"""Publishes the datapoints that a batch consists of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.part import Ground, Part
from tracer.observing.pulls import Pulls
from tracer.observing.tags import UndecidedTag


class _Given(NamedTuple):
    """Ids that the user gave, the number of training forwards until then, and the step."""

    ids: Tensor
    forwards: int
    step: int


class Samples(Part):
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
