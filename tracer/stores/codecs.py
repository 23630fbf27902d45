"""The codecs that chunks can be compressed with: by name, what they write, and what is checked before they decode.

All are those of Blosc, which Zarr and HDF5 both know: a chunk becomes one buffer of its first version. It is encoded
and decoded here, and not by the libraries of the formats, because those cost more than the codec.
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
"""Bytes of a buffer's header: so much larger than a chunk it is at most."""
_HEADER = struct.Struct("<BBBBIII")
_STORED = 2
"""Bit of a header's flags: the numbers stand in the buffer as they are, because they cannot be compressed."""


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
        How much time it takes.
    shuffle : str
        What is done before: the bits or bytes of the same significance are put together.
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
        """Blosc's number of the compressor, as it is given to it; HDF5's filter has it as a parameter."""
        return {"lz4": 1, "zstd": 5}[self.inner]

    @property
    def format_code(self) -> int:
        """Blosc's number of the compressor's format, as it stands in a header."""
        return {"lz4": 1, "zstd": 4}[self.inner]


CODECS: Mapping[str, Codec] = MappingProxyType(
    {
        "lz4": Codec("lz4", "lz4", 5, "bitshuffle"),
        "zstd": Codec("zstd", "zstd", 1, "shuffle"),
    }
)
"""Every codec, by name. A name never changes what it means: files refer to it by its parameters."""


def codec_of(name: str | None) -> Codec | None:
    """The codec of this name; None for None. `UnknownNameError` if there is none."""
    if name is None:
        return None
    if name not in CODECS:
        raise UnknownNameError.of("codec", name, CODECS)
    return CODECS[name]


def load() -> None:
    """Import the library that compresses now, and not when the first chunk is full.

    That may be as late as when a program ends, where an import is late: of Python 3.11 it changes the exit status of a
    program that SIGINT interrupted.
    """
    _blosc()


@cache
def _blosc() -> ModuleType:
    # only where something is compressed
    from numcodecs import blosc

    # As zarr-python sets it. By default, calls from the main thread share one pool of threads behind a lock; a training
    # has better uses for its processors, and threads do not survive a fork.
    blosc.use_threads = False
    return blosc  # type: ignore[no-any-return]


def encode(codec: Codec, data: memoryview, itemsize: int) -> bytes:
    """A chunk of items of so many bytes, compressed; at most `OVERHEAD` bytes longer than it was."""
    # Blosc takes the size of the items from the array. In blocks of its own choice it compresses up to 40 % less.
    items = np.frombuffer(data, f"V{itemsize}")
    encoded: bytes = _blosc().compress(items, codec.inner.encode(), codec.level, codec.shuffle_code, len(data))
    return encoded


def decoded_size(stored: bytes | NDArray[np.uint8]) -> int:
    """How many bytes a compressed chunk says it has when it is decoded; 0 if it is none."""
    header = bytes(stored[:OVERHEAD])
    return int(_HEADER.unpack(header)[4]) if len(header) == OVERHEAD and header[0] == 2 else 0


def decode(codec: Codec, stored: NDArray[np.uint8], out: NDArray[np.uint8], itemsize: int) -> bool:
    """Decode a chunk into `out`, which has its size; whether that is possible.

    What the buffer says of itself is checked first: that it is one of this codec, complete, and decodes to exactly this
    size. The decoders check every length on the way, too.
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
