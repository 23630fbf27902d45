"""The folder of a batch's results, on a disk or on an object store; its files are written atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, final

from tracer.errors import TraceError, TraceExistsError, TraceUnreadableError
from tracer.format.process import process_start
from tracer.stores.disk import open_file, replacing
from tracer.stores.locations import Anywhere, Url, location
from tracer.stores.opening import check_writable, remove

if TYPE_CHECKING:
    from tracer.stores.objects import Objects

LARGEST = 1 << 40
"""The most bytes that are read of a file on an object store."""


@final
class DiskFolder:
    """A folder on a disk: files and traces by their names, which may have slashes.

    A file is written under a temporary name, and then renamed.

    Attributes
    ----------
    on_disk : bool
        Whether access to a file is cheap; on an object store it is a request.
    """

    on_disk = True

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.normpath(path))
        if self._path.exists() and not self._path.is_dir():
            raise TraceExistsError(f"{path} is a file; a batch writes a folder of results")

    def __str__(self) -> str:
        return str(self._path)

    def make(self) -> None:
        """Create the folder, so that an unwritable place is reported before any work.

        Raises
        ------
        TraceError
            If the folder cannot be created or written to.
        """
        parts = self._path / "parts"
        try:
            parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"{self._path} cannot be made: {error.strerror or error}") from error
        if not os.access(parts, os.W_OK):
            raise TraceError(f"{parts} cannot be written to")

    def names(self, prefix: str) -> set[str]:
        """The names directly below a prefix, without the prefix and without unfinished files."""
        try:
            return {name for name in os.listdir(self._path / prefix) if not name.startswith(".")}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise TraceUnreadableError(f"{self._path / prefix} cannot be listed: {error.strerror or error}") from error

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None if there is none.

        Raises
        ------
        TraceUnreadableError
            If it cannot be read, or is no file; a pipe is not waited for.
        """
        try:
            with open(open_file(self._path / name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TraceUnreadableError(f"{self._path / name} cannot be read: {error.strerror or error}") from error

    def write(self, name: str, data: bytes, *, replace: bool = True) -> None:
        """Write a file atomically.

        Without `replace`, an object store keeps an existing file; a disk always replaces it.

        Raises
        ------
        TraceError
            If the file cannot be written.
        """
        target = self._path / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target, f".{socket.gethostname()}.{os.getpid()}.tmp") as temporary:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise TraceError(f"{target} cannot be written: {error.strerror or error}") from error

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; names without a file are skipped."""
        for name in names:
            try:
                (self._path / name).unlink(missing_ok=True)
            except IsADirectoryError:
                pass  # not a file of a batch
            except OSError as error:
                raise TraceError(f"{self._path / name} cannot be removed: {error.strerror or error}") from error

    def trace(self, name: str) -> Path:
        """The place of a trace in the folder; the trace need not exist."""
        return self._path / name

    def remove_trace(self, name: str) -> None:
        """Remove a trace in the folder."""
        shutil.rmtree(self._path / name, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the unfinished files of ended processes of this machine."""
        ours = f".{socket.gethostname()}."
        for path in (*self._path.glob(".*.tmp"), *self._path.glob("parts/.*.tmp")):
            front, _, pid = path.stem.rpartition(".")
            if f"{front}.".endswith(ours) and pid.isdigit() and process_start(int(pid)) is None:
                with contextlib.suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Do nothing: there is no connection."""


@final
class ObjectFolder:
    """A folder on an object store, with the methods of `DiskFolder`: the store writes each file atomically."""

    on_disk = False

    def __init__(self, url: Url) -> None:
        check_writable(url / "results.zarr")
        from tracer.stores.objects import Objects

        self._url = url
        self._objects: Objects = Objects(url)

    def __str__(self) -> str:
        return str(self._url)

    def make(self) -> None:
        """Do nothing: an object store has no folders."""

    def sweep(self) -> None:
        """Do nothing: an object store has no unfinished files."""

    def names(self, prefix: str) -> set[str]:
        if not prefix:
            return set(self._objects.names())
        found = (one.name.removeprefix(f"{prefix}/") for one in self._objects.listed(prefix))
        return {name for name in found if "/" not in name}

    def read(self, name: str) -> bytes | None:
        part = self._objects.get(name, nbytes=LARGEST)
        return None if part is None else bytes(part.data)

    def write(self, name: str, data: bytes, *, replace: bool = True) -> None:
        if replace:
            self._objects.put(name, data)
        else:
            # keep the same answers if another process has stored them
            with contextlib.suppress(TraceExistsError):
                self._objects.put_new(name, data)

    def remove(self, names: Iterable[str]) -> None:
        names = list(names)
        if names:
            self._objects.delete(names)

    def trace(self, name: str) -> Url:
        return self._url / name

    def remove_trace(self, name: str) -> None:
        remove(self.trace(name))

    def close(self) -> None:
        self._objects.close()


Folder: TypeAlias = DiskFolder | ObjectFolder


@contextlib.contextmanager
def folder_at(place: Anywhere) -> Iterator[Folder]:
    """The folder at a path or URL, which need not exist.

    Raises
    ------
    TraceExistsError
        If a file is at `place`.
    TraceFormatError
        If `place` is a URL that cannot be written to.
    """
    found = location(place)
    folder = ObjectFolder(found) if isinstance(found, Url) else DiskFolder(found)
    with contextlib.closing(folder):
        yield folder
