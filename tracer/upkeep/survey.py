"""`Survey`: a part of a trace that may be damaged, read as far as it is intact."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, final

from tracer.errors import TraceCorruptError, TraceError, TracerError, TraceUnreadableError
from tracer.format.declarations import unsealed
from tracer.format.names import check_root, declarations_name, journal_name
from tracer.format.summaries import Fact
from tracer.format.tables import Stream, Tables
from tracer.messaging.messages import DEFAULT_TAG, LARGEST
from tracer.stores.locations import Location
from tracer.stores.protocols import ReadStore
from tracer.trace.part import Part, is_empty
from tracer.upkeep.damage import UNKNOWN, Array, Chunks, Findings, Problem
from tracer.upkeep.survey_rows import SurveyedRows


@final
class Survey(Part):
    """A part of a trace that may be damaged. Damage is collected in `findings`, not raised.

    Its `tables` have the readable declarations, numbered without gaps, and a last stream for lost messages, which has
    the kind `UNKNOWN`.

    Parameters
    ----------
    path : path
        The path of the trace.
    part : str
    store : ReadStore
        The store; the caller closes it.
    tell_store : bool
        Whether to report the problems of the store as a whole.

    Attributes
    ----------
    chunks : Chunks
        The arrays that were read so far.
    findings : Findings
        Collects the problems.
    declarations : int
        The number of readable lines of the declarations.
    begins : int or None
        The first step of the attempt; None: as the header says. Settable, because a header may be lost.

    Raises
    ------
    TraceError
        As `verify` does.
    """

    rows: SurveyedRows

    def __init__(self, path: Location, part: str, store: ReadStore, *, tell_store: bool = True) -> None:
        self.findings = Findings(path)
        self._told = set() if tell_store else set(store.problems)
        names = journal_name(part), declarations_name(part)
        self.chunks = Chunks(store, names, self.findings)
        self.declarations = 0
        self.begins: int | None = None
        # whether the checksums chain all lines, so that declarations can be missing only at the end
        self._chained = False
        super().__init__(path, part, store)

    def _root(self) -> dict[str, Any]:
        self.tell_store()
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

    def _read(self) -> None:
        # The length of the journal is looked up first. Everything that its rows refer to was committed before them, so
        # the declarations that are read afterwards contain it.
        self.rows = SurveyedRows(self.path, self.name, self.store, self.tables, self.chunks, self.findings)
        declared = self._read_declarations()
        self.tables.header, self.tables.notes, self.tables.ending = declared.header, declared.notes, declared.ending
        lost = Stream(UNKNOWN, False, None, DEFAULT_TAG, "", None, None, self.rank)
        for table, found in (
            (self.tables.streams, [*(declared.streams[number] for number in sorted(declared.streams)), lost]),
            (self.tables.shapes, [declared.shapes[number] for number in sorted(declared.shapes)]),
            (self.tables.pools, [declared.pools[number] for number in sorted(declared.pools)]),
        ):
            table.update(enumerate(found))  # type: ignore[arg-type] # each has its own type
        self.rows.check(declared, zeros_are_wrong=self.store.checksums_chunks)

    def _read_declarations(self) -> Tables:
        """What is left of the declarations."""
        tables = Tables(gaps=True)
        array = self.chunks.array(declarations_name(self.name))
        place = 0
        damaged = broken = False
        # Possible checksums of the previous line. Even a damaged line gives some, so the next line can be checked.
        before = {0}
        for line in () if array is None else self._lines(array):
            start, place = place, place + len(line) + 1
            if not line:
                damaged = broken = True
                continue
            found, before = unsealed(line + b"\n", before)
            broken = broken or found is None
            why = "is damaged" if found is None else _declare(tables, found)
            if not why:
                self.declarations += 1
            elif not damaged:  # else it is the rest of a line that was reported already
                what = f"the line at byte {start} {why}"
                self.findings.add("declaration", what, declarations_name(self.name), (start, place))
            damaged = False
        if array is not None and not tables.header:
            self.findings.add("declaration", "the header is not there", array.name)
        self._chained = array is not None and not broken
        return tables

    def _lines(self, array: Array) -> list[bytes]:
        """The lines of the declarations without line feeds; an empty line stands for an unreadable chunk."""
        data = bytearray()
        for number in range(len(array.state)):
            rows, there = self.chunks.table(array, *array.rows_of(number))
            # the first line feed ends the line in which the damage begins, the second makes the empty line
            data += rows.data if there.all() else b"\n\n"
        del data[data.rfind(b"\n") + 1 :]
        return list(map(bytes, data.split(b"\n")[:-1]))

    @property
    def problems(self) -> list[Problem]:
        """The problems found so far."""
        return self.findings.problems

    @property
    def first_step(self) -> int:
        """The first global step of this attempt."""
        return super().first_step if self.begins is None else self.begins

    @property
    def first_trained(self) -> int | None:
        """The lowest step of its training messages; None if there are none."""
        facts = self.rows.total.facts
        training = [
            number
            for number, stream in self.tables.streams.items()
            if stream.tag == DEFAULT_TAG and stream.kind != UNKNOWN
        ]
        steps = [int(fact[Fact.FIRST_STEP]) for fact in facts if fact[Fact.STREAM] in training]
        return min(steps, default=None)

    def written_since(self, when: float) -> bool:
        """Whether the store was written after a time in seconds since 1970; file systems round times to 10 ms."""
        with contextlib.suppress(TraceError, OSError):
            return self.store.modified > when - 0.02
        return False

    @property
    def empty(self) -> bool:
        """Whether the part shows no trace of any commit, not even of the header."""
        return not self.header and not self.findings.of_check("store") and is_empty(self.store, self.name)

    def tell_store(self) -> None:
        """Report the problems of the store as a whole that were not yet reported."""
        for problem in self.store.problems:
            if problem not in self._told:
                self._told.add(problem)
                self.findings.add("store", problem)

    def tell_chunks(self) -> None:
        """Report the damaged chunks of all arrays that were read, with the messages that were lost in them."""
        journal = self.chunks.arrays.get(journal_name(self.name))
        for array in self.chunks.arrays.values():
            for problem in [] if array is None else array.problems():
                if array is journal and problem.rows is not None:
                    low, high = problem.rows
                    count = high - low - int(self.rows.certain[low:high].sum())
                    affects = "what these messages were is not known" if count else ""
                    self.findings.add("chunk", problem.what, problem.array, problem.rows, count, affects)
                else:
                    self.problems.append(problem)
        self.tell_store()

    def array_of(self, name: str, dtype: str | None = None) -> Array | None:
        """An array by name; None, with a new problem, if it cannot be opened or has another dtype than declared."""
        arrays = self.chunks.arrays
        if name in arrays:
            return arrays[name]
        array = self.chunks.array(name, self.rows.needs.get(name, 0))
        if array is not None and dtype is not None and (array.dtype != dtype or array.size < 1):
            self.findings.add("array", f"array {name!r} is of {array.dtype}, and {dtype} was declared", name)
            array = arrays[name] = None
        return array

    def read_rest(self) -> None:
        """Read what no message needed: the declared pools, the other arrays of the part, and their other chunks."""
        for pool in self.tables.pools.values():
            self.array_of(pool.name, pool.dtype)
        found = set(self.chunks.arrays)
        try:
            found.update(self.store.names(f"{self.name}/"))
        except TraceUnreadableError:
            raise
        except TracerError as error:
            self.findings.add("store", self.findings.plain(error))
        for name in sorted(found):
            array = self.array_of(name)
            if array is not None:
                self.chunks.read_rest(array, ended=bool(self.tables.ending))

    @property
    def told_all(self) -> bool:
        """Whether the journal and the declarations, which list all messages, are intact."""
        if self.rows.zeros is not None and self.findings.of_check("store"):
            # zeros may also be the lost end of a truncated file
            return False
        # intact: the checksums chain all declarations, and every journal row that the last declaration counts is right
        counted = self._chained and self.tables.ending.get("messages") == self.rows.length
        if counted and self.rows.certain.all():
            return True
        return not self.findings.of_check("declaration") and not self.findings.of_array(*self.chunks.tables)

    @property
    def status(self) -> str:
        """As `TraceReader.status`; ``"unknown"`` if it is damaged."""
        # the declaration of the status may be lost
        lost = not self.tables.ending and self.findings.of_array(declarations_name(self.name))
        return "unknown" if lost else super().status


def _declare(tables: Tables, found: Mapping[str, Any]) -> str:
    """Enter the declaration of a line; returns its problem, or an empty text."""
    try:
        for what, value in found.items():
            if what == "stream" and value["rank"] > LARGEST:
                return f"makes no sense: the rank is {value['rank']}"
            tables.declare(what, value)
    except TraceCorruptError:
        return "is damaged"
    except (TraceError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"makes no sense: {error!r}"
    return ""
