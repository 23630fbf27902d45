"""`verify` names what is wrong with a trace and where, and finds nothing wrong with one that is whole."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import pytest
import torch

from tests import processes
from tests.trace.small_summaries import copy_journal, small_summaries
from tracer.errors import TraceFormatError, TraceNotFoundError
from tracer.format.declarations import declaration
from tracer.format.summaries import Summary
from tracer.messaging.messages import LARGEST, ModuleMessage, NetworkMessage
from tracer.stores.hdf5.datasets import ChunkPlaces
from tracer.trace.writer import TraceWriter
from tracer.upkeep import damage, survey_rows
from tracer.upkeep.damage import CHECKS
from tracer.upkeep.recover import recover
from tracer.upkeep.survey import Survey
from tracer.upkeep.verify import TRIES, first_step_of, verify

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)


def weight(step: int) -> torch.Tensor:
    """What the module ``fc`` has in a step."""
    return torch.full((30, 20), 3.25 + step)


def write(path: Path, steps: int = 6) -> Path:
    """A run with a large stream, which has a pool of its own, a small one and events."""
    with TraceWriter(path, own_pool_bytes=2000, chunk_bytes=64) as writer:
        for step in range(steps):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="batch_started", **where))
            writer.write(ModuleMessage(kind="weights", module="fc", data=weight(step), **where))
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


@every_format
def test_a_whole_trace(tmp_path: Path, suffix: str) -> None:
    """Nothing is wrong with a trace as it was written, and the report says how much was checked."""
    path = write(tmp_path / f"run{suffix}")
    report = verify(path)
    assert (report.problems, report.intact, report.complete, report.status) == ([], True, True, "finished")
    assert (report.messages, report.damaged) == (18, 0)
    assert report.bytes >= 6 * (2400 + 8) + 18 * 88
    # the header, three streams, two shapes, two pools, the status, and in HDF5 the pools for what comes late
    assert report.declarations >= 9
    assert report.describe()["checks"] == CHECKS


@every_format
def test_damaged_data(tmp_path: Path, suffix: str) -> None:
    """A flipped bit in a message's data is told with the array, the row and the message."""
    path = write(tmp_path / f"run{suffix}")
    flip(path, weight(3).numpy().tobytes())
    report = verify(path)
    [problem] = report.problems
    assert (problem.check, problem.array) == ({".zarr": "chunk", ".h5": "data"}[suffix], "rank0/weights/fc")
    assert (problem.rows, problem.messages) == ((3, 4), 1)
    assert "weights of fc in step 3" in str(problem)
    assert (report.intact, report.complete, report.damaged, report.messages) == (False, False, 1, 18)


def test_damaged_declarations(tmp_path: Path) -> None:
    """A declaration that cannot be parsed is told, and every message that needs it counts as damaged."""
    path = write(tmp_path / "run.zarr")
    flip(path, b'{"stream":{"id":2,', 7)
    report = verify(path)
    assert {problem.array for problem in report.problems} >= {"rank0/declarations"}
    assert report.damaged >= 6
    assert not report.intact


@pytest.mark.parametrize("name", ["journal", "declarations", "weights/fc", "pools/loss/float64"])
def test_missing_shards(tmp_path: Path, name: str) -> None:
    """A shard that is gone is told, and is not taken for zeros."""
    path = write(tmp_path / "run.zarr")
    shutil.rmtree(path / "rank0" / name / "c")
    report = verify(path)
    assert f"rank0/{name}" in {problem.array for problem in report.problems}
    assert not report.intact
    assert report.damaged == {"journal": 18, "declarations": 18, "weights/fc": 6, "pools/loss/float64": 6}[name]


@pytest.mark.parametrize(
    ("name", "damaged"),
    [("", 0), ("rank0", 0), ("rank0/pools", 0), ("rank0/weights/fc", 6), ("rank0/declarations", 18)],
)
def test_damaged_zarr_json(tmp_path: Path, name: str, damaged: int) -> None:
    """A zarr.json that is no JSON is told; the messages of other arrays are there all the same."""
    path = write(tmp_path / "run.zarr")
    (path / name / "zarr.json").write_text("{")
    report = verify(path)
    assert not report.intact
    assert (report.messages, report.damaged) == (18, damaged)


def test_interrupted(tmp_path: Path) -> None:
    """What a killed writer committed is intact, and the trace is not complete."""
    path = tmp_path / "run.zarr"
    program = (
        "import os, signal, sys, torch\n"
        "from tracer import NetworkMessage, TraceWriter\n"
        "writer = TraceWriter(sys.argv[1])\n"
        "for step in range(4):\n"
        "    where = dict(global_step=step, train_step=step, epoch=0)\n"
        "    writer.write(NetworkMessage(kind='loss', data=torch.tensor(1.0), **where))\n"
        "    writer.commit()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = processes.run([sys.executable, "-c", program, path], check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL
    report = verify(path)
    assert (report.status, report.intact, report.complete, report.messages) == ("interrupted", True, False, 4)


def test_while_it_is_recorded(tmp_path: Path) -> None:
    """What is committed of a trace that is being written can be checked, and is complete as far as it goes."""
    with TraceWriter(tmp_path / "run.zarr") as writer:
        for step in range(3):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), **where))
            writer.commit()
            report = verify(writer.path)
            assert (report.status, report.complete, report.messages) == ("recording", True, step + 1)


def test_a_run_that_ends_while_it_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written between two looks is no damage: the trace is looked at again."""
    path = tmp_path / "run.zarr"
    writer = TraceWriter(path)
    plainly, looks = Survey._read_declarations, []

    def write_step(step: int) -> None:
        where = {"global_step": step, "train_step": step, "epoch": 0}
        writer.write(ModuleMessage(kind="weights", module=f"fc{step}", data=weight(step), **where))

    def late(self: Survey) -> Any:
        looks.append(self)
        if len(looks) == 1:
            write_step(1)
            writer.finish()
        return plainly(self)

    write_step(0)
    writer.commit()
    monkeypatch.setattr(Survey, "_read_declarations", late)
    report = verify(path)
    assert (report.problems, report.messages, report.status, len(looks)) == ([], 2, "finished", 2)
    assert verify(path).complete


def test_rows_that_are_zeros(tmp_path: Path) -> None:
    """A journal of a run that ended has no rows of zeros, which in an unfinished one are not there yet."""
    path = write(tmp_path / "run.h5")
    with h5py.File(path, "r+") as file:
        file["rank0/journal"].resize(20, axis=0)
    report = verify(path)
    # they are neither among the rows that the run ended with, nor in a chunk of the file
    assert [(problem.check, problem.rows) for problem in report.problems] == [("journal", None), ("chunk", (18, 20))]


@every_format
def test_what_is_no_trace(tmp_path: Path, suffix: str) -> None:
    """Nothing there, something else, or a newer version is an error and no report."""
    path = tmp_path / f"run{suffix}"
    with pytest.raises(TraceNotFoundError):
        verify(path)
    path.write_text("hello")
    with pytest.raises(TraceFormatError):
        verify(path)
    os.remove(path)
    if suffix == ".zarr":
        path.mkdir()
        with pytest.raises(TraceFormatError):
            verify(path)
    else:
        write(path)
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = file["rank0"].attrs["format_version"] = 99
        with pytest.raises(TraceFormatError, match="99"):
            verify(path)


def test_a_damaged_index_takes_no_time_for_each_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 tries long to read a damaged index, so it is asked once, and again only when the file was written since."""
    path = tmp_path / "run.h5"
    with TraceWriter(path, chunk_bytes=8192) as writer:
        for step in range(600):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="activations", module="fc", data=torch.ones(1024), **where))
    whole = path.read_bytes()
    asked: list[Any] = []
    look = ChunkPlaces._look
    monkeypatch.setattr(
        ChunkPlaces,
        "_look",
        lambda places, name, ask: look(places, name, lambda: (asked.append(name), ask())),
    )
    assert verify(path).intact
    often, damaged = len(asked), 0
    for place in (found.start() for found in re.finditer(b"EADB", whole)):
        path.write_bytes(whole[: place + 40] + bytes([whole[place + 40] ^ 1]) + whole[place + 41 :])
        os.utime(path, (1e9, 1e9))
        asked.clear()
        report = verify(path)
        damaged = max(damaged, report.damaged)
        assert len(asked) <= often + 4
    assert damaged >= 500


@pytest.mark.parametrize("before", [1, 3 * 128])
def test_what_a_killed_writer_had_begun_is_no_damage(tmp_path: Path, before: int) -> None:
    """Of a shard that no commit knows yet, chunks are there and no index; the array says that it is as long."""
    path = tmp_path / "run.zarr"
    writer = TraceWriter(path, chunk_bytes=4096, own_pool_bytes=4096, commit_seconds=1e9)

    def write(module: str, steps: range) -> None:
        for step in steps:
            counters = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="activations", module=module, data=torch.rand(1100), **counters))

    write("a", range(before))
    writer.commit()
    write("a", range(before, before + 3))
    write("b", range(3))
    for name in ("while", "after"):
        if name == "after":
            writer._store.abandon()  # type: ignore[attr-defined]
        report = verify(path)
        assert (report.problems, report.messages, report.damaged) == ([], before, 0)
        loss = recover(path, tmp_path / f"{name}.zarr")
        assert (loss.saved, loss.lossless, loss.problems) == (before, True, [])


@pytest.mark.parametrize("what", ["crc32c", "streams", "rows"])
def test_a_summary_that_is_not_of_its_rows(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the declarations say of rows of the journal is compared with these rows; where it is wrong, it is told."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=7)
    declared = Summary.declared
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "crc32c": lambda value: value["crc32c"] ^ 4,
        "streams": lambda value: [[*row[:5], row[5] + 1, *row[6:]] for row in value["streams"]],
        "rows": lambda value: [one + 1000 * (value["rows"][0] > 40) for one in value["rows"]],
    }

    def write_it(path: Path) -> None:
        with TraceWriter(path, commit_rows=3) as writer:
            for step in range(60):
                where = {"global_step": step, "train_step": step, "epoch": 0}
                writer.write(NetworkMessage(kind="loss", data=torch.ones(()), **where))

    with monkeypatch.context() as patches:
        patches.setattr(Summary, "declared", lambda self: declared(self) | {what: changes[what](declared(self))})
        write_it(path)
    report = verify(path)
    assert not report.intact
    assert {problem.check for problem in report.problems} == {"summary"}
    write_it(tmp_path / "right.zarr")
    assert verify(tmp_path / "right.zarr").intact


def test_a_journal_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are right, and of the same streams and steps, but of another run than their summaries, are told."""
    small_summaries(monkeypatch, rows=7)
    paths = [tmp_path / f"{name}.zarr" for name in ("one", "other")]
    for path, value in zip(paths, (1.0, 2.0), strict=True):
        with TraceWriter(path, commit_rows=3) as writer:
            for step in range(60):
                where = {"global_step": step, "train_step": step, "epoch": 0}
                writer.write(NetworkMessage(kind="loss", data=torch.tensor(value), **where))
    copy_journal(paths[1], paths[0])
    told = [str(problem) for problem in verify(paths[0]).problems if problem.check == "summary"]
    assert told
    assert all(one.endswith("is not of them") for one in told)


def test_many_summaries_of_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is compared with one summary, however many say that they are of it; that they do is told once."""
    path = tmp_path / "run.zarr"
    small_summaries(monkeypatch, rows=50)
    again = {"rows": [0, 60], "crc32c": 1, "streams": [[0, 60, 0, 1, 0, 59, 0, 0, []]]}
    with TraceWriter(path, commit_rows=50) as writer:
        for step in range(60):
            writer.write(NetworkMessage(kind="batch_started", global_step=step, train_step=step, epoch=0))
        writer.commit()
        writer._commits.lines.extend([declaration("summary", again)] * 300)
    rows = 0
    summarize = survey_rows.summarized

    def counting(table: Any, start: int, **options: Any) -> Summary:
        nonlocal rows
        rows += len(table)
        return summarize(table, start, **options)

    monkeypatch.setattr(survey_rows, "summarized", counting)
    told = [str(problem) for problem in verify(path).problems]
    assert told == ["summary: the summary of rows 0 to 59 is of rows that one before it is of (and 299 more summaries)"]
    assert rows <= TRIES * 60


def test_much_damage_of_one_kind_is_told_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few messages, and rows, are told of one by one; the rest of a pool and of a journal is one problem."""
    path = write(tmp_path / "run.h5", steps=40)
    with h5py.File(path, "r+") as file:
        file["rank0/pools/loss/float64"][:30] = 0
        journal = file["rank0/journal"][:]
        journal[60:100:2, 2] ^= 3  # two bits, which nothing puts right
        file["rank0/journal"][:] = journal
    every = verify(path)
    monkeypatch.setattr(damage, "MOST_TOLD", 4)
    report = verify(path)
    assert report.damaged == every.damaged >= 40
    for check, rest in (
        ("data", "data of {} more messages fails"),
        ("journal", "{} more rows of the journal, from row"),
    ):
        all_of_it = [one for one in every.problems if one.check == check]
        *told, last = [one for one in report.problems if one.check == check]
        assert told == all_of_it[:4]
        assert len(all_of_it) >= 20
        assert last.messages == sum(one.messages for one in all_of_it[4:])
        assert rest.format(last.messages) in str(last)


@pytest.mark.parametrize(
    ("others", "trained", "first"), [([4, 2], 7, 2), ([], 7, 7), ([], None, LARGEST)], ids=["ranks", "rows", "nothing"]
)
def test_an_attempt_whose_header_is_lost(others: list[int], trained: int | None, first: int) -> None:
    """It began where other ranks of the attempt say; where none does, at its first message of training."""
    lost = SimpleNamespace(header={}, attempt=1, first_step=0, first_trained=trained)
    known = [SimpleNamespace(header={"a": 1}, attempt=1, first_step=step) for step in others]
    surveys: Any = [SimpleNamespace(header={"a": 1}, attempt=0, first_step=0), lost, *known]
    assert first_step_of(surveys[1], surveys) == first
    assert first_step_of(surveys[0], surveys) is None
