"""Creates, finds, opens and removes Zarr traces in directories."""

from __future__ import annotations

import shutil
from pathlib import Path

from tracer.errors import TraceCorruptError, TraceExistsError, TraceFormatError, TraceNotFoundError
from tracer.format.names import PART
from tracer.stores.disk.files import is_folder, is_there, listed, make_folder, remove_folder, remove_leftovers, sync
from tracer.stores.errors import write_errors
from tracer.stores.zarr.documents import (
    TEMPORARY,
    damaged_groups,
    disperse,
    read_document,
    write_document,
)
from tracer.stores.zarr.reading import ZarrReadStore
from tracer.stores.zarr.shards import group_document, is_group
from tracer.stores.zarr.writing import ZarrWriteStore


def create(path: Path, *, part: str | None = None, overwrite: bool = False, durable: bool = False) -> ZarrWriteStore:
    """Make a Zarr group at `path`, or the group of a part in it; see `tracer.stores.opening.create_store`."""
    mine = prepare(path, part=part, overwrite=overwrite, durable=durable)
    try:
        return ZarrWriteStore(path, part=part, durable=durable)
    except BaseException:
        shutil.rmtree(mine, ignore_errors=True)
        raise


def prepare(path: Path, *, part: str | None, overwrite: bool, durable: bool) -> Path:
    """Make the folder of a new group, or of a part of it, and return it; raises as `create`."""
    mine = path if part is None else path / part
    if is_there(mine) or mine.is_symlink():
        if not overwrite:
            raise TraceExistsError.at(mine)
        ours = (
            is_folder(mine)
            and not mine.is_symlink()
            and (blank(mine) or read_document(mine).get("node_type") == "group")
        )
        if not ours:
            raise TraceExistsError(f"{mine} already exists, and is not a Zarr group that could be overwritten")
    with write_errors(path):
        remove_leftovers(path)
        if is_there(mine):
            remove_folder(mine, path)
        if part is not None:
            # other ranks may create the directory and its root at the same time; only this process creates this part
            make_folder(path, durable=durable)
            write_document(path, group_document({}), durable, anew=False)
        else:
            make_folder(path.parent, durable=durable)
        try:
            mine.mkdir()
            if durable:
                sync(mine.parent)
        except FileExistsError:
            raise TraceExistsError.at(mine) from None
    return mine


def files(path: Path) -> list[Path]:
    """The directory itself: it holds all parts of a trace."""
    return [path]


def blank(path: Path) -> bool:
    """Whether a directory holds only what a process leaves when it is killed while it creates a store."""
    if not is_folder(path) or path.is_symlink():
        return False
    names = {name for name in listed(path) if not TEMPORARY.fullmatch(name)}
    return not names or (names == {"zarr.json"} and read_document(path) == group_document({}))


def remove_part(path: Path, part: str) -> None:
    """Remove the group of a part; see `tracer.stores.opening.remove_part`."""
    folder = path / part
    if is_folder(folder) and not folder.is_symlink():
        with write_errors(path):
            remove_folder(folder, path)
            disperse(path, durable=False)


def open(path: Path, *, damaged: bool = False) -> ZarrReadStore:
    """Open the Zarr group at `path`; see `tracer.stores.opening.open_store`."""
    if not is_there(path):
        raise TraceNotFoundError(f"there is no trace at {path}")
    if not is_folder(path):
        raise TraceFormatError(f"{path} is a file; a Zarr trace is a directory")
    document = read_document(path)
    if not is_group(document) and not (damaged and any(name.startswith("rank") for name in listed(path))):
        if any(PART.fullmatch(name.partition("/")[0]) for name in ZarrReadStore(path).names("rank")):
            raise TraceCorruptError(f"{path}: the zarr.json of the root is not that of a group, but there are arrays")
        raise TraceFormatError(f"{path} is not a Zarr group of format 3: it has no zarr.json that says so")
    store = ZarrReadStore(path)
    if damaged:
        store.thorough = True
        store.problems += damaged_groups(path)
    return store
