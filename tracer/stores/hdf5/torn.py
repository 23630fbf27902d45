"""Repairs blocks of HDF5 metadata that were half written when the process was killed.

HDF5 rewrites the header of a dataset, and the index of its chunks, in place. The system writes page by page, and a kill
stops it between two pages. So a block of several pages may have new first pages and an old last page, which holds the
checksum. HDF5 then refuses the block, and all chunks that it leads to are lost.

Such a block can be restored to its state before the write, because it changes only in known ways: an index gets
entries, one after the other, and a dataset gets rows. So entries or rows are removed one by one until the block matches
the checksum in the file, which proves that this is the old state. A block with any other damage matches no state and
stays unchanged.

The layouts are those of the HDF5 File Format Specification 3.0, III.B and VII.D ("Extensible Array"), the constants
those of H5Dpkg.h (``H5D_EARRAY_*``), the order in which entries are added that of H5EA.c.
"""

from __future__ import annotations

import collections
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracer.memory import PAGE

_ADDRESS: Final = 8
_UNDEFINED: Final = 0xFF
"""Each byte of the undefined address."""
_PAGE_ENTRIES: Final = 1024
"""Entries per page of a data block; smaller data blocks have no pages."""
_IN_INDEX: Final = 4
"""Entries in the index block itself."""
_SMALLEST: Final = 16
"""Entries of the first data block."""
_DIRECT: Final = 4
"""Super blocks that do not exist: the index block refers directly to their data blocks (1, 1, 2 and 2)."""
_DIRECT_BLOCKS: Final = 6
_SUPER_BLOCKS: Final = 29
"""Super blocks of an array with the maximum of 2^32 chunks."""
_BLOCK_START: Final = 18
"""Bytes at the start of a data or super block: signature, version, client, address of the header, and an offset."""
_INDEX_START: Final = 14
_FRAME: Final = _BLOCK_START + 4
"""Bytes of a data block without entries: `_BLOCK_START` and a checksum. No rewritten block is smaller."""
_STATISTICS: Final = struct.Struct("<6Q")
_STATISTICS_AT: Final = 12
_DATASPACE: Final = 1
_LAYOUT: Final = 8
_AT_ONCE: Final = 1 << 18
"""States of a block that are checksummed together."""
_FARTHEST: Final = 1 << 24
"""The most rows that are assumed to have been added by a torn write; trying them all takes seconds."""

_FILTERED: Final = range(_ADDRESS + 1 + 4, _ADDRESS + 8 + 4 + 1)
"""Possible bytes of an entry of a filtered chunk: its address, its size (1 to 8 bytes), and a mask of 4 bytes."""

_Blocks = NDArray[np.uint8]


class _SuperBlock(NamedTuple):
    """A block of an index that leads to data blocks.

    Attributes
    ----------
    number : int
    blocks, entries, pages : int
        Number of its data blocks, entries of each, and pages of each (0 if they have no pages).
    before : int
        Entries of all earlier data blocks.
    bits : int
        Bytes of the bitmap of initialized pages.
    nbytes : int
        Bytes of the super block itself, with its checksum.
    """

    number: int
    blocks: int
    entries: int
    pages: int
    before: int
    bits: int
    nbytes: int


def checksums(blocks: _Blocks) -> NDArray[np.uint32]:
    """The checksums that HDF5 uses for metadata, Bob Jenkins' lookup3 (`hashlittle`), of blocks of equal length.

    Parameters
    ----------
    blocks : numpy.ndarray of uint8, shape (blocks, bytes)

    Returns
    -------
    numpy.ndarray of uint32, shape (blocks,)

    Examples
    --------
    >>> text = np.frombuffer(b"Four score and seven years ago", np.uint8)
    >>> hex(checksums(text[None])[0])
    '0x17770551'
    """
    count, nbytes = blocks.shape
    words = np.zeros((max(1, -(-nbytes // 12)) * 3, count), "<u4")
    padded = np.zeros((count, words.shape[0] * 4), np.uint8)
    padded[:, :nbytes] = blocks
    words[:] = padded.view("<u4").T
    a, b, c = (np.full(count, (0xDEADBEEF + nbytes) & 0xFFFFFFFF, np.uint32) for _ in range(3))

    def turned(value: NDArray[np.uint32], by: int) -> NDArray[np.uint32]:
        return value << np.uint32(by) | value >> np.uint32(32 - by)

    last = len(words) - 3
    for place in range(0, last, 3):
        a += words[place]
        b += words[place + 1]
        c += words[place + 2]
        for by in ((4, 6, 8), (16, 19, 4)):
            a = a - c ^ turned(c, by[0])
            c = c + b
            b = b - a ^ turned(a, by[1])
            a = a + c
            c = c - b ^ turned(b, by[2])
            b = b + a
    if nbytes:
        a += words[last]
        b += words[last + 1]
        c += words[last + 2]
        c = (c ^ b) - turned(b, 14)
        a = (a ^ c) - turned(c, 11)
        b = (b ^ a) - turned(a, 25)
        c = (c ^ b) - turned(b, 16)
        a = (a ^ c) - turned(c, 4)
        b = (b ^ a) - turned(a, 14)
        c = (c ^ b) - turned(b, 24)
    return c


def checksum(block: bytes) -> int:
    """The checksum of one block; see `checksums`."""
    return int(checksums(np.frombuffer(block, np.uint8)[None])[0])


def restored(block: bytes, at: int) -> bytes:
    """Restore a block of metadata to its state before a torn write; any other block is returned unchanged.

    Parameters
    ----------
    block : bytes
        Bytes that HDF5 reads at once: a part of an array's chunk index, or the header of an object, perhaps with other
        bytes behind it.
    at : int
        Offset of the block in the file. A block within one page cannot be torn.
    """
    if len(block) < _FRAME:
        return block
    nbytes = _header_bytes(block) if block[:4] == b"OHDR" else len(block)
    if not _FRAME <= nbytes <= len(block) or at // PAGE == (at + nbytes - 1) // PAGE:
        return block
    body, rest = block[: nbytes - 4], block[nbytes - 4 :]
    whole = np.frombuffer(body, np.uint8)
    has = np.frombuffer(rest[:4], "<u4")[0]
    should = checksums(whole[None])[0]
    if has == should:
        return block
    # The page border may lie within the checksum. Then the block and the first bytes of the checksum are new, and the
    # last bytes of the checksum are old.
    mixed = max(bits for bits in (0, 8, 16, 24) if not (has ^ should) & np.uint32((1 << bits) - 1))
    for versions in _versions(whole):
        differ = checksums(versions) ^ has
        right = int(differ.argmin())
        if not differ[right]:
            earlier: bytes = versions[right].tobytes()
            return earlier + rest
        if mixed and (differ >> np.uint32(mixed) == 0).any():
            return body + int(should).to_bytes(4, "little") + rest[4:]
    older = _without_newer_pages(whole, [cut for cut in range(-at % PAGE, nbytes, PAGE) if cut])
    if older is None:
        return block
    return older.tobytes() + checksum(older.tobytes()).to_bytes(4, "little") + rest[4:]


def _without_newer_pages(body: _Blocks, cuts: Sequence[int]) -> _Blocks | None:
    """Restore a block whose later pages are new while an earlier page is old; None if it does not look like one.

    A power failure may leave such a block, because disks do not write pages in order. The checksum in the file is then
    the new one, and parts of the new block are lost, so the checksum proves nothing. But missing entries show: those
    that were added last. A block with other damage may be mistaken for such a block. It then leads to wrong bytes,
    which the checksums of the messages reveal.

    Parameters
    ----------
    body : numpy.ndarray of uint8
        The block without the checksum.
    cuts : sequence of int
        Offsets of page borders in it.
    """
    kind = body[:4].tobytes()
    if kind == b"OHDR":
        changing = [sum(place) for place in (_place_of_rows(body), _place_of_index(body)) if place is not None]
        return body if len(changing) == 2 and max(changing) <= cuts[-1] else None
    if kind == b"EAHD":
        return body if len(body) <= cuts[-1] else None
    entries = list(_entries_of(body) or ())
    for number, (at, _, bit) in enumerate(entries):
        address = body[at : at + _ADDRESS]
        inside = next((cut - at for cut in cuts if at < cut < at + _ADDRESS), _ADDRESS)
        missing = not body[at] & bit if bit >= 0 else bool((address[:inside] == _UNDEFINED).all())
        if missing:
            # entries behind a missing entry were added later, so they are removed, too
            rest = collections.deque(_emptied_one_by_one(body, entries[number:]), 1)
            return None if at >= cuts[-1] else rest.pop() if rest else body
    return None


def _versions(body: _Blocks) -> Iterator[_Blocks]:
    """Possible earlier states of a block, without checksum, in groups; the likeliest first."""
    kind = body[:4].tobytes()
    if kind == b"OHDR":
        yield from _shorter(body)
    elif kind == b"EAHD" and len(body) == 68:
        yield from _earlier(body)
    entries = _entries_of(body)
    if entries is not None:
        yield from _with_fewer(body, list(entries))


def _entries_of(body: _Blocks) -> Iterator[tuple[int, int, int]] | None:
    """Each entry in a block of an index: offset, size, and the mask of its bit, or -1 if it consists of whole bytes."""
    kind = body[:4].tobytes()
    if kind == b"EAIB":
        return _index_entries(body)
    if kind == b"EASB":
        return _super_entries(body)
    if kind == b"EADB":
        return _data_entries(body)
    size, rest = divmod(len(body), _PAGE_ENTRIES)
    # a page of a data block, which has no signature
    if kind not in (b"OHDR", b"EAHD") and not rest and size in (_ADDRESS, *_FILTERED):
        return _entries(0, size, _PAGE_ENTRIES)
    return None


def _entries(start: int, size: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Entries of chunks: an address, followed by size and mask if the chunks have a filter."""
    for at in range(start, start + size * count, size):
        yield at, size, -1


def _index_entries(body: _Blocks) -> Iterator[tuple[int, int, int]] | None:
    # the block ends with the addresses of all super blocks that an array may have
    supers = _SUPER_BLOCKS - _DIRECT
    size, rest = divmod(len(body) - _INDEX_START - _ADDRESS * (_DIRECT_BLOCKS + supers), _IN_INDEX)
    if rest or size not in (_ADDRESS, *_FILTERED):
        return None
    first = _INDEX_START + size * _IN_INDEX
    return itertools.chain(_entries(_INDEX_START, size, _IN_INDEX), _entries(first, _ADDRESS, _DIRECT_BLOCKS + supers))


def _data_entries(body: _Blocks) -> Iterator[tuple[int, int, int]] | None:
    for size in _FILTERED if body[5] else (_ADDRESS,):
        count, rest = divmod(len(body) - _BLOCK_START, size)
        if not rest and _SMALLEST <= count <= _PAGE_ENTRIES and count.bit_count() == 1:
            return _entries(_BLOCK_START, size, count)
    return None


def _super_entries(body: _Blocks) -> Iterator[tuple[int, int, int]] | None:
    start = int.from_bytes(body[_BLOCK_START - 4 : _BLOCK_START].tobytes(), "little")
    found = next((one for one in _super_blocks() if one.before == start), None)
    if found is None or found.number < _DIRECT or len(body) != found.nbytes - 4:
        return None
    return _of_super_block(found)


def _of_super_block(one: _SuperBlock) -> Iterator[tuple[int, int, int]]:
    for block in range(one.blocks):
        yield _BLOCK_START + one.bits + _ADDRESS * block, _ADDRESS, -1
        for page in range(block * one.pages, (block + 1) * one.pages):
            yield _BLOCK_START + page // 8, 1, 0x80 >> page % 8


def _super_blocks() -> Iterator[_SuperBlock]:
    before = 0
    for number in range(_SUPER_BLOCKS):
        blocks, entries = 1 << number // 2, _SMALLEST << (number + 1) // 2
        pages = entries // _PAGE_ENTRIES if entries > _PAGE_ENTRIES else 0
        bits = blocks * -(-pages // 8)
        yield _SuperBlock(number, blocks, entries, pages, before, bits, _FRAME + bits + _ADDRESS * blocks)
        before += blocks * entries


def _with_fewer(body: _Blocks, entries: list[tuple[int, int, int]]) -> Iterator[_Blocks]:
    """The block without its last entry, without its last two entries, and so on, in groups."""
    versions = []
    for version in _emptied_one_by_one(body, entries):
        versions.append(version)
        if len(versions) == 64:
            yield np.stack(versions)
            versions.clear()
    if versions:
        yield np.stack(versions)


def _emptied_one_by_one(body: _Blocks, entries: list[tuple[int, int, int]]) -> Iterator[_Blocks]:
    current = body.copy()
    for at, size, bit in reversed(entries):
        if bit < 0:
            blank = np.zeros(size, np.uint8)
            blank[:_ADDRESS] = _UNDEFINED
        else:
            blank = current[at : at + 1] & np.uint8(0xFF ^ bit)
        if not np.array_equal(current[at : at + size], blank):
            current[at : at + size] = blank
            yield current.copy()


def _earlier(body: _Blocks) -> Iterator[_Blocks]:
    """The header of an index with fewer chunks; all its numbers follow from the number of chunks."""
    size = int(body[6])
    torn = _STATISTICS.unpack_from(body.tobytes(), _STATISTICS_AT)[4]
    supers: list[tuple[int, int]] = []
    blocks: list[tuple[int, int, int]] = []
    for one in _super_blocks():
        if one.before > torn + _AT_ONCE:
            break
        if one.number >= _DIRECT:
            supers.append((one.before, one.nbytes))
        nbytes = _FRAME + (one.pages * (_PAGE_ENTRIES * size + 4) if one.pages else one.entries * size)
        # leave out data blocks beyond the largest number of chunks that is tried
        most = min(one.blocks, (torn + _AT_ONCE - one.before) // one.entries + 1)
        blocks += [(one.before + block * one.entries, nbytes, one.entries) for block in range(most)]
    starts = [np.array([start for start, *_ in parts]) for parts in (supers, blocks)]
    sums = [np.cumsum([0, *(part[1] for part in parts)]) for parts in (supers, blocks)]
    held = np.cumsum([0, *(entries for *_, entries in blocks)])
    for chunks in _around(torn, _AT_ONCE):
        chunks = chunks[chunks > 0]
        if not len(chunks):
            continue
        counts = [np.searchsorted(begin, chunks - _IN_INDEX, "left") for begin in starts]
        found = (counts[0], sums[0][counts[0]], counts[1], sums[1][counts[1]], chunks, _IN_INDEX + held[counts[1]])
        versions = np.repeat(body[None], len(chunks), 0)
        versions[:, _STATISTICS_AT : _STATISTICS_AT + _STATISTICS.size] = (
            np.stack(found, 1).astype("<u8").view(np.uint8)
        )
        yield versions
    empty = body.copy()
    empty[_STATISTICS_AT:-_ADDRESS] = 0
    empty[-_ADDRESS:] = _UNDEFINED
    yield empty[None]


def _shorter(body: _Blocks) -> Iterator[_Blocks]:
    """The header of a dataset with fewer rows, and without rows and index."""
    place = _place_of_rows(body)
    if place is None:
        return
    at, _ = place
    torn = int.from_bytes(body[at : at + 8].tobytes(), "little")
    for rows in _around(torn, _FARTHEST):
        versions = np.repeat(body[None], len(rows), 0)
        versions[:, at : at + 8] = rows.astype("<u8").view(np.uint8).reshape(-1, 8)
        yield versions
    index = _place_of_index(body)
    if index is not None:
        empty = body.copy()
        empty[at : at + 8] = 0
        empty[index[0] : sum(index)] = _UNDEFINED
        yield empty[None]


def _place_of_rows(body: _Blocks) -> tuple[int, int] | None:
    """Offset and size of the number of rows in a dataset's header."""
    at, length = _messages_in(body).get(_DATASPACE, (0, 0))
    return None if length < 12 or body[at] != 2 else (at + 4, 8)


def _place_of_index(body: _Blocks) -> tuple[int, int] | None:
    """Offset and size of the chunk index's address in a dataset's header."""
    found = _messages_in(body).get(_LAYOUT)
    return None if found is None else (sum(found) - _ADDRESS, _ADDRESS)


def _messages_in(body: _Blocks) -> dict[int, tuple[int, int]]:
    """Place and length of the messages in an object's header, by kind."""
    data = body.tobytes()
    start, size = header(data)
    end, head = min(start + size, len(data)), 6 if data[5] & 4 else 4
    return {kind: (place, length) for kind, place, length in messages(data, start, end, head)}


def _around(torn: int, farthest: int) -> Iterator[NDArray[np.int64]]:
    """Possible earlier values of a number: smaller ones, and some larger ones in case a page border cuts its bytes."""
    if not 0 <= torn < 1 << 62:
        return
    for first in range(torn, max(-1, torn - farthest), -_AT_ONCE):
        yield np.arange(first, max(-1, first - _AT_ONCE), -1)
        if first == torn:
            yield np.arange(torn + 1, torn + (1 << 16) + 1)


def _header_bytes(block: bytes) -> int:
    """Bytes of the first part of an object's header, with its checksum."""
    start, size = header(block)
    return start + size + 4


def header(block: bytes) -> tuple[int, int]:
    """Offset and total bytes of the messages in an object's header of version 2."""
    flags = block[5]
    # optional fields: four times, and two limits for the storage of attributes
    place = 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
    width = 1 << (flags & 3)
    return place + width, int.from_bytes(block[place : place + width], "little")


def messages(data: bytes, place: int, end: int, head: int) -> Iterator[tuple[int, int, int]]:
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
