"""Reads an HDF5 trace that is not a file yet, and goes on with the file when that has replaced the Zarr trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.stores.disk.files import is_file
from tracer.stores.protocols import ReadStore

_T = TypeVar("_T")


class FollowedStore(ReadStore):
    """One part, or the whole, of a trace that its writer moves from a Zarr trace into an HDF5 file at its end.

    The rows of all arrays are the same in both.

    Parameters
    ----------
    path : Path
        The file.
    store : ReadStore
        The Zarr trace.
    part : str or None
        The part that the file will hold; None for everything.
    reopen : callable
        Opens the file.
    """

    def __init__(self, path: Path, store: ReadStore, part: str | None, reopen: Callable[[], ReadStore]) -> None:
        self.path = self._file = path
        self.checksums_chunks = store.checksums_chunks
        self.problems = store.problems
        self._store = store
        self._part = part
        self._reopen = reopen
        self._moved = False

    def _ask(self, question: Callable[[ReadStore], _T]) -> _T:
        """Ask the store; the file if the trace has become a file, perhaps while the Zarr trace was asked."""
        if not self._moves():
            try:
                return question(self._store)
            except TraceError:
                if not self._moves():
                    raise
        return question(self._store)

    def _moves(self) -> bool:
        """Go on with the file if it is there; returns whether it is read now."""
        if not self._moved and is_file(self._file):
            store = self._reopen()
            self._store.close()
            self._store, self._moved = store, True
            self.checksums_chunks = store.checksums_chunks
        return self._moved

    @property
    def modified(self) -> float:
        """When the trace was last written."""
        return self._ask(lambda store: store.modified)

    @property
    def nbytes(self) -> int:
        """Bytes of the files of the trace."""
        return self._ask(lambda store: store.nbytes)

    def parts(self) -> list[str]:
        return [self._part] if self._part is not None else self._ask(lambda store: store.parts())

    def refresh(self) -> None:
        self._ask(lambda store: store.refresh())

    def names(self, prefix: str = "") -> list[str]:
        return self._ask(lambda store: store.names(prefix))

    def will_open(self, names: Sequence[str]) -> None:
        self._store.will_open(names)

    def will_read(self, ranges: Sequence[tuple[str, int, int]]) -> None:
        self._store.will_read(ranges)

    def length(self, name: str) -> int:
        return self._ask(lambda store: store.length(name))

    def row_shape(self, name: str) -> tuple[int, ...]:
        return self._ask(lambda store: store.row_shape(name))

    def dtype(self, name: str) -> str:
        return self._ask(lambda store: store.dtype(name))

    def read(
        self, name: str, start: int, stop: int, out: NDArray[Any] | None = None, *, verify: bool = True
    ) -> NDArray[Any]:
        return self._ask(lambda store: store.read(name, start, stop, out, verify=verify))

    def chunk_rows(self, name: str) -> int:
        return self._ask(lambda store: store.chunk_rows(name))

    def has_chunk(self, name: str, row: int) -> bool:
        return self._ask(lambda store: store.has_chunk(name, row))

    def stored_rows(self, name: str) -> int:
        return self._ask(lambda store: store.stored_rows(name))

    def attrs(self, name: str = "") -> dict[str, Any]:
        return self._ask(lambda store: store.attrs(name))

    def close(self) -> None:
        self._store.close()
