"""The contract of every store, and what each format has to refuse."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import sys
import threading
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import processes
from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreadableError,
)
from tracer.memory import PAGE, new_memory
from tracer.stores.chunks import ALIGNED_BYTES, CHUNKS_AT_ONCE, RowChunks, chunk_shape
from tracer.stores.disk import direct
from tracer.stores.disk.direct import DIRECT, DirectIO
from tracer.stores.hdf5 import reading as hdf5_reading
from tracer.stores.hdf5.writing import Hdf5WriteStore
from tracer.stores.opening import create_store, open_parts, open_store, store_files
from tracer.stores.zarr import writing as zarr_writing
from tracer.stores.zarr.documents import write_document
from tracer.stores.zarr.reading import ZarrReadStore
from tracer.stores.zarr.shards import chunks_begin

if sys.platform != "win32":
    import fcntl

SUFFIXES = (".zarr", ".h5", ".hdf5")
FORMATS = (".zarr", ".h5")
DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]

every_format = pytest.mark.parametrize("suffix", FORMATS)


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Numbers of any dtype that differ from place to place."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    values = rng.integers(0, 120, shape).astype(dtype)
    return values * np.array(1 - 2j).astype(dtype) if dtype.startswith("complex") else values


def five_numbers(path: Path) -> Any:
    """A store that is being written, with an array ``a`` of 0 to 4 that was committed."""
    store = create_store(path)
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    store.seal()
    store.append("a", np.arange(5, dtype=np.int8))
    store.commit()
    return store


def plainly(path: Path, name: str) -> np.ndarray[Any, Any]:
    """An array as the format's own library reads it."""
    if path.suffix == ".zarr":
        return np.asarray(zarr.open_group(path, mode="r")[name][...])
    with h5py.File(path, "r") as file:
        return np.asarray(file[name][...])


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(tmp_path: Path, suffix: str, dtype: str) -> None:
    """Numbers of every dtype come back, from the store and from the format's own library."""
    path = tmp_path / f"store{suffix}"
    values = numbers(dtype, (100, 3))
    store = create_store(path)
    store.create("group/array", dtype=dtype, shape=(3,), chunk_bytes=64)
    for start in range(0, 100, 7):
        store.append("group/array", values[start : start + 7])
    assert store.length("group/array") == 100
    store.close()
    reader = open_store(path)
    assert reader.names() == ["group/array"]
    assert (reader.dtype("group/array"), reader.row_shape("group/array")) == (dtype, (3,))
    assert np.array_equal(reader.read("group/array", 0, 100), values)
    assert np.array_equal(reader.read("group/array", 33, 34), values[33:34])
    assert reader.read("group/array", 5, 5).shape == (0, 3)
    reader.close()
    reader.close()
    plain = plainly(path, "group/array")
    assert plain.dtype == dtype
    assert np.array_equal(plain, values)


@every_format
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    chunk_bytes=st.integers(1, 200),
    appends=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=12),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_appends_and_commits_in_any_order(
    tmp_path: Path,
    suffix: str,
    shape: tuple[int, ...],
    chunk_bytes: int,
    appends: list[tuple[int, bool]],
    cut: tuple[float, float],
) -> None:
    """However rows are appended and committed, all of them come back, whole and in parts."""
    path = tmp_path / f"store{suffix}"
    total = sum(count for count, _ in appends)
    values = numbers("int32", (total, *shape))
    store = create_store(path, overwrite=True)
    store.create("a", dtype="int32", shape=shape, chunk_bytes=chunk_bytes)
    done = 0
    for count, commit in appends:
        store.append("a", values[done : done + count])
        done += count
        if commit:
            store.commit()
    store.close()
    reader = open_store(path)
    assert reader.length("a") == total
    assert np.array_equal(reader.read("a", 0, total), values)
    low, high = sorted(int(part * total) for part in cut)
    assert np.array_equal(reader.read("a", low, high), values[low:high])
    reader.close()
    assert np.array_equal(plainly(path, "a"), values)


@every_format
def test_rows_larger_than_a_chunk(tmp_path: Path, suffix: str) -> None:
    """A row over 1 MiB is split along its leading axes, the last part padded, and comes back whole."""
    path = tmp_path / f"store{suffix}"
    values = numbers("float64", (3, 3, 301, 700))
    store = create_store(path)
    store.create("a", dtype="float64", shape=(3, 301, 700), chunk_bytes=65536)
    for row in values:
        store.append("a", row[None])
    store.close()
    reader = open_store(path)
    assert np.array_equal(reader.read("a", 0, 3), values)
    assert np.array_equal(reader.read("a", 1, 2), values[1:2])
    reader.close()
    assert np.array_equal(plainly(path, "a"), values)


@given(
    st.sampled_from([1, 2, 4, 8, 16]), st.lists(st.integers(1, 3000), max_size=4).map(tuple), st.integers(1, 1 << 21)
)
def test_chunks_are_small_and_not_too_many(itemsize: int, shape: tuple[int, ...], chunk_bytes: int) -> None:
    """A chunk is at most 1 MiB where a row then has at most 256, and the padding is less than the row."""
    chunk = chunk_shape(itemsize, shape, chunk_bytes)
    row = itemsize * math.prod(shape)
    nbytes = itemsize * math.prod(chunk)
    assert nbytes <= max(1 << 20, -(-row // 64))
    per_row = math.prod(-(-size // part) for size, part in zip(shape, chunk[1:], strict=True))
    assert per_row <= 250
    assert per_row == 1 or (chunk[0] == 1 and per_row * nbytes < 2 * row)


def test_chunks_tile_the_rows() -> None:
    """The chunks of split rows, put together on their grid, are the rows (checked without any store)."""
    rows = RowChunks("a", "float32", (5, 7, 90000), 1)
    values = numbers("float32", (2, 5, 7, 90000))
    padded = np.full([2, *(c * s for c, s in zip(rows.grid, rows.chunk[1:], strict=True))], np.nan, np.float32)

    def place(first: int, pieces: list[memoryview]) -> None:
        assert len(pieces) <= CHUNKS_AT_ONCE
        for number, data in enumerate(pieces, first):
            row, rest = divmod(number, rows.per_row)
            where = np.unravel_index(rest, rows.grid)
            at = tuple(slice(i * s, (i + 1) * s) for i, s in zip(where, rows.chunk[1:], strict=True))
            padded[(row, *at)] = np.frombuffer(data, np.float32).reshape(rows.chunk[1:])

    rows.append(values, place)
    assert np.array_equal(padded[:, :5, :7, :90000], values)


@every_format
def test_committed_rows_are_there_while_the_store_is_written(tmp_path: Path, suffix: str) -> None:
    """A reader that opens a store between two commits sees the first and not the second."""
    path = tmp_path / f"store{suffix}"
    store = create_store(path)
    store.create("a", dtype="int64", shape=(), chunk_bytes=80, gapless=True)
    store.commit()
    assert open_store(path).length("a") == 0
    store.append("a", np.arange(25))
    store.seal()
    store.commit()
    store.append("a", np.arange(25, 28))
    reader = open_store(path)
    assert np.array_equal(reader.read("a", 0, reader.length("a"))[:25], np.arange(25))
    assert reader.length("a") == 25
    store.commit()
    assert reader.length("a") == 28
    assert np.array_equal(reader.read("a", 20, 28), np.arange(20, 28))
    reader.close()
    store.close()
    store.close()


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_metadata_of_an_array_with_gaps_are_not_written_at_each_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None
) -> None:
    """Its zarr.json says more rows than there are until it is closed; a reader gets those that are there."""
    written: list[str] = []
    write = write_document
    monkeypatch.setattr(
        zarr_writing,
        "write_document",
        lambda folder, *rest: (written.append(Path(folder).name), write(folder, *rest))[1],
    )
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
    assert (written.count("a"), written.count("b")) == (3, 21)
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
        patch.setattr(zarr_writing, "write_document", full)
        store.close()
    reader = open_store(path)
    assert reader.length("a") == 1280
    assert np.array_equal(reader.read("a", 0, 25), np.arange(25))
    reader.close()


@every_format
@pytest.mark.parametrize("codec", [None, "lz4"])
@pytest.mark.parametrize("gapless", [True, False])
def test_what_was_read_before_a_commit_is_the_same_after_it(
    tmp_path: Path, suffix: str, codec: str | None, gapless: bool
) -> None:
    """The last chunk moves when it grows, and the next takes its place: a reader that knows the old place sees that."""
    path = tmp_path / f"store{suffix}"
    store = create_store(path)
    store.create("a", dtype="int64", shape=(), chunk_bytes=64, compression=codec, gapless=gapless)
    store.seal()
    values = np.arange(100)
    store.append("a", values[:3])
    store.commit()
    reader = open_store(path)
    for stop in range(4, 100):
        assert np.array_equal(reader.read("a", 0, 3), values[:3])
        store.append("a", values[stop - 1 : stop])
        store.commit()
        assert np.array_equal(reader.read("a", 0, 3), values[:3])
        if stop % 7 == 0:
            reader.refresh()
            assert reader.length("a") == stop or (not gapless and reader.length("a") > stop)
            assert np.array_equal(reader.read("a", 0, stop), values[:stop])
            known = stop
        elif stop > 7:
            assert np.array_equal(reader.read("a", 0, known), values[:known])
            assert np.array_equal(reader.read("a", known - 1, known), values[known - 1 : known])
    reader.close()
    store.close()


@every_format
def test_attributes(tmp_path: Path, suffix: str) -> None:
    """Attributes of root, groups and arrays are JSON values of any size, and come back as they were."""
    path = tmp_path / f"store{suffix}"
    values = {
        "text": "ä\n",
        "empty": "",
        "like json": "json:{",
        "zero": "a\0b",
        "int": -5,
        "huge": 2**70,
        "float": 0.1,
        "bool": True,
        "none": None,
        "list": [1, [2.5, "x"]],
        "large": {"parameters": ["w" * 50] * 20000},
    }
    store = create_store(path)
    store.create("g/a", dtype="int8", shape=(), chunk_bytes=8)
    for name in ("", "g", "g/a"):
        store.set_attrs(name, {"first": name})
        store.set_attrs(name, values)
    store.append("g/a", np.zeros(3, np.int8))
    store.close()
    reader = open_store(path)
    for name in ("", "g", "g/a"):
        found = reader.attrs(name)
        assert found == {"first": name, **values}
        assert type(found["bool"]) is bool
    reader.close()


@every_format
def test_names_of_arrays(tmp_path: Path, suffix: str) -> None:
    """Names are listed sorted, by prefix; bad, taken and unknown ones are refused."""
    path = tmp_path / f"store{suffix}"
    store = create_store(path)
    for name in ("b/c", "a", "b/d/e%2F", "bb"):
        store.create(name, dtype="int8", shape=(), chunk_bytes=8)
    for name in ("a", "b", "../x", "/x", "x//y", "", ".", "x/..", "__x", "x\\y", "x\ny", "y" * 300, "zarr.json"):
        with pytest.raises(TraceError):
            store.create(name, dtype="int8", shape=(), chunk_bytes=8)
    with pytest.raises(TraceError, match="nothing"):
        store.append("nothing", np.zeros(1, np.int8))
    store.close()
    reader = open_store(path)
    assert reader.names() == ["a", "b/c", "b/d/e%2F", "bb"]
    assert reader.names("b/") == ["b/c", "b/d/e%2F"]
    with pytest.raises(TraceError, match="nothing"):
        reader.length("nothing")
    reader.close()


@every_format
def test_rows_that_do_not_fit(tmp_path: Path, suffix: str) -> None:
    """Rows of another shape or dtype, arrays of objects or of empty rows, and rows beyond the end are refused."""
    path = tmp_path / f"store{suffix}"
    store = create_store(path)
    store.create("a", dtype="float32", shape=(2, 3), chunk_bytes=8)
    for rows in (np.zeros((1, 3, 2), np.float32), np.zeros((2, 3), np.float32), np.zeros((1, 2, 3))):
        with pytest.raises(TraceError, match="do not fit"):
            store.append("a", rows)
    for dtype, shape in (("object", ()), ("S3", ()), ("float32", (2, 0))):
        with pytest.raises(TraceError, match="cannot have"):
            store.create("b", dtype=dtype, shape=shape, chunk_bytes=8)
    store.append("a", np.zeros((2, 2, 3), np.float32))
    store.close()
    reader = open_store(path)
    for start, stop in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(TraceCorruptError, match="has 2 rows"):
            reader.read("a", start, stop)
    reader.close()


@every_format
def test_memory_is_free_to_use(tmp_path: Path, suffix: str) -> None:
    """What was appended may be changed afterwards, and what was read may be changed unseen by others."""
    path = tmp_path / f"store{suffix}"
    store = create_store(path)
    store.create("a", dtype="int32", shape=(), chunk_bytes=16)
    values = np.arange(10, dtype=np.int32)
    store.append("a", values)
    values[:] = -1
    store.close()
    reader = open_store(path)
    reader.read("a", 0, 10)[:] = -2
    assert np.array_equal(reader.read("a", 0, 10), np.arange(10))
    reader.close()


@every_format
def test_nothing_is_overwritten_unasked(tmp_path: Path, suffix: str) -> None:
    """An existing store is overwritten when asked; other files and directories never are."""
    path = tmp_path / "made" / "on the way" / f"store{suffix}"
    create_store(path).close()
    with pytest.raises(TraceExistsError, match="store"):
        create_store(path)
    store = create_store(path, overwrite=True)
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    store.close()
    assert open_store(path).names() == ["a"]
    file, folder = tmp_path / f"file{suffix}", tmp_path / f"folder{suffix}"
    file.write_text("a thesis")
    folder.mkdir()
    (folder / "thesis.tex").write_text("a thesis")
    for other in (file, folder):
        with pytest.raises(TraceExistsError, match="could be overwritten"):
            create_store(other, overwrite=True)
    assert file.read_text() == (folder / "thesis.tex").read_text() == "a thesis"


@every_format
def test_what_is_no_store(tmp_path: Path, suffix: str) -> None:
    """A missing path, a text file, an empty file and an empty directory are refused in a sentence with the path."""
    path = tmp_path / f"store{suffix}"
    with pytest.raises(TraceNotFoundError, match=f"store{suffix}"):
        open_store(path)
    for content in ("", "not a trace at all"):
        path.write_text(content)
        with pytest.raises(TraceFormatError, match=f"store{suffix}"):
            open_store(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(TraceFormatError, match=f"store{suffix}"):
        open_store(path)
    for broken in ("{", "[]", '{"zarr_format": 2, "node_type": "group"}', "[" * 100000):
        (path / "zarr.json").write_text(broken)
        with pytest.raises(TraceFormatError, match=f"store{suffix}"):
            open_store(path)


def test_unknown_suffixes(tmp_path: Path) -> None:
    """A path with another suffix is refused, naming those that are allowed."""
    for name in ("trace", "trace.mcap"):
        for function in (create_store, open_store):
            with pytest.raises(TraceFormatError, match=r"\.zarr, \.h5, \.hdf5"):
                function(tmp_path / name)


@every_format
def test_a_closed_store_takes_nothing(tmp_path: Path, suffix: str) -> None:
    """After closing, appending is an error of this project and not of a library."""
    store = create_store(tmp_path / f"store{suffix}")
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    store.close()
    with pytest.raises(TraceError, match="closed"):
        store.append("a", np.zeros(1, np.int8))
    store.abandon()


def test_hdf5_is_sealed(tmp_path: Path) -> None:
    """A sealed HDF5 file takes rows, and neither arrays nor attributes."""
    store = create_store(tmp_path / "store.h5")
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    assert store.seals
    assert store.can_create
    store.seal()
    assert not store.can_create
    store.append("a", np.zeros(1, np.int8))
    for attempt in (
        lambda: store.create("b", dtype="int8", shape=(), chunk_bytes=8),
        lambda: store.set_attrs("", {"x": 1}),
    ):
        with pytest.raises(TraceError, match="sealed"):
            attempt()
    store.close()


@pytest.mark.parametrize("what", ["reference", "text of variable length", "list", "bytes"])
def test_hdf5_attributes_of_other_types(tmp_path: Path, what: str) -> None:
    """An attribute that no JSON value is stored as is refused, not interpreted; what would be in a heap is not read."""
    path = tmp_path / "store.h5"
    with h5py.File(path, "w") as file:
        value = {"reference": file.ref, "list": [1, 2], "bytes": np.void(b"x")}.get(what, "text")
        file.attrs["odd"] = value
    store = open_store(path)
    with pytest.raises(TraceFormatError, match=r"'odd' of 'the root' is not one of a trace"):
        store.attrs()
    store.close()


def test_hdf5_attributes_need_no_heap(tmp_path: Path) -> None:
    """Texts are of fixed length: a trace has no global heap, of which a damaged one would make HDF5 hang."""
    path = tmp_path / "run.h5"
    values = {
        "text": "gr\u00fc\u00df",
        "empty": "",
        "nested": {"a": ["b"]},
        "zero": "a\0b",
        "long": "x" * 100_000,
        "none": None,
    }
    store = create_store(path)
    store.set_attrs("", values)
    store.close()
    assert b"GCOL" not in path.read_bytes()
    with h5py.File(path) as file:
        assert file.attrs["text"].decode() == values["text"]
    read = open_store(path)
    assert read.attrs() == values
    read.close()


@pytest.mark.parametrize(
    "kind",
    ["external", "soft", "external storage", "virtual", "filter", "contiguous", "text", "twice", "cycle", "type"],
)
def test_hdf5_parts_that_a_trace_never_has(tmp_path: Path, kind: str) -> None:
    """What would make a trace show other files, or run a filter, is refused on open, before anything is read."""
    path = tmp_path / "hostile.h5"
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"secret!!")
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other.create_dataset("a", data=np.arange(8))
    with h5py.File(path, "w") as file:
        group = file.create_group("g")
        if kind == "external":
            group["a"] = h5py.ExternalLink("other.h5", "/a")
        elif kind == "soft":
            group["a"] = h5py.SoftLink("/g")
        elif kind == "external storage":
            group.create_dataset("a", shape=(8,), dtype="u1", external=[(str(secret), 0, 8)])
        elif kind == "virtual":
            virtual = h5py.VirtualLayout((8,), "i8")
            virtual[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "a", (8,))
            group.create_virtual_dataset("a", virtual)
        elif kind == "filter":
            group.create_dataset("a", data=np.arange(8), chunks=(8,), compression="gzip")
        elif kind == "contiguous":
            group.create_dataset("a", data=np.arange(8))
        elif kind == "text":
            group.create_dataset("a", data=["x"], chunks=(1,), maxshape=(None,))
        elif kind == "twice":
            group.create_dataset("a", data=np.arange(8), chunks=(8,))
            group["b"] = group["a"]
        elif kind == "cycle":
            group["a"] = group
        elif kind == "type":
            group["a"] = np.dtype("f8")
    with pytest.raises(TraceFormatError, match="g/"):
        open_store(path)


def damaged(path: Path, **changes: Any) -> None:
    """Change members of the metadata of array ``a`` of a Zarr store."""
    document = json.loads((path / "a" / "zarr.json").read_text())
    (path / "a" / "zarr.json").write_text(json.dumps(document | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"codecs": [{"name": "bytes"}, {"name": "pickle"}]},
        {"codecs": [{"name": "numcodecs.pickle"}]},
        {"codecs": [{"name": "sharding_indexed", "configuration": {"codecs": [{"name": "evil"}]}}]},
        {"codecs": 7},
        {"codecs": []},
        {"data_type": "object"},
        {"data_type": "nothing"},
        {"data_type": {"name": "struct"}},
        {"shape": [-3]},
        {"shape": []},
        {"shape": [2, 2]},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}},
        {"storage_transformers": [{"name": "evil"}]},
    ],
)
def test_zarr_metadata_that_a_trace_never_has(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Unknown codecs, objects and nonsense in a zarr.json are refused, before anything is read."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    store.append("a", np.arange(20, dtype=np.int8))
    store.close()
    damaged(path, **changes)
    with pytest.raises(TraceFormatError, match="'a'"):
        open_store(path).read("a", 0, 2)


def test_zarr_links_out_of_the_store(tmp_path: Path) -> None:
    """A link that leads out of the directory is refused, be it an array or a shard."""
    for name in ("one.zarr", "two.zarr"):
        store = create_store(tmp_path / name)
        store.create("a", dtype="int8", shape=(), chunk_bytes=8)
        store.append("a", np.arange(20, dtype=np.int8))
        store.close()
    shard = tmp_path / "two.zarr" / "a" / "c" / "0"
    shard.unlink()
    shard.symlink_to(tmp_path / "one.zarr" / "a" / "c" / "0")
    (tmp_path / "two.zarr" / "b").symlink_to(tmp_path / "one.zarr" / "a")
    reader = open_store(tmp_path / "two.zarr")
    for name in ("a", "b"):
        with pytest.raises(TraceFormatError, match="leads out"):
            reader.read(name, 0, 2)


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
    reader = ZarrReadStore(Path(root))
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
    reader = open_store(path)
    assert reader.names() == ["b", "g/a"]
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


def test_hdf5_opened_twice_in_a_process(tmp_path: Path) -> None:
    """Two readers of one file see the same, one after the other and side by side, while it is written and later."""
    path = tmp_path / "store.h5"
    values = numbers("int64", (40, 3))
    store = create_store(path)
    store.create("a", dtype="int64", shape=(3,), chunk_bytes=24)
    store.seal()
    store.append("a", values[:20])
    store.commit()
    for stop in (20, 40):
        one, two = open_store(path), open_store(path)
        for reader in (one, two, one):
            assert np.array_equal(reader.read("a", 0, reader.length("a")), values[:stop])
        one.close()
        two.close()
        if stop == 20:
            store.append("a", values[20:])
            store.close()


def test_hdf5_grows_beside_a_reader_that_is_behind(tmp_path: Path) -> None:
    """A reader of what another one of the process follows reads what it saw, though the file has grown since."""
    path = tmp_path / "store.h5"
    values = numbers("int64", (3000, 3))
    store = create_store(path)
    store.create("a", dtype="int64", shape=(3,), chunk_bytes=24)
    store.seal()
    store.append("a", values[:20])
    store.commit()
    with closing(open_store(path)) as behind, closing(open_store(path)) as reader:
        assert (behind.length("a"), reader.length("a")) == (20, 20)
        store.append("a", values[20:])
        store.commit()
        assert np.array_equal(reader.read("a", 0, 20), values[:20])
        reader.refresh()
        assert np.array_equal(reader.read("a", 0, reader.length("a")), values)
    store.close()


def test_hdf5_fails_to_say_why_a_file_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is being written is read although h5py, which collects garbage meanwhile, loses why it is not."""
    path = tmp_path / "store.h5"
    store = five_numbers(path)
    plainly = h5py.h5f.open
    failed = []

    def open_file(*arguments: Any, **options: Any) -> Any:
        try:
            return plainly(*arguments, **options)
        except OSError as error:
            failed.append(str(error))
            raise UnicodeDecodeError("utf-8", b"\x9b", 0, 1, "invalid start byte") from None

    monkeypatch.setattr(h5py.h5f, "open", open_file)
    reader = open_store(path)
    assert (reader.length("a"), bool(failed)) == (5, True)
    reader.close()
    store.close()


def test_hdf5_opened_while_another_thread_opens_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose writer ends is opened although another thread changes how it is open, as soon as it can."""
    path = tmp_path / "store.h5"
    store = five_numbers(path)
    one = open_store(path)
    store.close()
    others: list[Any] = []

    def reopen() -> None:
        one.close()
        others.append(open_store(path))

    thread = threading.Thread(target=reopen)
    plainly = h5py.h5f.open

    def open_file(*arguments: Any, **options: Any) -> Any:
        try:
            return plainly(*arguments, **options)
        except OSError:
            if thread.ident is None:
                thread.start()
                thread.join(0.5)
            raise

    monkeypatch.setattr(h5py.h5f, "open", open_file)
    monkeypatch.setattr(hdf5_reading, "is_followed", lambda file: False)  # as when the other one opens it only then
    two = open_store(path)
    thread.join()
    for reader in (two, *others):
        assert np.array_equal(reader.read("a", 0, 5), np.arange(5))
        reader.close()
    assert len(others) == 1


def test_hdf5_readers_that_nobody_refers_to_are_closed(tmp_path: Path) -> None:
    """A reader that was forgotten holds no file until garbage is collected, opened while it is written or later."""

    def opened() -> int:
        return int(h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE | h5py.h5f.OBJ_DATASET))

    gc.collect()
    gc.disable()
    try:
        before = opened()
        path = tmp_path / "store.h5"
        store = five_numbers(path)
        writing = opened()
        assert open_store(path).length("a") == 5
        assert opened() == writing > before
        store.close()
        del store
        assert open_store(path).length("a") == 5
        assert opened() == before
    finally:
        gc.enable()


def test_a_forked_child_writes_nothing_to_hdf5(tmp_path: Path) -> None:
    """What HDF5 keeps in memory is not written a second time by a child that ends in order."""
    path = tmp_path / "run.h5"
    code = """
import os, sys
import numpy as np
from tracer.stores.opening import create_store, open_store
store = create_store(sys.argv[1])
store.create("a", dtype="int64", shape=(), chunk_bytes=64)
store.append("a", np.arange(100))
store.seal()
store.append("a", np.arange(1000))
if os.fork() == 0:
    assert not os.path.samestat(os.fstat(store._file.id.get_vfd_handle()), os.stat(sys.argv[1]))
    sys.exit()
store.append("a", np.arange(50_000))
store.commit()
assert os.wait()[1] == 0
store.append("a", np.arange(9))
store.close()
read = open_store(sys.argv[1])
assert read.length("a") == 51_109
assert read.read("a", 1100, 51_100).tolist() == list(range(50_000))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = processes.run(
        [sys.executable, "-W", "ignore", "-c", code, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@every_format
def test_append_says_where(tmp_path: Path, suffix: str) -> None:
    """Appending tells the row at which the rows begin, and nothing is left out on a disk."""
    store = create_store(tmp_path / f"store{suffix}")
    store.create("group/array", dtype="int32", shape=(2,), chunk_bytes=16)
    begins = []
    for count in (3, 0, 5):
        begins.append(store.append("group/array", np.ones((count, 2), np.int32)))
        store.commit()
    store.close()
    assert begins == [0, 3, 3]
    reader = open_store(tmp_path / f"store{suffix}")
    assert [reader.has_chunk("group/array", row) for row in range(8)] == [True] * 8


def test_a_chunk_that_was_left_out(tmp_path: Path) -> None:
    """Whether a chunk is there is told by its shard's index, also where the shard is not there."""
    store = create_store(tmp_path / "store.zarr")
    store.create("array", dtype="int64", shape=(), chunk_bytes=64)
    store.append("array", np.arange(8))
    store.close()
    document = json.loads((tmp_path / "store.zarr/array/zarr.json").read_text())
    (tmp_path / "store.zarr/array/zarr.json").write_text(json.dumps(document | {"shape": [5000]}))
    reader = open_store(tmp_path / "store.zarr")
    assert [reader.has_chunk("array", row) for row in (0, 7, 8, 1023, 1024, 4999)] == [True, True, *[False] * 4]
    with pytest.raises(TraceCorruptError, match="lacks its chunk"):
        reader.read("array", 0, 9)


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


def written_unhurried(path: Path) -> np.ndarray[Any, Any]:
    """Write six rows of 256 KB to a store, and return them."""
    values = numbers("float32", (6, 256, 256))
    store = create_store(path)
    store.unhurried = True
    store.create("own", dtype="float32", shape=(256, 256), chunk_bytes=1)
    for number in range(6):
        store.append("own", values[number : number + 1])
    store.close()
    return values


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
                found = array.dataset.get_chunk_info_by_coord(store._start(array, array.first + number)).byte_offset
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


def test_hdf5_that_is_moved_while_it_is_written(tmp_path: Path) -> None:
    """Large chunks go to the file that was begun, whatever else is at its path by now."""
    path = tmp_path / "store.h5"
    values = numbers("float32", (6, 256, 256))
    store = create_store(path)
    store.create("own", dtype="float32", shape=(256, 256), chunk_bytes=1)
    store.seal()
    store.append("own", values[:3])
    store.commit()
    path.rename(tmp_path / "moved.h5")
    written_unhurried(path)
    other = path.read_bytes()
    store.unhurried = True
    store.append("own", values[3:])
    store.close()
    assert path.read_bytes() == other
    with closing(open_store(tmp_path / "moved.h5")) as reader:
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
        assert len(files) == {"in part": 6, "when opened": 0}.get(how, 1)


@pytest.mark.parametrize("piece", [1000, 65536, 1 << 20])
def test_zarr_chunks_are_read_in_pieces(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a chunk is cut to be read, its bytes are right, and one that is not is found wherever it is."""
    monkeypatch.setattr("tracer.stores.zarr.reading.READ_PIECE", piece)
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


def test_parts_in_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that may be entered only: an attempt that is not seen would have its steps twice, a rank would be missing."""
    parts = ["rank0.attempt1", "rank0.attempt2", "rank1", "rank3", "rank3.attempt1", "rank12"]
    for name in ("run.h5", *(f"run.{part}.h5" for part in parts), "run2.rank1.h5", "run.other.h5"):
        (tmp_path / name).touch()
    expected = [tmp_path / "run.h5", *(tmp_path / f"run.{part}.h5" for part in parts)]
    assert store_files(tmp_path / "run.h5") == expected

    def refused(number: int) -> None:
        def listdir(path: Path) -> list[str]:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "listdir", listdir)

    refused(errno.EACCES)
    assert store_files(tmp_path / "run.h5") == expected
    assert store_files(tmp_path / "other.h5") == [tmp_path / "other.h5"]
    refused(errno.EMFILE)
    with pytest.raises(TraceUnreadableError, match="cannot be listed: Too many open files"):
        store_files(tmp_path / "run.h5")


@every_format
def test_a_folder_that_cannot_be_listed_now_is_not_empty(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files say nothing of what is there."""
    path = tmp_path / f"run{suffix}"
    with closing(create_store(path, part="rank0")) as store:
        store.create("rank0/values", dtype="float32", shape=(4,), chunk_bytes=1 << 16)
        store.append("rank0/values", np.ones((3, 4), np.float32))

    def listdir(folder: object) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(TraceUnreadableError, match="cannot be listed: Too many open files"):
        open_parts(path)
