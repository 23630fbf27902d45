"""The laws of the architecture over the registry: what subscribers say live and on replay, and what a trace holds."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from analyze.asking import analyze
from analyze.batching.batch import batch as run_batch
from analyze.batching.units import questions
from analyze.registry import describe, parse, subscribers
from analyze.tables.columns import Row
from tests.laws import (
    BATCHES,
    EPOCHS,
    FORMATS,
    NAMES,
    NEEDING_THE_MODEL,
    Training,
    batch,
    everyone,
    exact,
    live_only,
)
from tracer import Capture, Collect, Message, ModuleMessage, NetworkMessage, Subscriber
from tracer.messaging.messages import DATA_KINDS, KINDS, MODULE_KINDS
from tracer.messaging.receiver import in_order


def with_producers(*names: str) -> list[Subscriber]:
    """The subscribers of these names, and those whose answers they take."""
    there = everyone()
    wanted = [there[name] for name in names]
    for one in wanted:
        for kind in sorted(one.needs - set(KINDS)):
            producers = [other for other in there.values() if kind in other.produces]
            assert producers, f"{one.name} needs {kind}, which no registered subscriber produces by default"
            wanted += [producers[0]] if producers[0] not in wanted else []
    return wanted


def derived_by(name: str, heard: Collect) -> list[tuple[Any, ...]]:
    """What the subscriber of this name said."""
    produces = parse(name).produces
    return [exact(message) for message in heard if message.kind in produces]


@dataclasses.dataclass
class Live:
    """A recording, and what was heard while it was made."""

    path: Path
    heard: Collect


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Live]:
    """A training with every registered subscriber attached, recorded once in each format that is asked for."""

    @functools.cache
    def record(suffix: str) -> Live:
        path = tmp_path_factory.mktemp("laws") / f"run.{suffix}"
        training, heard = Training.new(), Collect()
        receivers = [*everyone().values(), *live_only().values(), heard]
        probe_x, probe_y = batch(200, 12)
        capture = Capture(kinds=KINDS)
        with tracer.record(
            path,
            training.model,
            training.optimizer,
            loss=training.loss,
            capture=capture,
            receivers=receivers,
            strict=True,
        ) as run:
            run.probe("probe", probe_x, probe_y, every=2)
            training.run(run)
        return Live(path, heard)

    return record


@pytest.fixture(scope="module")
def live(request: pytest.FixtureRequest, recorded: Callable[[str], Live]) -> Live:
    """That training; that both formats give the same messages is tested once, so all else is asked of one."""
    return recorded(getattr(request, "param", "zarr"))


# -- 1. live = replay -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_replay_says_what_was_said_live(name: str, live: Live) -> None:
    """Every registered subscriber says on replay, bit for bit, what it said live; and it says something."""
    heard = Collect()
    tracer.replay(live.path, *with_producers(name), heard)
    expected = derived_by(name, live.heard)
    assert expected, f"{name} said nothing in a training with evaluations and a probe"
    assert derived_by(name, heard) == expected
    said = {kind for _, kind, *_ in expected}
    assert said == set(parse(name).produces), f"{name} promised {parse(name).produces} and gave {said}"
    assert {data[0] for *_, data in expected} <= {"torch.float64", "torch.int64"}


@pytest.mark.parametrize("name", [name for name in NAMES if parse(name).takes_many])
def test_many_messages_at_once_say_what_was_said_live(
    name: str, recorded: Callable[[str], Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes many messages at once says of these, bit for bit, what was said live of each, however few are alike."""
    live, heard = recorded("zarr"), Collect()
    monkeypatch.setattr(tracer.trace.data, "FEW", 0)
    monkeypatch.setattr(tracer.MessageBus, "publish", None)  # nothing is published by itself
    tracer.replay(live.path, parse(name), heard)
    assert derived_by(name, heard) == derived_by(name, live.heard) != []


@pytest.mark.parametrize("steps", [1, 3, 4])
def test_a_replay_in_two_parts_goes_on_where_it_stopped(live: Live, steps: int) -> None:
    """With the state of the first part loaded, the second part of a replay says the rest of what was said live."""
    first, second, heard = everyone(), everyone(), Collect()
    # the last answers of the first part are not the end of the run: take its state before `finish` is asked for
    with tracer.open(live.path) as trace:
        bus = tracer.MessageBus()
        for one in [*in_order(list(first.values())), heard]:
            bus.register(one)
        for message in trace.messages(steps=(0, steps)):
            bus.publish(message)
    for name, one in second.items():
        one.load_state_dict(copy.deepcopy(first[name].state_dict()))
    tracer.replay(live.path, *second.values(), heard, steps=(steps, None))
    for name in NAMES:
        assert sorted(derived_by(name, heard)) == sorted(derived_by(name, live.heard)), name


def test_there_are_subscribers_that_need_the_model() -> None:
    """The registry tells them apart."""
    told = {name: describe(name)["needs_model"] for name in subscribers()}
    assert {name for name, needing in told.items() if needing} == set(NEEDING_THE_MODEL)
    assert {"hessian_eigen", "hessian_trace", "ticdiag", "tictrace"} <= set(NEEDING_THE_MODEL)


@pytest.mark.parametrize("name", NEEDING_THE_MODEL)
def test_who_needs_the_model_answers_live_and_is_refused_on_replay(name: str, live: Live) -> None:
    """Live it answers each loss, in the kinds that it promises; a replay and a batch refuse it and say what serves."""
    said = [message for message in live.heard if message.kind in parse(name).produces]
    assert {message.kind for message in said} == set(parse(name).produces)
    assert len(said) == EPOCHS * BATCHES * len(parse(name).produces)
    assert all(bool(torch.isfinite(message.data).all()) for message in said)
    heard = Collect()
    way = rf"^{name} needs the model.* `trace reenact .*run\.\w+ --steps \d+:\d+ -s {name} \S.*`.*$"
    with pytest.raises(tracer.CaptureError, match=way):
        tracer.replay(live.path, parse(name), heard)
    assert not len(heard)
    (missing,) = tracer.plan(live.path, parse(name)).missing
    assert re.fullmatch(way, missing)
    with pytest.raises(tracer.CaptureError, match=f"{name} needs the model.*trace reenact"):
        run_batch(live.path, [name], live.path.parent / "never", workers=0)
    assert not (live.path.parent / "never").exists()


@pytest.mark.parametrize("live", FORMATS, indirect=True)
def test_the_trace_holds_what_was_observed_in_its_order(live: Live) -> None:
    """The observed messages that a replay gives are those that were heard live, in the same order, to the bit."""
    heard = Collect()
    tracer.replay(live.path, heard)
    observed = [exact(message) for message in live.heard if message.kind in KINDS]
    assert [exact(message) for message in heard] == observed
    assert {message.kind for message in heard} == set(KINDS) - {"eval_mode", "train_mode"}


# -- 2. values only -------------------------------------------------------------------------------------------


def test_messages_are_values(live: Live) -> None:
    """A message is frozen, and holds nothing but names, integers and a tensor without a graph."""
    for message in live.heard:
        for field in dataclasses.fields(message):
            value = getattr(message, field.name)
            if field.name == "sampling" and value is not None:
                assert json.loads(json.dumps(value)) == value
            else:
                assert type(value) in (str, int, Tensor, type(None)), (message.kind, field.name, type(value))
        assert message.data is None or (message.data.grad_fn is None and not message.data.requires_grad)
        assert type(message) in (NetworkMessage, ModuleMessage)
        with pytest.raises(dataclasses.FrozenInstanceError):
            message.global_step = 1  # type: ignore[misc]
        assert not hasattr(message, "__dict__")


def test_no_two_messages_share_memory() -> None:
    """What a message holds is its own: neither another message's memory nor a parameter's, buffer's or gradient's."""
    training, heard = Training.new(), Collect("*")
    exporter = tracer.Exporter(capture=Capture(kinds=DATA_KINDS))
    exporter.message_bus.register(heard)
    exporter.set_model(training.model)
    exporter.set_optimizer(training.optimizer)
    exporter.set_loss(training.loss)
    training.run()
    exporter.detach()
    own = {t.untyped_storage().data_ptr() for t in training.model.state_dict().values()}
    own |= {p.grad.untyped_storage().data_ptr() for p in training.model.parameters() if p.grad is not None}
    own |= {t.untyped_storage().data_ptr() for s in training.optimizer.state.values() for t in s.values()}
    seen: set[int] = set()
    for message in heard:
        if message.data is not None and message.data.numel():
            pointer = message.data.untyped_storage().data_ptr()
            assert pointer not in own, message.kind
            assert pointer not in seen, message.kind
            assert message.data.untyped_storage().nbytes() == message.data.nbytes, message.kind
            seen.add(pointer)
    assert len(seen) > 100


def test_identities_are_unique(live: Live) -> None:
    """No two messages have the same kind, module, tag, leaf, step and call."""
    identities = [exact(message)[1:-1] for message in live.heard]
    assert len(set(identities)) == len(identities)


# -- 3. choice depends on the message alone -------------------------------------------------------------------

MEMORYLESS = [name for name in NAMES if not parse(name).state_dict()]


def test_there_are_memoryless_subscribers() -> None:
    """Most metrics have no memory; those that have say so by a state."""
    assert {"norm", "mean", "ratio", "stable_rank", "spectral_norm"} <= set(MEMORYLESS)
    assert {"svcca", "message_mean", "saturation"}.isdisjoint(MEMORYLESS)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_says_who_remembers(name: str, live: Live, published: list[Message]) -> None:
    """A plan says of each registered subscriber what it remembers across, if it has a state, and only then."""
    one = parse(name)
    told = tracer.plan(live.path, *with_producers(name)).memory
    assert (one.scope != "message") == (name in told)
    if name in told:
        assert told[name] == one.scope
        assert name not in MEMORYLESS
    else:
        answers(one, published)
        assert one.state_dict() == parse(name).state_dict()


@pytest.mark.parametrize("steps", [(2, 4), (0, 1), (1, 6, 2), (None, 3)])
def test_a_replay_of_some_steps_is_a_slice_of_the_whole(steps: Any, live: Live) -> None:
    """A replay of some steps gives what was said live in these steps."""
    part = Collect()
    tracer.replay(live.path, *with_producers(*MEMORYLESS), part, steps=steps)
    chosen = set(range(100)[slice(*steps)])
    for name in MEMORYLESS:
        expected = [one for one in derived_by(name, live.heard) if one[3] in chosen]
        assert derived_by(name, part) == expected, name


@pytest.mark.parametrize("module", ["fc", "conv"])
def test_a_replay_of_one_module_is_a_slice_of_the_whole(module: str, live: Live) -> None:
    """A replay of one module gives what was said live of this module."""
    part = Collect()
    names = [name for name in MEMORYLESS if parse(name).needs <= set(MODULE_KINDS)]
    tracer.replay(live.path, *with_producers(*names), part, modules=module)
    for name in names:
        expected = [one for one in derived_by(name, live.heard) if one[2] == module]
        assert expected
        assert derived_by(name, part) == expected, name


def test_subsampling_is_a_slice_of_the_whole(live: Live) -> None:
    """A subscriber with subsample=2 says what was said live at even steps, wherever its replay starts."""
    part = Collect()
    names = [name for name in MEMORYLESS if "subsample" in inspect.signature(type(parse(name))).parameters]
    tracer.replay(live.path, *[parse(f"{name}:subsample=2") for name in names], part, steps=(1, None))
    for name in names:
        expected = [one for one in derived_by(name, live.heard) if one[3] >= 1 and one[3] % 2 == 0]
        assert derived_by(name, part) == expected, name


# -- 6. observed is not derived -------------------------------------------------------------------------------


def test_a_trace_holds_nothing_derived(live: Live) -> None:
    """Although every metric listened, the trace holds kinds of the exporter only."""
    with tracer.open(live.path) as trace:
        assert {stream.kind for stream in trace.streams} <= set(KINDS)
    assert {message.kind for message in live.heard} > set(KINDS) - {"eval_mode", "train_mode"}


def test_replaying_never_doubles(live: Live) -> None:
    """However often a trace is replayed, each answer comes once, and the trace stays as it is."""
    with tracer.open(live.path) as trace:
        before = len(trace)
    for _ in range(2):
        heard = Collect()
        tracer.replay(live.path, *everyone().values(), heard)
    identities = [exact(message)[1:-1] for message in heard]
    assert len(set(identities)) == len(identities)
    of_model = {kind for one in live_only().values() for kind in one.produces}
    assert sorted(exact(m) for m in heard if m.kind not in KINDS) == sorted(
        exact(m) for m in live.heard if m.kind not in of_model.union(KINDS)
    )
    with tracer.open(live.path) as trace:
        assert len(trace) == before


def test_a_subscriber_that_joins_late_leaves_nothing_in_the_trace(tmp_path: Path) -> None:
    """The answers of a subscriber that is registered in the middle of a run are no observations either."""
    training, heard = Training.new(), Collect("weights_norm2")
    with tracer.record(
        tmp_path / "run.zarr", training.model, training.optimizer, strict=True, capture=tracer.Capture()
    ) as run:
        run.bus.register(parse("norm"))
        run.bus.register(heard)
        training.run(run)
    assert len(heard) > 0
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert {stream.kind for stream in trace.streams} <= set(KINDS)


# -- the parts of a batch are the whole -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "live", "part_bytes"),
    [(name, "zarr", 1) for name in NAMES]
    + [
        pytest.param(name, "h5", 3000, marks=[pytest.mark.slow] if number % 6 else [])
        for number, name in enumerate(NAMES)
    ],
    indirect=["live"],
)
def test_the_parts_of_a_batch_are_the_whole(name: str, part_bytes: int, live: Live, tmp_path: Path) -> None:
    """However finely a batch cuts a trace, what each registered subscriber says is that of one replay, to the bit."""
    names = {type(one): known for known, one in everyone().items()}
    specs = [names[type(one)] for one in with_producers(name)]

    def said(rows: Iterable[Row]) -> list[tuple[Any, ...]]:
        produces = parse(name).produces
        return sorted((*row[2:-1], np.float64(row.value).tobytes()) for row in rows if row.kind in produces)

    results = run_batch(live.path, specs, tmp_path / "out", workers=0, part_bytes=part_bytes)
    assert not results.failures
    assert said(results) == said(analyze(live.path, specs))
    (question,) = (one for one in questions(specs) if one.spec == name)
    parts = [unit for unit in results.units if unit.spec == name]
    cut = part_bytes == 1 and question.scope in ("message", "stream", "step")
    one_stream = question.scope == "stream" and len({module for unit in parts for module in unit.modules or ()}) == 1
    assert len(parts) > 1 or not cut or one_stream


# -- 7. memories and ranks ------------------------------------------------------------------------------------

MERGEABLE = [
    "aggregate",
    "aggregate:over=run",
    "aggregate:over=3,kind=activations,tag=none,which=mean+std+skewness+max+first+last+count",
    "classification_report",
    "classification_report:per=epoch,tag=none",
    "ema",
    "ema:kind=weights,decay=0.5,bias_correction=false",
    "message_mean",
    "message_mean:which=std+median",
    "path_length",
    "path_length:kind=weights,subsample=2",
    "saturation:window=epoch",
    "saturation:window=epoch,tag=none,positions=mean",
    "test_accuracy",
    "test_accuracy:tag=none",
]

AT_ONCE = {"ema", "path_length"}
"""Those of them that answer each message."""


@pytest.fixture(scope="module")
def published(recorded: Callable[[str], Live]) -> list[Message]:
    """All that a replay publishes, which is the same of each format, and the answers that some subscribers take."""
    heard = Collect("*")
    tracer.replay(recorded("zarr").path, parse("svcca"), parse("ratio"), parse("norm"), heard)
    return list(heard)


def answers(one: Subscriber, messages: list[Message]) -> list[Message]:
    """What a subscriber says to these messages, before it is told that there are no more."""
    return [answer for message in messages for answer in one.receive(message)]


def exact_place(message: Message) -> tuple[str, ...]:
    """Everything that a message says, but for its data."""
    return tuple(map(str, exact(message)[:-1]))


def kept(state: Any) -> Any:
    """A state as it comes back from a file that holds tensors and plain values only."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize(
    ("name", "step"), [(name, step) for name in NAMES for step in ((2,) if name in MEMORYLESS else (1, 2, 5))]
)
def test_a_state_is_of_its_moment(name: str, step: int, published: list[Message]) -> None:
    """What is saved in the middle is plain, stays as it is when its subscriber goes on, and leads to its answers."""
    cut = [message.global_step for message in published].index(step)
    first, second, third = parse(name), parse(name), parse(name)
    answers(first, published[:cut])
    state = first.state_dict()
    saved = kept(state)
    rest = [exact(said) for said in [*answers(first, published[cut:]), *first.finish()]]
    assert rest
    for one, at in ((second, state), (third, saved)):
        one.load_state_dict(at)
        assert [exact(said) for said in [*answers(one, published[cut:]), *one.finish()]] == rest


def assert_alike(one: Any, other: Any) -> None:
    """That two states are the same but for rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_alike(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_alike(mine, theirs)
    elif isinstance(one, (Tensor, float)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
    else:
        assert one == other


def test_every_mergeable_subscriber_is_merged_below() -> None:
    """The list of what is merged is complete, and who cannot merge says so in a sentence."""
    assert {wish.partition(":")[0] for wish in MERGEABLE} == {name for name in NAMES if parse(name).mergeable}
    for name in NAMES:
        if not parse(name).mergeable:
            with pytest.raises(tracer.MessageError, match="cannot be put together"):
                parse(name).merge({})


@pytest.mark.parametrize("wish", MERGEABLE)
def test_merged_memories_are_those_of_the_whole(wish: str, published: list[Message]) -> None:
    """Two that heard the parts of a step, or of an epoch, say together what one says that heard it all."""
    scope, cuts = parse(wish).scope, 0
    # a state is taken between bundles
    size = max(len(one.kinds) for one in parse(wish).subscriptions)
    epochs = [[message for message in published if message.epoch == epoch] for epoch in range(EPOCHS)]
    parts = epochs
    if scope == "step":
        parts = [[m for m in epoch if m.global_step == s] for epoch in epochs for s in {m.global_step for m in epoch}]
    for part in parts:
        wanted = [message for message in part if parse(wish).wants(message.kind, message.key, message.tag, None)]
        for cut in range(0, len(wanted) + 1, size * max(1, len(wanted) // 12)):
            whole, one, other = parse(wish), parse(wish), parse(wish)
            expected = answers(whole, wanted)
            said = answers(one, wanted[:cut]) + answers(other, wanted[cut:])
            one.merge(kept(other.state_dict()))
            if wish.partition(":")[0] in AT_ONCE:  # what was answered at once was of a part; what is left is of all
                said, expected = [], []
                assert_alike(one.state_dict(), whole.state_dict())
            for found, right in zip(
                sorted([*said, *one.finish()], key=exact_place),
                sorted([*expected, *whole.finish()], key=exact_place),
                strict=True,
            ):
                assert exact_place(found) == exact_place(right)
                torch.testing.assert_close(found.data, right.data, rtol=1e-12, atol=1e-12, equal_nan=True)
            cuts += 1
    assert cuts > 4


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_of_the_rank_that_was_heard(name: str, published: list[Message]) -> None:
    """Whatever rank a replay is of, it is that of the answers, and their values are those of any other."""
    here, there = parse(name), parse(name)
    expected = [*answers(here, published), *here.finish()]
    moved = [dataclasses.replace(message, rank=3) for message in published]
    found = [*answers(there, moved), *there.finish()]
    assert {said.rank for said in expected} == {0}
    assert {said.rank for said in found} == {3}
    assert [exact(said)[:-1] for said in found] == [exact(said)[:-1] for said in expected]


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    """A program may have set another default device: observations and answers stay where they were, live and later."""

    def said(name: str, where: Any) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters())
        inputs, labels = torch.randn(4, 8, 6), torch.randint(3, (8,))
        heard, later = Collect(), Collect()
        capture = [Capture(kinds=["biases"], elements=3), Capture(kinds=DATA_KINDS)]
        receivers = [*everyone().values(), *live_only().values(), heard]
        with (
            where,
            tracer.record(
                tmp_path / name,
                model,
                optimizer,
                loss=F.cross_entropy,
                capture=capture,
                receivers=receivers,
                strict=True,
            ) as run,
        ):
            run.probe("probe", inputs[0], labels, every=2)
            for x in inputs:
                optimizer.zero_grad()
                F.cross_entropy(model(x), labels).backward()
                optimizer.step()
                run.log("lr", 0.5)
        with where:
            tracer.replay(tmp_path / name, *everyone().values(), later)
        assert {one.data.device.type for one in (*heard, *later) if one.data is not None} == {"cpu"}
        return [exact(message) for message in (*heard, *later)]  # of those that need the model, what they said live

    plain = said("plain.zarr", contextlib.nullcontext())
    assert len({one[1] for one in plain}) > len(NAMES)
    assert said("other.zarr", torch.device("meta")) == plain
