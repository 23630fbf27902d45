"""Blocks of HDF5's metadata in which one byte is wrong, put right.

A flipped bit in a block of metadata, which has some hundred bytes, costs all that the block leads to: an array with all
its chunks, or a group with all its arrays. Behind each block stands a checksum. Of all blocks that differ from a
damaged one in a single byte, one has the checksum that is there, save in one case of some thousands in which another
has it, too; and whatever that one leads to still has to pass checksums of its own.

The layouts are those of the HDF5 File Format Specification 3.0, III.A.2 ("Version 2 B-trees"), III.G ("Fractal Heap")
and IV.A.1.b ("Version 2 Data Object Header Prefix"), the numbers those of H5Gdense.c and H5Adense.c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.stores.torn import checksum, checksums, header, is_page

LONGEST: Final = 1 << 14
"""Bytes of the longest block that is put right: to try each bit of it takes seconds."""
HEADER_BYTES: Final = 1 << 12
"""Bytes of an object's header that are looked at where its own size is in doubt."""
_EACH_VALUE: Final = 1 << 10
"""Bytes of the longest block in which each byte is tried with each value; in longer ones, each bit."""
_AT_ONCE: Final = 1 << 23
"""Bytes of the versions that are tried at once."""
_HEADER: Final = b"OHDR"
_HEAP: Final = b"FHDB"
_HEAP_CHECKSUM: Final = 17
"""Where in a block of a heap the checksum stands: behind signature, version, header's address and offset."""
_TREE_RECORDS: Final = {5: 11, 6: 15, 8: 17, 9: 13}
"""Bytes of a record of the B-trees that have the links and attributes of an object, by type."""
_TREE_START: Final = 6
_TREE_POINTERS: Final = (9, 10, 11, 12)
"""Bytes of what a node of a B-tree says of a node below it: address, records, and those of all nodes below that."""
_SIGNATURES: Final = (
    *(_HEADER, b"OCHK", b"EAHD", b"EAIB", b"EASB", b"EADB", b"FRHP", _HEAP, b"FHIB"),
    *(b"BTHD", b"BTIN", b"BTLF"),
)

_Blocks = NDArray[np.uint8]


class _Frame(NamedTuple):
    """Where in a block its checksum stands, and the end of what that is of."""

    end: int
    at: int


def is_header(block: bytes) -> bool:
    """Whether a block is the header of an object, perhaps with a byte of its signature wrong."""
    return sum(one == other for one, other in zip(block, _HEADER, strict=False)) > 2


def righted(block: bytes, may_spend: Callable[[int], bool] = lambda nbytes: True) -> tuple[bytes, int | None]:
    """A block of metadata as it was before one of its bytes changed, and which one; None where none is known to have.

    Parameters
    ----------
    block : bytes
        What HDF5 reads at once: a block of one of the kinds that have a checksum, or a page of an index of chunks. The
        header of an object may be followed by other bytes.
    may_spend : callable
        Asked before each search whether it may be made, with the bytes that it computes checksums of: some 0.4 GB/s.

    Examples
    --------
    >>> block = b"OCHK" + bytes(range(40))
    >>> block += checksum(block).to_bytes(4, "little")
    >>> righted(block)[1], righted(block[:9] + b"?" + block[10:]) == (block, 9)
    (None, True)
    """
    if block[:4] not in _SIGNATURES:
        for place in range(4):
            for signature in _SIGNATURES:
                if signature[:place] + signature[place + 1 :] == block[:place] + block[place + 1 : 4]:
                    candidate = signature + block[4:]
                    if _is_right(candidate):
                        return candidate, place
        if not is_page(len(block) - 4):
            return block, None
    frames = list(_frames(block))
    if _is_right(block) or (not frames and block[:4] != _HEADER):
        return block, None
    if block[:4] == _HEADER:
        # these say where the header ends
        for place in range(4, min(header(block)[0], len(block))):
            for bit in range(8):
                candidate = _flipped(block, place, 1 << bit)
                if _is_right(candidate):
                    return candidate, place
    for frame in frames:
        if frame.end <= LONGEST and may_spend(frame.end**2 * (255 if frame.end <= _EACH_VALUE else 8)):
            place, mask = _wrong(block, frame)
            if mask:
                return _flipped(block, place, mask), place
    return block, None


def _flipped(block: bytes, place: int, mask: int) -> bytes:
    return block[:place] + bytes([block[place] ^ mask]) + block[place + 1 :]


def _frames(block: bytes) -> Iterator[_Frame]:
    """Where the checksum of a block may stand; of a node of a B-tree that depends on how many records are in it."""
    nbytes = len(block)
    if nbytes < 8:
        return
    kind = block[:4]
    if kind == _HEADER:
        start, size = header(block)
        if start + size + 4 <= nbytes:
            yield _Frame(start + size, start + size)
    elif kind == _HEAP:
        yield _Frame(nbytes, _HEAP_CHECKSUM)
    elif kind in (b"BTLF", b"BTIN"):
        record = _TREE_RECORDS.get(block[5], nbytes)
        for pointer in (0,) if kind == b"BTLF" else _TREE_POINTERS:
            for end in range(_TREE_START + pointer + record + pointer, nbytes - 3, record + pointer):
                yield _Frame(end, end)
    else:
        yield _Frame(nbytes - 4, nbytes - 4)


def _is_right(block: bytes) -> bool:
    return any(not _difference(block, frame) for frame in _frames(block))


def _body(block: bytes, frame: _Frame) -> bytes:
    """What the checksum is of: where it stands within that, its place is taken by zeros."""
    body = block[: frame.end]
    return body if frame.at >= frame.end else body[: frame.at] + bytes(4) + body[frame.at + 4 :]


def _stored(block: bytes, frame: _Frame) -> int:
    return int.from_bytes(block[frame.at : frame.at + 4], "little")


def _difference(block: bytes, frame: _Frame) -> int:
    return checksum(_body(block, frame)) ^ _stored(block, frame)


def _wrong(block: bytes, frame: _Frame) -> tuple[int, int]:
    """The byte that is wrong, and which bits of it; no bits where it is not one."""
    differ = _difference(block, frame).to_bytes(4, "little")
    if sum(byte != 0 for byte in differ) == 1:  # the checksum itself
        place = next(place for place, byte in enumerate(differ) if byte)
        return frame.at + place, differ[place]
    body = np.frombuffer(_body(block, frame), np.uint8)
    stored = np.uint32(_stored(block, frame))
    bits = np.left_shift(1, np.arange(8)).astype(np.uint8)
    several = np.setdiff1d(np.arange(1, 256), bits).astype(np.uint8)
    for masks in (bits, several) if len(body) <= _EACH_VALUE else (bits,):
        step = max(1, _AT_ONCE // (len(masks) * len(body)))
        for begin in range(0, len(body), step):
            places = np.repeat(np.arange(begin, min(begin + step, len(body))), len(masks))
            values = np.tile(masks, len(places) // len(masks))
            versions: _Blocks = np.repeat(body[None], len(places), 0)
            versions[np.arange(len(places)), places] ^= values
            found = np.flatnonzero(checksums(versions) == stored)
            if len(found):
                return int(places[found[0]]), int(values[found[0]])
    return 0, 0
