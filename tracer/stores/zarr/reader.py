"""The base of the stores that read Zarr traces: it finds out which chunks are asked for, and subclasses read those.

Arrays with other codecs than those written here (a trace that another tool copied) are left to zarr-python.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError
from tracer.stores.chunks import RowChunks, check_name
from tracer.stores.codecs import Codec, codec_of
from tracer.stores.protocols import ReadStore, rows_in
from tracer.stores.zarr.description import CHUNK_LIMIT, ArrayDescription
from tracer.stores.zarr.format import DOCUMENT_LIMIT
from tracer.stores.zarr.shards import MISSING, as_index, chunks_begin, second_index

EXPANSION: Final = 4096
"""How many times its size on disk the data of an array with other codecs than ours can be, at most."""


class ZarrReader(ReadStore):
    """A Zarr group being read; see `tracer.stores.protocols.ReadStore`."""

    checksums_chunks = True

    def __init__(self) -> None:
        self.problems = []
        self.thorough = False
        """Whether what a reading does not need is looked at, too."""
        self._arrays: dict[str, ArrayDescription] = {}
        self._assumed: set[str] = set()

    # -- what depends on where the trace is ----------------------------------------------------------------------------

    @abstractmethod
    def _document(self, name: str) -> Mapping[str, Any]:
        """The ``zarr.json`` of an array or group; empty where there is none."""

    @abstractmethod
    def _foreign(self, array: ArrayDescription) -> Any:
        """zarr-python's array, for codecs other than ours."""

    @abstractmethod
    def _open(self, name: str, anew: bool = False) -> ArrayDescription:
        """An array, looked at once, or `anew`."""

    @abstractmethod
    def _bytes_of(self, name: str) -> int:
        """Bytes of all that is there of an array."""

    @abstractmethod
    def _shard_numbers(self, name: str) -> list[int]:
        """Numbers of the shards of an array that are there."""

    @abstractmethod
    def _index_of(self, array: ArrayDescription, shard: int) -> NDArray[np.uint64]:
        """The index of a shard; empty where it cannot be read."""

    @abstractmethod
    def _decoded_size(self, array: ArrayDescription, shard: int, offset: int) -> int:
        """How large a compressed chunk says that it is; 0 where that cannot be read."""

    @abstractmethod
    def _made_as(self, name: str, rows: RowChunks, codec: Codec | None) -> ArrayDescription:
        """An array of no rows as it was made here."""

    @abstractmethod
    def _held_bytes(self, array: ArrayDescription, start: int, stop: int) -> int:
        """How many bytes of rows what is there of these can hold, at most."""

    def _check_size(self, array: ArrayDescription, start: int, stop: int) -> None:
        """Refuse, before memory is taken, to read rows that cannot be there."""
        nbytes = (stop - start) * array.row_nbytes
        if nbytes <= DOCUMENT_LIMIT:
            return
        foreign = array.foreign is not None
        held = EXPANSION * self._bytes_of(array.name) if foreign else self._held_bytes(array, start, stop)
        if nbytes > held:
            raise TraceCorruptError(f"{self.path}: array {array.name!r} is larger than what is there of it")

    @abstractmethod
    def _fill(self, array: ArrayDescription, start: int, stop: int, out: NDArray[np.uint8], verify: bool) -> list[int]:
        """Fill `out` with rows ``start`` to ``stop``; the checksums of their chunks, if they were compared."""

    # -- what does not -------------------------------------------------------------------------------------------------

    def length(self, name: str) -> int:
        return self._open(name, anew=True).rows

    def row_shape(self, name: str) -> tuple[int, ...]:
        return self._open(name).row_shape

    def dtype(self, name: str) -> str:
        return str(self._open(name).dtype.name)

    def chunk_rows(self, name: str) -> int:
        return self._open(name).chunk[0]

    def attrs(self, name: str = "") -> dict[str, Any]:
        if name:
            check_name(name)
        attributes = self._document(name).get("attributes", {})
        return attributes if isinstance(attributes, dict) else {}

    def stored_rows(self, name: str) -> int:
        array = self._open(name)
        if array.foreign is not None:
            return int(EXPANSION * self._bytes_of(name) // max(1, array.row_nbytes))
        numbers = self._shard_numbers(name)
        # the name of a shard is its number, which a damaged trace may set to anything; shards may be missing
        return min(max(numbers, default=-1) + 1, 1000 * (len(numbers) + 1)) * array.shard_rows

    def assume(
        self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, compression: str | None = None
    ) -> int | None:
        check_name(name)
        codec = codec_of(compression)
        array = self._arrays[name] = self._made_as(name, RowChunks(name, dtype, shape, chunk_bytes), codec)
        rows = self.stored_rows(name)
        last = rows // array.shard_rows - 1
        index = self._index_of(array, last)
        stored = index[index[:, 0] != MISSING]
        nbytes = int(stored[0, 1]) - 4 if len(stored) else array.chunk_nbytes
        if codec is not None and len(stored):
            nbytes = self._decoded_size(array, last, int(stored[0, 0]))
        if not 0 < nbytes <= CHUNK_LIMIT:
            return None
        if nbytes != array.chunk_nbytes:
            # the first compressed chunk tells that chunks have another size
            array = self._arrays[name] = self._made_as(name, RowChunks(name, dtype, shape, nbytes), codec)
            rows = (last + 1) * array.shard_rows
        if len(stored):
            # the last shard has rows only up to its last chunk
            chunks = int(np.flatnonzero(index[:, 0] != MISSING).max()) + 1
            rows = last * array.shard_rows - (-chunks // array.per_row) * array.chunk[0]
        array.rows = rows
        self._assumed.add(name)
        return rows

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        out: NDArray[Any] | None = None,
        *,
        checksums: list[int] | None = None,
        verify: bool = True,
    ) -> NDArray[Any]:
        array = self._open(name)
        if not 0 <= start <= stop <= array.rows:
            raise TraceCorruptError(
                f"{self.path}: array {name!r} has {array.rows} rows, and not those from {start} to {stop}"
            )
        self._check_size(array, start, stop)
        if array.foreign is not None:
            try:
                return np.array(array.foreign[start:stop])
            except Exception as error:
                raise TraceCorruptError(f"{self.path}: array {name!r} cannot be read: {error}") from error
        try:
            found = rows_in(out, (stop - start, *array.row_shape), array.dtype)
        except (MemoryError, ValueError) as error:
            raise TraceCorruptError(f"{self.path}: array {name!r} does not fit into memory: {error}") from error
        if found.size:
            target = found.reshape(-1).view(np.uint8)
            chunks = self._fill(array, start, stop, target, verify and self.verifies)
            if checksums is not None and chunks and array.chunk[0] == 1:
                checksums += array.row_checksums(chunks)
        return found

    def _described(self, name: str, document: Mapping[str, Any]) -> ArrayDescription:
        """An array by its ``zarr.json``."""
        array = ArrayDescription(self.path, name, document)
        if not array.is_ours:
            array.foreign = self._foreign(array)
        return array

    def _index_in(
        self, array: ArrayDescription, shard: int, read: Callable[[int, int], bytes]
    ) -> tuple[NDArray[np.uint64], int]:
        """The index of a shard, and where it begins: the second one if the first fails.

        `read` gives bytes of the shard, from where and how many.
        """
        chunks = array.per_shard
        size, at = chunks * 16 + 4, second_index(chunks)
        first = as_index(read(0, size), chunks)
        second = as_index(read(at, size), chunks) if first is None or self.thorough else None
        why = f"of shard {shard} of array {array.name!r} fails its checksum"
        if first is None:
            if second is None:
                raise TraceCorruptError(f"{self.path}: the index {why}")
            self._tell(f"the index {why}; its copy is whole, and what it leads to can be read")
            return second, at
        # traces that other programs wrote have none
        if self.thorough and second is None and int(first[:, 0].min()) >= chunks_begin(chunks):
            self._tell(f"the copy of the index {why}; the index itself is whole")
        return first, 0

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def numbers_in(names: Iterable[str]) -> list[int]:
    """Those of some names that can be numbers of shards."""
    return [int(name) for name in names if name.isdecimal() and len(name) < 16]
