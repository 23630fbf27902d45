"""Each rule on messages made by hand: what fires, what does not, what is said."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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
from tracer.numbers.statistics import are_statistics


def at(step: int, kind: str, data: Any, module: str | None = None, **more: Any) -> Message:
    """A message of a step."""
    tensor = data if isinstance(data, Tensor) else torch.tensor(data)
    return message_of(module, kind=kind, data=tensor, global_step=step, train_step=step, epoch=0, **more)


def findings(text: str, messages: Iterable[Message], model: dict[str, Any] | None = None) -> list[Finding]:
    """What a rule finds in messages that a bus delivers."""
    rule = parse(text)
    assert isinstance(rule, Rule)
    rule.know_model(model or {})
    bus, found = MessageBus(), FindingsOfRules([rule])
    bus.register(rule)
    bus.register(found)
    messages = list(messages)
    for message in messages:
        bus.publish(message)
    bus.finish()
    if isinstance(rule, TableRule) and not any(is_whole(rule, one) for one in messages):
        assert by_tables(text, messages, model or {}, rule.coverage) == list(found)
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
        counters = np.array([(one.global_step, one.train_step, one.epoch, one.call) for _, _, one in of])
        heads = Heads(
            sources, np.array([number for _, number, _ in of]), counters, np.array([place for place, _, _ in of])
        )
        data = None if like is None else torch.stack([one.data for _, _, one in of if one.data is not None])
        found.append(Stack(kind, heads, data, samplings))
    return Stretch(found)


def noise(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def modules(**classes: str) -> dict[str, Any]:
    """A header's model with these classes of ``torch.nn``."""
    return {"modules": [{"name": name, "class": f"torch.nn.modules.x.{one}"} for name, one in classes.items()]}


# -- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_documented(name: str) -> None:
    """It says when it fires, what it needs and where its thresholds are from, and its name is that of the table."""
    about = rulebook.describe(name)
    assert registry.find(name).name == name
    assert set(about["notes"]) == set(rulebook.HEADINGS)
    assert about["advice"]
    assert about["summary"].endswith(".")
    assert about["produces"] == [f"{name}_finding"]
    rule = parse(name)
    assert isinstance(rule, Rule)
    assert rule.unjudged().startswith("it needs ")


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_nothing_of_nothing(name: str) -> None:
    """A run without messages has no findings."""
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


def test_a_message_of_another_kind_is_no_finding() -> None:
    """Of a rule, only what it said can be read."""
    rule = parse("not_finite")
    assert isinstance(rule, Rule)
    with pytest.raises(MessageError, match="not_finite"):
        rule.finding(at(0, "loss", 1.0))


def test_severities() -> None:
    """They have an order, and names."""
    assert Severity.named("error") > Severity.named("warning") > Severity.named("note")
    with pytest.raises(UnknownNameError, match="'error'"):
        Severity.named("errr")


# -- not finite ---------------------------------------------------------------------------------------------------


def test_the_first_that_is_not_finite_is_named() -> None:
    """What follows it is counted with it; the counts are those of the first."""
    bad = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    messages = [at(3, "activations", [1.0], "a"), at(3, "activations", bad, "b"), at(3, "loss", math.nan)]
    messages += [at(4, "activations", [math.nan] * 3, "a"), at(5, "activations", [math.nan] * 3, "b")]
    (found,) = findings("not_finite", messages)
    assert (found.first, found.module, found.kind, found.severity) == (3, "b", "activations", Severity.ERROR)
    assert found.evidence == "1 NaN and 2 infinite; from there on in 2 more streams"
    assert (found.last, found.steps) == (5, 3)


def test_a_finding_is_said_when_it_is_found_and_at_the_end() -> None:
    """And not in between, whatever follows; at the end only if more is known by then."""
    rule = parse("not_finite")
    heard = [
        one
        for step in range(5)
        for kind in ("loss", "network_output")
        for one in rule.compute(at(step, kind, math.nan))
    ]
    assert [one.global_step for one in heard] == [0]
    (last,) = rule.conclude()
    assert isinstance(rule, Rule)
    assert (rule.finding(heard[0]).steps, rule.finding(last).steps) == (1, 5)
    once = parse("not_finite")
    assert len(list(once.compute(at(0, "loss", math.nan)))) == 1
    assert list(once.conclude()) == []


def test_two_bursts_are_two_findings() -> None:
    """A step with finite numbers only ends the first."""
    messages = [
        at(step, "loss" if step < 5 else "network_output", math.nan if step in (2, 9) else 1.0) for step in range(12)
    ]
    assert [(one.first, one.kind) for one in findings("not_finite", messages)] == [(2, "loss"), (9, "network_output")]


@pytest.mark.parametrize(("value", "kind", "bad"), [
    (-math.inf, "activations", False), (-math.inf, "loss", True), (math.inf, "activations", True),
    (math.nan, "layer_inputs", True), (-math.inf, "network_output", False), (-math.inf, "weight_gradients", True),
])  # fmt: skip
def test_masks_are_no_fault(value: float, kind: str, bad: bool) -> None:
    """Minus infinity in a forward is what masks are made of."""
    module = None if kind in ("loss", "network_output") else "m"
    assert bool(findings("not_finite", [at(0, kind, [1.0, value], module)])) is bad


# -- what was judged, and what is one finding -----------------------------------------------------------------------


def test_separate_episodes_are_separate_findings() -> None:
    """Each has its own step, worst step and evidence."""
    found = findings("loss_spike", falling(300, {18: 9.0, 20: 12.0, 275: 49.39}))
    assert [(one.first, one.worst, one.last, one.steps) for one in found] == [(18, 20, 20, 2), (275, 275, 275, 1)]
    assert found[1].evidence.startswith("the loss was 49.39 in step 275")


def test_a_condition_that_comes_and_goes_makes_few_findings() -> None:
    """One of every twelve steps for 60,000 steps is not 5,000 findings, and no step of them is lost."""
    messages = [at(step, "activations", [0.0 if step % 12 == 0 else 1.0] * 4, "a") for step in range(60_000)]
    found = findings("all_zeros:patience=1", messages)
    assert [one.first for one in found[:3]] == [0, 12, 24]
    assert len(found) < 40
    assert sum(one.steps for one in found) == 5_000


def test_a_rule_accounts_for_what_it_judged() -> None:
    """Steps and streams, in whatever order they come: 40 steps of one layer, 15 of another, 3 of evaluations."""
    rule = RankCollapse(tag=None)
    order = list(range(100, 140))
    random.Random(0).shuffle(order)
    for step in order:
        list(rule.receive(at(step, "activations", noise(step, 6, 3), "a")))
    for step in range(100, 115):
        list(rule.receive(at(step, "activations", noise(step, 6, 3), "b")))
    for step in (110, 120, 130):
        list(rule.receive(at(step, "activations", noise(step, 6, 3), "a", tag="eval")))
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
    rules = {}
    for steps in (99, 100):
        rules[steps] = parse("loss_not_falling")
        for message in falling(steps):
            list(rules[steps].receive(message))
        list(rules[steps].finish())
    assert rules[99].unjudged() == "it needs a loss over 100 steps or more"
    assert rules[100].coverage.coverage({"default": np.arange(100)}).complete


# -- losses -------------------------------------------------------------------------------------------------------


def falling(steps: int, jumps: dict[int, float] | None = None) -> list[Message]:
    """A loss that falls from 2 to 0.2 with noise."""
    curve = 0.2 + 1.8 * torch.exp(-torch.arange(steps) / 30) + noise(1, steps, scale=0.03)
    return [at(step, "loss", (jumps or {}).get(step, float(curve[step]))) for step in range(steps)]


def test_a_spike_of_the_loss() -> None:
    """The step is the exact one, and a loss that just falls has none."""
    (found,) = findings("loss_spike", falling(200, {150: 3.0}))
    assert (found.first, found.steps, found.value) == (150, 1, 3.0)
    assert abs(found.numbers["usual"] - 0.22) < 0.03
    assert findings("loss_spike", falling(200)) == []


def test_a_loss_that_does_not_fall() -> None:
    """It stands at the beginning; one that fell and came back is none."""
    flat = [at(step, "loss", 1.0 + float(value)) for step, value in enumerate(noise(2, 150, scale=0.02))]
    (found,) = findings("loss_not_falling", flat)
    assert (found.first, found.numbers["last"]) == (0, 149)
    assert findings("loss_not_falling", falling(150)) == []
    back = falling(150) + [at(step, "loss", 2.0) for step in range(150, 400)]
    assert findings("loss_not_falling", back) == []
    assert findings("loss_not_falling", flat[:99]) == []


def test_guessing_is_no_learning() -> None:
    """A loss that falls from a bad start to that of guessing has learned nothing."""
    messages = []
    for step, value in enumerate(noise(3, 200, scale=0.01)):
        loss = math.log(8) + float(value) + (1.0 if step < 12 else 0.0)
        labels = torch.arange(4)
        messages += [
            at(step, "network_output", noise(step, 4, 8)),
            at(step, "input_labels", labels),
            at(step, "loss", loss),
        ]
    (found,) = findings("loss_not_falling", messages)
    assert found.numbers["chance"] == pytest.approx(math.log(8))
    assert "guessing has 2.079" in found.evidence


def test_overfitting() -> None:
    """From the third evaluation in a row on that is worse than the best, while the training goes on falling."""
    messages = []
    for epoch, loss in enumerate([1.0, 0.8, 0.7, 0.8, 0.9, 1.0, 1.1]):
        messages += [at(10 * epoch + one, "loss", 1.0 / (1 + epoch)) for one in range(10)]
        messages += [at(10 * epoch + 9, "loss", loss, tag="eval", call=call) for call in range(2)]
    (found,) = findings("overfitting", messages)
    assert (found.first, found.tag, found.numbers["best_step"]) == (39, "eval", 29)
    assert found.numbers["best"] == pytest.approx(0.7)
    constant = [one for one in messages if one.tag == "eval" or one.global_step < 10]
    assert findings("overfitting", constant) == []


# -- gradients and updates ----------------------------------------------------------------------------------------


def test_gradients_that_vanish_and_explode() -> None:
    """By the norms of the layers' gradients, which the rule names."""
    layers = [f"l{number}" for number in range(6)]
    for name, growth, module in (("vanishing_gradient", 0.05, "l0"), ("exploding_gradient", 10.0, "l0")):
        messages = [
            at(step, "layer_gradients", torch.full((4,), growth**depth), layer)
            for step in range(8)
            for depth, layer in enumerate(reversed(layers))
        ]
        (found,) = findings(name, messages)
        assert (found.module, found.first) == (module, 0)
        assert findings(name, [one for one in messages if one.key in ("l5", "l4", "l3", "l2")]) == []


def test_a_gradient_that_leaves_its_past() -> None:
    """By a factor of its median, which the evidence says."""
    norms = [1.0] * 60
    norms[50] = 400.0
    messages = [at(step, "weight_gradients", [norm, 0.0], "fc") for step, norm in enumerate(norms)]
    (found,) = findings("exploding_gradient", messages)
    assert (found.first, found.value, found.numbers["usual"]) == (50, 400.0, pytest.approx(1.0))


def updates(ratios: Iterable[dict[str, float]]) -> Iterable[Message]:
    """Weights of norm 2 and updates with these ratios to them, step by step."""
    for step, of_step in enumerate(ratios):
        for module, ratio in of_step.items():
            yield at(step, "weights", torch.full((2, 2), 1.0), module)
            yield at(step, "weight_updates", torch.full((2, 2), ratio), module)


def test_a_layer_whose_updates_leave_its_past() -> None:
    """One layer's jump is found at its step; one of all layers together, as of a learning rate, is none."""
    usual = [
        {name: 1e-3 * (1 + 0.1 * ((step * 7 + number) % 5)) for number, name in enumerate("abcd")} for step in range(80)
    ]
    assert findings("update_ratio", updates(usual)) == []
    restart = [
        {name: value * (30 if step >= 60 else 1) for name, value in one.items()} for step, one in enumerate(usual)
    ]
    assert findings("update_ratio", updates(restart)) == []
    jump = [{**one, "c": one["c"] * (30 if 60 <= step < 63 else 1)} for step, one in enumerate(usual)]
    (found,) = findings("update_ratio", updates(jump))
    assert (found.module, found.first, found.steps, found.numbers["alone"]) == ("c", 60, 3, 1.0)


def test_updates_as_large_as_the_weights() -> None:
    """Of one layer alone there is nothing to compare with but the bound."""
    (found,) = findings("update_ratio", updates([{"a": 0.7}] * 40))
    assert (found.module, found.first, found.threshold) == ("a", 24, 0.5)


def test_weights_that_nothing_changes() -> None:
    """A warning where gradients arrive; one note each for those that are frozen, apart, or were changed before."""
    frozen = {"parameters": [{"name": f"b{one}.weight", "requires_grad": False} for one in (1, 2)]}
    trained = [f"t{one}" for one in range(9)]
    messages = []
    for step in range(20):
        for name in ("a", "b1", "b2", "c", "d", "e", *trained):
            zero = name not in ("c", *trained) or (name == "c" and step > 5)
            if name not in ("b1", "b2", "d", "e"):
                messages.append(at(step, "weight_gradients", [1.0, 1.0], name))
            messages.append(at(step, "weights", [1.0, 1.0 + (name == "e") * step], name))
            messages.append(at(step, "weight_updates", [0.0, 0.0 if zero else 1.0], name))
    found = findings("unchanged", messages, frozen)
    told = {one.module: (one.first, str(one.severity), one.numbers["others"]) for one in found}
    assert told == {"a": (0, "warning", 0), "b1": (0, "note", 1), "c": (6, "note", 0), "d": (0, "note", 1)}
    (copies,) = (one for one in found if one.module == "d")
    assert "the program writes to it between the steps" in copies.evidence
    without = [one for one in messages if one.kind != "weight_gradients"]
    assert {str(one.severity) for one in findings("unchanged", without, frozen)} == {"note"}


def test_weights_that_something_else_changes() -> None:
    """The step before which it happened; a habit is a note."""

    def run(steps: int, nudged: set[int], share: int = 3) -> list[Message]:
        weight, messages = noise(0, 3, 4).double(), []
        for step in range(steps):
            if step in nudged:
                weight = weight.clone()
                weight[1, 2] += 1e-3
            update = noise(step, 3, 4, scale=1e-3).double()
            messages += [at(step, "weights", weight.float(), "w"), at(step, "weight_updates", update.float(), "w")]
            weight = weight.float().double() + update.float().double()
        return messages

    assert findings("changed_between_steps", run(40, set())) == []
    (found,) = findings("changed_between_steps", run(40, {30}))
    assert (found.first, found.numbers["elements"], str(found.severity)) == (30, 1.0, "warning")
    (habit,) = findings("changed_between_steps", run(40, set(range(40))))
    assert (habit.steps, str(habit.severity)) == (39, "note")
    (at_times,) = findings("changed_between_steps", run(200, set(range(10, 200, 15))))
    assert (at_times.first, at_times.steps, str(at_times.severity)) == (10, 13, "note")
    copied = [one for one in run(40, set(range(40))) if one.kind == "weights"]
    still = [at(one.global_step, "weight_updates", torch.zeros(3, 4), "w") for one in copied]
    both = [one for pair in zip(copied, still, strict=True) for one in pair]
    assert findings("changed_between_steps", both) == []


def test_weights_that_grow() -> None:
    """By the factor of their first norm."""
    messages = [at(step, "weights", torch.full((2, 2), 1.2**step), "w") for step in range(30)]
    (found,) = findings("norm_drift", messages)
    assert (found.first, found.value) == (13, pytest.approx(1.2**29))


# -- activations --------------------------------------------------------------------------------------------------


def test_dead_units() -> None:
    """From the step on at which half of them gave nothing any more."""

    def outputs(step: int) -> Tensor:
        x = noise(step, 32, 10).abs()
        x[:, : (6 if step >= 30 else 2)] = 0
        x[0, 9] = 0
        return x

    (found,) = findings("dead_units", [at(step, "activations", outputs(step), "relu") for step in range(60)])
    assert (found.first, found.numbers["dead"], found.numbers["units"]) == (30, 6, 10)
    assert findings("dead_units", [at(step, "activations", outputs(step), "relu") for step in range(35)]) == []
    linear = modules(relu="Linear")
    zeros = [at(step, "activations", torch.zeros(32, 10), "relu") for step in range(60)]
    assert findings("dead_units", zeros, linear) == []
    assert [one.first for one in findings("all_zeros", zeros, linear)] == [0]


@pytest.mark.parametrize(
    ("shape", "silent", "units"), [((8, 6, 4, 4), (slice(None), slice(0, 3)), 6), ((8, 5, 6), (..., slice(0, 3)), 6)]
)
def test_units_of_images_and_sequences(shape: tuple[int, ...], silent: Any, units: int) -> None:
    """Channels of images, features of sequences."""

    def outputs(step: int) -> Tensor:
        x = noise(step, *shape).relu()
        x[silent] = 0
        return x

    (found,) = findings("dead_units", [at(step, "activations", outputs(step), "relu") for step in range(12)])
    assert (found.numbers["units"], found.numbers["dead"]) == (units, 3)


def test_saturation() -> None:
    """Of tanh and sigmoid at the ends of their range; other modules may have such numbers."""
    model = modules(t="Tanh", s="Sigmoid", other="Linear")
    ends = {"t": torch.tensor([[-1.0, 0.999, 0.1]]), "s": torch.tensor([[0.0, 0.9999, 0.5]]), "other": torch.ones(1, 3)}
    messages = [at(step, "activations", data, name) for step in range(6) for name, data in ends.items()]
    found = findings("saturated_activations", messages, model)
    assert {one.module for one in found} == {"t", "s"}
    assert all(one.value == pytest.approx(2 / 3) for one in found)


def test_attention_that_becomes_sharp_over_time_is_a_note() -> None:
    """And a warning if it does so at once; a classifier's softmax is nobody's concern."""
    model = modules(a="Softmax")

    def sharp(share: float) -> Tensor:
        x = torch.full((2, 50, 4), 0.25)
        x[:, : round(50 * share)] = torch.tensor([1.0, 0, 0, 0])
        return x

    def found(shares: list[float]) -> list[str]:
        messages = [at(step, "activations", sharp(share), "a") for step, share in enumerate(shares)]
        return [str(one.severity) for one in findings("saturated_activations", messages, model)]

    assert found([0.0] * 10 + [0.9] * 10) == ["warning"]
    assert found([step / 100 for step in range(100)]) == ["note"]
    sure = [at(step, "activations", torch.tensor([[1.0, 0.0]] * 4), "a") for step in range(9)]
    assert findings("saturated_activations", sure, model) == []


def test_outputs_that_do_not_depend_on_the_input() -> None:
    """But for those that never did, as embeddings of places."""
    constant = noise(0, 1, 16).expand(8, 16)
    messages = [
        at(step, "activations", data, name)
        for step in range(10)
        for name, data in {
            "varies": noise(step, 8, 16),
            "collapses": noise(0, 8, 16) if step < 2 else constant + 1e-5 * noise(step, 8, 16),
            "places": constant.contiguous(),
        }.items()
    ]
    (found,) = findings("rank_collapse", messages)
    assert (found.module, found.first) == ("collapses", 2)


def test_a_start_that_is_bad() -> None:
    """Equal weights, layers of very different scale, and a loss that is far above guessing."""

    def scales(*several: float) -> list[Message]:
        named = zip("abcde", several, strict=False)
        return [at(0, "activations", noise(1, 8, 4, scale=scale), name) for name, scale in named]

    def first(scale: float, dtype: torch.dtype = torch.int64) -> list[Message]:
        labels = torch.arange(4).to(dtype)
        return [at(0, "network_output", noise(1, 4, 10, scale=scale)), at(0, "input_labels", labels)]

    (found,) = findings("poor_initialisation", scales(1.0, 1e2, 1e5, 1e7))
    assert (found.module, found.kind) == ("d", "activations")
    assert findings("poor_initialisation", scales(1.0, 2.0, 1.5, 1e-6)) == [], "one layer may be scaled on purpose"
    (found,) = findings("poor_initialisation", first(40.0))
    of_torch = torch.nn.functional.cross_entropy(noise(1, 4, 10, scale=40.0), torch.arange(4))
    assert (found.kind, found.value) == ("network_output", pytest.approx(float(of_torch), rel=1e-6))
    assert (
        findings("poor_initialisation", first(1.0)) == findings("poor_initialisation", first(40.0, torch.float32)) == []
    )


@pytest.mark.parametrize("name", ["zeros", "constant", "LoRA", "no gradient"])
def test_units_that_stay_alike(name: str) -> None:
    """PyTorch's own training: what begins with equal numbers is a fault only if its units get the same gradients."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    equal = list(net.parameters()) if name in ("zeros", "constant") else [net[2].weight]
    for parameter in equal:
        torch.nn.init.constant_(parameter, 0.3 if name == "constant" else 0.0)
    if name == "no gradient":
        net[2].weight.requires_grad_(False)
    optimizer, messages = torch.optim.Adam(net.parameters(), 0.01), []
    for step in range(20):
        x = noise(step, 32, 4)
        weights = {path: net[int(path)].weight for path in "02"}
        messages += [at(step, "weights", one.detach().clone(), path) for path, one in weights.items()]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), x[:, :3].argmax(1)).backward()
        for path, one in weights.items():
            if one.grad is not None:
                messages.append(at(step, "weight_gradients", one.grad.clone(), path))
        optimizer.step()
    found = findings("poor_initialisation", messages)
    stuck = [path for path in "02" if bool((net[int(path)].weight == net[int(path)].weight[0]).all())]
    assert [one.module for one in found] == (stuck if name in ("zeros", "constant") else [])
    assert all((one.first, one.last) == (0, 19) for one in found)
    without = [one for one in messages if one.kind == "weights"]
    assert [one.module for one in findings("poor_initialisation", without)] == (["0"] if name == "constant" else [])


@pytest.mark.parametrize(
    ("scale", "offset", "bad"), [(1.0, 0.0, False), (30.0, 0.0, True), (0.1, 2.0, True), (0.3, 0.4, False)]
)
def test_inputs(scale: float, offset: float, bad: bool) -> None:
    """Mean and scale; images between 0 and 1 are fine, and words are no numbers."""
    messages = [at(step, "input_data", noise(step, 16, 5) * scale + offset) for step in range(4)]
    assert bool(findings("input_not_normalised", messages)) is bad
    words = [at(step, "input_data", torch.arange(1000).reshape(10, 100)) for step in range(4)]
    assert findings("input_not_normalised", words) == []


def test_features_of_different_scale() -> None:
    """One feature that varies ten thousand times as much as another."""
    factors = torch.tensor([1.0, 1e-4, 1.0])
    (found,) = findings(
        "input_not_normalised", [at(step, "input_data", noise(step, 16, 3) * factors) for step in range(4)]
    )
    assert found.value > 1e3


def test_a_rare_class_that_is_not_learned() -> None:
    """Both are needed: it is rare, and predicted wrong; sequences are not judged."""

    def run(right: bool, sequence: bool = False) -> list[Message]:
        messages = []
        for step in range(30):
            labels = torch.tensor([0] * 20 + [1] * 19 + [2])
            output = torch.nn.functional.one_hot(labels, 3).float()
            if not right:
                output[-1] = torch.tensor([1.0, 0.0, 0.0])
            if sequence:
                output, labels = output.reshape(8, 3, 5), labels.reshape(8, 5)
            messages += [at(step, "network_output", output), at(step, "input_labels", labels)]
        return messages

    (found,) = findings("class_imbalance", run(right=False))
    assert (found.numbers["class"], found.numbers["recall"], found.value) == (2, 0.0, 20.0)
    assert findings("class_imbalance", run(right=True)) == []
    assert findings("class_imbalance", run(right=False, sequence=True)) == []


def test_training_in_evaluation_mode() -> None:
    """Steps with updates and passes of evaluation only."""

    def run(tag: str) -> list[Message]:
        return [
            one
            for step in range(12)
            for one in (
                at(step, "network_output", noise(step, 4, 2), tag=tag),
                at(step, "weight_updates", noise(step, 2, 2), "w"),
            )
        ]

    (found,) = findings("evaluation_mode", run("eval"))
    assert (found.first, found.module) == (0, None)
    assert findings("evaluation_mode", run("default")) == []


def test_a_step_that_was_trained_in_eval_mode() -> None:
    """The recorded mode is a fact: a single step is told, with its number."""
    event = message_of(None, kind="eval_mode", global_step=7, train_step=7, epoch=0, data=None)
    passes = [at(step, "network_output", noise(step, 4, 2)) for step in range(12)]
    messages = [*passes[:7], event, *passes[7:]]
    (found,) = findings("evaluation_mode", messages)
    assert (found.first, found.last, found.steps) == (7, 7, 1)
    assert found.evidence == "step 7 was trained while the model was in eval() mode"


@pytest.mark.parametrize("before", ["relu", "linear"])
def test_a_dropout_that_passes_everything(before: str) -> None:
    """Whether or not what it gets has zeros."""
    model = {"modules": [{"name": "drop", "class": "torch.nn.modules.dropout.Dropout", "probability": 0.2}]}

    def run(works: bool) -> list[Message]:
        messages = []
        for step in range(12):
            x = noise(step, 32, 64)
            x = x.relu() if before == "relu" else x
            kept = (noise(step + 100, 32, 64) > -0.8).float() if works else torch.ones(32, 64)
            messages += [at(step, "activations", x, "before"), at(step, "activations", x * kept, "drop")]
        return messages

    (found,) = findings("evaluation_mode", run(works=False), model)
    assert (found.module, found.first) == ("drop", 0)
    assert findings("evaluation_mode", run(works=True), model) == []


@pytest.mark.parametrize("training", [False, True])
def test_a_batch_normalisation_with_running_statistics(training: bool) -> None:
    """PyTorch's own, on inputs whose mean is not what it remembers."""
    norm, messages = torch.nn.BatchNorm1d(6), []
    norm.train(training)
    with torch.no_grad():
        norm.bias += torch.arange(6)
        for step in range(25):
            messages += [
                at(step, "activations", norm(noise(step, 64, 6) + 1.5), "bn"),
                at(step, "biases", norm.bias.clone(), "bn"),
            ]
    found = findings("evaluation_mode", messages, modules(bn="BatchNorm1d"))
    assert [(one.module, one.first) for one in found] == ([] if training else [("bn", 0)])


def test_gradients_that_are_noise() -> None:
    """By the noise scale of a linear layer, which is computed here from its per-sample gradients."""

    def run(signal: float) -> tuple[list[Message], float]:
        messages, scales = [], []
        for step in range(60):
            a, d = torch.ones(8, 1), (signal + noise(step, 8, 1)) / 8
            each = (8 * d * a)[:, 0].double()
            if step % 10 == 0:
                scales.append(float(each.var() / each.mean() ** 2))
            messages += [
                at(step, "layer_inputs", a, "fc"), at(step, "loss", 1.0), at(step, "layer_gradients", d, "fc"),
                at(step, "weight_gradients", (d.T @ a), "fc"),
            ]  # fmt: skip
        return messages, sorted(scales[-5:])[2]

    messages, scale = run(0.0)
    (found,) = findings("noisy_gradient:factor=0.1", messages)
    assert (str(found.severity), found.numbers["batch"]) == ("note", 8)
    assert found.value >= 0.99 * scale
    assert findings("noisy_gradient", run(5.0)[0]) == []
    clipped = [replace(one, data=one.data / 3) if one.kind == "weight_gradients" else one for one in messages]
    assert findings("noisy_gradient:factor=0.1", clipped) == [], "what does not add up is not judged"
    ranks = {"placement": {"replicas": [0, 1]}}
    averaged = [replace(one, sampling=ranks) if one.kind == "weight_gradients" else one for one in messages]
    assert findings("noisy_gradient:factor=0.1", averaged) == [], "a rank does not see all datapoints"
    of_what = [
        replace(one, data=one.data[:, None]) if one.kind in ("layer_inputs", "layer_gradients") else one
        for one in messages
    ]
    assert findings("noisy_gradient:factor=0.1", of_what) == [], "the rows may be time steps"
    for some, reason in ((clipped, "do not add up"), (averaged, "averages over ranks"), (of_what, "which axis")):
        rule = parse("noisy_gradient:factor=0.1")
        assert isinstance(rule, Rule)
        bus = MessageBus()
        bus.register(rule)
        for message in some:
            bus.publish(message)
        bus.finish()
        assert rule.unjudged().startswith("at 6 steps ")
        assert reason in rule.unjudged()


# -- anything -----------------------------------------------------------------------------------------------------

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = ((), (0,), (1,), (5,), (0, 3), (3, 0), (6, 4), (1, 1), (4, 3, 2), (2, 3, 4, 4), (2, 1, 1, 1, 2))
EXTREMES = (0.0, 1.0, -1.0, 1e30, -1e30, math.nan, math.inf, -math.inf, 1e-30)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(6))
def test_no_mixture_of_messages_ends_a_replay(seed: int) -> None:
    """Any dtype, any shape, numbers of any size, tags and calls in any order: a finding or nothing, never an error."""
    draw = random.Random(seed)
    kinds = [name for name, kind in KINDS.items() if not kind.event]
    classes = ("Tanh", "Softmax", "BatchNorm2d", "ReLU", "Linear", "Dropout", "Sigmoid")
    told = [
        {"name": f"m{n}", "class": f"torch.nn.modules.x.{one}", "probability": 0.5} for n, one in enumerate(classes)
    ]
    messages = []
    for step in range(60):
        for _ in range(20):
            kind, shape = draw.choice(kinds), draw.choice(SHAPES)
            values = [draw.choice(EXTREMES) for _ in range(math.prod(shape))]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                data = torch.tensor(values, dtype=torch.float64).reshape(shape).nan_to_num(0, 9, 9).to(torch.float64)
                if draw.random() < 0.5:
                    data = torch.tensor(values, dtype=torch.float64).reshape(shape)
                dtype = draw.choice(DTYPES)
                data = data.to(dtype) if dtype.is_floating_point else data.nan_to_num(0, 9, 9).clamp(-9, 9).to(dtype)
            module = None if KINDS[kind].network else draw.choice(["", *(one["name"] for one in told)])
            tag, call = draw.choice(["default", "default", "eval", "probe"]), draw.choice([0, 0, 1])
            messages.append(at(step, kind, data, module, tag=tag, call=call))
    for name in RULES:
        for found in findings(name, messages, {"modules": told}):
            assert found.evidence
            assert json.dumps(found.as_json(), allow_nan=False)
