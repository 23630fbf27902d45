"""Creates, finds, opens and removes HDF5 traces."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import h5py

from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreadableError,
)
from tracer.stores.disk.files import LocalFile, again, is_file, is_there, make_folder
from tracer.stores.errors import OF_HDF5, reason, write_errors
from tracer.stores.hdf5.mended import head_of
from tracer.stores.hdf5.reading import Hdf5ReadStore
from tracer.stores.hdf5.superblock import SIGNATURE, looks_like_ours
from tracer.stores.hdf5.writing import Hdf5WriteStore
from tracer.stores.locations import FIRST_PART, beside

ABSENT_RANKS = 64
"""In a folder that cannot be listed, the search for ranks ends after this many missing ranks in a row."""


def create(path: Path, *, part: str | None = None, overwrite: bool = False, durable: bool = False) -> Hdf5WriteStore:
    """Make an HDF5 file at `path`, or the file of a part beside it; see `tracer.stores.opening.create_store`."""
    if part is not None:
        path = file_of(path, part)
    else:
        beside = [file for file in files(path) if file != path]
        if beside and not overwrite:
            raise TraceExistsError(f"{path} has a part beside it already, {beside[0].name}")
    if is_there(path) or path.is_symlink():
        if not overwrite:
            raise TraceExistsError.at(path)
        if path.is_symlink() or not is_file(path) or not h5py.is_hdf5(path):
            raise TraceExistsError(f"{path} already exists, and is not an HDF5 file that could be overwritten")
    with write_errors(path, OF_HDF5):
        make_folder(path.parent, durable=durable)
        return Hdf5WriteStore(path, overwrite=overwrite, durable=durable)


def blank(path: Path) -> bool:
    """Always False: a file gets its name only when it holds a trace; see `tracer.stores.opening.blank`."""
    return False


def remove_part(path: Path, part: str) -> None:
    """Remove the file of a part; see `tracer.stores.opening.remove_part`."""
    file = file_of(path, part)
    with write_errors(file, OF_HDF5):
        file.unlink(missing_ok=True)


def open(path: Path, *, damaged: bool = False) -> Hdf5ReadStore:
    """Open the HDF5 file at `path`; see `tracer.stores.opening.open_store`."""
    if not is_there(path):
        raise TraceNotFoundError(f"there is no trace at {path}")
    if not is_file(path):
        raise TraceFormatError(f"{path} is not a file; an HDF5 trace is one")
    file = LocalFile(path)
    try:
        try:
            file.hold()
            head = head_of(file)
        except TraceError:
            raise
        except OSError as error:
            raise TraceUnreadableError(f"cannot read {file.path}: {reason(error)}") from error
        # stricter than HDF5, which accepts a signature at a later offset, too
        if head[: len(SIGNATURE)] != SIGNATURE:
            if not looks_like_ours(head):
                raise TraceFormatError(f"{file.path} is not an HDF5 file")
            if not damaged:
                why = "begins as a trace does, but its first bytes are not those of an HDF5 file"
                raise TraceCorruptError(f"{file.path} {why}")
        return Hdf5ReadStore(file, damaged=damaged)
    except BaseException:
        file.close()
        raise


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
    """The files of a trace: the file at `path`, if it exists, and the files of other parts beside it."""
    there = _itself(path)
    try:
        names = again(lambda: os.listdir(there.parent))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except PermissionError:  # files in the folder may still be readable
        names = list(_met(there))
    except OSError as error:
        raise TraceUnreadableError(f"{there.parent} cannot be listed: {error.strerror}") from error
    found = [there.with_name(name) for name in beside(there, names)]
    return [path, *found] if is_there(path) or not found else found


def _met(path: Path) -> Iterator[str]:
    """Names of part files in a folder that cannot be listed, found by trying ranks and attempts in order."""
    absent = 0
    for rank in itertools.count():
        attempts = itertools.count(1 if rank == 0 else 0)  # the first attempt of rank 0 is in the file at `path`
        parts = (f"rank{rank}.attempt{attempt}" if attempt else f"rank{rank}" for attempt in attempts)
        files = (path.with_name(f"{path.stem}.{part}{path.suffix}") for part in parts)
        there = list(itertools.takewhile(os.path.lexists, files))
        yield from (file.name for file in there)
        absent = 0 if there else absent + 1
        if absent > ABSENT_RANKS:
            return
