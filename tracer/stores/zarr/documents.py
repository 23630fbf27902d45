"""Reads the ``zarr.json`` of groups and arrays on a disk, and writes them atomically."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tracer.stores.disk.files import UNREADABLE, again, open_file, read_bytes, sync, unreadable, walked
from tracer.stores.zarr.shards import CONSOLIDATED, DOCUMENT_LIMIT, as_bytes, as_document, is_group

TEMPORARY = re.compile(r"\.zarr\.json\.\d+\.[0-9a-f]{8}\.part")
"""The name of a ``zarr.json`` while it is written."""


def damaged_groups(path: Path) -> list[str]:
    """Problems of the zarr.json of groups; those of arrays are checked when the arrays are opened."""
    found = []
    for folder, folders, files in walked(path):
        document = read_document(Path(folder))
        if document.get("node_type") == "array" or "c" in folders:
            folders.clear()
        elif not is_group(document):
            if not _anything(Path(folder)):
                folders.clear()  # an empty folder: its writer was killed before it wrote the zarr.json
                continue
            name = os.path.relpath(folder, path)
            why = "is not that of a group or an array" if "zarr.json" in files else "is not there"
            found.append(f"the zarr.json of {'the root' if name == '.' else repr(name)} {why}")
    return found


def _anything(folder: Path) -> bool:
    """Whether a folder holds, at any depth, a file that is not temporary."""
    return any(not TEMPORARY.fullmatch(name) for _, _, names in walked(folder) for name in names)


def read_document(folder: Path) -> dict[str, Any]:
    """The parsed ``zarr.json`` of a folder; empty if it is missing or not a JSON object."""
    try:
        file = open_file(folder / "zarr.json")
        try:
            data = read_bytes(file, min(DOCUMENT_LIMIT, again(lambda: os.fstat(file).st_size)) + 1, 0)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in UNREADABLE:  # a file without read access is neither damaged nor missing
            raise unreadable(folder / "zarr.json", error) from error
        return {}
    return as_document(data)


def disperse(path: Path, durable: bool) -> None:
    """Remove zarr-python's consolidated metadata from the root, because it is out of date after a write."""
    document = read_document(path)
    if document.pop(CONSOLIDATED, None) is not None:
        write_document(path, document, durable)


def write_document(folder: Path, document: Mapping[str, Any], durable: bool, anew: bool = True) -> None:
    """Write the ``zarr.json`` of a folder atomically; if not `anew`, an existing file stays."""
    # a random name, because two ranks may write the root at the same time
    temporary = f"{folder}/.zarr.json.{os.getpid()}.{os.urandom(4).hex()}.part"
    data = as_bytes(document, folder)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        while data:
            data = data[os.write(file, data) :]
        if durable:
            os.fsync(file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(file)
    _put(temporary, f"{folder}/zarr.json", anew)
    if durable:
        sync(folder)


def _put(temporary: str, place: str, anew: bool) -> None:
    """Rename a file; if not `anew`, an existing file of that name stays and the new one is removed."""
    if not anew:
        try:
            with suppress(FileExistsError):
                os.link(temporary, place)
        except OSError:  # the file system has no hard links
            anew = not os.path.exists(place)
    if anew:
        os.replace(temporary, place)
    else:
        os.unlink(temporary)
