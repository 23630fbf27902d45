"""Where the epochs of a script end, as far as its DataLoaders tell."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from tracer.observing.exporter import Exporter
from tracer.observing.pytorch.identity import WeakIdentitySet


@dataclass(slots=True)
class _Leader:
    """The iterator of a DataLoader that was the first to be drawn from in an epoch, at which step, and how often."""

    iterator: weakref.ref[Any]
    began: int
    draws: int = 1


@dataclass(slots=True)
class _Pass:
    """What is known of an iterator of a DataLoader."""

    loader: weakref.ref[Any]
    began: int
    """The step at which it was made."""
    seen: int
    """The step at which it was drawn from last."""
    forwards: int
    """How many forwards there had been when it was made."""
    given: int = 0
    """How many batches it gave."""


@dataclass(slots=True)
class _Unused:
    """An iterator that came to its end, maybe before all that it gave was used."""

    loader: weakref.ref[Any]
    began: int
    forwards: int
    """How many forwards there will have been when all is used."""


class Epochs:
    """Ends the epochs of an exporter where a DataLoader that feeds the training is at its end, or is begun anew.

    Parameters
    ----------
    exporter : Exporter
        Which counts steps, and is told of epochs that are over.
    """

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._feeding = WeakIdentitySet()
        # the DataLoaders that were begun since this epoch began
        self._begun = WeakIdentitySet()
        self._new_amid = False  # whether one of them was not among them before, and a step had taken place
        self._leader: _Leader | None = None
        self._unused: _Unused | None = None
        # the DataLoader that was begun last, if its iterator is not known: one that wraps another
        self._wrapped: weakref.ref[Any] | None = None
        self._began = 0
        self.ended = False
        """Whether a DataLoader ended an epoch."""

    def begins(self, loader: Any) -> None:
        """A DataLoader begins anew: if it fed the training and was left before its end, that ended the epoch too.

        Of one that is at its end, some batches may have been left out: they are not waited for any more. But others
        that are begun in the midst of an epoch, or made anew at each step, may come before the last batch is used.
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
        """And this is its iterator."""
        self._wrapped = None
        now = self._exporter.global_step
        self._passes[iterator] = _Pass(weakref.ref(loader), now, now, self._exporter.forwards_seen)

    def drawn(self, iterator: Any) -> None:
        """A batch is drawn: if a step took place since the one before, this DataLoader feeds the training."""
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
        if known is None:  # it was made before anybody looked
            return
        loader = known.loader()
        if loader is not None and now > known.seen:
            self._feeding.add(loader)
        known.seen = now

    def given(self, iterator: Any) -> None:
        """It has given a batch."""
        known = self._passes.get(iterator)
        if known is not None:
            known.given += 1

    def exhausted(self, iterator: Any) -> None:
        """A DataLoader is at its end: if training steps took place meanwhile, so is the epoch.

        But some libraries draw batches before they need them. Then the epoch ends when as many forwards have begun.
        """
        exporter, known = self._exporter, self._passes.get(iterator)
        if known is None or self._is_led(known.loader()):
            return
        self._leader = None
        # of several models nobody knows which one the batches are for
        counted = exporter.model is not None and len(exporter.tops) == 1
        told = counted and (exporter.forwards_seen > 0 or exporter.steps_seen == 0)
        self._unused = _Unused(known.loader, known.began, known.forwards + known.given if told else 0)
        self._used()

    def _left_early(self) -> bool:
        """Whether the DataLoader that fed this epoch was left before its end, and nobody has its iterator any more.

        One of which only a step was trained may be made anew at each.
        """
        leader = self._leader
        if leader is None or leader.iterator() is not None:
            return False
        return leader.draws > 1 and self._exporter.global_step - leader.began > 1

    def _is_led(self, loader: Any) -> bool:
        """Whether another DataLoader feeds this epoch, at every step since it was the first to: its end is the epoch's.

        One that ends sooner is begun again, as in semi-supervised learning.
        """
        iterator = None if self._leader is None else self._leader.iterator()
        known = None if iterator is None else self._passes.get(iterator)
        if self._leader is None or known is None:
            return False
        steps = self._exporter.global_step - self._leader.began
        return known.loader() is not loader and self._leader.draws >= steps > 0

    def _used(self, *, anyhow: bool = False) -> None:
        """End the epoch if all is used that an exhausted DataLoader gave; `anyhow`: what is not was left out."""
        if self._unused is not None and (anyhow or self._exporter.forwards_seen >= self._unused.forwards):
            began, self._unused = self._unused.began, None
            now = self._exporter.global_step
            if now > max(began, self._began):
                self._end(now)

    def _end(self, now: int) -> None:
        self.ended = True
        self._leader = self._unused = None
        self._new_amid = False
        self._begun.clear()
        self._exporter.epoch_is_over()
        self._began = now
