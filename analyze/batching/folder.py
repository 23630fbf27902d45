"""The folder of a batch's results, on a disk or on an object store: files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, final

from tracer.errors import TraceError, TraceExistsError
from tracer.format.process import process_start
from tracer.stores import Anywhere, Url, check_writable, location, remove

if TYPE_CHECKING:
    from tracer.stores.objects import Objects

LARGEST = 1 << 40
"""Bytes of a file on an object store, at most."""


@final
class Folder:
    """Files by their names, which may have slashes.

    Parameters
    ----------
    place : path or URL

    Raises
    ------
    TraceExistsError
        If a file is at `place`.
    TraceFormatError
        If it is a URL where nothing can be written.
    """

    def __init__(self, place: Anywhere) -> None:
        found = location(place)
        self.objects: Objects | None = None
        self.path: Path | Url
        if isinstance(found, Url):
            check_writable(found / "results.zarr")
            from tracer.stores.objects import Objects

            self.objects = Objects(found)
            self.path = found
        else:
            self.path = Path(os.path.normpath(found))
            if self.path.exists() and not self.path.is_dir():
                raise TraceExistsError(f"{found} is a file; a batch writes a folder of results")

    def __str__(self) -> str:
        return str(self.path)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def on_disk(self) -> bool:
        """Whether a look at a file is cheap; on an object store it is a request."""
        return self.objects is None

    def make(self) -> None:
        """Make the folder on a disk, so that it is known before any work is done whether it can be written to.

        Raises
        ------
        TraceError
            If it cannot.
        """
        if isinstance(self.path, Path):
            try:
                (self.path / "parts").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TraceError(f"{self.path} cannot be made: {error.strerror or error}") from error
            if not os.access(self.path / "parts", os.W_OK):
                raise TraceError(f"{self.path / 'parts'} cannot be written to")

    def names(self, prefix: str) -> set[str]:
        """The names of what is directly below a prefix, without it; files that are being written are not there."""
        if self.objects is not None and not prefix:
            return set(self.objects.names())
        if self.objects is not None:
            found = (one.name.removeprefix(f"{prefix}/") for one in self.objects.listed(prefix))
            return {name for name in found if "/" not in name}
        assert isinstance(self.path, Path)
        try:
            return {name for name in os.listdir(self.path / prefix) if not name.startswith(".")}
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes | None:
        """The bytes of a file; None if there is none."""
        if self.objects is not None:
            part = self.objects.get(name, nbytes=LARGEST)
            return None if part is None else bytes(part.data)
        assert isinstance(self.path, Path)
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes, *, replace: bool = True) -> None:
        """Write a file at once; one that is there stays if it is not to be replaced.

        Raises
        ------
        TraceError
            If it cannot be written.
        """
        if self.objects is not None:
            if replace:
                self.objects.put(name, data)
            else:
                # somebody else may have computed the same: then that is it
                with contextlib.suppress(TraceExistsError):
                    self.objects.put_new(name, data)
            return
        assert isinstance(self.path, Path)
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError as error:
            raise TraceError(f"{target} cannot be written: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are removed already."""
        names = list(names)
        if self.objects is not None:
            if names:
                self.objects.delete(names)
            return
        assert isinstance(self.path, Path)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).unlink()

    def trace(self, name: str) -> Path | Url:
        """The place of a trace in the folder."""
        return self.path.joinpath(*name.split("/"))

    def new_trace(self, name: str) -> Path | Url:
        """The place of a trace that is to be written: on a disk, the folder that it comes into is made."""
        place = self.trace(name)
        if isinstance(place, Path):
            place.parent.mkdir(exist_ok=True)
        return place

    def remove_trace(self, name: str) -> None:
        """Remove a trace in the folder."""
        if isinstance(self.path, Url):
            remove(self.path / name)
        else:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what processes of this machine that are gone had begun to write."""
        if not isinstance(self.path, Path) or not (self.path / "parts").is_dir():
            return
        ours = f".{socket.gethostname()}."
        for name in os.listdir(self.path / "parts"):
            front, _, pid = name.removesuffix(".tmp").rpartition(".")
            begun = name.startswith(".") and name.endswith(".tmp") and f"{front}.".endswith(ours)
            if begun and pid.isdigit() and process_start(int(pid)) is None:
                with contextlib.suppress(OSError):
                    (self.path / "parts" / name).unlink()

    def close(self) -> None:
        """End what reaches the object store."""
        if self.objects is not None:
            self.objects.close()
