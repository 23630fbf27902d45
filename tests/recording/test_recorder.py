"""`record`: what is refused before a file is there, what stands in the trace, what is kept alive."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tracer
from tests.recording.recorder_runs import FORMATS, training
from tracer import Capture, CaptureError, Collect, TraceExistsError
from tracer.messaging.messages import Message


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_durable_recording_waits_for_the_disk(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With durable=True every file of the trace reaches the disk before the commit that refers to it returns."""
    synced, fsync = set(), os.fsync

    def noting(file: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noting)
    path = tmp_path / f"run.{suffix}"
    model, optimizer, steps = training()
    with tracer.record(path, model, optimizer, durable=True, commit_steps=1, capture=tracer.Capture()):
        steps(2)
    if suffix == "zarr":  # an HDF5 trace is one until it is closed, which its file replaces
        shards = {str(file) for file in path.rglob("*") if file.is_file() and file.name != "zarr.json"}
        folders = {str(folder) for folder in path.rglob("*") if folder.is_dir()}
        assert shards | folders <= synced
    else:
        assert str(tmp_path) in synced
        assert any(name.endswith(".part") for name in synced)
        assert any("/run.h5.zarr/rank0/journal/c/" in name for name in synced)
    synced.clear()
    with tracer.record(tmp_path / f"other.{suffix}", model, optimizer, capture=tracer.Capture()):
        steps(2)
        assert not synced
    # an HDF5 file is on the disk before the Zarr trace that it is made of goes
    assert not synced or suffix == "h5"


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("what", ["trace", "something else"])
def test_nothing_is_overwritten_unasked(suffix: str, what: str, tmp_path: Path) -> None:
    """Something at the path is an error that leaves it and the model alone; `overwrite` replaces traces only."""
    path = tmp_path / f"run.{suffix}"
    model, optimizer, steps = training()
    if what == "trace":
        with tracer.record(path, model, optimizer, capture=tracer.Capture()):
            steps(2)
    elif suffix == "zarr":
        path.mkdir()
        (path / "precious").write_text("data")
    else:
        path.write_text("precious data")
    files = {one: one.read_bytes() for one in sorted(tmp_path.rglob("*")) if one.is_file()}
    with pytest.raises(TraceExistsError):
        tracer.record(path, model, optimizer, capture=tracer.Capture()).__enter__()
    assert not model._forward_pre_hooks
    assert {one: one.read_bytes() for one in sorted(tmp_path.rglob("*")) if one.is_file()} == files
    if what == "trace":
        with tracer.record(path, model, optimizer, overwrite=True, capture=tracer.Capture()):
            steps(1)
        assert tracer.open(path).array("weights", "0")[0].tolist() == [0]
    else:
        with pytest.raises(TraceExistsError):
            tracer.record(path, model, optimizer, overwrite=True, capture=tracer.Capture()).__enter__()
        assert {one: one.read_bytes() for one in sorted(tmp_path.rglob("*")) if one.is_file()} == files


class Answers(tracer.Subscriber):
    """Answers a kind, and needs another."""

    def __init__(self, needs: str, produces: str) -> None:
        super().__init__(tracer.Subscription(needs), produces=produces)

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        message = message_or_bundle
        yield tracer.derived(message, self.produces[0], message.data)


@pytest.mark.parametrize(
    ("receivers", "capture", "error", "match"),
    [
        ([tracer.CallbackSubscriber("weights", print)], Capture(kinds=["loss"]), CaptureError, "needs weights"),
        ([tracer.CallbackSubscriber(["weights", "loss"], print, modules="9")], Capture(), CaptureError, "modules 9"),
        ([Answers("unknown", "a")], Capture(), CaptureError, "needs unknown"),
        ([Answers("b", "a"), Answers("a", "b")], Capture(), CaptureError, "in a circle"),
        ([Answers("weights", "a"), Answers("biases", "a")], Capture(), tracer.MessageError, "both"),
        ([Answers("weights", "loss")], Capture(), tracer.MessageError, "loss"),
    ],
)
def test_what_cannot_work_is_refused_before_a_file_is_there(
    receivers: Any, capture: Capture, error: type[Exception], match: str, tmp_path: Path
) -> None:
    """Receivers that cannot get what they need, or cannot live together, are an error at once: no file, no hook."""
    model, optimizer, _ = training()
    with pytest.raises(error, match=match):
        tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture, receivers=receivers).__enter__()
    assert not list(tmp_path.iterdir())
    assert not model._forward_pre_hooks
    assert not model[0]._forward_hooks


def test_receivers_come_in_any_order(tmp_path: Path) -> None:
    """A consumer may be given before its producer."""
    model, optimizer, steps = training()
    heard = Collect("c")
    receivers = [Answers("b", "c"), heard, Answers("a", "b"), Answers("weights", "a")]
    with tracer.record(
        tmp_path / "run.zarr", model, optimizer, receivers=receivers, strict=True, capture=tracer.Capture()
    ):
        steps(2)
    assert [(one.global_step, one.key) for one in heard] == [(0, "0"), (0, "2"), (1, "0"), (1, "2")]


def test_the_header_says_what_is_known(tmp_path: Path) -> None:
    """Versions, program, seeds, captures and the model's structure stand in the trace, before its first message."""
    torch.manual_seed(123)
    model, optimizer, steps = training()
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=Capture(every=2, rows=3)):
        steps(1)
    with tracer.open(tmp_path / "run.zarr") as trace:
        header = json.loads(json.dumps(trace.header, allow_nan=False))
    assert header["versions"]["torch"] == torch.__version__
    assert header["seeds"] == {"torch": 123}
    assert header["argv"] == sys.argv
    assert (header["capture"][0]["every"], header["capture"][0]["rows"]) == (2, 3)
    assert [one["name"] for one in header["model"]["modules"]] == ["", "0", "1", "2"]
    assert header["model"]["parameters"][0] == {
        "name": "0.weight", "shape": [4, 3], "dtype": "float32", "requires_grad": True,
    }  # fmt: skip


def test_what_the_user_says_is_recorded(tmp_path: Path) -> None:
    """The methods of the run reach the trace: log, tag, probe, step and epoch_finished."""
    model, _, _ = training()
    with tracer.record(tmp_path / "run.zarr", model, (), strict=True, capture=tracer.Capture()) as run:
        run.probe("probe", torch.zeros(2, 3), every=2)
        for step in range(4):
            model(torch.randn(5, 3)).sum().backward()
            run.log("rate", 0.1 * step)
            run.step()
        with run.tag("test"):
            model(torch.zeros(1, 3))
        run.epoch_finished()
        assert run.path == tmp_path / "run.zarr"
    with tracer.open(run.path) as trace:
        assert trace.array("rate")[0].tolist() == [0, 1, 2, 3]
        assert trace.array("rate")[1].tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3])
        assert trace.array("activations", "0", tag="probe")[0].tolist() == [0, 2, 4]
        assert trace.array("activations", "0", tag="test")[0].tolist() == [4]
        assert [one.kind for one in trace if one.kind.startswith("epoch")] == ["epoch_started", "epoch_finished"]
        assert trace.status == "finished"


def test_nothing_trained_is_a_trace_too(tmp_path: Path) -> None:
    """A run without a step gives a trace without messages."""
    model, optimizer, _ = training()
    with tracer.record(tmp_path / "run.h5", model, optimizer, capture=tracer.Capture()):
        pass
    with tracer.open(tmp_path / "run.h5") as trace:
        assert (len(trace), trace.status) == (0, "finished")


@pytest.mark.parametrize(
    "options",
    [
        *({"on_full": "x"}, {"queue_bytes": 1.5}, {"queue_bytes": True}, {"queue_bytes": 0}),
        *({"commit_steps": 1.5}, {"commit_steps": 0}, {"commit_seconds": "2"}, {"commit_seconds": math.nan}),
        *({"ranks": []}, {"ranks": [5]}, {"ranks": [-1]}),
    ],
)
def test_wrong_options_leave_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    """An option that is none is said before anything is made, so that the corrected call works."""
    model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match=next(iter(options))):
        tracer.record(tmp_path / "run.h5", model, None, **{"capture": tracer.Capture(), **options}).__enter__()
    assert not any(tmp_path.iterdir())
    assert not model._forward_hooks


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_a_recording_that_has_ended_keeps_nothing_alive(tmp_path: Path, suffix: str) -> None:
    """Model and optimizer go with their last reference, without a collection of garbage, as they would unrecorded."""
    path = tmp_path / f"run{suffix}"
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        with tracer.record(path, model, optimizer, capture=tracer.Capture()):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
        there = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        assert [one() for one in there] == [None, None]
    finally:
        gc.enable()
