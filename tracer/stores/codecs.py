"""The codecs that can compress chunks: their parameters, how they encode, and what is checked before they decode.

All of them are compressors of Blosc 1, which both Zarr and HDF5 support. A compressed chunk is one buffer of Blosc: a
header of 16 bytes, then the compressed bytes. Chunks are encoded and decoded here instead of by the Zarr and HDF5
libraries, whose own work on each chunk takes longer than the codec.
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
"""Bytes of the header of a compressed chunk. A chunk that does not compress grows by these, and never by more."""
_HEADER = struct.Struct("<BBBBIII")
_STORED = 2
"""Bit of the header's flags: the chunk did not compress, so its bytes follow the header unchanged."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to compress chunks.

    Attributes
    ----------
    name : str
        What it is called in `CODECS`.
    inner : str
        Blosc's name of the compressor.
    level : int
        Blosc's level of compression, from 0 to 9; higher ones are slower.
    shuffle : str
        Blosc's name of what is done before compressing: bits or bytes of the same significance are put side by side.
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
        """The number by which the compressor is chosen, which HDF5's filter has as a parameter."""
        return {"lz4": 1, "lz4hc": 2, "zstd": 5}[self.inner]

    @property
    def format_code(self) -> int:
        """The number that the header of a compressed chunk has for the compressor."""
        return {"lz4": 1, "lz4hc": 1, "zstd": 4}[self.inner]  # LZ4HC writes the format of LZ4


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "lz4": Codec("lz4", "lz4", 5, "bitshuffle"),
        "lz4hc": Codec("lz4hc", "lz4hc", 1, "noshuffle"),
        "zstd": Codec("zstd", "zstd", 1, "shuffle"),
    }
)
"""Every codec, by name. The parameters of a name never change, because files have the parameters and not the name."""


def codec_of(name: str | None) -> Codec | None:
    """The codec of this name; None for None. `UnknownNameError` if there is none."""
    if name is None:
        return None
    if name not in CODECS:
        raise UnknownNameError.of("codec", name, CODECS)
    return CODECS[name]


def load() -> None:
    """Import the library that compresses now, instead of when the first chunk is full.

    The first chunk may be full only when the program ends. In Python 3.11 an import at that time changes the exit
    status of a program that SIGINT interrupted.
    """
    _blosc()


@cache
def _blosc() -> ModuleType:
    # only where something is compressed
    from numcodecs import blosc

    # As zarr-python sets it. By default Blosc compresses in threads of its own, behind a lock. Those would take
    # processors from the training, and they do not survive a fork.
    blosc.use_threads = False
    return blosc  # type: ignore[no-any-return]


def encode(codec: Codec, data: memoryview, itemsize: int) -> bytes:
    """Compress a chunk whose items have `itemsize` bytes; the result is at most `OVERHEAD` bytes longer."""
    # Blosc takes the size of the items from the array. The last argument makes the whole chunk one block: in smaller
    # ones, which Blosc would choose, it compresses up to 40 % less.
    items = np.frombuffer(data, f"V{itemsize}")
    encoded: bytes = _blosc().compress(items, codec.inner.encode(), codec.level, codec.shuffle_code, len(data))
    return encoded


def decoded_size(stored: bytes | NDArray[np.uint8]) -> int:
    """How many bytes a compressed chunk decodes to, as its header says; 0 if it has no such header."""
    header = bytes(stored[:OVERHEAD])
    return int(_HEADER.unpack(header)[4]) if len(header) == OVERHEAD and header[0] == 2 else 0


def decode(codec: Codec, stored: NDArray[np.uint8], out: NDArray[np.uint8], itemsize: int) -> bool:
    """Decode a chunk into `out`, which has the size of a decoded chunk; returns False where that is not possible.

    The header is checked first: the chunk must be of this codec, complete, and decode to exactly this size. While they
    decode, Blosc's decoders check every length again.
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
    """As `decode`, of a chunk of so many bytes of which `out` gets those from `at` on."""
    if len(out) == chunk_nbytes:
        return decode(codec, stored, out, itemsize)
    whole = np.empty(chunk_nbytes, np.uint8)
    if not decode(codec, stored, whole, itemsize):
        return False
    out[:] = whole[at : at + len(out)]
    return True


def zarr_codec(codec: Codec, itemsize: int, chunk_nbytes: int) -> dict[str, Any]:
    """The codec as the metadata of a Zarr array says it."""
    configuration = {
        "typesize": itemsize,
        "cname": codec.inner,
        "clevel": codec.level,
        "shuffle": codec.shuffle,
        "blocksize": chunk_nbytes,
    }
    return {"name": "blosc", "configuration": configuration}


HDF5_FILTER = 32001
"""The number of Blosc among HDF5's registered filters."""


def hdf5_options(codec: Codec, itemsize: int, chunk_nbytes: int) -> tuple[int, ...]:
    """The parameters of HDF5's filter: its version and Blosc's, then what the codec does."""
    return (2, 2, itemsize, chunk_nbytes, codec.level, codec.shuffle_code, codec.code)
