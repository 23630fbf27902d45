"""Compresses and decompresses chunks with Blosc 1, which both Zarr and HDF5 support.

A compressed chunk is one Blosc buffer: a header of 16 bytes, then the compressed bytes. The Zarr and HDF5 libraries
are bypassed, because their overhead per chunk takes longer than the codec.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracer.errors import UnknownNameError

OVERHEAD = 16
"""Bytes of the Blosc header, and the most bytes by which an incompressible chunk grows."""
_HEADER = struct.Struct("<BBBBIII")
_STORED = 2
"""Header flag: the bytes follow the header uncompressed."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A compressor and its parameters.

    Attributes
    ----------
    name : str
        The key in `CODECS`.
    inner : str
        Blosc's name of the compressor.
    level : int
        Blosc's compression level, 0 to 9; higher is slower.
    shuffle : str
        Blosc's name of the shuffle, which groups bits or bytes of equal significance before compression.
    """

    name: str
    inner: str
    level: int
    shuffle: str

    @property
    def shuffle_code(self) -> int:
        """Blosc's number of the shuffle."""
        return {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}[self.shuffle]

    @property
    def code(self) -> int:
        """The compressor's number in the parameters of HDF5's Blosc filter."""
        return {"lz4": 1, "lz4hc": 2, "zstd": 5}[self.inner]

    @property
    def format_code(self) -> int:
        """The number of the compressed format in a Blosc header."""
        return {"lz4": 1, "lz4hc": 1, "zstd": 4}[self.inner]  # LZ4HC writes the format of LZ4


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "lz4": Codec("lz4", "lz4", 5, "bitshuffle"),
        "lz4hc": Codec("lz4hc", "lz4hc", 1, "noshuffle"),
        "zstd": Codec("zstd", "zstd", 1, "shuffle"),
    }
)
"""Every codec, by name. Files hold only the parameters, so the parameters of a name never change."""


def codec_of(name: str | None) -> Codec | None:
    """The codec of this name; None for None. Raises `UnknownNameError` for an unknown name."""
    if name is None:
        return None
    if name not in CODECS:
        raise UnknownNameError.of("codec", name, CODECS)
    return CODECS[name]


def load() -> None:
    """Import the compression library now instead of at the first full chunk.

    The first chunk may be full only at interpreter shutdown. In Python 3.11 an import at that time changes the exit
    status of a program that SIGINT interrupted.
    """
    _blosc()


@cache
def _blosc() -> ModuleType:
    # imported lazily: most traces are not compressed
    from numcodecs import blosc

    # As in zarr-python. Blosc's own threads would take CPU time from the training, and do not survive a fork.
    blosc.use_threads = False
    return blosc  # type: ignore[no-any-return]


def encode(codec: Codec, data: memoryview, itemsize: int) -> bytes:
    """Compress a chunk whose items have `itemsize` bytes; the result is at most `OVERHEAD` bytes longer."""
    # Blosc takes the item size from the array. The last argument makes the whole chunk one block, which compresses up
    # to 40 % better than Blosc's default of smaller blocks.
    items = np.frombuffer(data, f"V{itemsize}")
    encoded: bytes = _blosc().compress(items, codec.inner.encode(), codec.level, codec.shuffle_code, len(data))
    return encoded


def decode(codec: Codec, stored: NDArray[np.uint8], out: NDArray[np.uint8], itemsize: int) -> bool:
    """Decode a chunk into `out`, which has the size of a decoded chunk; returns False for an invalid chunk.

    The header is checked first: the codec, the stored size and the decoded size must match. Blosc checks every length
    again while it decodes.
    """
    if len(stored) < OVERHEAD:
        return False
    version, _, flags, typesize, size, block, compressed = _HEADER.unpack(stored[:OVERHEAD].tobytes())
    if (version, typesize, size, compressed) != (2, itemsize, len(out), len(stored)) or not 0 < block <= size:
        return False
    if flags & _STORED:
        if compressed != size + OVERHEAD:
            return False
        out[:] = stored[OVERHEAD:]
        return True
    if flags >> 5 != codec.format_code:
        return False
    try:
        _blosc().decompress(stored, out)
    except (RuntimeError, ValueError):
        return False
    return True


def decode_part(
    codec: Codec, stored: NDArray[np.uint8], at: int, out: NDArray[np.uint8], chunk_nbytes: int, itemsize: int
) -> bool:
    """Decode a chunk of `chunk_nbytes` decoded bytes, and fill `out` with its bytes from `at` on; see `decode`."""
    if len(out) == chunk_nbytes:
        return decode(codec, stored, out, itemsize)
    whole = np.empty(chunk_nbytes, np.uint8)
    if not decode(codec, stored, whole, itemsize):
        return False
    out[:] = whole[at : at + len(out)]
    return True


def zarr_codec(codec: Codec, itemsize: int, chunk_nbytes: int) -> dict[str, Any]:
    """The codec's entry in the metadata of a Zarr array."""
    configuration = {
        "typesize": itemsize,
        "cname": codec.inner,
        "clevel": codec.level,
        "shuffle": codec.shuffle,
        "blocksize": chunk_nbytes,
    }
    return {"name": "blosc", "configuration": configuration}


HDF5_FILTER = 32001
"""Blosc's registered HDF5 filter number."""


def hdf5_options(codec: Codec, itemsize: int, chunk_nbytes: int) -> tuple[int, ...]:
    """The parameters of HDF5's Blosc filter: filter version, Blosc format version, then the codec's parameters."""
    return (2, 2, itemsize, chunk_nbytes, codec.level, codec.shuffle_code, codec.code)
