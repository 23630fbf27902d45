"""Triton kernels that read a tensor once, for its hash and its statistics.

`read` runs a program for each piece of 64 KiB, which it reads tile by tile. For each tile it adds moments to those of
the piece, and stores the sums of blocks of 1024 bytes that make up XXH3's digest. Only the chain of these sums has to
be computed sequentially. `unite` computes the tensor's hash from its pieces' digests, and its statistics from their
moments. A tensor of a single piece needs no second kernel.

Names and constants of XXH3 are those of its reference (https://xxhash.com). Words are assembled from elements, so that
tensors need no alignment. All sums of numbers are float64.
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
ROWS = tl.constexpr(12)
"""Moments of a piece: counts of numbers, zeros, NaN and infinities; sums of the numbers, of squares and of moduli;
minimum, maximum; the sum of squared deviations, a number near the mean, the sum of the deviations from that number."""
SUMS = tl.constexpr(512)
"""Words for the sums of a piece's blocks."""
TEXT = tl.constexpr(64)
"""Bytes reserved for the text in front of the digests."""


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
def _keys(table, STRIPES: tl.constexpr):
    """The words of the secret that are combined with those of the stripes."""
    return tl.load(table + 8 * ((tl.arange(0, STRIPES) % 16)[:, None] + tl.arange(0, 8)[None, :]))


@triton.jit
def _block_sums(bits, keys, first, size, sums, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    """Store what each block of a tile adds to the accumulators; `first` is the number of its first block."""
    words = bits.to(tl.uint64)
    if PARTS > 1:
        shift = (tl.arange(0, PARTS) * (64 // PARTS)).to(tl.uint64)
        words = tl.sum(tl.reshape(words, (BLOCKS * 128, PARTS)) << shift[None, :], 1)
    words = tl.reshape(words, (BLOCKS * 16, 8))
    stripe, lane = tl.arange(0, BLOCKS * 16), tl.arange(0, 8)
    keyed = words ^ keys
    there = (first * 16 + stripe < (size - 1) // 64)[:, None]
    products = tl.where(there, (keyed & LOW_HALF) * (keyed >> 32), 0)
    added = tl.sum(tl.reshape(tl.where(there, words, 0), (BLOCKS, 16, 8)), 1)
    added = _swapped(added, (BLOCKS, 8), (BLOCKS, 4, 2))
    added += tl.sum(tl.reshape(products, (BLOCKS, 16, 8)), 1)
    block = first + tl.arange(0, BLOCKS)
    tl.store(sums + block[:, None] * 8 + lane[None, :], added)


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
    keyed = last ^ tl.load(table + 121 + 8 * lane)
    state += tl.load(sums + blocks * 8 + lane) + _swapped(last, (8,), (4, 2)) + (keyed & LOW_HALF) * (keyed >> 32)
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
def _grouped(numbers, COUNT: tl.constexpr, GROUP: tl.constexpr):
    """The numbers in groups of neighbours, which one thread has loaded."""
    return tl.reshape(numbers, (COUNT // GROUP, GROUP))


@triton.jit
def _piece(size, pivot, deviations, second, absolute, low, high, counts, exponent):
    """The moments of a piece, from those of groups of its numbers; deviations are from `pivot`.

    The extremes have not yet been divided by the power of two.
    """
    count = size.to(tl.float64)
    zeros = tl.sum(counts & 1023, 0).to(tl.float64)
    nan = tl.sum((counts >> 10) & 1023, 0).to(tl.float64)
    inf = tl.sum(counts >> 20, 0).to(tl.float64)
    rest, second = tl.sum(deviations, 0), tl.sum(second, 0)
    mean = rest / count
    total = count * pivot + rest
    squares = second + pivot * (count * pivot + 2 * rest)
    second -= mean * rest
    squares = tl.where((inf > 0) | (squares != squares), float("inf"), tl.where(squares < 0, 0.0, squares))
    squares = tl.where(nan > 0, float("nan"), squares)
    second = tl.where(nan + inf > 0, float("nan"), tl.where(second < 0, 0.0, second))
    centre = pivot + mean
    least = _raised(tl.min(low, 0).to(tl.float64), -exponent)
    greatest = _raised(tl.max(high, 0).to(tl.float64), -exponent)
    rest = count * (mean - (centre - pivot))
    return count, zeros, nan, inf, total, squares, tl.sum(absolute, 0), least, greatest, second, centre, rest


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
    tl.store(entries + 3, tl.where(nan > 0, undefined, _raised(of[7], exponent) + 0.0))
    tl.store(entries + 4, tl.where(nan > 0, undefined, _raised(of[8], exponent) + 0.0))
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


# -- the kernels --------------------------------------------------------------------------------------------


@triton.jit
def _bytes_of(words):
    return words.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def _numbers_of(words):
    return words.to(tl.pointer_type(tl.float64), bitcast=True)


@triton.jit
def _store_text(message, letters, w0, w1, w2, w3, w4, w5, w6, w7):
    """Store the first `letters` bytes of eight words."""
    at = tl.arange(0, TEXT)
    word = tl.where(at < 8, w0, tl.where(at < 16, w1, tl.where(at < 24, w2, w3)))
    word = tl.where(at < 32, word, tl.where(at < 40, w4, tl.where(at < 48, w5, tl.where(at < 56, w6, w7))))
    tl.store(message + at, ((word >> (8 * (at % 8))) & 255).to(tl.uint8), mask=at < letters)


@triton.jit
def _store_hash(hashed, digest):
    tl.store(hashed, digest.to(tl.int64, bitcast=True))


@triton.jit(
    do_not_specialize=["size", "pieces", "letters", "w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"],
)
def read(
    x, size: tl.int64, pieces: tl.int64, work, table, entries, hashed, exponent, letters: tl.int64,
    w0: tl.int64, w1: tl.int64, w2: tl.int64, w3: tl.int64, w4: tl.int64, w5: tl.int64, w6: tl.int64, w7: tl.int64,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    STATISTICS: tl.constexpr, PRECISE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Read a piece; for a tensor of one piece, also store the statistics and the hash.

    Parameters
    ----------
    x : pointer
        The elements in C order, `PARTS` of which make a word.
    size, pieces : int
        The numbers of elements and pieces of the tensor.
    work : pointer to uint64
        `SUMS` words of each piece, `ROWS` of each piece, and the message: `TEXT` bytes and a word of each piece.
    table : pointer to uint64
        `TABLE`.
    entries, hashed : pointers to float64 and int64
        The results.
    exponent : pointer to float64
        The numbers are divided by two to this power, if they are `WIDE`.
    letters, w0, …, w7 : int
        The text of the hash: its length, and its bytes.
    BLOCKS, STAGES : int
        The number of 1024-byte blocks in a tile, and of tiles loaded at a time.
    EVEN : bool
        Whether `size` is a multiple of 16, so that a thread loads several elements at once.
    STATISTICS : bool
        Whether to compute statistics in addition to the hash.
    PRECISE : bool
        Whether float32 cannot represent the elements.
    """
    TILE: tl.constexpr = 128 * PARTS * BLOCKS
    PIECE: tl.constexpr = 8192 * PARTS
    GROUP: tl.constexpr = 2 * PARTS
    COMPARED: tl.constexpr = tl.float64 if PRECISE else tl.float32
    size, pieces, letters = size.to(tl.int64), pieces.to(tl.int64), letters.to(tl.int64)
    if EVEN:
        size = size // 16 * 16
    piece = tl.program_id(0).to(tl.int64)
    here = tl.minimum(size - piece * PIECE, PIECE).to(tl.int32)
    start = x + piece * PIECE
    sums = work + piece * SUMS
    shift = tl.full((), 0, tl.int32)
    if WIDE:
        shift = tl.load(exponent).to(tl.int32)
    keys = _keys(table, BLOCKS * 16)
    if STATISTICS:
        at = tl.arange(0, TILE)
        numbers = tl.load(start + at, mask=at < here, other=0).to(tl.float64)
        if WIDE:
            numbers = _raised(numbers, -shift)
        pivot = tl.sum(numbers, 0) / tl.minimum(here, TILE)
        pivot = tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)
        deviations = tl.zeros((TILE // GROUP,), tl.float64)
        second = tl.zeros((TILE // GROUP,), tl.float64)
        absolute = tl.zeros((TILE // GROUP,), tl.float64)
        low = tl.full((TILE // GROUP,), float("inf"), COMPARED)
        high = tl.full((TILE // GROUP,), float("-inf"), COMPARED)
        counts = tl.zeros((TILE // GROUP,), tl.int32)
    for first in tl.range(0, here, TILE, num_stages=STAGES):
        at = first + tl.arange(0, TILE)
        there = at < here
        loaded = tl.load(start + at, mask=there, other=0)
        if PARTS == 1:
            bits = loaded.to(tl.uint64, bitcast=True)
        elif PARTS == 2:
            bits = loaded.to(tl.uint32, bitcast=True)
        elif PARTS == 4:
            bits = loaded.to(tl.uint16, bitcast=True)
        else:
            bits = loaded.to(tl.uint8, bitcast=True)
        _block_sums(bits, keys, first // (128 * PARTS), here * (8 // PARTS), sums, PARTS, BLOCKS)
        if STATISTICS:
            numbers = loaded.to(tl.float64)
            if WIDE:
                numbers = _raised(numbers, -shift)
            compared = loaded.to(COMPARED)
            nan = compared != compared
            zero, infinite = there & (compared == 0), tl.abs(compared) == float("inf")
            count = zero.to(tl.int32) + (nan.to(tl.int32) << 10) + (infinite.to(tl.int32) << 20)
            deviation = tl.where(there, numbers - pivot, 0.0)
            known = there & (compared == compared)
            counts += tl.sum(_grouped(count, TILE, GROUP), 1)
            deviations += tl.sum(_grouped(deviation, TILE, GROUP), 1)
            second += tl.sum(_grouped(deviation * deviation, TILE, GROUP), 1)
            absolute += tl.sum(_grouped(tl.abs(numbers), TILE, GROUP), 1)
            low = tl.minimum(low, tl.min(_grouped(tl.where(known, compared, float("inf")), TILE, GROUP), 1))
            high = tl.maximum(high, tl.max(_grouped(tl.where(known, compared, float("-inf")), TILE, GROUP), 1))
    tl.debug_barrier()  # other threads of this program read what is stored above
    digest = _digest(_bytes_of(start), here * (8 // PARTS), sums, table)
    message = _bytes_of(work + pieces * (SUMS + ROWS))
    each = tl.arange(0, 8)
    tl.store(message + letters + piece * 8 + each, ((digest >> (56 - 8 * each).to(tl.uint64)) & 255).to(tl.uint8))
    if piece == 0:
        _store_text(message, letters, w0, w1, w2, w3, w4, w5, w6, w7)
    if pieces == 1:
        tl.debug_barrier()
        _store_hash(hashed, _digest(message, letters + 8, sums, table))
        if STATISTICS:
            found = _piece(here, pivot, deviations, second, absolute, low, high, counts, shift)
            _store_entries(entries, found, shift)
    elif STATISTICS:
        found = _piece(here, pivot, deviations, second, absolute, low, high, counts, shift)
        row = _numbers_of(work + pieces * SUMS + piece * ROWS)
        for one in tl.static_range(ROWS):
            tl.store(row + one, found[one])


@triton.jit(do_not_specialize=["pieces", "letters"])
def unite(
    pieces: tl.int64, work, table, entries, hashed, exponent, letters: tl.int64,
    STATISTICS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the statistics and the hash of a tensor of several pieces from what `read` stored in `work`."""
    TOGETHER: tl.constexpr = 1024
    BLOCKS: tl.constexpr = 4
    pieces, letters = pieces.to(tl.int64), letters.to(tl.int64)
    if STATISTICS:
        shift = tl.full((), 0, tl.int32)
        if WIDE:
            shift = tl.load(exponent).to(tl.int32)
        found = _nothing()
        rows = _numbers_of(work + pieces * SUMS)
        for first in range(0, pieces, TOGETHER):
            piece = first + tl.arange(0, TOGETHER)
            there = piece < pieces
            row = rows + piece * ROWS
            counts = tl.load(row, mask=there, other=0.0)
            origin = tl.load(rows + first * ROWS + 10)
            means = tl.load(row + 10, mask=there, other=0.0) - origin
            means += tl.load(row + 11, mask=there, other=0.0) / tl.maximum(counts, 1.0)
            means = tl.where(there, means, 0.0)
            count = tl.sum(counts, 0)
            mean = tl.sum(counts * means, 0) / count
            centre = origin + mean
            deviation = tl.where(there, means - mean, 0.0)
            second = tl.sum(tl.load(row + 9, mask=there, other=0.0) + counts * deviation * deviation, 0)
            chunk = (
                count,
                tl.sum(tl.load(row + 1, mask=there, other=0.0), 0),
                tl.sum(tl.load(row + 2, mask=there, other=0.0), 0),
                tl.sum(tl.load(row + 3, mask=there, other=0.0), 0),
                tl.sum(tl.load(row + 4, mask=there, other=0.0), 0),
                tl.sum(tl.load(row + 5, mask=there, other=0.0), 0),
                tl.sum(tl.load(row + 6, mask=there, other=0.0), 0),
                tl.min(tl.load(row + 7, mask=there, other=float("inf")), 0),
                tl.max(tl.load(row + 8, mask=there, other=float("-inf")), 0),
                second,
                centre,
                count * (mean - (centre - origin)),
            )
            found = _merged(found, chunk)
        _store_entries(entries, found, shift)
    message = _bytes_of(work + pieces * (SUMS + ROWS))
    size = letters + pieces * 8
    keys = _keys(table, BLOCKS * 16)
    for first in range(0, size, BLOCKS * 1024):
        at = first + tl.arange(0, BLOCKS * 1024)
        _block_sums(tl.load(message + at, mask=at < size, other=0), keys, first // 1024, size, work, 8, BLOCKS)
    tl.debug_barrier()
    _store_hash(hashed, _digest(message, size, work, table))
