"""`TraceWriter`: messages into a store, committed every now and then, so that a killed run loses moments only."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import math
import os
import platform
import struct
import time
import uuid
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import (
    MessageError,
    TraceError,
    TraceExistsError,
    TracerError,
    TraceUnreadableError,
    plain,
    summary,
)
from tracer.format import journal
from tracer.format.declarations import declaration, is_note, sealed
from tracer.format.encodings import STORAGE_DTYPES, Encoding, encode, encoding_of
from tracer.format.journal import COLUMNS, HAS_DATA, NONE, Column, row_checksums
from tracer.format.names import declarations_name, journal_name, late_pool, own_pool, part_name, part_of, shared_pool
from tracer.format.process import process_start
from tracer.format.version import FORMAT, VERSION
from tracer.messaging.messages import Message
from tracer.secrets import masked, masked_text
from tracer.stores.locations import Anywhere, Location, Url, location
from tracer.stores.opening import check_writable, create_store, exists, refuse_part, remove_part, store_files
from tracer.stores.protocols import WriteStore
from tracer.trace.compression import Compression
from tracer.trace.part import Head, heads, refuse_link, refuse_living

if TYPE_CHECKING:
    from torch import Tensor

_ROW: Final = struct.Struct(f"<{COLUMNS}q")
PACKED_BYTES: Final = 32768
"""Messages up to this size are copied together before they are written."""
_PACK_BYTES: Final = 1 << 20
"""Bytes of one shape that are copied together: they should still be in the processor's cache when they are written."""
_BATCH_BYTES: Final = 8 << 20
_BATCH_ROWS: Final = 4096
"""Bytes and messages that wait to be copied together, at most."""
_FIRST_BYTES: Final = 1 << 20
"""The first commit comes after so many bytes, so that a disk that is nearly full has a trace of the run's beginning."""
REMOTE_COMMIT_BYTES: Final = 64 << 20
"""Bytes after which a commit to an object store is due at the latest."""
SIGN_OF_LIFE: Final = 15.0
"""Seconds after which a writer that has nothing to write shows that it still runs."""
_FEW: Final = 24
"""So few messages are entered into the journal one by one; numpy pays for more."""
_MOST_OWN_AXES: Final = 31
"""Axes of a message that may have an array of its own: in HDF5 it has 32 at most, one of them that of the messages."""
_FIELDS: Final = 7
"""Numbers that are noted of each message of a batch."""
# the dtypes of which torch.stack copies the bits
_STACKED: Final = frozenset(
    {
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    }
)


class _Pool:
    """An array that messages go to."""

    __slots__ = ("id", "name", "row")

    def __init__(self, number: int, name: str, row: tuple[int, ...]) -> None:
        self.id = number
        self.name = name
        # shape of one row of an own pool, () for a shared one
        self.row = row


class _Place:
    """Where messages of one shape go, and those of them that wait to be written together."""

    __slots__ = ("count", "entry", "nbytes", "number", "own", "pool", "tensors")

    def __init__(self, pool: _Pool, shape_id: int, shape: tuple[int, ...], encoding: Encoding) -> None:
        self.pool = pool
        self.own = pool.row == shape and bool(shape)
        self.count = math.prod(shape)
        self.nbytes = self.count * encoding.dtype.itemsize
        # pool, count, shape, flags: what the journal says of each
        self.entry = (pool.id, self.count, shape_id, HAS_DATA)
        self.number = -1
        self.tensors: list[Tensor] = []


class _Stream:
    """What is known of a stream after its first message."""

    __slots__ = ("encoding", "fresh", "id", "own", "packs", "place", "sampling", "shape", "shared")

    def __init__(self, number: int, encoding: Encoding | None, sampling: Mapping[str, Any] | None) -> None:
        self.id = number
        self.encoding = encoding
        self.sampling = sampling
        # until its first message decided whether it has a pool of its own
        self.fresh = True
        self.own: _Pool | None = None
        self.shared: _Pool | None = None
        # of the last message: most streams have but one shape
        self.shape: tuple[int, ...] | None = None
        self.place: _Place | None = None
        self.packs = False


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
        `tracer.trace.part.claim` tells which. `overwrite` does not go with it.
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
        self._compression = Compression(compression)
        refuse_part(self.path)
        full_header = _complete(header or {})
        first_line = declaration("header", full_header)
        if overwrite:
            parts = _check_ours(self.path)
            refuse_here(self.path, None)
            for one in parts:
                if one.name != part_name(0):
                    remove_part(self.path, one.name)
        self._part = part_name(0) if part is None else part
        self.messages = 0
        """Messages written so far, with those not yet committed."""
        self.bytes = 0
        """Bytes of their data."""
        self._chunk_bytes = chunk_bytes
        self._own_pool_bytes = own_pool_bytes
        # what waits for a commit to an object store waits in memory
        self._commit_bytes = min(commit_bytes, REMOTE_COMMIT_BYTES) if isinstance(self.path, Url) else commit_bytes
        self._commit_rows = commit_rows
        self.commit_seconds = commit_seconds
        """Seconds after which a commit is due, at the latest."""
        self.commit_steps = commit_steps
        """And steps; None if they do not matter."""
        # the first and the last step of what is not committed
        self._steps: tuple[int, int] | None = None
        self._streams: dict[tuple[Any, ...], _Stream] = {}
        self._variants: dict[tuple[Any, ...], _Stream] = {}
        self._shapes: dict[tuple[int, ...], int] = {}
        self._pools: dict[str, _Pool] = {}
        self._places: dict[tuple[int, int, str], _Place] = {}
        # of the batch that is being written: what stands together in a pool (first: nothing, for messages without data)
        self._entries = [(NONE, 0, NONE, 0)]
        self._offsets = [0]
        self._checksums: list[NDArray[np.int64] | list[int]] = [[NONE]]
        self._places_open: list[_Place] = []
        self._taken: set[str] = set()
        self._next_stream = 0
        self._journal = bytearray(commit_rows * _ROW.size)
        self._rows = 0
        self._pending_bytes = 0
        self._declared: list[bytes] = [first_line]
        self._sealed = 0
        self._committed_at = time.monotonic()
        self.last_notes: Callable[[], Iterable[Mapping[str, Any]]] = tuple
        """Asked for notes that should stand in the trace also where nothing else can be written any more."""
        self._failed: BaseException | None = None
        # whether the declarations are as the last commit left them
        self._tables_rest = False
        self._finished = False
        self._store: WriteStore = create_store(self.path, part=part, overwrite=overwrite, durable=durable)
        self._compression.load(plainly=self._store.plainly_compressed)
        self._journal_name = journal_name(self._part)
        self._declarations = declarations_name(self._part)
        _living.add(self)
        try:
            with self._guard():
                self._store.create(self._declarations, dtype="uint8", shape=(), chunk_bytes=chunk_bytes, gapless=True)
                row = (COLUMNS,)
                self._store.create(self._journal_name, dtype="int64", shape=row, chunk_bytes=chunk_bytes, gapless=True)
                known = {"format": FORMAT, "format_version": VERSION}
                self._store.set_attrs("", {**known, "run_id": full_header["run_id"], "created": full_header["created"]})
                if not self._store.seals:
                    # attributes have no checksum there: those of the part tell a damaged root from another version's
                    self._store.set_attrs(self._part, known)
                self._publish()
        except BaseException:
            self._store.discard()
            raise

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
        self.write_many(((message, sampling),))

    def write_many(self, batch: Iterable[tuple[Message, Mapping[str, Any] | None]]) -> None:
        """Append messages, each with its sampling or None, as `write` does; much faster than one by one.

        Small messages of one shape are copied together. When this returns, all data is copied or written.

        Raises
        ------
        MessageError
            If a trace cannot hold a message; those before it are written, so `messages` tells which it is.
        TraceError
            As `write`.
        """
        self._refuse()
        rest = iter(batch)
        more = True
        while more:
            more = self._write_some(rest)
            if (
                self._rows >= self._commit_rows
                or self._pending_bytes >= self._commit_bytes
                or self._many_steps()
                or self._first_is_due()
                or time.monotonic() - self._committed_at >= self.commit_seconds
            ):
                self.commit()

    def _many_steps(self) -> bool:
        return self.commit_steps is not None and (
            self._steps is not None and abs(self._steps[1] - self._steps[0]) >= self.commit_steps
        )

    def _first_is_due(self) -> bool:
        """Whether nothing is safe yet, though enough is there.

        A store that seals waits for the first step to be over, because most streams are seen in it for the first time.
        """
        return (
            self._rows == self.messages
            and self._pending_bytes >= _FIRST_BYTES
            and (not self._store.seals or (self._steps is not None and self._steps[0] != self._steps[1]))
        )

    def _write_some(self, batch: Iterator[tuple[Message, Mapping[str, Any] | None]]) -> bool:
        """Write messages until so many wait that they should be committed or copied; whether there are more."""
        import torch

        limit = min(
            _FIRST_BYTES if self._rows == self.messages else _BATCH_BYTES, self._commit_bytes - self._pending_bytes
        )
        most = min(_BATCH_ROWS, self._commit_rows - self._rows)
        streams, entries, opened = self._streams, self._entries, self._places_open
        strided, plain_tensor = torch.strided, torch.Tensor
        flat: list[int] = []
        nbytes = number = place_in_pack = 0
        more = False
        try:
            for message, sampling in itertools.islice(batch, most):
                data = message.data
                try:
                    # the two classes of messages differ in the key alone
                    name = (
                        message.key, message.kind, message.tag, message.leaf, message.rank,
                        None if data is None else data.dtype,
                    )  # fmt: skip
                    stream = streams.get(name)
                    if stream is None or (stream.sampling is not sampling and stream.sampling != sampling):
                        encoding = None if data is None else encoding_of(data)
                        stream = self._declare_stream(name, message, encoding, sampling)
                    if data is None:
                        number = place_in_pack = 0
                    else:
                        shape = data.shape
                        if shape != stream.shape:
                            self._find_place(stream, message, data, tuple(shape))
                        place = stream.place
                        assert place is not None
                        if stream.packs and type(data) is plain_tensor and data.is_cpu and data.layout is strided:
                            tensors = place.tensors
                            if not tensors:
                                place.number = self._open(place.entry)
                                opened.append(place)
                            number, place_in_pack = place.number, len(tensors)
                            tensors.append(data)
                            if place_in_pack * place.nbytes >= _PACK_BYTES:
                                self._pack(place)
                        else:
                            number, place_in_pack = self._write_alone(place, encode(data)), 0
                        nbytes += place.nbytes
                except (TracerError, MemoryError):
                    raise
                except Exception as error:
                    if self._failed is not None:  # it is not this message's fault
                        raise
                    raise MessageError(f"a trace cannot hold this message: {summary(error)}") from error
                flat += (
                    stream.id, number, place_in_pack,
                    message.global_step, message.train_step, message.epoch, message.call,
                )  # fmt: skip
                if nbytes >= limit:
                    break
            more = len(flat) == _FIELDS * most or nbytes >= limit
        finally:
            # also after an error: what came before it is written
            if self._failed is None:
                for place in opened:
                    if place.tensors:
                        self._pack(place)
                self._enter(flat)
                if flat:
                    first = flat[3] if self._steps is None else self._steps[0]
                    self._steps = (first, flat[3 - _FIELDS])
                self._pending_bytes += nbytes
                self.bytes += nbytes
                self.messages += len(flat) // _FIELDS
            opened.clear()
            del entries[1:], self._offsets[1:], self._checksums[1:]
        return more

    def _find_place(self, stream: _Stream, message: Message, data: Tensor, shape: tuple[int, ...]) -> None:
        """Decide where messages of this shape go, which are not those of the last shape."""
        encoding = encoding_of(data)
        assert stream.encoding is not None
        few_axes = len(shape) <= _MOST_OWN_AXES
        if stream.fresh and few_axes and data.nbytes >= self._own_pool_bytes and self._store.can_create:
            with self._guard():
                stream.own = self._own_pool(stream, message, shape)
        stream.fresh = False
        found = self._shapes.get(shape)
        shape_id = self._declare_shape(shape) if found is None else found
        pool = stream.own
        if pool is None or pool.row != shape:
            pool = stream.shared
            if pool is None:
                with self._guard():
                    pool = stream.shared = self._shared_pool(stream, message)
        place = self._places.get((pool.id, shape_id, encoding.name))
        if place is None:
            place = self._places[pool.id, shape_id, encoding.name] = _Place(pool, shape_id, shape, encoding)
        stream.shape, stream.place = shape, place
        stream.packs = place.nbytes <= PACKED_BYTES and few_axes and encoding.name in _STACKED

    def _open(self, entry: tuple[int, int, int, int]) -> int:
        """Begin messages that stand together in a pool; their number in this batch."""
        self._entries.append(entry)
        self._offsets.append(0)
        self._checksums.append([])
        return len(self._entries) - 1

    def _write_alone(self, place: _Place, data: NDArray[Any]) -> int:
        number = self._open(place.entry)
        self._append(place, number, data[None] if place.own else data.reshape(1, -1), 1)
        return number

    def _pack(self, place: _Place) -> None:
        """Write the messages that wait at a place."""
        tensors = place.tensors
        if len(tensors) == 1:
            rows = encode(tensors[0])[None]
        else:
            import torch

            rows = encode(torch.stack(tensors))
        tensors.clear()
        self._append(place, place.number, rows, len(rows))

    def _append(self, place: _Place, number: int, rows: NDArray[Any], count: int) -> None:
        pool = place.pool
        found: list[int] = []
        try:
            first = self._store.append(pool.name, rows if place.own else rows.reshape(-1), found)
        except BaseException as error:
            self._fail(error)
            raise
        known = place.own and found
        self._checksums[number] = found if known else journal.checksums(rows.reshape(count, place.count))
        self._offsets[number] = first * place.count if place.own else first

    def _enter(self, flat: list[int]) -> None:
        """Enter messages into the journal, from what was noted of them."""
        count = len(flat) // _FIELDS
        if count <= _FEW:
            for begin in range(0, len(flat), _FIELDS):
                stream, number, place, *counters = flat[begin : begin + _FIELDS]
                pool, size, shape, flags = self._entries[number]
                _ROW.pack_into(
                    self._journal, self._rows * _ROW.size, stream, pool, self._offsets[number] + place * size, size,
                    shape, *counters, flags, int(self._checksums[number][place]), 0,
                )  # fmt: skip
                self._rows += 1
            return
        # array, because numpy converts a list of numbers five times slower
        noted = np.frombuffer(array("q", flat), np.int64).reshape(count, _FIELDS)
        numbers, places = noted[:, 1], noted[:, 2]
        entries = np.array(self._entries, np.int64)[numbers]
        flat_rows = np.frombuffer(self._journal, np.int64, count * COLUMNS, self._rows * _ROW.size)
        rows = flat_rows.reshape(count, COLUMNS)
        rows[:, Column.STREAM] = noted[:, 0]
        rows[:, Column.POOL] = entries[:, 0]
        rows[:, Column.OFFSET] = np.array(self._offsets, np.int64)[numbers] + places * entries[:, 1]
        rows[:, Column.COUNT] = entries[:, 1]
        rows[:, Column.SHAPE] = entries[:, 2]
        rows[:, Column.GLOBAL_STEP : Column.CALL + 1] = noted[:, 3:]
        rows[:, Column.FLAGS] = entries[:, 3]
        checksums = [np.asarray(one, np.int64) for one in self._checksums]
        begins = np.cumsum([0, *map(len, checksums[:-1])])
        rows[:, Column.CRC32C] = np.concatenate(checksums)[begins[numbers] + places]
        self._rows += count

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
        self._declared.append(declaration("note", _public(note)))

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

    @property
    def first_step(self) -> int | None:
        """The global step of the first message that is not committed; None where there is none."""
        return None if self._steps is None else self._steps[0]

    @property
    def commit_due_in(self) -> float:
        """In how many seconds a commit is due; infinite where nothing waits for one."""
        waits = self._rows or self._declared
        return self._committed_at + self.commit_seconds - time.monotonic() if waits else math.inf

    def commit_if_due(self) -> None:
        """Commit if something was written and `commit_seconds` have passed since the last commit.

        For a writer that waits: `write` does this by itself. If there was nothing to commit for a while, a sign of life
        tells readers on other machines, who cannot look for this process, that it still runs.
        """
        passed = time.monotonic() - self._committed_at
        if self._rows or self._declared:
            if passed >= self.commit_seconds:
                self.commit()
        elif passed >= SIGN_OF_LIFE and self._failed is None and not self._finished:
            with self._guard():
                self._store.touch()
            self._committed_at = time.monotonic()

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
        status = masked_text(plain(status))
        self.commit()
        with self._guard():
            # alone in the last commit: a trace that says "finished" is complete
            if ended is None and status != "interrupted":
                ended = _now()
            ending = {"status": status, "ended": ended, "messages": self.messages}
            self._declared.append(declaration("status", ending))
            self._publish()
            # nothing may follow the status
            self._tables_rest = False
            if self._store.can_create:
                self._store.set_attrs(self._part, {"status": status})
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

    @property
    def _writes(self) -> bool:
        return not self._finished and self._failed is None

    def _guard(self) -> _Guard:
        return _Guard(self)

    def _refuse(self) -> None:
        if self._finished:
            raise TraceError(f"{self.path} is finished, and takes no more")
        if self._failed is not None:
            raise TraceError(f"{self.path} takes no more, because writing failed before: {self._failed}")

    def give_up(self, error: BaseException) -> None:
        """Write nothing more, because something failed outside of this; what was committed is safe."""
        if not self._finished:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failed is not None:
            return
        self._failed = error
        if self._tables_rest:
            # best effort: without it, the trace reads as one that is still being recorded, until this process ends
            with contextlib.suppress(Exception):
                self._say_why(error)
        self._store.abandon()

    def _say_why(self, error: BaseException) -> None:
        """Write the status of a run that can no longer be recorded; the messages are those of the last commit."""
        reason = " ".join(str(error).split()) or type(error).__name__
        status = masked_text(plain(f"failed: {reason}"))
        ending = {"status": status, "ended": _now(), "messages": self.messages - self._rows}
        notes = [line for line in self._declared if is_note(line)]
        notes += [declaration("note", _public(note)) for note in self.last_notes()]
        lines, _ = sealed([*notes, declaration("status", ending)], self._sealed)
        self._store.last_words(self._declarations, np.frombuffer(lines, np.uint8))

    def _publish(self) -> None:
        """Commit what there is: numbers, then declarations, then the journal, which makes the messages exist."""
        self._store.commit()
        self._tables_rest = False
        if self._declared:
            lines, self._sealed = sealed(self._declared, self._sealed)
            self._store.append(self._declarations, np.frombuffer(lines, np.uint8))
            self._store.commit()
            self._declared.clear()
        if self._rows:
            rows = np.frombuffer(self._journal, "<i8", self._rows * COLUMNS).reshape(-1, COLUMNS)
            rows[:, Column.CHECK] = row_checksums(rows, self.messages - self._rows)
            self._store.append(self._journal_name, rows)
            self._store.commit()
            self._rows = 0
        self._tables_rest = True
        self._steps = None
        self._pending_bytes = 0
        self._committed_at = time.monotonic()

    def _declare_stream(
        self, name: tuple[Any, ...], message: Message, encoding: Encoding | None, sampling: Mapping[str, Any] | None
    ) -> _Stream:
        sampling = None if sampling is None else dict(sampling)
        # a stream that goes back and forth between two samplings has two ids, not one for each change
        variant = (name, declaration("sampling", sampling))
        stream = self._variants.get(variant)
        if stream is not None:
            self._streams[name] = stream
            return stream
        stream = self._variants[variant] = _Stream(self._next_stream, encoding, sampling)
        line = declaration(
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
                "rank": message.rank,
            },
        )
        self._declared.append(line)
        self._next_stream += 1
        self._streams[name] = stream
        return stream

    def _declare_shape(self, shape: tuple[int, ...]) -> int:
        number = self._shapes[shape] = len(self._shapes)
        self._declared.append(declaration("shape", {"id": number, "shape": list(shape)}))
        return number

    def _declare_pool(
        self, name: str, dtype: str, row: tuple[int, ...], chunk_bytes: int, compression: str | None
    ) -> _Pool:
        self._store.create(name, dtype=dtype, shape=row, chunk_bytes=chunk_bytes, compression=compression)
        pool = self._pools[name] = _Pool(len(self._pools), name, row)
        told = {} if compression is None else {"compression": compression}
        self._declared.append(declaration("pool", {"id": pool.id, "name": name, "dtype": dtype, **told}))
        return pool

    def _codec(self, kind: str | None, dtype: str) -> str | None:
        return self._compression.of(kind, dtype, plainly=self._store.plainly_compressed)

    def _own_pool(self, stream: _Stream, message: Message, row: tuple[int, ...]) -> _Pool:
        assert stream.encoding is not None
        name = own_pool(self._part, message.kind, message.key, message.tag, message.leaf)
        # taken by an earlier id of this stream, or on a file system that ignores case by another stream
        if name.casefold() in self._taken:
            name = f"{name}%~{stream.id}"
        self._taken.add(name.casefold())
        # one row a chunk: rows are at least as large as the chunks of shared pools should be
        codec = self._codec(message.kind, stream.encoding.name)
        return self._declare_pool(name, stream.encoding.storage, row, 1, codec)

    def _shared_pool(self, stream: _Stream, message: Message) -> _Pool:
        assert stream.encoding is not None
        storage = stream.encoding.storage
        name = shared_pool(self._part, message.kind, storage)
        pool = self._pools.get(name)
        if pool is not None:
            return pool
        if self._store.can_create:
            # the dtypes that share a pool differ in what auto says; the first one decides
            codec = self._codec(message.kind, stream.encoding.name)
            return self._declare_pool(name, storage, (), self._chunk_bytes, codec)
        return self._pools[late_pool(self._part, storage)]

    def _make_late_pools(self) -> None:
        if not self._store.seals:
            return
        for storage in STORAGE_DTYPES:
            codec = self._codec(None, storage)
            self._declare_pool(late_pool(self._part, storage), storage, (), self._chunk_bytes, codec)


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


_living: weakref.WeakSet[TraceWriter] = weakref.WeakSet()
"""The writers of this process."""


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def _complete(header: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    created = _now()
    added = {
        "run_id": uuid.uuid4().hex[:12],
        "created": created,
        "process": {"pid": os.getpid(), "hostname": platform.node(), "start": process_start(os.getpid())},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    return added | _public(header)


_NAMES = ("run_id", "launch", "process", "versions", "model", "kinds", "indices")
"""What holds names of the program and numbers, and is compared with what other processes wrote."""


def _public(told: Mapping[str, Any]) -> dict[str, Any]:
    """A header or a note as it is written: without secrets (see `tracer.secrets`)."""
    with contextlib.suppress(RecursionError):  # it is no JSON, which is said elsewhere
        return {name: value if name in _NAMES else masked({name: value})[name] for name, value in told.items()}
    return dict(told)


def refuse_here(path: Location, rank: int | None) -> None:
    """Raise `TraceExistsError` if this process is recording the trace at `path`, or the part of one rank of it."""
    for one in _living:
        where = part_of(one._part)
        same_rank = rank is None or where is None or where[0] == rank
        if one._writes and same_rank and _absolute(one.path) == _absolute(path):
            raise TraceExistsError(f"{path} is being recorded by this process, so it is not overwritten")


def _absolute(path: Location) -> str:
    """The one name of what a path leads to, by whatever way."""
    return str(path) if isinstance(path, Url) else os.path.realpath(path)


def _check_ours(path: Location) -> list[Head]:
    """The parts of the trace at `path`, if there is one.

    Raises
    ------
    TraceExistsError
        If something else is there, a link to one, or if another process is recording it.
    """
    refuse_link(path)
    try:
        found = heads(path)
    except TraceUnreadableError:
        raise
    except TraceError as error:
        raise TraceExistsError(
            f"{path} already exists, and is not overwritten because it is not a trace of this format: {error}"
        ) from error
    refuse_living(path, found)
    return found


def check_target(path: Anywhere, *, overwrite: bool = False) -> None:
    """Make sure, without creating anything, that a trace could be written at `path`.

    Raises
    ------
    TraceExistsError
        If something is there and may not be overwritten, or is not a trace.
    TraceFormatError
        If the suffix is not one of a store that can be written there.
    """
    path = location(path)
    check_writable(path)
    refuse_part(path)
    if not overwrite and any(exists(file) for file in store_files(path)):
        raise TraceExistsError(f"{path} already exists; give another path, or say that it may be overwritten")
    _check_ours(path)
