"""`Problems`: notes of what is not observed, and why."""

from __future__ import annotations

from typing import Any

from tracer.errors import raised_by_signal, warn_only
from tracer.observing.clock import Clock


class Problems:
    """Notes what is not observed, so that the training continues. The first note of each kind is also a warning.

    Parameters
    ----------
    clock : Clock
        Gives the step of a note.
    strict : bool
        Whether errors are raised in the training loop.

    Attributes
    ----------
    all : list of dict
        The notes: `what`, `why`, their `count`, and the `global_step` of the first occurrence.
    enabled : bool
        Whether problems are currently noted.
    """

    def __init__(self, clock: Clock, *, strict: bool) -> None:
        self.all: list[dict[str, Any]] = []
        self.enabled = True
        self.strict = strict
        self._clock = clock
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def note(self, what: str, why: str, *, warn: bool = True) -> None:
        """Note what is not observed, and why. `warn`: False if nothing is missing."""
        if not self.enabled:  # observation has ended, for a reason already noted
            return
        known = self._known.get((what, why))
        if known is not None:
            known["count"] += 1
            return
        known = self._known[what, why] = {"what": what, "why": why, "count": 1, "global_step": self._clock.step}
        self.all.append(known)
        if warn:
            warn_only(f"{what} is not observed: {why}; the training goes on", stacklevel=3)

    def failed(self, what: str, error: Exception) -> None:
        """Note an exception that ended an observation; raise it under `strict` or if a signal handler raised it."""
        if self.strict or raised_by_signal(error):
            raise error
        self.note(what, f"{type(error).__name__}: {error}")
