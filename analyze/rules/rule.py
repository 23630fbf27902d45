"""The base classes of the rules: subscribers that look for a fault of trainings, and answer with findings."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from analyze.metrics.checks import check, is_whole
from analyze.metrics.metric import Registered, Series, series_of
from analyze.rules.coverage import Judged
from analyze.rules.finding import Episode, Episodes, Finding, Measured, Place, Severity
from analyze.rules.tables import Bools, Numbers, OfKind, RuleTables, Table
from tracer.errors import MessageError
from tracer.messaging.messages import DEFAULT_TAG, KINDS, Message
from tracer.messaging.subscriber import Subscriber
from tracer.messaging.subscription import Subscription, is_doubled
from tracer.numbers.statistics import are_statistics
from tracer.trace.streams import StreamInfo


class Known(NamedTuple):
    """A module: its name, the package and the name of its class, and its whole entry in the header."""

    name: str
    package: str
    kind: str
    said: Mapping[str, Any]


def modules_of(model: Mapping[str, Any]) -> Iterator[Known]:
    """The modules in the header.

    Examples
    --------
    >>> told = {"modules": [{"name": "act", "class": "torch.nn.modules.activation.Tanh"}, "nonsense"]}
    >>> [(one.name, one.package, one.kind) for one in modules_of(told)]
    [('act', 'torch.nn.modules.activation', 'Tanh')]
    """
    for said in entries(model, "modules"):
        package, _, kind = str(said.get("class")).rpartition(".")
        yield Known(str(said.get("name")), package, kind, said)


def entries(model: Mapping[str, Any], part: str) -> Iterator[Mapping[str, Any]]:
    """The well-formed entries of a list in the header, such as ``modules`` or ``parameters``."""
    told = model.get(part)
    yield from (one for one in (told if isinstance(told, list) else ()) if isinstance(one, Mapping))


FIELDS = ("severity", "kind", "worst", "last", "steps", "value", "threshold")
"""The first numbers in the data of a finding's message; those of `Rule.numbers` follow."""


_FIXED = frozenset({"subscriptions", "produces", "_labels", "kinds"})
"""The attributes of a rule that are no part of its state."""


class Looking(TypedDict, total=False):
    """The options of a rule that select messages, as in `tracer.Subscription`."""

    tag: str | None
    modules: str | Iterable[str] | None


class Rule(Registered):
    """A subscriber that looks for a fault, and publishes each finding twice, as ``{name}_finding``.

    The first message comes as soon as the condition has held for `patience` steps, so that a live run can be stopped.
    The second says how long the condition held and when it was worst. It comes if the finding has changed since: when
    the next finding in the series begins, or when the run or the replay ends. Both messages have the step at which the
    finding began. `finding` turns either into a `Finding`. A condition that holds again after 10 judged steps without
    it is another finding.

    A subclass implements `look`, which calls `judge` for each series that it can judge, and `evidence`. `judge` notes
    in `coverage` what was judged. A rule that judges several steps at once calls `weigh` at each; a rule that judges
    several series at once, or has no value to compare, calls `judged` for each.

    Parameters
    ----------
    needs : iterable of (str or tuple of str)
        The kinds that the rule needs; of a tuple, one kind is enough.
    also : iterable of str
        Kinds that the rule takes if they are there.
    tag, modules
        As in `tracer.Subscription`.
    patience : int
        The number of recorded steps in a row at which the condition must hold.
    every : int
        The rule receives only steps that are multiples of this.

    Attributes
    ----------
    severity : Severity
        The severity of findings for which `judge` is given no other.
    advice : str
        What to try.
    judges : str
        What the rule judges, for the sentence that says that this was missing.
    numbers : tuple of str
        The names of the further numbers of a finding.
    coverage : Judged
        The steps and streams that the rule has judged.
    episodes : Episodes
        Its findings so far.
    """

    severity: ClassVar[Severity] = Severity.WARNING
    advice: ClassVar[str]
    judges: str
    numbers: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        needs: Iterable[str | tuple[str, ...]],
        also: Iterable[str] = (),  # positional, so that no rule has it among the parameters that it inherits
        *,
        patience: int = 1,
        every: int = 1,
        tag: str | None = DEFAULT_TAG,
        modules: str | Iterable[str] | None = None,
    ) -> None:
        check(is_whole(patience, 1), f"the patience of {self.name} is a positive integer", patience)
        wanted = [(one,) if isinstance(one, str) else tuple(one) for one in needs]
        statistics = self.takes_statistics
        subscriptions = [Subscription(kinds, tag, every, modules, statistics=statistics) for kinds in wanted]
        if optional := tuple(also):
            wanted.append(optional)
            subscriptions.append(Subscription(optional, tag, every, modules, statistics=statistics, optional=True))
        Subscriber.__init__(self, subscriptions, f"{self.name}_finding")
        self.kinds = tuple(kind for kinds in wanted for kind in kinds)
        self.patience = patience
        self.coverage = Judged()
        self._weighed: dict[tuple[str, Series], Judged] = {}
        self._step: int | None = None
        self.episodes = Episodes()

    @abstractmethod
    def look(self, message: Message) -> Iterator[Message]:
        """Judge one message, or store it for `look_back`."""

    def look_back(self) -> Iterator[Message]:
        """Judge what `look` stored of a finished step."""
        return iter(())

    @abstractmethod
    def evidence(self, found: Finding) -> str:
        """A sentence that says what was seen."""

    def compute(self, message: Message) -> Iterator[Message]:
        """Judge the previous step if a message begins a new step; then judge the message."""
        if message.global_step != self._step:
            if self._step is not None:
                yield from self.look_back()
            self._step = message.global_step
        yield from self.look(message)

    def conclude(self) -> Iterator[Message]:
        """Judge the last step; publish again the findings that have changed since they were published."""
        yield from self.look_back()
        for episode in self.episodes.known.values():
            if episode.said and episode.changed:
                yield self.published(episode)

    def judge(
        self,
        at: Message | Place,
        bad: bool,
        value: float,
        threshold: float,
        *numbers: float,
        since: Place | None = None,
        severity: Severity | None = None,
        worse: bool = True,
        patience: int | None = None,
        covers: bool = True,
    ) -> Iterator[Message]:
        """Judge a series at a step; yield the finding once the condition has held for `patience` steps.

        Parameters
        ----------
        at : Message or Place
        bad : bool
            Whether the condition holds.
        value, threshold : float
            The measured value, and the bound that it was compared with.
        *numbers : float
            The further numbers, in the order of the attribute `numbers`.
        since : Place, optional
            Where the condition began to hold, if that was earlier than `at`.
        severity : Severity, optional
        worse : bool
            Whether a larger value is worse than a smaller one.
        patience : int, optional
            At how many recorded steps the condition must hold, if not at the rule's `patience`.
        covers : bool
            Whether this is noted in `coverage`.
        """
        if covers:
            self.judged(at)
        if not bad and not self.episodes:
            return
        place = at if isinstance(at, Place) else Place.of(at)
        steps = np.array([place.global_step])
        if not bad:
            self.episodes.rest(place[:2], steps)
            return
        told, of_each = np.array([severity or self.severity]), [np.array([float(one)]) for one in numbers]
        measured = Measured(place, steps, np.array([float(value)]), np.array([float(threshold)]), of_each, told, worse)
        yield from map(self.published, self.episodes.hold(measured, since, patience or self.patience))

    def published(self, episode: Episode) -> Message:
        """The finding of an episode as a message."""
        return episode.message(self.produces[0], self.kinds)

    def judged(self, at: Message | Place) -> None:
        """Note in `coverage` that a series was judged at a step, and at the earlier steps that were weighed."""
        stream = at.kind, at.series if isinstance(at, Place) else series_of(at)
        weighed = self._weighed.pop(stream, None)
        if weighed is not None:
            self.coverage.take(weighed)
        self.coverage.add(*stream, at.global_step)

    def weigh(self, at: Message | Place) -> None:
        """Note that a series at a step is part of the next judgement on this series."""
        stream = at.kind, at.series if isinstance(at, Place) else series_of(at)
        self._weighed.setdefault(stream, Judged()).add(*stream, at.global_step)

    def amend(self, kind: str, series: Series, *numbers: float) -> None:
        """Replace the further numbers of a finding; its last message will have them."""
        known = self.episodes.known[kind, series]
        if known.numbers != numbers:
            known.numbers, known.changed = numbers, True

    def finding(self, message: Message) -> Finding:
        """The finding in a message of this rule.

        Raises
        ------
        MessageError
            If the message is not of this rule.
        """
        data = message.data
        length = len(FIELDS) + len(self.numbers)
        if message.kind not in self.produces or data is None or data.shape != (length,):
            raise MessageError(f"{self.name} makes {', '.join(self.produces)} of {length} numbers, not this message")
        severity, kind, worst, last, steps, value, threshold, *numbers = data.tolist()
        found = Finding(
            rule=self.name,
            severity=Severity(int(severity)),
            module=message.key,
            kind=self.kinds[int(kind)],
            tag=message.tag,
            leaf=message.leaf,
            rank=message.rank,
            epoch=message.epoch,
            first=message.global_step,
            worst=int(worst),
            last=int(last),
            steps=int(steps),
            value=value,
            threshold=threshold,
            numbers=dict(zip(self.numbers, numbers, strict=True)),
            advice=self.advice,
        )
        vars(found)["evidence"] = self.evidence(found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state of the rule, as copies."""
        return {name: deepcopy(value) for name, value in vars(self).items() if name not in _FIXED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another rule of the same class and parameters."""
        vars(self).update(deepcopy(dict(state)))

    def unjudged(self) -> str:
        """The reason why the rule judged nothing; empty if it judged something."""
        return "" if self.coverage else f"it needs {self.judges}"


_FEW_ELEMENTS = 16
"""Streams with at most this many numbers a message are read as tables, too."""


class TableRule(Rule):
    """A rule that judges statistics of tensors as arrays (steps x streams).

    A subclass implements `judge_table` instead of `look`. Live, a table is of one step; in `trace check`, of a block of
    steps. So a rule keeps what it remembers of earlier steps as arrays with an entry for each column of a kind:
    `grown` makes room for columns that come up later.

    Attributes
    ----------
    statistics : tuple of str
        The statistics of a tensor that the tables have, as `analyze.metrics.moments.shared` names them.
    whole : frozenset of str
        The kinds of which the rule takes whole tensors as messages, where they are recorded: by `look_at_data`.
    tables : Tables
        What the rule has heard since the last table.
    """

    takes_statistics: bool | Literal["too"] = True
    statistics: ClassVar[tuple[str, ...]]
    whole: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, *needs: Any, **where: Any) -> None:
        super().__init__(*needs, **where)
        self.tables = RuleTables(self.subscriptions, self.statistics)

    @abstractmethod
    def judge_table(self, table: Table) -> Iterator[Message]:
        """Judge the steps of a table, by calls of `judge_all`."""

    def reads(self, stream: StreamInfo) -> bool:
        """Whether tables have all that the rule needs of a recorded stream."""
        if are_statistics(stream.sampling) or (stream.kind in KINDS and KINDS[stream.kind].event):
            return True
        width = np.dtype(np.float64).itemsize
        return stream.kind not in self.whole and stream.bytes <= _FEW_ELEMENTS * width * stream.count

    def look(self, message: Message) -> Iterator[Message]:
        """Take a message into the table of its step, or the data of a tensor of a kind of `whole`."""
        if message.kind in self.whole and not are_statistics(message.sampling):
            yield from self.look_at_data(message)
        elif not is_doubled(message.sampling):  # else the message of its statistics is taken
            self.tables.hear(message)

    def look_at_data(self, message: Message) -> Iterator[Message]:
        """Judge or store the data of a tensor."""
        yield from ()

    def look_back(self) -> Iterator[Message]:
        """Judge the table of a finished step."""
        yield from self._judged(self.tables.rest())

    def take(self, stacks: Sequence[Numbers]) -> Iterator[Message]:
        """Take the messages of a stretch of a trace, and judge the steps that are over."""
        yield from self._judged(self.tables.hear_many(stacks))

    def _judged(self, table: Table | None) -> Iterator[Message]:
        if table is not None:
            yield from self.judge_table(table)

    def cover(self, table: Table, of: OfKind, judged: Bools) -> None:
        """Note in `coverage` which messages of a kind were judged, (steps, columns)."""
        if len(of.series) < len(of.columns):
            judged = np.stack([judged[:, columns].any(axis=1) for columns in of.series.values()], axis=1)
        self.coverage.add_many(of.kind, list(of.series), table.steps, judged)

    def judge_all(
        self,
        table: Table,
        of: OfKind,
        judged: Bools,
        bad: Bools,
        value: ArrayLike,
        threshold: ArrayLike,
        *numbers: ArrayLike,
        severity: NDArray[np.int64] | None = None,
        worse: bool = True,
        covers: bool = True,
    ) -> Iterator[Message]:
        """Judge the messages of a kind, as `judge` does a single one; yield the findings.

        Parameters
        ----------
        table : Table
        of : OfKind
        judged, bad : ndarray of bool, (steps, columns)
            Which messages are judged, and for which the condition holds.
        value, threshold, *numbers : array_like
            As in `judge`; they broadcast to (steps, columns).
        severity : ndarray of int64, optional
            By default the rule's `severity`.
        worse : bool
            As in `judge`.
        covers : bool
            Whether the judged messages are noted in `coverage`.
        """
        if covers:
            self.cover(table, of, judged)
        bad = bad & judged
        odd: Bools = np.any(bad, axis=0)
        if not odd.any() and not self.episodes:
            return
        shape = bad.shape
        told = np.full(shape, self.severity, np.int64) if severity is None else np.broadcast_to(severity, shape)
        arrays = [np.broadcast_to(np.asarray(one, np.float64), shape) for one in (value, threshold, *numbers)]
        for series, columns in of.series.items():
            if odd[columns].any() or (of.kind, series) in self.episodes:
                at = of.cells(columns, judged)
                of_series = [one[at] for one in arrays]
                yield from self._judge_series(table, (of.kind, series), at[0], bad[at], of_series, told[at], worse)

    def _judge_series(
        self,
        table: Table,
        stream: tuple[str, Series],
        rows: NDArray[np.int64],
        bad: Bools,
        arrays: list[NDArray[np.float64]],
        severities: NDArray[np.int64],
        worse: bool,
    ) -> Iterator[Message]:
        """Judge the messages of a series in order, in runs of steps at which the condition holds, or does not."""
        cuts = [0, *(np.flatnonzero(bad[1:] != bad[:-1]) + 1).tolist(), len(bad)]
        for begin, end in itertools.pairwise(cuts):
            if begin == end:
                continue
            steps = table.steps[rows[begin:end]]
            if not bad[begin]:
                self.episodes.rest(stream, steps)
                continue
            value, threshold, *numbers = (one[begin:end] for one in arrays)
            place = table.place(*stream, int(rows[begin]))
            measured = Measured(place, steps, value, threshold, numbers, severities[begin:end], worse)
            yield from map(self.published, self.episodes.hold(measured, None, self.patience))


def grown(array: NDArray[Any], size: int, fill: Any) -> NDArray[Any]:
    """An array of an entry for each column, with entries of `fill` for columns that have come up since."""
    return array if len(array) == size else np.append(array, np.full(size - len(array), fill, array.dtype))


def latest(values: NDArray[Any], there: Bools, before: NDArray[Any]) -> NDArray[Any]:
    """The last value up to each step that is there: (steps, columns).

    Parameters
    ----------
    values : ndarray, (steps, columns)
    there : ndarray of bool, (steps, columns)
    before : ndarray, (columns,)
        The last values before the first step.
    """
    rows = np.maximum.accumulate(np.where(there, np.arange(1, len(there) + 1)[:, None], 0), axis=0)
    found: NDArray[Any] = np.take_along_axis(np.concatenate([before[None], values]), rows, axis=0)
    return found


class LastValues:
    """The last value that was there of each column of a kind, from table to table.

    Parameters
    ----------
    fill : float or bool
        The value before the first.
    """

    def __init__(self, fill: Any) -> None:
        self.fill = fill
        self.values: NDArray[Any] = np.full(0, fill)

    def beside(self, target: OfKind, source: OfKind, values: NDArray[Any]) -> NDArray[Any]:
        """The last value up to each step of the same series as each column of `target`, (steps, columns).

        Parameters
        ----------
        target, source : OfKind
        values : ndarray, (steps, columns of source)
        """
        known = latest(values, source.there, grown(self.values, len(source.columns), self.fill))
        self.values = known[-1]
        return taken(known, columns_of(source, target), self.fill)


def columns_of(source: OfKind, target: OfKind) -> list[int]:
    """For each column of `target`, the first column of the same series in `source`; -1 if there is none."""
    return [source.series.get(column.series, [-1])[0] for column in target.columns]


def taken(array: NDArray[Any], columns: Sequence[int], fill: Any) -> NDArray[Any]:
    """Some columns of an array (steps, columns); `fill` for those of the number -1."""
    return np.concatenate([array, np.full((len(array), 1), fill, array.dtype)], axis=1)[:, list(columns)]
