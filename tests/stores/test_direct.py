"""Large chunks that are written past the page cache, and where HDF5 puts them."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.stores.stored import every_format, numbers, plainly, written_unhurried
from tracer.errors import (
    TraceError,
)
from tracer.memory import PAGE, new_memory
from tracer.stores.chunks import ALIGNED_BYTES
from tracer.stores.disk import direct
from tracer.stores.disk.direct import DIRECT, DirectIO
from tracer.stores.hdf5.writing import Hdf5WriteStore
from tracer.stores.opening import create_store, open_store

if sys.platform != "win32":
    import fcntl


def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The files that are written past the page cache, from now on, one entry for each write."""
    files: list[int] = []
    write = os.pwritev

    def written(file: int, parts: list[Any], offset: int) -> int:
        if is_direct(file):
            files.append(file)
        return write(file, parts, offset)

    monkeypatch.setattr(os, "pwritev", written)
    return files


def is_direct(file: int) -> bool:
    """Whether an open file is written past the page cache."""
    return DIRECT != 0 and bool(fcntl.fcntl(file, fcntl.F_GETFL) & DIRECT)


def served(path: Path) -> bool:
    """Whether files at a path can be written past the page cache at all."""
    with path.open("wb") as file:
        return DirectIO().serves(file.fileno())


@every_format
@pytest.mark.parametrize("extra", [0, 1, 4091, 4092, 4093, 4095, 4096])
@pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "not aligned"])
def test_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, extra: int, shift: int
) -> None:
    """Large chunks of any length, from memory of any alignment, in turns with ones that are written as ever."""
    path = tmp_path / f"store{suffix}"
    files = noted(monkeypatch)
    nbytes = ALIGNED_BYTES + extra
    apart = -(-nbytes // PAGE) * PAGE
    memory = new_memory(12 * apart + shift)[shift:].reshape(12, apart)
    values = numbers("uint8", (12, nbytes))
    memory[:, :nbytes] = values
    store = create_store(path)
    store.create("own", dtype="uint8", shape=(nbytes,), chunk_bytes=1)
    store.create("small", dtype="uint8", shape=(), chunk_bytes=64)
    for number in range(12):
        store.unhurried = number % 4 != 3
        store.append("own", memory[number : number + 1, :nbytes])
        store.append("small", values[number, :100])
        if number % 5 == 1:
            store.commit()
    store.close()
    reader = open_store(path)
    assert np.array_equal(reader.read("own", 0, 12), values)
    assert np.array_equal(reader.read("small", 0, 1200), values[:, :100].reshape(-1))
    assert np.array_equal(plainly(path, "own"), values)
    reader.close()
    # HDF5 writes those itself of which it is not known where they belong, as the first ones, with which an index begins
    most = 9 if served(tmp_path / "file") else 0
    assert most * (1 if suffix == ".zarr" else 0.5) <= len(files) <= most


@pytest.mark.parametrize("sealed_at", [0, 3, 99])
def test_hdf5_places_of_large_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed_at: int) -> None:
    """Where large chunks are thought to be is where HDF5 says that they are, whatever else the file grows by."""
    known = [0, 0]
    make_room = Hdf5WriteStore._make_room

    def compared(store: Any, array: Any, length: int) -> None:
        make_room(store, array, length)
        known[array.place >= 0] += 1
        if array.place >= 0:
            for number in range((length - array.length) * array.rows.per_row):
                found = array.dataset.get_chunk_info_by_coord(array.rows.begin_of(array.first + number)).byte_offset
                assert found == array.place + number * store._apart(array)

    monkeypatch.setattr(Hdf5WriteStore, "_make_room", compared)
    path = tmp_path / "store.h5"
    rng = np.random.default_rng(0)
    store = create_store(path)
    shapes = {"a": (ALIGNED_BYTES,), "b": (ALIGNED_BYTES + 4097,), "c": (2, 1024, 1024), "d": (5, 33, 20_001)}
    for name, shape in shapes.items():
        store.create(name, dtype="uint8", shape=shape, chunk_bytes=1)
    store.create("small", dtype="int64", shape=(12,), chunk_bytes=4096)
    written: dict[str, list[Any]] = {name: [] for name in shapes}
    for turn in range(12):
        if turn == sealed_at:
            store.seal()
        store.unhurried = turn % 2 > 0
        for name, shape in shapes.items():
            rows = rng.integers(0, 256, (1 + turn % 3, *shape), np.uint8)
            store.append(name, rows)
            written[name].append(rows)
        store.append("small", np.zeros((rng.integers(200), 12), np.int64))
        if turn % 4 == 3:
            store.commit()
    store.close()
    with closing(open_store(path)) as reader:
        for name, parts in written.items():
            assert np.array_equal(reader.read(name, 0, reader.length(name)), np.concatenate(parts))
    assert np.array_equal(plainly(path, "d"), np.concatenate(written["d"]))
    assert known[1] > 4 * known[0]


def test_hdf5_places_that_are_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HDF5 puts large chunks elsewhere, it writes them itself."""
    monkeypatch.setattr(Hdf5WriteStore, "_apart", staticmethod(lambda array: array.rows.chunk_nbytes + PAGE))
    values = np.random.default_rng(0).integers(0, 256, (6, 3, 1024, 1024), np.uint8)
    path = tmp_path / "store.h5"
    store = create_store(path)
    store.unhurried = True
    store.create("own", dtype="uint8", shape=values.shape[1:], chunk_bytes=1)
    for row in values:
        store.append("own", row[None])
    store.close()
    with closing(open_store(path)) as reader:
        assert np.array_equal(reader.read("own", 0, 6), values)


@every_format
def test_past_the_page_cache_rows_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Rows of several chunks, of which the last is padded, in shards of which only so many are open at a time."""
    monkeypatch.setattr("tracer.stores.zarr.shard_files.OPEN_FILES", 2)
    files = noted(monkeypatch)
    values = numbers("float32", (3, 5, 333, 401))
    path = tmp_path / f"store{suffix}"
    store = create_store(path)
    store.unhurried = True
    for name in "abc":
        store.create(name, dtype="float32", shape=values.shape[1:], chunk_bytes=1)
    for number in range(3):
        for name in "abc":
            store.append(name, values[number : number + 1])
    store.close()
    reader = open_store(path)
    for name in "abc":
        assert np.array_equal(reader.read(name, 0, 3), values)
        assert np.array_equal(plainly(path, name), values)
    assert len(files) >= 9 * 3 or not served(tmp_path / "file")


@every_format
@pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "not aligned"])
def test_past_the_page_cache_many_chunks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, shift: int
) -> None:
    """Chunks that follow each other are one request to the disk, across shards and at the end of a run, too."""
    monkeypatch.setattr("tracer.stores.zarr.shards.CHUNKS_PER_SHARD", 10)
    monkeypatch.setattr("tracer.stores.chunks.CHUNKS_AT_ONCE", 4)
    files = noted(monkeypatch)
    nbytes = 33 * (ALIGNED_BYTES + 4096)
    values = new_memory(nbytes + shift)[shift : nbytes + shift].reshape(33, -1)
    values[:] = numbers("uint8", values.shape)
    path = tmp_path / f"store{suffix}"
    store = create_store(path)
    store.unhurried = True
    store.create("own", dtype="uint8", shape=values.shape[1:], chunk_bytes=1)
    store.create("split", dtype="uint8", shape=(11, *values.shape[1:]), chunk_bytes=1)
    for first, stop in ((0, 7), (7, 8), (8, 33)):
        store.append("own", values[first:stop])
        store.append("split", values[11 * (first % 3) : 11 * (first % 3) + 11][None])
        store.commit()
    store.close()
    with closing(open_store(path)) as reader:
        assert np.array_equal(reader.read("own", 0, 33), values)
        split = values.reshape(3, 11, -1)
        assert np.array_equal(reader.read("split", 0, 3), split[[0, 1, 2]])
    assert np.array_equal(plainly(path, "own"), values)
    if served(tmp_path / "file") and not shift:
        assert len(files) < 33


def test_past_the_page_cache_is_the_same_file(tmp_path: Path) -> None:
    """A chunk and its checksum lie where they always do; only what lies behind them, up to the next page, is zeros."""
    values = numbers("uint8", (2, ALIGNED_BYTES + 10))
    found = []
    for unhurried in (False, True):
        path = tmp_path / f"{unhurried}.zarr"
        store = create_store(path)
        store.unhurried = unhurried
        store.create("own", dtype="uint8", shape=values.shape[1:], chunk_bytes=1)
        store.append("own", values)
        store.close()
        found.append((path / "own/c/0/0").read_bytes())
    assert len(found[1]) >= len(found[0])
    assert found[1] == found[0].ljust(len(found[1]), b"\0")


@every_format
def test_past_the_page_cache_where_there_is_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Nothing is tried on a file system that lies on no block device, whatever the number of its device."""
    files = noted(monkeypatch)
    for number, device in enumerate((os.makedev(0, 41), os.makedev(200, 977))):
        # as the module sees it that asks, and nobody else
        elsewhere = SimpleNamespace(**vars(os) | {"fstat": lambda file, device=device: SimpleNamespace(st_dev=device)})
        monkeypatch.setattr(direct, "os", elsewhere)
        path = tmp_path / f"{number}{suffix}"
        values = written_unhurried(path)
        monkeypatch.undo()
        assert np.array_equal(open_store(path).read("own", 0, 6), values)
        assert files == []
        files = noted(monkeypatch)


@every_format
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fcntl")
@pytest.mark.parametrize("how", [errno.EINVAL, errno.EFAULT, errno.EIO, errno.ENOSPC, "in part", "when opened"])
def test_past_the_page_cache_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any, suffix: str) -> None:
    """What the system refuses to write so is written as ever, and so all that follows; the disk's errors are errors."""
    write, open_file, files = os.pwritev, os.open, []
    possible = served(tmp_path / "file")

    def opened(path: Any, flags: int, *mode: int, **rest: Any) -> int:
        if how == "when opened" and flags & DIRECT:
            raise OSError(errno.EMFILE, "no")
        return open_file(path, flags, *mode, **rest)

    def written(file: int, parts: list[Any], offset: int) -> int:
        if not is_direct(file):
            return write(file, parts, offset)
        files.append(file)
        if how == "in part":
            return write(file, [parts[0][:PAGE]], offset)
        raise OSError(how, os.strerror(how))

    monkeypatch.setattr(os, "pwritev", written)
    monkeypatch.setattr(os, "open", opened)
    path = tmp_path / f"store{suffix}"
    if how in (errno.EIO, errno.ENOSPC):
        with pytest.raises(TraceError, match=os.strerror(how)) if possible else nullcontext():
            written_unhurried(path)
        return
    values = written_unhurried(path)
    assert np.array_equal(open_store(path).read("own", 0, 6), values)
    assert np.array_equal(plainly(path, "own"), values)
    if possible:
        # HDF5 tries a chunk that happens to lie at a page of memory with those that follow it, and then by itself
        most = {"in part": 12, "when opened": 0}.get(how, 1)
        assert len(files) == most or (how == "in part" and 6 <= len(files) < most)
