"""Creates, finds, opens and removes Zarr traces, in folders and on object stores."""

from __future__ import annotations

import builtins
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from tracer.errors import TraceCorruptError, TraceExistsError, TraceFormatError, TraceNotFoundError
from tracer.format.names import PART
from tracer.stores.disk import is_folder, is_there
from tracer.stores.locations import Location, Url
from tracer.stores.zarr.files import Files
from tracer.stores.zarr.layout import (
    CONSOLIDATED,
    WRITER,
    ArrayDescription,
    as_bytes,
    as_document,
    document_name,
    is_group,
)
from tracer.stores.zarr.on_disk import DiskFiles
from tracer.stores.zarr.reading import ZarrReadStore
from tracer.stores.zarr.writing import ZarrWriteStore, disperse


def files_at(path: Location, *, durable: bool = False) -> Files:
    """The files of a trace; what is put on an object store is durable in any case."""
    if isinstance(path, Path):
        return DiskFiles(path, durable=durable)
    from tracer.stores.zarr.on_objects import ObjectFiles  # imported here, because obstore may not be installed

    return ObjectFiles(path)


def create(
    path: Location, *, part: str | None = None, overwrite: bool = False, durable: bool = False
) -> ZarrWriteStore:
    """Make a Zarr group at `path`, or the group of a part in it; see `tracer.stores.opening.create_store`."""
    files = cleared(path, part=part, overwrite=overwrite, durable=durable)
    try:
        return ZarrWriteStore(files, part)
    except BaseException:
        files.discard()
        raise


def cleared(path: Location, *, part: str | None, overwrite: bool, durable: bool) -> Files:
    """The files of a new group, or of a part of it, without what was there before; raises as `create`."""
    files = files_at(path, durable=durable)
    name = part or ""
    try:
        if files.exists(name):
            place = path / name if name else path
            if not overwrite:
                raise TraceExistsError.at(place)
            if not files.is_group(name):
                raise TraceExistsError(f"{place} already exists, and is not a Zarr group that could be overwritten")
        files.remove(name)
    except BaseException:
        files.close()
        raise
    return files


def files(path: Location) -> list[Location]:
    """The directory or URL itself: it holds all parts of a trace."""
    return [path]


def blank(path: Location) -> bool:
    """Whether `path` holds only what a process leaves when it is killed while it creates a store."""
    if isinstance(path, Path) and (not is_folder(path) or path.is_symlink()):
        return False
    with closing(files_at(path)) as place:
        names = place.children()
        if names != ["zarr.json"]:
            return not names and isinstance(path, Path)
        document = place.document("")
        return is_group(document) and document.get("attributes", {}).keys() <= {WRITER}


def remove_part(path: Location, part: str) -> None:
    """Remove the group of a part; see `tracer.stores.opening.remove_part`."""
    with closing(files_at(path)) as place:
        place.remove(part)
        disperse(place)


def put_indexes_last(path: Path) -> None:
    """Append the index of each shard of a finished trace, for programs that look for it only there, such as zarrita.

    Raises
    ------
    OSError
        If a file cannot be read or written.
    """
    place = files_at(path)
    for array in [path / name for name in place.paths() if name.endswith("/zarr.json")]:
        name, document = str(array.parent.relative_to(path)), as_document(array.read_bytes())
        if document["node_type"] == "array":
            size = 16 * ArrayDescription(path, name, document).per_shard + 4
            for shard in filter(Path.is_file, (array.parent / "c").rglob("*")):
                with builtins.open(shard, "r+b") as file:
                    index = file.read(size)
                    file.seek(0, os.SEEK_END)
                    file.write(index)
            place.put(document_name(name), as_bytes(_with_last_index(document), array))
    root = place.document("")
    copies = root.get(CONSOLIDATED, {}).get("metadata", {})
    for name, document in copies.items():
        copies[name] = _with_last_index(document)
    place.put(document_name(""), as_bytes(root, path))
    place.wait()
    place.close()


def _with_last_index(document: dict[str, Any]) -> dict[str, Any]:
    """The document of an array whose shards end with their index."""
    for codec in document.get("codecs", ()):
        codec["configuration"]["index_location"] = "end"
    return document


def exists(url: Url) -> bool:
    """Whether an object exists at `url` or below it."""
    with closing(files_at(url)) as place:
        return place.exists()


def remove(url: Url) -> None:
    """Remove all objects below `url`."""
    with closing(files_at(url)) as place:
        place.remove()


def open(path: Location, *, damaged: bool = False) -> ZarrReadStore:
    """Open the Zarr group at `path`; see `tracer.stores.opening.open_store`."""
    if isinstance(path, Path) and not is_there(path):
        raise TraceNotFoundError(f"there is no trace at {path}")
    if isinstance(path, Path) and not is_folder(path):
        raise TraceFormatError(f"{path} is a file; a Zarr trace is a directory")
    place = files_at(path)
    try:
        document = place.document("")
        if not is_group(document):
            if not document and not place.exists():
                raise TraceNotFoundError(f"there is no trace at {path}")
            _check_root(place, damaged=damaged)
        store = ZarrReadStore(place, document if place.readers > 1 else None)
        if damaged:
            store.thorough = True
            store.problems += store.damaged_groups()
        return store
    except BaseException:
        place.close()
        raise


def _check_root(place: Files, *, damaged: bool) -> None:
    """Raise an error for a root that is not that of a group, unless there are parts that may be saved."""
    web = isinstance(place.location, Url) and place.location.is_web  # HTTP servers list nothing
    names = [] if web else place.paths()
    if damaged and any(name.startswith("rank") for name in names):
        return
    if any(name.endswith("/zarr.json") and PART.fullmatch(name.partition("/")[0]) for name in names):
        why = "the zarr.json of the root is not that of a group, but there are parts of a trace"
        raise TraceCorruptError(f"{place.location}: {why}")
    raise TraceFormatError(f"{place.location} is not a Zarr group of format 3: it has no zarr.json that says so")
