"""Recognises virtual datasets by their headers, before HDF5 opens them, which may never return."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from tracer.errors import TraceCorruptError
from tracer.stores.hdf5.torn import header, messages

_LAYOUT, _CONTINUED = 0x08, 0x10
"""What messages in the header of an object are about: how its data is laid out, and where the header goes on."""
_HEADER_LIMIT: Final = 1 << 20
"""Bytes of the largest part of a header that is read."""
_HEADER_PARTS: Final = 100
"""Parts of a header that are read, at most."""


def is_virtual(read: Callable[[int, int], bytes], address: int) -> bool:
    """Whether the object header at an address is that of a virtual dataset.

    HDF5 reads the global heap of one as soon as it is opened, or asked what it is. Global heaps have no checksum, and
    of a damaged one the library never returns; nothing else that is read of a trace lies in one.

    Parameters
    ----------
    read : callable
        Gives so many bytes of the file from an offset on, or fewer where it ends.
    address : int
    """
    start = read(64, address)
    if start[:4] == b"OHDR":
        front, size = header(start)
        head = 6 if start[5] & 4 else 4
    else:
        # a header of version 1, as older libraries write it
        front, size = 16, int.from_bytes(start[8:12], "little")
        head = 8
    # in version 2 a signature is before the messages, and a checksum behind them
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
