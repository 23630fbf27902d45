"""How a recording begins, writes and ends: `Options` and `Flight`, and what the environment says of it.

Environment variables let a launcher control recording without changing the training script:

==================  ============================================================================================
``TRACE_DISABLE``   ``1``: `tracer.record` and ``trace record`` record nothing, and the training runs as without them
``TRACE_PATH``      where `tracer.record` writes its trace, instead of the path that the script gives
``TRACE_MAX_BYTES`` the most that either may write (``500MB``, ``2GiB``); the smaller of two bounds holds. Messages
                    become rarer to stay within it, unless ``stop_at_bytes`` is given: then the recording ends
==================  ============================================================================================

Every option of ``trace record`` has a variable too, ``TRACE_RECORD_`` and the option's name; see its ``--help``.
Torch takes seconds to import, so this module imports what needs it only when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from tracer.errors import CaptureError, UnknownNameError
from tracer.recording.checks import OneOf, Size, Whole, check_fields, from_zero, option, seconds, share, size_of
from tracer.recording.settings import name_of_run, settings_of, tags_of_run

if TYPE_CHECKING:
    from tracer.messaging.receiver import Receiver
    from tracer.observing.capture import Capture
    from tracer.observing.probes import ProbePlan
    from tracer.trace.header import Certificate

QUEUE_BYTES: Final = "256MiB"
"""How much data may wait for the writer thread before the training waits."""
COMMIT_SECONDS: Final = 2.0
"""The most seconds between commits."""
EXCEPTION, SIGNAL = "exception", "signal"
WHEN: Final = ("non_finite", "loss", EXCEPTION, SIGNAL)
"""By default, the triggers that make a flight recorder write."""
NAMES: Final = ("non_finite", "loss", "norm", EXCEPTION, SIGNAL)
"""All names that `Flight` takes as `when`."""

DISABLE, PATH, MAX_BYTES = "TRACE_DISABLE", "TRACE_PATH", "TRACE_MAX_BYTES"
REHEARSAL = "TRACE_REHEARSAL"
"""Set to ``certify`` or ``dry-run`` where a script runs for its first steps only, so that the script can tell."""

Given = TypeVar("Given")


# -- checks that need torch ---------------------------------------------------------------------------------------


def _plan_of_probe(name: str, value: Any) -> ProbePlan:
    from tracer.observing.probes import ProbePlan

    return ProbePlan(*value)


def _codecs(name: str, value: Any) -> dict[str, str]:
    from tracer.trace.compression import Compression

    return dict(Compression(value).choice)


def _flight(name: str, value: Any) -> Flight:
    if not isinstance(value, Flight | Mapping):
        raise CaptureError(f"{name} is a tracer.Flight, not {value!r}")
    return value if isinstance(value, Flight) else Flight.of(value)


def _reasons(name: str, value: Any) -> tuple[str | Receiver, ...]:
    from tracer.messaging.receiver import Receiver

    when = (value,) if isinstance(value, str | Receiver) else tuple(value)
    for one in when:
        if not isinstance(one, str | Receiver):
            raise CaptureError(f"{name} is names and receivers, not {one!r}")
        if isinstance(one, str) and one not in NAMES:
            raise UnknownNameError.of("reason to write what a flight recorder holds", one, NAMES)
    return when


def _captures_of_flight(name: str, value: Any) -> tuple[Capture, ...]:
    from tracer.observing.capture import Capture

    captures = (value,) if isinstance(value, Capture) else tuple(value) if isinstance(value, Iterable) else ()
    if not captures or not all(isinstance(capture, Capture) for capture in captures):
        raise CaptureError(f"{name} is a tracer.Capture or several, not {value!r}")
    if any(capture.runs for capture in captures):
        raise CaptureError("a flight recorder holds no running reductions: of what it drops they would not know")
    if any(capture.hash_above is not None for capture in captures):
        raise CaptureError("a flight recorder holds tensors whole, whatever their size: leave out hash_above")
    return captures


# -- the options --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A flight recorder: holds the last steps in memory in full, and writes them when something happens.

    Every step is observed as `capture` says, besides what is recorded anyway; recorded messages are not held as well.
    When a trigger of `when` fires in a step, the trace gets the steps held before it, that step and the next steps in
    full, as ordinary messages, and a note ``flight`` with the reason. All other steps are recorded as usual.

    Parameters
    ----------
    before, after : int
        Steps before and after the step in which a trigger fires.
    when : iterable of (str or Receiver)
        Triggers. ``"non_finite"``: a NaN or an infinity appears in losses, activations or gradients. ``"loss"``: the
        loss is far above its recent past, as in the rule ``loss_spike``. ``"norm"``: the norm of all gradients is.
        ``"exception"``: the recording ends with an error. ``"signal"``: SIGUSR1 arrives, if the recording begins in
        the main thread; an existing handler is called, too. A `Receiver`, such as a rule, hears every observed message
        and fires when it gives an answer. `Run.keep` always works.
    bytes : int or str
        The most that may be held, such as ``"1GiB"``. The oldest steps are dropped first; a step that alone is larger
        is not held.
    capture : Capture or iterable of Capture, optional
        What is held. By default everything in training passes that a default `Capture` takes.

    Raises
    ------
    CaptureError
        If a value is out of range, or `bytes` is more than the memory of this machine.
    UnknownNameError
        If `when` has an unknown name.

    Examples
    --------
    >>> Flight(before=3, bytes="64MB").bytes, Flight().when
    (64000000, ('non_finite', 'loss', 'exception', 'signal'))
    """

    before: int = option(8, Whole(0), "With --flight: steps before that one to write.")
    after: int = option(4, Whole(0), "With --flight: steps after that one to write.")
    when: Iterable[str | Receiver] = option(WHEN, _reasons)
    bytes: int | str = option("1GiB", Size(), "With --flight: how much may be held. The oldest steps leave first.")
    capture: Capture | Iterable[Capture] | None = option(None, _captures_of_flight)

    def __post_init__(self) -> None:
        check_fields(self, " of a flight recorder")
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.nbytes > there:
            raise CaptureError(
                f"a flight recorder of {self.nbytes:,} bytes does not fit into the memory of this machine, which has "
                f"{there:,}"
            )

    @property
    def captures(self) -> tuple[Capture, ...]:
        """What is held; copies, distinct from all other captures."""
        from tracer.messaging.messages import DEFAULT_TAG
        from tracer.observing.capture import Capture

        given = (Capture(tags=[DEFAULT_TAG]),) if self.capture is None else self.capture
        return tuple(replace(one) for one in ((given,) if isinstance(given, Capture) else given))

    @property
    def names(self) -> tuple[str, ...]:
        """The names in `when`."""
        return tuple(one for one in self.when if isinstance(one, str))

    @property
    def receivers(self) -> tuple[Receiver, ...]:
        """The receivers in `when`."""
        return tuple(one for one in self.when if not isinstance(one, str))

    @property
    def nbytes(self) -> int:
        """The most bytes that may be held."""
        return size_of(self.bytes)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Flight:
        """The flight from which `dataclasses.asdict` made these settings."""
        from tracer.observing.capture import Capture

        given = settings.get("capture")
        several = [given] if isinstance(given, Mapping) else given
        return cls(**{**settings, "capture": None if several is None else [Capture(**one) for one in several]})

    def describe(self) -> dict[str, Any]:
        """Its settings as JSON, for the header of a trace."""
        from tracer.messaging.receiver import describe

        when = [one if isinstance(one, str) else describe(one) for one in self.when]
        told = {"before": self.before, "after": self.after, "when": when, "bytes": self.bytes}
        return {**told, "capture": [capture.describe() for capture in self.captures]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a recording begins, writes and ends.

    Each option is declared here: its default, its check, and what ``trace record --help`` says of it, from which that
    command's options are made. `tracer.record` spells the options out for editors, and describes them at length; all
    code between it and the writer passes this value.

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

    name: str | None = option(None, name_of_run, "What people call this run; tables of several runs show it.")
    tags: str | Iterable[str] = option((), tags_of_run)
    config: Any = option(None, settings_of)
    queue_bytes: int | str = option(QUEUE_BYTES, Size(), "How much data may wait for the thread that writes.")
    on_full: Literal["wait", "drop"] = option(
        "wait", OneOf(("wait", "drop")),
        "When so much waits: let the training wait, or drop messages and count them.",
    )  # fmt: skip
    commit_steps: int | None = option(
        None, Whole(),
        "Make what was recorded safe against kill -9 every N steps.  [default: by time and size only]",
    )  # fmt: skip
    commit_seconds: float = option(COMMIT_SECONDS, from_zero, "And after S seconds at the latest.")
    durable: bool = option(False, None, "Safe against a power failure too (fsync).  [default: no]")
    strict: bool = option(
        False, None,
        "End the training if it can no longer be recorded, and exit with 1 if nothing of one was.  [default: go on]",
    )  # fmt: skip
    compression: str | Mapping[str, str] = option("auto", _codecs)
    overwrite: bool = option(False, None, "Replace what is already at the output's path.")
    resume: bool = option(False, None, "Go on with the trace, if there is one, after a restart.")
    first_step: int | None = option(
        None, Whole(0),
        "With --resume: the step that the checkpoint goes on with.  [default: as the optimizer counted]",
    )  # fmt: skip
    first_epoch: int | None = option(None, Whole(0))
    seeds: Mapping[str, Any] | None = None
    ranks: Iterable[int] | None = option(None, lambda _, ranks: tuple(ranks))
    replicated: Literal["once", "every"] = option(
        "once", OneOf(("once", "every")),
        "Of several ranks: record weights that they hold alike by one of them, or by each.",
    )  # fmt: skip
    max_overhead: float | None = option(
        None, share,
        "The share of the training's CPU time that recording may take, such as 3%: tensors, statistics and hashes, "
        "and then keyframes, are recorded as often as that allows.  [default: with the profile standard 5%]",
    )  # fmt: skip
    overhead_credit: float | None = option(
        None, seconds,
        "CPU time that recording may take before --max-overhead holds, such as 30s.  [default: with the profile "
        "standard 30s, unless --max-overhead is given]",
    )  # fmt: skip
    keyframe_bytes: int | None = None
    update_bytes: int | None = None
    max_bytes: int | None = option(
        None, Size(),
        "Bound of the trace, such as 500MB or 2GiB, before compression, all ranks and attempts together: as it is "
        "used up, what is recorded becomes rarer.",
    )  # fmt: skip
    stop_at_bytes: int | None = option(
        None, Size(),
        "As --max-bytes, but nothing becomes rarer, and the first step that does not fit as a whole ends the "
        "recording; the script goes on.",
    )  # fmt: skip
    min_free_disk: int | None = option(
        None, Size(0),
        "End the recording where less of the disk is free; the script goes on.  [default: 1GiB, or 2 % of the file "
        "system if that is less]",
    )  # fmt: skip
    flight: Flight | None = option(None, _flight)
    certificate: Certificate | None = None
    command: bool = True
    probe: ProbePlan | None = option(None, _plan_of_probe)
    disabled: bool = False
    reenacts: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.resume and (self.first_step is not None or self.first_epoch is not None):
            raise CaptureError("first_step and first_epoch say where to resume; give resume=True with them")
        if self.resume and self.overwrite:
            raise CaptureError("resume goes on with a trace, and overwrite removes it; give one of them")
        if self.max_bytes is not None and self.stop_at_bytes is not None:
            raise CaptureError(
                "max_bytes thins out what is recorded and stop_at_bytes ends the recording: give one of them"
            )
        check_fields(self)

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
        from tracer.observing.profiles import options_of

        missing = {one: value for one, value in options_of(name).items() if getattr(self, one) is None}
        if self.max_overhead is not None:
            missing.pop("overhead_credit", None)
        return replace(self, **missing)

    def in_this_environment(self) -> Options:
        """These options, within what ``TRACE_MAX_BYTES`` and ``TRACE_DISABLE`` allow."""
        max_bytes, stop_at_bytes = bounds_or(self.max_bytes, self.stop_at_bytes)
        return replace(self, max_bytes=max_bytes, stop_at_bytes=stop_at_bytes, disabled=disabled())

    def unbounded(self) -> Options:
        """These options, without bounds of bytes and of overhead."""
        bounds = ("max_bytes", "stop_at_bytes", "max_overhead", "overhead_credit", "keyframe_bytes")
        none: dict[str, Any] = dict.fromkeys(bounds)
        return replace(self, **none)

    def describe(self) -> dict[str, Any]:
        """The options that a trace's header has, as JSON."""
        told = ("queue_bytes", "on_full", "commit_steps", "commit_seconds", "durable")
        of_profile = ("overhead_credit", "keyframe_bytes", "update_bytes")
        bounds = ("max_overhead", *of_profile, "max_bytes", "stop_at_bytes", "min_free_disk")
        return {name: getattr(self, name) for name in (*told, *bounds)}


def check_option(name: str, value: Any) -> Any:
    """A value for an option of `Options` in its one form; raises `CaptureError` if it is invalid."""
    (check,) = (one.metadata["check"] for one in fields(Options) if one.name == name)
    return check(name, value)


# -- environment variables ----------------------------------------------------------------------------------------


def disabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``TRACE_DISABLE`` turns recording off.

    Raises
    ------
    CaptureError
        If the variable is neither a yes nor a no.

    Examples
    --------
    >>> disabled({}), disabled({"TRACE_DISABLE": "1"}), disabled({"TRACE_DISABLE": "no"})
    (False, True, False)
    """
    value = environment.get(DISABLE, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise CaptureError(f"the environment variable {DISABLE} is {value!r}; 1 turns recording off, and 0 leaves it on")


def path_or(given: Given, environment: Mapping[str, str] = os.environ) -> Given | str:
    """The value of ``TRACE_PATH``, else the given path."""
    return environment.get(PATH) or given


def bounds_or(
    max_bytes: int | None, stop_at_bytes: int | None, environment: Mapping[str, str] = os.environ
) -> tuple[int | None, int | None]:
    """Both bounds of a trace, lowered to ``TRACE_MAX_BYTES``.

    The variable bounds `stop_at_bytes` if that is given, else `max_bytes`.

    Raises
    ------
    CaptureError
        If the variable is not a size.

    Examples
    --------
    >>> bounds_or(None, None, {"TRACE_MAX_BYTES": "5kB"}), bounds_or(None, 9000, {"TRACE_MAX_BYTES": "5kB"})
    ((5000, None), (None, 5000))
    """
    value = environment.get(MAX_BYTES)
    if not value:
        return max_bytes, stop_at_bytes
    try:
        bound = size_of(value)
    except CaptureError as error:
        raise CaptureError(f"the environment variable {MAX_BYTES} is no bound: {error}") from None
    if stop_at_bytes is not None:
        return max_bytes, min(stop_at_bytes, bound)
    return bound if max_bytes is None else min(max_bytes, bound), None
