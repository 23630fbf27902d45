"""The digest in a Parquet file by which a reader knows that every byte is as it was written."""

from __future__ import annotations

import hashlib
from typing import Final

_DIGEST: Final = 32
_TAIL: Final = 8
"""Bytes at the end of a Parquet file: the length of its footer, and its magic number."""


def sealed(parquet: bytes) -> bytes:
    """The bytes of a Parquet file with a digest between its data and its footer, where no reader of Parquet looks."""
    footer = _footer(parquet)
    return parquet[:footer] + _digest(parquet[:footer], parquet[footer:]) + parquet[footer:]


def is_sealed(data: bytes) -> bool:
    """Whether all these bytes, and no others, are what `sealed` returned."""
    footer = _footer(data)
    begin = footer - _DIGEST
    return begin >= 0 and data[begin:footer] == _digest(data[:begin], data[footer:])


def _footer(parquet: bytes) -> int:
    """Where the footer begins; negative if the file is too short for the length that it claims."""
    return len(parquet) - _TAIL - int.from_bytes(parquet[-_TAIL:-4], "little")


def _digest(data: bytes, footer: bytes) -> bytes:
    return hashlib.sha256(len(data).to_bytes(8, "little") + data + footer).digest()
