"""Which parts of a shard are fetched by one request: chunks that are close to each other together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tracer.stores.objects.client import RANGE_BYTES

GAP_BYTES = 65536
"""Chunks that are closer to each other than this are fetched at once."""


class Chunk(NamedTuple):
    """Where a chunk is in its shard, and what of an array's rows it holds; see `tracer.stores.chunks.walk`."""

    offset: int
    nbytes: int
    number: int
    begin: int
    length: int


class Range(NamedTuple):
    """A part of a shard that is fetched by one request."""

    shard: int
    start: int
    nbytes: int
    chunks: list[Chunk]


def ranges(shard: int, chunks: list[Chunk]) -> Iterator[Range]:
    """Put chunks of a shard that are close to each other together."""
    chunks = sorted(chunks)
    begin = 0
    for number, chunk in enumerate(chunks):
        following = chunks[number + 1] if number + 1 < len(chunks) else None
        start, end = chunks[begin].offset, chunk.offset + chunk.nbytes
        if (
            following is None
            or following.offset > end + GAP_BYTES
            or following.offset + following.nbytes - start > RANGE_BYTES
        ):
            yield Range(shard, start, end - start, chunks[begin : number + 1])
            begin = number + 1
