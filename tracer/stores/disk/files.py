"""Files and folders: whether they are there, which they are, and whether the disk has them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tracer.errors import TraceUnreadableError

UNREADABLE = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ESTALE})
"""Errors that say nothing about what is there, only that it cannot be read now, or by this user."""


def key_of(file: int) -> tuple[int, int]:
    """What no other file has as long as this one is open or mapped."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def is_there(path: Path) -> bool:
    """Whether something is at a path, or where a link there leads.

    Raises
    ------
    TraceUnreadableError
        If that cannot be told: a folder on the way may not be entered, or the name is too long.
    """
    try:
        path.stat()
    except ValueError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise TraceUnreadableError(f"cannot read {path}: {error.strerror or error}") from error
    return True


def make_folder(folder: Path, *, durable: bool) -> None:
    """Make a folder, and those above it, unless it is there; if `durable`, the disk has their names."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if durable:
        # one that is there may have been made just now, by another rank
        for one in reversed(new or [folder]):
            sync_folder(one.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in a folder."""
    sync_file(folder)


def sync_file(path: Path | str) -> None:
    """Wait until the disk has what is in a file."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
