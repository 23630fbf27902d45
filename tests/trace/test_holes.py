"""Steps that are missing between two attempts of a run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import analyze
import tracer
from analyze.batching.batch import batch
from tests.trace.written_parts import write_part
from tracer import NetworkMessage, TraceReader, TraceWriter
from tracer.format.names import part_name
from tracer.trace.holes import Hole
from tracer.upkeep.verify import verify
from tracereel.main import main

HOLE = "has nothing of steps 11 to 13: attempt 1 began at step 14"


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """A run that was killed in step 13, of which steps up to 10 were committed, and that went on at step 14."""
    path = tmp_path / "run.zarr"
    write_part(path, range(11), ranks=(0,))
    write_part(path, range(14, 20), ranks=(0,), attempt=1)
    return path


def test_a_hole_is_told(tmp_path: Path) -> None:
    """By a reader, `info`, `verify`, `ls` and a batch, whatever the status is."""
    path = tmp_path / "run.zarr"
    write_part(path, range(11), ranks=(0,))
    write_part(path, range(14, 20), ranks=(0,), attempt=1)
    with TraceReader(path) as reader:
        assert reader.status == "finished"
        assert reader.holes == [Hole(0, 1, 11, 13)]
        assert reader.problems == [f"{path} {HOLE}"]
    report = verify(path)
    assert report.intact
    assert not report.complete
    assert report.holes == [f"{path} {HOLE}"]
    ran = CliRunner().invoke(main, ["verify", str(path)])
    assert ran.exit_code == 3
    assert "intact, finished, but not complete" in ran.stdout
    assert HOLE in ran.stdout
    assert HOLE in CliRunner().invoke(main, ["info", str(path)]).stdout
    assert json.loads(CliRunner().invoke(main, ["info", "--json", str(path)]).stdout)["problems"] == [f"{path} {HOLE}"]
    assert HOLE in CliRunner().invoke(main, ["check", str(path)]).stderr
    results = batch(path, "norm", tmp_path / "out", workers=0)
    assert [note for note in results.notes if HOLE in note]


def test_a_copy_keeps_a_hole(tmp_path: Path) -> None:
    """Its parts are one, so a note tells it; also of a copy of a copy, and if the steps around it are chosen."""
    path = tmp_path / "run.zarr"
    for rank in (0, 1):
        write_part(path, range(11 + 3 * rank), rank=rank)
        write_part(path, range(14, 20), rank=rank, attempt=1)
    assert tracer.convert(path, tmp_path / "copy.zarr")["problems"] == [
        f"{path} has nothing of steps 11 to 13 of rank 0: attempt 1 began at step 14"
    ]
    assert tracer.recover(path, tmp_path / "saved.zarr").lossless
    tracer.convert(tmp_path / "copy.zarr", tmp_path / "again.h5", steps=(10, 15))
    tracer.recover(tmp_path / "again.h5", tmp_path / "saved again.zarr")
    for name in ("copy.zarr", "saved.zarr", "again.h5", "saved again.zarr"):
        with TraceReader(tmp_path / name) as copy:
            assert copy.holes == [Hole(0, 1, 11, 13)], name
            assert len(copy.problems) == 1
            assert copy.of_rank(1).holes == []
        assert not verify(tmp_path / name).complete
    for number, steps in enumerate(((0, 14), (11, 20))):
        tracer.convert(path, tmp_path / f"{number}.zarr", steps=steps)
        assert verify(tmp_path / f"{number}.zarr").complete


@pytest.mark.parametrize(
    ("spec", "steps", "told"),
    [
        ("ema:kind=weights", None, True),
        ("ema:kind=weights", "5:14", False),
        ("ema:kind=weights", "5:15", True),
        ("ema:kind=weights", "11:20", False),
        ("norm:kind=weights", None, False),
    ],
)
def test_metrics_that_run_across_a_hole_are_named(resumed: Path, spec: str, steps: str | None, told: bool) -> None:
    """Those with a memory, if messages before the hole and after it are replayed."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        ran = CliRunner().invoke(main, ["replay", str(resumed), "-s", spec, *(["--steps", steps] if steps else [])])
    assert ran.exit_code == 0, ran.stderr
    assert ("the memory of ema goes across steps 11 to 13, of which" in ran.stderr) is told
    assert HOLE in ran.stderr


def test_a_replay_warns(resumed: Path) -> None:
    """In Python, too."""
    with pytest.warns(RuntimeWarning, match="the memory of ema goes across steps 11 to 13"):
        tracer.replay(resumed, analyze.parse("ema:kind=weights"), tracer.Collect())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracer.replay(resumed, tracer.Collect())


def test_where_there_is_no_hole(tmp_path: Path) -> None:
    """Attempts that follow each other, overlap, begin again, or were replaced by a later attempt."""
    for number, attempts in enumerate(
        (
            [range(11), range(11, 20)],
            [range(11), range(8, 20)],
            [range(11), range(20)],
            [range(11), range(14, 16), range(9, 20)],
            [range(14, 20)],
        )
    ):
        path = tmp_path / f"run{number}.zarr"
        for attempt, steps in enumerate(attempts):
            write_part(path, steps, ranks=(0,), attempt=attempt)
        with TraceReader(path) as reader:
            assert reader.holes == [], attempts
        assert verify(path).complete


def test_holes_of_several_attempts_and_ranks(tmp_path: Path) -> None:
    """What a later attempt replaced is no longer there; a hole of one rank is told as that."""
    path = tmp_path / "run.zarr"
    for rank in (0, 1):
        write_part(path, range(21), rank=rank)
        write_part(path, range(5, 8), rank=rank, attempt=1)
        write_part(path, range(14 if rank else 8, 20), rank=rank, attempt=2)
    with TraceReader(path) as reader:
        assert reader.holes == [Hole(1, 2, 8, 13)]
        assert reader.problems == [f"{path} has nothing of steps 8 to 13 of rank 1: attempt 2 began at step 14"]
        assert reader.of_rank(0).holes == []
    write_part(path, range(30, 33), rank=0, attempt=3)
    write_part(path, range(30, 33), rank=1, attempt=3)
    with TraceReader(path) as reader:
        assert reader.holes == [Hole(0, 3, 20, 29), Hole(1, 2, 8, 13), Hole(1, 3, 20, 29)]


def test_an_attempt_that_recorded_nothing(tmp_path: Path) -> None:
    """It was killed before its first commit, and the run went on from a checkpoint."""
    path = tmp_path / "run.zarr"
    write_part(path, range(0), ranks=(0,))
    write_part(path, range(14, 20), ranks=(0,), attempt=1)
    with TraceReader(path) as reader:
        assert reader.holes == [Hole(0, 1, 0, 13)]


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 600), marks=pytest.mark.slow)])
def test_steps_that_a_capture_leaves_out_are_no_hole(tmp_path: Path, seeds: range) -> None:
    """Each of some streams is recorded every n steps: a hole begins with the first multiple of an n that is missing."""
    for seed in seeds:
        chance = np.random.default_rng(seed)
        strides = sorted(chance.choice([1, 2, 3, 5, 10], int(chance.integers(1, 4)), replace=False).tolist())
        last, first = int(chance.integers(20, 60)), int(chance.integers(20, 90))
        path = tmp_path / f"run{seed}.zarr"
        for attempt, steps in enumerate((range(last + 1), range(first, first + 40))):
            header = {"ranks": [0], "attempt": attempt, "first_step": steps.start}
            with TraceWriter(path, header=header, part=part_name(0, attempt)) as writer:
                for step in steps:
                    for stride in strides:
                        if step % stride == 0:
                            at = {"global_step": step, "train_step": step, "epoch": 0}
                            writer.write(NetworkMessage(kind="loss", leaf=f"every{stride}", data=torch.ones(()), **at))
        missing = [step for step in range(last + 1, first) if any(step % stride == 0 for stride in strides)]
        with TraceReader(path) as reader:
            told = [(hole.first, hole.last) for hole in reader.holes]
        assert told == ([(missing[0], first - 1)] if missing else []), (seed, strides, last, first)
