"""What ``loss`` is in each way to train: the numbers of the run itself, beside those that are recorded."""

from __future__ import annotations

import contextlib
import pkgutil
import textwrap
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracer
from tests.observing.oracles import Nobody
from tests.observing.recorded import attached
from tracer import Capture, Collect
from tracer.observing.guesses.losses import differentiated_name
from tracer.observing.pytorch.patches import BACKWARD

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


class Training:
    """A small model, and an optimizer that steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, *losses: Tensor) -> None:
        """Differentiate these one after the other, and step."""
        self.optimizer.zero_grad()
        for one in losses:
            one.backward(retain_graph=True)
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        """Copies of the parameters."""
        return [one.detach().clone() for one in self.model.parameters()]


@contextlib.contextmanager
def recorded(
    path: Path, train: Callable[[Training, Any, list[Any]], None], **options: Any
) -> Iterator[tuple[tracer.TraceReader, list[Any]]]:
    """The trace of a training, which ends with the bits that it ends with when nobody records it; and what it kept."""
    plain, watched, kept = Training(), Training(), list[Any]()
    train(plain, Nobody(), [])
    options = {"loss": F.cross_entropy, "capture": tracer.Capture(), **options}
    with tracer.record(path, watched.model, watched.optimizer, strict=True, **options) as run:
        train(watched, run, kept)
    assert all(map(torch.equal, plain.weights(), watched.weights()))
    with tracer.open(path) as trace:
        yield trace, kept


def values(trace: tracer.TraceReader, kind: str = "loss", tag: str = "default") -> list[float]:
    """The numbers of a kind."""
    return [float(one.data) for one in trace.messages(kind) if one.tag == tag and one.data is not None]


def told(trace: tracer.TraceReader) -> str:
    """What the trace says of what was not observed."""
    return str([note for note in trace.notes if "problem" in note])


# -- trainings ------------------------------------------------------------------------------------------------


def penalty(training: Training) -> Tensor:
    """A term that no loss function gives."""
    return sum((one.square().sum() for one in training.model.parameters()), torch.zeros(()))


WAYS: dict[str, Callable[[Training, Callable[[Tensor], Tensor]], None]] = {}


def way(name: str) -> Callable[[Any], Any]:
    """A way to train for one step, which keeps each scalar that it differentiates."""

    def named(train: Any) -> Any:
        WAYS[name] = train
        return train

    return named


@way("one loss")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    self.step(keep(F.cross_entropy(self.model(X), Y)))


@way("a loss and a penalty")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    self.step(keep(F.cross_entropy(self.model(X), Y) + 10 * penalty(self)))


@way("actor and critic")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    out = self.model(X)
    terms = [F.smooth_l1_loss(one[0], one[1].detach()) - one[2] for one in out]
    self.step(keep(torch.stack(terms).sum()))


@way("by hand")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    self.step(keep((self.model(X) - 1).abs().mean()))


@way("micro-batches that are divided")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    self.step(*(keep(F.cross_entropy(self.model(x), y) / 2) for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)))


@way("a function, not a method")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    self.optimizer.zero_grad()
    torch.autograd.backward(keep(F.cross_entropy(self.model(X), Y) * 3))
    self.optimizer.step()


@way("several at once")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    out = self.model(X)
    one, other = F.cross_entropy(out, Y), F.mse_loss(out, torch.zeros(8, 3))
    keep(one + other)
    self.optimizer.zero_grad()
    torch.autograd.backward([one, other])
    self.optimizer.step()


@way("a closure")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    optimizer = self.optimizer

    def closure() -> float:
        optimizer.zero_grad()
        loss = keep(F.cross_entropy(self.model(X), Y) + penalty(self))
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


@way("autograd.grad")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    parameters = list(self.model.parameters())
    loss = keep(F.cross_entropy(self.model(X), Y) + penalty(self))
    for one, gradient in zip(parameters, torch.autograd.grad(loss, self.model.parameters()), strict=True):
        one.grad = gradient
    self.optimizer.step()


@way("a gradient penalty")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    x = X.clone().requires_grad_()
    out = self.model(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    (again,) = torch.autograd.grad(out.mean(), x, create_graph=True)
    self.step(keep(out.mean() + (slope.norm(dim=1) - 1).square().mean() + again.square().sum()))


@way("an inner step, and one through it")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    parameters = dict(self.model.named_parameters())
    inner = F.cross_entropy(self.model(X[:4]), Y[:4])
    gradients = torch.autograd.grad(inner, tuple(parameters.values()), create_graph=True)
    fast = {name: one - 0.1 * g for (name, one), g in zip(parameters.items(), gradients, strict=True)}
    self.step(keep(F.cross_entropy(torch.func.functional_call(self.model, fast, (X[4:],)), Y[4:])))


@way("a checkpoint")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    x = X.clone().requires_grad_()
    self.step(keep(checkpoint(lambda x: F.cross_entropy(self.model(x), Y), x, use_reentrant=True) * 2))


@way("a loss that is only looked at")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    out = self.model(X)
    F.mse_loss(out, torch.zeros(8, 3))
    loss = keep(F.cross_entropy(out, Y))
    F.l1_loss(out, torch.zeros(8, 3))
    self.step(loss)


@way("a loss of another network")
def _(self: Training, keep: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(2)
    critic = nn.Linear(3, 1)
    out = self.model(X)
    F.mse_loss(critic(out.detach()), torch.ones(8, 1)).backward()
    self.step(keep(critic(out).mean()))


@pytest.mark.parametrize(
    ("way", "named"),
    [
        pytest.param(way, named, marks=[] if named == number % 2 else [pytest.mark.slow])
        for number, way in enumerate(WAYS)
        for named in (True, False)
    ],
)
def test_the_loss_is_what_backward_was_called_on(way: str, named: bool, tmp_path: Path) -> None:
    """Whatever it is made of, and whether or not a loss function was named: the number that the run differentiates."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        def keep(loss: Tensor) -> Tensor:
            kept.append(float(loss.detach()))
            return loss

        for _ in range(3):
            WAYS[way](training, keep)

    with recorded(tmp_path / "run.zarr", train, **({} if named else {"loss": None})) as (trace, kept):
        assert values(trace) == pytest.approx(kept, rel=1e-6)
        assert [one.global_step for one in trace.messages("loss")] == [
            step for step in range(3) for _ in range(len(kept) // 3)
        ]
        assert {one.leaf for one in trace.messages("loss")} == {""}


def test_what_loss_functions_gave_are_the_terms(tmp_path: Path) -> None:
    """Each function's or module's own value, with its name as leaf, and several of one name by call."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(2):
            out = training.model(X)
            first, second = F.cross_entropy(out, Y), F.cross_entropy(out, Y.flip(0))
            kept.extend(("cross_entropy", call, float(one.detach())) for call, one in enumerate((first, second)))
            training.step(first + 0.5 * second)

    with recorded(tmp_path / "run.zarr", train) as (trace, kept):
        terms = [(one.leaf, one.call, float(one.data)) for one in trace.messages("loss_terms") if one.data is not None]
        assert terms == kept
        assert len(values(trace)) == 2
        assert len(list(trace.messages("input_labels"))) == 4


def test_a_module_is_called_by_its_class_or_its_path(tmp_path: Path) -> None:
    """A loss module beside the model has the name of its class, one in it that of its place."""
    for name, inside in (("NLLLoss", False), ("criterion", True)):
        model, loss = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), nn.NLLLoss()
        if inside:
            model.add_module("criterion", loss)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / f"{name}.zarr"
        with tracer.record(path, model, optimizer, loss=loss, capture=Capture(kinds=["loss", "loss_terms"])):
            value = loss(model[1](model[0](X)), Y)
            value.backward()
            optimizer.step()
        with tracer.open(path) as trace:
            assert [one.leaf for one in trace.messages("loss_terms")] == [name]
            assert values(trace, "loss_terms") == values(trace) == [float(value.detach())]


@pytest.mark.parametrize("factor", [1.0, 512.0])
def test_a_scaler_is_divided_out(factor: float, tmp_path: Path) -> None:
    """Also where the loss is more than what a function gave; a scaler that is not enabled changes nothing."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=factor, enabled=factor != 1)
        for _ in range(3):
            training.optimizer.zero_grad()
            loss = F.cross_entropy(training.model(X), Y) + penalty(training)
            kept.append(float(loss.detach()))
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()

    with recorded(tmp_path / "run.zarr", train) as (trace, kept):
        assert values(trace) == kept


def test_a_vector_is_no_loss(tmp_path: Path) -> None:
    """``backward(gradient=…)`` on several elements has no value of its own: none is recorded, which is told once."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(2):
            training.optimizer.zero_grad()
            out = training.model(X)
            out.backward(torch.ones_like(out))
            training.optimizer.step()

    with recorded(tmp_path / "run.zarr", train) as (trace, _):
        assert values(trace) == []
        assert "backward was called on a tensor of several elements" in told(trace)


@pytest.mark.parametrize("when", ["before backward", "after backward", "after the step"])
def test_a_logged_loss_is_the_loss(when: str, tmp_path: Path) -> None:
    """It is there once in each step, also in the first, where nobody could know that it would be logged."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(3):
            loss = F.cross_entropy(training.model(X), Y)
            kept.append(float(loss.detach()))
            training.optimizer.zero_grad()
            for now in ("before backward", "after backward", "after the step"):
                if now == "after backward":
                    loss.backward()
                if now == "after the step":
                    training.optimizer.step()
                if now == when:
                    run.log("loss", loss.item())

    with recorded(tmp_path / "run.zarr", train) as (trace, kept):
        assert values(trace) == kept
        assert [(one.global_step, one.call) for one in trace.messages("loss")] == [(0, 0), (1, 0), (2, 0)]


def test_a_logged_loss_that_is_announced_is_the_only_one(tmp_path: Path) -> None:
    """Whatever is differentiated; without the announcement the first step has both, which is told."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for step in range(2):
            training.step(F.cross_entropy(training.model(X), Y))
            run.log("loss", 7.0 + step)

    with recorded(tmp_path / "announced.zarr", train, logs=["loss"]) as (trace, _):
        assert values(trace) == [7.0, 8.0]
        assert "problem" not in told(trace)
    with recorded(tmp_path / "not.zarr", train) as (trace, _):
        assert values(trace)[1:] == [7.0, 8.0]
        assert "the loss of step 0" in told(trace)


# -- evaluations ----------------------------------------------------------------------------------------------


def evaluate(training: Training, *terms: Callable[[Tensor], Tensor]) -> Iterator[list[float]]:
    """Evaluate two batches; what each term is of each."""
    training.model.eval()
    with torch.no_grad():
        for x in X.chunk(2):
            out = training.model(x)
            yield [float(term(out)) for term in terms]
    training.model.train()


def test_an_evaluation_with_the_training_s_own_term_has_a_loss(tmp_path: Path) -> None:
    """What one loss function gives is the loss of an evaluation, before and after the training, divided or not."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(2):
            kept.extend(one for (one,) in evaluate(training, lambda out: F.cross_entropy(out, Y[:4])))
            training.step(F.cross_entropy(training.model(X), Y) / 2)
            training.step(F.cross_entropy(training.model(X), Y, reduction="sum") / 8)
        kept.extend(one for (one,) in evaluate(training, lambda out: F.cross_entropy(out, Y[:4])))

    with recorded(tmp_path / "run.zarr", train) as (trace, kept):
        assert values(trace, tag="eval") == values(trace, "loss_terms", "eval") == kept
        assert [(one.global_step, one.call) for one in trace.messages("loss") if one.tag == "eval"] == [
            (step, call) for step in (0, 2, 4) for call in range(2)
        ]
        assert "problem" not in told(trace)


def test_losses_of_evaluations_are_counted_in_their_step(tmp_path: Path) -> None:
    """Also of one that is known for the loss only when the next step has begun, or ended, and nobody records that."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(4):
            training.step(F.cross_entropy(training.model(X), Y))
            list(evaluate(training, lambda out: F.cross_entropy(out, Y[:4])))
        training.model.requires_grad_(False)  # nothing is learned: losses as of an evaluation
        for _ in range(3):
            F.cross_entropy(training.model(X), Y)
            training.optimizer.step()

    with recorded(tmp_path / "run.zarr", train, capture=Capture(kinds=["loss", "loss_terms"], every=2)) as (trace, _):
        counted = [
            [(one.global_step, one.call, float(one.data)) for one in trace.messages(kind) if one.tag == "eval"]
            for kind in ("loss", "loss_terms")
        ]
        assert counted[0] == counted[1]
        assert [(step, call) for step, call, _ in counted[0]] == [
            (1, 0), (2, 0), (3, 0), (4, 0),  # of two passes each, every second one
            (4, 2), (5, 0), (6, 0),
        ]  # fmt: skip


def test_a_loss_under_a_tag_is_counted_with_those_of_evaluations_under_it(tmp_path: Path) -> None:
    """What ``backward`` is called on there is the loss of the pass, and its term is not another."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(2):
            training.step(F.cross_entropy(training.model(X), Y))
            with run.tag("attack") or contextlib.nullcontext():
                kept.extend(one for (one,) in evaluate(training, lambda out: F.cross_entropy(out, Y[:4])))
                inputs = X.clone().requires_grad_()
                loss = F.cross_entropy(training.model(inputs), Y) * 3
                loss.backward(inputs=[inputs])
                kept.append(loss.item())

    with recorded(tmp_path / "run.zarr", train) as (trace, kept):
        assert values(trace, tag="attack") == kept
        numbers = [(one.global_step, one.call) for one in trace.messages("loss") if one.tag == "attack"]
        assert numbers == [(step, call) for step in (1, 2) for call in range(3)]


def test_a_term_of_an_evaluation_is_no_loss(tmp_path: Path) -> None:
    """Where the training's loss is more, as a VAE's, an evaluation has its term; what came too early is told."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(2):
            kept.extend(one for (one,) in evaluate(training, lambda out: F.cross_entropy(out, Y[:4])))
            training.step(F.cross_entropy(training.model(X), Y) + penalty(training))
        kept.extend(one for (one,) in evaluate(training, lambda out: F.cross_entropy(out, Y[:4])))

    with recorded(tmp_path / "run.zarr", train) as (trace, kept):
        assert values(trace, "loss_terms", "eval") == kept
        assert [one.global_step for one in trace.messages("loss") if one.tag == "eval"] == [0, 0]
        assert "the loss of evaluations since step 0" in told(trace)
        assert told(trace).count("the loss of passes tagged 'eval'") == 1


def test_several_terms_of_an_evaluation_are_no_losses(tmp_path: Path) -> None:
    """Nobody knows what is made of them."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(2):
            training.step(F.cross_entropy(training.model(X), Y))
            list(evaluate(training, lambda out: F.cross_entropy(out, Y[:4]), lambda out: F.cross_entropy(-out, Y[:4])))

    with recorded(tmp_path / "run.zarr", train) as (trace, _):
        assert values(trace, tag="eval") == []
        assert len(values(trace, "loss_terms", "eval")) == 8
        assert "several loss functions were called in a pass" in told(trace)


def test_the_last_evaluation_is_there_although_nothing_follows(tmp_path: Path) -> None:
    """Nothing tells that its pass is over but the end of the recording, also where an exception is that."""
    for number, error in enumerate((None, ValueError)):
        training, path = Training(), tmp_path / f"{number}.zarr"
        try:
            with tracer.record(
                path, training.model, training.optimizer, loss=F.cross_entropy, capture=tracer.Capture()
            ):
                training.step(F.cross_entropy(training.model(X), Y))
                (kept, *_) = evaluate(training, lambda out: F.cross_entropy(out, Y[:4]))
                if error is not None:
                    raise error
        except ValueError:
            pass
        with tracer.open(path) as trace:
            assert values(trace, tag="eval")[:1] == kept
            assert len(values(trace, tag="eval")) == 2


# -- several losses -------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 4), nn.Linear(4, 1)


@pytest.mark.parametrize("order", ["critic first", "all backwards first"])
def test_losses_of_two_optimizers_have_their_names(order: str, tmp_path: Path) -> None:
    """As a GAN has them: what each network's optimizer stepped for, and else the variables that the losses were in."""
    model, kept = Pair(), {}
    critic, generator = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model.critic, model.generator))
    path = tmp_path / "run.zarr"
    with tracer.record(
        path, model, [critic, generator], loss="binary_cross_entropy_with_logits", strict=True, capture=tracer.Capture()
    ):
        for step in range(3):
            fake = model.generator(X[:, :2])
            real_loss = F.binary_cross_entropy_with_logits(model.critic(X), torch.ones(8, 1))
            fake_loss = F.binary_cross_entropy_with_logits(model.critic(fake.detach()), torch.zeros(8, 1))
            critic.zero_grad()
            real_loss.backward()
            fake_loss.backward()
            if order == "critic first":
                critic.step()
            generator.zero_grad()
            cheat_loss = F.binary_cross_entropy_with_logits(model.critic(fake), torch.ones(8, 1))
            cheat_loss.backward()
            if order != "critic first":
                critic.step()
            generator.step()
            kept[step] = [float(one.detach()) for one in (real_loss, fake_loss, cheat_loss)]
    with tracer.open(path) as trace:
        found = [(one.leaf, one.call, float(one.data)) for one in trace.messages("loss") if one.data is not None]
    names = (
        [("critic", 0), ("critic", 1), ("generator", 0)]
        if order == "critic first"
        else [("real_loss", 0), ("fake_loss", 0), ("cheat_loss", 0)]
    )
    assert found == [(*name, value) for step in range(3) for name, value in zip(names, kept[step], strict=True)]


def test_one_loss_of_two_optimizers_has_no_name(tmp_path: Path) -> None:
    """As Muon beside AdamW train one model for one loss."""
    training = Training()
    optimizers = [torch.optim.SGD(training.model[place].parameters(), lr=0.1) for place in (0, 2)]
    path, kept = tmp_path / "run.zarr", []
    with tracer.record(path, training.model, optimizers, loss=F.cross_entropy, capture=tracer.Capture()):
        for _ in range(3):
            loss = F.cross_entropy(training.model(X), Y)
            kept.append(float(loss.detach()))
            loss.backward()
            for one in optimizers:
                one.step()
    with tracer.open(path) as trace:
        assert [(one.leaf, one.call) for one in trace.messages("loss")] == [("", 0)] * 3
        assert values(trace) == kept


def test_losses_of_one_optimizer_have_the_names_of_their_variables(tmp_path: Path) -> None:
    """From the second step on, when it is known that there are several; micro-batches of one variable have none."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(3):
            training.optimizer.zero_grad()
            image = F.cross_entropy(training.model(X), Y)
            image.backward()
            text = F.cross_entropy(training.model(-X), Y)
            text.backward()
            training.optimizer.step()

    with recorded(tmp_path / "two.zarr", train) as (trace, _):
        names = [(one.global_step, one.leaf, one.call) for one in trace.messages("loss")]
    assert names == [(0, "", 0), (0, "", 1), (1, "image", 0), (1, "text", 0), (2, "image", 0), (2, "text", 0)]

    def accumulate(training: Training, run: Any, kept: list[Any]) -> None:
        for _ in range(12):
            training.optimizer.zero_grad()
            for x in (X, -X):
                loss = F.cross_entropy(training.model(x), Y) / 2
                loss.backward()
            training.optimizer.step()

    with recorded(tmp_path / "one.zarr", accumulate) as (trace, _):
        assert [(one.leaf, one.call) for one in trace.messages("loss")] == [("", 0), ("", 1)] * 12


def named(losses: Sequence[Tensor], differentiate: Callable[..., None]) -> list[str]:
    """The names of what a function differentiates, as they are at each call of ``backward``."""
    found: list[str] = []

    # a function of the project's own, as the exporter's is: frames of the project are passed over
    told: dict[str, Any] = {"__name__": "tracer.told", "found": found, "name": differentiated_name}
    exec("def backward(self, *tensors): found.append(name())", told)
    gate = tracer.Exporter(strict=True).parts.gate
    watcher = type("Told", (), {"gate": gate, "is_quiet": False, "waits": False, "backward": told["backward"]})()
    BACKWARD.watch(watcher)
    try:
        differentiate(*losses)
    finally:
        BACKWARD.unwatch(watcher)
    return found


def test_what_a_program_calls_its_losses() -> None:
    """Variables, attributes, entries; through functions of the program's, and through those that scale."""
    scaler = torch.amp.GradScaler("cpu")

    class Holder:
        pass

    def backward_of(loss: Tensor, retain: bool = False) -> None:
        loss.backward(retain_graph=retain)

    def given(image: Tensor, text: Tensor, other: Tensor, last: Tensor) -> None:
        holder, losses = Holder(), {"critic": text}
        holder.of_images = image  # type: ignore[attr-defined]
        image.backward(retain_graph=True)
        torch.autograd.backward(text, retain_graph=True)
        holder.of_images.backward(  # type: ignore[attr-defined]
            retain_graph=True
        )
        losses["critic"].backward(retain_graph=True)
        backward_of(other, True)
        backward_of(retain=True, loss=image)
        scaler.scale(last).backward(retain_graph=True)
        (image + text).backward(retain_graph=True)
        for hidden in (text,):
            hidden.backward()

    weight = torch.ones(2, requires_grad=True)
    losses = [(weight * number).sum() for number in range(1, 5)]
    expected = ["image", "text", "of_images", "critic", "other", "image", "last", "", "hidden"]
    assert named(losses, given) == expected


def test_a_name_is_found_without_a_look_at_variables() -> None:
    """What a function's ``locals()`` gave stays as it was, and its variables go when they are deleted."""

    def given(loss: Tensor) -> None:
        before = locals()
        later = torch.ones(1000)
        there = weakref.ref(later)
        loss.backward()
        assert set(before) == {"loss"}
        del later
        assert there() is None

    weight = torch.ones(2, requires_grad=True)
    assert named([weight.sum()], given) == ["loss"]


# -- torch's own functions ------------------------------------------------------------------------------------


def test_torch_has_its_functions_back() -> None:
    """After the recording, and for whoever took one of them while it lasted."""
    names = ("torch.autograd:backward", "torch.autograd:grad")
    before = [pkgutil.resolve_name(name) for name in names]
    training = Training()
    exporter, heard = attached(tracer.Exporter(strict=True), Collect("loss"), training.model)
    exporter.watch_backward()
    during = [pkgutil.resolve_name(name) for name in names]
    assert not any(now is one for now, one in zip(during, before, strict=True))
    assert [one.__wrapped__ for one in during] == before
    exporter.detach()
    assert [pkgutil.resolve_name(name) for name in names] == before
    loss = F.cross_entropy(training.model(X), Y)
    (gradient,) = during[1](loss, training.model[0].weight, retain_graph=True)
    during[0](loss)
    assert torch.equal(gradient, training.model[0].weight.grad)
    assert not list(heard)


def test_a_compiled_derivative_is_left_alone(tmp_path: Path) -> None:
    """`torch.compile` sees torch's own ``autograd.grad``: as many graphs and breaks as without a recording."""
    code = textwrap.dedent("""
    def slope(x):
        return torch.autograd.grad((x * x).sum(), x)[0]
    """)
    counted = []
    for watched in (False, True):
        torch._dynamo.reset()
        space: dict[str, Any] = {"torch": torch}
        exec(code, space)
        exporter = tracer.Exporter(strict=True)
        exporter.message_bus.register(Collect("loss"))
        if watched:
            exporter.watch_backward()
        x = torch.ones(3, requires_grad=True)
        told = torch._dynamo.explain(space["slope"])(x)
        counted.append((told.graph_count, told.graph_break_count))
        exporter.detach()
    assert counted[0] == counted[1]


def test_a_loss_inside_a_compiled_region_is_there(tmp_path: Path) -> None:
    """Its function is not seen, but `backward` is called outside of the region."""

    def train(training: Training, run: Any, kept: list[Any]) -> None:
        torch._dynamo.reset()
        compute = torch.compile(lambda x, y: F.cross_entropy(training.model(x), y) * 2, backend="aot_eager")
        for _ in range(3):
            loss = compute(X, Y)
            kept.append(float(loss.detach()))
            training.step(loss)

    with recorded(tmp_path / "run.zarr", train, capture=Capture(kinds=["loss", "loss_terms"])) as (trace, kept):
        assert values(trace) == kept
        assert values(trace, "loss_terms") == []
