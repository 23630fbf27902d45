"""`Survey`: reads what is left of a part of a trace that may be damaged; `SurveyedTables`: of its declarations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError, TraceError, TracerError, TraceUnreadableError
from tracer.format.declarations import unsealed
from tracer.format.encodings import ENCODINGS, STORAGE_DTYPES
from tracer.format.journal import Column
from tracer.format.names import check_root, declarations_name, journal_name, rank_and_attempt
from tracer.format.tables import Stream, Tables
from tracer.messaging.messages import DEFAULT_TAG
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore
from tracer.trace.attempts import first_step
from tracer.trace.part import is_empty, lives
from tracer.trace.streams import stream_name
from tracer.upkeep.survey_chunks import Array, Chunks, Findings, Problem, Reach
from tracer.upkeep.survey_journal import SurveyedJournal


@final
class SurveyedTables:
    """Reads what is left of the declarations of a part.

    Parameters
    ----------
    chunks : Chunks
    name : str
        Name of the array.
    findings : Findings
        Receives problems of the declarations.

    Attributes
    ----------
    tables : Tables
        The readable declarations.
    declarations : int
        The number of readable lines.
    chained : bool
        Whether the checksums chain all lines, so that declarations can be missing only at the end.
    """

    def __init__(self, chunks: Chunks, name: str, findings: Findings) -> None:
        self.tables = Tables(gaps=True)
        self.declarations = 0
        self.chained = False
        self._chunks = chunks
        self._findings = findings
        self._name = name
        self._read_declarations()

    def _read_declarations(self) -> None:
        array = self._chunks.array(self._name)
        if array is None:
            return
        place = 0
        damaged = broken = False
        # Possible checksums of the previous line. Even a damaged line gives some, so the next line can be checked.
        before = {0}
        for line in self._lines(array):
            start, place = place, place + len(line) + 1
            if not line:
                damaged = broken = True
                continue
            found, after = unsealed(line + b"\n", before)
            before = after
            broken = broken or found is None
            why = "is damaged" if found is None else self._declare(found)
            if not why:
                self.declarations += 1
            elif not damaged:  # else it is the rest of a line that was reported already
                self._findings.add("declaration", f"the line at byte {start} {why}", array.name, (start, place))
            damaged = False
        if not self.tables.header:
            self._findings.add("declaration", "the header is not there", array.name)
        self.chained = not broken

    def _lines(self, array: Array) -> list[bytes]:
        """The lines of the declarations without line feeds; an empty line stands for an unreadable chunk."""
        data = bytearray()
        for number in range(len(array.state)):
            chunk = self._chunks.of_table(array, number)
            # the first line feed ends the line in which the damage begins, the second makes the empty line
            data += b"\n\n" if chunk is None else chunk.data
        del data[data.rfind(b"\n") + 1 :]
        return list(map(bytes, data.split(b"\n")[:-1]))

    def _declare(self, found: Mapping[str, Any]) -> str:
        """Enter the declaration of a line; returns its problem, or an empty text."""
        try:
            for what, value in found.items():
                self.tables.declare(what, value)
        except TraceCorruptError:
            return "is damaged"
        except (TraceError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return f"makes no sense: {error!r}"
        return ""


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
        The readable attributes of the store's root.
    read : SurveyedTables
        The readable declarations.
    tables : Tables
        The content of the declarations.
    journal : SurveyedJournal
        The readable rows of the journal.
    chunks : Chunks
        The arrays that were read so far.
    store : ReadStore
    findings : Findings
        Collects the problems.
    ids : numpy.ndarray of int64, (streams,)
        The numbers of the streams with readable declarations, ascending.

    Parameters
    ----------
    path : path
        The path of the trace.
    part : str
    store : ReadStore
        The store; the caller closes it.
    tell_store : bool
        Whether to report the problems of the store as a whole.

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
        # The length of the journal is looked up first. Everything that its rows refer to was committed before them, so
        # the declarations that are read afterwards contain it.
        self.journal = SurveyedJournal(self.chunks, names[0], self.findings)
        self.read = SurveyedTables(self.chunks, names[1], self.findings)
        self.tables = self.read.tables
        self.journal.check(self.tables, zeros_are_wrong=store.checksums_chunks)
        self._pools_of: dict[str, list[int]] = {}
        for number, pool in self.tables.pools.items():
            self._pools_of.setdefault(pool.name, []).append(number)
        # for each stream the index of its storage dtype in `STORAGE_DTYPES`
        self.ids = np.array(sorted(self.streams), np.int64)
        dtypes = [self.streams[number].dtype for number in self.ids.tolist()]
        places = [-1 if dtype is None else _PLACES[ENCODINGS[dtype].storage] for dtype in dtypes]
        self._kept_as = np.array(places, np.int64)

    def _root(self) -> dict[str, Any]:
        """Read and check the attributes of the root."""
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
        """The problems found so far."""
        return self.findings.problems

    @property
    def messages(self) -> int:
        """The number of messages in the journal, including those whose rows are missing."""
        return self.journal.length + self.journal.absent

    @property
    def header(self) -> dict[str, Any]:
        """The header of the run; empty if it is lost."""
        return self.tables.header

    @property
    def streams(self) -> dict[int, Stream]:
        """The streams with readable declarations, by number."""
        return self.tables.streams

    def written_since(self, when: float) -> bool:
        """Whether the store was written after a time in seconds since 1970; file systems round times to 10 ms."""
        with contextlib.suppress(TraceError, OSError):
            return self.store.modified > when - 0.02
        return False

    @property
    def empty(self) -> bool:
        """Whether the part shows no trace of any commit, not even of the header."""
        return not self.header and not self.findings.of_check("store") and is_empty(self.store, self.name)

    @property
    def first_step(self) -> int:
        """The first global step of this attempt."""
        return first_step(self.header, self.attempt)

    def tell_store(self) -> None:
        """Report the problems of the store as a whole that were not yet reported."""
        for problem in self.store.problems:
            if problem not in self._told:
                self._told.add(problem)
                self.findings.add("store", problem)

    def pools_of(self, name: str) -> list[int]:
        """The numbers of the pools that are declared with this array."""
        return self._pools_of.get(name, [])

    def elements_needed(self, name: str) -> int:
        """The elements of an array up to the end of its last message."""
        return max((self.journal.needs.get(number, 0) for number in self.pools_of(name)), default=0)

    def pool(self, number: int) -> Array | None:
        """The array of a pool; None, with a new problem, if it cannot be opened or does not match its declaration."""
        name, dtype, _ = self.tables.pools[number]
        arrays = self.chunks.arrays
        if name in arrays:
            return arrays[name]
        array = self.chunks.array(name, self.elements_needed(name))
        if array is not None and (array.dtype != dtype or array.size < 1):
            self.findings.add("array", f"array {name!r} is of {array.dtype}, and {dtype} was declared", name)
            array = arrays[name] = None
        return array

    def stored_in(self, array: Array, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which sound rows fit an array: their data lies within it, and their streams have its dtype."""
        within = rows[:, Column.COUNT] <= array.length * array.size - rows[:, Column.OFFSET]
        kept_as = self._kept_as[np.searchsorted(self.ids, rows[:, Column.STREAM])]
        return np.asarray(within & (kept_as == _PLACES[array.dtype]))

    def reach(self, reach: Reach, rows: NDArray[np.int64], keys: Iterable[NDArray[np.int64]]) -> None:
        """Add messages to a `Reach`.

        Parameters
        ----------
        reach : Reach
        rows : numpy.ndarray of int64, (messages, columns)
            The sound journal rows of the messages.
        keys : iterable of two numpy.ndarray of int64, (messages,)
            The two sort keys of the messages, which are sorted by them.
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
        """The number of chunks that were read or found damaged."""
        return sum(int(np.count_nonzero(array.state)) for array in self.chunks.arrays.values() if array is not None)

    @property
    def told_all(self) -> bool:
        """Whether the journal and the declarations, which list all messages, are intact."""
        journal = self.journal
        if journal.zeros is not None and self.findings.of_check("store"):
            # zeros may also be the lost end of a truncated file
            return False
        # intact: the checksums chain all declarations, and every journal row that the last declaration counts is right
        counted = self.read.chained and self.tables.ending.get("messages") == journal.length
        if counted and journal.certain.count() == journal.length:
            return True
        return not self.findings.of_check("declaration") and not self.findings.of_array(*self.chunks.tables)

    def names(self) -> list[str]:
        """Sorted names of the part's arrays: those in the store, and those that were looked up."""
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
        """As `TraceReader.status`; ``"unknown"`` if it is damaged."""
        if self.tables.ending:
            return str(self.tables.ending.get("status", "finished"))
        # the declaration of the status may be lost
        if self.findings.of_array(declarations_name(self.name)):
            return "unknown"
        return "recording" if self.header and lives(self.header.get("process"), self.store) else "interrupted"


def _in_words(stream: Stream | None) -> str:
    """The name of a stream, without its tag."""
    return UNKNOWN if stream is None else stream_name(stream.kind, stream.module, DEFAULT_TAG, stream.leaf)
