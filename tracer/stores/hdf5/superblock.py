"""The superblock at the start of an HDF5 file: signature, end of the file, and the flag of a file being written."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

from tracer.stores.hdf5.torn import checksum

SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"
UNDEFINED: Final = 2**64 - 1
"""The undefined address."""
_FIELDS: Final = struct.Struct("<8sBBBBQQQQ")
_FLAGS, _END = 4, 7
"""Indexes of the fields for the flags (being written or not) and for the end of the file."""
BYTES: Final = _FIELDS.size + 4
"""Bytes of a superblock with its checksum."""
HEAD_BYTES: Final = BYTES + 4
"""Bytes of a file that this module needs: the superblock, and the signature of the root group's header behind it."""


def fields_of(head: bytes) -> list[Any] | None:
    """The fields of a file's superblock; None if it fails its checksum."""
    body = head[: _FIELDS.size]
    right = len(head) >= BYTES and checksum(body).to_bytes(4, "little") == head[_FIELDS.size : BYTES]
    return list(_FIELDS.unpack(body)) if right else None


def superblock(fields: list[Any]) -> bytes:
    """Serialize a superblock with its checksum."""
    body = _FIELDS.pack(*fields)
    return body + checksum(body).to_bytes(4, "little")


def repaired(head: bytes, size: int, farther: int) -> tuple[bytes, int]:
    """A superblock that HDF5 accepts, and the end of the file in it.

    Parameters
    ----------
    head : bytes
        The first bytes of the file.
    size : int
        Bytes of the file.
    farther : int
        Bytes to add to the end of the file.
    """
    fields = fields_of(head)
    if fields is None:
        # as HDF5 creates new files: no extension, and the root group right behind the superblock
        fields = [SIGNATURE, 3, 8, 8, 0, 0, UNDEFINED, size, BYTES]
    else:
        fields[_FLAGS] = 0  # not marked as being written
        fields[_END] = max(fields[_END], size) + farther
    return superblock(fields), fields[_END]


def looks_like_ours(head: bytes) -> bool:
    """Whether a file with a damaged signature has the root group where files of this package have it."""
    return head[BYTES:HEAD_BYTES] == b"OHDR"


def cut_off(head: bytes, size: int) -> list[str]:
    """The problem of a truncated file, or an empty list. Only a properly closed file has a reliable length."""
    fields = fields_of(head)
    if fields is None or fields[_FLAGS] or size >= fields[_END]:
        return []
    return [f"the file was cut off: it has {size} bytes, and had {fields[_END]}"]


def is_unfinished(head: bytes) -> bool:
    """Whether a file is marked as being written."""
    fields = fields_of(head)
    return fields is not None and bool(fields[_FLAGS])


def mark_closed(path: Path) -> None:
    """Mark a file as closed, after HDF5 has flushed it."""
    with path.open("r+b") as file:
        head, _ = repaired(file.read(HEAD_BYTES), path.stat().st_size, 0)
        file.seek(0)
        file.write(head)
