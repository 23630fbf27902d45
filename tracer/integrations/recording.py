"""What the callbacks share: a recording that begins, counts epochs and ends when a training library says so."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from tracer.errors import CaptureError, MessageError, TraceError, TracerError, UnknownNameError, warn_only
from tracer.messaging.messages import KINDS, kept_of
from tracer.observing.pytorch.patches import LOSS_FUNCTIONS
from tracer.recording.recording import Run, end, record
from tracer.recording.settings import settings_of
from tracer.recording.termination import Ending, last_unhandled, what_ends_the_program
from tracer.stores.locations import Anywhere, location

_FROM_THE_TRAINER = frozenset({"self", "path", "model", "optimizer", "first_step", "first_epoch"})
"""Parameters of `tracer.record` that a callback sets itself, not its user."""


def require(library: str, missing: ImportError | None, what: str = "callback") -> None:
    """Raise `TracerError` if the library of a callback, or of another `what`, could not be imported."""
    if missing is not None:
        raise TracerError(
            f"this {what} needs {library}, which cannot be imported ({missing}): pip install 'tracereel[{library}]'"
        )


class Recording:
    """A recording whose model, optimizers and counters are known only when a trainer begins.

    Parameters
    ----------
    path : path or URL
        The trace.
    options : dict
        Options of `tracer.record` without those that the trainer knows: model, optimizer, first step and epoch.

    Raises
    ------
    UnknownNameError
        If an option is unknown.
    """

    def __init__(self, path: Anywhere, options: dict[str, Any]) -> None:
        known = set(inspect.signature(record.__init__).parameters) - _FROM_THE_TRAINER
        for name in options:
            if name not in known:
                raise UnknownNameError.of("option of a trace callback", name, known)
        self._path = location(path)  # absolute now: the script may change its folder before the training begins
        # by default all loss functions of torch.nn.functional, which the losses of torch.nn call, too
        self._options = {"loss": LOSS_FUNCTIONS, **options}
        self._settings: dict[str, Any] = {}
        self._run: Run | None = None
        self._ending: Ending | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the recording in progress: only the original, no copy or pickle, can write its trace."""
        return self.__dict__ | {"_run": None, "_ending": None}

    @property
    def active(self) -> bool:
        """Whether the recording has begun and not ended."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """The recording in progress, for `Run.log`, `Run.tag` and `Run.probe`.

        Raises
        ------
        CaptureError
            If the recording has not begun, or has ended.
        """
        if self._run is None:
            raise CaptureError(f"nothing is being recorded to {self._path}: the training has not begun, or has ended")
        return self._run

    def know_settings(self, settings: Any) -> None:
        """Add settings of the run to the header of the recording that begins next, below those of ``config=``."""
        known, self._settings = self._settings, self._settings | settings_of("the hyperparameters", settings)
        if self.active and self._settings != known:
            warn_only(f"the recording to {self._path} has begun, so its header has no hyperparameters that come now")

    def begin(self, model: nn.Module, optimizers: Iterable[Optimizer], step: int, epoch: int) -> None:
        """Begin to record at the trainer's step and epoch; an unfinished recording ends as failed."""
        self.end(TraceError("the training was begun again before it had ended"))
        resume: dict[str, Any] = {"first_step": step, "first_epoch": epoch} if self._options.get("resume") else {}
        options = self._options | resume
        if self._settings:
            given = options.get("config")
            options["config"] = self._settings | ({} if given is None else settings_of("config", given))
        run = record(self._path, model, list(optimizers), **options).__enter__()
        if (run.exporter.global_step, run.exporter.epoch) != (step, epoch):
            # also in a new trace of a run that the trainer resumes, use the trainer's counters
            run.exporter.start_at(step, 0, epoch)
        self._run = run
        # not every trainer reports that it was interrupted, so the end of the program ends the recording
        self._ending = Ending(self, partial(_end_unended, run, last_unhandled()))

    def epoch_finished(self) -> None:
        """End the epoch, if there is a recording."""
        if self._run is not None:
            self._run.epoch_finished()

    def end(self, error: BaseException | None = None) -> None:
        """Remove the hooks and close the trace, if it is open; `error` becomes its status."""
        run, self._run = self._run, None
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.cancel()
        if run is not None:
            end(run, error)


def _end_unended(run: Run, before: object, *, wait: bool) -> None:
    """Close the trace of a training that did not end, with the exception that ends the program as its status."""
    end(run, what_ends_the_program(before), wait=wait)


@final
class Scalars:
    """Records the numbers that a program logs to its trackers, as `Run.log`; a warning tells once of what it cannot."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def log(self, run: Run | None, values: Mapping[str, Any]) -> None:
        """Record numbers at the open step of a recording, or at its last one if none is open.

        A name that is a kind of the trace's own (``loss``) gets ``logged_`` before it: the loss that is recorded is the
        tensor that ``backward`` is called on.
        """
        if run is None or run.closed:
            self._warn("a number was logged while nothing is recorded, so no trace has it")
            return
        for name, value in values.items():
            try:
                run.log(f"logged_{name}" if kept_of(name)[0] in KINDS else name, value)
            except MessageError as error:
                self._warn(f"{name!r} is logged and not recorded: {error}")

    def _warn(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            warn_only(sentence, stacklevel=3)
