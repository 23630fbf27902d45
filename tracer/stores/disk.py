"""Helpers for files and folders: existence, identity, syncing, listing, and files open for reading."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tracer.errors import TracerError, TraceUnreadableError

PASSING = frozenset({errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
"""Errors that may pass, as on a network file system whose server restarts: `again` tries once more."""
UNREADABLE = PASSING | {errno.EPERM, errno.EMFILE, errno.ENFILE}
"""Errors that mean that a file cannot be read now or by this user, not that it is missing or damaged."""
PAUSES = (0.02, 0.1, 0.3)
"""Seconds before each further try of what failed."""

_T = TypeVar("_T")


def again(call: Callable[[], _T]) -> _T:
    """Call a function of the system, and call it again, after a pause, if it fails with an error that may pass."""
    for pause in PAUSES:
        try:
            return call()
        except OSError as error:
            if error.errno not in PASSING or isinstance(error, TracerError):
                raise
        time.sleep(pause)
    return call()


def unreadable(path: Path | str, error: OSError) -> TraceUnreadableError:
    """The error for a file or folder that cannot be read."""
    return TraceUnreadableError(f"cannot read {path}: {error.strerror or error}")


def read_into(file: int, parts: Sequence[Any], offset: int) -> int:
    """Fill buffers, one after the other, with the bytes of a file from an offset on; returns how many there were.

    The system may return fewer bytes than there are, so only a read that returns none ends the reading.
    """
    size = sum(map(len, parts))
    try:
        done = os.preadv(file, parts, offset)
    except OSError as error:
        if error.errno not in PASSING:
            raise
        done = again(lambda: os.preadv(file, parts, offset))
    while 0 < done < size:
        rest, skipped = [], done
        for part in parts:
            rest += [memoryview(part)[skipped:]] if skipped < len(part) else []
            skipped = max(0, skipped - len(part))
        at = offset + done
        count = again(lambda rest=rest, at=at: os.preadv(file, rest, at))  # type: ignore[misc]
        if count == 0:
            break
        done += count
    return done


def read_bytes(file: int, nbytes: int, offset: int) -> bytes:
    """The bytes of a file from an offset on; fewer at its end."""
    target = bytearray(nbytes)
    return bytes(memoryview(target)[: read_into(file, [target], offset)])


def gone(path: Path) -> TraceUnreadableError:
    """The error for a reader whose files are no longer at their path, so that its open files are incomplete."""
    return TraceUnreadableError(f"{path} was removed, moved or overwritten while it was read")


def key_of(file: int) -> tuple[int, int]:
    """Device and inode number, which are unique while the file is open or mapped."""
    found = again(lambda: os.fstat(file))
    return found.st_dev, found.st_ino


def found_at(path: Path) -> os.stat_result | None:
    """What is at a path, with links followed; None for nothing.

    Raises
    ------
    TraceUnreadableError
        If that cannot be determined: no access to a parent folder, the name is too long, or the disk fails.
    """
    try:
        return again(path.stat)
    except ValueError:
        return None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise unreadable(path, error) from error


def is_there(path: Path) -> bool:
    """Whether something is at a path; see `found_at`."""
    return found_at(path) is not None


def is_folder(path: Path) -> bool:
    """Whether a folder is at a path; see `found_at`."""
    found = found_at(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_file(path: Path) -> bool:
    """Whether a regular file is at a path; see `found_at`."""
    found = found_at(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def walked(folder: Path | str) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, which passes over a folder that cannot be listed; here it raises `TraceUnreadableError`."""
    pending = [str(folder)]
    while pending:
        top = pending.pop()
        try:
            folders, files = again(partial(_folders_and_files, top))
        except OSError as error:
            if error.errno in UNREADABLE:
                raise TraceUnreadableError(f"{top} cannot be listed: {error.strerror}") from error
            continue
        yield top, folders, files
        below = [os.path.join(top, name) for name in reversed(folders)]
        pending += [one for one in below if not os.path.islink(one)]


def _folders_and_files(folder: str) -> tuple[list[str], list[str]]:
    folders: list[str] = []
    files: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            (folders if entry.is_dir() else files).append(entry.name)
    return folders, files


def make_folder(folder: Path, *, durable: bool) -> None:
    """Make a folder and its parents unless they exist; if `durable`, wait until their names are on the disk."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if durable:
        # If another rank has just made the folder, its name may not be on the disk yet.
        for one in reversed(new or [folder]):
            sync(one.parent)


def sync(path: Path | str) -> None:
    """Wait until the disk has the content of a file, or the names in a folder."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def shortened(name: str) -> str:
    """A name that leaves room for an ending: a file system allows 255 bytes. Names of up to 230 bytes stay."""
    raw = os.fsencode(name)
    return name if len(raw) <= 230 else f"{os.fsdecode(raw[:200])}~{hashlib.sha256(raw).hexdigest()[:8]}"


def create_beside(path: Path, ending: str) -> Path:
    """Make an empty hidden file beside `path`, named at random, and return its path.

    It is never a file or a link that somebody else put there: the name of such a thing is taken, and another is tried.
    """
    while True:
        made = path.with_name(f".{shortened(path.name)}.{os.urandom(4).hex()}{ending}")
        with suppress(FileExistsError):
            os.close(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
            return made


@contextmanager
def replacing(path: Path, ending: str) -> Iterator[Path]:
    """A new file from `create_beside`, which replaces `path` if the block succeeds, and is removed otherwise."""
    made = create_beside(path, ending)
    try:
        yield made
        os.replace(made, path)
    except BaseException:
        with suppress(OSError):
            made.unlink()
        raise


def remove_folder(folder: Path, beside: Path) -> None:
    """Remove a folder of a trace at once: it is renamed to a hidden name beside the trace before its files go.

    So a kill meanwhile leaves no half of a trace, but a hidden folder, which `remove_leftovers` removes.
    """
    hidden = beside.with_name(f".{shortened(beside.name)}.{os.urandom(4).hex()}.removed")
    os.rename(folder, hidden)
    shutil.rmtree(hidden)


def remove_leftovers(path: Path) -> None:
    """Remove the hidden folders that killed calls of `remove_folder` left beside `path`, as far as possible."""
    hidden = re.compile(rf"\.{re.escape(shortened(path.name))}\.[0-9a-f]{{8}}\.removed")
    with suppress(OSError):
        for name in filter(hidden.fullmatch, os.listdir(path.parent)):
            shutil.rmtree(path.with_name(name), ignore_errors=True)


def open_file(path: Path) -> int:
    """Open a regular file for reading; raises `OSError` for anything else (opening a pipe would block)."""

    def opened() -> int:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
        except BaseException:
            os.close(file)
            raise
        return file

    return again(opened)


class OpenFile:
    """Owns the descriptor of an open file or folder, and closes it when the object is freed."""

    __slots__ = ("file",)

    def __init__(self, file: int) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        raise TypeError("open files cannot be copied or pickled; open the trace once more")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound now: modules are emptied at exit
        close(self.file)


class Folder(OpenFile):
    """The folder of a part, kept open so that its inode number is not reused for a new folder at the path."""

    __slots__ = ("_path",)

    def __init__(self, path: Path, file: int) -> None:
        super().__init__(file)
        self._path = path

    @classmethod
    def of(cls, path: Path) -> Folder | None:
        """Open the folder at a path; None if that fails, as on a system that cannot open folders."""
        try:
            return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return None

    def is_there(self) -> bool:
        """Whether this folder is still the folder at its path."""
        try:
            return again(lambda: os.path.samestat(os.stat(self._path), os.fstat(self.file)))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise unreadable(self._path, error) from error


def listed(folder: Path) -> list[str]:
    """The names in a folder; empty if the folder does not exist."""
    try:
        return again(lambda: os.listdir(folder))
    except OSError as error:
        if error.errno in UNREADABLE:
            raise TraceUnreadableError(f"{folder} cannot be listed: {error.strerror}") from error
        return []


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    found = 0
    for parent, _, files in walked(folder):
        for name in files:
            # a writer may have renamed the file meanwhile
            with suppress(FileNotFoundError):
                found += os.lstat(os.path.join(parent, name)).st_size
    return found


class LocalFile:
    """A file on a disk, kept open, so that it stays the same file when another one is put at its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: OpenFile | None = OpenFile(again(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC)))

    def is_current(self) -> bool:
        """Whether the open file is still the file at the path."""
        return os.path.samestat(self.stat(), again(lambda: os.fstat(self._descriptor())))

    def stat(self) -> os.stat_result:
        """What is at the path now."""
        try:
            return again(lambda: os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise gone(self.path) from error
        except OSError as error:
            raise unreadable(self.path, error) from error

    def readinto(self, target: memoryview, offset: int) -> int:
        """Read bytes from an offset on; returns how many were read."""
        return read_into(self._descriptor(), [target], offset)

    def close(self) -> None:
        """Close the file. Closing again does nothing."""
        self._file = None

    def _descriptor(self) -> int:
        return -1 if self._file is None else self._file.file
