"""What is said of a trace does not depend on how many rows of its journal are in memory at once."""

from __future__ import annotations

import contextlib
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trace.test_hostile import damage, facts
from tests.trace.written_parts import write_part
from tracer.errors import TraceError, TraceLostError
from tracer.format.journal import COLUMNS
from tracer.format.names import part_name
from tracer.format.tables import Stream
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace.columns import Columns, Group
from tracer.trace.commits import Due
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.damage import Chunks
from tracer.upkeep.recover import recover
from tracer.upkeep.verify import verify

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)
STEPS = 24


def of_step(step: int, rank: int = 0) -> Iterator[Message]:
    """An event, a scalar, rows of a pool of their own, ragged ones, and one that is cut into several chunks."""
    where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
    yield NetworkMessage(kind="batch_started", **where)
    yield NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where)
    yield ModuleMessage(kind="weights", module="own", data=torch.full((20, 16), float(step)), **where)
    yield ModuleMessage(kind="biases", module="a", data=torch.full((step % 5,), float(step)), **where)
    yield ModuleMessage(kind="biases", module="b", data=torch.full((3, 70), float(step)), **where)
    yield ModuleMessage(kind="biases", module="c", data=torch.full((70, 3), step).bfloat16(), **where)


def write(
    path: Path, *, part: str | None = None, rank: int = 0, first: int = 0, compression: str = "none", **header: Any
) -> Path:
    """A run of some steps, committed every now and then."""
    options: dict[str, Any] = {"own_pool_bytes": 1000, "chunk_bytes": 512, "commit_rows": 31}
    with TraceWriter(path, part=part, header=header, compression=compression, **options) as writer:
        for step in range(first, STEPS):
            writer.write_many(of_step(step, rank))
    return path


def windows_of(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Read a journal in windows of so many rows."""
    monkeypatch.setattr("tracer.trace.rows.PIECE_ROWS", rows)
    monkeypatch.setattr("tracer.trace.reader.WINDOW_ROWS", rows)


def told(path: Path, saved: Path) -> tuple[Any, ...]:
    """All that is said of a trace, and what can be saved of it."""
    report = verify(path).describe()
    try:
        loss = recover(path, saved).describe()
    except TraceLostError as error:
        return report, None if error.loss is None else error.loss.describe()
    with TraceReader(saved) as reader:
        messages = [facts(message) for message in reader]
    shutil.rmtree(saved)
    return report, loss, messages


@pytest.fixture(scope="module", params=[*FORMATS, "zstd.zarr"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in each format, undamaged."""
    compression, _, suffix = request.param.rpartition(".")
    return write(tmp_path_factory.mktemp("whole") / f"run.{suffix}", compression=compression or "none")


@pytest.mark.parametrize("cases", [range(3), pytest.param(range(3, 300), marks=pytest.mark.slow)])
def test_reports_of_damaged_traces(whole: Path, tmp_path: Path, cases: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify and recover say the same, and save the same, with windows of 8 rows and of all of them."""
    lost = 0
    for case in cases:
        path = tmp_path / f"bad{whole.suffix}"
        (shutil.copytree if whole.is_dir() else shutil.copyfile)(whole, path)
        rng = random.Random(case)
        what = [damage(path, rng) for _ in range(1 + case % 3)]
        found = []
        for rows in (8192, 8):
            windows_of(monkeypatch, rows)
            try:
                found.append(told(path, tmp_path / "saved.zarr"))
            except TraceError as error:
                found.append((str(error),))
        assert found[0] == found[1], what
        lost += len(found[0]) > 1 and found[0][0]["damaged"]
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert lost


def test_ranks_and_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, one of which went on in a second attempt, all that counts is saved in the order of a reader."""
    path = tmp_path / "run.zarr"
    run = {"run_id": "r", "created": "2026-01-01T00:00:00+00:00", "ranks": [0, 1]}
    for rank in (0, 1):
        write(path, part=part_name(rank), rank=rank, **run)
    for rank in (0, 1):
        write(path, part=part_name(rank, 1), rank=rank, first=15, attempt=1, first_step=15, **run)
    with TraceReader(path) as reader:
        expected = [facts(message) for message in reader]
    assert len(expected) == 2 * 6 * STEPS
    for rows in (8192, 8):
        windows_of(monkeypatch, rows)
        saved = tmp_path / f"saved{rows}.zarr"
        asked: list[tuple[int, int]] = []
        loss = recover(path, saved, progress=lambda done, total, asked=asked: asked.append((done, total)))
        assert (loss.saved, loss.lost, loss.lossless) == (len(expected), 0, True)
        assert {total for _, total in asked} == {len(expected)}
        with TraceReader(saved) as reader:
            assert [facts(message) for message in reader] == expected


def test_rows_that_change_while_they_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is not what it was when it was first read is damage, and no message is made of it."""
    path = write(tmp_path / "run.zarr")
    plainly, times = Chunks.table, [0]

    def other(self: Chunks, *given: Any) -> Any:
        rows, there = plainly(self, *given)
        if rows.shape[1:] == (COLUMNS,) and len(rows) > 9:
            times[0] += 1
            rows = rows.copy()
            rows[9] *= times[0] == 1
        return rows, there

    monkeypatch.setattr(Chunks, "table", other)
    report = verify(path)
    [problem] = report.problems
    assert (problem.check, problem.rows, problem.messages) == ("journal", (9, 10), 1)
    assert report.damaged == 1
    times[0] = 0
    loss = recover(path, tmp_path / "saved.zarr")
    assert (loss.saved, loss.lost, loss.lossless) == (6 * STEPS - 1, 1, False)


@pytest.mark.parametrize(("row", "lost"), [(6, 1), (17, 0), (19, 0)])
def test_a_damaged_row_stands_in_the_step_of_the_row_before_it(
    tmp_path: Path, row: int, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is lost where that step counts, and superseded where a later attempt trained the step again."""
    windows_of(monkeypatch, 17)
    path = tmp_path / "run.zarr"
    write_part(path, range(10), ranks=(0,))
    write_part(path, range(6, 10), attempt=1, ranks=(0,))
    with TraceReader(path) as reader:
        needle = reader._parts.shown[0].rows.all[row].tobytes()
    shard = path / "rank0" / "journal" / "c" / "0" / "0"
    data = bytearray(shard.read_bytes())
    data[data.rindex(needle) + 9] ^= 4  # of several versions of a chunk the last one counts
    shard.write_bytes(data)
    loss = recover(path, tmp_path / "saved.zarr")
    assert (loss.messages, loss.saved, loss.lost) == (20, 20 - lost, lost)
    assert [(one.kind, one.lost) for one in loss.streams] == [("(unknown)", 1)][:lost]
    assert verify(path).damaged == 1


ROWS = 400_000
"""Messages of a long run; its journal has 38 MB."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of many scalars."""
    path = tmp_path_factory.mktemp("long") / "run.zarr"
    loss = Stream("loss", True, None, "default", "", "float32", None, 0)
    counters = np.zeros((ROWS, 4), np.int64)
    counters[:, 0] = np.arange(ROWS)
    data = np.arange(ROWS, dtype=np.float32)
    with TraceWriter(path) as writer:
        columns = Columns([loss], np.zeros(ROWS, np.int64), counters, [Group(np.arange(ROWS), data, "float32")])
        writer.write_columns(columns)
    return path


def test_memory_is_that_of_a_window(long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither verify nor recover has all of the journal in memory."""
    windows_of(monkeypatch, 8192)
    # a slow machine commits by its clock, and then a summary is of up to twice as many rows
    monkeypatch.setattr(Due, "passed", property(lambda self: 0.0))

    # in the place of the reader that verify opens at the end
    nothing = SimpleNamespace(holes=[], ranks=[0])
    monkeypatch.setattr("tracer.upkeep.verify.TraceReader", lambda path: contextlib.nullcontext(nothing))
    saved = tmp_path / "saved.zarr"
    for work in (verify, lambda path: recover(path, saved)):
        tracemalloc.start()
        try:
            work(long)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most < ROWS * COLUMNS * 8 * 0.7, most
    with TraceReader(saved) as reader:
        assert (reader.array("loss")[1] == np.arange(ROWS)).all()
