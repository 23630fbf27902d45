"""Opens HDF5 files, also those that another process is writing or whose writer was killed."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import weakref
from typing import Any

import h5py
from h5py._objects import phil

from tracer.errors import TraceCorruptError
from tracer.stores.disk.files import PASSING, LocalFile, key_of
from tracer.stores.errors import errno_of
from tracer.stores.hdf5.mended import head_of
from tracer.stores.hdf5.superblock import cut_off

_FOLLOWED: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
"""The files that this process has open in SWMR mode, by `key_of`."""
_OTHER_MODE = "SWMR read access flag not the same"
"""HDF5's words for a file that this process already has open in the other mode."""


def is_followed(file: LocalFile) -> bool:
    """Whether another reader of this process has the file open in SWMR mode, so that it may have grown since.

    A second open of a file in one process shares HDF5's cached metadata, which is out of date, and HDF5 gets confused
    when one of several readers refreshes it.
    """
    other = _FOLLOWED.get(key_of(file.descriptor))
    return other is not None and bool(other)


def open_both(file: LocalFile) -> Any:
    """Open by HDF5 the same file that `file` reads, although early commits of a writer replace the file at the path."""
    while True:
        file.hold()
        found = open_plainly(file)
        # A replaced file never returns to the path. So if it is at the path before and after, HDF5 has opened it.
        if file.is_current():
            if found.swmr_mode:
                _FOLLOWED[key_of(file.descriptor)] = found
            return found
        found.close()


def open_plainly(file: LocalFile) -> Any:
    """Open a file by HDF5, by its path."""
    # h5py's lock, so that no other thread calls HDF5, or opens the file in another mode, between the tries
    with phil:
        return _open_on_disk(file)


def _check_length(file: LocalFile) -> None:
    problems = cut_off(head_of(file), file.size())
    if problems:
        raise TraceCorruptError(f"{file.path}: {problems[0]}")


def _open_on_disk(file: LocalFile) -> Any:
    # Without SWMR first: a process can open a file twice only in the same mode, and most programs do not use SWMR. Then
    # with SWMR, for a file that is being written or whose writer was killed. Last without locks, for file systems that
    # have none.
    first = ""  # not the error itself, whose traceback would keep the reader
    for swmr, locking in ((False, True), (True, True), (True, False)):
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_libver_bounds(h5py.h5f.LIBVER_LATEST, h5py.h5f.LIBVER_LATEST)
        if not locking:
            access.set_file_locking(False, ignore_when_disabled=False)
        _bound_retries(access)
        flags = h5py.h5f.ACC_RDONLY | (h5py.h5f.ACC_SWMR_READ if swmr else 0)
        try:
            return h5py.File(h5py.h5f.open(os.fsencode(str(file.path)), flags, fapl=access))
        except (OSError, UnicodeDecodeError) as error:
            # UnicodeDecodeError: a garbage collection while h5py builds the error may free the error's text
            if errno_of(error) in PASSING:
                raise
            if swmr and _OTHER_MODE in str(error):
                # the file is open without SWMR, so the first try was right, and failed to read
                raise OSError(errno.EIO, f"a read failed: {first}") from error
            first = first or str(error)
            if not swmr:
                # with SWMR a truncated file would open, and its lost part would look as if it had never been written
                _check_length(file)
            if not locking:
                raise
    raise AssertionError("the last way to open a file returns or raises")


@functools.cache
def _set_read_attempts() -> Any:
    """A function of the HDF5 library that h5py does not wrap; None if it cannot be found."""
    function = getattr(ctypes.CDLL(h5py.h5p.__file__), "H5Pset_metadata_read_attempts", None)
    if function is not None:
        function.argtypes = (ctypes.c_int64, ctypes.c_uint)
    return function


def _bound_retries(access: Any) -> None:
    """Limit HDF5's retries of metadata that fails its checksum to 20 ms, which suffices while a file is being written.

    By default HDF5 retries a hundred times with doubled pauses, so it would practically never return for a damaged
    file.
    """
    function = _set_read_attempts()
    if function is not None:
        function(access.id, 24)
