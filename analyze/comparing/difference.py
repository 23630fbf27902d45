"""The result of a comparison of two traces, as values and as a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from analyze.comparing.amounts import Amount
from analyze.comparing.matching import Name
from tracer.shown import json_of, table


@dataclass(frozen=True, slots=True)
class StructureDifference:
    """A difference between the headers or the tables of two traces.

    Attributes
    ----------
    what : str
        What differs: ``"module"``, ``"parameter"``, ``"version"``, ``"seed"``, ``"argv"`` and so on.
    name : str
        The name of what differs; empty if there is only one of it.
    one, other : JSON value
        The value in each trace; None if it has none.
    """

    what: str
    name: str
    one: Any
    other: Any

    def as_json(self) -> dict[str, Any]:
        """The difference in JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Parting:
    """A message that differs between two traces.

    Attributes
    ----------
    name : Name
        The stream: kind, module, tag, leaf and rank.
    step, call : int
        The global step, and the number of the message among the stream's messages in this step.
    epoch : int
        The epoch in the first trace.
    amount : Amount
        How the message differs.
    tolerance : float or None
        The relative difference that noise allows; None if the message was not judged by noise.
    """

    name: Name
    step: int
    call: int
    epoch: int
    amount: Amount
    tolerance: float | None = None

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call else ""
        rank = f", rank {self.name.rank}" if self.name.rank else ""
        allowed = "" if self.tolerance is None else f" (the noise allows {self.tolerance:.2g})"
        return f"step {self.step}: {self.name}{call}{rank}: {self.amount}{allowed}"

    def as_json(self) -> dict[str, Any]:
        """The message and its difference in JSON values."""
        amount = self.amount
        found = json_of(self, "step", "epoch") | asdict(self.name) | {"call": self.call}
        found |= json_of(amount, "elements", "of", "largest", "relative", "place")
        found |= {"one": _plain(amount.here), "other": _plain(amount.there), "beyond": amount.beyond}
        if amount.by != "data":
            found |= {"by": amount.by, "statistics": {name: [a, b] for name, a, b in amount.statistics}}
        if amount.shapes is not None:
            found["shapes"] = [list(shape) for shape in amount.shapes]
        if self.tolerance is not None:
            found["tolerance"] = self.tolerance
        return found


@dataclass(frozen=True, slots=True)
class StreamDifference:
    """How one stream differs between two traces.

    Attributes
    ----------
    name : Name
    compared, differing, parted : int
        The numbers of messages that were compared, that differ in a bit, and that differ beyond the tolerance.
    first : Parting or None
        The first message that differs beyond the tolerance.
    largest : Parting
        The message with the largest relative difference.
    """

    name: Name
    compared: int
    differing: int
    parted: int
    first: Parting | None
    largest: Parting

    def as_json(self) -> dict[str, Any]:
        """The stream in JSON values."""
        return asdict(self.name) | json_of(self, "compared", "differing", "parted", "first", "largest")


_SHOWN = 12
"""How many streams a notebook shows."""


@dataclass(frozen=True, slots=True)
class Uncompared:
    """Messages that could not be compared.

    Attributes
    ----------
    why : str
        ``"only in A"``, ``"only in B"``, or another reason.
    name : Name
        The stream.
    count : int
        The number of messages.
    first : int
        The global step of the first message.
    whole : bool
        Whether no message of the stream was compared.
    """

    why: str
    name: Name
    count: int
    first: int
    whole: bool

    def as_json(self) -> dict[str, Any]:
        """The messages in JSON values."""
        return {"why": self.why, **asdict(self.name), "count": self.count, "first": self.first, "whole": self.whole}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The result of `analyze.diff`, a comparison of two traces.

    Attributes
    ----------
    one, other : str
        The paths of the traces, A and B.
    structure : tuple of StructureDifference
        The differences of headers and tables. They do not make runs part.
    streams : tuple of StreamDifference
        The streams with differing messages: first the streams that part, in the order in which they do, then the
        others, from the largest difference to the smallest.
    uncompared : tuple of Uncompared
        The messages that could not be compared.
    compared : int
        The number of compared messages.
    by_hash, by_statistics : int
        The numbers of messages that were compared by hash and by statistics, because a trace lacks their data.
    undecided : int
        The number of messages that differ by hash or statistics, perhaps within the tolerance.
    compared_streams : int
        The number of streams with compared messages.
    steps : tuple of int or None
        The first and the last step with compared messages.
    first : Parting or None
        The first message, in A's order of observation, that differs beyond the tolerance.
    tolerance : str
        The tolerance in words; empty if no difference is allowed.
    remarks : tuple of str
        Sentences about the comparison: missing parts of a trace, what noise could not judge.
    likely_renamings : tuple of (str, str)
        Modules that only A has, each with a module that only B has and that may be the same.
    quick : bool
        Whether messages with equal checksums counted as equal.
    margins : mapping of str to float
        For each kind, the factor by which noise may exceed the noise of other runs; empty without noise.
    """

    one: str
    other: str
    structure: tuple[StructureDifference, ...] = ()
    streams: tuple[StreamDifference, ...] = ()
    uncompared: tuple[Uncompared, ...] = ()
    compared: int = 0
    by_hash: int = 0
    by_statistics: int = 0
    undecided: int = 0
    compared_streams: int = 0
    steps: tuple[int, int] | None = None
    first: Parting | None = None
    tolerance: str = ""
    remarks: tuple[str, ...] = ()
    likely_renamings: tuple[tuple[str, str], ...] = ()
    quick: bool = False
    margins: Mapping[str, float] = field(default_factory=dict)

    @property
    def parted(self) -> bool:
        """Whether a message differs beyond the tolerance."""
        return self.first is not None

    @property
    def differing(self) -> int:
        """The number of messages that differ in a bit."""
        return sum(one.differing for one in self.streams)

    @property
    def parted_messages(self) -> int:
        """The number of messages that differ beyond the tolerance."""
        return sum(one.parted for one in self.streams)

    @property
    def complete(self) -> bool:
        """Whether every message of both traces was compared."""
        return not self.uncompared

    @property
    def identical(self) -> bool:
        """Whether every message of both traces was compared, and is bitwise equal, or equal by its hash."""
        return self.compared > 0 and self.complete and not self.differing and not self.by_statistics

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        streams = counted(self.compared_streams, "stream")
        whole = f"{counted(self.compared, 'message')} of {streams}{self._over()}{self._without_data()}"
        lacking = self._lacking()
        if not self.compared:
            return f"nothing could be compared{lacking or ': neither trace has messages'}"
        if self.first is not None:
            parts = sum(one.first is not None for one in self.streams)
            return f"A and B part at {self.first}; in all, {parts:,} of {streams} part{lacking}"
        if self.undecided:
            return f"A and B differ, and hashes do not tell whether within {self.tolerance}{lacking}"
        if not self.differing:
            same = "have the same checksums" if self.quick else "are bit-identical"
            same = "are the same as far as was recorded" if self.by_statistics else same
            return f"A and B {same}: {whole}{lacking}"
        most = max((one.largest for one in self.streams), key=lambda one: one.amount.relative)
        return f"A and B agree within {self.tolerance}: {self.differing:,} of {whole} differ, most at {most}{lacking}"

    def _over(self) -> str:
        if self.steps is None:
            return ""
        first, last = self.steps
        return f" at step {first}" if first == last else f" over the steps {first} to {last}"

    def _without_data(self) -> str:
        """The numbers of messages that were compared without their data, in words."""
        told = [(self.by_hash, "by hash"), (self.by_statistics, "by statistics")]
        some = [f"{count:,} {how}" for count, how in told if count]
        return f" ({', '.join(some)})" if some else ""

    def _lacking(self) -> str:
        """The end of the verdict: what was not compared."""
        if not self.uncompared:
            return ""
        whys: dict[str, int] = {}
        for one in self.uncompared:
            whys[one.why] = whys.get(one.why, 0) + one.count
        told = "; ".join(f"{count:,} {'are ' if why.startswith('only') else ''}{why}" for why, count in whys.items())
        return f". Not compared: {counted(sum(whys.values()), 'message')}, of which {told}"

    def _repr_html_(self) -> str:
        """The verdict and the streams that differ, for notebooks."""
        rows = [
            (one.name.kind, one.name.module, one.name.tag, one.differing, one.parted, one.first or "")
            for one in self.streams[:_SHOWN]
        ]
        columns = ("kind", "module", "tag", "differing", "beyond the tolerance", "first")
        return table(columns, rows, self.verdict)

    def as_json(self) -> dict[str, Any]:
        """The result in JSON values."""
        names = "one other verdict identical parted complete compared by_hash by_statistics undecided differing"
        more = "parted_messages compared_streams steps tolerance first streams structure uncompared likely_renamings"
        return json_of(self, *names.split(), *more.split(), "margins", "remarks")


def counted(count: int, what: str) -> str:
    """A number with its noun, in the singular or plural.

    Examples
    --------
    >>> counted(1, "stream"), counted(1200, "stream")
    ('1 stream', '1,200 streams')
    """
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _plain(value: Any) -> Any:
    """A NumPy scalar as a JSON value; a complex number as text."""
    item = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(item, complex) else item
