"""`record`, which wires a whole recording: exporter, bus, receivers, recorder and trace; and how it begins and ends."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from tracer.errors import CaptureError, TraceError, plain, summary, warn_only
from tracer.format.declarations import declaration
from tracer.format.journal import Column
from tracer.format.names import part_name
from tracer.messaging.bus import MessageBus, Receiver, in_order
from tracer.messaging.messages import DEFAULT_TAG, KINDS
from tracer.observing.capture import Capture
from tracer.observing.exporter import Exporter
from tracer.recording import environment, termination
from tracer.recording.budget import Budget, already_spent
from tracer.recording.family import Member
from tracer.recording.recorder import COMMIT_SECONDS, QUEUE_BYTES, Recorder, check_options
from tracer.stores import Anywhere, Location, exists, location
from tracer.trace.compression import Compression
from tracer.trace.part import Process, claim, of_launch, run_id_of, there, this_process
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter, refuse_here

if TYPE_CHECKING:
    from tracer.recording.certifying.certify import Certificate

NO_EPOCHS = (
    "no epoch was seen to end, so all steps are of one: run.epoch_finished() ends an epoch; under `trace record` "
    "a DataLoader does so that feeds the training and comes to its end"
)
_PATIENCE = 5.0
"""Seconds that the end of a recording that was dropped waits for the thread, at most."""


class Run:
    """A recording in progress: what `record` gives inside its ``with`` block."""

    def __init__(self, path: Location, exporter: Exporter, recorder: Recorder | None) -> None:
        self.exporter = exporter
        self.recorder = recorder
        self.bus = exporter.message_bus
        self.path = path
        self.bus.watch(self._know_answers)

    def _know_answers(self) -> None:
        """What a subscriber says that joins in the middle of the run is no observation either."""
        if self.recorder is not None:
            self.recorder.derived.update(kind for one in self.bus.receivers for kind in getattr(one, "produces", ()))

    @property
    def global_step(self) -> int:
        """The global step that comes next: what a checkpoint should hold, for `record` to resume from."""
        return self.exporter.global_step

    def log(self, kind: str, value: Any) -> None:
        """Record a value of your own, as `Exporter.log`."""
        self.exporter.log(kind, value)

    def tag(self, name: str) -> AbstractContextManager[None]:
        """Give every pass inside this context a tag, as `Exporter.tag`."""
        return self.exporter.tag(name)

    def probe(
        self, name: str, inputs: Any, labels: Any = None, *, every: int = 1, batch_size: int | None = None
    ) -> None:
        """Observe the model on fixed inputs, as `Exporter.probe`."""
        self.exporter.probe(name, inputs, labels, every=every, batch_size=batch_size)

    def epoch_finished(self) -> None:
        """End the epoch, as `Exporter.epoch_finished`."""
        self.exporter.epoch_finished()

    def step(self) -> None:
        """End the step, as `Exporter.step`: for loops whose optimizer the recorder does not know."""
        self.exporter.step()


class record:  # noqa: N801 - a context manager that reads as a verb, as in contextlib
    """Record a training run: a context manager around a training loop that needs no other change.

    Parameters
    ----------
    path : path or URL
        Of the trace: a new ``.zarr`` directory or ``.h5`` file, or a URL that ends in ``.zarr`` (``s3://bucket/run.zarr``).
    model : nn.Module
        The root of the network; wrappers (compiled, DistributedDataParallel) are looked through.
    optimizer : Optimizer or iterable of Optimizer, optional
        The last one's step ends a step. None: each training forward of the model is a step. An empty sequence: you call
        ``run.step()``.
    loss : nn.Module or callable, optional
        A loss module, or a function of ``torch.nn.functional`` that the loop calls by that path. It gives
        ``network_output`` and ``input_labels``, what it returned as ``loss_terms``, and the ``loss`` of evaluations.
        The ``loss`` of the training is what ``backward`` is called on, whether or not this is given; where you log
        another with ``run.log("loss", value)``, it is that.
    capture : Capture or iterable of Capture
        What to observe; also the bound of what `receivers` can get.
    receivers : iterable of Receiver
        Subscribers that listen live, on the same bus, to the same messages that are recorded.
    logs : iterable of str
        Kinds of your own that the loop will `Run.log`, so that `receivers` can ask for them.
    overwrite : bool
        Whether to replace a trace that is at `path`. Anything else there is never replaced.
    strict : bool
        Whether an exception while observing reaches the training loop. By default what fails is disabled, with a
        warning and a note in the trace.
    seeds : mapping, optional
        The seeds the run was given, for the header. By default torch's initial seed.
    queue_bytes : int
        How much data may wait for the writer thread.
    on_full : {"wait", "drop"}
        What happens when so much waits: the training waits, or messages are dropped and counted.
    commit_steps, commit_seconds : int, float
        What was recorded is made safe against ``kill -9`` after so many steps (None: however many) or seconds,
        whichever comes first; also after 256 MiB or 65,536 messages.
    durable : bool
        Whether it is then safe against a power failure, too (``fsync``).
    resume : bool
        Whether to go on with the trace at `path`, if there is one, after a restart from a checkpoint: what it has of
        the steps from `first_step` on is superseded by this attempt. Nothing that was recorded is written over.
    first_step : int, optional
        The global step that the training goes on with. By default it is what the optimizer counted, if it counts its
        steps (Adam and its kind do, SGD does not) and its state was loaded before this.
    first_epoch : int, optional
        The epoch of that step; by default the one that the trace says.
    ranks : iterable of int, optional
        The ranks of a distributed run that are recorded, each into a part of its own; by default all. On the others
        this does nothing.
    replicated : {"once", "every"}
        Whether weights that several ranks hold alike, their gradients (as averaged) and their updates are recorded by
        the lowest of these ranks only, or by each: to see whether they drift apart.
    compression : str or mapping
        How the data is compressed, on the writer thread: ``"auto"`` (integers are, floats are not; in HDF5 nothing),
        ``"none"``, ``"lz4"`` or ``"zstd"``, or one of them for each kind, such as ``{"activations": "zstd"}``.
    max_bytes : int or str, optional
        The most that the trace may take, such as ``"2GiB"``, counted before compression, with what earlier attempts
        took; of several ranks, each may take an equal share. The first step that does not fit as a whole ends the
        recording: the trace is closed, complete up to there, and says so; the training, and `receivers`, go on. To know
        that, a step's messages are held in memory until it is over. A trace takes some 150 kB before its first message,
        whatever the bound is.
    certificate : Certificate, optional
        What `tracer.certify` said of this training; it is kept in the trace.
    command : bool
        Whether the header has the command line; what it says of passwords, keys and tokens is ``***`` there.

    Raises
    ------
    TraceExistsError
        If something is at `path`; with `resume`, if it is still being recorded.
    CaptureError
        If the capture matches nothing, a receiver needs a stream that the capture does not observe, or `resume` cannot
        tell the step; or if a variable of the environment (`tracer.recording.environment`) has no such value.
    UnknownNameError
        If there is no such compression.

    Examples
    --------
    >>> import tempfile, torch
    >>> import tracer
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> model, loss = torch.nn.Linear(3, 2), torch.nn.MSELoss()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tracer.record(path, model, optimizer, loss=loss):
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
        capture: Capture | Iterable[Capture] | None = None,
        receivers: Iterable[Receiver] = (),
        logs: Iterable[str] = (),
        overwrite: bool = False,
        strict: bool = False,
        seeds: Mapping[str, Any] | None = None,
        queue_bytes: int = QUEUE_BYTES,
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
        max_bytes: int | str | None = None,
        certificate: Certificate | None = None,
        command: bool = True,
    ) -> None:
        if not resume and (first_step is not None or first_epoch is not None):
            raise CaptureError("first_step and first_epoch say where to resume; give resume=True with them")
        self._path = location(environment.path_or(path))
        self._options = Options(
            overwrite=overwrite,
            resume=Resume(first_step, first_epoch) if resume else None,
            seeds=seeds,
            queue_bytes=queue_bytes,
            on_full=on_full,
            commit_steps=commit_steps,
            commit_seconds=commit_seconds,
            durable=durable,
            ranks=ranks,
            replicated=replicated,
            compression=compression,
            max_bytes=environment.bound_or(None if max_bytes is None else environment.size_of(max_bytes)),
            certificate=certificate,
            command=command,
            disabled=environment.disabled(),
        )
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        if not isinstance(capture, Capture | Iterable | None):
            raise CaptureError(f"capture is a tracer.Capture or several of them, not {capture!r}")
        self._captures = (
            (Capture(),) if capture is None else (capture,) if isinstance(capture, Capture) else tuple(capture)
        )
        if not self._captures or not all(isinstance(one, Capture) for one in self._captures):
            raise CaptureError(f"capture is a tracer.Capture or several of them, not {capture!r}")
        self._receivers = tuple(receivers)
        self._logs = (logs,) if isinstance(logs, str) else tuple(logs)
        self._strict = strict
        self._run: Run | None = None

    def __enter__(self) -> Run:
        bus = MessageBus(f"recording to {self._path}", on_error="raise" if self._strict else "disable")
        exporter = Exporter(message_bus=bus, capture=self._captures, strict=self._strict)
        try:
            exporter.set_model(self._model)
            exporter.set_optimizer(self._optimizer)
            exporter.watch_backward()
            if self._loss is not None:
                exporter.set_loss(self._loss)
            for kind in self._logs:
                bus.register_topic(kind, "network")
            if "loss" in self._logs:
                exporter.loss_is_logged()
            exporter.check(self._receivers, self._logs)
            run = start(self._path, exporter, self._receivers, self._options)
        except BaseException:
            exporter.detach()
            raise
        self._run = run
        if run.recorder is not None:
            termination.watch(run.recorder.close)
        return run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        run, self._run = self._run, None
        if run is not None:
            end(run, None if concluded(run.exporter, error) else error)


def concluded(exporter: Exporter, error: BaseException | None) -> bool:
    """Whether a training has come to its end where this left it: without an error, or with ``sys.exit("bye")``."""
    last_word = isinstance(error, SystemExit) and isinstance(error.code, str)
    return termination.ends_in_order(error) and not (last_word and (exporter.clock.open or not exporter.steps_seen))


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a training goes on after a restart; None: as the optimizer and the trace say."""

    first_step: int | None = None
    first_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("first_step", "first_epoch"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise CaptureError(f"{name} is a whole number from 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a recording does beside observing; each as in `record`.

    Attributes
    ----------
    resume : Resume, optional
        Where to go on with a trace that is there.
    disabled : bool
        Whether steps are only counted.

    Raises
    ------
    CaptureError
        If one has no such value, or two of them exclude each other.
    UnknownNameError
        If there is no such compression.
    """

    overwrite: bool = False
    resume: Resume | None = None
    seeds: Mapping[str, Any] | None = None
    queue_bytes: int = QUEUE_BYTES
    on_full: Literal["wait", "drop"] = "wait"
    commit_steps: int | None = None
    commit_seconds: float = COMMIT_SECONDS
    durable: bool = False
    ranks: Iterable[int] | None = None
    replicated: Literal["once", "every"] = "once"
    compression: str | Mapping[str, str] = "auto"
    max_bytes: int | None = None
    certificate: Certificate | None = None
    command: bool = True
    disabled: bool = False

    def __post_init__(self) -> None:
        check_options(
            queue_bytes=self.queue_bytes,
            on_full=self.on_full,
            commit_steps=self.commit_steps,
            commit_seconds=self.commit_seconds,
        )
        if self.resume is not None and self.overwrite:
            raise CaptureError("resume goes on with a trace, and overwrite removes it; give one of them")
        if self.replicated not in ("once", "every"):
            raise CaptureError(f"replicated is 'once' or 'every', not {self.replicated!r}")
        object.__setattr__(self, "compression", dict(Compression(self.compression).choice))

    def describe(self) -> dict[str, Any]:
        """Those that a trace's header tells, as JSON."""
        told = ("queue_bytes", "on_full", "commit_steps", "commit_seconds", "durable", "max_bytes")
        return {name: getattr(self, name) for name in told}


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


def _go_on(path: Location, rank: int, where: Resume, exporter: Exporter) -> None:
    """Let an exporter count on where an earlier attempt, of which there is a trace at `path`, was left.

    Raises
    ------
    CaptureError
        If the step cannot be told.
    TraceError
        If the trace cannot be read.
    """
    step = where.first_step if where.first_step is not None else _steps_counted(exporter.optimizers.all)
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
    if where.first_epoch is not None and where.first_epoch != epoch:
        train_step, epoch = 0, where.first_epoch
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


def start(
    path: Location,
    exporter: Exporter,
    receivers: Iterable[Receiver] = (),
    options: Options | None = None,
    *,
    member: Member | None = None,
) -> Run:
    """Put a recorder and the receivers on an exporter's bus.

    `member`: which of the processes of a script this is. Then the trace is created at the first message, when the
    script has loaded its checkpoint, and its rank is asked for no earlier.
    """
    options = options if options is not None else Options()
    resume, overwrite, max_bytes = options.resume, options.overwrite, options.max_bytes
    process, recorded = _place(member, options)
    budget = None if max_bytes is None else Budget(max(1, max_bytes // len(recorded)))

    def settle() -> None:
        """What depends on the rank, which a script may have only as it begins to train."""
        nonlocal process, recorded
        process, recorded = _place(member, options)
        exporter.publisher.rank = process.rank
        exporter.ranks.recorded = recorded if options.replicated == "once" else None
        if budget is not None and max_bytes is not None:
            if recorded != [0] and len(recorded) == 1 and process.related:
                raise CaptureError(
                    "processes that know nothing of each other cannot share max_bytes, so only the script that starts "
                    "them is recorded"
                )
            budget.max_bytes = max(1, max_bytes // len(recorded))

    if member is None or member.number == 0:
        settle()
    if options.disabled and resume is not None and resume.first_step is not None:
        exporter.start_at(resume.first_step, 0, resume.first_epoch or 0)
    if options.disabled or process.rank not in recorded:
        return Run(path, exporter, None)
    ordered = in_order(tuple(receivers))
    derived = {kind for one in ordered for kind in getattr(one, "produces", ())}
    _doubt_kinds(Compression(options.compression), {*KINDS, *exporter.message_bus.topics, *derived})
    trial = MessageBus(exporter.message_bus.name)  # what cannot be registered is an error before a file is there
    for kind, topic in exporter.message_bus.topics.items():
        trial.register_topic(kind, topic)
    for one in (*exporter.message_bus.receivers, *ordered):
        trial.register(one)

    def begin() -> None:
        settle()
        if resume is None:
            return
        if any(one.began for one in there(path, process)):
            _go_on(path, process.rank, resume, exporter)
        elif resume.first_step is not None:  # all that is there is what a process left that was killed as it began
            exporter.start_at(resume.first_step, 0, resume.first_epoch or 0)

    def make() -> TraceWriter:
        settle()
        if member is None:
            return made()
        with member.beginning():
            return made()

    def made() -> TraceWriter:
        alone = recorded == [0] and not (process.related and of_launch(path, process))
        attempt, run_id = 0, run_id_of(path, process) if process.related else None
        if resume is not None or not alone:
            refuse_here(path, process.rank)
            attempt, run_id = claim(path, process, recorded, overwrite=overwrite, resume=resume is not None)
        # else others may make theirs, or something may be there that was left by a process that was killed as it began
        whole = alone and not attempt and not (resume is not None and exists(path))
        part: dict[str, Any] = {
            "ranks": recorded,
            "launch": process.launch,
            "attempt": attempt,
            "first_step": exporter.global_step,
        }
        if run_id is not None:
            part["run_id"] = run_id
        if options.certificate is not None:
            part["certificate"] = options.certificate.describe()
        about = header(exporter, options.seeds)
        if not options.command:
            del about["argv"]
        if budget is not None:
            budget.spent += len(declaration("header", about))
            budget.spent += already_spent(path, process.rank) if attempt else 0
        return TraceWriter(
            path,
            header=about | part | {"recording": options.describe()},
            overwrite=overwrite and whole,
            part=None if whole else part_name(process.rank, attempt),
            commit_steps=options.commit_steps,
            commit_seconds=options.commit_seconds,
            durable=options.durable,
            compression=options.compression,
        )

    lazily = member is not None
    if lazily:
        exporter.clock.starting = begin
    else:
        begin()

    def stopped(step: int) -> None:
        if exporter.attached:  # else it has said already what is to be known
            for note in notes(exporter):
                recorder.note(note)
        exporter.message_bus.unregister(recorder)
        warn_only(
            f"the recording to {path} ends before global step {step}, for which max_bytes ({max_bytes:,}) leaves no "
            "room; the training goes on",
            stacklevel=2,
        )

    recorder = Recorder(
        make if lazily else make(),
        sampling=exporter.publisher.sampling,
        queue_bytes=options.queue_bytes,
        on_full=options.on_full,
        derived=derived,
        budget=budget,
        stopped=stopped,
        elsewhere=exporter.ranks.elsewhere,
    )
    try:
        for one in (recorder, *ordered):
            exporter.message_bus.register(one)
    except BaseException as error:
        recorder.close(f"failed: {summary(error)}")
        raise
    return Run(path, exporter, recorder)


def _place(member: Member | None, options: Options) -> tuple[Process, list[int]]:
    """The rank of this process, and the ranks that are recorded as far as it knows.

    Raises
    ------
    CaptureError
        If the options name other ranks.
    """
    process = this_process() if member is None else member.process()
    if process.related and process.size == 1:  # how many others there will be is not known
        return process, [process.rank]
    recorded = sorted(set(range(process.size) if options.ranks is None else options.ranks))
    if not recorded or not all(type(one) is int and 0 <= one < process.size for one in recorded):
        raise CaptureError(f"ranks are some of 0 to {process.size - 1}, the ranks of this run, not {recorded}")
    return process, recorded


def _doubt_kinds(compression: Compression, known: set[str]) -> None:
    """Warn of a kind that is probably misspelt; any other may be pushed by `Run.log` at any time."""
    for kind in compression.kinds:
        close = [] if kind in known else difflib.get_close_matches(kind, sorted(known), n=1)
        if close:
            said = f"a compression is chosen for messages of kind {kind!r}; did you mean {close[0]!r}?"
            warn_only(said, stacklevel=3)


def end(run: Run, error: BaseException | None = None, *, wait: bool = True) -> None:
    """Finish what is open, take the hooks off, and close the trace; a failure to write is a warning unless strict.

    `wait`: until all is written, however long that takes; else the recorder's thread may still be at it.
    """
    exporter, recorder, strict = run.exporter, run.recorder, run.exporter.strict
    if recorder is None:
        exporter.detach()
        return
    failure: BaseException | None = None
    try:
        if error is None:
            exporter.finish()
            run.bus.finish()
    except BaseException as raised:  # an interrupt, or under strict what else is noted; it is raised below
        failure = raised
    exporter.detach()
    for note in notes(exporter):
        recorder.note(note)
    cause = error if error is not None else failure
    status = "finished" if cause is None else f"failed: {summary(cause)}"
    try:
        # what is dropped may be dropped where the thread cannot go on before this returns
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


def notes(exporter: Exporter) -> Iterator[Mapping[str, Any]]:
    """What a reader of the trace should know about how it was observed."""
    for problem in exporter.problems:
        yield {"problem": {**problem, "why": plain(problem["why"])}}
    for overflow in exporter.publisher.overflows.told():
        yield {"overflowed": overflow}
    for receiver, error in exporter.message_bus.failures:
        name = getattr(receiver, "name", type(receiver).__name__)
        why = plain(f"{type(error).__name__}: {error}")
        yield {"problem": {"what": f"subscriber {name}", "why": why, "count": 1}}
    if exporter.loss_is_silent:
        yield {"problem": {"what": "loss", "why": "it was never called by the name it was given by", "count": 1}}
    if exporter.steps_seen > 1 and not exporter.epochs_seen:
        yield {"epochs": NO_EPOCHS}
    if exporter.unended is not None:
        yield {"unended": exporter.unended}
    silent = exporter.silent
    if silent:
        yield {"silent": silent}


def header(exporter: Exporter, seeds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What is known of a run before its first message."""
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__}
    for package in ("tracereel", "zarr", "h5py"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "argv": list(sys.argv),
        "seeds": dict(seeds) if seeds is not None else {"torch": torch.initial_seed()},
        "capture": [capture.describe() for capture in exporter.captures],
        "kinds": sorted(KINDS),
        "model": exporter.structure(),
        "models": exporter.models(),
        "optimizers": exporter.trainers(),
    }
