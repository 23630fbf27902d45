"""`TraceWriter`: messages into a store, committed every now and then, so that a killed run loses moments only."""

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
from tracer.trace.columns import FEW, ColumnPacking, Columns
from tracer.trace.commits import Commits, Due
from tracer.trace.compression import Compression
from tracer.trace.header import complete, now, public
from tracer.trace.packing import Packing
from tracer.trace.pools import Pools

REMOTE_COMMIT_BYTES: Final = 64 << 20
"""Bytes after which a commit to an object store is due at the latest."""
SIGN_OF_LIFE: Final = 15.0
"""Seconds after which a writer that has nothing to write shows that it still runs."""


@final
class TraceWriter:
    """Writes messages to a new trace, in their order. For one thread.

    A message is safe when a commit has acknowledged it: it then survives ``kill -9``. Commits come by themselves after
    so many bytes, messages or seconds (at the next `write`), by `commit`, and at the end.

    Parameters
    ----------
    path : path or URL
        Of a directory that ends in ``.zarr``, or of a file that ends in ``.h5`` or ``.hdf5``; or a URL that ends in
        ``.zarr`` (``s3://bucket/run.zarr``).
    header : mapping
        What is known of the run before it starts (JSON values). ``run_id``, ``created`` (ISO 8601, UTC), ``versions``
        and ``process`` (``pid``, ``hostname``, ``start``: what tells later if the writer lives) are added if missing.
    overwrite : bool
        Whether a trace that is already at `path` is removed. Anything else than a trace never is.
    part : str, optional
        Write only this part of a trace (see `tracer.format.names.part_name`) that other processes write other parts of;
        `tracer.trace.claiming.claim` tells which. `overwrite` does not go with it.
    chunk_bytes : int
        Bytes of the chunks that small messages, the journal and the declarations are stored in.
    own_pool_bytes : int
        A stream whose first message has at least so many bytes gets an array of its own, one row a message.
    commit_bytes, commit_rows, commit_seconds : int, int, float
        Bytes, messages and seconds after which a commit is due, whichever comes first.
    commit_steps : int, optional
        And steps: one is due with the first message of a step so many after the first that is not committed.
    durable : bool
        Whether a commit waits until the disk has it (``fsync``): what it acknowledged then survives a power failure,
        too, also one in the midst of the next commit. Otherwise that takes the operating system some seconds.
    compression : str or mapping
        How the data is compressed: ``"auto"``, ``"none"``, ``"lz4"`` or ``"zstd"``, or one of them for each kind; see
        `tracer.trace.compression.Compression`. The journal and the declarations never are.

    Raises
    ------
    TraceExistsError
        If something is at `path`, unless it is a trace and `overwrite` is true.
    TraceFormatError
        If the suffix of `path` is unknown.
    UnknownNameError, CaptureError
        If the compression is none.
    TraceError
        If it cannot be written, or if the header is no JSON.

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
        """The part of the trace that it writes."""
        if isinstance(self.path, Url):  # an object store keeps in memory what is not committed yet
            commit_bytes = min(commit_bytes, REMOTE_COMMIT_BYTES)
        self._finished = False
        self._store = create_store(self.path, part=part, overwrite=overwrite, durable=durable)
        codecs.load(plainly=self._store.plainly_compressed)
        self._commits = Commits(self._store, self.part, commit_rows)
        self._commits.lines.append(first_line)
        self._due = Due(commit_bytes, commit_rows, commit_seconds, commit_steps)
        self._pools = Pools(self._commits, codecs, chunk_bytes, own_pool_bytes)
        self._packing = Packing(self._commits, self._pools, self._due)
        self._columns = ColumnPacking(self._commits, self._pools, self._due)
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
        """Messages written so far, with those not yet committed."""
        return self._commits.committed + self._commits.rows

    @property
    def bytes(self) -> int:
        """Bytes of their data."""
        return self._commits.bytes

    @property
    def commit_seconds(self) -> float:
        """Seconds after which a commit is due, at the latest; settable at any time."""
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
        """Asked for notes that should stand in the trace also where nothing else can be written any more; settable."""
        return self._commits.last_notes

    @last_notes.setter
    def last_notes(self, ask: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        self._commits.last_notes = ask

    def write(self, message: Message) -> None:
        """Append one message.

        Its data is copied or written before this returns, so the caller may then change it.

        Parameters
        ----------
        message : Message
            Its sampling is declared with the stream. A stream whose sampling or dtype changes goes on under a new id.

        Raises
        ------
        MessageError
            If a trace cannot hold such tensors; the trace is as it was before.
        TraceError
            If it cannot be written (disk full) or the writer is finished. Once writing failed, nothing more is written.
        """
        self.write_many((message,))

    def write_many(self, batch: Iterable[Message]) -> None:
        """Append messages, as `write` does; much faster than one by one.

        Small messages of one shape are copied together. When this returns, all data is copied or written.

        Raises
        ------
        MessageError
            If a trace cannot hold a message; those before it are written, so `messages` tells which it is.
        TraceError
            As `write`.
        """
        self._refuse()
        messages = iter(batch)
        more = True
        while more:
            more = self._packing.write(messages)
            if self._due.is_now(self._commits):
                self.commit()

    def write_columns(self, columns: Columns) -> None:
        """Append messages that are given in columns; for many small ones, much faster than `write_many`.

        What is written is what `write` would write of the same messages, one by one. When this returns, all data is
        copied or written.

        Parameters
        ----------
        columns : Columns
            As `TraceReader.columns` gives them: they were in a trace before, and are not checked again.

        Raises
        ------
        TraceError
            As `write`.
        """
        self._refuse()
        if len(columns) <= FEW:
            self.write_many(columns.messages())
            return
        begin = 0
        while begin < len(columns):
            begin = self._columns.write(columns, begin)
            if self._due.is_now(self._commits):
                self.commit()

    @property
    def unhurried(self) -> bool:
        """Whether nobody waits for `write`; settable at any time, false at first.

        On a block device, large messages then go past the page cache: that takes a fraction of the processor's
        time, and drives nothing out of memory, but takes as long as the disk does.
        """
        return self._store.unhurried

    @unhurried.setter
    def unhurried(self, value: bool) -> None:
        self._store.unhurried = value

    def note(self, note: Mapping[str, Any]) -> None:
        """Add a remark on the run (JSON values), such as why a stream was given up.

        Raises
        ------
        TraceError
            If it is no JSON, or the writer is finished.
        """
        self._refuse()
        self._commits.declare("note", public(note))

    def commit(self) -> None:
        """Make every message written so far safe.

        Raises
        ------
        TraceError
            If it cannot be written, or the writer is finished.
        """
        self._refuse()
        with self._commits:
            if self._store.can_create and self._commits.rows:
                self._pools.make_late()
                self._store.seal()
            self._commits.publish()
        self._due.reset()

    @property
    def _waits(self) -> bool:
        """Whether something waits for a commit."""
        return bool(self._commits.rows or self._commits.lines)

    @property
    def first_step(self) -> int | None:
        """The global step of the first message that is not committed; None where there is none."""
        return None if self._due.steps is None else self._due.steps[0]

    @property
    def commit_due_in(self) -> float:
        """In how many seconds a commit is due; infinite where nothing waits for one."""
        return self._due.left(self._waits)

    def commit_if_due(self) -> None:
        """Commit if something was written and `commit_seconds` have passed since the last commit.

        For a writer that waits: `write` does this by itself. If there was nothing to commit for a while, a sign of life
        tells readers on other machines, who cannot look for this process, that it still runs.
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
        """Commit, write down how the run ended, and close. Finishing again does nothing.

        Parameters
        ----------
        status : str
            ``"finished"``, or ``"failed: "`` and why; ``"interrupted"`` for the copy of a trace that has no status.
        ended : str, optional
            When the run ended (ISO 8601, UTC), if not now. Of an interrupted one that is not known.

        Raises
        ------
        TraceError
            If the rest cannot be written; what was committed before is safe, and the trace reads as interrupted.
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

    @property
    def writes(self) -> bool:
        """Whether it may still write."""
        return not self._finished and self._commits.failed is None

    def _refuse(self) -> None:
        if self._finished:
            raise TraceError(f"{self.path} is finished, and takes no more")
        if self._commits.failed is not None:
            raise TraceError(f"{self.path} takes no more, because writing failed before: {self._commits.failed}")

    def give_up(self, error: BaseException) -> None:
        """Write nothing more, because something failed outside of this; what was committed is safe."""
        if not self._finished:
            self._commits.fail(error)
