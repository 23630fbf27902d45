"""`tracer.format.checksum`: CRC-32C, whichever library computes it, and only where it is right."""

from __future__ import annotations

import builtins
import importlib
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tracer.format import checksum
from tracer.stores import chunks, opening

awscrt = pytest.importorskip("awscrt.checksums")


def bit_by_bit(data: bytes, before: int = 0) -> int:
    """CRC-32C as RFC 3720 defines it: the reflected polynomial 0x1EDC6F41, begun and ended with all ones."""
    register = before ^ 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.fixture
def reloaded() -> Iterator[Callable[[], Any]]:
    """Load the module anew, as a test has arranged the libraries; it is as it was afterwards."""
    kept = dict(vars(checksum))

    def load() -> Any:
        return importlib.reload(checksum)

    yield load
    vars(checksum).update(kept)


def test_the_vectors_of_the_standard() -> None:
    """RFC 3720, B.4."""
    for data, expected in (
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ):
        assert checksum.crc32c(data) == bit_by_bit(data) == expected


def test_what_the_choice_is_checked_with() -> None:
    """The constants are of the definition, not of a library."""
    for length, expected in checksum._EXPECTED.items():
        assert bit_by_bit(checksum._PATTERN[:length]) == expected
    assert max(checksum._EXPECTED) == len(checksum._PATTERN)


def test_all_lengths_and_alignments_agree_with_others() -> None:
    """Any part of a block, at once and continued, of what is chosen and of what it stands in for."""
    draw = random.Random(0)
    data = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    for number in range(3000):
        length = draw.choice((draw.randrange(300), draw.randrange(20_000), draw.randrange(1 << 17)))
        begin = draw.randrange(1 << 16)
        part = data[begin : begin + length]
        expected = google_crc32c.value(part.tobytes())
        cut = draw.randrange(length + 1)
        for library in (checksum.crc32c, awscrt.crc32c):
            assert library(part) == library(memoryview(part)) == expected, (number, begin, length)
            assert library(part[cut:], library(part[:cut])) == expected, (number, begin, length, cut)


@pytest.mark.parametrize("data", [np.arange(10)[::2], np.arange(16.0).reshape(4, 4).T, memoryview(b"abcdef")[::2]])
def test_what_is_in_pieces_is_refused(data: Any) -> None:
    """Its bytes are not those that are stored."""
    with pytest.raises((ValueError, BufferError)):
        checksum.crc32c(data)


def test_without_the_faster_library(reloaded: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that every installation has is used, without a word."""
    monkeypatch.setitem(sys.modules, "crc32c_rs", None)
    assert reloaded().crc32c is awscrt.crc32c


def test_the_faster_library_is_used_where_it_is_there(reloaded: Callable[[], Any]) -> None:
    """It is asked nothing but whether it is right."""
    crc32c_rs = pytest.importorskip("crc32c_rs")
    assert reloaded().crc32c is crc32c_rs.crc32c


def wrong_when_long(data: Any, before: int = 0) -> int:
    """As a library that is broken on some processor: only what takes its widest instructions is wrong."""
    right: int = awscrt.crc32c(data, before)
    return right ^ 1 if len(data) > 10_000 else right


def wrong_when_continued(data: Any, before: int = 0) -> int:
    """One that takes the checksum before in another form."""
    right: int = awscrt.crc32c(data, before)
    return right ^ 1 if before else right


@pytest.mark.parametrize("wrong", [zlib.crc32, wrong_when_long, wrong_when_continued, builtins.len, None])
def test_a_library_that_is_wrong_is_not_used(
    wrong: Any, reloaded: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checksum that nobody else computes would make a trace unreadable: it is told, and the other is used."""
    stand_in: Any = type(sys)("crc32c_rs")
    stand_in.crc32c = wrong
    monkeypatch.setitem(sys.modules, "crc32c_rs", stand_in)
    with pytest.warns(RuntimeWarning, match="crc32c-rs computes wrong checksums"):
        assert reloaded().crc32c is awscrt.crc32c


@pytest.mark.parametrize("length", [0, 1, 4, 511, 70_000, 1 << 20])
def test_checksums_are_joined(length: int) -> None:
    """That of two pieces follows from those of each, and that of data from that of the same with zeros behind it."""
    one, other = bytes(range(200)), (b"trace" * (length // 5 + 1))[:length]
    assert checksum.joined(checksum.crc32c(one), checksum.crc32c(other), length) == checksum.crc32c(one + other)
    assert checksum.without_zeros(checksum.crc32c(one + bytes(length)), length) == checksum.crc32c(one)


@pytest.mark.parametrize("shape", [(700,), (3, 500), (5, 7, 31), (2, 1300), (1, 1)])
def test_checksums_of_rows_follow_from_those_of_their_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """Of rows that are a chunk each and of rows that are split, in runs whose last chunk is padded."""
    monkeypatch.setattr(chunks, "CHUNK_LIMIT", 2048)
    rows = np.random.default_rng(0).random((4, *shape), np.float32)
    store = opening.create_store(tmp_path / "store.zarr")
    store.create("a", dtype="float32", shape=shape, chunk_bytes=1)
    found: list[int] = []
    store.append("a", rows, found)
    store.close()
    assert found == [checksum.crc32c(row.tobytes()) for row in rows]
