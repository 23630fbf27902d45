"""Steps that nobody records take a short way; what is told of the others does not depend on it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.observing.recorded import attached
from tracer import Capture, Collect, Exporter, Message
from tracer.messaging.messages import DATA_KINDS

STEPS = 8
EVERY = 3


class Nested(torch.optim.SGD):
    """An optimizer whose step calls its parent's, so that torch runs the hooks of a step twice."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Rarely(Collect):
    """Wants nothing but the first step."""

    def wants(self, kind: str, module: str | None, tag: str | None, step: int | None) -> bool:
        return not step and super().wants(kind, module, tag, step)

    def awake(self, step: int) -> bool:
        return step == 0


OPTIMIZERS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "one": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
    "two": lambda model: [torch.optim.Adam(model[0].parameters()), torch.optim.Adam(model[2].parameters())],
    "nested": lambda model: [Nested(model.parameters(), lr=0.1)],
    "fused": lambda model: [torch.optim.Adam(model.parameters(), fused=True)],
    "untold": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],  # each forward is a step
}


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels."""
    for _ in range(steps):
        yield torch.randn(5, 3), torch.randint(2, (5,))


def plainly(run: Exporter, model: nn.Module, optimizers: Any, steps: int = STEPS) -> None:
    """Forward, backward, step."""
    for x, y in batches(steps):
        for one in optimizers:
            one.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for one in optimizers:
            one.step()


def with_evaluations(run: Exporter, model: nn.Module, optimizers: Any) -> None:
    """After each step an evaluation: in eval mode, without gradients, or by a tag."""
    for number, (x, y) in enumerate(batches(STEPS)):
        plainly(run, model, optimizers, 1)
        if number % 4 == 0:
            model.eval()
            F.cross_entropy(model(x), y)
            model.train()
        elif number % 4 == 1:
            with torch.no_grad():
                F.cross_entropy(model(x), y)
        else:
            with run.tag("again"):
                F.cross_entropy(model(x), y).backward()


def in_epochs(run: Exporter, model: nn.Module, optimizers: Any) -> None:
    """Epochs of one to three steps, which end at once or when the next step begins."""
    for number, steps in enumerate((2, 3, 2, 1)):
        plainly(run, model, optimizers, steps)
        if number % 2:
            run.epoch_finished()
        else:
            run.parts.steps.epochs.over = True
            if number == 2:
                with torch.no_grad():
                    model(torch.ones(2, 3))


def logging(run: Exporter, model: nn.Module, optimizers: Any) -> None:
    """Values that are logged before and after each step."""
    for number in range(STEPS):
        run.log("rate", 0.1 * number)
        plainly(run, model, optimizers, 1)
        run.log("rate", 0.2 * number)


def accumulating(run: Exporter, model: nn.Module, optimizers: Any) -> None:
    """Two backwards a step."""
    for x, y in batches(STEPS):
        for one in optimizers:
            one.zero_grad()
        for part in (slice(0, 2), slice(2, None)):
            (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
        for one in optimizers:
            one.step()


def with_closures(run: Exporter, model: nn.Module, optimizers: Any) -> None:
    """The forward is inside the optimizers' step."""
    for x, y in batches(STEPS):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            for one in optimizers:
                one.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for one in optimizers:
            one.step(closure)


def with_skipped_steps(run: Exporter, model: nn.Module, optimizers: Any) -> None:
    """Every second backward overflows, and its step is not taken."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(2 * STEPS):
        ((x, y),) = batches(1)
        for one in optimizers:
            one.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * float("inf") if number % 2 else loss).backward()
        for one in optimizers:
            scaler.step(one)
        scaler.update()


def traced(run: Exporter, model: nn.Module, optimizers: Any) -> None:
    """Between two steps the model is traced and exported, in the mode of the training."""
    for number in range(STEPS):
        plainly(run, model, optimizers, 1)
        if number % 3 == 1:
            torch.jit.trace(model, torch.ones(2, 3))
        elif number % 4 == 3:
            torch.export.export(model, (torch.ones(2, 3),), strict=False)


def with_failures(run: Exporter, model: nn.Module, optimizers: Any) -> None:
    """In every second step a forward raises, or the closure of an optimizer, before it is done again."""
    for number, (x, y) in enumerate(batches(STEPS)):
        if number % 2:
            with contextlib.suppress(RuntimeError):
                model(x[:, :2])
        if number % 4 == 1:
            with contextlib.suppress(ZeroDivisionError):
                optimizers[0].step(lambda: 1 / 0)
        for one in optimizers:
            one.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for one in optimizers:
            one.step()


LOOPS = [
    plainly,
    with_evaluations,
    in_epochs,
    logging,
    accumulating,
    with_closures,
    with_skipped_steps,
    traced,
    with_failures,
]


def observed(train: Any, name: str, loss: Any, probed: bool, every: int) -> tuple[list[Message], list[Any], nn.Module]:
    """The messages of a training, what was counted, and the model at its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizers = OPTIMIZERS[name](model)
    exporter, heard = attached(
        Exporter(capture=Capture(kinds=DATA_KINDS, every=every), strict=True),
        Collect("*"),
        model,
        None if name == "untold" else optimizers,
    )
    if loss is not None:
        exporter.set_loss(loss)
    if probed:
        exporter.probe("probe", torch.ones(2, 3), every=2)
    train(exporter, model, optimizers)
    exporter.finish()
    exporter.detach()
    assert exporter.problems == []
    clock = [exporter.global_step, exporter.train_step, exporter.epoch]
    parts = exporter.parts
    return list(heard), [*clock, parts.losses.seen, parts.forwards.seen, parts.optimizer_steps.calls], model


def is_of_sparse(message: Message) -> bool:
    """Whether a message is told although only one step in `EVERY` is recorded."""
    events = ("epoch_started", "epoch_finished", "skipped_step", "rate")
    return message.tag != "default" or message.global_step % EVERY == 0 or message.kind in events


COMBINATIONS = [
    pytest.param(
        *(train, optimizers, loss, probed),
        id=f"{train.__name__}-{optimizers}-{'no loss' if loss is None else 'loss'}-{'probed' if probed else ''}",
        # each loop and each optimizer meet once, with or without a loss, probed or not; and an export, which takes
        # longer than all else, does what it does whatever a step has to count
        marks=[]
        if (number + place) % 4 == 2 * (loss is None) + probed
        and (train is not traced or optimizers in ("one", "untold"))
        else [pytest.mark.slow],
    )
    for number, train in enumerate(LOOPS)
    for place, optimizers in enumerate(OPTIMIZERS)
    for loss in (F.cross_entropy, None)
    for probed in (False, True)
]


@pytest.mark.parametrize(("train", "optimizers", "loss", "probed"), COMBINATIONS)
def test_a_step_is_told_as_it_is_where_all_are_recorded(train: Any, optimizers: str, loss: Any, probed: bool) -> None:
    """Bit for bit, in the same order, with the same counters, whatever happens in the steps between."""
    whole, counted, trained = observed(train, optimizers, loss, probed, 1)
    sparse, same, other = observed(train, optimizers, loss, probed, EVERY)
    assert same == counted
    assert optimizers == "untold" or counted[0] == STEPS
    for one, two in zip(trained.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    expected = [one for one in whole if is_of_sparse(one)]
    assert len(expected) > 50
    assert len(sparse) == len(expected)
    for found, wanted in zip(sparse, expected, strict=True):
        for name in ("kind", "key", "tag", "leaf", "call", "global_step", "train_step", "epoch"):
            assert getattr(found, name) == getattr(wanted, name)
        if wanted.data is None:
            assert found.data is None
        else:
            # an overflow's gradients are not numbers
            torch.testing.assert_close(found.data, wanted.data, rtol=0, atol=0, equal_nan=True)


def test_counting_from_an_earlier_step() -> None:
    """What is known of the steps that nobody records is known of these steps, and not of those before them."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = attached(
        Exporter(capture=Capture(kinds="weights", every=10), strict=True), Collect("weights"), model, optimizer
    )
    for first in (11, 5):
        exporter.start_at(first, 0, 0)
        for _ in range(7):
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
    exporter.detach()
    assert [one.global_step for one in heard] == [10]


@pytest.mark.parametrize("when", ["before the forward", "before the backward", "before the step"])
def test_a_receiver_that_joins_in_the_middle_of_a_step_that_nobody_recorded(when: str) -> None:
    """What is looked at for it in that step leaves nothing behind that the next could take for its own."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter, heard = Exporter(capture=Capture(kinds=DATA_KINDS), strict=True), Collect("*")
    exporter.message_bus.register(Rarely("weights"))
    exporter.set_model(model)
    exporter.set_optimizer(optimizer)
    expected = {}
    for number in range(5):
        optimizer.zero_grad()
        joins = number == 2
        if joins and when == "before the forward":
            exporter.message_bus.register(heard)
        loss = model(torch.randn(2, 3)).sum()
        if joins and when == "before the backward":
            exporter.message_bus.register(heard)
        loss.backward()
        if joins and when == "before the step":
            exporter.message_bus.register(heard)
        before = copy.deepcopy(model)
        optimizer.step()
        expected[number] = before.weight.detach(), (model.weight - before.weight).detach()
    exporter.detach()
    assert exporter.global_step == 5
    for kind, place in (("weights", 0), ("weight_updates", 1)):
        told = {one.global_step: one.data for one in heard.of(kind)}
        assert set(told) - {2} == {3, 4}
        for number, data in told.items():
            assert torch.equal(data, expected[number][place])
