"""Copies from a device that nobody waits for, on a device that is made up: it does its work as late as one may."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tracer
from tracer.messaging.messages import ModuleMessage
from tracer.recording import transfers as module
from tracer.recording.recorder import Recorder
from tracer.recording.transfers import Transfers


class OnDevice(Tensor):
    """A tensor that says it is on a CUDA device."""

    is_cuda = True
    is_cpu = False

    number = 0

    def get_device(self) -> int:
        return self.number

    def reshape(self, *shape: Any) -> Tensor:
        if self.is_contiguous():
            return super().reshape(*shape)
        plain = self.as_subclass(Tensor)
        return late(plain.reshape(*shape), device.running[-1], lambda: plain.reshape(*shape))

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        device.log.append("copy and wait")
        device.current(device.streams[0]).run()
        return self.as_subclass(Tensor).clone()


class Elsewhere(Tensor):
    """A tensor on a device of another sort."""

    is_cpu = False


class Pinned(Tensor):
    """Memory into which copies are made late."""

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        assert source.is_cuda
        device.log.append("copy")
        stream = device.running[-1]
        stream.enqueue(lambda: Tensor.copy_(self.as_subclass(Tensor).data, source.as_subclass(Tensor)))
        return self


class Stream:
    """A stream that does nothing of its work before somebody waits for it."""

    training = False  # or of the recorder

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.work: list[Callable[[], Any]] = []
        self.done = 0
        self.lock = threading.RLock()
        device.streams.append(self)

    def enqueue(self, work: Callable[[], Any]) -> None:
        self.work.append(work)

    def run(self, until: int | None = None) -> None:
        with self.lock:
            while self.done < (len(self.work) if until is None else until):
                self.work[self.done]()
                self.done += 1

    def wait_event(self, event: Event) -> None:
        stream, position = event.at  # as it was recorded last
        self.enqueue(lambda: stream.run(position))

    def __enter__(self) -> None:
        # else the thread would go back to another device afterwards, and use memory there
        assert self.training or device.entered()[-1] == self.number
        device.running.append(self)

    def __exit__(self, *_: Any) -> None:
        device.running.remove(self)


class Event:
    """A place in a stream."""

    def __init__(self, *, blocking: bool = False) -> None:
        device.events += 1
        self.number: int | None = None
        self.at: tuple[Stream, int]

    def record(self, stream: Stream) -> None:
        assert self.number in (None, stream.number), "the event is of another device"
        self.number = stream.number
        self.at = stream, len(stream.work)

    def query(self) -> bool:
        stream, position = self.at
        return stream.done >= position

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread() or device.main_may_wait
        device.log.append("wait")
        stream, position = self.at
        stream.run(position)


class On:
    """What makes a device the current one of a thread."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        device.entered().append(self.number)

    def __exit__(self, *_: Any) -> None:
        device.entered().pop()


class Device:
    """All of it."""

    def entered(self) -> list[int]:
        """The devices that this thread has made its own, the current one last."""
        if not hasattr(self.threads, "entered"):
            self.threads.entered = [0]
        entered: list[int] = self.threads.entered
        return entered

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.threads = threading.local()
        self.log: list[str] = []
        self.events = 0
        self.main_may_wait = False  # whether the thread of the training may

    def current(self, otherwise: Stream) -> Stream:
        """The stream on which this thread works."""
        return self.running[-1] if self.running else otherwise

    @property
    def running(self) -> list[Stream]:
        """The streams that this thread has made its own, the current one last."""
        if not hasattr(self.threads, "running"):
            self.threads.running = []
        running: list[Stream] = self.threads.running
        return running


device = Device()


@pytest.fixture(autouse=True)
def training(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """A CUDA device that is none; the stream of the training on it."""
    device.__init__()  # type: ignore[misc]
    stream = Stream()
    stream.training = True
    empty, cat, stack = torch.empty, torch.cat, torch.stack

    def pinned(*shape: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        made_here = empty(*shape, **settings)
        return made_here.zero_().as_subclass(Pinned) if pin_memory else made_here

    def together(tensors: list[Tensor]) -> Tensor:
        if not tensors[0].is_cuda:
            return cat(tensors)
        result = empty(sum(one.numel() for one in tensors), dtype=tensors[0].dtype)
        plain = [one.as_subclass(Tensor) for one in tensors]
        device.running[-1].enqueue(lambda: result.copy_(cat(plain)))
        return result.as_subclass(OnDevice)

    monkeypatch.setattr(torch, "empty", pinned)

    def stacked(tensors: list[Tensor]) -> Tensor:
        if not tensors[0].is_cuda:
            return stack(tensors)
        result = empty((len(tensors), *tensors[0].shape), dtype=tensors[0].dtype)
        plain = [one.as_subclass(Tensor) for one in tensors]
        device.running[-1].enqueue(lambda: result.copy_(stack(plain)))
        return result.as_subclass(OnDevice)

    monkeypatch.setattr(torch, "cat", together)
    monkeypatch.setattr(torch, "stack", stacked)
    # what tells a stream from others, and the stream itself
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda _: id(device.current(stream)), raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: device.current(stream))
    return stream


def late(values: Tensor, stream: Stream, compute: Callable[[], Tensor] | None = None) -> OnDevice:
    """A tensor on the device that has these values, or what is computed then, when the stream has done its work."""
    there = torch.zeros_like(values)
    stream.enqueue(lambda: Tensor.copy_(there.data, values if compute is None else compute()))
    found = there.as_subclass(OnDevice)
    found.number = stream.number
    return found


def bits(data: Tensor | None) -> bytes:
    """Of a tensor, to compare those with NaN too."""
    assert data is not None
    plain = data.as_subclass(Tensor).contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def test_a_copy_is_asked_for_here_and_waited_for_elsewhere(training: Stream) -> None:
    """To ask begins nothing; who wants the data begins the copy, behind the training's work, and waits for that."""
    transfers = Transfers()
    copy = transfers.start(late(torch.arange(1.0, 4.0), training))
    assert device.log == []
    assert device.streams == [training]
    device.main_may_wait = True
    host = transfers.wait(copy)
    assert device.log == ["copy", "wait"]
    assert host is not None
    assert host.tolist() == [1, 2, 3]


def test_small_tensors_are_copied_together(training: Stream) -> None:
    """One copy for each dtype, and for each shape of which there are many; large and rare tensors are copied alone.

    Each arrives in its shape, to the bit.
    """
    generator = torch.Generator().manual_seed(0)
    small = [torch.randn(number % 5, 3, generator=generator) for number in range(100)]
    small += [torch.tensor(float("nan")), torch.randn(4, 6, generator=generator).mT]
    small += [torch.arange(7), torch.tensor([True, False]), torch.tensor(3)]
    alone = [torch.randn(80_000, generator=generator), torch.randn(3, dtype=torch.complex64)]
    alone += [torch.randn(4).to(torch.float8_e4m3fn)]
    values = small + alone
    transfers = Transfers()
    copies = [transfers.start(late(one, training)) for one in values]
    device.main_may_wait = True
    for copy, expected in zip(reversed(copies), reversed(values), strict=True):
        host = transfers.wait(copy)
        assert host is not None
        assert (host.shape, host.dtype) == (expected.shape, expected.dtype)
        assert bits(host) == bits(expected)
    assert device.log == ["copy"] * 11 + ["wait"]  # five shapes; else float32, int64, bool, and three alone


def test_the_rows_of_many_steps_are_copied_at_once(training: Stream) -> None:
    """All that the device has made since the writer was last awake: a copy of statistics, and one of hashes."""
    rows = [torch.full((600, 16), step, dtype=torch.float64) for step in range(50)]
    hashes = [torch.full((600,), step) for step in range(50)]
    transfers = Transfers()
    copies = [transfers.start(late(one, training)) for both in zip(rows, hashes, strict=True) for one in both]
    device.main_may_wait = True
    for copy, both in zip(copies[::2], rows, strict=True):
        assert bits(transfers.wait(copy)) == bits(both)
    assert device.log == ["copy"] * 2 + ["wait"]


def test_streams_are_all_waited_for(training: Stream) -> None:
    """Of work on several streams of the training, each is done before its tensors are copied."""
    other = Stream()
    other.training = True
    transfers = Transfers()
    copies = []
    for number in range(20):
        stream = other if number % 3 else training
        with stream:
            copies.append(transfers.start(late(torch.full((2,), float(number)), stream)))
    device.main_may_wait = True
    found = [transfers.wait(one) for one in copies]
    assert [None if one is None else one.tolist() for one in found] == [[number, number] for number in range(20)]


def test_devices_are_kept_apart(training: Stream) -> None:
    """Of a model on two devices, the copies of each wait for that one, with events of its own."""
    second = Stream(1)
    second.training = True
    transfers = Transfers()
    device.main_may_wait = True
    for start in (0, 10):
        copies = []
        for number in range(start, start + 10):
            stream = second if number % 3 else training
            with stream:
                copies.append(transfers.start(late(torch.full((2,), float(number)), stream)))
        found = [transfers.wait(one) for one in copies]
        assert [None if one is None else one.tolist() for one in found] == [[n, n] for n in range(start, start + 10)]
    assert [one.number for one in device.streams] == [0, 1, 0, 1]


def test_events_are_used_again(training: Stream) -> None:
    """However many tensors are recorded, there are only as many events as copies are asked for at once."""
    transfers = Transfers()
    device.main_may_wait = True
    for number in range(100):
        first, second = (transfers.start(late(torch.tensor(number + one), training)) for one in (0, 1000))
        assert [int(host) for host in (transfers.wait(first), transfers.wait(second)) if host is not None] == [
            number,
            number + 1000,
        ]
    assert device.events == 100 + 2


def test_a_source_is_let_go_as_soon_as_it_is_copied(training: Stream) -> None:
    """Memory on the device is given back when the copy is made, though nobody waited for it; one stream serves all."""
    transfers = Transfers()
    source = late(torch.ones(2), training)
    alive = weakref.ref(source)
    kept = transfers.start(source)
    del source
    transfers._begin()
    transfers.start(late(torch.ones(2), training))
    gc.collect()
    assert alive() is not None
    device.streams[1].run()
    training.work.clear()  # which holds the tensor here, as no real stream does
    training.done = 0
    transfers.start(late(torch.ones(2), training))
    device.streams[1].work.clear()
    gc.collect()
    assert alive() is None
    host = transfers.wait(kept)
    assert host is not None
    assert host.tolist() == [1, 1]
    assert len(device.streams) == 2


def test_too_much_does_not_wait_on_the_device(training: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a lot while nobody fetches it begins the copies, and waits for none of them."""
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    transfers = Transfers()
    copies = [transfers.start(late(torch.full((10,), float(number)), training)) for number in range(9)]
    assert device.log == ["copy"] * 3
    assert transfers._asked - transfers._begun == 0
    device.main_may_wait = True
    assert [float(host[0]) for host in map(transfers.wait, copies) if host is not None] == list(range(9))


def test_a_source_that_is_changed_before_it_is_copied_is_told(training: Stream) -> None:
    """A change before the copy spoils it, a change after it does not."""
    transfers = Transfers()
    source = torch.ones(2).as_subclass(OnDevice)
    spoilt = transfers.start(source)
    device.main_may_wait = True
    source.add_(1)
    assert transfers.wait(spoilt) is None
    good = transfers.start(source)
    transfers._begin()
    device.streams[1].run()
    transfers.start(torch.ones(2).as_subclass(OnDevice))  # which sees that the last one is made
    source.add_(1)
    host = transfers.wait(good)
    assert host is not None
    assert host.tolist() == [2, 2]


def test_memory_that_cannot_be_pinned_is_no_failure(training: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the copy is waited for where it is begun, behind the training's work."""

    def refused(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(torch, "empty", refused)
    transfers = Transfers()
    device.main_may_wait = True
    host = transfers.wait(transfers.start(late(torch.arange(2.0), training)))
    assert host is not None
    assert host.tolist() == [0, 1]
    assert device.log == ["copy and wait", "wait"]


def test_a_device_without_memory_is_no_failure(training: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are copied one by one where there is no room to put them together."""

    def refused(_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "cat", refused)
    monkeypatch.setattr(torch, "stack", refused)
    transfers = Transfers()
    copies = [transfers.start(late(torch.tensor(float(number)), training)) for number in range(5)]
    device.main_may_wait = True
    assert [float(host) for host in map(transfers.wait, copies) if host is not None] == list(range(5))
    assert device.log == ["copy"] * 5 + ["wait"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", ["wait_event", "__enter__", "record", "copied", "extend"])
def test_what_could_not_be_begun_waits_on(
    error: type[BaseException], at: str, training: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that fails, or an interrupt of the training while it begins copies, loses none of them."""
    transfers = Transfers()
    values = [torch.full((2,), float(number)) for number in range(40)] + [torch.ones(20_000)]
    copies = [transfers.start(late(one, training)) for one in values]

    def fails(*_: Any) -> None:
        raise error("an illegal address")

    with monkeypatch.context() as patch:
        if at == "copied":
            whole, calls = module._copied, []
            patch.setattr(module, "_copied", lambda one: fails() if len(calls) else (calls.append(0), whole(one))[1])
        elif at == "extend":  # after all else
            patch.setattr(transfers, "_spare", {0: type("Full", (), {"extend": fails})()})
        else:
            patch.setattr(Event if at == "record" else Stream, at, fails)
        with pytest.raises(error, match="illegal address"):
            transfers._begin()
    device.threads.__dict__.clear()  # streams that were not left
    device.main_may_wait = True
    found = [transfers.wait(one) for one in copies]
    assert [bits(one) for one in found] == [bits(one) for one in values]
    assert not transfers._waiting or at == "extend"
    assert transfers._asked == transfers._begun
    again = transfers.start(late(torch.ones(3), training))
    assert bits(transfers.wait(again)) == bits(torch.ones(3))
    assert not transfers._waiting


def test_forgotten_copies_hold_nothing(training: Stream) -> None:
    """When nobody will wait any more, nothing is kept on the device."""
    transfers = Transfers()
    alive = []
    for number in range(4):
        source = late(torch.full((2,), float(number)), training)
        alive.append(weakref.ref(source))
        transfers.start(source)
        if number == 1:
            transfers._begin()
    del source
    transfers.forget()
    for stream in device.streams:
        stream.work.clear()
    gc.collect()
    assert [one() for one in alive] == [None] * 4


def test_other_devices_copy_at_once() -> None:
    """On devices without such streams; and what is on the host is passed on."""
    transfers = Transfers()
    host = transfers.wait(transfers.start(torch.arange(2.0).as_subclass(Elsewhere)))
    assert host is not None
    assert host.tolist() == [0, 1]
    own = torch.ones(1)
    assert transfers.wait(transfers.start(own)) is own
    assert device.log == []


def test_one_thread_asks_while_another_waits(training: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arrive, each once, whoever begins them."""
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    transfers = Transfers()
    copies: list[Any] = []
    found: list[float] = []

    def fetch() -> None:
        for number in range(3000):
            while len(copies) <= number:
                pass
            host = transfers.wait(copies[number])
            assert host is not None
            found.append(float(host[number % 7]))

    thread = threading.Thread(target=fetch)
    thread.start()
    values = (late(torch.full((8 + number % 50,), float(number)), training) for number in range(3000))
    copies.extend(transfers.start(one) for one in values)  # one after the other
    thread.join(60)
    assert found == list(range(3000))


# -- in a recorder ----------------------------------------------------------------------------------------------


def message(data: Tensor, step: int = 0) -> ModuleMessage:
    """An activation of a step."""
    return ModuleMessage(kind="activations", module="fc", global_step=step, train_step=step, epoch=0, data=data)


@pytest.mark.parametrize("max_bytes", [None, 10_000_000])
def test_a_recorder_writes_what_was_on_the_device(max_bytes: int | None, training: Stream, tmp_path: Path) -> None:
    """The thread that writes waits for the copies, the one that trains for none, but with a budget for all."""
    path = tmp_path / "run.zarr"
    recorder = Recorder(tracer.TraceWriter(path))
    if max_bytes is not None:
        recorder.budget = tracer.recording.budget.Budget(max_bytes)
    for step in range(20):
        recorder.receive(message(late(torch.full((1000,), float(step)), training), step))
    recorder.close()
    with tracer.open(path) as trace:
        assert [(one.global_step, one.data.unique().tolist()) for one in trace.messages() if one.data is not None] == [
            (step, [float(step)]) for step in range(20)
        ]
    assert ("wait" in device.log) == (max_bytes is None)
    assert ("copy and wait" in device.log) == (max_bytes is not None)


def test_a_message_that_a_receiver_spoilt_is_not_recorded(training: Stream, tmp_path: Path) -> None:
    """On a device, too: better lost than wrong, and told."""
    writing, spoilt = threading.Event(), threading.Event()

    class Late(tracer.TraceWriter):
        def write_many(self, batch: Any) -> None:
            writing.set()
            assert spoilt.wait(10)
            super().write_many(batch)

    recorder = Recorder(Late(tmp_path / "run.zarr", commit_seconds=0.1))
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
