"""`TraceWriter`: writes messages to a store with frequent commits, so that a killed run loses only moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, final

from tracer.errors import TraceError
from tracer.format.declarations import declaration
from tracer.format.names import part_name
from tracer.messaging.messages import Message
from tracer.stores.locations import Anywhere, Url, location
from tracer.stores.opening import create_store, refuse_part, remove_part
from tracer.trace.claiming import WRITERS, check_ours, refuse_here
from tracer.trace.columns import Columns
from tracer.trace.commits import Commits, Due
from tracer.trace.compression import Compression
from tracer.trace.header import complete, now, public
from tracer.trace.packing import FEW, Packing
from tracer.trace.pools import Pools

REMOTE_COMMIT_BYTES: Final = 64 << 20
"""Upper bound of `commit_bytes` for an object store."""
SIGN_OF_LIFE: Final = 15.0
"""Seconds after which a writer without new messages shows that it still runs."""


@final
class TraceWriter:
    """Writes messages to a new trace, in order; use it from a single thread.

    A committed message survives ``kill -9``. Commits happen automatically after a number of bytes, messages or seconds
    (at the next `write`), on `commit`, and at the end.

    Parameters
    ----------
    path : path or URL
        A directory that ends in ``.zarr``, a file that ends in ``.h5`` or ``.hdf5``, or a URL that ends in ``.zarr``
        (``s3://bucket/run.zarr``).
    header : mapping
        What is known of the run before it starts (JSON values). ``run_id``, ``created`` (ISO 8601, UTC), ``versions``
        and ``process`` (``pid``, ``hostname``, ``start``, to find out later if the writer lives) are added if missing.
    overwrite : bool
        Whether to remove an existing trace at `path`. Anything other than a trace is never removed.
    part : str, optional
        Write only this part (see `tracer.format.names.part_name`) of a trace whose other parts other processes write;
        `tracer.trace.claiming.claim` gives the attempt for its name. Not to be combined with `overwrite`.
    chunk_bytes : int
        Bytes of the chunks for small messages, the journal and the declarations.
    own_pool_bytes : int
        A stream whose first message has at least this many bytes gets an array of its own, with one row a message.
    commit_bytes, commit_rows, commit_seconds : int, int, float
        Bytes, messages and seconds after which a commit is due, whichever comes first.
    commit_steps : int, optional
        Steps after which a commit is due: at the first message this many steps after the first uncommitted message.
    durable : bool
        Whether a commit waits until the data is on disk (``fsync``). Committed messages then survive a power failure,
        even one during the next commit. Otherwise, the operating system takes some seconds to write them to the disk.
    compression : str or mapping
        How the data is compressed, such as ``"auto"``, ``"none"``, ``"lz4"`` or ``"zstd"``, or a mapping from kinds to
        these; see `tracer.trace.compression.Compression`. The journal and the declarations are never compressed.

    Raises
    ------
    TraceExistsError
        If something is at `path`, unless it is a trace and `overwrite` is true.
    TraceFormatError
        If the suffix of `path` is unknown.
    UnknownNameError, CaptureError
        If `compression` is invalid.
    TraceError
        If the trace cannot be written, or if the header is not JSON.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from tracer.messaging.messages import ModuleMessage
    >>> from tracer.trace.reader import TraceReader
    >>> path = tempfile.mkdtemp() + "/run.zarr"
    >>> with TraceWriter(path, header={"argv": ["train.py"]}) as writer:
    ...     for step in range(3):
    ...         counters = {"global_step": step, "train_step": step, "epoch": 0}
    ...         writer.write(ModuleMessage(kind="biases", module="fc", data=torch.full((2,), float(step)), **counters))
    >>> with TraceReader(path) as trace:
    ...     [message.data.tolist() for message in trace.messages()], trace.status
    ([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], 'finished')
    """

    def __init__(
        self,
        path: Anywhere,
        *,
        header: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        part: str | None = None,
        chunk_bytes: int = 65536,
        own_pool_bytes: int = 65536,
        commit_bytes: int = 256 << 20,
        commit_rows: int = 65536,
        commit_seconds: float = 2.0,
        commit_steps: int | None = None,
        durable: bool = False,
        compression: str | Mapping[str, str] = "auto",
    ) -> None:
        if type(commit_seconds) not in (int, float) or not commit_seconds >= 0:
            raise ValueError(f"commit_seconds must be a number from 0, and is {commit_seconds!r}")
        for name, value in (
            ("chunk_bytes", chunk_bytes),
            ("own_pool_bytes", own_pool_bytes),
            ("commit_bytes", commit_bytes),
            ("commit_rows", commit_rows),
            ("commit_steps", commit_steps),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} must be a whole number from 1, and is {value!r}")
        self.path = location(path)
        """Where the trace is."""
        codecs = Compression(compression)
        refuse_part(self.path)
        full_header = complete(header or {})
        first_line = declaration("header", full_header)
        if overwrite:
            parts = check_ours(self.path)
            refuse_here(self.path, None)
            for one in parts:
                if one.name != part_name(0):
                    remove_part(self.path, one.name)
        self.part = part_name(0) if part is None else part
        """The part of the trace that this writer writes."""
        if isinstance(self.path, Url):  # an object store keeps uncommitted data in memory
            commit_bytes = min(commit_bytes, REMOTE_COMMIT_BYTES)
        self._finished = False
        self._store = create_store(self.path, part=part, overwrite=overwrite, durable=durable)
        codecs.load(plainly=self._store.plainly_compressed)
        self._commits = Commits(self._store, self.part, commit_rows)
        self._commits.lines.append(first_line)
        self._due = Due(commit_bytes, commit_rows, commit_seconds, commit_steps)
        self._pools = Pools(self._commits, codecs, chunk_bytes, own_pool_bytes)
        self._packing = Packing(self._commits, self._pools, self._due)
        WRITERS.add(self)
        try:
            with self._commits:
                self._commits.begin(full_header, chunk_bytes)
        except BaseException:
            self._store.discard()
            raise
        self._due.reset()

    @property
    def messages(self) -> int:
        """The number of messages written so far, including uncommitted ones."""
        return self._commits.committed + self._commits.rows

    @property
    def bytes(self) -> int:
        """The bytes of data of these messages."""
        return self._commits.bytes

    @property
    def commit_seconds(self) -> float:
        """Seconds after which a commit is due; settable at any time."""
        return self._due.most_seconds

    @commit_seconds.setter
    def commit_seconds(self, seconds: float) -> None:
        self._due.most_seconds = seconds

    @property
    def commit_steps(self) -> int | None:
        """Steps after which a commit is due; None if they do not matter."""
        return self._due.most_steps

    @property
    def last_notes(self) -> Callable[[], Iterable[Mapping[str, Any]]]:
        """Called for notes to add to the trace when nothing else can be written any more; settable."""
        return self._commits.last_notes

    @last_notes.setter
    def last_notes(self, ask: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._commits.last_notes = ask

    def write(self, message: Message) -> None:
        """Append one message.

        The data is copied or written when this returns, so the caller may change it.

        Parameters
        ----------
        message : Message
            Its sampling is declared with the stream. A stream gets a new id if its sampling or dtype changes.

        Raises
        ------
        MessageError
            If a trace cannot hold such a tensor; the trace is unchanged.
        TraceError
            If writing fails (disk full) or the writer is finished. After a failure, nothing more is written.
        """
        self.write_many((message,))

    def write_many(self, batch: Iterable[Message]) -> None:
        """Append messages; much faster than `write` for each.

        Small messages of one shape are copied together. When this returns, all data is copied or written.

        Raises
        ------
        MessageError
            If a trace cannot hold a message; the messages before it are written, and counted in `messages`.
        TraceError
            For the reasons of `write`.
        """
        self._refuse()
        messages = iter(batch)
        more = True
        while more:
            more = self._packing.write(messages)
            if self._due.is_now(self._commits):
                self.commit()

    def write_columns(self, columns: Columns) -> None:
        """Append messages that are given as columns; for many small messages, much faster than `write_many`.

        Writes the same as `write` for each message. When this returns, all data is copied or written.

        Parameters
        ----------
        columns : Columns
            A result of `TraceReader.columns`; not checked, because the messages come from a trace.

        Raises
        ------
        TraceError
            For the reasons of `write`.
        """
        self._refuse()
        if len(columns) <= FEW:
            self.write_many(columns.messages())
            return
        begin = 0
        while begin < len(columns):
            begin = self._packing.write_columns(columns, begin)
            if self._due.is_now(self._commits):
                self.commit()

    def note(self, note: Mapping[str, Any]) -> None:
        """Add a remark on the run (JSON values), such as why recording a stream was stopped.

        Raises
        ------
        TraceError
            If the note is not JSON, or the writer is finished.
        """
        self._refuse()
        self._commits.declare("note", public(note))

    def commit(self) -> None:
        """Commit all messages written so far.

        Raises
        ------
        TraceError
            If writing fails, or the writer is finished.
        """
        self._refuse()
        with self._commits:
            self._commits.publish()
        self._due.reset()

    @property
    def _waits(self) -> bool:
        """Whether something waits for a commit."""
        return bool(self._commits.rows or self._commits.lines)

    @property
    def first_step(self) -> int | None:
        """The global step of the first uncommitted message; None if there is none."""
        return None if self._due.steps is None else self._due.steps[0]

    @property
    def commit_due_in(self) -> float:
        """Seconds until a commit is due; infinite if nothing waits for a commit."""
        return self._due.left(self._waits)

    def commit_if_due(self) -> None:
        """Commit if something was written and `commit_seconds` have passed since the last commit.

        To be called while no messages come; `write` does this by itself. If there was nothing to commit for a while, it
        touches the store, to show readers on other machines, which cannot see this process, that it still runs.
        """
        passed = self._due.passed
        if self._waits:
            if passed >= self.commit_seconds:
                self.commit()
        elif passed >= SIGN_OF_LIFE and self.writes:
            with self._commits:
                self._store.touch()
            self._due.reset()

    def finish(self, status: str = "finished", *, ended: str | None = None) -> None:
        """Commit, write how the run ended, and close. A second call does nothing.

        Parameters
        ----------
        status : str
            ``"finished"``, or ``"failed: "`` and why; ``"interrupted"`` for the copy of a trace that has no status.
        ended : str, optional
            When the run ended (ISO 8601, UTC); by default now, or unknown for ``"interrupted"``.

        Raises
        ------
        TraceError
            If the rest cannot be written; earlier commits are safe, and the trace reads as interrupted.
        """
        if self._finished:
            return
        self._refuse()
        self.commit()
        with self._commits:
            if ended is None and status != "interrupted":
                ended = now()
            self._commits.conclude(status, ended)
        self._finished = True

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._commits.failed is None:
            try:
                self.finish(f"failed: {type(error).__name__}: {error}")
            except TraceError as second:
                error.add_note(f"and the trace could not be finished: {second}")
        else:
            self._commits.say_again()

    @property
    def writes(self) -> bool:
        """Whether the writer may still write."""
        return not self._finished and self._commits.failed is None

    def _refuse(self) -> None:
        if self._finished:
            raise TraceError(f"{self.path} is finished, and takes no more")
        if self._commits.failed is not None:
            raise TraceError(f"{self.path} takes no more, because writing failed before: {self._commits.failed}")

    def give_up(self, error: BaseException) -> None:
        """Write nothing more, because of an error outside the writer; what was committed is safe."""
        if not self._finished:
            self._commits.fail(error)

    def say_again(self) -> None:
        """Write into a failed trace why it failed, if its store did not answer at that time."""
        self._commits.say_again()
