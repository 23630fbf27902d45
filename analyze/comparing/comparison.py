"""Two traces whose messages are matched, and what comes of comparing them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from analyze.comparing.amounts import Amount, amount
from analyze.comparing.difference import Difference, Parting, StreamDifference, Uncompared
from analyze.comparing.matching import Matched, Name, values_of_pairs
from analyze.comparing.noise import Judgement, Observed
from analyze.comparing.samples import INPUT, Samples
from analyze.comparing.structure import StructureDifference
from tracer.errors import CaptureError
from tracer.format.journal import NONE, Column
from tracer.trace.reader import TraceReader
from tracer.trace.streams import StreamInfo

Align = Literal["step", "sample"]
UPDATED = {"weight_updates": "weights", "bias_updates": "biases"}
"""Kinds that are differences of others, before and after a step."""
_WAYS = ("equal", "by checksum", "read", "data in one of them only", "recorded with another sampling")
_ONLY = ("only in A", "only in B")


@dataclass
class _Tally:
    """What was seen of one stream."""

    compared: int = 0
    differing: int = 0
    parted: int = 0
    first: Parting | None = None
    largest: Parting | None = None
    row: float = math.inf
    """Of the first, in the journal of A."""


@dataclass(eq=False)
class Comparison:
    """Two traces whose messages are matched, and what came of comparing them."""

    readers: tuple[TraceReader, TraceReader]
    matched: Matched
    align: Align
    rtol: float
    atol: float
    quick: bool
    of_a_rank: bool = False
    with_norms: bool = False
    tallies: dict[int, _Tally] = field(default_factory=dict)
    refused: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """The steps of messages that are in both and cannot be compared, by name and reason."""
    observed: Observed = field(init=False)
    beyond: NDArray[np.bool_] = field(init=False)
    norms: dict[tuple[Name, int, int], float] = field(default_factory=dict)
    """The norm of each weight and each update of A, by its stream, step and call; with `with_norms` only."""
    first: Parting | None = None

    def __post_init__(self) -> None:
        self.observed = Observed.nothing(len(self.readers[0].journal))
        self.beyond = np.zeros(len(self.readers[0].journal), np.bool_)
        self.samples = Samples() if self.align == "sample" else None
        for reader in self.readers if self.samples else ():
            if not any(stream.kind == INPUT for stream in reader.streams):
                raise CaptureError(f"{reader.path} has no {INPUT}, by which samples are aligned; align by step")

    def run(self) -> None:
        """Compare all messages that both have."""
        journal = self.readers[0].journal
        names = self.matched.name_of[0]
        equal, unread, rows = self._sorted()
        for number, count in zip(*np.unique(names[equal], return_counts=True), strict=True):
            self._tally(int(number)).compared += int(count)
        self.observed.relative[equal] = 0.0
        for row, why in unread:
            self._refuse(row, why)
        for row, _, mine, theirs in values_of_pairs(self.readers, rows):
            number = int(names[row])
            if self.samples is not None:
                name, step = self.matched.names[number], int(journal[row, Column.GLOBAL_STEP])
                aligned = self.samples.aligned(name, step, mine, theirs)
                if isinstance(aligned, str):
                    self._refuse(row, aligned)
                    continue
                mine, theirs = aligned
            if self.with_norms and self.matched.names[number].kind in (*UPDATED, *UPDATED.values()):
                self._weigh(row, mine)
            tally = self._tally(number)
            tally.compared += 1
            found = amount(mine, theirs, self.rtol, self.atol)
            self._note(row, found)
            if found is None:
                continue
            tally.differing += 1
            parting = self._parting(row, found)
            if tally.largest is None or _size(parting) > _size(tally.largest):
                tally.largest = parting
            if found.beyond:
                tally.parted += 1
                if tally.first is None:
                    tally.first, tally.row = parting, row
                self.first = self.first or parting

    def _weigh(self, row: int, data: NDArray[Any]) -> None:
        line = self.readers[0].journal[row]
        name = self.matched.names[int(self.matched.name_of[0][row])]
        norm = float(np.linalg.norm(data.astype(np.float64).reshape(-1)))
        self.norms[name, int(line[Column.GLOBAL_STEP]), int(line[Column.CALL])] = norm

    def roundings(self, epsilon: NDArray[np.float64]) -> NDArray[np.float64]:
        """For each message of A, the relative error that it has as the difference of two rounded weights; 0 for others.

        Parameters
        ----------
        epsilon : ndarray of float64
            Of each stream.
        """
        journal, names = self.readers[0].journal, self.matched.name_of[0]
        found = np.zeros(len(journal))
        numbers = [number for number, name in enumerate(self.matched.names) if name.kind in UPDATED]
        for row in np.flatnonzero(np.isin(names, numbers)).tolist():
            name = self.matched.names[int(names[row])]
            at = int(journal[row, Column.GLOBAL_STEP]), int(journal[row, Column.CALL])
            update = self.norms.get((name, *at), 0.0)
            weight = self.norms.get((replace(name, kind=UPDATED[name.kind]), *at), 0.0)
            if update > 0:
                found[row] = float(epsilon[names[row]]) * weight / update
        return found

    def _note(self, row: int, found: Amount | None) -> None:
        """Remember what the judge of noise needs."""
        if found is None:
            self.observed.relative[row] = 0.0
            return
        broken = found.shapes is not None or math.isinf(found.largest)
        self.observed.relative[row] = 1.0 if broken else found.relative
        self.observed.broken[row] = broken
        self.observed.switched[row] = found.switched
        self.beyond[row] = found.beyond

    def judged(self, judgement: Judgement) -> None:
        """Let noise decide what is too much."""
        alarms = judgement.alarms & self.beyond
        names = self.matched.name_of[0]
        self.first = None
        for tally in self.tallies.values():
            tally.first, tally.row, tally.parted = None, math.inf, 0
        rows = np.flatnonzero(alarms)
        numbers, firsts, counts = np.unique(names[rows], return_index=True, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self.tallies[number].parted = count
        chosen = np.isin(self.matched.rows[0], rows[firsts])
        pair = (self.matched.rows[0][chosen], self.matched.rows[1][chosen])
        for row, found in self._again(pair):
            parting = replace(self._parting(row, found), tolerance=float(judgement.tolerance[row]))
            tally = self.tallies[int(names[row])]
            tally.first, tally.row = parting, row
            self.first = self.first or parting

    def _again(self, rows: tuple[NDArray[np.int64], NDArray[np.int64]]) -> Iterator[tuple[int, Amount]]:
        """Read a few messages once more; with aligned samples, with the inputs of their steps."""
        journal, names = self.readers[0].journal, self.matched.name_of[0]
        samples = None
        wanted = set(rows[0].tolist())
        if self.samples is not None:
            samples = Samples()
            inputs = [number for number, name in enumerate(self.matched.names) if name.kind == INPUT]
            at = np.isin(journal[self.matched.rows[0], Column.GLOBAL_STEP], journal[rows[0], Column.GLOBAL_STEP])
            chosen = (at & np.isin(names[self.matched.rows[0]], inputs)) | np.isin(self.matched.rows[0], rows[0])
            rows = (self.matched.rows[0][chosen], self.matched.rows[1][chosen])
        for row, _, mine, theirs in values_of_pairs(self.readers, rows):
            if samples is not None:
                name, step = self.matched.names[int(names[row])], int(journal[row, Column.GLOBAL_STEP])
                aligned = samples.aligned(name, step, mine, theirs)
                if isinstance(aligned, str):
                    continue
                mine, theirs = aligned
            if row in wanted:
                found = amount(mine, theirs, self.rtol, self.atol)
                assert found is not None
                yield row, found

    def _sorted(
        self,
    ) -> tuple[NDArray[np.int64], list[tuple[int, str]], tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """The rows of A that are equal without a look, those that cannot be compared and why not, and all others."""
        one, other = self.readers
        mine, theirs = self.matched.rows
        first, second = one.journal[mine], other.journal[theirs]
        streams = np.stack([first[:, Column.STREAM], second[:, Column.STREAM]], axis=1)
        found, of_pair = np.unique(streams, axis=0, return_inverse=True)
        ways = [self._way(self.matched.streams[0][a], self.matched.streams[1][b]) for a, b in found.tolist()]
        way = np.array([_WAYS.index(one) for one in ways], np.int64)[of_pair.reshape(-1)]
        checksums = first[:, Column.CRC32C]
        same = (checksums == second[:, Column.CRC32C]) & (checksums != NONE)
        equal = (way == _WAYS.index("equal")) | ((way == _WAYS.index("by checksum")) & same)
        left = ~equal & ((way == _WAYS.index("read")) | (way == _WAYS.index("by checksum")))
        out = ~equal & ~left
        unread = [(row, _WAYS[one]) for row, one in zip(mine[out].tolist(), way[out].tolist(), strict=True)]
        return mine[equal], unread, (mine[left], theirs[left])

    def _way(self, x: StreamInfo, y: StreamInfo) -> str:
        """How messages of two streams are compared, or why not: one of `_WAYS`."""
        if x.dtype is None and y.dtype is None:
            return "equal"
        if x.dtype is None or y.dtype is None:
            return "data in one of them only"
        if _sampled(x.sampling) != _sampled(y.sampling):
            return "recorded with another sampling"
        alike = x.dtype == y.dtype and x.shapes == y.shapes and len(x.shapes) == 1
        return "by checksum" if self.quick and alike and self.samples is None else "read"

    def _tally(self, number: int) -> _Tally:
        return self.tallies.setdefault(number, _Tally())

    def _refuse(self, row: int, why: str) -> None:
        step = int(self.readers[0].journal[row, Column.GLOBAL_STEP])
        self.refused.setdefault((int(self.matched.name_of[0][row]), why), []).append(step)

    def _parting(self, row: int, found: Amount) -> Parting:
        line = self.readers[0].journal[row]
        name = self.matched.names[int(self.matched.name_of[0][row])]
        return Parting(name, int(line[Column.GLOBAL_STEP]), int(line[Column.CALL]), int(line[Column.EPOCH]), found)

    # -- what came of it ------------------------------------------------------------------------------------------

    def structure(self) -> list[StructureDifference]:
        """What the tables of the traces say differently: streams, dtypes, sampling, counters, the order."""
        mine, theirs = self.matched.streams
        ids = np.unique(np.stack([self._column(side, Column.STREAM) for side in (0, 1)], axis=1), axis=0).tolist()
        found = []
        for a, b in ids:
            x, y = mine[a], theirs[b]
            if x.dtype != y.dtype:
                found.append(StructureDifference("dtype", str(x), x.dtype, y.dtype))
            if _sampled(x.sampling) != _sampled(y.sampling):
                found.append(StructureDifference("sampling", str(x), x.sampling, y.sampling))
        for what, column in (("epoch", Column.EPOCH), ("train_step", Column.TRAIN_STEP)):
            one, other = (self._column(side, column) for side in (0, 1))
            unlike = np.flatnonzero(one != other)
            if len(unlike):
                step = int(self._column(0, Column.GLOBAL_STEP)[unlike[0]])
                found.append(
                    StructureDifference(what, f"from step {step} on", int(one[unlike[0]]), int(other[unlike[0]]))
                )
        back = np.flatnonzero(np.diff(self.matched.rows[1]) < 0)
        if len(back):
            pair = self.matched.rows[0][back[0]], self.matched.rows[0][back[0] + 1]
            names = [str(self.matched.names[int(self.matched.name_of[0][row])]) for row in pair]
            step = int(self.readers[0].journal[pair[1], Column.GLOBAL_STEP])
            found.append(
                StructureDifference(
                    "order", f"from step {step} on", " before ".join(names), " before ".join(names[::-1])
                )
            )
        return found

    def _column(self, side: int, column: Column) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.readers[side].journal[self.matched.rows[side], column]
        return found

    def remarks(self) -> list[str]:
        """Sentences on what aligned samples left out."""
        left = (0, 0) if self.samples is None else self.samples.left_out
        return [
            f"{n:,} rows of the batches of {side} are not in those of the other"
            for n, side in zip(left, "AB", strict=True)
            if n
        ]

    def uncompared(self) -> list[Uncompared]:
        """What could not be compared, and why."""
        found = []
        for (number, why), steps in sorted(self.refused.items(), key=lambda one: min(one[1])):
            whole = number not in self.tallies
            found.append(Uncompared(why, self.matched.names[number], len(steps), min(steps), whole))
        for side, why in enumerate(_ONLY):
            rows = self.matched.alone[side]
            numbers, first, counts = np.unique(self.matched.name_of[side][rows], return_index=True, return_counts=True)
            steps = self.readers[side].journal[rows[first], Column.GLOBAL_STEP]
            for number, step, count in sorted(
                zip(numbers.tolist(), steps.tolist(), counts.tolist(), strict=True), key=_second
            ):
                found.append(Uncompared(why, self.matched.names[number], count, step, number not in self.tallies))
        for side, why in enumerate(_ONLY):
            found += self._of_other_ranks(side, why)
        return found

    def _of_other_ranks(self, side: int, why: str) -> list[Uncompared]:
        """Streams of ranks that the other run lacks."""
        found = []
        for number in self.matched.strangers[side]:
            one, reader = self.matched.streams[side][number], self.readers[side]
            rows = reader.select(steps=self.matched.steps, streams=[number])
            if len(rows):
                name = Name(one.kind, one.module, one.tag, one.leaf, one.rank)
                found.append(Uncompared(why, name, len(rows), int(reader.journal[rows[0], Column.GLOBAL_STEP]), True))
        return found

    def difference(self, **told: Any) -> Difference:
        """All of it as a value."""
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
            compared_streams=len(self.tallies),
            steps=(int(steps.min()), int(steps.max())) if len(steps) else None,
            first=self.first,
            quick=self.quick,
            **told,
        )


def _sampled(sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    """What makes the numbers of one sampling those of another: not their dtype, nor the shape of the first tensor."""
    return {name: value for name, value in (sampling or {}).items() if name not in ("dtype", "shape") and value}


def _size(parting: Parting) -> tuple[float, float]:
    """What differs most: other shapes, then the largest relative difference."""
    found = parting.amount
    return (math.inf, math.inf) if found.shapes is not None else (found.relative, found.largest)


def _order(one: tuple[int, _Tally]) -> tuple[float, float, float]:
    tally = one[1]
    size = (0.0, 0.0) if tally.largest is None else _size(tally.largest)
    return tally.row, -size[0], -size[1]


def _second(one: tuple[int, int, int]) -> int:
    return one[1]
