"""Replays of small messages, which are handed out in stacks: all is as if each had been published by itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tracer
from analyze.registry import parse
from analyze.tables.results import Results
from tracer import (
    CallbackSubscriber,
    Collect,
    Message,
    MessageBus,
    MessageError,
    ModuleMessage,
    NetworkMessage,
    Subscriber,
    Subscription,
    TraceCorruptError,
    TraceReader,
    TraceWriter,
    derived,
)
from tracer.messaging.stacks import Stretch
from tracer.replaying import replay as replaying
from tracer.trace import data as blocks
from tracer.trace.columns import Group
from tracer.trace.data import Data

STEPS = 48
DTYPES = ("float32", "bfloat16", "float16", "float8_e5m2", "int64", "bool", "uint16", "float64", "complex64")


def said(message: Message) -> tuple[Any, ...]:
    """All that a message says, to the bit."""
    data = message.data
    fields = ("kind", "key", "global_step", "train_step", "epoch", "tag", "call", "leaf", "rank", "sampling")
    bits = b"" if data is None or not data.numel() else data.reshape(-1).view(torch.uint8).numpy().tobytes()
    values = None if data is None else (str(data.dtype), tuple(data.shape), bits)
    return (type(message).__name__, *(getattr(message, field) for field in fields), values)


def recorded(path: Path) -> Path:
    """A trace of scalars, small arrays of several shapes and dtypes, events, and a few large messages."""
    generator = torch.Generator().manual_seed(0)
    with TraceWriter(path) as writer:
        for step in range(STEPS):
            where = {"global_step": step, "train_step": step % 20, "epoch": step // 20}
            if step % 20 == 0:
                writer.write(NetworkMessage(kind="epoch_started", **where))
            writer.write(NetworkMessage(kind="batch_started", **where))
            for number, dtype in enumerate(DTYPES):
                for shape in ((), (3,), (2, 5) if step % 3 else (0,)):
                    data = (torch.randn(shape, generator=generator) * 4).to(getattr(torch, dtype.lstrip("u")))
                    data = data.view(getattr(torch, dtype))
                    fields: dict[str, Any] = {
                        **where,
                        "tag": "eval" if step % 5 == 4 else "default",
                        "leaf": "1.0" if shape else "",
                    }
                    sampling = {"rows": 2} if number == 2 and step > 30 else None
                    fields |= {"module": f"layer{number}", "sampling": sampling}
                    writer.write(ModuleMessage(kind="activations", data=data, **fields))
            loss = torch.randn((), generator=generator) if step % 40 else torch.tensor(float("nan"))
            writer.write(NetworkMessage(kind="loss", data=loss, **where))
            if step in (20, 21, 40):
                writer.write(ModuleMessage(kind="weights", module="fc", data=torch.full((300, 300), 0.5), **where))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That trace."""
    return recorded(tmp_path_factory.mktemp("many") / "run.zarr")


class Deliveries:
    """Counts what a bus delivers at once, and what one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stretches = self.messages = 0
        deliver, deliver_many = MessageBus._deliver, MessageBus._deliver_many

        def noting(bus: MessageBus, message: Message, key: str | None) -> None:
            self.messages += 1
            deliver(bus, message, key)

        def noting_many(bus: MessageBus, stretch: Stretch, alone: Any) -> bool:
            self.stretches += 1
            return deliver_many(bus, stretch, alone)

        monkeypatch.setattr(MessageBus, "_deliver", noting)
        monkeypatch.setattr(MessageBus, "_deliver_many", noting_many)


def asked(specs: Iterable[str]) -> list[Subscriber]:
    """Fresh subscribers."""
    return [parse(one) for one in specs]


QUESTIONS: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("norm:kind=loss",), {}),
    (("norm:kind=loss", "mean:kind=loss", "statistics:kind=loss,subsample=3"), {"steps": (10, 45, 2)}),
    (("norm:kind=activations,tag=*", "mean:kind=activations,modules=layer[0-3]", "norm:kind=weights"), {}),
    (
        ("statistics:kind=activations,which=mean+median+norm3+count,tag=eval", "quantiles:kind=activations,tag=*"),
        {"modules": "layer[1-5]", "tags": ["eval", "default"]},
    ),
    (("statistics:kind=activations,per=channel,modules=layer[2-4]", "sum", "variance"), {"steps": (28, None)}),
    (
        ("histogram:kind=activations,details=true", "sample_norm", "norm:kind=activations,order=3,as=third"),
        {"modules": "layer[0368]"},
    ),
]


@pytest.mark.parametrize(("specs", "filters"), QUESTIONS, ids=lambda one: "+".join(one) if type(one) is tuple else "")
def test_tables_and_messages_are_those_of_one_by_one(
    specs: tuple[str, ...], filters: dict[str, Any], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, series, shapes and dtypes are the same to the bit and in the same order; so is what a collector hears."""
    found: list[tuple[Any, ...]] = []
    for guard in (contextlib.nullcontext(), None):  # with a guard around each message, each is published by itself
        counted = Deliveries(monkeypatch)
        subscribers, results, heard = asked(specs), Results(), Collect()
        tracer.replay(trace, *subscribers, results.sink(subscribers, "run"), heard, guard=guard, **filters)
        columns = {
            name: column if isinstance(column, list) else column.tobytes() for name, column in results.columns().items()
        }
        found.append((columns, results.structure(), [said(one) for one in heard], [*map(said, results.messages())]))
        assert len(results) > 30
        assert bool(counted.stretches) is (guard is None)
    assert found[1] == found[0]


@pytest.mark.parametrize("filters", [{}, {"kinds": ["batch_started", "loss"]}])
@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_a_collector_alone_hears_what_the_reader_gives(suffix: str, filters: dict[str, Any], tmp_path: Path) -> None:
    """Every dtype and shape, events, and large messages between small ones."""
    trace = recorded(tmp_path / f"run.{suffix}")
    heard = Collect()
    tracer.replay(trace, heard, **filters)
    with TraceReader(trace) as reader:
        expected = [said(one) for one in reader.messages(**filters)]
    assert [said(one) for one in heard] == expected
    assert len(expected) > 80


def test_a_stack_has_only_what_is_alike(trace: Path) -> None:
    """What the reader hands out are stretches of small messages, in blocks, and large messages one by one."""
    with TraceReader(trace) as reader:
        whole = [
            said(one)
            for part in reader.stretches(np.ones(len(reader), np.bool_))
            for one in (part if isinstance(part, Stretch) else list(part))
        ]
        assert whole == [said(one) for one in reader.messages()]
        (part,) = reader.stretches(reader.journal[:, 0] >= 0)
        assert isinstance(part, Stretch)
        alike = {(one.kind, *(() if one.data is None else (one.data.dtype, one.data.shape[1:]))) for one in part.stacks}
        assert len(alike) == len(part.stacks)


def test_large_messages_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where messages are large, or few of them alike, a stack would cost more than it saves."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(40):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.zeros(200, 200), **where))
            writer.write(ModuleMessage(kind="biases", module="fc", data=torch.zeros(step + 1), **where))
    counted = Deliveries(monkeypatch)
    for kind in ("weights", "biases"):
        tracer.replay(path, parse(f"norm:kind={kind}"))
    assert (counted.stretches, counted.messages) == (0, 2 * 2 * 40)


def test_updates_that_are_derived_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update is made of two messages, so it has its place between those of two steps."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(40):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="biases", module="fc", data=torch.full((2,), float(step**2)), **where))
    counted, results = Deliveries(monkeypatch), Results()
    subscriber = parse("norm:kind=bias_updates,order=inf")
    tracer.replay(path, subscriber, results.sink([subscriber]))
    assert [row.value for row in results] == [2.0 * step + 1 for step in range(39)]
    assert counted.stretches == 0


def test_one_who_is_not_able_has_all_published_one_by_one(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that must hear each message by itself hears it, beside others that need not."""
    counted = Deliveries(monkeypatch)
    steps: list[int] = []
    tracer.replay(trace, CallbackSubscriber("loss", lambda loss, step, *_: steps.append(step)), parse("norm:kind=loss"))
    assert steps == list(range(STEPS))
    assert counted.stretches == 0


def test_only_what_must_be_alone_comes_one_by_one(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that remembers hears its stream message by message; those of other streams are handed out together."""
    found = []
    for guard in (contextlib.nullcontext(), None):
        counted = Deliveries(monkeypatch)
        subscribers, results, heard = asked(("norm:kind=activations,tag=*", "ema:kind=loss")), Results(), Collect()
        tracer.replay(trace, *subscribers, results.sink(subscribers), heard, guard=guard)
        found.append((list(map(repr, results)), results.structure(), [said(one) for one in heard]))
    assert found[0] == found[1]
    assert counted.stretches > 0
    assert counted.messages == 2 * STEPS  # the losses and the answers to them


class Failing(Subscriber):
    """Answers each loss, and fails at a step."""

    scope = "message"
    takes_many = True

    def __init__(self, step: int) -> None:
        super().__init__(Subscription("loss"), "loss_checked")
        self.step = step

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        if message_or_bundle.global_step == self.step:
            raise ZeroDivisionError("no more")
        yield derived(message_or_bundle, "loss_checked", 1.0)


def test_an_error_comes_after_all_earlier_answers(trace: Path) -> None:
    """What a message raises names the message; what was answered before it is in the results, and nothing after."""
    found = []
    for guard in (contextlib.nullcontext(), None):
        subscribers = [*asked(("mean:kind=loss",)), Failing(33)]
        results = Results()
        with pytest.raises(ZeroDivisionError) as caught:
            tracer.replay(trace, *subscribers, results.sink(subscribers), guard=guard)
        assert caught.value.__notes__ == ["raised by Failing on loss of global step 33"]
        found.append([row[:-1] for row in results])
    assert found[0] == found[1]
    assert len(found[1]) in (66, 67)  # the mean was answered of the message that fails, or not


class Guarded:
    """Counts how often it is entered, and raises once that is enough."""

    def __init__(self, most: int) -> None:
        self.entered, self.most = 0, most

    def __enter__(self) -> None:
        self.entered += 1
        if self.entered > self.most:
            raise TimeoutError

    def __exit__(self, *_: object) -> None:
        return


def test_a_guard_is_entered_around_each_message(trace: Path) -> None:
    """Also where messages could be published at once: it may end the replay at any of them."""
    heard, guard = Collect("loss_mean"), Guarded(7)
    with pytest.raises(TimeoutError):
        tracer.replay(trace, parse("mean:kind=loss"), heard, guard=guard)
    assert len(heard) == 7


def test_what_comes_before_damage_is_answered(tmp_path: Path) -> None:
    """Blocks before a damaged message are published, as they are one by one."""
    path = recorded(tmp_path / "run.zarr")
    chunk = max((one for one in path.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 0xFF
    chunk.write_bytes(content)
    found = []
    for guard in (contextlib.nullcontext(), None):
        subscribers, results = asked(("norm:kind=activations,tag=*", "norm:kind=weights")), Results()
        with pytest.raises(TraceCorruptError) as caught:
            tracer.replay(path, *subscribers, results.sink(subscribers), guard=guard)
        found.append((str(caught.value), results.structure(), list(map(repr, results))))
    assert found[0] == found[1]


def test_memory_of_stacks_does_not_grow_with_the_trace(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a block is read, nobody holds the messages of the one before: their memory is used again."""
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 100)
    monkeypatch.setattr(blocks, "FEW", 1)
    monkeypatch.setattr(blocks, "SLOW_SECONDS", 1e9)  # else a thread may read ahead
    published: list[weakref.ref[Stretch]] = []
    alive: list[int] = []
    publish_many, read = MessageBus.publish_many, Data.read

    def noting(bus: MessageBus, stretch: Stretch, alone: Any) -> None:
        published.append(weakref.ref(stretch))
        publish_many(bus, stretch, alone)

    def reading(data: Data, *rest: Any) -> Any:
        alive.append(sum(one() is not None for one in published))
        return read(data, *rest)

    monkeypatch.setattr(MessageBus, "publish_many", noting)
    monkeypatch.setattr(Data, "read", reading)
    tracer.replay(trace, parse("norm:kind=activations,tag=*"))
    assert len(published) > 10
    assert alive == [0] * len(published)


def test_messages_that_were_read_out_of_order_are_put_in_order() -> None:
    """Those of several pools come pool by pool, those of several attempts in any order."""
    found = blocks._ascending(Group(np.array([5, 2, 0, 7]), np.array([50.0, 20.0, 0.0, 70.0]), "float64", 32))
    assert (found.rows.tolist(), found.data.tolist()) == ([0, 2, 5, 7], [0.0, 20.0, 50.0, 70.0])


def test_a_follower_is_handed_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run commits while it is followed is handed out together, commit by commit, and is the same in the end."""
    path, counted, results = tmp_path / "run.zarr", Deliveries(monkeypatch), Results()
    with TraceWriter(path) as writer:
        commits = iter(range(5))

        def committed(reader: TraceReader) -> bool:
            number = next(commits, None)
            for step in range(40 * number, 40 * (number + 1)) if number is not None else ():
                where = {"global_step": step, "train_step": step, "epoch": 0}
                writer.write(NetworkMessage(kind="loss", data=torch.tensor(float(step)), **where))
                writer.write(ModuleMessage(kind="biases", module="fc", data=torch.full((2,), float(step)), **where))
            writer.commit()
            reader.refresh()
            return number is not None

        monkeypatch.setattr(replaying, "wait", committed)
        subscribers = asked(("mean:kind=loss", "norm:kind=biases,order=inf"))
        tracer.replay(path, *subscribers, results.sink(subscribers), follow=True)
    assert [row.value for row in results] == [float(step) for step in range(200) for _ in range(2)]
    assert counted.stretches >= 5
    assert counted.messages == 0


class Complex(Subscriber):
    """Answers each loss with a complex number at one step, else with a real one."""

    scope = "message"
    takes_many = True

    def __init__(self) -> None:
        super().__init__(Subscription("loss"), "loss_turned")

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        yield derived(
            message_or_bundle, "loss_turned", torch.tensor(1j if message_or_bundle.global_step == 21 else 1.0)
        )


def test_a_complex_answer_is_refused_at_its_message(trace: Path) -> None:
    """No table holds it; all answers before it are there."""
    for guard in (contextlib.nullcontext(), None):
        subscriber, results = Complex(), Results()
        with pytest.raises(MessageError, match="results hold real numbers, but loss_turned") as caught:
            tracer.replay(trace, subscriber, results.sink([subscriber]), guard=guard)
        assert caught.value.__notes__ == ["raised by results on loss_turned of global step 21"]
        assert [row.global_step for row in results] == list(range(21))


class Totals(Subscriber):
    """Answers about the whole network what it hears of a layer."""

    takes_many = True
    scope = "message"

    def __init__(self) -> None:
        super().__init__(Subscription("weights"), produces="whole")

    def compute(self, message: Message) -> Iterator[Message]:
        where = {"global_step": message.global_step, "train_step": message.train_step, "epoch": message.epoch}
        assert message.data is not None
        yield ModuleMessage(kind="whole", module="total", data=message.data.sum(), **where)


class Twice(Subscriber):
    """Answers only about the whole network."""

    scope = "message"

    def __init__(self) -> None:
        super().__init__(Subscription("whole", modules="total"), produces="whole_twice")

    def compute(self, message: Message) -> Iterator[Message]:
        yield tracer.derived(message, "whole_twice", 2 * message.data)  # type: ignore[operator] # it carries data


def weights_of_a_layer(path: Path) -> Path:
    """A trace of many small weights."""
    with TraceWriter(path) as writer:
        for step in range(40):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="weights", module="a", data=torch.full((4,), float(step)), **where))
    return path


def test_an_answer_may_be_about_another_module(tmp_path: Path) -> None:
    """Who wants only answers about that module gets them."""
    path = weights_of_a_layer(tmp_path / "run.zarr")
    for guard in (contextlib.nullcontext(), None):
        heard = Collect("whole_twice")
        tracer.replay(path, Totals(), Twice(), heard, guard=guard)
        assert [float(one.data) for one in heard] == [8.0 * step for step in range(40)]  # type: ignore[arg-type]


def test_a_method_of_one_object_is_called(tmp_path: Path) -> None:
    """A profiler that wraps the `compute` of a single metric sees each message, as in a live run."""
    path = weights_of_a_layer(tmp_path / "run.zarr")
    norm, called = parse("norm:kind=weights"), []
    compute = norm.compute
    norm.compute = lambda message: (called.append(message.global_step), compute(message))[1]  # type: ignore[method-assign]
    tracer.replay(path, norm, Collect())
    assert called == list(range(40))
