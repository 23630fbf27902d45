"""A label and a digest in a Parquet file: a reader knows what it is, and that every byte is as it was written."""

from __future__ import annotations

import hashlib
from typing import Final

_DIGEST: Final = 32
_LENGTH: Final = 4
"""Bytes of the length of the label."""
_TAIL: Final = 8
"""Bytes at the end of a Parquet file: the length of its footer, and its magic number."""


def sealed(parquet: bytes, label: bytes) -> bytes:
    """A Parquet file with a label and a digest between its data and its footer, where no reader of Parquet looks."""
    footer = _footer(parquet)
    data = parquet[:footer] + label + len(label).to_bytes(_LENGTH, "little")
    return data + _digest(data, parquet[footer:]) + parquet[footer:]


def label_of(data: bytes) -> bytes | None:
    """The label of a file; None unless all these bytes, and no others, are what `sealed` returned."""
    footer = _footer(data)
    end = footer - _DIGEST - _LENGTH
    if end < 0 or data[end + _LENGTH : footer] != _digest(data[: end + _LENGTH], data[footer:]):
        return None
    return data[end - int.from_bytes(data[end : end + _LENGTH], "little") : end]


def _footer(parquet: bytes) -> int:
    """Where the footer begins; negative if the file is too short for the length that it claims."""
    return len(parquet) - _TAIL - int.from_bytes(parquet[-_TAIL:-4], "little")


def _digest(data: bytes, footer: bytes) -> bytes:
    return hashlib.sha256(len(data).to_bytes(8, "little") + data + footer).digest()
