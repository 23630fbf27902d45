"""What a batch is made of: units, tasks, the runs and failures that they tell of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tracer.secrets import masked_text
from tracer.trace.reader import Steps, TraceReader

SCHEMA: Final = 2
"""Raised whenever the files of parts change, so that parts of another release are not taken for this one's."""
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


def digest(value: Any) -> str:
    """A digest of JSON values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def steps_of(steps: Steps | None) -> tuple[int | None, ...] | None:
    """A range of steps as a tuple of plain integers."""
    return None if steps is None else tuple(None if one is None else int(one) for one in steps)
