"""A trace that is moved, copied or overwritten while it is read or written."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tracer
from tests.trace.round_trips import every_format, module, network
from tracer.errors import (
    TraceError,
    TraceUnreadableError,
)
from tracer.integrations.recording import Recording
from tracer.messaging.messages import ModuleMessage, NetworkMessage
from tracer.recorders import ForwardOutput
from tracer.trace.reader import TraceReader
from tracer.trace.writer import TraceWriter


@pytest.mark.parametrize("compression", ["none", "auto"])
def test_an_hdf5_trace_that_is_moved_while_it_is_read(tmp_path: Path, compression: str) -> None:
    """What is open can be read to its end, wherever it is by then."""
    path = tmp_path / "run.h5"
    with TraceWriter(path, own_pool_bytes=1, compression=compression) as writer:
        for step in range(20):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.full((500,), float(step)), **where))
    with TraceReader(path) as reader:
        path.rename(tmp_path / "moved.h5")
        found = [float(one.data[0]) for one in reader.messages() if one.data is not None]
    assert found == [float(step) for step in range(20)]


def _losses(path: Path, first: float, steps: int, **options: Any) -> TraceWriter:
    """A writer that has committed so many losses, which begin with this one."""
    writer = TraceWriter(path, **options)
    for step in range(steps):
        loss = torch.tensor(first + step)
        writer.write(NetworkMessage(kind="loss", data=loss, global_step=step, train_step=step, epoch=0))
    writer.commit()
    return writer


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_copies_of_a_reader_have_files_of_their_own(suffix: str, tmp_path: Path) -> None:
    """What a copy closes is not what the reader, or another one, reads from; a pickled one may be read elsewhere."""
    for name, first in (("a", 0.0), ("b", 100.0)):
        _losses(tmp_path / f"{name}{suffix}", first, 4).finish()

    def values(reader: Any) -> list[float]:
        return [float(message.data) for message in reader]

    with tracer.open(tmp_path / f"a{suffix}", ranks=[0]) as reader:
        assert values(reader) == [0.0, 1.0, 2.0, 3.0]
        for make in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            other = make(reader)
            assert values(other) == values(reader)
            other.close()
            del other
            gc.collect()
            with tracer.open(tmp_path / f"b{suffix}") as stranger:
                assert values(stranger) == [100.0, 101.0, 102.0, 103.0]
                assert values(reader) == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(TypeError, match=r"be (?:copied or )?pickled"):
            pickle.dumps(reader._parts.stores)


@pytest.mark.parametrize("refreshed", [True, False])
def test_a_trace_that_is_overwritten_while_it_is_read(refreshed: bool, tmp_path: Path) -> None:
    """The reader of one run gives nothing of another one that took its place, and does not call it damaged."""
    first = _losses(tmp_path / "run.zarr", 0.0, 10)
    reader = tracer.open(tmp_path / "run.zarr")
    first.finish()
    second = _losses(tmp_path / "run.zarr", 1000.0, 20, overwrite=True)
    with pytest.raises(TraceUnreadableError, match="was removed, moved or overwritten while it was read"):
        if refreshed:
            reader.refresh()
        else:
            list(reader)
    reader.close()
    second.finish()
    with tracer.open(tmp_path / "run.zarr") as reader:
        assert len(reader) == 20


def test_a_trace_that_is_overwritten_while_it_is_written(tmp_path: Path) -> None:
    """The writer whose files are gone says so, and leaves those of the other alone."""
    path = tmp_path / "run.zarr"
    first = _losses(path, 0.0, 3)
    shutil.rmtree(path)
    second = _losses(path, 1000.0, 5)
    with pytest.raises(TraceError, match="was removed while it was written"):
        first.finish()
    first._store.discard()
    second.finish()
    with tracer.open(path) as reader:
        assert [float(message.data) for message in reader] == [1000.0 + step for step in range(5)]


def two_runs_of_one_name(folder: Path, suffix: str) -> None:
    """The runs ``a/run`` and ``b/run``, with a loss of 0 and of 1."""
    for value, name in enumerate("ab"):
        with TraceWriter(folder / name / f"run{suffix}") as writer:
            writer.write(network("loss", 0, float(value)))


@every_format
def test_a_reader_stays_with_its_run(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means what it meant when the trace was opened, whichever folder the program goes to."""
    two_runs_of_one_name(tmp_path, suffix)
    monkeypatch.chdir(tmp_path / "a")
    with TraceReader(f"run{suffix}") as reader:
        monkeypatch.chdir(tmp_path / "b")
        reader.refresh()
        readers = [reader, copy.copy(reader), copy.deepcopy(reader), pickle.loads(pickle.dumps(reader))]
        readers += [reader.of_rank(0), pickle.loads(pickle.dumps(reader.of_rank(0)))]
        assert [one.array("loss")[1].tolist() for one in readers] == [[0.0]] * len(readers)
        assert {one.info["path"] for one in readers} == {str(tmp_path / "a" / f"run{suffix}")}
        monkeypatch.chdir("/")
        assert pickle.loads(pickle.dumps(reader)).array("loss")[1].tolist() == [0.0]
    for one in readers[1:]:
        one.close()


@every_format
def test_a_reader_follows_its_run_from_elsewhere(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is committed after the program went to another folder is of the same run, for the writer and the reader."""
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path)
    with TraceWriter(f"run{suffix}") as writer:
        writer.write(network("loss", 0, 0.0))
        writer.commit()
        with TraceReader(f"run{suffix}") as reader:
            monkeypatch.chdir("b")
            writer.write(network("loss", 1, 1.0))
            writer.write(module("weights", "late", 1, [1.0]))  # an array that was not there
            writer.commit()
            assert reader.refresh()
            assert reader.array("loss")[1].tolist() == [0.0, 1.0]
            assert reader.array("weights", "late")[1].tolist() == [[1.0]]
    assert os.listdir(tmp_path / "b") == []


def test_a_recording_stays_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that goes to another folder, also before its recording begins, goes on with its trace."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = tracer.record("run.zarr", model, optimizer, capture=tracer.Capture())
    callback = Recording("trainer.zarr", {})
    recorder = ForwardOutput(trace="outputs.zarr")
    monkeypatch.chdir("elsewhere")
    with recording:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    with recorder.modules(model):
        model(torch.ones(1, 2))
    callback.begin(model, [optimizer], step=0, epoch=0)
    callback.end()
    assert os.listdir() == []
    for name in ("run", "trainer", "outputs"):
        with TraceReader(tmp_path / f"{name}.zarr") as reader:
            assert reader.status == "finished"


def test_a_path_from_nowhere_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that was removed, a relative path leads nowhere; a full one still does."""
    gone = tmp_path / "gone"
    gone.mkdir()
    two_runs_of_one_name(tmp_path, ".zarr")
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(TraceUnreadableError, match=r"run\.zarr leads nowhere: the working directory was removed"):
        TraceReader("run.zarr")
    with TraceReader(tmp_path / "a" / "run.zarr") as reader:
        assert len(reader) == 1
    monkeypatch.chdir(tmp_path)
