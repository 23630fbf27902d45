"""Turns errors of the system, HDF5 and h5py into errors of the trace (`tracer.errors`)."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from tracer.errors import TraceCorruptError, TraceError, TraceUnreadableError
from tracer.stores.disk import UNREADABLE
from tracer.stores.locations import Location

OF_HDF5 = (OSError, RuntimeError, ValueError, KeyError)
"""Errors that h5py raises when a write fails."""


@contextlib.contextmanager
def write_errors(path: Location, errors: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Turn these errors into `TraceError` while the block writes a file."""
    try:
        yield
    except TraceError:
        raise
    except errors as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Location, error: Exception) -> TraceError:
    """The `TraceError` for a failed write."""
    return TraceError(f"cannot write {path}: {reason(error)}")


@contextlib.contextmanager
def read_errors(path: Location, what: str) -> Iterator[None]:
    """Turn any error of the block into `TraceCorruptError`, or `TraceUnreadableError` if `is_unreadable`."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:  # h5py raises almost any exception on damaged metadata
        why = f"{path}: {what} cannot be read: {reason(error)}"
        raise (TraceUnreadableError if is_unreadable(error) else TraceCorruptError)(why) from error


def is_unreadable(error: BaseException) -> bool:
    """Whether an error means that a file cannot be read now or by this user, not that it is missing or damaged."""
    return isinstance(error, TraceUnreadableError) or errno_of(error) in UNREADABLE


def reason(error: BaseException) -> str:
    r"""The cause of an error on one line: the system's text for an errno, else the error's own text.

    HDF5 hides the errno in a long text with buffer addresses.

    Examples
    --------
    >>> reason(RuntimeError("Can't write data (file write failed: time = Mon\n, errno = 28, buf = 0x7f00)"))
    'No space left on device'
    """
    number = errno_of(error)
    return os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__


def errno_of(error: BaseException) -> int | None:
    """The errno of an error, from Python or from the text of an HDF5 error; None if it has none."""
    found = re.search(r"\berrno = (\d+)", str(error))
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return None if found is None else int(found[1])
