"""What is in a Zarr trace: documents of arrays and groups, and shards with two indexes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.format.checksum import crc32c
from tracer.memory import PAGE
from tracer.stores.codecs import Codec, zarr_codec

CHUNKS_PER_SHARD = 128


CHUNK_LIMIT = 1 << 30
"""Bytes of the largest chunk that is read, and of the index of a shard."""


EXPANSION = 4096
"""How many times its size on disk the data of an array with other codecs than ours can be, at most."""


MISSING = 2**64 - 1
"""Offset and size of a chunk that is not there."""
DOCUMENT_LIMIT = 16 << 20
"""Bytes of the largest zarr.json that is read; parsed, it takes many times as much."""
WRITER = "writer"
"""The only attribute of a root on an object store that was put so that no other process does, and holds nothing yet."""


CONSOLIDATED = "consolidated_metadata"
"""Member of the ``zarr.json`` of a group in which zarr-python keeps those of all that is in it, and believes them."""


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


_CRC32C = {"name": "crc32c"}


_SAFE_CODECS = frozenset({"bytes", "crc32c", "gzip", "zstd", "blosc", "sharding_indexed", "transpose"})


def checksum_bytes(data: bytes | memoryview) -> bytes:
    """The CRC-32C of some bytes, as it stands in a file."""
    return int(crc32c(data)).to_bytes(4, "little")


def second_index(chunks: int) -> int:
    """Where the second index of a shard of so many chunks begins: at the first page behind the first one.

    Examples
    --------
    >>> second_index(128), second_index(256)
    (4096, 8192)
    """
    return -(-(chunks * 16 + 4) // PAGE) * PAGE


def chunks_begin(chunks: int) -> int:
    """Where the chunks of a shard of so many begin: behind its two indexes."""
    return second_index(chunks) + chunks * 16 + 4


def both_indexes(index: NDArray[Any]) -> bytes:
    """What a shard begins with: its index with the checksum, and once more at the next page."""
    data = index.tobytes()
    data += checksum_bytes(data)
    return data.ljust(second_index(len(index)), b"\0") + data


def as_index(data: bytes, chunks: int) -> NDArray[np.uint64] | None:
    """The index of a shard of so many chunks that is in `data` with its checksum; None if it fails that."""
    size = chunks * 16
    if len(data) != size + 4 or checksum_bytes(data[:size]) != data[size:]:
        return None
    return np.frombuffer(data[:size], "<u8").reshape(-1, 2)


def array_document(
    dtype: np.dtype[Any], chunk: tuple[int, ...], shard: tuple[int, ...], codec: Codec | None
) -> dict[str, Any]:
    """The ``zarr.json`` of an array, without what changes: its shape and its attributes."""
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


def group_document(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The ``zarr.json`` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def check_codecs(codecs: Any) -> None:
    """Raise `ValueError` unless an array can be read with these codecs without running code of others."""
    for codec in codecs:
        if codec["name"] not in _SAFE_CODECS:
            raise ValueError(f"codec {codec['name']!r}")
        configuration = codec.get("configuration", {})
        for nested in ("codecs", "index_codecs"):
            check_codecs(configuration.get(nested, ()))


def innermost(codecs: Any, shard: tuple[int, ...]) -> Any:
    """The shape of the chunks that are encoded one by one."""
    for codec in codecs:
        if codec["name"] == "sharding_indexed":
            return codec["configuration"]["chunk_shape"]
    return shard
