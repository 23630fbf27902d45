"""What all stores share that write Zarr traces: the names of arrays and groups, and their attributes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from tracer.errors import TraceError
from tracer.stores.chunks import check_name
from tracer.stores.protocols import WriteStore
from tracer.stores.zarr.shards import GrowingArray

A = TypeVar("A", bound=GrowingArray)


class ZarrWriter(WriteStore, Generic[A]):
    """A Zarr group being written; see `tracer.stores.protocols.WriteStore`."""

    checksums_chunks = True
    plainly_compressed = True

    def __init__(self) -> None:
        self._arrays: dict[str, A] = {}
        self._groups: dict[str, dict[str, Any]] = {"": {}}
        # arrays and groups with something to publish
        self._changed: dict[str, None] = {}
        self._closed = False
        # whether the root has attributes that another process set
        self._joined = False

    def create(
        self,
        name: str,
        *,
        dtype: str,
        shape: tuple[int, ...],
        chunk_bytes: int,
        compression: str | None = None,
        gapless: bool = False,
    ) -> None:
        self._check_open()
        check_name(name)
        if name in self._arrays or name in self._groups:
            raise TraceError(f"{self.path} already has an array or group {name!r}")
        parts = name.split("/")
        parents = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        if any(parent in self._arrays for parent in parents):
            raise TraceError(f"{self.path}: {name!r} lies within an array")
        array = self._array_of(name, dtype, shape, chunk_bytes, compression, gapless)
        self._make(array, [parent for parent in parents if parent not in self._groups])

    @abstractmethod
    def _array_of(
        self, name: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int, compression: str | None, gapless: bool
    ) -> A:
        """An array as `create` makes it."""

    @abstractmethod
    def _make(self, array: A, groups: list[str]) -> None:
        """Take in an array, and groups above it that are not there yet, the upper ones first."""

    def length(self, name: str) -> int:
        return self._array(name).rows.rows

    def set_attrs(self, name: str, values: Mapping[str, Any]) -> None:
        if name == "" and self._joined:
            return
        if name in self._groups:
            self._groups[name].update(values)
        else:
            array = self._array(name)
            array.attrs.update(values)
            array.published = -1
        self._changed[name] = None

    def _array(self, name: str) -> A:
        self._check_open()
        if name not in self._arrays:
            raise TraceError(f"{self.path} has no array {name!r}")
        return self._arrays[name]

    def _check_open(self) -> None:
        if self._closed:
            raise TraceError(f"{self.path} is closed")
