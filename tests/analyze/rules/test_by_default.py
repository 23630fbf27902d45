"""Faults that a recording by default shows without tensors, and healthy trainings that look like them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tracer
from analyze.rules.finding import Finding
from analyze.seeing.check import check
from tests.analyze.rules.test_rules import FLAT, at, falling, findings, noise, with_labels
from tracer.messaging.messages import Message
from tracer.numbers.statistics import ENTRIES, statistics_of

Step = Callable[[int, nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]
Made = Callable[[], nn.Module]


def found_in(
    folder: Path,
    rule: str,
    model: nn.Module,
    step: Step,
    optimizer: Any = None,
    *,
    steps: int = 20,
    inputs: Callable[[int], Any] | None = None,
) -> list[Finding]:
    """What a rule finds in a training that is recorded with no options: 20 batches of 16 datapoints, 3 classes."""
    torch.manual_seed(3)
    draw = torch.Generator().manual_seed(1)
    chosen = torch.optim.SGD(model.parameters(), lr=0.05) if optimizer is None else optimizer
    with tracer.record(folder / "run.zarr", model, chosen, capture="standard", loss=F.cross_entropy):
        for number in range(steps):
            x = torch.randn(16, 6, generator=draw) if inputs is None else inputs(number)
            y = torch.randint(0, 3, (16,), generator=draw)
            step(number, model, chosen, x, y)
    found = check(folder / "run.zarr", rule)
    assert not found.damage
    return list(found.findings)


def network(*middle: nn.Module) -> nn.Sequential:
    """Three linear layers, with others before the last."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 10), *middle, nn.ReLU(), nn.Linear(10, 3))


def images() -> nn.Sequential:
    """A convolution with a batch normalisation."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 3),
    )  # fmt: skip


def plain(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The step of the first tutorial."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


# -- gradients that are not set to zero ---------------------------------------------------------------------------


def forgotten(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Nothing sets the gradients to zero."""
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def forgotten_micro_batches(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Two backwards a step, and nothing sets their gradients to zero."""
    for part, labels in zip(x.split(8), y.split(8), strict=True):
        (F.cross_entropy(model(part), labels) / 2).backward()
    optimizer.step()


def forgotten_and_clipped(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Nothing sets the gradients to zero, and they are clipped."""
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def micro_batches(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Gradients are accumulated on purpose, for one step."""
    optimizer.zero_grad()
    forgotten_micro_batches(0, model, optimizer, x, y)


def in_place(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The gradients stay the same tensors, of zeros."""
    optimizer.zero_grad(set_to_none=False)
    forgotten(0, model, optimizer, x, y)


def clipped(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Every step's gradients are clipped."""
    optimizer.zero_grad()
    forgotten_and_clipped(0, model, optimizer, x, y)


def repeated(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The same batch at each step, clipped: each gradient is nearly a multiple of the one before."""
    clipped(0, model, optimizer, torch.linspace(-1, 1, 96).reshape(16, 6), torch.arange(16) % 3)


def closure(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The optimizer calls a closure several times in a step."""

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(model(x), y)
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]  # torch's annotation wants a float


def deep() -> nn.Sequential:
    """Six layers, of which enough tell a factor that is common to all."""
    torch.manual_seed(0)
    widths = (6, 12, 12, 12, 12, 12)
    layers = [part for sizes in itertools.pairwise(widths) for part in (nn.Linear(*sizes), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(12, 3))


@pytest.mark.parametrize(
    ("make", "step"),
    [(network, forgotten), (images, forgotten), (network, forgotten_micro_batches), (deep, forgotten_and_clipped)],
)
def test_gradients_that_nothing_sets_to_zero(make: Made, step: Step, tmp_path: Path) -> None:
    """They are told from the second step on, at all steps, whether or not they are clipped."""
    (found,) = found_in(tmp_path, "accumulated_gradients", make(), step)
    assert (found.module, found.first, found.last, str(found.severity)) == (None, 1, 19, "warning")
    assert found.steps == 19


@pytest.mark.parametrize("make", [network, images, deep])
@pytest.mark.parametrize("step", [plain, micro_batches, in_place, clipped, repeated])
def test_gradients_that_are_set_to_zero(make: Made, step: Step, tmp_path: Path) -> None:
    """Micro-batches of one step, momentum and clipping are no accumulation."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
    assert found_in(tmp_path, "accumulated_gradients", model, step, optimizer) == []


def test_gradients_of_a_closure(tmp_path: Path) -> None:
    """A step has several, of which the last is used."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    assert found_in(tmp_path, "accumulated_gradients", model, closure, optimizer, steps=8) == []


def test_gradients_that_another_backward_left(tmp_path: Path) -> None:
    """A discriminator gets gradients when the generator learns, which are set to zero before it learns itself."""
    torch.manual_seed(0)
    nets = nn.ModuleDict(
        {"made": nn.Linear(6, 6), "judge": nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))}
    )
    both = [torch.optim.SGD(one.parameters(), lr=0.01) for one in nets.values()]

    def step(_: int, __: nn.Module, ___: Any, x: Tensor, y: Tensor) -> None:
        both[1].zero_grad()
        (nets["judge"](x).mean() - nets["judge"](nets["made"](x).detach()).mean()).backward()
        both[1].step()
        both[0].zero_grad()
        nets["judge"](nets["made"](x)).mean().backward()
        both[0].step()

    assert found_in(tmp_path, "accumulated_gradients", nets, step, both[::-1]) == []


# -- optimizers that do not step ----------------------------------------------------------------------------------


class Heads(nn.Module):
    """A trunk with two heads, of which the second may have layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.classes, self.number = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shared = self.trunk(x).relu()
        return self.classes(shared), self.number(shared)


def heads(steps_of_second: Callable[[int], bool], first: Callable[[Heads], list[nn.Module]]) -> tuple[Heads, Any, Step]:
    """A training of two heads with an optimizer each; `first` says what the first one trains."""
    model = Heads()
    trained = [one for module in first(model) for one in module.parameters()]
    both = [torch.optim.Adam(trained, lr=0.01), torch.optim.Adam(model.number.parameters(), lr=0.01)]

    def step(number: int, _: nn.Module, __: Any, x: Tensor, y: Tensor) -> None:
        for one in both:
            one.zero_grad()
        classes, estimate = model(x)
        (F.cross_entropy(classes, y) + F.mse_loss(estimate, x[:, :1])).backward()
        both[0].step()
        if steps_of_second(number):
            both[1].step()

    return model, both, step


@pytest.mark.parametrize(("alone", "severity"), [(False, "warning"), (True, "note")])
def test_an_optimizer_that_never_steps(alone: bool, severity: str, tmp_path: Path) -> None:
    """A warning where most of the network is trained; a note where one layer is."""
    model, both, step = heads(lambda _: False, lambda one: [one.classes] if alone else [one.trunk, one.classes])
    # the last one ends a step
    (found,) = found_in(tmp_path, "never_stepped", model, step, both[::-1], steps=60)
    assert (found.module, found.first, str(found.severity)) == ("number", 0, severity)
    assert found.evidence == (
        "it is in step 50 what it was in step 0, though its layer had gradients at 50 recorded steps between them"
    )


@pytest.mark.parametrize("every", [1, 5])
def test_an_optimizer_that_steps_seldom(every: int, tmp_path: Path) -> None:
    """It is nobody's concern, nor are frozen weights."""
    model, both, step = heads(lambda number: number % every == 0, lambda one: [one.trunk, one.classes])
    assert found_in(tmp_path, "never_stepped", model, step, both, steps=60) == []


def test_a_frozen_layer_is_not_forgotten(tmp_path: Path) -> None:
    """Gradients come to its outputs, and it asks for none itself."""
    model = network()
    model[2].requires_grad_(False)
    assert found_in(tmp_path, "never_stepped", model, plain, steps=60) == []


# -- weights that the program writes ------------------------------------------------------------------------------


def writing(write: Callable[[int, nn.Module], None]) -> Step:
    """A training whose program does something to its model before each step."""

    def step(number: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            write(number, model)
        dtype = next(model.parameters()).dtype
        plain(number, model, optimizer, x.to(dtype), y)

    return step


def initialised_again(number: int, model: nn.Module) -> None:
    """It initialises a layer again."""
    if number == 30:
        model[2].reset_parameters()  # type: ignore[index,union-attr,operator]


def nudged(number: int, model: nn.Module) -> None:
    """It changes one number."""
    if number == 30:
        model[2].weight[3, 4] += 0.01  # type: ignore[index,union-attr]


def halved(number: int, model: nn.Module) -> None:
    """It halves a weight."""
    if number == 30:
        model[2].weight.mul_(0.5)  # type: ignore[index,union-attr,operator]


@pytest.mark.parametrize("write", [initialised_again, nudged, halved])
def test_a_weight_that_the_program_writes(write: Callable[[int, nn.Module], None], tmp_path: Path) -> None:
    """The sum of the weight is not that of the weight before and its update."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    (found,) = found_in(tmp_path, "changed_between_steps", model, writing(write), optimizer, steps=40)
    assert (found.module, found.first, found.steps, str(found.severity)) == ("2", 30, 1, "warning")
    assert found.evidence.startswith("its sum changed between the update of step 29 and step 30")


def clamped(_: int, model: nn.Module) -> None:
    """It clamps all weights."""
    for one in model.parameters():
        one.clamp_(-0.05, 0.05)


def test_weights_that_are_clamped_at_each_step_are_a_note(tmp_path: Path) -> None:
    """A habit is meant."""
    found = found_in(tmp_path, "changed_between_steps", network(), writing(clamped))
    assert {str(one.severity) for one in found} == {"note"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_weights_that_only_the_optimizer_changes(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whatever the precision, and however large the steps; 200,000 numbers are summed in parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 500), nn.ReLU(), nn.Linear(500, 3)).to(dtype)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.02)
    step = writing(lambda *_: None)
    assert found_in(tmp_path, "changed_between_steps", model, step, optimizer, steps=10) == []


# -- saturation, dead units, inputs, and the first loss -----------------------------------------------------------


def scaled(factor: float, nonlinearity: type[nn.Module]) -> nn.Sequential:
    """A network whose first layer's weights are too large by a factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nonlinearity(), nn.Linear(64, 3))
    with torch.no_grad():
        model[0].weight.mul_(factor)  # type: ignore[operator,union-attr]
    return model


@pytest.mark.parametrize("nonlinearity", [nn.Tanh, nn.Sigmoid])
def test_weights_that_saturate(nonlinearity: type[nn.Module], tmp_path: Path) -> None:
    """From the first step on; at the usual scale, and three times it, nothing is said."""
    (found,) = found_in(tmp_path / "large", "saturated_activations", scaled(60, nonlinearity), plain)
    assert (found.module, found.first, str(found.severity)) == ("1", 0, "warning")
    assert 0.9 < found.value <= 1
    for factor in (1.0, 3.0):
        folder = tmp_path / f"{factor}"
        assert found_in(folder, "saturated_activations", scaled(factor, nonlinearity), plain) == []


def test_the_mean_derivative_is_that_of_the_outputs() -> None:
    """The finding's value, against the outputs themselves: what the mean derivative lacks to its largest value."""
    for name, function, largest in (("Tanh", torch.tanh, 1.0), ("Sigmoid", torch.sigmoid, 0.25)):
        x = 40 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).double()
        y = function(x.requires_grad_())
        (slope,) = torch.autograd.grad(y.sum(), x)
        messages = [statistics_at(step, "activations", y.detach(), "a") for step in range(6)]
        (found,) = findings(
            "saturated_activations", messages, {"modules": [{"name": "a", "class": f"torch.nn.{name}"}]}
        )
        assert found.value == pytest.approx(1 - float(slope.mean()) / largest)
        assert float((slope < largest / 5).double().mean()) >= 0.5


def statistics_at(step: int, kind: str, data: Tensor, module: str | None = None, **more: Any) -> Message:
    """A message with the statistics of data, as a recording by default has them."""
    told = {"reduce": "statistics", "entries": list(ENTRIES), "axes": data.ndim, "floating": data.is_floating_point()}
    return at(step, kind, statistics_of(data), module, sampling=told, **more)


def test_outputs_that_may_be_at_their_ends() -> None:
    """A gate that is shut on purpose, and the output of the network."""
    model = {"modules": [{"name": "a", "class": "torch.nn.Sigmoid"}]}
    shut = torch.sigmoid(-9 + torch.randn(50, 40, generator=torch.Generator().manual_seed(0)))
    gate = [statistics_at(step, "activations", shut, "a") for step in range(9)]
    assert findings("saturated_activations", gate, model) == []
    sure = torch.sigmoid(60 * torch.randn(50, 1, generator=torch.Generator().manual_seed(0)))
    last = [
        message
        for step in range(9)
        for message in (
            statistics_at(step, "activations", sure, "a"),
            statistics_at(step, "network_output", sure.reshape(-1)),
        )
    ]
    assert findings("saturated_activations", last, model) == []
    assert len(findings("saturated_activations", last[::2], model)) == 1


@pytest.mark.parametrize(("bias", "dead"), [(-30.0, True), (-0.5, False), (0.0, False)])
def test_a_bias_that_kills_a_layer(bias: float, dead: bool, tmp_path: Path) -> None:
    """All numbers of a ReLU are zero at each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    nn.init.constant_(model[0].bias, bias)  # type: ignore[arg-type]
    found = found_in(tmp_path, "dead_units", model, plain)
    assert [(one.module, one.first) for one in found] == ([("1", 0)] if dead else [])


class Stateful(nn.Module):
    """A network that gets a state beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        found: Tensor = self.head(self.cell(x, state))
        return found


def with_state(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The state begins at zero in each step."""
    optimizer.zero_grad()
    F.cross_entropy(model(x, torch.zeros(16, 8)), y).backward()
    optimizer.step()


def test_inputs_of_zeros(tmp_path: Path) -> None:
    """All inputs of a step are zero; a state of zeros beside an input is usual."""
    (found,) = found_in(
        tmp_path / "zero", "input_not_normalised", network(), plain, inputs=lambda _: torch.zeros(16, 6)
    )
    assert (found.first, found.last, found.evidence) == (0, 19, "every number is zero in step 0")
    assert found_in(tmp_path / "state", "input_not_normalised", Stateful(), with_state) == []


def summed(_: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """The loss is the sum over the datapoints."""
    optimizer.zero_grad()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    optimizer.step()


@pytest.mark.parametrize(("factor", "step", "bad"), [(200, plain, True), (1, plain, False), (1, summed, False)])
def test_the_first_loss(factor: float, step: Step, bad: bool, tmp_path: Path) -> None:
    """Of logits that are far too large; a sum over datapoints is more than a mean of such logits can be."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    with torch.no_grad():
        model[2].weight.mul_(factor)  # type: ignore[operator,union-attr]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found = found_in(tmp_path, "poor_initialisation", model, step, optimizer, steps=3)
    assert [(one.kind, one.first) for one in found] == ([("network_output", 0)] if bad else [])


# -- evaluations --------------------------------------------------------------------------------------------------


def evaluations(evaluate: Callable[[nn.Module, Tensor, Tensor], None]) -> Step:
    """A training that is evaluated after every tenth step."""

    def step(number: int, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        plain(number, model, optimizer, x, y)
        if number % 10 == 9:
            with torch.no_grad():
                evaluate(model, x, y)

    return step


def as_in_training(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """In train mode, with a loss for each pass."""
    for rows, labels in zip(x.split(4), y.split(4), strict=True):
        F.cross_entropy(model(rows), labels)


def in_eval_mode(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """As it should be."""
    model.eval()
    F.cross_entropy(model(x), y)
    model.train()


def over_masks(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The loss of the mean over dropout masks."""
    F.cross_entropy(torch.stack([model(x) for _ in range(5)]).mean(0), y)


def statistics_again(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Passes that recompute the statistics of a batch normalisation."""
    for rows in x.split(4):
        model(rows)


def layers() -> nn.Sequential:
    """A network with a batch normalisation and a dropout."""
    return network(nn.BatchNorm1d(10), nn.Dropout(0.3))


@pytest.mark.parametrize(
    ("make", "evaluate", "bad"),
    [
        (layers, as_in_training, True),
        (network, as_in_training, False),
        (layers, in_eval_mode, False),
        (layers, over_masks, False),
        (layers, statistics_again, False),
    ],
)
def test_evaluations_in_train_mode(
    make: Made, evaluate: Callable[[nn.Module, Tensor, Tensor], None], bad: bool, tmp_path: Path
) -> None:
    """A fault where a dropout or a batch normalisation is active in the only pass of a loss."""
    found = found_in(tmp_path, "evaluation_mode", make(), evaluations(evaluate), steps=40)
    assert [(one.first, one.tag, one.steps) for one in found] == ([(10, "eval", 4)] if bad else [])


# -- numbers that are not finite ----------------------------------------------------------------------------------


class Logarithm(nn.Module):
    """Meets zero where its input is negative."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().log()


def test_a_logarithm_of_zero(tmp_path: Path) -> None:
    """The first is minus infinity, which the layer after it makes NaN of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Logarithm(), nn.Linear(8, 3))
    nn.init.constant_(model[0].bias, 30.0)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def inputs(number: int) -> Tensor:
        return torch.full((16, 6), -1e3 if number == 5 else 0.1) * torch.eye(16, 6)

    (found,) = found_in(tmp_path, "not_finite", model, plain, optimizer, steps=8, inputs=inputs)
    assert (found.module, found.kind, found.first) == ("1", "activations", 5)


@pytest.mark.parametrize("usual", [True, False])
def test_minus_infinity_is_the_first_where_it_is_new(usual: bool) -> None:
    """A mask that had it before, or that is not known from an earlier step, is not to blame."""
    mask = torch.tensor([0.0, -torch.inf])
    messages = []
    for step in range(8):
        masked = mask if step in ((3, 6) if usual else (6,)) else torch.zeros(2)
        value = torch.tensor([1.0, torch.nan if step == 6 else 1.0])
        messages += [at(step, "activations", masked, "mask"), at(step, "activations", value, "other")]
    (found,) = findings("not_finite", messages)
    assert (found.module, found.first) == ("other" if usual else "mask", 6)
    (early,) = findings("not_finite", messages[12:])
    assert (early.module, early.first) == ("other", 6)


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
    flat = with_labels(FLAT)
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
