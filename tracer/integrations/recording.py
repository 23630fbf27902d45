"""What the callbacks have in common: a recording that begins, counts epochs and ends when a library says so."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tracer.errors import CaptureError, TraceError, TracerError, UnknownNameError
from tracer.observing.pytorch.loss_functions import LOSS_FUNCTIONS
from tracer.recording.recording import end, record
from tracer.recording.run import Run
from tracer.recording.termination import Ending, last_unhandled, what_ends_the_program
from tracer.stores.locations import Anywhere, location

_FROM_THE_TRAINER = frozenset({"self", "path", "model", "optimizer", "first_step", "first_epoch"})
"""What `tracer.record` is told by a callback, not by its user."""


def require(library: str, missing: ImportError | None) -> None:
    """Raise `TracerError` if a library that a callback is for could not be imported."""
    if missing is not None:
        raise TracerError(
            f"this callback needs {library}, which cannot be imported ({missing}): pip install 'tracereel[{library}]'"
        )


class Recording:
    """A recording whose model, optimizers and counters are known only when a trainer begins.

    Parameters
    ----------
    path : path or URL
        Of the trace.
    options : dict
        Of `tracer.record`, apart from those that the trainer knows: model, optimizer, first step and epoch.

    Raises
    ------
    UnknownNameError
        If there is no such option.
    """

    def __init__(self, path: Anywhere, options: dict[str, Any]) -> None:
        known = set(inspect.signature(record.__init__).parameters) - _FROM_THE_TRAINER
        for name in options:
            if name not in known:
                raise UnknownNameError.of("option of a trace callback", name, known)
        self._path = location(path)  # the script may go to another folder before the training begins
        # the functions that losses are made of, unless one is named: all of torch.nn's modules call them
        self._options = {"loss": LOSS_FUNCTIONS, **options}
        self._run: Run | None = None
        self._ending: Ending | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is pickled, records nothing until it begins: one alone can write a trace."""
        return self.__dict__ | {"_run": None, "_ending": None}

    @property
    def active(self) -> bool:
        """Whether it has begun and not ended."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """The recording in progress, for `Run.log`, `Run.tag` and `Run.probe`.

        Raises
        ------
        CaptureError
            If it has not begun, or has ended.
        """
        if self._run is None:
            raise CaptureError(f"nothing is being recorded to {self._path}: the training has not begun, or has ended")
        return self._run

    def begin(self, model: nn.Module, optimizers: Iterable[Optimizer], step: int, epoch: int) -> None:
        """Begin to record, at the trainer's step and epoch; what was being recorded before is given up."""
        self.end(TraceError("the training was begun again before it had ended"))
        resume: dict[str, Any] = {"first_step": step, "first_epoch": epoch} if self._options.get("resume") else {}
        run = record(self._path, model, list(optimizers), **self._options, **resume).__enter__()
        if (run.exporter.global_step, run.exporter.epoch) != (step, epoch):
            # a new trace of a run that is not: it has the trainer's counters, too
            run.exporter.start_at(step, 0, epoch)
        self._run = run
        # not every trainer says that it was interrupted, but every program ends
        self._ending = Ending(self, partial(_end_unended, run, last_unhandled()))

    def epoch_finished(self) -> None:
        """End the epoch, if there is a recording."""
        if self._run is not None:
            self._run.epoch_finished()

    def end(self, error: BaseException | None = None) -> None:
        """Take the hooks off and close the trace, if it is open; its status says which exception ended it."""
        run, self._run = self._run, None
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.cancel()
        if run is not None:
            end(run, error)


def _end_unended(run: Run, before: object, *, wait: bool) -> None:
    """Close the trace of a training that nobody ended; the exception that ends the program is why."""
    end(run, what_ends_the_program(before), wait=wait)
