"""Has the DataLoaders of a script give the datapoints that a recorded run had."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import is_grad_enabled

from tracer.observing.exporter import Exporter
from tracer.observing.pulls import Pulls
from tracer.observing.pytorch.leaves import arguments_of
from tracer.recording.reenacting.recorded import BatchOf


class Batches:
    """Chooses the datapoints of each batch that a training draws: those of the forward that the batch will be for.

    Which forward that is follows from the step, from how many forwards it had, and from how many batches were drawn and
    not used so far. Batches that are drawn in eval mode, without gradients or under a tag are left to the script. So
    are those of a data set that is too small for them.

    Parameters
    ----------
    recorded : sequence of BatchOf
        The sample ids of the forwards, in their order.
    exporter : Exporter
    """

    def __init__(self, recorded: Sequence[BatchOf], exporter: Exporter) -> None:
        self.gate = exporter.parts.gate
        self._recorded = recorded
        self._exporter = exporter
        self._steps = [one.step for one in recorded]
        self._places = {(one.step, one.model, one.call): place for place, one in enumerate(recorded)}
        self._pulls = Pulls()
        self._next = 0  # the place of the forward that comes next

    # -- what DataLoaders ask and tell ------------------------------------------------------------------------

    def chosen(self, iterator: Any) -> Sequence[int] | None:
        """The datapoints of the batch that is drawn next."""
        if not self._is_training:
            return None
        batch = next(islice(self._coming(), len(self._pulls.waiting), None), None)
        return None if batch is None or not _can_have(iterator._dataset, batch.ids) else batch.ids

    def pulled(self, iterator: object, ids: Sequence[int], batch: Any) -> None:
        """Take note of a batch."""
        if self._is_training:
            self._pulls.add(iterator, ids, batch, self._exporter.parts.forwards.seen)

    @property
    def _is_training(self) -> bool:
        parts = self._exporter.parts
        return is_grad_enabled() and parts.passes.user_tag is None and any(top.training for _, top in parts.models.tops)

    def _coming(self) -> Iterator[BatchOf]:
        """The batches of the forwards to come. One that several forwards in a row share comes once."""
        place = max(self._next, bisect_left(self._steps, self._exporter.parts.clock.step))
        before: Sequence[int] | None = None
        for one in self._recorded[place:]:
            if one.ids != before:
                yield one
            before = one.ids

    # -- what the model is given ------------------------------------------------------------------------------

    def forward_begins(self, name: str, call: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take note of a training forward of the model, or of one of several: of its number in the step."""
        place = self._places.get((self._exporter.parts.clock.step, name, call))
        forwards = None if name else self._exporter.parts.forwards.seen
        if self._pulls.of_forward(arguments_of(args, kwargs), forwards) is None and place is not None:
            self._pulls.use_first()
        if place is not None:
            self._next = place + 1


def _can_have(dataset: Any, ids: Sequence[int]) -> bool:
    """Whether a data set has so many datapoints that it may be the one that these are of."""
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return True
    return all(-count <= one < count for one in ids)
