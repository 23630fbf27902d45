"""Compares the matched messages of two traces, and collects the results."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.amounts import HASH, STATISTICS, Amount, Summaries, Way, amount, differing, sampled, ways_of
from analyze.comparing.difference import Difference, Parting, StreamDifference, StructureDifference, Uncompared
from analyze.comparing.matching import INPUT, KEPT, Arrays, Matched, Name, Rows, Samples, first_of, values_of_pairs
from analyze.comparing.noise import Judgement, Observed
from tracer.errors import CaptureError
from tracer.format.journal import NONE, Column
from tracer.trace.reader import TraceReader
from tracer.trace.streams import StreamInfo

Align = Literal["step", "sample"]
UPDATED = {"weight_updates": "weights", "bias_updates": "biases"}
"""Kinds that are differences of another kind, before and after a step."""
_ONLY = ("only in A", "only in B")
UNDECIDED = "different by hash or statistics, which do not tell by how much"


@dataclass
class _Tally:
    """Counts and extremes of one stream."""

    compared: int = 0
    by: Counter[str] = field(default_factory=Counter)
    """The numbers of messages that were compared by hash and by statistics."""
    differing: int = 0
    parted: int = 0
    first: Parting | None = None
    largest: Parting | None = None
    place: float = math.inf
    """The index of `first` among all messages, in A's order of observation."""

    def differs(self, most: Parting, first: Parting | None, place: float, differing: int = 1, parted: int = 1) -> None:
        """Count differing messages; `most` differs most, and `first`, at `place`, is the first beyond the tolerance."""
        self.differing += differing
        self.parted += parted
        if self.largest is None or _size(most) > _size(self.largest):
            self.largest = most
        if first is not None and place < self.place:
            self.first, self.place = first, place


@dataclass(eq=False)
class Comparison:
    """A comparison of two traces, A and B, whose messages are matched.

    Parameters
    ----------
    readers : pair of TraceReader
    matched : Matched
    align, rtol, atol, quick
        As in `analyze.diff`.
    with_norms : bool
        Whether the norms of weights and updates are kept, and messages that differ by hash or statistics are refused,
        because noise cannot judge them.
    """

    readers: tuple[TraceReader, TraceReader]
    matched: Matched
    align: Align
    rtol: float = 0.0
    atol: float = 0.0
    quick: bool = False
    with_norms: bool = False
    tallies: defaultdict[int, _Tally] = field(default_factory=lambda: defaultdict(_Tally))
    refused: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """The steps of matched messages that cannot be compared, by name and reason."""
    observed: Observed = field(init=False)
    beyond: NDArray[np.bool_] = field(init=False)
    norms: dict[tuple[Name, int, int], float] = field(default_factory=dict)
    """The norms of the weights and updates of A, by stream, step and call; only `with_norms`."""
    place: NDArray[np.int64] = field(init=False)
    """For each row of A, the index of its message in the order of observation; `NONE` if B lacks the message."""

    def __post_init__(self) -> None:
        length = len(self.readers[0].journal)
        self.observed = Observed.nothing(length)
        self.beyond = np.zeros(length, np.bool_)
        self.place = np.full(length, NONE)
        self.place[self.matched.rows[0]] = np.arange(len(self.matched.rows[0]))
        self.samples = Samples() if self.align == "sample" else None
        for reader in self.readers if self.samples else ():
            if not any(stream.kind == INPUT for stream in reader.streams):
                raise CaptureError(f"{reader.path} has no {INPUT}, by which samples are aligned; align by step")

    @property
    def first(self) -> Parting | None:
        """The first message beyond the tolerance, in A's order of observation."""
        return min(self.tallies.values(), key=lambda one: one.place, default=_Tally()).first

    def run(self) -> None:
        """Compare all matched messages."""
        names = self.matched.name_of[0]
        ways, way = ways_of(self.readers, self.matched, aligned=self.samples is not None)
        equal, rows = self._by_checksum(ways, way)
        for number, count in zip(*np.unique(names[equal], return_counts=True), strict=True):
            self.tallies[int(number)].compared += int(count)
        self.observed.relative[equal] = 0.0
        for number, one in enumerate(ways):
            pairs = np.flatnonzero(way == number)
            if one.why:
                for row in self.matched.rows[0][pairs].tolist():
                    self._refuse(row, one.why)
            elif one.by in KEPT[HASH:]:
                self._compare_kept(pairs, one)
        self._compare_data(rows)

    def _compare_data(self, rows: Rows) -> None:
        """Read and compare the data of the given rows of both traces."""
        for row, both in self._read(rows, self.samples):
            if isinstance(both, str):
                self._refuse(row, both)
                continue
            mine, theirs = both
            if self.with_norms and self._name(row).kind in (*UPDATED, *UPDATED.values()):
                self._weigh(row, mine)
            tally = self.tallies[int(self.matched.name_of[0][row])]
            tally.compared += 1
            found = amount(mine, theirs, self.rtol, self.atol)
            self._note(row, found)
            if found is not None:
                parting = self._parting(row, found)
                first = parting if found.beyond else None
                tally.differs(parting, first, int(self.place[row]), parted=found.beyond)

    def _read(self, rows: Rows, samples: Samples | None) -> Iterator[tuple[int, Arrays | str]]:
        """The rows of A with both arrays, of the samples that both have; or a sentence why they cannot be aligned."""
        for row, both in values_of_pairs(self.readers, rows):
            step = int(self.readers[0].journal[row, Column.GLOBAL_STEP])
            yield row, both if samples is None else samples.aligned(self._name(row), step, *both)

    def _name(self, row: int) -> Name:
        """The name of the stream of a row of A."""
        return self.matched.names[int(self.matched.name_of[0][row])]

    def _compare_kept(self, pairs: NDArray[np.int64], way: Way) -> None:
        """Compare messages by their hashes or statistics."""
        names = self.matched.name_of[0]
        rows = self.matched.rows[0][pairs]
        for number, many in zip(*np.unique(names[rows], return_counts=True), strict=True):
            tally = self.tallies[int(number)]
            tally.compared += int(many)
            tally.by[way.by] += int(many)
        self.observed.relative[rows] = 0.0
        for some, summaries in differing(self.readers, self.matched.kept, pairs, way):
            sure = np.ones(len(some), np.bool_)
            if self.rtol or self.atol or self.with_norms:
                # noise and tolerances judge the size of a difference, which a hash does not give
                if summaries is None or self.with_norms:
                    sure[:] = False
                else:
                    sure = summaries.beyond(self.rtol, self.atol)
                for row in self.matched.rows[0][some[~sure]].tolist():
                    tally = self.tallies[int(names[row])]
                    tally.compared -= 1
                    tally.by[way.by] -= 1
                    self.observed.relative[row] = math.nan
                    self._refuse(row, UNDECIDED)
            self._note_kept(some, np.flatnonzero(sure), summaries, way.by)

    def _note_kept(
        self, pairs: NDArray[np.int64], sure: NDArray[np.int64], summaries: Summaries | None, by: str
    ) -> None:
        """Count messages that differ by hash or statistics; `sure` has the indices of those beyond the tolerance."""
        rows = self.matched.rows[0][pairs]
        far = np.full(len(pairs), math.nan) if summaries is None else summaries.relative()
        self.observed.relative[rows[sure]] = np.fmax(far[sure], 0.0)
        self.beyond[rows[sure]] = True

        def parting(number: int) -> Parting:
            told = () if summaries is None else summaries.told(number)
            return self._parting(int(rows[number]), Amount(relative=float(far[number]), by=by, statistics=told))

        streams = self.matched.name_of[0][rows[sure]]
        for stream in np.unique(streams).tolist():
            mine = sure[streams == stream]
            first = int(mine[self.place[rows[mine]].argmin()])
            most = int(mine[np.fmax(far[mine], -1.0).argmax()])
            tally, place = self.tallies[stream], int(self.place[rows[first]])
            tally.differs(parting(most), parting(first), place, len(mine), len(mine))

    def _weigh(self, row: int, data: NDArray[Any]) -> None:
        line = self.readers[0].journal[row]
        norm = float(np.linalg.norm(data.astype(np.float64).reshape(-1)))
        self.norms[self._name(row), int(line[Column.GLOBAL_STEP]), int(line[Column.CALL])] = norm

    def roundings(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        """The relative error of each update of A that comes from rounding the weights; 0 for other messages.

        Parameters
        ----------
        epsilon : ndarray of float64
            The machine epsilon of each stream.
        """
        journal, names = self.readers[0].journal, self.matched.name_of[0]
        found = np.zeros(len(journal))
        numbers = [number for number, name in enumerate(self.matched.names) if name.kind in UPDATED]
        for row in np.flatnonzero(np.isin(names, numbers)).tolist():
            name = self._name(row)
            at = int(journal[row, Column.GLOBAL_STEP]), int(journal[row, Column.CALL])
            update = self.norms.get((name, *at), 0.0)
            weight = self.norms.get((replace(name, kind=UPDATED[name.kind]), *at), 0.0)
            if update > 0:
                found[row] = float(epsilon[names[row]]) * weight / update
        return found

    def _note(self, row: int, found: Amount | None) -> None:
        """Store what the judgement by noise needs."""
        if found is None:
            self.observed.relative[row] = 0.0
            return
        broken = found.shapes is not None or math.isinf(found.largest)
        self.observed.relative[row] = 1.0 if broken else found.relative
        self.observed.broken[row] = broken
        self.observed.switched[row] = found.switched
        self.beyond[row] = found.beyond

    def judged(self, judgement: Judgement) -> None:
        """Replace the differences beyond the tolerance by those that noise does not explain."""
        alarms = judgement.alarms & self.beyond
        names = self.matched.name_of[0]
        for tally in self.tallies.values():
            tally.first, tally.place, tally.parted = None, math.inf, 0
        rows = np.flatnonzero(alarms)
        numbers, firsts, counts = np.unique(names[rows], return_index=True, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.tallies[number].parted = count
        chosen = np.isin(self.matched.rows[0], rows[firsts])
        pair = (self.matched.rows[0][chosen], self.matched.rows[1][chosen])
        for row, found in self._again(pair):
            parting = replace(self._parting(row, found), tolerance=float(judgement.tolerance[row]))
            tally = self.tallies[int(names[row])]
            tally.first, tally.place = parting, int(self.place[row])

    def _again(self, rows: Rows) -> Iterator[tuple[int, Amount]]:
        """Read the given rows again and measure them; aligning samples needs the inputs of their steps, too."""
        journal, names = self.readers[0].journal, self.matched.name_of[0]
        samples = None
        wanted = set(rows[0].tolist())
        if self.samples is not None:
            samples = Samples()
            inputs = [number for number, name in enumerate(self.matched.names) if name.kind == INPUT]
            at = np.isin(journal[self.matched.rows[0], Column.GLOBAL_STEP], journal[rows[0], Column.GLOBAL_STEP])
            chosen = (at & np.isin(names[self.matched.rows[0]], inputs)) | np.isin(self.matched.rows[0], rows[0])
            rows = (self.matched.rows[0][chosen], self.matched.rows[1][chosen])
        for row, both in self._read(rows, samples):
            if row in wanted and not isinstance(both, str):
                found = amount(*both, self.rtol, self.atol)
                assert found is not None
                yield row, found

    def _by_checksum(self, ways: Sequence[Way], way: NDArray[np.int64]) -> tuple[NDArray[np.int64], Rows]:
        """The rows of A that are equal as events or by checksum, and the rows of A and B whose data must be read."""
        mine, theirs = self.matched.rows
        by = np.array([one.by for one in ways], np.str_)[way]
        equal, data = by == "nothing", by == "data"
        if self.quick and self.samples is None:
            first, second = (self._column(side, Column.CRC32C) for side in (0, 1))
            alike = np.array([one.alike for one in ways], np.bool_)[way]
            equal |= alike & (first == second) & (first != NONE)
        data &= ~equal
        return mine[equal], (mine[data], theirs[data])

    def _compared(self, number: int) -> bool:
        """Whether any message of a stream was compared."""
        return number in self.tallies and self.tallies[number].compared > 0

    def _refuse(self, row: int, why: str) -> None:
        step = int(self.readers[0].journal[row, Column.GLOBAL_STEP])
        self.refused.setdefault((int(self.matched.name_of[0][row]), why), []).append(step)

    def _parting(self, row: int, found: Amount) -> Parting:
        line = self.readers[0].journal[row]
        step, call, epoch = (int(line[column]) for column in (Column.GLOBAL_STEP, Column.CALL, Column.EPOCH))
        return Parting(self._name(row), step, call, epoch, found)

    # -- results --------------------------------------------------------------------------------------------------

    def structure(self) -> list[StructureDifference]:
        """The differences of the dtypes and samplings of streams, of counters, and of the order of messages."""
        found = []
        for x, y in self._streams_of_one_sort():
            if x.dtype != y.dtype:
                found.append(StructureDifference("dtype", str(x), x.dtype, y.dtype))
            if sampled(x.sampling) != sampled(y.sampling):
                found.append(StructureDifference("sampling", str(x), x.sampling, y.sampling))
        for what, column in (("epoch", Column.EPOCH), ("train_step", Column.TRAIN_STEP)):
            one, other = (self._column(side, column) for side in (0, 1))
            unlike = np.flatnonzero(one != other)
            if len(unlike):
                step = int(self._column(0, Column.GLOBAL_STEP)[unlike[0]])
                found.append(
                    StructureDifference(what, f"from step {step} on", int(one[unlike[0]]), int(other[unlike[0]]))
                )
        order = np.diff(first_of(self.matched.kept[1])) < 0
        back = np.flatnonzero(order & (np.diff(self._column(0, Column.GLOBAL_STEP)) == 0))
        if len(back):
            pair = self.matched.rows[0][back[0]], self.matched.rows[0][back[0] + 1]
            names = [str(self._name(row)) for row in pair]
            step = int(self.readers[0].journal[pair[1], Column.GLOBAL_STEP])
            found.append(
                StructureDifference(
                    "order", f"from step {step} on", " before ".join(names), " before ".join(names[::-1])
                )
            )
        return found

    def _streams_of_one_sort(self) -> list[tuple[StreamInfo, StreamInfo]]:
        """Pairs of streams, of A and B, that both hold data, both hashes or both statistics of the same messages."""
        mine, theirs = self.matched.streams
        found = []
        for one, other in zip(self.matched.kept[0].T, self.matched.kept[1].T, strict=True):
            both = (one != NONE) & (other != NONE)
            rows = (one[both], other[both])
            streams = [self.readers[side].journal[rows[side], Column.STREAM] for side in (0, 1)]
            found += [(mine[a], theirs[b]) for a, b in np.unique(np.stack(streams, axis=1), axis=0).tolist()]
        return found

    def _column(self, side: int, column: Column) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.readers[side].journal[self.matched.rows[side], column]
        return found

    def remarks(self) -> list[str]:
        """Sentences about rows that the alignment of samples left out."""
        left = (0, 0) if self.samples is None else self.samples.left_out
        return [
            f"{n:,} rows of the batches of {side} are not in those of the other"
            for n, side in zip(left, "AB", strict=True)
            if n
        ]

    def uncompared(self) -> list[Uncompared]:
        """The messages that could not be compared, and why."""
        found = []
        for (number, why), steps in sorted(self.refused.items(), key=lambda one: min(one[1])):
            whole = not self._compared(number)
            found.append(Uncompared(why, self.matched.names[number], len(steps), min(steps), whole))
        for side, why in enumerate(_ONLY):
            rows = self.matched.alone[side]
            numbers, first, counts = np.unique(self.matched.name_of[side][rows], return_index=True, return_counts=True)
            steps = self.readers[side].journal[rows[first], Column.GLOBAL_STEP]
            told = zip(numbers.tolist(), steps.tolist(), counts.tolist(), strict=True)
            for number, step, count in sorted(told, key=itemgetter(1)):
                found.append(Uncompared(why, self.matched.names[number], count, step, not self._compared(number)))
        for side, why in enumerate(_ONLY):
            found += self._of_other_ranks(side, why)
        return found

    def _of_other_ranks(self, side: int, why: str) -> list[Uncompared]:
        """The messages of ranks that the other run lacks."""
        found = []
        for number in self.matched.strangers[side]:
            one, reader = self.matched.streams[side][number], self.readers[side]
            rows = reader.select(steps=self.matched.filters.steps, streams=[number])
            if len(rows):
                name = Name(one.kind, one.module, one.tag, one.leaf, one.rank)
                found.append(Uncompared(why, name, len(rows), int(reader.journal[rows[0], Column.GLOBAL_STEP]), True))
        return found

    def difference(self, **told: Any) -> Difference:
        """The results as a `Difference`."""
        streams = [
            StreamDifference(
                self.matched.names[number], tally.compared, tally.differing, tally.parted, tally.first, tally.largest
            )
            for number, tally in sorted(self.tallies.items(), key=_order)
            if tally.largest is not None
        ]
        compared = np.flatnonzero(~np.isnan(self.observed.relative))
        steps = self.readers[0].journal[compared, Column.GLOBAL_STEP]
        return Difference(
            one=str(self.readers[0].path),
            other=str(self.readers[1].path),
            streams=tuple(streams),
            uncompared=tuple(self.uncompared()),
            compared=sum(tally.compared for tally in self.tallies.values()),
            by_hash=sum(tally.by[KEPT[HASH]] for tally in self.tallies.values()),
            by_statistics=sum(tally.by[KEPT[STATISTICS]] for tally in self.tallies.values()),
            undecided=sum(len(steps) for (_, why), steps in self.refused.items() if why == UNDECIDED),
            compared_streams=sum(tally.compared > 0 for tally in self.tallies.values()),
            steps=(int(steps.min()), int(steps.max())) if len(steps) else None,
            first=self.first,
            quick=self.quick,
            **told,
        )


def _size(parting: Parting) -> tuple[float, float]:
    """A key to order partings by size: different shapes, then the largest relative difference."""
    found = parting.amount
    if found.shapes is not None:
        return math.inf, math.inf
    return tuple(-1.0 if math.isnan(size) else size for size in (found.relative, found.largest))  # type: ignore[return-value] # two


def _order(one: tuple[int, _Tally]) -> tuple[float, float, float]:
    tally = one[1]
    size = (0.0, 0.0) if tally.largest is None else _size(tally.largest)
    return tally.place, -size[0], -size[1]
