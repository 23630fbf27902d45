"""Makes the DataLoaders of a script give the datapoints of a recorded run."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import is_grad_enabled

from tracer.observing.exporter import Exporter
from tracer.observing.guesses.batches import Pulls
from tracer.observing.pytorch.tensors import arguments_of
from tracer.recording.reenacting.recorded import BatchOf


class Batches:
    """Chooses the datapoints of each batch that a training draws: those of the recorded forward it will be used in.

    That forward follows from the step, the step's forwards so far, and the number of batches that were drawn and not
    yet used. The script's own batches are kept in eval mode, without gradients, under a tag, and if the data set is too
    small to have the recorded datapoints.

    Parameters
    ----------
    recorded : sequence of BatchOf
        The sample ids of the recorded forwards, in order.
    exporter : Exporter
    """

    def __init__(self, recorded: Sequence[BatchOf], exporter: Exporter) -> None:
        self.gate = exporter.parts.gate
        self._recorded = recorded
        self._exporter = exporter
        self._steps = [one.step for one in recorded]
        self._places = {(one.step, one.model, one.call): place for place, one in enumerate(recorded)}
        self._pulls = Pulls()
        self._next = 0  # the place of the next forward

    # -- what DataLoaders ask and tell ------------------------------------------------------------------------

    def chosen(self, iterator: Any) -> Sequence[int] | None:
        """The datapoints of the next batch; None: the script's own."""
        if not self._is_training:
            return None
        batch = next(islice(self._coming(), len(self._pulls.waiting), None), None)
        return None if batch is None or not _can_have(iterator._dataset, batch.ids) else batch.ids

    def pulled(self, iterator: object, ids: Sequence[int], batch: Any) -> None:
        """Note a batch that was drawn."""
        if self._is_training:
            self._pulls.add(iterator, ids, batch, self._exporter.parts.forwards.seen)

    @property
    def _is_training(self) -> bool:
        passes, models = self._exporter.parts.passes, self._exporter.parts.models
        return is_grad_enabled() and any(passes.is_training(top) for _, top in models.tops)

    def _coming(self) -> Iterator[BatchOf]:
        """The batches of the next forwards; a batch that consecutive forwards share comes once."""
        place = max(self._next, bisect_left(self._steps, self._exporter.parts.clock.step))
        before: Sequence[int] | None = None
        for one in self._recorded[place:]:
            if one.ids != before:
                yield one
            before = one.ids

    # -- what the model is given ------------------------------------------------------------------------------

    def forward_begins(self, name: str, call: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note a training forward of a model: `call` is its number in the step.

        Returns whether it uses a batch of the datapoints that the recorded forward used.
        """
        place = self._places.get((self._exporter.parts.clock.step, name, call))
        forwards = None if name else self._exporter.parts.forwards.seen
        pulled = self._pulls.of_forward(arguments_of(args, kwargs), forwards)
        if place is None:
            return False
        if pulled is None:
            self._pulls.use_first()
        self._next = place + 1
        return pulled is not None and list(pulled.ids) == self._recorded[place].ids


def _can_have(dataset: Any, ids: Sequence[int]) -> bool:
    """Whether a data set is large enough to have the datapoints `ids`."""
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return True
    return all(-count <= one < count for one in ids)
