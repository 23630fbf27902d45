"""Acting on answers: rules say what they would do, only an Actor does it, and a replay says what was said live."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import analyze
import tracer
from tracer import Actor, Collect, Message, MessageError, ModuleMessage, NetworkMessage
from tracer.messaging.actor import freeze, scale_learning_rate


def network() -> nn.Sequential:
    """Two layers with a nonlinearity and a normalisation between them."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def data() -> tuple[Tensor, Tensor]:
    """A batch that is always the same."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)


def train(
    path: Path, *receivers: Any, actor: dict[str, Any] | None = None, steps: int = 8
) -> tuple[nn.Module, Any, Any]:
    """A short training; the model, the Actor (or None) and the weights of the first layer after each step."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)
    loss = nn.CrossEntropyLoss()
    acting = Actor(model, optimizer, **actor) if actor is not None else None
    history = []
    listeners = [*receivers, *([acting] if acting else [])]
    with tracer.record(
        path, model, optimizer, loss=loss, receivers=listeners, strict=True, capture=tracer.Capture()
    ) as run:
        run.probe("probe", x)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            history.append(copy.deepcopy(model.state_dict()))
    return model, acting, (history, optimizer)


def said_by(rule: Any, heard: Collect) -> list[tuple[Any, ...]]:
    """What a rule said, as comparable values."""
    return [
        (one.kind, one.key, one.global_step, one.tag, float(one.data))
        for one in heard
        if one.kind in rule.produces and one.data is not None
    ]


def rules() -> list[Any]:
    """A freezing rule and a learning rate rule, with what they need."""
    freezing = analyze.Freeze(threshold=0.9, patience=2, modules=("0", "1"))
    rating = analyze.LearningRateFromRatio(window=2, target=1e-4)
    return [analyze.SVCCA(), analyze.Ratio(), freezing, rating]


def test_rules_alone_change_nothing(tmp_path: Path) -> None:
    """A live run with rules, but without an Actor, is the run that nobody watches."""
    watched, _, (history, optimizer) = train(tmp_path / "watched.zarr", *rules())
    plain, _, _ = train(tmp_path / "plain.zarr")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, watched.state_dict()[name])
    assert all(p.requires_grad for p in watched.parameters())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert len(history) == 8


def test_a_replay_says_what_would_have_been_done(tmp_path: Path) -> None:
    """Of a run without an Actor the rules say the same live and on replay: what they would have done."""
    live, heard, again = rules(), Collect(), Collect()
    train(tmp_path / "run.zarr", *live, heard)
    tracer.replay(tmp_path / "run.zarr", *rules(), again)
    for rule in live[2:]:
        assert said_by(rule, heard) == said_by(rule, again)
        assert {value for *_, value in said_by(rule, again)} != {0.0}


def test_an_actor_freezes_and_scales(tmp_path: Path) -> None:
    """With an Actor the layers stop at the probe at which the rule said so; a replay of this run says the same."""
    live, heard, again = rules(), Collect(), Collect()
    model, actor, (history, optimizer) = train(tmp_path / "run.zarr", *live, heard, actor={})
    frozen = {one.module: one.global_step for one in actor.done if isinstance(one, ModuleMessage)}
    assert set(frozen) == {"0", "1"}
    for module, step in frozen.items():
        first = next(at for _, key, at, _, value in said_by(live[2], heard) if key == module and value == 1)
        assert step == first
        for name in ("weight", "bias"):
            values = [state[f"{module}.{name}"] for state in history]
            # the probe of step s comes before its forward: from then on nothing moves, by momentum and decay neither
            assert all(torch.equal(values[step - 1], value) for value in values[step:])
            assert not torch.equal(values[step - 2], values[step - 1])
    assert not torch.equal(history[-2]["3.weight"], history[-1]["3.weight"])
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["3.weight", "3.bias"]
    factors = [value for *_, value in said_by(live[3], heard)]
    applied = [float(one.data) for one in actor.done if one.data is not None and one.key is None]
    # the last window is answered when the run has ended, and then nothing is done any more
    assert applied == [factor for factor in factors[:-1] if factor != 1]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * math.prod(applied), rel=1e-12)
    tracer.replay(tmp_path / "run.zarr", *rules(), again)
    for rule in live[2:]:
        assert said_by(rule, heard) == said_by(rule, again)


def test_the_learning_rate_brings_the_ratio_to_its_target(tmp_path: Path) -> None:
    """With plain SGD and an Actor, the mean ratio ends within a factor of 1.3 of the target; without, it is far off."""
    x, y = data()
    ends = {}
    for acts in (False, True):
        model = network()
        optimizer, loss = torch.optim.SGD(model.parameters(), lr=1e-4), nn.CrossEntropyLoss()
        heard = Collect()
        rule = analyze.LearningRateFromRatio(target=2e-3, window=2)
        receivers = [analyze.Ratio(), rule, analyze.MessageMean(), *([Actor(model, optimizer)] if acts else []), heard]
        with tracer.record(
            tmp_path / f"{acts}.zarr",
            model,
            optimizer,
            loss=loss,
            receivers=receivers,
            strict=True,
            capture=tracer.Capture(),
        ):
            for _ in range(24):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
        means = [float(one.data) for one in heard if one.kind.endswith("message_mean") and one.data is not None]
        ends[acts] = means[-1]
    assert ends[False] < 1e-3
    assert 2e-3 / 1.3 < ends[True] < 2e-3 * 1.3


def test_actions_on_training_passes_wait_for_the_end_of_the_step() -> None:
    """In the middle of a step nothing is changed; what probes ask for is done at once."""
    model = network()
    actor = Actor(model)
    where: dict[str, Any] = {"global_step": 3, "train_step": 3, "epoch": 0}
    wish = ModuleMessage(kind="activations_svcca_freeze", module="0", data=torch.tensor(1.0), **where)
    assert not list(actor.receive(wish))
    assert model[0].weight.requires_grad
    assert not list(actor.receive(NetworkMessage(kind="batch_finished", **where)))
    assert not model[0].weight.requires_grad
    assert [one.key for one in actor.done] == ["0"]
    at_once = ModuleMessage(kind="activations_svcca_freeze", module="3", data=torch.tensor(1.0), tag="probe", **where)
    assert not list(actor.receive(at_once))
    assert not model[3].weight.requires_grad
    model = network()
    both = Actor(model)
    for answer in (wish, at_once):  # the probe's answer takes no answer of the training along
        assert not list(both.receive(answer))
    assert (model[0].weight.requires_grad, model[3].weight.requires_grad) == (True, False)
    other = Actor(network())
    assert not list(other.receive(wish))
    assert not list(other.finish())
    assert not list(other.receive(NetworkMessage(kind="batch_finished", **where)))
    assert not other.done


def test_an_actor_wants_what_it_can_do() -> None:
    """Kinds by glob, modules by glob, and the ends of steps."""
    actor = Actor(network(), modules="fc*")
    assert actor.wants("activations_svcca_freeze", "fc1", "probe", 3)
    assert not actor.wants("activations_svcca_freeze", "conv1", "probe", 3)
    assert actor.wants("x_learning_rate_factor", None, "default", 3)
    assert actor.wants("batch_finished", None, "default", 3)
    assert not actor.wants("weights", "fc1", "default", 3)


def test_own_actions(tmp_path: Path) -> None:
    """A user's own rule and function: here the loss stops the momentum when it falls below a bound."""

    class Settled(tracer.Subscriber):
        def __init__(self) -> None:
            super().__init__(tracer.Subscription("loss"), produces="loss_settled")

        def compute(self, message: Message) -> Any:
            assert message.data is not None
            yield tracer.derived(message, "loss_settled", float(message.data < 1.05))

    def stop_momentum(model: nn.Module, optimizer: Any, message: Message) -> bool:
        assert message.data is not None
        if float(message.data) > 0 and optimizer.param_groups[0]["momentum"]:
            optimizer.param_groups[0]["momentum"] = 0.0
            return True
        return False

    _, actor, (_, optimizer) = train(
        tmp_path / "run.zarr", Settled(), actor={"actions": {"*_settled": stop_momentum}}, steps=60
    )
    assert len(actor.done) == 1
    assert optimizer.param_groups[0]["momentum"] == 0


def test_a_failing_action_is_taken_off_with_a_warning(tmp_path: Path) -> None:
    """The training goes on without it; the sentence names the module that is not there."""
    model, (x, y) = network(), data()
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    receivers = [analyze.SVCCA(), analyze.Freeze(threshold=0.1), Actor(nn.Linear(2, 2))]
    with pytest.warns(RuntimeWarning, match=r"actor failed .*names the module '0', which the model does not have"):
        with tracer.record(
            tmp_path / "run.zarr", model, optimizer, loss=loss, receivers=receivers, capture=tracer.Capture()
        ) as run:
            run.probe("probe", x)
            for _ in range(3):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()


def test_wrong_wishes_are_errors() -> None:
    """Each action says what it was asked and what it needs."""
    model, where = network(), {"global_step": 0, "train_step": 0, "epoch": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    rate = NetworkMessage(kind="learning_rate_factor", data=torch.tensor(0.5), **where)
    with pytest.raises(MessageError, match="no optimizer"):
        scale_learning_rate(model, None, rate)
    assert scale_learning_rate(model, optimizer, rate)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    for factor in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(MessageError, match="positive number"):
            scale_learning_rate(model, optimizer, NetworkMessage(kind="f", data=torch.tensor(factor), **where))
    with pytest.raises(MessageError, match="message of a module"):
        freeze(model, None, rate)
    for actions in ({}, {"*_freeze": "freeze"}):
        with pytest.raises(MessageError, match="needs a function"):
            Actor(model, None, actions)  # type: ignore[arg-type]


# -- the rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("patience", "seed"), [(1, 0), (2, 1), (3, 2)])
def test_freezing_is_as_its_function_says(patience: int, seed: int) -> None:
    """The subscriber freezes each layer at the probe that the function gives, and a frozen layer stays so."""
    similarities = np.random.default_rng(seed).uniform(0.8, 1.0, (12, 4))
    similarities[3, 1] = math.nan
    expected = analyze.freeze(similarities.tolist(), threshold=0.9, patience=patience)
    rule = analyze.Freeze(threshold=0.9, patience=patience)
    when: dict[str, int] = {}
    for step, values in enumerate(similarities):
        for layer, value in enumerate(values):
            where: dict[str, Any] = {"global_step": step, "train_step": step, "epoch": 0, "tag": "probe"}
            (said,) = rule.receive(
                ModuleMessage(kind="activations_svcca", module=str(layer), data=torch.tensor(value), **where)
            )
            assert said.data is not None
            if float(said.data):
                when.setdefault(str(layer), step)
            assert float(said.data) == (str(layer) in when)
    assert [when.get(str(layer)) for layer in range(4)] == expected
    frozen = [step for step in expected if step is not None]
    assert frozen == sorted(frozen)
    assert None not in expected[: len(frozen)]


def test_without_order_a_layer_does_not_wait() -> None:
    """With bottom_up=False an upper layer is frozen although the one below is not."""
    for bottom_up, expected in ((True, 0.0), (False, 1.0)):
        rule = analyze.Freeze(bottom_up=bottom_up)
        said = []
        for module, value in (("low", 0.2), ("high", 1.0)):
            where: dict[str, Any] = {"global_step": 0, "train_step": 0, "epoch": 0, "tag": "probe", "module": module}
            said += rule.receive(ModuleMessage(kind="activations_svcca", data=torch.tensor(value), **where))
        assert [float(one.data) for one in said if one.data is not None] == [0.0, expected]


def test_wrong_parameters_of_rules_are_errors() -> None:
    """Each is refused."""
    for wrong in ({"threshold": 0.0}, {"patience": 0}, {"threshold": math.nan}):
        with pytest.raises(MessageError):
            analyze.Freeze(**wrong)
    for wrong in ({"target": 0.0}, {"max_factor": 1.0}, {"window": 0}, {"target": math.inf}):
        with pytest.raises(MessageError):
            analyze.LearningRateFromRatio(**wrong)


def test_factors_are_bounded() -> None:
    """By max_factor and its inverse; ratios that are not finite do not count, and without any the factor is 1."""
    rule = analyze.learning_rate_from_ratio
    assert rule([1e-3, 1e-3]) == 1
    assert rule([1e-3, math.nan, math.inf]) == 1
    assert rule([1.0]) == 0.5
    assert rule([0.0, 0.0], max_factor=3) == 3
    assert rule([4e-3], max_factor=10) == 0.25
    assert rule([math.nan]) == 1
