"""CRC-32C, the checksum of all that a trace holds, by the fastest library that is there and right.

awscrt, which every installation has, computes it with the processor's widest instructions, but follows several distant
places of what it reads. crc32c-rs (the extra ``fast``) goes through it from front to back, which for what is not in the
processor's cache takes three quarters of the time, and each call of it half. It is young, and a checksum that is wrong
loses a trace, so it is taken only where it gives what the standard says, on this processor.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Final

Checksum = Callable[..., int]
"""``crc32c(data, before=0)``: of a contiguous buffer, continued from the checksum of what came before it."""

_PATTERN: Final = bytes(range(251)) * 84
_EXPECTED: Final = {
    0: 0x00000000,
    9: 0x7144C5A8,
    100: 0xC1CAEBE5,
    1000: 0x11F66220,
    5000: 0x83F68E3A,
    21084: 0x432352A7,
}
"""The checksums of so many bytes of the pattern: libraries treat each of these lengths in another way."""


def _choose() -> Checksum:
    """The faster of the libraries that are installed, if it is right."""
    try:
        from crc32c_rs import crc32c as fast
    except ImportError:
        pass
    else:
        if is_right(fast):
            return fast
        warnings.warn(
            "crc32c-rs computes wrong checksums on this processor and is not used; awscrt is. Please report it to its "
            "authors",
            RuntimeWarning,
            stacklevel=2,
        )
    from awscrt.checksums import crc32c

    return crc32c  # type: ignore[no-any-return] # it has no types


def is_right(checksum: Checksum) -> bool:
    """Whether a function computes CRC-32C (RFC 3720), of short and long data, at once and in parts.

    Examples
    --------
    >>> import zlib
    >>> is_right(crc32c), is_right(zlib.crc32)
    (True, False)
    """
    data = memoryview(_PATTERN)
    try:
        whole = all(checksum(data[:length]) == expected for length, expected in _EXPECTED.items())
        return whole and checksum(data[4999:], checksum(data[:4999])) == _EXPECTED[len(_PATTERN)]
    except Exception:  # noqa: BLE001 - whatever is wrong with it, another is at hand
        return False


crc32c: Final[Any] = _choose()


_POLYNOMIAL: Final = 0x82F63B78
_ORDER: Final = 2**31 - 1
"""So many zero bits after any data leave its checksum as it is, but for a constant."""


def joined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32C of data that is followed by other data, from the checksums of both.

    Parameters
    ----------
    first, second : int
    nbytes : int
        Bytes of the second data.

    Examples
    --------
    >>> joined(crc32c(b"some"), crc32c(b"thing"), 5) == crc32c(b"something")
    True
    """
    return _moved(first, 8 * nbytes % _ORDER) ^ second


def without_zeros(checksum: int, zeros: int) -> int:
    """The CRC-32C of data, from the checksum of the same data with so many zero bytes behind it.

    Examples
    --------
    >>> without_zeros(crc32c(b"some" + bytes(7)), 7) == crc32c(b"some")
    True
    """
    return _moved(checksum ^ crc32c(bytes(zeros)), -8 * zeros % _ORDER)


def _moved(checksum: int, bits: int) -> int:
    """What a checksum adds to that of the data with so many bits behind it."""
    low, second, third, high = _tables(bits)
    return low[checksum & 255] ^ second[checksum >> 8 & 255] ^ third[checksum >> 16 & 255] ^ high[checksum >> 24]


@functools.lru_cache(64)
def _tables(bits: int) -> tuple[list[int], ...]:
    """What each value of each byte of a checksum adds, lowest byte first: a product, which is a sum over its bits."""
    power, square = 1 << 31, 1 << 30  # 1 and x, as the highest bits
    while bits:
        if bits & 1:
            power = _times(power, square)
        square = _times(square, square)
        bits >>= 1
    tables = []
    for byte in range(4):
        table = [0]
        for bit in range(8):
            product = _times(1 << (8 * byte + bit), power)
            table += [entry ^ product for entry in table]
        tables.append(table)
    return tuple(tables)


def _times(one: int, other: int) -> int:
    """The product of two polynomials modulo that of the checksum; the highest bit is the coefficient of 1."""
    product = 0
    for place in range(31, -1, -1):
        if one >> place & 1:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product
