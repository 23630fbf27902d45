"""Who may write a part of a trace, which files belong to it, and what is committed while a part is read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from torch import nn

import tracer
from cli import main
from tests import processes
from tests.trace.written_parts import adam, in_rank, told, train, weights, write_part
from tracer import TraceReader, TraceWriter
from tracer.errors import CaptureError, TraceError, TraceExistsError
from tracer.stores.opening import create_store, open_store, remove_part
from tracer.trace.claiming import Process, claim

# -- whose a part is ------------------------------------------------------------------------------------------


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
    with (
        pytest.raises(TraceExistsError, match="part of"),
        tracer.record(tmp_path / "run.rank7.h5", model, optimizer, capture=tracer.Capture()),
    ):
        pass
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.h5", "run.rank1.h5"]
    assert (tmp_path / "run.rank1.h5").read_bytes() == before


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
                tracer.record(path, model, optimizer, **{"capture": tracer.Capture(), **options}).__enter__()
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
    with pytest.raises(TraceExistsError):
        create_store(path)
    first.create("a", dtype="int64", shape=(), chunk_bytes=1 << 16)
    first.append("a", np.arange(3))
    first.commit()
    with pytest.raises(TraceExistsError):
        create_store(path)
    first.close()
    assert [one.name for one in tmp_path.iterdir()] == ["run.h5"]
    with contextlib.closing(open_store(path)) as store:
        assert store.read("a", 0, 3).tolist() == [0, 1, 2]
    for left in (".run.h5.0123abcd.part", ".run.h5.0123abcd.copy", ".run.h5.part"):
        (tmp_path / left).write_bytes(b"left by one that was killed")
    create_store(tmp_path / "other.h5").close()
    assert (tmp_path / ".run.h5.0123abcd.part").exists()
    create_store(path, overwrite=True).close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other.h5", "run.h5"]


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_temporary_files_are_new_files_of_random_names(tmp_path: Path, suffix: str) -> None:
    """What is renamed to its name was made under another name each time, and no file of that name was opened."""
    code = (
        "import os, sys; from tests.trace.written_parts import write_part\n"
        "from pathlib import Path\n"
        "def told(event, given):\n"
        "    if event == 'open' and given[2] & os.O_CREAT and not given[2] & os.O_EXCL: print('opened', given[0])\n"
        "    if event == 'os.rename': print('renamed', given[0])\n"
        "sys.addaudithook(told)\n"
        "write_part(Path(sys.argv[1]), range(3))"
    )
    renamed: list[set[str]] = []
    for number in range(2):
        path = tmp_path / str(number) / f"run{suffix}"
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, env=environment, check=True
        )
        lines = [line.split(" ", 1) for line in ran.stdout.splitlines() if str(tmp_path) in line]
        renamed.append({os.path.relpath(name, path.parent) for what, name in lines if what == "renamed"})
        opened = {name for what, name in lines if what == "opened"}
        # an HDF5 file is written into the new file of that name
        assert all(".part" in name or "/c/" in name for name in opened), opened
    assert renamed[0]
    assert renamed[0] & renamed[1] == ({"run.h5.zarr/rank0"} if suffix == ".h5" else set())


def test_a_trace_is_one_by_whatever_way_it_is_named(tmp_path: Path) -> None:
    """Neither another spelling nor a link lets this process record it twice; and a link has all its parts."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "links").mkdir()
    path = tmp_path / "runs" / "run.zarr"
    (tmp_path / "folder").symlink_to(tmp_path / "runs")
    (tmp_path / "links" / "latest.zarr").symlink_to(path)
    model, optimizer = adam()
    with tracer.record(path, model, optimizer, capture=tracer.Capture()) as run:
        train(run, model, optimizer, 3)
        for other in (tmp_path / "runs" / ".." / "runs" / path.name, tmp_path / "folder" / path.name):
            for options in ({"overwrite": True}, {"resume": True, "first_step": 1}):
                with pytest.raises(TraceExistsError):
                    tracer.record(other, *adam(), **{"capture": tracer.Capture(), **options}).__enter__()  # type: ignore[arg-type] # of several types
        train(run, model, optimizer, 3)
    with tracer.record(path, *adam(), resume=True, first_step=4, capture=tracer.Capture()) as run:
        train(run, run.exporter.model, run.exporter.parts.optimizers.all[0], 4)
    with TraceReader(path) as trace, TraceReader(tmp_path / "links" / "latest.zarr") as linked:
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
    with tracer.record(path, model, optimizer, capture=tracer.Capture()) as run:
        train(run, model, optimizer, 3)
        run.recorder.writer.commit()  # type: ignore[union-attr] # it records
        for options in ({"resume": True, "first_step": 1}, {"overwrite": True}, {}):
            with pytest.raises(TraceExistsError):
                tracer.record(path, *adam(), **{"capture": tracer.Capture(), **options}).__enter__()  # type: ignore[arg-type] # of several types
        train(run, model, optimizer, 3)
    with TraceReader(path) as reader:
        assert reader.array("weights", "0")[0].tolist() == [*range(6)]
    with pytest.raises(CaptureError, match="one of them"):
        tracer.record(path, model, optimizer, resume=True, overwrite=True, capture=tracer.Capture())


def test_a_rank_that_is_done_early_keeps_no_other_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that do not wait for each other write one trace; of a launch of long ago they are another run."""
    path = tmp_path / "run.zarr"
    for rank in (0, 1):
        in_rank(monkeypatch, rank)
        model, optimizer = adam()
        with tracer.record(path, model, optimizer, capture=tracer.Capture()) as run:
            train(run, model, optimizer, 2)
    assert TraceReader(path).ranks == [0, 1]
    monkeypatch.setattr("tracer.trace.claiming.FRESH_SECONDS", -1.0)
    in_rank(monkeypatch, 2, size=3)
    with pytest.raises(TraceExistsError):
        tracer.record(path, *adam(), capture=tracer.Capture()).__enter__()


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


def test_a_part_of_another_run_is_not_recovered(tmp_path: Path) -> None:
    """What a reader leaves out is left out of a recovered trace, too, which lacks nothing; `verify` tells of it."""
    path, other, saved = (tmp_path / f"{name}.zarr" for name in ("run", "other", "saved"))
    write_part(path, range(3), ranks=(0,), run_id="mine")
    write_part(other, range(5), ranks=(0,), run_id="theirs")
    shutil.copytree(other / "rank0", path / "rank1")
    mine = told(path)
    assert len(mine) == 6
    with pytest.raises(CaptureError, match="has no messages of rank 1; it has 0"):
        TraceReader(path, ranks=[1])
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


def test_a_link_is_not_overwritten(tmp_path: Path) -> None:
    """It is refused before a training begins, by the command and by the API; what it leads to stays."""
    real, link = tmp_path / "real.zarr", tmp_path / "link.zarr"
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
        tracer.record(
            link, model, torch.optim.SGD(model.parameters(), lr=0.1), overwrite=True, capture=tracer.Capture()
        ).__enter__()
    assert told(real) == before


# -- what is committed while a part is read -------------------------------------------------------------------
