"""Attempts: a run that is resumed writes a part of its own, which supersedes what came after its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tracer
from cli import main
from tests.trace.written_parts import adam, every_format, loss, told, train, write_part
from tracer import Collect, TraceReader, TraceWriter
from tracer.errors import CaptureError, TraceError, TraceExistsError
from tracer.format.journal import Column
from tracer.format.names import part_name
from tracer.trace import claiming
from tracer.trace.claiming import claim, this_process


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


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["one", "two"])
def test_a_header_that_is_lost_supersedes_nothing(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """Where an attempt began is then what other ranks say of it, or its first message: what came before is saved."""
    path, saved = tmp_path / "run.zarr", tmp_path / "saved.zarr"
    for rank in ranks:
        write_part(path, range(10), rank=rank, ranks=ranks)
        write_part(path, range(6, 9), rank=rank, attempt=1, ranks=ranks)
    before = told(path)
    files = (path / "rank0.attempt1").rglob("c/*")
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


def test_one_rank_is_read_as_it_is_among_all(tmp_path: Path) -> None:
    """What a later attempt of any rank trained again is left out of each, though this rank took no part in it."""
    path = tmp_path / "run.zarr"
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
        with tracer.record(path, model, optimizer, **{"capture": tracer.Capture(), **settings}):
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


def test_what_was_evaluated_of_the_checkpoint_still_counts(tmp_path: Path) -> None:
    """Evaluations of the state a run went on from are kept, unless it made them again; later ones are superseded."""
    path = tmp_path / "run.zarr"

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
    copy = tmp_path / "copy.zarr"
    tracer.convert(path, copy)
    assert told(copy) == told(path)
    assert tracer.recover(path, tmp_path / "saved.zarr").lossless


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


def test_resume_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """The optimizer says the step; the result is the trace of a run that was never interrupted, bit for bit."""
    whole, path = tmp_path / "whole.zarr", tmp_path / "run.zarr"
    model, optimizer = adam()
    with tracer.record(whole, model, optimizer, capture=tracer.Capture()) as run:
        train(run, model, optimizer, 5)
        run.epoch_finished()
        train(run, model, optimizer, 5)
    model, optimizer = adam()
    with (
        pytest.raises(KeyboardInterrupt),
        tracer.record(path, model, optimizer, resume=True, capture=tracer.Capture()) as run,
    ):
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
    with tracer.record(path, model, optimizer, resume=True, capture=tracer.Capture()) as run:
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
def test_a_run_that_was_killed_as_it_began_is_resumed(
    tmp_path: Path, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a process left of its part before there was a header in it, another attempt takes place after it."""
    monkeypatch.setattr(claiming, "MADE_SECONDS", 0.1)

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
    with tracer.record(path, model, optimizer, resume=True, capture=tracer.Capture()) as run:
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
        with (
            pytest.raises(TraceError, match="is not a trace"),
            tracer.record(path, model, optimizer, resume=True, capture=tracer.Capture()),
        ):
            pass
        assert sorted(os.listdir(path)) == names


def test_an_empty_folder_may_be_overwritten(tmp_path: Path) -> None:
    """Without being told to, a trace is begun in none: another process may be about to."""
    path = tmp_path / "run.zarr"
    path.mkdir()
    model, optimizer = adam()
    with pytest.raises(TraceExistsError), tracer.record(path, model, optimizer, capture=tracer.Capture()):
        pass
    with tracer.record(path, model, optimizer, overwrite=True, capture=tracer.Capture()) as run:
        train(run, model, optimizer, 1)
    assert tracer.verify(path).intact


@pytest.mark.parametrize(
    ("stop", "every"),
    [(4, 1), (5, 1), (7, 1), (8, 1), (5, 3), *(pytest.param(one, 3, marks=pytest.mark.slow) for one in (4, 7, 8))],
)
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
        with tracer.record(copy, model, optimizer, resume=True, first_step=first_step, capture=tracer.Capture()) as run:
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
    with tracer.record(path, model, optimizer, capture=tracer.Capture()) as run:
        for _ in range(2):
            train(run, model, optimizer, 4)
            run.epoch_finished()
    with pytest.raises(CaptureError, match="first_step="):
        tracer.record(path, model, optimizer, resume=True, capture=tracer.Capture()).__enter__()
    assert [*model.modules()][-1]._forward_hooks == {}
    for first_step, first_epoch, expected in (
        (6, None, (6, 2, 1)),
        (8, None, (8, 0, 2)),
        (9, None, (9, 1, 2)),
        (6, 3, (6, 0, 3)),
    ):
        options = {"first_step": first_step, "first_epoch": first_epoch}
        with tracer.record(path, model, optimizer, resume=True, **{"capture": tracer.Capture(), **options}) as run:
            exporter = run.exporter
            assert (exporter.global_step, exporter.train_step, exporter.epoch) == expected
    for wrong in (-1, 1.5, True):
        with pytest.raises(CaptureError, match="first_step"):
            tracer.record(path, model, optimizer, resume=True, first_step=wrong, capture=tracer.Capture())
    with pytest.raises(CaptureError, match="resume=True"):
        tracer.record(path, model, optimizer, first_step=3, capture=tracer.Capture())


def test_an_optimizer_that_never_stepped_begins_at_zero(tmp_path: Path) -> None:
    """A run that died before its first checkpoint begins anew, and all of it is superseded."""
    path = tmp_path / "run.zarr"
    for _ in range(2):
        model, optimizer = adam()
        with tracer.record(path, model, optimizer, resume=True, capture=tracer.Capture()) as run:
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


def test_a_script_that_restarts_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trace record --resume` finds the step in the optimizer that the script has loaded."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    command = ["record", "--out", "run.zarr", "--resume", "train.py"]
    assert CliRunner().invoke(main, command).exit_code == 7
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 0, ran.output
    with TraceReader("run.zarr") as reader:
        assert [one["first_step"] for one in reader.attempts] == [0, 3]
        assert reader.array("loss")[0].tolist() == [*range(6)]
    # without its state, the optimizer of this script would count from 0; an SGD could not be resumed at all
    sgd = SCRIPT.replace("Adam(model.parameters())", "SGD(model.parameters(), lr=0.1)").replace("checkpoint", "other")
    Path("train.py").write_text(sgd)
    ran = CliRunner().invoke(main, command)
    assert ran.exit_code == 2
    assert "--first-step" in ran.stderr
    assert CliRunner().invoke(main, [*command[:-1], "--first-step", "5", "train.py"]).exit_code == 7
    with TraceReader("run.zarr") as reader:
        assert [one["first_step"] for one in reader.attempts] == [0, 3, 5]
        assert reader.array("loss")[0].tolist() == [*range(10)]


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_trace_as_an_attempt_left_it(tmp_path: Path, rank: int | None) -> None:
    """Each attempt can be read as it was before later ones took the place of its steps, of all ranks or of one."""
    path = tmp_path / "run.zarr"
    for one in (0, 1):
        write_part(path, range(10), rank=one)
        write_part(path, range(6, 9), rank=one, attempt=1)
        write_part(path, range(7, 12), rank=one, attempt=2)
    expected = {
        0: {step: step for step in range(10)},
        1: {**{step: step for step in range(6)}, **{step: 100_000 + step for step in range(6, 9)}},
        2: {**{step: step for step in range(6)}, 6: 100_006, **{step: 200_000 + step for step in range(7, 12)}},
    }
    with TraceReader(path) as whole:
        reader = whole if rank is None else whole.of_rank(rank)
        for attempt, values in expected.items():
            steps, losses = reader.until_attempt(attempt).array("loss", rank=rank or 0)
            assert steps.tolist() == list(values)
            assert list(losses) == [value + 1000 * (rank or 0) for value in values.values()]
            view = reader.until_attempt(attempt)
            assert view.ranks == ([0, 1] if rank is None else [rank])
            assert [one["attempt"] for one in view.attempts] == list(range(attempt + 1))
        with pytest.raises(CaptureError, match="no attempt 3; it has 0, 1, 2"):
            reader.until_attempt(3)
