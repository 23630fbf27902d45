"""Reads from the header of a dataset whether it is virtual, before HDF5 opens it.

HDF5 reads the global heap of a virtual dataset as soon as it opens it. Global heaps have no checksum, and a damaged
heap makes HDF5 hang. The layouts are those of the HDF5 File Format Specification 3.0, IV.A.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final

from tracer.errors import TraceCorruptError

_LAYOUT, _CONTINUED = 0x08, 0x10
"""Kinds of messages in the header of an object: the layout of its data, and the continuation of the header."""
_VIRTUAL: Final = 3
"""The class of a virtual dataset, since version 3 of the layout message."""
_HEADER_LIMIT: Final = 1 << 20
"""The most bytes of a part of a header."""
_HEADER_PARTS: Final = 100
"""The most parts of a header."""


def is_virtual(read: Callable[[int, int], bytes], address: int) -> bool:
    """Whether the object whose header begins at `address` is a virtual dataset.

    Parameters
    ----------
    read : callable
        ``read(nbytes, offset)`` returns bytes of the file, fewer at its end.
    address : int

    Raises
    ------
    TraceCorruptError
        If the header is larger than any of a trace.
    """
    start = read(64, address)
    if start[:4] == b"OHDR":
        front, size = _messages_of(start)
        head = 6 if start[5] & 4 else 4
    else:
        # a header of version 1, from older HDF5 libraries
        front, size = 16, int.from_bytes(start[8:12], "little")
        head = 8
    # in version 2, each part has a signature in front of the messages, and a checksum behind them
    behind = 0 if head == 8 else 4
    parts, known = [(address, front, front + size + behind)], 1
    while parts:
        begin, front, size = parts.pop()
        if size > _HEADER_LIMIT or known > _HEADER_PARTS:
            raise TraceCorruptError("the header of an object is larger than any of a trace")
        data = read(size, begin)
        for kind, place, length in _messages(data, front, len(data) - behind, head):
            body = data[place : place + length]
            if kind == _LAYOUT and len(body) > 1 and body[0] > 2 and body[1] == _VIRTUAL:
                return True
            if kind == _CONTINUED and len(body) >= 16:
                known += 1
                offset, size = struct.unpack_from("<QQ", body)
                parts.append((offset, behind, size))
    return False


def _messages_of(block: bytes) -> tuple[int, int]:
    """Offset and total bytes of the messages in an object's header of version 2."""
    flags = block[5]
    # optional fields: four times, and two limits for the storage of attributes
    place = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    return place + width, int.from_bytes(block[place : place + width], "little")


def _messages(data: bytes, place: int, end: int, head: int) -> Iterator[tuple[int, int, int]]:
    """Kind, place and length of each message in a part of an object's header.

    Parameters
    ----------
    data : bytes
    place, end : int
        Start and end of the messages in `data`.
    head : int
        Bytes in front of each message: 4 or 6, or 8 in headers of version 1.
    """
    while place + head <= end:
        old = head == 8
        kind = int.from_bytes(data[place : place + 2], "little") if old else data[place]
        length = int.from_bytes(data[place + 2 : place + 4] if old else data[place + 1 : place + 3], "little")
        yield kind, place + head, length
        place += head + length
