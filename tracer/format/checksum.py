"""CRC-32C, the checksum of everything in a trace, by the fastest installed library that computes it correctly.

awscrt is always installed. crc32c-rs (the extra ``fast``) takes three quarters of its time for data outside the CPU
cache, because it reads from front to back instead of at several distant places, and half of its time per call. But
crc32c-rs is young, and a wrong checksum loses a trace. So it is used only if it passes a test on this processor.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Final

Checksum = Callable[..., int]
"""``crc32c(data, before=0)``: the checksum of a contiguous buffer, continued from the checksum of the data before."""

_PATTERN: Final = bytes(range(251)) * 84
_EXPECTED: Final = {
    0: 0x00000000,
    9: 0x7144C5A8,
    100: 0xC1CAEBE5,
    1000: 0x11F66220,
    5000: 0x83F68E3A,
    21084: 0x432352A7,
}
"""The checksums of prefixes of the pattern, by length; libraries have a code path of its own for each length."""


def _choose() -> Checksum:
    """The function of the fastest installed library that is right."""
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
    """Whether a function computes CRC-32C (RFC 3720), for short and long data, in one call and in several.

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
    except Exception:  # noqa: BLE001 - any error excludes the function
        return False


crc32c: Final[Any] = _choose()


_POLYNOMIAL: Final = 0x82F63B78
_ORDER: Final = 2**31 - 1
"""The order of x modulo the CRC polynomial: this many appended zero bits change a checksum only by a constant."""


def joined(first: int, second: int, nbytes: int) -> int:
    """The CRC-32C of two concatenated pieces of data, from the checksums of both.

    Parameters
    ----------
    first, second : int
    nbytes : int
        Bytes of the second piece.

    Examples
    --------
    >>> joined(crc32c(b"some"), crc32c(b"thing"), 5) == crc32c(b"something")
    True
    """
    return _moved(first, 8 * nbytes % _ORDER) ^ second


def without_zeros(checksum: int, zeros: int) -> int:
    """The CRC-32C of data, from the checksum of the same data with `zeros` zero bytes behind it.

    Examples
    --------
    >>> without_zeros(crc32c(b"some" + bytes(7)), 7) == crc32c(b"some")
    True
    """
    return _moved(checksum ^ crc32c(bytes(zeros)), -8 * zeros % _ORDER)


def _moved(checksum: int, bits: int) -> int:
    """A checksum's contribution to the checksum of its data with `bits` bits appended (negative: removed)."""
    low, second, third, high = _tables(bits)
    return low[checksum & 255] ^ second[checksum >> 8 & 255] ^ third[checksum >> 16 & 255] ^ high[checksum >> 24]


@functools.lru_cache(64)
def _tables(bits: int) -> tuple[list[int], ...]:
    """Products with x to the power of `bits`, for each value of each byte of a checksum, lowest byte first."""
    power, square = 1 << 31, 1 << 30  # the polynomials 1 and x: the highest bit is the coefficient of 1
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
    """The product of two polynomials modulo the CRC polynomial; the highest bit is the coefficient of 1."""
    product = 0
    for place in range(31, -1, -1):
        if one >> place & 1:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product
