"""What is written in columns is what is written message by message."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trace.test_hostile import facts
from tracer.errors import TraceError
from tracer.format.journal import Column
from tracer.messaging.messages import Message, ModuleMessage, NetworkMessage
from tracer.trace import data as reading
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.verify import verify

OPTIONS: dict[str, dict[str, Any]] = {
    "as they come": {},
    "small chunks": {"chunk_bytes": 256, "own_pool_bytes": 400},
    "many commits": {"commit_rows": 7, "own_pool_bytes": 400},
    "few bytes": {"commit_bytes": 3000, "chunk_bytes": 512},
    "few steps": {"commit_steps": 3},
    "compressed": {"compression": "zstd", "chunk_bytes": 1024},
}


def messages(count: int = 400) -> list[Message]:
    """Messages of many streams in any order: ragged, of several dtypes, samplings, calls and leaves, and events."""
    rng = random.Random(3)
    generator = torch.Generator().manual_seed(3)
    made: list[Message] = []
    for number in range(count):
        where: dict[str, Any] = {"global_step": number // 9, "train_step": number // 9 % 5, "epoch": number // 45}
        kind = rng.choice(["event", "loss", "weights", "ragged", "biases", "empty", "late"])
        shape = rng.choice([(2, 3), (3, 2), (6,), (9, 40)])
        data = torch.randn(shape, generator=generator)
        if kind == "event":
            made.append(NetworkMessage(kind="batch_started", tag=rng.choice(["default", "eval"]), **where))
        elif kind == "loss":
            made.append(NetworkMessage(kind="loss", data=data.sum().double(), rank=rng.randrange(2), **where))
        elif kind == "weights":
            data = torch.randn(20, 16, generator=generator)
            where["sampling"] = {"rows": 20}
            made.append(ModuleMessage(kind="weights", module=rng.choice("abc"), data=data, **where))
        elif kind == "late" and number < count // 2:
            continue
        else:
            data = data[:0] if kind == "empty" else data.bfloat16() if rng.random() < 0.3 else data
            sampling = rng.choice([None, {"rows": 2}])
            made.append(
                ModuleMessage(kind=kind, module=rng.choice("ab"), data=data, call=1, sampling=sampling, **where)
            )
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of these messages."""
    path = tmp_path_factory.mktemp("source") / "run.zarr"
    with TraceWriter(path, chunk_bytes=600, own_pool_bytes=700) as writer:
        writer.write_many(messages())
    return path


SAME = [column for column in Column if column not in (Column.OFFSET, Column.CHECK)]
"""The columns of a journal that do not say where in its pool a message lies."""


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_columns_are_messages(
    source: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever blocks they come in, and wherever they are cut: the tables, the data and the counts are the same."""
    plain = tmp_path / "plain.zarr"
    options = {"commit_seconds": 1e9, **options}
    with TraceReader(source) as reader:
        with TraceWriter(plain, **options) as writer:
            for message in reader:
                writer.write(message)
        for rows, few, cut in ((1000, 0, 1000), (64, 16, 1000), (50, 0, 13)):
            monkeypatch.setattr(reading, "BLOCK_ROWS", rows)
            monkeypatch.setattr("tracer.trace.writer.FEW", few)
            path = tmp_path / f"{rows}.zarr"
            with TraceWriter(path, **options) as copy:
                for block in reader.columns():
                    for begin in range(0, len(block), cut):
                        copy.write_columns(block.part(begin, min(begin + cut, len(block))))
            assert (copy.bytes, copy.messages) == (writer.bytes, writer.messages)
            with TraceReader(plain) as one, TraceReader(path) as other:
                assert one.streams == other.streams
                assert [part.tables.shapes for part in one._parts.all] == [
                    part.tables.shapes for part in other._parts.all
                ]
                assert (one.journal[:, SAME] == other.journal[:, SAME]).all()
                assert [facts(message) for message in one] == [facts(message) for message in other]
            assert verify(path).intact


def test_columns_and_messages_in_turns(source: Path, tmp_path: Path) -> None:
    """A writer takes both, and each message goes to its stream."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer, TraceReader(source) as reader:
        [block] = reader.columns()
        both = list(reader)
        for begin in range(0, len(block), 40):
            writer.write_columns(block.part(begin, min(begin + 20, len(block))))
            writer.write_many(both[begin + 20 : begin + 40])
        expected = [(str(stream), stream.sampling, stream.count) for stream in reader.streams]
        with pytest.raises(TraceError, match="finished"):
            writer.finish()
            writer.write_columns(block)
    with TraceReader(path) as found, TraceReader(source) as reader:
        assert [(str(stream), stream.sampling, stream.count) for stream in found.streams] == expected
        assert [facts(message) for message in found] == [facts(message) for message in reader]


def test_a_disk_that_is_full(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be written is an error, after which nothing more is written; what was committed is safe."""
    writer = TraceWriter(tmp_path / "run.zarr", commit_rows=50)
    with TraceReader(source) as reader:
        [block] = reader.columns()
        writer.write_columns(block.part(0, 100))

        def fails(*_: Any) -> int:
            raise TraceError("no space left")

        monkeypatch.setattr(writer._store, "append", fails)
        for _ in range(2):
            with pytest.raises(TraceError, match="no space left"):
                writer.write_columns(block.part(100, 200))
        expected = [message.global_step for message in reader][:100]
    with TraceReader(writer.path) as found:
        assert [message.global_step for message in found] == expected
