"""Finds and opens HDF5 traces on object stores, read-only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from contextlib import closing

from tracer.errors import TraceNotFoundError, TraceUnreachableError
from tracer.stores.hdf5.reading import Hdf5ReadStore
from tracer.stores.hdf5.store import open_file
from tracer.stores.locations import Url, beside
from tracer.stores.objects.client import RANGE_BYTES, Objects
from tracer.stores.protocols import ByteFile

BLOCK_BYTES = 1 << 18
BLOCKS = 256
"""How many blocks of a file stay in memory; `BLOCK_BYTES` is the size of each."""


class ObjectFile(ByteFile):
    """An object read in blocks, with an LRU cache of blocks. Reading fails if the object is replaced meanwhile."""

    def __init__(self, url: Url) -> None:
        self.path = url
        self._objects = Objects(url)
        head = self._objects.head()
        if head is None:
            self._objects.close()
            raise TraceNotFoundError(f"there is no trace at {url}")
        self._nbytes = int(head["size"])
        self._modified: float = head["last_modified"].timestamp()
        self._version = str(head.get("e_tag") or "")
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()

    def size(self) -> int:
        """Bytes of the object."""
        return self._nbytes

    def modified(self) -> float:
        """When the object was put."""
        return self._modified

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the blocks of ranges (offset, size) in parallel; the cache holds 64 MiB of blocks."""
        wanted = sorted(
            {
                number
                for offset, nbytes in ranges
                for number in range(offset // BLOCK_BYTES, -(-min(offset + nbytes, self._nbytes) // BLOCK_BYTES))
                if number not in self._blocks
            }
        )
        runs: list[list[int]] = []
        for number in wanted:
            if runs and number == runs[-1][-1] + 1 and len(runs[-1]) * BLOCK_BYTES < RANGE_BYTES:
                runs[-1].append(number)
            else:
                runs.append([number])
        for run, data in zip(runs, self._objects.at_once(self._get, ((run,) for run in runs)), strict=True):
            for place, number in enumerate(run):
                self._blocks[number] = data[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
        while len(self._blocks) > BLOCKS:
            self._blocks.popitem(last=False)

    def _get(self, run: list[int]) -> memoryview:
        part = self._objects.get("", run[0] * BLOCK_BYTES, len(run) * BLOCK_BYTES, self._version)
        if part is None:
            raise TraceUnreachableError(f"{self.path} cannot be read: it was removed")
        return part.data

    def readinto(self, target: memoryview, offset: int) -> int:
        """Read bytes from an offset on; returns how many were read."""
        done = 0
        while done < len(target):
            number, begin = divmod(offset + done, BLOCK_BYTES)
            block = self._blocks.get(number)
            if block is None:
                self.fetch([(offset + done, min(len(target) - done, RANGE_BYTES))])
                block = self._blocks.get(number, memoryview(b""))
            else:
                self._blocks.move_to_end(number)
            piece = block[begin : begin + len(target) - done]
            if not piece:
                break
            target[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def close(self) -> None:
        """Drop the cached blocks and close the connection."""
        self._blocks.clear()
        self._objects.close()


def open(url: Url, *, damaged: bool = False) -> Hdf5ReadStore:
    """Open the HDF5 file at `url`; see `tracer.stores.opening.open_store`."""
    return open_file(ObjectFile(url), damaged=damaged)


def files(url: Url) -> list[Url]:
    """The files of a trace: the file at `url`, if it exists, and the files of other parts beside it."""
    if url.is_web:
        return [url]
    folder, _, _ = url.key.rpartition("/")
    with closing(Objects(Url(url.scheme, url.bucket, folder))) as objects:
        names = objects.names()
    found = [Url(url.scheme, url.bucket, f"{folder}/{name}" if folder else name) for name in beside(url, names)]
    return [url, *found] if url.name in names or not found else found


def blank(url: Url) -> bool:
    """Always False; see `tracer.stores.opening.blank`."""
    return False
