"""`Options`: how a recording begins, writes and ends, as a single value that every way of recording passes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from tracer.errors import CaptureError
from tracer.observing.probes import ProbePlan
from tracer.observing.profiles import options_of
from tracer.recording import environment
from tracer.recording.flight import Flight
from tracer.trace.certificate import Certificate
from tracer.trace.compression import Compression

QUEUE_BYTES: Final = 256 << 20
"""How much data may wait for the writer thread before the training waits."""
COMMIT_SECONDS: Final = 2.0
"""The most seconds between commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a recording begins, writes and ends.

    Each option is a field here, with its default and its check. Its description is in `tracer.record`. `tracer.record`
    and ``trace record`` repeat the options for their users; all code between them and the writer passes this value.

    Attributes
    ----------
    probe : ProbePlan, optional
        Regularly run the model on its first datapoints, under the tag ``probe``; see `Exporter.probe_first`. Only
        ``trace record`` and profiles set it.
    overhead_credit : float, optional
        Seconds of CPU time that the recording may take before `max_overhead` holds; None: 0.
    keyframe_bytes : int, optional
        Bytes that keyframes may take at their given frequency, before they are spread. Only profiles set it.
    update_bytes : int, optional
        The most bytes of weights that a step keeps to compute updates; see `Exporter.take_turns`. Only profiles set it.
    disabled : bool
        Whether steps are only counted and nothing is recorded (``TRACE_DISABLE``).
    reenacts : mapping, optional
        For the header: which steps of which run this training runs again.

    Raises
    ------
    CaptureError
        If an option has an invalid value, or two options exclude each other.
    UnknownNameError
        If `compression` names no codec.
    """

    overwrite: bool = False
    strict: bool = False
    seeds: Mapping[str, Any] | None = None
    queue_bytes: int = QUEUE_BYTES
    on_full: Literal["wait", "drop"] = "wait"
    commit_steps: int | None = None
    commit_seconds: float = COMMIT_SECONDS
    durable: bool = False
    resume: bool = False
    first_step: int | None = None
    first_epoch: int | None = None
    ranks: Iterable[int] | None = None
    replicated: Literal["once", "every"] = "once"
    compression: str | Mapping[str, str] = "auto"
    max_overhead: float | None = None
    overhead_credit: float | None = None
    keyframe_bytes: int | None = None
    update_bytes: int | None = None
    max_bytes: int | None = None
    stop_at_bytes: int | None = None
    min_free_disk: int | None = None
    flight: Flight | None = None
    certificate: Certificate | None = None
    command: bool = True
    probe: ProbePlan | None = None
    disabled: bool = False
    reenacts: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.resume and (self.first_step is not None or self.first_epoch is not None):
            raise CaptureError("first_step and first_epoch say where to resume; give resume=True with them")
        for name, value in (("first_step", self.first_step), ("first_epoch", self.first_epoch)):
            if value is not None and (type(value) is not int or value < 0):
                raise CaptureError(f"{name} is a whole number from 0, not {value!r}")
        check_queue(self.queue_bytes, self.on_full)
        if self.commit_steps is not None and (type(self.commit_steps) is not int or self.commit_steps < 1):
            raise CaptureError(f"commit_steps is a whole number from 1, or None, not {self.commit_steps!r}")
        if type(self.commit_seconds) not in (int, float) or not self.commit_seconds >= 0:
            raise CaptureError(f"commit_seconds is a number from 0, not {self.commit_seconds!r}")
        if self.resume and self.overwrite:
            raise CaptureError("resume goes on with a trace, and overwrite removes it; give one of them")
        if self.max_bytes is not None and self.stop_at_bytes is not None:
            raise CaptureError(
                "max_bytes thins out what is recorded and stop_at_bytes ends the recording: give one of them"
            )
        if self.flight is not None and not isinstance(self.flight, Flight | Mapping):
            raise CaptureError(f"flight is a tracer.Flight, not {self.flight!r}")
        if self.replicated not in ("once", "every"):
            raise CaptureError(f"replicated is 'once' or 'every', not {self.replicated!r}")
        # normalize the options that can be given in several forms
        held = {
            "max_bytes": None if self.max_bytes is None else environment.size_of(self.max_bytes),
            "stop_at_bytes": None if self.stop_at_bytes is None else environment.size_of(self.stop_at_bytes),
            "max_overhead": None if self.max_overhead is None else environment.share_of(self.max_overhead),
            "overhead_credit": None if self.overhead_credit is None else environment.seconds_of(self.overhead_credit),
            "min_free_disk": None if self.min_free_disk is None else environment.size_of(self.min_free_disk, least=0),
            "ranks": None if self.ranks is None else tuple(self.ranks),
            "probe": None if self.probe is None else ProbePlan(*self.probe),
            "compression": dict(Compression(self.compression).choice),
            "flight": Flight.of(self.flight) if isinstance(self.flight, Mapping) else self.flight,
        }
        for name, one in held.items():
            object.__setattr__(self, name, one)

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> Options:
        """Options from a mapping of names to values, such as all parameters of a function; other names are ignored."""
        return cls(**{one.name: given[one.name] for one in fields(cls) if one.name in given})

    def of_profile(self, name: str) -> Options:
        """These options, with those of a profile where they are None.

        Raises
        ------
        UnknownNameError
            If `name` is no profile.
        """
        missing = {one: value for one, value in options_of(name).items() if getattr(self, one) is None}
        if self.max_overhead is not None:
            missing.pop("overhead_credit", None)
        return replace(self, **missing)

    def in_this_environment(self) -> Options:
        """These options, within what ``TRACE_MAX_BYTES`` and ``TRACE_DISABLE`` allow."""
        max_bytes, stop_at_bytes = environment.bounds_or(self.max_bytes, self.stop_at_bytes)
        return replace(self, max_bytes=max_bytes, stop_at_bytes=stop_at_bytes, disabled=environment.disabled())

    def unbounded(self) -> Options:
        """These options, without bounds of bytes and of overhead."""
        return replace(
            self, max_bytes=None, stop_at_bytes=None, max_overhead=None, overhead_credit=None, keyframe_bytes=None
        )

    def describe(self) -> dict[str, Any]:
        """The options that a trace's header has, as JSON."""
        told = ("queue_bytes", "on_full", "commit_steps", "commit_seconds", "durable")
        of_profile = ("overhead_credit", "keyframe_bytes", "update_bytes")
        bounds = ("max_overhead", *of_profile, "max_bytes", "stop_at_bytes", "min_free_disk")
        return {name: getattr(self, name) for name in (*told, *bounds)}


def check_queue(queue_bytes: int, on_full: str) -> None:
    """Raise `CaptureError` unless these are valid settings of a `Recorder`'s queue."""
    if type(queue_bytes) is not int or queue_bytes < 1:
        raise CaptureError(f"queue_bytes is a whole number from 1, not {queue_bytes!r}")
    if on_full not in ("wait", "drop"):
        raise CaptureError(f"on_full is 'wait' or 'drop', not {on_full!r}")
