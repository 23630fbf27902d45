"""The laws of the architecture that concern recording and replaying; each test can fail."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import json
import pickle
import random
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
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
from analyze.batching.questions import questions
from analyze.registry import describe, parse, subscribers
from analyze.tables.columns import Row
from tracer import Capture, Collect, Message, ModuleMessage, NetworkMessage, Subscriber
from tracer.messaging.messages import DATA_KINDS, KINDS, MODULE_KINDS
from tracer.messaging.receiver import in_order

FORMATS = ("zarr", "h5")
NAMES = [name for name in subscribers() if not parse(name).needs_model]
NEEDING_THE_MODEL = [name for name in subscribers() if parse(name).needs_model]
EPOCHS, BATCHES = 2, 3


def network() -> nn.Sequential:
    """A small network with everything that watching could disturb: statistics, random numbers, in-place operations."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3),
            norm=nn.BatchNorm2d(4),
            relu=nn.ReLU(inplace=True),
            flatten=nn.Flatten(),
            drop=nn.Dropout(0.3),
            fc=nn.Linear(4 * 4 * 4, 3),
        )
    )


def batch(seed: int, n: int = 8) -> tuple[Tensor, Tensor]:
    """Images and labels, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 6, 6, generator=generator), torch.randint(3, (n,), generator=generator)


def seed_all() -> None:
    """Put all generators in a known state."""
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - users' scripts draw from it
    torch.manual_seed(3)


@dataclasses.dataclass
class Training:
    """A model with its optimizer, and what the training left behind."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: nn.Module
    losses: list[Tensor] = dataclasses.field(default_factory=list)

    @classmethod
    def new(cls) -> Training:
        seed_all()
        model = network()
        return cls(model, torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01), nn.CrossEntropyLoss())

    def run(self, run: tracer.Run | None = None, between: Callable[[], None] = lambda: None) -> Training:
        """Two epochs of three batches, each epoch with an evaluation of two batches in its middle."""
        for epoch in range(EPOCHS):
            for number in range(BATCHES):
                x, y = batch(10 * epoch + number, 8 if number < BATCHES - 1 else 5)
                x = x + 0.01 * random.random() + 0.01 * float(np.random.rand())  # noqa: NPY002
                self.optimizer.zero_grad()
                if run is not None:
                    run.samples(range(10 * number, 10 * number + len(x)))
                loss = self.loss(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.detach().clone())
                if number == 1:
                    self.model.eval()
                    with torch.no_grad():
                        for seed in (100, 101):
                            x, y = batch(seed)
                            self.losses.append(self.loss(self.model(x), y).clone())
                    self.model.train()
                between()
            if run is not None:
                run.epoch_finished()
        return self

    def state(self) -> dict[str, Any]:
        """All that watching must not change, in comparable form."""
        optimizer = self.optimizer.state_dict()
        return {
            "losses": [bits(loss) for loss in self.losses],
            "model": {name: bits(value) for name, value in self.model.state_dict().items()},
            "gradients": {name: None if p.grad is None else bits(p.grad) for name, p in self.model.named_parameters()},
            "optimizer": [
                (number, name, bits(value) if isinstance(value, Tensor) else value)
                for number, state in optimizer["state"].items()
                for name, value in state.items()
            ],
            "groups": repr(optimizer["param_groups"]),
            "modes": [one.training for one in self.model.modules()],
            "attributes": [sorted(vars(one)) for one in self.model.modules()],
            "torch": bits(torch.get_rng_state()),
            "numpy": repr(np.random.get_state()),  # noqa: NPY002
            "python": random.getstate(),
        }


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor to the bit."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.detach().contiguous().numpy().tobytes()


def exact(message: Message) -> tuple[Any, ...]:
    """Everything that a message says, to the bit."""
    return (
        type(message).__name__,
        message.kind,
        message.key,
        message.global_step,
        message.train_step,
        message.epoch,
        message.tag,
        message.call,
        message.leaf,
        None if message.data is None else bits(message.data),
    )


def everyone() -> dict[str, Subscriber]:
    """Every registered subscriber that a replay serves, with its default parameters."""
    return {name: parse(name) for name in NAMES}


def live_only() -> dict[str, Subscriber]:
    """Every registered subscriber that needs the model, with its default parameters."""
    return {name: parse(name) for name in NEEDING_THE_MODEL}


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


def in_turns(*values: Any) -> list[Any]:
    """Each registered subscriber with one of these values, in turns; with the others it is slow."""
    return [
        pytest.param(name, value, marks=[] if at == number % len(values) else [pytest.mark.slow])
        for number, name in enumerate(NAMES)
        for at, value in enumerate(values)
    ]


@pytest.fixture(scope="module", params=FORMATS)
def live(request: pytest.FixtureRequest, recorded: Callable[[str], Live]) -> Live:
    """That training in each format."""
    return recorded(request.param)


# -- 1. live = replay -----------------------------------------------------------------------------------------


# that both formats give the same messages is tested below
@pytest.mark.parametrize(("name", "live"), in_turns(*FORMATS), indirect=["live"])
def test_replay_says_what_was_said_live(name: str, live: Live) -> None:
    """Every registered subscriber says on replay, bit for bit, what it said live; and it says something."""
    heard = Collect()
    tracer.replay(live.path, *with_producers(name), heard)
    expected = derived_by(name, live.heard)
    assert expected, f"{name} said nothing in a training with evaluations and a probe"
    assert derived_by(name, heard) == expected
    said = {kind for _, kind, *_ in expected}
    assert said == set(parse(name).produces), f"{name} promised {parse(name).produces} and gave {said}"


@pytest.mark.parametrize("name", [name for name in NAMES if parse(name).takes_many])
def test_many_messages_at_once_say_what_was_said_live(
    name: str, recorded: Callable[[str], Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes many messages at once says of these, bit for bit, what was said live of each, however few are alike."""
    live, heard = recorded("zarr"), Collect()
    monkeypatch.setattr(tracer.trace.blocks, "FEW", 0)
    monkeypatch.setattr(tracer.MessageBus, "publish", None)  # nothing is published by itself
    tracer.replay(live.path, parse(name), heard)
    assert derived_by(name, heard) == derived_by(name, live.heard) != []


@pytest.mark.parametrize(
    ("live", "steps"),
    [("zarr", 1), ("h5", 3), ("zarr", 4)]
    + [pytest.param(suffix, steps, marks=pytest.mark.slow) for suffix, steps in (("h5", 1), ("zarr", 3), ("h5", 4))],
    indirect=["live"],
)
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
    way = rf"^{name} needs the model.* `trace reenact .*run\.\w+ --subscriber {name} SCRIPT.py`.*$"
    with pytest.raises(tracer.CaptureError, match=way):
        tracer.replay(live.path, parse(name), heard)
    assert not len(heard)
    (missing,) = tracer.plan(live.path, parse(name)).missing
    assert re.fullmatch(way, missing)
    with pytest.raises(tracer.CaptureError, match=f"{name} needs the model.*trace reenact"):
        run_batch(live.path, [name], live.path.parent / "never", workers=0)
    assert not (live.path.parent / "never").exists()


def test_the_trace_holds_what_was_observed_in_its_order(live: Live) -> None:
    """The observed messages that a replay gives are those that were heard live, in the same order, to the bit."""
    heard = Collect()
    tracer.replay(live.path, heard)
    observed = [exact(message) for message in live.heard if message.kind in KINDS]
    assert [exact(message) for message in heard] == observed
    assert {message.kind for message in heard} == set(KINDS)


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

MEMORYLESS = [name for name in NAMES if type(parse(name)).state_dict is Subscriber.state_dict]


def test_there_are_memoryless_subscribers() -> None:
    """Most metrics have no memory; those that have say so by a state."""
    assert {"norm", "mean", "ratio", "stable_rank", "spectral_norm"} <= set(MEMORYLESS)
    assert {"svcca", "message_mean", "saturation"}.isdisjoint(MEMORYLESS)


@pytest.mark.parametrize(("name", "live"), in_turns(*FORMATS), indirect=["live"])
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


# -- 4. watching changes nothing ------------------------------------------------------------------------------


def hooks_of(*things: Any) -> int:
    """How many hooks hang on modules, their parameters and buffers, optimizers, and on torch itself."""
    count = 0
    for thing in things:
        if isinstance(thing, nn.Module):
            for one in thing.modules():
                count += sum(len(value) for name, value in vars(one).items() if "_hooks" in name and value)
                for tensor in [*one._parameters.values(), *one._buffers.values()]:
                    if tensor is not None:
                        count += len(tensor._backward_hooks or ())
                        count += len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())
        else:
            count += len(thing._optimizer_step_pre_hooks) + len(thing._optimizer_step_post_hooks)
    from torch.nn.modules import module
    from torch.optim import optimizer

    count += sum(len(value) for name, value in vars(module).items() if name.startswith("_global") and value)
    return count + len(optimizer._global_optimizer_pre_hooks) + len(optimizer._global_optimizer_post_hooks)


@pytest.fixture(scope="module")
def unwatched() -> dict[str, Any]:
    """The same training without anything of this project."""
    return Training.new().run().state()


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    "capture",
    [
        Capture(kinds=DATA_KINDS),
        Capture(every=2, elements=7, dtype="bfloat16"),
        (Capture(kinds=["activations"], rows=2, positions=3, reduce="norm"), Capture(kinds=["weights"], every=3)),
    ],
    ids=["everything", "elements", "statistics"],
)
@pytest.mark.parametrize("metrics", [False, True], ids=["alone", "with-metrics"])
def test_watching_changes_nothing(
    capture: Any, suffix: str, metrics: bool, unwatched: dict[str, Any], tmp_path: Path
) -> None:
    """Losses, parameters, buffers, optimizer, gradients, modes and generators are those of an unwatched training."""
    training = Training.new()
    receivers = [tracer.CallbackSubscriber("activations", lambda *_: None)] if metrics else []
    if metrics and not isinstance(capture, tuple):
        receivers += [parse("spectral_norm"), parse("ratio")]
    with tracer.record(
        tmp_path / f"run.{suffix}",
        training.model,
        training.optimizer,
        loss=training.loss,
        capture=capture,
        receivers=receivers,
        strict=True,
    ) as run:
        run.probe("probe", *batch(200, 12), every=2, batch_size=5)
        training.run(run)
        assert hooks_of(training.model, training.optimizer) > 0
    assert training.state() == unwatched
    assert hooks_of(training.model, training.optimizer, training.loss) == 0


@pytest.mark.parametrize("capture", [Capture(kinds=KINDS), Capture(kinds=["loss"], every=2)], ids=["all", "loss"])
def test_differentiating_changes_nothing(capture: Capture, unwatched: dict[str, Any], tmp_path: Path) -> None:
    """The same holds where subscribers ask for derivatives of the loss."""
    training, heard = Training.new(), Collect("loss_hessian_trace")
    receivers = [*live_only().values(), heard]
    with tracer.record(
        tmp_path / "run.zarr",
        training.model,
        training.optimizer,
        loss=training.loss,
        capture=capture,
        receivers=receivers,
        strict=True,
    ) as run:
        training.run(run)
    assert training.state() == unwatched
    assert hooks_of(training.model, training.optimizer, training.loss) == 0
    assert len(heard) == EPOCHS * BATCHES // (capture.every or 1)


def test_watching_a_functional_loss_changes_nothing(unwatched: dict[str, Any], tmp_path: Path) -> None:
    """A loss function of torch is itself again afterwards, and the training the same."""
    original, training = F.cross_entropy, Training.new()
    with tracer.record(
        tmp_path / "run.zarr",
        training.model,
        training.optimizer,
        loss=F.cross_entropy,
        strict=True,
        capture=tracer.Capture(),
    ):
        assert F.cross_entropy is not original
        training.run()
    assert F.cross_entropy is original
    assert training.state() == unwatched


@pytest.mark.parametrize("optimizer", [None, ()], ids=["forward-steps", "user-steps"])
def test_watching_without_the_optimizer_changes_nothing(
    optimizer: Any, unwatched: dict[str, Any], tmp_path: Path
) -> None:
    """The same holds for an exporter that does not know the optimizer, which hangs hooks on parameters."""
    training = Training.new()
    with tracer.record(
        tmp_path / "run.zarr", training.model, optimizer, loss=training.loss, strict=True, capture=tracer.Capture()
    ) as run:
        training.run(run, between=run.step if optimizer == () else lambda: None)
    assert training.state() == unwatched
    assert hooks_of(training.model, training.optimizer, training.loss) == 0


def copies(model: nn.Module) -> Iterator[nn.Module]:
    """The model deep-copied, pickled, and saved by torch."""
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("optimizer", ["known", "unknown"])
def test_models_copy_and_pickle_while_watched(optimizer: str, tmp_path: Path) -> None:
    """A copy of a watched model computes the same, publishes nothing, and its own hooks do nothing."""
    training, heard = Training.new(), Collect()
    known = training.optimizer if optimizer == "known" else None
    capture = Capture(kinds=DATA_KINDS)
    with tracer.record(
        tmp_path / "run.zarr", training.model, known, capture=capture, receivers=[heard], strict=True
    ) as run:
        x, y = batch(0)
        training.loss(training.model(x), y).backward()
        training.optimizer.step()
        copied, before = list(copies(training.model)), len(heard)
        step = run.exporter.global_step
        training.model.eval()
        expected = training.model(x)
        training.model.train()
        after = len(heard)
        assert after > before
        for one in copied:
            loss = training.loss(one.train()(x), y)
            loss.backward()
            one.eval()
            assert torch.isfinite(loss)
        assert len(heard) == after
        assert run.exporter.global_step == step
    fresh = network()
    fresh.load_state_dict(copied[0].state_dict())
    assert torch.equal(fresh.eval()(x), copied[0](x))
    assert expected.shape == copied[0](x).shape


def test_models_copy_and_pickle_afterwards(tmp_path: Path) -> None:
    """After a recording the model and the optimizer copy and pickle, and the copies have no hooks."""
    training = Training.new()
    with tracer.record(
        tmp_path / "run.zarr",
        training.model,
        training.optimizer,
        loss=training.loss,
        strict=True,
        capture=tracer.Capture(),
    ):
        training.run()
    x, _ = batch(0)
    expected = training.model.eval()(x)
    for one in copies(training.model):
        assert torch.equal(one(x), expected)
        assert hooks_of(one) == 0
    assert hooks_of(copy.deepcopy(training.optimizer)) == 0
    assert pickle.dumps(training.optimizer)


def test_a_pickled_watched_model_loads_without_this_project(tmp_path: Path) -> None:
    """What is pickled in the middle of a recording names nothing of this project, so it loads without it."""
    training = Training.new()
    with tracer.record(
        tmp_path / "run.zarr", training.model, training.optimizer, strict=True, capture=tracer.Capture()
    ):
        assert b"tracer" not in pickle.dumps(training.model)


def test_an_exception_leaves_no_hooks(tmp_path: Path) -> None:
    """Hooks are gone too when the training ends in an exception, and the exception is the user's own."""
    training = Training.new()
    with pytest.raises(ZeroDivisionError):
        with tracer.record(
            tmp_path / "run.zarr", training.model, training.optimizer, loss=F.cross_entropy, capture=tracer.Capture()
        ):
            training.model(batch(0)[0])
            raise ZeroDivisionError
    assert hooks_of(training.model, training.optimizer) == 0
    assert F.cross_entropy.__module__ == "torch.nn.functional"


# -- 5. nothing nobody wants ----------------------------------------------------------------------------------


def test_hooks_are_only_where_something_is_wanted() -> None:
    """With a receiver of one kind of one module, only this module (and the root, for the clock) has hooks."""
    training = Training.new()
    exporter = tracer.Exporter()
    exporter.set_model(training.model)
    exporter.set_optimizer(training.optimizer)
    exporter.set_loss(training.loss)
    exporter.message_bus.register(tracer.CallbackSubscriber("activations", lambda *_: None, modules="conv"))
    hooked = {name for name, one in training.model.named_modules() if one._forward_hooks or one._forward_pre_hooks}
    assert hooked == {"", "conv"}
    assert not training.loss._forward_hooks
    assert not training.model.conv._forward_pre_hooks
    assert all(
        not (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)) for p in training.model.parameters()
    )
    exporter.message_bus.unregister(exporter.message_bus.receivers[0])
    assert {name for name, one in training.model.named_modules() if one._forward_hooks or one._forward_pre_hooks} <= {
        ""
    }
    exporter.detach()
    assert hooks_of(training.model, training.optimizer, training.loss) == 0


def test_a_capture_bounds_the_hooks(tmp_path: Path) -> None:
    """A recording of weights puts no hook on any inner module."""
    training = Training.new()
    capture = Capture(kinds=["weights", "weight_updates"])
    with tracer.record(tmp_path / "run.zarr", training.model, training.optimizer, capture=capture, strict=True):
        assert {name for name, one in training.model.named_modules() if one._forward_hooks} <= {""}
        training.run()
    kinds = {stream.kind for stream in tracer.open(tmp_path / "run.zarr").streams}
    assert kinds == {"weights", "weight_updates"}


@pytest.mark.parametrize("receiver", ["capture", "subscriber"])
def test_steps_that_nobody_wants_touch_no_tensor(receiver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every=3, or subscribers that take every third step, nothing is selected or copied in the other steps."""
    training = Training.new()
    every = 3 if receiver == "capture" else 1
    exporter = tracer.Exporter(capture=Capture(kinds=DATA_KINDS, tags=["default"], every=every))
    exporter.set_model(training.model)
    exporter.set_optimizer(training.optimizer)
    exporter.set_loss(training.loss)
    if receiver == "capture":
        exporter.message_bus.register(Collect("*"))
    else:
        kinds = [kind for kind in KINDS if KINDS[kind].clock == "global_step"]
        exporter.message_bus.register(tracer.CallbackSubscriber(kinds[0], lambda *_: None, subsample=3))
        for kind in kinds[1:]:
            exporter.message_bus.register(tracer.CallbackSubscriber(kind, lambda *_: None, subsample=3))
    selected: dict[int, int] = {}
    cloned: dict[int, int] = {}
    select, clone = Capture.select, Tensor.clone

    def counting_select(self: Capture, *args: Any) -> Tensor:
        selected[exporter.global_step] = selected.get(exporter.global_step, 0) + 1
        return select(self, *args)

    def counting_clone(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if sys._getframe(1).f_globals["__name__"].startswith("tracer."):  # the training clones, too
            cloned[exporter.global_step] = cloned.get(exporter.global_step, 0) + 1
        return clone(self, *args, **kwargs)

    monkeypatch.setattr(Capture, "select", counting_select)
    monkeypatch.setattr(Tensor, "clone", counting_clone)
    training.run()
    exporter.detach()
    assert set(selected) == {0, 3}
    assert set(cloned) == {0, 3}


def test_differences_are_made_only_when_updates_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants the gradients of one module gets no snapshot of any weight."""
    training, copied = Training.new(), []
    exporter = tracer.Exporter()
    exporter.set_model(training.model)
    exporter.set_optimizer(training.optimizer)
    exporter.message_bus.register(tracer.CallbackSubscriber("weight_gradients", lambda *_: None, modules="fc"))
    select = Capture.select
    monkeypatch.setattr(Capture, "select", lambda self, kind, *rest: copied.append(kind) or select(self, kind, *rest))
    training.run()
    exporter.detach()
    assert copied == ["weight_gradients"] * EPOCHS * BATCHES


# -- 6. observed is not derived -------------------------------------------------------------------------------


def test_a_trace_holds_nothing_derived(live: Live) -> None:
    """Although every metric listened, the trace holds kinds of the exporter only."""
    with tracer.open(live.path) as trace:
        assert {stream.kind for stream in trace.streams} <= set(KINDS)
    assert {message.kind for message in live.heard} > set(KINDS)


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_replaying_never_doubles(live: Live, times: int) -> None:
    """However often a trace is replayed, each answer comes once, and the trace stays as it is."""
    with tracer.open(live.path) as trace:
        before = len(trace)
    for _ in range(times):
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, 2, 5])
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
