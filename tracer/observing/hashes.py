"""The hash of a tensor: eight bytes that tell whether two tensors are identical bit by bit.

`hash_of` is XXH3-64 (https://xxhash.com, seed 0) of a line of text and of the hashes of the tensor's pieces. The text
is torch's name of the dtype, and the shape: ``float32 [2, 3]``, with a newline. A piece is `PIECE` bytes of the numbers
in C order, little-endian; the last piece is shorter. The hash of a piece is its XXH3-64 as eight bytes, big-endian.
Pieces can be hashed in parallel.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from tracer.observing.pytorch.tensors import bytes_of

PIECE: Final = 1 << 16
"""The size of a piece in bytes."""
_PART: Final = 1 << 22
"""How many bytes are copied at once if a tensor is not in C order."""


def hash_of(tensor: Tensor) -> int:
    """The hash of a tensor's dtype, shape and numbers, as a signed 64-bit integer.

    A CPU tensor in C order is not copied; others are copied a few megabytes at a time.

    Parameters
    ----------
    tensor : torch.Tensor
        Dense, of any shape, dtype and device.

    Examples
    --------
    >>> one = torch.arange(6.0).reshape(2, 3)
    >>> hash_of(one) == hash_of(one.t().contiguous().t()), hash_of(one) == hash_of(one.flatten())
    (True, False)
    """
    whole = xxhash.xxh3_64(text_of(tensor.dtype, tensor.shape))
    for piece in _pieces(tensor):
        whole.update(xxhash.xxh3_64_digest(piece))
    return int.from_bytes(whole.digest(), "big", signed=True)


def hashes_of_pieces(texts: Iterable[bytes], pieces: Iterable[NDArray[Any]]) -> list[int]:
    """The hashes of tensors with these `text_of`; the numbers of each, in C order, are at most one piece."""
    whole, numbers = xxhash.xxh3_64_digest, int.from_bytes
    pairs = zip(texts, pieces, strict=True)
    return [numbers(whole(text + whole(piece.data)), "big", signed=True) for text, piece in pairs]


@functools.lru_cache(maxsize=1024)
def text_of(dtype: torch.dtype, shape: torch.Size) -> bytes:
    r"""The text that a hash begins with.

    Examples
    --------
    >>> text_of(torch.float32, torch.Size([2, 3]))
    b'float32 [2, 3]\n'
    """
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}\n".encode()


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in C order, piece by piece."""
    rest = memoryview(b"")
    for part in _parts(tensor):
        data = part
        if rest:
            missing = PIECE - len(rest)
            joined, data = memoryview(bytes(rest) + bytes(part[:missing])), part[missing:]
            if len(joined) < PIECE:
                rest = joined
                continue
            yield joined
        end = len(data) // PIECE * PIECE
        for start in range(0, end, PIECE):
            yield data[start : start + PIECE]
        rest = data[end:]
    if rest:
        yield rest


def _parts(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in C order: all at once if they lie so in memory, else a few megabytes at a time."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_cpu and plain.is_contiguous():
        yield _bytes(plain)
    elif plain.nbytes <= _PART or not plain.ndim:
        yield _bytes(plain.contiguous().cpu())
    else:
        rows = max(1, _PART * len(plain) // plain.nbytes)
        for some in plain.split(rows):
            if len(some) == 1:
                yield from _parts(some[0])
            else:
                yield _bytes(some.contiguous().cpu())


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, little-endian."""
    array = bytes_of(tensor).numpy()
    if sys.byteorder == "big" and tensor.itemsize > 1:
        size = tensor.itemsize // (2 if tensor.is_complex() else 1)
        array = array.reshape(-1, size)[:, ::-1].reshape(-1)
        return memoryview(array.tobytes())
    return array.data
