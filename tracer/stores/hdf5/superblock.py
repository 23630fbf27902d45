"""The first bytes of an HDF5 file: whether it is one, how long it should be, and whether somebody writes it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

from tracer.stores.hdf5.torn import checksum

SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"
UNDEFINED: Final = 2**64 - 1
"""An address that is not there."""
_FIELDS: Final = struct.Struct("<8sBBBBQQQQ")
_FLAGS, _END = 4, 7
"""Which of the fields say that the file is being written, and where it ends."""
_WRITTEN_IN_SWMR_MODE: Final = 5
BYTES: Final = _FIELDS.size + 4
"""Bytes of a superblock with its checksum."""
HEAD_BYTES: Final = BYTES + 4
"""Bytes of a file that the functions here look at: the signature of the root group's header follows."""


def fields_of(head: bytes) -> list[Any] | None:
    """The fields of the superblock that a file begins with; None if it fails its checksum."""
    body = head[: _FIELDS.size]
    right = len(head) >= BYTES and checksum(body).to_bytes(4, "little") == head[_FIELDS.size : BYTES]
    return list(_FIELDS.unpack(body)) if right else None


def superblock(fields: list[Any]) -> bytes:
    """A superblock with its checksum."""
    body = _FIELDS.pack(*fields)
    return body + checksum(body).to_bytes(4, "little")


def repaired(head: bytes, size: int, farther: int) -> tuple[bytes, int]:
    """A superblock that HDF5 accepts, and where it says that the file ends.

    Parameters
    ----------
    head : bytes
        What the file begins with.
    size : int
        Bytes of the file.
    farther : int
        By how much farther than that the file may say that it ends.
    """
    fields = fields_of(head)
    if fields is None:
        # the library makes new files so: without an extension, and with the root group behind the superblock
        fields = [SIGNATURE, 3, 8, 8, 0, 0, UNDEFINED, size, BYTES]
    else:
        fields[_FLAGS] = 0  # not marked as being written
        fields[_END] = max(fields[_END], size) + farther
    return superblock(fields), fields[_END]


def looks_like_ours(head: bytes) -> bool:
    """Whether a file without the signature of HDF5 begins otherwise as the files written here do."""
    return head[BYTES:HEAD_BYTES] == b"OHDR"


def cut_off(head: bytes, size: int) -> list[str]:
    """What is wrong with the length of a file that was closed in order; others may be shorter than they say."""
    fields = fields_of(head)
    if fields is None or fields[_FLAGS] or size >= fields[_END]:
        return []
    return [f"the file was cut off: it has {size} bytes, and had {fields[_END]}"]


def is_unfinished(head: bytes) -> bool:
    """Whether a file says that it is being written."""
    fields = fields_of(head)
    return fields is not None and bool(fields[_FLAGS])


def mark_unfinished(path: Path) -> None:
    """Let a file that HDF5 closed, but could not write in full, say again that it is being written.

    So it is opened as one whose writer was killed, with all that was committed, and not refused as cut off.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    fields = fields_of(head)
    if fields is None or not cut_off(head, path.stat().st_size):
        return
    fields[_FLAGS] = _WRITTEN_IN_SWMR_MODE
    with path.open("r+b") as file:
        file.write(superblock(fields))
