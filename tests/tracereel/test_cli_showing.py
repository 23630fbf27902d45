"""``trace info``, ``ls`` and ``cat``: what is in a trace."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.tracereel.command_line import STEPS, messages, run, spawn, write
from tracer.format.names import part_name
from tracer.messaging.messages import NetworkMessage
from tracer.trace.writer import TraceWriter


def test_info(each_trace: Path) -> None:
    """``info`` says what the trace is of, how far it got, how much it holds."""
    result = run("info", each_trace)
    assert result.exit_code == 0, result.output
    for fact in ("finished", "train.py --lr 0.1", "0 to 11", "0 to 1", "loss 12", "default, probe", "66 messages"):
        assert fact in result.stdout
    told = json.loads(run("info", each_trace, "--json").stdout)
    assert (told["status"], told["messages"], told["kinds"]["weights"]) == ("finished", 66, 24)
    files = [each_trace] if each_trace.is_file() else [file for file in each_trace.rglob("*") if file.is_file()]
    assert told["stored_bytes"] == sum(file.stat().st_size for file in files)
    assert " of data\n" in result.stdout


def test_info_of_several(tmp_path: Path) -> None:
    """Of a folder, a glob or several traces there is a line each, and a list of JSON; a damaged one is told."""
    traces = [write(tmp_path / "a" / "run.zarr"), write(tmp_path / "b" / "run.h5")]
    folder = run("info", tmp_path)
    assert folder.exit_code == 0, folder.output
    header, *lines = folder.stdout.splitlines()
    assert header.split()[:3] == ["run", "status", "steps"]
    expected = [str(one) for one in traces]
    assert [line.split()[:3] for line in lines] == [["run", "finished", str(STEPS)]] * 2
    assert [line.split()[-1] for line in lines] == expected
    told = json.loads(run("info", tmp_path, "--json").stdout)
    assert [one["path"] for one in told] == expected
    assert [one["messages"] for one in told] == [len(messages())] * 2
    assert told[0]["kinds"] == json.loads(run("info", expected[0], "--json").stdout)["kinds"]
    assert json.loads(run("info", *expected, "--json").stdout) == told
    assert json.loads(run("info", tmp_path / "*" / "run*", "--json").stdout) == told
    (tmp_path / "c.h5").write_bytes(b"not what it seems")
    some = run("info", tmp_path)
    assert some.exit_code == 4
    assert len(some.stdout.splitlines()) == 4
    assert "c.h5 is not an HDF5 file" in some.stderr
    assert [one["status"] for one in json.loads(run("info", tmp_path, "--json").stdout)] == [
        "finished", "finished", "unreadable",
    ]  # fmt: skip
    assert run("info", tmp_path / "nothing").exit_code == 1


def test_info_shows_once_what_all_ranks_noted(tmp_path: Path) -> None:
    """JSON has the notes of each rank."""
    path = tmp_path / "run.zarr"
    for rank in (0, 1):
        with TraceWriter(path, part=part_name(rank, 0)) as writer:
            writer.note({"epochs": "no epoch was seen to end"})
            writer.note({"silent": [f"layer{rank}"]})
    shown = run("info", path).stdout
    assert [shown.count(one) for one in ("no epoch was seen to end", "layer0", "layer1")] == [1, 1, 1]
    assert len(json.loads(run("info", path, "--json").stdout)["notes"]) == 4


def test_info_counts_what_was_dropped(tmp_path: Path) -> None:
    """Messages that the trace lacks are counted for each kind, over all notes."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for count in (3, 1500):
            writer.note({"dropped": {"weights": count, "loss": 1}})
    assert json.loads(run("info", path, "--json").stdout)["dropped"] == {"weights": 1503, "loss": 2}
    lines = [line for line in run("info", path).stdout.splitlines() if line.startswith("dropped")]
    assert len(lines) == 1
    assert "weights 1,503, loss 2" in lines[0]


@pytest.mark.parametrize(
    ("header", "notes", "rows"),
    [
        (
            {"model": "resnet50", "capture": "all", "argv": 5, "where": "a\nb\x1b[2J", "optimizers": 3, "flight": [1]},
            [{"problem": "slow"}, {"silent": 3}, {"stopped": {"by": "me"}}, {"schedule": {"global_step": 3}}],
            [
                *("model       resnet50", "capture     all", "command     5", "where       a\\nb\\x1b[2J"),
                *("optimizer   3", "flight      1", "problem     slow", "silent      3", "stopped     by me"),
                "schedule    global_step 3",
            ],
        ),
        ({"model": {"modules": 3}, "models": [{"name": 1}]}, [], ["model       modules 3", "models      (1)"]),
    ],
)
def test_info_of_what_another_writer_says(
    header: dict[str, object], notes: list[dict[str, object]], rows: list[str], tmp_path: Path
) -> None:
    """The header and the notes are up to the writer: whatever stands there is shown on a line."""
    with TraceWriter(tmp_path / "run.zarr", header=header) as writer:
        for note in notes:
            writer.note(note)
    told = run("info", tmp_path / "run.zarr")
    assert told.exit_code == 0
    assert set(rows) <= set(told.output.splitlines())


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    """A run that was killed reads as interrupted; ``info`` and ``replay`` say it, and it is no error."""
    path = tmp_path / "killed.zarr"
    code = (
        "import os, signal, torch\n"
        "from tracer.messaging.messages import NetworkMessage\n"
        "from tracer.trace.writer import TraceWriter\n"
        "writer = TraceWriter(sys.argv[1])\n"
        "for step in range(5):\n"
        "    where = dict(global_step=step, train_step=step, epoch=0)\n"
        "    writer.write(NetworkMessage(kind='loss', data=torch.tensor(2.0), **where))\n"
        "writer.commit()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = processes.run(spawn(path, code=code), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    told = run("info", path)
    assert (told.exit_code, "interrupted" in told.stdout) == (0, True)
    result = run("replay", path, "-s", "loss", "--json")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 5)
    assert "interrupted" in result.stderr


def test_ls(trace: Path) -> None:
    """``ls`` has a row for each stream, and with filters only theirs."""
    rows = json.loads(run("ls", trace, "--json").stdout)
    assert len(rows) == 7
    weights = next(row for row in rows if (row["kind"], row["module"]) == ("weights", "fc.0"))
    assert (weights["count"], weights["shapes"], weights["steps"], weights["bytes"]) == (12, [[4, 3]], [0, 11], 576)
    text = run("ls", trace, "-m", "fc.*", "--tag", "probe").stdout
    assert len(text.splitlines()) == 2
    assert "20×3" in text


def test_cat(each_trace: Path) -> None:
    """``cat`` gives the chosen messages in their order, with their numbers."""
    result = run(
        "cat", each_trace, "-k", "loss", "-k", "weights", "-m", "conv1", "--steps", "2:8:3", "--json", "--values", "2"
    )
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(one["kind"], one["module"], one["global_step"]) for one in told] == [
        ("weights", "conv1", 2),
        ("weights", "conv1", 5),
    ]
    expected = [m for m in messages() if m.kind == "weights" and m.key == "conv1" and m.global_step in (2, 5)]
    for one, message in zip(told, expected, strict=True):
        assert message.data is not None
        assert one["values"] == message.data.flatten()[:2].tolist()
        assert one["mean"] == pytest.approx(float(message.data.double().mean()), abs=0)
    text = run("cat", each_trace, "-k", "loss", "--steps", "1").stdout
    assert text == "step 1  loss  float32  scalar  0.5\n"


def test_cat_of_a_diverged_loss_and_of_large_integers(tmp_path: Path) -> None:
    """A scalar that is no number is shown as one; an integer as it is, beyond what float64 can hold."""
    at = {"global_step": 0, "train_step": 0, "epoch": 0}
    with TraceWriter(tmp_path / "run.zarr") as writer:
        writer.write(NetworkMessage(kind="loss", data=torch.tensor(float("nan")), **at))
        writer.write(NetworkMessage(kind="count", data=torch.tensor([2**53 + 1, 3]), **at))
    assert "scalar  nan\n" in run("cat", tmp_path / "run.zarr").output
    count = json.loads(run("cat", tmp_path / "run.zarr", "--json").output.splitlines()[1])
    assert (count["min"], count["max"]) == (3, 2**53 + 1)


def test_steps(trace: Path) -> None:
    """A range of steps is start inclusive, stop exclusive, stride; each end may be left open."""
    ranges = {"3": [3], "3:5": [3, 4], ":2": [0, 1], "10:": [10, 11], "1:9:4": [1, 5], "::5": [0, 5, 10]}
    for steps, expected in ranges.items():
        lines = run("cat", trace, "-k", "loss", "--steps", steps, "--json").stdout.splitlines()
        assert [json.loads(line)["global_step"] for line in lines] == expected
