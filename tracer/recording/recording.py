"""`record`: wires exporter, bus, receivers and recorder together; `Run`: the user's handle on the recording."""

from __future__ import annotations

import difflib
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from tracer.errors import CaptureError, TraceError, summary, warn_only
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.messaging.receiver import Receiver, in_order
from tracer.observing.capture import Capture
from tracer.observing.exporter import Exporter
from tracer.observing.profiles import DEFAULT_PROFILE, profile
from tracer.recording import termination
from tracer.recording.flight_recorder import FlightRecorder
from tracer.recording.options import COMMIT_SECONDS, QUEUE_BYTES, Flight, Options, path_or
from tracer.recording.own_part import Member, OwnPart, notes
from tracer.recording.pacer import FirstStep, FreeDisk, Outlook, Pacer, disk_of
from tracer.recording.recorder import Recorder
from tracer.stores.locations import Anywhere, Location, location
from tracer.trace.compression import Compression
from tracer.trace.header import Certificate


class Run:
    """A recording in progress, as ``with record(...) as run`` and `record.start` give it.

    Attributes
    ----------
    closed : bool
        Whether the recording has ended.
    """

    def __init__(
        self,
        path: Location,
        exporter: Exporter,
        recorder: Recorder | None,
        flight: FlightRecorder | None = None,
        end: Callable[[Run], None] | None = None,
    ) -> None:
        self.closed = False
        self._end = end
        self.exporter = exporter
        self.recorder = recorder
        self.flight = flight
        self.bus = exporter.message_bus
        self.path = path
        self._between: list[Pacer | FreeDisk | FirstStep] = []
        self.bus.watch(self._know_answers)

    def _know_answers(self) -> None:
        """Treat the kinds that subscribers produce as answers, also if the subscribers join during the run."""
        if self.recorder is not None:
            self.recorder.derived |= answers_of(self.bus.receivers)

    def paced_by(self, one: Pacer | FreeDisk | FirstStep) -> None:
        """Call ``one.step_over`` after the steps of this recording."""
        self._between.append(one)  # the exporter holds no strong reference
        each_step = isinstance(one, Pacer) and one.each_step
        self.exporter.parts.steps.between.call(one.step_over, each_step=each_step)

    def end_pacing(self) -> None:
        """Have the trace tell what the recording took, if that was measured."""
        for one in self._between:
            if isinstance(one, Pacer):
                one.end()

    def tell_outlook(self, tell: Callable[[Outlook], None]) -> None:
        """After the first recorded step, call `tell` with an estimate of the disk space that the recording takes."""
        if self.recorder is not None:
            self.paced_by(FirstStep(self.path, self.exporter, self.recorder, tell))

    @property
    def global_step(self) -> int:
        """The next global step: save it in checkpoints, so that `record` can resume from it."""
        return self.exporter.global_step

    def log(self, kind: str, value: Any) -> None:
        """Record your own value, as `Exporter.log`."""
        self.exporter.log(kind, value)

    def samples(self, ids: Any) -> None:
        """Give the sample ids of the next training forward where no DataLoader tells them, as `Exporter.samples`."""
        self.exporter.samples(ids)

    def tag(self, name: str) -> AbstractContextManager[None]:
        """Give every pass inside this context a tag, as `Exporter.tag`."""
        return self.exporter.tag(name)

    def probe(
        self, name: str, inputs: Any, labels: Any = None, *, every: int = 1, batch_size: int | None = None
    ) -> None:
        """Observe the model on fixed inputs, as `Exporter.probe`."""
        self.exporter.probe(name, inputs, labels, every=every, batch_size=batch_size)

    def keep(self, why: str) -> None:
        """Write the steps that the flight recorder holds, and the next ones; `why` is kept in the trace.

        Within a step, they are written when the step is over. Does nothing if nothing is recorded.

        Raises
        ------
        CaptureError
            If there is no flight recorder.
        """
        if self.flight is not None:
            self.flight.keep(why)
        elif self.recorder is not None:
            raise CaptureError("nothing is held that could be kept: give the recording flight=tracer.Flight()")

    def close(self) -> None:
        """End the recording of `record.start`: finish the open step, remove the hooks, close the trace.

        Does nothing if it has ended.
        """
        if self._end is not None:
            self._end(self)

    def epoch_finished(self) -> None:
        """End the epoch, as `Exporter.epoch_finished`."""
        self.exporter.epoch_finished()

    def step(self) -> None:
        """End the step, as `Exporter.step`: for loops whose optimizer the recorder does not know."""
        self.exporter.step()


def answers_of(receivers: Iterable[Receiver]) -> set[str]:
    """The kinds of the receivers' own answers, which are not recorded."""
    return {kind for one in receivers for kind in one.produces}


_PATIENCE = 5.0
"""The most seconds that `end` with ``wait=False`` waits for the recorder's thread."""


_started: dict[Run, record] = {}
"""The recordings that `record.start` began and that are not closed."""


class record:  # noqa: N801 - a context manager that reads as a verb, as in contextlib
    """Record a training run: a context manager around a training loop that needs no other change.

    Where a ``with`` cannot stand around the training, as in the cells of a notebook, `start` begins the recording, and
    `Run.close` ends it. A `record` that never began warns when it is dropped.

    Parameters
    ----------
    path : path or URL
        The trace: a new ``.zarr`` directory or ``.h5`` file, or a URL that ends in ``.zarr`` (``s3://bucket/run.zarr``).
    model : nn.Module
        The root of the network; wrappers (compiled, DistributedDataParallel) are looked through.
    optimizer : Optimizer or iterable of Optimizer, optional
        A step ends when the last optimizer steps. None: each training forward of the model is a step. An empty
        sequence: you call ``run.step()``.
    loss : nn.Module or callable, optional
        A loss module, or a function of ``torch.nn.functional`` that the loop calls by that path. Its arguments are
        recorded as ``network_output`` and ``input_labels``, its results as ``loss_terms``, and in evaluations as
        ``loss``. The training's ``loss`` is the tensor that ``backward`` is called on, with or without this argument,
        or the value of ``run.log("loss", value)`` where the loop logs it.
    capture : Capture, iterable of Capture or str
        What to observe; `receivers` get nothing beyond it. A string names a `tracer.profile`; the default is
        ``"standard"``. ``tracer.Capture()`` observes everything.
    receivers : iterable of Receiver
        Subscribers that listen live, on the same bus, to the same messages that are recorded.
    logs : iterable of str
        Your own kinds that the loop will pass to `Run.log`, so that `receivers` can ask for them.
    name : str, optional
        What people call this run; tables of several runs show it.
    tags : str or iterable of str
        Words by which people find runs.
    config : mapping, argparse.Namespace, dataclass or OmegaConf configuration, optional
        The settings of the run, for the header, with ``***`` for passwords, keys and tokens. ``trace info FOLDER``
        shows those that differ between runs. Values that JSON does not know are kept as text.
    overwrite : bool
        Whether to replace a trace that is at `path`. Anything else there is never replaced.
    strict : bool
        Whether an exception while observing reaches the training loop. By default the part that fails is disabled,
        with a warning and a note in the trace.
    seeds : mapping, optional
        The seeds the run was given, for the header. By default torch's initial seed.
    queue_bytes : int or str
        The most data that may wait for the writer thread, such as ``"256MiB"``.
    on_full : {"wait", "drop"}
        What happens when `queue_bytes` wait: the training waits, or messages are dropped and counted.
    commit_steps, commit_seconds : int, float
        Recorded messages are made safe against ``kill -9`` after this many steps (None: no limit) or seconds,
        whichever comes first, and also after 256 MiB or 65,536 messages.
    durable : bool
        Whether each commit is also safe against a power failure (``fsync``).
    resume : bool
        Whether to continue the trace at `path`, if it exists, after a restart from a checkpoint. This attempt
        supersedes the steps from `first_step` on; the earlier records of these steps stay in the trace.
    first_step : int, optional
        The global step that the training continues with. By default the optimizer's own count of its steps (Adam and
        its relatives count, SGD does not), if its state was loaded before recording starts.
    first_epoch : int, optional
        The epoch of that step; by default the epoch in the trace.
    ranks : iterable of int, optional
        The ranks of a distributed run that are recorded, each into its own part; by default all. On other ranks
        `record` does nothing.
    replicated : {"once", "every"}
        Who records weights that several ranks hold alike, their averaged gradients and their updates: the lowest of
        these ranks only, or every rank, to see whether they drift apart.
    compression : str or mapping
        How the writer thread compresses data: ``"auto"`` (integers and inputs, but no other floats; in HDF5 nothing),
        ``"none"``, ``"lz4"``, ``"lz4hc"`` or ``"zstd"``, or a codec for each kind, such as ``{"activations": "zstd"}``.
    max_overhead : float or str, optional
        The share of the training's CPU time that recording may take, such as ``0.03`` or ``"3%"``; by default 5 % with
        the profile ``standard``, else no bound. Recording measures its share, and records training steps more seldom
        or more often, each with all that was asked for. When a recorded loss or the norm of all gradients leaves its
        past, the next 16 steps are recorded, too. A note ``schedule`` in the trace tells each change.
    overhead_credit : float or str, optional
        CPU time that recording may take before `max_overhead` holds, in seconds or such as ``"30s"``; by default 30
        seconds with the profile ``standard``, unless `max_overhead` is given.
    max_bytes : int or str, optional
        The most bytes that the trace may take, such as ``"2GiB"``, counted before compression and including earlier
        attempts. Ranks get equal shares. As the bytes are used up, messages become rarer: tensors first, then
        keyframes, inputs and losses. A step that does not fit is left out, so a step's messages are held in memory
        until the step is over. A trace takes some 150 kB before its first message, whatever the bound is.
    stop_at_bytes : int or str, optional
        The same bound, but all messages keep their frequency, and the first step that does not fit as a whole ends
        the recording. The trace is then complete up to that step and says so; the training and `receivers` continue.
    min_free_disk : int or str, optional
        The recording ends in the same way when less than this is free on the disk. By default 1 GiB, or 2 % of the
        file system if that is less. 0: no limit.
    flight : Flight, optional
        Also hold the last steps in full in memory, and write them when something happens, such as a NaN.
    certificate : Certificate, optional
        The verdict of `tracer.certify` on this training; it is kept in the trace.
    command : bool
        Whether the header has the command line, with ``***`` for passwords, keys and tokens.
    reenacts : mapping, optional
        For the header: which steps of which run this training runs again; see `tracer.reenact`.

    Raises
    ------
    TraceExistsError
        If something is at `path`; with `resume`, if the trace at `path` is still being recorded.
    CaptureError
        If the capture matches nothing, a receiver needs a stream that the capture does not observe, `resume` cannot
        tell the step, or an environment variable (`tracer.recording.options`) has an invalid value.
    UnknownNameError
        If `compression` names no codec.

    Examples
    --------
    >>> import tempfile, torch
    >>> import tracer
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> model, loss = torch.nn.Linear(3, 2), torch.nn.MSELoss()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tracer.record(path, model, optimizer, loss=loss, capture=tracer.Capture()):
    ...     for _ in range(4):
    ...         optimizer.zero_grad()
    ...         loss(model(torch.ones(5, 3)), torch.zeros(5, 2)).backward()
    ...         optimizer.step()
    >>> steps, weights = tracer.open(path).array("weights", "")
    >>> steps.tolist(), weights.shape
    ([0, 1, 2, 3], (4, 2, 3))
    """

    def __init__(
        self,
        path: Anywhere,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        loss: nn.Module | Callable[..., Any] | None = None,
        capture: Capture | Iterable[Capture] | str | None = None,
        receivers: Iterable[Receiver] = (),
        logs: Iterable[str] = (),
        name: str | None = None,
        tags: str | Iterable[str] = (),
        config: Any = None,
        overwrite: bool = False,
        strict: bool = False,
        seeds: Mapping[str, Any] | None = None,
        queue_bytes: int | str = QUEUE_BYTES,
        on_full: Literal["wait", "drop"] = "wait",
        commit_steps: int | None = None,
        commit_seconds: float = COMMIT_SECONDS,
        durable: bool = False,
        resume: bool = False,
        first_step: int | None = None,
        first_epoch: int | None = None,
        ranks: Iterable[int] | None = None,
        replicated: Literal["once", "every"] = "once",
        compression: str | Mapping[str, str] = "auto",
        max_overhead: float | str | None = None,
        overhead_credit: float | str | None = None,
        max_bytes: int | str | None = None,
        stop_at_bytes: int | str | None = None,
        min_free_disk: int | str | None = None,
        flight: Flight | None = None,
        certificate: Certificate | None = None,
        command: bool = True,
        reenacts: Mapping[str, Any] | None = None,
    ) -> None:
        given = locals()
        self.path = location(path_or(path))
        """Where the trace is written."""
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        options = Options.among(given)
        if capture is None or isinstance(capture, str):
            chosen = DEFAULT_PROFILE if capture is None else capture
            options, captures = options.of_profile(chosen), profile(chosen)
        else:
            captures = tuple(capture) if isinstance(capture, Iterable) else (capture,)
        self._options = options.in_this_environment()
        self._captures = captures
        if not self._captures or not all(isinstance(one, Capture) for one in self._captures):
            raise CaptureError(f"capture is a tracer.Capture or several of them, not {capture!r}")
        self._receivers = tuple(receivers)
        self._logs = (logs,) if isinstance(logs, str) else tuple(logs)
        self._run: Run | None = None
        caller = sys._getframe(1)
        self._code, self._line = caller.f_code, caller.f_lineno  # that made this object
        self._forgotten = weakref.finalize(self, _tell_forgotten, self.path, self._code.co_filename, self._line)

    def start(self) -> Run:
        """Begin the recording, without a ``with``; `Run.close` ends it.

        A recording that a cell of a notebook started ends first, with a warning, if the cell runs again, as does one
        with the same path.

        Raises
        ------
        TraceExistsError, CaptureError
            As a ``with``.
        """
        for run, other in [*_started.items()]:
            if other is not self and (run.path == self.path or self._made_again(other)):
                run.close()
                warn_only(f"the recording to {run.path} ends here, because it is started again", stacklevel=2)
        run = self.__enter__()
        _started[run] = self
        return run

    def _made_again(self, other: record) -> bool:
        """Whether a cell made another `record` and ran again to make this one: each run of a cell compiles it anew."""
        mine, theirs = self._code, other._code
        return mine is not theirs and (mine.co_filename, self._line) == (theirs.co_filename, other._line)

    def close(self) -> None:
        """End the recording, as `Run.close`; does nothing if there is none."""
        if self._run is not None:
            self._run.close()

    def __enter__(self) -> Run:
        self._forgotten.detach()
        if self._run is not None and not self._run.closed:
            raise CaptureError(f"the recording to {self.path} has begun; close it before it begins again")
        exporter = observer(self.path, self._captures, self._options)
        try:
            exporter.set_model(self._model)
            exporter.set_optimizer(self._optimizer)
            exporter.watch_backward()
            if self._loss is not None:
                exporter.set_loss(self._loss)
            for kind in self._logs:
                exporter.message_bus.register_topic(kind, "network")
            if "loss" in self._logs:
                exporter.parts.values.loss_is_logged(DEFAULT_TAG)
            exporter.check(self._receivers, self._logs)
            self._run = start(self.path, exporter, self._receivers, self._options)
        except BaseException:
            exporter.detach()
            raise
        return self._run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        run = self._run
        if run is not None:
            end(run, None if concluded(run.exporter, error) else error)


def _tell_forgotten(path: Location, file: str, line: int) -> None:
    """Warn, as Python does of a coroutine that was never awaited, of a `record` that was dropped before it began."""
    told = f"nothing is recorded to {path}: use `with record(...) as run:`, or `run = record(...).start()`"
    warn_only(told, place=(file, line))


def concluded(exporter: Exporter, error: BaseException | None) -> bool:
    """Whether a training ended in order (`ends_in_order`). A ``sys.exit("bye")`` must come after a whole step."""
    last_word = isinstance(error, SystemExit) and isinstance(error.code, str)
    amid = exporter.parts.clock.open or not exporter.steps_seen
    return termination.ends_in_order(error) and not (last_word and amid)


def observer(path: Location, captures: Sequence[Capture], options: Options) -> Exporter:
    """An exporter for a recording at `path`, with its own bus, and the probe of the options."""
    bus = MessageBus(f"recording to {path}", on_error="raise" if options.strict else "disable")
    exporter = Exporter(message_bus=bus, capture=captures, strict=options.strict)
    if options.probe:
        exporter.probe_first(options.probe)
    if options.update_bytes is not None:
        exporter.take_turns(options.update_bytes)
    return exporter


def start(
    path: Location,
    exporter: Exporter,
    receivers: Iterable[Receiver] = (),
    options: Options | None = None,
    *,
    member: Member | None = None,
) -> Run:
    """Put a recorder and the receivers on an exporter's bus.

    Parameters
    ----------
    path : Location
    exporter : Exporter
    receivers : iterable of Receiver
    options : Options, optional
    member : Member, optional
        Given for a script under ``trace record``. The trace is then created at the first message, after the script has
        loaded its checkpoint and knows its rank.
    """
    options = options if options is not None else Options()
    part = OwnPart(path, exporter, options, member)
    if options.disabled and options.first_step is not None:
        exporter.start_at(options.first_step, 0, options.first_epoch or 0)
    if options.disabled or not part.is_recorded:
        return Run(path, exporter, None, end=end)
    ordered = in_order(tuple(receivers))
    derived = answers_of(ordered)
    _doubt_kinds(Compression(options.compression), {*KINDS, *exporter.message_bus.topics, *derived})
    _try_to_register(exporter.message_bus, ordered)

    def stopped(about: Mapping[str, Any]) -> None:
        if exporter.parts.gate.attached:  # else `end` writes the notes
            for note in notes(exporter):
                recorder.note(note)
        exporter.message_bus.unregister(recorder)
        by = about["by"]
        warn_only(
            f"the recording to {path} ends before global step {about['global_step']}, for which {by} ({about[by]:,}) "
            "leaves no room; the training goes on",
            stacklevel=2,
        )

    lazily = member is not None
    if lazily:
        exporter.parts.clock.starting = part.begin
    else:
        part.begin()
    recorder = Recorder(
        part.make_writer if lazily else part.make_writer(),
        queue_bytes=options.queue_bytes,
        on_full=options.on_full,
        derived=derived,
        budget=part.budget,
        stopped=stopped,
        elsewhere=exporter.parts.steps.ranks.elsewhere,
    )
    try:
        for one in (recorder, *ordered):
            exporter.message_bus.register(one)
    except BaseException as error:
        recorder.close(f"failed: {summary(error)}")
        raise
    flight = None if options.flight is None else FlightRecorder(options.flight, exporter, recorder)
    run = Run(path, exporter, recorder, flight, end)
    pacer, folder = Pacer.of(options, exporter, recorder), disk_of(path)
    if pacer is not None:
        run.paced_by(pacer)
    if folder is not None:
        run.paced_by(FreeDisk(folder, options.min_free_disk, exporter, recorder))
    if not lazily:  # under `trace record`, SIGTERM raises SystemExit in the script
        termination.watch(recorder.close)
    return run


def _try_to_register(bus: MessageBus, receivers: Iterable[Receiver]) -> None:
    """Raise the errors of registering the receivers before a file is created."""
    trial = MessageBus(bus.name)
    for kind, topic in bus.topics.items():
        trial.register_topic(kind, topic)
    for one in (*bus.receivers, *receivers):
        trial.register(one)


def _doubt_kinds(compression: Compression, known: set[str]) -> None:
    """Warn of kinds that are probably misspelt. Other unknown kinds are fine: `Run.log` may push them at any time."""
    for kind in compression.kinds:
        close = [] if kind in known else difflib.get_close_matches(kind, sorted(known), n=1)
        if close:
            said = f"a compression is chosen for messages of kind {kind!r}; did you mean {close[0]!r}?"
            warn_only(said, stacklevel=3)


def _finish(flight: FlightRecorder | None, error: BaseException | None) -> None:
    """Let a flight recorder write what is due at the end. If it fails, its held steps are lost."""
    if flight is not None:
        try:
            flight.finish_with(error)
        except Exception as raised:
            told = f"what the flight recorder holds is lost: {type(raised).__name__}: {raised}"
            warn_only(told, stacklevel=4)


def end(run: Run, error: BaseException | None = None, *, wait: bool = True) -> None:
    """Finish open steps, remove the hooks, and close the trace; a failure to write is a warning unless strict.

    `wait`: whether to wait until all is written, however long that takes. If not, the recorder's thread may still
    write on return.
    """
    if run.closed:
        return
    run.closed = True
    _started.pop(run, None)
    exporter, recorder, strict = run.exporter, run.recorder, run.exporter.strict
    if recorder is None:
        exporter.detach()
        return
    failure: BaseException | None = None
    try:
        if error is None:
            exporter.finish()
            _finish(run.flight, None)
            run.bus.finish()
    except BaseException as raised:  # an interrupt, or under strict a failed receiver; raised below
        failure = raised
    exporter.detach()
    cause = error if error is not None else failure
    _finish(run.flight, cause)
    if run.flight is not None:
        run.flight.let_go()
    run.end_pacing()
    for note in notes(exporter):
        recorder.note(note)
    status = "finished" if cause is None else f"failed: {summary(cause)}"
    try:
        # garbage collection may call this in a place where the recorder's thread cannot continue until it returns
        recorder.close(status, patience=None if wait else _PATIENCE)
    except TraceError as raised:
        if strict and cause is None:
            failure = raised
        else:
            warn_only(f"the trace is incomplete: {raised}", stacklevel=3)
    termination.unwatch(recorder.close)
    try:
        if not wait and recorder in run.bus.receivers:
            run.bus.unregister(recorder)
        run.bus.close()
    except Exception as raised:
        if strict and cause is None:
            failure = failure or raised
        else:
            told = f"a receiver could not be closed: {type(raised).__name__}: {raised}"
            warn_only(told, stacklevel=3)
    if failure is not None:
        raise failure
