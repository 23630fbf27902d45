"""`Pools`: chooses the array for the data of each message, and declares streams, shapes and pools."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from tracer.format.declarations import declaration
from tracer.format.encodings import Encoding, encoding_of
from tracer.format.journal import HAS_DATA
from tracer.format.names import own_pool, shared_pool
from tracer.messaging.messages import Message
from tracer.messaging.pulses import is_pulse
from tracer.trace.commits import Commits
from tracer.trace.compression import Compression

if TYPE_CHECKING:
    from torch import Tensor

PACKED_BYTES: Final = 32768
"""Messages up to this many bytes are copied together before they are written."""
MOST_PULSES: Final = 16
"""The most streams of pulses with pools of their own; a program whose steps all differ has many more."""
_MOST_OWN_AXES: Final = 31
"""The most axes of a message in a stream's own pool: HDF5 allows 32, and the first axis is that of the messages."""
# the dtypes that torch.stack copies without changing bits
_STACKED: Final = frozenset(
    {
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    }
)


@final
@dataclass(slots=True, eq=False)
class OpenPool:
    """An array that takes the data of messages."""

    id: int
    name: str
    # the shape of a row of a stream's own pool; () for a shared pool
    row: tuple[int, ...]


@final
class PoolPlace:
    """The pool for messages of one shape, and the messages that wait to be written to it together."""

    __slots__ = ("count", "entry", "nbytes", "number", "own", "pool", "tensors")

    def __init__(self, pool: OpenPool, shape_id: int, shape: tuple[int, ...], encoding: Encoding) -> None:
        self.pool = pool
        self.own = pool.row == shape and bool(shape)
        self.count = math.prod(shape)
        self.nbytes = self.count * encoding.dtype.itemsize
        # the journal entries of each message: pool, count, shape and flags
        self.entry = (pool.id, self.count, shape_id, HAS_DATA)
        self.number = -1
        self.tensors: list[Tensor] = []


@final
@dataclass(slots=True, eq=False)
class OpenStream:
    """A declared stream and its pools."""

    id: int
    encoding: Encoding | None
    sampling: Mapping[str, Any] | None
    # True until the first message, whose size decides whether the stream gets a pool of its own
    fresh: bool = True
    own: OpenPool | None = None
    shared: OpenPool | None = None
    # of the last message; cached, because most streams have a single shape
    shape: tuple[int, ...] | None = None
    place: PoolPlace | None = None
    packs: bool = False


@final
class Pools:
    """Decides which array each message goes to, makes the arrays, and declares streams, shapes and pools.

    Parameters
    ----------
    commits : Commits
    compression : Compression
    chunk_bytes : int
        Bytes of the chunks of shared pools.
    own_bytes : int
        A stream whose first message has at least this many bytes gets a pool of its own.

    Attributes
    ----------
    streams : dict
        The declared stream of each name and dtype; if the sampling changed, that of the last message.
    """

    def __init__(self, commits: Commits, compression: Compression, chunk_bytes: int, own_bytes: int) -> None:
        self.streams: dict[tuple[Any, ...], OpenStream] = {}
        self._commits = commits
        self._store = commits.store
        self._part = commits.part
        self._compression = compression
        self._chunk_bytes = chunk_bytes
        self._own_bytes = own_bytes
        self._variants: dict[tuple[Any, ...], OpenStream] = {}
        self._shapes: dict[tuple[int, ...], int] = {}
        self._pools: dict[str, OpenPool] = {}
        self._places: dict[tuple[int, int, str], PoolPlace] = {}
        self._taken: set[str] = set()
        self._pulses = 0

    def stream(self, name: tuple[Any, ...], message: Message) -> OpenStream:
        """The stream of a message; declared if it or its sampling is new."""
        encoding = None if message.data is None else encoding_of(message.data)
        sampling = None if message.sampling is None else dict(message.sampling)
        # a stream that alternates between two samplings has two ids, not a new id for each change
        variant = (name, declaration("sampling", sampling))
        stream = self._variants.get(variant)
        if stream is None:
            stream = self._variants[variant] = OpenStream(len(self._variants), encoding, sampling)
            self._commits.declare(
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
        self.streams[name] = stream
        return stream

    def stream_of(self, message: Message) -> OpenStream:
        """Look up the stream of a message; declared if it is new."""
        dtype = None if message.data is None else message.data.dtype
        name = message.key, message.kind, message.tag, message.leaf, message.rank, dtype
        stream = self.streams.get(name)
        if stream is None or stream.sampling != message.sampling:
            stream = self.stream(name, message)
        return stream

    def place_of(self, stream: OpenStream, message: Message, data: Tensor) -> PoolPlace:
        """The place of a message of a stream."""
        shape = tuple(data.shape)
        if shape != stream.shape:
            self.find_place(stream, message, data, shape)
        assert stream.place is not None
        return stream.place

    def find_place(self, stream: OpenStream, message: Message, data: Tensor, shape: tuple[int, ...]) -> None:
        """Set the place of a stream for messages of a shape that differs from the last message's."""
        encoding = encoding_of(data)
        few_axes = len(shape) <= _MOST_OWN_AXES
        owns = data.nbytes >= self._own_bytes or (is_pulse(message) and self._pulses < MOST_PULSES)
        if stream.fresh and few_axes and owns:
            with self._commits:
                stream.own = self._own_pool(stream, message, shape)
        stream.fresh = False
        found = self._shapes.get(shape)
        shape_id = self._declare_shape(shape) if found is None else found
        pool = stream.own
        if pool is None or pool.row != shape:
            pool = stream.shared
            if pool is None:
                with self._commits:
                    pool = stream.shared = self._shared_pool(stream, message)
        place = self._places.get((pool.id, shape_id, encoding.name))
        if place is None:
            place = self._places[pool.id, shape_id, encoding.name] = PoolPlace(pool, shape_id, shape, encoding)
        stream.shape, stream.place = shape, place
        stream.packs = place.nbytes <= PACKED_BYTES and few_axes and encoding.name in _STACKED

    def _declare_shape(self, shape: tuple[int, ...]) -> int:
        number = self._shapes[shape] = len(self._shapes)
        self._commits.declare("shape", {"id": number, "shape": list(shape)})
        return number

    def _declare_pool(
        self, name: str, dtype: str, row: tuple[int, ...], chunk_bytes: int, compression: str | None
    ) -> OpenPool:
        self._store.create(name, dtype=dtype, shape=row, chunk_bytes=chunk_bytes, compression=compression)
        pool = self._pools[name] = OpenPool(len(self._pools), name, row)
        told = {} if compression is None else {"compression": compression}
        self._commits.declare("pool", {"id": pool.id, "name": name, "dtype": dtype, **told})
        return pool

    def _codec(self, kind: str, dtype: str) -> str | None:
        return self._compression.of(kind, dtype, plainly=self._store.plainly_compressed)

    def _own_pool(self, stream: OpenStream, message: Message, row: tuple[int, ...]) -> OpenPool:
        assert stream.encoding is not None
        name = own_pool(self._part, message.kind, message.key, message.tag, message.leaf)
        # the name may be taken by an earlier id of this stream or, if the file system ignores case, by another stream
        if name.casefold() in self._taken:
            name = f"{name}%~{stream.id}"
        self._taken.add(name.casefold())
        chunk_bytes = 1  # one row a chunk: rows of own pools are large enough for that
        if is_pulse(message):
            self._pulses += 1
            chunk_bytes = self._chunk_bytes
        codec = self._codec(message.kind, stream.encoding.name)
        pool = self._declare_pool(name, stream.encoding.storage, row, chunk_bytes, codec)
        self._commits.coordinates.follow(pool.id, name, math.prod(row))
        self._store.set_attrs(name, _about(message, stream))
        return pool

    def _shared_pool(self, stream: OpenStream, message: Message) -> OpenPool:
        assert stream.encoding is not None
        storage = stream.encoding.storage
        name = shared_pool(self._part, message.kind, storage)
        pool = self._pools.get(name)
        if pool is not None:
            return pool
        # a shared pool has one codec; with "auto", the dtype of the first message decides
        codec = self._codec(message.kind, stream.encoding.name)
        return self._declare_pool(name, storage, (), self._chunk_bytes, codec)


def _about(message: Message, stream: OpenStream) -> dict[str, Any]:
    """What other programs are told of an array; the declaration of the stream is what counts."""
    where = "the network" if message.key is None else message.key or "the root module"
    names = {"kind": message.kind, "module": message.key, "tag": message.tag, "leaf": message.leaf}
    assert stream.encoding is not None
    about = {"long_name": f"{message.kind} of {where}", "units": "1", "dtype": stream.encoding.name}
    return {**about, **names, "sampling": stream.sampling}
