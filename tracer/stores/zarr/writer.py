"""The base class of stores that write Zarr traces: it keeps the names and attributes of arrays and groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

from tracer.errors import TraceError
from tracer.stores.chunks import RowChunks
from tracer.stores.codecs import Codec
from tracer.stores.protocols import WriteStore
from tracer.stores.zarr.shards import GrowingArray

A = TypeVar("A", bound=GrowingArray)


class ZarrWriter(WriteStore[A]):
    """A Zarr group being written; see `tracer.stores.protocols.WriteStore`."""

    checksums_chunks = True
    plainly_compressed = True

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[str, dict[str, Any]] = {"": {}}
        # names of arrays and groups with unpublished changes
        self._changed: dict[str, None] = {}
        # whether another process has already set the attributes of the root
        self._joined = False

    def make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool) -> None:
        if name in self.arrays or name in self._groups:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(parent in self.arrays for parent in parents):
            raise TraceError(f"{self.path}: {name!r} lies within an array")
        self._make(name, rows, codec, gapless, [parent for parent in parents if parent not in self._groups])

    @abstractmethod
    def _make(self, name: str, rows: RowChunks, codec: Codec | None, gapless: bool, groups: list[str]) -> None:
        """Register an array and the new `groups` above it, which are ordered from the top down."""

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
