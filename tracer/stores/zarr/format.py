"""The content of ``zarr.json`` documents, and the checksum behind each chunk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tracer.errors import TraceError
from tracer.format.checksum import crc32c
from tracer.format.parsing import parsed
from tracer.stores.codecs import Codec, zarr_codec

DOCUMENT_LIMIT: Final = 16 << 20
"""The most bytes of a zarr.json that are read; parsed, it takes many times as much memory."""
WRITER: Final = "writer"
"""The only attribute of a new root on an object store: a random number that identifies the writer that claimed it."""
CONSOLIDATED: Final = "consolidated_metadata"
"""Member of a group's ``zarr.json`` with zarr-python's copies of all documents below, which it trusts blindly."""
_BYTES: Final = {"name": "bytes", "configuration": {"endian": "little"}}
_CRC32C: Final = {"name": "crc32c"}


def checksum_bytes(data: bytes | memoryview) -> bytes:
    """The CRC-32C of `data`, as 4 bytes little-endian."""
    return int(crc32c(data)).to_bytes(4, "little")


def array_document(
    dtype: np.dtype[Any], chunk: tuple[int, ...], shard: tuple[int, ...], codec: Codec | None
) -> dict[str, Any]:
    """The constant part of an array's ``zarr.json``: without shape and attributes."""
    inner = [] if codec is None else [zarr_codec(codec, dtype.itemsize, dtype.itemsize * math.prod(chunk))]
    fill: Any = {"b": False, "i": 0, "u": 0, "f": 0.0, "c": [0.0, 0.0]}[dtype.kind]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(chunk),
                    "codecs": [_BYTES, *inner, _CRC32C],
                    "index_codecs": [_BYTES, _CRC32C],
                    "index_location": "start",
                },
            }
        ],
    }


def as_document(data: bytes | memoryview) -> dict[str, Any]:
    """Parse a ``zarr.json``; empty if it is not a JSON object, or is too large."""
    if len(data) > DOCUMENT_LIMIT:
        return {}
    try:
        document = parsed(bytes(data).decode().strip())
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def as_bytes(document: Mapping[str, Any], where: object) -> bytes:
    """Serialize a ``zarr.json``; raises `TraceError` if the attributes of `where` are not valid JSON."""
    try:
        return json.dumps(document).encode()
    except (TypeError, ValueError) as error:
        raise TraceError(f"the attributes of {where} cannot be written as JSON: {error}") from error


def is_group(document: Mapping[str, Any]) -> bool:
    """Whether a ``zarr.json`` describes a Zarr v3 group."""
    return document.get("zarr_format") == 3 and document.get("node_type") == "group"


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The ``zarr.json`` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}
