"""Ranks and attempts: each process writes a part of its own, and a reader makes one trace of them again."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from torch import nn

import analyze
import tracer
from cli import main
from tests import processes
from tracer import Collect, ModuleMessage, NetworkMessage, TraceReader, TraceWriter
from tracer.errors import CaptureError, TraceCorruptError, TraceError, TraceExistsError
from tracer.format.journal import Column
from tracer.format.names import part_name
from tracer.stores.hdf5.datasets import Dataset
from tracer.stores.opening import create_store, open_store, remove_part
from tracer.trace.claiming import Process, claim, this_process
from tracer.trace.part import Part

FORMATS = (".zarr", ".h5")
every_format = pytest.mark.parametrize("suffix", FORMATS)


def loss(step: int, value: float, rank: int = 0, epoch: int = 0) -> NetworkMessage:
    """A loss whose value tells where it is from."""
    where = {"global_step": step, "train_step": step, "epoch": epoch, "rank": rank}
    return NetworkMessage(kind="loss", data=torch.tensor(value), **where)


def weights(step: int, value: float, rank: int = 0, size: int = 20_000) -> ModuleMessage:
    """Weights that are large enough for an array of their own."""
    where = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
    return ModuleMessage(kind="weights", module="fc", data=torch.full((size,), value), **where)


def write_part(
    path: Path, steps: range, *, rank: int = 0, attempt: int = 0, ranks: tuple[int, ...] = (0, 1), **header: Any
) -> None:
    """A part of a trace: losses and weights whose values tell step, rank and attempt."""
    header = {"ranks": list(ranks), "attempt": attempt, "first_step": steps.start} | header
    with TraceWriter(path, header=header, part=part_name(rank, attempt)) as writer:
        for step in steps:
            value = step + 1000 * rank + 100_000 * attempt
            writer.write(loss(step, value, rank))
            writer.write(weights(step, value, rank))


def told(path: Path, **filters: Any) -> list[tuple[str, int, int, float]]:
    """Kind, step, rank and value of each message."""
    with TraceReader(path) as reader:
        return [
            (one.kind, one.global_step, one.rank, float(one.data.reshape(-1)[0]))
            for one in reader.messages(**filters)
            if one.data is not None
        ]


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_the_array_of_one_rank_and_of_one_call(tmp_path: Path) -> None:
    """All ranks and calls stand in one array, step by step, unless one of them is asked for."""
    path = tmp_path / "run.zarr"
    for rank in range(2):
        with TraceWriter(path, header={"ranks": [0, 1]}, part=part_name(rank, 0)) as writer:
            for step, call in itertools.product(range(2), range(3)):
                value = 100.0 * rank + 10 * step + call
                writer.write(dataclasses.replace(loss(step, value, rank), call=call))
    with TraceReader(path) as trace:
        for filters, expected in (
            ({}, [0, 1, 2, 100, 101, 102, 10, 11, 12, 110, 111, 112]),
            ({"rank": 1}, [100, 101, 102, 110, 111, 112]),
            ({"call": 2}, [2, 102, 12, 112]),
            ({"rank": 0, "call": 1}, [1, 11]),
            ({"rank": 0, "call": 3}, []),
        ):
            steps, values = trace.array("loss", **filters)
            assert list(values) == expected
            assert steps.tolist() == [value // 10 % 10 for value in expected]
        with pytest.raises(CaptureError, match="no loss of rank 2"):
            trace.array("loss", rank=2)


@every_format
def test_ranks_are_merged_by_step(tmp_path: Path, suffix: str) -> None:
    """Messages of all ranks come by step, then by rank; each says its own, and any of them can be had alone."""
    path = tmp_path / f"run{suffix}"
    write_part(path, range(5), rank=1)
    write_part(path, range(4), rank=0)
    expected = [
        (kind, step, rank, float(step + 1000 * rank))
        for step in range(5)
        for rank in (0, 1)
        for kind in ("loss", "weights")
        if step < 4 or rank == 1
    ]
    assert told(path) == expected
    assert told(path, ranks=1, kinds="weights") == [one for one in expected if one[0] == "weights" and one[2] == 1]
    with TraceReader(path) as reader:
        assert (reader.ranks, reader.problems, reader.status) == ([0, 1], [], "finished")
        assert reader.rank.tolist() == [rank for _, _, rank, _ in expected]
        assert [(one.kind, one.rank, one.count) for one in reader.streams] == [
            *(("loss", 0, 4), ("weights", 0, 4)),
            *(("loss", 1, 5), ("weights", 1, 5)),
        ]
        batches = {
            int(row): float(data.reshape(-1)[0])
            for b in reader.arrays()
            for row, data in zip(b.rows, b.data, strict=True)
        }
        assert [batches[row] for row in range(len(reader))] == [value for *_, value in expected]
    with TraceReader(path, ranks=[1]) as reader:
        assert (reader.ranks, len(reader), reader.array("loss")[1].tolist()) == (
            [1],
            10,
            [1000.0 + s for s in range(5)],
        )
    with pytest.raises(CaptureError, match="rank 7"):
        TraceReader(path, ranks=[7])


@every_format
def test_a_replay_is_of_one_rank(tmp_path: Path, suffix: str) -> None:
    """Subscribers remember what they heard, so ranks are replayed one by one; the command line does that by itself."""
    path = tmp_path / f"run{suffix}"
    for rank in (0, 1):
        write_part(path, range(3), rank=rank)
    with pytest.raises(CaptureError, match=r"ranks 0, 1.*rank="):
        tracer.replay(path, Collect("loss"))
    with pytest.raises(CaptureError, match="nothing of rank 2"):
        tracer.replay(TraceReader(path), Collect("loss"), rank=2)
    heard = Collect("loss")
    tracer.replay(path, heard, rank=1)
    assert [(one.rank, float(one.data)) for one in heard if one.data is not None] == [(1, 1000.0 + s) for s in range(3)]
    found = analyze.analyze(path, ["ema:decay=0", "message_mean:kind=loss"], rank=1)
    assert {(row.rank, row.global_step, row.value) for row in found} == {(1, s, 1000.0 + s) for s in range(3)}
    ran = CliRunner().invoke(main, ["replay", str(path), "-s", "norm:kind=weights", "--json"])
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(row["rank"], row["global_step"]) for row in rows] == [(rank, s) for rank in (0, 1) for s in range(3)]
    for row in rows:
        assert row["value"] == pytest.approx((row["global_step"] + 1000 * row["rank"]) * np.sqrt(20_000), rel=1e-6)
    ran = CliRunner().invoke(main, ["replay", str(path), "-s", "norm:kind=weights", "--json", "--rank", "1"])
    assert {json.loads(line)["rank"] for line in ran.stdout.splitlines()} == {1}
    ran = CliRunner().invoke(main, ["cat", str(path), "--rank", "3"])
    assert ran.exit_code == 2
    assert "no recorded rank '3'" in ran.stderr


@every_format
def test_what_is_being_read_stays_what_was_asked_for(tmp_path: Path, suffix: str) -> None:
    """A refresh puts the messages of several ranks together anew, but not those that somebody is in the middle of."""
    path = tmp_path / f"run{suffix}"
    writers = [TraceWriter(path, header={"ranks": [0, 1]}, part=part_name(rank, 0)) for rank in (0, 1)]

    def put(rank: int, step: int) -> None:
        where = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
        data = torch.full((600, 600), 10.0 * step + rank)  # each is read by itself
        writers[rank].write(ModuleMessage(kind="weights", module=f"of{rank}", data=data, **where))
        writers[rank].commit()

    for rank, steps in ((0, 10), (1, 3)):
        for step in range(steps):
            put(rank, step)
    with TraceReader(path) as reader:
        expected = [(step, rank, 10.0 * step + rank) for step in range(10) for rank in (0, 1) if rank == 0 or step < 3]
        messages, arrays = reader.messages(), reader.arrays()
        found = [next(messages) for _ in range(8)]
        first = float(next(arrays).data[0, 0, 0])
        for step in range(3, 10):
            put(1, step)
        assert reader.refresh()
        found += messages
        assert [(one.global_step, one.rank, float(one.data[0, 0])) for one in found if one.data is not None] == expected
        assert [first, *(float(one) for batch in arrays for one in batch.data[:, 0, 0])] == [one[2] for one in expected]
        assert len([*reader.messages()]) == 20
    for writer in writers:
        writer.finish()


def test_nothing_is_written_where_it_would_be_a_part_of_a_trace(tmp_path: Path) -> None:
    """Beside ``run.h5``, ``run.rank1.h5`` is a part of it: no other trace, and no answers, may be put there."""
    path = tmp_path / "run.h5"
    write_part(path, range(2), rank=0)
    write_part(path, range(2), rank=1)
    before = (tmp_path / "run.rank1.h5").read_bytes()
    for name in ("run.rank1.h5", "run.rank2.h5", "run.rank0.attempt1.h5"):
        ran = CliRunner().invoke(
            main, ["replay", str(path), "-s", "norm:kind=weights", "--overwrite", "--out", str(tmp_path / name)]
        )
        assert ran.exit_code == 1
        assert "part of" in ran.stderr
        with pytest.raises(TraceExistsError, match="part of"):
            TraceWriter(tmp_path / name, overwrite=True)
    model, optimizer = adam()
    with pytest.raises(TraceExistsError, match="part of"), tracer.record(tmp_path / "run.rank7.h5", model, optimizer):
        pass
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.h5", "run.rank1.h5"]
    assert (tmp_path / "run.rank1.h5").read_bytes() == before


@every_format
def test_the_root_module_and_the_network_are_told_apart(tmp_path: Path, suffix: str) -> None:
    """The path of the root module is empty; no path is the network. Where there is only one of them, both find it."""
    path = tmp_path / f"run{suffix}"
    where = {"global_step": 0, "train_step": 0, "epoch": 0}
    with TraceWriter(path) as writer:
        writer.write(NetworkMessage(kind="mine", data=torch.tensor(1.0), **where))
        writer.write(ModuleMessage(kind="mine", module="", data=torch.tensor(2.0), **where))
        writer.write(NetworkMessage(kind="loss", data=torch.tensor(3.0), **where))
        writer.write(ModuleMessage(kind="weights", module="", data=torch.tensor(4.0), **where))
    with TraceReader(path) as reader:
        found = [
            reader.array(kind, module)[1].tolist() for kind in ("mine", "loss", "weights") for module in (None, "")
        ]
    assert found == [[1.0], [2.0], [3.0], [3.0], [4.0], [4.0]]


@every_format
def test_what_only_one_rank_recorded_can_be_asked_for(tmp_path: Path, suffix: str) -> None:
    """A kind or tag that only one rank has is known when the others are replayed, which answer nothing."""
    path = tmp_path / f"run{suffix}"
    for rank in (0, 1):
        with TraceWriter(path, header={"ranks": [0, 1]}, part=part_name(rank, 0)) as writer:
            where = {"global_step": 0, "train_step": 0, "epoch": 0, "rank": rank}
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.ones(3), **where))
            if rank == 0:
                writer.write(NetworkMessage(kind="mine", data=torch.tensor(-7.0), tag="aside", **where))
    for narrowed in ([], ["-k", "mine"], ["--tag", "aside"]):
        ran = CliRunner().invoke(main, ["replay", str(path), "-s", "norm:kind=mine,tag=aside", "--json", *narrowed])
        assert ran.exit_code == 0, ran.stderr
        assert [(row["rank"], row["value"]) for row in map(json.loads, ran.stdout.splitlines())] == [(0, 7.0)]
    ran = CliRunner().invoke(main, ["replay", str(path), "-s", "norm:kind=mine,tag=aside", "-k", "nobodys"])
    assert (ran.exit_code, "kind 'nobodys'" in ran.stderr) == (2, True)


@every_format
@pytest.mark.parametrize("torn", [False, True])
def test_a_missing_or_torn_rank_is_reported_and_the_others_are_read(tmp_path: Path, suffix: str, torn: bool) -> None:
    """What is left of a run of two ranks is read, by every command, and each says what is missing."""
    path = tmp_path / f"run{suffix}"
    for rank in (0, 1):
        write_part(path, range(3), rank=rank)
    part = path / "rank1" / "journal" if suffix == ".zarr" else tmp_path / "run.rank1.h5"
    if not torn:
        shutil.rmtree(part.parent) if suffix == ".zarr" else part.unlink()
    elif suffix == ".zarr":
        next(file for file in (part / "c").rglob("*") if file.is_file()).write_bytes(b"torn")
    else:
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with TraceReader(path) as reader:
        (problem,) = reader.problems
        assert ("rank 1 cannot be read: " if torn else "has nothing of rank 1") in problem
    assert [one[1] for one in told(path, kinds="loss")] == [0, 1, 2]
    ran = CliRunner().invoke(main, ["info", str(path)])
    assert ran.exit_code == 0
    assert "PROBLEM" in ran.stdout
    ran = CliRunner().invoke(main, ["replay", str(path), "-s", "norm:kind=weights", "--json"])
    assert ran.exit_code == 0
    assert "rank 1" in ran.stderr
    assert len(ran.stdout.splitlines()) == 3
    ran = CliRunner().invoke(main, ["verify", str(path)])
    assert ran.exit_code == 3
    loss = tracer.recover(path, tmp_path / f"saved{suffix}")
    assert not loss.lossless
    assert [one for one in told(tmp_path / f"saved{suffix}") if one[2] == 0] == told(path)
    ran = CliRunner().invoke(main, ["recover", str(path), str(tmp_path / f"again{suffix}")])
    assert ran.exit_code == 3
    assert torn or ("rank 1" in ran.stderr and "cannot be counted" in ran.stdout)


COMMANDS = {
    "info": ("info", "TRACE"),
    "ls": ("ls", "TRACE"),
    "cat": ("cat", "TRACE"),
    "replay": ("replay", "TRACE", "-s", "norm:kind=weights"),
    "plan": ("replay", "TRACE", "-s", "norm:kind=weights", "--plan"),
    "follow": ("replay", "TRACE", "-s", "norm:kind=weights", "--follow"),
    "convert": ("convert", "TRACE", "COPY"),
}


def tear(path: Path, rank: int) -> None:
    """Damage what a rank recorded, so that nothing of it can be read."""
    if path.suffix == ".zarr":
        (path / f"rank{rank}" / "journal" / "zarr.json").write_text("garbage")
    else:
        os.truncate(path.with_name(f"run.rank{rank}.h5" if rank else "run.h5"), 3000)


@every_format
def test_a_torn_rank_is_not_called_absent(tmp_path: Path, suffix: str) -> None:
    """Every command says of a rank that is there and cannot be read that, and of one that is absent this; each once."""
    path = tmp_path / f"run{suffix}"
    for rank in (0, 2, 3):
        write_part(path, range(3), rank=rank, ranks=(0, 1, 2, 3))
    tear(path, 2)
    tear(path, 3)
    with TraceReader(path) as reader:
        two, three, absent = reader.problems
        with pytest.raises(TraceCorruptError, match="rank 2 cannot be read"):
            reader.of_rank(2)
    assert f"{path}: rank 2 cannot be read: " in two
    assert two.replace("rank 2", "rank 3").replace("rank2", "rank3") == three
    assert absent == f"{path} has nothing of rank 1, of the 4 ranks that were recorded"
    for name, command in COMMANDS.items():
        words = [{"TRACE": str(path), "COPY": str(tmp_path / "copy.zarr")}.get(word, word) for word in command]
        ran = CliRunner().invoke(main, words)
        assert ran.exit_code == (3 if name == "convert" else 0), ran.output
        for problem in (two, three, absent):
            assert ran.output.count(problem) == 1, name
        for rank in (2, 3):
            assert len(re.findall(rf"\brank \d?,? ?{rank}\b", ran.output)) == 1, name
        if name == "info":
            continue
        if name == "convert":
            words[2] = str(tmp_path / "one.zarr")
        for rank, code, sentence in ((2, 3, two), (3, 3, three), (1, 2, None)):
            ran = CliRunner().invoke(main, [*words, "--rank", str(rank)])
            assert ran.exit_code == code, ran.output
            assert sentence is None or ran.output == f"Error: {sentence}\n"
    assert not (tmp_path / "one.zarr").exists()
    with pytest.raises(TraceCorruptError, match="rank 3 cannot be read"):
        tracer.convert(path, tmp_path / "one.zarr", ranks=3)
    with pytest.raises(TraceCorruptError, match="rank 3 cannot be read"):
        tracer.replay(TraceReader(path), Collect("loss"), rank=3)


@every_format
def test_a_torn_part_of_an_attempt_is_told_with_it(tmp_path: Path, suffix: str) -> None:
    """Neither is the attempt called absent, nor the rank in it."""
    path = tmp_path / f"run{suffix}"
    for attempt, steps in enumerate((range(6), range(3, 8), range(7, 10))):
        for rank in (0, 1):
            write_part(path, steps, rank=rank, attempt=attempt)
    if suffix == ".zarr":
        (path / "rank1.attempt1" / "declarations" / "zarr.json").write_text("garbage")
    else:
        os.truncate(tmp_path / "run.rank1.attempt1.h5", 3000)
    with TraceReader(path) as reader:
        (problem,) = reader.problems
        assert reader.ranks == [0, 1]
    assert f"{path}: rank 1 of attempt 1 cannot be read: " in problem


def test_of_a_trace_whose_ranks_are_all_torn_none_is_called_absent(tmp_path: Path) -> None:
    """It is damaged, and of the ranks that are asked for the first is told of."""
    path = tmp_path / "run.zarr"
    for rank in (0, 1):
        write_part(path, range(3), rank=rank)
        tear(path, rank)
    with pytest.raises(TraceCorruptError, match="rank 0 cannot be read"):
        TraceReader(path)
    for rank in (0, 1):
        with pytest.raises(TraceCorruptError, match=f"rank {rank} cannot be read"):
            TraceReader(path, ranks=[rank])
    with pytest.raises(CaptureError, match="no messages of rank 2"):
        TraceReader(path, ranks=[2])


def test_without_the_first_rank(tmp_path: Path) -> None:
    """Of an HDF5 trace whose own file is lost, the files beside it are read; each also by its own name."""
    path = tmp_path / "run.h5"
    for rank in (0, 1):
        write_part(path, range(3), rank=rank)
    with TraceReader(tmp_path / "run.rank1.h5") as reader:
        assert (len(reader), reader.ranks, reader.problems) == (6, [1], [])
    path.unlink()
    with TraceReader(path) as reader:
        assert (len(reader), reader.ranks) == (6, [1])
        assert "nothing of rank 0" in reader.problems[0]
    with pytest.raises(TraceExistsError):
        TraceWriter(path)


@every_format
@pytest.mark.parametrize("target", FORMATS)
def test_convert_merges_ranks(tmp_path: Path, suffix: str, target: str) -> None:
    """A copy has one part with the messages of all ranks, in the same order, each with its rank; or of one."""
    path, copy, one = tmp_path / f"run{suffix}", tmp_path / f"copy{target}", tmp_path / f"one{target}"
    for rank in (0, 1):
        write_part(path, range(4), rank=rank)
    tracer.convert(path, copy)
    assert told(copy) == told(path)
    assert sorted(file.name for file in tmp_path.glob(f"copy*{target}")) == [copy.name]
    with TraceReader(copy) as reader:
        assert (reader.ranks, reader.problems) == ([0, 1], [])
    with TraceReader(copy, ranks=[1]) as reader:
        assert reader.array("loss")[1].tolist() == [1000.0 + step for step in range(4)]
    heard = Collect("loss")
    tracer.replay(copy, heard, rank=1)
    assert len(heard) == 4
    assert tracer.convert(path, one, ranks=1)["left_out"] == 8
    assert told(one) == told(path, ranks=1)
    with pytest.raises(CaptureError, match=r"no messages of rank 7; it has those of 0, 1"):
        tracer.convert(path, tmp_path / "seven.zarr", ranks=[0, 7])
    assert not (tmp_path / "seven.zarr").exists()
    assert tracer.verify(copy).complete


def in_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2, port: int = 29500) -> None:
    """Let this process look like one of a distributed run."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, str(value))


def train(run: tracer.Run, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """A few steps."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def adam(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that counts its steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


@every_format
def test_ranks_record_into_one_trace(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`record` finds its rank in the environment; a second run is refused on every rank, or replaces all parts."""
    path = tmp_path / f"run{suffix}"
    for size, overwrite in ((3, False), (2, True)):
        runs = []
        for rank in range(size):
            in_rank(monkeypatch, rank, size, port=29500 + size)
            model, optimizer = adam(rank)
            recording = tracer.record(path, model, optimizer, overwrite=overwrite)
            runs.append((recording, recording.__enter__(), model, optimizer))
        for recording, run, model, optimizer in runs:
            train(run, model, optimizer, 3)
            recording.__exit__(None, None, None)
        with TraceReader(path) as reader:
            assert (reader.ranks, reader.problems) == ([*range(size)], [])
            assert reader.header["ranks"] == [*range(size)]
            assert len({part.header["run_id"] for part in reader._parts.shown}) == 1
        in_rank(monkeypatch, 1, size, port=29999)
        with pytest.raises(TraceExistsError, match="already exists"):
            tracer.record(path, *adam()).__enter__()


def test_only_chosen_ranks_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the others `record` does nothing, and nobody misses them."""
    path = tmp_path / "run.zarr"
    for rank in (1, 0):
        in_rank(monkeypatch, rank)
        model, optimizer = adam()
        with tracer.record(path, model, optimizer, ranks=[0]) as run:
            run.log("mine", 1.0)
            train(run, model, optimizer, 2)
        assert path.exists() is (rank == 0)
    with TraceReader(path) as reader:
        assert (reader.ranks, reader.problems) == ([0], [])


def test_which_process_this_is() -> None:
    """The variables of torchrun, then srun's; what does not make sense is no distributed run."""
    assert this_process({}) == Process(0, 1, None)
    srun = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
    assert this_process(srun) == Process(2, 4, "SLURM_JOB_ID=17/SLURM_STEP_ID=0")
    assert this_process(srun | {"RANK": "1", "WORLD_SIZE": "2"}).rank == 1
    assert this_process({"RANK": "5", "WORLD_SIZE": "2"}) == Process(0, 1, None)
    assert this_process({"RANK": "x", "WORLD_SIZE": "2"}) == Process(0, 1, None)


DDP = """
import sys, torch, tracer
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 2))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
with tracer.record(sys.argv[1], ddp, optimizer):
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.full((2, 3), float(dist.get_rank() + 1))).sum().backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
@every_format
def test_under_torchrun(tmp_path: Path, suffix: str) -> None:
    """Two real processes write one trace; activations are each rank's own."""
    script, path = tmp_path / "train.py", tmp_path / f"run{suffix}"
    script.write_text(DDP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ran = processes.run([*command, str(script), str(path)], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert tracer.verify(path).complete
    with TraceReader(path) as reader:
        assert (reader.ranks, reader.problems) == ([0, 1], [])
        for rank in (0, 1):
            inputs = [message.data for message in reader.messages("input_data", ranks=rank)]
            assert len(inputs) == 3
            assert all(data is not None and (data == rank + 1).all() for data in inputs)


# -- attempts ---------------------------------------------------------------------------------------------------------


@every_format
def test_a_later_attempt_supersedes_steps(tmp_path: Path, suffix: str) -> None:
    """Steps that were trained again are there once, from the last attempt; those before it stay."""
    path = tmp_path / f"run{suffix}"
    write_part(path, range(10), ranks=(0,))
    write_part(path, range(6, 9), attempt=1, ranks=(0,))
    write_part(path, range(7, 12), attempt=2, ranks=(0,))
    with TraceReader(path) as reader:
        steps, values = reader.array("loss")
        assert steps.tolist() == [*range(12)]
        assert isinstance(values, np.ndarray)
        assert values.tolist() == [*range(6), 100_006, *(200_000 + step for step in range(7, 12))]
        assert len(reader.streams) == 2
        assert [one["first_step"] for one in reader.attempts] == [0, 6, 7]
        assert [one["superseded"] for one in reader.attempts] == [8, 4, 0]
        assert np.isin(reader.journal[:, Column.GLOBAL_STEP], range(12)).all()
    heard = Collect("weight_updates")
    # across the restart, too, an update is the difference of consecutive weights
    tracer.replay(path, heard, CountUpdates())
    assert [one.global_step for one in heard] == [*range(11)]
    copy = tmp_path / f"copy{suffix}"
    tracer.convert(path, copy)
    assert told(copy) == told(path)
    assert tracer.recover(path, tmp_path / f"saved{suffix}").saved == 24
    ran = CliRunner().invoke(main, ["info", str(path)])
    assert "from step 7" in ran.stdout
    assert "8 superseded" in ran.stdout


@every_format
@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one", "two"])
def test_a_header_that_is_lost_supersedes_nothing(tmp_path: Path, suffix: str, ranks: tuple[int, ...]) -> None:
    """Where an attempt began is then what other ranks say of it, or its first message: what came before is saved."""
    path, saved = tmp_path / f"run{suffix}", tmp_path / "saved.zarr"
    for rank in ranks:
        write_part(path, range(10), rank=rank, ranks=ranks)
        write_part(path, range(6, 9), rank=rank, attempt=1, ranks=ranks)
    before = told(path)
    files = [tmp_path / "run.rank0.attempt1.h5"] if suffix == ".h5" else [*(path / "rank0.attempt1").rglob("c/*")]
    (file,) = [one for one in files if one.is_file() and b'"first_step"' in one.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.find(b'"first_step"') + 2] ^= 1
    file.write_bytes(data)
    found = tracer.recover(path, saved)
    assert found.lost == 0
    assert found.saved == len(before) == 9 * 2 * len(ranks)
    assert sorted(told(saved)) == sorted(before)


GONE = {
    "the first attempt": [(0, 0)],
    "an attempt between others": [(0, 1), (1, 1)],
    "one rank's first attempt": [(1, 0)],
    "one rank's last attempt": [(1, 2)],
}


@every_format
@pytest.mark.parametrize("gone", GONE)
def test_a_missing_part_of_an_attempt_is_told(tmp_path: Path, suffix: str, gone: str) -> None:
    """By a reader, `verify` and `recover`; but not one of which nothing counts any more."""
    path = tmp_path / f"run{suffix}"
    ranks = (0,) if gone == "the first attempt" else (0, 1)
    for attempt, steps in enumerate((range(6), range(3, 8), range(7, 10))):
        for rank in ranks:
            write_part(path, steps, rank=rank, attempt=attempt, ranks=ranks)
    with TraceReader(path) as reader:
        assert not reader.problems
    for rank, attempt in GONE[gone]:
        name = part_name(rank, attempt)
        file = path / name if suffix == ".zarr" else path.with_name(f"run.{name}.h5") if name != "rank0" else path
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    with TraceReader(path) as reader:
        (problem,) = reader.problems
    assert f"attempt {GONE[gone][0][1]}" in problem
    assert not tracer.verify(path).complete
    assert not tracer.recover(path, tmp_path / "saved.zarr").lossless


@every_format
def test_one_rank_is_read_as_it_is_among_all(tmp_path: Path, suffix: str) -> None:
    """What a later attempt of any rank trained again is left out of each, though this rank took no part in it."""
    path = tmp_path / f"run{suffix}"
    for rank in (0, 1):
        write_part(path, range(6), rank=rank)
    write_part(path, range(4, 9), attempt=1, ranks=(0,))
    with TraceReader(path) as reader:
        whole = [one.global_step for one in reader.messages("loss") if one.rank == 1]
        alone = [one.global_step for one in reader.of_rank(1).messages("loss")]
    with TraceReader(path, ranks=[1], assemble=False) as reader:
        chosen = [one.global_step for one in reader.messages("loss")]
    assert whole == alone == chosen == [0, 1, 2, 3]


def test_a_rank_that_is_new_in_a_later_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of the attempt that the others are of, though the launcher calls both launches the same."""
    path = tmp_path / "run.zarr"
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"), ("TORCHELASTIC_RUN_ID", "none")):
        monkeypatch.setenv(name, value)
    # the first launch was before this process began
    long_ago = "2026-01-01T00:00:00+00:00"
    for rank in (0, 1):
        write_part(path, range(6), rank=rank, launch=this_launch(rank, 2, monkeypatch), created=long_ago)
    for rank in (0, 1, 2):
        this_launch(rank, 3, monkeypatch)
        attempt, _ = claim(path, this_process(), [0, 1, 2], resume=True)
        assert attempt == 1, rank


def this_launch(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What tells the launch, in the process of this rank."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    return this_process().launch


def test_a_rank_resumes_while_another_makes_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half made is waited for."""
    path = tmp_path / "run.zarr"

    def train(rank: int, **settings: Any) -> None:
        this_launch(rank, 2, monkeypatch)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tracer.record(path, model, optimizer, **settings):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    train(0)
    train(1)
    half = path / "rank1.attempt1"
    half.mkdir()
    later = threading.Timer(0.5, half.rmdir)
    later.start()
    train(0, resume=True, first_step=1)
    later.join()
    with TraceReader(path, ranks=[0]) as reader:
        assert [one.global_step for one in reader.messages("weights")] == [0, 1]


@every_format
def test_what_was_evaluated_of_the_checkpoint_still_counts(tmp_path: Path, suffix: str) -> None:
    """Evaluations of the state a run went on from are kept, unless it made them again; later ones are superseded."""
    path = tmp_path / f"run{suffix}"

    def evaluated(writer: TraceWriter, tag: str, step: int, value: float) -> None:
        writer.write(dataclasses.replace(loss(step, value), tag=tag))

    with TraceWriter(path, part=part_name(0, 0)) as writer:
        for step in range(6):
            for tag in ("test", "probe"):
                evaluated(writer, tag, step, step)
            writer.write(loss(step, step))
    with TraceWriter(path, header={"attempt": 1, "first_step": 4}, part=part_name(0, 1)) as writer:
        evaluated(writer, "probe", 4, 104)
        for step in range(4, 6):
            writer.write(loss(step, 100 + step))
            evaluated(writer, "test", step + 1, 101 + step)
    with TraceReader(path) as reader:
        found = {tag: reader.array("loss", tag=tag) for tag in ("default", "test", "probe")}
        assert {tag: list(values) for tag, (_, values) in found.items()} == {
            "default": [0, 1, 2, 3, 104, 105],
            "test": [0, 1, 2, 3, 4, 105, 106],
            "probe": [0, 1, 2, 3, 104],
        }
        assert {tag: steps.tolist() for tag, (steps, _) in found.items()}["test"] == [*range(7)]
        assert [one["superseded"] for one in reader.attempts] == [5, 0]
    copy = tmp_path / f"copy{suffix}"
    tracer.convert(path, copy)
    assert told(copy) == told(path)
    assert tracer.recover(path, tmp_path / f"saved{suffix}").lossless


class CountUpdates(tracer.Subscriber):
    """Asks for updates, which are then made of weights."""

    name = "count_updates"
    kinds = ("weight_updates",)

    def __init__(self) -> None:
        super().__init__(tracer.Subscription("weight_updates"))

    def compute(self, message: Any) -> Any:
        return ()


def test_an_attempt_without_a_message_supersedes_nothing(tmp_path: Path) -> None:
    """A restart that died before its first step took nothing away."""
    path = tmp_path / "run.zarr"
    write_part(path, range(5), ranks=(0,))
    TraceWriter(path, header={"first_step": 2}, part=part_name(0, 1)).commit()
    assert [one[1] for one in told(path, kinds="loss")] == [*range(5)]


@every_format
def test_resume_goes_on_where_the_checkpoint_was(tmp_path: Path, suffix: str) -> None:
    """The optimizer says the step; the result is the trace of a run that was never interrupted, bit for bit."""
    whole, path = tmp_path / f"whole{suffix}", tmp_path / f"run{suffix}"
    model, optimizer = adam()
    with tracer.record(whole, model, optimizer) as run:
        train(run, model, optimizer, 5)
        run.epoch_finished()
        train(run, model, optimizer, 5)
    model, optimizer = adam()
    with pytest.raises(KeyboardInterrupt), tracer.record(path, model, optimizer, resume=True) as run:
        train(run, model, optimizer, 5)
        run.epoch_finished()
        train(run, model, optimizer, 1)
        assert run.global_step == 6
        state = {key: value.clone() for key, value in model.state_dict().items()}, optimizer.state_dict()
        state = torch.load(save(tmp_path / "checkpoint", state), weights_only=False)
        train(run, model, optimizer, 3)
        raise KeyboardInterrupt
    model, optimizer = adam(seed=1)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    with tracer.record(path, model, optimizer, resume=True) as run:
        assert (run.global_step, run.exporter.train_step, run.exporter.epoch) == (6, 1, 1)
        train(run, model, optimizer, 4)
    with TraceReader(whole) as one, TraceReader(path) as other:
        assert other.status == "finished"
        assert [a["status"] for a in other.attempts] == ["failed: KeyboardInterrupt", "finished"]
        assert other.info["run_id"] == other.header["run_id"]
        for expected, found in zip(one, other, strict=True):
            for field in ("kind", "key", "global_step", "train_step", "epoch", "tag", "call", "leaf"):
                assert getattr(expected, field) == getattr(found, field)
            if expected.data is not None:
                assert found.data is not None
                assert torch.equal(expected.data, found.data)


def save(path: Path, state: Any) -> Path:
    """A checkpoint."""
    torch.save(state, path)
    return path


@pytest.mark.parametrize("first", [False, True])
def test_a_run_that_was_killed_as_it_began_is_resumed(tmp_path: Path, first: bool) -> None:
    """Whatever a process left of its part before there was a header in it, another attempt takes place after it."""

    def train(path: Path, **options: Any) -> None:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with tracer.record(path, net, optimizer, capture=tracer.Capture(kinds=["weights"]), **options):
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.randn(4, 3)).sum().backward()
                optimizer.step()

    whole, path = tmp_path / "whole.zarr", tmp_path / "run.zarr"
    train(whole)
    left = "rank0" if first else "rank0.attempt1"
    made = ["zarr.json", "declarations", "declarations/zarr.json", "journal/zarr.json"]
    for number in range(len(made) + 1):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        shutil.copy(whole / "zarr.json", path)
        if not first:
            shutil.copytree(whole / "rank0", path / "rank0")
        (path / left).mkdir()
        for name in made[:number]:
            if name.endswith("declarations"):
                (path / left / name).mkdir()
                continue
            (path / left / name).parent.mkdir(exist_ok=True)
            document = json.loads((whole / "rank0" / name).read_text())
            if "shape" in document:
                document["shape"][0] = 0
            (path / left / name).write_text(json.dumps(document))
        train(path, resume=True, first_step=3)
        with TraceReader(path) as trace:
            steps = [message.global_step for message in trace.messages("weights")]
        assert steps == [*([] if first else [0, 1, 2]), 3, 4, 5], made[:number]


BEGINNINGS = [
    [],
    [".zarr.json.4711.0123abcd.part"],
    ["zarr.json"],
    ["zarr.json", "rank0"],
    ["zarr.json", "rank0/zarr.json"],
    ["zarr.json", "rank0/zarr.json", "rank0/declarations/zarr.json", "rank0/journal"],
]
"""What a process has made of a trace, one after the other, before its root says that it is one."""


@pytest.mark.parametrize("left", BEGINNINGS)
def test_a_run_that_was_killed_before_its_root_was_written_is_resumed(tmp_path: Path, left: list[str]) -> None:
    """Then nothing is wrong with the trace, and it says so."""
    path = tmp_path / "run.zarr"
    path.mkdir()
    TraceWriter(tmp_path / "whole.zarr").finish()
    array = json.loads((tmp_path / "whole.zarr/rank0/declarations/zarr.json").read_text()) | {"shape": [0]}
    for name in left:
        if not name.endswith((".json", ".part")):
            (path / name).mkdir()
            continue
        (path / name).parent.mkdir(exist_ok=True)
        document = array if "declarations" in name else {"node_type": "group", "attributes": {}}
        (path / name).write_text("" if name.endswith(".part") else json.dumps({"zarr_format": 3} | document))
    with pytest.raises(TraceError):
        TraceReader(path)
    model, optimizer = adam()
    with tracer.record(path, model, optimizer, resume=True) as run:
        train(run, model, optimizer, 2)
    with TraceReader(path) as trace:
        assert [message.global_step for message in trace.messages("weights", "0")] == [0, 1]
        assert (trace.problems, [one["attempt"] for one in trace.attempts]) == ([], [int("rank0" in str(left))])
    assert tracer.verify(path).intact


def test_a_folder_of_something_else_is_no_beginning(tmp_path: Path) -> None:
    """What another program keeps there is neither added to nor removed."""
    groups = {"attributes": {"mine": 1}}, {"attributes": {}}
    for number, (attributes, names) in enumerate(zip(groups, (["zarr.json"], ["notes.txt", "zarr.json"]), strict=True)):
        path = tmp_path / f"{number}.zarr"
        path.mkdir()
        for name in names:
            (path / name).write_text(json.dumps({"zarr_format": 3, "node_type": "group"} | attributes))
        model, optimizer = adam()
        with pytest.raises(TraceError, match="is not a trace"), tracer.record(path, model, optimizer, resume=True):
            pass
        assert sorted(os.listdir(path)) == names


def test_an_empty_folder_may_be_overwritten(tmp_path: Path) -> None:
    """Without being told to, a trace is begun in none: another process may be about to."""
    path = tmp_path / "run.zarr"
    path.mkdir()
    model, optimizer = adam()
    with pytest.raises(TraceExistsError), tracer.record(path, model, optimizer):
        pass
    with tracer.record(path, model, optimizer, overwrite=True) as run:
        train(run, model, optimizer, 1)
    assert tracer.verify(path).intact


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("stop", [4, 5, 7, 8])
def test_resuming_at_any_step_counts_on(tmp_path: Path, stop: int, every: int) -> None:
    """Whatever lies between two steps, evaluations, probes or the ends of epochs: the counters go on as in one run."""
    epochs = (4, 1, 3)
    expected = [(step, epoch) for epoch, steps in enumerate(epochs) for step in range(steps)] + [(0, len(epochs))]
    path = tmp_path / "run.zarr"
    model, optimizer = adam()
    with tracer.record(path, model, optimizer, capture=tracer.Capture(every=every)) as run:
        run.probe("fixed", torch.ones(2, 3), every=2)
        for steps in epochs:
            for _ in range(min(steps, stop - run.global_step)):
                train(run, model, optimizer, 1)
                run.log("rate", 0.1)
            with torch.no_grad():
                model(torch.ones(2, 3))
            if run.global_step == sum(epochs[: run.exporter.epoch + 1]):
                run.epoch_finished()
    for first_step in range(1, stop + 1):
        copy = tmp_path / f"{first_step}.zarr"
        shutil.copytree(path, copy)
        with tracer.record(copy, model, optimizer, resume=True, first_step=first_step) as run:
            train(run, model, optimizer, 1)
        with tracer.open(copy) as reader:
            at = reader.journal[reader.select("batch_started")] if every == 1 else reader.journal
            last = at[at[:, Column.GLOBAL_STEP] == first_step][-1] if every == 1 else None
        counted = (run.exporter.train_step - 1, run.exporter.epoch)
        assert (counted, run.global_step) == (expected[first_step], first_step + 1)
        if last is not None:
            assert (int(last[Column.TRAIN_STEP]), int(last[Column.EPOCH])) == counted


def test_where_to_resume_has_to_be_known(tmp_path: Path) -> None:
    """SGD counts no steps, so the step must be said; epochs are as the trace says, unless they are said, too."""
    path = tmp_path / "run.zarr"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(path, model, optimizer) as run:
        for _ in range(2):
            train(run, model, optimizer, 4)
            run.epoch_finished()
    with pytest.raises(CaptureError, match="first_step="):
        tracer.record(path, model, optimizer, resume=True).__enter__()
    assert [*model.modules()][-1]._forward_hooks == {}
    for first_step, first_epoch, expected in (
        (6, None, (6, 2, 1)),
        (8, None, (8, 0, 2)),
        (9, None, (9, 1, 2)),
        (6, 3, (6, 0, 3)),
    ):
        options = {"first_step": first_step, "first_epoch": first_epoch}
        with tracer.record(path, model, optimizer, resume=True, **options) as run:
            exporter = run.exporter
            assert (exporter.global_step, exporter.train_step, exporter.epoch) == expected
    for wrong in (-1, 1.5, True):
        with pytest.raises(CaptureError, match="first_step"):
            tracer.record(path, model, optimizer, resume=True, first_step=wrong)
    with pytest.raises(CaptureError, match="resume=True"):
        tracer.record(path, model, optimizer, first_step=3)


def test_an_optimizer_that_never_stepped_begins_at_zero(tmp_path: Path) -> None:
    """A run that died before its first checkpoint begins anew, and all of it is superseded."""
    path = tmp_path / "run.zarr"
    for _ in range(2):
        model, optimizer = adam()
        with tracer.record(path, model, optimizer, resume=True) as run:
            train(run, model, optimizer, 3)
    with TraceReader(path) as reader:
        assert reader.array("weights", "0")[0].tolist() == [0, 1, 2]
        assert reader.attempts[0]["superseded"] == reader.attempts[0]["messages"]


SCRIPT = """
import os, sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 2))
optimizer = torch.optim.Adam(model.parameters())
if os.path.exists("checkpoint"):
    state = torch.load("checkpoint")
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
first = int(next(iter(optimizer.state.values()))["step"]) if optimizer.state else 0
for step in range(first, 6):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
    optimizer.step()
    if step == 2 and not first:
        torch.save([model.state_dict(), optimizer.state_dict()], "checkpoint")
    if step == 4 and not first:
        sys.exit(7)
"""


@every_format
def test_a_script_that_restarts_is_resumed(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trace record --resume` finds the step in the optimizer that the script has loaded."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    command = ["record", "--out", f"run{suffix}", "--resume", "train.py"]
    assert CliRunner().invoke(main, command).exit_code == 7
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    with TraceReader(f"run{suffix}") as reader:
        assert [one["first_step"] for one in reader.attempts] == [0, 3]
        assert reader.array("loss")[0].tolist() == [*range(6)]
    # without its state, the optimizer of this script would count from 0; an SGD could not be resumed at all
    sgd = SCRIPT.replace("Adam(model.parameters())", "SGD(model.parameters(), lr=0.1)").replace("checkpoint", "other")
    Path("train.py").write_text(sgd)
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 2
    assert "--first-step" in ran.stderr
    assert CliRunner().invoke(main, [*command[:-1], "--first-step", "5", "train.py"]).exit_code == 7
    with TraceReader(f"run{suffix}") as reader:
        assert [one["first_step"] for one in reader.attempts] == [0, 3, 5]
        assert reader.array("loss")[0].tolist() == [*range(10)]


def test_a_living_trace_is_not_resumed(tmp_path: Path) -> None:
    """Two writers on one trace: the second is refused while the first lives, and resumes when it is dead."""
    path = tmp_path / "run.zarr"
    code = (
        "import sys, time, torch; from tracer import TraceWriter, NetworkMessage\n"
        "writer = TraceWriter(sys.argv[1])\n"
        "writer.write(NetworkMessage(kind='loss', global_step=0, train_step=0, epoch=0, data=torch.ones(())))\n"
        "writer.commit(); print('ready', flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with processes.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        model, optimizer = adam()
        for options in ({"resume": True}, {"overwrite": True}, {}):
            with pytest.raises(TraceExistsError):
                tracer.record(path, model, optimizer, **options).__enter__()
        other.send_signal(signal.SIGKILL)
        # it stays in the list of processes until it is waited for, and is dead all the same
        while TraceReader(path).status == "recording":
            pass
        assert claim(path, Process(0, 1, None), [0], resume=True)[0] == 1
        other.wait()


def test_two_that_begin_one_file_at_the_same_moment(tmp_path: Path) -> None:
    """The first of two writers has the path from the beginning on; the second is refused, and destroys nothing."""
    path = tmp_path / "run.h5"
    first = create_store(path)
    for overwrite in (False, True):
        with pytest.raises(TraceExistsError, match="being recorded"):
            create_store(path, overwrite=overwrite)
    first.create("a", dtype="int64", shape=(), chunk_bytes=1 << 16)
    first.append("a", np.arange(3))
    first.commit()
    for overwrite in (False, True):
        with pytest.raises(TraceExistsError):
            create_store(path, overwrite=overwrite)
    first.close()
    assert [one.name for one in tmp_path.iterdir()] == ["run.h5"]
    with contextlib.closing(open_store(path)) as store:
        assert store.read("a", 0, 3).tolist() == [0, 1, 2]
    create_store(path, overwrite=True).abandon()
    (tmp_path / ".run.h5.part").write_bytes(b"left by one that was killed")
    create_store(tmp_path / "other.h5").close()
    create_store(path, overwrite=True).close()


@every_format
def test_a_trace_is_one_by_whatever_way_it_is_named(tmp_path: Path, suffix: str) -> None:
    """Neither another spelling nor a link lets this process record it twice; and a link has all its parts."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "links").mkdir()
    path = tmp_path / "runs" / f"run{suffix}"
    (tmp_path / "folder").symlink_to(tmp_path / "runs")
    (tmp_path / "links" / f"latest{suffix}").symlink_to(path)
    model, optimizer = adam()
    with tracer.record(path, model, optimizer) as run:
        train(run, model, optimizer, 3)
        for other in (tmp_path / "runs" / ".." / "runs" / path.name, tmp_path / "folder" / path.name):
            for options in ({"overwrite": True}, {"resume": True, "first_step": 1}):
                with pytest.raises(TraceExistsError):
                    tracer.record(other, *adam(), **options).__enter__()  # type: ignore[arg-type] # of several types
        train(run, model, optimizer, 3)
    with tracer.record(path, *adam(), resume=True, first_step=4) as run:
        train(run, run.exporter.model, run.exporter.optimizers.all[0], 4)
    with TraceReader(path) as trace, TraceReader(tmp_path / "links" / f"latest{suffix}") as linked:
        assert len(linked.attempts) == 2
        assert linked.array("weights", "0")[0].tolist() == trace.array("weights", "0")[0].tolist() == [*range(8)]


def test_claims_of_what_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else at the path is an error, also for a rank and for one that resumes."""
    monkeypatch.setattr("tracer.trace.claiming.BEGINNING_SECONDS", 0.1)
    path = tmp_path / "run.zarr"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    for process in (Process(0, 1, None), Process(1, 2, None)):
        for options in ({"resume": True}, {}):
            with pytest.raises(TraceError):
                claim(path, process, [process.rank], **options)


def test_one_process_does_not_write_twice(tmp_path: Path) -> None:
    """A second recording of a trace that this process records is refused, also one that would resume it."""
    path = tmp_path / "run.zarr"
    model, optimizer = adam()
    with tracer.record(path, model, optimizer) as run:
        train(run, model, optimizer, 3)
        run.recorder.writer.commit()  # type: ignore[union-attr] # it records
        for options in ({"resume": True, "first_step": 1}, {"overwrite": True}, {}):
            with pytest.raises(TraceExistsError):
                tracer.record(path, *adam(), **options).__enter__()  # type: ignore[arg-type] # of several types
        train(run, model, optimizer, 3)
    with TraceReader(path) as reader:
        assert reader.array("weights", "0")[0].tolist() == [*range(6)]
    with pytest.raises(CaptureError, match="one of them"):
        tracer.record(path, model, optimizer, resume=True, overwrite=True)


def test_a_rank_that_is_done_early_keeps_no_other_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that do not wait for each other write one trace; of a launch of long ago they are another run."""
    path = tmp_path / "run.zarr"
    for rank in (0, 1):
        in_rank(monkeypatch, rank)
        model, optimizer = adam()
        with tracer.record(path, model, optimizer) as run:
            train(run, model, optimizer, 2)
    assert TraceReader(path).ranks == [0, 1]
    monkeypatch.setattr("tracer.trace.claiming.FRESH_SECONDS", -1.0)
    in_rank(monkeypatch, 2, size=3)
    with pytest.raises(TraceExistsError):
        tracer.record(path, *adam()).__enter__()


# -- what is committed while a part is read ---------------------------------------------------------------------------


class Growing:
    """A trace to which a stream is added that was not there before, and a way to do so in the middle of a reading."""

    def __init__(self, path: Path) -> None:
        self.writer = TraceWriter(path)
        self.step = 0
        self.grow()

    def grow(self) -> None:
        """One more stream, of one message."""
        where = {"global_step": self.step, "train_step": self.step, "epoch": 0}
        data = torch.full((self.step + 1,), float(self.step))
        self.writer.write(ModuleMessage(kind="weights", module=f"m{self.step}", data=data, **where))
        self.writer.commit()
        self.step += 1

    def check(self, reader: TraceReader) -> int:
        """How many messages there are, all of them right."""
        messages = list(reader.messages())
        assert [message.global_step for message in messages] == list(range(len(messages)))
        assert all(bool((message.data == message.global_step).all()) for message in messages)
        return len(messages)


def test_hdf5_that_grows_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever array of a file is opened when more is committed, nothing that the journal tells of is missing."""
    plainly = Dataset.__init__
    for name in ("rank0/declarations", "rank0/journal", "rank0/late/float32"):
        growing = Growing(tmp_path / f"{name.replace('/', '-')}.h5")

        def opened(self: Any, dataset: Any, *args: Any, name: str = name, growing: Growing = growing) -> None:
            plainly(self, dataset, *args)
            if dataset.name == f"/{name}":
                growing.grow()

        with monkeypatch.context() as patched:
            patched.setattr(Dataset, "__init__", opened)
            reader = TraceReader(tmp_path / f"{name.replace('/', '-')}.h5")
        assert growing.step == 2
        assert growing.check(reader) in (1, 2)
        growing.grow()
        assert reader.refresh()
        assert growing.check(reader) == 3
        reader.close()
        growing.writer.finish()


@pytest.mark.parametrize("ends", [False, True])
def test_hdf5_whose_declarations_come_after_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The library writes both at once, in any order: what the journal refers to is waited for."""
    growing = Growing(tmp_path / "run.h5")
    reader = TraceReader(tmp_path / "run.h5")
    growing.grow()
    plainly, asked = Part._new_lines, []

    def late(self: Part) -> Any:
        asked.append(self)
        if len(asked) == 2:
            growing.grow()
            if ends:
                growing.writer.finish()
        return plainly(self) if len(asked) > 2 else []

    with monkeypatch.context() as patched:
        patched.setattr(Part, "_new_lines", late)
        assert reader.refresh()
    reader.refresh()
    assert growing.check(reader) == 3
    assert reader.status == ("finished" if ends else "recording")
    assert len(asked) == 3
    reader.close()
    growing.writer.finish()


def test_files_of_another_run_beside_a_trace(tmp_path: Path) -> None:
    """Where a file was moved to the place of a resumed run's first one, its later attempts are not this run's."""
    path = tmp_path / "run.h5"
    began = [f"2026-01-0{day}T00:00:00+00:00" for day in range(1, 6)]
    write_part(path, range(4), ranks=(0,), run_id="old", created=began[0])
    write_part(path, range(2, 6), attempt=1, ranks=(0,), run_id="old", created=began[1])
    expected = told(path)
    assert {value for _, step, _, value in expected if step >= 2} == {100_000.0 + step for step in range(2, 6)}
    write_part(tmp_path / "new.h5", range(3), ranks=(0,), run_id="new", created=began[2])
    new = told(tmp_path / "new.h5")
    (tmp_path / "new.h5").rename(path)
    assert told(path) == new
    with TraceReader(path) as reader:
        assert [one for one in reader.problems if "rank0.attempt1 is a part of another run, old" in one]
    # ranks that were not recorded, of another run; and one that was, whose launch nobody knew
    write_part(path, range(3), rank=1, ranks=(0,), run_id="stray", created=began[3])
    assert told(path) == new
    other = tmp_path / "two.h5"
    write_part(other, range(3), run_id="one", created=began[4])
    write_part(other, range(3), rank=1, run_id="another", created=began[0])
    assert {rank for _, _, rank, _ in told(other)} == {0, 1}


@every_format
def test_a_part_of_another_run_is_not_recovered(tmp_path: Path, suffix: str) -> None:
    """What a reader leaves out is left out of a recovered trace, too, which lacks nothing; `verify` tells of it."""
    path, other, saved = (tmp_path / f"{name}{suffix}" for name in ("run", "other", "saved"))
    write_part(path, range(3), ranks=(0,), run_id="mine")
    write_part(other, range(5), ranks=(0,), run_id="theirs")
    if suffix == ".zarr":
        shutil.copytree(other / "rank0", path / "rank1")
    else:
        write_part(path, range(5), rank=1, ranks=(0,), run_id="theirs")
    mine = told(path)
    assert len(mine) == 6
    report = tracer.verify(path)
    [problem] = report.problems
    assert (problem.check, report.messages, report.damaged) == ("foreign", 6, 0)
    assert "rank1 is a part of another run, theirs, and is left out" in problem.what
    loss = tracer.recover(path, saved)
    assert (loss.lossless, loss.saved, loss.lost) == (True, 6, 0)
    assert told(saved) == mine
    with TraceReader(path) as one, TraceReader(saved) as two:
        assert (two.status, two.header["run_id"]) == (one.status, "mine")


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_consolidated_metadata_do_not_hide_an_attempt(tmp_path: Path) -> None:
    """What zarr-python consolidated in the root knows nothing of what is written later, so it is taken out again."""
    path = tmp_path / "run.zarr"
    write_part(path, range(3), ranks=(0,), run_id="mine")
    zarr.consolidate_metadata(path)
    assert "rank0/weights/fc" in zarr.open_group(path, mode="r")
    write_part(path, range(2, 5), attempt=1, ranks=(0,), run_id="mine")
    root = zarr.open_group(path, mode="r")
    assert root["rank0.attempt1/weights/fc"].shape == (3, 20_000)
    assert root.attrs["run_id"] == "mine"
    # also of one that is consolidated while it is recorded, or that loses a part
    with TraceWriter(path, part="rank0.attempt2", header={"run_id": "mine"}) as writer:
        zarr.consolidate_metadata(path)
        writer.write(weights(5, 5.0))
    assert zarr.open_group(path, mode="r")["rank0.attempt2/weights/fc"].shape == (1, 20_000)
    zarr.consolidate_metadata(path)
    remove_part(path, "rank0.attempt2")
    assert sorted(name for name, _ in zarr.open_group(path, mode="r").groups()) == ["rank0", "rank0.attempt1"]


@every_format
def test_a_link_is_not_overwritten(tmp_path: Path, suffix: str) -> None:
    """It is refused before a training begins, by the command and by the API; what it leads to stays."""
    real, link = tmp_path / f"real{suffix}", tmp_path / f"link{suffix}"
    write_part(real, range(2), ranks=(0,), run_id="one")
    write_part(real, range(1, 3), attempt=1, ranks=(0,), run_id="one")
    before = told(real)
    link.symlink_to(real.name)
    script = tmp_path / "train.py"
    script.write_text("print('began')")
    done = CliRunner().invoke(main, ["record", "--overwrite", "--out", str(link), str(script)])
    assert done.exit_code == 1
    assert "is a link to" in done.output
    assert "began" not in done.output
    model = nn.Linear(2, 2)
    with pytest.raises(TraceExistsError, match="is a link to"):
        tracer.record(link, model, torch.optim.SGD(model.parameters(), lr=0.1), overwrite=True).__enter__()
    assert told(real) == before
