"""Each rule on messages made by hand: what fires, what does not, what is said."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

import analyze.rules.tables
from analyze import registry, rulebook
from analyze.registry import parse
from analyze.rules import RULES
from analyze.rules.activations import RankCollapse
from analyze.rules.coverage import Judged
from analyze.rules.finding import Finding, Severity
from analyze.rules.rule import Rule, TableRule
from analyze.rules.tables import ByTables
from analyze.seeing.check import FindingsOfRules
from tracer.errors import MessageError, TracerError, UnknownNameError
from tracer.messaging.bus import MessageBus
from tracer.messaging.messages import KINDS, Message, message_of
from tracer.messaging.stacks import Heads, Source, Stack, Stretch
from tracer.numbers.statistics import ENTRIES, are_statistics, statistics_of
from tracer.observing.pytorch.optimizer_states import hyperparameters

# -- messages -----------------------------------------------------------------------------------------------------


def at(step: int, kind: str, data: Any, module: str | None = None, **more: Any) -> Message:
    """A message of a step."""
    tensor = data if isinstance(data, Tensor) else torch.tensor(data)
    return message_of(module, kind=kind, data=tensor, global_step=step, train_step=step, epoch=0, **more)


def statistics_at(step: int, kind: str, data: Tensor, module: str | None = None, **more: Any) -> Message:
    """A message with the statistics of data, as a recording by default has them."""
    told = {"reduce": "statistics", "entries": list(ENTRIES), "axes": data.ndim, "floating": data.is_floating_point()}
    return at(step, kind, statistics_of(data), module, sampling=told, **more)


def run(steps: int, *streams: tuple[Any, ...], **more: Any) -> list[Message]:
    """The messages of streams, step by step; each stream is a kind, its data or what makes it of a step, a module."""
    return [
        at(step, kind, data(step) if callable(data) else data, *module, **more)
        for step in range(steps)
        for kind, data, *module in streams
    ]


def noise(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def modules(**classes: str) -> dict[str, Any]:
    """A header's model with these classes of ``torch.nn``."""
    return {"modules": [{"name": name, "class": f"torch.nn.modules.x.{one}"} for name, one in classes.items()]}


def falling(steps: int, jumps: Mapping[int, float] | None = None) -> list[Message]:
    """A loss that falls from 2 to 0.2 with noise."""
    curve = 0.2 + 1.8 * torch.exp(-torch.arange(steps) / 30) + noise(1, steps, scale=0.03)
    return [at(step, "loss", (jumps or {}).get(step, float(curve[step]))) for step in range(steps)]


FLAT = [1.0 + float(value) for value in noise(2, 150, scale=0.02)]
"""A loss that does not fall."""


def guessing() -> list[Message]:
    """A loss that falls from a bad start to that of guessing."""
    loss = math.log(8) + noise(3, 200, scale=0.01) + (torch.arange(200) < 12)
    labels = ("input_labels", torch.arange(4))
    return run(200, ("network_output", lambda step: noise(step, 4, 8)), labels, ("loss", lambda step: loss[step]))


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


def jumping(labels: str, advantage: bool) -> list[Message]:
    """A loss with a jump; an advantage changes its sign with each step."""
    curve = [float(one.data) for one in falling(200, {150: 30.0}) if one.data is not None]
    signs = [(-1.0) ** step if advantage else 1.0 for step in range(200)]
    return with_labels(map(math.prod, zip(curve, signs, strict=True)), labels=labels, advantage=advantage)


def evaluated(epochs: int) -> list[Message]:
    """A training with evaluations that become worse from the fourth on."""
    messages = []
    for epoch, loss in enumerate([1.0, 0.8, 0.7, 0.8, 0.9, 1.0, 1.1]):
        training = [at(10 * epoch + one, "loss", 1.0 / (1 + epoch)) for one in range(10)]
        messages += [*(training if epoch < epochs else [])]
        messages += [at(10 * epoch + 9, "loss", loss, tag="eval", call=call) for call in range(2)]
    return messages


def backward(growth: float, layers: Sequence[str]) -> list[Message]:
    """Gradients of six layers, each `growth` times the one after it; only those of some layers."""
    return [
        at(step, "layer_gradients", torch.full((4,), growth**depth), layer)
        for step in range(8)
        for depth, layer in enumerate(reversed([f"l{number}" for number in range(6)]))
        if layer in layers
    ]


def of_blocks(trunk: float) -> list[Message]:
    """Gradients of blocks whose branches are nearly closed, and that of the trunk, which arrives at the first layer."""
    layers = [f"{block}.{name}" for block in reversed(range(4)) for name in ("down", "act", "up", "norm")]
    several = [("layer_gradients", torch.full((4,), 1e-6), name) for name in layers]
    stem = ("layer_gradients", torch.full((4,), trunk), "stem")
    return run(6, ("layer_gradients", torch.ones(4), "head"), *several, stem)


def updates(ratios: Iterable[Mapping[str, float]]) -> Iterator[Message]:
    """Weights of norm 2 and updates with these ratios to them, step by step."""
    for step, of_step in enumerate(ratios):
        for module, ratio in of_step.items():
            yield at(step, "weights", torch.full((2, 2), 1.0), module)
            yield at(step, "weight_updates", torch.full((2, 2), ratio), module)


def ratios(modules: str = "", steps: range = range(0)) -> list[dict[str, float]]:
    """The usual ratios of four layers over 80 steps; those of some layers are 30 times as large at some steps."""
    return [
        {
            name: 1e-3 * (1 + 0.1 * ((step * 7 + number) % 5)) * (30 if name in modules and step in steps else 1)
            for number, name in enumerate("abcd")
        }
        for step in range(80)
    ]


def seldom_used() -> list[Message]:
    """Torch's Adagrad on units that are seldom active, and a layer that a program thaws at a step."""
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
    return messages


def still(gradients: bool = True) -> list[Message]:
    """Weights that nothing changes, for each reason that there is, and nine that are trained."""
    messages = []
    for step in range(20):
        for name in ("a", "b1", "b2", "c", "d", "e", *(f"t{one}" for one in range(9))):
            zero = not name.startswith(("c", "t")) or (name == "c" and step > 5)
            if gradients and name not in ("b1", "b2", "d", "e"):
                messages.append(at(step, "weight_gradients", [1.0, 1.0], name))
            messages.append(at(step, "weights", [1.0, 1.0 + (name == "e") * step], name))
            messages.append(at(step, "weight_updates", [0.0, 0.0 if zero else 1.0], name))
    return messages


FROZEN = {"parameters": [{"name": f"b{one}.weight", "requires_grad": False} for one in (1, 2)]}


def nudged(steps: int, at_steps: Iterable[int], *, copied: bool = False) -> list[Message]:
    """Weights that something else than the update changes before some steps; if `copied`, no update changes them."""
    weight, messages, nudges = noise(0, 3, 4).double(), [], set(at_steps)
    for step in range(steps):
        if step in nudges:
            weight = weight.clone()
            weight[1, 2] += 1e-3
        update = noise(step, 3, 4, scale=1e-3).double()
        messages.append(at(step, "weights", weight.float(), "w"))
        messages.append(at(step, "weight_updates", torch.zeros(3, 4) if copied else update.float(), "w"))
        weight = weight.float().double() + update.float().double()
    return messages


def grown(last: float) -> list[Message]:
    """A weight that begins at a hundredth of PyTorch's initialisation, and ends at `last` times it."""
    usual = float(nn.Linear(64, 8).weight.detach().norm())
    direction = noise(0, 8, 64) / noise(0, 8, 64).norm()
    sizes = torch.logspace(-2, math.log10(last), 30)
    return run(30, ("weights", lambda step: usual * float(sizes[step]) * direction, "head"))


HEAD = {"parameters": [{"name": "head.weight", "shape": [8, 64], "requires_grad": True}]}


def outputs(step: int) -> Tensor:
    """The outputs of a ReLU, of which 2 of 10 units are dead, and from step 30 on 6."""
    x = noise(step, 32, 10).abs()
    x[:, : (6 if step >= 30 else 2)] = 0
    x[0, 9] = 0
    return x


def silent(shape: tuple[int, ...], where: Any) -> list[Message]:
    """The outputs of a ReLU of which some units are dead."""

    def data(step: int) -> Tensor:
        x = noise(step, *shape).relu()
        x[where] = 0
        return x

    return run(12, ("activations", data, "relu"))


def counts(step: int) -> Tensor:
    """Features of which seven are never there."""
    return noise(step, 32, 10).relu() * (torch.arange(10) < 3)


def sharp(shares: Sequence[float]) -> list[Message]:
    """An attention of which a share of the distributions is sure, step by step."""

    def data(step: int) -> Tensor:
        x = torch.full((2, 50, 4), 0.25)
        x[:, : round(50 * shares[step])] = torch.tensor([1.0, 0, 0, 0])
        return x

    return run(len(shares), ("activations", data, "a"))


def gate(shares: Sequence[float], every: int = 1) -> list[Message]:
    """A tanh of which a share of the outputs is at an end, step by step."""
    sizes = [torch.cat([torch.ones(round(100 * one)), torch.zeros(100 - round(100 * one))]) for one in shares]
    return [at(step * every, "activations", one[None], "t") for step, one in enumerate(sizes)]


def classified(loss: Callable[[Tensor, Tensor], Tensor], right: bool) -> list[Message]:
    """The outputs of a saturated sigmoid, and the gradients that a loss gives them."""
    messages = []
    for step in range(8):
        y = (noise(step, 32, 1) > 0).float()
        x = (12.0 * (2 * y - 1)).clone() if right else 12.0 * noise(step + 50, 32, 1).sign()
        p = x.sigmoid().requires_grad_(True)
        loss(p, y).backward()
        assert p.grad is not None
        messages += [at(step, "activations", p.detach(), "s"), at(step, "network_output", p.detach())]
        messages.append(at(step, "layer_gradients", p.grad, "s"))
    return messages


SHUT = torch.sigmoid(-9 + noise(0, 50, 40))
SURE = torch.sigmoid(60 * noise(0, 50, 1))
LAST = [
    made
    for step in range(9)
    for made in (statistics_at(step, "activations", SURE, "a"), statistics_at(step, "network_output", SURE[:, 0]))
]
"""The statistics of a sigmoid whose outputs are sure, and those of the network, which are the same."""


def collapsing() -> list[Message]:
    """Outputs that vary, those that become the same from step 2 on, and those that never depended on the input."""
    constant = noise(0, 1, 16).expand(8, 16)
    return run(
        10,
        ("activations", lambda step: noise(step, 8, 16), "varies"),
        ("activations", lambda step: noise(0, 8, 16) if step < 2 else constant + 1e-5 * noise(step, 8, 16), "same"),
        ("activations", constant.contiguous(), "places"),
    )


def scales(*several: float) -> list[Message]:
    """The first activations of layers of different scale."""
    return [at(0, "activations", noise(1, 8, 4, scale=scale), name) for name, scale in zip("abcde", several)]  # noqa: B905


def first(scale: float, dtype: torch.dtype = torch.int64) -> list[Message]:
    """The first output of a classifier, and its labels."""
    return run(1, ("network_output", noise(1, 4, 10, scale=scale)), ("input_labels", torch.arange(4).to(dtype)))


def first_loss(factor: float, reduction: str) -> list[Message]:
    """The statistics of the first output of a classifier and of its labels, and the loss that a function made of it."""
    x, y = noise(1, 16, 3, scale=factor), torch.arange(16) % 3
    loss = at(0, "loss_terms", F.cross_entropy(x, y, reduction=reduction), leaf="cross_entropy")
    return [statistics_at(0, "network_output", x), statistics_at(0, "input_labels", y), loss]


def inputs(scale: float, offset: float) -> list[Message]:
    """Inputs of a scale, around an offset."""
    return run(4, ("input_data", lambda step: noise(step, 16, 5) * scale + offset))


def classes(right: bool, shape: tuple[int, ...] = (40,)) -> list[Message]:
    """The outputs of a classifier and labels, of which one is rare."""
    labels = torch.tensor([0] * 20 + [1] * 19 + [2])
    output = F.one_hot(labels, 3).float()
    if not right:
        output[-1] = torch.tensor([1.0, 0.0, 0.0])
    output = output if len(shape) == 1 else output.reshape(shape[0], 3, shape[1])
    return run(30, ("network_output", output), ("input_labels", labels.reshape(shape)))


def passes(tag: str) -> list[Message]:
    """Steps with updates, and with passes of a tag."""
    made = [
        (at(step, "network_output", noise(step, 4, 2), tag=tag), at(step, "weight_updates", noise(step, 2, 2), "w"))
        for step in range(12)
    ]
    return [one for both in made for one in both]


def one_step_in_eval_mode() -> list[Message]:
    """Twelve passes; step 7 was trained in eval mode."""
    event = message_of(None, kind="eval_mode", global_step=7, train_step=7, epoch=0, data=None)
    made = run(12, ("network_output", lambda step: noise(step, 4, 2)))
    return [*made[:7], event, *made[7:]]


def dropout(works: bool, before: str) -> list[Message]:
    """What a dropout gets from a layer before it, and what it puts out."""
    messages = []
    for step in range(12):
        x = noise(step, 32, 64)
        x = x.relu() if before == "relu" else x
        kept = (noise(step + 100, 32, 64) > -0.8).float() if works else torch.ones(32, 64)
        messages += [at(step, "activations", x, "before"), at(step, "activations", x * kept, "drop")]
    return messages


DROPOUT = {"modules": [{"name": "drop", "class": "torch.nn.modules.dropout.Dropout", "probability": 0.2}]}


def normalised(training: bool) -> list[Message]:
    """PyTorch's own batch normalisation, on inputs whose mean is not what it remembers."""
    norm, messages = nn.BatchNorm1d(6), []
    norm.train(training)
    with torch.no_grad():
        norm.bias += torch.arange(6)
        for step in range(25):
            messages.append(at(step, "activations", norm(noise(step, 64, 6) + 1.5), "bn"))
            messages.append(at(step, "biases", norm.bias.clone(), "bn"))
    return messages


def masked(usual: bool) -> list[Message]:
    """Minus infinity in step 6, before a NaN; it is usual if it was there in step 3, too."""
    mask, told = torch.tensor([0.0, -torch.inf]), (3, 6) if usual else (6,)
    return run(
        8,
        ("activations", lambda step: mask if step in told else torch.zeros(2), "mask"),
        ("activations", lambda step: torch.tensor([1.0, torch.nan if step == 6 else 1.0]), "other"),
    )


Change = Callable[[int, list[dict[str, Any]]], None]


def rates(
    steps: int, schedule: Callable[[Any], Any] | None = None, change: Change | None = None,
    groups: tuple[float, ...] = (0.1,),
) -> Iterator[Message]:  # fmt: skip
    """The hyperparameters of a real optimizer, step by step, as a recording has them."""
    several = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in groups]
    optimizer = torch.optim.SGD(several, lr=0.1)
    scheduler = None if schedule is None else schedule(optimizer)
    for step in range(steps):
        if change is not None:
            change(step, optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            found = hyperparameters(group)
            data = torch.tensor(list(found.values()), dtype=torch.float64)
            yield at(step, "hyperparameters", data, leaf=f"0.{number}", sampling={"entries": list(found)})
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def times(factor: float) -> Change:
    """The rates of all groups, multiplied at step 60."""

    def change(step: int, groups: list[dict[str, Any]]) -> None:
        for group in groups if step == 60 else ():
            group["lr"] = float(group["lr"]) * factor

    return change


def stop(which: slice) -> Change:
    """The rates of some groups are zero from step 60 on."""

    def change(step: int, groups: list[dict[str, Any]]) -> None:
        for group in groups[which] if step >= 60 else ():
            group["lr"] = 0.0

    return change


def decaying(optimizer: Any) -> Any:
    """A schedule."""
    return schedules.ExponentialLR(optimizer, 0.99)


SCHEDULES: tuple[Callable[[Any], Any] | None, ...] = (
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
)
"""Warm-ups from zero and from a plateau, restarts, zeros at the end; none."""

Data = Callable[[int], Tensor]


def indices(step: int) -> Tensor:
    """Class indices of 16 datapoints."""
    return torch.randint(0, 5, (16,), generator=torch.Generator().manual_seed(step))


def logits(step: int) -> Tensor:
    """Logits of 16 datapoints and 5 classes."""
    return noise(step, 16, 5, scale=2.0)


def calls(loss: Callable[..., Tensor], output: Data, labels: Data = indices, name: str = "") -> Iterator[Message]:
    """Calls of a loss function, step by step, as a recording has them."""
    for step in range(40):
        x, y = output(step), labels(step)
        yield at(step, "network_output", x)
        yield at(step, "input_labels", y)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using a target size")
            yield at(step, "loss_terms", loss(x, y), leaf=name or loss.__name__)


def of_logits(change: Callable[[Tensor], Tensor], seed: int = 0) -> Data:
    """Something made of logits."""
    return lambda step: change(logits(step + seed))


def signs(step: int) -> Tensor:
    """Labels of two classes."""
    return (noise(step, 16, 1) > 0).float()


def sigmoids(begin: float = 0.0) -> Data:
    """Outputs from 0 to 1, up to step 20 less `begin` from then on."""
    return lambda step: noise(step, 16, 1).sigmoid() - (begin if step > 20 else 0.0)


def broadcast(output: tuple[int, ...], labels: tuple[int, ...]) -> Iterator[Message]:
    """Calls of a squared distance with these shapes."""
    return calls(F.mse_loss, lambda step: noise(step, *output), lambda step: noise(-step, *labels))


# -- what is found --------------------------------------------------------------------------------------------------

Found = Mapping[str, Any]
"""Attributes and numbers of a finding; `begins` and `says` are a beginning and a part of its evidence."""
Made = Callable[[], Iterable[Message]]
Case = tuple[str, Made, list[Found]] | tuple[str, Made, list[Found], Any]
"""A rule, the messages, what it finds, and the model in the header."""


def when(bad: bool, **found: Any) -> list[Found]:
    """One finding, or none."""
    return [found] if bad else []


CASES: dict[str, Case] = {
    "the first that is not finite is named, and what follows is counted with it": ("not_finite", lambda: [
        at(3, "activations", [1.0], "a"), at(3, "activations", [1.0, math.nan, math.inf, -math.inf], "b"),
        at(3, "loss", math.nan), at(4, "activations", [math.nan] * 3, "a"), at(5, "activations", [math.nan] * 3, "b"),
    ], [{
        "first": 3, "last": 5, "steps": 3, "module": "b", "kind": "activations", "severity": "error",
        "evidence": "1 NaN and 2 infinite; from there on in 2 more streams",
    }]),
    "a step with finite numbers only ends a finding": ("not_finite", lambda: [
        at(step, "loss" if step < 5 else "network_output", math.nan if step in (2, 9) else 1.0) for step in range(12)
    ], [{"first": 2, "kind": "loss"}, {"first": 9, "kind": "network_output"}]),
    **{f"{value} in {kind}": (
        "not_finite", lambda value=value, kind=kind: [at(0, kind, [1.0, value], None if kind in ("loss",
            "network_output") else "m")],
        when(bad),
    ) for value, kind, bad in (
        (-math.inf, "activations", False), (-math.inf, "loss", True), (math.inf, "activations", True),
        (math.nan, "layer_inputs", True), (-math.inf, "network_output", False), (-math.inf, "weight_gradients", True),
    )},
    "minus infinity is the first where it is new": ("not_finite", lambda: masked(False), [{"module": "mask",
        "first": 6}]),
    "a mask that had it before is not": ("not_finite", lambda: masked(True), [{"module": "other", "first": 6}]),
    "nor one that is not known from an earlier step": (
        "not_finite", lambda: masked(False)[12:], [{"module": "other", "first": 6}],
    ),
    "separate episodes are separate findings": ("loss_spike", lambda: falling(300, {18: 9.0, 20: 12.0, 275: 49.39}), [
        {"first": 18, "worst": 20, "last": 20, "steps": 2},
        {"first": 275, "worst": 275, "last": 275, "steps": 1, "begins": "the loss was 49.39 in step 275"},
    ]),
    "a spike of the loss": ("loss_spike", lambda: falling(200, {150: 3.0}), [
        {"first": 150, "steps": 1, "value": 3.0, "usual": pytest.approx(0.22, abs=0.03)},
    ]),
    "a loss that just falls": ("loss_spike", lambda: falling(200), []),
    "a loss that does not fall stands at the beginning": ("loss_not_falling",
        lambda: run(150, ("loss", FLAT.__getitem__)), [
        {"first": 0, "last": 149, "worst": 149},
    ]),
    "a loss that falls": ("loss_not_falling", lambda: falling(150), []),
    "one that fell and came back": (
        "loss_not_falling", lambda: [*falling(150), *(at(step, "loss", 2.0) for step in range(150, 400))], [],
    ),
    "one that is too short": ("loss_not_falling", lambda: run(99, ("loss", FLAT.__getitem__)), []),
    "guessing is no learning": ("loss_not_falling", guessing, [
        {"chance": pytest.approx(math.log(8)), "says": "guessing has 2.079"},
    ]),
    "adversaries take turns": (
        "loss_not_falling", lambda: [at(step,
            "loss", one, leaf=leaf) for step, one in enumerate(FLAT) for leaf in "dg"], [],
    ),
    "a network that was trained before cannot fall much": (
        "loss_not_falling", lambda: with_labels([loss / 10 for loss in FLAT]), [{"severity": "note"}],
    ),
    # those of contrastive networks, adversaries and policies need not fall, and may jump
    **{f"a jump with {labels}{' and advantages' * advantage}": (
        "loss_spike", lambda labels=labels, advantage=advantage: jumping(labels, advantage), [{"first": 150,
            "severity": severity}],
    ) for labels, advantage, severity in (
        ("data", False, "warning"), ("pairs", False, "note"), ("real", False, "note"), ("data", True, "note"),
    )},
    **{f"no fall with {labels}": (
        "loss_not_falling", lambda labels=labels: with_labels(FLAT, labels=labels), [{"severity": severity}],
    ) for labels, severity in (("data", "warning"), ("pairs", "note"), ("real", "note"))},
    **{f"no fall below zero with {labels}": (
        "loss_not_falling", lambda labels=labels: with_labels([one - 1.0 for one in FLAT], labels=labels), [],
    ) for labels in ("data", "pairs", "real")},
    "overfitting, from the third evaluation in a row on that is worse": ("overfitting", lambda: evaluated(7), [
        {"first": 39, "tag": "eval", "best_step": 29, "best": pytest.approx(0.7)},
    ]),
    "evaluations while the training does not fall": ("overfitting", lambda: evaluated(1), []),
    **{f"gradients for {name}": (name, lambda growth=growth: backward(growth, [f"l{one}" for one in range(6)]), [
        {"module": "l0", "first": 0},
    ]) for name, growth in (("vanishing_gradient", 0.05), ("exploding_gradient", 10.0))},
    **{f"less for {name}": (name, lambda growth=growth: backward(growth, ["l5", "l4", "l3", "l2"]), [])
       for name, growth in (("vanishing_gradient", 0.05), ("exploding_gradient", 10.0))},
    "a closed branch loses no gradient": ("vanishing_gradient", lambda: of_blocks(1.0), []),
    "a closed trunk does": ("vanishing_gradient", lambda: of_blocks(1e-7), [{"module": "stem", "first": 0}]),
    "a gradient that leaves its past": (
        "exploding_gradient",
        lambda: run(60, ("weight_gradients", lambda step: torch.tensor([400.0 if step == 50 else 1.0, 0.0]), "fc")),
        [{"first": 50, "value": 400.0, "usual": pytest.approx(1.0)}],
    ),
    "usual updates": ("update_ratio", lambda: updates(ratios()), []),
    "updates of all layers together, as of a learning rate": (
        "update_ratio", lambda: updates(ratios("abcd", range(60, 80))), [],
    ),
    "a layer whose updates leave its past": ("update_ratio", lambda: updates(ratios("c", range(60, 63))), [
        {"module": "c", "first": 60, "steps": 3, "alone": 1.0},
    ]),
    "updates as large as the weights, of one layer alone": ("update_ratio", lambda: updates([{"a": 0.7}] * 40), [
        {"module": "a", "first": 24, "threshold": 0.5},
    ]),
    "layers that join or are seldom used have no usual update": ("update_ratio", seldom_used, []),
    "weights that nothing changes: a warning where gradients arrive, one note each for all of which the same holds": (
        "unchanged", still, [
            {"module": "a", "first": 0, "severity": "warning", "others": 0},
            {"module": "b1", "first": 0, "severity": "note", "others": 1},
            {"module": "d", "first": 0, "severity": "note", "others": 1,
             "says": "the program writes to it between the steps"},
            {"module": "c", "first": 6, "severity": "note", "others": 0},
        ], FROZEN,
    ),
    "the same without gradients": ("unchanged", lambda: still(gradients=False), [{"severity": "note"}] * 3, FROZEN),
    "weights that only updates change": ("changed_between_steps", lambda: nudged(40, ()), []),
    "weights that something else changes": ("changed_between_steps", lambda: nudged(40, [30]), [
        {"first": 30, "elements": 1.0, "severity": "warning"},
    ]),
    "a habit is a note": ("changed_between_steps", lambda: nudged(40, range(40)), [{"steps": 39, "severity": "note"}]),
    "so is one at times": ("changed_between_steps", lambda: nudged(200, range(10, 200, 15)), [
        {"first": 10, "steps": 13, "severity": "note"},
    ]),
    "a copy that the program writes": ("changed_between_steps", lambda: nudged(40, range(40), copied=True), []),
    "weights that grow": (
        "norm_drift", lambda: run(30, ("weights", lambda step: torch.full((2, 2), 1.2**step), "w")),
        [{"first": 13, "value": pytest.approx(1.2**29)}],
    ),
    **{f"a head that ends at {last} times PyTorch's initialisation": ("norm_drift",
        lambda last=last: grown(last), found, HEAD)
       for last, found in ((2.0, []), (20.0, [{"severity": "warning"}]), (5e-4, [{"severity": "note"}]),
                           (1e-6, [{"severity": "warning"}]))},
    "dead units, from the step on at which half of them gave nothing": (
        "dead_units", lambda: run(60, ("activations", outputs, "relu")), [{"first": 30, "dead": 6, "units": 10}],
    ),
    "not for long enough": ("dead_units", lambda: run(35, ("activations", outputs, "relu")), []),
    "zeros of a linear layer are no dead units": (
        "dead_units", lambda: run(60, ("activations", torch.zeros(32, 10), "relu")), [], modules(relu="Linear"),
    ),
    "but all zeros": (
        "all_zeros", lambda: run(60, ("activations", torch.zeros(32, 10), "relu")), [{"first": 0}],
            modules(relu="Linear"),
    ),
    "channels of images": (
        "dead_units", lambda: silent((8, 6, 4, 4), (slice(None), slice(0, 3))), [{"units": 6, "dead": 3}],
    ),
    "features of sequences": ("dead_units", lambda: silent((8, 5, 6), (..., slice(0, 3))), [{"units": 6, "dead": 3}]),
    **{f"the statistics of a ReLU after a bias of {bias}": ("dead_units", lambda bias=bias: [
        statistics_at(step, "activations", (noise(step, 16, 12) + bias).relu(), "1") for step in range(20)
    ], when(bias == -30.0, module="1", first=0), modules(**{"1": "ReLU"})) for bias in (-30.0, -0.5, 0.0)},
    "features that are never there": ("dead_units", lambda: run(20, ("layer_inputs", counts, "fc")),
        [{"module": "fc"}]),
    "those of the network's own input are no units": (
        "dead_units", lambda: run(20, ("input_data", counts), ("layer_inputs", counts, "fc")), [],
    ),
    "nor are counts": ("dead_units", lambda: run(20, ("layer_inputs", lambda step: counts(step).ceil(), "fc")), []),
    "tanh and sigmoid at their ends; other modules may have such numbers": ("saturated_activations", lambda: run(
        6, ("activations", [[-1.0, 0.999, 0.1]], "t"), ("activations", [[0.0, 0.9999, 0.5]], "s"),
        ("activations", torch.ones(1, 3), "other"),
    ), [{"module": "t", "value": pytest.approx(2 / 3)}, {"module": "s", "value": pytest.approx(2 / 3)}],
        modules(t="Tanh", s="Sigmoid", other="Linear")),
    **{f"{name} saturated {how}": ("saturated_activations", made, [{"severity": severity}],
        modules(t="Tanh", a="Softmax"))
       for name, how, severity, made in (
        ("an attention", "at once", "warning", lambda: sharp([0.0] * 10 + [0.9] * 10)),
        ("an attention", "over time", "note", lambda: sharp([step / 100 for step in range(100)])),
        ("a gate", "over time", "note", lambda: gate([step / 100 for step in range(100)])),
        ("a gate", "from the start", "warning", lambda: gate([0.9] * 10)),
        ("a gate", "at once", "warning", lambda: gate([0.0] * 10 + [0.9] * 10)),
        ("a gate", "within ten steps", "warning", lambda: gate([min(0.9, step / 8) for step in range(20)])),
        ("a gate", "between recorded steps", "note", lambda: gate([0.0, *[0.9] * 10], every=50)),
    )},
    "a classifier's softmax is nobody's concern": (
        "saturated_activations", lambda: run(9, ("activations", [[1.0, 0.0]] * 4, "a")), [], modules(a="Softmax"),
    ),
    # a cross-entropy divides by the sigmoid's derivative, a squared distance does not
    **{f"sure outputs, {'right' if right else 'wrong'}, of {loss.__name__}": (
        "saturated_activations", lambda loss=loss, right=right: classified(loss, right), when(bad),
            modules(s="Sigmoid"),
    ) for loss, right, bad in (
        (F.binary_cross_entropy, True, False), (F.binary_cross_entropy, False, False), (F.mse_loss, True, False),
        (F.mse_loss, False, True),
    )},
    "without gradients the network's output is left": (
        "saturated_activations",
        lambda: [one for one in classified(F.mse_loss, False) if one.kind != "layer_gradients"], [],
            modules(s="Sigmoid"),
    ),
    **{f"the statistics of a {name.lower()} of usual numbers": ("saturated_activations", lambda function=function: [
        statistics_at(step, "activations", function(noise(step, 50, 40)), "a") for step in range(9)
    ], [], modules(a=name)) for name, function in (("Tanh", torch.tanh), ("Sigmoid", torch.sigmoid))},
    "a gate that is shut on purpose": (
        "saturated_activations", lambda: [statistics_at(step, "activations", SHUT, "a") for step in range(9)], [],
        modules(a="Sigmoid"),
    ),
    "the network's output": ("saturated_activations", lambda: LAST, [], modules(a="Sigmoid")),
    "an output that is not the network's": ("saturated_activations", lambda: LAST[::2], [{}], modules(a="Sigmoid")),
    "outputs that no longer depend on the input": ("rank_collapse", collapsing, [{"module": "same", "first": 2}]),
    "layers of different scale": ("poor_initialisation", lambda: scales(1.0, 1e2, 1e5, 1e7), [
        {"module": "d", "kind": "activations"},
    ]),
    "one layer may be scaled on purpose": ("poor_initialisation", lambda: scales(1.0, 2.0, 1.5, 1e-6), []),
    "a first loss far above guessing": ("poor_initialisation", lambda: first(40.0), [{
        "kind": "network_output",
        "value": pytest.approx(float(F.cross_entropy(noise(1, 4, 10, scale=40.0), torch.arange(4))), rel=1e-6),
    }]),
    "an ordinary first loss": ("poor_initialisation", lambda: first(1.0), []),
    "labels that are no indices": ("poor_initialisation", lambda: first(40.0, torch.float32), []),
    **{f"the first loss of logits of scale {factor}, as a {reduction}": (
        "poor_initialisation", lambda factor=factor, reduction=reduction: first_loss(factor, reduction),
        when(bad, first=0, kind="network_output"),
    ) for factor, reduction, bad in ((200.0, "mean", True), (1.0, "mean", False), (1.0, "sum", False))},
    "inputs of zeros": ("input_not_normalised", lambda: run(20, ("input_data", torch.zeros(16, 6))), [
        {"first": 0, "last": 19, "evidence": "every number is zero in step 0"},
    ]),
    "a state of zeros beside an input": ("input_not_normalised", lambda: [
        at(step, "input_data", data, leaf=leaf)
        for step in range(20) for leaf, data in (("0", noise(step, 16, 6)), ("1", torch.zeros(16, 8)))
    ], []),
    **{f"inputs of scale {scale} around {offset}": ("input_not_normalised",
        lambda s=scale, o=offset: inputs(s, o), when(bad))
       for scale, offset, bad in ((1.0, 0.0, False), (30.0, 0.0, True), (0.1, 2.0, True), (0.3, 0.4, False))},
    "words are no numbers": (
        "input_not_normalised", lambda: run(4, ("input_data", torch.arange(1000).reshape(10, 100))), [],
    ),
    "a rare class that is not learned": ("class_imbalance", lambda: classes(False), [
        {"class": 2, "recall": 0.0, "value": 20.0},
    ]),
    "a rare class that is learned": ("class_imbalance", lambda: classes(True), []),
    "sequences are not judged": ("class_imbalance", lambda: classes(False, (8, 5)), []),
    "training in evaluation mode": ("evaluation_mode", lambda: passes("eval"), [{"first": 0, "module": None}]),
    "training in training mode": ("evaluation_mode", lambda: passes("default"), []),
    "a single step in eval mode is a fact": ("evaluation_mode", one_step_in_eval_mode, [{
        "first": 7, "last": 7, "steps": 1, "evidence": "step 7 was trained while the model was in eval() mode",
    }]),
    **{f"a dropout behind {before} that {'works' if works else 'passes everything'}": (
        "evaluation_mode", lambda works=works, before=before: dropout(works, before),
        when(not works, module="drop", first=0), DROPOUT,
    ) for before in ("relu", "linear") for works in (False, True)},
    **{f"a batch normalisation with statistics of {'the batch' if training else 'before'}": (
        "evaluation_mode", lambda training=training: normalised(training), when(not training, module="bn", first=0),
        modules(bn="BatchNorm1d"),
    ) for training in (False, True)},
    **{f"schedule {number}": ("learning_rate", lambda one=one: rates(100, one),
        []) for number, one in enumerate(SCHEDULES)},
    **{f"a rate that jumps {factor} times{' in a schedule' if one else ''}": (
        "learning_rate", lambda one=one, factor=factor: rates(100, one, times(factor)),
        when(factor > 20, first=60, steps=1, severity="warning"),
    ) for one in (None, decaying) for factor in (100, 10)},
    "rates of several groups that jump": ("learning_rate", lambda: rates(100, None, times(100), (0.1, 0.2, 0.3)), [
        {"groups": 3},
    ]),
    "rates that are zero from a step on": ("learning_rate", lambda: rates(100, None, stop(slice(None)), (0.1, 0.2)), [{
        "first": 60, "last": 99, "severity": "warning", "says": "0 from step 60 to 99; the highest had been 0.2",
    }]),
    "a single group may be frozen so": ("learning_rate", lambda: rates(100, None, stop(slice(1)), (0.1, 0.2)), []),
    "a schedule may end at zero": ("learning_rate", lambda: rates(66, None, stop(slice(None))), []),
    "a group with a far higher rate": ("learning_rate", lambda: rates(30, groups=(0.001, 0.03, 0.001)), [{
        "first": 0, "severity": "note",
        "says": "group 1 of the optimizer has the learning rate 0.03, 30 times that of the others",
    }]),
    "a group with a higher rate": ("learning_rate", lambda: rates(30, groups=(0.001, 0.01)), []),
    # probabilities by their sum, with the loss functions that take logits, or logarithms
    **{f"{loss.__name__} as {name or 'itself'} of outputs {number}": (
        "softmax_before_loss", lambda loss=loss, name=name, output=output: calls(loss, output, name=name),
        when(why is not None, first=0, why=why),
    ) for number, (loss, name, output, why) in enumerate((
        (F.cross_entropy, "", of_logits(lambda x: x.softmax(1)), 0),
        (F.cross_entropy, "criterion", of_logits(lambda x: x.softmax(1)), 0),
        (F.nll_loss, "NLLLoss", of_logits(lambda x: x.softmax(1)), 1),
        (F.cross_entropy, "", logits, None),
        (F.cross_entropy, "", of_logits(lambda x: x.log_softmax(1)), None),
        (F.nll_loss, "", of_logits(lambda x: x.log_softmax(1)), None),
        (F.multi_margin_loss, "", of_logits(lambda x: x.softmax(1)), None),
        (F.cross_entropy, "", of_logits(torch.sigmoid), None),
    ))},
    **{f"probabilities and probabilities as labels of {loss.__name__}": ("softmax_before_loss", lambda loss=loss: calls(
        loss, of_logits(lambda x: x.softmax(1)), of_logits(lambda x: x.softmax(1), 100)
    ), when(bad, first=0)) for loss, bad in ((F.cross_entropy, True), (F.mse_loss, False))},
    **{f"sigmoids, then less {begin}": ("softmax_before_loss", lambda begin=begin: calls(
        F.binary_cross_entropy_with_logits, sigmoids(begin), signs, "BCEWithLogitsLoss"
    ), when(begin == 0, why=2, steps=10)) for begin in (0.0, 0.9)},
    "a ReLU before a loss": ("relu_before_loss", lambda: calls(F.cross_entropy, of_logits(torch.relu)), [
        {"first": 0, "steps": 40},
    ]),
    "logits before a loss": ("relu_before_loss", lambda: calls(F.cross_entropy, logits), []),
    "a network that predicts counts": (
        "relu_before_loss", lambda: calls(F.mse_loss, of_logits(torch.relu), of_logits(torch.relu)), [],
    ),
    "a head that begins at zero": ("relu_before_loss", lambda: calls(F.cross_entropy, of_logits(torch.zeros_like)), []),
    **{f"{x} against {y}": ("loss_broadcasts", lambda x=x, y=y: broadcast(x, y),
        when(bad, value=(torch.zeros(x) - torch.zeros(y)).numel()))
       for x, y, bad in (
        ((16, 1), (16,), True), ((16,), (16, 1), True), ((8, 1, 2, 3), (8, 2, 3), True), ((16,), (16,), False),
        ((16, 1), (16, 1), False), ((1, 16), (16,), False), ((16, 3), (1,), False), ((16, 3, 1), (16, 1, 3), False),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_rule_finds(name: str) -> None:
    """Each finding, with the facts that the table says."""
    rule, messages, expected, *model = CASES[name]
    found = findings(rule, messages(), *model)
    assert len(found) == len(expected), found
    for one, facts in zip(found, expected, strict=True):
        told = {**vars(one), **one.numbers, "severity": str(one.severity)}
        for fact, value in facts.items():
            if fact == "begins":
                assert one.evidence.startswith(value)
            elif fact == "says":
                assert value in one.evidence
            else:
                assert told[fact] == value, (fact, one)


def findings(text: str, messages: Iterable[Message], model: dict[str, Any] | None = None) -> list[Finding]:
    """What a rule finds in messages that a bus delivers."""
    rule = parse(text)
    assert isinstance(rule, Rule)
    rule.know_model(model or {})
    messages = list(messages)
    found = heard(rule, messages)
    if isinstance(rule, TableRule) and not any(is_whole(rule, one) for one in messages):
        assert by_tables(text, messages, model or {}, rule.coverage) == found
    return found


def heard(rule: Rule, messages: Iterable[Message]) -> list[Finding]:
    """What a rule finds in messages that a bus delivers one by one."""
    bus, found = MessageBus(), FindingsOfRules([rule])
    bus.register(rule)
    bus.register(found)
    for message in messages:
        bus.publish(message)
    bus.finish()
    return list(found)


def is_whole(rule: TableRule, message: Message) -> bool:
    """Whether a rule takes the whole tensor of a message, which no table has."""
    whole = message.kind in rule.whole and not are_statistics(message.sampling)
    return whole and any(one.stands_for(message.kind) for one in rule.subscriptions)


def by_tables(text: str, messages: list[Message], model: dict[str, Any], coverage: Judged) -> list[Finding]:
    """What a rule finds in the same messages in tables of some steps; it judges the same."""
    rule = parse(text)
    assert isinstance(rule, TableRule)
    found = FindingsOfRules([rule])
    tables = ByTables([rule], found.receive)
    tables.know_model(model)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(analyze.rules.tables, "MESSAGES", 100)
        for begin in range(0, len(messages), 41):
            part = messages[begin : begin + 41]
            if wanted := stretch_of(part).wanted(tables.wants):
                tables.receive_many(wanted)
        tables.finish()
    assert (rule.coverage.steps, rule.coverage.streams) == (coverage.steps, coverage.streams)
    return list(found)


def stretch_of(messages: list[Message]) -> Stretch:
    """Messages as a stretch: a stack for each kind, dtype and shape."""
    sources, samplings = [], []
    stacks: dict[Any, list[tuple[int, int, Message]]] = {}
    for place, one in enumerate(messages):
        source = Source(one.key, one.tag, one.leaf, one.rank)
        if (source, one.sampling) not in zip(sources, samplings, strict=True):
            sources.append(source)
            samplings.append(one.sampling)
        number = list(zip(sources, samplings, strict=True)).index((source, one.sampling))
        like = None if one.data is None else (one.data.dtype, one.data.shape)
        stacks.setdefault((one.kind, like), []).append((place, number, one))
    found = []
    for (kind, like), of in stacks.items():
        places, numbers, made = zip(*of, strict=True)
        counters = np.array([(one.global_step, one.train_step, one.epoch, one.call) for one in made])
        heads = Heads(sources, np.array(numbers), counters, np.array(places))
        data = None if like is None else torch.stack([one.data for one in made])
        found.append(Stack(kind, heads, data, samplings))
    return Stretch(found)


# -- more than a finding ------------------------------------------------------------------------------------------


def test_a_jump_is_told_by_its_factor() -> None:
    """The value beside the usual one."""
    for schedule in (None, decaying):
        (found,) = findings("learning_rate", rates(100, schedule, times(100)))
        assert found.value == pytest.approx(100 * found.numbers["usual"], rel=0.011)


def test_a_finding_is_said_when_it_is_found_and_at_the_end() -> None:
    """And not in between, whatever follows; at the end only if more is known by then."""
    rule, once = parse("not_finite"), parse("not_finite")
    told = [one for made in run(5, ("loss", math.nan), ("network_output", math.nan)) for one in rule.compute(made)]
    assert [one.global_step for one in told] == [0]
    (last,) = rule.conclude()
    assert isinstance(rule, Rule)
    assert (rule.finding(told[0]).steps, rule.finding(last).steps) == (1, 5)
    assert len(list(once.compute(at(0, "loss", math.nan)))) == 1
    assert list(once.conclude()) == []


def test_a_condition_that_comes_and_goes_makes_few_findings() -> None:
    """One of every twelve steps for 2,400 steps is not 200 findings, and no step of them is lost."""
    found = findings("all_zeros:patience=1", run(2_400, ("activations", lambda step: [float(step % 12 > 0)] * 4, "a")))
    assert [one.first for one in found[:3]] == [0, 12, 24]
    assert len(found) < 40
    assert sum(one.steps for one in found) == 200


def test_a_rule_accounts_for_what_it_judged() -> None:
    """Steps and streams, in whatever order they come: 40 steps of one layer, 15 of another, 3 of evaluations."""
    rule = RankCollapse(tag=None)
    order = list(range(100, 140))
    random.Random(0).shuffle(order)
    streams = ((order, "a", "default"), (range(100, 115), "b", "default"), ((110, 120, 130), "a", "eval"))
    for steps, layer, tag in streams:
        for step in steps:
            list(rule.receive(at(step, "activations", noise(step, 6, 3), layer, tag=tag)))
    covered = rule.coverage.coverage({"default": np.arange(90, 200), "eval": np.array([110, 120, 130])})
    assert (covered.steps, covered.of, covered.first, covered.last, covered.streams) == (40, 110, 100, 139, 3)
    assert (covered.before, covered.after, covered.aside) == (100, 139, {"eval": 3})
    assert covered.ended["activations of b"] == 114


@pytest.mark.parametrize(("judged", "told"), [
    (range(100), ""), (range(0, 100, 10), ""), (range(40), "after step 39"), (range(40, 100), "before step 40"),
    ([*range(40), 60, 95], "between steps 60 and 95"), ([*range(30), *range(85, 100)], "between steps 29 and 85"),
    ([*range(30), 85], "between steps 29 and 85; after step 85"), ([0], "after step 0"),
])  # fmt: skip
def test_where_nothing_was_judged_is_told(judged: Iterable[int], told: str) -> None:
    """Of 100 recorded steps: holes of ten or more, and the ends."""
    rule = RankCollapse()
    for step in judged:
        list(rule.receive(at(step, "activations", noise(step, 6, 3), "a")))
    assert rule.coverage.coverage({"default": np.arange(100)}).unjudged == told


def test_a_judgement_over_many_steps_covers_them() -> None:
    """A loss that is judged at the end of the run was judged at all its steps; one that is too short, at none."""
    short, whole = parse("loss_not_falling"), parse("loss_not_falling")
    heard(short, falling(99))
    heard(whole, falling(100))
    assert short.unjudged() == "it needs a loss over 100 steps or more"
    assert whole.coverage.coverage({"default": np.arange(100)}).complete


def test_features_of_different_scale() -> None:
    """One feature that varies ten thousand times as much as another."""
    factors = torch.tensor([1.0, 1e-4, 1.0])
    (found,) = findings("input_not_normalised", run(4, ("input_data", lambda step: noise(step, 16, 3) * factors)))
    assert found.value > 1e3


@pytest.mark.parametrize("name", ["zeros", "constant", "LoRA", "no gradient"])
def test_units_that_stay_alike(name: str) -> None:
    """PyTorch's own training: what begins with equal numbers is a fault only if its units get the same gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    for parameter in list(net.parameters()) if name in ("zeros", "constant") else [net[2].weight]:
        nn.init.constant_(parameter, 0.3 if name == "constant" else 0.0)
    if name == "no gradient":
        net[2].weight.requires_grad_(False)
    optimizer, messages = torch.optim.Adam(net.parameters(), 0.01), []
    for step in range(20):
        x = noise(step, 32, 4)
        weights = {path: net[int(path)].weight for path in "02"}
        messages += [at(step, "weights", one.detach().clone(), path) for path, one in weights.items()]
        optimizer.zero_grad()
        F.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
        graded = {path: one.grad for path, one in weights.items() if one.grad is not None}
        messages += [at(step, "weight_gradients", grad.clone(), path) for path, grad in graded.items()]
        optimizer.step()
    found = findings("poor_initialisation", messages)
    stuck = [path for path in "02" if bool((net[int(path)].weight == net[int(path)].weight[0]).all())]
    assert [one.module for one in found] == (stuck if name in ("zeros", "constant") else [])
    assert all((one.first, one.last) == (0, 19) for one in found)
    without = [one for one in messages if one.kind == "weights"]
    assert [one.module for one in findings("poor_initialisation", without)] == (["0"] if name == "constant" else [])


@pytest.mark.parametrize(("name", "function", "largest"), [("Tanh", torch.tanh, 1.0), ("Sigmoid", torch.sigmoid, 0.25)])
def test_the_mean_derivative_is_that_of_the_outputs(name: str, function: Any, largest: float) -> None:
    """The finding's value, against the outputs themselves: what the mean derivative lacks to its largest value."""
    x = (40 * noise(0, 50, 40)).double().requires_grad_()
    y = function(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    messages = [statistics_at(step, "activations", y.detach(), "a") for step in range(6)]
    (found,) = findings("saturated_activations", messages, modules(a=name))
    assert found.value == pytest.approx(1 - float(slope.mean()) / largest)
    assert float((slope < largest / 5).double().mean()) >= 0.5


def of_samples(signal: float) -> tuple[list[Message], float]:
    """The gradients of a linear layer, and the noise scale that is computed from its per-sample gradients."""
    messages, noise_scales = [], []
    for step in range(60):
        a, d = torch.ones(8, 1), (signal + noise(step, 8, 1)) / 8
        each = (8 * d * a)[:, 0].double()
        if step % 10 == 0:
            noise_scales.append(float(each.var() / each.mean() ** 2))
        messages += [
            at(step, "layer_inputs", a, "fc"), at(step, "loss", 1.0), at(step, "layer_gradients", d, "fc"),
            at(step, "weight_gradients", (d.T @ a), "fc"),
        ]  # fmt: skip
    return messages, sorted(noise_scales[-5:])[2]


def test_gradients_that_are_noise() -> None:
    """By the noise scale; steps that cannot be judged are counted, with the reason."""
    messages, scale = of_samples(0.0)
    (found,) = findings("noisy_gradient:factor=0.1", messages)
    assert (str(found.severity), found.numbers["batch"]) == ("note", 8)
    assert found.value >= 0.99 * scale
    assert findings("noisy_gradient", of_samples(5.0)[0]) == []
    ranks = {"placement": {"replicas": [0, 1]}}
    for kinds, reason, change in (
        (("weight_gradients",), "do not add up", lambda one: replace(one, data=one.data / 3)),
        (("weight_gradients",), "averages over ranks", lambda one: replace(one, sampling=ranks)),
        (("layer_inputs", "layer_gradients"), "which axis", lambda one: replace(one, data=one.data[:, None])),
    ):
        rule = parse("noisy_gradient:factor=0.1")
        assert isinstance(rule, Rule)
        assert heard(rule, [change(one) if one.kind in kinds else one for one in messages]) == []
        assert rule.unjudged().startswith("at 6 steps ")
        assert reason in rule.unjudged()


# -- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_documented(name: str) -> None:
    """It says when it fires, what it needs and where its thresholds are from; of nothing it says nothing."""
    about = rulebook.describe(name)
    assert registry.find(name).name == name
    assert set(about["notes"]) == set(rulebook.HEADINGS)
    assert about["advice"]
    assert about["summary"].endswith(".")
    assert about["produces"] == [f"{name}_finding"]
    rule = parse(name)
    assert isinstance(rule, Rule)
    assert rule.unjudged().startswith("it needs ")
    assert findings(name, []) == []


def test_the_page_of_rules_is_made_of_them() -> None:
    """`make docs` was run."""
    with open("docs/rules.md", encoding="utf-8") as file:
        assert file.read() == rulebook.markdown()


@pytest.mark.parametrize(
    "text",
    [
        "not_finite:modules=1,x=2", "loss_spike:deviations=0", "loss_spike:window=3", "loss_not_falling:least=2",
        "loss_not_falling:steps=50", "vanishing_gradient:ratio=2", "exploding_gradient:growth=1",
        "dead_units:share=0", "dead_units:steps=0", "saturated_activations:attention=1", "poor_initialisation:loss=1",
        "input_not_normalised:scale=0", "class_imbalance:ratio=1", "overfitting:rise=0", "norm_drift:factor=1",
        "rank_collapse:spread=1", "update_ratio:factor=1", "update_ratio:window=3", "noisy_gradient:every=0",
        "evaluation_mode:patience=1", "unchanged:patience=0", "all_zeros:patience=0", "poor_initialisation:steps=0",
        "learning_rate:factor=1", "learning_rate:patience=0", "relu_before_loss:share=0", "loss_broadcasts:patience=0",
        "softmax_before_loss:patience=0",
    ],
)  # fmt: skip
def test_wrong_parameters(text: str) -> None:
    """Each is a sentence that says what is allowed."""
    with pytest.raises(TracerError):
        parse(text)


def test_severities() -> None:
    """They have an order, and names; of a rule, only what it said can be read."""
    assert Severity.named("error") > Severity.named("warning") > Severity.named("note")
    with pytest.raises(UnknownNameError, match="'error'"):
        Severity.named("errr")
    rule = parse("not_finite")
    assert isinstance(rule, Rule)
    with pytest.raises(MessageError, match="not_finite"):
        rule.finding(at(0, "loss", 1.0))


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64),
)
SHAPES = ((), (0,), (1,), (5,), (0, 3), (3, 0), (6, 4), (1, 1), (4, 3, 2), (2, 3, 4, 4), (2, 1, 1, 1, 2))
EXTREMES = (0.0, 1.0, -1.0, 1e30, -1e30, math.nan, math.inf, -math.inf, 1e-30)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_no_mixture_of_messages_ends_a_replay(seed: int) -> None:
    """Any dtype, any shape, numbers of any size, tags and calls in any order: a finding or nothing, never an error."""
    draw = random.Random(seed)
    kinds = [name for name, kind in KINDS.items() if not kind.event]
    named = ("Tanh", "Softmax", "BatchNorm2d", "ReLU", "Linear", "Dropout", "Sigmoid")
    told = [{"name": f"m{n}", "class": f"torch.nn.modules.x.{one}", "probability": 0.5} for n, one in enumerate(named)]
    messages = []
    for step in [step for step in range(60) for _ in range(20)]:
        kind, shape, dtype = draw.choice(kinds), draw.choice(SHAPES), draw.choice(DTYPES)
        values = [draw.choice(EXTREMES) for _ in range(math.prod(shape))]
        data = torch.tensor(values, dtype=torch.float64).reshape(shape)
        if draw.random() < 0.5 or not dtype.is_floating_point:
            data = data.nan_to_num(0, 9, 9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = data.to(dtype) if dtype.is_floating_point else data.clamp(-9, 9).to(dtype)
        module = None if KINDS[kind].network else draw.choice(["", *(one["name"] for one in told)])
        tag, call = draw.choice(["default", "default", "eval", "probe"]), draw.choice([0, 0, 1])
        messages.append(at(step, kind, data, module, tag=tag, call=call))
    for name in RULES:
        for found in findings(name, messages, {"modules": told}):
            assert found.evidence
            assert json.dumps(found.as_json(), allow_nan=False)
