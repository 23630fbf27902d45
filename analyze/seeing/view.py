"""The data of a page with a server: gathered in the background, from a trace that may still be recorded."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self, final

from analyze.registry import instances, subscribers
from analyze.seeing.check import Wanted, rules_of
from analyze.seeing.course import Grid
from analyze.seeing.gathered import AnswersOfPage, Gathered
from analyze.seeing.report import PageGathering, rank_shown, reference, without_damage
from tracer.errors import CaptureError, TracerError, UnknownNameError
from tracer.messaging.messages import Message
from tracer.messaging.receiver import Receiver, describe
from tracer.messaging.subscriber import Subscriber
from tracer.replaying.replay import replay
from tracer.stores.locations import Anywhere
from tracer.trace.reader import TraceReader


@final
class Turns:
    """A lock with two sides: replays change the gathered data; a reader never sees a half-made change.

    Replays do not exclude each other, since each has its own series. A waiting reader goes first, so that fast replays
    cannot starve it.

    Examples
    --------
    >>> turns = Turns()
    >>> with turns:  # the turn of a replay
    ...     pass
    >>> with turns.reading():
    ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._writing = self._reading = 0

    def __enter__(self) -> None:
        with self._changed:
            while self._reading:
                self._changed.wait()
            self._writing += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._writing -= 1
            self._changed.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The reader's side of the lock."""
        with self._changed:
            self._reading += 1
            while self._writing:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()


RUNNING, DONE, FAILED, CANCELLED = "running", "done", "failed", "cancelled"


class _Cancelled(BaseException):
    """Ends the replay of a cancelled job."""


@final
class Guard:
    """A context manager that raises in the replay of a cancelled job; see `Job.guard`."""

    def __init__(self, cancelled: threading.Event, turns: Turns | None) -> None:
        self._cancelled, self._turns = cancelled, turns

    def __enter__(self) -> None:
        if self._turns is not None:
            self._turns.__enter__()
        if self._cancelled.is_set():
            self.__exit__()
            raise _Cancelled

    def __exit__(self, *error: object) -> None:
        if self._turns is not None:
            self._turns.__exit__(*error)


class Job(Receiver):
    """A replay in its own thread.

    The job is also a receiver, to note the progress of the replay. Its guards end the replay after a cancellation.

    Parameters
    ----------
    title : str
        What the job does, for the user.
    work : callable
        Called with the job, in the thread.

    Attributes
    ----------
    state : str
        ``running``, ``done``, ``failed`` or ``cancelled``.
    reached : int
        The last step that the replay has reached; -1 before the first.
    heard : int
        How many messages were received.
    error : str
        Why the job failed; empty if it did not.
    """

    passive = True
    scope = "message"
    name = "progress"

    def __init__(self, title: str, work: Callable[[Job], None]) -> None:
        self.title, self.state, self.error = title, RUNNING, ""
        self.reached, self.heard = -1, 0
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), name=title, daemon=True)

    def start(self) -> Self:
        """Start the thread; returns the job."""
        self._thread.start()
        return self

    def cancel(self, state: str = CANCELLED) -> None:
        """End the replay at the next message. `state` is set at once."""
        self._cancelled.set()
        if self.state == RUNNING:
            self.state = state

    def guard(self, turns: Turns | None = None) -> Guard:
        """A context manager that ends the job if it is cancelled; with `turns`, it also takes a replay's turn."""
        return Guard(self._cancelled, turns)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self, work: Callable[[Job], None]) -> None:
        try:
            work(self)
            state = DONE
        except _Cancelled:
            state = CANCELLED
        except TracerError as error:
            state, self.error = FAILED, str(error)
        except Exception as error:  # noqa: BLE001 - a metric may raise anything; the page shows it and goes on
            state, self.error = FAILED, f"{type(error).__name__}: {error}"
        if self.state == RUNNING:
            self.state = state

    # -- progress -----------------------------------------------------------------------------------------------

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """True: every message that other receivers request."""
        return True

    def receive(self, message: Message) -> Iterable[Message]:
        """Note its step."""
        self.reached = message.global_step
        self.heard += 1
        return ()


JOBS = 8
"""How many metrics are computed at once, at most."""
BEFORE = 64
"""A closer look also replays this many steps before its own, for their past."""
STOP_SECONDS = 10.0
"""How long `stop` waits for a replay, which ends at its next message."""
LOOK_SECONDS = 1.0
"""The shortest time between two checks for new commits."""


@dataclass(slots=True)
class _Look:
    """The result of the last check for new commits: `View.status`, `View.mark` and `View.progress`."""

    status: str
    streams: int
    at: float = 0.0
    mark: tuple[object, ...] = ()
    progress: str = "Begins."


class AskedMetric(NamedTuple):
    """A metric that was requested, at the start or in the page."""

    title: str
    metric: Subscriber
    job: Job


@final
class View:
    """The data behind the page of a trace.

    A replay in the background gathers what a report shows, and follows a run that is being recorded. If new streams let
    more rules judge, the replay starts again from the beginning.

    Parameters
    ----------
    path : path or URL
    metrics : sequence of str or Subscriber
        Metrics to compute from the start.
    against : sequence of path or URL
        Runs to compare with.
    rules : Rule or str, or several
        By default all.
    rank : int, optional
        By default the lowest.

    Raises
    ------
    TracerError
        If the trace cannot be opened, has nothing of this rank, or a name or parameter is wrong.

    Attributes
    ----------
    turns : Turns
        Gathered data must be read within ``turns.reading()``.
    references : list of Gathered
        The other runs, as far as they are loaded.
    asked : list of AskedMetric
        The metrics that were requested, at the start or in the page.
    """

    def __init__(
        self,
        path: Anywhere,
        metrics: Sequence[str | Subscriber] = (),
        *,
        against: Sequence[Anywhere] = (),
        rules: Wanted | None = None,
        rank: int | None = None,
    ) -> None:
        self.path, self.against = path, against
        self.metrics, self.rules = instances(metrics), rules_of(rules)
        self.reader = TraceReader(path)
        self.rank = rank_shown(self.reader, rank)
        self.turns = Turns()
        self.references: list[Gathered] = []
        self.asked: list[AskedMetric] = []
        self._last = _Look(self.reader.status, len(self.reader.streams))
        self._shown = self._next = self._gathering()
        self._gatherer = self._gather(self._next)
        self._others = Job("the other runs", lambda job: self._refer(job, rank))

    def start(self) -> None:
        """Start the replays in the background."""
        self._gatherer.start()
        self.asked = [self._ask(describe(one), one) for one in self.metrics]
        self._others.start()

    def stop(self) -> None:
        """End everything that still runs."""
        jobs = [self._gatherer, self._others, *(one.job for one in self.asked)]
        for job in jobs:
            job.cancel()
        for job in jobs:
            job.join(STOP_SECONDS)
        self.reader.close()

    # -- the gathered data --------------------------------------------------------------------------------------

    @property
    def found(self) -> Gathered:
        """The data gathered so far; read it within ``turns.reading()``."""
        return self._shown.found

    @property
    def status(self) -> str:
        """`TraceReader.status` at the last `refresh`."""
        return self._last.status

    @property
    def mark(self) -> tuple[object, ...]:
        """A value that changes whenever a `refresh` finds something new to show."""
        return self._last.mark

    @property
    def progress(self) -> str:
        """The progress at the last `refresh`, in a sentence; empty when everything is there."""
        return self._last.progress

    @property
    def unread(self) -> str:
        """Why some of the other runs cannot be shown, in a sentence; empty if all can."""
        return f"Not compared with every run: {self._others.error}." if self._others.error else ""

    @property
    def following(self) -> bool:
        """Whether the run is still being recorded."""
        return self.status == "recording"

    def refresh(self) -> None:
        """Check for new commits and update the verdict. Cheap to call often: most calls return at once."""
        last = self._last
        if time.monotonic() - last.at < LOOK_SECONDS:
            return
        if self.following:
            last.status = self.reader.status  # before the refresh, so that the last commits of an ended run are read
            self.reader.refresh()
        if len(self.reader.streams) != last.streams:
            last.streams = len(self.reader.streams)
            if self._next.answerable(self.reader) != self._next.answering:
                self._again()
        with self.turns.reading():
            if self._next.ended or self._next.found.reached >= self._shown.found.reached:
                self._shown = self._next
            if not self._shown.ended:
                self._shown.conclude(self.reader)
            jobs = [(job.heard, job.state) for job in (self._gatherer, *(one.job for one in self.asked))]
            last.mark = id(self._shown), self.status, len(self.references), self._others.state, *jobs
            last.progress = self._progress()
        last.at = time.monotonic()

    def _progress(self) -> str:
        if self._gatherer.error:
            return f"The replay ended early: {self._gatherer.error}."
        if self._gatherer.state != RUNNING:
            return "Waits for the run to record something." if self.following else ""
        does = "Follows the run, at" if self.following else "Replayed to"
        return f"{does} step {max(0, self._gatherer.reached)} of {(self._next.found.span or (0, 0))[1]}."

    def _again(self) -> None:
        """Restart the replays, with every rule and metric that can answer now."""
        for job in (self._gatherer, *(one.job for one in self.asked)):
            job.cancel(DONE)
        self._next = self._gathering()
        self._gatherer = self._gather(self._next).start()
        self.asked = [one if one.job.state == CANCELLED else self._ask(one.title, one.metric) for one in self.asked]

    def _gathering(self) -> PageGathering:
        return PageGathering(self.reader, (), self.rules, rank=self.rank, grows=self.following)

    def _gather(self, gathering: PageGathering) -> Job:
        def work(job: Job) -> None:
            gathering.run(self.path, job, follow=gathering.found.grows, guard=job.guard(self.turns))
            with TraceReader(self.path) as reader:
                with self.turns.reading():
                    gathering.conclude(reader)
                whole = without_damage(gathering, reader)
            if whole is not gathering and self._next is gathering:
                self._next = whole

        return Job("the run", work)

    def _refer(self, job: Job, rank: int | None) -> None:
        """Load the other runs. What cannot be loaded is in the job's error; the rest is shown all the same."""
        found, failed = self.found, []
        for path in self.against:
            try:
                run = reference(path, found.grid, rank, grows=found.grows, guard=job.guard())
            except TracerError as error:
                failed.append(str(error))
            else:
                with self.turns.reading():
                    self.references.append(run)
        if failed:
            raise CaptureError("; ".join(failed))

    # -- requested metrics --------------------------------------------------------------------------------------

    def metrics_to_ask(self) -> dict[str, str]:
        """Each registered metric → what it needs that the trace lacks, in a sentence; empty if nothing."""
        found = {}
        for name in subscribers():
            try:
                found[name] = self._next.missing(instances(name)[0], self.reader)
            except TracerError:
                found[name] = ""  # such as a metric that needs an option
        return found

    def compute(self, name: str, options: str = "") -> None:
        """Start a metric in the background; its answers appear as they are computed.

        Parameters
        ----------
        name : str
            Name of a registered metric. Files are refused, since their code would be run.
        options : str
            Parameters of the metric, as `analyze.parse` reads them.

        Raises
        ------
        TracerError
            If there is no such metric, an option is wrong, the trace lacks what it needs, or its answers are shown
            already.
        """
        if name not in subscribers():
            raise UnknownNameError(f"there is no metric {name!r}")
        if sum(one.job.state == RUNNING for one in self.asked) >= JOBS:
            raise CaptureError(f"{JOBS} metrics are being computed; cancel one, or wait for it")
        title = f"{name}:{options}" if options else name
        metric: Subscriber = instances(title)[0]
        gathering = self._next
        lacks = gathering.missing(metric, self.reader)
        if lacks:
            raise CaptureError(lacks)
        if any(kind in gathering.found.subscribers for kind in metric.produces):
            raise CaptureError(f"{title} is shown already; the option as=NAME gives its answers another name")
        self.asked.append(self._ask(title, metric))

    def _ask(self, title: str, metric: Subscriber) -> AskedMetric:
        """Replay the trace through a metric. Only storing an answer takes a turn, since computing it may take long."""
        gathering, own = self._next, copy.deepcopy(metric)
        follow = gathering.found.grows

        def work(job: Job) -> None:
            answers = AnswersOfPage(gathering.found, [own], job.guard(self.turns))
            listening = (own, answers, job)
            replay(self.path, *listening, kinds=gathering.only, rank=self.rank, follow=follow, guard=job.guard())

        return AskedMetric(title, metric, Job(title, work).start())

    def cancel(self, number: int) -> None:
        """Stop computing the metric ``asked[number]`` and drop its answers."""
        if not 0 <= number < len(self.asked):
            raise CaptureError(f"no metric was asked as number {number}")
        one = self.asked[number]
        if one.job.state != RUNNING:
            return
        one.job.cancel()
        with self.turns.reading():
            for gathering in {self._shown, self._next}:
                gathering.found.forget(one.metric.produces)

    def closer(self, first: int, last: int) -> Gathered | None:
        """The steps between two, both inclusive, without a replay; None if that would leave values out.

        Call it within ``turns.reading()``.
        """
        return None if self.found.thinned else self.found.cut(first, last)

    def look(self, first: int, last: int, into: list[Gathered]) -> Job:
        """Replay the steps between two, both inclusive, in the background, and append the result to `into`."""
        metrics = [one.metric for one in self.asked if one.job.state in (RUNNING, DONE)]
        gathering = PageGathering(
            self.reader, metrics, (), rank=self.rank, grid=Grid.over(max(0, first - BEFORE), last),
            only=self._shown.only, steps=(max(0, first - BEFORE), last + 1),
        )  # fmt: skip

        def work(job: Job) -> None:
            gathering.run(self.path, job, guard=job.guard())
            into.append(gathering.found.cut(first, last))

        return Job(f"steps {first} to {last}", work).start()
