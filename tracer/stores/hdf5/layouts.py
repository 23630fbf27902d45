"""Reads how the data of an array is laid out from its header, before HDF5 opens it.

HDF5 may hang when it opens a damaged virtual dataset, and cannot open a dataset that a newer HDF5 has written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from tracer.errors import TraceCorruptError
from tracer.stores.hdf5.torn import checksum, header, messages

_LAYOUT, _CONTINUED = 0x08, 0x10
"""Kinds of messages in the header of an object: the layout of its data, and the continuation of the header."""
_VIRTUAL: Final = 3
"""The class of a virtual dataset, since version 3 of the layout message."""
_HEADER_LIMIT: Final = 1 << 20
"""The most bytes of a part of a header."""
_HEADER_PARTS: Final = 100
"""The most parts of a header."""


class DataLayout(NamedTuple):
    """The layout message of an object's header."""

    version: int
    kind: int
    part: bytes
    """The part of the header that holds the message, with its checksum."""

    @property
    def intact(self) -> bool:
        """Whether the part of the header matches its checksum; headers of version 1 have none."""
        return checksum(self.part[:-4]).to_bytes(4, "little") == self.part[-4:]

    @property
    def is_virtual(self) -> bool:
        """Whether the dataset is virtual.

        HDF5 reads the global heap of a virtual dataset as soon as it opens or inspects it. Global heaps have no
        checksum, and a damaged heap makes HDF5 hang. Nothing in a valid trace uses a global heap.
        """
        return self.version > 2 and self.kind == _VIRTUAL


def layout_of(read: Callable[[int, int], bytes], address: int) -> DataLayout | None:
    """The layout in the object header at an address; None if it has none, as a group. A virtual one comes first.

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
    found: DataLayout | None = None
    while blocks:
        begin, front, size = blocks.pop()
        if size > _HEADER_LIMIT or known > _HEADER_PARTS:
            raise TraceCorruptError("the header of an object is larger than any of a trace")
        data = read(size, begin)
        for kind, place, length in messages(data, front, len(data) - behind, head):
            body = data[place : place + length]
            if kind == _LAYOUT and len(body) > 1:
                layout = DataLayout(body[0], body[1], data)
                if layout.is_virtual:
                    return layout
                found = found or layout
            if kind == _CONTINUED and len(body) >= 16:
                known += 1
                offset, size = struct.unpack_from("<QQ", body)
                blocks.append((offset, behind, size))
    return found
