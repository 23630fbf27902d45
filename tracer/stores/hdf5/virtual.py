"""Detects virtual datasets by their headers, because HDF5 may hang when it opens a damaged one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from tracer.errors import TraceCorruptError
from tracer.stores.hdf5.torn import header, messages

_LAYOUT, _CONTINUED = 0x08, 0x10
"""Kinds of messages in the header of an object: the layout of its data, and the continuation of the header."""
_HEADER_LIMIT: Final = 1 << 20
"""The most bytes of a part of a header."""
_HEADER_PARTS: Final = 100
"""The most parts of a header."""


def is_virtual(read: Callable[[int, int], bytes], address: int) -> bool:
    """Whether the object header at an address belongs to a virtual dataset.

    HDF5 reads the global heap of a virtual dataset as soon as it opens or inspects it. Global heaps have no checksum,
    and a damaged heap makes HDF5 hang. Nothing in a valid trace uses a global heap.

    Parameters
    ----------
    read : callable
        ``read(nbytes, offset)`` returns bytes of the file, fewer at its end.
    address : int
    """
    start = read(64, address)
    if start[:4] == b"OHDR":
        front, size = header(start)
        head = 6 if start[5] & 4 else 4
    else:
        # a header of version 1, from older HDF5 libraries
        front, size = 16, int.from_bytes(start[8:12], "little")
        head = 8
    # in version 2, each part has a signature in front of the messages, and a checksum behind them
    behind = 0 if head == 8 else 4
    blocks, known = [(address, front, front + size + behind)], 1
    while blocks:
        begin, front, size = blocks.pop()
        if size > _HEADER_LIMIT or known > _HEADER_PARTS:
            raise TraceCorruptError("the header of an object is larger than any of a trace")
        data = read(size, begin)
        for kind, place, length in messages(data, front, len(data) - behind, head):
            body = data[place : place + length]
            if kind == _LAYOUT and body[1:2] == b"\x03" and body[0] > 2:
                return True
            if kind == _CONTINUED and len(body) >= 16:
                known += 1
                offset, size = struct.unpack_from("<QQ", body)
                blocks.append((offset, behind, size))
    return False
