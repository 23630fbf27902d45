"""Copies from a device that nobody waits for, on devices that are made up: what a copy may do, one of these does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tracer
from tracer.messages import ModuleMessage
from tracer.recorder import Recorder
from tracer.transfers import Transfers


class OnDevice(Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True
    is_cpu = False

    def record_stream(self, stream: Any) -> None:
        stream.log.append("keep the source")


class Elsewhere(Tensor):
    """A tensor on a device of another sort."""

    is_cpu = False


class Event:
    """Of a stream that does its work only when somebody waits for it, or when `run` is called."""

    def __init__(self, stream: Stream, work: list[Any]) -> None:
        self.stream, self.work = stream, work

    def query(self) -> bool:
        return not self.work

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread() or self.stream.may_wait
        self.stream.log.append("wait")
        self.run()


class Stream:
    """A stream that writes down what it is asked for."""

    may_wait = False  # whether the thread of the training may

    def __init__(self, device: Any = None) -> None:
        self.log: list[str] = []
        self.work: list[Any] = []
        self.events: list[Event] = []
        made.append(self)

    def wait_stream(self, other: Any) -> None:
        assert other == "the training's"
        self.log.append("wait for the training's stream")

    def record_event(self) -> Event:
        work, self.work = self.work, []
        self.events.append(Event(self, work))
        return self.events[-1]

    def __enter__(self) -> None:
        running.append(self)

    def __exit__(self, *_: Any) -> None:
        running.remove(self)


class Pinned(Tensor):
    """Memory into which copies are made late."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        (stream,) = running
        stream.log.append("copy")
        plain = self.as_subclass(Tensor)
        stream.work.append(lambda: Tensor.copy_(plain.data, source.as_subclass(Tensor)))
        return self


made: list[Stream] = []
running: list[Stream] = []


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device that is none."""
    made.clear()
    empty = torch.empty

    def pinned(*shape: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        made_here = empty(*shape, **settings)
        return made_here.fill_(-1).as_subclass(Pinned) if pin_memory else made_here

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the training's")


def message(data: Tensor, step: int = 0) -> ModuleMessage:
    """An activation of a step."""
    return ModuleMessage(kind="activations", module="fc", global_step=step, train_step=step, epoch=0, data=data)


def test_a_copy_is_begun_beside_the_training_and_waited_for_elsewhere() -> None:
    """The stream beside waits for the training's, keeps the source's memory, and the host waits only when told to."""
    transfers = Transfers()
    source = torch.arange(3.0).as_subclass(OnDevice)
    host = transfers.start(source)
    (stream,) = made
    assert stream.log == ["wait for the training's stream", "copy", "keep the source"]
    assert host.tolist() == [-1, -1, -1]  # not there yet
    stream.may_wait = True
    assert transfers.wait(host)
    assert host.tolist() == [0, 1, 2]
    assert transfers.wait(host)  # once is enough
    assert stream.log.count("wait") == 1


def test_a_source_is_let_go_as_soon_as_it_is_copied() -> None:
    """Memory on the device is given back when the copy is made, though nobody waited for it; one stream serves all."""
    transfers = Transfers()
    transfers.start(torch.ones(2).as_subclass(OnDevice))
    (copy,) = transfers._unsettled
    transfers.start(torch.ones(2).as_subclass(OnDevice))
    assert copy._source is not None
    (stream,) = made
    stream.events[0].run()
    transfers.start(torch.ones(2).as_subclass(OnDevice))
    assert copy._source is None
    assert len(transfers._unsettled) == 2


def test_a_source_that_is_changed_before_it_is_copied_is_told() -> None:
    """A change before the copy spoils it, a change after it does not."""
    transfers = Transfers()
    source = torch.ones(2).as_subclass(OnDevice)
    spoilt = transfers.start(source)
    made[0].may_wait = True
    source.add_(1)
    assert not transfers.wait(spoilt)
    good = transfers.start(source)
    made[0].events[-1].run()
    transfers.start(torch.ones(2).as_subclass(OnDevice))  # which sees that the last one is made
    source.add_(1)
    assert transfers.wait(good)
    assert good.tolist() == [2, 2]


def test_memory_that_cannot_be_pinned_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then, and on devices of other sorts, the copy is made at once."""

    def refused(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(torch, "empty", refused)
    transfers = Transfers()
    for sort in (OnDevice, Elsewhere):
        host = transfers.start(torch.arange(2.0).as_subclass(sort))
        assert transfers.wait(host)
        assert host.tolist() == [0, 1]
    assert not made


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_a_recorder_writes_what_was_on_the_device(suffix: str, tmp_path: Path) -> None:
    """The thread that writes waits for each copy, the one that trains for none."""
    path = tmp_path / f"run.{suffix}"
    recorder = Recorder(tracer.TraceWriter(path))
    tensors = [torch.full((1000,), float(step)).as_subclass(OnDevice) for step in range(20)]
    assert not tensors[0].is_cpu
    for step, data in enumerate(tensors):
        recorder.receive(message(data, step))
    recorder.close()
    with tracer.open(path) as trace:
        assert [(one.global_step, one.data.unique().tolist()) for one in trace.messages() if one.data is not None] == [
            (step, [float(step)]) for step in range(20)
        ]
    (stream,) = made
    assert stream.log.count("wait") == 20


def test_a_message_that_a_receiver_spoilt_is_not_recorded(tmp_path: Path) -> None:
    """On a device, too: better lost than wrong, and told."""
    writing, spoilt = threading.Event(), threading.Event()

    class Late(tracer.TraceWriter):
        def write_many(self, batch: Any) -> None:
            writing.set()
            assert spoilt.wait(10)
            super().write_many(batch)

    recorder = Recorder(Late(tmp_path / "run.zarr"))
    first, second = (torch.full((3,), float(step)).as_subclass(OnDevice) for step in range(2))
    recorder.receive(message(torch.zeros(3), 0))
    assert writing.wait(10)
    recorder.receive(message(first, 1))
    recorder.receive(message(second, 2))
    first.add_(1)
    spoilt.set()
    recorder.close()
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert [one.global_step for one in trace.messages()] == [0, 2]
        (note,) = [one["problem"] for one in trace.notes if "problem" in one]
        assert "changed the data before it was written" in note["why"]
