"""Large parameters: published as soon as they are final, with the values of small ones, and little in memory."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tracer
from tests.endings import alike
from tests.observing.recorded import descend
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import DATA_KINDS, KINDS
from tracer.observing import parameters
from tracer.observing.clock import Clock, Problems
from tracer.observing.profiles import options_of
from tracer.observing.publisher import Publisher
from tracer.observing.wanted_parameters import Candidate, UpdateTurns
from tracer.trace.writer import TraceWriter

OF_PARAMETERS = tuple(kind for kind, entry in KINDS.items() if not (entry.network or entry.per_call or entry.state))
SIZE = parameters.EARLY
"""Bytes of a parameter that is large."""


class Net(nn.Module):
    """Layers of which one is frozen and one has no gradient in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.second.requires_grad_(False)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        x = self.second(self.first(x)).relu()
        result: Tensor = x.sum(1) if self.number % 3 == 0 else self.third(x).sum(1)
        return result


def plain(model: nn.Module, exporter: Exporter | None, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Four steps of an optimizer."""
    optimizer = make(model.parameters())
    if exporter is not None:
        exporter.set_optimizer(optimizer)
    descend(optimizer, lambda _: model(torch.randn(3, 4)).square().sum(), range(4))


def sgd(model: nn.Module, exporter: Exporter | None) -> None:
    """Which writes into the gradients."""
    plain(model, exporter, lambda its: torch.optim.SGD(its, lr=0.1, momentum=0.9, nesterov=True, foreach=True))


def adam(model: nn.Module, exporter: Exporter | None) -> None:
    """Which does not."""
    plain(model, exporter, lambda its: torch.optim.AdamW(its, lr=0.1))


def closures(model: nn.Module, exporter: Exporter | None) -> None:
    """Gradients come in the step."""
    optimizer = torch.optim.LBFGS([one for one in model.parameters() if one.requires_grad], lr=0.1, max_iter=3)
    if exporter is not None:
        exporter.set_optimizer(optimizer)
    for _ in range(3):
        x = torch.randn(3, 4)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def clipped_in_a_later_hook(model: nn.Module, exporter: Exporter | None) -> None:
    """Gradients are final when a hook of the program's has run, behind the exporter's."""

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if exporter is not None:
        exporter.set_optimizer(optimizer)
    handle = optimizer.register_step_pre_hook(clip)
    descend(optimizer, lambda _: model(torch.randn(3, 4)).square().sum(), range(3))
    handle.remove()


def scaled(model: nn.Module, exporter: Exporter | None) -> None:
    """A GradScaler skips the second step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if exporter is not None:
        exporter.set_optimizer(optimizer)
    for number in range(4):
        optimizer.zero_grad()
        x = torch.randn(3, 4)
        scaler.scale(model(x * torch.inf if number == 1 else x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def several_optimizers(model: Any, exporter: Exporter | None) -> None:
    """One of them steps twice in each step."""
    first, last = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model.first, model.third))
    if exporter is not None:
        exporter.set_optimizer((first, last))
    for _ in range(3):
        for optimizer in (first, first, last):
            optimizer.zero_grad()
            model.number = 0
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()


def a_step_that_fails(model: nn.Module, exporter: Exporter | None) -> None:
    """The second step raises before it changes anything, and is taken once more."""

    class Failing(torch.optim.SGD):
        fails = False

    optimizer = Failing(model.parameters(), lr=0.1)
    if exporter is not None:
        exporter.set_optimizer(optimizer)

    def fail(*_: Any) -> None:
        if optimizer.fails:
            raise RuntimeError

    optimizer.register_step_pre_hook(fail)
    for number in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.fails = number == 1
        if optimizer.fails:
            with pytest.raises(RuntimeError):
                optimizer.step()
            optimizer.fails = False
        optimizer.step()


def spoil(x: Tensor) -> Tensor:
    """A reduction that writes into what it gets."""
    result = x.flatten()[0].clone()
    x.fill_(7)
    return result


CAPTURES: dict[str, Any] = {
    "everything": Capture(kinds=DATA_KINDS),
    "weights alone": Capture(kinds=["weights", "biases"]),
    "updates alone": Capture(kinds=["weight_updates", "bias_updates"]),
    "gradients alone, every second step": Capture(kinds=["weight_gradients"], every=2),
    "a function that writes": Capture(kinds=DATA_KINDS, reduce=spoil),
    "hashes and statistics beside": [Capture(kinds=DATA_KINDS, reduce="hash"), Capture(reduce="statistics"), Capture()],
    "statistics alone": Capture(reduce="statistics"),
    "some elements of weights": [Capture(kinds=["weights"], elements=3), Capture(kinds=["weight_updates"])],
}
TRAININGS = (sgd, adam, closures, clipped_in_a_later_hook, scaled, several_optimizers, a_step_that_fails)


def train(training: Callable[..., None], capture: Any = None) -> tuple[list[Tensor], list[Message]]:
    """The parameters at the end of a training, and what was heard."""
    torch.manual_seed(0)
    model, heard = Net(), Collect("*")
    exporter = None
    if capture is not None:
        exporter = Exporter(capture=capture, strict=training is not a_step_that_fails)
        exporter.message_bus.register(heard)
        exporter.set_model(model)
    training(model, exporter)
    if exporter is not None:
        exporter.finish()
        exporter.detach()
    return list(model.parameters()), heard.messages


def where(message: Message) -> tuple[Any, ...]:
    """What tells a message from others."""
    return message.kind, message.key or "", message.global_step, message.epoch, message.tag, message.call, message.leaf


@functools.cache
def unwatched(training: Callable[..., None]) -> list[Tensor]:
    """The parameters at the end of a training that nobody records."""
    return train(training)[0]


@pytest.mark.parametrize("capture", CAPTURES.values(), ids=CAPTURES)
@pytest.mark.parametrize("training", TRAININGS)
def test_all_that_is_published_of_small_ones(
    training: Callable[..., None], capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same messages with the same data, each once, whenever that is; and the training goes on as ever."""
    end, small = train(training, capture)
    monkeypatch.setattr(parameters, "EARLY", 1)
    large_end, large = train(training, capture)
    alone = unwatched(training)
    assert alike(large_end, alone)
    assert alike(end, alone)
    small, large = sorted(small, key=where), sorted(large, key=where)
    assert [*map(where, large)] == [*map(where, small)]
    assert len({*map(where, large)}) == len(large)
    for one, other in zip(large, small, strict=True):
        assert (one.data is None) == (other.data is None)
        if one.data is not None and other.data is not None:
            assert one.data.dtype == other.data.dtype
            assert np.array_equal(one.data.numpy(), other.data.numpy(), equal_nan=True), where(one)
        assert one.sampling == other.sampling


def test_what_is_final_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and gradients of the large ones come before the step changes anything, updates at its end, in order."""
    _, heard = train(
        sgd, Capture(kinds=[*OF_PARAMETERS, "batch_started", "batch_finished"], modules=["first", "third"])
    )
    kinds = ("weights", "weight_gradients", "weight_updates", "biases", "bias_gradients", "bias_updates")
    first = [one for one in heard if one.global_step == 0]
    assert [(one.kind, one.key) for one in first[1:-1]] == [(kind, key) for key in ("first", "third") for kind in kinds]
    monkeypatch.setattr(parameters, "EARLY", 4 * 20)  # the weight of the first layer, and of no other
    _, heard = train(
        sgd, Capture(kinds=[*OF_PARAMETERS, "batch_started", "batch_finished"], modules=["first", "third"])
    )
    order = [(one.kind, one.key) for one in heard if one.global_step == 0]
    assert order == [
        ("batch_started", None),
        ("weights", "first"),
        ("weight_gradients", "first"),
        ("weight_updates", "first"),
        *((kind, "first") for kind in kinds[3:]),
        *((kind, "third") for kind in kinds),
        ("batch_finished", None),
    ]


class Copies:
    """What copies were alive at each time when another was made, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._alive: list[tuple[weakref.ref[Any], int]] = []
        self._watch(monkeypatch, "copy")
        self._watch(monkeypatch, "space")

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(Publisher, name)

        def watched(publisher: Publisher, data: Tensor) -> Any:
            made = original(publisher, data)
            if made is not None and made.nbytes >= SIZE:
                self._alive = [(ref, size) for ref, size in self._alive if ref() is not None]
                # the memory, which views of the tensor keep alive, too
                self._alive.append((weakref.ref(made.untyped_storage()), made.nbytes))
                self.most = max(self.most, sum(size for _, size in self._alive))
            return made

        monkeypatch.setattr(Publisher, name, watched)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """The copies that are made, watched."""
    return Copies(monkeypatch)


def test_one_copy_of_the_largest_is_in_memory(copies: Copies, tmp_path: Path) -> None:
    """Of weights, gradients and updates of an embedding that is larger than the queue, one is there at a time."""
    model = nn.Embedding(SIZE // 64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "run.zarr"
    with tracer.record(path, model, optimizer, capture=Capture(kinds=OF_PARAMETERS), queue_bytes=1 << 16, strict=True):
        descend(optimizer, lambda number: model(torch.tensor([number, 1])).square().sum(), range(3))
    assert copies.most == SIZE
    with tracer.open(path) as trace:
        assert [one.count for one in trace.streams] == [3, 3, 3]
        weights, updates = ([one.data for one in trace.messages(kind)] for kind in ("weights", "weight_updates"))
    for number in range(2):
        assert torch.equal(weights[number + 1] - weights[number], updates[number])


def test_bases_and_one_more_are_in_memory(copies: Copies, tmp_path: Path) -> None:
    """Of several large parameters there is one copy of each through the step, and one more of one of them."""
    model = nn.Sequential(nn.Linear(SIZE // 4096, 1024, bias=False), nn.Linear(1024, SIZE // 4096, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture(kinds=OF_PARAMETERS)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture, queue_bytes=1 << 16, strict=True):
        descend(optimizer, lambda _: model(torch.randn(2, SIZE // 4096)).square().sum(), range(2))
    assert copies.most == 2 * SIZE  # the second one's weights and gradient come and go beside the first one's base


def test_a_copy_waits_for_room(tmp_path: Path) -> None:
    """A large tensor is copied when what waits before it is written, and not earlier."""

    class Slow(TraceWriter):
        go = threading.Event()

        def write_many(self, batch: Any) -> None:
            self.go.wait(60)
            super().write_many(batch)

    recorder = tracer.Recorder(Slow(tmp_path / "run.zarr"), queue_bytes=1 << 16)
    bus = tracer.MessageBus()
    bus.register(recorder)
    bus.make_room(SIZE)  # nothing waits, so there is room for one
    bus.publish_network_message(0, 0, 0, "loss", torch.zeros(100))
    bus.make_room(1000)
    reached = threading.Event()

    def wait() -> None:
        bus.make_room(SIZE)
        reached.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not reached.wait(0.2)
    Slow.go.set()
    assert reached.wait(60)
    waiting.join()
    recorder.close()
    bus.make_room(SIZE)  # closed: there is nothing to wait for


def test_nothing_waits_where_messages_are_dropped(tmp_path: Path) -> None:
    """With on_full="drop" the training never waits, for no copy either."""

    class Stuck(TraceWriter):
        go = threading.Event()

        def write_many(self, batch: Any) -> None:
            self.go.wait(60)
            super().write_many(batch)

    recorder = tracer.Recorder(Stuck(tmp_path / "run.zarr"), queue_bytes=1 << 10, on_full="drop")
    bus = tracer.MessageBus()
    bus.register(recorder)
    bus.publish_network_message(0, 0, 0, "loss", torch.zeros(100))
    bus.make_room(SIZE)
    Stuck.go.set()
    recorder.close()


# -- updates where the weights of all parameters may not be kept: parameters take turns ----------------------


UPDATES = ("weight_updates", "bias_updates")


def turns(bound: int) -> tuple[UpdateTurns, Problems]:
    """Turns, and where they note that there are any."""
    problems = Problems(Clock(), strict=False)
    return UpdateTurns(bound, problems), problems


def chosen(of: UpdateTurns, steps: int, *sizes: int, copied: bool = False) -> list[str]:
    """Which of parameters of these sizes, called a, b and so on, have their turns in each step."""
    candidates = [Candidate(name, size, copied) for name, size in zip("abcdef", sizes, strict=False)]
    return ["".join(sorted(of.of(step, lambda: candidates))) for step in range(steps)]


def test_who_waited_for_the_longest_comes_first() -> None:
    """No step keeps more than the bound, unless it keeps one parameter alone."""
    some, problems = turns(10)
    assert chosen(some, 2, 3, 3, 4) == ["abc", "abc"]
    assert not problems.all
    some, problems = turns(10)
    assert chosen(some, 5, 6, 6, 4, 20) == ["ac", "bc", "d", "ac", "bc"]
    assert "updates" in str(problems.all)


def test_a_larger_one_waits_while_its_weights_are_copied_too() -> None:
    """So that there are no two copies of it."""
    some, _ = turns(10)
    assert chosen(some, 3, 20, 6, 6, copied=True) == ["b", "c", "b"]


@pytest.mark.parametrize("early", [1 << 30, 1], ids=["small", "large"])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_updates_in_turn_are_what_they_are_without(
    monkeypatch: pytest.MonkeyPatch, early: int, optimizers: int
) -> None:
    """All other messages are there as well, and every parameter has its turn."""
    monkeypatch.setattr(parameters, "EARLY", early)
    found = []
    for bound in (1 << 30, 1300):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 30))
        several = [list(model[:3].parameters()), list(model[3].parameters())]
        groups = several if optimizers == 2 else [list(model.parameters())]
        stepping = [torch.optim.Adam(one, lr=0.1) for one in groups]
        exporter, heard = Exporter(capture=Capture()), Collect()
        exporter.take_turns(bound)
        exporter.message_bus.register(heard)
        exporter.set_model(model)
        exporter.set_optimizer(stepping)
        with torch.no_grad():
            model(torch.ones(1, 10))
        for _ in range(8):
            for one in stepping:
                one.zero_grad()
            model(torch.randn(4, 10)).square().mean().backward()
            for one in stepping:
                one.step()
        exporter.detach()
        told = [((one.kind, one.key, one.global_step, one.call), one.data) for one in heard.messages]
        found.append({key: data for key, data in told if data is not None})
    whole, some = found
    assert all(torch.equal(data, whole[key]) for key, data in some.items())
    missing = whole.keys() - some.keys()
    assert {kind for kind, *_ in missing} == {*UPDATES}
    there = [key for key in some if "updates" in key[0]]
    assert {key[:2] for key in there} == {key[:2] for key in whole if "updates" in key[0]}
    for step in range(8):
        of_step = [some[key] for key in there if key[2] == step]
        assert of_step
        assert sum(one.nbytes for one in of_step) <= 1300


def test_standard_says_that_parameters_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the header and in a problem; other captures have every update."""
    monkeypatch.setitem(cast("dict[str, Any]", options_of("standard")), "update_bytes", 1000)
    model = nn.Sequential(nn.Linear(2, 100), nn.Linear(100, 2))
    counts = []
    for name, capture in (("default", None), ("own", Capture(kinds=UPDATES, reduce="hash"))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / f"{name}.zarr"
        with tracer.record(path, model, optimizer, capture=capture):
            descend(optimizer, lambda _: model(torch.ones(1, 2)).sum(), range(4))
        with tracer.open(path) as trace:
            counts.append(sum(len(trace.array("weight_updates_hash", one)[0]) for one in ("0", "1")))
            told = "take turns" in str([note.get("problem") for note in trace.notes])
            assert told == (name == "default")
            assert trace.header["recording"]["update_bytes"] == (1000 if name == "default" else None)
    assert counts[0] < counts[1] == 8
