"""The base class of stores that read Zarr traces: it interprets documents and indexes, and subclasses fetch the bytes.

Arrays with codecs that this package does not write (in a trace that another tool copied) are read by zarr-python.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceCorruptError
from tracer.stores.chunks import check_name
from tracer.stores.protocols import ReadStore, rows_in
from tracer.stores.zarr.shards import DOCUMENT_LIMIT, ArrayDescription, as_index, chunks_begin, second_index

EXPANSION: Final = 4096
"""The highest compression ratio that is believed of an array with foreign codecs."""


class ZarrReader(ReadStore):
    """A Zarr group being read; see `tracer.stores.protocols.ReadStore`."""

    checksums_chunks = True

    def __init__(self) -> None:
        self.problems = []
        self.thorough = False
        """Whether to check redundant data as well, such as copies of indexes; set for a damaged store."""
        self._arrays: dict[str, ArrayDescription] = {}

    # -- access to files or objects, by subclasses ---------------------------------------------------------------------

    @abstractmethod
    def _document(self, name: str) -> Mapping[str, Any]:
        """The ``zarr.json`` of an array or group; empty if there is none."""

    @abstractmethod
    def _foreign(self, array: ArrayDescription) -> Any:
        """Open an array with foreign codecs by zarr-python."""

    @abstractmethod
    def _open(self, name: str, anew: bool = False) -> ArrayDescription:
        """The description of an array, cached unless `anew`."""

    @abstractmethod
    def _bytes_of(self, name: str) -> int:
        """Bytes of all files or objects of an array."""

    @abstractmethod
    def _shard_numbers(self, name: str) -> list[int]:
        """Numbers of the existing shards of an array."""

    @abstractmethod
    def _held_bytes(self, array: ArrayDescription, start: int, stop: int) -> int:
        """An upper bound of the decoded bytes in the existing shards of rows ``start`` to ``stop``."""

    def _check_size(self, array: ArrayDescription, start: int, stop: int) -> None:
        """Raise `TraceCorruptError` for more rows than can be stored, before memory is allocated for them."""
        nbytes = (stop - start) * array.row_nbytes
        if nbytes <= DOCUMENT_LIMIT:
            return
        foreign = array.foreign is not None
        held = EXPANSION * self._bytes_of(array.name) if foreign else self._held_bytes(array, start, stop)
        if nbytes > held:
            raise TraceCorruptError(f"{self.path}: array {array.name!r} is larger than what is there of it")

    @abstractmethod
    def _fill(self, array: ArrayDescription, start: int, stop: int, out: NDArray[np.uint8], verify: bool) -> None:
        """Fill `out` with rows ``start`` to ``stop``."""

    # -- independent of the location -----------------------------------------------------------------------------------

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
        # Shards may be missing, so the highest number counts. A damaged trace may have a shard named by any number.
        return min(max(numbers, default=-1) + 1, 1000 * (len(numbers) + 1)) * array.shard_rows

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        out: NDArray[Any] | None = None,
        *,
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
            self._fill(array, start, stop, target, verify and self.verifies)
        return found

    def _described(self, name: str, document: Mapping[str, Any]) -> ArrayDescription:
        """Describe an array from its ``zarr.json``."""
        array = ArrayDescription(self.path, name, document)
        if not array.is_ours:
            array.foreign = self._foreign(array)
        return array

    def _index_in(
        self, array: ArrayDescription, shard: int, read: Callable[[int, int], bytes]
    ) -> tuple[NDArray[np.uint64], int]:
        """The index of a shard, and its offset in the shard; the second copy is used if the first fails its checksum.

        ``read(offset, nbytes)`` returns bytes of the shard.
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
        # shards that another program wrote have no second index: their chunks begin in its place
        if self.thorough and second is None and int(first[:, 0].min()) >= chunks_begin(chunks):
            self._tell(f"the copy of the index {why}; the index itself is whole")
        return first, 0

    def _tell(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def numbers_in(names: Iterable[str]) -> list[int]:
    """The shard numbers among the names of files."""
    return [int(name) for name in names if name.isdecimal() and len(name) < 16]
