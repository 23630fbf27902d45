"""What is recorded when the program, a hook or a signal raises, when threads run, and what is left alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.endings import same
from tests.observing.oracles import (
    OF_CALLS,
    OF_PARAMETERS,
    batches,
    by_place,
    equal,
    mlp,
    simple,
    situation,
    squares,
    unchanged,
    witnessed,
)
from tests.observing.recorded import data_of, descend, find, only, problems, sgd
from tracer import Message
from tracer.observing.capture import choice


def test_a_parameter_that_cannot_be_copied_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails for one parameter is a problem of its stream; the other parameters and the clock go on."""
    from tracer.observing import parameters as module

    def failing(now: Tensor, before: Tensor, _: Any) -> Tensor:
        if now.shape == (3, 3):
            raise NotImplementedError("no such kernel")
        return now - before

    monkeypatch.setattr(module, "difference", failing)
    with pytest.warns(RuntimeWarning, match="no such kernel"):
        _, exporter, heard = situation(
            mlp, simple, strict=False, but=lambda place: place[:2] == ("weight_updates", "0")
        )
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    assert not find(heard, "weight_updates", "0")
    assert "weight_updates of '0'" in problems(exporter)


def test_strict_failures_of_a_parameter_leave_the_clock_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """With strict=True the failure reaches the loop, after the step was counted."""
    from tracer.observing import parameters as module

    def failing(*_: Any) -> Tensor:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(module, "difference", failing)
    raised: list[bool] = []

    def train(model: nn.Module, optimizer: Any) -> None:
        try:
            simple(model, optimizer, 1)
        except NotImplementedError:
            raised.append(True)
        else:
            raised.append(False)

    _, exporter, heard = unchanged(mlp, train)
    assert raised == [False, True]
    assert exporter.global_step == 1
    assert not heard.of("weight_updates")
    seen = witnessed(mlp, lambda *given: simple(*given, 1))
    equal(by_place(heard, OF_CALLS), {place: one for place, one in seen.items() if place[0] in OF_CALLS})


def test_exceptions_in_the_users_code() -> None:
    """Exceptions in a forward that is tried again, in a backward and in a step: what follows is told right."""

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.fails = nn.Linear(3, 2), True

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.layer(x if not self.fails else x[:, :2])
            except RuntimeError:
                self.fails = False
                return self.layer(x)

    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyError("in the backward")

    def train(model: nn.Module, optimizer: Any) -> None:
        x = batches(1)[0]
        with pytest.raises(KeyError, match="in the backward"):
            Raising.apply(model(x)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    _, _, heard = situation(Trying, train)
    assert [(one.global_step, one.call) for one in find(heard, "activations", "layer")] == [(0, 0), (0, 1), (1, 0)]
    assert [(one.global_step, one.call) for one in find(heard, "layer_gradients", "layer")] == [(0, 1), (1, 0)]
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    for slope in data_of(heard, "bias_gradients", "layer"):
        assert same(slope, torch.full((2,), 4.0))


def of_parts(place: Any) -> bool:
    """Whether something is of a forward that was interrupted, or of an evaluation, which `every` chooses otherwise."""
    return place[0] == "input_data" or place[3] == "eval"


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_an_interrupted_forward(every: int, whole: bool) -> None:
    """Who interrupts a forward, as in a notebook, and goes on, finds what follows recorded as ever.

    PyTorch calls no hook at the end of such a forward, so nothing says then that it is over.
    """

    class Slow(nn.Module):
        interrupted = False

        def forward(self, x: Tensor) -> Tensor:
            if self.interrupted:
                raise KeyboardInterrupt
            return x

    def train(model: nn.Module, optimizer: Any) -> None:
        for number, x in enumerate(batches(6)):
            optimizer.zero_grad()
            if number in (2, 3):
                model[1].interrupted = True
                with pytest.raises(KeyboardInterrupt):
                    model(x)
                model[1].interrupted = False
            output = model(x) if whole or number not in (2, 3) else model[2](model[0](x))
            squares(output).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model[0](x)  # the part alone: nothing else says that another forward runs
            model.train()

    _, _, heard = situation(
        lambda: nn.Sequential(nn.Linear(3, 2), Slow(), nn.Linear(2, 2)), train, every=every, but=of_parts
    )
    recorded = range(0, 6, every)
    found = find(heard, "activations", "0", tag="default")
    both = [(step, call) for step in recorded for call in ((0, 1) if step in (2, 3) else (0,))]
    assert [(one.global_step, one.call) for one in found] == both
    assert [one.global_step for one in find(heard, "activations", "0", tag="eval")] == [1, 2, 3, 4, 5, 6]
    assert [one.global_step for one in heard.of("batch_finished")] == list(recorded)
    assert [one.global_step for one in find(heard, "layer_gradients", "2")] == list(recorded)


def test_exceptions_in_hooks_reach_nobody() -> None:
    """An exception inside our hooks: the training goes on unchanged, other streams go on, the problem is noted."""

    def condition(message: Message) -> bool:
        if (message.kind, message.key) in lost:
            raise OSError("a hook of ours")
        return True

    lost = {("activations", "0"), ("weight_gradients", "0"), ("layer_inputs", "2"), ("layer_gradients", "2")}
    lost |= {("input_data", None), ("weights", "2"), ("weight_updates", "2"), ("loss", None)}
    with pytest.warns(RuntimeWarning, match="a hook of ours"):
        _, exporter, heard = situation(
            mlp, simple, strict=False, condition=condition, loss=F.mse_loss,
            but=lambda place: place[:2] in lost or place[0] == "network_output",  # which the loss would get
        )  # fmt: skip
    assert not [one for one in heard if (one.kind, one.key) in lost]
    of_modules = {f"{kind} of {module!r}" for kind, module in lost if module is not None}
    failed = {f"{what}: OSError: a hook of ours" for what in (*of_modules, "before root", "loss")}
    assert set(problems(exporter).splitlines()) == failed
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]


def test_hooks_return_nothing() -> None:
    """Return values: a hook that returned something would replace the output; ours leave the very objects alone."""
    objects: list[tuple[bool, bool]] = []

    def train(model: Any, optimizer: Any) -> None:
        for x in batches(2):
            given = x.requires_grad_()
            optimizer.zero_grad()
            made = model[1](passed := model[0](given))
            loss = model[2](made).square().sum()
            objects.append((passed is given, model[2](made) is made))
            loss.backward()
            optimizer.step()

    situation(lambda: nn.Sequential(nn.Identity(), nn.Linear(3, 2), nn.Identity()), train)
    assert objects == [(True, True)] * 6


def test_an_evaluation_in_another_thread() -> None:
    """Threads: an evaluation that runs beside the training keeps its tag, and the training its own."""

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.go_on = threading.Event(), threading.Event()

        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                self.inside.set()
                self.go_on.wait(20)
            return x

    def train(model: Any, optimizer: Any) -> None:
        def evaluate() -> None:
            with torch.no_grad():
                model(torch.ones(1, 3))

        thread = threading.Thread(target=evaluate)
        thread.start()
        assert model[1].inside.wait(20)
        for x in batches(2):  # while the evaluation is in the middle of the model
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        model[1].go_on.set()
        thread.join()

    def aside(place: Any) -> bool:  # the evaluation begins before the first step, and ends after the last
        return place[3] == "eval"

    model, _, heard = situation(lambda: mlp().insert(1, Waiting()), train, but=aside)
    weights, biases = data_of(heard, "weights", "0"), data_of(heard, "biases", "0")
    before = F.linear(torch.ones(1, 3), weights[0], biases[0])
    assert same(only(heard, "activations", "0", tag="eval"), before)
    last = F.linear(torch.tanh(before), model.get_submodule("3").weight, model.get_submodule("3").bias)
    assert same(only(heard, "activations", "3", tag="eval"), last)
    for module in ("0", "3"):
        tags = sorted((one.tag, one.call) for one in find(heard, "activations", module))
        assert tags == [("default", 0), ("default", 0), ("eval", 0)]
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    assert len(find(heard, "network_output", tag="eval")) == 1
    assert len(find(heard, "layer_gradients", "3", tag="default")) == 2


def test_losses_and_logs_in_many_threads() -> None:
    """Threads: a loss that runs beside another is seen, too; values logged beside the training have their own calls."""
    given: list[list[Tensor]] = []  # the losses of the loop, without a recorder and with it

    def train(model: nn.Module, optimizer: Any, run: Any) -> list[Tensor]:
        run.set_loss(F.triplet_margin_with_distance_loss)
        inside, go_on = threading.Event(), threading.Event()
        losses: list[Tensor] = []

        def distance(one: Tensor, other: Tensor) -> Tensor:
            inside.set()
            go_on.wait(20)
            return (one - other).abs().sum(1)

        def beside() -> None:
            x = torch.ones(2, 3)
            losses.append(F.triplet_margin_with_distance_loss(x, x, x, distance_function=distance))

        def log() -> None:
            for number in range(300):
                run.log("note", number)

        threads = [threading.Thread(target=beside), threading.Thread(target=log)]
        for thread in threads:
            thread.start()
        assert inside.wait(20)
        for x in batches(20):
            optimizer.zero_grad()
            output = model(x)
            losses.append(F.triplet_margin_with_distance_loss(output, output + 1, output - 1 + x[:, :2]))
            losses[-1].backward()
            optimizer.step()
        go_on.set()
        for thread in threads:
            thread.join()
        given.append([loss.detach().clone() for loss in losses])
        return given[-1]

    _, _, heard = situation(lambda: nn.Linear(3, 2), train, calls=True, but=lambda place: place[3] == "eval")
    assert [one.global_step for one in heard.of("loss") if one.tag == "default"] == list(range(20))
    assert all(map(same, data_of(heard, "loss", tag="default"), given[1][:20]))
    assert len(find(heard, "loss", tag="eval")) == 1
    assert same(only(heard, "loss", tag="eval"), given[1][20])
    notes = find(heard, "note")
    assert [float(one.data) for one in notes] == list(range(300))
    assert len({(one.global_step, one.call) for one in notes}) == 300


def test_forwards_in_many_threads() -> None:
    """Threads: forwards of one step in many threads are its calls, each with the inputs and outputs of its own."""

    def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
        made: dict[int, Tensor] = {}

        def run(number: int) -> None:
            for part in range(20):
                made[100 * number + part] = model(torch.tensor([[float(100 * number + part)]]))

        in_threads(run, 4)
        sum(made[number] for number in sorted(made)).sum().backward()
        optimizer.step()
        return [made[number].detach() for number in sorted(made)]

    _, _, heard = unchanged(lambda: nn.Linear(1, 1, bias=False), train)
    outputs = {one.call: one.data for one in find(heard, "activations", "")}
    inputs = {one.call: one.data for one in find(heard, "layer_inputs", "")}
    assert sorted(outputs) == sorted(inputs) == list(range(80))
    assert len(find(heard, "activations", "")) == 80
    weight = only(heard, "weights", "")
    for call, value in outputs.items():
        assert same(value, F.linear(inputs[call], weight))
        assert same(only(heard, "layer_gradients", "", call=call), torch.ones(1, 1))
    given = [float(100 * number + part) for number in range(4) for part in range(20)]
    assert sorted(one.item() for one in inputs.values()) == given
    assert same(only(heard, "weight_gradients", ""), torch.tensor([[sum(given)]]))
    moved = weight.add(torch.tensor([[sum(given)]]), alpha=-0.1) - weight
    assert same(only(heard, "weight_updates", ""), moved)
    assert len(heard.of("batch_started")) == 1


def in_threads(run: Callable[[int], None], number: int) -> None:
    """Run a function in so many threads at once, with their numbers; an exception in one is raised here."""
    begin = threading.Barrier(number)

    def each(which: int) -> None:
        begin.wait(20)
        run(which)

    with ThreadPoolExecutor(number) as pool:
        list(pool.map(each, range(number)))


def test_forwards_and_backwards_in_many_threads() -> None:
    """Threads that train together: each gradient is at its own forward's call, the weight's is the sum of all.

    No number has more digits than a float64, so that sums are the same in any order.
    """

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for number, one in enumerate(model.parameters()):
            one.data.fill_(number + 2.0)
        return model.double()

    def train(model: nn.Module, optimizer: Any) -> None:
        def run(number: int) -> None:
            for part in range(10):
                x = torch.tensor([[float(10 * number + part)]], dtype=torch.float64)
                (model(x) * (x + 1)).sum().backward()

        for _ in range(2):
            optimizer.zero_grad()
            in_threads(run, 4)
            optimizer.step()

    _, exporter, heard = unchanged(make, train, lambda model: sgd(model, 2.0**-14))
    assert not exporter.problems
    for step in range(2):
        first, second = (only(heard, "weights", name, global_step=step) for name in "01")
        for name, weight, before, after in (("0", first, 1.0, second), ("1", second, first, 1.0)):
            given = {one.call: one.data for one in find(heard, "layer_inputs", name, global_step=step)}
            assert sorted(given) == list(range(40))
            assert sorted(float(one / before) for one in given.values() if one is not None) == list(range(40))
            for call, x in given.items():
                at = {"global_step": step, "call": call}
                assert x is not None
                slope = (x / before + 1) * after
                assert same(only(heard, "activations", name, **at), x * weight)
                assert same(only(heard, "layer_gradients", name, **at), slope)
                if name == "1":
                    assert same(only(heard, "input_gradients", name, **at), slope * weight)
        total = sum(x * (x + 1) for x in range(40))
        for name, other in (("0", second), ("1", first)):
            assert same(only(heard, "weight_gradients", name, global_step=step), total * other)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]


def test_random_generators() -> None:
    """RNG: random choices of positions and elements draw from no generator of the training's."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    whole, some = situation(make, simple)[2], unchanged(make, simple, elements=5)[2]
    for kind in ("weights", "weight_gradients", "weight_updates", "activations"):
        for full, part in zip(data_of(whole, kind, "0"), data_of(some, kind, "0"), strict=True):
            assert same(part, full.flatten()[torch.as_tensor(choice(full.numel(), 5, 0))])


def test_steps_that_nobody_records_change_nothing_and_tell_nothing() -> None:
    """A step that nobody records: checkpoints, scaled losses and optimizers in the backward leave nothing behind."""
    hooked: list[bool] = []

    def train(model: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for x in batches(3):
            optimizer.zero_grad()
            loss = model[2](model[1](checkpoint(model[0], x.requires_grad_(), use_reentrant=True))).sum()
            scaled = scaler.scale(loss)
            hooked.append(bool(scaled._backward_hooks))
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()

    def plainly(model: nn.Module, optimizer: Any) -> None:
        descend(optimizer, lambda x: model(x.requires_grad_()).sum(), batches(3))

    kinds = (*OF_CALLS, *OF_PARAMETERS)
    _, _, heard = situation(mlp, train, every=2, plain=(mlp, plainly), kinds=kinds)
    assert hooked == [False, False, False, True, False, True]
    assert {one.global_step for one in heard if one.kind not in ("epoch_started", "epoch_finished")} == {0, 2}


def test_the_page_names_tests_that_there_are() -> None:
    """Each test that docs/semantics.md names is a function of the tests."""
    root = Path(__file__).parents[2]
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "semantics.md").read_text(encoding="utf-8")))
    files = (root / "tests").rglob("test_*.py")
    there = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)}
    assert len(named) > 90
    assert named <= there
