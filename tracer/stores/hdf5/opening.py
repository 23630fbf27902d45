"""Opens files with HDF5 that another process writes, or whose writer was killed."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from typing import Any

import h5py
from h5py._objects import phil

from tracer.errors import TraceCorruptError
from tracer.stores.disk.files import key_of
from tracer.stores.hdf5.mended import Mended, Plain, head_of
from tracer.stores.hdf5.superblock import cut_off, is_unfinished
from tracer.stores.protocols import ByteFile

_FOLLOWED: weakref.WeakValueDictionary[tuple[int, int], Any] = weakref.WeakValueDictionary()
"""The files that this process reads while they are written, by their keys (see `key_of`)."""


def is_followed(file: ByteFile) -> bool:
    """Whether another reader of this process has a file open that may have grown since.

    HDF5 opens a file that is open in the process by showing what was read of it before, and loses its way where one of
    several that have it open looks anew.
    """
    if file.descriptor is None:
        return False
    other = _FOLLOWED.get(key_of(file.descriptor))
    return other is not None and bool(other)


def open_both(file: ByteFile) -> Any:
    """Open a file by HDF5: the same one that `file` reads, though the first commits put another in its place."""
    while True:
        file.hold()
        found = open_plainly(file)
        # a file that was replaced never returns, so if it is there before and after, HDF5 has opened it
        if file.is_current():
            if found.swmr_mode and file.descriptor is not None:
                _FOLLOWED[key_of(file.descriptor)] = found
            return found
        found.close()


def open_plainly(file: ByteFile) -> Any:
    """Open a file by HDF5, which opens by itself what lies on a disk."""
    if file.descriptor is not None:
        # h5py's lock: no other thread may open the file in another mode between the tries, or call HDF5 meanwhile
        with phil:
            return _open_on_disk(file)
    _check_length(file)
    # HDF5 would refuse a file whose writer was killed as one that is being written; objects are never being written
    return h5py.File((Mended if is_unfinished(head_of(file)) else Plain)(file), "r")


def _check_length(file: ByteFile) -> None:
    problems = cut_off(head_of(file), file.size())
    if problems:
        raise TraceCorruptError(f"{file.path}: {problems[0]}")


def _open_on_disk(file: ByteFile) -> Any:
    # Plainly first: a process can open a file twice only in the same mode, and most programs open files plainly. SWMR
    # is for files that are being written or whose writer was killed, and the last try for file systems without locks.
    for swmr, locking in ((False, True), (True, True), (True, False)):
        access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
        access.set_libver_bounds(h5py.h5f.LIBVER_LATEST, h5py.h5f.LIBVER_LATEST)
        if not locking:
            access.set_file_locking(False, ignore_when_disabled=False)
        _bound_retries(access)
        flags = h5py.h5f.ACC_RDONLY | (h5py.h5f.ACC_SWMR_READ if swmr else 0)
        try:
            return h5py.File(h5py.h5f.open(os.fsencode(str(file.path)), flags, fapl=access))
        except (OSError, UnicodeDecodeError):
            # UnicodeDecodeError: a garbage collection while h5py builds the error may free the text of the error
            if not swmr:
                # in the other modes a file that was cut off opens, and its lost part reads as if it had never been
                # there
                _check_length(file)
            if not locking:
                raise
    raise AssertionError("the last way to open a file returns or raises")


@functools.cache
def _set_read_attempts() -> Any:
    """A function of HDF5 that h5py does not offer, but is linked with; None where it is not."""
    function = getattr(ctypes.CDLL(h5py.h5p.__file__), "H5Pset_metadata_read_attempts", None)
    if function is not None:
        function.argtypes = (ctypes.c_int64, ctypes.c_uint)
    return function


def _bound_retries(access: Any) -> None:
    """Let HDF5 read metadata that fails its checksum again for 20 ms, as a file that is being written needs.

    By default it waits twice as long each time, a hundred times, which no damaged file would survive to tell of.
    """
    function = _set_read_attempts()
    if function is not None:
        function(access.id, 24)
