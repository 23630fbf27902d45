"""A tracker for accelerate, ``Accelerator(log_with=TraceTracker())``, that records what a program logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracer.integrations.recording import Scalars, require
from tracer.recording.recording import Run

try:
    from accelerate.tracking import GeneralTracker
except ImportError as _error:
    GeneralTracker = object
    _missing: ImportError | None = _error
else:
    _missing = None


class TraceTracker(GeneralTracker):  # type: ignore[misc]  # without accelerate a plain object that cannot be made
    """Records what ``accelerator.log`` is given, in the trace of a recording::

        tracker = TraceTracker()
        accelerator = Accelerator(log_with=[tracker, "wandb"])
        accelerator.init_trackers("digits", config={"lr": 0.1})
        model, optimizer = accelerator.prepare(model, optimizer)
        with tracer.record("run.zarr", model, optimizer, config=tracker.config) as tracker.run:
            ...
            accelerator.log({"accuracy": 0.9}, step=step)

    A number is a message of its name, at the open step of the recording, or at the last one if none is open; the
    ``step`` that the program counts is not used. Names that are kinds of the trace's own, such as ``loss``, get
    ``logged_`` before them. What is no number, and what is logged while nothing is recorded, is left out, with one
    warning.

    Parameters
    ----------
    run : Run, optional
        The recording; may be set later.

    Attributes
    ----------
    run : Run or None
    config : dict
        What ``init_trackers`` was given.

    Raises
    ------
    TracerError
        If accelerate is not installed.
    """

    name = "trace"
    requires_logging_directory = False

    def __init__(self, run: Run | None = None) -> None:
        require("accelerate", _missing, "tracker")
        super().__init__()
        self.run = run
        self.config: dict[str, Any] = {}
        self._scalars = Scalars()

    @property
    def tracker(self) -> Run | None:
        """The recording."""
        return self.run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the settings, for ``config=tracker.config``."""
        self.config |= values

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers."""
        self._scalars.log(self.run, values)
