"""Creates, finds, opens and removes stores, in the format that the suffix of the path names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, cast

from tracer.errors import TraceError, TraceExistsError, TraceFormatError, TraceUnreadableError
from tracer.stores.locations import Anywhere, Location, Url, location, part_in, whole_of
from tracer.stores.protocols import ReadStore, WriteStore

STORES: Mapping[str, str] = {".zarr": "zarr", ".h5": "hdf5", ".hdf5": "hdf5"}
"""The formats of traces, by their suffixes."""
_MODULES: Mapping[str, str] = {"zarr": "tracer.stores.zarr.store", "hdf5": "tracer.stores.hdf5.store"}
"""The module for each format, imported when it is first needed."""


class Backend(Protocol):
    """The functions of a module that handles one format."""

    def create(self, path: Any, *, part: str | None, overwrite: bool, durable: bool) -> WriteStore[Any]:
        """As `create_store`."""

    def open(self, path: Any, *, damaged: bool) -> ReadStore:
        """As `open_store`."""

    def files(self, path: Any) -> Sequence[Location]:
        """As `store_files`."""

    def blank(self, path: Any) -> bool:
        """As `blank`."""

    def remove_part(self, path: Any, part: str) -> None:
        """As `remove_part`."""


def exists(path: Location) -> bool:
    """Whether anything is at a path, even a broken link, or at or below a URL.

    Raises
    ------
    TraceError
        If an object store does not answer.
    """
    return bool(_zarr().exists(path)) if isinstance(path, Url) else os.path.lexists(path)


def blank(path: Location) -> bool:
    """Whether `path` holds only what a process leaves when it is killed while it creates a store."""
    return backend_of(path).blank(path)


def remove(url: Url) -> None:
    """Remove all objects of a trace.

    Raises
    ------
    TraceError
        If they cannot be removed.
    """
    _zarr().remove(url)


def _zarr() -> ModuleType:
    return importlib.import_module(_MODULES["zarr"])


def backend_of(path: Location) -> Backend:
    """The module that handles stores at `path`, by its suffix.

    Raises
    ------
    TraceFormatError
        If the suffix is unknown, or names HDF5 at a URL.
    """
    format_name = STORES.get(path.suffix.lower())
    if format_name is None:
        allowed = ", ".join(STORES)
        raise TraceFormatError(
            f"{path}: the suffix says how a trace is stored; it can be {allowed}, and there is {path.suffix or 'none'}"
        )
    if isinstance(path, Url) and format_name == "hdf5":
        raise TraceFormatError(
            f"{path}: an HDF5 trace can only be on a disk; copy the file to a disk, or use `trace convert` there, to a "
            "URL that ends in .zarr"
        )
    return cast(Backend, importlib.import_module(_MODULES[format_name]))


def check_writable(path: Location) -> None:
    """Raise `TraceFormatError` if the suffix or the kind of URL allows no writing."""
    backend_of(path)
    if isinstance(path, Url) and path.is_web:
        raise TraceFormatError(f"{path}: a trace can be read from an http server, and not be written there")


def create_store(
    path: Anywhere, *, part: str | None = None, overwrite: bool = False, durable: bool = False
) -> WriteStore[Any]:
    """Make a store at `path`, and its parent directories, in the format that the suffix names.

    Parameters
    ----------
    path : path or URL
    part : str, optional
        Make only this part (see `PART`) of a store whose other parts other processes write. A directory may exist
        already, without this part; a file format keeps each part in a file beside `path`. The process that sets the
        attributes of the root first determines them.
    overwrite : bool
        Whether an existing store of this format is removed first.
    durable : bool
        Whether `WriteStore.commit` waits until its data is on the disk, so that it survives a power failure.

    Raises
    ------
    TraceFormatError
        If the suffix is not one of `STORES`.
    TraceExistsError
        If something is at `path` and `overwrite` is false, or if it is not a store of this format.
    TraceError
        If the store cannot be written.
    """
    path = location(path)
    check_writable(path)
    return backend_of(path).create(path, part=part, overwrite=overwrite, durable=durable)


def store_files(path: Anywhere) -> list[Location]:
    """The directory or the files that hold the parts of the store at `path`; `path` itself if nothing exists."""
    path = location(path)
    return list(backend_of(path).files(path))


def refuse_part(path: Location) -> None:
    """Raise `TraceExistsError` if the name of `path` would make a new file a part of an existing trace."""
    whole = whole_of(path.name)
    if whole is not None and not isinstance(path, Url) and exists(path.with_name(whole)):
        raise TraceExistsError(f"{path} would be a part of {path.with_name(whole)}, by its name; give another one")


def remove_part(path: Anywhere, part: str) -> None:
    """Remove one part of the store at `path`, if it exists.

    Raises
    ------
    TraceError
        If it cannot be removed.
    """
    path = location(path)
    check_writable(path)
    backend_of(path).remove_part(path, part)


def open_store(path: Anywhere, *, damaged: bool = False) -> ReadStore:
    """Open the store at `path` for reading, in the format that its suffix names.

    Parameters
    ----------
    path : path or URL
    damaged : bool
        Whether to open a damaged store as far as possible. Unsafe content is still refused.

    Raises
    ------
    TraceNotFoundError
        If nothing is at `path`.
    TraceFormatError
        If it is not a store of this format, or has content that a trace never has and that is not safe to read.
    TraceCorruptError
        If it is damaged.
    """
    path = location(path)
    return backend_of(path).open(path, damaged=damaged)


def open_parts(path: Anywhere, *, damaged: bool = False) -> tuple[list[tuple[str, ReadStore]], dict[str, TraceError]]:
    """Open all parts of the store at `path`: a directory, or a file and the files of other parts beside it.

    Parameters
    ----------
    path : path or URL
    damaged : bool
        As in `open_store`.

    Returns
    -------
    parts : list of (str, ReadStore)
        Name of each part, and the store that holds it; a store may hold several parts.
    broken : dict of str to TraceError
        Files that could not be opened, by name, and why.

    Raises
    ------
    TraceError
        As `open_store`, if no part could be opened.
    """
    path = location(path)
    backend = backend_of(path)
    files = store_files(path)
    parts: list[tuple[str, ReadStore]] = []
    broken: dict[str, TraceError] = {}
    for file in files:
        try:
            store = backend.open(file, damaged=damaged)
        except TraceError as error:
            # of a part that cannot be read now nobody can say what is damaged or lost
            if len(files) == 1 or (damaged and isinstance(error, TraceUnreadableError)):
                raise
            broken[file.name] = error
            continue
        # a damaged store may have lost the names of its parts
        found = store.parts() or ([part_in(file.name)] if damaged else [])
        twice = {name for name, _ in parts}.intersection(found)
        if not found or twice:
            store.close()
            why = f"{', '.join(twice)} is in another file, too" if twice else "it has no group rank0"
            broken[file.name] = TraceFormatError(f"{file} is not a trace: {why}")
            continue
        parts += [(name, store) for name in found]
    if not parts:
        raise next(iter(broken.values()))
    return parts, broken
