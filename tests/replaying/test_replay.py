"""Replays: what is read, what is published to whom, and what is refused before anything is read."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import tracer
from analyze.registry import parse
from tracer import (
    CallbackSubscriber,
    Capture,
    CaptureError,
    Collect,
    Message,
    ModuleMessage,
    NetworkMessage,
    Subscriber,
    Subscription,
    TraceReader,
    TraceWriter,
    UnknownNameError,
)
from tracer.messaging.messages import DATA_KINDS
from tracer.replaying import wanted
from tracer.replaying.filters import Audience, Filters
from tracer.replaying.wanted import due_windows, wanted_of
from tracer.stores.hdf5.reading import Hdf5ReadStore
from tracer.stores.zarr.reading import ZarrReadStore
from tracer.trace.data import Data
from tracereel.main import main

STEPS = 6


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with an evaluation and a probe."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("replay") / "run.zarr"
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(path, model, optimizer, loss=loss, strict=True, capture=tracer.Capture()) as run:
        run.probe("probe", torch.randn(4, 3), every=3)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model(torch.randn(5, 3)), torch.zeros(5, 2)).backward()
            optimizer.step()
            run.log("rate", 0.1)
            if step % 3 == 2:
                with torch.no_grad():
                    loss(model(torch.randn(5, 3)), torch.zeros(5, 2))
                run.epoch_finished()
    return path


def place(message: Message) -> tuple[Any, ...]:
    """Where a message belongs."""
    return (
        message.kind, message.key, message.tag, message.global_step, message.train_step, message.epoch, message.call,
        message.leaf,
    )  # fmt: skip


@pytest.fixture(scope="module")
def everything(trace: Path) -> list[Message]:
    """All messages of the trace, by the reader alone."""
    with TraceReader(trace) as reader:
        return list(reader)


# -- what is read and published -------------------------------------------------------------------------------


def heard_by_replay(trace: Path, *receivers: Any, **filters: Any) -> list[Message]:
    """What a collector alone hears, or overhears of other receivers."""
    heard = Collect()
    tracer.replay(trace, *receivers, heard, **filters)
    return heard.messages


FILTERS: list[tuple[dict[str, Any], Callable[[Message], bool]]] = [
    ({}, lambda m: True),
    ({"kinds": "weights"}, lambda m: m.kind == "weights"),
    ({"kinds": ["loss", "batch_started"]}, lambda m: m.kind in ("loss", "batch_started")),
    ({"modules": "0"}, lambda m: m.key == "0"),
    ({"modules": ["[12]"]}, lambda m: m.key in ("1", "2")),
    ({"tags": "eval"}, lambda m: m.tag == "eval"),
    ({"tags": ["!default"]}, lambda m: m.tag != "default"),
    ({"tags": "pro*"}, lambda m: m.tag == "probe"),
    ({"steps": (2, 4)}, lambda m: 2 <= m.global_step < 4),
    ({"steps": (None, 4)}, lambda m: m.global_step < 4),
    ({"steps": (1, None, 2)}, lambda m: m.global_step % 2 == 1),
    ({"steps": (2, 2)}, lambda m: False),
    (
        {"kinds": "activations", "modules": "2", "tags": "default", "steps": (0, 5, 3)},
        lambda m: (m.kind, m.key, m.tag) == ("activations", "2", "default") and m.global_step in (0, 3),
    ),
]


@pytest.mark.parametrize(
    ("filters", "chosen"), FILTERS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_filters_choose_by_the_message_alone(
    filters: dict[str, Any], chosen: Callable[[Message], bool], trace: Path, everything: list[Message]
) -> None:
    """Kinds, modules, steps and tags choose a part of the trace, in its order, with its data."""
    got = heard_by_replay(trace, **filters)
    expected = [message for message in everything if chosen(message)]
    assert [place(one) for one in got] == [place(one) for one in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.data is None if other.data is None else torch.equal(one.data, other.data)


class Reading:
    """Notes what a store is asked to read."""

    def __init__(self, reader: TraceReader, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[str] = []
        self.bytes = 0
        read = reader._parts.stores[0].read

        def noting(name: str, start: int, stop: int, out: Any = None, **how: Any) -> Any:
            found = read(name, start, stop, out, **how)
            self.pools.append(name)
            self.bytes += found.nbytes
            return found

        monkeypatch.setattr(reader._parts.stores[0], "read", noting, raising=False)


@pytest.fixture(scope="module", params=["zarr", "h5"])
def large(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams that are large enough to have arrays of their own."""
    path = tmp_path_factory.mktemp("large") / f"run.{request.param}"
    with TraceWriter(path) as writer:
        for step in range(8):
            at = {"global_step": step, "train_step": step, "epoch": 0}
            for module in ("a", "b"):
                for kind in ("weights", "activations"):
                    data = torch.full((200, 200), float(step))
                    writer.write(ModuleMessage(kind=kind, module=module, data=data, **at))
            writer.write(NetworkMessage(kind="loss", data=torch.tensor(1.0), **at))
    return path


def test_only_what_is_wanted_is_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants the weights of one module makes the store read this stream, and no byte of the others."""
    with TraceReader(large) as reader:
        reading = Reading(reader, monkeypatch)
        got: list[Any] = []
        tracer.replay(reader, CallbackSubscriber("weights", lambda *of: got.append(of[1:]), modules="a"))
        assert got == [(step, step, 0, "a") for step in range(8)]
        assert len(set(reading.pools)) == 1
        assert "weights" in reading.pools[0]
        one = 200 * 200 * 4
        assert 8 * one <= reading.bytes <= 9 * one


def test_only_the_wanted_steps_are_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subsample, or a range of steps, is read as such."""
    one = 200 * 200 * 4
    for receiver, filters, steps in (
        (CallbackSubscriber("weights", lambda *_: None, subsample=4), {}, 2),
        (CallbackSubscriber("weights", lambda *_: None), {"steps": (2, 4)}, 2),
        (CallbackSubscriber("weights", lambda *_: None, subsample=4), {"steps": (1, 4)}, 0),
    ):
        with TraceReader(large) as reader:
            todo = tracer.plan(reader, receiver, **filters)
            assert (todo.messages, todo.bytes) == (2 * steps, 2 * steps * one)
            with monkeypatch.context() as patch:
                reading = Reading(reader, patch)
                tracer.replay(reader, receiver, **filters)
            assert 2 * steps * one <= reading.bytes <= (2 * steps + 2) * one


def test_the_plan_says_what_would_be_read(trace: Path, everything: list[Message]) -> None:
    """A plan names the streams, counts messages and bytes, and reads no data."""
    todo = tracer.plan(
        trace, CallbackSubscriber(["weights", "weight_updates"], lambda *_: None, subsample=2), Collect()
    )
    expected = [one for one in everything if one.kind in ("weights", "weight_updates") and one.global_step % 2 == 0]
    assert {(one.kind, one.module) for one in todo.streams} == {(one.kind, one.key) for one in expected}
    assert todo.messages == len(expected)
    assert todo.bytes == sum(one.data.nbytes for one in expected)
    assert todo.skipped == len(everything) - len(expected)
    assert todo.missing == []
    told = todo.describe()
    assert told["trace"] == str(trace)
    assert [one["count"] for one in told["streams"]] == [STEPS] * 4


def test_the_plan_says_who_remembers_what(trace: Path) -> None:
    """Subscribers without memory are not told; those with one say what it reaches across."""
    asked = [parse("spectral_norm"), parse("svcca:tag=probe"), parse("path_length"), parse("norm"), Collect("loss")]
    planned = tracer.plan(trace, *asked)
    assert {"svcca": "stream", "path_length": "stream"}.items() <= planned.memory.items()
    assert not {"norm", "Collect"} & planned.memory.keys()
    assert planned.describe()["memory"] == planned.memory
    asked = [parse("svcca:tag=probe"), parse("svcca:tag=probe,against=layers,as=l"), parse("saturation:tag=probe")]
    expected = {"svcca": "stream", "svcca (activations_svcca_l)": "step"}
    assert tracer.plan(trace, *asked).memory == expected


def test_ten_subscribers_read_each_message_once(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many listen, what they want is read once, and nothing else is."""
    specs = (
        "norm norm:order=1 mean:kind=weights variance:kind=weights sum:kind=weights histogram spectral_norm ratio loss"
    )
    asked = [*map(parse, [*specs.split(), "norm:kind=weight_gradients", "svcca:tag=probe,details=false"])]
    read: list[int] = []
    plainly = Data.read

    def counting(self: Data, selected: Any, *others: Any) -> Any:
        read.extend(selected.tolist())
        return plainly(self, selected, *others)

    monkeypatch.setattr(Data, "read", counting)
    planned = tracer.plan(trace, *asked)
    tracer.replay(trace, *asked)
    filters = Filters()
    with TraceReader(trace) as reader:
        [window] = due_windows(reader, wanted_of(reader, Audience(asked), filters, 0), filters)
    assert sorted(read) == window.where.nonzero()[0].tolist()
    assert len(read) == planned.read
    kinds = {stream.kind for stream in planned.streams}
    assert kinds == {"weights", "weight_updates", "weight_gradients", "loss", "activations"}


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_ten_subscribers_of_a_command_read_each_byte_once(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trace replay` with ten of them asks the stores for what the plan says, also where updates are derived."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(120, 160), nn.Linear(160, 120))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / f"run.{suffix}"
    with tracer.record(path, model, optimizer, capture=Capture(kinds=["weights", "weight_gradients", "activations"])):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(200, 120)).square().mean().backward()
            optimizer.step()
    asked = "norm norm:order=1 mean:kind=weights variance:kind=weights spectral_norm distance ratio path_length"
    specs = [*asked.split(), "norm:kind=weight_gradients", "alpha:bias=false"]
    planned = tracer.plan(path, *map(parse, specs))
    assert {one.kind for one in planned.derived} == {"weight_updates"}
    weights, steps, each = 2, 6, 120 * 160 * 4
    assert planned.bytes == 2 * weights * steps * each  # weights and their gradients
    read: list[tuple[str, int, int]] = []
    for store in (ZarrReadStore, Hdf5ReadStore):
        plainly = store.read

        def noting(self: Any, name: str, start: int, stop: int, *rest: Any, plainly: Any = plainly, **how: Any) -> Any:
            read.append((name, start, stop))
            return plainly(self, name, start, stop, *rest, **how)

        monkeypatch.setattr(store, "read", noting)
    told = CliRunner().invoke(main, ["replay", str(path), *(f"--subscriber={one}" for one in specs)])
    assert told.exit_code == 0, told.output
    rows = [(name, row) for name, start, stop in read for row in range(start, stop) if "/weight" in name]
    assert len(rows) == len(set(rows)) == 2 * weights * steps
    assert not [name for name, *_ in read if "activations" in name]


# -- what is missing ------------------------------------------------------------------------------------------


def test_what_is_missing_is_named_with_what_is_there(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is not there is an error before any data is read, that names it and what there is."""
    monkeypatch.setattr(TraceReader, "messages", lambda *_: pytest.fail("data was read"))
    with pytest.raises(CaptureError) as raised:
        tracer.replay(trace, CallbackSubscriber(["layer_inputs", "weights"], print))
    sentence = str(raised.value)
    assert sentence.startswith(f"CallbackSubscriber needs layer_inputs (tag default), but {trace} has only")
    there = sentence.partition("has only ")[2]
    for kind in {*DEFAULT, "rate"}:
        assert kind in there
    assert "layer_inputs" not in there
    for receiver, match in (
        (CallbackSubscriber("weights", print, tag="probe"), r"needs weights \(tag probe; there is tag default\)"),
        (CallbackSubscriber("weights", print, modules="nine"), "needs weights .* of modules nine"),
        (CallbackSubscriber("weights", print, modules="1"), "of modules 1"),
    ):
        with pytest.raises(CaptureError, match=match):
            tracer.replay(trace, receiver)
    with pytest.raises(CaptureError, match=r"\(after the filters\) has only activations"):
        tracer.replay(trace, CallbackSubscriber("weights", print), kinds="activations")


def test_what_cannot_be_a_replay(trace: Path) -> None:
    """Nobody who listens, unknown kinds and tags, and steps that are no range are errors of their own."""
    with pytest.raises(CaptureError, match="somebody to listen"):
        tracer.replay(trace)
    with pytest.raises(UnknownNameError, match="did you mean 'weights'"):
        tracer.replay(trace, Collect(), kinds="wieghts")
    with pytest.raises(UnknownNameError, match="did you mean 'probe'"):
        tracer.replay(trace, Collect(), tags="prob")
    for steps in ((3, 1), (-1, 2), (0, 4, 0), (0,), (0.5, 2)):
        with pytest.raises(CaptureError, match="steps"):
            tracer.replay(trace, Collect(), steps=steps)
    with pytest.raises(tracer.TraceNotFoundError):
        tracer.replay(trace.with_name("other.zarr"), Collect())


def test_kinds_that_exist_but_were_not_recorded_are_no_typo(trace: Path) -> None:
    """A filter by a known kind that the trace happens to lack gives nothing, as any filter may."""
    assert heard_by_replay(trace, kinds="layer_inputs") == []
    assert heard_by_replay(trace, modules="nine") == []


# -- who hears what -------------------------------------------------------------------------------------------


class Answers(Subscriber):
    """Answers each message of a kind with one of another, one larger."""

    def __init__(self, needs: str, produces: str) -> None:
        super().__init__(Subscription(needs, tag=None), produces=produces)

    def compute(self, message_or_bundle: Message) -> Iterator[Message]:
        message = message_or_bundle
        yield tracer.derived(message, self.produces[0], message.data + 1)


def test_a_collector_overhears_or_asks(trace: Path) -> None:
    """`Collect()` hears what others ask for and their answers; with kinds it asks itself; alone it hears everything."""
    overheard = {one.kind for one in heard_by_replay(trace, Answers("weights", "a"))}
    assert overheard == {"weights", "a"}
    asked = Collect("bias*", "a")
    tracer.replay(trace, Answers("weights", "a"), asked)
    assert {one.kind for one in asked} == {"biases", "bias_gradients", "bias_updates", "a"}
    assert {one.kind for one in heard_by_replay(trace)} == {*DEFAULT, "rate"}


class Satisfied(Collect):
    """Wants no more than the losses of the first steps."""

    @property
    def is_satisfied(self) -> bool:
        return len(self.messages) >= 2


def test_a_receiver_that_is_satisfied_gets_no_further_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is what the others want; a replay without others ends."""
    path = tmp_path / "run.zarr"
    with tracer.TraceWriter(path) as writer:
        for step in range(200):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(tracer.NetworkMessage(kind="loss", data=torch.tensor(1.0), **where))
    monkeypatch.setattr(tracer.replaying.wanted, "WINDOW_ROWS", 64)
    first, alone, whole = Satisfied("loss"), Satisfied("loss"), Collect("loss")
    tracer.replay(path, alone)
    assert 2 <= len(alone) < 70
    tracer.replay(path, first, whole)
    assert len(whole) == 200


DEFAULT = set(DATA_KINDS) - {
    *("layer_inputs", "input_gradients", "gradient_norms", "sample_ids", "eval_mode", "train_mode")
}


def test_producers_may_come_in_any_order(trace: Path) -> None:
    """A chain of subscribers works whatever the order in which they are given."""
    chain = [Answers("weights", "a"), Answers("a", "b"), Answers("b", "c")]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        heard = Collect("c")
        tracer.replay(trace, heard, *(chain[i] for i in order))
        expected = heard_by_replay(trace, kinds="weights")
        assert [place(one)[1:] for one in heard] == [place(one)[1:] for one in expected]
        for got, raw in zip(heard, expected, strict=True):
            assert torch.equal(got.data, raw.data + 1 + 1 + 1)


def test_a_reader_that_was_given_stays_open(trace: Path) -> None:
    """A replay closes what it opened, and nothing else."""
    with TraceReader(trace) as reader:
        tracer.replay(reader, Collect("loss"))
        assert len(list(reader.messages(kinds="loss"))) == STEPS + 2


# -- results of earlier replays -------------------------------------------------------------------------------


def test_results_can_be_replayed(trace: Path, tmp_path: Path) -> None:
    """The answers of one replay, written as a trace, are what a later one consumes."""
    results = tmp_path / "results.zarr"
    heard = Collect("a")
    tracer.replay(trace, Answers("weights", "a"), heard)
    with TraceWriter(results) as writer:
        for message in heard:
            writer.write(message)
    direct, later = Collect("b"), Collect("b")
    tracer.replay(trace, Answers("weights", "a"), Answers("a", "b"), direct)
    tracer.replay(results, Answers("a", "b"), later)
    assert [place(one) for one in later] == [place(one) for one in direct]
    assert all(torch.equal(one.data, other.data) for one, other in zip(later, direct, strict=True))
    with pytest.raises(CaptureError, match=r"produces a, which .* already holds"):
        tracer.replay(results, Answers("a", "a"), Collect())


# -- updates that were not recorded ---------------------------------------------------------------------------


def test_updates_are_derived_from_consecutive_weights(tmp_path: Path) -> None:
    """From weights alone a replay tells the updates that a live subscriber heard, all but the last, to the bit."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
    exporter = tracer.Exporter()
    live = Collect("weight_updates", "bias_updates")
    exporter.message_bus.register(live)
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    path = tmp_path / "run.zarr"
    capture = Capture(kinds=["weights", "biases", "weight_gradients"])
    with tracer.record(path, model, optimizer, capture=capture, strict=True):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().sum().backward()
            optimizer.step()
    exporter.detach()
    replayed = Collect("weight_updates", "bias_updates")
    tracer.replay(path, replayed)
    expected = [one for one in live if one.global_step < 4]
    assert [place(one) for one in replayed] == [place(one) for one in expected]
    assert all(torch.equal(one.data, other.data) for one, other in zip(replayed, expected, strict=True))
    part = Collect("weight_updates")
    tracer.replay(path, part, steps=(1, 3), modules="2")
    assert [(one.global_step, one.key) for one in part] == [(1, "2"), (2, "2")]
    bundles: list[tuple[Tensor, ...]] = []
    tracer.replay(path, CallbackSubscriber(["weight_updates", "weights"], lambda *of: bundles.append(of)))
    assert len(bundles) == 8


@pytest.mark.parametrize(
    ("dtype", "values", "of_updates"),
    [
        (torch.uint8, [3, 5, 2], torch.int16),
        (torch.int8, [100, -100, 7], torch.int16),
        (torch.bool, [1, 0, 1], torch.int16),
        (torch.float8_e4m3fn, [0.5, 448.0, -448.0], torch.float32),
        (torch.float8_e5m2, [0.5, 2.0, -57344.0], torch.float32),
        (torch.bfloat16, [1.0, 3.0, 2.5], torch.bfloat16),
        (torch.float16, [1.0, 3.0, 2.5], torch.float16),
        (torch.complex64, [1.0, 2.0j, 3.0], torch.complex64),
    ],
)
def test_updates_of_all_dtypes_are_derived(
    dtype: torch.dtype, values: list[Any], of_updates: torch.dtype, tmp_path: Path
) -> None:
    """As they are recorded, of numbers of 8 bits, too, which are wider than those; and the plan says so."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step, value in enumerate(values):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            writer.write(ModuleMessage(kind="weights", module="fc", data=torch.tensor([value]).to(dtype), **where))
    heard = Collect("weight_updates")
    tracer.replay(path, heard)
    assert [one.data.item() for one in heard] == [now - before for before, now in itertools.pairwise(values)]
    assert {one.data.dtype for one in heard} == {of_updates}
    (planned,) = tracer.plan(path, heard).derived
    assert planned.dtype == str(of_updates).removeprefix("torch.")


def test_updates_are_planned_only_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it takes to find them grows with the trace."""
    path = tmp_path / "run.zarr"
    with TraceWriter(path) as writer:
        for step in range(3):
            where = {"global_step": step, "train_step": step, "epoch": 0}
            for module in ("a", "b"):
                writer.write(ModuleMessage(kind="weights", module=module, data=torch.ones(2), **where))
    asked = []
    pairs = wanted.pairs_of
    monkeypatch.setattr(wanted, "pairs_of", lambda *of: asked.append(len(of[1])) or pairs(*of))
    for kinds, modules, expected in (("weights", None, []), ("weight_updates", "b", [3])):
        asked.clear()
        tracer.replay(path, CallbackSubscriber(kinds, lambda *_: None, modules=modules))
        assert asked == expected


@pytest.mark.parametrize(
    "settings", [{"dtype": "float16"}, {"reduce": "mean"}, {"every": 2}], ids=["cast", "reduced", "subsampled"]
)
def test_updates_are_not_made_up(settings: dict[str, Any], tmp_path: Path) -> None:
    """From weights that were cast, reduced or recorded at every other step no update is derived."""
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture(kinds=["weights"], **settings)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture, strict=True):
        for _ in range(4):
            model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
    with pytest.raises(CaptureError, match="needs weight_updates"):
        tracer.replay(tmp_path / "run.zarr", CallbackSubscriber("weight_updates", print))


OF_ELEMENTS = ("mean", "aggregate", "ema", "message_mean", "loss")
"""Metrics of the elements of a tensor, that say as much of some of them, and something else of a reduction."""


@pytest.mark.parametrize(
    ("settings", "spoiled"),
    [
        ({"elements": 5}, dict.fromkeys(["spectral_norm", "norm"], "only some elements of weights")),
        ({"reduce": "norm"}, dict.fromkeys(["spectral_norm", *OF_ELEMENTS], "only the norm of weights")),
        ({"dtype": "float16"}, {}),
    ],
)
def test_parts_of_tensors_are_not_taken_for_tensors(
    settings: dict[str, Any], spoiled: dict[str, str], tmp_path: Path
) -> None:
    """A plan and a replay tell what is about whole tensors where a trace holds parts; the norm of a norm is right."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    capture = tracer.Capture(kinds=["weights"], **settings)
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=capture, strict=True):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    asked = [parse(name) for name in ("spectral_norm", "norm", *(f"{name}:kind=weights" for name in OF_ELEMENTS))]
    planned = tracer.plan(tmp_path / "run.zarr", *asked)
    assert {sentence.partition(" is about")[0]: sentence for sentence in planned.partial}.keys() == spoiled.keys()
    for sentence in planned.partial:
        assert spoiled[sentence.partition(" is about")[0]] in sentence
        # a weight of two by two is whole where five elements of each are kept
        assert ("(0, 1)" in sentence) == ("elements" in settings)
    assert planned.describe()["partial"] == planned.partial
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracer.replay(tmp_path / "run.zarr", *asked)
    assert [str(one.message) for one in caught] == planned.partial


def test_nearest_names_are_suggested(tmp_path: Path) -> None:
    """What is misspelt in a filter of Python's or the command line's is answered with what may be meant."""
    path = tmp_path / "run.zarr"
    with tracer.TraceWriter(path) as writer:
        for module in ("features.conv1", "features.conv2", "classifier"):
            data = torch.ones(2)
            writer.write(ModuleMessage(kind="weights", module=module, global_step=0, train_step=0, epoch=0, data=data))
    with tracer.open(path) as reader:
        for name, call in {
            "'weights'": lambda: reader.array("wieghts", "classifier"),
            "'classifier'": lambda: reader.array("weights", "clasifier"),
            "'features.conv1'": lambda: reader.array("weights", "conv1"),
            "'default'": lambda: reader.array("weights", "classifier", tag="defualt"),
        }.items():
            with pytest.raises(CaptureError, match=rf"has no .*; it has weights of.*; did you mean {name}"):
                call()
    for name, filters in {
        "'weights'": {"kinds": "wieghts"},
        "'classifier'": {"modules": ["features.*", "clasifier"]},
        "'default'": {"tags": "defualt"},
    }.items():
        with pytest.raises((UnknownNameError, CaptureError), match=f"did you mean {name}"):
            tracer.replay(path, parse("norm"), **filters | {"modules": filters.get("modules", [])[1:] or None})
        with pytest.raises(UnknownNameError, match=f"did you mean {name}"):
            tracer.convert(path, tmp_path / "copy.zarr", **filters)
        ((option, value),) = filters.items()
        value = value if isinstance(value, str) else value[-1]
        option = {"kinds": "--kind", "modules": "--modules", "tags": "--tag"}[option]
        told = CliRunner().invoke(main, ["ls", str(path), option, value])
        assert told.exit_code == 2
        assert f"did you mean {name}" in told.stderr
    assert not tracer.plan(path, Collect(), modules="encoder.*").messages
    with pytest.raises(CaptureError, match="has no messages of rank 3; it has 0"):
        tracer.open(path, ranks=[3])
    with pytest.raises(tracer.MessageError, match=r"no parameter 'ordr'; it has kind.*; did you mean 'order'\?"):
        parse("norm:ordr=1")
