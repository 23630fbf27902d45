"""Exceptions, signals and interrupts, in the program or in the recorder, and hooks that the program takes off."""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracer
from tests.observing.recorded import attached, descend, find, mlp, train, watch
from tracer import Capture, Collect, Exporter, Message
from tracer.observing import part
from tracer.observing.pytorch.hooks import Hook

# -- exceptions and interrupts --------------------------------------------------------------------------------


class LateError(RuntimeError):
    """What a handler of the program's raises."""


class Ringing(Collect):
    """Sends this process a signal when it hears of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)

    def receive(self, message: Message) -> tuple[Message, ...]:
        signal.raise_signal(signal.SIGUSR1)
        return ()


@pytest.mark.parametrize("kind", ["activations", "layer_gradients", "weights", "weight_updates", "batch_started"])
def test_what_a_handler_for_a_signal_raises_is_for_the_training(kind: str) -> None:
    """A time limit, say, wherever it comes: in the middle of what an exporter does, too, which else ends alone."""

    def late(number: int, frame: Any) -> None:
        raise LateError

    before = signal.signal(signal.SIGUSR1, late)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bus = tracer.MessageBus(on_error="disable")
    exporter, _ = watch(model, optimizer, strict=False, bus=bus)
    bus.register(Ringing(kind))
    try:
        with pytest.raises(LateError):
            descend(optimizer, lambda _: model(torch.ones(4, 3)).sum(), range(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
        exporter.detach()
    assert not exporter.problems
    assert not bus.failures


def failing(kinds: set[str]) -> Callable[[Message], bool]:
    """A condition that fails for some kinds, from step 1 on."""

    def condition(message: Message) -> bool:
        if message.kind in kinds and message.global_step >= 1:
            raise RuntimeError("no luck")
        return True

    return condition


@pytest.mark.parametrize("kind", ["activations", "weights", "layer_gradients"])
def test_strict_lets_failures_through(kind: str) -> None:
    """With strict=True an exception while observing reaches the training loop, and the clock stays right."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, optimizer, strict=True, condition=failing({kind}))
    train(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="no luck"):
        train(model, optimizer, 1)
    exporter.detach()
    assert not model[0]._forward_hooks


class Faulty(tracer.Subscriber):
    """Fails, or answers what it may not."""

    def __init__(self, how: str) -> None:
        super().__init__(tracer.Subscription(["activations", "epoch_finished"]), produces="declared")
        self.how = how

    def compute(self, message_or_bundle: Message) -> Iterator[Any]:
        message = message_or_bundle
        if self.how == "raises":
            raise ValueError("a faulty metric")
        if self.how == "undeclared":
            yield tracer.derived(message, "undeclared", torch.zeros(1))
        if self.how == "a number":
            yield 3


@pytest.mark.parametrize("how", ["raises", "undeclared", "a number"])
def test_a_failing_subscriber_is_taken_off(how: str, tmp_path: Path) -> None:
    """A live subscriber that fails is disabled with one warning; training, recording and the others go on."""
    model, heard = mlp(), Collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match="no longer listens; the training goes on") as caught:
        with tracer.record(
            tmp_path / "run.zarr", model, optimizer, receivers=[Faulty(how), heard], capture=tracer.Capture()
        ) as run:
            train(model, optimizer, 3)
            run.epoch_finished()
    assert len(caught) == 1
    assert len(find(heard, "activations", "0")) == 3
    with tracer.open(tmp_path / "run.zarr") as trace:
        assert trace.status == "finished"
        assert len(trace.array("activations", "0")[0]) == 3
        (problem,) = [note["problem"] for note in trace.notes if "problem" in note]
        assert "Faulty" in problem["what"]


def test_an_exception_of_the_users_in_a_forward() -> None:
    """After a forward that raised, the next one is observed as if nothing had been."""

    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.raises = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if self.raises:
                raise KeyError("mine")
            return y

    model = nn.Sequential(Moody(), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = watch(model, optimizer, modules="*")
    for raises in (False, True, False):
        model[0].raises = raises
        optimizer.zero_grad()
        if raises:
            with pytest.raises(KeyError, match="mine"):
                model(torch.randn(5, 3))
            continue
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    exporter.detach()
    assert [one.global_step for one in heard.of("network_output")] == [0, 1]
    assert [(one.global_step, one.call) for one in find(heard, "activations", "0.layer")] == [(0, 0), (1, 0), (1, 1)]
    inputs = find(heard, "layer_inputs", "0")
    assert [(one.global_step, one.call) for one in inputs] == [(0, 0), (1, 0)]
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]


class _Stop(BaseException):
    """As what interrupts a program."""


def interrupted_at(number: int, work: Callable[[], Any]) -> bool:
    """Do work, and interrupt it where the `number`-th time a signal could be heard in this project's code; whether so.

    Python looks for signals when a function begins, and when one that is not written in Python has returned.
    """
    left = number
    ours = str(Path(tracer.__file__).parent)

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(ours):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise _Stop

    sys.setprofile(look)
    try:
        work()
    except _Stop:
        pass
    finally:
        sys.setprofile(None)
    return left < 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where Python lets go of things
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("first", "stride"), [(0, 30), *(pytest.param(place, 6, marks=pytest.mark.slow) for place in range(6))]
)
def test_an_interrupt_anywhere(every: int, first: int, stride: int, tmp_path: Path) -> None:
    """Wherever an interrupt meets the recorder, the steps after the one that it met are recorded whole, and right.

    Every thirtieth place is looked at, and all of them in the slow suite.
    """
    torch.manual_seed(0)
    model, loss, seen = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), nn.MSELoss(), {}
    optimizer, heard = torch.optim.SGD(model.parameters(), lr=0.1), Collect("*")
    x, y = torch.randn(4, 3), torch.randn(4, 2)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    kinds = ("layer_inputs", "activations", "layer_gradients", "weights", "weight_gradients", "weight_updates", "loss")
    capture = Capture(kinds=kinds, every=every)
    with (
        warnings.catch_warnings(),
        tracer.record(tmp_path / "run.zarr", model, optimizer, loss=loss, capture=capture, receivers=[heard]) as run,
    ):
        warnings.simplefilter("ignore")
        step()
        number = first
        while interrupted_at(number, lambda: [step() for _ in range(every)]):
            step()  # the step that was open is over now, if it was not
            for _ in range(every):
                now = run.global_step
                before = model[0].weight.detach().clone()
                step()
                assert run.global_step == now + 1, number
                gradient = model[0].weight.grad.clone()
                seen[now] = number, before, gradient, model[0].weight.detach() - before
            number += stride
    assert number > 500
    found: dict[int, dict[tuple[str, str | None], list[Tensor]]] = {}
    for one in heard:
        if one.data is not None:
            found.setdefault(one.global_step, {}).setdefault((one.kind, one.key), []).append(one.data)
    with tracer.open(tmp_path / "run.zarr") as trace:
        written = Counter(one.global_step for one in trace.messages() if one.data is not None)
    for now, (number, before, gradient, update) in seen.items():
        if now % every:
            assert now not in found, number
            continue
        step_found = found[now]
        assert sorted(map(len, step_found.values())) == [1] * len(step_found), (number, now)
        assert written[now] == len(step_found) == 10, (number, now)
        assert torch.equal(step_found["weights", "0"][0], before), number
        assert torch.equal(step_found["weight_gradients", "0"][0], gradient), number
        assert torch.equal(step_found["weight_updates", "0"][0], update), number
        assert torch.equal(step_found["layer_inputs", "0"][0], x), number


def test_a_spoilt_message_is_not_recorded(tmp_path: Path) -> None:
    """What a live receiver wrote into is left out of the trace and counted, rather than recorded wrong."""

    class Spoiler(tracer.Subscriber):
        def __init__(self) -> None:
            super().__init__(tracer.Subscription("weights"))

        def compute(self, message: Message) -> None:
            assert message.data is not None
            message.data.zero_()

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        pytest.warns(RuntimeWarning, match="changed the data"),
        tracer.record(tmp_path / "run.zarr", model, optimizer, receivers=[Spoiler()], capture=tracer.Capture()),
    ):
        descend(optimizer, lambda _: model(torch.ones(4, 3)).sum(), range(3))
    with tracer.open(tmp_path / "run.zarr") as trace:
        steps, weights = trace.array("weights", "")
        assert steps.tolist() in ([1, 2], [0, 1, 2])  # the first may have been written before it was spoilt
        assert all(bool((one != 0).any()) for one in weights)
    assert not torch.equal(before[0], model.weight)


def test_parts_that_fail_leave_nothing_behind() -> None:
    """The inputs of calls that raised are let go of with the step."""
    model = nn.ModuleDict({"part": nn.Linear(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, _ = watch(model, optimizer)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model["part"](torch.randn(4, 7))
    model["part"](torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert exporter.parts.gate.passes.now.inputs == []
    exporter.detach()


# -- hooks that the program takes off -------------------------------------------------------------------------


def take_off(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> None:
    """Remove all hooks as programs do that think that all are theirs."""
    for one in model.modules():
        if way == "cleared":
            one._forward_hooks.clear()
            one._forward_pre_hooks.clear()
        else:
            one._forward_hooks = OrderedDict()
            one._forward_pre_hooks = {} if way == "plain" else OrderedDict()  # type: ignore[assignment]
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if way == "cleared":
            getattr(optimizer, name).clear()
        else:
            setattr(optimizer, name, OrderedDict())


@pytest.mark.parametrize("what", ["model", "optimizer", "both"])
@pytest.mark.parametrize("when", ["between steps", "before the optimizer"])
@pytest.mark.parametrize("way", ["cleared", "replaced", "plain"])
def test_hooks_that_the_program_takes_off_come_back(way: str, when: str, what: str) -> None:
    """Streams go on with the next step at the latest, at most one step is counted with the next, and it is told."""

    def train(exporter: Exporter | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        nothing = nn.Linear(1, 1)
        other = torch.optim.SGD(nothing.parameters(), lr=0.1)
        if exporter is not None:
            exporter.set_loss("mse_loss")
            exporter.set_model(model)
            exporter.set_optimizer(optimizer)
        for step in range(6):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            targets = (model if what != "optimizer" else nothing, optimizer if what != "model" else other)
            if step == 2 and when == "between steps":
                take_off(*targets, way)
            optimizer.zero_grad()
            F.mse_loss(model(x), torch.zeros(4, 2)).backward()
            if step == 2 and when == "before the optimizer":
                take_off(*targets, way)
            optimizer.step()
        return model, optimizer

    exporter, heard = Exporter(strict=True), Collect("*")
    exporter.message_bus.register(heard)
    with pytest.warns(RuntimeWarning, match="the program took the recorder's hooks off"):
        model, optimizer = train(exporter)
        exporter.finish()
    plain, _ = train(None)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    told = {problem["what"] for problem in exporter.problems}
    assert ("what passed through the model, '0', '1', '2' meanwhile" in told) == (what != "optimizer")
    assert ("what SGD did meanwhile" in told) == (what != "model")
    # a step of an optimizer without hooks is not seen; before the forward, or the loss, they are put back
    expected = 5 if what != "model" and when == "before the optimizer" else 6
    assert exporter.global_step == expected
    last = [message for message in heard if message.global_step == expected - 1]
    assert {(m.kind, m.key) for m in last} == {
        (m.kind, m.key) for m in heard if m.global_step == 1 and m.kind != "epoch_started"
    }
    (weights,) = [m.data for m in last if m.kind == "weights" and m.key == "0"]
    (update,) = [m.data for m in last if m.kind == "weight_updates" and m.key == "0"]
    assert weights is not None
    assert update is not None
    assert torch.allclose(weights + update, model[0].weight)
    exporter.detach()
    for one in model.modules():
        assert not one._forward_hooks
        assert not one._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_an_idle_step_notices_that_the_optimizer_has_no_hooks() -> None:
    """Of steps that nobody records, none is merged with another where the hooks are taken off between two steps."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = attached(
        Exporter(capture=Capture(kinds=["weights"], every=4)), Collect("weights"), model, optimizer
    )
    with pytest.warns(RuntimeWarning, match="the program took the recorder's hooks off"):
        for step in range(9):
            if step in (2, 6):
                optimizer._optimizer_step_post_hooks.clear()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
    assert exporter.global_step == 9
    assert sorted({message.global_step for message in heard}) == [0, 4, 8]
    (problem,) = exporter.problems
    assert problem["what"] == "what SGD did meanwhile"
    assert problem["count"] == 2
    exporter.detach()


# -- hooks inside the model rest in steps that nobody records: the same is recorded, and no order of----------


def hooks_inside(model: nn.Module) -> list[str]:
    """Whose hooks hang inside a model, in the order in which torch calls them."""
    return ["ours" if isinstance(hook, Hook) else "other" for hook in model[0]._forward_hooks.values()]


class Spy(nn.Module):
    """Says which hooks hang on its neighbour while it runs; fails, or hangs a hook of its own, if told to."""

    def __init__(self, model: list[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.seen: list[list[str]] = []
        self.do: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(hooks_inside(self.model[0]))
        if self.do is not None:
            self.do()
        return x


@pytest.fixture
def network() -> tuple[nn.Sequential, Spy, torch.optim.Optimizer]:
    """A model, the spy in it, and its optimizer."""
    place: list[nn.Module] = []
    model = nn.Sequential(nn.Linear(3, 4), Spy(place), nn.Linear(4, 2))
    place.append(model)
    return model, model[1], torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[return-value]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Train some steps."""
    descend(optimizer, lambda _: model(torch.ones(2, 3)).sum(), range(steps))


EVERY = [Capture(kinds=["activations"], every=4)]


def nine_steps(network: Any, run: Any) -> None:
    """They hang in each recorded step, whose messages are there, and between forwards."""
    model, _, optimizer = network
    trained(model, optimizer, 9)
    assert hooks_inside(model) == ["ours"]
    assert run.global_step == 9


def with_another_hook(network: Any, run: Any) -> None:
    """A hook beside which others hang stays; a hook that the program hangs meanwhile comes after it."""
    model, spy, optimizer = network
    trained(model, optimizer, 2)
    spy.do = lambda: model[0].register_forward_hook(lambda *_: None)
    trained(model, optimizer)
    spy.do = None
    assert hooks_inside(model) == ["ours", "other"]
    trained(model, optimizer, 3)
    assert spy.seen[1:] == [["ours"], [], *[["ours", "other"]] * 3]


def with_a_failure(network: Any, run: Any) -> None:
    """The next step that is recorded has its messages, and nothing is told of hooks that were taken off."""
    model, spy, optimizer = network

    def fail() -> None:
        raise ValueError("of its own")

    trained(model, optimizer, 3)
    spy.do = fail
    with pytest.raises(ValueError, match="of its own"):
        trained(model, optimizer)
    spy.do = None
    trained(model, optimizer, 4)


def accumulated(network: Any, run: Any) -> None:
    """Each forward of a step takes the short way, and a step is a step."""
    model, _, optimizer = network
    for _ in range(9):
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert run.global_step == 9


# whose hooks hang while a forward runs: the first step after a recorded one finds out until when nothing is due
RESTING: dict[str, tuple[Callable[[Any, Any], None], list[bool] | None, list[tuple[int, int]]]] = {
    "nine steps": (nine_steps, [step % 4 < 2 for step in range(9)], [(0, 0), (4, 0), (8, 0)]),
    "compiled": (nine_steps, [True] * 9, [(0, 0), (4, 0), (8, 0)]),  # a graph is made anew when hooks come and go
    "another hook": (with_another_hook, None, [(0, 0), (4, 0)]),
    "a failure": (with_a_failure, None, [(0, 0), (4, 0)]),
    "accumulated": (
        accumulated,
        [step % 4 == 0 or (step % 4 == 1 and forward == 0) for step in range(9) for forward in range(3)],
        [(step, call) for step in (0, 4, 8) for call in range(3)],
    ),
}


@pytest.mark.parametrize("name", RESTING)
def test_hooks_rest_in_steps_that_nobody_records(
    name: str, tmp_path: Path, network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless torch has compiled anything; and whatever happens meanwhile, the recorded steps have their messages."""
    train, seen, calls = RESTING[name]
    monkeypatch.setattr(part, "compiled_anything", lambda: name == "compiled")
    model, spy, optimizer = network
    with tracer.record(tmp_path / "run.zarr", model, optimizer, capture=EVERY) as run:
        train(network, run)
    assert seen in (None, [bool(one) for one in spy.seen])
    with tracer.open(tmp_path / "run.zarr") as trace:
        found = trace.messages(kinds=["activations"], modules=["0"])
        assert [(one.global_step, one.call) for one in found] == calls
        assert not trace.problems
