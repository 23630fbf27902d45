"""`TraceWriter`: messages into a store, committed every now and then, so that a killed run loses moments only."""

from __future__ import annotations

import datetime as dt
import os
import platform
import struct
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, final

import numpy as np
import torch

from tracer import layout
from tracer.errors import TraceError, TraceExistsError
from tracer.layout import Encoding
from tracer.messages import Message
from tracer.stores import WriteStore, create_store, open_store, store_module

_ROW: Final = struct.Struct(f"<{layout.COLUMNS}q")


class _Pool:
    """An array that messages go to."""

    __slots__ = ("elements", "id", "name", "row")

    def __init__(self, number: int, name: str, row: tuple[int, ...]) -> None:
        self.id = number
        self.name = name
        # shape of one row of an own pool, () for a shared one
        self.row = row
        self.elements = 0


class _Stream:
    """What is known of a stream after its first message."""

    __slots__ = ("encoding", "fresh", "id", "own", "sampling", "shared")

    def __init__(self, number: int, encoding: Encoding | None, sampling: Mapping[str, Any] | None) -> None:
        self.id = number
        self.encoding = encoding
        self.sampling = sampling
        # until its first message decided whether it has a pool of its own
        self.fresh = True
        self.own: _Pool | None = None
        self.shared: _Pool | None = None


@final
class TraceWriter:
    """Writes messages to a new trace, in their order. For one thread.

    A message is safe when a commit has acknowledged it: it then survives ``kill -9``. Commits come by themselves after
    so many bytes, messages or seconds (at the next `write`), by `commit`, and at the end.

    Parameters
    ----------
    path : path
        Of a directory that ends in ``.zarr``, or of a file that ends in ``.h5`` or ``.hdf5``.
    header : mapping
        What is known of the run before it starts (JSON values). ``run_id``, ``created`` (ISO 8601, UTC), ``versions``
        and ``process`` (``pid``, ``hostname``, ``start``: what tells later if the writer lives) are added if missing.
    overwrite : bool
        Whether a trace that is already at `path` is removed. Anything else than a trace never is.
    chunk_bytes : int
        Bytes of the chunks that small messages, the journal and the declarations are stored in.
    own_pool_bytes : int
        A stream whose first message has at least so many bytes gets an array of its own, one row a message.
    commit_bytes, commit_rows, commit_seconds : int, int, float
        Bytes, messages and seconds after which a commit is due.

    Raises
    ------
    TraceExistsError
        If something is at `path`, unless it is a trace and `overwrite` is true.
    TraceFormatError
        If the suffix of `path` is unknown.
    TraceError
        If it cannot be written, or if the header is no JSON.

    Examples
    --------
    >>> import tempfile
    >>> from tracer.messages import ModuleMessage
    >>> from tracer.reader import TraceReader
    >>> path = Path(tempfile.mkdtemp()) / "run.zarr"
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
        path: str | os.PathLike[str],
        *,
        header: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        chunk_bytes: int = 65536,
        own_pool_bytes: int = 65536,
        commit_bytes: int = 64 << 20,
        commit_rows: int = 65536,
        commit_seconds: float = 2.0,
    ) -> None:
        for name, value in (
            ("chunk_bytes", chunk_bytes),
            ("own_pool_bytes", own_pool_bytes),
            ("commit_bytes", commit_bytes),
            ("commit_rows", commit_rows),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, and is {value}")
        self.path = Path(path)
        """Where the trace is."""
        full_header = _complete(header or {})
        first_line = layout.declaration("header", full_header)
        if overwrite:
            _check_ours(self.path)
        self.messages = 0
        """Messages written so far, with those not yet committed."""
        self.bytes = 0
        """Bytes of their data."""
        self._chunk_bytes = chunk_bytes
        self._own_pool_bytes = own_pool_bytes
        self._commit_bytes = commit_bytes
        self._commit_rows = commit_rows
        self._commit_seconds = commit_seconds
        self._streams: dict[tuple[Any, ...], _Stream] = {}
        self._variants: dict[tuple[Any, ...], _Stream] = {}
        self._shapes: dict[tuple[int, ...], int] = {}
        self._pools: dict[str, _Pool] = {}
        self._taken: set[str] = set()
        self._next_stream = 0
        self._journal = bytearray(commit_rows * _ROW.size)
        self._rows = 0
        self._pending_bytes = 0
        self._declared: list[bytes] = [first_line]
        self._committed_at = time.monotonic()
        self._failed: BaseException | None = None
        self._finished = False
        self._store: WriteStore = create_store(self.path, overwrite=overwrite)
        self._checksum = not self._store.checksums_chunks
        with self._guard():
            self._store.create(layout.DECLARATIONS, dtype="uint8", shape=(), chunk_bytes=chunk_bytes)
            self._store.create(layout.JOURNAL, dtype="int64", shape=(layout.COLUMNS,), chunk_bytes=chunk_bytes)
            self._store.set_attrs(
                "",
                {
                    "format": layout.FORMAT,
                    "format_version": layout.VERSION,
                    "run_id": full_header["run_id"],
                    "created": full_header["created"],
                    "ranks": [0],
                },
            )
            self._publish()

    def write(self, message: Message, sampling: Mapping[str, Any] | None = None) -> None:
        """Append one message.

        Its data is copied or written before this returns, so the caller may then change it.

        Parameters
        ----------
        message : Message
        sampling : mapping, optional
            How the data was made from what was observed (JSON values); it is declared with the stream. A stream whose
            sampling or dtype changes goes on under a new id.

        Raises
        ------
        MessageError
            If a trace cannot hold such tensors; the trace is as it was before.
        TraceError
            If it cannot be written (disk full) or the writer is finished. Once writing failed, nothing more is written.
        """
        if self._finished or self._failed is not None:
            self._refuse()
        data = message.data
        # key first: the two classes of messages differ in it alone
        name = (message.key, message.kind, message.tag, message.leaf, None if data is None else data.dtype)
        stream = self._streams.get(name)
        if data is None:
            if stream is None or stream.sampling != sampling:
                stream = self._declare_stream(name, message, None, sampling)
            pool_id, offset, count, shape_id, flags, checksum = layout.NONE, 0, 0, layout.NONE, 0, layout.NONE
        else:
            array = layout.encode(data)
            if stream is None or stream.sampling != sampling:
                stream = self._declare_stream(name, message, layout.encoding_of(data), sampling)
                if stream.fresh and array.nbytes >= self._own_pool_bytes and self._store.can_create:
                    with self._guard():
                        stream.own = self._own_pool(stream, message, array.shape)
                stream.fresh = False
            shape = array.shape
            found = self._shapes.get(shape)
            shape_id = self._declare_shape(shape) if found is None else found
            pool = stream.own
            if pool is not None and pool.row == shape:
                rows = array[None]
            else:
                pool = stream.shared
                if pool is None:
                    with self._guard():
                        pool = stream.shared = self._shared_pool(stream, message)
                rows = array.reshape(-1)
            pool_id, offset, count, flags = pool.id, pool.elements, array.size, layout.HAS_DATA
            checksum = layout.crc32c(array) if self._checksum else layout.NONE
            try:
                self._store.append(pool.name, rows)
            except BaseException as error:
                self._fail(error)
                raise
            pool.elements += count
            self._pending_bytes += array.nbytes
            self.bytes += array.nbytes
        _ROW.pack_into(
            self._journal,
            self._rows * _ROW.size,
            stream.id,
            pool_id,
            offset,
            count,
            shape_id,
            message.global_step,
            message.train_step,
            message.epoch,
            message.call,
            flags,
            checksum,
        )
        self._rows += 1
        self.messages += 1
        if (
            self._rows >= self._commit_rows
            or self._pending_bytes >= self._commit_bytes
            or time.monotonic() - self._committed_at >= self._commit_seconds
        ):
            self.commit()

    def note(self, note: Mapping[str, Any]) -> None:
        """Add a remark on the run (JSON values), such as why a stream was given up.

        Raises
        ------
        TraceError
            If it is no JSON, or the writer is finished.
        """
        self._refuse()
        self._declared.append(layout.declaration("note", dict(note)))

    def commit(self) -> None:
        """Make every message written so far safe.

        Raises
        ------
        TraceError
            If it cannot be written, or the writer is finished.
        """
        self._refuse()
        with self._guard():
            if self._store.can_create and self._rows:
                self._make_late_pools()
                self._store.seal()
            self._publish()

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
        with self._guard():
            # alone in the last commit: a trace that says "finished" is complete
            if ended is None and status != "interrupted":
                ended = _now()
            self._declared.append(layout.declaration("status", {"status": status, "ended": ended}))
            self._publish()
            if self._store.can_create:
                self._store.set_attrs("", {"status": status})
            self._store.close()
        self._finished = True

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._failed is None:
            try:
                self.finish(f"failed: {type(error).__name__}: {error}")
            except TraceError as second:
                error.add_note(f"and the trace could not be finished: {second}")

    def _guard(self) -> _Guard:
        return _Guard(self)

    def _refuse(self) -> None:
        if self._finished:
            raise TraceError(f"{self.path} is finished, and takes no more")
        if self._failed is not None:
            raise TraceError(f"{self.path} takes no more, because writing failed before: {self._failed}")

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self._store.abandon()

    def _publish(self) -> None:
        """Commit what there is: numbers, then declarations, then the journal, which makes the messages exist."""
        self._store.commit()
        if self._declared:
            self._store.append(layout.DECLARATIONS, np.frombuffer(b"".join(self._declared), np.uint8))
            self._store.commit()
            self._declared.clear()
        if self._rows:
            rows = np.frombuffer(self._journal, "<i8", self._rows * layout.COLUMNS).reshape(-1, layout.COLUMNS)
            self._store.append(layout.JOURNAL, rows)
            self._store.commit()
            self._rows = 0
        self._pending_bytes = 0
        self._committed_at = time.monotonic()

    def _declare_stream(
        self, name: tuple[Any, ...], message: Message, encoding: Encoding | None, sampling: Mapping[str, Any] | None
    ) -> _Stream:
        sampling = None if sampling is None else dict(sampling)
        # a stream that goes back and forth between two samplings has two ids, not one for each change
        variant = (name, layout.declaration("sampling", sampling))
        stream = self._variants.get(variant)
        if stream is not None:
            self._streams[name] = stream
            return stream
        stream = self._variants[variant] = _Stream(self._next_stream, encoding, sampling)
        line = layout.declaration(
            "stream",
            {
                "id": stream.id,
                "kind": message.kind,
                "network": message.key is None,
                "module": message.key,
                "tag": message.tag,
                "leaf": message.leaf,
                "dtype": None if encoding is None else encoding.name,
                "sampling": sampling,
            },
        )
        self._declared.append(line)
        self._next_stream += 1
        self._streams[name] = stream
        return stream

    def _declare_shape(self, shape: tuple[int, ...]) -> int:
        number = self._shapes[shape] = len(self._shapes)
        self._declared.append(layout.declaration("shape", {"id": number, "shape": list(shape)}))
        return number

    def _declare_pool(self, name: str, dtype: str, row: tuple[int, ...], chunk_bytes: int) -> _Pool:
        self._store.create(name, dtype=dtype, shape=row, chunk_bytes=chunk_bytes)
        pool = self._pools[name] = _Pool(len(self._pools), name, row)
        self._declared.append(layout.declaration("pool", {"id": pool.id, "name": name, "dtype": dtype}))
        return pool

    def _own_pool(self, stream: _Stream, message: Message, row: tuple[int, ...]) -> _Pool:
        assert stream.encoding is not None
        name = layout.own_pool(message.kind, message.key, message.tag, message.leaf)
        # taken by an earlier id of this stream, or on a file system that ignores case by another stream
        if name.casefold() in self._taken:
            name = f"{name}%~{stream.id}"
        self._taken.add(name.casefold())
        # one row a chunk: rows are at least as large as the chunks of shared pools should be
        return self._declare_pool(name, stream.encoding.storage, row, 1)

    def _shared_pool(self, stream: _Stream, message: Message) -> _Pool:
        assert stream.encoding is not None
        storage = stream.encoding.storage
        name = layout.shared_pool(message.kind, storage)
        pool = self._pools.get(name)
        if pool is not None:
            return pool
        if self._store.can_create:
            return self._declare_pool(name, storage, (), self._chunk_bytes)
        return self._pools[layout.late_pool(storage)]

    def _make_late_pools(self) -> None:
        if not self._store.seals:
            return
        for storage in layout.STORAGE_DTYPES:
            self._declare_pool(layout.late_pool(storage), storage, (), self._chunk_bytes)


class _Guard:
    """Remembers that writing failed, so that nothing is written after it."""

    __slots__ = ("_writer",)

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._writer._fail(error)


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def _complete(header: Mapping[str, Any]) -> dict[str, Any]:
    created = _now()
    added = {
        "run_id": uuid.uuid4().hex[:12],
        "created": created,
        "process": {"pid": os.getpid(), "hostname": platform.node(), "start": layout.process_start(os.getpid())},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    return added | dict(header)


def _check_ours(path: Path) -> None:
    """Raise `TraceExistsError` if something other than a trace is at `path`."""
    if not path.exists():
        return
    try:
        store = open_store(path)
        try:
            layout.check_version(store.attrs())
        finally:
            store.close()
    except TraceError as error:
        raise TraceExistsError(
            f"{path} already exists, and is not overwritten because it is not a trace of this format: {error}"
        ) from error


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Make sure, without creating anything, that a trace could be written at `path`.

    Raises
    ------
    TraceExistsError
        If something is there and may not be overwritten, or is not a trace.
    TraceFormatError
        If the suffix is not one of a store.
    """
    store_module(Path(path))
    if not overwrite and Path(path).exists():
        raise TraceExistsError(f"{path} already exists; give another path, or say that it may be overwritten")
    _check_ours(Path(path))
