"""The values that a batch consists of: questions, units, tasks, outcomes and failures.

A `Question` is a subscriber that runs on every trace. A `Unit` is the share of one subscriber in one trace that is
computed and stored as a whole. Its id is a digest of everything that its answers depend on, so that a stored unit need
not be computed again. A `Task` groups units that read the same messages, so that a worker reads these once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from analyze import registry
from tracer.errors import CaptureError, MessageError, TracerError
from tracer.messaging.receiver import Rerun, Scope, describe, refusal
from tracer.messaging.subscriber import Subscriber
from tracer.replaying.filters import Filters
from tracer.secrets import masked_text
from tracer.trace.reader import TraceReader
from tracer.trace.streams import Steps

KNOWN_SCOPES: Final = ("message", "stream", "step")
"""The scopes that let the work on a trace be cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A subscriber that runs on every trace, with the subscribers whose answers it takes.

    Attributes
    ----------
    spec : str
    chain : tuple of str
        The specs of the producers, and last that of the subscriber itself.
    scope : Scope
        The widest in the chain.
    identity : list
        The classes of the chain and their versions.
    receivers : tuple of Subscriber
        The subscribers of the chain, used for planning only: they receive no messages.
    """

    spec: str
    chain: tuple[str, ...]
    scope: Scope
    identity: list[list[str]]
    receivers: tuple[Subscriber, ...]

    def document(self) -> dict[str, Any]:
        """The question as JSON values, for manifests."""
        return {"spec": self.spec, "chain": list(self.chain), "scope": self.scope, "identity": self.identity}


def questions(specs: Iterable[str]) -> list[Question]:
    """A question for each subscriber; the chain has the other given subscribers whose answers it takes.

    Raises
    ------
    MessageError
        If a subscriber is not given as text: each part of the work makes its own instance.
    UnknownNameError, TracerError
        What `analyze.parse` raises.
    CaptureError
        If there is no subscriber, if a subscriber needs the model, if subscribers need each other in a circle, or if
        two produce what a third needs.
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
    refused = [describe(one) for one in made.values() if one.needs_model]
    if refused:
        raise CaptureError(refusal(refused, Rerun()))
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
    """A subscriber, preceded by its producers; `consumers` are the subscribers that take its answers."""
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


def _widest(scopes: Iterable[str]) -> Scope:
    """The narrowest scope that includes all scopes of a chain."""
    found = {scope if scope in KNOWN_SCOPES else "everything" for scope in scopes} - {"message"}
    if not found:
        return "message"
    return "stream" if found == {"stream"} else "step" if found == {"step"} else "everything"


SCHEMA: Final = 3
"""Raised whenever the format of part files changes, so that parts of another release are not reused."""
Module: TypeAlias = str | None
"""A module's dotted path; None is the network."""
Pairs: TypeAlias = Literal["all", "first"]
"""Which runs are compared: every two, or each with the first."""


def stride_of(steps: Steps | None) -> int | None:
    """The stride of a range of steps; None if it has none."""
    return None if steps is None or len(steps) < 3 else steps[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of what a subscriber reads of a trace.

    Attributes
    ----------
    modules : tuple of (str or None), or None
        The modules whose observed messages are read (None among them is the network); None for all modules.
    steps : (start, stop, stride) or None
        The global steps that are read; None for all.
    """

    modules: tuple[Module, ...] | None = None
    steps: Steps | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit(Share):
    """The share of one subscriber in one trace that is computed and stored as a whole.

    Attributes
    ----------
    id : str
        A digest of its question (trace, rank and subscriber, as text), a dash, and a digest of everything that its
        answers depend on. Units with the same first half answer the same question; a stored unit is outdated if a new
        plan has its question but not its id.
    spec : str
        The subscriber, as `analyze.parse` reads it.
    chain : tuple of str
        The subscribers whose answers `spec` takes, producers first, and `spec` itself.
    trace : str
    rank : int
    messages, bytes : int
        The numbers of messages and bytes that are read.
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
    messages: int
    bytes: int
    other: str = ""
    other_rank: int = 0

    @property
    def cell(self) -> str:
        """The digest of the question: the first half of the id."""
        return self.id.partition("-")[0]

    @property
    def title(self) -> str:
        """The name of the trace in the table; ``one|other`` for a pair."""
        return f"{self.trace}|{self.other}" if self.other else self.trace


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """The description of a trace in a plan; the run's id, creation time and status go into each row of the answers."""

    trace: str
    run_id: str
    created: str
    status: str
    ranks: tuple[int, ...]
    messages: int
    problems: tuple[str, ...]

    @classmethod
    def of(cls, path: str, reader: TraceReader) -> PlannedRun:
        """The run of an open trace."""
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
        """``"finished"`` or ``"failed"``; ``"unfinished"`` for every other status, which may still change."""
        status = self.status.partition(":")[0]
        return status if status in ("finished", "failed") else "unfinished"

    def beside(self, other: PlannedRun) -> PlannedRun:
        """A pair of compared runs as one run: the values of both, separated by a bar."""
        return PlannedRun(
            trace=f"{self.trace}|{other.trace}",
            run_id=f"{self.run_id}|{other.run_id}",
            created=f"{self.created}|{other.created}",
            status=self.status if self.status == other.status else f"{self.status}|{other.status}",
            ranks=(0,),
            messages=self.messages + other.messages,
            problems=(*self.problems, *other.problems),
        )


class Outcome(NamedTuple):
    """The result of a unit: its status is ``"computed"``, or a status of `UnitFailure`."""

    unit: str
    status: str
    rows: int = 0
    seconds: float = 0.0
    reason: str = ""
    traceback: str = ""


class Receipt(NamedTuple):
    """What a worker did: the outcomes of the units of a task, and the machine and process."""

    outcomes: list[Outcome]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFailure:
    """A question that could not be answered, and why; secrets are masked (see `tracer.secrets`).

    Attributes
    ----------
    trace : str
    spec : str
        The subscriber; empty if the trace itself could not be opened.
    rank : int or None
    unit : str
        The id of the unit; empty if planning failed.
    status : str
        ``"unplanned"``: planning failed, before data was read; ``"failed"``: the subscriber raised an error;
        ``"damaged"``: the trace is damaged, and only the readable part has answers; ``"killed"``: the process that
        computed the unit died.
    reason : str
        A sentence.
    where : str
        The machine and process; empty if unknown.
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

    @classmethod
    def of(cls, unit: Unit, outcome: Outcome, where: str) -> UnitFailure:
        """The failure of a unit that was not computed."""
        return cls(
            trace=unit.title,
            spec=unit.spec,
            rank=unit.rank,
            unit=unit.id,
            status=outcome.status,
            reason=outcome.reason,
            where=where,
            traceback=outcome.traceback,
        )

    def __post_init__(self) -> None:
        for name in ("trace", "reason", "traceback"):  # they are printed and written to files
            object.__setattr__(self, name, masked_text(getattr(self, name)))


@dataclass(slots=True, kw_only=True)
class TracePlan:
    """The units to compute for one trace, and its failures; `run` is None if the trace cannot be opened."""

    run: PlannedRun | None
    units: list[Unit] = field(default_factory=list)
    failures: list[UnitFailure] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Units that a worker computes in one pass over a trace."""

    units: tuple[Unit, ...]
    run: PlannedRun
    filters: Filters

    @property
    def bytes(self) -> int:
        """The bytes of the largest unit."""
        return max(unit.bytes for unit in self.units)

    def only(self, *units: Unit) -> Task:
        """The same task with the given units only."""
        return replace(self, units=units)


def sentence_of(error: Exception) -> str:
    """The message of an error, preceded by the name of its class unless it is an error of this project."""
    return str(error) if isinstance(error, TracerError) else f"{type(error).__name__}: {error}"


def digest(value: Any) -> str:
    """A digest of JSON values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
