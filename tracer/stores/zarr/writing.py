"""Writes a Zarr trace without a Zarr library, which costs more per chunk than the chunk."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from numpy.typing import NDArray

from tracer.errors import TraceError, TraceExistsError
from tracer.format.names import PART
from tracer.stores.chunks import RowChunks, rows_ahead
from tracer.stores.codecs import Codec, encode
from tracer.stores.errors import cannot_write, write_errors
from tracer.stores.protocols import WriteStore
from tracer.stores.zarr.files import Files, Shard
from tracer.stores.zarr.layout import (
    CONSOLIDATED,
    DOCUMENT_LIMIT,
    WRITER,
    array_document,
    as_bytes,
    axes_of,
    document_name,
    group_document,
    shard_name,
)

CHUNKS_PER_SHARD: Final = 128
"""The most chunks of a shard; a row of more chunks has a shard of its own."""
SHARD_BYTES: Final = 16 << 20
"""The most bytes of chunks in a shard where files cannot grow; a larger row has a shard of its own."""
GAPLESS_SHARD_BYTES: Final = 1 << 20
"""`SHARD_BYTES` for gapless arrays, smaller because each commit puts the last shard again."""
PUBLISHED_SHARDS: Final = 16
"""Shards whose rows an array with gaps claims at first where each commit begins a shard; the claim doubles then."""
CHUNK_FRACTION: Final = 8
"""Divides the chunk size of one-dimensional arrays with gaps where files cannot grow: each commit pads a chunk."""


class GrowingArray:
    """An array being written: its shards and its ``zarr.json``.

    Parameters
    ----------
    name : str
    rows : RowChunks
    codec : Codec or None
    gapless : bool
        As in `WriteStore.create`.
    appends : bool
        As in `Files`.
    """

    __slots__ = (
        *("ahead", "attrs", "axes", "codec", "committed", "end", "full", "gapless", "name", "per_shard", "published"),
        *("rows", "shard", "shard_rows", "template"),
    )

    def __init__(self, name: str, rows: RowChunks, codec: Codec | None, *, gapless: bool, appends: bool) -> None:
        self.name = name
        self.rows = rows
        self.codec = codec
        self.gapless = gapless
        heights = CHUNKS_PER_SHARD // rows.per_row
        if not appends:
            limit = GAPLESS_SHARD_BYTES if gapless else SHARD_BYTES
            heights = min(heights, limit // (rows.per_row * rows.chunk_nbytes))
        heights = max(1, heights)
        self.per_shard = heights * rows.per_row
        self.shard_rows = heights * rows.chunk[0]
        trailing = [count * size for count, size in zip(rows.grid, rows.chunk[1:], strict=True)]
        self.template = array_document(rows.dtype, rows.chunk, (self.shard_rows, *trailing), codec)
        self.attrs: dict[str, Any] = {}
        self.axes = axes_of(name, rows.row_shape)
        self.ahead = self.shard_rows * (1 if appends else PUBLISHED_SHARDS)
        """The least number of rows that the ``zarr.json`` of an array with gaps claims."""
        self.end = 0
        """Number of the last appended row plus one."""
        self.published = -1
        """Rows that the ``zarr.json`` claims; -1 if it must be rewritten."""
        self.committed = 0
        """What `published` was after the last commit."""
        self.shard: Shard | None = None
        self.full: list[Shard] = []
        """Full shards that are published by the next commit."""

    def to_publish(self) -> int:
        """Rows that the zarr.json should claim: rounded up with gaps, to avoid costly rewrites at each commit."""
        return self.end if self.gapless else rows_ahead(self.end, self.ahead)

    def document(self, rows: int) -> Mapping[str, Any]:
        """The ``zarr.json`` that claims `rows` rows."""
        shape = [rows, *self.rows.row_shape]
        return self.template | {"shape": shape, "attributes": self.attrs, "dimension_names": self.axes}

    def shard_name(self, number: int) -> str:
        """The path of a shard within the store."""
        return f"{self.name}/{shard_name(number, len(self.rows.row_shape) + 1)}"

    def changed_shards(self) -> list[Shard]:
        """The shards whose published index is out of date."""
        last = [] if self.shard is None or not self.shard.changed else [self.shard]
        return [*self.full, *last]


class ZarrWriteStore(WriteStore[GrowingArray]):
    """A Zarr group being written; see `tracer.stores.protocols.WriteStore`.

    Parameters
    ----------
    files : Files
        Closed with the store.
    part : str, optional
        Make only the group of this part; other processes write other parts.

    Raises
    ------
    TraceExistsError
        If another writer has made the group in the meantime.
    """

    checksums_chunks = True
    plainly_compressed = True

    def __init__(self, files: Files, part: str | None = None) -> None:
        super().__init__()
        self.path = files.location
        self.may_answer_later = files.may_answer_later
        self._files = files
        self._own = part or ""
        self._groups: dict[str, dict[str, Any]] = {self._own: {}, "": {}}
        # names of arrays and groups with unpublished changes
        self._changed: dict[str, None] = dict.fromkeys(("", self._own))
        # whether another process has already set the attributes of the root
        self._joined = False
        # the random number makes the document unique, so that the second of two concurrent writers is refused
        claim = as_bytes(group_document({WRITER: uuid.uuid4().hex}), self.path)
        with write_errors(self.path):
            if part is not None:
                files.make(shared=True)
                self._join(claim)
            files.make(self._own)
            files.put_new(document_name(self._own), claim)

    def _join(self, claim: bytes) -> None:
        """Make the root, or take over the attributes that another process gave it."""
        attributes = self._files.document("").get("attributes")
        if isinstance(attributes, dict) and "format" in attributes:
            self._joined = True
            self._groups[""] = attributes
            del self._changed[""]
            disperse(self._files)
            return
        # If another rank made the root, this rank sets the same attributes too, as the other may have been killed.
        with suppress(TraceExistsError):
            self._files.put_new(document_name(""), claim)

    def chunk_size(self, shape: tuple[int, ...], chunk_bytes: int, gapless: bool) -> int:
        pads = not (self._files.appends or gapless or shape)
        return max(1, chunk_bytes // CHUNK_FRACTION) if pads else chunk_bytes

    def make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool) -> None:
        if name in self.arrays or name in self._groups:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(parent in self.arrays for parent in parents):
            raise TraceError(f"{self.path}: {name!r} lies within an array")
        array = GrowingArray(name, rows, codec, gapless=gapless, appends=self._files.appends)
        for parent in parents:
            if parent not in self._groups:
                self._groups[parent] = {}
                self._changed[parent] = None
        self.arrays[name] = array
        self._changed[name] = None

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if name == "" and self._joined:
            return
        if name in self._groups:
            self._groups[name].update(values)
        else:
            array = self.array(name)
            array.attrs.update(values)
            array.published = -1
        self._changed[name] = None

    def name_rows(self, name: str, axis: str) -> None:
        array = self.array(name)
        array.axes[0] = axis
        array.published = -1
        self._changed[name] = None

    def append(self, name: str, rows: NDArray[Any], checksums: list[int] | None = None) -> int:
        array = self.array(name)
        first = array.rows.rows
        written: list[int] = []
        self._changed[name] = None
        try:  # not `with write_errors`, which adds five function calls to the ten of each message
            array.rows.append(rows, lambda number, pieces: written.extend(self._write(array, number, pieces)))
        except OSError as error:
            raise error if isinstance(error, TraceError) else cannot_write(self.path, error) from error
        finally:
            array.end = array.rows.rows
        if checksums is not None and array.codec is None and array.rows.in_rows:
            checksums += written if array.rows.per_row == 1 else array.rows.row_checksums(written)
        return first

    def commit(self) -> None:
        self.check_open()
        self._files.check_there()
        with write_errors(self.path):
            arrays = [array for name in self._changed if (array := self.arrays.get(name)) is not None]
            for array in arrays:
                tail = array.rows.take_tail()
                if tail is not None:
                    self._write(array, tail[0], [tail[1]], last=True)
            # Data, then indexes, then lengths: each refers to the one before, which must be there first.
            self._files.sync()
            shards = [shard for array in arrays for shard in array.changed_shards()]
            for shard in shards:
                shard.publish()
            self._files.wait()
            for shard in shards:
                shard.settle()
            for array in arrays:
                array.full.clear()
                if not self._files.appends and not array.gapless:
                    # the shard cannot grow, so the next rows begin a new one
                    array.shard = None
                    array.rows.skip(-(-array.rows.rows // array.shard_rows) * array.shard_rows)
            for name in self._changed:
                changed = self.arrays.get(name)
                if changed is None:
                    self._put_group(name)
                elif changed.published != changed.to_publish():
                    self._put_array(changed, changed.to_publish())
            self._files.wait()
            for array in arrays:
                array.committed = array.published
        self._changed.clear()

    def touch(self) -> None:
        with write_errors(self.path):
            self._put_group(self._own)
            self._files.wait()

    def close(self) -> None:
        if self.closed:
            return
        self.commit()
        # exact lengths replace the rounded-up ones, and other programs find all documents; a failure loses no data
        with suppress(OSError):
            for array in self.arrays.values():
                if array.published != array.end:
                    self._put_array(array, array.end)
            self._files.wait()
            self._consolidate()
        self.abandon()

    def _consolidate(self) -> None:
        """Let the root have a copy of all other documents, so that other programs open the trace with one request.

        Of several parts this is done by the last that ends. On an object store it is not, which would need a request
        for each document.
        """
        others = self._documents_of_others()
        if others is None:
            return
        groups = {name: group_document(attributes) for name, attributes in self._groups.items() if name}
        arrays = {array.name: array.document(array.published) for array in self.arrays.values()}
        copies = {
            "kind": "inline",
            "must_understand": False,
            "metadata": dict(sorted((others | groups | arrays).items())),
        }
        root = self._files.document("") | {CONSOLIDATED: copies}
        data = as_bytes(root, self.path)
        if len(data) <= DOCUMENT_LIMIT // 4:
            self._files.put(document_name(""), data)
            self._files.wait()

    def _documents_of_others(self) -> dict[str, Any] | None:
        """The documents of other parts; None if a part has not ended, or if there would be a request for each."""
        if not self._own:
            return {}
        if not self._files.appends:
            return None
        paths = [path for path in self._files.paths() if path.endswith("/zarr.json")]
        names = [path.removesuffix("/zarr.json") for path in paths if not path.startswith(f"{self._own}/")]
        documents = {name: self._files.document(name) for name in names}
        parts = [document for name, document in documents.items() if PART.fullmatch(name)]
        return documents if all("status" in part.get("attributes", {}) for part in parts) else None

    def last_words(self, name: str, rows: NDArray[Any]) -> None:
        array = self.array(name)
        with write_errors(self.path):
            self._files.begin_again(name, "" if array.shard is None else array.shard.name)
            changed = [other for one in self._changed if (other := self.arrays.get(one)) is not None]
            for other in changed:
                for shard in other.changed_shards():
                    shard.cut()
            # the failed commit may have put the length of the journal, whose rows count only after all else is written
            for other in changed:
                if other is not array and other.gapless and other.published != other.committed:
                    self._put_array(other, other.committed)
            self._files.wait()
        array.published = array.committed
        if array.shard is not None:
            array.shard.changed = True
        self._changed = {name: None}
        self.append(name, rows)
        self.commit()

    def abandon(self) -> None:
        self.closed = True
        self._files.close()

    def discard(self) -> None:
        self.closed = True
        self._files.discard()

    def _write(
        self, array: GrowingArray, number: int, pieces: Sequence[memoryview], *, last: bool = False
    ) -> list[int]:
        """Add consecutive chunks to their shards, and return their checksums.

        `last` marks the unfinished last chunk, which is written again when it has more rows.
        """
        checksums = []
        for one, data in enumerate(pieces, number):
            shard_number, place = divmod(one, array.per_shard)
            shard = array.shard
            if shard is None or shard.number != shard_number:
                shard = self._next_shard(array, shard_number)
            if array.codec is not None:
                data = memoryview(encode(array.codec, data, array.rows.dtype.itemsize))
            checksums.append(shard.add(place, data, last=last))
        return checksums

    def _next_shard(self, array: GrowingArray, number: int) -> Shard:
        """Begin a shard, and let go of the one before; chunks come in order."""
        before = array.shard
        if before is not None and before.changed:
            if self._files.appends:
                array.full.append(before)
            else:
                before.publish()
        array.shard = self._files.new_shard(
            array.shard_name(number), number, array.per_shard, array.rows.chunk_nbytes,
            packed=array.codec is not None, gapless=array.gapless,
        )  # fmt: skip
        return array.shard

    def _put_group(self, name: str) -> None:
        self._files.put(document_name(name), as_bytes(group_document(self._groups[name]), self.path / name))

    def _put_array(self, array: GrowingArray, rows: int) -> None:
        array.published = rows
        self._files.put(document_name(array.name), as_bytes(array.document(rows), self.path / array.name))


def disperse(files: Files) -> None:
    """Remove zarr-python's consolidated metadata from the root, because it is out of date after a write."""
    document = files.document("")
    if document.pop(CONSOLIDATED, None) is not None:
        files.put(document_name(""), as_bytes(document, files.location))
        files.wait()
