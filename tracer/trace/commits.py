"""`Commits`: writes declarations and journal rows, which make messages exist; `Due`: when the next commit is due."""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.format.declarations import declaration, is_note, sealed
from tracer.format.journal import COLUMNS, Column, row_checksums
from tracer.format.names import FORMAT, VERSION, declarations_name, journal_name
from tracer.format.summaries import Summarizing
from tracer.stores.protocols import WriteStore
from tracer.trace.coordinates import Coordinates
from tracer.trace.header import ending, now, public

FIRST_BYTES: Final = 1 << 20
"""Bytes until the first commit: early, so that even a nearly full disk has a trace of the run's beginning."""
_ROW: Final = struct.Struct(f"<{COLUMNS}q")


@final
class Commits:
    """The declarations and journal rows of a part that wait for its next commit.

    As a context manager, it catches no error but remembers it: nothing is written afterwards.

    Parameters
    ----------
    store : WriteStore
    part : str
    capacity : int
        The most rows that can wait.

    Attributes
    ----------
    lines : list of bytes
        The waiting declarations.
    rows, committed : int
        The numbers of journal rows that wait and that are committed.
    bytes : int
        Bytes of the data of all written messages.
    failed : BaseException or None
        The error after which nothing more is written.
    coordinates : Coordinates
    last_notes : callable
        Called for notes to add to the trace when nothing else can be written any more.
    """

    def __init__(self, store: WriteStore[Any], part: str, capacity: int) -> None:
        self.store = store
        self.part = part
        self.lines: list[bytes] = []
        self.rows = 0
        self.committed = 0
        self.bytes = 0
        self.failed: BaseException | None = None
        self.last_notes: Callable[[], Iterable[Mapping[str, Any]]] = tuple
        self._journal = bytearray(capacity * _ROW.size)
        self._summaries = Summarizing()
        self.coordinates = Coordinates()
        # the checksum of the last line
        self._sealed = 0
        # whether the declarations are as they were after the last commit
        self._at_rest = False
        # whether the status is being written, which nothing may follow
        self._concluding = False
        # whether `_say_why` is to be tried again
        self._unsaid = False

    def begin(self, header: Mapping[str, Any], chunk_bytes: int) -> None:
        """Create the tables of a new part, and commit what waits."""
        store = self.store
        store.create(declarations_name(self.part), dtype="uint8", shape=(), chunk_bytes=chunk_bytes, gapless=True)
        name = journal_name(self.part)
        store.create(name, dtype="int64", shape=(COLUMNS,), chunk_bytes=chunk_bytes, gapless=True)
        known = {"format": FORMAT, "format_version": VERSION}
        store.set_attrs("", {**known, "run_id": header["run_id"], "created": header["created"]})
        # attributes have no checksums; a copy tells a damaged root from another version
        store.set_attrs(self.part, known)
        self.publish()

    def declare(self, what: str, value: Any) -> None:
        """Add a declaration.

        Raises
        ------
        TraceError
            If the value is not JSON.
        """
        self.lines.append(declaration(what, value))

    def enter(self, row: tuple[int, ...]) -> None:
        """Add a row of the journal."""
        _ROW.pack_into(self._journal, self.rows * _ROW.size, *row)
        self.rows += 1

    def new_rows(self, count: int) -> NDArray[np.int64]:
        """Add rows to the journal, and return them for the caller to fill before the next commit."""
        flat = np.frombuffer(self._journal, np.int64, count * COLUMNS, self.rows * _ROW.size)
        self.rows += count
        return flat.reshape(count, COLUMNS)

    def publish(self) -> None:
        """Commit what waits: first data, then declarations, then journal rows, which make the messages exist."""
        self.store.commit()
        self._at_rest = False
        summary = self._summaries.due()
        if summary is not None:
            self.lines.insert(0, declaration("summary", summary.declared()))  # the status stays the last line
        if self.lines:
            lines, self._sealed = sealed(self.lines, self._sealed)
            self.store.append(declarations_name(self.part), np.frombuffer(lines, np.uint8))
            self.lines.clear()
            self.store.commit()
        if self.rows:
            rows = np.frombuffer(self._journal, "<i8", self.rows * COLUMNS).reshape(-1, COLUMNS)
            rows[:, Column.CHECK] = row_checksums(rows, self.committed)
            self.store.append(journal_name(self.part), rows)
            self.store.commit()
            self._summaries.add(rows)
            self.coordinates.add(rows)
            self.committed += self.rows
            self.rows = 0
        self._at_rest = True

    def conclude(self, status: str, ended: str | None) -> None:
        """Commit the status last and by itself, so that a trace with a status is complete; then close the store."""
        self._concluding = True
        self.coordinates.write(self.store)
        told = ending(status, ended, self.committed)
        self.declare("status", told)
        self.publish()
        self._at_rest = False
        self.store.set_attrs(self.part, {"status": told["status"]})
        self.store.close()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Write nothing more, except why; what was committed is safe."""
        if self.failed is not None:
            return
        self.failed = error
        if self._at_rest or (self.store.may_answer_later and not self._concluding):
            # if this fails too, the trace reads as being recorded until this process ends
            try:
                self._say_why(error)
            except Exception:  # noqa: BLE001 - `error` is what is reported
                self._unsaid = self.store.may_answer_later
        if not self._unsaid:
            self.store.abandon()

    def say_again(self) -> None:
        """Write why nothing more was written, if the store did not answer when that happened."""
        if self._unsaid and self.failed is not None:
            self._unsaid = False
            with contextlib.suppress(Exception):
                self.store.last_words(declarations_name(self.part), np.empty(0, np.uint8))
            self.store.abandon()

    def _say_why(self, error: BaseException) -> None:
        """Write the status of a failed recording; its messages are those of the last commit."""
        reason = " ".join(str(error).split()) or type(error).__name__
        told = ending(f"failed: {reason}", now(), self.committed)
        notes = [line for line in self.lines if is_note(line)]
        notes += [declaration("note", public(note)) for note in self.last_notes()]
        lines, _ = sealed([*notes, declaration("status", told)], self._sealed)
        self.store.last_words(declarations_name(self.part), np.frombuffer(lines, np.uint8))


@final
class Due:
    """Whether a commit is due: after a number of bytes, rows, seconds or steps, whichever comes first.

    Attributes
    ----------
    bytes : int
        Bytes of data that wait for a commit.
    steps : (int, int) or None
        The first and the last step of the waiting messages.
    most_bytes, most_rows, most_seconds, most_steps : int, int, float, int or None
        The limits; without `most_steps`, steps do not matter.
    """

    def __init__(self, most_bytes: int, most_rows: int, most_seconds: float, most_steps: int | None) -> None:
        self.most_bytes = most_bytes
        self.most_rows = most_rows
        self.most_seconds = most_seconds
        self.most_steps = most_steps
        self.reset()

    def reset(self) -> None:
        """Note that everything is committed now."""
        self.bytes = 0
        self.steps: tuple[int, int] | None = None
        self.since = time.monotonic()

    @property
    def passed(self) -> float:
        """Seconds since the last commit."""
        return time.monotonic() - self.since

    def left(self, waits: object) -> float:
        """Seconds until a commit is due; infinite if nothing `waits`."""
        return self.since + self.most_seconds - time.monotonic() if waits else math.inf

    def add(self, nbytes: int, first: int, last: int) -> None:
        """Note waiting messages: the bytes of their data, and the first and the last step."""
        self.steps = (first if self.steps is None else self.steps[0], last)
        self.bytes += nbytes

    def until(self, commits: Commits, nbytes: NDArray[np.int64], steps: NDArray[np.int64]) -> int:
        """The number of messages to write before a commit is due, including the message that makes it due.

        Parameters
        ----------
        commits : Commits
        nbytes, steps : numpy.ndarray of int64, (messages,)
            The bytes and steps of the messages, of which there is at least one.
        """
        together = self.bytes + np.cumsum(nbytes)
        first = int(steps[0]) if self.steps is None else self.steps[0]
        due = self._suffices(commits, together, np.abs(steps - first))
        count = int(due.argmax()) + 1 if due.any() else len(nbytes)
        return min(count, self.most_rows - commits.rows)

    def is_now(self, commits: Commits) -> bool:
        """Whether a commit is due."""
        apart = 0 if self.steps is None else abs(self.steps[1] - self.steps[0])
        due: bool = self._suffices(commits, self.bytes, apart)
        return due or commits.rows >= self.most_rows or self.passed >= self.most_seconds

    def _suffices(self, commits: Commits, nbytes: Any, apart: Any) -> Any:
        """Whether bytes and the distance of steps suffice for a commit; for numbers, or elementwise for arrays.

        Until the first commit, `FIRST_BYTES` suffice.
        """
        due = nbytes >= self.most_bytes
        if self.most_steps is not None:
            due = due | (apart >= self.most_steps)
        if not commits.committed:
            due = due | (nbytes >= FIRST_BYTES)
        return due
