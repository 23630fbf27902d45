"""`Survey`: a part of a trace that may be damaged, and what can be read of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TracerError, TraceUnreadableError
from tracer.format.encodings import ENCODINGS, STORAGE_DTYPES
from tracer.format.journal import Column
from tracer.format.names import declarations_name, journal_name, rank_and_attempt
from tracer.format.tables import Stream
from tracer.format.version import check_root
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore
from tracer.trace.attempts import first_step
from tracer.trace.part import is_empty, lives
from tracer.trace.streams import stream_name
from tracer.upkeep.findings import Findings, Problem, Reach
from tracer.upkeep.survey_chunks import Array, Chunks
from tracer.upkeep.survey_journal import SurveyedJournal
from tracer.upkeep.survey_tables import SurveyedTables

UNKNOWN: Final = "(unknown)"
"""The kind of messages whose stream is lost."""
_PLACES: Final = {storage: place for place, storage in enumerate(STORAGE_DTYPES)}


@final
class Survey:
    """A part of a trace (see `tracer.trace.part`) that may be damaged, read piece by piece.

    Attributes
    ----------
    name : str
        The name of the part.
    rank, attempt : int
    attributes : dict
        The attributes of the store's root, as far as they can be read.
    read : SurveyedTables
        What can be read of the declarations.
    tables : Tables
        What these say.
    journal : SurveyedJournal
        And of the journal.
    chunks : Chunks
        The arrays that were read so far.
    store : ReadStore
    findings : Findings
        Where what is found is told.
    ids : numpy.ndarray of int64, (streams,)
        The numbers of the streams whose declarations can be read, ascending.

    Parameters
    ----------
    path : path
        The path of the trace.
    part : str
    store : ReadStore
        The store; it stays open.
    tell_store : bool
        Whether the problems include what is wrong with the store as a whole.

    Raises
    ------
    TraceError
        As `verify` does.
    """

    def __init__(self, path: Location, part: str, store: ReadStore, *, tell_store: bool = True) -> None:
        self.path = path
        self.name = part
        self.rank, self.attempt = rank_and_attempt(part)
        self.store = store
        self.findings = Findings(path)
        self._told = set() if tell_store else set(store.problems)
        self.tell_store()
        self.attributes = self._root()
        names = journal_name(part), declarations_name(part)
        self.chunks = Chunks(store, names, self.findings)
        # how long the journal is is looked up first: what its rows refer to was committed before them
        self.journal = SurveyedJournal(self.chunks, names[0], self.findings)
        self.read = SurveyedTables(self.chunks, names[1], self.findings)
        self.tables = self.read.tables
        self.journal.check(self.tables, zeros_are_wrong=store.checksums_chunks)
        self._pools_of: dict[str, list[int]] = {}
        for number, pool in self.tables.pools.items():
            self._pools_of.setdefault(pool.name, []).append(number)
        # of each stream the place of its storage dtype
        self.ids = np.array(sorted(self.streams), np.int64)
        dtypes = [self.streams[number].dtype for number in self.ids.tolist()]
        places = [-1 if dtype is None else _PLACES[ENCODINGS[dtype].storage] for dtype in dtypes]
        self._kept_as = np.array(places, np.int64)

    def _root(self) -> dict[str, Any]:
        """The attributes of the root, after a check of them."""
        attributes: dict[str, Any] = {}
        try:
            attributes = self.store.attrs()
        except TraceCorruptError as error:
            self.findings.add("root", self.findings.plain(error))
        if attributes:
            try:
                check_root(attributes, lambda: self.store.attrs(self.name), doubt_version=True)
            except TraceCorruptError as error:
                self.findings.add("root", str(error))
            except TraceError as error:
                raise type(error)(f"{self.path} cannot be read: {error}") from None
        elif not self.findings.of_check("root"):
            self.findings.add("root", "the attributes of the root are not there")
        return attributes

    @property
    def problems(self) -> list[Problem]:
        """What was found wrong so far."""
        return self.findings.problems

    @property
    def messages(self) -> int:
        """Messages that the journal had."""
        return self.journal.length + self.journal.absent

    @property
    def header(self) -> dict[str, Any]:
        """What was known of the run before it started; empty if that is lost."""
        return self.tables.header

    @property
    def streams(self) -> dict[int, Stream]:
        """The streams whose declarations can be read, by their numbers."""
        return self.tables.streams

    def written_since(self, when: float) -> bool:
        """Whether the store was written to after a time, in seconds since 1970; file systems round times to 10 ms."""
        with contextlib.suppress(TraceError, OSError):
            return self.store.modified > when - 0.02
        return False

    @property
    def empty(self) -> bool:
        """Whether nothing was ever committed, not even the header, as far as the part shows."""
        return not self.header and not self.findings.of_check("store") and is_empty(self.store, self.name)

    @property
    def first_step(self) -> int:
        """The global step that this attempt began with."""
        return first_step(self.header, self.attempt)

    def tell_store(self) -> None:
        """Add to the problems what was found wrong so far with the store as a whole."""
        for problem in self.store.problems:
            if problem not in self._told:
                self._told.add(problem)
                self.findings.add("store", problem)

    def pools_of(self, name: str) -> list[int]:
        """The numbers of the pools that are declared to be this array."""
        return self._pools_of.get(name, [])

    def elements_needed(self, name: str) -> int:
        """Elements of an array up to the end of the last message in it."""
        needs = self.journal.needs
        return max((needs[number].elements for number in self.pools_of(name) if number in needs), default=0)

    def pool(self, number: int) -> Array | None:
        """The array of a pool; None, with a new problem, if it cannot be opened, or is not what was declared."""
        name, dtype, compression = self.tables.pools[number]
        arrays = self.chunks.arrays
        if name in arrays:
            return arrays[name]
        row: tuple[int, ...] | None = None
        chunk_bytes = 65536
        if name.startswith((f"{self.name}/pools/", f"{self.name}/late/")):
            row = ()
        elif number in self.journal.needs and len(self.journal.needs[number].shapes) == 1:
            # in a pool of one stream, a row has the shape of the messages
            (shape,) = self.journal.needs[number].shapes
            row, chunk_bytes = self.tables.shapes[shape], 1
        array = self.chunks.array(name, dtype, row, self.elements_needed(name), chunk_bytes, compression)
        if array is not None and (array.dtype != dtype or array.size < 1):
            self.findings.add("array", f"array {name!r} is of {array.dtype}, and {dtype} was declared", name)
            array = arrays[name] = None
        return array

    def stored_in(self, array: Array, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which sound rows can have their data in an array, by their places and the dtypes of their streams."""
        within = rows[:, Column.COUNT] <= array.length * array.size - rows[:, Column.OFFSET]
        kept_as = self._kept_as[np.searchsorted(self.ids, rows[:, Column.STREAM])]
        return np.asarray(within & (kept_as == _PLACES[array.dtype]))

    def reach(self, reach: Reach, rows: NDArray[np.int64], keys: Iterable[NDArray[np.int64]]) -> None:
        """Add messages to those that a problem reaches.

        Parameters
        ----------
        reach : Reach
        rows : numpy.ndarray of int64, (messages, columns)
            Their rows of the journal, which are sound.
        keys : iterable of two numpy.ndarray of int64, (messages,)
            What their order follows from; they are in that order.
        """
        first_keys, second_keys = keys
        steps = rows[:, Column.GLOBAL_STEP]
        numbers, firsts, places = np.unique(rows[:, Column.STREAM], return_index=True, return_inverse=True)
        counts = np.bincount(places, minlength=len(numbers)).tolist()
        low, high = steps[firsts], steps[firsts]
        np.minimum.at(low, places, steps)
        np.maximum.at(high, places, steps)
        for at, number in enumerate(numbers.tolist()):
            first = int(first_keys[firsts[at]]), int(second_keys[firsts[at]])
            name = _in_words(self.streams.get(number))
            reach.add(name, first, (int(low[at]), int(high[at])), counts[at])

    @property
    def checked(self) -> int:
        """How many chunks were read, or found damaged."""
        return sum(int(np.count_nonzero(array.state)) for array in self.chunks.arrays.values() if array is not None)

    @property
    def told_all(self) -> bool:
        """Whether the journal and the declarations, which list all messages, are as they were written."""
        journal = self.journal
        if journal.zeros is not None and self.findings.of_check("store"):
            # a file that was cut off reads as zeros behind its end
            return False
        # they are if the checksums chain all lines, and all journal rows that the last line counts pass theirs
        counted = self.read.chained and self.tables.ending.get("messages") == journal.length
        if counted and journal.certain.count() == journal.length:
            return True
        return not self.findings.of_check("declaration") and not self.findings.of_array(*self.chunks.tables)

    def names(self) -> list[str]:
        """The arrays of the part, those that are there and those that were asked for, sorted."""
        found = set(self.chunks.arrays)
        try:
            found.update(self.store.names(f"{self.name}/"))
        except TraceUnreadableError:
            raise
        except TracerError as error:
            self.findings.add("store", self.findings.plain(error))
        return sorted(found)

    @property
    def status(self) -> str:
        """As `TraceReader.status`; ``"unknown"`` if that is damaged."""
        if self.tables.ending:
            return str(self.tables.ending.get("status", "finished"))
        # the line with the status may be lost
        if self.findings.of_array(declarations_name(self.name)):
            return "unknown"
        return "recording" if self.header and lives(self.header.get("process"), self.store) else "interrupted"


def _in_words(stream: Stream | None) -> str:
    """The name of a stream, without its tag."""
    return UNKNOWN if stream is None else stream_name(stream.kind, stream.module, DEFAULT_TAG, stream.leaf)
