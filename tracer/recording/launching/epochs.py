"""Finds the ends of a script's epochs from its DataLoaders."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from tracer.observing.exporter import Exporter
from tracer.observing.pytorch.structure import WeakIdentitySet


@dataclass(slots=True)
class _Leader:
    """The iterator of an epoch's first batch, the step when that was drawn, and the number of batches drawn from it."""

    iterator: weakref.ref[Any]
    began: int
    draws: int = 1


@dataclass(slots=True)
class _Pass:
    """The state of an iterator of a DataLoader."""

    loader: weakref.ref[Any]
    began: int
    """The step at which the iterator was made."""
    seen: int
    """The step at which its last batch was drawn."""
    forwards: int
    """The number of the model's forwards before the iterator was made."""
    given: int = 0
    """The number of batches that the iterator gave."""


class Epochs:
    """Ends an exporter's epoch when a DataLoader that feeds the training is exhausted or begun again.

    Parameters
    ----------
    exporter : Exporter
        Counts the steps and the epochs.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._feeding = WeakIdentitySet()
        # the DataLoaders that were begun in this epoch
        self._begun = WeakIdentitySet()
        self._new_amid = False  # whether a DataLoader of `_begun` was first begun after a step of this epoch
        self._leader: _Leader | None = None
        # an exhausted iterator whose last batches the model may not have seen yet, and the forwards after which it has
        self._unused: _Pass | None = None
        self._used_after = 0
        # the DataLoader that was begun last, while its iterator is unknown, because its class wraps another DataLoader
        self._wrapped: weakref.ref[Any] | None = None
        self._began = 0
        self.ended = False
        """Whether a DataLoader ended an epoch."""

    def begins(self, loader: Any) -> None:
        """A DataLoader is begun (``iter(loader)``).

        If a DataLoader that fed the training was left before its end, the epoch is over. Batches of an exhausted
        DataLoader that the model has not seen are no longer waited for, with one exception: a program that makes a
        DataLoader at each step may begin a new DataLoader before it uses the last batch.
        """
        if self._left_early():
            self._end(self._exporter.global_step)
        new = loader not in self._begun
        same = self._unused is not None and self._unused.loader() is loader
        self._used(anyhow=same or (new and not self._new_amid))
        now = self._exporter.global_step
        if loader in self._feeding and now > self._began and not self._is_led(loader):
            self._end(now)
        self._new_amid |= new and now > self._began
        self._begun.add(loader)
        self._wrapped = weakref.ref(loader)

    def begun(self, loader: Any, iterator: Any) -> None:
        """A DataLoader that was just begun has made its iterator."""
        self._wrapped = None
        now = self._exporter.global_step
        self._passes[iterator] = _Pass(weakref.ref(loader), now, now, self._exporter.parts.forwards.seen)

    def drawn(self, iterator: Any) -> None:
        """A batch is drawn. If a step took place since the iterator's last batch, its loader feeds the training."""
        self._used()
        wrapped = None if self._wrapped is None or iterator in self._passes else self._wrapped()
        if wrapped is not None:
            self.begun(wrapped, iterator)
        now = self._exporter.global_step
        leader = None if self._leader is None else self._leader.iterator()
        if leader is None:
            self._leader = _Leader(weakref.ref(iterator), now)
        elif leader is iterator and self._leader is not None:
            self._leader.draws += 1
        known = self._passes.get(iterator)
        if known is None:  # the iterator was made before the script was watched
            return
        loader = known.loader()
        if loader is not None and now > known.seen:
            self._feeding.add(loader)
        known.seen = now

    def given(self, iterator: Any) -> None:
        """An iterator gave a batch."""
        known = self._passes.get(iterator)
        if known is not None:
            known.given += 1

    def exhausted(self, iterator: Any) -> None:
        """An iterator is exhausted. If training steps took place since it was made, the epoch is over.

        Some libraries draw batches ahead. The epoch then ends when the model has had as many forwards as batches.
        """
        exporter, known = self._exporter, self._passes.get(iterator)
        if known is None or self._is_led(known.loader()):
            return
        self._leader = None
        # with several models, it is unknown which model the batches are for
        counted = exporter.model is not None and not exporter.parts.models.several
        told = counted and (exporter.parts.forwards.seen > 0 or exporter.steps_seen == 0)
        self._unused, self._used_after = known, known.forwards + known.given if told else 0
        self._used()

    def _left_early(self) -> bool:
        """Whether the DataLoader that fed this epoch was left before its end: its iterator no longer exists.

        A DataLoader that fed a single step does not count, because some programs make a DataLoader at each step.
        """
        leader = self._leader
        if leader is None or leader.iterator() is not None:
            return False
        return leader.draws > 1 and self._exporter.global_step - leader.began > 1

    def _is_led(self, loader: Any) -> bool:
        """Whether another DataLoader leads this epoch: it has given a batch for every step of the epoch.

        Only the leader's end is the end of the epoch. A DataLoader that ends sooner is begun again, as in
        semi-supervised learning.
        """
        iterator = None if self._leader is None else self._leader.iterator()
        known = None if iterator is None else self._passes.get(iterator)
        if self._leader is None or known is None:
            return False
        steps = self._exporter.global_step - self._leader.began
        return known.loader() is not loader and self._leader.draws >= steps > 0

    def _used(self, *, anyhow: bool = False) -> None:
        """End the epoch if the model has seen all batches of an exhausted DataLoader, or in any case if `anyhow`."""
        if self._unused is not None and (anyhow or self._exporter.parts.forwards.seen >= self._used_after):
            began, self._unused = self._unused.began, None
            now = self._exporter.global_step
            if now > max(began, self._began):
                self._end(now)

    def _end(self, now: int) -> None:
        self.ended = True
        self._leader = self._unused = None
        self._new_amid = False
        self._begun.clear()
        self._exporter.parts.steps.epochs.over = True
        self._began = now
