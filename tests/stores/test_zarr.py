"""What is Zarr's own: metadata, links, damaged indexes and chunks, shards that are read in pieces."""

from __future__ import annotations

import errno
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.stores.stored import numbers, plainly
from tracer.errors import (
    TraceCorruptError,
    TraceFormatError,
)
from tracer.memory import PAGE
from tracer.stores.opening import create_store, open_store
from tracer.stores.zarr.layout import chunks_begin
from tracer.stores.zarr.on_disk import DiskFiles
from tracer.stores.zarr.reading import ZarrReadStore


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_metadata_of_an_array_with_gaps_are_not_written_at_each_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None
) -> None:
    """Its zarr.json says more rows than there are until it is closed; a reader gets those that are there."""
    written: list[str] = []
    put = DiskFiles.put
    monkeypatch.setattr(DiskFiles, "put", lambda self, name, data: (written.append(name), put(self, name, data))[1])
    path = tmp_path / "store.zarr"
    store = create_store(path)
    for name, gapless in (("a", False), ("b", True)):
        store.create(name, dtype="int64", shape=(), chunk_bytes=80, compression=codec, gapless=gapless)
    reader = open_store(path)
    values = np.arange(4000)
    for stop in range(200, 4001, 200):
        for name in "ab":
            store.append(name, values[stop - 200 : stop])
        store.commit()
        assert reader.length("a") >= stop == reader.length("b")
        assert np.array_equal(reader.read("a", 0, stop), values[:stop])
        assert np.array_equal(plainly(path, "a")[:stop], values[:stop])
    # chunks of ten rows in shards of 128: one and two shards, and four
    assert (written.count("a/zarr.json"), written.count("b/zarr.json")) == (3, 20)
    assert reader.length("a") == 4 * 1280
    with pytest.raises(TraceCorruptError, match="lacks its chunk"):
        reader.read("a", 3990, 4001 + 10)
    store.close()
    assert reader.length("a") == 4000
    assert np.array_equal(plainly(path, "a"), values)
    reader.close()


def test_a_trace_is_complete_though_its_arrays_look_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all is committed, and the disk takes no zarr.json any more that only says how long an array is."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    store.create("a", dtype="int64", shape=(), chunk_bytes=80)
    store.append("a", np.arange(25))
    store.commit()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DiskFiles, "put", full)
        store.close()
    reader = open_store(path)
    assert reader.length("a") == 1280
    assert np.array_equal(reader.read("a", 0, 25), np.arange(25))
    reader.close()


def damaged(path: Path, **changes: Any) -> None:
    """Change members of the metadata of array ``a`` of a Zarr store."""
    document = json.loads((path / "a" / "zarr.json").read_text())
    (path / "a" / "zarr.json").write_text(json.dumps(document | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"codecs": 7},
        {"codecs": []},
        {"data_type": "nothing"},
        {"shape": [-3]},
        {"shape": []},
        {"shape": [2, 2]},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}},
    ],
)
def test_zarr_metadata_that_a_trace_never_has(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Nonsense in a zarr.json is refused before anything is read; what is not safe, see `test_hostile.py`."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    store.append("a", np.arange(20, dtype=np.int8))
    store.close()
    damaged(path, **changes)
    with pytest.raises(TraceFormatError, match="'a'"):
        open_store(path).read("a", 0, 2)


@pytest.mark.parametrize("linked", ["a", "a/b", "a/b/c", "a/b/c/0", "a/b/zarr.json"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("root", ["store.zarr", ".", "../store.zarr/../store.zarr"])
def test_zarr_links_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: str, inside: bool, root: str
) -> None:
    """Whatever on the way to an array is a link, it is followed within the directory only; wherever one stands."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    for name in ("a/b", "a/d"):
        store.create(name, dtype="int8", shape=(), chunk_bytes=8)
        store.append(name, np.arange(20, dtype=np.int8))
    store.close()
    elsewhere = path / "elsewhere" if inside else tmp_path / "elsewhere"
    (path / linked).rename(elsewhere)
    (path / linked).symlink_to(elsewhere)
    monkeypatch.chdir(tmp_path if root == "store.zarr" else path)
    reader = ZarrReadStore(DiskFiles(Path(root)))
    for _ in range(2):
        if inside:
            assert reader.read("a/b", 0, 20).tolist() == list(range(20))
        else:
            with pytest.raises(TraceFormatError, match="leads out"):
                reader.read("a/b", 0, 20)
    if linked != "a":  # what is beside it is read
        assert reader.read("a/d", 0, 20).tolist() == list(range(20))


@pytest.mark.parametrize("place", ["indexes", "chunk", "checksum", "missing", "empty", "short"])
def test_zarr_damage_is_found(tmp_path: Path, place: str) -> None:
    """A flipped byte anywhere in a shard, and a shard that is missing or cut, are errors and never zeros."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    store.create("a", dtype="int64", shape=(), chunk_bytes=80)
    store.append("a", np.arange(30))
    store.close()
    shard = path / "a" / "c" / "0"
    data = bytearray(shard.read_bytes())
    header = chunks_begin(128)
    if place in ("indexes", "chunk", "checksum"):
        for at in {"indexes": [3, PAGE + 9], "chunk": [header + 84 + 5], "checksum": [header + 84 + 81]}[place]:
            data[at] ^= 1
        shard.write_bytes(data)
    elif place == "missing":
        shard.unlink()
    else:
        shard.write_bytes(data[: 0 if place == "empty" else header + 100])
    reader = open_store(path)
    with pytest.raises(TraceCorruptError, match="'a'"):
        reader.read("a", 12, 13)
    if place in ("chunk", "checksum"):
        assert np.array_equal(reader.read("a", 0, 10), np.arange(10))


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("damage", [(3, 4), (0, PAGE), (128 * 16, 128 * 16 + 4), (PAGE + 9, PAGE + 10)])
def test_zarr_indexes_are_there_twice(tmp_path: Path, damage: tuple[int, int], compression: str | None) -> None:
    """Whatever becomes of one index of a shard, the other leads to its chunks, and the damage is told where asked."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    store.create("a", dtype="int64", shape=(), chunk_bytes=80, compression=compression)
    for number in range(0, 60, 4):
        store.append("a", np.arange(number, number + 4))
        store.commit()
    store.close()
    shard = path / "a" / "c" / "0"
    data = bytearray(shard.read_bytes())
    data[damage[0] : damage[1]] = bytes(byte ^ 5 for byte in data[damage[0] : damage[1]])
    shard.write_bytes(data)
    reader = open_store(path)
    assert np.array_equal(reader.read("a", 0, 60), np.arange(60))
    # the last chunk, which a writer might move
    assert np.array_equal(reader.read("a", 58, 60), np.arange(58, 60))
    store = open_store(path, damaged=True)
    assert store.problems == []
    assert np.array_equal(store.read("a", 0, 60), np.arange(60))
    [problem] = store.problems
    assert ("the copy of the index of shard 0" in problem) is (damage[0] > PAGE)


@pytest.mark.parametrize("page", [False, True])
def test_zarr_killed_between_its_indexes(tmp_path: Path, page: bool) -> None:
    """A second index that is one commit older than the first, as a kill leaves it, is no damage."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    store.create("a", dtype="int64", shape=(), chunk_bytes=80)
    store.append("a", np.arange(4))
    store.commit()
    shard = path / "a" / "c" / "0"
    before = shard.read_bytes()[PAGE : chunks_begin(128)]
    store.append("a", np.arange(4, 8))
    store.commit()
    if page:
        data = bytearray(shard.read_bytes())
        assert data[PAGE : chunks_begin(128)] != before
        data[PAGE : chunks_begin(128)] = before
        shard.write_bytes(data)
    reader = open_store(path, damaged=True)
    assert np.array_equal(reader.read("a", 0, 8), np.arange(8))
    assert reader.problems == []


def test_zarr_with_other_codecs_is_read(tmp_path: Path) -> None:
    """A copy that another tool made with compression and other chunks is read, and its damage found."""
    values = numbers("float32", (40, 6))
    path = tmp_path / "copy.zarr"
    root = zarr.create_group(path)
    root.create_array("g/a", data=values, chunks=(7, 3), shards=(14, 6), compressors=zarr.codecs.ZstdCodec())
    root.create_array("b", data=values, chunks=(7, 6), compressors=None)
    # as we lay arrays out, but with room for more columns than there are
    plain = [zarr.codecs.BytesCodec(endian="little"), zarr.codecs.Crc32cCodec()]
    wide = zarr.codecs.ShardingCodec(chunk_shape=(2, 6), codecs=plain, index_codecs=plain, index_location="start")
    root.create_array("c", data=values, chunks=(6, 12), serializer=wide, compressors=None, filters=None)
    reader = open_store(path)
    assert reader.names() == ["b", "c", "g/a"]
    for name in reader.names():
        assert np.array_equal(reader.read(name, 3, 29), values[3:29])
    shard = path / "g" / "a" / "c" / "0" / "0"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(TraceCorruptError, match="g/a"):
        reader.read("g/a", 0, 40)


def test_zarr_keeps_few_files_open_and_little_garbage(tmp_path: Path) -> None:
    """Hundreds of arrays and of commits need few open files, and at most one chunk more than there is data."""
    store = create_store(tmp_path / "store.zarr")
    for number in range(200):
        store.create(f"a{number}", dtype="uint8", shape=(), chunk_bytes=100)
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(3):
        for number in range(200):
            store.append(f"a{number}", np.full(30, number, np.uint8))
        store.commit()
    if before:
        assert len(os.listdir("/proc/self/fd")) - before <= 64
    for _ in range(300):
        store.append("a0", np.zeros(1, np.uint8))
        store.commit()
    store.close()
    size = (tmp_path / "store.zarr" / "a0" / "c" / "0").stat().st_size
    assert size <= chunks_begin(128) + 104 * 5
    reader = open_store(tmp_path / "store.zarr")
    assert all((reader.read(f"a{number}", 0, 90) == number).all() for number in range(200))


def test_zarr_damage_anywhere_in_a_large_chunk(tmp_path: Path) -> None:
    """The bytes of a large chunk are right, and one that is not is found wherever it is."""
    data = np.random.default_rng(0).integers(0, 256, (2, 300_000), np.uint8)
    path = tmp_path / "run.zarr"
    store = create_store(path)
    store.create("a", dtype="uint8", shape=(300_000,), chunk_bytes=300_000)
    store.append("a", data)
    store.close()
    with closing(open_store(path)) as reading:
        np.testing.assert_array_equal(reading.read("a", 0, 2), data)
    (shard,) = (entry for entry in (path / "a").rglob("*") if entry.is_file() and entry.name != "zarr.json")
    stored = shard.read_bytes()
    begin = stored.index(data[1].tobytes())
    for place in (0, 999, 1000, 65535, 65536, 150_000, 299_999, 300_000, 300_003):
        changed = bytearray(stored)
        changed[begin + place] ^= 1
        shard.write_bytes(changed)
        with closing(open_store(path)) as reading:
            np.testing.assert_array_equal(reading.read("a", 0, 1), data[:1])
            with pytest.raises(TraceCorruptError, match="chunk 1 of array 'a' fails its checksum"):
                reading.read("a", 0, 2)
