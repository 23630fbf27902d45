"""Ranks: each process writes a part of its own, and a reader makes one trace of them again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import analyze
import tracer
from cli import main
from tests import processes
from tests.trace.written_parts import FORMATS, adam, every_format, in_rank, loss, told, train, write_part
from tracer import Collect, ModuleMessage, NetworkMessage, TraceReader, TraceWriter
from tracer.errors import CaptureError, TraceCorruptError, TraceExistsError
from tracer.format.names import part_name
from tracer.trace.claiming import Process, this_process


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


def test_a_replay_is_of_one_rank(tmp_path: Path) -> None:
    """Subscribers remember what they heard, so ranks are replayed one by one; the command line does that by itself."""
    path = tmp_path / "run.zarr"
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


def test_what_is_being_read_stays_what_was_asked_for(tmp_path: Path) -> None:
    """A refresh puts the messages of several ranks together anew, but not those that somebody is in the middle of."""
    path = tmp_path / "run.zarr"
    writers = [TraceWriter(path, header={"ranks": [0, 1]}, part=part_name(rank, 0)) for rank in (0, 1)]

    def put(rank: int, step: int) -> None:
        where = {"global_step": step, "train_step": step, "epoch": 0, "rank": rank}
        data = torch.full((600, 600), 10.0 * step + rank)  # a block has a few of them
        writers[rank].write(ModuleMessage(kind="weights", module=f"of{rank}", data=data, **where))
        writers[rank].commit()

    for rank, steps in ((0, 10), (1, 3)):
        for step in range(steps):
            put(rank, step)
    with TraceReader(path) as reader:
        expected = [(step, rank, 10.0 * step + rank) for step in range(10) for rank in (0, 1) if rank == 0 or step < 3]
        messages, arrays = reader.messages(), reader.arrays()
        found = [next(messages) for _ in range(8)]
        batches = [next(arrays)]
        for step in range(3, 10):
            put(1, step)
        assert reader.refresh()
        found += messages
        assert [(one.global_step, one.rank, float(one.data[0, 0])) for one in found if one.data is not None] == expected
        batches += arrays
        assert len(batches) > 2
        assert sorted(float(one) for batch in batches for one in batch.data[:, 0, 0]) == sorted(
            one[2] for one in expected
        )
        assert len([*reader.messages()]) == 20
    for writer in writers:
        writer.finish()


def test_the_root_module_and_the_network_are_told_apart(tmp_path: Path) -> None:
    """The path of the root module is empty; no path is the network. Where there is only one of them, both find it."""
    path = tmp_path / "run.zarr"
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


def test_what_only_one_rank_recorded_can_be_asked_for(tmp_path: Path) -> None:
    """A kind or tag that only one rank has is known when the others are replayed, which answer nothing."""
    path = tmp_path / "run.zarr"
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


@every_format
def test_ranks_record_into_one_trace(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`record` finds its rank in the environment; a second run is refused on every rank, or replaces all parts."""
    path = tmp_path / f"run{suffix}"
    for size, overwrite in ((3, False), (2, True)):
        runs = []
        for rank in range(size):
            in_rank(monkeypatch, rank, size, port=29500 + size)
            model, optimizer = adam(rank)
            recording = tracer.record(path, model, optimizer, overwrite=overwrite, capture=tracer.Capture())
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
            tracer.record(path, *adam(), capture=tracer.Capture()).__enter__()


def test_only_chosen_ranks_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the others `record` does nothing, and nobody misses them."""
    path = tmp_path / "run.zarr"
    for rank in (1, 0):
        in_rank(monkeypatch, rank)
        model, optimizer = adam()
        with tracer.record(path, model, optimizer, ranks=[0], capture=tracer.Capture()) as run:
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
with tracer.record(sys.argv[1], ddp, optimizer, capture=tracer.Capture()):
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.full((2, 3), float(dist.get_rank() + 1))).sum().backward()
        optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no torch.distributed")
@pytest.mark.parametrize("suffix", [".zarr", pytest.param(".h5", marks=pytest.mark.slow)])
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
