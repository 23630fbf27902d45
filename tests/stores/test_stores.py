"""The contract of every store: what it holds, in which order, what it refuses, and what a reader sees meanwhile."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.stores.stored import DTYPES, all_plainly, every_format, numbers, plainly
from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
    TraceUnreadableError,
)
from tracer.stores.chunks import CHUNKS_AT_ONCE, RowChunks, chunk_shape
from tracer.stores.codecs import CODECS
from tracer.stores.opening import create_store, open_parts, open_store, store_files


@every_format
def test_every_dtype_and_codec(tmp_path: Path, suffix: str) -> None:
    """Numbers of every dtype come back from the store and from the format's own library, smaller if compressed."""
    path = tmp_path / f"store{suffix}"
    values = {dtype: numbers(dtype, (500, 3), below=9) for dtype in DTYPES}
    store = create_store(path)
    for dtype, codec in itertools.product(DTYPES, (None, *CODECS)):
        name = f"{codec}/{dtype}"
        store.create(name, dtype=dtype, shape=(3,), chunk_bytes=2048, compression=codec)
        for start in range(0, 500, 70):
            assert store.append(name, values[dtype][start : start + 70]) == start
    store.close()
    names = [f"{codec}/{dtype}" for dtype in DTYPES for codec in (None, *CODECS)]
    with closing(open_store(path)) as reader:
        assert reader.names() == sorted(names)
        for name in names:
            expected = values[name.partition("/")[2]]
            assert (reader.dtype(name), reader.row_shape(name)) == (expected.dtype, (3,))
            assert np.array_equal(reader.read(name, 0, 500), expected)
            assert np.array_equal(reader.read(name, 33, 34), expected[33:34])
            assert reader.read(name, 5, 5).shape == (0, 3)
    for name, plain in all_plainly(path, names).items():
        assert plain.dtype == values[name.partition("/")[2]].dtype
        assert np.array_equal(plain, values[name.partition("/")[2]])


@every_format
@pytest.mark.parametrize("codec", [None, *CODECS])
def test_rows_larger_than_a_chunk(tmp_path: Path, suffix: str, codec: str | None) -> None:
    """A row over 1 MiB is split along its leading axes, the last part padded, and comes back whole."""
    path = tmp_path / f"store{suffix}"
    values = numbers("float64", (2, 3, 301, 200), below=9)
    values[1] = np.random.default_rng(0).random((3, 301, 200))  # cannot be compressed
    store = create_store(path)
    store.create("a", dtype="float64", shape=(3, 301, 200), chunk_bytes=65536, compression=codec)
    for row in values:
        store.append("a", row[None])
    store.close()
    with closing(open_store(path)) as reader:
        assert np.array_equal(reader.read("a", 0, 2), values)
        assert np.array_equal(reader.read("a", 1, 2), values[1:2])
        assert reader.stored_rows("a") >= 2
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


@pytest.mark.parametrize("codec", [None, "lz4"])
@pytest.mark.parametrize("gapless", [True, False])
def test_what_was_read_before_a_commit_is_the_same_after_it(tmp_path: Path, codec: str | None, gapless: bool) -> None:
    """The last chunk moves when it grows, and the next takes its place: a reader that knows the old place sees that."""
    path = tmp_path / "store.zarr"
    store = create_store(path)
    store.create("a", dtype="int64", shape=(), chunk_bytes=64, compression=codec, gapless=gapless)
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


def test_names_of_arrays(tmp_path: Path) -> None:
    """Names are listed sorted, by prefix; bad, taken and unknown ones are refused."""
    path = tmp_path / "store.zarr"
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


def test_rows_that_do_not_fit(tmp_path: Path) -> None:
    """Rows of another shape or dtype, arrays of objects or of empty rows, and rows beyond the end are refused."""
    path = tmp_path / "store.zarr"
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


def test_memory_is_free_to_use(tmp_path: Path) -> None:
    """What was appended may be changed afterwards, and what was read may be changed unseen by others."""
    path = tmp_path / "store.zarr"
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


def test_a_closed_store_takes_nothing(tmp_path: Path) -> None:
    """After closing, appending is an error of this project and not of a library."""
    store = create_store(tmp_path / "store.zarr")
    store.create("a", dtype="int8", shape=(), chunk_bytes=8)
    store.close()
    with pytest.raises(TraceError, match="closed"):
        store.append("a", np.zeros(1, np.int8))
    store.abandon()


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


def test_parts_in_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that is not seen would have its steps twice, and a rank would be missing."""
    parts = ["rank0.attempt1", "rank0.attempt2", "rank1", "rank3", "rank3.attempt1", "rank12"]
    for name in ("run.h5", *(f"run.{part}.h5" for part in parts), "run2.rank1.h5", "run.other.h5"):
        (tmp_path / name).touch()
    expected = [tmp_path / "run.h5", *(tmp_path / f"run.{part}.h5" for part in parts)]
    assert store_files(tmp_path / "run.h5") == expected

    def refused(number: int) -> None:
        def listdir(path: Path) -> list[str]:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "listdir", listdir)

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
