"""Stores are made, found, opened and removed here, in the format that the suffix of their path names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from types import ModuleType
from typing import cast

from tracer.errors import TraceError, TraceExistsError, TraceFormatError
from tracer.stores.locations import Anywhere, Location, Url, location, part_in, whole_of
from tracer.stores.protocols import ReadStore, WriteStore

STORES: Mapping[str, str] = {
    ".zarr": "tracer.stores.zarr",
    ".h5": "tracer.stores.hdf5",
    ".hdf5": "tracer.stores.hdf5",
}
"""Which module stores traces of which suffix; a module is imported when a store of its suffix is first opened."""


WRITER = "writer"
"""The only attribute of a root on an object store that was put so that no other process does, and holds nothing yet."""


def exists(path: Location) -> bool:
    """Whether anything is at a path, be it a broken link, or at or below a URL.

    Raises
    ------
    TraceError
        If an object store does not answer.
    """
    return bool(_objects().exists(path)) if isinstance(path, Url) else os.path.lexists(path)


def blank(path: Location) -> bool:
    """Whether all that is at `path` is what a process left that was killed before its part of a store was there."""
    return bool(store_module(path).blank(path))


def remove(url: Url) -> None:
    """Remove all objects of a trace that was just written there.

    Raises
    ------
    TraceError
        If they cannot be removed.
    """
    _objects().remove(url)


def _objects() -> ModuleType:
    return importlib.import_module("tracer.stores.objects")


def store_module(path: Location) -> ModuleType:
    """The module that reads and writes stores with the suffix of `path`; `TraceFormatError` if there is none."""
    name = STORES.get(path.suffix.lower())
    if name is None:
        allowed = ", ".join(STORES)
        raise TraceFormatError(
            f"{path}: the suffix says how a trace is stored; it can be {allowed}, and there is {path.suffix or 'none'}"
        )
    return _objects() if isinstance(path, Url) else importlib.import_module(name)


def check_writable(path: Location) -> None:
    """Raise `TraceFormatError` where no trace can be written, because of the suffix or the kind of URL."""
    module = store_module(path)
    if isinstance(path, Url):
        module.check_writable(path)


def create_store(
    path: Anywhere, *, part: str | None = None, overwrite: bool = False, durable: bool = False
) -> WriteStore:
    """Make a store at `path`, in the format that its suffix names. Parent directories are made.

    Parameters
    ----------
    path : path or URL
    part : str, optional
        Make only this part of a store that other processes write other parts of (see `PART`). A directory may be there
        then, without this part; a file format keeps it in a file of its own beside `path`. The attributes of the root
        are those that were set first.
    overwrite : bool
        Whether a store of this format that is already there is removed first.
    durable : bool
        Whether `WriteStore.commit` waits until the disk has what it publishes, which is then there after a power
        failure too.

    Raises
    ------
    TraceFormatError
        If the suffix is not one of `STORES`.
    TraceExistsError
        If something is at `path` and `overwrite` is false, or if it is not a store of this format.
    TraceError
        If nothing can be written there.
    """
    path = location(path)
    return cast(WriteStore, store_module(path).create(path, part=part, overwrite=overwrite, durable=durable))


def store_files(path: Anywhere) -> list[Location]:
    """The directory, or the files, that the parts of the store at `path` are in; `path` itself if there are none."""
    path = location(path)
    return cast("list[Location]", store_module(path).files(path))


def refuse_part(path: Location) -> None:
    """Raise `TraceExistsError` if, by its name, what is to be written at `path` would be a part of a trace there."""
    whole = whole_of(path.name)
    if whole is not None and not isinstance(path, Url) and exists(path.with_name(whole)):
        raise TraceExistsError(f"{path} would be a part of {path.with_name(whole)}, by its name; give another one")


def remove_part(path: Anywhere, part: str) -> None:
    """Remove one part of the store at `path`, if it is there.

    Raises
    ------
    TraceError
        If it cannot be removed.
    """
    path = location(path)
    store_module(path).remove_part(path, part)


def open_store(path: Anywhere, *, damaged: bool = False) -> ReadStore:
    """Open the store at `path` for reading, in the format that its suffix names.

    Parameters
    ----------
    path : path or URL
    damaged : bool
        Whether a damaged store is opened too, as far as that is possible. What is unsafe is refused all the same.

    Raises
    ------
    TraceNotFoundError
        If nothing is at `path`.
    TraceFormatError
        If it is not a store of this format, or has parts that a trace never has and that are not safe to read.
    TraceCorruptError
        If it is one but damaged.
    """
    path = location(path)
    return cast(ReadStore, store_module(path).open(path, damaged=damaged))


def open_parts(path: Anywhere, *, damaged: bool = False) -> tuple[list[tuple[str, ReadStore]], dict[str, TraceError]]:
    """Open all parts of the store at `path`, which may be one directory, or a file and others beside it.

    Parameters
    ----------
    path : path or URL
    damaged : bool
        As in `open_store`.

    Returns
    -------
    parts : list of (str, ReadStore)
        Name of each part, and the store that it is in; several may be in one.
    broken : dict of str to TraceError
        Why the others could not be opened.

    Raises
    ------
    TraceError
        As `open_store`, if no part could be opened.
    """
    path = location(path)
    module = store_module(path)
    files = store_files(path)
    parts: list[tuple[str, ReadStore]] = []
    broken: dict[str, TraceError] = {}
    for file in files:
        try:
            store = cast(ReadStore, module.open(file, damaged=damaged))
        except TraceError as error:
            if len(files) == 1:
                raise
            broken[file.name] = error
            continue
        # of a damaged store the names of groups may be lost, too
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
