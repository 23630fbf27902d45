"""Triton kernels that read many tensors at once, each number once, for their hashes and their statistics.

`read` gets a table of the addresses of tensors of one dtype. Its programs share the tensors' pieces of 64 KiB, of which
each stores a row: moments, and XXH3's digest. `unite_statistics` and `unite_hashes` make the statistics and the hashes
of any number of tensors of the rows of their pieces.

A piece is read as words of eight bytes, 16 bytes at a time. A thread adds up the same two words of all 16 stripes of a
block, as XXH3 does, and takes the numbers out of the words. So nothing is exchanged between threads before the end of
the piece. Only the chain of a piece's blocks has to be computed sequentially.

Names and constants of XXH3 are those of its reference (https://xxhash.com). All sums of numbers are float64.
"""

# Triton compiles these functions, and types their arguments.
# mypy: ignore-errors

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1 = tl.constexpr(0x9E3779B1)
PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
PRIME64_2 = tl.constexpr(0xC2B2AE3D27D4EB4F)
PRIME64_3 = tl.constexpr(0x165667B19E3779F9)
PRIME_MX1 = tl.constexpr(0x165667919E3779F9)
PRIME_MX2 = tl.constexpr(0x9FB21C651E98DF25)
LOW_HALF = tl.constexpr(0xFFFFFFFF)
START = tl.constexpr(len(_SECRET) - 7)
TABLE: Final = (
    *(int.from_bytes(_SECRET[at : at + 8], "little") for at in range(START.value)),
    *(0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1),
)
"""The word at each byte of XXH3's secret; from `START` on, the initial values of its eight accumulators."""
COLUMNS = tl.constexpr(4)
"""Words of a tensor in the table of `read`: its address, its bytes, the address of its first row, its first piece."""
ROW = tl.constexpr(14)
"""Words of a row. Moments: counts of numbers, zeros, NaN and infinities; sums of the numbers, of squares and of moduli;
minimum, maximum; the sum of squared deviations, a number near the mean, the sum of the deviations from that number; the
exponent e of the power of two by which all of them but the counts, the minimum and the maximum are divided. The
digest."""
PIECE = tl.constexpr(65536)
"""Bytes of a piece."""
BLOCKS = tl.constexpr(64)
"""Blocks of 1024 bytes of a piece."""
SUMS = tl.constexpr(512)
"""Words for the sums of a piece's blocks."""
TOGETHER = tl.constexpr(128)
"""Rows that are united at once."""


# -- XXH3 ---------------------------------------------------------------------------------------------------


@triton.jit
def _folded(a, b):
    """The exclusive or of the two halves of a 128-bit product."""
    return (a * b) ^ tl.umulhi(a, b)


@triton.jit
def _avalanche(digest):
    digest ^= digest >> 37
    digest *= PRIME_MX1
    return digest ^ (digest >> 32)


@triton.jit
def _swapped(words, SHAPE: tl.constexpr, PAIRS: tl.constexpr):
    """Swap the two words of each pair of neighbours."""
    even, odd = tl.split(tl.reshape(words, PAIRS))
    return tl.reshape(tl.join(odd, even), SHAPE)


@triton.jit
def _word(data, at, BYTES: tl.constexpr):
    """The integer in this many bytes at an offset."""
    each = tl.arange(0, BYTES)
    parts = tl.load(data + at + each).to(tl.uint64)
    return tl.sum(parts << (8 * each).to(tl.uint64), 0)


@triton.jit
def _words(data, at):
    """The words at several offsets."""
    each = tl.arange(0, 8)
    parts = tl.load(data + at[:, None] + each[None, :]).to(tl.uint64)
    return tl.sum(parts << (8 * each).to(tl.uint64)[None, :], 1)


@triton.jit
def _mixed(data, at, table, key):
    """Mix the 16 bytes at several offsets with 16 bytes of the secret each."""
    return _folded(_words(data, at) ^ tl.load(table + key), _words(data, at + 8) ^ tl.load(table + key + 8))


@triton.jit
def _of_three(data, size, table):
    """The digest of 1 to 3 bytes."""
    first, middle, last = tl.load(data), tl.load(data + (size >> 1)), tl.load(data + size - 1)
    digest = (first.to(tl.uint64) << 16) | (middle.to(tl.uint64) << 24) | last.to(tl.uint64)
    digest |= size.to(tl.uint64) << 8
    digest ^= (tl.load(table) ^ tl.load(table + 4)) & LOW_HALF
    digest ^= digest >> 33
    digest *= PRIME64_2
    digest ^= digest >> 29
    digest *= PRIME64_3
    return digest ^ (digest >> 32)


@triton.jit
def _of_eight(data, size, table):
    """The digest of 4 to 8 bytes."""
    digest = _word(data, size - 4, 4) + (_word(data, 0, 4) << 32)
    digest ^= tl.load(table + 8) ^ tl.load(table + 16)
    digest ^= ((digest << 49) | (digest >> 15)) ^ ((digest << 24) | (digest >> 40))
    digest *= PRIME_MX2
    digest ^= (digest >> 35) + size.to(tl.uint64)
    digest *= PRIME_MX2
    return digest ^ (digest >> 28)


@triton.jit
def _of_sixteen(data, size, table):
    """The digest of 9 to 16 bytes."""
    low = _word(data, 0, 8) ^ tl.load(table + 24) ^ tl.load(table + 32)
    high = _word(data, size - 8, 8) ^ tl.load(table + 40) ^ tl.load(table + 48)
    turned = ((low << 8) & 0xFF00FF00FF00FF00) | ((low >> 8) & 0x00FF00FF00FF00FF)
    turned = ((turned << 16) & 0xFFFF0000FFFF0000) | ((turned >> 16) & 0x0000FFFF0000FFFF)
    turned = (turned << 32) | (turned >> 32)
    return _avalanche(size.to(tl.uint64) + turned + high + _folded(low, high))


@triton.jit
def _of_128(data, size, table):
    """The digest of 17 to 128 bytes."""
    each = tl.arange(0, 8)
    there = each // 2 <= (size - 1) // 32
    step = 16 * (each // 2)
    at = tl.where(there, tl.where(each % 2 == 0, step, size - 16 - step), 0)
    mixed = tl.where(there, _mixed(data, at, table, 16 * each), 0)
    return _avalanche(size.to(tl.uint64) * PRIME64_1 + tl.sum(mixed, 0))


@triton.jit
def _of_240(data, size, table):
    """The digest of 129 to 240 bytes."""
    each = tl.arange(0, 16)
    rounds = size // 16
    mixed = _mixed(data, tl.where(each < rounds, 16 * each, 0), table, tl.where(each < 8, 16 * each, 16 * each - 125))
    first = tl.sum(tl.where(each < 8, mixed, 0), 0)
    later = tl.sum(tl.where((each >= 8) & (each < rounds), mixed, 0), 0)
    low = _word(data, size - 16, 8) ^ tl.load(table + 119)
    high = _word(data, size - 8, 8) ^ tl.load(table + 127)
    return _avalanche(_avalanche(size.to(tl.uint64) * PRIME64_1 + first) + later + _folded(low, high))


@triton.jit
def _of_stripe(words, keys):
    """What the products of a stripe's words add to the accumulators."""
    keyed = words ^ keys
    return (keyed & LOW_HALF) * (keyed >> 32)


@triton.jit
def _of_blocks(data, size, sums, table):
    """The digest of more than 240 bytes, whose block sums are stored."""
    lane = tl.arange(0, 8)
    state = tl.load(table + START + lane)
    key = tl.load(table + 128 + 8 * lane)
    blocks = (size - 1) // 1024
    several = blocks // 8 * 8
    for block in range(0, several, 8):
        for one in tl.static_range(8):
            state += tl.load(sums + (block + one) * 8 + lane)
            state = (state ^ (state >> 47) ^ key) * PRIME32_1
    for block in range(several, blocks):
        state += tl.load(sums + block * 8 + lane)
        state = (state ^ (state >> 47) ^ key) * PRIME32_1
    last = _words(data, size - 64 + 8 * lane)
    state += tl.load(sums + blocks * 8 + lane) + _swapped(last, (8,), (4, 2))
    state += _of_stripe(last, tl.load(table + 121 + 8 * lane))
    even, odd = tl.split(tl.reshape(state ^ tl.load(table + 11 + 8 * lane), (4, 2)))
    return _avalanche(size.to(tl.uint64) * PRIME64_1 + tl.sum(_folded(even, odd), 0))


@triton.jit
def _digest(data, size, sums, table):
    """The XXH3 digest of at least one byte; beyond 240 bytes, the block sums must be stored."""
    if size > 240:
        digest = _of_blocks(data, size, sums, table)
    elif size > 128:
        digest = _of_240(data, size, table)
    elif size > 16:
        digest = _of_128(data, size, table)
    elif size > 8:
        digest = _of_sixteen(data, size, table)
    elif size > 3:
        digest = _of_eight(data, size, table)
    else:
        digest = _of_three(data, size, table)
    return digest


# -- moments ------------------------------------------------------------------------------------------------


@triton.jit
def _power(exponent):
    """2**exponent, for exponents of at most 1022."""
    return ((1023 + exponent.to(tl.int64)) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _raised(value, exponent):
    """Return value * 2**exponent, where 2**exponent itself may overflow."""
    half = exponent >> 1
    return value * _power(half) * _power(exponent - half)


@triton.jit
def _exponent(largest):
    """The exponent of the power of two to divide by, as in `tracer.numbers.moments`; of the largest modulus."""
    small = largest < 1e-290  # the bits of subnormal numbers have no exponent
    bits = tl.where(small, largest * 18014398509481984.0, largest).to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 2047) - tl.where(small, 1076, 1022)
    outside = (largest > 1e60) | ((largest < 1e-60) & (largest > 0))
    return tl.where(outside & (largest < float("inf")), exponent, 0).to(tl.int32)


@triton.jit
def _number(words, PART: tl.constexpr, LIKE: tl.constexpr):
    """One of the numbers that lie in each word."""
    if LIKE == "float64":
        found = words.to(tl.float64, bitcast=True)
    elif LIKE == "int64":
        found = words.to(tl.int64, bitcast=True)
    elif LIKE == "float32":
        found = (words >> (32 * PART)).to(tl.uint32).to(tl.float32, bitcast=True)
    elif LIKE == "int32":
        found = (words >> (32 * PART)).to(tl.uint32).to(tl.int32, bitcast=True)
    elif LIKE == "bfloat16":
        found = ((words >> (16 * PART)).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif LIKE == "float16":
        found = (words >> (16 * PART)).to(tl.uint16).to(tl.float16, bitcast=True)
    elif LIKE == "int16":
        found = (words >> (16 * PART)).to(tl.uint16).to(tl.int16, bitcast=True)
    elif LIKE == "int8":
        found = (words >> (8 * PART)).to(tl.uint8).to(tl.int8, bitcast=True)
    else:
        found = (words >> (8 * PART)).to(tl.uint8)
    return found


@triton.jit
def _wide(number, shift, LIKE: tl.constexpr):
    """Numbers in float64, divided by 2**shift."""
    wide = number.to(tl.float64)
    if LIKE == "float64":
        wide = _raised(wide, -shift)
    return wide


@triton.jit
def _store_moments(row, count, zeros, nan, inf, pivot, rest, second, absolute, low, high, shift):
    """Store the moments of a piece in its row; `rest` and `second` are sums of deviations from `pivot`."""
    mean = rest / count
    squares = second + pivot * (count * pivot + 2 * rest)
    second -= mean * rest
    squares = tl.where((inf > 0) | (squares != squares), float("inf"), tl.where(squares < 0, 0.0, squares))
    centre = pivot + mean
    tl.store(row, count)
    tl.store(row + 1, zeros)
    tl.store(row + 2, nan)
    tl.store(row + 3, inf)
    tl.store(row + 4, count * pivot + rest)
    tl.store(row + 5, tl.where(nan > 0, float("nan"), squares))
    tl.store(row + 6, absolute)
    tl.store(row + 7, low)
    tl.store(row + 8, high)
    tl.store(row + 9, tl.where(nan + inf > 0, float("nan"), tl.where(second < 0, 0.0, second)))
    tl.store(row + 10, centre)
    tl.store(row + 11, count * (mean - (centre - pivot)))
    tl.store(row + 12, shift.to(tl.float64))


@triton.jit
def _merged(a, b):
    """The moments of both sets of numbers, by the formulas of `tracer.numbers.moments`."""
    count = a[0] + b[0]
    origin = tl.where(a[0] > 0, a[10], b[10])
    mean_a = tl.where(a[0] > 0, a[11] / tl.maximum(a[0], 1.0), 0.0)
    mean_b = tl.where(b[0] > 0, b[10] - origin + b[11] / tl.maximum(b[0], 1.0), 0.0)
    mean = (a[0] * mean_a + b[0] * mean_b) / count
    centre = origin + mean
    rest = count * (mean - (centre - origin))
    second = a[9] + b[9] + a[0] * (mean_a - mean) * (mean_a - mean) + b[0] * (mean_b - mean) * (mean_b - mean)
    return (
        count, a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6],
        tl.minimum(a[7], b[7]), tl.maximum(a[8], b[8]), second, centre, rest,
    )  # fmt: skip


@triton.jit
def _nothing():
    """The moments of no numbers."""
    zero = tl.full((), 0.0, tl.float64)
    infinite = tl.full((), float("inf"), tl.float64)
    return zero, zero, zero, zero, zero, zero, zero, infinite, -infinite, zero, zero, zero


@triton.jit
def _store_entries(entries, of, exponent):
    """Store the statistics computed from moments, in the order of `ENTRIES`."""
    count, nan, undefined = of[0], of[2], float("nan")
    spread = tl.where(count > 1, of[9] / tl.maximum(count - 1, 1.0), undefined)
    tl.store(entries, _raised(of[4] / count, exponent))
    tl.store(entries + 1, _raised(tl.sqrt(spread), exponent))
    tl.store(entries + 2, _raised(tl.sqrt(of[5]), exponent))
    # as on the host, where the extremes have been divided by the power of two, too
    low, high = _raised(_raised(of[7], -exponent), exponent), _raised(_raised(of[8], -exponent), exponent)
    tl.store(entries + 3, tl.where(nan > 0, undefined, low + 0.0))
    tl.store(entries + 4, tl.where(nan > 0, undefined, high + 0.0))
    tl.store(entries + 5, nan)
    tl.store(entries + 6, of[3])
    tl.store(entries + 7, of[1])
    tl.store(entries + 8, count)
    tl.store(entries + 9, of[4])
    tl.store(entries + 10, of[5])
    tl.store(entries + 11, of[6])
    tl.store(entries + 12, of[9])
    tl.store(entries + 13, exponent.to(tl.float64))
    tl.store(entries + 14, of[10])
    tl.store(entries + 15, of[11])


# -- pieces -------------------------------------------------------------------------------------------------


@triton.jit
def _loaded(data, at, size, WHOLE: tl.constexpr):
    """Words of a piece; zero past the 16 bytes that its end lies in, which torch's memory has whole."""
    if WHOLE:
        words = tl.load(data + at)
    else:
        words = tl.load(data + at, mask=at < (size + 15) // 16 * 2, other=0)
    return words


@triton.jit
def _there(at, count, PART: tl.constexpr, PARTS: tl.constexpr):
    """Which numbers in words belong to the piece."""
    return at * PARTS + PART < count


@triton.jit
def _largest(data, at, size, LIKE: tl.constexpr, WHOLE: tl.constexpr):
    """The largest modulus of the numbers of a piece of float64; infinite if one of them is not finite."""
    found = tl.zeros((BLOCKS, 8), tl.float64)
    for stripe in range(16):
        here = at + stripe * 8
        moduli = tl.abs(_number(_loaded(data, here, size, WHOLE), 0, LIKE))
        moduli = tl.where(moduli < float("inf"), moduli, float("inf"))
        found = tl.maximum(found, tl.where(_there(here, size // 8, 0, 1), moduli, 0.0))
    return tl.max(tl.max(found, 1), 0)


@triton.jit
def _counts(data, at, size, LIKE: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr):
    """How many numbers of a piece are NaN, and how many infinite."""
    nan = tl.zeros((BLOCKS, 8), tl.int32)
    inf = tl.zeros((BLOCKS, 8), tl.int32)
    for stripe in range(16):
        here = at + stripe * 8
        words = _loaded(data, here, size, WHOLE)
        for part in tl.static_range(PARTS):
            number = _number(words, part, LIKE)
            there = _there(here, size * PARTS // 8, part, PARTS)
            nan += (there & (number != number)).to(tl.int32)
            inf += (there & (tl.abs(number) == float("inf"))).to(tl.int32)
    return tl.sum(tl.sum(nan, 1), 0).to(tl.float64), tl.sum(tl.sum(inf, 1), 0).to(tl.float64)


@triton.jit
def _scan(data, size, stripes, sums, row, secret, LIKE: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr):
    """Store the sums of a piece's blocks, over its first `stripes`, and the moments of its numbers.

    If the piece is `WHOLE`, the sums are over all stripes, and the last is taken off them at the end.
    """
    UNROLLED: tl.constexpr = 2 if PARTS == 8 else 4
    NARROW: tl.constexpr = tl.float64 if LIKE == "int32" else tl.float32
    COMPARED: tl.constexpr = tl.float64 if PARTS == 1 else NARROW
    block, lane = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 8)[None, :]
    at = block * 128 + lane
    count = size * PARTS // 8
    added = tl.zeros((BLOCKS, 8), tl.uint64)
    products = tl.zeros((BLOCKS, 8), tl.uint64)
    if LIKE != "bytes":
        shift = tl.full((), 0, tl.int32)
        if LIKE == "float64":
            shift = _exponent(_largest(data, at, size, LIKE, WHOLE))
        words = _loaded(data, at, size, WHOLE)
        pivot = tl.full((), 0.0, tl.float64)
        sample = tl.full((), 0, tl.int32)
        for part in tl.static_range(PARTS):
            there = _there(at, count, part, PARTS)
            numbers = tl.where(there, _wide(_number(words, part, LIKE), shift, LIKE), 0.0)
            pivot += tl.sum(tl.sum(numbers, 1), 0)
            sample += tl.sum(tl.sum(there.to(tl.int32), 1), 0)
        pivot = pivot / sample
        pivot = tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)
        deviations = tl.zeros((BLOCKS, 8), tl.float64)
        second = tl.zeros((BLOCKS, 8), tl.float64)
        absolute = tl.zeros((BLOCKS, 8), tl.float64)
        zeros = tl.zeros((BLOCKS, 8), tl.int32)
        low = tl.full((BLOCKS, 8), float("inf"), COMPARED)
        high = tl.full((BLOCKS, 8), float("-inf"), COMPARED)
    for first in range(0, tl.minimum((size + 63) // 64, 16), UNROLLED):
        for more in tl.static_range(UNROLLED):
            stripe = first + more
            here = at + stripe * 8
            words = _loaded(data, here, size, WHOLE)
            product = _of_stripe(words, tl.load(secret + 8 * (stripe + lane)))
            if WHOLE:
                added += words
                products += product
            else:
                taken = block * 16 + stripe < stripes
                added += tl.where(taken, words, 0)
                products += tl.where(taken, product, 0)
            if LIKE != "bytes":
                for part in tl.static_range(PARTS):
                    number = _number(words, part, LIKE)
                    wide = _wide(number, shift, LIKE)
                    compared = number.to(COMPARED)
                    deviation = wide - pivot
                    zero = compared == 0
                    if WHOLE:
                        low = tl.minimum(low, compared)
                        high = tl.maximum(high, compared)
                    else:
                        there = _there(here, count, part, PARTS)
                        wide = tl.where(there, wide, 0.0)
                        deviation = tl.where(there, deviation, 0.0)
                        zero = zero & there
                        low = tl.minimum(low, tl.where(there, compared, float("inf")))
                        high = tl.maximum(high, tl.where(there, compared, float("-inf")))
                    zeros += zero.to(tl.int32)
                    deviations += deviation
                    second += deviation * deviation
                    absolute += tl.abs(wide)
    if WHOLE:
        last = tl.load(data + (PIECE // 8 - 8) + lane)
        too_much = _of_stripe(last, tl.load(secret + 8 * (15 + lane)))
        added -= tl.where(block == BLOCKS - 1, last, 0)
        products -= tl.where(block == BLOCKS - 1, too_much, 0)
    tl.store(sums + block * 8 + lane, _swapped(added, (BLOCKS, 8), (BLOCKS, 4, 2)) + products)
    if LIKE != "bytes":
        moduli = tl.sum(tl.sum(absolute, 1), 0)
        nan = tl.full((), 0.0, tl.float64)
        inf = tl.full((), 0.0, tl.float64)
        if (moduli != moduli) | (moduli == float("inf")):
            nan, inf = _counts(data, at, size, LIKE, PARTS, WHOLE)
        _store_moments(
            row,
            count.to(tl.float64),
            tl.sum(tl.sum(zeros, 1), 0).to(tl.float64),
            nan,
            inf,
            pivot,
            tl.sum(tl.sum(deviations, 1), 0),
            tl.sum(tl.sum(second, 1), 0),
            moduli,
            tl.min(tl.min(low, 1), 0).to(tl.float64),
            tl.max(tl.max(high, 1), 0).to(tl.float64),
            shift,
        )


# -- the kernels --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tensors", "pieces"])
def read(table, tensors: tl.int64, pieces: tl.int64, work, secret, LIKE: tl.constexpr, PARTS: tl.constexpr):
    """Read the pieces of tensors of one dtype, and store their rows.

    Parameters
    ----------
    table : pointer to int64
        `COLUMNS` words of each tensor, and for each piece the number of its tensor. Addresses are multiples of 16; the
        elements lie in C order.
    tensors, pieces : int
    work : pointer to uint64
        `SUMS` words of each program.
    secret : pointer to uint64
        `TABLE`.
    LIKE : str
        The dtype; ``"bytes"`` for hashes alone.
    PARTS : int
        How many numbers lie in a word.
    """
    sums = work + tl.program_id(0) * SUMS
    for number in range(tl.program_id(0), pieces, tl.num_programs(0)):
        columns = table + COLUMNS * tl.load(table + COLUMNS * tensors + number)
        piece = number - tl.load(columns + 3)
        size = tl.minimum(tl.load(columns + 1) - piece * PIECE, PIECE).to(tl.int32)
        address = tl.load(columns) + piece * PIECE
        row = (tl.load(columns + 2) + piece * (8 * ROW)).to(tl.pointer_type(tl.float64))
        data = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
        if size == PIECE:
            _scan(data, size, PIECE // 64 - 1, sums, row, secret, LIKE, PARTS, True)
        else:
            _scan(data, size, (size - 1) // 64, sums, row, secret, LIKE, PARTS, False)
        tl.debug_barrier()  # other threads of this program read what is stored above
        digest = _digest(address.to(tl.pointer_type(tl.uint8)), size, sums, secret)
        tl.store(row + (ROW - 1), digest.to(tl.float64, bitcast=True))
        tl.debug_barrier()  # before the sums are overwritten


@triton.jit
def _column(rows, piece, there, NUMBER: tl.constexpr, missing):
    return tl.load(rows + piece * ROW + NUMBER, mask=there, other=missing)


@triton.jit
def unite_statistics(table, entries):
    """Compute the statistics of tensors; a program for each.

    Parameters
    ----------
    table : pointer to int64
        The address of the first row of each tensor, and the number of its rows.
    entries : pointer to float64
        The results: 16 of each tensor.
    """
    program = tl.program_id(0)
    rows = tl.load(table + 2 * program).to(tl.pointer_type(tl.float64))
    pieces = tl.load(table + 2 * program + 1)
    largest = tl.full((), 0.0, tl.float64)
    strange = tl.full((), 0.0, tl.float64)
    for first in range(0, pieces, TOGETHER):
        piece = first + tl.arange(0, TOGETHER)
        there = piece < pieces
        moduli = tl.maximum(tl.abs(_column(rows, piece, there, 7, 0.0)), tl.abs(_column(rows, piece, there, 8, 0.0)))
        largest = tl.maximum(largest, tl.max(moduli, 0))
        strange += tl.sum(_column(rows, piece, there, 2, 0.0) + _column(rows, piece, there, 3, 0.0), 0)
    exponent = tl.where(strange > 0, 0, _exponent(largest))
    found = _nothing()
    for first in range(0, pieces, TOGETHER):
        piece = first + tl.arange(0, TOGETHER)
        there = piece < pieces
        shift = _column(rows, piece, there, 12, 0.0).to(tl.int32) - exponent
        counts = _column(rows, piece, there, 0, 0.0)
        centres = _raised(_column(rows, piece, there, 10, 0.0), shift)
        rests = _raised(_column(rows, piece, there, 11, 0.0), shift)
        origin = tl.sum(tl.where(piece == first, centres, 0.0), 0)
        means = tl.where(there, centres - origin + rests / tl.maximum(counts, 1.0), 0.0)
        count = tl.sum(counts, 0)
        mean = tl.sum(counts * means, 0) / count
        centre = origin + mean
        deviation = tl.where(there, means - mean, 0.0)
        second = _raised(_raised(_column(rows, piece, there, 9, 0.0), shift), shift)
        chunk = (
            count,
            tl.sum(_column(rows, piece, there, 1, 0.0), 0),
            tl.sum(_column(rows, piece, there, 2, 0.0), 0),
            tl.sum(_column(rows, piece, there, 3, 0.0), 0),
            tl.sum(_raised(_column(rows, piece, there, 4, 0.0), shift), 0),
            tl.sum(_raised(_raised(_column(rows, piece, there, 5, 0.0), shift), shift), 0),
            tl.sum(_raised(_column(rows, piece, there, 6, 0.0), shift), 0),
            tl.min(_column(rows, piece, there, 7, float("inf")), 0),
            tl.max(_column(rows, piece, there, 8, float("-inf")), 0),
            tl.sum(second + counts * deviation * deviation, 0),
            centre,
            count * (mean - (centre - origin)),
        )
        found = _merged(found, chunk)
    _store_entries(entries + 16 * program, found, exponent)


@triton.jit(do_not_specialize=["tensors"])
def unite_hashes(table, tensors: tl.int64, work, secret, hashed):
    """Compute the hashes of tensors; a program for each.

    Parameters
    ----------
    table : pointer to int64
        For each tensor the address of its first row, the number of its rows, where its text begins and its length in
        bytes, and the number of its first word in `work`. The texts follow.
    tensors : int
    work : pointer to uint64
        For each tensor, the words of its message (the text and eight bytes of each row, rounded up to 16 bytes), and
        eight words of each 1024 bytes of it, rounded up to those of a piece.
    secret : pointer to uint64
        `TABLE`.
    hashed : pointer to int64
        The results.
    """
    program = tl.program_id(0)
    columns = table + 5 * program
    rows, pieces = tl.load(columns).to(tl.pointer_type(tl.uint64)), tl.load(columns + 1)
    letters = tl.load(columns + 3)
    text = (table + 5 * tensors).to(tl.pointer_type(tl.uint8), bitcast=True) + tl.load(columns + 2)
    words = work + tl.load(columns + 4)
    message = words.to(tl.pointer_type(tl.uint8), bitcast=True)
    each = tl.arange(0, 8)[None, :]
    for first in range(0, letters, 64):
        letter = first + tl.arange(0, 64)
        tl.store(message + letter, tl.load(text + letter, mask=letter < letters, other=0), mask=letter < letters)
    for first in range(0, pieces, TOGETHER):
        piece = first + tl.arange(0, TOGETHER)
        there = (piece < pieces)[:, None]
        digests = tl.load(rows + piece[:, None] * ROW + (ROW - 1), mask=there, other=0)
        digests = (digests >> (56 - 8 * each).to(tl.uint64)) & 255
        tl.store(message + letters + piece[:, None] * 8 + each, digests.to(tl.uint8), mask=there)
    tl.debug_barrier()
    size = letters + pieces * 8
    sums = words + (size + 15) // 16 * 2
    for first in range(0, size, PIECE):
        part = tl.minimum(size - first, PIECE).to(tl.int32)
        stripes = (size - 1) // 64 - first // 64
        data = tl.multiple_of(words + first // 8, 16)
        _scan(data, part, stripes, sums + first // 128, rows, secret, "bytes", 8, False)
    tl.debug_barrier()
    tl.store(hashed + program, _digest(message, size, sums, secret).to(tl.int64, bitcast=True))
