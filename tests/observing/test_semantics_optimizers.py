"""What is recorded with each kind of optimizer: closures, several, fused, compiled, in the backward, or none."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracer
from tests.endings import InBackward, same
from tests.observing.oracles import (
    GAN,
    OF_CALLS,
    OF_PARAMETERS,
    batches,
    by_place,
    equal,
    mlp,
    simple,
    situation,
    unchanged,
    witnessed,
)
from tests.observing.recorded import data_of, descend, find, only, problems, sgd
from tracer import Collect, Exporter
from tracereel.main import main


def test_lbfgs_closures() -> None:
    """LBFGS: the evaluations of one step are calls; weights are those before, the update is the whole way.

    The gradient of a step is the one of its last evaluation, which is what the optimizer leaves behind.
    """

    def train(model: nn.Module, optimizer: Any) -> None:
        x = batches(1)[0]

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    make_optimizer = lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)  # noqa: E731
    _, _, heard = situation(lambda: nn.Linear(3, 2), train, make_optimizer)
    for step in range(2):
        calls = [m.call for m in find(heard, "activations", "", global_step=step)]
        assert calls == list(range(len(calls)))
        assert len(calls) > 1
        first = data_of(heard, "layer_gradients", "", global_step=step)[0].sum(0)
        assert not same(first, only(heard, "bias_gradients", "", global_step=step))


class SAM:
    """Sharpness-aware minimisation: a second pass at perturbed weights, with the weights put back before the step."""

    def __init__(self, model: nn.Module) -> None:
        self.base = sgd(model)
        self.parameters = list(model.parameters())

    def step(self, loss: Callable[[], Tensor]) -> None:
        self.base.zero_grad()
        loss().backward()
        held = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for p in self.parameters:
                p.add_(0.05 * p.grad)
        self.base.zero_grad()
        loss().backward()
        with torch.no_grad():
            for p, before in zip(self.parameters, held, strict=True):
                p.copy_(before)
        self.base.step()


def test_sam() -> None:
    """SAM-like two-pass: two calls of one step; the gradient is the second pass's, the weights are the unperturbed."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.step(lambda x=x: model(x).square().sum())

    _, _, heard = situation(lambda: nn.Linear(3, 2), train, SAM, given=lambda optimizer: optimizer.base)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]


def test_passes_that_are_never_differentiated() -> None:
    """An agent that acts with gradients: its forwards are calls of the step, and are counted; tagged, they are not."""
    x = torch.ones(4, 3)

    def train(model: nn.Module, optimizer: Any, run: Any, tag: str) -> None:
        for _ in range(3):
            for _ in range(5):
                with (run.tag(tag) if tag else None) or contextlib.nullcontext():
                    model(x).argmax()
            optimizer.zero_grad()
            (model(x).square().sum() + model(-x).sum()).backward()  # two forwards of one backward
            optimizer.step()

    def acting(tag: str) -> tuple[Exporter, Collect]:
        _, exporter, heard = unchanged(mlp, functools.partial(train, tag=tag), calls=True)
        return exporter, heard

    exporter, heard = acting("")
    assert "of 15 forwards in training mode nothing was differentiated" in problems(exporter)
    assert "run.tag(" in problems(exporter)
    assert [one.call for one in find(heard, "activations", "0", global_step=1)] == list(range(7))
    exporter, heard = acting("acting")
    assert not exporter.problems
    assert [one.call for one in find(heard, "activations", "0", global_step=1, tag="default")] == [0, 1]


def test_a_look_at_the_model_after_the_training(tmp_path: Path) -> None:
    """A forward that no step follows is no step and no epoch of `trace info`; the trace says which messages it has."""
    path = tmp_path / "run.zarr"

    def train(model: nn.Module, optimizer: Any, run: Any) -> None:
        for _ in range(2):
            simple(model, optimizer, 2)
            run.epoch_finished()
        model(torch.ones(4, 3))

    _, _, heard = unchanged(mlp, train, path=path, calls=True)
    with tracer.open(path) as trace:
        (note,) = (note["unended"] for note in trace.notes if "unended" in note)
        assert note == {"global_step": 4, "train_step": 0, "epoch": 2, "passes": 1}
        assert (trace.info["steps"], trace.info["epochs"]) == ([0, 3], [0, 1])
    assert len(heard.of("batch_finished")) == 4
    info = CliRunner().invoke(main, ["info", str(path)])
    assert re.search(r"unended +1 forwards after the last step have the number 4", info.output)


def test_an_optimizer_that_never_steps_is_told() -> None:
    """An optimizer given that another one stands in for (SAM's ``first_step``): nothing ends a step; that is told."""

    def train(model: nn.Module, both: Any) -> None:
        simple(model, both[1], 3)

    with pytest.warns(RuntimeWarning, match="was never called, so everything is of one step"):
        _, _, heard = situation(
            lambda: nn.Linear(3, 2), train, lambda model: (sgd(model), sgd(model)), given=lambda both: both[0],
            kinds=OF_CALLS, strict=False,
        )  # fmt: skip
    assert [one.call for one in find(heard, "activations", "")] == [0, 1, 2]
    assert not heard.of("batch_finished")


def test_gan_with_two_optimizers() -> None:
    """Two optimizers: one step, each parameter with the weights, gradient and update of its own optimizer's step."""

    def optimizers(model: Any) -> tuple[Any, Any]:
        return sgd(model.critic), sgd(model.generator, 0.2)

    def train(model: Any, both: Any) -> None:
        critic, generator = both
        for x, z in zip(batches(2), batches(2, (4, 2)), strict=True):
            critic.zero_grad()
            (model.critic(model.generator(z).detach()).mean() - model.critic(x).mean()).backward()
            critic.step()
            generator.zero_grad()
            (-model(z).mean()).backward()
            generator.step()

    _, _, heard = situation(GAN, train, optimizers)
    for kind in ("weights", "weight_gradients", "weight_updates"):
        assert [(one.key, one.global_step) for one in heard.of(kind)] == [
            (name, step) for step in range(2) for name in ("generator", "critic")
        ]
    assert [one.call for one in find(heard, "activations", "critic", global_step=0)] == [0, 1, 2]


def by_formula(kind: str, weight: Tensor, gradients: list[Tensor]) -> list[Tensor]:
    """Where the optimizers of `test_fused_optimizer` go from a weight, in float64 and by their formulas."""
    w, m, v, lr, decay = weight.double(), 0.0, 0.0, 0.01, 0.1
    way = []
    for t, g in enumerate((one.double() for one in gradients), start=1):
        if kind == "SGD":
            g = g + decay * w
            m = g if t == 1 else 0.9 * m + g
            w = w - lr * m
        else:
            g, w = (g + decay * w, w) if kind == "Adam" else (g, w - lr * decay * w)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            w = w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        way.append(w)
    return way


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_fused_optimizer(kind: str) -> None:
    """A fused optimizer gives the same weights, gradients and updates as its formula, in each step."""

    def make_optimizer(model: nn.Module) -> Any:
        more = {"momentum": 0.9} if kind == "SGD" else {}
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01, weight_decay=0.1, fused=True, **more)

    model, _, heard = situation(mlp, lambda *given: simple(*given, 3), make_optimizer)
    for at in "02":
        weights, updates = data_of(heard, "weights", at), data_of(heard, "weight_updates", at)
        weights.append(model.get_submodule(at).weight.detach())
        way = by_formula(kind, weights[0], data_of(heard, "weight_gradients", at))
        for step in range(3):
            assert same(updates[step], weights[step + 1] - weights[step])
            moved = way[step] - (way[step - 1] if step else weights[0].double())
            torch.testing.assert_close(updates[step].double(), moved, rtol=1e-4, atol=2e-7)


class SignDescent(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move each parameter by the sign of its gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class Overwriting(torch.optim.Optimizer):
    """An optimizer of the user's own that uses the gradients' memory for something else."""

    def __init__(self, parameters: Any, way: str) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.way = way

    def step(self, closure: Any = None) -> None:
        """Move each parameter against what is made of its gradient, in place; or drop the gradient."""
        if closure is not None:
            closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if self.way == "decay":
                    parameter.grad.add_(parameter, alpha=0.5)
                elif self.way == "momentum":
                    parameter.grad.lerp_(torch.ones_like(parameter), 0.9)
                parameter.sub_(parameter.grad, alpha=0.1)
                if self.way == "drop":
                    parameter.grad = None


OVERWRITTEN: dict[str, Callable[[nn.Module, str], Any]] = {
    "own": lambda model, way: Overwriting(model.parameters(), way),
    "nesterov": lambda model, way: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, foreach=True),
    "forgotten": lambda model, way: forgetting(torch.optim.SGD(model.parameters(), 0.1), set_to_none=True),
    "zeroed": lambda model, way: forgetting(torch.optim.SGD(model.parameters(), 0.1), set_to_none=False),
}


def forgetting(optimizer: Any, **how: Any) -> Any:
    """An optimizer that a hook of the user's lets forget the gradients after each step."""
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad(**how))
    return optimizer


@pytest.mark.parametrize(
    ("kind", "way"),
    [("own", "decay"), ("own", "momentum"), ("own", "drop"), ("own", "made in the step"), ("own", "clipped")]
    + [("own", "clipped, decay"), ("own", "clipped, drop"), ("nesterov", ""), ("nesterov", "clipped")]
    + [("forgotten", ""), ("forgotten", "clipped"), ("zeroed", ""), ("zeroed", "clipped")],
)
def test_optimizers_that_overwrite_gradients(kind: str, way: str) -> None:
    """Recorded is what the optimizer was given: by the loop, by a hook of the user's, or by a closure.

    Torch's SGD with Nesterov's momentum adds that to the gradients, where it moves many parameters at once.
    """
    seen: list[list[Tensor]] = []

    def train(model: nn.Module, optimizer: Any) -> None:
        seen.clear()

        def gradients() -> list[Tensor]:
            return [one.grad.clone() for one in model.parameters()]

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            seen[-1] = gradients()

        if way.startswith("clipped"):
            handle = optimizer.register_step_pre_hook(clip)
        for x in batches(3):

            def closure(x: Tensor = x) -> None:
                optimizer.zero_grad()
                model(x).square().sum().backward()
                seen.append(gradients())

            if way == "made in the step":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        if way.startswith("clipped"):
            handle.remove()

    _, exporter, heard = unchanged(
        matrices, train, lambda model: OVERWRITTEN[kind](model, way.removeprefix("clipped, "))
    )
    assert (exporter.global_step, exporter.problems) == (3, [])
    for number, at in enumerate(("0", "2")):
        assert all(map(same, data_of(heard, "weight_gradients", at), [step[number] for step in seen]))
        assert len(data_of(heard, "weight_gradients", at)) == 3


def matrices() -> nn.Sequential:
    """Two layers without biases: Muon takes matrices only."""
    return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False))


OF_ALL_KINDS = {
    "muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.1),
    "own": lambda model: SignDescent(model.parameters(), lr=0.125),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    "adamw, at once": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(
    ("compiled", "kind"),
    [("no", kind) for kind in OF_ALL_KINDS]
    + [
        pytest.param(compiled, kind, marks=[] if number % 2 == at else [pytest.mark.slow])
        for number, kind in enumerate(OF_ALL_KINDS)
        for at, compiled in enumerate(("step", "around it"))
    ],
)
def test_optimizers_of_all_kinds_and_compiled_steps(kind: str, compiled: str) -> None:
    """Weights, gradients and updates of each step are those of the loop, also where ``step`` is compiled."""
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")

    def train(model: nn.Module, optimizer: Any) -> None:
        def around() -> None:
            optimizer.step()

        torch._dynamo.reset()
        step = around if compiled == "around it" else optimizer.step
        step = step if compiled == "no" else torch.compile(step, backend="eager")
        for x in batches(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            step()

    _, exporter, _ = situation(matrices, train, OF_ALL_KINDS[kind])
    torch._dynamo.reset()
    assert exporter.global_step == 3
    assert not exporter.problems


def test_clipping() -> None:
    """Clipping: the gradient of a step is the clipped one, that of an activation is not."""

    def train(model: nn.Module, optimizer: Any) -> None:
        for x in batches(2):
            optimizer.zero_grad()
            (100 * model(x)).sum().backward()
            assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
            optimizer.step()

    _, _, heard = situation(mlp, train)
    for step in range(2):
        gradients = [
            only(heard, kind, module, global_step=step).flatten()
            for kind in ("weight_gradients", "bias_gradients")
            for module in "02"
        ]
        torch.testing.assert_close(torch.cat(gradients).norm(), torch.tensor(1.0))
        assert same(only(heard, "layer_gradients", "2", global_step=step), torch.full((4, 2), 100.0))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_optimizer_in_backward(checkpointed: bool) -> None:
    """Optimizer-in-backward: one step a backward, with each parameter's gradient before it was forgotten."""
    kept: list[InBackward] = []

    def make_optimizer(model: nn.Module) -> InBackward:
        kept.append(InBackward(model))
        return kept[-1]

    def train(model: Any, optimizer: Any) -> None:
        for x in batches(3):
            if checkpointed:
                x = model[1](checkpoint(model[0], x.requires_grad_(), use_reentrant=True))
                model[2](x).square().sum().backward()
            else:
                model(x).square().sum().backward()

    _, exporter, heard = unchanged(mlp, train, make_optimizer, lambda optimizer: optimizer.each.values())
    assert exporter.global_step == 3
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1, 2]
    like_momentum(heard, 3, checkpointed)


def like_momentum(heard: Collect, steps: int, needed: bool = False) -> None:
    """All is recorded as of one optimizer for all parameters."""

    def train(model: nn.Module, optimizer: Any) -> None:
        descend(optimizer, lambda x: model(x.requires_grad_(needed)).square().sum(), batches(steps))

    seen = witnessed(mlp, train, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    kinds = (*OF_CALLS, *OF_PARAMETERS)
    equal(by_place(heard, kinds), {place: one for place, one in seen.items() if place[0] in kinds})


def test_the_step_of_an_optimizer_in_backward_ends_where_it_is_asked_for() -> None:
    """After a backward that stepped, the global step is the next one: what a checkpoint of the training holds."""
    finished = Collect("batch_finished")

    def train(model: nn.Module, optimizer: Any, run: Any) -> None:
        if isinstance(run, Exporter):
            run.message_bus.register(finished)
        first, second = batches(2)
        model(first).square().sum().backward()
        if isinstance(run, Exporter):
            assert run.global_step == len(finished) == 1
        model(second).square().sum().backward()
        run.step()
        if isinstance(run, Exporter):
            assert run.global_step == len(finished) == 2

    _, _, heard = unchanged(mlp, train, InBackward, lambda optimizer: optimizer.each.values(), calls=True)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    like_momentum(heard, 2)


class Counting(torch.optim.SGD):
    """A subclass that steps by its parent's step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_subclassed_optimizers_and_schedulers() -> None:
    """Subclass with ``super().step()``, schedulers, an empty step: one step each, with the rate of its time."""

    def train(model: nn.Module, optimizer: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for x in batches(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        optimizer.step()

    _, _, heard = situation(mlp, train, lambda model: Counting(model.parameters(), lr=0.1))
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1, 2]
    for step, rate in enumerate((0.1, 0.05)):
        gradient, update = (data_of(heard, kind, "0")[step] for kind in ("weight_gradients", "weight_updates"))
        torch.testing.assert_close(update, -rate * gradient, rtol=1e-4, atol=1e-6)
    assert len(data_of(heard, "weight_gradients", "0")) == 2
    assert float(data_of(heard, "weight_updates", "0")[2].abs().max()) == 0.0


def test_a_manual_update_without_an_optimizer() -> None:
    """Manual ``w -= lr * g``: no optimizer hook; the user ends the step."""

    def train(model: nn.Module, optimizer: Any, run: Any) -> None:
        for x in batches(2):
            model.zero_grad()
            model(x).square().sum().backward()
            with torch.no_grad():
                for one in model.parameters():
                    one.sub_(one.grad, alpha=0.1)
            run.step()

    make = lambda: nn.Linear(3, 2)  # noqa: E731
    _, _, heard = unchanged(make, train, given=lambda _: (), calls=True)
    assert [one.global_step for one in heard.of("batch_finished")] == [0, 1]
    equal(by_place(heard), witnessed(make, simple))
