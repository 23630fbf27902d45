"""Creates, finds, opens and removes HDF5 traces, also those that are still Zarr traces beside their path."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import h5py
from numpy.typing import NDArray

from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreadableError,
)
from tracer.format.names import PART
from tracer.stores.disk import LocalFile, again, is_file, is_folder, is_there, listed, shortened
from tracer.stores.errors import OF_HDF5, reason, write_errors
from tracer.stores.hdf5.reading import Hdf5ReadStore
from tracer.stores.hdf5.writing import Hdf5WriteStore
from tracer.stores.locations import FIRST_PART, beside, part_in
from tracer.stores.protocols import ReadStore
from tracer.stores.zarr import store as zarr

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


SIGNATURE = b"\x89HDF\r\n\x1a\n"
ROOT = b"OHDR"
"""What follows the superblock in the files that are written here: the header of the root group."""
HEAD_BYTES = 48 + len(ROOT)
"""Bytes of the superblock, and of `ROOT` behind it."""


def create(path: Path, *, part: str | None = None, overwrite: bool = False, durable: bool = False) -> Hdf5WriteStore:
    """Begin an HDF5 file at `path`, or the file of a part beside it; see `tracer.stores.opening.create_store`."""
    path = _itself(path) if part is not None else path
    file = path if part is None else file_of(path, part)
    folder = folder_of(path)
    mine = folder if part is None else folder / part
    old = is_there(file) or file.is_symlink()
    if not overwrite:
        if old or is_folder(mine):
            raise TraceExistsError.at(file)
        others = [other.name for other in files(path) if other != path]
        if part is None and others:
            raise TraceExistsError(f"{path} has a part beside it already, {others[0]}")
    elif old and (file.is_symlink() or not is_file(file) or not h5py.is_hdf5(file)):
        raise TraceExistsError(f"{file} already exists, and is not an HDF5 file that could be overwritten")
    place = zarr.cleared(folder, part=part, overwrite=overwrite, durable=durable)
    try:
        store = Hdf5WriteStore(file, place, part)
        with write_errors(file):
            _remove_leftovers(file)
            file.unlink(missing_ok=True)
    except BaseException:
        place.discard()
        raise
    return store


def blank(path: Path) -> bool:
    """Whether only an unused Zarr trace is beside `path`; see `tracer.stores.opening.blank`."""
    return files(path) == [path] and not is_there(path) and zarr.blank(folder_of(path))


def remove_part(path: Path, part: str) -> None:
    """Remove the file of a part, or what became of it so far; see `tracer.stores.opening.remove_part`."""
    file = file_of(path, part)
    with write_errors(file, OF_HDF5):
        file.unlink(missing_ok=True)
    zarr.remove_part(folder_of(path), part)


def open(path: Path, *, damaged: bool = False) -> ReadStore:
    """Open the HDF5 file at `path`, or the Zarr trace or its part that is to become one.

    See `tracer.stores.opening.open_store`.
    """
    if PART.fullmatch(path.name):
        # a part in the folder of a trace: see `files`
        trace, part = path.parent.with_suffix(""), path.name
        return _followed(file_of(trace, part), path.parent, part, damaged=damaged)
    if not is_there(path):
        if is_folder(folder_of(path)):
            return _followed(path, folder_of(path), None, damaged=damaged)
        raise TraceNotFoundError(f"there is no trace at {path}")
    if not is_file(path):
        raise TraceFormatError(f"{path} is not a file; an HDF5 trace is one")
    return _open_file(path, damaged=damaged)


def _followed(path: Path, folder: Path, part: str | None, *, damaged: bool) -> ReadStore:
    store = zarr.open(folder, damaged=damaged)
    return FollowedStore(path, store, part, functools.partial(_open_file, path, damaged=damaged))


def _open_file(path: Path, *, damaged: bool) -> Hdf5ReadStore:
    try:
        file = LocalFile(path)
    except OSError as error:
        raise TraceUnreadableError(f"cannot read {path}: {reason(error)}") from error
    try:
        try:
            head = bytearray(HEAD_BYTES)
            file.readinto(memoryview(head), 0)
        except OSError as error:
            raise TraceUnreadableError(f"cannot read {path}: {reason(error)}") from error
        # stricter than HDF5, which accepts a signature at a later offset, too
        if not head.startswith(SIGNATURE):
            if head.endswith(ROOT):
                why = "begins as a trace does, but its first bytes are not those of an HDF5 file"
                raise TraceCorruptError(f"{file.path} {why}")
            raise TraceFormatError(f"{file.path} is not an HDF5 file")
        return Hdf5ReadStore(file, damaged=damaged)
    except BaseException:
        file.close()
        raise


def folder_of(path: Path) -> Path:
    """The Zarr trace in which the trace at `path` is recorded: ``run.h5.zarr`` for ``run.h5``."""
    path = _itself(path)
    return path.with_name(f"{shortened(path.name)}.zarr")


def file_of(path: Path, part: str) -> Path:
    """The file of a part: ``run.h5`` for the first part, ``run.rank1.h5`` and so on for others."""
    if part == FIRST_PART:
        return path
    path = _itself(path)
    return path.with_name(f"{path.stem}.{part}{path.suffix}")


def _itself(path: Path) -> Path:
    """The target of a link, which other parts lie beside; any other path as it is."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def files(path: Path) -> list[Path]:
    """The file at `path`, if it exists, the files of other parts beside it, and parts that are not files yet."""
    there = _itself(path)
    try:
        names = again(lambda: os.listdir(there.parent))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise TraceUnreadableError(f"{there.parent} cannot be listed: {error.strerror}") from error
    found = [there.with_name(name) for name in beside(there, names)]
    parts = [FIRST_PART] if is_there(path) else []
    parts += [part_in(file.name) for file in found]
    folder = folder_of(path)
    found += [folder / name for name in sorted(listed(folder)) if PART.fullmatch(name) and name not in parts]
    return [path, *found] if is_there(path) or not found else found


def _remove_leftovers(file: Path) -> None:
    """Remove the temporary files of earlier writers that were killed while they made this file."""
    temporary = re.compile(rf"\.{re.escape(shortened(file.name))}(\.[0-9a-f]{{8}})?\.(part|copy)")
    for name in filter(temporary.fullmatch, os.listdir(file.parent)):
        with contextlib.suppress(OSError):
            file.with_name(name).unlink()
