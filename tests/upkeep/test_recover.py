"""`recover` saves all that a damaged trace still holds, counts what it does not, and changes nothing of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tracer.errors import TraceError, TraceExistsError, TraceFormatError, TraceLostError, TraceNotFoundError
from tracer.messaging.messages import ModuleMessage, NetworkMessage
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter
from tracer.upkeep.recover import recover
from tracer.upkeep.verify import verify

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)
STEPS = 6


def weight(step: int) -> torch.Tensor:
    """What the module ``fc`` has in a step."""
    return torch.full((30, 20), 3.25 + step)


def write(path: Path, compression: str = "auto", chunk_bytes: int = 176) -> Path:
    """A run with a large stream, which has a pool of its own, a small one and events."""
    with TraceWriter(
        path, own_pool_bytes=2000, chunk_bytes=chunk_bytes, header={"argv": ["x"]}, compression=compression
    ) as writer:
        writer.note({"silent": ["c"]})
        for step in range(STEPS):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="batch_started", **where))
            writer.write(ModuleMessage(kind="weights", module="fc", data=weight(step), sampling={"rows": 30}, **where))
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.5 + step, dtype=torch.float64), **where))
    return path


def flip(path: Path, needle: bytes, mask: int = 4) -> None:
    """Flip a bit, or several, in the midst of the first place where these bytes are."""
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        data = bytearray(file.read_bytes())
        place = data.find(needle)
        if place >= 0:
            data[place + len(needle) // 2] ^= mask
            file.write_bytes(data)
            return
    raise AssertionError("these bytes are nowhere")


def names(path: Path) -> list[tuple[str, int]]:
    """Kind and step of each message; the numbers of the weights and of the loss are checked."""
    found = []
    with TraceReader(path) as reader:
        for message in reader:
            if message.kind == "weights":
                assert message.data is not None
                assert torch.equal(message.data, weight(message.global_step))
            elif message.kind == "loss":
                assert message.data is not None
                assert message.data.item() == 1.5 + message.global_step
            found.append((message.kind, message.global_step))
    return found


ALL = [(kind, step) for step in range(STEPS) for kind in ("batch_started", "weights", "loss")]


@pytest.mark.parametrize(("suffix", "into"), [(".zarr", ".h5"), (".h5", ".zarr")])
def test_of_a_whole_trace(tmp_path: Path, suffix: str, into: str) -> None:
    """Nothing is lost of a trace that is whole: header, notes, sampling and status come along."""
    path = write(tmp_path / f"run{suffix}")
    loss = recover(path, tmp_path / f"saved{into}")
    assert (loss.messages, loss.saved, loss.lost, loss.lossless, loss.problems) == (18, 18, 0, True, [])
    assert (loss.header, loss.notes, loss.streams) == (True, 1, [])
    assert names(tmp_path / f"saved{into}") == ALL
    with TraceReader(path) as old, TraceReader(tmp_path / f"saved{into}") as new:
        assert (new.header, new.status, new.info["ended"]) == (old.header, "finished", old.info["ended"])
        assert new.notes[0] == {"silent": ["c"]}
        assert new.notes[1]["recovered"]["saved"] == 18
        assert [stream.sampling for stream in new.streams] == [stream.sampling for stream in old.streams]


@every_format
def test_damaged_data(tmp_path: Path, suffix: str) -> None:
    """The one message whose data is damaged is lost, and counted with its kind, module and step."""
    path = write(tmp_path / f"run{suffix}")
    flip(path, weight(3).numpy().tobytes())
    before = path.read_bytes() if path.is_file() else None
    loss = recover(path, tmp_path / "saved.zarr")
    assert (loss.saved, loss.lost, loss.lossless) == (17, 1, False)
    [stream] = loss.streams
    assert (stream.kind, stream.module, stream.saved, stream.lost, stream.steps) == ("weights", "fc", 5, 1, (3, 3))
    assert names(tmp_path / "saved.zarr") == [one for one in ALL if one != ("weights", 3)]
    assert json.loads(json.dumps(loss.describe()))["lost"] == 1
    with TraceReader(tmp_path / "saved.zarr") as reader:
        assert reader.status == "failed: recovered with 1 of 18 messages lost; the status was finished"
    assert before is None or path.read_bytes() == before
    assert verify(tmp_path / "saved.zarr").intact


def test_damaged_declarations(tmp_path: Path) -> None:
    """Messages of a stream whose declaration is damaged are lost, or found again; none is given to another stream."""
    path = write(tmp_path / "run.zarr")
    flip(path, b'{"stream":{"id":2,', 7)
    loss = recover(path, tmp_path / "saved.h5")
    found = names(tmp_path / "saved.h5")
    assert len(found) == loss.saved
    assert set(found) <= set(ALL)
    assert ("batch_started", 0) in found
    assert not loss.lossless


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("weights/fc", [one for one in ALL if one[0] != "weights"]),
        ("pools/loss/float64", [one for one in ALL if one[0] != "loss"]),
        ("journal", None),
        ("declarations", None),
    ],
)
def test_missing_shards(tmp_path: Path, name: str, left: list[tuple[str, int]] | None) -> None:
    """What was in a shard that is gone is lost; without the journal or the declarations there is nothing to save."""
    path = write(tmp_path / "run.zarr")
    shutil.rmtree(path / "rank0" / name / "c")
    if left is None:
        with pytest.raises(TraceError, match="nothing could be saved"):
            recover(path, tmp_path / "saved.zarr")
        assert [entry.name for entry in tmp_path.iterdir()] == ["run.zarr"]
    else:
        assert recover(path, tmp_path / "saved.zarr").lost == 6
        assert names(tmp_path / "saved.zarr") == left


@pytest.mark.parametrize("text", ["{", None])
@pytest.mark.parametrize(
    ("name", "lost"),
    [("", 0), ("rank0", 0), ("rank0/pools", 0), ("rank0/weights/fc", 6), ("rank0/pools/loss/float64", 6)],
)
def test_damaged_zarr_json(tmp_path: Path, name: str, lost: int, text: str | None) -> None:
    """A group whose zarr.json is damaged or gone loses nothing, and an array only itself."""
    path = write(tmp_path / "run.zarr")
    if text is None:
        (path / name / "zarr.json").unlink()
    else:
        (path / name / "zarr.json").write_text(text)
    loss = recover(path, tmp_path / "saved.zarr")
    assert (loss.saved, loss.lost) == (18 - lost, lost)
    assert len(loss.problems) >= 1


@pytest.mark.parametrize("name", ["rank0/journal", "rank0/declarations"])
def test_tables_without_zarr_json(tmp_path: Path, name: str) -> None:
    """Nothing is read without the tables, and the error says which array is damaged."""
    path = write(tmp_path / "run.zarr")
    (path / name / "zarr.json").write_text("{")
    with pytest.raises(TraceLostError, match=name):
        recover(path, tmp_path / "saved.zarr")
    assert not (tmp_path / "saved.zarr").exists()


@every_format
def test_cut_at_any_length(tmp_path: Path, suffix: str) -> None:
    """A file that was cut off gives what lies before the cut, in order, or nothing and an error."""
    whole = write(tmp_path / f"run{suffix}")
    name = "" if whole.is_file() else "rank0/weights/fc/c/0/0/0"
    size = (whole / name).stat().st_size
    most = 0
    for number, length in enumerate(range(0, size, size // 25)):
        path, saved = tmp_path / f"cut{number}{suffix}", tmp_path / f"saved{number}.zarr"
        (shutil.copytree if whole.is_dir() else shutil.copyfile)(whole, path)
        with (path / name).open("r+b") as file:
            file.truncate(length)
        try:
            loss = recover(path, saved)
        except TraceError:
            continue
        found = names(saved)
        rest = iter(ALL)
        assert all(one in rest for one in found)
        assert len(found) == loss.saved
        assert loss.lossless is (loss.saved == 18)
        most = max(most, loss.saved)
    assert most >= 12


def test_what_is_refused(tmp_path: Path) -> None:
    """Nothing is overwritten or made within the source, and what is no trace is an error."""
    path = write(tmp_path / "run.zarr")
    for target, error in ((path, TraceExistsError), (path / "in.zarr", TraceExistsError), ("x.txt", TraceFormatError)):
        with pytest.raises(error):
            recover(path, target)
    with pytest.raises(TraceNotFoundError):
        recover(tmp_path / "none.zarr", tmp_path / "out.zarr")
    (tmp_path / "no.h5").write_text("hello")
    with pytest.raises(TraceFormatError):
        recover(tmp_path / "no.h5", tmp_path / "out.zarr")
    assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize("table", ["journal", "declarations"])
@pytest.mark.parametrize(("suffix", "mask"), [(".zarr", 4), (".h5", 13)])
def test_a_wrong_byte_of_a_table_costs_one_row_or_line(tmp_path: Path, suffix: str, table: str, mask: int) -> None:
    """Though all of it lies in one chunk, which has one checksum in Zarr."""
    path = tmp_path / f"run{suffix}"
    with TraceWriter(path) as writer:
        for step in range(300):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where))
            if step < 30:
                writer.write(ModuleMessage(kind="weights", module=f"layer{step}", data=torch.ones(3), **where))
    with TraceReader(path) as reader:
        row = reader.journal[200].tobytes()
    flip(path, row if table == "journal" else b'"module":"layer7"', mask)
    found = recover(path, tmp_path / "saved.zarr")
    assert (found.saved, found.lost, found.lossless) == (329, 1, False)
    with TraceReader(tmp_path / "saved.zarr") as reader:
        assert len(reader) == 329
        assert {stream.module for stream in reader.streams} >= {f"layer{number}" for number in range(30) if number != 7}
        for message in reader.messages("loss"):
            assert message.data is not None
            assert message.data.item() == message.global_step


def test_another_version_of_the_root(tmp_path: Path) -> None:
    """Where only the root says that it is of another version, all is saved; where the part says so too, nothing is."""
    path = write(tmp_path / "run.zarr")
    for folder in (path, path / "rank0"):
        document = (folder / "zarr.json").read_text()
        assert '"format_version": 1' in document
        (folder / "zarr.json").write_text(document.replace('"format_version": 1', '"format_version": 3'))
        with pytest.raises(TraceFormatError, match="3"):
            TraceReader(path)
        if folder == path:
            loss = recover(path, tmp_path / "saved.zarr")
            assert (loss.saved, loss.lossless) == (len(ALL), True)
            assert "the trace format 3" in loss.problems[0]
    with pytest.raises(TraceFormatError, match="3"):
        recover(path, tmp_path / "other.zarr")


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_follows_the_last_row(tmp_path: Path, interrupted: bool) -> None:
    """Damage to the rest of a chunk that is not full costs none of the messages in it; damage to them does."""
    path = write(tmp_path / "run.zarr", chunk_bytes=4096)
    if interrupted:  # then the array still says that it has as many rows as its shard
        document = path / "rank0" / "pools" / "loss" / "float64" / "zarr.json"
        text = json.loads(document.read_text())
        text["shape"] = text["chunk_grid"]["configuration"]["chunk_shape"]
        document.write_text(json.dumps(text))
    shard = path / "rank0" / "pools" / "loss" / "float64" / "c" / "0"
    whole = shard.read_bytes()
    first = whole.index(torch.tensor(1.5, dtype=torch.float64).numpy().tobytes())
    shard.write_bytes(whole[: first + 8 * STEPS] + b"\x01\x02" + whole[first + 8 * STEPS + 2 :])
    loss = recover(path, tmp_path / "saved.zarr")
    assert (loss.saved, loss.lossless) == (len(ALL), True)
    assert "what follows the last row" in loss.problems[0]
    assert names(tmp_path / "saved.zarr") == ALL
    shard.write_bytes(whole[: first + 8 * STEPS - 1] + b"\x01\x02" + whole[first + 8 * STEPS + 1 :])
    assert recover(path, tmp_path / "lost.zarr").saved == len(ALL) - 1


def test_many_damaged_declarations(tmp_path: Path) -> None:
    """Each costs itself alone: the lines after it are compared with what it said and with what it is."""
    path = tmp_path / "run.h5"
    with TraceWriter(path) as writer:
        for number in range(60):
            writer.note({"text": "x" * 4000, "number": number})
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), global_step=number, train_step=0, epoch=0))
            writer.commit()
    data = bytearray(path.read_bytes())
    for number in range(0, 60, 2):
        place = data.index(b'"number":%d' % number) - 100
        data[place : place + 2] = b"??"
    path.write_bytes(data)
    loss = recover(path, tmp_path / "saved.zarr")
    assert (loss.saved, loss.notes, loss.lossless) == (60, 30, False)


@every_format
def test_any_flipped_bit_of_the_declarations(tmp_path: Path, suffix: str) -> None:
    """Also one that makes two lines of one, or one of two: what is saved is right, and what is lost is counted."""
    path = write(tmp_path / f"run{suffix}", chunk_bytes=65536)
    where = path if suffix == ".h5" else path / "rank0" / "declarations" / "c" / "0"
    whole = where.read_bytes()
    first = whole.index(b'{"header"')
    end = whole.index(b'{"status"')
    line = whole.index(b"\n", end) + 1
    assert line - first > 600
    letters = [whole.index(b'"module":"fc"') + 10, whole.index(b'"id":1')]
    feeds = [place for place in range(first, line) if whole[place] == 10]
    for number, place in enumerate([first, end + 3, line - 8, *letters, *feeds]):
        mask = 1 << number % 7
        if place in letters:
            mask = whole[place] ^ 10 if (whole[place] ^ 10).bit_count() == 1 else mask
        where.write_bytes(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
        saved = tmp_path / f"saved{number}.zarr"
        if place == line - 1:  # where no line ends, nothing is committed
            assert recover(path, saved).saved == len(ALL)
            continue
        loss = recover(path, saved)
        assert loss.saved + loss.lost == len(ALL), (place, loss.problems)
        assert (loss.saved, loss.lossless) != (len(ALL), True)
        there = names(saved)
        assert there == [one for one in ALL if one in set(there)]


def test_progress(tmp_path: Path) -> None:
    """Whoever wants to know is told how far it is."""
    told: list[Any] = []
    recover(
        write(tmp_path / "run.zarr"), tmp_path / "saved.h5", progress=lambda done, total: told.append((done, total))
    )
    assert told == [(0, 18)]
