"""Damage to a trace, contradictions in it, and other files in its place: each is found, and said."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import tracer
from tests.stores.stored import recorded_in
from tests.trace.round_trips import every_format, module, network, run, write
from tracer.errors import (
    TraceCorruptError,
    TraceError,
    TraceExistsError,
    TraceFormatError,
    TraceNotFoundError,
)
from tracer.format.journal import Column, row_checksums
from tracer.format.names import declarations_name, journal_name
from tracer.messaging.messages import Message
from tracer.trace.reader import TraceReader
from tracer.trace.rows import Rows
from tracer.trace.writer import TraceWriter


@every_format
def test_paths_that_hold_no_trace(tmp_path: Path, suffix: str) -> None:
    """A path that is missing, and one with a file that is no trace, raise what a caller would expect of them."""
    path = tmp_path / f"run{suffix}"
    with pytest.raises(TraceNotFoundError, match=f"run{suffix}"):
        TraceReader(path)
    path.write_text("hello")
    with pytest.raises(TraceFormatError, match=f"run{suffix}"):
        TraceReader(str(path))
    with pytest.raises(TraceExistsError, match=f"run{suffix}"):
        TraceWriter(path, overwrite=True)
    with pytest.raises(TraceFormatError, match="suffix"):
        TraceWriter(tmp_path / "run.txt")
    with pytest.raises(TraceError, match="run"):
        TraceWriter(path / "below" / f"run{suffix}")
    with pytest.raises(TraceError, match="header"):
        TraceWriter(tmp_path / f"new{suffix}", header={"a": object()})
    assert not (tmp_path / f"new{suffix}").exists()


@every_format
def test_other_versions(tmp_path: Path, suffix: str) -> None:
    """A trace of a later version is refused, naming the version found and the one that is read."""
    path = tmp_path / f"run{suffix}"
    write(path, run(1))
    if suffix == ".zarr":
        document = json.loads((path / "zarr.json").read_text())
        document["attributes"]["format_version"] = 7
        (path / "zarr.json").write_text(json.dumps(document))
    else:
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = 7
    with pytest.raises(TraceFormatError, match="format 7, and this release reads 1"):
        TraceReader(path)


def flip(path: Path, needle: bytes) -> None:
    """Flip a bit of the file that holds these bytes, in the midst of them."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    for file in files:
        data = bytearray(file.read_bytes())
        place = data.find(needle)
        if place >= 0:
            data[place + len(needle) // 2] ^= 4
            file.write_bytes(data)
            return
    raise AssertionError("these bytes are nowhere")


@every_format
@pytest.mark.parametrize("size", [50, 5000, 100_000])
def test_damaged_data_is_found(tmp_path: Path, suffix: str, size: int) -> None:
    """One flipped bit in a message's data is an error when it is read, in a shared pool and in one of its own."""
    path = tmp_path / f"run{suffix}"
    data = torch.rand(size, generator=torch.Generator().manual_seed(3))
    messages: list[Message] = [network("loss", 0, 0.0), module("weights", "fc", 1, data), network("loss", 2, 2.0)]
    write(path, messages, own_pool_bytes=10000)
    flip(path, data.numpy().tobytes()[8:48])
    with TraceReader(path) as reader:
        assert [m.global_step for m in reader.messages(kinds="loss")] == [0, 2]
        with pytest.raises(TraceCorruptError, match="weights"):
            list(reader.messages(kinds="weights"))
        with pytest.raises(TraceCorruptError, match="weights"):
            reader.array("weights", "fc")


@every_format
@pytest.mark.parametrize("size", [50, 5000, 100_000])
def test_unverified_data_is_read_as_it_is(tmp_path: Path, suffix: str, size: int) -> None:
    """With verify=False a flipped bit is read as it is, and all else as ever; a trace without an end is verified."""
    path = tmp_path / f"run{suffix}"
    data = torch.rand(size, generator=torch.Generator().manual_seed(3))
    messages: list[Message] = [network("loss", 0, 0.0), *(module("weights", "fc", k, data + k) for k in range(5))]
    write(path, messages, own_pool_bytes=10000)
    flip(path, (data + 1).numpy().tobytes()[8:48])
    with TraceReader(path, verify=False) as reader:
        found = [one.data for one in reader.messages(kinds="weights")]
        steps, array = reader.array("weights", "fc")
    assert steps.tolist() == list(range(5))
    for step, one in enumerate(found):
        assert one is not None
        wrong = torch.nonzero(one != data + step).reshape(-1).tolist()
        assert wrong == ([7] if step == 1 else [])
        assert np.array_equal(array[step], one.numpy())
    with TraceReader(path) as reader, pytest.raises(TraceCorruptError, match="weights"):
        list(reader.messages())


LARGE = [torch.rand(64, 1024, generator=torch.Generator().manual_seed(k)) for k in range(10)]


@every_format
@pytest.mark.parametrize("damage", ["a chunk's end", "cut", "empty", "gone"])
def test_damaged_large_data_is_found(tmp_path: Path, suffix: str, damage: str) -> None:
    """What cannot be read as it lies in its file is an error that names it, wherever it is hurt."""
    path = tmp_path / f"run{suffix}"
    write(path, [module("weights", "fc", k, data) for k, data in enumerate(LARGE)])
    (file,) = [path] if suffix == ".h5" else [one for one in path.rglob("c/0/0/0") if one.stat().st_size > 1 << 20]
    data = bytearray(file.read_bytes())
    begin = data.find(LARGE[5].numpy().tobytes())
    if damage == "a chunk's end":
        data[begin + LARGE[5].nbytes - 1] ^= 1
        file.write_bytes(data)
    with TraceReader(path) as reader:
        if damage == "gone" and suffix == ".zarr":
            file.unlink()
        elif damage in ("cut", "empty", "gone"):  # while it is open
            os.truncate(file, begin + 1000 if damage == "cut" else 0)
        with pytest.raises(TraceCorruptError, match="weights"):
            list(reader.messages())


def test_the_checksum_of_a_chunk_is_damaged_and_the_data_is_not(tmp_path: Path) -> None:
    """Messages are compared with their own checksums, so they are read; `verify` and other programs tell of it."""
    path = tmp_path / "run.zarr"
    write(path, [module("weights", "fc", k, data) for k, data in enumerate(LARGE)])
    (file,) = [one for one in path.rglob("c/0/0/0") if one.stat().st_size > 1 << 20]
    data = bytearray(file.read_bytes())
    data[data.find(LARGE[5].numpy().tobytes()) + LARGE[5].nbytes] ^= 1
    file.write_bytes(data)
    with TraceReader(path) as reader:
        found = list(reader.messages())
    assert all(torch.equal(one.data, want) for one, want in zip(found, LARGE, strict=True))
    report = tracer.verify(path)
    assert [problem.check for problem in report.problems] == ["chunk"]


@every_format
def test_a_trace_that_is_not_finished_is_always_verified(tmp_path: Path, suffix: str) -> None:
    """What is being written may be in two states at once."""
    path = tmp_path / f"run{suffix}"
    writer = TraceWriter(path)
    data = torch.rand(5000)
    writer.write(module("weights", "fc", 0, data))
    writer.commit()
    flip(recorded_in(path), data.numpy().tobytes()[8:48])
    with TraceReader(path, verify=False) as reader, pytest.raises(TraceCorruptError, match="weights"):
        list(reader.messages())
    with contextlib.nullcontext() if suffix == ".zarr" else pytest.raises(TraceError, match="fails its checksum"):
        writer.finish()


@every_format
def test_damaged_tables_are_found(tmp_path: Path, suffix: str) -> None:
    """A damaged declaration is an error on opening."""
    path = tmp_path / f"run{suffix}"
    write(path, run(2))
    flip(path, b'{"stream":{"id":1,')
    with pytest.raises(TraceCorruptError, match="run"):
        TraceReader(path)


def test_every_flipped_bit_of_an_hdf5_table_is_found(tmp_path: Path) -> None:
    """No bit of the journal and the declarations can change unnoticed where the format has no checksums."""
    path, changed = tmp_path / "run.h5", tmp_path / "changed.h5"
    write(path, run(1))
    data = path.read_bytes()
    places = []
    with h5py.File(path) as file:
        for name in (journal_name("rank0"), declarations_name("rank0")):
            begin = file[name].id.get_chunk_info(0).byte_offset
            places += range(begin, begin + file[name].nbytes)
    for place in np.random.default_rng(0).choice(places, 300, replace=False).tolist():
        changed.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        with pytest.raises(TraceCorruptError, match=r"(row|line) \d+ of the"):
            TraceReader(changed)


@every_format
def test_a_finished_trace_has_all_its_messages(tmp_path: Path, suffix: str) -> None:
    """A journal that is shorter than the ending says is an error, even where every row of it is right."""
    path = tmp_path / f"run{suffix}"
    write(path, run(1))
    if suffix == ".zarr":
        document = json.loads((path / journal_name("rank0") / "zarr.json").read_text())
        document["shape"][0] -= 1
        (path / journal_name("rank0") / "zarr.json").write_text(json.dumps(document))
    else:
        with h5py.File(path, "r+") as file:
            file[journal_name("rank0")].resize(len(file[journal_name("rank0")]) - 1, axis=0)
    with pytest.raises(TraceCorruptError, match=r"ended with 10 messages, and the journal has 9"):
        TraceReader(path)


CONTRADICTIONS: list[tuple[dict[Column, int], str]] = [
    ({Column.STREAM: 9}, "stream"),
    ({Column.STREAM: -1}, "stream"),
    ({Column.STREAM: 0}, "data"),
    ({Column.POOL: 7}, "pool"),
    ({Column.POOL: -1}, "pool"),
    ({Column.SHAPE: 5}, "shape"),
    ({Column.SHAPE: -1}, "shape"),
    ({Column.COUNT: 5}, "elements"),
    ({Column.COUNT: -1}, "elements"),
    ({Column.OFFSET: -1}, "before its pool"),
    ({Column.GLOBAL_STEP: -1}, "counter"),
    ({Column.FLAGS: 0}, "data"),
    ({Column.OFFSET: 10**6}, "not in pool"),
    ({Column.OFFSET: 2**63 - 1}, "before its pool"),
    ({Column.POOL: 1}, "not in pool"),
]


@pytest.mark.parametrize(("changes", "word"), CONTRADICTIONS)
def test_journals_that_contradict(
    tmp_path: Path, changes: dict[Column, int], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal row that refers to nothing, or beyond a pool, is refused and never shows other numbers."""
    path = tmp_path / "run.zarr"
    write(path, [network("batch_started", 0), network("loss", 0, [1.0, 2.0]), network("labels", 0, [1, 2])])
    read = Rows.new

    def changed(self: Rows, length: int) -> Any:
        start, journal = read(self, length)
        for column, value in changes.items():
            journal[1, column] = value
        journal[:, Column.CHECK] = row_checksums(journal, 0)
        return start, journal

    monkeypatch.setattr(Rows, "new", changed)
    with pytest.raises(TraceCorruptError, match=word):
        list(TraceReader(path).messages())


def test_rows_of_zeros_at_the_end_of_an_hdf5_journal(tmp_path: Path) -> None:
    """Rows whose length reached the disk before their numbers are not there yet; they never read as messages."""
    path = tmp_path / "run.h5"
    write(path, [network("batch_started", 0), network("loss", 0, 1.0)])
    with h5py.File(path, "r+") as file:
        file[journal_name("rank0")].resize(5, axis=0)
    with TraceReader(path) as reader:
        assert [m.kind for m in reader] == ["batch_started", "loss"]
