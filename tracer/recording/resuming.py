"""Where a recording goes on that continues an earlier one: step, epoch, and step of the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer

from tracer.errors import CaptureError
from tracer.format.journal import Column
from tracer.messaging.messages import DEFAULT_TAG
from tracer.observing.exporter import Exporter
from tracer.recording.options import Options
from tracer.stores.locations import Location
from tracer.trace.reader import TraceReader

_COUNTING = frozenset(
    {
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop"),
        *("Rprop", "SparseAdam"),
    }
)
"""Optimizers of torch.optim that count their steps."""


def _steps_counted(optimizers: Iterable[Optimizer]) -> int | None:
    """How many steps the last optimizer has taken, over all restarts; None if it does not count them."""
    last = [*optimizers][-1:]
    if not last:
        return None
    counts = [int(state["step"]) for state in last[0].state.values() if isinstance(state, Mapping) and "step" in state]
    if counts:
        return max(counts)
    return 0 if type(last[0]).__name__ in _COUNTING and not last[0].state else None


def go_on(path: Location, rank: int, options: Options, exporter: Exporter) -> None:
    """Let an exporter count on where an earlier attempt, of which there is a trace at `path`, was left.

    Raises
    ------
    CaptureError
        If the step cannot be told.
    TraceError
        If the trace cannot be read.
    """
    step = options.first_step if options.first_step is not None else _steps_counted(exporter.optimizers.all)
    if step is None:
        raise CaptureError(
            f"{path} cannot be resumed, because the optimizer does not count its steps; say with first_step= "
            "(--first-step) which global step the checkpoint goes on with"
        )
    with TraceReader(path) as trace:
        # an evaluation after an epoch's last step has the number of the next one, but counts with the old epoch
        training = [one.id for one in trace.streams if one.tag == DEFAULT_TAG]
        ended = [one.id for one in trace.streams if one.kind == "epoch_finished"]
        counts = np.isin(trace.journal[:, Column.STREAM], training)
        # what this rank did not record, another may have
        mine = counts & (trace.rank == rank)
        train_step, epoch = _counted(trace.journal[mine if mine.any() else counts], step, ended)
    if options.first_epoch is not None and options.first_epoch != epoch:
        train_step, epoch = 0, options.first_epoch
    exporter.start_at(step, train_step, epoch)


def _counted(journal: NDArray[np.int64], step: int, ended: Sequence[int]) -> tuple[int, int]:
    """The train step and the epoch that a global step has, or would have as the next one.

    Parameters
    ----------
    journal : (messages, columns) array
        Of the training passes, and of what was said of steps and epochs.
    step : int
        The global step.
    ended : sequence of int
        The streams of messages that say that an epoch has ended.
    """
    journal = journal[journal[:, Column.GLOBAL_STEP] <= step]
    if not len(journal):
        return 0, 0
    numbers = journal[:, Column.GLOBAL_STEP]
    over = np.isin(journal[:, Column.STREAM], ended)
    # of the step itself, unless all that is there is the end of its epoch
    for found in (journal[(numbers == step) & ~over], journal[(numbers == step) & over]):
        if len(found):
            return int(found[-1, Column.TRAIN_STEP]), int(found[-1, Column.EPOCH])
    last = journal[numbers == numbers.max()][-1]
    number, train_step, epoch = (int(last[one]) for one in (Column.GLOBAL_STEP, Column.TRAIN_STEP, Column.EPOCH))
    if (journal[over, Column.EPOCH] == epoch).any():
        return step - number - 1, epoch + 1
    return train_step + step - number, epoch
