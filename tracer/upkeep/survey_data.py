"""`SurveyedData`: reads the data of parts that may be damaged; leaves out what is lost, and says which messages."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from tracer.format.journal import NONE, Column
from tracer.memory import Memory
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore
from tracer.trace.assembly import Merged
from tracer.trace.columns import Columns, Group
from tracer.trace.data import Data, PoolRange
from tracer.trace.merging import Parts
from tracer.trace.reader import TraceReader
from tracer.upkeep import damage
from tracer.upkeep.damage import DAMAGED, GONE, UNKNOWN, Array, Problem, Reach
from tracer.upkeep.survey import Survey


def readable(surveys: Sequence[Survey]) -> tuple[TraceReader, LostData]:
    """A reader of the messages of some parts, in which a pulse is one message, and what it finds to be lost.

    The `Columns` that it reads lack the data of lost messages. Call `LostData.tell` when everything is read.
    """
    path, stores = surveys[0].path, list({id(one.store): one.store for one in surveys}.values())
    lost = LostData(surveys)
    data = functools.partial(SurveyedData, lost)
    return TraceReader.of(Parts(path, None, False, True, stores, shown=[*surveys], data=data)), lost


def saved(columns: Columns) -> NDArray[np.bool_]:
    """Which messages of a reader from `readable` are intact."""
    known = np.array([stream.kind != UNKNOWN for stream in columns.streams], np.bool_)
    return columns.complete() & known[columns.numbers]


@final
class _PoolLoss:
    """The messages of a pool that are lost, except in damaged chunks."""

    def __init__(self) -> None:
        self.misplaced = Reach()
        self.failed: list[Problem] = []
        self.more_failed = Reach()


@final
class LostData:
    """Collects the messages of parts whose data is lost.

    Parameters
    ----------
    surveys : sequence of Survey
    """

    def __init__(self, surveys: Sequence[Survey]) -> None:
        self._surveys = surveys
        self.surveys = {pool.name: one for one in surveys for pool in one.tables.pools.values()}
        """The part of the array of each pool."""
        self.pools: dict[str, _PoolLoss] = {}
        self.lock = threading.Lock()

    def misplace(self, name: str, rows: NDArray[np.int64], merged: Merged) -> None:
        """Note messages that are not in the array of their pool."""
        self.pools.setdefault(name, _PoolLoss()).misplaced.add(rows, merged.streams)

    def fail(self, array: Array, rows: NDArray[np.int64], merged: Merged) -> None:
        """Note messages outside of damaged chunks that fail their checksum."""
        loss = self.pools.setdefault(array.name, _PoolLoss())
        left = max(0, damage.MOST_TOLD - len(loss.failed))
        for row in rows[:left]:
            reach, start = Reach(), int(row[Column.OFFSET]) // array.size
            reach.add(row[None], merged.streams)
            told = (start, start - (-int(row[Column.COUNT]) // array.size))
            what = f"the data of {reach} fails its checksum"
            loss.failed.append(Problem(check="data", what=what, array=array.name, rows=told, messages=1))
        loss.more_failed.add(rows[left:], merged.streams)

    def tell(self) -> None:
        """Report what is lost, and the damaged chunks."""
        for name, loss in self.pools.items():
            findings, count = self.surveys[name].findings, loss.misplaced.count
            if count and self.surveys[name].chunks.arrays.get(name) is None:
                what = f"pool {name!r} cannot be read"
                findings.add("array", what, name, None, count, str(loss.misplaced))
            elif count:
                what = f"the data of {count} messages is not in pool {name!r} where the journal says"
                findings.add("place", what, name, None, count, str(loss.misplaced))
            findings.problems.extend(loss.failed)
            if loss.more_failed.count:
                what = f"the data of {loss.more_failed.count} more messages fails its checksum"
                findings.add("data", what, name, None, loss.more_failed.count, str(loss.more_failed))
        for survey in self._surveys:
            survey.tell_chunks()


@final
class SurveyedData(Data):
    """Reads the data of journal rows; leaves out messages whose data is lost.

    A message is intact if its own checksum agrees or, if it has none, if all its chunks are intact.

    Parameters
    ----------
    lost : LostData
        Receives the lost messages.
    path, merged, stores, verify
        As in `Data`.
    """

    def __init__(
        self, lost: LostData, path: Location, merged: Merged, stores: Sequence[ReadStore], verify: bool
    ) -> None:
        super().__init__(path, merged, stores, verify)
        self._lost = lost

    def _read_rows(self, rows: NDArray[np.int64], memory: Memory | None) -> list[Group]:
        pools = rows[:, Column.POOL]
        with self._lost.lock:
            found = [
                group
                for pool in np.unique(pools[pools != NONE]).tolist()
                for group in self._read_pool(rows, pool, np.flatnonzero(pools == pool))
            ]
        return [group for group in found if len(group.rows)]

    def _read_pool(self, rows: NDArray[np.int64], pool: int, places: NDArray[np.int64]) -> Iterator[Group]:
        name, dtype, _ = self.merged.pools[pool]
        array = self._lost.surveys[name].array_of(name, dtype)
        fits = np.zeros(len(places), np.bool_)
        if array is not None:
            mine = rows[places]
            fits = mine[:, Column.COUNT] <= array.length * array.size - mine[:, Column.OFFSET]
            fits &= self._storages[mine[:, Column.STREAM]] == array.dtype
        if not fits.all():
            self._lost.misplace(name, rows[places[~fits]], self.merged)
        if fits.any():
            for one in self._ranges(rows, pool, places[fits]):
                yield from self._read_range(rows, one, None)

    def _check_pool(
        self, pool: int, places: NDArray[np.int64], ends: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> int:
        name = self.merged.pools[pool].name
        array = self._lost.surveys[name].chunks.arrays[name]
        assert array is not None
        return array.size

    def _read_range(self, rows: NDArray[np.int64], one: PoolRange, memory: Memory | None) -> list[Group]:
        survey = self._lost.surveys[one.name]
        array = survey.chunks.arrays[one.name]
        assert array is not None
        whole = survey.chunks.read(array, one.low, one.high)
        if whole is not None:
            return list(self._group(rows, one, whole.reshape(-1)))
        mine = rows[one.places]
        lost = array.touching(mine, GONE) | (array.touching(mine, DAMAGED) & (mine[:, Column.CRC32C] == NONE))
        if lost.any():
            self._lose(rows[np.sort(one.places[lost])])  # in the order of the journal
        groups: list[Group] = []
        for part in self._ranges(rows, one.pool, one.places[~lost]) if not lost.all() else ():
            groups += self._as_it_stands(rows, part, array)
        return groups

    def _as_it_stands(self, rows: NDArray[np.int64], one: PoolRange, array: Array) -> Iterator[Group]:
        """The data of a range in which chunks are damaged, if a message's own checksum agrees."""
        whole = self._lost.surveys[one.name].chunks.as_it_stands(array, one.low, one.high)
        if whole is not None:
            yield from self._group(rows, one, whole.reshape(-1))
        elif len(one.places) == 1:
            self._lose(rows[one.places])
        else:
            for place in one.places:
                for alone in self._ranges(rows, one.pool, np.array([place])):
                    yield from self._as_it_stands(rows, alone, array)

    def _lose(self, rows: NDArray[np.int64]) -> None:
        name = self.merged.pools[int(rows[0, Column.POOL])].name
        array = self._lost.surveys[name].chunks.arrays[name]
        assert array is not None
        damaged = array.touching(rows, DAMAGED)
        if damaged.any():
            array.lose(rows[damaged], self.merged.streams)
        if not damaged.all():
            self._lost.fail(array, rows[~damaged], self.merged)
