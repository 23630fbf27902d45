"""The folder of a batch's results, on a disk or on an object store; its files are written atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, final

from tracer.errors import TraceError, TraceExistsError, TraceUnreadableError
from tracer.format.process import process_start
from tracer.stores.disk.files import open_file, replacing
from tracer.stores.locations import Anywhere, Url, location
from tracer.stores.opening import check_writable, remove

if TYPE_CHECKING:
    from tracer.stores.objects.client import Objects

LARGEST = 1 << 40
"""The most bytes that are read of a file on an object store."""


def folder_at(place: Anywhere) -> Folder:
    """The folder at a path or URL, which need not exist.

    Raises
    ------
    TraceExistsError
        If a file is at `place`.
    TraceFormatError
        If `place` is a URL that cannot be written to.
    """
    found = location(place)
    return _ObjectFolder(found) if isinstance(found, Url) else _DiskFolder(found)


class Folder(ABC):
    """Files and traces by their names, which may have slashes.

    Attributes
    ----------
    on_disk : bool
        Whether access to a file is cheap; on an object store it is a request.
    """

    on_disk: bool

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make(self) -> None:
        """Create the folder on a disk, so that an unwritable place is reported before any work.

        On an object store it does nothing, because an object store has no folders.

        Raises
        ------
        TraceError
            If the folder cannot be created or written to.
        """

    @abstractmethod
    def names(self, prefix: str) -> set[str]:
        """The names directly below a prefix, without the prefix and without unfinished files."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None if there is none.

        Raises
        ------
        TraceUnreadableError
            If it cannot be read, or is no file; a pipe is not waited for.
        """

    @abstractmethod
    def write(self, name: str, data: bytes, *, replace: bool = True) -> None:
        """Write a file atomically.

        Without `replace`, an object store keeps an existing file; a disk always replaces it.

        Raises
        ------
        TraceError
            If the file cannot be written.
        """

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files; names without a file are skipped."""

    @abstractmethod
    def trace(self, name: str) -> Path | Url:
        """The place of a trace in the folder; the trace need not exist."""

    @abstractmethod
    def remove_trace(self, name: str) -> None:
        """Remove a trace in the folder."""

    def sweep(self) -> None:
        """On a disk, remove the unfinished files of ended processes of this machine."""

    def close(self) -> None:
        """Close the connection to an object store, if there is one."""


@final
class _DiskFolder(Folder):
    """A folder on a disk: a file is written under a temporary name, and then renamed."""

    on_disk = True

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.normpath(path))
        if self._path.exists() and not self._path.is_dir():
            raise TraceExistsError(f"{path} is a file; a batch writes a folder of results")

    def __str__(self) -> str:
        return str(self._path)

    def make(self) -> None:
        parts = self._path / "parts"
        try:
            parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"{self._path} cannot be made: {error.strerror or error}") from error
        if not os.access(parts, os.W_OK):
            raise TraceError(f"{parts} cannot be written to")

    def names(self, prefix: str) -> set[str]:
        try:
            return {name for name in os.listdir(self._path / prefix) if not name.startswith(".")}
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise TraceUnreadableError(f"{self._path / prefix} cannot be listed: {error.strerror or error}") from error

    def read(self, name: str) -> bytes | None:
        try:
            with open(open_file(self._path / name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TraceUnreadableError(f"{self._path / name} cannot be read: {error.strerror or error}") from error

    def write(self, name: str, data: bytes, *, replace: bool = True) -> None:
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
        for name in names:
            try:
                (self._path / name).unlink(missing_ok=True)
            except IsADirectoryError:
                pass  # not a file of a batch
            except OSError as error:
                raise TraceError(f"{self._path / name} cannot be removed: {error.strerror or error}") from error

    def trace(self, name: str) -> Path:
        return self._path / name

    def remove_trace(self, name: str) -> None:
        shutil.rmtree(self._path / name, ignore_errors=True)

    def sweep(self) -> None:
        parts = self._path / "parts"
        if not parts.is_dir():
            return
        ours = f".{socket.gethostname()}."
        for name in os.listdir(parts):
            front, _, pid = name.removesuffix(".tmp").rpartition(".")
            begun = name.startswith(".") and name.endswith(".tmp") and f"{front}.".endswith(ours)
            if begun and pid.isdigit() and process_start(int(pid)) is None:
                with contextlib.suppress(OSError):
                    (parts / name).unlink()


@final
class _ObjectFolder(Folder):
    """A folder on an object store: a file is an object, which the store writes atomically."""

    on_disk = False

    def __init__(self, url: Url) -> None:
        check_writable(url / "results.zarr")
        from tracer.stores.objects.client import Objects

        self._url = url
        self._objects: Objects = Objects(url)

    def __str__(self) -> str:
        return str(self._url)

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
