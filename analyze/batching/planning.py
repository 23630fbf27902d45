"""The plan of a batch: which parts the work on many traces falls into, what each is called, and which are done at once.

A `Unit` is the share of one subscriber in one trace that is computed and stored as a whole. Its id is made of all that
its answers depend on, so that a unit that is there need not be computed again. A `Task` is what a worker does at once:
units that read the same messages, which are then read once.

How far the work on a trace can be cut is what the subscriber says it remembers (`tracer.messaging.subscriber.Scope`),
or what the producers of its input do, whichever is more. Cuts depend on the trace and the subscriber alone, never on
how many workers there are or what else is asked: another run cuts in the same places and finds what is there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from analyze import registry
from tracer.errors import CaptureError, MessageError, TracerError
from tracer.format.journal import Column
from tracer.messaging.bus import Receiver, describe
from tracer.messaging.messages import Message
from tracer.messaging.subscriber import Scope, Subscriber
from tracer.replaying.plan import Plan, plan
from tracer.secrets import masked_text
from tracer.stores.locations import Anywhere, Url, location
from tracer.trace.reader import TraceReader
from tracer.trace.selection import Steps

SCHEMA: Final = 2
"""Raised whenever the files of parts change, so that parts of another release are not taken for this one's."""
PART_BYTES: Final = 128 << 20
"""Bytes that a part reads, at most, where the work can be cut."""
TASKS_PER_WORKER: Final = 4
"""Units are done at once only where so many tasks are left for each worker."""
Module = str | None
"""A module's dotted path; None stands for the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is asked of each trace, as the filters of `tracer.replay`."""

    kinds: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None
    steps: tuple[int | None, ...] | None = None
    tags: tuple[str, ...] | None = None

    def filters(self) -> dict[str, Any]:
        """The arguments of `tracer.replay`."""
        return {"kinds": self.kinds, "modules": self.modules, "steps": self.steps, "tags": self.tags}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The share of one subscriber in one trace that is computed and stored as a whole.

    Attributes
    ----------
    id : str
        A digest of what it belongs to (trace, rank and subscriber, as text), a dash, and a digest of all that its
        answers depend on. Units of the same first half answer the same question; those that are no longer planned are
        out of date.
    spec : str
        The subscriber, as `analyze.parse` reads it.
    chain : tuple of str
        The subscribers whose answers it takes, producers first, and itself.
    trace : str
    rank : int
    modules : tuple of (str or None), or None
        Observed messages of these modules only (None among them: of the network); None for all.
    steps : (start, stop, stride) or None
        Only these global steps; None for all.
    messages, bytes : int
        What it reads.
    other : str
        The trace that the layers of `trace` are compared with; empty if nothing is compared.
    other_rank : int
        The rank of `other` that `rank` is compared with.
    """

    id: str
    spec: str
    chain: tuple[str, ...]
    trace: str
    rank: int
    modules: tuple[Module, ...] | None
    steps: tuple[int | None, ...] | None
    messages: int
    bytes: int
    other: str = ""
    other_rank: int = 0

    @property
    def cell(self) -> str:
        """What it belongs to: the first half of its id."""
        return self.id.partition("-")[0]

    @property
    def title(self) -> str:
        """What the trace is called in the table; a pair is ``one|other``."""
        return f"{self.trace}|{self.other}" if self.other else self.trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the rows of a trace's answers say of the run, and what else is known of the trace."""

    trace: str
    run_id: str
    created: str
    status: str
    ranks: tuple[int, ...]
    messages: int
    problems: tuple[str, ...]

    @classmethod
    def of(cls, path: str, reader: TraceReader) -> Run:
        """What a trace says of its run."""
        header = reader.header
        return cls(
            trace=path,
            run_id=str(header.get("run_id") or ""),
            created=str(header.get("created") or ""),
            status=reader.status,
            ranks=tuple(reader.ranks),
            messages=len(reader),
            problems=tuple(reader.problems),
        )

    @property
    def ended(self) -> str:
        """How the run ended, as far as that does not change by looking again."""
        status = self.status.partition(":")[0]
        return status if status in ("finished", "failed") else "unfinished"

    def beside(self, other: Run) -> Run:
        """What is said of two runs that are compared: of each, with a bar between them."""
        return Run(
            trace=f"{self.trace}|{other.trace}",
            run_id=f"{self.run_id}|{other.run_id}",
            created=f"{self.created}|{other.created}",
            status=self.status if self.status == other.status else f"{self.status}|{other.status}",
            ranks=(0,),
            messages=self.messages + other.messages,
            problems=(*self.problems, *other.problems),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What was asked and could not be answered, and why, without secrets (see `tracer.secrets`).

    Attributes
    ----------
    trace : str
    spec : str
        The subscriber; empty if the trace itself could not be opened.
    rank : int or None
    unit : str
        Id of the unit; empty if there was no plan.
    status : str
        ``"unplanned"``: it was clear before anything was read; ``"failed"``: the subscriber raised; ``"damaged"``: the
        trace is damaged, and the answers to what comes before that are there; ``"killed"``: the process that computed
        it died.
    reason : str
        A sentence.
    where : str
        The machine, where that is known.
    traceback : str
    """

    trace: str
    spec: str
    rank: int | None
    unit: str
    status: str
    reason: str
    where: str = ""
    traceback: str = ""

    def __post_init__(self) -> None:
        for name in ("trace", "reason", "traceback"):  # they are printed and written
            object.__setattr__(self, name, masked_text(getattr(self, name)))


@dataclass(slots=True, kw_only=True)
class TracePlan:
    """What is to be done with one trace."""

    run: Run | None
    units: list[Unit] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Units that one worker computes in one reading of a trace."""

    units: tuple[Unit, ...]
    run: Run
    selection: Selection

    @property
    def bytes(self) -> int:
        """What it reads, at most."""
        return max(unit.bytes for unit in self.units)

    def document(self) -> dict[str, Any]:
        """The task as JSON, which `of` reads."""
        return {
            "units": [asdict(unit) for unit in self.units],
            "run": asdict(self.run),
            "selection": asdict(self.selection),
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Task:
        """The task that a document says."""
        return cls(
            units=tuple(Unit(**_with_tuples(one)) for one in document["units"]),
            run=Run(**_with_tuples(document["run"])),
            selection=Selection(**_with_tuples(document["selection"])),
        )


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# -- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A subscriber that is asked of every trace, with those whose answers it takes.

    Attributes
    ----------
    spec : str
    chain : tuple of str
        Producers first, itself last.
    scope : Scope
        The widest in the chain.
    identity : list
        Which classes answer, and in which version.
    receivers : tuple of Subscriber
        Those of the chain, for planning only: they hear nothing.
    """

    spec: str
    chain: tuple[str, ...]
    scope: Scope
    identity: list[list[str]]
    receivers: tuple[Subscriber, ...]


def questions(specs: Iterable[str]) -> list[Question]:
    """What is asked, each with the producers among the others whose answers it takes; each once.

    Raises
    ------
    MessageError
        If a subscriber is not given as text: each part of the work makes its own.
    UnknownNameError, TracerError
        What `analyze.parse` raises.
    CaptureError
        If nothing is asked, if subscribers need each other in a circle, or if two produce what a third needs.
    """
    made: dict[str, Subscriber] = {}
    for spec in specs:
        if not isinstance(spec, str):
            raise MessageError(
                "a batch takes subscribers as text, because each part of the work makes its own: write 'norm:order=1' "
                f"or 'path/to/file.py:{type(spec).__name__}', and not an instance"
            )
        made.setdefault(registry.canonical(spec), registry.parse(spec))
    if not made:
        raise CaptureError("a batch needs at least one subscriber, but got none")
    asked = []
    for spec in made:
        chain = _chain(spec, made, ())
        asked.append(
            Question(
                spec=spec,
                chain=chain,
                scope=_widest(made[one].scope for one in chain),
                identity=[[one, *registry.origin(one)] for one in chain],
                receivers=tuple(made[one] for one in chain),
            )
        )
    return asked


def _chain(spec: str, made: Mapping[str, Subscriber], consumers: tuple[str, ...]) -> tuple[str, ...]:
    if spec in consumers:
        circle = ", ".join(consumers[consumers.index(spec) :])
        raise CaptureError(f"these need each other's answers in a circle: {circle}")
    chain: dict[str, None] = {}
    for kind in sorted(made[spec].needs):
        producers = [other for other, one in made.items() if other != spec and kind in one.produces]
        if len(producers) > 1:
            raise CaptureError(f"{spec} needs {kind}, which {' and '.join(producers)} produce: ask one of them")
        for producer in producers:
            chain.update(dict.fromkeys(_chain(producer, made, (*consumers, spec))))
    return (*chain, spec)


_KNOWN_SCOPES = ("message", "stream", "step")


def _widest(scopes: Iterable[str]) -> Scope:
    """What a chain remembers across: nothing, the steps of a stream, the streams of a step, or more."""
    found = {scope if scope in _KNOWN_SCOPES else "everything" for scope in scopes} - {"message"}
    if not found:
        return "message"
    return "stream" if found == {"stream"} else "step" if found == {"step"} else "everything"


@dataclass(frozen=True, slots=True, eq=False)
class OfModules:
    """A subscriber that hears of some modules only; of what others answer it hears all."""

    subscriber: Subscriber
    modules: frozenset[Module]
    answers: frozenset[str]

    @property
    def name(self) -> str:
        """What the subscriber is called."""
        return describe(self.subscriber)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subscriber, name)

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        """Whether the subscriber does, if the message is of one of the modules or an answer."""
        return (kind in self.answers or module in self.modules) and self.subscriber.wants(kind, module, tag, step)

    def receive(self, message: Message) -> Iterable[Message]:
        """What the subscriber answers."""
        return self.subscriber.receive(message)

    def finish(self) -> Iterable[Message]:
        """What the subscriber answers."""
        return self.subscriber.finish()

    def close(self) -> None:
        """As the subscriber does."""
        self.subscriber.close()


def of_modules(chain: Sequence[Subscriber], modules: Iterable[Module] | None) -> list[Receiver]:
    """Subscribers that hear of some modules only (all, if None)."""
    if modules is None:
        return list(chain)
    chosen, answers = frozenset(modules), frozenset(kind for one in chain for kind in one.produces)
    return [OfModules(one, chosen, answers) for one in chain]


# -- one trace ---------------------------------------------------------------------------------------------------------


def where(trace: Anywhere) -> str:
    """The name of a trace in a batch, which is the same from every working directory: its full path or its URL."""
    place = location(trace)
    return str(place) if isinstance(place, Url) else os.path.normpath(place)


def plan_trace(
    trace: Anywhere, asked: Sequence[Question], selection: Selection | None = None, *, part_bytes: int = PART_BYTES
) -> TracePlan:
    """Cut what is asked of one trace into units; no data is read, and nothing is raised for what is in the trace.

    Parameters
    ----------
    trace : path or URL
    asked : sequence of Question
    selection : Selection, optional
    part_bytes : int
        Bytes that a unit reads, at most, where its scope lets it be cut.
    """
    path = where(trace)
    selection = selection or Selection()
    try:
        reader = TraceReader(path)
    except TracerError as error:
        return TracePlan(run=None, failures=[unplanned(path, "", None, error)])
    except Exception as error:  # noqa: BLE001 - one file that a library chokes on must not end a batch of hundreds
        return TracePlan(run=None, failures=[unplanned(path, "", None, f"{type(error).__name__}: {error}")])
    with reader:
        return _plan_trace(path, reader, asked, selection, part_bytes)


def _plan_trace(
    path: str, reader: TraceReader, asked: Sequence[Question], selection: Selection, part_bytes: int
) -> TracePlan:
    run = Run.of(path, reader)
    planned = TracePlan(run=run)
    views = {rank: reader.of_rank(rank) for rank in run.ranks}
    for question in asked:
        units: list[Unit] = []
        failures: list[Failure] = []
        lacking: list[Failure] = []
        for rank, view in views.items():
            try:
                steps = _settled(view, selection.steps) if run.status == "recording" else selection.steps
                filters = selection.filters() | {"steps": steps}
                todo = plan(view, *question.receivers, rank=rank, **filters)
                if todo.missing:
                    lacking.append(unplanned(path, question.spec, rank, "; ".join(todo.missing)))
                    continue
                units += _units(path, view, question, todo, rank, steps, run.ended, part_bytes)
            except TracerError as error:
                failures.append(unplanned(path, question.spec, rank, error))
            except Exception as error:  # noqa: BLE001 - as above
                failures.append(unplanned(path, question.spec, rank, f"{type(error).__name__}: {error}"))
        planned.units += units
        # a rank may have been recorded in part, such as without the weights, which are the same in all
        planned.failures += failures if units else failures + lacking
    return planned


def unplanned(trace: str, spec: str, rank: int | None, why: object) -> Failure:
    """What cannot be answered, as is clear before anything is read."""
    return Failure(trace=trace, spec=spec, rank=rank, unit="", status="unplanned", reason=str(why))


def _settled(reader: TraceReader, steps: tuple[int | None, ...] | None) -> tuple[int | None, ...]:
    """The steps of a run that is being recorded whose messages are all there, with what derives from them."""
    last = int(reader.journal[:, Column.GLOBAL_STEP].max(initial=0)) - 1
    start, stop, stride = (*(steps or (None, None)), 1)[:3]
    return start, max(last, 0) if stop is None else min(stop, max(last, 0)), stride


def _units(
    path: str,
    reader: TraceReader,
    question: Question,
    todo: Plan,
    rank: int,
    steps: tuple[int | None, ...] | None,
    ended: str,
    part_bytes: int,
) -> list[Unit]:
    """The units of one subscriber in one rank of a trace."""
    cell = digest([path, rank, question.spec])[:16]
    units = []
    for share in shares(reader, todo, question.scope, steps, part_bytes):
        rows, pairs = share.rows(reader, todo)
        units.append(
            Unit(
                id=f"{cell}-{identity(reader, question, rows, pairs, path, rank, ended)}",
                spec=question.spec,
                chain=question.chain,
                trace=path,
                rank=rank,
                modules=share.modules,
                steps=share.steps,
                messages=len(rows) + len(pairs),
                bytes=int(reader.sizes(np.union1d(rows, pairs)).sum()),
            )
        )
    return units


def identity(
    reader: TraceReader,
    question: Question,
    rows: NDArray[np.int64],
    pairs: NDArray[np.int64],
    path: str,
    rank: int,
    ended: str,
) -> str:
    """A digest of all that the stored answers of a unit depend on."""
    values = [
        SCHEMA,
        path,
        rank,
        ended,
        question.identity,
        reader.fingerprint(rows),
        reader.fingerprint(pairs.reshape(-1)),
    ]
    return digest(values)[:32]


def digest(value: Any) -> str:
    """A digest of JSON values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of what a subscriber reads of a trace."""

    modules: tuple[Module, ...] | None = None
    steps: tuple[int | None, ...] | None = None

    def rows(self, reader: TraceReader, todo: Plan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows of the journal that it publishes, and the pairs that it derives updates from."""
        rows, pairs = np.flatnonzero(todo.where), todo.pairs
        if self.modules is not None:
            mine = [stream.id for stream in reader.streams if stream.module in self.modules]
            rows = rows[np.isin(reader.journal[rows, Column.STREAM], mine)]
            pairs = pairs[np.isin(reader.journal[pairs[:, 0], Column.STREAM], mine)]
        if self.steps is not None:
            start, stop, _ = (*self.steps, 1)[:3]
            for bound, keep in ((start, np.greater_equal), (stop, np.less)):
                if bound is not None:
                    rows = rows[keep(reader.journal[rows, Column.GLOBAL_STEP], bound)]
                    pairs = pairs[keep(reader.journal[pairs[:, 0], Column.GLOBAL_STEP], bound)]
        return rows, pairs


def shares(
    reader: TraceReader, todo: Plan, scope: Scope, steps: tuple[int | None, ...] | None, part_bytes: int = PART_BYTES
) -> list[Share]:
    """Cut what a subscriber reads of a trace into shares of some `part_bytes`, as far as its scope allows.

    Steps are cut from the first on, where a chunk of the largest array begins if that is near, so that a trace that
    grows keeps all shares but the last. A step that is too large by itself is cut by modules, if nothing is remembered.
    """
    whole = [Share(steps=steps)]
    if todo.bytes <= part_bytes or scope not in _KNOWN_SCOPES:
        return whole
    if scope == "stream":
        return [Share(modules=some, steps=steps) for some in _by_modules(reader, todo, whole[0], part_bytes)]
    found = []
    for share, nbytes in _by_steps(reader, todo, steps, part_bytes):
        if scope == "message" and nbytes > 2 * part_bytes:
            found += [Share(modules=some, steps=share.steps) for some in _by_modules(reader, todo, share, part_bytes)]
        else:
            found.append(share)
    return found


def _by_steps(
    reader: TraceReader, todo: Plan, steps: tuple[int | None, ...] | None, part_bytes: int
) -> list[tuple[Share, int]]:
    rows = np.concatenate([np.flatnonzero(todo.where), todo.pairs[:, 0]])
    sizes = reader.sizes(rows)
    numbers, place = np.unique(reader.journal[rows, Column.GLOBAL_STEP], return_inverse=True)
    per_step = np.bincount(place, sizes).astype(np.int64)
    # where to cut is asked of the streams that make up most of what is read
    pools = reader.journal[rows, Column.POOL]
    if (pools >= 0).any():
        weights = np.bincount(pools[pools >= 0], sizes[pools >= 0])
        largest = np.flatnonzero(pools == int(weights.argmax()))
        begins = np.zeros(len(numbers), np.bool_)
        begins[place[largest[reader.begins_chunk(rows[largest])]]] = True
    else:
        begins = np.ones(len(numbers), np.bool_)
    ends = np.cumsum(per_step)
    stride = (*(steps or ()), None, None, None)[2]
    found = []
    first = 0
    while first < len(numbers):
        before = int(ends[first - 1]) if first else 0
        last = max(int(np.searchsorted(ends, before + part_bytes, side="right")), first + 1)
        if last < len(numbers):
            near = int(np.searchsorted(ends, before + part_bytes // 2, side="right"))
            aligned = np.flatnonzero(begins[max(near, first + 1) : last + 1])
            last = max(near, first + 1) + int(aligned[-1]) if len(aligned) else last
        start = int(numbers[first])
        stop = int(numbers[last]) if last < len(numbers) else int(numbers[-1]) + 1
        share = Share(steps=(start, stop) if stride is None else (start, stop, stride))
        found.append((share, int(ends[last - 1]) - before))
        first = last
    return found


def _by_modules(reader: TraceReader, todo: Plan, share: Share, part_bytes: int) -> list[tuple[Module, ...]]:
    """Groups of modules, in the order of the trace, of some `part_bytes` in all."""
    rows, pairs = share.rows(reader, todo)
    rows = np.concatenate([rows, pairs[:, 0]])
    weights = np.bincount(reader.journal[rows, Column.STREAM], reader.sizes(rows), minlength=len(reader.streams))
    counts = np.bincount(reader.journal[rows, Column.STREAM], minlength=len(reader.streams))
    of_module: dict[Module, int] = {}
    for stream in reader.streams:
        if counts[stream.id]:
            of_module[stream.module] = of_module.get(stream.module, 0) + int(weights[stream.id])
    groups: list[list[Module]] = []
    filled = part_bytes
    for module, nbytes in of_module.items():
        if filled + nbytes > part_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(module)
        filled += nbytes
    return [tuple(group) for group in groups]


# -- many traces -------------------------------------------------------------------------------------------------------


def fused(plans: Iterable[TracePlan], selection: Selection, workers: int) -> list[Task]:
    """Put units that read the same part of a trace together, while enough tasks are left for all workers.

    Two units are not put together if their chains bring two producers of the same kind. The largest task comes first.
    """
    tasks: list[Task] = []
    made: dict[str, frozenset[str]] = {}
    for one in plans:
        if one.run is None:
            continue
        groups: dict[Any, list[list[Unit]]] = {}
        for unit in one.units:
            alike = groups.setdefault((unit.rank, unit.modules, unit.steps), [])
            for group in alike:
                if not _collide(unit, group, made):
                    group.append(unit)
                    break
            else:
                alike.append([unit])
        tasks += [
            Task(units=tuple(group), run=one.run, selection=selection) for alike in groups.values() for group in alike
        ]
    tasks = _divided(tasks, TASKS_PER_WORKER * workers)
    return sorted(tasks, key=lambda task: (-task.bytes, task.units[0].id))


def _divided(tasks: Sequence[Task], wanted: int) -> list[Task]:
    """Halve the largest of tasks that have several units until there are as many as wanted."""
    left = sorted(tasks, key=lambda task: -task.bytes * len(task.units))
    done: list[Task] = []
    while left and len(left) + len(done) < wanted:
        task = left.pop(0)
        if len(task.units) < 2:
            done.append(task)
            continue
        middle = len(task.units) // 2
        left += [
            Task(units=units, run=task.run, selection=task.selection)
            for units in (task.units[:middle], task.units[middle:])
        ]
        left.sort(key=lambda one: -one.bytes * len(one.units))
    return done + left


def _collide(unit: Unit, group: Sequence[Unit], made: dict[str, frozenset[str]]) -> bool:
    """Whether the chain of a unit and those of others have two subscribers that produce the same kind."""

    def produces(spec: str) -> frozenset[str]:
        if spec not in made:
            made[spec] = frozenset(registry.parse(spec).produces)
        return made[spec]

    there = {spec for other in group for spec in other.chain}
    new = [spec for spec in unit.chain if spec not in there]
    kinds = {kind for spec in there for kind in produces(spec)}
    return any(produces(spec) & kinds for spec in new)


def dealt(tasks: Sequence[Task], part: int, parts: int) -> list[Task]:
    """The tasks of one of several shares of about equal size; all shares together are all tasks."""
    loads = [0] * parts
    mine = []
    for task in tasks:  # the largest first
        lightest = min(range(parts), key=lambda number: (loads[number], number))
        # a task costs something even if it reads nothing
        loads[lightest] += task.bytes + (1 << 20)
        if lightest == part:
            mine.append(task)
    return mine


def steps_of(steps: Steps | None) -> tuple[int | None, ...] | None:
    """A range of steps as a tuple of plain integers."""
    return None if steps is None else tuple(None if one is None else int(one) for one in steps)
