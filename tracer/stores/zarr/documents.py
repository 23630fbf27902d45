"""The ``zarr.json`` of groups and arrays on a disk: read, and written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tracer.errors import TraceUnreadableError
from tracer.stores.disk.files import UNREADABLE, open_file, sync
from tracer.stores.zarr.format import CONSOLIDATED, DOCUMENT_LIMIT, as_bytes, as_document, is_group

TEMPORARY = re.compile(r"\.zarr\.json\.\d+\.[0-9a-f]{8}\.part")
"""What ``zarr.json`` is called while it is written."""


def damaged_groups(path: Path) -> list[str]:
    """What is wrong with the zarr.json of groups; those of arrays are looked at when the arrays are opened."""
    found = []
    for folder, folders, files in os.walk(path):
        document = read_document(Path(folder))
        if document.get("node_type") == "array" or "c" in folders:
            folders.clear()
        elif not is_group(document):
            if not _anything(Path(folder)):
                folders.clear()  # a folder without the file: a process was killed as it made it
                continue
            name = os.path.relpath(folder, path)
            why = "is not that of a group or an array" if "zarr.json" in files else "is not there"
            found.append(f"the zarr.json of {'the root' if name == '.' else repr(name)} {why}")
    return found


def _anything(folder: Path) -> bool:
    """Whether a file lies in a folder, or below it, that its writer was done with."""
    return any(not TEMPORARY.fullmatch(name) for _, _, names in os.walk(folder) for name in names)


def read_document(folder: Path) -> dict[str, Any]:
    """The parsed ``zarr.json`` of a folder; empty when there is none, or when it is not a JSON object."""
    try:
        file = open_file(folder / "zarr.json")
        try:
            data = os.pread(file, DOCUMENT_LIMIT + 1, 0)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in UNREADABLE:  # a file that may not be read is neither damaged nor missing
            raise TraceUnreadableError(f"cannot read {folder / 'zarr.json'}: {error.strerror or error}") from error
        return {}
    return as_document(data)


def disperse(path: Path, durable: bool) -> None:
    """Take out of the root what zarr-python consolidated there, because it does not know what was written since."""
    document = read_document(path)
    if document.pop(CONSOLIDATED, None) is not None:
        write_document(path, document, durable)


def write_document(folder: Path, document: Mapping[str, Any], durable: bool, anew: bool = True) -> None:
    """Write the ``zarr.json`` of a folder, all of it or nothing; unless it is there already, if not `anew`."""
    # a random name, because two ranks may write the root at the same time
    temporary = f"{folder}/.zarr.json.{os.getpid()}.{os.urandom(4).hex()}.part"
    data = as_bytes(document, folder)
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
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
    """Give a file its name: in place of one that has it if `anew`, else only where there is none."""
    if not anew:
        try:
            with suppress(FileExistsError):
                os.link(temporary, place)
        except OSError:  # the file system has no links
            anew = not os.path.exists(place)
    if anew:
        os.replace(temporary, place)
    else:
        os.unlink(temporary)
