"""Rules on learning rates, losses, outputs and updates: PyTorch itself makes most of the messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

import tracer
from analyze.seeing.check import check
from tests.analyze.rules.test_rules import at, falling, findings, modules, noise
from tracer.messaging.messages import Message
from tracer.observing.pytorch.optimizer_states import hyperparameters

Schedule = Callable[[torch.optim.Optimizer], schedules.LRScheduler]


# -- learning rates -----------------------------------------------------------------------------------------------


def rates(
    steps: int, schedule: Schedule | None = None, at_step: Callable[[int, list[dict[str, object]]], None] | None = None,
    groups: tuple[float, ...] = (0.1,),
) -> Iterator[Message]:  # fmt: skip
    """The hyperparameters of a real optimizer, step by step, as a recording has them."""
    several = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in groups]
    optimizer = torch.optim.SGD(several, lr=0.1)
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(steps):
        if at_step is not None:
            at_step(step, optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            found = hyperparameters(group)
            data = torch.tensor(list(found.values()), dtype=torch.float64)
            yield at(step, "hyperparameters", data, leaf=f"0.{number}", sampling={"entries": list(found)})
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@pytest.mark.parametrize("schedule", [
    lambda one: schedules.OneCycleLR(one, 0.5, total_steps=100, div_factor=1e3),
    lambda one: schedules.OneCycleLR(one, 0.5, total_steps=100, pct_start=0.02),
    lambda one: schedules.CosineAnnealingWarmRestarts(one, 10),
    lambda one: schedules.CosineAnnealingLR(one, 99),
    lambda one: schedules.LambdaLR(one, lambda step: min(step / 20, 1.0) * max(0.0, 1 - step / 100)),
    lambda one: schedules.LambdaLR(one, lambda step: 1e-3 if step < 20 else 1.0),
    lambda one: schedules.LambdaLR(one, lambda step: 8 * min((step + 1) ** -0.5, (step + 1) * 50**-1.5)),
    lambda one: schedules.CyclicLR(one, 1e-5, 0.1, step_size_up=3),
    lambda one: schedules.StepLR(one, 20, 0.01),
    None,
])  # fmt: skip
def test_schedules_are_no_fault(schedule: Schedule | None) -> None:
    """Neither warm-ups, from zero or from a plateau, nor restarts, nor the zero at the end."""
    assert findings("learning_rate", rates(100, schedule)) == []


def test_a_rate_that_jumps() -> None:
    """At the step, with a schedule and without; a jump by a factor that schedules have is none."""

    def jump(factor: float) -> Callable[[int, list[dict[str, object]]], None]:
        def change(step: int, groups: list[dict[str, object]]) -> None:
            for group in groups if step == 60 else ():
                group["lr"] = float(str(group["lr"])) * factor

        return change

    for schedule in (None, lambda one: schedules.ExponentialLR(one, 0.99)):
        (found,) = findings("learning_rate", rates(100, schedule, jump(100)))
        assert (found.first, found.steps, str(found.severity)) == (60, 1, "warning")
        assert found.value == pytest.approx(100 * found.numbers["usual"], rel=0.011)
        assert findings("learning_rate", rates(100, schedule, jump(10))) == []
    (several,) = findings("learning_rate", rates(100, None, jump(100), groups=(0.1, 0.2, 0.3)))
    assert several.numbers["groups"] == 3


def test_a_rate_that_is_zero_from_a_step_on() -> None:
    """Of all groups; a single group may be frozen so."""

    def stop(which: slice) -> Callable[[int, list[dict[str, object]]], None]:
        def change(step: int, groups: list[dict[str, object]]) -> None:
            for group in groups[which] if step >= 60 else ():
                group["lr"] = 0.0

        return change

    (found,) = findings("learning_rate", rates(100, None, stop(slice(None)), groups=(0.1, 0.2)))
    assert (found.first, found.last, str(found.severity)) == (60, 99, "warning")
    assert "0 from step 60 to 99; the highest had been 0.2" in found.evidence
    assert findings("learning_rate", rates(100, None, stop(slice(1)), groups=(0.1, 0.2))) == []
    assert findings("learning_rate", rates(66, None, stop(slice(None)))) == [], "a schedule may end at zero"


def test_a_group_with_a_far_higher_rate() -> None:
    """It may be meant, so it is a note."""
    (found,) = findings("learning_rate", rates(30, groups=(0.001, 0.03, 0.001)))
    assert (found.first, str(found.severity), found.numbers["groups"]) == (0, "note", 1)
    assert "group 1 of the optimizer has the learning rate 0.03, 30 times that of the others" in found.evidence
    assert findings("learning_rate", rates(30, groups=(0.001, 0.01))) == []


# -- what loss functions are given ---------------------------------------------------------------------------------


def calls(
    loss: Callable[[Tensor, Tensor], Tensor],
    name: str,
    output: Callable[[int], Tensor],
    labels: Callable[[int], Tensor],
) -> Iterator[Message]:
    """Calls of a loss function, step by step, as a recording has them."""
    for step in range(40):
        x, y = output(step), labels(step)
        yield at(step, "network_output", x)
        yield at(step, "input_labels", y)
        yield at(step, "loss_terms", loss(x, y), leaf=name)


def indices(step: int) -> Tensor:
    """Class indices of 16 datapoints."""
    return torch.randint(0, 5, (16,), generator=torch.Generator().manual_seed(step))


def logits(step: int) -> Tensor:
    """Logits of 16 datapoints and 5 classes."""
    return noise(step, 16, 5, scale=2.0)


@pytest.mark.parametrize(("loss", "name", "output", "why"), [
    (F.cross_entropy, "cross_entropy", lambda step: logits(step).softmax(1), 0),
    (F.cross_entropy, "criterion", lambda step: logits(step).softmax(1), 0),
    (F.nll_loss, "NLLLoss", lambda step: logits(step).softmax(1), 1),
    (F.cross_entropy, "cross_entropy", logits, None),
    (F.cross_entropy, "cross_entropy", lambda step: logits(step).log_softmax(1), None),
    (F.nll_loss, "nll_loss", lambda step: logits(step).log_softmax(1), None),
    (F.multi_margin_loss, "multi_margin_loss", lambda step: logits(step).softmax(1), None),
    (F.cross_entropy, "cross_entropy", lambda step: logits(step).sigmoid(), None),
])  # fmt: skip
def test_softmax_before_a_loss(
    loss: Callable[[Tensor, Tensor], Tensor], name: str, output: Callable[[int], Tensor], why: int | None
) -> None:
    """Of probabilities by their sum, with the loss functions that take logits, or logarithms."""
    found = findings("softmax_before_loss", calls(loss, name, output, indices))
    assert [(one.first, one.numbers["why"]) for one in found] == ([] if why is None else [(0, why)])


def test_softmax_before_a_loss_with_probabilities_as_labels() -> None:
    """Of a distillation; the squared distance of probabilities is a loss of its own."""
    output, labels = (lambda step: logits(step).softmax(1)), (lambda step: logits(step + 100).softmax(1))
    (found,) = findings("softmax_before_loss", calls(F.cross_entropy, "cross_entropy", output, labels))
    assert found.first == 0
    assert findings("softmax_before_loss", calls(F.mse_loss, "mse_loss", output, labels)) == []


def test_sigmoid_before_a_loss_with_logits() -> None:
    """If no output is ever outside of 0 to 1; logits of a network that has just begun may be positive for a while."""
    labels = lambda step: (noise(step, 16, 1) > 0).float()  # noqa: E731
    asked = "softmax_before_loss", F.binary_cross_entropy_with_logits, "BCEWithLogitsLoss"
    (found,) = findings(asked[0], calls(*asked[1:], lambda step: noise(step, 16, 1).sigmoid(), labels))
    assert (found.numbers["why"], found.steps) == (2, 10)
    begins = lambda step: noise(step, 16, 1).sigmoid() - (0.9 if step > 20 else 0.0)  # noqa: E731
    assert findings(asked[0], calls(*asked[1:], begins, labels)) == []


def test_relu_before_a_loss() -> None:
    """Of logits; a network that predicts counts may end in a ReLU, and a head may begin at zero."""
    clipped = lambda step: logits(step).relu()  # noqa: E731
    (found,) = findings("relu_before_loss", calls(F.cross_entropy, "cross_entropy", clipped, indices))
    assert (found.first, found.steps) == (0, 40)
    assert findings("relu_before_loss", calls(F.cross_entropy, "cross_entropy", logits, indices)) == []
    assert findings("relu_before_loss", calls(F.mse_loss, "mse_loss", clipped, clipped)) == []
    zeros = lambda step: torch.zeros(16, 5)  # noqa: E731
    assert findings("relu_before_loss", calls(F.cross_entropy, "cross_entropy", zeros, indices)) == []


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("output", "labels", "pairs"), [
    ((16, 1), (16,), 256), ((16,), (16, 1), 256), ((8, 1, 2, 3), (8, 2, 3), 384), ((16,), (16,), None),
    ((16, 1), (16, 1), None), ((1, 16), (16,), None), ((16, 3), (1,), None), ((16, 3, 1), (16, 1, 3), None),
])  # fmt: skip
def test_a_loss_that_broadcasts(output: tuple[int, ...], labels: tuple[int, ...], pairs: int | None) -> None:
    """By the number of differences that PyTorch takes the mean of."""
    told = calls(F.mse_loss, "mse_loss", lambda step: noise(step, *output), lambda step: noise(-step, *labels))
    found = findings("loss_broadcasts", told)
    assert [one.value for one in found] == ([] if pairs is None else [pairs])
    if pairs is not None:
        assert (torch.zeros(output) - torch.zeros(labels)).numel() == pairs


# -- losses -----------------------------------------------------------------------------------------------------


def with_labels(losses: Iterable[float], *, labels: str = "data", advantage: bool = False) -> list[Message]:
    """Losses with labels, and with the cross-entropy that a loss function gave."""
    messages = []
    for step, loss in enumerate(losses):
        draw = torch.Generator().manual_seed(step)
        of = {"data": torch.randint(0, 8, (16,), generator=draw), "pairs": torch.arange(16), "real": torch.ones(16)}
        term = 2.0 if advantage else loss
        messages += [at(step, "input_labels", of[labels]), at(step, "loss_terms", term, leaf="cross_entropy")]
        messages.append(at(step, "loss", loss))
    return messages


@pytest.mark.parametrize(("labels", "advantage", "severity"), [
    ("data", False, "warning"), ("pairs", False, "note"), ("real", False, "note"), ("data", True, "note"),
])  # fmt: skip
def test_only_losses_of_classifications_have_to_fall(labels: str, advantage: bool, severity: str) -> None:
    """Not those of contrastive networks, adversaries and policies; their jumps, and that they stay, are notes."""
    curve = [float(one.data) for one in falling(200, {150: 30.0}) if one.data is not None]
    weights = [(-1.0) ** step if advantage else 1.0 for step in range(200)]
    (found,) = findings(
        "loss_spike", with_labels(map(math.prod, zip(curve, weights, strict=True)), labels=labels, advantage=advantage)
    )
    assert (found.first, str(found.severity)) == (150, severity)
    flat = [1.0 + float(value) for value in noise(2, 150, scale=0.02)]
    told = findings("loss_not_falling", with_labels(flat, labels=labels))
    assert [str(one.severity) for one in told] == ["note" if labels != "data" else "warning"]
    assert findings("loss_not_falling", with_labels([one - 1.0 for one in flat], labels=labels)) == []


def test_several_losses_of_a_step_need_not_fall() -> None:
    """Adversaries take turns; a network that was trained before cannot fall much."""
    flat = [1.0 + float(value) for value in noise(2, 150, scale=0.02)]
    both = [at(step, "loss", loss, leaf=leaf) for step, loss in enumerate(flat) for leaf in ("d", "g")]
    assert findings("loss_not_falling", both) == []
    (found,) = findings("loss_not_falling", with_labels([loss / 10 for loss in flat]))
    assert str(found.severity) == "note"


# -- saturated outputs ---------------------------------------------------------------------------------------------


def classified(loss: Callable[[Tensor, Tensor], Tensor], right: bool, last: str = "s") -> list[Message]:
    """The outputs of a saturated sigmoid, and the gradients that a loss gives them."""
    messages = []
    for step in range(8):
        y = (noise(step, 32, 1) > 0).float()
        x = (12.0 * (2 * y - 1)).clone() if right else 12.0 * noise(step + 50, 32, 1).sign()
        p = x.sigmoid().requires_grad_(True)
        loss(p, y).backward()
        assert p.grad is not None
        messages += [at(step, "activations", p.detach(), last), at(step, "network_output", p.detach())]
        messages.append(at(step, "layer_gradients", p.grad, last))
    return messages


def test_a_saturated_output_does_harm_if_the_loss_would_have_it_back() -> None:
    """And cannot: a cross-entropy divides by the sigmoid's derivative, a squared distance does not."""
    model = modules(s="Sigmoid")
    for loss, right, expected in (
        (F.binary_cross_entropy, True, 0), (F.binary_cross_entropy, False, 0),
        (F.mse_loss, True, 0), (F.mse_loss, False, 1),
    ):  # fmt: skip
        messages = classified(loss, right)
        assert len(findings("saturated_activations", messages, model)) == expected, (loss.__name__, right)
    without = [one for one in classified(F.mse_loss, False) if one.kind != "layer_gradients"]
    assert findings("saturated_activations", without, model) == [], "without gradients the network's output is left"


def test_a_gate_that_learns_to_decide_is_a_note() -> None:
    """It takes many steps; so is one of which the steps between were not recorded."""
    model = modules(t="Tanh")

    def found(shares: list[float], every: int = 1) -> list[str]:
        sizes = [torch.cat([torch.ones(round(100 * one)), torch.zeros(100 - round(100 * one))]) for one in shares]
        messages = [at(step * every, "activations", one[None], "t") for step, one in enumerate(sizes)]
        return [str(one.severity) for one in findings("saturated_activations", messages, model)]

    assert found([step / 100 for step in range(100)]) == ["note"]
    assert found([0.9] * 10) == ["warning"]
    assert found([0.0] * 10 + [0.9] * 10) == ["warning"]
    assert found([0.0, *[0.9] * 10], every=50) == ["note"]


# -- branches, units, experts --------------------------------------------------------------------------------------


def test_a_closed_branch_loses_no_gradient() -> None:
    """Blocks whose branches begin nearly closed; the gradient of the trunk arrives at the first layer."""

    def backward(closed: float, trunk: float) -> list[Message]:
        messages = []
        for step in range(6):
            messages.append(at(step, "layer_gradients", torch.ones(4), "head"))
            for block in reversed(range(4)):
                layers = [f"{block}.{name}" for name in ("down", "act", "up", "norm")]
                messages += [at(step, "layer_gradients", torch.full((4,), closed), name) for name in layers]
            messages.append(at(step, "layer_gradients", torch.full((4,), trunk), "stem"))
        return messages

    assert findings("vanishing_gradient", backward(1e-6, 1.0)) == []
    (found,) = findings("vanishing_gradient", backward(1e-6, 1e-7))
    assert (found.module, found.first) == ("stem", 0)


def test_layers_that_join_or_are_seldom_used_have_no_usual_update() -> None:
    """Torch's Adagrad on units that are seldom active, and layers that a program thaws at a step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
    optimizer, messages = torch.optim.Adagrad(net.parameters(), 0.05), []
    for step in range(120):
        x = noise(step, 8, 6) * (torch.rand(6, generator=torch.Generator().manual_seed(step)) < 0.2)
        thawed = ("0", "2", "4") if step >= 60 else ("2", "4")
        before = {name: net[int(name)].weight.detach().clone() for name in thawed}
        optimizer.zero_grad()
        F.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
        if step < 60:
            net[0].weight.grad = None
        optimizer.step()
        for name, old in before.items():
            weight = net[int(name)].weight
            assert weight.grad is not None
            messages += [
                at(step, "weights", old, name), at(step, "weight_gradients", weight.grad.clone(), name),
                at(step, "weight_updates", weight.detach() - old, name),
            ]  # fmt: skip
    assert findings("update_ratio", messages) == []


def test_counts_and_inputs_are_no_units() -> None:
    """Features that are never there, of the network's own input or in counts."""
    x = [noise(step, 32, 10).relu() * (torch.arange(10) < 3) for step in range(20)]
    told = [at(step, "layer_inputs", one, "fc") for step, one in enumerate(x)]
    assert [one.module for one in findings("dead_units", told)] == ["fc"]
    own = [one for step, data in enumerate(x) for one in (at(step, "input_data", data), told[step])]
    assert findings("dead_units", own) == []
    assert findings("dead_units", [at(step, "layer_inputs", one.ceil(), "fc") for step, one in enumerate(x)]) == []


def test_a_head_that_begins_small_may_grow() -> None:
    """Up to the scale that PyTorch's own initialisation has, and tenfold beyond; what decays is a note."""
    usual = float(nn.Linear(64, 8).weight.detach().norm())
    model = {"parameters": [{"name": "head.weight", "shape": [8, 64], "requires_grad": True}]}
    direction = noise(0, 8, 64) / noise(0, 8, 64).norm()

    def found(last: float) -> list[str]:
        sizes = torch.logspace(-2, float(torch.tensor(last).log10()), 30)
        told = [at(step, "weights", usual * float(size) * direction, "head") for step, size in enumerate(sizes)]
        return [str(one.severity) for one in findings("norm_drift", told, model)]

    assert found(2.0) == []
    assert found(20.0) == ["warning"]
    assert found(5e-4) == ["note"]
    assert found(1e-6) == ["warning"]


def test_kinds_that_help_are_not_needed(tmp_path: Path) -> None:
    """A trace of losses alone lacks nothing that `loss_spike` needs; what `update_ratio` needs is named."""
    with tracer.TraceWriter(tmp_path / "run.zarr") as writer:
        for message in falling(40):
            writer.write(message)
    found = check(tmp_path / "run.zarr", ["loss_spike", "update_ratio"])
    assert found.looked == ("loss_spike",)
    assert "it needs weights, weight_updates" in found.unjudged["update_ratio"]
    assert "weight_gradients" not in found.unjudged["update_ratio"]


def test_a_loss_that_does_not_fall_is_named_after_its_cause(tmp_path: Path) -> None:
    """Though it stands at the first step."""
    flat = with_labels([1.0 + float(value) for value in noise(2, 150, scale=0.02)])
    with tracer.TraceWriter(tmp_path / "run.zarr") as writer:
        for message in flat:
            writer.write(message)
            if message.kind == "loss" and message.global_step >= 60:
                writer.write(at(message.global_step, "weights", torch.full((2, 2), 1e3), "fc"))
            elif message.kind == "loss":
                writer.write(at(message.global_step, "weights", torch.ones(2, 2), "fc"))
    found = check(tmp_path / "run.zarr", ["loss_not_falling", "norm_drift"])
    assert [one.rule for one in found.findings] == ["loss_not_falling", "norm_drift"]
    assert found.worst is not None
    assert found.worst.title == "norm_drift in weights of fc at step 60"


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_shapes_are_judged_by_statistics(tmp_path: Path) -> None:
    """Of the network's output only statistics are kept, as in the default profile."""
    model = nn.Linear(4, 1)
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss()
    kept = tracer.Capture(kinds=("input_data", "input_labels", "loss_terms", "loss"))
    for squeezed in (False, True):
        path, captures = tmp_path / f"{squeezed}.zarr", [kept, tracer.Capture(reduce="statistics")]
        with tracer.record(path, model, optimizer, loss=loss, capture=captures):
            for step in range(4):
                x = noise(step, 16, 4)
                optimizer.zero_grad()
                output = model(x)
                loss(output[:, 0] if squeezed else output, x[:, 0]).backward()
                optimizer.step()
        found = check(path, "loss_broadcasts")
        assert found.looked == ("loss_broadcasts",)
        assert [one.value for one in found.findings] == ([] if squeezed else [256])
