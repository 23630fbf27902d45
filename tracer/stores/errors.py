"""What fails while a store is written or read, as errors of the trace."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from tracer.errors import TraceCorruptError, TraceError, TraceUnreadableError
from tracer.stores.disk.files import UNREADABLE
from tracer.stores.locations import Location

OF_HDF5 = (OSError, RuntimeError, ValueError, KeyError)
"""What HDF5 raises where it cannot write."""


@contextlib.contextmanager
def write_errors(path: Location, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise `TraceError` for those of some errors that come up while a file is written."""
    try:
        yield
    except TraceError:
        raise
    except errors as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Location, error: Exception) -> TraceError:
    """The error of a file that cannot be written."""
    return TraceError(f"cannot write {path}: {reason(error)}")


@contextlib.contextmanager
def read_errors(path: Location, what: str) -> Iterator[None]:
    """Raise `TraceCorruptError` or `TraceUnreadableError` for what fails while something is read."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:  # on damaged metadata h5py raises almost anything
        why = f"{path}: {what} cannot be read: {reason(error)}"
        raise (TraceUnreadableError if errno_of(error) in UNREADABLE else TraceCorruptError)(why) from error


def reason(error: BaseException) -> str:
    r"""Why something failed, on one line: HDF5 tells the system's reason between the addresses of its buffers.

    Examples
    --------
    >>> reason(RuntimeError("Can't write data (file write failed: time = Mon\n, errno = 28, buf = 0x7f00)"))
    'No space left on device'
    """
    number = errno_of(error)
    return os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__


def errno_of(error: BaseException) -> int | None:
    """The system's number of an error, where HDF5 or Python tells it."""
    found = re.search(r"\berrno = (\d+)", str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return None if found is None else int(found[1])
